"""A call that fails leaves no reference cycles: its arguments are the caller's again when the error is dropped.

An exception refers to the frames that it went through, and these to their variables. Whoever keeps an exception, in a
future, say, and raises it in a frame that refers to what keeps it, makes a cycle, which has the arguments of the call
until the garbage collector comes by. So here the collector is off, and arguments are watched at both sides.
"""

import asyncio
import contextlib
import gc
import socket
import struct
import types
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import numpy
import pytest
from net import Journal, Net, callee, idle

from rdmanet import rpc
from rdmanet.rpc import Code, fetching, taking
from rdmanet.rpc.messenger import logger
from tests.support.waiting import begin, loop_turns, until_seen

QUICK = rpc.Retry(first_seconds=0.001, most_seconds=0.002, attempts=3)
INLINE, LENT = 1000, 2 << 20


class Holds(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.gate = asyncio.Event()
        self.seen: list[weakref.ref[Any]] = []

    def _saw(self, data: Any) -> None:
        self.seen.append(weakref.ref(data))
        self.journal("saw")

    async def fail(self, data: numpy.ndarray, how: str) -> None:
        self._saw(data)
        if how == "error":
            raise rpc.Error(Code.NOT_FOUND, "no")
        if how == "mistake":
            raise ValueError("no")
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "unsendable":
            return asyncio.Lock()  # type: ignore[return-value]
        if how == "wrong":
            return 1  # type: ignore[return-value]
        await self.gate.wait()

    async def items(self, data: numpy.ndarray, how: str) -> AsyncIterator[int]:
        self._saw(data)
        yield "1" if how == "wrong" else 1  # type: ignore[misc]
        await self.fail(data, how)

    async def take(self, data: numpy.ndarray, how: str, numbers: AsyncIterator[int]) -> None:
        self._saw(data)
        async for _ in numbers:
            await self.fail(data, how)

    async def echo(self, data: numpy.ndarray, how: str, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        self._saw(data)
        async for number in numbers:
            yield number
            await self.fail(data, how)

    async def patient(self, data: numpy.ndarray, numbers: AsyncIterator[int]) -> None:
        """Asks again for what it does not get."""
        self._saw(data)
        for _ in range(2):
            with contextlib.suppress(rpc.Error):
                async for _ in numbers:
                    pass
        self.journal("patient ends")

    @rpc.method(idempotent=True)
    async def again(self, data: numpy.ndarray) -> None:
        self._saw(data)
        await self.gate.wait()


async def numbers(error: type[BaseException] | None = None) -> AsyncIterator[int]:
    yield 1
    if error is not None:
        raise error("mine")  # not an object that this frame has
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what is logged, and with it the errors of methods."""
    monkeypatch.setattr(logger, "disabled", True)


@contextlib.contextmanager
def without_collector(leaves_nothing: bool = True) -> Iterator[None]:
    """A block that may leave no exception, no frame and no traceback to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (BaseException, types.FrameType, types.TracebackType)
        left = [repr(each)[:200] for each in gc.garbage if isinstance(each, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()
    assert left == [] or not leaves_nothing


class Watch:
    """Arguments that are watched, at both sides."""

    def __init__(self, service: Holds) -> None:
        self._service = service
        self._given: list[weakref.ref[Any]] = []

    def array(self, size: int) -> Any:
        array = numpy.ones(size, "u1")
        self._given.append(weakref.ref(array))
        return array

    async def is_over(self, server: rpc.Server) -> bool:
        """Once nothing runs any more, nobody has any of them."""
        await idle(server)
        await loop_turns(5)
        await until_seen(lambda: all(found() is None for found in [*self._given, *self._service.seen]))
        return bool(self._given)


async def dropped(work: Awaitable[Any]) -> type[BaseException]:
    """Wait for a call that fails, and drop its error; returns its class."""
    try:
        await work
    except BaseException as exc:
        return type(exc)
    finally:
        del work  # a task has its error, and that has this frame
    raise AssertionError("it did not fail")


async def listed(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


def make(client: Holds, method: str, data: Any, how: str) -> Awaitable[Any]:
    """A call of this kind."""
    call = getattr(client, method)
    if method == "fail":
        return call(data, how)  # type: ignore[no-any-return]
    if method == "items":
        return listed(call(data, how))
    return call(data, how, numbers()) if method == "take" else listed(call(data, how, numbers()))


async def passes(_: Any, proceed: Any) -> Any:
    return await proceed()


CLIENTS: dict[str, dict[str, Any]] = {"plain": {}, "both": {"interceptors": [passes], "retry": QUICK}}
methods = pytest.mark.parametrize("method", ["fail", "items", "take", "echo"])
sizes = pytest.mark.parametrize("size", [INLINE, LENT])
clients = pytest.mark.parametrize("kind", CLIENTS)


async def watched(net: Net, kind: str = "plain", **options: Any) -> tuple[Holds, rpc.Server, Holds, Watch]:
    """A service, its server with these options, a client of this kind, and what is passed to it."""
    service = Holds()
    server = await net.serve(service, **options)
    return service, server, await net.connect(Holds, server, **CLIENTS[kind]), Watch(service)


@sizes
@clients
@methods
async def test_what_a_method_raises(net: Net, method: str, kind: str, size: int):
    _, server, client, watch = await watched(net, kind, interceptors=[passes] if kind == "both" else [])
    with without_collector():
        for how in ("error", "cancelled", "mistake", "unsendable", "wrong"):
            if (how == "unsendable" and method != "fail") or (how == "wrong" and method in ("take", "echo")):
                continue
            assert await dropped(make(client, method, watch.array(size), how)) is rpc.Error
        assert await watch.is_over(server)


@sizes
@clients
@methods
async def test_cancelling_and_time_outs(net: Net, method: str, kind: str, size: int):
    service, server, client, watch = await watched(net, kind)
    with without_collector():
        late = rpc.options(client, timeout=0.02)
        assert await dropped(make(late, method, watch.array(size), "wait")) is rpc.Error
        assert (
            await dropped(make(rpc.options(client, timeout=0), method, watch.array(size), "wait"))
            is rpc.Error
        )
        count = len(service.journal.entries)
        (call,) = await begin(make(client, method, watch.array(size), "wait"))
        await service.journal.until("saw", count + 1)
        call.cancel()
        assert await dropped(call) is asyncio.CancelledError
        del call
        assert await watch.is_over(server)


@sizes
@clients
@pytest.mark.parametrize("method", ["take", "echo"])
async def test_what_the_callers_stream_raises(net: Net, method: str, kind: str, size: int):
    service, server, client, watch = await watched(net, kind)
    with without_collector():
        for error in (ValueError, GeneratorExit, asyncio.CancelledError):
            call = getattr(client, method)(watch.array(size), "wait", numbers(error))
            found = await dropped(call if method == "take" else listed(call))
            assert issubclass(found, (error, rpc.Error, RuntimeError))
            del call
        assert await watch.is_over(server)


@sizes
@clients
@methods
async def test_a_lost_connection(net: Net, method: str, kind: str, size: int):
    """In the middle of a call, at both sides; and calls after it."""
    service, server, client, watch = await watched(net, kind)
    with without_collector():
        (call,) = await begin(make(client, method, watch.array(size), "wait"))
        await service.journal.until("saw")
        callee(server).link.transport.abort()
        assert await dropped(call) is rpc.Error
        del call
        if "retry" not in CLIENTS[kind]:
            assert await dropped(make(client, method, watch.array(size), "wait")) is rpc.Error
        assert await watch.is_over(server)


async def takes(client: Holds, data: Any) -> None:
    """A caller whose frame has what it passes."""
    await client.take(data, "wait", numbers())


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_connection_that_is_found_lost_when_a_call_is_cancelled(net: Net):
    """Cancel cannot be written. That error is raised while CancelledError is handled, and the connection keeps it."""
    service, server, client, watch = await watched(net)
    with without_collector():
        (call,) = await begin(takes(client, watch.array(INLINE)))
        await service.journal.until("saw")
        theirs = callee(server).link.transport
        at_once = struct.pack("ii", 1, 0)  # by RST
        theirs.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        theirs.abort()
        call.cancel()
        assert await dropped(call) is asyncio.CancelledError
        del call
        assert await watch.is_over(server)


async def test_a_method_that_asks_again_for_its_stream(net: Net):
    service, server, client, watch = await watched(net)
    with without_collector():
        (call,) = await begin(client.patient(watch.array(INLINE), numbers()))
        await service.journal.until("saw")
        (running,) = server.running
        assert running.received is not None
        running.received.finish(rpc.Error(Code.UNAVAILABLE, "lost"))
        del running
        await call
        del call
        assert service.journal.entries == ["saw", "patient ends"]
        assert await watch.is_over(server)


async def test_calls_that_are_made_again(net: Net):
    """Until they give up. A lost connection may leave its error to the collector, which has nothing of calls."""
    service = Holds()
    server = await net.serve(service)
    client = await net.connect(Holds, server, retry=QUICK)
    watch = Watch(service)
    with without_collector(leaves_nothing=False):
        (call,) = await begin(client.again(watch.array(INLINE)))
        for turn in range(QUICK.attempts or 0):
            await service.journal.until("saw", turn + 1)
            callee(server).link.transport.abort()
        assert await dropped(call) is rpc.Error
        del call
        assert await watch.is_over(server)


@pytest.mark.parametrize("policy", ["first", "spread"])
@pytest.mark.parametrize("retry", [None, QUICK])
async def test_connecting_in_vain(net: Net, policy: Any, retry: rpc.Retry | None):
    """To nobody, to two nobodies, and by a call that finds that its server has gone.

    How asyncio connects has cycles of its own. They have nothing of calls.
    """
    service = Holds()
    server = await net.serve(service)
    where = net.address(server)
    each: Any = where[0] if net.is_by_name else where
    watch = Watch(service)

    async def connect(addresses: Any) -> None:
        async with rpc.connect(Holds, addresses, transport=net.transport, retry=retry, policy=policy):
            pass

    async with net.connecting(Holds, server, retry=retry, policy=policy) as client:
        server.close()
        await server.wait_closed()
        with without_collector(leaves_nothing=False):
            for addresses in ([each], [each, each]):
                assert issubclass(await dropped(connect(addresses)), (OSError, rpc.Error))
            assert await dropped(client.fail(watch.array(INLINE), "none")) is rpc.Error
            assert await dropped(listed(client.items(watch.array(INLINE), "none"))) is rpc.Error
            await loop_turns(5)
            assert await watch.is_over(server)


async def test_a_service_that_does_not_fit(net: Net):
    def different() -> type[rpc.Service]:
        class Holds(rpc.Service):
            async def fail(self, data: str) -> int: ...  # type: ignore[empty-body]

        return Holds

    server, other = await net.serve(Holds()), different()

    async def connect() -> None:
        async with net.connecting(other, server):
            pass

    with without_collector():
        assert await dropped(connect()) is rpc.Error
        await loop_turns(5)


async def test_what_is_not_sent(net: Net):
    """It cannot be encoded, is too long, or is one too many."""
    service = Holds()
    server = await net.serve(service, limits=rpc.Limits(calls=1, message_bytes=10_000))
    client = await net.connect(Holds, server)
    watch = Watch(service)
    with without_collector():
        for how in ("x" * 10_000, asyncio.Lock()):
            assert issubclass(await dropped(client.fail(watch.array(INLINE), how)), (rpc.Error, TypeError))  # type: ignore[arg-type]
        (call,) = await begin(client.fail(watch.array(INLINE), "wait"))
        assert await dropped(client.fail(watch.array(INLINE), "wait")) is rpc.Error
        call.cancel()
        assert await dropped(call) is asyncio.CancelledError
        del call
        assert await watch.is_over(server)


class Boxes(rpc.Service):
    async def put(self, arrays: list[numpy.ndarray]) -> None: ...

    async def get(self) -> list[numpy.ndarray]:
        return [numpy.ones(LENT, "u1") for _ in range(3)]


@pytest.mark.parametrize("transport", ["rdma"])
@pytest.mark.parametrize("fails", ["all", "the second"])
async def test_arrays_that_cannot_be_read(net: Net, fails: str, monkeypatch: pytest.MonkeyPatch):
    """Several of them are read at a time, at either side."""
    client, server = await net.pair(Boxes())
    offsets: list[int] = []

    async def read(link: Any, places: Any, remotes: Any, memory: Any, offset: int) -> None:
        offsets.append(offset)
        await loop_turns(1)
        if fails == "all" or offset:
            raise rpc.Error(Code.UNAVAILABLE, "it cannot be read")

    monkeypatch.setattr(taking, "read_loans", read)
    monkeypatch.setattr(fetching, "read_loans", read)
    arrays = [numpy.ones(LENT, "u1") for _ in range(3)]
    with without_collector():
        assert await dropped(client.put(arrays)) is rpc.Error
        assert await dropped(client.get()) is rpc.Error
        assert await idle(server)
        await loop_turns(5)
    assert len(offsets) >= 4
