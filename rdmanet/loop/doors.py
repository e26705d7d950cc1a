"""How a client on this host learns that a TCP listener also takes RDMA: its door.

Theory
------
The names of the embedded device's connection manager may be anybody's: Valkey's, perftest's. They do not say that a
program of ours listens on the TCP port of the same number. So a server of the loop has a listening Unix socket with a
name of its own in the abstract namespace, ``rdmanet-stream/<address>/<port>``: the door. The address is the one that
its TCP listener is bound to. Only a server that holds that TCP listener makes it.

A client that wants to connect to an address looks for a door of the address itself, then of the wildcards. Most
connections go to programs that have none, and must take no longer for that. To be refused by a listening socket costs
the kernel some memory, which a datagram socket does without. So beside its door a server has a *sign*: a datagram
socket of the same name, from which nobody reads, and to which nobody can send. A server that takes IPv4 on ``::`` has a
second one, of ``0.0.0.0``, so that a client looks for two signs at most: that of the address, and of its own family's
wildcard. If there is none, two system calls have failed at once, and the connection is made by TCP. A sign proves
nothing: who sees one looks for the door. Where there is one, the client does not believe it yet, because everybody may
take any name:

* The kernel says which listener gets a TCP connection to the address. The door must have the name of that listener's
  address, so that a server on 0.0.0.0 cannot speak for one on 127.0.0.1.
* The door's process must be trusted as much as that TCP listener: it has it (trust.py). So whoever could impersonate
  the server by its door could do so by TCP.
* The address must be one of this host: a listener on a wildcard would else speak for every host of the world.

Then it knocks: it connects, and the server's loop answers and closes. That shows, too, that the loop runs. One that has
answered nobody of this process for `PATIENCE_S` gets a TCP connection, which the kernel accepts for it (choice.py). The
answer has these numbers:

* the port of the RDMA listener;
* the descriptor of the server's TCP listener, which shows whether the door's process is to be trusted;
* if that port is another process's, a worker's, the inode of the TCP listener that this one has there. A worker may
  end, and its port may become anybody's. So when the client is connected there, and before it says anything, it asks
  the kernel whether that very socket still listens (`Place.why_left`). If so, it did when the client connected. Of a
  server that has no workers it is the inode of its own TCP listener, and else 0;
* the ports of workers whose loops are busy (workers.py), if there are any.

If a server has no workers, the client keeps the answer for a moment (choice.py): to knock takes longer than to connect.
As long as the kernel says that the same listener gets TCP's connections, and /proc that the door's process has it, the
door is believed, and says the same. So nothing is kept of another user's server that /proc does not show. RDMA may end
before the TCP listener, and its port on an adapter is anybody's then. So an answer is kept for the embedded device
alone, which asks for each connection who has the listener's name (soft/cm/name.c).

The number before them is the version of what doors say and mean, `VERSION`. It moves by one when an older client would
misunderstand an answer. A client of another version takes TCP, and says both versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rdmanet.loop import kernel, trust
from rdmanet.loop.acceptor import Acceptor
from rdmanet.loop.trust import Speaker

PATIENCE_S = 0.3
"""How long a client waits for the answer to its knock, while the server answers no other either."""

VERSION = 2
_ANSWER = re.compile(rb"rdmanet-stream (\d{1,9}) ")
_ANSWER_BYTES = 512
_BUSY_SAID = 64  # at most, of ports with five digits
_STREAM = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_SIGN = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_BACKLOG = 512
_REFUSED = errno.ECONNREFUSED  # by the kernel: there is no such name
_WILDCARDS = (("0.0.0.0", "::"), ("::",))  # of IPv4, and of IPv6
_NAME = b"\0rdmanet-stream/%s/%d"


class Answer(NamedTuple):
    """What a door says.

    :ivar port: of an RDMA listener
    :ivar descriptor: of the door's process: its TCP listener
    :ivar inode: of the TCP listener at that port; 0 if that is the port that was asked for, and there are workers
    :ivar busy: ports at which the loops of workers have not turned for a while
    """

    port: int
    descriptor: int
    inode: int = 0
    busy: Sequence[int] = ()


# -- the server's side -------------------------------------------------------------------------------------


class Door:
    """The door of one TCP listener. It answers each knock with a port."""

    def __init__(
        self, address: str, port: int, answer: Callable[[], Answer], takes_both: bool = False
    ) -> None:
        """
        :param address: the one that the TCP listener is bound to
        :param answer: called for each knock
        :param takes_both: the TCP listener is on ``::``, and takes IPv4, too
        :raises OSError: another process has this name (EADDRINUSE), or there are no descriptors left
        """
        self._answer = answer
        self._acceptor: Acceptor | None = None
        self._signs: list[socket.socket] = []
        self._socket = socket.socket(socket.AF_UNIX, _STREAM, 0)
        _doors.add(self)
        try:
            self._socket.bind(_NAME % (address.encode(), port))
            self._socket.listen(_BACKLOG)  # now, so that others see whose it is
            for place in (address, "0.0.0.0") if takes_both else (address,):
                self._put_up_sign(place, port)
        except BaseException:
            self._close_all()
            raise

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to answer. Who has knocked before has waited."""
        self._acceptor = Acceptor(loop, self._socket, self._knocked)

    def close(self) -> None:
        """Give the name up. Those who wait for an answer find the door closed."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._close_all()

    def _put_up_sign(self, address: str, port: int) -> None:
        sign = socket.socket(socket.AF_UNIX, _SIGN, 0)
        self._signs.append(sign)
        sign.shutdown(socket.SHUT_RD)  # or strangers could leave things in it
        sign.bind(_NAME % (address.encode(), port))

    def _close_all(self) -> None:
        for sign in self._signs:  # first, so that who gets the name of the door gets that of the sign
            sign.close()
        self._socket.close()

    def _knocked(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            port, descriptor, inode, busy = self._answer()
            more = "".join(f" {port}" for port in busy[:_BUSY_SAID]).encode()
            caller.send(b"rdmanet-stream %d %d %d %d%s\n" % (VERSION, port, descriptor, inode, more))

    def _left_to_parent(self) -> None:
        """In a forked child: the door is the parent's, and must not stay open here when the parent closes it."""
        if self._acceptor is not None:
            self._acceptor.forget()
        self._close_all()


