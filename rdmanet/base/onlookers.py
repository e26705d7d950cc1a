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

The answer is lines of JSON. The head, about the source, comes at once. Each byte that comes from whoever looks asks for
one line more: of the connections that a slice of `SLICE_S` is enough for, then of the calls of rdmanet.rpc, and when
there are none left, how many connections there were. So the loop turns between two slices, does its other work there,
and makes no more than is asked for. That may be `LINES_AHEAD` at a time: to wake each other for each line would take
most of the time. Who looks asks one process at a time (cli/asking.py). The names of counters stand once in a line, and
so does what all connections of a line have in common (`columns_of` in accounts.py), which of thousands is nearly all.

What an answer needs of modules, and the program may not have imported, takes 15 ms the first time, most of it msgspec's
own needs. These are imported one in a turn; also if who looks has taken the last descriptor (late_import.py).

Who asks for nothing is given up after `PATIENCE_S`, and who asks too slowly after `PATIENCE_IN_ALL_S`. At most
`ONLOOKERS_MOST` are answered at a time. If nobody can be accepted, for want of descriptors say, nobody is heard for
`REST_S`, since the loop would do nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import posix  # for what is in /proc: tools against blocking calls replace os's (loop/kernel.py)
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rdmanet.base.late_import import imported

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from rdmanet.base.accounts import ConnectionInfo, ServerInfo
    from rdmanet.base.call_accounts import CallsInfo

NAME = "rdmanet-ss/"
"""How the names of these sockets begin."""
VERSION = 3
"""Of the answers. Who reads another one says so."""
SLICE_S = 0.0006
"""Of CPU time: who else has the CPU meanwhile makes no line shorter. Each line is a turn of two loops' and a switch to
another process, which take as long as some hundred rows."""
ROWS_MOST = 128
"""Of a line, so that it fits in a socket."""
LINES_AHEAD = 8
"""Who asks for more at a time is not answered."""
CALLERS_MOST = 8
"""Servers and clients of calls in a line, for the same reason."""
PATIENCE_S = 10.0
PATIENCE_IN_ALL_S = 60.0
ONLOOKERS_MOST = 4
REST_S = 1.0

_MODULES = (
    "datetime", "decimal", "platform", "uuid", "typing_extensions", "msgspec", "dataclasses",
    "rdmanet.base.accounts",
)  # fmt: skip
"""What an answer takes, and what msgspec imports, if it is there: in this order none takes long."""
_BACKLOG = 8
_SPARE = 2  # descriptors: a connection, and what looks for a server's sign before (loop/doors.py)
_KIND = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_CREDENTIALS = struct.Struct("iII")  # struct ucred
_FULL_S = 0.01  # to wait until a socket takes more
_ROWS_AT_ONCE = 8  # between two looks at the clock


class Source(Protocol):
    """What has connections of one loop.

    :ivar modules: those that it imports when it is asked, which take long
    """

    modules: Sequence[str]

    def headline(self) -> dict[str, Any]:
        """What is to be known of it besides: texts, numbers, lists and dicts of them."""

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        """Its live connections, as they are now."""

    def transports(self) -> Iterator[Any]:
        """Of those that are established, the transports."""

    def connection_rows(self) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        """The same, as `rows_of` says it (accounts.py)."""

    def server_infos(self) -> Iterator[ServerInfo]:
        """Its servers, as they are now."""

    def calls_infos(self) -> Iterator[CallsInfo]:
        """What `rdmanet.rpc` has under way on its loop."""


class Readers:
    """How a source learns that descriptors are readable. (A named tuple takes as long to make as this whole module.)

    :ivar loop: which calls back
    :ivar add: has a function called when a descriptor is readable
    :ivar remove: ends that
    """

    __slots__ = ("add", "loop", "remove")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        add: Callable[[int, Callable[[], None]], object],
        remove: Callable[[int], object],
    ) -> None:
        self.loop, self.add, self.remove = loop, add, remove


