"""Streams in both directions: order, credit, back-pressure, and how they end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from net import Journal, Net, callee, channel

from rdmanet import rpc
from rdmanet.rpc import Code, streaming
from tests.support.waiting import begin, loop_turns

WINDOW = 4096


class Example(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.sent = 0
        self.gate = asyncio.Event()

    async def slow(self) -> AsyncIterator[int]:
        try:
            yield 0
            await self.gate.wait()
            yield 1
        finally:
            self.journal("slow ends")

    async def count(self, number: int, fail: bool = False) -> AsyncIterator[int]:
        try:
            for value in range(number):
                self.sent = value + 1
                yield value
            if fail:
                raise rpc.Error(Code.OUT_OF_RANGE, "no more")
        finally:
            self.journal("count ends")

    async def total(self, start: int, numbers: AsyncIterator[int]) -> int:
        async for number in numbers:
            self.journal("took one")
            start += number
        return start

    async def before(self, a: int, numbers: AsyncIterator[int], /, b: int = 0, *, c: int = 0) -> list[int]:
        return [a, b, c, *[number async for number in numbers]]

    async def by_name(self, a: int, b: int = 0, *, numbers: AsyncIterator[int], c: int = 0) -> list[int]:
        return [a, b, c, *[number async for number in numbers]]

    async def first(self, numbers: AsyncIterator[int]) -> int:
        return await anext(numbers)

    async def leave(self, numbers: AsyncIterator[int]) -> None:
        self.left = asyncio.ensure_future(self.total(0, numbers))
        await self.journal.until("took one", 3)

    async def chunks(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            assert type(chunk) is bytes
            yield chunk

    async def views(self) -> AsyncIterator[memoryview]:
        yield memoryview(b"view")

    @rpc.method(outlives_connection=True)
    async def survive(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1000)
        finally:
            self.journal("survive ends")

    async def hang(self, numbers: AsyncIterator[int]) -> None:
        try:
            self.journal("hang begins")
            await asyncio.Event().wait()
        finally:
            self.journal("hang ends")

    async def multiply(self, factor: int, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield factor * number

    async def texts(self, texts: AsyncIterator[str]) -> list[str]:
        return [text async for text in texts]


class Numbers:
    """A stream of the caller's that remembers how far it went, and whether it was closed."""

    def __init__(self, stop: int | None, error: BaseException | None = None) -> None:
        self.journal = Journal()
        self.sent = 0
        self._stop = stop
        self._error = error

    def __aiter__(self) -> AsyncIterator[int]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[int]:
        try:
            while self._stop is None or self.sent < self._stop:
                self.sent += 1
                yield self.sent - 1
            if self._error is not None:
                raise self._error
        finally:
            self.journal("closed")


LIMITS = rpc.Limits(stream_bytes=WINDOW)


async def pair(net: Net) -> tuple[Example, Example, rpc.Server]:
    """(the client, the service, the server), with small windows in both directions."""
    service = Example()
    server = await net.serve(service, limits=LIMITS)
    return await net.connect(Example, server, limits=LIMITS), service, server


def nothing_is_left(client: Example, server: rpc.Server) -> bool:
    return len(channel(client).book) == len(callee(server).book) == len(server.running) == 0


@pytest.mark.parametrize("number", [0, 1, 1000])
async def test_streams(net: Net, number: int):
    client, _, server = await pair(net)
    assert [item async for item in client.count(number)] == list(range(number))
    assert await client.total(5, Numbers(number)) == 5 + sum(range(number))  # type: ignore[arg-type]
    doubled = client.multiply(2, Numbers(number))  # type: ignore[arg-type]
    assert [item async for item in doubled] == [2 * value for value in range(number)]
    assert nothing_is_left(client, server)


async def test_a_callers_stream_at_any_place(net: Net):
    client, _ = await net.pair(Example())
    assert await client.before(1, Numbers(3), 5, c=6) == [1, 5, 6, 0, 1, 2]  # type: ignore[arg-type]
    assert await client.before(1, Numbers(1)) == [1, 0, 0, 0]  # type: ignore[arg-type]
    assert await client.by_name(1, numbers=Numbers(3)) == [1, 0, 0, 0, 1, 2]  # type: ignore[arg-type]
    assert await client.by_name(1, 5, c=6, numbers=Numbers(1)) == [1, 5, 6, 0]  # type: ignore[arg-type]