class Heir:
    """Waits for the end of the process that has a door, to open one after it.

    Workers share a TCP port (SO_REUSEPORT, or a socket that was bound before fork), but a door has one owner.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, inherit: Callable[[], None]) -> None:
        """
        :param inherit: called once, when the process has ended
        :raises OSError: there is no such process, or there are no descriptors left
        """
        self.pid = pid
        self.has_ended = False
        """Whether that process has ended."""
        self._loop = loop
        self._inherit = inherit
        self._fd = os.pidfd_open(pid)
        loop.add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        self.close()
        self.has_ended = True
        self._inherit()

    def close(self) -> None:
        """Wait no longer; later calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def owner(address: str, port: int) -> int | None:
    """The process of this user that has the door of this address and port; None if there is none.

    :raises OSError: there are no descriptors left
    """
    with socket.socket(socket.AF_UNIX, _STREAM, 0) as asking:
        if asking.connect_ex(_NAME % (address.encode(), port)):
            return None
        speaker = Speaker(asking, address, port)
    return speaker.pid if speaker.user == os.geteuid() and not speaker.why_not() else None


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _forked() -> None:
    for door in list(_doors):
        door._left_to_parent()


os.register_at_fork(after_in_child=_forked)


# -- the client's side -------------------------------------------------------------------------------------


