"""For tests of programs that call: a clock that the test moves, and faults of connections in memory.

A client and a server of one loop find each other by a name, without sockets and devices: ``transport="memory"``, for
`serve()` and `connect()` (in_memory.py). Everything else is as over the other transports. docs/testing.md has examples.

Theory
------
All times of rdmanet.rpc, and of asyncio, are those of the loop's ``time()``: deadlines, pauses before another try,
keepalive. On the loop of a `Clock` that stands still. So when nothing is left to be done, a loop that would sleep until
its next timer waits for whatever else may come, or for the test: `advance` moves the clock from one timer to the next,
and each time the loop does all that follows from it. What other threads do for the loop (``asyncio.to_thread``) is
waited for, too. What other processes do is not, nor what a device has under way. A test that awaits what only a timer
can bring, and does not move the clock beside that, would hang for ever: that is an error.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rdmanet.errors import shown
from rdmanet.rpc.in_memory import Listener
from rdmanet.rpc.server import Server

__all__ = ["Clock", "cut", "freeze", "thaw"]

_T = TypeVar("_T")


class Clock:
    """The time of an event loop, in seconds from 0, which passes when a test says so.

    ``clock.run(main())`` is as ``asyncio.run(main())``, on a loop with this time. `new_loop` makes one for other
    runners. ``time.time()`` and ``time.monotonic()`` are as ever.

    :ivar now: what ``loop.time()`` says
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._until = 0.0
        self._moved: asyncio.Future[None] | None = None  # of whoever moves it

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on a new loop, and return its result; see ``asyncio.run``.

        :raises RuntimeError: a loop runs in this thread; or all tasks wait for the clock, and nobody moves it
        """
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            return runner.run(main)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """A loop of this time: asyncio's for sockets, not uvloop's, whose time is the machine's."""
        return _Loop(self)

    async def advance(self, seconds: float) -> None:
        """Let so much time pass: all that is due until then happens, in its order, and what follows from it.

        0 lets no time pass: it waits until nothing is left to be done now. Cancelling leaves the clock where it is.

        :raises ValueError: `seconds` is less than 0, or no finite number
        :raises RuntimeError: the loop that runs is not one of this clock, or another task moves the clock
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"Clock.advance: {shown(seconds)} is no number of seconds from 0 on")
        loop = asyncio.get_running_loop()
        if not isinstance(loop, _Loop) or loop.clock is not self:
            raise RuntimeError(
                "Clock.advance: this loop has another time: use clock.run(), or clock.new_loop()"
            )
        if self._moved is not None:
            raise RuntimeError("Clock.advance: another task moves this clock")
        self._until, self._moved = self.now + seconds, loop.create_future()
        try:
            await self._moved
        finally:
            self._moved = None

    def _passes(self, seconds: float | None) -> bool:
        """Nothing is left to be done for so long, or at all. Whether this changes that."""
        if self._moved is None or self._moved.done():
            return False
        if seconds is not None and self.now + seconds <= self._until:
            self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))
        else:
            self.now = self._until
            self._moved.set_result(None)
        return True


class _Loop(asyncio.SelectorEventLoop):
    """:ivar at_work: how many functions other threads run for it"""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at_work = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.at_work += 1
        future.add_done_callback(self._is_done)
        return future

    def _is_done(self, _: object) -> None:
        self.at_work -= 1

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        """It waits in a thread of its own until the others have ended."""
        self.at_work += 1
        try:
            await super().shutdown_default_executor(*args, **options)
        finally:
            self.at_work -= 1


class _Selector(selectors.DefaultSelector):
    """Waits for descriptors, and not for timers."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        found = super().select(0)
        if found or self._loop.at_work:
            return found or super().select(None)
        if not self._loop.clock._passes(timeout):
            if timeout is not None and len(self.get_map()) == 1:  # that by which other threads wake it
                text = f"the next timer is due in {timeout:g} s: a task beside it awaits clock.advance()"
                raise RuntimeError(f"all tasks wait for the clock, and nobody moves it; {text}")
            return super().select(None)
        return found


def cut(server: Server) -> None:
    """End all connections of a server in memory, as if its process were killed. It goes on to listen.

    Its clients get ConnectionResetError. To keep clients from connecting again, close the server, too.

    :raises ValueError: the server is not served by ``transport="memory"``; as for the functions below
    """
    for transport in list(_listener(server).transports):
        transport.abort()


def freeze(server: Server) -> None:
    """Let nothing pass on the connections of a server in memory, as if its host had vanished, until `thaw`.

    Clients connect, and hear nothing. What is written waits.
    """
    _listener(server).freeze(True)


def thaw(server: Server) -> None:
    """Let everything pass again, and first of all what waits."""
    _listener(server).freeze(False)


def _listener(server: Server) -> Listener:
    if not isinstance(server._listener, Listener):
        raise ValueError(f'{shown(server)} is not served by transport="memory"')
    return server._listener
