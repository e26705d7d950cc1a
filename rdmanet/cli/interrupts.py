"""Ctrl-C: the first ends a command in good order, and no further one can make a traceback of that.

asyncio's own way cancels the task for the first SIGINT and raises KeyboardInterrupt for each that follows, in the midst
of what ends then, and so does Python outside of a loop. Here the first one cancels the task, or raises
KeyboardInterrupt where none runs; from that moment on SIGINT is what `then` says: ignored, or the end of the process.
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


def hear_once(then: signal.Handlers = signal.SIG_DFL) -> None:
    """From now on, where SIGINT does what it does in every program of Python's; not where it is ignored, say."""
    global _then
    _then = then
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _then)
    if _task is None or _task.done():
        raise KeyboardInterrupt
    _task.cancel()
    _task.get_loop().call_soon_threadsafe(lambda: None)  # it may be asleep


def run(
    main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _T:
    """asyncio.run(), in which Ctrl-C cancels `main` once.

    :raises KeyboardInterrupt: it did
    """

    async def cancellable() -> _T:
        global _task
        _task = asyncio.current_task()
        try:
            return await main
        finally:
            _task = None

    with contextlib.closing(main), asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
