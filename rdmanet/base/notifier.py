"""The interface of an event loop that the async layer needs: four methods that asyncio's loops have.

A loop of asyncio or uvloop is a `Notifier` as it is. `TrioNotifier` adapts Trio's run loop. For another loop, implement
the four methods:

    add_reader(fd, callback)    call callback whenever fd is readable. Spurious calls do no harm
    remove_reader(fd)           stop doing so
    call_soon(callback)         call callback once, after the callbacks that are ready now
    create_future()             an awaitable with done(), set_result() and set_exception(); done() must be true once
                                its awaiter was cancelled

All of them are called, and call back, in the loop's own thread. This module imports no event loop.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import trio

__all__ = ["Future", "Notifier", "TrioNotifier", "current_notifier"]

logger = logging.getLogger("rdmanet")


class Future(Awaitable[Any], Protocol):
    """A result to come, for one awaiter."""

    def done(self) -> bool:
        """Whether it has a result, or its awaiter was cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Set the result and wake the awaiter; called once, and not when done()."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Raise this exception in the awaiter; called once, and not when done()."""


class Notifier(Protocol):
    """The part of an event loop that rdmanet needs."""

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object:
        """Call back whenever fd is readable. A descriptor has one reader."""

    def remove_reader(self, fd: int, /) -> object:
        """Stop calling back. The descriptor may be closed next."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call back once, after the callbacks that are ready now."""

    def create_future(self) -> Any:
        """A Future."""


class Home:
    """The thread in which an object was created, to which it and its loop belong."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def check(self, thing: object) -> None:
        """Check the thread before `thing` waits for anything.

        :raises RuntimeError: this is another thread
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{thing!r} can be used in the thread of its event loop only")


def wake(waiting: list[Future]) -> None:
    """Wake all awaiters, and clear the list. If their loop is closed, nobody is left to wake."""
    futures = waiting.copy()
    waiting.clear()
    for future in futures:
        with contextlib.suppress(RuntimeError):
            if not future.done():
                future.set_result(None)


def current_notifier() -> Notifier:
    """The loop that is running in this thread: asyncio's, uvloop's or Trio's.

    :raises RuntimeError: none is running, or another kind, which must be passed as `notifier=`
    """
    # A library that is not imported has no running loop. Where Trio is a guest of asyncio's loop both run; a caller
    # is Trio's only if it is one of its tasks.
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return TrioNotifier()
    if (asyncio := sys.modules.get("asyncio")) is not None:
        try:
            loop: Notifier = asyncio.get_running_loop()
            return loop
        except RuntimeError:
            pass
    if trio is not None and trio.lowlevel.in_trio_run():  # in a callback
        return TrioNotifier()
    raise RuntimeError(
        "no event loop of asyncio, uvloop or Trio is running here; pass notifier= for another one"
    )


class TrioNotifier:
    """The caller's Trio run loop. Readers are system tasks, which end with the run."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._readers: dict[int, trio.CancelScope] = {}

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back whenever fd is readable, from a system task."""
        scope = self._readers[fd] = self._trio.CancelScope()
        self._trio.lowlevel.spawn_system_task(self._read, fd, callback, scope, name=f"rdmanet reader {fd}")

    async def _read(self, fd: int, callback: Callable[[], object], scope: trio.CancelScope) -> None:
        with scope:
            while not scope.cancel_called:
                try:
                    await self._trio.lowlevel.wait_readable(fd)
                except self._trio.ClosedResourceError:
                    return
                try:
                    callback()
                except Exception:  # an exception would end the whole run
                    logger.exception("%r failed", callback)

    def remove_reader(self, fd: int) -> None:
        """End the reader's task."""
        scope = self._readers.pop(fd, None)
        if scope is not None:
            scope.cancel()
            # The descriptor may be closed next, so no task may wait for it.
            self._trio.lowlevel.notify_closing(fd)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back in the run loop's next round, if there is one."""
        with contextlib.suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(callback)

    def create_future(self) -> _TrioFuture:
        """A result to come, for one task.

        :raises RuntimeError: the loop that this is for has ended, and another one runs
        """
        if self._trio.lowlevel.current_trio_token() is not self._token:
            raise RuntimeError(
                "this belongs to a run of Trio's loop that has ended: open another in this run"
            )
        return _TrioFuture(self._trio)


class _TrioFuture:
    __slots__ = ("_trio", "_task", "_done", "_result", "_exception")

    def __init__(self, module: Any) -> None:
        self._trio = module
        self._task: Any = None
        self._done = False
        self._result: Any = None
        self._exception: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, exception: BaseException) -> None:
        self._exception = exception
        self._end()

    def _end(self) -> None:
        self._done = True
        task, self._task = self._task, None
        if task is not None:
            self._trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        lowlevel = self._trio.lowlevel
        if not self._done:
            self._task = lowlevel.current_task()

            def abort(_: object) -> Any:
                self._task = None
                self._done = True
                return lowlevel.Abort.SUCCEEDED

            await lowlevel.wait_task_rescheduled(abort)
        if self._exception is not None:
            raise self._exception
        return self._result
