"""Log what strangers do without letting them fill the log.

Each cause gets at most one line per second in the whole process; the next line tells how many were left out. The
embedded device limits its own warnings in the same way.
"""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["due", "warn"]

_lock = threading.RLock()  # reentrant: the garbage collector may end a connection while it is held
# By cause: the second of its last line, and how many were left out since.
_said: dict[str, tuple[int, int]] = {}


def due(cause: str) -> str | None:
    """None if this cause has had its line for this second; else the end of the line: "", or how many were left out."""
    second = _second()
    with _lock:
        last, left_out = _said.get(cause, (-1, 0))
        if last == second:
            _said[cause] = (last, left_out + 1)
            return None
        _said[cause] = (second, 0)
    return f" (and {left_out} more of this kind)" if left_out else ""


def warn(logger: logging.Logger, cause: str, message: str, *args: object) -> None:
    """Log a warning, unless this cause has had its line for this second."""
    if (ending := due(cause)) is not None:
        logger.warning(f"{message}%s", *args, ending, stacklevel=2)


def _second() -> int:
    return int(time.monotonic())
