"""Ctrl-C: the first one ends a command in good order, and further ones cannot interrupt that with a traceback.

asyncio cancels the task on the first SIGINT and raises KeyboardInterrupt on each further one, in the middle of the
clean-up; outside a loop Python does the same. Here the first SIGINT cancels the task, or raises KeyboardInterrupt if no
task is running. From then on SIGINT does what `then` says: nothing, or it ends the process. While a loop is created
or closed, the first SIGINT is only remembered: an exception there would leave the loop open.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

_T = TypeVar("_T")

_then: signal.Handlers = signal.SIG_DFL
_task: asyncio.Task[Any] | None = None
_has_loop = False  # run() is creating a loop, running it, or closing it
_heard = False  # SIGINT came while run() was creating or closing a loop


def hear_once(then: signal.Handlers = signal.SIG_DFL) -> None:
    """Handle SIGINT from now on, if Python's own handler is installed; leave it alone if it is ignored, for example."""
    global _then
    _then = then
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _heard
    signal.signal(signal.SIGINT, _then)
    if _task is not None and not _task.done():
        _task.cancel()
        _task.get_loop().call_soon_threadsafe(lambda: None)  # wake the loop
    elif _has_loop:
        _heard = True
    else:
        raise KeyboardInterrupt


def run(
    main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _T:
    """asyncio.run(), except that Ctrl-C cancels `main` once.

    :raises KeyboardInterrupt: Ctrl-C came while `main` ran, or while the loop was being created or closed
    """
    global _has_loop
    import asyncio  # for commands that have a loop only

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
