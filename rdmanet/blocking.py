"""Another name of ``rdmanet.streams.blocking``."""

from rdmanet.streams.blocking import RdmaStream as RdmaStream
from rdmanet.streams.blocking import RdmaStreamListener as RdmaStreamListener
from rdmanet.streams.blocking import listen_rdma_stream as listen_rdma_stream
from rdmanet.streams.blocking import open_rdma_stream as open_rdma_stream