async def test_streams_of_bytes(net: Net):
    client, _, _ = await pair(net)

    async def chunks() -> AsyncIterator[bytes]:
        for size in (0, 1, 1000):
            yield bytes(size)

    found = [chunk async for chunk in client.chunks(chunks())]
    assert found == [bytes(0), bytes(1), bytes(1000)] and {type(chunk) for chunk in found} == {bytes}
    (view,) = [view async for view in client.views()]
    assert type(view) is memoryview and view == b"view" and view.readonly


async def test_many_at_once(net: Net):
    client, _, _ = await pair(net)

    async def one(factor: int) -> int:
        return sum([item async for item in client.multiply(factor, Numbers(300))])  # type: ignore[arg-type]

    expected = sum(range(300))
    assert await asyncio.gather(*map(one, range(20))) == [factor * expected for factor in range(20)]


async def test_a_reader_that_waits_holds_up_the_callee(net: Net):
    client, service, _ = await pair(net)
    stream = client.count(100_000)
    assert await anext(stream) == 0
    assert await client.first(Numbers(1)) == 0  # type: ignore[arg-type]  # all that was to come has come
    await loop_turns(10)
    # An item costs 65 to 67 bytes.
    assert service.sent <= WINDOW // 65 + 3
    assert [await anext(stream) for _ in range(500)] == list(range(1, 501))
    assert service.sent > 500
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_handler_that_does_not_read_holds_up_the_caller(net: Net):
    client, service, _ = await pair(net)
    numbers = Numbers(None)
    (call,) = await begin(client.hang(numbers))  # type: ignore[arg-type]
    await service.journal.until("hang begins")
    assert await client.first(Numbers(1)) == 0  # type: ignore[arg-type]
    await loop_turns(10)
    assert numbers.sent <= WINDOW // 65 + 3
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await service.journal.until("hang ends")
    assert numbers.journal.entries == ["closed"]


async def test_a_reader_that_leaves_ends_the_callee(net: Net):
    client, service, server = await pair(net)
    async with contextlib.aclosing(client.count(100_000)) as stream:  # type: ignore[type-var]
        async for item in stream:
            if item == 3:
                break
    await service.journal.until("count ends")
    assert await client.total(0, Numbers(1)) == 0  # type: ignore[arg-type]
    assert nothing_is_left(client, server)


async def test_a_stream_that_nobody_asks_begins_nothing(net: Net):
    client, service, server = await pair(net)
    await client.count(10).aclose()  # type: ignore[attr-defined]
    assert service.sent == 0 and nothing_is_left(client, server)


async def test_errors_after_items(net: Net):
    client, _, server = await pair(net)
    stream = client.count(3, fail=True)
    found = []
    with pytest.raises(rpc.Error, match="OUT_OF_RANGE: no more"):
        async for item in stream:
            found.append(item)
    assert found == [0, 1, 2]
    assert nothing_is_left(client, server)


async def test_an_error_of_the_callers_stream(net: Net):
    client, _, server = await pair(net)
    for call in (
        client.total(0, Numbers(10, ValueError("mine"))),  # type: ignore[arg-type]
        anext(client.multiply(0, Numbers(0, ValueError("mine")))),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="mine"):
            await call
    assert await client.total(0, Numbers(3)) == 3  # type: ignore[arg-type]
    assert nothing_is_left(client, server)


async def test_a_callers_stream_that_is_cancelled_by_itself(net: Net):
    """By a task that it awaits, say: nobody has cancelled the call."""
    client, service, server = await pair(net)
    for call in (
        client.hang(Numbers(0, asyncio.CancelledError())),  # type: ignore[arg-type]
        anext(client.multiply(0, Numbers(0, asyncio.CancelledError()))),  # type: ignore[arg-type]
    ):
        with pytest.raises(rpc.Error, match="CANCELLED: the caller's stream was cancelled"):
            await call
    assert await client.total(0, Numbers(3)) == 3  # type: ignore[arg-type]
    assert nothing_is_left(client, server)


