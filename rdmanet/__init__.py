"""asyncio over RDMA.

General layout
--------------
The layers, from the top; a module imports only what stands below it:

    cli/          the command line: ``rdmanet``
    testing       a pytest plugin: fault injection for RDMA programs
    frameworks/   other frameworks over RDMA: Dask
    loop/         any asyncio program over RDMA: an event loop that chooses between RDMA and TCP
    rpc/          calls of typed functions in other processes
    tensors/      memory of other processes, which one reads and writes one-sidedly
    streams/      the byte streams of asyncio, of AnyIO, and of programs without a loop; sendfile
    transport     create_rdma_connection, start_rdma_server
    stream/       the parts of a connection, its states, its server and its loop: lifecycle connects them
    verbs_async/  awaitable verbs, on any event loop (queues, cm, connect)
    verbs, cm     the verbs, for programs that want the hardware
    _core         compiled: devices, memory, queues, connection manager, the data engine
    credit, protocol, errors, wire/   flow control, states, exceptions, what else peers tell each other: pure
    base/         environment variables, log lines, what is needed of an event loop
    abi/, soft/   the verbs' C ABI and its loader; the embedded device

Import names from here; the verbs from ``rdmanet.verbs``, ``rdmanet.cm`` and ``rdmanet.verbs_async``; AnyIO's streams
from ``rdmanet.anyio_streams``. Everything is imported on first use: programs that use only the verbs do not import
asyncio, and ``rdmanet.run(main())`` does not load a device before there is a connection.

The first server over RDMA imports all that it takes to make others and connections, to read and write, and to end in
whatever way. A program may then give up the right to read these files (tests/streams/test_starting.py). The first
connection does so, too, except for what few short ones need, which takes long (stream/whole.py): a program that only
connects, and gives up that right, names ``rdmanet.OfferedMemory`` before.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # type checkers know this name; to import typing takes milliseconds
if TYPE_CHECKING:
    from typing import Any

    from rdmanet._core import AccessFlags as AccessFlags
    from rdmanet._core import AllocatedMemory as AllocatedMemory
    from rdmanet._core import alloc as alloc
    from rdmanet._core import devices as devices
    from rdmanet.base.accounts import ConnectionInfo as ConnectionInfo
    from rdmanet.base.accounts import ServerInfo as ServerInfo
    from rdmanet.base.fabric_of import FabricInfo as FabricInfo
    from rdmanet.base.fabric_of import fabric as fabric
    from rdmanet.base.watching import connections as connections
    from rdmanet.errors import CompletionError as CompletionError
    from rdmanet.errors import CompletionResetError as CompletionResetError
    from rdmanet.errors import DeviceLostError as DeviceLostError
    from rdmanet.errors import DeviceNotFoundError as DeviceNotFoundError
    from rdmanet.errors import ModifyQPError as ModifyQPError
    from rdmanet.errors import ProtocolError as ProtocolError
    from rdmanet.errors import RdmaError as RdmaError
    from rdmanet.errors import RegionRevokedError as RegionRevokedError
    from rdmanet.errors import RemoteAccessError as RemoteAccessError
    from rdmanet.loop import loop_factory as loop_factory
    from rdmanet.loop import patch_loop as patch_loop
    from rdmanet.loop import run as run
    from rdmanet.stream.metrics import MetricsCollector as MetricsCollector
    from rdmanet.stream.metrics import metrics as metrics
    from rdmanet.stream.registered import RegisteredMemory as RegisteredMemory
    from rdmanet.stream.tls import start_tls as start_tls
    from rdmanet.stream.whole import OfferedMemory as OfferedMemory
    from rdmanet.streams.blocking import RdmaStream as RdmaStream
    from rdmanet.streams.blocking import open_rdma_stream as open_rdma_stream
    from rdmanet.streams.blocking_listener import RdmaStreamListener as RdmaStreamListener
    from rdmanet.streams.blocking_listener import listen_rdma_stream as listen_rdma_stream
    from rdmanet.streams.files import sendfile as sendfile
    from rdmanet.streams.reader_writer import RdmaStreamReader as RdmaStreamReader
    from rdmanet.streams.reader_writer import RdmaStreamWriter as RdmaStreamWriter
    from rdmanet.streams.reader_writer import open_rdma_connection as open_rdma_connection
    from rdmanet.streams.reader_writer import start_rdma_stream_server as start_rdma_stream_server
    from rdmanet.transport import RdmaServer as RdmaServer
    from rdmanet.transport import RdmaTransport as RdmaTransport
    from rdmanet.transport import create_rdma_connection as create_rdma_connection
    from rdmanet.transport import start_rdma_server as start_rdma_server
    from rdmanet.wire.remote import RemoteMemory as RemoteMemory

__version__ = "0.1.0"

_NAMES = {
    "_core": "AccessFlags AllocatedMemory alloc devices",
    "base.accounts": "ConnectionInfo ServerInfo",
    "base.fabric_of": "FabricInfo fabric",
    "base.watching": "connections",
    "errors": "CompletionError CompletionResetError DeviceLostError DeviceNotFoundError ModifyQPError ProtocolError"
    " RdmaError RegionRevokedError RemoteAccessError",
    "stream.registered": "RegisteredMemory",
    "wire.remote": "RemoteMemory",
    "loop": "loop_factory patch_loop run",
    "streams.blocking": "RdmaStream open_rdma_stream",
    "streams.blocking_listener": "RdmaStreamListener listen_rdma_stream",
    "streams.files": "sendfile",
    "stream.metrics": "MetricsCollector metrics",
    "stream.whole": "OfferedMemory",
    "streams.reader_writer": "RdmaStreamReader RdmaStreamWriter open_rdma_connection start_rdma_stream_server",
    "stream.tls": "start_tls",
    "transport": "RdmaServer RdmaTransport create_rdma_connection start_rdma_server",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("_core", "blocking", "credit", "errors", "loop", "rpc", "streams", "tensors", "transport")


_COMPILED = "rdmanet._core"
NOT_BUILT = "rdmanet is not built: run `make build` in its folder, or `pip install .`"


if not TYPE_CHECKING:  # for them it would be there whatever is asked for: no name would be a misspelt one

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            found = globals()[name] = getattr(_load(_LAZY[name]), name)
            return found
        if name in _MODULES:
            return _load(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(name: str) -> Any:
    def load() -> Any:
        return importlib.import_module(f"rdmanet.{name}")

    try:
        late = sys.modules.get("rdmanet.base.late_import")  # it is there once there are connections
        return load() if late is None else late.imported(load)
    except ModuleNotFoundError as exc:
        if exc.name != _COMPILED:
            raise
        raise ModuleNotFoundError(NOT_BUILT, name=_COMPILED) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
