"""Pass the embedded device's warnings on to Python's logging.

Theory
------
The device writes warnings as lines, at most one per second and cause, to standard error or to a descriptor: strangers
who try its ports, peers with another secret, memory that cannot be mapped. As long as some loop uses the
embedded device, that descriptor is a packet pipe with one line per packet. The contexts of all loops watch it
(stream/loop_context.py); whichever reads a line logs it, as a warning of the logger "rdmanet.device". This takes no
thread, and nothing blocks: the device counts the lines that find the pipe full, and reports the count in the next line.

When the last loop context is gone, the lines go to standard error again. A forked child does not use its parent's pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from rdmanet._core import Library

__all__ = ["DeviceLog"]

logger = logging.getLogger("rdmanet.device")

_LINE_BYTES = 4096  # a packet of a pipe has no more
_LINES = 64  # at a time; a pipe has 16 packets

# Reentrant: the garbage collector may end a loop context while this thread creates another one.
_lock = threading.RLock()
_users: set[DeviceLog] = set()
_pipe: tuple[int, int] | None = None


class DeviceLog:
    """A reader of the device's warnings.

    :ivar fd: readable when there is one; None if this library has none
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        with _lock:
            _users.add(self)  # first, so that nobody closes the pipe from here on
            self.fd = _open_pipe(library)
            if self.fd is None:
                _users.discard(self)

    def pass_on(self) -> None:
        """Log the lines that are in the pipe."""
        with _lock:  # without it, the descriptor could belong to another file by now
            lines = _read(self.fd) if self in _users and self.fd is not None else []
        _log(lines)

    def close(self) -> None:
        """Stop reading. Nobody may be waiting for `fd`. The last reader logs what is left in the pipe."""
        global _pipe
        lines: list[bytes] = []
        with _lock:
            if self not in _users:
                return
            _users.discard(self)
            if not _users and _pipe is not None:
                self.library.log_to(-1)
                lines = _read(_pipe[0])
                for fd in _pipe:
                    os.close(fd)
                _pipe = None
        _log(lines)


def _open_pipe(library: Library) -> int | None:
    """The descriptor to read from; None if the library writes no warnings, or no descriptor is left."""
    global _pipe
    if _pipe is None and library.log_to(-1):
        with contextlib.suppress(OSError):
            _pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECT)
            library.log_to(_pipe[1])
    return _pipe[0] if _pipe is not None else None


def _read(fd: int) -> list[bytes]:
    lines: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(lines) < _LINES:
            lines.append(os.read(fd, _LINE_BYTES))
    return lines


def _log(lines: list[bytes]) -> None:
    """Call this without the lock: a logging handler has its own, and the garbage collector may run while it is held."""
    # Without a handler, logging writes the bare message to standard error, which does not say whose it is.
    form = "%s" if logger.hasHandlers() else "rdmanet: %s"
    for line in lines:
        logger.warning(form, line.decode(errors="backslashreplace"))


def _forget() -> None:
    """Forget the pipe in a forked child. The child's device writes to standard error again by itself."""
    global _lock, _pipe
    _lock = threading.RLock()
    _users.clear()
    if _pipe is not None:
        for fd in _pipe:
            os.close(fd)
        _pipe = None


os.register_at_fork(after_in_child=_forget)
