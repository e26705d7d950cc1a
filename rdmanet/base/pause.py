"""To wait for some time, whatever the program's tests have made of asyncio.sleep().

Tests of programs replace that by what does not wait, so that theirs are fast. Ours would then ask and try without end.
"""

from __future__ import annotations

import asyncio


async def pause(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Wait so many seconds; cancelling it ends the wait."""
    over = loop.create_future()
    timer = loop.call_later(seconds, _end, over)
    try:
        await over
    finally:
        timer.cancel()


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():  # it may be cancelled in the same turn of the loop
        over.set_result(None)
