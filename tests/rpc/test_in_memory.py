"""Connections in memory, the clock that a test moves, and faults: what programs' own tests use."""

import asyncio
import gc
import math
import threading
import weakref
from typing import Any

import numpy
import pytest
from net import Journal

from rdmanet import rpc
from rdmanet.rpc import Code, in_memory, testing
from rdmanet.rpc.in_memory import HIGH_BYTES, RECEIVE_BYTES, MemoryTransport
from tests.support.waiting import loop_turns


class Work(rpc.Service):
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.journal = Journal()

    async def who(self) -> str:
        self.journal("who")
        return self.name

    async def wait(self) -> None:
        self.journal("wait")
        try:
            await asyncio.Event().wait()
        finally:
            self.journal("cancelled")

    @rpc.method(idempotent=True)
    async def sum(self, numbers: numpy.ndarray) -> int:
        return int(numbers.sum())


async def serve(service: rpc.Service, name: str | None = None, **how: Any) -> rpc.Server:
    return await rpc.serve(service, name, transport="memory", **how)


def connect(name: Any, **how: Any) -> Any:
    return rpc.connect(Work, name, transport="memory", **how)


@pytest.fixture
def clock() -> testing.Clock:
    return testing.Clock()


# ---- Names ---------------------------------------------------------------------------------------------------


async def test_servers_have_names():
    async with await serve(Work("a"), "a") as server, await serve(Work("b")) as other:
        assert [each.getsockname() for each in server.sockets] == ["a"]
        (name,) = (each.getsockname() for each in other.sockets)
        async with connect("a") as a, connect(name) as b:
            assert [await a.who(), await b.who()] == ["a", "b"]
        with pytest.raises(OSError, match="another server of this event loop has the name 'a'"):
            await serve(Work(), "a")
    assert server.sockets == ()
    with pytest.raises(rpc.Error, match="no server of this event loop has the name 'a' in memory") as caught:
        await connect("a")
    assert caught.value.code is Code.UNAVAILABLE
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    async with await serve(Work("new"), "a"), connect("a") as client:
        assert await client.who() == "new"


async def test_another_loop_has_servers_of_its_own():
    async with await serve(Work(), "a"):
        with pytest.raises(rpc.Error, match="no server of this event loop"):
            await asyncio.to_thread(rpc.blocking.connect, Work, "a", transport="memory")


async def test_a_wrong_use():
    with pytest.raises(ValueError, match="transport='memory' wants a name, and no port"):
        await rpc.serve(Work(), "a", 1, transport="memory")
    with pytest.raises(TypeError, match="transport=\"memory\" has no option 'ssl'"):
        await serve(Work(), "a", ssl=None)
    with pytest.raises(TypeError, match="transport=\"memory\" has no option 'ssl'"):
        await connect("a", ssl=None)


# ---- The clock -----------------------------------------------------------------------------------------------


def test_deadlines(clock: testing.Clock):
    async def main() -> None:
        service = Work()
        async with await serve(service, "work"), connect("work") as client:
            call = asyncio.ensure_future(rpc.options(client, timeout=5).wait())
            await clock.advance(4.5)
            assert service.journal.entries == ["wait"] and not call.done()
            await clock.advance(0.5)
            assert service.journal.entries == ["wait", "cancelled"]
            with pytest.raises(rpc.Error) as caught:
                await call
            assert caught.value.code is Code.DEADLINE_EXCEEDED

    clock.run(main())
    assert clock.now == 5


