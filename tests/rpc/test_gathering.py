"""The arrays of a message are read several at a time: all reading has ended when the first error is raised."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from net import Journal

from rdmanet.rpc.gathering import fetch
from rdmanet.rpc.packing import Block
from tests.support.waiting import begin

NBYTES = 100


def unpacking(count: int) -> Any:
    """What has come: so many blocks."""
    blocks = [Block(NBYTES * number, NBYTES) for number in range(count)]
    for block in blocks:
        block.used = NBYTES
    return SimpleNamespace(blocks=blocks, value="it", text_checks=list)


class Reader:
    """When it may go on, it fails at each block but the first, which it reads for ever."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.go_on = asyncio.Event()

    async def read(self, memory: memoryview, offset: int) -> None:
        number = offset // NBYTES
        self.journal(f"reads {number}")
        try:
            await self.go_on.wait()
            if number:
                raise ConnectionError(f"no block {number}")
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.sleep(0))  # a device takes its time
            self.journal(f"ends {number}")


async def test_all_is_read():
    offsets = []

    async def read(memory: memoryview, offset: int) -> None:
        offsets.append(offset)

    assert await fetch(asyncio.get_running_loop(), unpacking(5), read) == "it"
    assert sorted(offsets) == [NBYTES * number for number in range(5)]


async def test_one_fails():
    reader = Reader()
    reader.go_on.set()
    with pytest.raises(ConnectionError, match="no block 1"):
        await fetch(asyncio.get_running_loop(), unpacking(5), reader.read)
    assert sorted(reader.journal.entries) == ["ends 0", "ends 1", "reads 0", "reads 1"]


@pytest.mark.parametrize("times", [1, 2])
async def test_it_is_cancelled(times: int):
    """Once more while it waits for the end of what is read."""
    reader = Reader()
    (task,) = await begin(fetch(asyncio.get_running_loop(), unpacking(5), reader.read))
    await reader.journal.until("reads 1")
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(reader.journal.entries) == ["ends 0", "ends 1", "reads 0", "reads 1"]


async def test_one_is_cancelled_by_somebody_else():
    """Its block is not filled, so there is no value."""
    reader = Reader()
    before = asyncio.all_tasks()
    (task,) = await begin(fetch(asyncio.get_running_loop(), unpacking(5), reader.read))
    await reader.journal.until("reads 1")
    (asyncio.all_tasks() - before - {task}).pop().cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(reader.journal.entries) == ["ends 0", "ends 1", "reads 0", "reads 1"]
