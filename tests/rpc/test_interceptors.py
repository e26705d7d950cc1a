"""What goes along with calls, and around them: metadata, context variables, interceptors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
from net import Journal, Net, channel, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.interceptors import Proceed, Stepped, hand
from rdmanet.rpc.lending import LEND_BYTES
from tests.support.waiting import begin, loop_turns

tenant: ContextVar[str] = ContextVar("tenant")
trace: ContextVar[str] = ContextVar("trace", default="none")


class Work(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.behind: Any = None
        self.asked = asyncio.Event()

    async def metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in rpc.metadata().items()}

    async def carried(self) -> list[str]:
        return [tenant.get("nobody"), trace.get()]

    async def through(self) -> list[str]:
        return await self.behind.carried()  # type: ignore[no-any-return]

    async def take(self, data: memoryview) -> int:
        return data.nbytes

    async def count(self, until: int) -> AsyncIterator[int]:
        try:
            for number in range(until):
                yield number
                await asyncio.sleep(0)
        finally:
            self.journal("count ends")

    async def one_and_wait(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.journal("one_and_wait ends")

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def fail(self) -> None:
        raise rpc.Error(Code.NOT_FOUND, "there is none")

    async def get(self, count: int) -> memoryview:
        return memoryview(bytes(range(256)) * count)

    async def double(self, array: numpy.ndarray) -> numpy.ndarray:
        return array * 2

    async def later(self) -> None:
        async def look() -> None:
            await self.asked.wait()
            self.journal(f"later: {dict(rpc.metadata())}")

        self.journal(f"now: {dict(rpc.metadata())}")
        self.tasks = [asyncio.create_task(look())]

    async def wait(self) -> None:
        self.journal("wait")
        await asyncio.Event().wait()


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


async def test_metadata(net: Net):
    client, server = await net.pair(Work())
    assert await client.metadata() == {}
    named = rpc.options(client, metadata={"tenant": "a", "key": b"\0"})
    assert await named.metadata() == {"tenant": "a", "key": r"b'\x00'"}
    assert await rpc.options(named, timeout=5).metadata() != {}  # what is not given stays
    assert await rpc.options(named, metadata={}).metadata() == {}
    assert dict(rpc.metadata()) == {}
    retrying = await net.connect(Work, server, retry=rpc.Retry())
    assert await rpc.options(retrying, metadata={"a": "b"}).metadata() == {"a": "b"}
    with pytest.raises(TypeError):
        rpc.metadata()["x"] = "y"  # type: ignore[index]


async def test_wrong_metadata_is_not_sent(net: Net):
    client, _ = await net.pair(Work())
    for wrong in ({"a": 1}, {1: "a"}, {"x" * 257: "a"}, {"a": None}):
        with pytest.raises(TypeError, match="metadata: "):
            rpc.options(client, metadata=wrong)  # type: ignore[arg-type]
    with pytest.raises(rpc.Error, match="the limit metadata_bytes is 8192"):
        rpc.options(client, metadata={"a": "x" * 8192})


async def test_context_variables_go_with_calls(net: Net):
    inner = await net.serve(Work(), carry=[tenant, trace])
    service = Work()
    service.behind = await net.connect(Work, inner, carry=[tenant])
    outer = await net.serve(service, carry=[tenant])
    client = await net.connect(Work, outer, carry=[tenant, trace])
    assert await client.carried() == ["nobody", "none"]
    token = tenant.set("me")
    assert await client.carried() == ["me", "none"]
    assert await client.through() == ["me", "none"]
    assert await rpc.options(client, metadata={"tenant": "another"}).carried() == ["another", "none"]
    tenant.reset(token)


async def test_interceptors_of_a_server(net: Net):
    seen: list[str] = []

    async def log(call: CallInfo, proceed: Proceed) -> Any:
        seen.append(f"{call.service}.{call.method} {call.metadata} {call.deadline is not None}")
        try:
            return await proceed()
        finally:
            seen.append("ends")

    async def guard(call: CallInfo, proceed: Proceed) -> Any:
        if call.metadata.get("key") == "wrong":
            raise rpc.Error(Code.UNAUTHENTICATED, "who are you?")
        if call.method == "carried":
            return ["another", "result"]
        return await proceed()

    service = Work()
    server = await net.serve(service, interceptors=[log, guard])
    client = await net.connect(Work, server)
    assert (
        await rpc.options(client, timeout=5, metadata={"a": "b"}).take(memoryview(bytes(2 << 20))) == 2 << 20
    )
    assert seen == ["Work.take {'a': 'b'} True", "ends"]
    assert await client.carried() == ["another", "result"]
    assert (
        await failure(rpc.options(client, metadata={"key": "wrong"}).metadata())
    ).code is Code.UNAUTHENTICATED
    assert (await failure(client.fail())).code is Code.NOT_FOUND
    seen.clear()
    assert [number async for number in client.count(3)] == [0, 1, 2]
    assert seen == ["Work.count {} False", "ends"]  # it ended after the last item was sent
    assert await client.total(numbers()) == 3


async def test_a_method_finds_what_an_interceptor_puts_into_the_metadata(net: Net):
    async def sign(call: CallInfo, proceed: Proceed) -> Any:
        call.metadata["user"] = "b"
        assert rpc.metadata() == call.metadata and call.peer == rpc.peer()
        return await proceed()

    client = await net.connect(Work, await net.serve(Work(), interceptors=[sign]))
    assert await client.metadata() == {"user": "b"}
    assert await rpc.options(client, metadata={"tenant": "a"}).metadata() == {"tenant": "a", "user": "b"}


async def test_metadata_ends_with_the_call(net: Net):
    service = Work()
    client, _ = await net.pair(service)
    await rpc.options(client, metadata={"tenant": "a"}).later()
    service.asked.set()
    await service.journal.until("later: {}")
    assert service.journal.entries[0] == "now: {'tenant': 'a'}"


async def test_what_is_not_given_stays(net: Net):
    client, _ = await net.pair(Work())
    memory = bytearray(1 << 20)
    into = rpc.options(client, into=memory)
    both = rpc.options(into, timeout=5, metadata={"a": "b"})
    assert (await both.get(2)).nbytes == 512 and memory[:512] == bytes(range(256)) * 2
    again = rpc.options(both, into=None)
    assert (await again.get(1)).obj is not memory
    assert await again.metadata() == {"a": "b"}


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
async def test_interceptors_see_arrays_and_the_memory_of_the_caller(net: Net, retry: rpc.Retry | None):
    seen: list[Any] = []

    async def see(call: CallInfo, proceed: Proceed) -> Any:
        result = await proceed()
        seen.append(result)
        return result

    server = await net.serve(Work(), interceptors=[see])
    client = await net.connect(Work, server, interceptors=[see], retry=retry)
    array = numpy.arange(1 << 19, dtype="<f4")  # 2 MiB
    mine = numpy.zeros_like(array)
    result = await rpc.options(client, into=mine).double(array)
    assert result is mine and seen[1] is mine
    assert (mine == array * 2).all() and (seen[0] == mine).all()
    memory = bytearray(2 << 20)
    for count in (1, 2 << 12):  # in a message, by reference
        got = await rpc.options(client, into=memory).get(count)
        assert got.nbytes == count * 256 and got.obj is memory and seen[-1] is got
        assert memory[: count * 256] == bytes(range(256)) * count


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
async def test_a_stream_that_was_cancelled_says_so_through_interceptors(net: Net, retry: rpc.Retry | None):
    async def log(call: CallInfo, proceed: Proceed) -> Any:
        return await proceed()

    service = Work()
    server = await net.serve(service, interceptors=[log])
    client = await net.connect(Work, server, interceptors=[log], retry=retry)
    stream: Any = client.one_and_wait()
    assert await anext(stream) == 1
    (waiting,) = await begin(anext(stream))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(2):
        with pytest.raises(rpc.Error, match="this stream has ended: a task was cancelled"):
            await anext(stream)
    await service.journal.until("one_and_wait ends")


async def test_a_mistake_in_an_interceptor_is_internal(net: Net):
    async def broken(call: CallInfo, proceed: Proceed) -> Any:
        await proceed()
        return await proceed()

    client = await net.connect(Work, await net.serve(Work(), interceptors=[broken]))
    assert (await failure(client.carried())).code is Code.INTERNAL
    other = await net.connect(Work, await net.serve(Work()), interceptors=[broken])
    with pytest.raises(RuntimeError, match="may call proceed"):
        await other.carried()


async def test_interceptors_of_a_client(net: Net):
    seen: list[str] = []

    async def sign(call: CallInfo, proceed: Proceed) -> Any:
        call.metadata["signed"] = "yes"
        return await proceed()

    async def log(call: CallInfo, proceed: Proceed) -> Any:
        seen.append(f"{call!r} {sorted(call.metadata)}")
        try:
            return await proceed()
        except rpc.Error as exc:
            seen.append(exc.code.name)
            raise
        finally:
            seen.append("ends")

    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, interceptors=[sign, log], retry=rpc.Retry())
    assert await rpc.options(client, metadata={"a": "b"}).metadata() == {"a": "b", "signed": "yes"}
    assert seen == ["<call of Work.metadata> ['a', 'signed']", "ends"]
    seen.clear()
    stream = client.count(3)
    assert await anext(stream) == 0 and seen == ["<call of Work.count> ['signed']"]  # type: ignore[arg-type]
    assert [number async for number in stream] == [1, 2] and seen[1:] == ["ends"]
    seen.clear()
    assert await client.total(numbers()) == 3
    assert (await failure(client.fail())).code is Code.NOT_FOUND
    assert seen[-2:] == ["NOT_FOUND", "ends"]
    assert rpc.peer(client) is not None or net.is_by_name


async def test_leaving_a_stream_early_ends_the_interceptor(net: Net):
    journal = Journal()

    async def log(call: CallInfo, proceed: Proceed) -> Any:
        try:
            return await proceed()
        finally:
            await asyncio.sleep(0)
            journal("ends")

    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, interceptors=[log])
    stream: Any = client.count(1_000_000)
    assert await anext(stream) == 0
    await stream.aclose()
    assert journal.entries == ["ends"]
    await service.journal.until("count ends")
    (call,) = await begin(client.wait())
    await service.journal.until("wait")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert journal.entries == ["ends"] * 2
    inner = channel(client).inner  # type: ignore[attr-defined]
    assert len(inner.book) <= 2  # what was abandoned, and has no answer yet


async def test_leaving_a_stream_early_waits_for_what_all_interceptors_await(net: Net):
    """So does what the call has lent, which comes back when the server says so."""
    ended = []

    async def log(call: CallInfo, proceed: Proceed) -> Any:
        try:
            return await proceed()
        finally:
            await asyncio.sleep(0)
            ended.append(call.method)

    class Sums(rpc.Service):
        async def sums(self, numbers: numpy.ndarray) -> AsyncIterator[int]:
            for number in numbers:
                yield int(number)

    server = await net.serve(Sums())
    client = await net.connect(Sums, server, interceptors=[log, log])
    link = channel(client).inner.link  # type: ignore[attr-defined]
    free = link.loans_left
    async with contextlib.aclosing(client.sums(numpy.ones(LEND_BYTES, "u1"))) as numbers:  # type: ignore[type-var]
        assert await anext(numbers) == 1
    assert ended == ["sums"] * 2 and link.loans_left == free


async def test_a_coroutine_by_steps():
    async def work(hands: int) -> None:
        for number in range(hands):
            await asyncio.sleep(0)
            try:
                await hand(number)
            except KeyError:
                await hand("caught")

    assert [item async for item in Stepped(work(3))] == [0, 1, 2]
    assert [item async for item in Stepped(work(0))] == []
    stepped = Stepped(work(3))
    assert await anext(stepped) == 0
    await stepped.aclose()
    await stepped.aclose()
    await Stepped(work(1)).aclose()

    async def waiting() -> None:
        await asyncio.Event().wait()

    (taken,) = await begin(anext(Stepped(waiting())))  # type: ignore[arg-type]
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken

    async def failing() -> None:
        await hand(1)
        raise ValueError

    stepped = Stepped(failing())
    assert await anext(stepped) == 1
    with pytest.raises(ValueError):
        await anext(stepped)
    await stepped.aclose()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_stream_that_goes_on_after_its_call(net: Net, busy: bool):
    """An interceptor has answered, and left it: it sends nothing more, holds nothing, and ends."""
    left: list[asyncio.Task[Any]] = []

    class Endless(rpc.Service):
        async def count(self) -> AsyncIterator[int]:
            number = 0
            while True:
                yield number
                number += 1
                await asyncio.sleep(0)

    async def leave(call: rpc.CallInfo, proceed: Any) -> None:
        left.append(asyncio.create_task(proceed()))
        await loop_turns(10)

    limits = rpc.Limits(stream_bytes=100 if busy else 1 << 20)
    server = await net.serve(Endless(), interceptors=[leave])
    client = await net.connect(Endless, server, limits=limits)
    items = [item async for item in client.count()]
    assert items == list(range(len(items)))
    with pytest.raises(rpc.Error, match="has ended") as caught:
        await left[0]
    assert caught.value.code is rpc.Code.CANCELLED
    assert server.shares.held_bytes == 0 and server.shares.calls == 0
