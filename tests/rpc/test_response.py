"""What a method says beside its result: initial and trailing metadata."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
from net import Journal, Net, channel, failure
from numpy.typing import NDArray

from rdmanet import rpc
from rdmanet.rpc import Code, Limits
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.interceptors import Proceed
from rdmanet.rpc.lending import LEND_BYTES
from tests.support.waiting import begin, until_seen


class Work(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.go_on = asyncio.Event()

    async def plain(self) -> int:
        return 1

    async def say(self, initial: dict[str, str], trailing: dict[str, str]) -> int:
        await rpc.send_initial_metadata(initial)
        rpc.set_trailing_metadata(trailing)
        return 1

    async def fail(self, trailing: dict[str, str], key: bytes | None = None) -> None:
        rpc.set_trailing_metadata(trailing)
        if key is not None:
            rpc.set_trailing_metadata({"key": key})
        raise rpc.Error(Code.NOT_FOUND, "there is none")

    async def broken(self) -> None:
        rpc.set_trailing_metadata({"node": "3"})
        raise ZeroDivisionError

    async def slowly(self) -> str:
        await rpc.send_initial_metadata({"node": "3"})
        self.journal("said")
        await self.go_on.wait()
        await rpc.send_initial_metadata({"more": "4", "node": "5"})
        return "done"

    async def count(self, until: int, fails: bool = False) -> AsyncIterator[int]:
        await rpc.send_initial_metadata({"first": "0"})
        for number in range(until):
            yield number
        rpc.set_trailing_metadata({"last": str(until)})
        if fails:
            raise rpc.Error(Code.ABORTED, "enough")

    async def late(self) -> AsyncIterator[int]:
        yield 1
        await rpc.send_initial_metadata({"first": "1"})
        yield 2

    async def total(self, numbers: AsyncIterator[int]) -> int:
        total = sum([number async for number in numbers])
        rpc.set_trailing_metadata({"total": str(total)})
        return total

    async def double(self, array: numpy.ndarray) -> numpy.ndarray:
        rpc.set_trailing_metadata({"bytes": str(array.nbytes)})
        return array * 2

    async def state(self, size: int) -> dict[str, NDArray[numpy.uint8]]:
        rpc.set_trailing_metadata({"bytes": str(size)})
        return {"w": numpy.full(size, 7, "u1")}

    async def wrong(self, what: str) -> None:
        given: dict[str, Any] = {"number": {"a": 1}, "name": {"x" * 257: "a"}, "long": {"a": "x" * 9000}}
        await rpc.send_initial_metadata(given[what])

    async def afterwards(self) -> None:
        async def look() -> None:
            await self.go_on.wait()
            try:
                rpc.set_trailing_metadata({"a": "b"})
            except RuntimeError as exc:
                self.journal(str(exc))

        self.task = asyncio.create_task(look())


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


async def test_a_caller_reads_what_the_method_says(net: Net):
    client, server = await net.pair(Work())
    said = rpc.Response()
    hearing = rpc.options(client, response=said)
    assert await hearing.say({"node": "3"}, {"cost": "0.5"}) == 1
    assert said.initial_metadata == {"node": "3"} and said.trailing_metadata == {"cost": "0.5"}
    assert await said.wait_initial() == {"node": "3"}
    assert await hearing.plain() == 1  # which says nothing
    assert said.initial_metadata == said.trailing_metadata == {} == await said.wait_initial()
    assert await client.say({"node": "3"}, {"cost": "0.5"}) == 1  # which nobody hears
    assert said.initial_metadata == {}
    assert await rpc.options(hearing, response=None).say({}, {"a": "b"}) == 1
    retrying = await net.connect(Work, server, retry=rpc.Retry())
    assert await rpc.options(retrying, response=said).say({"a": "b"}, {}) == 1
    assert said.initial_metadata == {"a": "b"} and said.trailing_metadata == {}


async def test_initial_metadata_comes_before_the_result(net: Net):
    service = Work()
    client, _ = await net.pair(service)
    said = rpc.Response()
    (call,) = await begin(rpc.options(client, response=said).slowly())
    assert await said.wait_initial() == {"node": "3"} and not call.done()
    service.go_on.set()
    assert await call == "done"
    assert said.initial_metadata == {"node": "5", "more": "4"}  # calls add up


async def test_waiting_for_initial_metadata_can_be_cancelled_and_ends_with_the_call(net: Net):
    client, _ = await net.pair(Work())
    said = rpc.Response()
    one, other = await begin(said.wait_initial(), said.wait_initial())
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert not other.done()
    assert await rpc.options(client, response=said).plain() == 1
    assert await other == {}


async def test_an_error_carries_the_trailers(net: Net):
    client, server = await net.pair(Work())
    error = await failure(client.fail({"cost": "0.5"}, b"\0"))
    assert error == rpc.Error(Code.NOT_FOUND, "there is none")
    assert error.trailing_metadata == {"cost": "0.5", "key": b"\0"}
    assert pickle.loads(pickle.dumps(error)).trailing_metadata == error.trailing_metadata
    said = rpc.Response()
    again = await failure(rpc.options(client, response=said).fail({"cost": "0.7"}))
    assert said.trailing_metadata == again.trailing_metadata == {"cost": "0.7"}
    assert (await failure(client.fail({}))).trailing_metadata == {}
    internal = await failure(client.broken())
    assert internal.code is Code.INTERNAL and internal.trailing_metadata == {"node": "3"}
    late = await failure(rpc.options(client, timeout=0).plain())
    assert late.code is Code.DEADLINE_EXCEEDED and late.trailing_metadata == {}


async def test_the_trailers_of_another_server_are_not_passed_on(net: Net):
    class Front(rpc.Service):
        async def fail(self) -> None:
            await behind.fail({"secret": "x"})

    behind, _ = await net.pair(Work())
    front, _ = await net.pair(Front())
    error = await failure(front.fail())
    assert error.code is Code.NOT_FOUND and error.trailing_metadata == {}


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
async def test_streams(net: Net, retry: rpc.Retry | None):
    server = await net.serve(Work())
    client = await net.connect(Work, server, retry=retry)
    said = rpc.Response()
    hearing = rpc.options(client, response=said)
    stream: Any = hearing.count(3)
    assert await anext(stream) == 0
    assert said.initial_metadata == {"first": "0"}
    assert [number async for number in stream] == [1, 2]
    assert said.trailing_metadata == {"last": "3"}
    found: list[int] = []
    with pytest.raises(rpc.Error) as caught:
        async for number in hearing.count(2, fails=True):
            found.append(number)
    assert found == [0, 1] and caught.value.trailing_metadata == said.trailing_metadata == {"last": "2"}
    assert await hearing.total(numbers()) == 3 and said.trailing_metadata == {"total": "3"}
    assert [number async for number in client.count(2)] == [0, 1]
    left: Any = hearing.count(1_000_000)
    assert await anext(left) == 0
    await left.aclose()
    assert await hearing.plain() == 1  # the Response is free again


async def test_initial_metadata_after_an_item_is_refused(net: Net):
    client, _ = await net.pair(Work(), send_tracebacks=True)
    stream: Any = client.late()
    assert await anext(stream) == 1
    with pytest.raises(rpc.Error) as caught:
        await anext(stream)
    assert caught.value.code is Code.INTERNAL
    assert "before the first yield" in (caught.value.traceback or "")


@pytest.mark.parametrize("size", [1, 700_000, LEND_BYTES])
async def test_long_results_have_trailers_too(net: Net, size: int):
    client, _ = await net.pair(Work())
    said = rpc.Response()
    hearing = rpc.options(client, response=said)
    array = numpy.arange(size, dtype="u1")
    assert (await hearing.double(array) == array * 2).all()
    assert said.trailing_metadata == {"bytes": str(size)}
    assert (await hearing.state(size))["w"].sum() == 7 * size
    assert said.trailing_metadata == {"bytes": str(size)}


async def test_interceptors_add_and_see(net: Net):
    seen: list[Any] = []

    async def sign(call: CallInfo, proceed: Proceed) -> Any:
        call.trailing_metadata["before"] = "1"
        await rpc.send_initial_metadata({"node": "0"})
        try:
            return await proceed()
        finally:
            call.trailing_metadata["after"] = "2"
            assert call.initial_metadata["node"] in "03"

    async def look(call: CallInfo, proceed: Proceed) -> Any:
        try:
            return await proceed()
        finally:
            seen.append((dict(call.initial_metadata), dict(call.trailing_metadata)))
            call.trailing_metadata["seen"] = "3"

    server = await net.serve(Work(), interceptors=[sign])
    client = await net.connect(Work, server, interceptors=[look])
    assert await client.say({"node": "3"}, {"cost": "0.5"}) == 1
    assert seen == [({"node": "3"}, {"before": "1", "cost": "0.5", "after": "2"})]
    said = rpc.Response()
    hearing = rpc.options(client, response=said)
    assert await hearing.plain() == 1
    assert said.initial_metadata == {"node": "0"}
    assert said.trailing_metadata == {"before": "1", "after": "2", "seen": "3"}
    error = await failure(client.fail({}))
    assert error.trailing_metadata == {"before": "1", "after": "2", "seen": "3"}
    assert [number async for number in hearing.count(2)] == [0, 1]
    assert said.trailing_metadata == {"before": "1", "last": "2", "after": "2", "seen": "3"}


async def test_what_an_interceptor_puts_there_is_checked(net: Net):
    async def broken(call: CallInfo, proceed: Proceed) -> Any:
        call.trailing_metadata["a"] = 1 if call.method == "plain" else "x" * 9000  # type: ignore[assignment]
        return await proceed()

    server = await net.serve(Work(), interceptors=[broken], send_tracebacks=True)
    client = rpc.options(await net.connect(Work, server), response=rpc.Response())
    error = await failure(client.plain())
    assert error.code is Code.INTERNAL and "'a' is 1, and must be a str or bytes" in str(error.traceback)
    error = await failure(client.double(numpy.zeros(LEND_BYTES, "u1")))
    assert error.code is Code.RESOURCE_EXHAUSTED and "the limit metadata_bytes is 8192" in error.text


async def test_wrong_uses_say_what_to_do(net: Net):
    service = Work()
    client, _ = await net.pair(service, send_tracebacks=True)
    with pytest.raises(TypeError, match=r"is no rpc\.Response: make one"):
        rpc.options(client, response={})  # type: ignore[arg-type]
    for what, says in (("number", "must be a str or bytes"), ("name", "at most 256 characters")):
        error = await failure(client.wrong(what))
        assert error.code is Code.INTERNAL and says in str(error.traceback)
    error = await failure(client.wrong("long"))
    assert error.code is Code.RESOURCE_EXHAUSTED and "metadata_bytes is 8192" in error.text
    with pytest.raises(RuntimeError, match="does not run in a method"):
        rpc.set_trailing_metadata({"a": "b"})
    with pytest.raises(RuntimeError, match="does not run in a method"):
        await rpc.send_initial_metadata({"a": "b"})
    await client.afterwards()
    service.go_on.set()
    await service.task
    assert "or its call has its answer" in service.journal.entries[-1]
    said = rpc.Response()
    hearing = rpc.options(client, response=said)
    service.go_on.clear()
    (call,) = await begin(hearing.slowly())
    await service.journal.until("said")
    with pytest.raises(RuntimeError, match=r"give each call a Response of its own"):
        await hearing.plain()
    with pytest.raises(RuntimeError, match=r"give each call a Response of its own"):
        _ = [number async for number in hearing.count(1)]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await hearing.plain() == 1


async def test_a_hedged_call_has_what_its_winner_says(net: Net):
    class Node(rpc.Service):
        def __init__(self, name: str) -> None:
            self.name = name
            self.is_slow = False

        @rpc.method(idempotent=True)
        async def who(self) -> str:
            await rpc.send_initial_metadata({self.name: "begins"})
            rpc.set_trailing_metadata({"node": self.name})
            if self.is_slow:
                await asyncio.Event().wait()
            return self.name

    nodes = [Node("a"), Node("b")]
    where = [net.address(await net.serve(node)) for node in nodes]
    servers: Any = [each[0] if len(each) == 1 else each for each in where]
    retry = rpc.Retry(hedge_seconds=0.01)
    async with rpc.connect(Node, servers, transport=net.transport, policy="spread", retry=retry) as client:
        await until_seen(lambda: all(slot.usable for slot in channel(client)._slots))  # type: ignore[attr-defined]
        said = rpc.Response()
        for slow, quick in (nodes, reversed(nodes)):
            slow.is_slow, quick.is_slow = True, False
            for _ in range(3):
                assert await rpc.options(client, response=said).who() == quick.name
                assert said.trailing_metadata == {"node": quick.name}
                assert said.initial_metadata == {quick.name: "begins"}


async def test_a_call_that_is_made_again_forgets_what_the_first_try_said(net: Net):
    class Twice(rpc.Service):
        tries = 0

        @rpc.method(idempotent=True)
        async def get(self) -> int:
            self.tries += 1
            await rpc.send_initial_metadata({f"try {self.tries}": "begins"})
            rpc.set_trailing_metadata({"try": str(self.tries)})
            if self.tries == 1:
                raise rpc.Error(Code.ABORTED, "once more")
            return self.tries

    server = await net.serve(Twice())
    client = await net.connect(Twice, server, retry=rpc.Retry(codes=[Code.ABORTED], first_seconds=0.01))
    said = rpc.Response()
    assert await rpc.options(client, response=said).get() == 2
    assert said.initial_metadata == {"try 2": "begins"} and said.trailing_metadata == {"try": "2"}


async def test_a_caller_with_less_room_gets_an_error(net: Net):
    server = await net.serve(Work())
    client = await net.connect(Work, server, limits=Limits(metadata_bytes=100))
    hearing = rpc.options(client, response=rpc.Response())
    for initial, trailing in (({}, {"a": "x" * 200}), ({"a": "x" * 200}, {})):
        error = await failure(hearing.say(initial, trailing))
        assert error.code is Code.RESOURCE_EXHAUSTED
        assert "the method's " in error.text and "the limit metadata_bytes is 100" in error.text
    error = await failure(client.fail({"a": "x" * 200}))  # the error itself is what matters
    assert error.code is Code.NOT_FOUND and error.trailing_metadata == {}
    assert await hearing.plain() == 1


def test_a_client_without_a_loop(tmp_path: Any):
    async def serve(ready: asyncio.Future[Any]) -> None:
        async with await rpc.serve(Work(), f"{tmp_path}/s", transport="unix"):
            ready.set_result(None)
            await asyncio.to_thread(script)

    def script() -> None:
        said = rpc.Response()
        with rpc.blocking.connect(Work, f"{tmp_path}/s", transport="unix") as client:
            hearing = rpc.blocking.options(client, response=said)
            assert hearing.say({"a": "b"}, {"c": "d"}) == 1
            assert said.initial_metadata == {"a": "b"} and said.trailing_metadata == {"c": "d"}
            assert list(hearing.count(2)) == [0, 1] and said.trailing_metadata == {"last": "2"}

    async def main() -> None:
        await serve(asyncio.get_running_loop().create_future())

    asyncio.run(main())
