"""The memory of a message's arrays (packing.py) is gathered, filled and read, without holding up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from rdmanet._core import unfilled
from rdmanet.rpc.copies import PIECE_BYTES, Steps, done
from rdmanet.rpc.packing import Block, Unpacking
from rdmanet.rpc.paging import brought_in, in_turns
from rdmanet.rpc.snapshot import MOMENT_BYTES

_AT_ONCE: Final = 2
"""How many READs of one message's arrays are under way: a device reads while memory is provided for the next one."""

Read = Callable[[memoryview, int], Awaitable[None]]
"""Fills memory from a place of the message's."""


async def gather(
    loop: asyncio.AbstractEventLoop,
    nbytes: int,
    copies: Callable[[memoryview, int], Steps],
    may_change: bool,
) -> memoryview:
    """New memory, into which bytes are copied.

    :param copies: what copies them there, in pieces of a length
    :param may_change: somebody may change them meanwhile: each piece of MOMENT_BYTES is of one moment. Else nobody may
    """
    memory = memoryview(unfilled(nbytes))
    await brought_in(loop, memory)
    if not may_change:
        await in_turns(loop, copies(memory, PIECE_BYTES))
    elif nbytes > MOMENT_BYTES:
        await in_turns(loop, copies(memory, MOMENT_BYTES))
    else:
        await in_turns(loop, [lambda: done(copies(memory, MOMENT_BYTES))])
    return memory


async def fill(loop: asyncio.AbstractEventLoop, unpacking: Unpacking) -> Any:
    """Copy what has come in the message. Returns the value.

    :raises ValueError: a text is none
    """
    memory = unpacking.packed.memory
    assert isinstance(memory, memoryview)
    copies = [copy for block in unpacking.blocks for copy in block.copies_from(memory)]
    await in_turns(loop, copies + unpacking.text_checks())
    return unpacking.value


async def fetch(loop: asyncio.AbstractEventLoop, unpacking: Unpacking, read: Read) -> Any:
    """Read what is on loan. Returns the value.

    :raises ValueError: a text is none
    """
    left = iter(unpacking.blocks)
    if len(unpacking.blocks) > 1:
        reads = (_read(loop, left, read) for _ in range(_AT_ONCE))
        await _together([loop.create_task(each, name="rpc read") for each in reads])
    else:
        await _read(loop, left, read)
    await in_turns(loop, unpacking.text_checks())
    return unpacking.value


async def _read(loop: asyncio.AbstractEventLoop, blocks: Iterator[Block], read: Read) -> None:
    """Read those that are left."""
    for block in blocks:
        memory = memoryview(block.memory)[: block.used]
        await brought_in(loop, memory)
        await read(memory, block.start)
        block.copy_out()


async def _together(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until all of these have ended; if one fails, or this is cancelled, the others are cancelled.

    An asyncio.TaskGroup would leave its error, with the tasks' frames and their memory, to the garbage collector.
    """
    error: BaseException | None = None
    are_cancelled = False
    try:
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(
                    [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
                )
            except asyncio.CancelledError as exc:
                error = exc
            error = error or _error_of(tasks)
            if error is not None and not are_cancelled:
                are_cancelled = True
                _cancel(tasks)
        if error is not None:
            raise error
    finally:
        tasks.clear()  # which have errors, whose tracebacks have this frame
        del error


def _error_of(tasks: list[asyncio.Task[None]]) -> BaseException | None:
    """The error of one that has failed."""
    for task in tasks:
        if task.done():
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                return error
    return None


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
