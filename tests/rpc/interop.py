"""What test_interop.py and test_interop_ends.py call: a service with methods of each kind, and how their calls end.

The cases are those of gRPC's interoperability tests, as far as rdmanet.rpc has the feature, and what gRPC lists there
as still to be written. (It has no compression, no credentials, and no metadata of the server's.)
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from net import Journal, Net

from rdmanet import rpc
from rdmanet.rpc import Code

WINDOW = 4096
SMALL = rpc.Limits(stream_bytes=WINDOW)
"""Streams stop soon."""
TIMEOUT_S = 5
"""Of calls whose time is over when a test says so: no other case reaches it."""
PATTERN = memoryview(random.Random(76).randbytes((2 << 20) + 1))


class Quota(msgspec.Struct):
    left: int
    names: list[str]


class Work(rpc.Service):
    """Methods whose names begin with `wait` wait for the gate, and say in the journal how they end."""

    def __init__(self, behind: "Work | None" = None) -> None:
        self.behind = behind
        self.journal = Journal()
        self.gate = asyncio.Event()
        self.given = 0
        self.deadline: float | None = None

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        self.deadline = rpc.deadline()
        self.journal("begins")
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):  # where it awaits, or where it yields
            self.journal("cancelled")
            raise
        else:
            self.journal("returns")

    async def empty(self) -> None: ...

    async def mirror(self, payload: memoryview) -> memoryview:
        return payload

    async def answer(self, payload: bytes, size: int) -> bytes:
        if payload != PATTERN[: len(payload)]:
            raise rpc.Error(Code.DATA_LOSS, "the argument is another one")
        return bytes(PATTERN[:size])

    async def aggregate(self, chunks: AsyncIterator[bytes]) -> int:
        return sum([len(chunk) async for chunk in chunks])

    async def give(self, sizes: list[int]) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(PATTERN[:size])

    async def duplex(self, requests: AsyncIterator[tuple[int, bytes]]) -> AsyncIterator[bytes]:
        async for size, _ in requests:
            yield bytes(PATTERN[:size])

    async def ask(self, answers: AsyncIterator[int]) -> AsyncIterator[int]:
        """The method asks, and the caller answers."""
        question = 0
        while question < 10:
            yield question
            question = await anext(answers)

    async def first(self, numbers: AsyncIterator[int]) -> int:
        return await anext(numbers)

    async def first_back(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        yield await anext(numbers)

    async def total_first(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        """Items after the end of the caller's stream."""
        yield sum([number async for number in numbers])
        for number in range(200):
            yield number

    async def count(self) -> AsyncIterator[int]:
        """For ever, and says how far."""
        with self._told():
            while True:
                self.given += 1
                yield self.given - 1

    async def wait(self) -> str:
        with self._told():
            await self.gate.wait()
            return "waited"

    async def wait_holding(self, payload: rpc.Buffer) -> int:
        with self._told():
            await self.gate.wait()
            return payload.nbytes

    async def wait_taking(self, numbers: AsyncIterator[int]) -> int:
        with self._told():
            found = await anext(numbers)
            self.journal("took one")
            await self.gate.wait()
            return found + sum([number async for number in numbers])

    async def wait_giving(self) -> AsyncIterator[int]:
        with self._told():
            yield 0
            await self.gate.wait()
            yield 1

    async def wait_both(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        with self._told():
            yield await anext(numbers)
            await self.gate.wait()
            async for number in numbers:
                yield number

    async def take_all(self, numbers: AsyncIterator[int]) -> int:
        with self._told():
            return sum([number async for number in numbers])

    async def take_none(self, numbers: AsyncIterator[int]) -> None:
        with self._told():
            await self.gate.wait()

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def cancel_itself_later(self) -> AsyncIterator[int]:
        yield 0
        raise asyncio.CancelledError

    async def fail(self, code: int, text: str) -> None:
        raise rpc.Error(Code(code), text)

    async def fail_after(self, code: int, text: str, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield number
        raise rpc.Error(Code(code), text)

    async def fail_while(self, numbers: AsyncIterator[int]) -> int:
        with self._told():
            raise rpc.Error(Code.ABORTED, f"at {await anext(numbers)}")

    @rpc.method(details=Quota)
    async def exceed(self) -> None:
        raise rpc.Error(Code.RESOURCE_EXHAUSTED, "too much", Quota(3, ["a", "ä"]))

    async def exceed_untyped(self) -> AsyncIterator[int]:
        yield 0
        raise rpc.Error(Code.RESOURCE_EXHAUSTED, "too much", {"left": 3, "at": [1.5, None, b"\xff"]})

    async def metadata(self) -> dict[str, Any]:
        return dict(rpc.metadata())

    async def metadata_by_items(self, names: AsyncIterator[str]) -> AsyncIterator[Any]:
        async for name in names:
            yield rpc.metadata()[name]

    async def through(self) -> str:
        with self._told():
            assert self.behind is not None
            return await self.behind.wait()

    async def through_stream(self) -> AsyncIterator[int]:
        with self._told():
            assert self.behind is not None
            async for item in self.behind.wait_giving():
                yield item

    @rpc.method(idempotent=True)
    async def wait_again(self) -> str:
        return await self.wait()


class Source:
    """A stream of the caller's: says how far it went, and when it was closed.

    :param count: so many numbers. None: without end
    :param error: is raised after these
    """

    def __init__(self, count: int | None, error: BaseException | None = None) -> None:
        self.count = count
        self.error = error
        self.sent = 0
        self.is_closed = False

    async def _iterate(self) -> AsyncIterator[int]:
        try:
            while self.count is None or self.sent < self.count:
                self.sent += 1
                yield self.sent - 1
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True

    def __aiter__(self) -> AsyncIterator[int]:
        return self._iterate()

    def __anext__(self) -> Awaitable[int]:
        raise TypeError("iterate by `async for`")


async def gated(gate: asyncio.Event) -> AsyncIterator[int]:
    """A stream of the caller's that waits after its first item."""
    yield 0
    await gate.wait()
    yield 1


def time_passes() -> None:
    """The clock of asyncio's loop goes on by TIMEOUT_S: timers that are due by then fire in the next turn."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + TIMEOUT_S  # type: ignore[method-assign]


async def listed(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def outcome(work: Awaitable[Any]) -> Any:
    """What it returns, or the Error that it raises."""
    try:
        return await work
    except rpc.Error as exc:
        return exc


async def items_and_error(items: AsyncIterator[Any]) -> tuple[list[Any], rpc.Error | None]:
    """What comes of a stream, and how it ends."""
    found: list[Any] = []
    try:
        async for item in items:
            found.append(item)
    except rpc.Error as exc:
        return found, exc
    return found, None


def said(error: rpc.Error) -> tuple[Code, bool]:
    """What a program asks an error for."""
    return error.code, error.begun


async def pair(net: Net, **options: Any) -> tuple[Work, Work, rpc.Server]:
    """(the client, the service, the server), with small windows in both directions unless it is said otherwise."""
    service = Work()
    limits = options.pop("limits", SMALL)
    server = await net.serve(service, limits=limits)
    return await net.connect(Work, server, **{"limits": limits, **options}), service, server


KINDS: dict[str, tuple[Callable[[Work, AsyncIterator[int]], Awaitable[Any]], Any]] = {
    "unary": (lambda client, _: client.wait(), "waited"),
    "client_stream": (lambda client, numbers: client.wait_taking(numbers), 1),
    "server_stream": (lambda client, _: listed(client.wait_giving()), [0, 1]),
    "both": (lambda client, numbers: listed(client.wait_both(numbers)), [0, 1]),
}
"""Calls that wait for the gate, and their results with `gated`."""
