"""Who looks at this process from outside: the Unix socket that `rdmanet ss` connects to, and the loop's answer.

Theory
------
There are two ways to let another process see counters:

* Memory that it maps. Reading takes nothing from anybody, and works while this process is stopped. But each counter
  then has to be in that memory, or be copied there for each message. Texts and lists that grow need a layout, which is
  an interface between versions. And the looker needs the right to trace, to open it.
* A socket, which the loop answers. It takes a descriptor, and nothing more until somebody connects. The answer is
  computed then, by the code of ``explain()``, of whatever objects there are. A loop that is busy or stopped does not
  answer.

This is the second. A message must not cost more for being countable, and that a loop does not answer is itself what
whoever looks must know first. The kernel still says of such a process that it is there, and whether it is stopped,
busy or asleep; and ``rdmanet ss --watch`` shows what it has said last.

The socket is in the abstract namespace, ``rdmanet-ss/PID/RANDOM``: nothing is left behind in the file system, and
nobody can take the name before. The number is only for people. Who looks takes the process and the user from the kernel
(SO_PEERCRED), and so does this side: it answers root, and processes of its own user that are in its own user and pid
namespaces and that it may trace, since otherwise it cannot see their namespaces. All others are closed without a word.

Nothing is read from the socket. The answer is a line of JSON about the source, one for each connection, and a last one.
It is made in slices of `SLICE_S`, between which the loop does its other work, and kept no longer than it takes to send
a slice. Who does not read is given up after `PATIENCE_S`, and who reads too slowly after `PATIENCE_IN_ALL_S`. At most
`ONLOOKERS_MOST` are answered at a time. If nobody can be accepted, for want of descriptors say, nobody is heard for
`REST_S`, since the loop would do nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import posix  # for what is in /proc: tools against blocking calls replace os's (loop/kernel.py)
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from rdmanet.base.accounts import ConnectionInfo, ServerInfo

NAME = "rdmanet-ss/"
"""How the names of these sockets begin."""
VERSION = 1
"""Of the answers. Who reads another one says so."""
SLICE_S = 0.0005
PATIENCE_S = 2.0
PATIENCE_IN_ALL_S = 10.0
ONLOOKERS_MOST = 4
REST_S = 1.0

_BACKLOG = 8
_SPARE = 2  # descriptors: a connection, and what looks for a server's sign before (loop/doors.py)
_KIND = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_CREDENTIALS = struct.Struct("iII")  # struct ucred
_FULL_S = 0.01  # to wait until a socket takes more
_CONNECTIONS_AT_ONCE = 8  # between two looks at the clock


class Source(Protocol):
    """What has connections of one loop."""

    def headline(self) -> dict[str, Any]:
        """What is to be known of it besides: texts, numbers, lists and dicts of them."""

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        """Its live connections, as they are now."""

    def server_infos(self) -> Iterator[ServerInfo]:
        """Its servers, as they are now."""


class Readers(NamedTuple):
    """How a source learns that descriptors are readable.

    :ivar loop: which calls back
    :ivar add: has a function called when a descriptor is readable
    :ivar remove: ends that
    """

    loop: asyncio.AbstractEventLoop
    add: Callable[[int, Callable[[], None]], object]
    remove: Callable[[int], object]


class Onlookers:
    """The socket of one source."""

    def __init__(self, source: Source, readers: Readers) -> None:
        """:raises OSError: too few descriptors would be left"""
        self.loop = readers.loop
        self.context = contextvars.Context()
        self.answers: set[_Answer] = set()
        self._source = source
        self._readers = readers
        self._resting: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, _KIND, 0)
        try:
            _leave_some(self._socket.fileno())
            self._socket.bind(f"\0{NAME}{os.getpid()}/{os.urandom(8).hex()}")
            self._socket.listen(_BACKLOG)
            self._begin()
        except BaseException:
            self._socket.close()
            raise
        _all.add(self)

    def close(self, loop_lives: bool = True) -> None:
        """Answer nobody any more. Later calls do nothing."""
        if self._socket.fileno() >= 0 and loop_lives and self._resting is None:
            self._readers.remove(self._socket.fileno())
        self._close_all()

    def _close_all(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._socket.close()
        for answer in list(self.answers):
            answer.close()

    def _begin(self) -> None:
        self._resting = None
        self._readers.add(self._socket.fileno(), self._arrived)

    def _rest(self) -> None:
        self._readers.remove(self._socket.fileno())
        self._resting = self.loop.call_later(REST_S, self._begin, context=self.context)

    def _arrived(self) -> None:
        for _ in range(ONLOOKERS_MOST):
            try:
                onlooker, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._rest()
                return
            onlooker.setblocking(False)
            if len(self.answers) >= ONLOOKERS_MOST or not may_look(onlooker):
                onlooker.close()
            else:
                _Answer(self, onlooker, self._source).go_on()


class _Answer:
    """One answer on its way."""

    def __init__(self, onlookers: Onlookers, onlooker: socket.socket, source: Source) -> None:
        self._onlookers = onlookers
        self._socket = onlooker
        self._pieces = _pieces_of(source)
        self._unsent = b""
        self._until = time.monotonic() + PATIENCE_S
        self._last = time.monotonic() + PATIENCE_IN_ALL_S
        self._next: asyncio.Handle | None = None
        onlookers.answers.add(self)

    def go_on(self) -> None:
        """Send what the socket takes, for the time of a slice."""
        began = time.monotonic()
        while True:
            try:
                self._unsent = self._unsent or next(self._pieces, b"")
                if not self._unsent:
                    self.close()
                    return
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if began > min(self._until, self._last):
                    self.close()
                    return
                self._later(_FULL_S)
                return
            except OSError:  # it has gone
                self.close()
                return
            except BaseException:
                self.close()
                raise
            self._unsent = self._unsent[sent:]
            self._until = time.monotonic() + PATIENCE_S
            if time.monotonic() - began > SLICE_S:
                self._later(0)
                return

    def _later(self, seconds: float) -> None:
        loop, context = self._onlookers.loop, self._onlookers.context
        if seconds:
            self._next = loop.call_later(seconds, self.go_on, context=context)
        else:
            self._next = loop.call_soon(self.go_on, context=context)

    def close(self) -> None:
        self._onlookers.answers.discard(self)
        if self._next is not None:
            self._next.cancel()
        self._pieces.close()
        self._socket.close()


def _pieces_of(source: Source) -> Generator[bytes, None, None]:
    """The answer, in pieces that take a moment each."""
    from msgspec import json

    head: dict[str, Any] = {"version": VERSION, **source.headline(), "servers": list(source.server_infos())}
    yield json.encode(head) + b"\n"
    count, piece = 0, bytearray()
    for info in source.connection_infos():
        piece += json.encode(info.facts()) + b"\n"
        count += 1
        if count % _CONNECTIONS_AT_ONCE == 0:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + json.encode({"connections": count}) + b"\n"


def _leave_some(fd: int) -> None:
    """Make sure that the program has descriptors left for what it is about to do.

    :raises OSError: it has not
    """
    spare: list[int] = []
    try:
        for _ in range(_SPARE):
            spare.append(os.dup(fd))
    finally:
        for each in spare:
            os.close(each)


def may_look(onlooker: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket may see what is here: root, or who is as we are."""
    pid, user, _ = _CREDENTIALS.unpack(
        onlooker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user == 0:
        return True
    if user != os.geteuid() or pid <= 0:
        return False
    with contextlib.suppress(OSError, ValueError):
        if user == _overflow_user():  # who stands for every user without a name here
            return False
        return all(_namespace(pid, kind) == _namespace(os.getpid(), kind) for kind in ("user", "pid"))
    return False


def _namespace(pid: int, kind: str) -> tuple[int, int]:
    """:raises OSError: there is none, or it may not be traced"""
    found = posix.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def _overflow_user() -> int:
    """:raises OSError: the kernel does not say"""
    fd = os.open("/proc/sys/kernel/overflowuid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 32))
    finally:
        os.close(fd)


_all: weakref.WeakSet[Onlookers] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: the sockets are the parent's, and must not stay open here when the parent closes them."""
    for each in list(_all):
        each._close_all()


os.register_at_fork(after_in_child=_forked)
