"""The end of an attempt to connect: its task is told it from the program's own cancellation."""

import asyncio

import pytest

from rdmanet.loop.limit import Limit
from rdmanet.stream.waits import Waits
from tests.support.waiting import loop_turns


async def limited(limits: list[Limit], waits: Waits, seconds: float) -> str:
    limits.append(Limit(waits, seconds))
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        if not limits[0].was_it():
            raise
    return "late" if limits[0].is_late else "ended"


async def begun(seconds: float = 1000.0) -> tuple[asyncio.Task[str], Limit, Waits]:
    limits: list[Limit] = []
    waits = Waits(asyncio.get_running_loop())
    task = asyncio.ensure_future(limited(limits, waits, seconds))
    await loop_turns(1)
    return task, limits[0], waits


async def test_its_time_is_up():
    task, _, _ = await begun(0.01)
    assert await task == "late" and not task.cancelling()


async def test_it_is_ended_and_goes_on():
    task, limit, _ = await begun()
    limit.end()
    limit.end()
    assert await task == "ended" and not task.cancelling()
    assert not limit.was_it() and not limit.has_ended


async def test_one_that_is_lifted_has_no_time():
    task, limit, waits = await begun(0.01)
    limit.lift()
    later = asyncio.get_running_loop().create_future()
    waits.begin(0.01, later.set_result, None)
    await later
    assert not limit.has_ended
    limit.end()
    assert await task == "ended"


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_programs_own_cancellation_is_not_taken_for_it(is_first: bool):
    task, limit, _ = await begun()
    for end in (task.cancel, limit.end) if is_first else (limit.end, task.cancel):
        end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1