class Found:
    """A door that may be believed, and a connection to it.

    :ivar socket: the connection; whoever has this object closes it
    :ivar speaker: who has the door
    """

    def __init__(self, socket: socket.socket, speaker: Speaker, address: str, port: int) -> None:
        self.socket, self.speaker, self.address, self.port = socket, speaker, address, port


class SilentError(TimeoutError):
    """The server's loop has not answered a knock in time.

    :ivar knock: the connection, which is the catcher's; it becomes readable when the loop answers, or has ended
    """

    def __init__(self, knock: socket.socket) -> None:
        super().__init__(f"the server's loop did not answer within {PATIENCE_S} s")
        self.knock = knock


class Place(NamedTuple):
    """Where a door leads."""

    address: str
    port: int
    inode: int
    busy: frozenset[int] = frozenset()
    listener: int = 0
    """The inode of the TCP listener, if the door would say the same while that is who listens."""
    link: str = ""
    """Where /proc shows that the door's process has that listener."""

    def holds(self) -> bool:
        """Whether the door would say the same now.

        :raises OSError: there are no descriptors left
        """
        if not self.listener or not trust.is_still(self.link, self.listener):
            return False
        listener = kernel.tcp_listener(self.address, self.port)
        return listener is not None and listener.inode == self.listener

    def why_left(self) -> str:
        """Why this place is not that of the process any more that the door spoke of; "" if it is.

        It is to be asked when there is a connection: what is so then was so when it was made.

        :raises OSError: there are no descriptors left
        """
        if not self.inode:
            return ""
        listener = kernel.tcp_listener(self.address, self.port)
        if listener is not None and listener.inode == self.inode:
            return ""
        return f"the worker at port {self.port} has ended, and the port may be anybody's"


def signs(address: str, port: int) -> tuple[bytes, ...]:
    """The names of the signs that a server which takes connections to this address may have."""
    return _NAME % (address.encode(), port), _NAME % (_WILDCARDS[":" in address][0].encode(), port)