class Onlookers:
    """The socket of one source."""

    def __init__(self, source: Source, readers: Readers) -> None:
        """:raises OSError: too few descriptors would be left"""
        self.loop = readers.loop
        self.context = contextvars.Context()
        self.answers: set[_Answer] = set()
        self.readers = readers
        self._source = source
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
            self.readers.remove(self._socket.fileno())
        self._close_all(loop_lives)

    def _close_all(self, loop_lives: bool) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._socket.close()
        for answer in list(self.answers):
            answer.close(loop_lives)

    def _begin(self) -> None:
        self._resting = None
        self.readers.add(self._socket.fileno(), self._arrived)

    def _rest(self) -> None:
        self.readers.remove(self._socket.fileno())
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
        self._lines = _lines_of(source)
        self._unsent = b""
        self._wanted = 1  # lines: the head is not asked for
        self._is_importing = False
        self._asked_at = time.monotonic()
        self._last = self._asked_at + PATIENCE_IN_ALL_S
        self._full: asyncio.TimerHandle | None = None
        self._patience = self._later(PATIENCE_S, self._look)
        onlookers.answers.add(self)
        onlookers.readers.add(onlooker.fileno(), self._asked)

    def _asked(self) -> None:
        try:
            asked = self._socket.recv(LINES_AHEAD + 1)
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        is_idle = not self._wanted
        self._wanted += len(asked)
        if (
            not asked or self._is_importing or self._wanted > LINES_AHEAD
        ):  # it has gone, or asks before it was told
            self.close()
            return
        self._asked_at = time.monotonic()
        if is_idle:
            self.go_on()

    def go_on(self) -> None:
        """Send the next line, or the rest of this one."""
        if self._socket.fileno() < 0:  # it was closed meanwhile
            return
        try:
            if not self._unsent and (line := next(self._lines, None)) is not None:
                self._is_importing = not line
                if not line:
                    self._onlookers.loop.call_soon(self.go_on, context=self._onlookers.context)
                    return
                self._unsent = line
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL) if self._unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # it has gone
            self.close()
            return
        except BaseException:
            self.close()
            raise
        if not self._unsent:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        self._full = self._later(_FULL_S, self.go_on) if self._unsent else None
        if not self._unsent:
            self._wanted -= 1
            if self._wanted:
                self._onlookers.loop.call_soon(self.go_on, context=self._onlookers.context)

    def _look(self) -> None:
        """Whether it still asks."""
        left = min(self._asked_at + PATIENCE_S, self._last) - time.monotonic()
        if left <= 0:
            self.close()
        else:
            self._patience = self._later(left, self._look)

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._onlookers.loop.call_later(seconds, call, context=self._onlookers.context)

    def close(self, loop_lives: bool = True) -> None:
        if self._socket.fileno() >= 0 and loop_lives:
            self._onlookers.readers.remove(self._socket.fileno())
        self._onlookers.answers.discard(self)
        for timer in (self._patience, self._full):
            if timer is not None:
                timer.cancel()
        self._lines.close()
        self._socket.close()


def _lines_of(source: Source) -> Generator[bytes, None, None]:
    """The answer, in lines that take a slice each; before it b"" for each turn that is to pass meanwhile."""
    for name in (*_MODULES, *source.modules):
        if name not in sys.modules:
            with contextlib.suppress(ImportError):  # typing_extensions; else it is raised where it is needed
                imported(functools.partial(importlib.import_module, name))
            yield b""
    from msgspec import json

    from rdmanet.base.accounts import columns_of

    def line(names: list[str], rows: list[tuple[Any, ...]]) -> bytes:
        columns, numbers = columns_of(rows)
        said = {"counters": names, "count": len(rows), "columns": columns, "numbers": numbers}
        return json.encode(said) + b"\n"

    head: dict[str, Any] = {"version": VERSION, **source.headline(), "servers": list(source.server_infos())}
    yield json.encode(head) + b"\n"
    until = time.thread_time() + SLICE_S
    count, counters, rows = 0, list[str](), list[tuple[Any, ...]]()
    attempts: list[tuple[Any, ...]] = []  # they have no numbers yet
    for names, row in source.connection_rows():
        of = rows if names else attempts
        is_long = len(of) == ROWS_MOST or (count % _ROWS_AT_ONCE == 0 and time.thread_time() > until)
        if of and (is_long or (names and names is not counters and names != counters)):
            yield line(counters if names else names, of)
            until = time.thread_time() + SLICE_S
            of.clear()
        counters = names or counters
        of.append(row)
        count += 1
    for names, of in ((counters, rows), ([], attempts)):
        if of:
            yield line(names, of)
    until, calls = time.thread_time() + SLICE_S, list[Any]()
    for each in source.calls_infos():
        if calls and (len(calls) == CALLERS_MOST or time.thread_time() > until):
            yield json.encode({"calls": calls}) + b"\n"
            until, calls = time.thread_time() + SLICE_S, []
        calls.append(each)
    if calls:
        yield json.encode({"calls": calls}) + b"\n"
    yield json.encode({"connections": count}) + b"\n"


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
        each._close_all(loop_lives=False)


os.register_at_fork(after_in_child=_forked)
