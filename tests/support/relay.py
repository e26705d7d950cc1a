"""A relay between TCP and a connection of the loop under test, for tests one of whose ends is a blocking socket."""

import asyncio
import contextlib
import functools
import threading
from typing import Any

import rdmanet

RELAYS = asyncio.SelectorEventLoop()
"""The loop of all relays. It has its own thread, because some tests stop their loop and then wait for the sockets."""


def run_relays() -> None:
    threading.Thread(target=RELAYS.run_forever, daemon=True).start()


async def there(coroutine):
    """Await something of the relays' loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, RELAYS))


class Relay(asyncio.Protocol):
    """One end of a relay: what it gets, the other end sends."""

    def __init__(self) -> None:
        self.other: Relay | None = None
        self.transport = None
        self.early: list[str | bytes] = []

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(1 << 30)

    def joins(self, other: "Relay") -> None:
        """This and the other end are connected: pass on what came before that."""
        self.other, other.other = other, self
        for end in (self, other):
            for event, *arguments in end.early:
                getattr(end, event)(*arguments)

    def data_received(self, data: bytes) -> None:
        self.passes("data_received", data) and self.other.transport.write(data)

    def eof_received(self) -> bool:
        with contextlib.suppress(OSError):  # a socket that is not connected any more
            self.passes("eof_received") and self.other.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self.passes("connection_lost", exc):
            self.other.transport.close() if exc is None else self.other.transport.abort()

    def passes(self, *event) -> bool:
        """Whether there is somebody to pass it on to, now."""
        if self.other is None:
            self.early.append(event)
        return self.other is not None


def first_of_two(connect):
    """A factory of relays each of which makes its other end."""

    def factory():
        relay = Relay()

        async def join():
            try:
                _, other = await connect()
            except OSError:
                relay.transport.abort()
            else:
                relay.joins(other)

        relay.task = RELAYS.create_task(join())
        return relay

    return factory


class BothServers:
    """The RDMA server, and the TCP server whose clients are passed on to it."""

    def __init__(self, rdma: Any, tcp: asyncio.AbstractServer) -> None:
        self.rdma, self.tcp = rdma, tcp
        self.sockets = tcp.sockets

    def close(self) -> None:
        over = threading.Event()
        RELAYS.call_soon_threadsafe(lambda: (self.tcp.close(), over.set()))
        over.wait()
        self.rdma.close()

    async def wait_closed(self) -> None:
        await self.rdma.wait_closed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rdma, name)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.close()
        await self.wait_closed()


OF_TCP = ("family", "flags", "reuse_address", "reuse_port")


def relay(loop: Any) -> None:
    """Have the connections of a loop that is switched go by RDMA, though the other end is a socket."""
    create_connection, create_server = loop.create_connection, loop.create_server
    if not hasattr(RELAYS, "_rdmanet"):
        rdmanet.patch_loop(RELAYS)
    by_tcp = RELAYS._rdmanet.base

    @functools.wraps(create_connection)
    async def connect(factory, host=None, port=None, *, sock=None, local_addr=None, **options):
        if sock is not None or local_addr is not None or not host or not port:
            return await create_connection(factory, host, port, sock=sock, local_addr=local_addr, **options)
        if options.get("ssl"):
            options.setdefault("server_hostname", host)
        _, far = await there(by_tcp.create_connection(Relay, host, port))

        async def connected():
            return None, far

        listener = await there(RELAYS.create_server(first_of_two(connected), "127.0.0.1", 0))
        try:
            return await create_connection(
                factory, "127.0.0.1", listener.sockets[0].getsockname()[1], **options
            )
        finally:
            RELAYS.call_soon_threadsafe(listener.close)

    @functools.wraps(create_server)
    async def serve(factory, host=None, port=None, *, sock=None, **options):
        of_tcp = {name: options.pop(name) for name in OF_TCP if name in options}
        server = await create_server(factory, "127.0.0.1", 0, **options)
        its_port = server.sockets[0].getsockname()[1]
        to_rdma = first_of_two(lambda: RELAYS.create_connection(Relay, "127.0.0.1", its_port))
        try:
            return BothServers(
                server, await there(by_tcp.create_server(to_rdma, host, port, sock=sock, **of_tcp))
            )
        except BaseException:
            server.close()
            raise

    loop.create_connection, loop.create_server = connect, serve
