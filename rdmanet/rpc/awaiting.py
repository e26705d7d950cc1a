"""What a call awaits beside its answer: its turn, before it is sent, and a result that is not all in the answer.

Most calls need none of this (unary.pyx), so it is not compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from rdmanet.rpc.errors import late, not_begun, own
from rdmanet.rpc.pending import CallDetails, Pending
from rdmanet.rpc.response import Response
from rdmanet.rpc.stats import ending_of
from rdmanet.rpc.streaming import Cut, Results


async def turn(calling: Any, call: CallDetails) -> None:
    """Wait until a call can be sent on a channel, and send it then before anything else is awaited."""
    turns, book = calling.link.turns, calling.book
    try:
        async with asyncio.timeout_at(call.deadline):
            while True:
                if call.waits and calling._is_full():
                    await calling._places.wait()
                if not turns.busy:
                    return
                await turns.wait()
                if not call.waits or len(book) < book.calls_max:
                    return
    except TimeoutError:
        is_own = call.waits and calling._is_full()  # else the server does not read
        raise not_begun(own(late()) if is_own else late()) from None


async def fetched(
    calling: Any, pending: Pending, result: Any, deadline: float | None, timer: asyncio.TimerHandle | None
) -> Any:
    """The end of a call of which an answer has come: the result, which may still have to be read."""
    counter = pending.counter
    try:
        found = await calling.fetching.take(pending, result, deadline)
        counter.ok += 1
        counter.seconds += calling.link.heard_at - pending.begun_at
        return found
    except BaseException as exc:
        counter.count_failed(ending_of(exc), calling.loop.time() - pending.begun_at)
        raise
    finally:
        del pending  # which has the error, and that has this frame
        if timer is not None:
            timer.cancel()


async def heard(caller: Any, details: CallDetails, response: Response) -> Any:
    """A call whose `Response` is filled in while it runs."""
    with response.during_call():
        return await caller.unary(details)


def heard_items(caller: Any, details: CallDetails, response: Response) -> Results:
    """The same for a call that streams its results."""

    async def items_of() -> AsyncGenerator[Any, None]:
        with cut, response.during_call():
            async with contextlib.aclosing(caller.stream(details)) as items:
                async for item in items:
                    yield item

    return Results(cut := Cut(), items_of)
