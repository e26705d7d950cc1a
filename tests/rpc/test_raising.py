"""Whatever a method or a stream raises, its caller has one answer: also a BaseException that is no Exception.

What ends the program, KeyboardInterrupt and SystemExit, goes on through the loop when the answer was sent, as asyncio
has it. Tests of that have a loop of their own, in a thread's place: `ending`.
"""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from net import Journal, Net, callee, channel, failure

from rdmanet import rpc
from rdmanet.base import log_rate
from rdmanet.rpc import Code
from tests.rpc.conftest import LIMIT_S


class Stop(BaseException):
    """A library's own, such as pytest's outcomes."""


class Incomplete(rpc.Error):
    def __init__(self, name: str) -> None:  # does not call that of Error
        self.name = name


def altered() -> rpc.Error:
    error = rpc.Error(Code.NOT_FOUND, "none")
    error.text = 5  # type: ignore[assignment]
    return error


RAISED: dict[str, Callable[[], BaseException]] = {
    "BaseException": lambda: Stop("no"),
    "pytest.fail": lambda: pytest.fail.Exception("no"),
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "group": lambda: BaseExceptionGroup("several", [Stop("no"), ValueError()]),
    "incomplete Error": lambda: Incomplete("w"),
    "altered Error": altered,
}
raised = pytest.mark.parametrize("raised", RAISED)


@dataclasses.dataclass
class Strict:
    """Its constructor raises, at whoever decodes it."""

    how: str = ""

    def __post_init__(self) -> None:
        if self.how:
            raise RAISED[self.how]()


class Zone(datetime.tzinfo):
    """A time zone that raises when it is asked for, which it is by whoever encodes a time."""

    def __init__(self, how: str) -> None:
        self._how = how

    def utcoffset(self, _: Any) -> datetime.timedelta:
        raise RAISED[self._how]()


def unsendable(how: str) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, tzinfo=Zone(how))


