"""A pool of registered buffers that tasks wait for.

A buffer that comes back goes to the task that has waited longest: the pool wakes it, and counts the buffer as promised
until the task runs and takes it. One that is cancelled in between passes its promise on.
"""

from __future__ import annotations

import collections
from typing import Literal

from rdmanet._core import PD, BufferPool, PooledBuffer
from rdmanet.base.notifier import Future, Home, Notifier, current_notifier, wake

__all__ = ["AsyncBufferPool"]


class AsyncBufferPool(BufferPool):
    """A BufferPool with a queue of waiting tasks: `with await pool.get(100) as buffer:`.

    It belongs to the thread of its event loop, like everything in this module. The parameters are BufferPool's.
    """

    # Of the class: the garbage collector clears a pool's own attributes before a view of its buffers, in the same
    # garbage, lets go of the buffer and calls _freed(). Nobody waits then.
    _waiting: collections.deque[Future] = collections.deque(maxlen=0)
    _promised = 0

    def __init__(
        self,
        pd: PD,
        buffer_bytes: int,
        count: int,
        *,
        huge_pages: bool | Literal["try"] = False,
        notifier: Notifier | None = None,
    ) -> None:
        self._waiting = collections.deque()
        self._promised = 0  # buffers that woken tasks are about to take
        self._home = Home()
        self._notifier = current_notifier() if notifier is None else notifier
        super().__init__(pd, buffer_bytes, count, huge_pages=huge_pages)

    async def get(self, nbytes: int | None = None) -> PooledBuffer:
        """Wait for a buffer and acquire() it; first come, first served. Cancelling takes none.

        :raises ValueError: nbytes is more than a buffer has, or the pool is closed
        :raises RuntimeError: this is not the loop's thread
        """
        self._home.check(self)
        self.fits(nbytes)
        place = self._waiting.append
        while self.available <= self._promised:
            future = self._notifier.create_future()
            place(future)
            place = self._waiting.appendleft  # in case acquire() is quicker than the woken task
            try:
                await future
            except BaseException:
                if future in self._waiting:
                    self._waiting.remove(future)
                else:
                    self._promised -= 1
                    self._freed()
                raise
            self._promised -= 1
            self.fits(nbytes)
        return self.acquire(nbytes)

    def close(self) -> None:
        """Free the memory; tasks that wait for a buffer get ValueError. Closing it again does nothing.

        :raises OSError: EBUSY while buffers are lent or used by pending requests; the pool stays open
        """
        super().close()
        waiting = list(self._waiting)
        self._waiting.clear()
        self._promised += len(waiting)
        wake(waiting)

    def _freed(self) -> None:
        while self._waiting and self.available > self._promised:
            self._promised += 1
            wake([self._waiting.popleft()])
