"""Another name of ``rdmanet.streams.blocking`` and ``rdmanet.streams.blocking_listener``."""

from rdmanet.streams.blocking import RdmaStream as RdmaStream
from rdmanet.streams.blocking import open_rdma_stream as open_rdma_stream
from rdmanet.streams.blocking_listener import RdmaStreamListener as RdmaStreamListener
from rdmanet.streams.blocking_listener import listen_rdma_stream as listen_rdma_stream
