"""The order of a protocol's callbacks, and of what they schedule, is that of asyncio's TCP."""

import asyncio

import pytest

import rdmanet
from tests.support.waiting import Conditions, loop_turns, until_seen


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
