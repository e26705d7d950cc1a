# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""Senders that wait until a transport or the loop takes more: who goes next, and how many at a time.

Theory
------
A transport that has enough says so, and later, that it takes more. If all who wait were woken then, most would find it
full again, and wait anew: with a thousand of them each would be woken hundreds of times. So they wait in one queue, and
the first `_most` of it are woken. They write in that order, in one turn of the loop. If the transport still takes more
in the next turn, twice as many are woken. Who finds it full goes back to where it was, and half as many are woken next
time. So a sender is woken some two times, large messages go one at a time, and many small ones in few turns.

Whoever comes while others wait goes behind them.

A transport may take all that it is given. So the streams of a connection have a second queue, `Rounds`: they are paused
when they have written so much in a turn of the loop, however many they are, and resumed in the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

_WOKEN_MOST: Final = 1 << 20
"""To double that any more would make no difference, and `_most` is an integer of C."""


class Turns:
    """The queue of one transport.

    :ivar busy: whether a sender has to `wait` before it writes
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.busy = False
        self._loop = loop
        self._is_open = True
        self._is_over = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = 0  # those that were, and have not run since
        self._back = 0  # those of them that have gone back to the queue
        self._most = 1
        self._turn_ends = False  # `_turn_has_ended` is about to be called

    def pause(self) -> None:
        """The transport has enough."""
        self._is_open, self.busy = False, not self._is_over

    def resume(self) -> None:
        """The transport takes more."""
        self._is_open = True
        if not self._woken and not self._turn_ends:
            self._wake()

    def end(self) -> None:
        """Nothing can be written any more: let all go."""
        self._is_over, self.busy = True, False
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def wait(self) -> None:
        """Wait for a turn, and write then before anything else is awaited. At the end of the connection return, too."""
        was_woken = False
        while not self._is_over:
            waiter: asyncio.Future[None] = self._loop.create_future()
            if was_woken:
                self._waiting.insert(self._back, waiter)
                self._back += 1
                self._has_run()
            else:
                self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._has_run()
                elif waiter in self._waiting:
                    self._waiting.remove(waiter)
                raise
            if self._is_over:
                return
            if self._is_open:
                self._has_run()
                return
            was_woken = True

    def _has_run(self) -> None:
        """One that was woken writes now, goes back, or has gone."""
        self._woken -= 1
        if self._woken == 0 and not self._is_over:
            self._ends_turn()

    def _ends_turn(self) -> None:
        self._turn_ends = True
        self._loop.call_soon(self._turn_has_ended)

    def _turn_has_ended(self) -> None:
        self._turn_ends = False
        if self._back:
            self._most = max(1, self._most // 2)
        elif self._is_open:
            self._most = min(2 * self._most, _WOKEN_MOST)
        self._back = 0
        if self._is_open:
            self._wake()

    def _wake(self) -> None:
        waiting = self._waiting
        for _ in range(min(self._most, len(waiting))):
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._woken += 1
        if not self._woken:
            if waiting:  # those were cancelled, and will be gone in the next turn
                self._ends_turn()
            else:
                self.busy = False
                self._most = 1


class Rounds(Turns):
    """The queue of senders who may write so much together in a turn of the loop, whatever the transport takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, budget: int) -> None:
        super().__init__(loop)
        self._budget = self._left = budget

    def waits(self, has_turn: bool) -> bool:
        """Whether a sender has to `wait`. One that has its turn goes on until all is spent."""
        return self.busy and not (has_turn and self._is_open)

    def spent(self, cost: int) -> bool:
        """This was written. Returns whether it was the last of this turn. Then its sender resumes this in the next."""
        self._left -= cost
        if self._left > 0:
            return False
        self._left = self._budget
        self.pause()
        return True
