"""Calls with one result, over each transport: results, errors, deadlines, limits, and the end of servers."""

import asyncio
import copy
import logging
import math
import sys
from typing import Any

import msgspec
import pytest
from net import Journal, Net, callee, channel, failure

from rdmanet import rpc
from rdmanet.base import log_rate
from rdmanet.rpc import Code
from rdmanet.rpc.channel import Channel
from tests.support.waiting import begin, loop_turns, until_seen


class Quota(msgspec.Struct):
    left: int


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Example(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.gate = asyncio.Event()

    async def add(self, a: int, b: int = 1, *, c: int = 0) -> int:
        """Add."""
        return a + b + c

    async def mirror(self, point: Point) -> Point:
        return Point(point.y, point.x)

    @rpc.method(details=Quota)
    async def fail(self, how: str) -> None:
        if how == "error":
            raise rpc.Error(Code.NOT_FOUND, "there is none", Quota(3))
        if how == "unsendable":
            raise rpc.Error(Code.ABORTED, "with a lock", asyncio.Lock())
        if how == "too large":
            raise rpc.Error(Code.ABORTED, "a number of 70 bits", 1 << 70)
        if how == "no text":
            raise rpc.Error(Code.ABORTED, "the file \udcff")
        if how == "cancelled":
            raise asyncio.CancelledError
        raise ValueError(f"the secret {how}")

    async def wrong(self) -> int:
        return "text"  # type: ignore[return-value]

    async def unsendable(self) -> dict[str, int]:
        return {"lock": asyncio.Lock()}  # type: ignore[dict-item]

    async def long(self, size: int) -> str:
        return "x" * size

    async def wait(self, name: str) -> str:
        self.journal(f"{name} begins")
        try:
            await self.gate.wait()
            return name
        except asyncio.CancelledError:
            self.journal(f"{name} is cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            self.journal(f"{name} ends")

    @rpc.method(outlives_connection=True)
    async def outlive(self) -> None:
        await self.wait("survivor")

    async def deadline(self) -> float | None:
        end = rpc.deadline()
        return None if end is None else end - asyncio.get_running_loop().time()

    async def stubborn(self) -> str:
        self.journal("stubborn begins")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "all the same"
        return ""

    async def peer(self) -> str:
        return str(rpc.peer())


async def test_calls(net: Net):
    client, _ = await net.pair(Example())
    assert await client.add(1) == 2
    assert await client.add(1, b=5, c=10) == 16
    assert await client.mirror(Point(1, 2)) == Point(2, 1)
    assert await asyncio.gather(*(client.add(i, i) for i in range(100))) == [2 * i for i in range(100)]
    with pytest.raises(TypeError, match=r"Example.add\(\) lacks the argument 'a'"):
        await client.add()  # type: ignore[call-arg]
    with pytest.raises(TypeError):  # msgspec cannot encode it, and nothing is sent
        await client.add(asyncio.Lock())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        client.journal  # noqa: B018  it has the methods of the service, and nothing else
    assert Example.add.__doc__ == type(client).add.__doc__
    assert len(channel(client).book) == 0


async def test_a_copy_of_a_client(net: Net):
    client, _ = await net.pair(Example())
    other = copy.copy(rpc.options(client, timeout=3600))
    assert await other.add(1) == 2
    assert await other.deadline() is not None and await client.deadline() is None
    assert rpc.stats(other) == rpc.stats(client)


async def test_errors(net: Net, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_rate, "_said", {})  # each method has a line a second
    client, _ = await net.pair(Example())
    error = await failure(client.fail("error"))
    assert (error.code, error.text, error.details) == (Code.NOT_FOUND, "there is none", Quota(3))
    assert (
        error
        == rpc.Error(Code.NOT_FOUND, "there is none", Quota(3))
        != rpc.Error(Code.NOT_FOUND, "there is none")
    )
    assert error in {error} and error != "NOT_FOUND"
    assert (await failure(client.fail("unsendable"))).details is None
    assert (await failure(client.fail("cancelled"))).code is Code.CANCELLED
    assert (await failure(client.add("1"))).code is Code.INVALID_ARGUMENT  # type: ignore[arg-type]
    caplog.clear()
    error = await failure(client.fail("word"))
    assert (error.code, error.text, error.details, error.traceback) == (
        Code.INTERNAL,
        "the service failed",
        None,
        None,
    )
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rdmanet.rpc", logging.ERROR)
    assert "the secret word" in caplog.text
    assert (await failure(client.unsendable())).code is Code.INTERNAL
    error = await failure(client.wrong())
    assert error.code is Code.INTERNAL and "not of its type" in error.text
    assert await client.add(1) == 2


async def test_tracebacks_if_wanted(net: Net):
    client, _ = await net.pair(Example(), send_tracebacks=True)
    error = await failure(client.fail("word"))
    assert error.traceback is not None and "ValueError: the secret word" in error.traceback


async def test_a_time_out_ends_both_sides(net: Net):
    service = Example()
    client, _ = await net.pair(service)
    error = await failure(rpc.options(client, timeout=0.02).wait("slow"))
    assert error.code is Code.DEADLINE_EXCEEDED and error.begun
    await service.journal.until("slow ends")
    assert service.journal.entries == ["slow begins", "slow is cancelled", "slow ends"]
    error = await failure(rpc.options(client, timeout=-1).add(1))
    assert error.code is Code.DEADLINE_EXCEEDED and not error.begun
    assert await rpc.options(client, timeout=60).add(1) == 2


async def test_the_callee_knows_the_deadline(net: Net):
    server = await net.serve(Example())
    client = await net.connect(Example, server, timeout=100)
    assert 0 < (await client.deadline() or 0) <= 100.001
    assert 0 < (await rpc.options(client, timeout=10).deadline() or 0) <= 10.001
    assert await rpc.options(client, timeout=None).deadline() is None
    with pytest.raises(TypeError, match="is not a client"):
        rpc.options(Example(), timeout=1)


async def test_the_callee_ends_it_by_itself(net: Net, monkeypatch: pytest.MonkeyPatch):
    """When the caller's Cancel never comes."""

    class Patient(Channel):
        def _time_is_over(self, pending: Any) -> None: ...

    monkeypatch.setattr("rdmanet.rpc.client.Channel", Patient)
    service = Example()
    client, _ = await net.pair(service)
    error = await failure(rpc.options(client, timeout=0.02).wait("slow"))
    assert (error.code, error.text) == (Code.DEADLINE_EXCEEDED, "the call took too long")


@pytest.mark.parametrize("timeout", [1e10, math.inf, 1e300, 9e9, 100 * 365 * 86400])
async def test_a_time_out_of_centuries(net: Net, timeout: float):
    server = await net.serve(Example())
    client = await net.connect(Example, server, timeout=timeout)
    limited = timeout < 9.007e9
    assert (await client.deadline() is not None) == limited
    assert (await rpc.options(client, timeout=timeout).deadline() is not None) == limited
    await server.drain(timeout=timeout)


async def test_a_time_out_that_is_none(net: Net):
    client, server = await net.pair(Example())
    for timeout in (0, -1, -math.inf):
        error = await failure(rpc.options(client, timeout=timeout).add(1))
        assert error.code is Code.DEADLINE_EXCEEDED
    for wrong in (math.nan, "1", True):
        with pytest.raises((TypeError, ValueError), match=f"timeout={wrong!r} is no number of seconds"):
            rpc.options(client, timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=nan"):
        await net.connect(Example, server, timeout=math.nan)
    with pytest.raises(ValueError, match="timeout=nan"):
        await server.drain(timeout=math.nan)
    assert server.is_serving()


async def test_tasks_have_the_names_of_methods(net: Net):
    """So `python -m asyncio ps` of Python 3.14 says what a server does."""

    class Named(rpc.Service):
        async def name(self) -> str:
            task = asyncio.current_task()
            return "" if task is None else task.get_name()

    client, _ = await net.pair(Named())
    assert await client.name() == "Named.name"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in Python 3.12")
@pytest.mark.embedded_only("tasks are the same on every device")
async def test_eager_tasks(net: Net):
    """A call may end in the step in which it begins."""

    def eager(loop: Any, coroutine: Any, **options: Any) -> Any:
        return asyncio.Task(coroutine, loop=loop, **{**options, "eager_start": True})

    asyncio.get_running_loop().set_task_factory(eager)
    service = Example()
    client, server = await net.pair(service)
    assert await asyncio.gather(*(client.add(i) for i in range(10))) == list(range(1, 11))
    assert not server.running
    assert (await failure(client.fail("error"))).code is Code.NOT_FOUND
    (call,) = await begin(client.wait("a"))
    await service.journal.until("a begins")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await service.journal.until("a ends")
    assert await client.add(1) == 2  # its answer came after that of the other
    assert not server.running and len(callee(server).book) == len(channel(client).book) == 0


async def test_cancelling_the_caller_cancels_the_handler(net: Net):
    service = Example()
    client, server = await net.pair(service)
    (call,) = await begin(client.wait("a"))
    await service.journal.until("a begins")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await service.journal.until("a ends")
    assert await client.add(1) == 2  # its answer came after that of the other
    assert len(channel(client).book) == len(callee(server).book) == 0


async def test_a_call_that_is_cancelled_before_it_begins(net: Net):
    """Call and Cancel come together: the handler's task has not had its first turn."""
    service = Example()
    client, server = await net.pair(service)
    calls = await begin(*(client.wait("a") for _ in range(3)))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await client.add(1) == 2  # whose answer may come before those of the others
    await until_seen(
        lambda: len(channel(client).book) == len(callee(server).book) == len(server.running) == 0
    )


async def test_a_handler_that_answers_though_it_is_cancelled(net: Net):
    service = Example()
    client, server = await net.pair(service)
    (call,) = await begin(client.stubborn())
    await service.journal.until("stubborn begins")
    callee(server).book.cancel(1).cancel()  # type: ignore[union-attr]
    assert await call == "all the same"


async def test_a_lost_connection_ends_both_sides(net: Net):
    service = Example()
    client, server = await net.pair(service)
    calls = await begin(client.wait("a"), client.outlive())
    await service.journal.until("survivor begins")
    channel(client).link.transport.abort()
    for call in calls:
        assert (await failure(call)).code is Code.UNAVAILABLE
    await service.journal.until("a ends")
    assert "survivor ends" not in service.journal.entries and len(server.running) == 1
    error = await failure(client.add(1))
    assert error.code is Code.UNAVAILABLE and "was not sent" in error.text
    service.gate.set()
    await service.journal.until("survivor ends")
    assert "survivor is cancelled" not in service.journal.entries


async def test_a_client_that_closes_ends_its_calls(net: Net):
    service = Example()
    server = await net.serve(service)
    async with net.connecting(Example, server) as client:
        (call,) = await begin(client.wait("a"))
        await service.journal.until("a begins")
    assert (await failure(call)).code is Code.CANCELLED
    await service.journal.until("a ends")


async def test_drain(net: Net):
    service = Example()
    client, server = await net.pair(service)
    connecting = net.connecting(Example, server)
    (call,) = await begin(client.wait("a"))
    await service.journal.until("a begins")
    (drained,) = await begin(server.drain())
    assert await client.add(1) == 2  # it was sent before the client has heard
    error = await failure(client.add(1))
    assert error.code is Code.UNAVAILABLE and "shutting down" in error.text and not error.begun
    assert not drained.done() and not server.is_serving()
    service.gate.set()
    assert await call == "a"
    await drained
    assert service.journal.entries == ["a begins", "a ends"]
    with pytest.raises(OSError):
        await connecting.__aenter__()


async def test_drain_while_serve_forever_waits(net: Net):
    service = Example()
    client, server = await net.pair(service)
    serving, call = await begin(server.serve_forever(), client.wait("a"))
    await service.journal.until("a begins")
    (drained,) = await begin(server.drain())
    service.gate.set()
    assert await call == "a"
    await drained
    await serving
    assert service.journal.entries == ["a begins", "a ends"]


async def test_cancelling_serve_forever_closes_the_server(net: Net):
    service = Example()
    client, server = await net.pair(service)
    serving, call = await begin(server.serve_forever(), client.wait("a"))
    await service.journal.until("a begins")
    serving.cancel()
    assert (await failure(call)).code is Code.CANCELLED
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not server.is_serving()


@pytest.mark.parametrize(
    ("how", "text"), [("too large", "a number of 70 bits"), ("no text", "the file \\udcff")]
)
async def test_an_error_that_cannot_be_sent_whole_is_an_answer(net: Net, how: str, text: str):
    client, server = await net.pair(Example())
    error = await failure(client.fail(how))
    assert (error.code, error.text) == (Code.ABORTED, text)
    assert await client.add(1) == 2


async def test_drain_for_so_long(net: Net):
    service = Example()
    client, server = await net.pair(service)
    (call,) = await begin(client.wait("a"))
    await service.journal.until("a begins")
    await server.drain(timeout=0.01)
    assert (await failure(call)).code is Code.CANCELLED
    assert service.journal.entries == ["a begins", "a is cancelled", "a ends"]


async def test_closing_a_server_waits_for_its_handlers(net: Net):
    service = Example()
    client, server = await net.pair(service)
    calls = await begin(*(client.wait(name) for name in "abc"))
    await service.journal.until("c begins")
    server.close()
    await server.wait_closed()
    assert {entry for entry in service.journal.entries if "ends" in entry} == {"a ends", "b ends", "c ends"}
    for call in calls:
        assert (await failure(call)).code is Code.CANCELLED
    assert not server.callees


async def test_a_server_that_is_cancelled(net: Net):
    service = Example()
    client, server = await net.pair(service)
    (serving,) = await begin(server.serve_forever())
    assert await client.add(1) == 2
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not server.callees


async def test_limits_are_named(net: Net):
    service = Example()
    server = await net.serve(service, limits=rpc.Limits(calls=2, server_calls=3, message_bytes=1000))
    client, other = await net.connect(Example, server), await net.connect(Example, server)
    calls = await begin(*(client.wait("a") for _ in range(2)), other.wait("b"))
    await service.journal.until("b begins")
    for call, named in (
        (client.add(1), "this connection has 2 unfinished calls: the limit calls is 2"),
        (other.add(1), "the server has 3 unfinished calls: the limit server_calls is 3"),
        (other.wait("x" * 1000), "the limit message_bytes is 1000"),
    ):
        error = await failure(call)
        assert error.code is Code.RESOURCE_EXHAUSTED and named in error.text and not error.begun
    service.gate.set()
    assert await asyncio.gather(*calls) == ["a", "a", "b"]
    small = await net.connect(Example, server, limits=rpc.Limits(message_bytes=1000))
    error = await failure(small.long(1000))
    assert error.code is Code.RESOURCE_EXHAUSTED and "the limit message_bytes is 1000" in error.text


async def test_another_version_of_the_service(net: Net):
    def newer() -> type[rpc.Service]:
        class Example(rpc.Service):
            async def add(self, a: int, b: int = 1, *, c: int = 0, d: str = "") -> int: ...  # type: ignore[empty-body]

            async def brand_new(self) -> int: ...  # type: ignore[empty-body]

        return Example

    def different() -> type[rpc.Service]:
        class Example(rpc.Service):
            async def add(self, a: str) -> int: ...  # type: ignore[empty-body]

        return Example

    server = await net.serve(Example())
    client: Any = await net.connect(newer(), server)
    assert await client.add(1, 2, d="new") == 3
    error = await failure(client.brand_new())
    assert error.code is Code.UNIMPLEMENTED and "Example.brand_new" in error.text and not error.begun
    error = await failure(net.connect(different(), server))
    assert error.code is Code.FAILED_PRECONDITION and "add: parameter a: str is not int" in error.text


async def test_the_peer(net: Net):
    client, _ = await net.pair(Example())
    named = channel(client).link.transport.get_extra_info("sockname")
    assert await client.peer() == str(named)


async def test_writing_waits_while_the_transport_is_full(net: Net):
    client, server = await net.pair(Example())
    link = channel(client).link
    link.pause_writing()
    calls = await begin(*(client.add(i) for i in range(3)), rpc.options(client, timeout=0.01).add(1))
    error = await failure(calls.pop())
    assert error.code is Code.DEADLINE_EXCEEDED and not error.begun
    await loop_turns(5)
    assert not any(call.done() for call in calls) and len(link._collected) == 0
    link.resume_writing()
    assert await asyncio.gather(*calls) == [1, 2, 3]
    there = callee(server).link
    there.pause_writing()
    assert not there.transport.is_reading()
    (call,) = await begin(client.add(5))
    there.resume_writing()
    assert await call == 6


async def test_what_is_asked_for_wrongly():
    for call, says in (
        (rpc.serve(Example(), "127.0.0.1", 0, transport="carrier"), "carrier"),
        (rpc.serve(Example(), "/tmp/x", 1, transport="unix"), "a path, and no port"),
        (rpc.serve(Example(), "127.0.0.1"), "a host and a port"),
    ):
        with pytest.raises(ValueError, match=says):
            await call
    with pytest.raises(TypeError, match=r"is not a rdmanet.rpc.Service"):
        await rpc.serve(object(), "127.0.0.1", 0)  # type: ignore[arg-type]
