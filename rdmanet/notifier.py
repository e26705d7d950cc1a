"""What the async layer asks of an event loop: four methods, those that asyncio's loops have.

A loop of asyncio or uvloop is a `Notifier` as it is. `TrioNotifier` makes one of Trio's run loop. For another
loop, write the four methods:

    add_reader(fd, callback)    call back whenever fd is readable, until remove_reader(fd). Calling back though
                                it is not does no harm
    call_soon(callback)         call back once, after what is ready to run now has had its turn
    create_future()             something to await, with done(), set_result() and set_exception(), whose done()
                                is true once who awaits it was cancelled

All are called, and call back, in the loop's own thread. This module imports no event loop.
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
    """One result to come, for one who awaits it."""

    def done(self) -> bool:
        """Whether it has one, or who awaited it was cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Wake who awaits it, with this; once, and not when done()."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Wake who awaits it, by raising this there."""


class Notifier(Protocol):
    """An event loop, as far as it is needed here."""

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object:
        """Call back whenever fd is readable; a descriptor has one reader."""

    def remove_reader(self, fd: int, /) -> object:
        """Do so no more; the descriptor may be closed next."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Call back once, after what is ready to run now."""

    def create_future(self) -> Any:
        """A Future."""


class Home:
    """The thread that something belongs to, with its loop: the one in which it was made."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def check(self, thing: object) -> None:
        """Before thing waits for anything.

        :raises RuntimeError: this is another thread
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{thing!r} is its own thread's only")


def wake(waiting: list[Future]) -> None:
    """Let all who wait go on, and forget them. Where their loop is closed nobody is left to be told."""
    futures = waiting.copy()
    waiting.clear()
    for future in futures:
        with contextlib.suppress(RuntimeError):
            if not future.done():
                future.set_result(None)


def current_notifier() -> Notifier:
    """The loop that runs here: asyncio's, uvloop's, or Trio's.

    :raises RuntimeError: none does, or it is another kind; then it has to be given as `notifier=`
    """
    # Whose module is not loaded does not run.
    if (trio := sys.modules.get("trio")) is not None and trio.lowlevel.in_trio_run():
        return TrioNotifier()
    if (asyncio := sys.modules.get("asyncio")) is not None:
        try:
            loop: Notifier = asyncio.get_running_loop()
            return loop
        except RuntimeError:
            pass
    raise RuntimeError("no event loop of asyncio, uvloop or Trio runs here; give yours as notifier=")


class TrioNotifier:
    """Trio's run loop, that of the caller. Readers are system tasks, which end with the run."""

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
                except Exception:  # it would end the whole run
                    logger.exception("%r failed", callback)

    def remove_reader(self, fd: int) -> None:
        """End that task."""
        scope = self._readers.pop(fd, None)
        if scope is not None:
            scope.cancel()
            # The descriptor may be closed next: whoever waits for it lets go of it now.
            self._trio.lowlevel.notify_closing(fd)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back in the run loop's next round."""
        self._token.run_sync_soon(callback)

    def create_future(self) -> _TrioFuture:
        """One result to come, for one task."""
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
