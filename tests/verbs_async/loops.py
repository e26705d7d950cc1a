"""The event loops that the async layer is tested on, with the little that the tests need of them.

A test is a coroutine function whose first argument is a `Loop`: `spawn` a coroutine, `cancel` and `join` it, let the
others have a `turn`. asyncio, uvloop and Trio do it their way; `OwnLoop` is an event loop of sixty lines that knows
nothing but Python's own protocol for coroutines: what a user may bring.
"""

import asyncio
import collections
import functools
import inspect
import selectors
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
import uvloop

from tests.support import debug_mode

LIMIT_S = 150


class Cancelled(BaseException):
    """OwnLoop's."""


# ---- asyncio and uvloop ------------------------------------------------------------------------------


class AsyncioTask:
    def __init__(self, task):
        self.task = task

    def cancel(self):
        self.task.cancel()

    @property
    def done(self):
        return self.task.done()

    async def join(self):
        """What it returned; cancelled is None."""
        try:
            return await self.task
        except asyncio.CancelledError:
            if not self.task.cancelled():
                raise
            return None


class AsyncioLoop:
    notifier = None  # the default
    in_order = True  # tasks run in the order in which they were made, or woken

    def spawn(self, coroutine):
        return AsyncioTask(asyncio.get_running_loop().create_task(coroutine))

    async def turn(self):
        await asyncio.sleep(0)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


def run_asyncio(test, factory):
    async def main():
        async with asyncio.timeout(LIMIT_S):
            await test(AsyncioLoop())

    debug = factory is asyncio.SelectorEventLoop and debug_mode.wanted()
    with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
        runner.run(main())


# ---- Trio --------------------------------------------------------------------------------------------


class TrioTask:
    def __init__(self, nursery, coroutine):
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.outcome = None
        nursery.start_soon(self._run, coroutine)

    async def _run(self, coroutine):
        try:
            with self.scope:
                try:
                    self.outcome = await coroutine, None
                except Exception as exc:
                    self.outcome = None, exc
        finally:
            self.ended.set()

    def cancel(self):
        self.scope.cancel()

    @property
    def done(self):
        return self.ended.is_set()

    async def join(self):
        await self.ended.wait()
        if self.outcome is None:
            return None
        result, exc = self.outcome
        if exc is not None:
            raise exc
        return result


class TrioLoop:
    notifier = None
    in_order = False

    def __init__(self, nursery):
        self.nursery = nursery

    def spawn(self, coroutine):
        return TrioTask(self.nursery, coroutine)

    async def turn(self):
        # Trio shuffles what runs next: the first time it may still be us.
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def sleep(self, seconds):
        await trio.sleep(seconds)


def run_trio(test):
    async def main():
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                await test(TrioLoop(nursery))

    trio.run(main)


# ---- One's own ---------------------------------------------------------------------------------------


class OwnFuture:
    def __init__(self):
        self.task = None
        self.ended = False
        self.result = self.exception = None

    def done(self):
        return self.ended

    def set_result(self, result):
        self._end(result, None)

    def set_exception(self, exception):
        self._end(None, exception)

    def _end(self, result, exception):
        assert not self.ended
        self.ended, self.result, self.exception = True, result, exception
        if self.task is not None:
            self.task.loop.call_soon(self.task.step)

    def __await__(self):
        if not self.ended:
            yield self
        if self.exception is not None:
            raise self.exception
        return self.result


class OwnTask:
    def __init__(self, loop, coroutine):
        self.loop, self.coroutine = loop, coroutine
        self.waits_for = None
        self.cancelling = False
        self.end = OwnFuture()
        self.joined = []
        loop.call_soon(self.step)

    def step(self):
        if self.end.ended:
            return
        self.waits_for = None
        try:
            if self.cancelling:
                self.cancelling = False
                future = self.coroutine.throw(Cancelled())
            else:
                future = self.coroutine.send(None)
        except StopIteration as stop:
            self._ended(stop.value, None)
        except Cancelled:
            self._ended(None, None)
        except Exception as exc:
            self._ended(None, exc)
        else:
            future.task, self.waits_for = self, future

    def _ended(self, result, exception):
        self.end._end(result, exception)
        for future in self.joined:
            future.set_result(None)

    def cancel(self):
        if self.end.ended:
            return
        self.cancelling = True
        if self.waits_for is not None:
            if not self.waits_for.ended:  # or its step is on the way
                self.waits_for.ended = True
                self.loop.call_soon(self.step)
            self.waits_for = None

    @property
    def done(self):
        return self.end.ended

    async def join(self):
        if not self.end.ended:
            future = OwnFuture()
            self.joined.append(future)
            await future
        if self.end.exception is not None:
            raise self.end.exception
        return self.end.result


class OwnLoop:
    """The four methods of a Notifier, and what the tests want."""

    in_order = True

    def __init__(self):
        self.ready = collections.deque()
        self.selector = selectors.DefaultSelector()
        self.notifier = self

    def add_reader(self, fd, callback):
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def remove_reader(self, fd):
        if self.selector is None:
            raise RuntimeError("the loop is closed")
        self.selector.unregister(fd)

    def call_soon(self, callback):
        self.ready.append(callback)

    def create_future(self):
        return OwnFuture()

    def spawn(self, coroutine):
        return OwnTask(self, coroutine)

    async def turn(self):
        future = OwnFuture()
        self.call_soon(lambda: future.ended or future.set_result(None))
        await future

    async def sleep(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.turn()

    def run(self, coroutine):
        task = self.spawn(coroutine)
        deadline = time.monotonic() + LIMIT_S
        while not task.done:
            assert time.monotonic() < deadline, "the test takes too long"
            for key, _ in self.selector.select(0 if self.ready else 1):
                key.data()
            for _ in range(len(self.ready)):
                self.ready.popleft()()
        self.selector.close()
        self.selector = None
        if task.end.exception is not None:
            raise task.end.exception


def run_own(test):
    loop = OwnLoop()
    loop.run(test(loop))


RUNNERS = {
    "asyncio": lambda test: run_asyncio(test, asyncio.SelectorEventLoop),
    "uvloop": lambda test: run_asyncio(test, uvloop.new_event_loop),
    "trio": run_trio,
    "own": run_own,
}


def on_every_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """A test whose first argument is the loop it runs on."""

    @pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS.keys())
    @functools.wraps(test)
    def run(runner: Callable[..., None], **fixtures: Any) -> None:
        runner(lambda loop: test(loop, **fixtures))

    parameters = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("runner", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
    )
    del run.__wrapped__  # type: ignore[attr-defined]
    return run
