"""Ctrl-C: the first ends a command in good order, and no further one can make a traceback of that.

asyncio's own way cancels the task for the first SIGINT and raises KeyboardInterrupt for each that follows, in the midst
of what ends then, and so does Python outside of a loop. Here the first one cancels the task, or raises
KeyboardInterrupt where none runs; from that moment on SIGINT is what `then` says: ignored, or the end of the process.
While a loop is made or closed, the first one is only remembered: an exception there would leave the loop open.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")

_then: signal.Handlers = signal.SIG_DFL
_task: asyncio.Task[Any] | None = None
_has_loop = False  # run() is making one, closing it, or between the two
_heard = False  # while it was making or closing one


def hear_once(then: signal.Handlers = signal.SIG_DFL) -> None:
    """From now on, where SIGINT does what it does in every program of Python's; not where it is ignored, say."""
    global _then
    _then = then
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _heard
    signal.signal(signal.SIGINT, _then)
    if _task is not None and not _task.done():
        _task.cancel()
        _task.get_loop().call_soon_threadsafe(lambda: None)  # it may be asleep
    elif _has_loop:
        _heard = True
    else:
        raise KeyboardInterrupt


def run(
    main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _T:
    """asyncio.run(), in which Ctrl-C cancels `main` once.

    :raises KeyboardInterrupt: it did, or the loop was being made or closed just then
    """
    global _has_loop

    async def cancellable() -> _T:
        global _task
        _task = asyncio.current_task()
        try:
            if _heard:
                raise asyncio.CancelledError
            return await main
        finally:
            _task = None

    _has_loop = True
    try:
        with contextlib.closing(main), asyncio.Runner(loop_factory=loop_factory) as runner:
            result = runner.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        _has_loop = False
    if _heard:
        raise KeyboardInterrupt
    return result