class Raising(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()

    async def method(self, how: str) -> None:
        raise RAISED[how]()

    async def items(self, how: str) -> AsyncIterator[int]:
        yield 1
        raise RAISED[how]()

    async def at_the_end(self, how: str) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.journal("ends")
            raise RAISED[how]()

    async def taking(self, how: str, numbers: AsyncIterator[int]) -> None:
        async for _ in numbers:
            raise RAISED[how]()

    async def take(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def echo(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield number

    async def result(self, how: str) -> datetime.datetime:
        return unsendable(how)

    async def details(self, how: str) -> None:
        raise rpc.Error(Code.NOT_FOUND, "none", unsendable(how))

    async def argument(self, value: Strict) -> None: ...

    async def strict(self, how: str) -> Strict:
        value = Strict()
        value.how = how
        return value

    @rpc.method(details=Strict)
    async def strict_details(self, how: str) -> None:
        raise rpc.Error(Code.NOT_FOUND, "none", {"how": how})


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rate, "_said", {})  # each method has a line a second


async def numbers_to(number: int) -> AsyncIterator[int]:
    for each in range(number):
        yield each


async def numbers(error: BaseException) -> AsyncIterator[int]:
    yield 1
    raise error


class Bare:
    """A stream of the caller's that is no generator: Python changes nothing of what it raises."""

    def __init__(self, error: BaseException, at_once: bool) -> None:
        self._error = error
        self._at_once = at_once

    def __aiter__(self) -> Any:
        if self._at_once:
            raise self._error
        return self

    async def __anext__(self) -> int:
        raise self._error


def nothing_is_left(client: rpc.Service, server: rpc.Server) -> bool:
    return len(channel(client).book) == len(callee(server).book) == len(server.running) == 0


@raised
async def test_a_method(net: Net, raised: str, caplog: pytest.LogCaptureFixture):
    client, server = await net.pair(Raising())
    for call in (client.method(raised), client.taking(raised, numbers_to(1))):
        assert await failure(call) == rpc.Error(Code.INTERNAL, "the service failed")
    with pytest.raises(rpc.Error, match="the service failed"):
        async for item in client.items(raised):
            assert item == 1
    assert server.stats()["method"].ended == {"INTERNAL": 1}
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "Raising.method raised what is no rpc.Error" in caplog.text
    assert await client.take(numbers_to(3)) == 3
    assert nothing_is_left(client, server)


@raised
async def test_the_end_of_a_cancelled_stream(net: Net, raised: str):
    service = Raising()
    client, server = await net.pair(service)
    stream = client.at_the_end(raised)
    assert await anext(stream) == 1
    await stream.aclose()  # type: ignore[attr-defined]
    await service.journal.until("ends")
    assert await client.take(numbers_to(3)) == 3  # the answer to what was cancelled came before
    assert nothing_is_left(client, server)


@raised
async def test_an_interceptor(net: Net, raised: str):
    async def raises(call: Any, proceed: Any) -> Any:
        await proceed()
        raise RAISED[raised]()

    client, server = await net.pair(Raising(), interceptors=[raises])
    assert await failure(client.take(numbers_to(3))) == rpc.Error(Code.INTERNAL, "the service failed")
    assert nothing_is_left(client, server)


@raised
async def test_what_cannot_be_encoded(net: Net, raised: str):
    """A result is a failure, also for the counters. An Error whose details cannot be sent goes without them."""
    client, server = await net.pair(Raising())
    assert (await failure(client.result(raised))).code is Code.INTERNAL
    assert server.stats()["result"].ended == {"INTERNAL": 1}
    assert await failure(client.details(raised)) == rpc.Error(Code.NOT_FOUND, "none")
    assert nothing_is_left(client, server)


@raised
async def test_what_cannot_be_decoded(net: Net, raised: str):
    """At either side."""
    client, server = await net.pair(Raising())
    value = Strict()
    value.how = raised
    error = await failure(client.argument(value))
    assert error.code in (Code.INVALID_ARGUMENT, Code.INTERNAL) and not error.begun
    assert (await failure(client.strict_details(raised))) == rpc.Error(Code.NOT_FOUND, "none")
    with pytest.raises(BaseException):  # noqa: B017  the class's own, unless it is an Exception
        await client.strict(raised)
    assert await client.take(numbers_to(3)) == 3
    assert nothing_is_left(client, server)


@raised
@pytest.mark.parametrize("where", ["generator", "item", "iterator"])
async def test_the_callers_stream(net: Net, raised: str, where: str):
    """What it raises, its call raises. None of it looks like the end of the stream."""
    client, server = await net.pair(Raising())
    for name in ("take", "echo"):
        error = RAISED[raised]()
        stream: Any = numbers(error) if where == "generator" else Bare(error, where == "iterator")
        call = getattr(client, name)(stream)
        if where == "item" and raised == "StopAsyncIteration":
            assert (await call if name == "take" else [item async for item in call]) in (0, [])
            continue
        with pytest.raises(BaseException) as caught:
            if name == "take":
                await call
            else:
                async for item in call:
                    assert item == 1
        assert caught.value is error or isinstance(caught.value, RuntimeError)
        if raised not in (
            "StopIteration",
            "StopAsyncIteration",
            "GeneratorExit",
        ):  # which Python changes as well
            assert caught.value is error
    assert await client.take(numbers_to(3)) == 3
    assert nothing_is_left(client, server)


class Ending(rpc.Service):
    async def method(self, by_name: str) -> None:
        raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[by_name]

    async def take(self, numbers: AsyncIterator[int]) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("where", ["method", "stream"])
def test_what_ends_the_program(name: str, where: str):
    """It comes out of the loop, and the caller has its answer."""
    error = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[name]
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio's own word for the task that has raised it
    stop = asyncio.Event()

    async def run(called: asyncio.Future[Any]) -> None:
        async with await rpc.serve(Ending(), "127.0.0.1", 0, transport="tcp") as server:
            address = server.sockets[0].getsockname()[:2]
            async with rpc.connect(Ending, *address, transport="tcp") as client:
                call = client.method(name) if where == "method" else client.take(numbers(error()))
                try:
                    await call
                except BaseException as exc:
                    called.set_result(exc)
                await stop.wait()

    called = loop.create_future()
    task = loop.create_task(run(called))
    with pytest.raises(error):
        loop.run_until_complete(task)
    found = loop.run_until_complete(asyncio.wait_for(called, LIMIT_S))
    assert (
        type(found) is error if where == "stream" else found == rpc.Error(Code.INTERNAL, "the service failed")
    )
    stop.set()
    loop.run_until_complete(task)
    loop.close()
