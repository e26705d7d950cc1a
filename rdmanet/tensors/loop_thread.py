"""The thread that runs an event loop for a program that has none, and what is under way there.

Theory
------
rdmanet starts no thread but this one. Transfer engines call from threads of their own, and have no event loop; and an
owner of memory has to answer its peers' claims while its threads compute, where no call runs a loop, as calls of
`rdmanet.streams.blocking` do. So each blocking endpoint has one thread, and its loop is all that uses the endpoint:
calls of other threads go there by ``call_soon_threadsafe()``. It sleeps in the loop's poll while it has nothing to do.

The thread ends with the endpoint. `LoopThread.end` cancels what is under way, awaits that and the endpoint's own end,
and joins the thread; then no device touches anybody's memory. Nothing is sent to a loop after its last turn: a lock is
between the last `submit` and the end, and callbacks run in the order in which they came. The thread is a daemon, so a
program that forgets it can end. At the interpreter's exit it is ended as by `end`, before Python stops daemons wherever
they are. A forked child has no such thread: all calls there are refused, and nothing of the parent's is touched.

A call that waits must not be made in the thread itself, which would wait for itself. Only a finalizer could do so,
which Python may run in any thread. It can ask there to cancel, without waiting (`Transfer.cancel`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from rdmanet._core import process_id

T = TypeVar("T")
_R = TypeVar("_R")


class Transfer(Generic[T]):
    """What is under way in the endpoint's thread. Any thread may use it.

    ``with`` closes it at the end of the block. One that is dropped goes on; its arrays stay alive until it is done.
    """

    def __init__(self, thread: LoopThread[Any], call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._thread = thread
        self._call: Callable[[], Coroutine[Any, Any, T]] | None = call
        self._task: asyncio.Task[T] | None = None
        self._changed = threading.Condition(threading.Lock())
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None  # of the error, as the operation raised it
        self._fd = -1

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._is_done

    def wait(self, timeout: float | None = None) -> T:
        """Wait until it is done, and return or raise what the operation does.

        :param timeout: in seconds; None: any time
        :raises TimeoutError: it is not `done` by then. It goes on: wait again, or `cancel` it
        :raises concurrent.futures.CancelledError: it was cancelled, or the endpoint was closed meanwhile
        :raises RuntimeError: this is the endpoint's own thread, or a forked child
        """
        if not self._is_done:
            self._thread.check_may_wait()
            with self._changed:
                if not self._changed.wait_for(self._has_ended, timeout):
                    raise TimeoutError(f"not done within {timeout} s; it goes on: wait again, or cancel() it")
        if self._error is None:
            return cast(T, self._result)
        error = _copy(self._error).with_traceback(self._traceback)
        try:
            raise error
        finally:
            del self, error  # the error's traceback has this frame

    def _has_ended(self) -> bool:
        return self._is_done

    def cancel(self, *, wait: bool = True) -> bool:
        """End it. When this returns, no device touches its arrays any more.

        Usually that takes microseconds; at most a second or two, if the peer's host is gone.

        :param wait: False only asks for it, and returns at once: any thread may do so
        :return: whether it was cancelled; False if it had ended before, and without `wait` if it has not ended yet
        :raises RuntimeError: this is the endpoint's own thread, and `wait` is set; or a forked child
        """
        if not self._is_done:
            self._thread.check_process()
            if wait:
                self._thread.check_may_wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and this with it
                self._thread.loop.call_soon_threadsafe(self._cancel)
            if wait:
                with self._changed:
                    self._changed.wait_for(self._has_ended)
        return isinstance(self._error, CancelledError)

    def fileno(self) -> int:
        """A descriptor that is readable once it is done: for select, poll and other event loops.

        It is closed by `close`, or with this object. What is read from it means nothing.
        """
        self._thread.check_process()
        with self._changed:
            if self._fd < 0:
                self._fd = os.eventfd(int(self._is_done), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def close(self) -> None:
        """Cancel it if it is under way, and close its descriptor."""
        if self._thread.is_foreign:  # a thread of the parent's may have had the lock as it forked
            fd, self._fd = self._fd, -1
        else:
            self.cancel()
            with self._changed:
                fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Transfer[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __repr__(self) -> str:
        if not self._is_done:
            state = "under way"
        elif self._error is None:
            state = "done"
        else:
            state = "cancelled" if isinstance(self._error, CancelledError) else f"failed: {self._error!r}"
        return f"<Transfer {state}>"

    # -- in the thread ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        assert self._call is not None
        call, self._call = self._call, None
        self._task = self._thread.loop.create_task(call(), name="tensors operation")
        self._thread.under_way.add(self._task)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        self._thread.under_way.discard(task)
        self._task = None
        if task.cancelled():
            self._error = CancelledError()
        elif (error := task.exception()) is not None:
            self._error, self._traceback = error, error.__traceback__
        else:
            self._result = task.result()
        with self._changed:
            self._is_done = True
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            self._changed.notify_all()


def _copy(error: BaseException) -> BaseException:
    """The same error for one who waits.

    Raised there, it gets the frames of who waits, which mostly have the transfer. If the transfer had it as well, it
    and the arrays in those frames would be there until the garbage collector comes by.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # of a class that cannot be copied
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied


