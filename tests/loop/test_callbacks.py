"""The order of a protocol's callbacks, and of what they schedule, is that of asyncio's TCP."""

import asyncio
import contextlib
import warnings

import pytest

import rdmanet
from tests.support.waiting import Conditions, begin, loop_turns, until_seen


class Scheduling(asyncio.Protocol):
    """Remembers its callbacks, and when what connection_made() has scheduled was run."""

    says = b""
    ends = False

    def __init__(self):
        self.events = []
        self.conditions = Conditions()

    def connection_made(self, transport):
        self.transport = transport
        self.note("made")
        asyncio.get_running_loop().call_soon(self.note, "soon")
        if self.says:
            transport.write(self.says)
        if self.ends:
            transport.close()

    def data_received(self, data):
        self.note("data")

    def eof_received(self):
        self.note("eof")

    def connection_lost(self, exc):
        self.note("lost")

    def note(self, event):
        self.events.append(event)
        self.conditions.look()

    async def until(self, event):
        await self.conditions.until(lambda: event in self.events)


class Buffered(Scheduling, asyncio.BufferedProtocol):
    def get_buffer(self, size_hint):
        return bytearray(100)

    def buffer_updated(self, number):
        self.note("data")


class Speaking(Scheduling):
    says = b"hello"


class Ending(Speaking):
    ends = True


async def served(kind, client_kind, meanwhile=None) -> list[str]:
    """What the server's protocol is told of a client that does not wait for it. `meanwhile` has it before its data."""
    loop = asyncio.get_running_loop()
    made = []

    def factory():
        made.append(kind())
        return made[-1]

    server = await loop.create_server(factory, "127.0.0.1", 0)
    transport, client = await loop.create_connection(client_kind, *server.sockets[0].getsockname())
    assert transport.get_extra_info("fabric") == ("rdma" if hasattr(loop, "_rdmanet") else None)
    await until_seen(lambda: made)
    if meanwhile is not None:
        await meanwhile(made[0])
    await made[0].until("data")
    transport.close()
    await made[0].until("lost")
    await client.until("lost")
    server.close()
    return made[0].events


@pytest.mark.parametrize("kind", [Scheduling, Buffered])
@pytest.mark.parametrize("client", [Speaking, Ending])
def test_what_connection_made_schedules_runs_before_data_comes(base, kind, client):
    events = rdmanet.run(served(kind, client), loop_factory=base)
    assert events == ["made", "soon", "data", "eof", "lost"]
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as over_tcp:
        assert events == over_tcp.run(served(kind, client))


@pytest.mark.parametrize("kind", [Scheduling, Buffered])
def test_a_server_that_speaks_first(base, kind):
    async def first() -> list[str]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Ending, "127.0.0.1", 0)
        _, client = await loop.create_connection(kind, *server.sockets[0].getsockname())
        await client.until("lost")
        server.close()
        return client.events

    events = rdmanet.run(first(), loop_factory=base)
    assert events == ["made", "soon", "data", "eof", "lost"]
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as over_tcp:
        assert events == over_tcp.run(first())


def test_reading_that_connection_made_pauses_stays_paused(base):
    class Pausing(Scheduling):
        def connection_made(self, transport):
            super().connection_made(transport)
            assert transport.is_reading()
            transport.pause_reading()

    async def look(server: Scheduling) -> None:
        await until_seen(lambda: "soon" in server.events)
        await loop_turns(1000)
        assert server.events == ["made", "soon"]
        server.transport.resume_reading()

    events = rdmanet.run(served(Pausing, Speaking, look), loop_factory=base)
    assert events == ["made", "soon", "data", "eof", "lost"]


@pytest.mark.parametrize(("first", "size"), [("ours", 0), ("ours", 100), ("ours", 2_000), ("theirs", 0)])
async def test_connection_lost_comes_in_the_turn_after_close(first, size):
    """So a server that counts its connections does not count one that it has closed, whoever has closed first."""

    class Staying(Scheduling):
        def eof_received(self):
            super().eof_received()
            return True

    loop = asyncio.get_running_loop()
    ours = Staying()
    server = await loop.create_server(lambda: ours, "127.0.0.1", 0)
    transport, client = await loop.create_connection(Speaking, *server.sockets[0].getsockname())
    assert transport.get_extra_info("fabric") == "rdma"
    await ours.until("data")
    if first == "theirs":
        transport.close()
        await ours.until("eof")
        await client.until("lost")
    ours.transport.write(bytes(size))
    ours.transport.close()
    assert "lost" not in ours.events
    await loop_turns(1)
    assert ours.events[-1] == "lost"
    if first == "ours":
        await client.until("lost")
        assert client.events == ["made", "soon", *(["data"] if size else []), "eof", "lost"]
    ours.transport.abort()  # nothing, as over TCP
    await loop_turns()
    assert ours.events.count("lost") == 1
    server.close()
    await server.wait_closed()


class Failing(Scheduling):
    """Closes, and fails: by then nothing is left to be cut off."""

    def data_received(self, data):
        super().data_received(data)
        self.transport.close()
        raise RuntimeError

    def connection_lost(self, exc):
        self.events.append(type(exc))
        super().connection_lost(exc)


def test_a_failure_after_close_is_no_reason_of_the_end(base):
    async def events() -> tuple[list, list]:
        reported = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context["message"])
        )
        return await served(Failing, Speaking), reported

    found = rdmanet.run(events(), loop_factory=base)
    assert found[0] == ["made", "soon", "data", type(None), "lost"]
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as over_tcp:
        assert found == over_tcp.run(events())


class Listening(Speaking):
    """Wants to know of ports and of offers, too."""

    def port_event(self, event):
        self.note("port")

    def region_offered(self, memory):
        self.note("offered")


@contextlib.asynccontextmanager
async def left_to_a_slow_device():
    """A server's protocol, which has closed and lost while the device has yet to send what it wrote; a client's; and
    the server."""
    loop = asyncio.get_running_loop()
    ours = Listening()
    server = await loop.create_server(lambda: ours, "127.0.0.1", 0)
    _, client = await loop.create_connection(Listening, *server.sockets[0].getsockname())
    await ours.until("data")
    device = ours.transport.engine.pd.context
    device.set_faults("delay=1000s")
    try:
        ours.transport.write(b"on its way")
        ours.transport.close()
        await ours.until("lost")
        assert ours.transport._life.connection.undelivered
        yield ours, client, server
    finally:
        device.set_faults("")
        ours.transport._end_now()
        client.transport.abort()
        server.close()
        await server.wait_closed()
        await client.until("lost")


async def test_nothing_comes_after_connection_lost():
    async with left_to_a_slow_device() as (ours, client, _):
        ours.transport.engine.pd.context.set_faults("delay=1000s, link=down:0ms:1ms")
        await client.until("port")
        ours.transport._life.connection.owner.tell("region_offered", None)
        assert ours.events[-1] == "lost"


async def test_no_server_waits_for_a_connection_that_is_lost():
    async with left_to_a_slow_device() as (_, _, server):
        server.close()
        [rdma] = server._rdma
        [waiting] = await begin(rdma.wait_closed())  # what the server does since Python 3.12
        assert waiting.done()


async def test_the_end_of_the_loop_does_not_call_unclosed_what_was_closed_and_lost():
    async with left_to_a_slow_device() as (ours, *_):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours.transport._life._loop_ended()
