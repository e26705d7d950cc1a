"""The part of asyncio's loop that transports use, on Trio's run loop.

Theory
------
A transport is written for an asyncio loop: it calls back, sets timers, reads descriptors, and makes futures. None of
that needs a second loop. A `TrioLoop` has these methods, and Trio does the work: one system task runs the callbacks and
the timers, and one for each descriptor waits until it is readable. So there is one loop, one clock and one place that
sleeps, which are Trio's. No thread is started; names are resolved by ``trio.socket.getaddrinfo``, which uses Trio's.

Coroutines of asyncio's, such as ``create_rdma_connection``, run as tasks of a TrioLoop. A task of Trio's waits for one
by `TrioLoop.call`, and cancels it if it is cancelled itself.

Each run of Trio has one TrioLoop, made when it is first asked for (`trio_loop`). It ends with the run, and so do all
its connections: Trio cancels its system tasks then.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

import trio

from rdmanet.base.notifier import TrioNotifier
from rdmanet.stream.loop_context import end_loop_contexts

_T = TypeVar("_T")

logger = logging.getLogger("rdmanet")

_TIMERS = 100  # cancelled ones are looked for if there are more


class TrioLoop(asyncio.AbstractEventLoop):
    """asyncio's loop, as far as transports use it. `trio_loop` creates it.

    :ivar notifier: the same run loop, for those who wait in tasks of Trio's
    """

    def __init__(self) -> None:
        self.notifier = TrioNotifier()
        self._token = trio.lowlevel.current_trio_token()
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []  # a heap
        self._timers_max = _TIMERS
        self._wake = trio.Event()
        self._closed = False
        trio.lowlevel.spawn_system_task(self._run, name="rdmanet loop")

    # -- for tasks of Trio's -----------------------------------------------------------------------------

    async def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of asyncio's, and return its result; if the caller is cancelled, so is the coroutine."""
        task = self.create_task(coroutine)
        waiter = trio.lowlevel.current_task()
        cancelled: list[Callable[[], Any]] = []

        def abort(raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
            cancelled.append(raise_cancel)
            task.cancel()
            return trio.lowlevel.Abort.FAILED  # not before the coroutine has undone what it began

        task.add_done_callback(lambda _: trio.lowlevel.reschedule(waiter))
        await trio.lowlevel.wait_task_rescheduled(abort)
        if task.cancelled() and cancelled:
            cancelled[0]()
        result: _T = task.result()
        return result

    # -- for transports: asyncio's methods ---------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call back in the next turn of the system task, which is after this turn of Trio's."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._wake.set()
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """``call_soon``, from any thread, and from the collector."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._token.run_sync_soon(self._append, handle)
        return handle

    def _append(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        self._wake.set()

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back after so many seconds of Trio's clock."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back when Trio's clock shows this."""
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if len(self._timers) >= self._timers_max:
            self._timers = [timer for timer in self._timers if not timer.cancelled()]
            heapq.heapify(self._timers)
            self._timers_max = max(_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, handle)
        if self._timers[0] is handle:
            self._wake.set()  # to sleep no longer than until then
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio's timers call this. They stay in the heap, and are not called."""

    def time(self) -> float:
        """Trio's clock, in seconds."""
        return trio.current_time()

    def create_future(self) -> asyncio.Future[Any]:
        """A future of asyncio's, for its coroutines."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task of asyncio's, whose steps the system task runs."""
        return asyncio.Task(coro, loop=self, **options)

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., object], *args: Any
    ) -> None:
        """Call back whenever the descriptor is readable, in a system task of its own."""
        self._check_open()
        self.notifier.add_reader(fd, lambda: self._enter(callback, *args))

    def remove_reader(self, fd: Any) -> bool:
        """Stop calling back."""
        self.notifier.remove_reader(fd)
        return True

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        """Trio's, which uses a thread of Trio's unless the host is a numeric address."""
        found = self.create_future()

        async def look_up() -> None:
            try:
                result = await trio.socket.getaddrinfo(host, port, **hints)
            except Exception as exc:
                if not found.done():
                    found.set_exception(exc)
            else:
                if not found.done():
                    found.set_result(result)

        trio.lowlevel.spawn_system_task(look_up)
        return await found

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log what a callback raised."""
        logger.error("%s", context.get("message"), exc_info=context.get("exception"))

    def get_debug(self) -> bool:
        """False."""
        return False

    def is_running(self) -> bool:
        """Whether the run goes on."""
        return not self._closed

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._closed

    def close(self) -> None:
        """End all connections and servers of the loop."""
        self._enter(end_loop_contexts, self)
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    # -- the system task ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._wake = trio.Event()
                self._turn()
                if self._ready:
                    await trio.lowlevel.checkpoint()
                else:
                    with trio.move_on_at(self._timers[0].when() if self._timers else float("inf")):
                        await self._wake.wait()
        finally:
            self.close()

    def _turn(self) -> None:
        """Run the callbacks that are ready now, and then the timers that are due."""
        for _ in range(len(self._ready)):
            self._call(self._ready.popleft())
        now = self.time()
        while self._timers and (self._timers[0].cancelled() or self._timers[0].when() <= now):
            self._call(heapq.heappop(self._timers))

    def _call(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self._enter(handle._run)

    def _enter(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back where this is the running loop, for asyncio's tasks and time-outs."""
        before = asyncio._get_running_loop()  # of a host, if Trio is its guest
        asyncio._set_running_loop(self)
        try:
            callback(*args)
        finally:
            asyncio._set_running_loop(before)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the run of Trio's loop that this belongs to has ended")


_of_run: trio.lowlevel.RunVar[TrioLoop] = trio.lowlevel.RunVar("rdmanet.trio_loop")


def trio_loop() -> TrioLoop:
    """The TrioLoop of the caller's run.

    :raises RuntimeError: Trio does not run here
    """
    try:
        return _of_run.get()
    except LookupError:
        loop = TrioLoop()  # type: ignore[abstract]  # other methods raise NotImplementedError
        _of_run.set(loop)
        return loop