async def test_a_callers_stream_that_does_not_end(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(streaming, "END_S", 0.01)
    gate = asyncio.Event()

    async def stubborn() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await gate.wait()

    client, service, server = await pair(net)
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await rpc.options(client, timeout=0.05).hang(stubborn())
    assert "rpc stream to Example.hang was cancelled 0.01 s ago, and has not ended" in caplog.text
    await service.journal.until("hang ends")
    (task,) = streaming._left
    gate.set()
    await asyncio.wait([task])
    assert not streaming._left and nothing_is_left(client, server)


async def test_cancelling_the_wait_for_an_item_ends_the_stream_and_says_so(net: Net):
    client, service, server = await pair(net)
    stream = client.slow()
    assert await anext(stream) == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    await service.journal.until("slow ends")
    for _ in range(2):
        with pytest.raises(rpc.Error, match="CANCELLED: this stream has ended: a task was cancelled"):
            await anext(stream)
    with pytest.raises(rpc.Error, match="CANCELLED"):
        async for _ in stream:
            pass
    assert await client.total(0, Numbers(1)) == 0  # type: ignore[arg-type]
    assert nothing_is_left(client, server)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_waiting_for_an_item_for_some_time(net: Net):
    """As the manual says: the task that waits is kept."""
    client, service, _ = await pair(net)
    stream = client.slow()
    assert await anext(stream) == 0
    (item,) = await begin(anext(stream))
    assert await asyncio.wait([item], timeout=0.01) == (set(), {item})
    service.gate.set()
    assert await item == 1
    await stream.aclose()  # type: ignore[attr-defined]


async def test_an_answer_before_the_end_of_the_callers_stream(net: Net):
    client, _, server = await pair(net)
    numbers = Numbers(None)
    assert await client.first(numbers) == 0  # type: ignore[arg-type]
    assert numbers.journal.entries == ["closed"]
    assert await client.total(0, Numbers(3)) == 3  # type: ignore[arg-type]  # late items were dropped
    assert nothing_is_left(client, server)


async def test_a_task_that_takes_items_of_an_answered_call(net: Net):
    client, service, server = await pair(net)
    await client.leave(Numbers(None))  # type: ignore[arg-type]
    with pytest.raises(rpc.Error, match="has ended"):
        await service.left
    assert await client.total(0, Numbers(3)) == 3  # type: ignore[arg-type]  # the connection is there
    assert nothing_is_left(client, server)


async def test_a_stream_that_outlives_its_connection_ends_at_its_next_item(net: Net):
    client, service, _ = await pair(net)
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):
        async for _ in client.survive():
            channel(client).link.abort()
    await service.journal.until("survive ends")


async def test_items_of_the_wrong_type(net: Net):
    client, _, _ = await pair(net)
    with pytest.raises(rpc.Error, match="Expected `str`, got `int`") as caught:
        await client.texts(Numbers(3))  # type: ignore[arg-type]
    assert caught.value.code is Code.INVALID_ARGUMENT


async def test_a_deadline_ends_a_stream(net: Net):
    client, service, server = await pair(net)
    slow = rpc.options(client, timeout=0.02)
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        async for _ in slow.count(1 << 40):
            await asyncio.sleep(0.001)
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await slow.hang(Numbers(None))  # type: ignore[arg-type]
    await service.journal.until("hang ends")
    await service.journal.until("count ends")


async def test_a_lost_connection_ends_streams(net: Net):
    client, service, _ = await pair(net)
    stream = client.count(1 << 40)
    await anext(stream)
    numbers = Numbers(None)
    (call,) = await begin(client.hang(numbers))  # type: ignore[arg-type]
    await service.journal.until("hang begins")
    channel(client).link.transport.abort()
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):
        async for _ in stream:
            pass
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):
        await call
    await service.journal.until("hang ends")
    await service.journal.until("count ends")
    assert numbers.journal.entries == ["closed"]
