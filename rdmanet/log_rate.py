"""What strangers do is logged, but they cannot fill the log.

At most one line a second for each cause, in all of the process; the next line tells how many were left out. The
embedded device does the same with what it warns of.
"""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["due", "warn"]

_lock = threading.RLock()  # the garbage collector may end a connection under it
# By cause: in which second there was a line, and how many were left out since.
_said: dict[str, tuple[int, int]] = {}


def due(cause: str) -> str | None:
    """May this cause have a line now? Its ending is "" or tells how many had none; None: it is one of those."""
    second = _second()
    with _lock:
        last, left_out = _said.get(cause, (-1, 0))
        if last == second:
            _said[cause] = (last, left_out + 1)
            return None
        _said[cause] = (second, 0)
    return f" (and {left_out} more of this kind)" if left_out else ""


def warn(logger: logging.Logger, cause: str, message: str, *args: object) -> None:
    """A warning, if it is due."""
    if (ending := due(cause)) is not None:
        logger.warning(f"{message}%s", *args, ending, stacklevel=2)


def _second() -> int:
    return int(time.monotonic())
