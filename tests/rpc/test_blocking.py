"""rpc.blocking: the client without an event loop."""

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

import rdmanet
from rdmanet import rpc
from rdmanet.rpc import blocking
from tests.rpc.net import HOST

TENANT: ContextVar[str] = ContextVar("tenant")


class Store(rpc.Service):
    """What a program without a loop calls."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    async def double(self, value: int, by: int = 2) -> int:
        return value * by

    async def scaled(self, values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        return values * 2

    async def who(self) -> str:
        return str(rpc.metadata().get("tenant", "nobody"))

    async def fails(self) -> None:
        raise rpc.Error(rpc.Code.NOT_FOUND, "there is none")

    async def never(self, interrupt: bool) -> None:
        try:
            if interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def count(self, stop: int) -> AsyncIterator[int]:
        try:
            for number in range(stop):
                yield number
        finally:
            self.cancelled.set()

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def running(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        total = 0
        async for number in numbers:
            total += number
            yield total

    async def buffer(self) -> rpc.Buffer:
        return rpc.Buffer(bytearray(range(200)))


class Serving:
    """A server in a thread."""

    def __init__(self, transport: str, folder: str) -> None:
        self.service = Store()
        self.where: tuple[Any, ...] = (f"{folder}/socket",) if transport == "unix" else (HOST, 0)
        self._transport = transport
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await rpc.serve(self.service, *self.where, transport=self._transport) as server:
            name = server.sockets[0].getsockname()
            self.where = (name,) if self._transport == "unix" else name[:2]
            self._is_up.set()
            await self._stop.wait()

    def __enter__(self) -> "Serving":
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture(params=["rdma", "tcp", "unix"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(request.param, str(tmp_path_factory.mktemp("s"))) as found:
        found.transport = request.param  # type: ignore[attr-defined]
        yield found


@pytest.fixture
def store(serving: Serving) -> Iterator[blocking.Client[Store]]:
    with blocking.connect(Store, *serving.where, transport=serving.transport) as client:  # type: ignore[attr-defined]
        yield client


def test_calls_by_name_and_with_types(store: blocking.Client[Store]):
    assert store.double(21) == 42
    number: int = blocking.call(store, Store.double, 5, by=3)
    assert number == 15
    assert {"double", "count", "close"} <= set(dir(store))
    assert store.double.__name__ == "double"
    assert list(inspect.signature(store.double).parameters) == ["value", "by"]
    with pytest.raises(AttributeError, match="Store has no method 'halve'"):
        store.halve(4)
    with pytest.raises(TypeError, match="is no method of Store"):
        blocking.call(store, len, [])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="lacks the argument 'value'"):
        store.double()
    with pytest.raises(rpc.Error, match="there is none"):
        store.fails()
    assert blocking.stats(store)["double"].begun == 2
    assert blocking.peer(store) is not None


def test_by_which_fabric(store: blocking.Client[Store], serving: Serving):
    assert rdmanet.fabric(store).fabric == serving.transport  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_arrays(store: blocking.Client[Store], count: int):
    values = numpy.arange(float(count))
    assert (store.scaled(values) == values * 2).all()
    mine = numpy.empty_like(values)
    assert blocking.options(store, into=mine).scaled(values) is mine
    assert mine[-1] == 2 * (count - 1)


def test_streams_each_way(store: blocking.Client[Store]):
    assert list(store.count(1000)) == list(range(1000))
    assert store.total(range(100)) == store.total(numbers=iter(range(100))) == 4950
    assert list(store.running([1, 2, 3])) == [1, 3, 6]

    async def numbers() -> AsyncIterator[int]:
        yield 7

    assert blocking.call(store, Store.total, numbers()) == 7


def test_a_stream_that_is_left(store: blocking.Client[Store], serving: Serving):
    with blocking.call(store, Store.count, 1 << 40) as items:
        assert next(items) == 0
        assert next(items) == 1
    assert serving.service.cancelled.wait(60)
    assert store.double(1) == 2
    with pytest.raises(StopIteration):
        next(items)


def test_a_stream_that_is_forgotten(store: blocking.Client[Store], serving: Serving):
    items = store.count(1 << 40)
    assert next(items) == 0
    del items
    gc.collect()
    assert store.double(1) == 2  # in which the call is ended
    assert serving.service.cancelled.wait(60)


def test_a_buffer_is_read_by_the_clients_loop(store: blocking.Client[Store]):
    buffer = store.buffer()
    assert blocking.run(store, buffer.read, 10, 13) == bytes([10, 11, 12])
    buffer.release()


def test_what_the_program_cancels_is_no_ctrl_c(store: blocking.Client[Store]):
    async def cancels() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        blocking.run(store, cancels)
    assert store.double(1) == 2


def test_results_keep_their_client(serving: Serving):
    transport = serving.transport  # type: ignore[attr-defined]
    items = blocking.connect(Store, *serving.where, transport=transport).count(3)
    gc.collect()
    assert list(items) == [0, 1, 2]
    items._client.close()


def test_a_forked_child_leaves_the_call_alone(store: blocking.Client[Store]):
    with store.count(1 << 40) as items:
        assert next(items) == 0
        if (child := os.fork()) == 0:
            status = 1
            try:
                items.close()
                try:
                    next(items)
                except RuntimeError as exc:
                    status = 0 if "after fork" in str(exc) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert next(items) == 1


def test_a_deadline(store: blocking.Client[Store], serving: Serving):
    with pytest.raises(rpc.Error) as caught:
        blocking.options(store, timeout=0.01).never(interrupt=False)
    assert caught.value.code is rpc.Code.DEADLINE_EXCEEDED
    assert serving.service.cancelled.wait(60)
    assert store.double(1) == 2


def test_ctrl_c_ends_a_call_and_not_the_client(store: blocking.Client[Store], serving: Serving):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            store.never(interrupt=True)
        assert serving.service.cancelled.wait(60)
        serving.service.cancelled.clear()
        assert store.double(1) == 2


def test_metadata_and_context_variables(serving: Serving):
    transport = serving.transport  # type: ignore[attr-defined]
    with blocking.connect(Store, *serving.where, transport=transport, carry=[TENANT]) as store:
        assert store.who() == "nobody"
        token = TENANT.set("a")  # after the client was made
        assert store.who() == "a"
        TENANT.reset(token)
        assert blocking.options(store, metadata={"tenant": "b"}).who() == "b"


def test_a_client_for_each_thread(serving: Serving):
    transport = serving.transport  # type: ignore[attr-defined]
    found: list[list[int]] = []

    def calls() -> None:
        with blocking.connect(Store, *serving.where, transport=transport) as store:
            found.append([store.double(number) for number in range(100)])

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[2 * number for number in range(100)]] * 3


def test_another_threads_call_is_refused(store: blocking.Client[Store], serving: Serving):
    refused: list[RuntimeError] = []

    def other() -> None:
        try:
            store.double(1)
        except RuntimeError as exc:
            refused.append(exc)

    def numbers() -> Iterator[int]:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        yield 1

    assert store.total(numbers()) == 1
    assert "another thread" in str(refused[0])
    refused.clear()


def test_after_its_end(serving: Serving):
    transport = serving.transport  # type: ignore[attr-defined]
    store = blocking.connect(Store, *serving.where, transport=transport)
    copy, items = blocking.options(store, timeout=60), store.count(10)
    copy.close()
    assert copy.double(1) == 2
    store.close()
    store.close()
    items.close()
    for call in (lambda: store.double(1), lambda: copy.double(1), lambda: next(items)):
        with pytest.raises(RuntimeError, match="this client is closed"):
            call()


def test_one_that_is_not_closed_warns(serving: Serving):
    transport = serving.transport  # type: ignore[attr-defined]
    store = blocking.connect(Store, *serving.where, transport=transport)
    assert store.double(1) == 2
    with warnings.catch_warnings(record=True) as warned:  # its transport warns, too
        warnings.simplefilter("always")
        del store
        texts = [str(each.message) for each in warned]
        warned.clear()  # they refer to the client
        gc.collect()
    assert any("unclosed <blocking client of Store" in text for text in texts)


def test_there_is_no_server():
    with pytest.raises(rpc.Error) as caught:
        blocking.connect(Store, HOST, 1, transport="tcp")
    assert caught.value.code is rpc.Code.UNAVAILABLE
    with pytest.raises(ValueError, match="policy"):
        blocking.connect(Store, HOST, 1, policy="all")


def test_within_a_loop(store: blocking.Client[Store], monkeypatch: pytest.MonkeyPatch):
    async def calls() -> int:
        task = asyncio.current_task()
        with contextlib.suppress(NotImplementedError):
            found: int = store.double(21)
        assert asyncio.current_task() is task
        await asyncio.sleep(0)
        return found

    with pytest.raises(RuntimeError, match=r"await rpc\.connect\(\) there"):
        asyncio.run(calls())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    assert asyncio.run(calls()) == 42


def test_ctrl_c_as_a_notebooks_loop_is_stopped(
    store: blocking.Client[Store], monkeypatch: pytest.MonkeyPatch
):
    stops = asyncio._set_running_loop

    def interrupted(loop: asyncio.AbstractEventLoop | None) -> None:
        stops(loop)
        if loop is None:
            raise KeyboardInterrupt

    async def calls() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(asyncio, "_set_running_loop", interrupted)
            store.double(21)
        assert asyncio._get_running_loop() is loop and asyncio.current_task() is task
        await asyncio.sleep(0)
        found: int = store.double(21)
        return found

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    assert asyncio.run(calls()) == 42