def test_everything_happens_in_its_order(clock: testing.Clock):
    seen: list[tuple[str, float]] = []

    async def each(name: str, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            seen.append((name, clock.now))

    async def main() -> None:
        tasks = [asyncio.ensure_future(each("slow", 3)), asyncio.ensure_future(each("fast", 2))]
        await clock.advance(6.5)
        for task in tasks:
            task.cancel()

    clock.run(main())
    assert sorted(seen) == [("fast", 2), ("fast", 4), ("fast", 6), ("slow", 3), ("slow", 6)]
    assert [at for _, at in seen] == [2, 3, 4, 6, 6] and clock.now == 6.5


def test_a_call_that_is_under_way_takes_no_time(clock: testing.Clock):
    async def main() -> None:
        async with await serve(Work(), "work"), connect("work") as client:
            numbers = numpy.arange(1_000_000)
            sums = [asyncio.ensure_future(client.sum(numbers)) for _ in range(3)]
            await clock.advance(0)
            assert [call.result() for call in sums] == [numbers.sum()] * 3

    clock.run(main())
    assert clock.now == 0


def test_other_threads_are_waited_for(clock: testing.Clock):
    async def main() -> None:
        work = asyncio.ensure_future(asyncio.to_thread(sum, range(1_000_000)))
        await clock.advance(1)
        assert work.done()

    clock.run(main())


def test_other_threads_are_waited_for_at_the_end(clock: testing.Clock):
    """Also those whose result nobody awaits any more: the executor's end waits for them, in a thread of its own."""
    began, ended = threading.Event(), threading.Event()

    def function() -> None:
        began.set()
        ended.wait()

    async def main() -> None:
        work = asyncio.get_running_loop().run_in_executor(None, function)
        began.wait()
        work.cancel()
        threading.Timer(0.3, ended.set).start()

    clock.run(main())
    assert ended.is_set()


def test_keepalive(clock: testing.Clock):
    async def main() -> None:
        async with await serve(Work(), "work") as server, connect("work", keepalive=10) as client:
            call = asyncio.ensure_future(client.wait())
            await clock.advance(1000)
            assert not call.done()
            testing.freeze(server)
            await clock.advance(22)
            assert not server.callees or not server.callees.pop().link.is_over
            with pytest.raises(rpc.Error, match="nothing came for 21 s, nor an answer to a Ping"):
                await call
            testing.thaw(server)
            await clock.advance(0)

    clock.run(main())


def test_a_server_that_is_frozen_for_a_while(clock: testing.Clock):
    async def main() -> None:
        async with await serve(Work("it"), "work") as server, connect("work", keepalive=10) as client:
            testing.freeze(server)
            call = asyncio.ensure_future(client.who())
            await clock.advance(9)
            assert not call.done()
            testing.thaw(server)
            assert await call == "it"

    clock.run(main())


def test_pauses_before_another_try(clock: testing.Clock):
    async def main() -> None:
        retry = rpc.Retry(first_seconds=100, factor=1, most_seconds=100, attempts=3)
        connecting = asyncio.ensure_future(connect("work", retry=retry).__aenter__())
        await clock.advance(30)
        assert not connecting.done()
        async with await serve(Work("it"), "work") as server:
            await clock.advance(150)
            client = await connecting
            testing.cut(server)
            await clock.advance(0)
            call = asyncio.ensure_future(client.who())
            await clock.advance(150)
            assert await call == "it"
            await client.aclose()

    clock.run(main())


def test_a_call_is_made_again_at_another_server(clock: testing.Clock):
    async def main() -> None:
        async with await serve(Work("a"), "a") as first, await serve(Work("b"), "b"):
            retry = rpc.Retry(codes=[Code.UNAVAILABLE], methods=["who"])
            async with connect(["a", "b"], retry=retry) as client:
                assert await client.who() == "a"
                first.close()
                testing.cut(first)
                call = asyncio.ensure_future(client.who())
                await clock.advance(60)
                assert await call == "b"

    clock.run(main())


def test_moving_it_wrongly(clock: testing.Clock):
    async def main() -> None:
        for seconds in (-1, math.nan, math.inf):
            with pytest.raises(ValueError, match="no number of seconds"):
                await clock.advance(seconds)
        with pytest.raises(RuntimeError, match="this loop has another time"):
            await testing.Clock().advance(1)
        first = asyncio.ensure_future(clock.advance(10))
        await loop_turns(1)
        with pytest.raises(RuntimeError, match="another task moves this clock"):
            await clock.advance(1)
        await first
        cancelled = asyncio.ensure_future(clock.advance(10))
        await loop_turns(1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert clock.now == 10
        await clock.advance(1)
        assert clock.now == 11

    clock.run(main())


def test_nobody_moves_it(clock: testing.Clock):
    """A test that waits for what only time can bring does not hang."""
    with pytest.raises(RuntimeError, match="nobody moves it; the next timer is due in 5 s"):
        clock.run(asyncio.sleep(5))


async def test_of_this_loop_it_is_not_the_clock():
    with pytest.raises(RuntimeError, match=r"use clock\.run\(\)"):
        await testing.Clock().advance(0)


# ---- Faults --------------------------------------------------------------------------------------------------


async def test_connections_that_are_cut():
    service = Work("it")
    async with await serve(service, "work") as server:
        client = await connect("work")
        call = asyncio.ensure_future(client.wait())
        await service.journal.until("wait")
        testing.cut(server)
        with pytest.raises(rpc.Error, match="reset by the peer; this call was sent") as caught:
            await call
        assert caught.value.code is Code.UNAVAILABLE
        await service.journal.until("cancelled")
        async with connect("work") as other:
            assert await other.who() == "it"
        assert not server._listener.transports  # type: ignore[attr-defined]


async def test_a_connection_that_ends_while_nothing_passes():
    """Its other side hears of that when everything passes again."""
    async with await serve(Work("it"), "work") as server, connect("work"):
        testing.freeze(server)
        (callee,) = server.callees
        testing.cut(server)
        await loop_turns(5)
        assert not server.callees and callee.link.closed.done()
        transports = server._listener.transports  # type: ignore[attr-defined]
        (transport,) = transports
        assert not transport.peer.is_closing()
        testing.thaw(server)
        await loop_turns(5)
        assert transport.peer.is_closing() and not transports


async def test_faults_are_of_servers_in_memory():
    async with await rpc.serve(Work(), "127.0.0.1", 0, transport="tcp") as server:
        for fault in (testing.cut, testing.freeze, testing.thaw):
            with pytest.raises(ValueError, match='is not served by transport="memory"'):
                fault(server)


# ---- The transport, as asyncio's ------------------------------------------------------------------------------


class Recorder(asyncio.Protocol):
    """:ivar received: bytes, and what else has happened"""

    def __init__(self, keeps: bool = False) -> None:
        self.received: list[Any] = []
        self._keeps = keeps

    def connection_made(self, transport: Any) -> None:
        self.transport: MemoryTransport = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def pause_writing(self) -> None:
        self.received.append("pause")

    def resume_writing(self) -> None:
        self.received.append("resume")

    def eof_received(self) -> bool:
        self.received.append("eof")
        return self._keeps

    def connection_lost(self, exc: Exception | None) -> None:
        self.received.append(type(exc))


async def pair(one: Any = None, other: Any = None) -> tuple[Any, Any]:
    one, other = one or Recorder(), other or Recorder()
    listener = await in_memory.listen(lambda: other, "pair")
    await in_memory.connect(lambda: one, "pair")
    listener.close()
    await loop_turns(2)
    return one, other


async def test_what_is_written_comes_in_parts():
    one, other = await pair()
    memory = bytearray(b"x" * (RECEIVE_BYTES + 5))
    one.transport.write(memory)
    memory[:] = bytes(len(memory))  # it is the writer's again
    one.transport.writelines([b"y", b"", b"z"])
    assert one.received == ["pause"] and one.transport.get_write_buffer_size() == RECEIVE_BYTES + 7
    await loop_turns(5)
    assert one.received == ["pause", "resume"] and one.transport.get_write_buffer_size() == 0
    assert other.received == [b"x" * RECEIVE_BYTES, b"xxxxxyz"]
    with pytest.raises(TypeError, match="no bytes-like object"):
        one.transport.write("text")


async def test_whoever_does_not_read():
    one, other = await pair()
    other.transport.pause_reading()
    one.transport.write(b"x" * HIGH_BYTES)
    await loop_turns(5)
    assert one.received == other.received == []
    one.transport.close()
    await loop_turns(5)
    assert one.received == other.received == []
    other.transport.resume_reading()
    await loop_turns(5)
    assert other.received == [b"x" * HIGH_BYTES, "eof", type(None)] and one.received == [type(None)]


async def test_an_end_is_read_when_the_other_side_reads():
    one, other = await pair()
    other.transport.pause_reading()
    one.transport.close()
    await loop_turns(5)
    assert (one.received, other.received) == ([type(None)], [])
    other.transport.resume_reading()
    await loop_turns(5)
    assert other.received == ["eof", type(None)]


async def test_what_is_written_to_a_side_that_closes_goes_nowhere():
    one, other = await pair(other=Recorder(keeps=True))
    one.transport.close()
    other.transport.write(b"x" * 2 * HIGH_BYTES)
    await loop_turns(5)
    assert one.received == [type(None)] and other.received == ["pause", "eof", "resume"]
    other.transport.write(b"y")
    assert other.transport.get_write_buffer_size() == 0
    other.transport.close()
    await loop_turns(5)
    assert other.received[-1] is type(None)


async def test_a_reset():
    one, other = await pair()
    one.transport.write(b"lost")
    one.transport.abort()
    await loop_turns(5)
    assert one.received == [type(None)] and other.received == [ConnectionResetError]


async def test_a_protocol_that_raises():
    class Raises(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("no")

    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    one, other = await pair(other=Raises())
    one.transport.write(b"x")
    await loop_turns(5)
    assert [type(each) for each in seen] == [ValueError]
    assert one.received == [ConnectionResetError] and other.received == [type(None)]


async def test_nothing_is_left():
    gc.collect()
    one, other = await pair()
    seen = [weakref.ref(one.transport), weakref.ref(other.transport)]
    one.transport.close()
    await loop_turns(5)
    del one, other
    gc.collect()
    assert [each() for each in seen] == [None, None]
    assert not in_memory._LISTENERS.get(asyncio.get_running_loop())
