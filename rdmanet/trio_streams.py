"""The public name of ``rdmanet.streams.trio_stream``. Importing it imports Trio."""

from rdmanet.streams.trio_stream import RdmaListener as RdmaListener
from rdmanet.streams.trio_stream import RdmaStream as RdmaStream
from rdmanet.streams.trio_stream import __all__ as __all__
from rdmanet.streams.trio_stream import open_rdma_listeners as open_rdma_listeners
from rdmanet.streams.trio_stream import open_rdma_stream as open_rdma_stream
from rdmanet.streams.trio_stream import serve_rdma as serve_rdma
