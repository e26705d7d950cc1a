# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The limits of many short waits, with one timer for all of a loop.

Theory
------
A connection waits a few times for its peer, and each wait has a limit that it mostly does not come near: ten seconds
for connecting, thirty for closing. A timer of the loop for each of them would be made, set and stopped, and all for
nothing. Here a wait is an entry in a line, and its end takes it out. Waits of the same length are over in the order in
which they began, so there is one line for each length, and the first of a line is the next whose time is up. The timer
is set for the earliest of these. It stays as it is when that wait ends: it expires then, finds nothing, and is set for
the earliest that is left.

Mostly there are a few lengths. But a program that passes what is left of a deadline as ``connect_timeout`` has another
one each time. So there are at most LINES_MAX lines, and any further wait has its own timer.

A blocking stream's loop runs only while it is not idle (streams/private_loop.py), and a timer that stays would have it
run for nothing. It has few waits, and each has its own timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Final

RESOLUTION_S: Final = 0.001
"""A timer of uvloop may be that early."""
LINES_MAX: Final = 32
"""How many lengths may have a line."""


class Wait:
    """One wait, as asyncio.TimerHandle: `cancel` it when it has ended."""

    def __init__(
        self, line: dict[Wait, None], over: float, call: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        """
        :param line: where it stands as long as it lasts
        :param over: when its time is up, by the loop's clock
        :param call: to be called then, with the arguments
        """
        self.line = line
        self.over = over
        self.call = call
        self.arguments = arguments

    def cancel(self) -> None:
        """It has ended. Later calls do nothing."""
        self.line.pop(self, None)

    def when(self) -> float:
        """When its time is up."""
        return self.over

    def cancelled(self) -> bool:
        """Whether it has ended, or its time was up."""
        return self not in self.line

    def run(self) -> None:
        """Its time is up."""
        if self in self.line:
            del self.line[self]
            self.call(*self.arguments)


class Waits:
    """The waits of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lines: dict[float, dict[Wait, None]] = {}  # by length
        self._due: dict[Wait, None] = {}  # whose time is up, and that are called in this turn of the loop
        self._has_timers = hasattr(loop, "idle")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def begin(
        self, seconds: float, call: Callable[..., object], *arguments: Any
    ) -> Wait | asyncio.TimerHandle:
        """Call this after so many seconds, unless the wait is cancelled before."""
        line = self._lines.get(seconds)
        if line is None:
            if self._has_timers or not self._has_room():
                return self._loop.call_later(seconds, call, *arguments)
            line = self._lines[seconds] = {}
        over = self._loop.time() + seconds
        wait = Wait(line, over, call, arguments)
        line[wait] = None
        if over < self._timer_at:
            self._set_timer(over)
        return wait

    def _has_room(self) -> bool:
        """Whether there may be one line more."""
        if len(self._lines) == LINES_MAX:
            self._lines = {seconds: line for seconds, line in self._lines.items() if line}
        return len(self._lines) < LINES_MAX

    def close(self) -> None:
        """Forget them all, but for those with a timer of their own."""
        for line in (*self._lines.values(), self._due):
            line.clear()
        self._lines.clear()
        if self._timer is not None and not self._loop.is_closed():
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # In an empty contextvars.Context: the first to use this is not the only one.
        self._timer = contextvars.Context().run(self._loop.call_at, when, self._expired)
        self._timer_at = when

    def _expired(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now, earliest = self._loop.time() + RESOLUTION_S, math.inf
        for seconds, line in list(self._lines.items()):
            for wait in list(takewhile(lambda wait: wait.over <= now, line)):
                del line[wait]
                wait.line, self._due[wait] = self._due, None
                self._loop.call_soon(wait.run)  # by itself: if it raises, the others are not affected
            if line:
                earliest = min(earliest, next(iter(line)).over)
            else:
                del self._lines[seconds]
        if earliest < math.inf:
            self._set_timer(earliest)
