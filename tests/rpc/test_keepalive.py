"""Pings: a peer that answers is kept, one that does not is lost, and a side that was busy itself is patient."""

import asyncio
import socket
from typing import Any

import pytest
from net import Net, callee, channel
from strangers import HELLO, SCHEMA, Store, Stranger, stranger

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.keepalive import LATE_PART, Keepalive
from rdmanet.rpc.messages import Hello, Ping, Pong
from tests.support.waiting import begin

tcp = pytest.mark.parametrize("transport", ["tcp"])


async def test_both_sides_answer(net: Net):
    """The other side need not ask for it."""
    server = await net.serve(Store(), keepalive=0.01)
    client = await net.connect(Store, server)
    other = await net.connect(Store, await net.serve(Store()), keepalive=0.01)
    heard: list[asyncio.Event] = []
    for link in (callee(server).link, channel(other).link):
        heard.append(asyncio.Event())
        link._handlers[Pong] = lambda _, event=heard[-1]: event.set()  # type: ignore[index, misc]
    for event in heard:
        await event.wait()
    assert await client.add(1, 2) == await other.add(1, 2) == 3


@tcp
async def test_a_client_that_does_not_answer_is_lost(net: Net):
    service = Store()
    server = await net.serve(service, keepalive=0.02)
    peer = await stranger(net, server, HELLO)
    assert isinstance(await peer.hear(), Hello)
    for _ in range(3):
        ping = await peer.hear()
        assert isinstance(ping, Ping)
        peer.say(Pong(ping.token))
    assert await peer.is_cut_off()


@tcp
async def test_a_server_that_does_not_answer_is_lost(net: Net):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        await peer.hear()
        peer.say(HELLO)
        await peer.is_cut_off()
        writer.close()

    assert SCHEMA.digest == HELLO.digest
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await net._stack.enter_async_context(server)
    address = server.sockets[0].getsockname()
    async with rpc.connect(Store, *address, transport="tcp", keepalive=0.02) as client:
        with pytest.raises(rpc.Error, match="nothing came for .* nor an answer to a Ping") as caught:
            await client.wait()
        assert caught.value.code is Code.UNAVAILABLE


@tcp
async def test_without_it_there_is_no_timer(net: Net):
    client, server = await net.pair(Store())
    assert channel(client)._keepalive is None and callee(server)._keepalive is None


@tcp
async def test_the_kernel_looks_after_the_host(net: Net):
    client, server = await net.pair(Store())
    for link in (channel(client).link, callee(server).link):
        sock = link.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


class Clock:
    """A loop and a link, for a Keepalive without either."""

    def __init__(self) -> None:
        self.loop = self.transport = self
        self.now = self.heard_at = 0.0
        self.timers: list[float] = []
        self.said: list[Any] = []
        self.error: BaseException | None = None
        self.unwritten = 0
        self.moved = 0
        self.is_over = False

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Any) -> Any:
        self.timers.append(seconds)

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def ask(self) -> None:
        self.said.append("Ping")

    def abort(self, error: BaseException) -> None:
        self.error = error

    def after(self, seconds: float, keepalive: Keepalive) -> None:
        self.now += seconds
        keepalive.look()


def test_its_states():
    clock = Clock()
    keepalive = Keepalive(clock, 10)  # type: ignore[arg-type]
    clock.now = clock.heard_at = 4.0
    clock.after(6, keepalive)
    assert clock.timers == [10, 4] and not clock.said  # to ten seconds after what came
    clock.after(4, keepalive)
    assert clock.said == ["Ping"] and clock.timers[-1] == 10
    clock.heard_at = clock.now + 1
    clock.after(10, keepalive)
    assert clock.timers[-1] == 1 and clock.error is None
    clock.after(1, keepalive)
    clock.after(100, keepalive)  # the loop was busy
    assert clock.timers[-1] == 10 * LATE_PART and clock.error is None
    clock.heard_at = clock.now  # and reads now what came
    clock.after(1, keepalive)
    assert clock.error is None and clock.timers[-1] == 9
    for seconds in (9, 10, 1):
        assert clock.error is None
        clock.after(seconds, keepalive)
    assert isinstance(clock.error, TimeoutError)


def test_a_peer_that_takes_what_is_written_is_there():
    clock = Clock()
    clock.unwritten = 1000
    keepalive = Keepalive(clock, 10)  # type: ignore[arg-type]
    clock.after(10, keepalive)
    for _ in range(5):
        clock.unwritten -= 100
        clock.after(10, keepalive)
    assert clock.error is None
    for seconds in (10, 10, 1):
        clock.after(seconds, keepalive)
    assert clock.error is not None


def test_a_peer_whose_memory_comes_is_there():
    clock = Clock()
    keepalive = Keepalive(clock, 10)  # type: ignore[arg-type]
    for _ in range(5):
        clock.moved += 1000
        clock.after(10, keepalive)
    assert clock.error is None
    for seconds in (10, 10, 1):
        clock.after(seconds, keepalive)
    assert clock.error is not None


@tcp
async def test_a_wrong_time(net: Net):
    for wrong in (0, -1, "1", True, (60, 10, 6)):
        with pytest.raises(ValueError, match="is not a number of seconds above 0"):
            await rpc.serve(Store(), "127.0.0.1", 0, transport="tcp", keepalive=wrong)  # type: ignore[arg-type]


@tcp
async def test_pings_of_a_server_that_does_not_read(net: Net):
    """The client remembers no Pongs for it."""
    client, server = await net.pair(Store())
    link = channel(client).link
    link.pause_writing()
    for token in range(1000):
        link._handlers[Ping](Ping(token))
    assert not link._collected
    link.resume_writing()
    (call,) = await begin(client.add(1, 2))
    assert await call == 3
