"""Methods that run in threads: @rpc.method(thread=True)."""

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
from net import Journal, Net, callee, channel, failure, idle

from rdmanet import rpc
from rdmanet.rpc import Code, Limits
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.interceptors import Proceed
from rdmanet.rpc.lending import LEND_BYTES
from tests.support.waiting import begin

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


class Compute(rpc.Service):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.journal = Journal()
        self.gate = threading.Event()

    def _tell(self, entry: str) -> None:
        self.loop.call_soon_threadsafe(self.journal, entry)

    @rpc.method(thread=True)
    def square(self, number: int, *, twice: bool = False) -> int:
        return number * number * (2 if twice else 1)

    @rpc.method(thread=True)
    def where(self) -> str:
        return threading.current_thread().name

    @rpc.method(thread=True)
    def known(self) -> list[str]:
        rpc.set_trailing_metadata({"cost": "0.5"})
        who = rpc.peer()
        assert rpc.deadline() is not None and rpc.is_active()
        return [str(rpc.metadata()["tenant"]), tenant.get(), "" if who is None else who.transport]

    @rpc.method(thread=True)
    def fail(self, how: str) -> None:
        errors = {"told": rpc.Error(Code.NOT_FOUND, "there is none"), "stop": StopIteration(1)}
        raise errors.get(how) or ZeroDivisionError

    @rpc.method(thread=True)
    def double(self, array: numpy.ndarray, state: dict[str, numpy.ndarray]) -> numpy.ndarray:
        return array * 2 + state["bias"]

    @rpc.method(thread=True)
    def total(self, array: numpy.ndarray) -> int:
        self._tell("begins")
        self.gate.wait()
        self._tell(f"{rpc.is_active()} {int(array.sum())}")
        return int(array.sum())

    @rpc.method(thread=True, timeout=0.02)
    def brief(self) -> int:
        self.gate.wait()
        return 1

    @rpc.method(thread=True, calls=1)
    def alone(self) -> int:
        self._tell("begins")
        self.gate.wait()
        return 1

    async def both(self) -> int:
        return await self.square(2) + await self.square(3)

    async def answer(self) -> int:
        return 42


@contextlib.contextmanager
def opened(service: Compute) -> Iterator[None]:
    """A block at whose end no thread waits any more."""
    try:
        yield
    finally:
        service.gate.set()


async def test_results_and_errors(net: Net):
    service = Compute()
    client, server = await net.pair(service, send_tracebacks=True)
    assert await client.square(5) == 25 and await client.square(5, twice=True) == 50
    assert await client.both() == 13
    assert await service.square(3) == 9  # in the service's own program
    assert await failure(client.fail("told")) == rpc.Error(Code.NOT_FOUND, "there is none")
    error = await failure(client.fail("other"))
    assert error.code is Code.INTERNAL and "in fail" in str(error.traceback)
    error = await failure(client.fail("stop"))
    assert error.code is Code.INTERNAL and "StopIteration" in str(error.traceback)
    for size in (3, LEND_BYTES):
        array = numpy.arange(size, dtype="u1")
        bias = {"bias": numpy.ones(size, "u1")}
        assert (await client.double(array, bias) == array * 2 + 1).all()
    assert server.stats()["square"].ended == {"OK": 2}


async def test_the_loop_goes_on(net: Net):
    service = Compute()
    client, _ = await net.pair(service)
    with opened(service):
        (call,) = await begin(client.total(numpy.ones(5, "u1")))
        await service.journal.until("begins")
        assert await client.answer() == 42 and not call.done()
    assert await call == 5


async def test_the_programs_own_threads(net: Net):
    assert threading.current_thread().name != await (await net.pair(Compute()))[0].where()
    with ThreadPoolExecutor(1, "computes") as executor:
        server = await net.serve(Compute(), executor=executor)
        async with net.connecting(Compute, server) as client:
            assert (await client.where()).startswith("computes")
        await server.drain()


