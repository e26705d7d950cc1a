"""asyncio over RDMA.

General layout
--------------
The layers, from the top; a module imports only what stands below it:

    cli/          the command line: ``python -m rdmanet demo`` and ``devices``
    testing       a pytest plugin: RDMA programs where things go wrong
    streams       StreamReader and StreamWriter
    transport     create_rdma_connection, start_rdma_server, the transport and the server
    driver        one a (loop, library): the loop's reader, the connection manager's events
    memory        the peer's memory as an object
    verbs, cm     the names of the verbs, for those who want the hardware
    protocol, offers    the life of a connection and of its memory regions: tables, no I/O
    _core         compiled: devices, memory, queues, connection manager, the data engine
    credit, errors      flow control and frames, exceptions: pure
    abi/, soft/   the verbs' C ABI and its loader; the embedded device

Import names from here. ``rdmanet.verbs`` and ``rdmanet.cm`` have the verbs.
"""

from rdmanet._core import AccessFlags as AccessFlags
from rdmanet._core import devices as devices
from rdmanet.errors import CompletionError as CompletionError
from rdmanet.errors import DeviceNotFoundError as DeviceNotFoundError
from rdmanet.errors import ProtocolError as ProtocolError
from rdmanet.errors import RdmaError as RdmaError
from rdmanet.errors import RegionRevokedError as RegionRevokedError
from rdmanet.memory import RemoteMemory as RemoteMemory
from rdmanet.streams import RdmaStreamWriter as RdmaStreamWriter
from rdmanet.streams import open_rdma_connection as open_rdma_connection
from rdmanet.streams import start_rdma_stream_server as start_rdma_stream_server
from rdmanet.transport import RdmaServer as RdmaServer
from rdmanet.transport import RdmaTransport as RdmaTransport
from rdmanet.transport import create_rdma_connection as create_rdma_connection
from rdmanet.transport import start_rdma_server as start_rdma_server

__version__ = "0.1.0"
