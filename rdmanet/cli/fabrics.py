"""RDMA, TCP and Unix sockets behind the same four calls, so that one program can run over each.

Everything above asyncio's transports is the same on each fabric, so a difference between two measurements is the
transport's. An address is plain data (host and port, or a path), which can be passed to another process as JSON. All
traffic stays on this host, unless another one is named.
"""

import asyncio
import contextlib
import importlib
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

HOST = "127.0.0.1"

Address = list[Any]
Factory = Callable[[], asyncio.BaseProtocol]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
StreamCallback = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Fabric:
    """A kind of network.

    :param host: where it listens
    :param options: keywords of its connect and listen calls
    """

    name: str

    def __init__(self, *, host: str = HOST, **options: Any) -> None:
        self.host = host
        self.options = options

    def calls(self) -> tuple[Callable[..., Any], ...]:
        """The functions that listen and connect, with a protocol, and the same with streams."""
        raise NotImplementedError

    def place(self) -> Address:
        """Where to listen."""
        return [self.host, 0]

    async def listen(self, factory: Factory) -> tuple[asyncio.AbstractServer, Address]:
        return await self._listen(self.calls()[0], factory)

    async def connect(
        self, factory: Factory, address: Address
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        return await self.calls()[1](factory, *address, **self.options)  # type: ignore[no-any-return]

    async def listen_streams(self, callback: StreamCallback) -> tuple[asyncio.AbstractServer, Address]:
        return await self._listen(self.calls()[2], callback)

    async def open_streams(self, address: Address) -> Streams:
        return await self.calls()[3](*address, **self.options)  # type: ignore[no-any-return]

    async def _listen(self, call: Callable[..., Any], what: Any) -> tuple[asyncio.AbstractServer, Address]:
        place = self.place()
        server = await call(what, *place, **self.options)
        return server, place if len(place) == 1 else list(server.sockets[0].getsockname()[:2])


class Rdma(Fabric):
    name = "rdmanet"

    def calls(self) -> tuple[Callable[..., Any], ...]:
        import rdmanet as r

        return (
            r.start_rdma_server,
            r.create_rdma_connection,
            r.start_rdma_stream_server,
            r.open_rdma_connection,
        )


class Tcp(Fabric):
    name = "TCP"

    def calls(self) -> tuple[Callable[..., Any], ...]:
        loop = asyncio.get_running_loop()
        return loop.create_server, loop.create_connection, asyncio.start_server, asyncio.open_connection


class Unix(Fabric):
    name = "Unix socket"

    def calls(self) -> tuple[Callable[..., Any], ...]:
        loop, streams = asyncio.get_running_loop(), asyncio.open_unix_connection
        return loop.create_unix_server, loop.create_unix_connection, asyncio.start_unix_server, streams

    def place(self) -> Address:
        # Unix socket paths are short. The directory is private, and goes with TMPDIR's tree.
        return [os.path.join(tempfile.mkdtemp(prefix="rdmanet-"), "s")]


FABRICS: dict[str, type[Fabric]] = {"rdmanet": Rdma, "tcp": Tcp, "unix": Unix}


def forget(address: Address) -> None:
    """Remove what a closed Unix listener left in the file system; do nothing for the other fabrics."""
    if len(address) == 1:
        with contextlib.suppress(OSError):
            os.unlink(address[0])
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(address[0]))


# --- the loop and the CPU of a process -------------------------------------------------------


def loop_factory(name: str | None = None) -> tuple[Callable[[], asyncio.AbstractEventLoop], str]:
    """A factory of asyncio's or uvloop's loops, and its name with version; without a name uvloop if it is installed.

    :raises ImportError: uvloop was asked for, and cannot be imported
    """
    if name != "asyncio":
        try:
            uvloop = importlib.import_module("uvloop")
        except ImportError as exc:
            if name == "uvloop":
                raise ImportError(
                    f"uvloop cannot be imported ({exc}): pip install 'rdmanet[uvloop]'"
                ) from exc
        else:
            return uvloop.new_event_loop, f"uvloop {uvloop.__version__}"
    return asyncio.new_event_loop, "asyncio's loop"


def pin(index: int) -> int | None:
    """Pin this process to the index-th CPU that it may use, so that two processes do not share one.

    Returns the CPU, or None if there is no second CPU for the other process.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return None
    cpu = cpus[index % len(cpus)]
    os.sched_setaffinity(0, {cpu})
    return cpu
