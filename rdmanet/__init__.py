"""asyncio over RDMA.

General layout
--------------
The layers, from the top; a module imports only what stands below it:

    cli/          the command line: ``rdmanet``
    testing       a pytest plugin: RDMA programs where things go wrong
    streams       StreamReader and StreamWriter
    anyio_streams the same for AnyIO: connect_rdma, create_rdma_listener
    files         sendfile
    blocking      streams for programs without a loop: open_rdma_stream, listen_rdma_stream
    pull          from a transport's callbacks to calls
    transport     create_rdma_connection, start_rdma_server, the transport
    server        the server
    driver, addresses   one a (loop, library): the loop's reader;  from a host's name to addresses and libraries
    memory        the peer's memory that a connection was offered
    verbs_async   the verbs for programs that await, on any event loop (async_queues, async_cm)
    notifier      what that asks of an event loop
    finding       which device, and what the libraries can do
    verbs, cm     the names of the verbs, for those who want the hardware
    protocol, offers    the life of a connection and of its memory regions: tables, no I/O
    _core         compiled: devices, memory, queues, connection manager, the data engine
    credit, errors, remote, qpinfo     flow control and frames, exceptions, what peers tell each other: pure
    environment   which variables there are
    abi/, soft/   the verbs' C ABI and its loader; the embedded device

Import names from here. ``rdmanet.verbs``, ``rdmanet.cm`` and ``rdmanet.verbs_async`` have the verbs,
``rdmanet.anyio_streams`` what is for AnyIO. What needs asyncio is imported when it is first asked for: programs that
want the verbs only do without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rdmanet._core import AccessFlags as AccessFlags
from rdmanet._core import devices as devices
from rdmanet.errors import CompletionError as CompletionError
from rdmanet.errors import CompletionResetError as CompletionResetError
from rdmanet.errors import DeviceLostError as DeviceLostError
from rdmanet.errors import DeviceNotFoundError as DeviceNotFoundError
from rdmanet.errors import ModifyQPError as ModifyQPError
from rdmanet.errors import ProtocolError as ProtocolError
from rdmanet.errors import RdmaError as RdmaError
from rdmanet.errors import RegionRevokedError as RegionRevokedError
from rdmanet.errors import RemoteAccessError as RemoteAccessError
from rdmanet.remote import RemoteMemory as RemoteMemory

if TYPE_CHECKING:
    from rdmanet.blocking import RdmaStream as RdmaStream
    from rdmanet.blocking import RdmaStreamListener as RdmaStreamListener
    from rdmanet.blocking import listen_rdma_stream as listen_rdma_stream
    from rdmanet.blocking import open_rdma_stream as open_rdma_stream
    from rdmanet.files import sendfile as sendfile
    from rdmanet.memory import OfferedMemory as OfferedMemory
    from rdmanet.streams import RdmaStreamWriter as RdmaStreamWriter
    from rdmanet.streams import open_rdma_connection as open_rdma_connection
    from rdmanet.streams import start_rdma_stream_server as start_rdma_stream_server
    from rdmanet.transport import RdmaServer as RdmaServer
    from rdmanet.transport import RdmaTransport as RdmaTransport
    from rdmanet.transport import create_rdma_connection as create_rdma_connection
    from rdmanet.transport import start_rdma_server as start_rdma_server

__version__ = "0.1.0"

_LAZY = {
    "RdmaStream": "blocking",
    "RdmaStreamListener": "blocking",
    "listen_rdma_stream": "blocking",
    "open_rdma_stream": "blocking",
    "sendfile": "files",
    "OfferedMemory": "memory",
    "RdmaStreamWriter": "streams",
    "open_rdma_connection": "streams",
    "start_rdma_stream_server": "streams",
    "RdmaServer": "transport",
    "RdmaTransport": "transport",
    "create_rdma_connection": "transport",
    "start_rdma_server": "transport",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = globals()[name] = getattr(importlib.import_module(f"rdmanet.{_LAZY[name]}"), name)
        return found
    if name in ("driver", *_LAZY.values()):
        return importlib.import_module(f"rdmanet.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
