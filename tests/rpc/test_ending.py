"""How calls, connections and servers end in odd moments: drains, half connections, pings that cannot be answered."""

import asyncio

import pytest
from net import Net, idle
from strangers import HELLO, LIMITS, SCHEMA, Store, Stranger, call, stranger
from test_unary import failure

from rdmanet import rpc
from rdmanet.rpc import Code, link
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.messages import Failure, Goaway, Hello, Ping, Pong, Reply, frame
from tests.support.waiting import loop_turns, until_seen

by_tcp = pytest.mark.parametrize("transport", ["tcp"])


class Closing(rpc.Service):
    server: rpc.Server
    task: asyncio.Task[None]

    async def drain(self) -> str:
        try:
            await self.server.drain()
        except RuntimeError as exc:
            return str(exc)
        return ""

    async def wait_closed(self) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def drain_later(self) -> None:
        self.task = asyncio.create_task(self.server.drain())
        await asyncio.sleep(0)


async def test_a_method_that_ends_its_server(net: Net, caplog: pytest.LogCaptureFixture):
    service = Closing()
    client, service.server = await net.pair(service)
    text = await client.drain()  # type: ignore[attr-defined]
    assert text == "drain() in a method would wait for that method: start a task for it"
    assert service.server.is_serving()
    await client.drain_later()  # type: ignore[attr-defined]
    await service.task
    client, service.server = await net.pair(service)
    assert (await failure(client.wait_closed())).code in (Code.INTERNAL, Code.UNAVAILABLE)  # type: ignore[attr-defined]
    await service.server.wait_closed()


@by_tcp
async def test_half_a_connection_is_none(net: Net):
    """A client that has no more to say has no more calls: the one that runs is cancelled."""
    service = Store()
    client, server = await net.pair(service, limits=LIMITS)
    peer = await stranger(net, server, HELLO, call(1, "wait"), call(2, "add", 1, 2))
    while not isinstance(await peer.hear(), Reply):
        pass
    assert service.alive == 1
    peer.writer.write_eof()
    assert await peer.is_cut_off()
    await idle(server)
    assert service.alive == 0 and len(server.callees) == 1
    assert await client.add(1, 2) == 3


@by_tcp
async def test_half_a_connection_that_reads_nothing(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It ends though its answers cannot be sent."""
    monkeypatch.setattr(link, "CLOSE_S", 0.05)
    client, server = await net.pair(Store(), limits=LIMITS)
    peer = await stranger(net, server, HELLO, *[call(number, "much") for number in range(40)])
    await until_seen(lambda: any(found.link.paused for found in server.callees))
    peer.writer.transport.pause_reading()
    (found,) = (found.link for found in server.callees if found.link.paused)
    found.transport.resume_reading()  # as if the end had come before it paused
    peer.writer.write_eof()
    await found.closed


@by_tcp
@pytest.mark.parametrize("side", ["client", "server"])
async def test_pings_while_writing_is_paused(net: Net, side: str):
    """A peer that reads nothing, and asks for ever."""

    class Transport(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written = b""

        def write(self, data: bytes) -> None:  # type: ignore[override]
            self.written += data

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

        def abort(self) -> None: ...

    server = await net.serve(Store(), limits=LIMITS)
    found = Channel(SCHEMA, LIMITS).link if side == "client" else Callee(server).link
    transport = Transport()
    found.connection_made(transport)
    found.data_received(frame(HELLO))
    await loop_turns(2)
    found.data_received(frame(Ping(7)))
    found.pause_writing()
    await loop_turns(2)
    assert transport.written.endswith(frame(Pong(7)))
    size = len(transport.written)
    for number in range(1000):
        found.data_received(frame(Ping(number)))
    await loop_turns(20)
    assert len(transport.written) == size
    found.resume_writing()
    await loop_turns(20)
    if side == "client":
        assert transport.written[size:] == frame(Pong(999))
    else:  # it has not looked at them before; a transport that stops reading gives it none
        assert transport.written.endswith(frame(Pong(999)))
    found.connection_lost(None)


@by_tcp
async def test_a_server_that_drains_before_hello(net: Net):
    """It says Hello all the same, and then Goaway. A Call that comes before the client can have heard is taken."""
    service = Store()
    client, server = await net.pair(service, limits=rpc.Limits(hello_seconds=3600))
    waiting = asyncio.ensure_future(client.wait())
    peer = await stranger(net, server)
    await until_seen(lambda: len(server.callees) == 2 and service.alive)
    drained = asyncio.ensure_future(server.drain())
    await loop_turns(2)
    peer.say(HELLO, call(1, "add", 1, 2))
    assert isinstance(await peer.hear(), Hello)
    assert await peer.hear() == Goaway("it is shutting down")
    assert await peer.hear() == Ping(1)
    assert isinstance(await peer.hear(), Reply)
    peer.say(Pong(1), call(2, "add", 1, 2))
    assert await peer.hear() == Goaway("it is shutting down", 1)
    refused = await peer.hear()
    assert isinstance(refused, Failure) and refused.code == rpc.Code.UNAVAILABLE
    assert refused.text == "the server takes no new calls (it is shutting down); this call did not begin"
    service.gate.set()
    await waiting
    assert await peer.hear() == Ping(2)
    peer.say(Pong(2))
    assert await peer.hear() is None
    await drained


@by_tcp
async def test_a_message_before_hello_ends_a_client(net: Net):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        peer.say(Goaway("early"), HELLO)
        await peer.is_cut_off()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await net._stack.enter_async_context(server)
    with pytest.raises(rpc.Error, match="the peer may not send Goaway"):
        async with rpc.connect(Store, *server.sockets[0].getsockname()[:2], transport="tcp"):
            pass


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
async def test_a_client_that_was_closed(net: Net, retry: rpc.Retry | None):
    """A call of it gets what the calls get that were pending."""
    server = await net.serve(Store())
    async with net.connecting(Store, server, retry=retry) as client:
        assert await client.add(1, 2) == 3
    error = await failure(client.add(1, 2))
    assert (error.code, error.text) == (Code.CANCELLED, "the client was closed; this call was not sent")
    assert not error.begun