async def test_what_a_method_can_ask_and_say(net: Net):
    server = await net.serve(Compute(), carry=[tenant])
    client = await net.connect(Compute, server, carry=[tenant], timeout=60)
    said = rpc.Response()
    token = tenant.set("me")
    assert await rpc.options(client, response=said).known() == ["me", "me", net.transport]
    assert said.trailing_metadata == {"cost": "0.5"}
    tenant.reset(token)
    assert not rpc.is_active()


@pytest.mark.parametrize("how", ["deadline", "cancel", "lost"])
@pytest.mark.parametrize("size", [1000, LEND_BYTES])
async def test_a_call_that_ends_before_its_thread(net: Net, how: str, size: int):
    """The answer comes at once; place and memory are kept."""
    service = Compute()
    client, server = await net.pair(service)
    other = await net.connect(Compute, server)
    with opened(service):
        (call,) = await begin(client.total(numpy.ones(size, "u1")))
        await service.journal.until("begins")
        (running,) = server.running
        if how == "deadline":
            running.time_is_over()
            assert (await failure(call)).code is Code.DEADLINE_EXCEEDED
        elif how == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            channel(client).link.abort()
            assert (await failure(call)).code is Code.UNAVAILABLE
        for _ in range(20):  # whose memory is not that of the thread
            await other.double(numpy.full(size, 9, "u1"), {"bias": numpy.full(size, 9, "u1")})
        assert server.running == {running}
        assert server.shares.calls == 1 and server.shares.held_bytes >= size
        service.gate.set()
        await service.journal.until(f"False {size}")
        await idle(server)
        assert server.shares.calls == server.shares.held_bytes == 0 and running.code is not None


async def test_the_methods_own_time(net: Net):
    service = Compute()
    client, server = await net.pair(service)
    with opened(service):
        assert (await failure(client.brief())).code is Code.DEADLINE_EXCEEDED
    await idle(server)


async def test_who_waits_for_a_thread_and_is_cancelled_never_begins(net: Net):
    service = Compute()
    with ThreadPoolExecutor(1) as executor, opened(service):
        server = await net.serve(service, executor=executor)
        async with net.connecting(Compute, server) as client:
            (first,) = await begin(client.total(numpy.ones(5, "u1")))
            await service.journal.until("begins")
            late = await failure(rpc.options(client, timeout=0.02).total(numpy.ones(7, "u1")))
            assert late.code is Code.DEADLINE_EXCEEDED
            assert await client.answer() == 42
            service.gate.set()
            assert await first == 5
            assert await client.square(2) == 4
        await server.drain()
    assert service.journal.entries == ["begins", "True 5"]


async def test_the_executors_queue_is_bounded(net: Net):
    """Calls that nobody waits for any more count, while they are in it."""
    service = Compute()
    with ThreadPoolExecutor(1) as executor, opened(service):
        client, server = await net.pair(service, executor=executor, limits=Limits(calls=3))
        (first,) = await begin(client.total(numpy.ones(5, "u1")))
        await service.journal.until("begins")
        for _ in range(2):
            late = await failure(rpc.options(client, timeout=0.02).square(2))
            assert late.code is Code.DEADLINE_EXCEEDED
        error = await failure(client.square(2))
        assert error.code is Code.RESOURCE_EXHAUSTED and "has 3 unfinished calls" in error.text
        assert executor._work_queue.qsize() == 2
        service.gate.set()
        assert await first == 5
        await idle(server)
        assert await client.square(2) == 4 and server.shares.calls == 0


