"""Large memory that nobody uses any more goes later, in pieces, and others have their turn between two of them.

Theory
------
New pages cost more than what is read into them, above all on a virtual machine, whose host has to find them as well. A
program that gets a gigabyte in a call often gets another one soon. And to unmap a gigabyte takes the kernel 3 to 50 ms,
for which a loop would wait: at the end of a call, or where the program lets go of a result. So memory of `unfilled()`
that is too much to be kept for good is put into a list, from which it can be used again (_pyx/reuse.pxi). If a loop
runs in the thread that lets go of it, the loop looks every LINGER_S how much of the list nobody has needed since its
last look, and unmaps that: PIECE_BYTES at a time, for STEP_S in each of its turns. Meanwhile the kernel may take the
pages if it runs short. When the list is empty, nothing is left to be done, and no timer is.

One loop of the process does so at a time, as long as it runs, whichever thread lets go of memory: two would take each
other's looks for their own, and unmap what went just now. Where no loop runs, nobody is held up, and all of the list
goes at once, unless another thread's loop is at it; so it does when that loop is closed.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref

from rdmanet._core import call_on_leaving, unmap_some, unneeded_bytes

LINGER_S = 2.0
PIECE_BYTES = 2 << 20
STEP_S = 0.001
_ALL = (1 << 63) - 1

_at_it: weakref.ref[_Unmapping] | None = None
"""What has begun last."""


class _Unmapping:
    """The work of one loop, whose timer has it. If that is dropped, because the loop is closed, all goes at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        global _at_it
        self.loop = loop
        self._unneeded = 0
        self._is_over = False
        _at_it = weakref.ref(self)
        # No timer yet: memory goes at any place, also while the loop sorts its timers.
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        unneeded_bytes()
        self.loop.call_later(LINGER_S, self._look)

    def _look(self) -> None:
        if _begun_last() is self:
            self._unneeded = unneeded_bytes()
            self._go_on()
        else:  # another loop has begun while this one did not run
            self._is_over = True
            _more_leaves()

    def _go_on(self) -> None:
        ends_at = time.monotonic() + STEP_S  # a loop's clock may stand still in a turn
        while self._unneeded > 0:
            unmap_some(min(PIECE_BYTES, self._unneeded))
            self._unneeded -= PIECE_BYTES
            if time.monotonic() >= ends_at:
                self.loop.call_soon(self._go_on)
                return
        if unmap_some(0):
            self.loop.call_later(LINGER_S, self._look)
            return
        self._end()
        if unmap_some(0):
            _more_leaves()  # another thread has let go of it meanwhile, and left it to us

    def _end(self) -> None:
        global _at_it
        self._is_over = True
        if _begun_last() is self:
            _at_it = None

    def __del__(self) -> None:
        if not self._is_over:
            self._end()
            unmap_some(_ALL)


def _begun_last() -> _Unmapping | None:
    return None if _at_it is None else _at_it()


def _more_leaves() -> bool:
    """Have the loop that is at it see to it, or the one that runs here; False: there is none."""
    at_it = _begun_last()
    if at_it is not None and at_it.loop.is_running():
        return True
    try:
        _Unmapping(asyncio.get_running_loop())
    except RuntimeError:
        return False
    return True


def _forked() -> None:
    """The parent's loop says in the child that it runs."""
    global _at_it
    _at_it = None


call_on_leaving(_more_leaves)
os.register_at_fork(after_in_child=_forked)
