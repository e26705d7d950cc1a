"""What the embedded device warns of, passed on to Python's logging.

Theory
------
Strangers who try the device's ports, peers with another secret, memory that cannot be mapped: the device says so in
lines, at most one a second for each cause, on standard error, or into a descriptor. As long as a loop has a driver
for the embedded device, that is a pipe of packets, a line each, which the drivers of all loops watch; whoever reads a
line logs it, as a warning of the logger "rdmanet.device". No thread is needed, and nobody waits: lines that find
the pipe full are counted by the device, and the next line tells of them.

With the last driver the lines go to standard error again. A forked child has no part in its parent's pipe.
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

# Reentrant: the garbage collector may end a driver while this thread makes another one.
_lock = threading.RLock()
_users: set[DeviceLog] = set()
_pipe: tuple[int, int] | None = None


class DeviceLog:
    """A reader of the device's warnings.

    :ivar fd: readable when there is one; None where there are none to be read
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        with _lock:
            _users.add(self)  # first: from here on nobody closes the pipe
            self.fd = _open_pipe(library)
            if self.fd is None:
                _users.discard(self)

    def pass_on(self) -> None:
        """Log what there is."""
        with _lock:  # else the descriptor may be another file's by now
            lines = _read(self.fd) if self in _users and self.fd is not None else []
        _log(lines)

    def close(self) -> None:
        """Read no more. Nobody may be waiting for `fd`. The last one logs what was not read."""
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
    """Where to read; None: this library has nothing to say, or there is no descriptor for it."""
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
    """Without the lock: a handler has one of its own, and the garbage collector may run under that one."""
    for line in lines:
        logger.warning("%s", line.decode(errors="backslashreplace"))


def _forget() -> None:
    """In a forked child, whose device has gone back to standard error by itself."""
    global _lock, _pipe
    _lock = threading.RLock()
    _users.clear()
    if _pipe is not None:
        for fd in _pipe:
            os.close(fd)
        _pipe = None


os.register_at_fork(after_in_child=_forget)
