"""Methods begin when their calls come, in a task that stands by; they cannot tell it from a task of their own."""

import asyncio
import contextlib
import gc
import sys
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from net import Net, failure, idle

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.first_steps import FirstSteps
from tests.support.waiting import loop_turns, until_seen

MARK: ContextVar[str] = ContextVar("mark", default="")


class Bare:
    """Yields this to the task, as no future does."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._value


class Iterated:
    """Its iterator is no coroutine's, nor a generator's."""

    def __await__(self) -> Iterator[None]:  # type: ignore[override]
        return iter([None, None])


class Looking(rpc.Service):
    """Its methods do what a test says."""

    def __init__(self) -> None:
        self.does: Callable[[], Any] = lambda: None
        self.awaits: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)
        self.tasks: list[asyncio.Task[Any]] = []
        self.numbers: list[int] = []

    async def look(self) -> str:
        task = asyncio.current_task()
        assert task is not None and task in asyncio.all_tasks() and not task.done() and not task.cancelling()
        self.numbers.append(id(task))
        self.does()
        return task.get_name()

    async def note(self, number: int) -> int:
        self.numbers.append(number)
        return number

    async def note_memory(self, number: int) -> memoryview:
        self.numbers.append(number)
        return memoryview(b"memory")

    async def rest(self) -> None:
        pass

    async def wait(self) -> int:
        task = asyncio.current_task()
        self.does()
        for _ in range(3):
            await self.awaits()
            assert asyncio.current_task() is task and task in asyncio.all_tasks()
        assert task is not None
        return task.cancelling()


def this() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def looking(net: Net) -> tuple[Any, Looking, rpc.Server]:
    """A server that has a task that stands by."""
    service = Looking()
    client, server = await net.pair(service)
    for _ in range(3):
        assert await client.look() == "Looking.look"
    return client, service, server


async def test_one_task_does_for_many_calls(net: Net):
    client, service, server = await looking(net)
    before = asyncio.all_tasks()
    service.numbers.clear()
    service.does = lambda: others.append(asyncio.Future())  # so that no other has its place in memory
    others: list[Any] = []
    for _ in range(10):
        await client.look()
    assert len(set(service.numbers)) == 1 and len(others) == 10
    assert asyncio.all_tasks() == before and not server.running


async def test_a_task_that_no_call_has_used_ends_quietly(monkeypatch):
    """Its server has had one call, say. What the collector meets may be told to the hook only."""
    met: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", met.append)
    for _ in range(3):
        steps = FirstSteps(asyncio.get_running_loop())
        running: Any = None
        assert not steps.enter(running)  # it makes the task
        await loop_turns(2)
        del steps
    gc.collect()
    assert not met and len(asyncio.all_tasks()) == 1


MARKS = ["kept", "weak", "weak callback", "callback", "name", "attribute", "cancelled", "uncancelled"]


@pytest.mark.parametrize("how", MARKS)
async def test_a_task_that_bears_a_mark_ends_with_its_call(net: Net, how: str):
    client, service, server = await looking(net)
    done: list[Any] = []
    kept: list[Any] = []

    def does() -> None:
        task = this()
        if how == "kept":
            kept.append(task)
        elif how == "weak":
            kept.append(weakref.ref(task))
        elif how == "weak callback":
            kept.append(weakref.ref(task, done.append))
        elif how == "callback":
            task.add_done_callback(done.append)
        elif how == "name":
            task.set_name("another")
        elif how == "attribute":
            task.session = object()  # type: ignore[attr-defined]
        else:
            task.cancel()
            if how == "uncancelled":
                task.uncancel()

    service.does = does
    assert await client.look() == ("another" if how == "name" else "Looking.look")
    service.does = lambda: None
    assert await client.look() == "Looking.look"
    await loop_turns(3)
    gc.collect()
    if how == "kept":
        assert kept[0].done() and not kept[0].cancelled()
    if how == "weak":
        assert kept[0]() is None
    if how in ("weak callback", "callback"):
        assert len(done) == 1
    assert not hasattr(service, "session")
    assert await client.look() == "Looking.look" and not server.running


async def test_calls_begin_in_the_order_in_which_they_come(net: Net):
    """Also behind those that cannot begin at once."""
    client, service, _ = await looking(net)
    service.numbers.clear()
    await asyncio.gather(*((client.note_memory if n % 3 else client.note)(n) for n in range(1, 100)))
    assert service.numbers == list(range(1, 100))
    before = asyncio.all_tasks()
    await client.note(1)
    assert service.numbers[-1] == 1 and asyncio.all_tasks() == before


async def test_calls_begin_at_once_behind_one_that_was_cancelled_before_it_began(net: Net):
    client, service, server = await looking(net)
    service.does = lambda: None
    call = asyncio.create_task(client.note_memory(1))
    await until_seen(lambda: server.running)
    for running in server.running:
        running.cancel()
    assert (await failure(call)).code is Code.CANCELLED
    service.numbers.clear()
    for _ in range(3):
        await client.look()
    assert len(set(service.numbers)) == 1


async def test_a_method_that_gives_what_is_awaited_by_an_iterator(net: Net):
    service = Looking()
    service.rest = Iterated  # type: ignore[method-assign,assignment]
    client, server = await net.pair(service)
    for _ in range(3):
        await client.look()
        await client.rest()
    assert not server.running


async def test_no_context_variable_is_left_for_the_next_call(net: Net):
    client, service, _ = await looking(net)
    found: list[str] = []

    def does() -> None:
        found.append(MARK.get())
        MARK.set("mine")

    service.does = does
    for _ in range(3):
        await client.look()
        await client.wait()
    assert found == [""] * 6


@pytest.mark.parametrize("how", ["sleep 0", "sleep", "future", "task", "timeout", "done"])
async def test_a_method_that_waits_goes_on_in_its_task(net: Net, how: str):
    client, service, server = await looking(net)

    async def in_time() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()

    async def done() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(1)
        assert await future == 1
        await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))

    async def future() -> None:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(found.set_result, 7)
        MARK.set("before")
        assert await found == 7
        assert MARK.get() == "before"

    service.awaits = {
        "sleep 0": lambda: asyncio.sleep(0),
        "sleep": lambda: asyncio.sleep(0.001),
        "future": future,
        "task": lambda: asyncio.create_task(asyncio.sleep(0)),
        "timeout": in_time,
        "done": done,
    }[how]
    assert await asyncio.gather(*(client.wait() for _ in range(20))) == [0] * 20
    assert await client.wait() == 0
    assert not server.running and asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("what", [7, "itself", "a future that waits for nobody"])
async def test_what_no_task_can_wait_for(net: Net, what: Any):
    client, service, server = await looking(net)
    service.awaits = lambda: this() if what == "itself" else Bare(what if what == 7 else asyncio.Future())
    assert (await failure(client.wait())).code is Code.INTERNAL
    assert await client.look() == "Looking.look" and not server.running


@pytest.mark.parametrize("shielded", [False, True])
async def test_a_method_that_cancels_itself(net: Net, shielded: bool):
    """At once what it waits for next is cancelled, too, as by a task of its own."""
    client, service, _ = await looking(net)
    inner: list[asyncio.Task[None]] = []

    def awaits() -> Awaitable[Any]:
        inner.append(asyncio.create_task(asyncio.sleep(0.01)))
        return asyncio.shield(inner[0]) if shielded else inner[0]

    service.does, service.awaits = lambda: this().cancel(), awaits
    error = await failure(client.wait())
    assert error.code is Code.CANCELLED
    await asyncio.wait(inner)
    assert inner[0].cancelled() != shielded
    service.does = lambda: None
    assert await client.look() == "Looking.look"


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_method_that_cancels_itself_and_what_takes_no_notice(net: Net, how: str):
    """What it waits for has been told to cancel, and has ended in another way: the method goes on with that."""
    client, service, _ = await looking(net)
    found: list[Any] = []

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "raises":
                raise KeyError("another") from None
        return 5

    async def awaits() -> None:
        if found:
            return
        try:
            found.append(await inner)
        except KeyError:
            found.append("another")

    inner = asyncio.create_task(stubborn())
    await loop_turns(2)
    service.does, service.awaits = lambda: this().cancel(), awaits
    assert await client.wait() == 1
    assert found == ([5] if how == "returns" else ["another"])
    service.does = lambda: None
    assert await client.look() == "Looking.look"


@pytest.mark.parametrize("turns", range(5))
async def test_a_call_that_is_cancelled_soon(net: Net, turns: int):
    client, service, server = await looking(net)
    inner: list[asyncio.Task[None]] = []

    def awaits() -> Awaitable[Any]:
        inner.append(asyncio.create_task(asyncio.sleep(60)))
        return inner[0]

    service.awaits = awaits
    call = asyncio.create_task(client.wait())
    await until_seen(lambda: inner)
    await loop_turns(turns)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await idle(server)
    assert inner[0].cancelled() and not server.running


async def test_a_method_that_uncancels_itself(net: Net):
    """What it waits for next is cancelled only where a task of its own would do so: before Python 3.13."""
    client, service, _ = await looking(net)

    def does() -> None:
        this().cancel()
        this().uncancel()

    async def own() -> int:
        does()
        await asyncio.sleep(0.001)
        return 0

    service.does, service.awaits = does, lambda: asyncio.sleep(0.001)
    (wanted,) = await asyncio.gather(asyncio.create_task(own()), return_exceptions=True)
    if wanted == 0:
        assert await client.wait() == 0
    else:
        assert isinstance(wanted, asyncio.CancelledError)
        assert (await failure(client.wait())).code is Code.CANCELLED


async def test_a_server_that_is_closed_by_its_method(net: Net):
    client, service, server = await looking(net)
    service.does = server.close
    assert (await failure(client.wait())).code is Code.CANCELLED
    await server.wait_closed()
    assert not server.running


async def test_a_server_that_is_closed_by_a_method_that_ends(net: Net):
    client, service, server = await looking(net)
    service.does = server.close
    assert await client.look() == "Looking.look"
    await server.wait_closed()
    assert not server.running


async def test_a_factory_makes_all_tasks(net: Net):
    client, service, _ = await looking(net)
    loop, made = asyncio.get_running_loop(), []

    def factory(loop: Any, work: Any, **options: Any) -> Any:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(factory)
    try:
        assert await client.look() == "Looking.look"
    finally:
        loop.set_task_factory(None)
    assert made == ["Executing._run"]


async def test_nothing_is_left_of_a_task_that_stood_by(net: Net):
    client, service, server = await looking(net)
    found: list[Any] = []
    service.awaits = lambda: found.append(weakref.ref(this())) or asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        await client.wait()
        await idle(server)
        await loop_turns(3)
        assert found[0]() is None
    finally:
        gc.enable()
