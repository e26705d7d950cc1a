"""Memory for what is read from a peer is there before the device needs it.

Theory
------
A device needs the pages of memory that is registered with it, so the kernel provides all of them at its registration.
That takes about as long as copying as many bytes, much longer on a busy host, and the loop waits for it. A peer chooses
how much that is. So they are provided before, PIECE_BYTES at a time. After STEP_S others have their turn; and one task
of a loop does this at a time, in turns, so that many of them take no longer in one turn than one.

Memory that has its pages costs a system call for each piece, and no turn.

A copy into memory that has no pages gets them as it goes. So it is done in the same pieces.
"""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from rdmanet._core import bring_in
from rdmanet.stream import leaving  # noqa: F401  memory goes in pieces, too

LEAST_BYTES: Final = 4 << 20
"""Less is provided in one go, by whoever needs it first."""
PIECE_BYTES: Final = 2 << 20
"""A huge page."""
STEP_S: Final = 0.001

_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def brought_in(loop: asyncio.AbstractEventLoop, memory: Any) -> None:
    """Have all pages of writable memory, without holding up the loop."""
    nbytes = memoryview(memory).nbytes
    if nbytes >= LEAST_BYTES:
        await _in_pieces(loop, nbytes, lambda offset: bring_in(memory, PIECE_BYTES, offset))


async def filled(loop: asyncio.AbstractEventLoop, memory: memoryview, data: memoryview) -> None:
    """Copy bytes that nobody changes meanwhile into memory of the same length, without holding up the loop."""

    def copy(offset: int) -> None:
        memory[offset : offset + PIECE_BYTES] = data[offset : offset + PIECE_BYTES]

    if data.nbytes < LEAST_BYTES:
        memory[:] = data
    else:
        await _in_pieces(loop, data.nbytes, copy)


async def _in_pieces(loop: asyncio.AbstractEventLoop, nbytes: int, do: Callable[[int], None]) -> None:
    """Do something for each piece of so many bytes, given its offset."""
    await in_turns(loop, [functools.partial(do, offset) for offset in range(0, nbytes, PIECE_BYTES)])


async def in_turns(loop: asyncio.AbstractEventLoop, steps: Sequence[Callable[[], None]]) -> None:
    """Do these, each of which is short, without holding up the loop."""
    lock = _locks.setdefault(loop, asyncio.Lock())
    left = iter(steps)
    step = next(left, None)
    while step is not None:
        async with lock:  # which is passed on in the order in which it was asked for
            ends_at = time.monotonic() + STEP_S  # a loop's clock may stand still in a turn
            while step is not None:
                step()
                step = next(left, None)
                if time.monotonic() >= ends_at:
                    break
            if step is not None:
                await asyncio.sleep(0)
