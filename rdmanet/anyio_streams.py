"""The public name of ``rdmanet.streams.byte_stream``. Importing it imports AnyIO."""

from rdmanet.streams.byte_stream import RdmaAttribute as RdmaAttribute
from rdmanet.streams.byte_stream import RdmaByteStream as RdmaByteStream
from rdmanet.streams.byte_stream import RdmaListener as RdmaListener
from rdmanet.streams.byte_stream import __all__ as __all__
from rdmanet.streams.byte_stream import connect_rdma as connect_rdma
from rdmanet.streams.byte_stream import create_rdma_listener as create_rdma_listener
