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
* The door's user (SO_PEERCRED: whoever called listen()) must be the user of that TCP listener. So whoever could
  impersonate the server by its door could do so by TCP.
* The address must be one of this host: a listener on a wildcard would else speak for every host of the world.

Then it knocks: it connects, and the server's loop answers with the port of its RDMA listener and closes. That shows,
too, that the loop runs. One that does not answer within `PATIENCE_S` gets a TCP connection, which the kernel accepts
for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from rdmanet.loop import kernel
from rdmanet.loop.acceptor import Acceptor

PATIENCE_S = 1.0
"""How long a client waits for the answer to its knock."""

_GREETING = b"rdmanet-stream 1 "
_ANSWER_BYTES = 64
_STREAM = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_SIGN = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_BACKLOG = 512
_REFUSED = errno.ECONNREFUSED  # by the kernel: there is no such name
_WILDCARDS = (("0.0.0.0", "::"), ("::",))  # of IPv4, and of IPv6
_NAME = b"\0rdmanet-stream/%s/%d"
_CREDENTIALS = struct.Struct("iII")  # struct ucred


# -- the server's side -------------------------------------------------------------------------------------


class Door:
    """The door of one TCP listener. It answers each knock with a port."""

    def __init__(self, address: str, port: int, answer: Callable[[], int], takes_both: bool = False) -> None:
        """
        :param address: the one that the TCP listener is bound to
        :param answer: called for each knock; returns the port of an RDMA listener
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
            caller.send(b"%s%d\n" % (_GREETING, self._answer()))

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
        self._loop = loop
        self._inherit = inherit
        self._fd = os.pidfd_open(pid)
        loop.add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        self.close()
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
    """The process of this user that has the door of this address and port; None if there is none."""
    with socket.socket(socket.AF_UNIX, _STREAM, 0) as asking:
        if asking.connect_ex(_NAME % (address.encode(), port)):
            return None
        pid, user, _ = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    return int(pid) if user == os.geteuid() and pid > 0 else None


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _forked() -> None:
    for door in list(_doors):
        door._left_to_parent()


os.register_at_fork(after_in_child=_forked)


# -- the client's side -------------------------------------------------------------------------------------


@dataclass
class Found:
    """A door that may be believed, and a connection to it.

    :ivar socket: the connection; whoever has this object closes it
    :ivar user: the server's user
    :ivar pid: its process
    """

    socket: socket.socket
    user: int
    pid: int


def signs(address: str, port: int) -> tuple[bytes, ...]:
    """The names of the signs that a server which takes connections to this address may have."""
    return _NAME % (address.encode(), port), _NAME % (_WILDCARDS[":" in address][0].encode(), port)


class Lookout:
    """Looks for signs. It keeps one socket for that.

    :ivar look: takes the name of a sign. `NO_SIGN` says that there is none of that name. Whatever else it returns,
        there may be one. Raises OSError if there are no descriptors left
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.look: Callable[[bytes], int] = self._open_and_look

    def _open_and_look(self, sign: bytes) -> int:
        self._socket = socket.socket(socket.AF_UNIX, _SIGN, 0)
        self.look = self._socket.connect_ex
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
    pid, user, _ = _CREDENTIALS.unpack(
        knocking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    listener = kernel.tcp_listener(address, port)
    if listener is None:
        return "the kernel knows no TCP listener there, so nobody can speak for it"
    if listener.address != place:
        return f"who offers RDMA listens on {place}, but TCP connections go to {listener.address}"
    if user == kernel.overflow_user():
        return (
            f"user {user} offers RDMA there, which stands for every user without a name in this user namespace,"
            " so nobody knows whether the TCP listener is the same user's"
        )
    if listener.user != user:
        return f"user {user} offers RDMA there, but the TCP listener is user {listener.user}'s"
    if not kernel.is_of_this_host(address):
        return "who offers RDMA is on this host, but the address is not"
    return Found(knocking, user, pid)


async def knock(found: Found, receive: Callable[[socket.socket, int], object]) -> int:
    """The port of the RDMA listener behind a door. It closes the connection; so does cancelling it.

    :param receive: the loop's sock_recv()
    :raises OSError: the server does not answer in time, or not as one of ours
    """
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not answer.endswith(b"\n"):
                more = await receive(found.socket, _ANSWER_BYTES)  # type: ignore[misc]
                answer += more
                if not more or len(answer) > _ANSWER_BYTES:
                    raise ConnectionResetError("the server closed its door")
    except TimeoutError:
        raise TimeoutError(f"the server's loop did not answer within {PATIENCE_S} s") from None
    finally:
        found.socket.close()
    port = answer.removeprefix(_GREETING).strip()
    if not answer.startswith(_GREETING) or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectionResetError("the server's door gives an answer that is not ours")
    return int(port)
