"""When a server's protocol is made: with what its client writes first, as by TCP, where the kernel has that already.

The tests also say what becomes of a client that says nothing, or goes away.
"""

import asyncio
import os
import time

import pytest
from loop_harness import Echo, Recorder, fabric, serving

from rdmanet.protocol import State
from rdmanet.stream import beginning
from tests.support.waiting import Conditions, loop_turns, until_seen

TURNS = 2
"""Those for which asyncio does not read a TCP connection, after it has been made."""
A_SLOW_TURN_S = 0.02


@pytest.fixture
def made(monkeypatch):
    """The protocols of a server, as they are made."""

    class Made(list):
        conditions = Conditions()

        async def until(self, count: int) -> None:
            await self.conditions.until(lambda: len(self) >= count)

    protocols = Made()

    def factory(kind=Recorder):
        protocols.append(kind())
        protocols.conditions.look()
        return protocols[-1]

    protocols.factory = factory
    return protocols


@pytest.fixture
def says_nothing(monkeypatch):
    """No client's side of a connection sends anything of its own accord."""
    monkeypatch.setattr(beginning, "speak", lambda life, turns: None)


async def connected(port, factory=Recorder):
    transport, protocol = await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)
    assert fabric(transport) == "rdma"
    return transport, protocol


async def answer(port) -> bytes:
    transport, client = await connected(port)
    await loop_turns(2)  # who connects is often not who writes
    transport.write(b"request")
    await client.until(lambda: client.data or "eof" in client.events)
    transport.abort()
    return bytes(client.data)


async def test_who_closes_what_is_idle_does_not_close_what_has_just_been_asked():
    """uvicorn, for one, when it ends: it closes the connections from which it has read no request."""

    class Impatient(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            self.closing = asyncio.ensure_future(self.close_if_idle())

        async def close_if_idle(self):
            await loop_turns(TURNS)
            if not self.data:
                self.transport.close()

    async with serving(Impatient) as (_, port):
        for _ in range(20):
            assert await answer(port) == b"request"


async def test_a_task_of_the_clients_has_time_to_write_first():
    """The task that connects is often not the one that writes."""

    class Seeing(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            self.had_come = transport.get_extra_info("rdma_stats")["frames_received"]

        def data_received(self, data):
            self.transport.write(b"%d" % self.had_come)

    async def connect():
        return await connected(port)

    async with serving(Seeing) as (_, port):
        transport, client = await asyncio.ensure_future(connect())
        transport.write(b"request")
        await client.until(lambda: client.data)
        assert client.data == b"1"
        transport.abort()


@pytest.mark.parametrize("stands_still", [False, True])
async def test_a_client_may_be_slow(says_nothing, stands_still):
    """Where a turn takes some milliseconds: on a machine with too much to do, or with an emulated processor.

    Where the server's loop has stood still, both times are up, and what was written first counts.
    """

    class Seeing(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            self.had_come = transport.get_extra_info("rdma_stats")["frames_received"]

        def data_received(self, data):
            self.transport.write(b"%d" % self.had_come)

    def write():
        transport.write(b"request")
        if stands_still:
            time.sleep(2 * beginning.FIRST_WORD_S)

    async with serving(Seeing) as (_, port):
        transport, client = await connected(port)
        asyncio.get_running_loop().call_later(A_SLOW_TURN_S, write)
        await client.until(lambda: client.data)
        assert client.data == b"1"
        transport.abort()


async def test_a_server_may_speak_first():
    class Speaking(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"welcome")

    async with serving(Speaking) as (_, port):
        transport, client = await connected(port)
        await client.until(lambda: client.data == b"welcome")
        assert transport.get_extra_info("rdma_stats")["control_frames_sent"] == 1
        transport.abort()


async def test_who_says_nothing_is_served_all_the_same(made, says_nothing):
    """A client that blocks its loop as soon as it is connected, say."""
    async with serving(made.factory) as (_, port):
        transport, client = await connected(port)
        assert not made
        await made.until(1)
        made[0].transport.write(b"held until the client has said something")
        transport.write(b"at last")
        await client.until(lambda: client.data)
        await made[0].until(lambda: made[0].data == b"at last")
        transport.abort()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_what_was_said_before_the_end_is_heard(made, end):
    async with serving(made.factory) as (_, port):
        transport, _ = await connected(port)
        transport.write(b"farewell")
        getattr(transport, end)()
        await made.until(1)
        [server] = made
        await server.until(lambda: "lost" in server.events)
        assert server.events == ["made", "data", "eof", "lost"] and server.data == b"farewell"


async def test_who_goes_without_a_word_was_never_there(made, says_nothing, monkeypatch):
    monkeypatch.setattr(beginning, "FIRST_WORD_S", 3600)
    async with serving(made.factory) as (server, port):
        transport, _ = await connected(port)
        [rdma] = server._rdma
        assert rdma._active == 1
        transport._end_now()
        waiting = asyncio.ensure_future(rdma.wait_closed())
        server.close()
        await waiting
        assert not made


async def test_a_forked_child_does_nothing_about_it(made, says_nothing, monkeypatch):
    """The connection is its parent's, even if the child runs the parent's loop."""
    monkeypatch.setattr(beginning, "FIRST_WORD_S", 3600)
    async with serving(made.factory) as (server, port):
        transport, _ = await connected(port)
        [accepted] = server._rdma[0]._transports
        await until_seen(lambda: accepted._machine.state is State.UNHEARD)
        child = os.fork()
        if not child:
            status = 1
            try:
                beginning.begin_late(accepted._life)
                status = len(made) + (accepted._machine.state is not State.UNHEARD)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        beginning.begin_late(accepted._life)
        assert len(made) == 1
        transport.abort()


@pytest.mark.parametrize("how", ["close_clients", "abort_clients"])
async def test_the_server_ends_while_it_waits(made, monkeypatch, how):
    monkeypatch.setattr(beginning, "FIRST_WORD_S", 3600)
    async with serving(made.factory) as (server, port):
        _, client = await connected(port)
        assert not made
        [rdma] = server._rdma
        server.close()
        getattr(rdma, how)()
        await rdma.wait_closed()
        await client.until(lambda: "lost" in client.events)


async def test_a_close_that_waited_for_the_first_word_has_its_whole_time(made, says_nothing, monkeypatch):
    """Little is left of the time in which the connection was to be made."""
    monkeypatch.setattr(beginning, "FIRST_WORD_S", 3600)
    async with serving(made.factory) as (server, port):
        transport, _ = await connected(port)
        [accepted] = server._rdma[0]._transports
        await until_seen(lambda: accepted._machine.state is State.UNHEARD)
        accepted.close()
        life = accepted._life
        made_by = life.deadlines.close
        beginning.begin_late(life)
        assert made_by.cancelled()
        assert life.deadlines.close.when() > made_by.when() + life.config.close_timeout / 2
        transport.abort()


async def test_a_factory_that_raises_late_refuses_the_client():
    def factory():
        raise RuntimeError("no")

    loop = asyncio.get_running_loop()
    told = loop.create_future()
    loop.set_exception_handler(lambda _, context: told.done() or told.set_result(context))
    async with serving(factory) as (_, port):
        _, client = await connected(port)
        assert str((await told)["exception"]) == "no"
        await client.until(lambda: "lost" in client.events)
