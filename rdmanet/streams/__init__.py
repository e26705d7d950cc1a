"""A connection's bytes, in the form that each kind of program expects.

Every module here builds on a transport, and none decides anything about a connection:

* ``reader_writer``: asyncio's StreamReader and StreamWriter. Its public names are also names of this package.
* ``byte_stream``: AnyIO's ByteStream and Listener, under the public name ``rdmanet.anyio_streams``.
* ``trio_stream``: Trio's streams and listeners, under the public name ``rdmanet.trio_streams``; ``trio_loop`` does what
  transports need of asyncio's loop.
* ``blocking``: raw files for programs without an event loop.
* ``files``: sendfile.
* ``buffering``: the protocol under ``byte_stream`` and ``trio_stream``, which keeps received bytes for them;
  ``accept_queue`` has connections that wait for ``accept()``.
"""

from rdmanet.streams.reader_writer import (
    RdmaStreamReader,
    RdmaStreamWriter,
    open_rdma_connection,
    start_rdma_stream_server,
)

__all__ = ["RdmaStreamReader", "RdmaStreamWriter", "open_rdma_connection", "start_rdma_stream_server"]