async def test_a_thread_that_goes_on_counts(net: Net):
    service = Compute()
    client, server = await net.pair(service, limits=Limits(calls=2))
    with opened(service):
        calls = await begin(*(client.total(numpy.ones(5, "u1")) for _ in range(2)))
        await service.journal.until("begins", 2)
        for running in list(server.running):
            running.time_is_over()
        for call in calls:
            assert (await failure(call)).code is Code.DEADLINE_EXCEEDED
        error = await failure(client.answer())
        assert error.code is Code.RESOURCE_EXHAUSTED and "has 2 unfinished calls" in error.text
    await idle(server)
    assert callee(server).book.left == 0 and await client.answer() == 42
    service.gate.clear()
    with opened(service):
        (call,) = await begin(client.alone())
        await service.journal.until("begins", 3)
        call.cancel()
        assert "calls of @rpc.method is 1" in (await failure(client.alone())).text
    await idle(server)
    assert await client.alone() == 1


async def test_draining_waits_for_threads(net: Net):
    service = Compute()
    server = await net.serve(service)
    client = await net.connect(Compute, server)
    with opened(service):
        (call,) = await begin(client.total(numpy.ones(5, "u1")))
        await service.journal.until("begins")
        (draining,) = await begin(server.drain(timeout=0.01))
        assert (await failure(call)).code is Code.CANCELLED
        assert not draining.done() and len(server.running) == 1
    await draining
    assert service.journal.entries == ["begins", "False 5"]


async def test_an_interceptor_that_does_not_wait(net: Net):
    async def hurry(call: CallInfo, proceed: Proceed) -> Any:
        (task,) = await begin(proceed())
        await service.journal.until("begins")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return -1

    service = Compute()
    server = await net.serve(service, interceptors=[hurry])
    client = await net.connect(Compute, server)
    with opened(service):
        assert await client.total(numpy.ones(5, "u1")) == -1
        assert len(server.running) == server.shares.calls == 1
    await idle(server)


async def test_a_client_whose_class_has_no_bodies(net: Net):
    class Base(rpc.Service):
        async def cube(self, number: int) -> int: ...  # type: ignore[empty-body]

    class Cubes(Base):
        @rpc.method(thread=True)
        def cube(self, number: int) -> int:
            return number**3

    assert await (await net.connect(Base, await net.serve(Cubes()))).cube(3) == 27


async def test_an_executor_that_is_over(net: Net):
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    client, _ = await net.pair(Compute(), executor=executor, send_tracebacks=True)
    error = await failure(client.square(1))
    assert error.code is Code.INTERNAL and "after shutdown" in str(error.traceback)


async def test_wrong_executors(net: Net):
    # By fork: from Python 3.14 on, the default starts a process that tracks semaphores, and stays.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        for wrong in (3, processes):
            with pytest.raises(TypeError, match=r"pass a concurrent\.futures\.ThreadPoolExecutor"):
                await rpc.serve(Compute(), "127.0.0.1", 0, executor=wrong)  # type: ignore[arg-type]


def test_wrong_methods():
    async def coroutine(self: Any) -> None: ...

    async def stream(self: Any) -> AsyncIterator[int]:
        yield 1

    def generator(self: Any) -> Iterator[int]:
        yield 1

    for wrong in (coroutine, stream, generator):
        with pytest.raises(TypeError, match=r"write `def` without `yield`, or leave thread=True out"):
            rpc.method(thread=True)(wrong)
    with pytest.raises(TypeError, match="thread=1 is neither True nor False"):
        rpc.method(thread=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"mark it with @rpc\.method\(thread=True\) if it computes"):

        class Plain(rpc.Service):
            def get(self) -> int:
                return 1

    with pytest.raises(TypeError, match="a stream, which a thread cannot take: take a list"):

        class Takes(rpc.Service):
            @rpc.method(thread=True)
            def get(self, numbers: AsyncIterator[int]) -> int:
                return 1

    with pytest.raises(TypeError, match="an rpc.Buffer, which a thread cannot read: take a memoryview"):

        class Reads(rpc.Service):
            @rpc.method(thread=True)
            def get(self, data: rpc.Buffer) -> int:
                return 1

    with pytest.raises(TypeError, match="cannot return a stream"):

        class Gives(rpc.Service):
            @rpc.method(thread=True)
            def get(self) -> AsyncIterator[int]:
                raise NotImplementedError
