"""A call that is made twice, because its first server is slow: the first result counts (pool.py).

Theory
------
Of many servers one is slow at a time: it collects garbage, or its CPU is busy. If a call has no result after
``Retry.hedge_seconds``, it is made at a server that it has not been to, as well. Whichever has a result first gives it
to the caller, and the other call is cancelled. If one fails, the other one decides. So it is for methods that may be
called twice, and not for calls with a stream of the caller's, or that write into the caller's memory.

What the method says beside its result (response.py) is that of the call which gave the result.

It has ended when both have, as its arguments are the caller's again then. A server that reads them by reference has
let go of them a quarter of a second after the end of its call, whatever it does (lending.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rdmanet.rpc.lending import until_done
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.response import Response
from rdmanet.rpc.tried import Tried

Make = Callable[[Tried], Coroutine[Any, Any, Any]]


async def hedged(
    loop: asyncio.AbstractEventLoop,
    make: Make,
    call: CallDetails,
    seconds: float,
    has_other: Callable[[Tried], bool],
) -> Any:
    """Make a call, and once more if it has no result after so many seconds.

    :param has_other: whether there is a server to which it has not been
    """
    responses, calls = (Response(), Response()), [call, call]
    if call.response is not None:
        calls = [call.carrying(call.metadata, each) for each in responses]
    first, second = Tried(calls[0]), Tried(calls[1])
    tasks: list[asyncio.Task[Any]] = [loop.create_task(make(first), name=call.method.label)]
    try:
        await asyncio.wait(tasks, timeout=seconds)
        if not tasks[0].done() and has_other(first):
            second.been = first.been
            tasks.append(loop.create_task(make(second), name=call.method.label))
        while (found := _result_of(tasks)) is None and not all(task.done() for task in tasks):
            await asyncio.wait(
                [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
        last = found or tasks[0]
        if call.response is not None:
            call.response.take(responses[tasks.index(last)])
        return last.result()
    finally:
        await _ended(tasks)
        tasks.clear()  # which have errors, whose tracebacks have this frame


def _result_of(tasks: list[asyncio.Task[Any]]) -> asyncio.Task[Any] | None:
    """One that has a result."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is None:
            return task
    return None


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel those that run, and wait for them. Of their errors nobody need hear."""
    for task in tasks:
        task.cancel()
    await until_done(asyncio.gather(*tasks, return_exceptions=True))
