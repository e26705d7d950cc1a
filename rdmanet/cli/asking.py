"""Ask the processes that use rdmanet what they have: for `rdmanet ss`. What they say is checked here.

As many are asked at once as there are descriptors for: each begins to speak when it is connected to, and is asked for
some lines more then. Only one is to speak at a time: the next is connected to, or asked, when these lines have come, or
none of them has come for `GRACE_S`. Sense is made of what has come while the next ones are made. So no more than two
CPUs are taken from those who talk to each other, and for a moment: where no CPU is idle, the kernel leaves one to who
computes for a tick of 4 ms, and takes it at once from who waits.

Each has `ANSWER_S` to begin, and as long again to go on, as long as something comes. What comes is bounded:
`LINE_BYTES_MOST` for one line, `ANSWER_BYTES_MOST` for one answer. An answer that breaks a rule is none:
`Answer.failed` says which.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rdmanet.base.accounts import ServerInfo
from rdmanet.base.call_accounts import CALLS_MOST, CallsInfo
from rdmanet.base.onlookers import LINES_AHEAD, NAME, VERSION
from rdmanet.cli.columns import (
    TEXT_MOST,
    Block,
    Columns,
    Connections,
    Numbers,
    checked_block,
    checked_host,
    printable,
)

REFUSED = "it does not let this process look"
ANSWER_S = 0.5
GRACE_S = 0.005
LINE_BYTES_MOST = 1 << 19
ANSWER_BYTES_MOST = 64 << 20
ROW_BYTES = 64
"""So much of it a connection counts for, also if it says nothing but what others say."""
NUMBER_BYTES = 2
"""And so much each number of its counters."""
_NAMES_MOST = 1 << 16
_NAME_MOST = 40
_NUMBER_MOST = (1 << 64) - 1
_LISTENS = 1 << 16  # __SO_ACCEPTCON, in the flags of /proc/net/unix
_KIND = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_CREDENTIALS = struct.Struct("iII")  # struct ucred
_PIECE_BYTES = 1 << 18
_OURS = re.compile(rb"@" + re.escape(NAME.encode()) + rb"(\d{1,10})/[0-9a-f]{16}")
# Of loop/kernel.py, which imports asyncio: half of the time that a list takes.
_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_SERVERS = ("rdma", "tcp", "rdma and tcp")


class _Head(msgspec.Struct):
    """The first line of an answer."""

    version: int
    loop: int = 0
    library: str = ""
    engines: list[dict[str, Any]] = []
    servers: list[ServerInfo] = []


class _Line(msgspec.Struct):
    """Each line after it: some connections, what is under way of calls, or in the last line how many there were."""

    counters: list[str] = []
    count: int = 0
    columns: Columns | None = None
    numbers: list[Numbers] = []
    calls: list[CallsInfo] = []
    connections: int | None = None


@dataclass
class Answer:
    """What one loop has said, by one of its sockets.

    :ivar pid: the process, as the kernel says
    :ivar user: its user, likewise
    :ivar failed: why this is no answer: "late", or a text; "" if it is one
    """

    pid: int
    user: int
    failed: str = ""
    loop: int = 0
    engines: list[dict[str, Any]] = field(default_factory=list)
    servers: list[ServerInfo] = field(default_factory=list)
    connections: Connections = field(default_factory=Connections)
    calls: list[CallsInfo] = field(default_factory=list)


def ask_all(pid: int | None = None) -> list[Answer]:
    """Ask the processes of this user, or as root of all users, in this network namespace.

    :param pid: ask this one only
    """
    names, answers = deque(_names()), []
    patience_ends = time.monotonic() + ANSWER_S
    while names:
        answers += _ask_some(names, pid, patience_ends)
    return answers


def _ask_some(names: deque[tuple[bytes, int]], pid: int | None, patience_ends: float) -> list[Answer]:
    """Ask the first ones of these, as many as there are descriptors for; they are taken out.

    :param patience_ends: from when on no moment is given to who has not begun to speak
    :raises OSError: there are none
    """
    found: list[_Asked] = []
    try:
        while names:
            try:
                one = _Asked(*names[0])
            except OSError as exc:
                if exc.errno in _NOTHING_LEFT:
                    if found:
                        break
                    raise
                names.popleft()  # nobody is there any more
                continue
            names.popleft()
            if one.is_ours and pid in (None, one.answer.pid):
                found.append(one)
                one.await_head(patience_ends)
            else:
                one.socket.close()
        _hear({one.socket.fileno(): one for one in found if not one.answer.failed})
    finally:
        for one in found:
            one.socket.close()
    return [one.answer for one in found]


def _names() -> Iterator[tuple[bytes, int]]:
    """The names of sockets that may be those of processes which use rdmanet, and their inodes.

    Anybody may take such a name.
    """
    try:
        file = open("/proc/net/unix", "rb")  # noqa: SIM115
    except FileNotFoundError as exc:
        why = "/proc is not mounted here, which lists the sockets of processes: mount -t proc proc /proc"
        raise FileNotFoundError(exc.errno, why) from None
    with file:
        count = 0
        for line in file:
            fields = line.split()
            if len(fields) == 8 and _OURS.fullmatch(fields[7]) and int(fields[3], 16) & _LISTENS:
                yield b"\0" + fields[7][1:], int(fields[6])
                count += 1
                if count == _NAMES_MOST:
                    return


class _Asked:
    """A socket that is asked.

    :ivar is_ours: whether it is to be listened to: it is of this user's, or this is root
    :ivar awaited: how many lines it was asked for that have not come; 0 if it has ended
    """

    def __init__(self, name: bytes, inode: int) -> None:
        """:raises OSError: nobody is there"""
        self.socket = socket.socket(socket.AF_UNIX, _KIND, 0)
        is_full = False
        try:
            try:
                self.socket.connect(name)
                owner = self._credentials()
            except BlockingIOError:  # so many wait there that nobody has been heard for long
                is_full = True
                self.socket.close()  # its descriptor may be the last one, and looking takes one
                owner = _owner_of(name, inode)
            self.answer = Answer(*owner)
        except BaseException:
            self.socket.close()
            raise
        self.is_ours = os.geteuid() in (0, self.answer.user)
        if is_full:
            self.answer.failed = "late"
        self.awaited = 1
        self._heard = bytearray()
        self._count = 0
        self._broke_off = False
        self._head: _Head | None = None

    def _credentials(self) -> tuple[int, int]:
        """The process that listens there, and its user.

        :raises OSError: it is in a pid namespace that is not seen from here
        """
        pid, user, _ = _CREDENTIALS.unpack(
            self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if pid <= 0:
            raise ProcessLookupError
        return pid, user

    def await_head(self, patience_ends: float) -> None:
        """Give it a moment to begin to speak: many silent ones in all have no more than one alone."""
        moment = min(GRACE_S, patience_ends - time.monotonic())
        if not self.answer.failed and moment > 0:
            poller = select.poll()
            poller.register(self.socket.fileno(), select.POLLIN)
            poller.poll(moment * 1000)

    def ask(self) -> None:
        """Ask for some lines."""
        self.awaited = LINES_AHEAD
        with contextlib.suppress(OSError):  # it has gone: what it has said still comes
            self.socket.send(b"\n" * LINES_AHEAD, socket.MSG_NOSIGNAL)

    def hear(self) -> None:
        """Take what has come."""
        try:
            some = self.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        self._count += len(some)
        self._heard += some
        self._broke_off = not some
        self.awaited = max(0, self.awaited - some.count(b"\n"))

    def understand(self) -> bool:
        """Make sense of what was taken; whether more is to come."""
        try:
            if self._broke_off:
                raise ValueError(REFUSED if not self._count else "it broke off")
            self._check_size()
            *lines, rest = self._heard.split(b"\n")
            if any(len(line) > LINE_BYTES_MOST for line in (*lines, rest)):
                raise ValueError(f"a line of its answer has more than {LINE_BYTES_MOST} bytes")
            self._heard = bytearray(rest)
            return all(self._understood(line) for line in lines)
        except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
            self.answer.failed = printable(str(exc), TEXT_MOST)
            self.answer.connections.blocks.clear()
            self.answer.calls.clear()
            return False

    def _check_size(self) -> None:
        """:raises ValueError: it has said too much"""
        if self._count > ANSWER_BYTES_MOST:
            raise ValueError(f"its answer has more than {ANSWER_BYTES_MOST} bytes")

    def _understood(self, line: bytearray) -> bool:
        """Take one line; whether more are to come.

        :raises ValueError: it makes no sense
        """
        if self._head is None:
            self._head = head = _HEAD.decode(line)
            if head.version != VERSION:
                raise ValueError(
                    f"it speaks version {head.version} of this, and `rdmanet ss` version {VERSION}"
                )
            self.answer.loop = _number(head.loop)
            self.answer.engines = [_checked_engine(engine) for engine in head.engines]
            self.answer.servers = [_checked_server(server) for server in head.servers]
            return True
        said = _LINE.decode(line)
        counters = [printable(name, _NAME_MOST) for name in said.counters]
        if said.counters and max(map(len, said.counters)) > _NAME_MOST:
            raise ValueError("it has a name for a number that is too long")
        if said.columns is not None:
            block = checked_block(Block(counters, said.count, [*said.columns], said.numbers))
            self._count += block.count * (ROW_BYTES + NUMBER_BYTES * len(block.numbers))
            self._check_size()
            self.answer.connections.blocks.append(block)
        self.answer.calls += map(_checked_calls, said.calls)
        return said.connections is None


def _owner_of(name: bytes, inode: int) -> tuple[int, int]:
    """The process whose number is in a name, and its user, if it has that socket among its descriptors.

    :raises OSError: it does not have it, or may not be looked at
    """
    pid = int(name.split(b"/")[1])
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry.path) == f"socket:[{inode}]":
                    return pid, os.stat(f"/proc/{pid}").st_uid
    raise ProcessLookupError


def _hear(asked: dict[int, _Asked]) -> None:
    """Hear all, as long as one says something in time; one is asked at a time.

    Who comes next is asked before sense is made of what has come, and makes its line meanwhile.
    """
    poller = select.poll()
    for fd in asked:
        poller.register(fd, select.POLLIN)
    now = time.monotonic()
    last = now + 10 * ANSWER_S  # who says a little again and again holds nobody up for ever
    until, turn_ends, speaker = now + ANSWER_S, now, None
    silent = deque[_Asked]()  # who have spoken, and wait to be asked
    while asked and (left := min(until, last) - now) > 0:
        heard = poller.poll(1000 * (min(left, max(0, turn_ends - now)) if silent else left))
        now = time.monotonic()
        for fd, _ in heard:
            until = now + ANSWER_S
            one = asked[fd]
            awaited = one.awaited
            one.hear()
            if one is speaker and one.awaited < awaited:
                turn_ends = now + GRACE_S
            if awaited and not one.awaited:
                silent.append(one)
        if silent and (speaker is None or not speaker.awaited or now >= turn_ends):
            speaker, turn_ends = silent.popleft(), now + GRACE_S
            speaker.ask()
        for fd, _ in heard:
            one = asked[fd]
            if not one.understand():
                if one in silent:
                    silent.remove(one)
                one.awaited = 0
                if one is speaker:
                    turn_ends = now
                poller.unregister(fd)
                del asked[fd]
    for one in asked.values():
        one.answer.failed = "late"
        one.answer.connections.blocks.clear()
        one.answer.calls.clear()


# -- what is believed ------------------------------------------------------------------------------------

_HEAD = msgspec.json.Decoder(_Head)
_LINE = msgspec.json.Decoder(_Line)


def _checked_server(server: ServerInfo) -> ServerInfo:
    """:raises ValueError: it makes no sense"""
    if server.fabric not in _SERVERS:
        raise ValueError("it says of a server what makes no sense")
    server.places = [place for place in map(_checked_place, server.places) if place is not None]
    for number in (server.connections, server.half_open, server.waiting, server.backlog):
        _number(number)
    for door in server.doors:
        _number(door.front)
        door.place = checked_host(door.place[0]), _number(door.place[1])
        door.port, door.missing = _number(door.port), printable(door.missing, TEXT_MOST)
        for worker in door.workers:
            _number(worker.pid)
            _number(worker.port)
    return server


def _checked_calls(info: CallsInfo) -> CallsInfo:
    """:raises ValueError: it makes no sense"""
    if info.side not in ("server", "client") or len(info.calls) > CALLS_MOST:
        raise ValueError("it says of calls what makes no sense")
    info.service, info.where = printable(info.service, TEXT_MOST), printable(info.where, TEXT_MOST)
    for number in (info.key, info.under_way, *(call.us for call in info.calls)):
        _number(number)
    for call in info.calls:
        call.method, call.doing = printable(call.method, TEXT_MOST), printable(call.doing, TEXT_MOST)
    info.notes = [printable(note, TEXT_MOST) for note in info.notes]
    return info


def _checked_engine(engine: dict[str, Any]) -> dict[str, Any]:
    """:raises ValueError: it makes no sense"""
    numbers = {printable(name, _NAME_MOST): _number(n) for name, n in engine.items() if name != "device"}
    return {"device": printable(str(engine.get("device", "?")), 64), **numbers}


def _checked_place(place: tuple[str, int] | None) -> tuple[str, int] | None:
    """:raises ValueError: it is no address"""
    return None if place is None else (checked_host(place[0]), place[1])


def _number(value: Any) -> int:
    """:raises ValueError: it is none that a counter can have"""
    if not isinstance(value, int) or not 0 <= value <= _NUMBER_MOST:
        raise ValueError("it says a number that no counter can have")
    return int(value)