class Lookout:
    """Looks for signs. It keeps one socket for that, unless none would be left for the TCP connection.

    :ivar look: takes the name of a sign. `NO_SIGN` says that there is none of that name. Whatever else it returns,
        there may be one. Raises OSError if there are no descriptors left
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.look: Callable[[bytes], int] = self._open_and_look

    def _open_and_look(self, sign: bytes) -> int:
        looking = socket.socket(socket.AF_UNIX, _SIGN, 0)
        try:
            os.close(os.dup(looking.fileno()))
        except OSError:
            looking.close()
            raise
        self._socket = looking
        self.look = looking.connect_ex
        return self.look(sign)

    def sees(self, signs: tuple[bytes, ...]) -> bool:
        """Whether there may be a sign of one of these names.

        :raises OSError: there are no descriptors left
        """
        return any(self.look(sign) != NO_SIGN for sign in signs)

    def close(self) -> None:
        """Close its socket. It may be used again."""
        self.look = self._open_and_look
        if self._socket is not None:
            self._socket.close()
            self._socket = None


NO_SIGN = _REFUSED


def find(address: str, port: int, lookout: Lookout | None = None) -> Found | str:
    """The door of the TCP listener at this address, or why there is none that may be believed. It does not wait.

    :raises OSError: there are no descriptors left
    """
    if lookout is None:
        with contextlib.closing(Lookout()) as lookout:
            return find(address, port, lookout)
    if not lookout.sees(signs(address, port)):
        return NOBODY
    knocking = socket.socket(socket.AF_UNIX, _STREAM, 0)
    try:
        found = _try_doors(knocking, address, port)
    except BaseException:
        knocking.close()
        raise
    if isinstance(found, str):
        knocking.close()
    return found


NOBODY = "no program on this host offers RDMA there"
"""What `find` says where there is no door."""


def _try_doors(knocking: socket.socket, address: str, port: int) -> Found | str:
    for place in (address, *_WILDCARDS[":" in address]):
        error = knocking.connect_ex(_NAME % (place.encode(), port))
        if error == 0:
            return _believed(knocking, address, port, place)
        if error != _REFUSED:
            return f"the server's door does not open: {os.strerror(error)}"
    return NOBODY


def _believed(knocking: socket.socket, address: str, port: int, place: str) -> Found | str:
    speaker = Speaker(knocking, address, port)
    listener = speaker.listener
    if listener is not None and listener.address != place:
        return f"who offers RDMA listens on {place}, but TCP connections go to {listener.address}"
    if why := speaker.why_not():
        return why
    if not kernel.is_of_this_host(address):
        return "who offers RDMA is on this host, but the address is not"
    return Found(knocking, speaker, address, port)


async def knock(found: Found, loop: asyncio.AbstractEventLoop) -> Place:
    """Where a door leads. It closes the connection, unless it raises SilentError; so does cancelling it.

    :raises SilentError: the server does not answer in time
    :raises OSError: it does not answer as one of ours; or it is not to be trusted
    """
    answer = b""
    try:
        while not answer.endswith(b"\n"):
            more = await _hear(found, loop)
            answer += more
            if not more or len(answer) > _ANSWER_BYTES:
                raise ConnectionResetError("the server closed its door")
        saw_turn(found.address, found.port)
        place = _understood(found, answer)
    except SilentError:
        raise
    except BaseException:
        found.socket.close()
        raise
    found.socket.close()
    return place


async def _hear(found: Found, loop: asyncio.AbstractEventLoop) -> bytes:
    """:raises SilentError: nothing has come in time. What has come is never lost by that"""
    waiter = loop.create_future()
    fd, began = found.socket.fileno(), time.monotonic()
    timer: asyncio.TimerHandle

    def end() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def look() -> None:
        nonlocal began, timer
        if not has_turned(found.address, found.port, began):
            end()
            return
        began = time.monotonic()  # many knock, and it is not our turn yet
        timer = loop.call_later(PATIENCE_S, look)

    timer = loop.call_later(PATIENCE_S, look)
    loop.add_reader(fd, end)
    try:
        await waiter
    finally:
        timer.cancel()
        loop.remove_reader(fd)
    try:
        return found.socket.recv(_ANSWER_BYTES)
    except BlockingIOError:
        raise SilentError(found.socket) from None


_turns: dict[tuple[str, int], float] = {}
_TURNS_KEPT = 4096


def saw_turn(address: str, port: int) -> None:
    """The loop of who listens there has just turned: it has answered, or made a connection."""
    if len(_turns) >= _TURNS_KEPT:
        _turns.clear()
    _turns[address, port] = time.monotonic()


def has_turned(address: str, port: int, since: float) -> bool:
    """Whether that was seen after this time, by time.monotonic()."""
    return _turns.get((address, port), 0.0) > since


def _understood(found: Found, answer: bytes) -> Place:
    begins = _ANSWER.match(answer)
    words = answer[begins.end() :].split() if begins else []
    if begins and int(begins[1]) != VERSION:
        raise ConnectionResetError(
            f"the server's door speaks version {int(begins[1])}, this side speaks version {VERSION}; "
            "install the same version of rdmanet on both sides"
        )
    if len(words) < 3 or not all(map(bytes.isdigit, words)):
        raise ConnectionResetError("the server's door gives an answer that is not ours")
    port, descriptor, inode, *busy = map(int, words)
    if not 0 < port < 65536 or (port != found.port and not inode):
        raise ConnectionResetError("the server's door gives an answer that is not ours")
    if why := found.speaker.why_not_with(descriptor):
        raise PermissionError(why)
    if port != found.port:
        return Place(found.address, port, inode, frozenset(busy))
    listener = found.speaker.listener
    is_the_same = listener is not None and listener.inode == inode
    link = found.speaker.link(descriptor)
    return Place(found.address, port, 0, frozenset(busy), inode if is_the_same else 0, link)