class LoopThread(Generic[T]):
    """A thread that runs an event loop, with something that is open on it, until `end`.

    :ivar opened: what is open
    :ivar under_way: tasks of transfers; for the thread itself
    """

    opened: T

    def __init__(self, name: str, opening: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.under_way: set[asyncio.Task[Any]] = set()
        self._pid = process_id()
        self._ending: asyncio.Event = asyncio.Event()
        self._lock = threading.RLock()  # reentrant: a finalizer that ends this may run while it is held
        self._is_ending = False
        started: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(opening, started), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there may be no more threads
            self.loop.close()
            raise
        _threads.add(self)
        try:
            self.opened = started.result()
        except BaseException:
            self.end(wait=started.done())
            raise

    def _run(self, opening: Callable[[], AbstractAsyncContextManager[T]], started: Future[T]) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._main(opening, started))

    async def _main(self, opening: Callable[[], AbstractAsyncContextManager[T]], started: Future[T]) -> None:
        try:
            async with opening() as opened:
                started.set_result(opened)
                await self._ending.wait()
                while left := self.under_way.copy():
                    for task in left:
                        task.cancel()
                    await asyncio.wait(left)
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    # -- in other threads ------------------------------------------------------------------------------------

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, and all this belongs to the parent."""
        return self._pid != process_id()

    @property
    def is_this(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.get_ident() == self._thread.ident and not self.is_foreign

    @property
    def is_ending(self) -> bool:
        return self._is_ending

    def check_process(self) -> None:
        if self.is_foreign:
            raise RuntimeError(f"this endpoint was opened by process {self._pid}; open another after fork")

    def check_may_wait(self) -> None:
        """Check that the caller may wait for something that this thread does."""
        self.check_process()
        if self.is_this:
            raise RuntimeError(
                f"a call that waits, in the endpoint's own thread ({self._thread.name}), would wait for itself; from"
                " finalizers, which Python runs in any thread, use cancel(wait=False)"
            )

    def submit(self, call: Callable[[], Coroutine[Any, Any, _R]]) -> Transfer[_R]:
        """Have the thread run a coroutine.

        :raises ValueError: it has ended, or ends
        :raises RuntimeError: this is a forked child
        """
        self.check_process()
        transfer = Transfer(self, call)
        with self._lock:
            if self._is_ending:
                raise ValueError("this endpoint is closed")
            self.loop.call_soon_threadsafe(transfer._begin)
        return transfer

    def run(self, call: Callable[[], Coroutine[Any, Any, _R]], timeout: float | None = None) -> _R:
        """Have the thread run a coroutine, and wait for it. If that takes longer, it is cancelled."""
        self.check_may_wait()
        transfer = self.submit(call)
        try:
            return transfer.wait(timeout)
        except TimeoutError:
            if transfer.cancel():
                raise TimeoutError(f"not done within {timeout} s") from None
            return transfer.wait()
        except BaseException:
            transfer.cancel(wait=False)  # Ctrl-C; otherwise it is done
            raise

    def call(self, function: Callable[..., _R], *args: Any) -> _R:
        """Have the thread call a function that does not wait."""

        async def called() -> _R:
            return function(*args)

        return self.run(called)

    def end(self, *, wait: bool = True) -> None:
        """End what is under way, then what is open, then the thread. In a forked child this does nothing."""
        if self.is_foreign:
            return
        if wait:
            self.check_may_wait()
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                with contextlib.suppress(RuntimeError):  # it could not be opened
                    self.loop.call_soon_threadsafe(self._ending.set)
        if wait:
            self._thread.join()


_threads: weakref.WeakSet[LoopThread[Any]] = weakref.WeakSet()


def _end_all() -> None:
    for thread in list(_threads):
        thread.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_threads.clear)
