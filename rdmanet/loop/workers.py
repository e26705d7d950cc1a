"""Several processes on one port: how RDMA connections are dealt out to them.

Theory
------
Workers share a TCP port (serving.py), but a port has one RDMA listener. So the first worker, which has the door,
listens there and is the *front*. Each of the others listens at a port of its own, which it tells the front: it connects
to the front's *register*, a Unix socket with the name ``rdmanet-stream/<address>/<port>/workers``, sends the port, and
stays connected. When it ends, the kernel closes that connection, and the front forgets the port.

The front takes connections in turn with the others. Where an adapter may have the address, it refuses the client when
it is another's turn, with that one's port, and the client goes there (`transport.connect`), once. Clients that do not
know this are the front's, and so are those of the embedded device.

Where there is only the embedded device, all clients of the loop ask at the front's door (doors.py), and it answers with
the port of the one whose turn it is. So a client need not be refused first. Other clients are the front's.

A worker may be busy: its loop does not turn, and who is sent there waits. So the front tells a worker of each
connection that it sends there, by a word that the worker reads in its next turn. The kernel says whether it has been
read (SIOCOUTQ), so nobody is woken for an answer. A worker that has left its word unread for `GRACE_S` gets no
connections until it has read it, and the others get its share. The door names such workers to its clients: one that
waits there asks again, and goes elsewhere (inquiry.py).

A port of the embedded device would be a TCP port, open to other hosts. So a worker *reserves* one: it listens there by
TCP itself, with a filter that has the kernel drop all that comes. Where only root may attach filters, the kernel
instead drops packets whose TTL is below 255. TCP sends 64 by default; a program that sets 255 gets into the backlog,
and is never accepted. Beside a TCP listener of our own user the embedded device listens by its name alone, which only
this host's programs reach (soft/cm/name.c).

Each tells the other which of its descriptors is its TCP listener at the common port, and each is believed only if that
is so (trust.py). So who takes the register's name, or registers, has TCP's connections anyhow. A worker also says which
socket has its own port, and the door passes that on: when the worker has ended, the port may be anybody's.

Whoever calls at the register has `SPEAK_S` to say what is to be believed, and only `_CALLERS_MOST` may be about to: a
sandbox of the same user must not take the front's descriptors. A worker that is not believed is told so, and stays
away. One that loses the front otherwise has met a want of descriptors or of room, on either side, and comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from rdmanet.base import log_rate
from rdmanet.loop import kernel
from rdmanet.loop.acceptor import REST_S, Acceptor
from rdmanet.loop.trust import Speaker, owner_of

if TYPE_CHECKING:
    from rdmanet._core import Library
    from rdmanet.stream.loop_context import LoopContext

logger = logging.getLogger("rdmanet")

_REGISTER = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_BACKLOG = 512
_NAME = b"\0rdmanet-stream/%s/%d/workers"
_OF_FRONT = b"rdmanet-front 2 "
_OF_WORKER = b"rdmanet-worker 2 "
_REFUSAL = _OF_FRONT + b"no\n"  # a worker leaves for good that hears anything but a number
_WORD_BYTES = 64
SPEAK_S = 5.0
"""How long who calls at the register may say nothing."""
_CALLERS_MOST = 64
GRACE_S = 0.02
"""How long a worker may leave unread that a connection comes, and still get more."""
_COMES = b"\n"
_SO_ATTACH_FILTER = 26  # Linux; socket has no name for these
IP_MINTTL = 21
IPV6_MINHOPCOUNT = 73
_HOPS_MOST = 255
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # struct sock_filter: return, and keep no byte


def is_dealt(library: Library) -> bool:
    """Whether connections by this library are dealt out by refusals."""
    return not library.embedded_device


def are_dealt_at_the_door(libraries: Iterable[Library]) -> bool:
    """Whether the door deals connections out, of a server that listens by these."""
    return not any(map(is_dealt, libraries))


def reserve(address: str, takes_both: bool) -> socket.socket:
    """A TCP listener that nobody reaches, at a port that the kernel chooses.

    :param address: the one that the server's TCP listener is bound to
    :param takes_both: that one is on ``::``, and takes IPv4, too
    :raises OSError: there are no ports or descriptors left
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not takes_both)
        try:
            _attach_filter(reserved)
        except PermissionError:
            reserved.setsockopt(socket.IPPROTO_IP, IP_MINTTL, _HOPS_MOST)  # also where IPv6 takes IPv4
            if family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, IPV6_MINHOPCOUNT, _HOPS_MOST)
        reserved.bind((address, 0))
        reserved.listen(1)
    except BaseException:
        reserved.close()
        raise
    return reserved


def _attach_filter(sock: socket.socket) -> None:
    import ctypes  # loading.py has imported it, for servers

    code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class Place(NamedTuple):
    """Where a worker listens.

    :ivar inode: of the TCP listener that has the port; 0 if none has
    """

    port: int
    inode: int


class Register:
    """The front's: which workers listen where, and whose turn it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, port: int, descriptor: int) -> None:
        """
        :param address: the one that the TCP listener is bound to
        :param descriptor: that TCP listener
        :raises OSError: another process has this name (EADDRINUSE), or there are no descriptors left
        """
        self._loop = loop
        self._address = address
        self._port = port
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        # Who have said nothing yet, the oldest first.
        self._callers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._places: dict[socket.socket, Place] = {}  # of the workers that are believed
        self._told: dict[socket.socket, float] = {}  # when, of those that may not have read it yet
        self._turns: deque[socket.socket | None] = deque([None])  # None: ours
        self._socket = socket.socket(socket.AF_UNIX, _REGISTER, 0)
        try:
            self._socket.bind(_NAME % (address.encode(), port))
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._acceptor = Acceptor(loop, self._socket, self._called)
        _open.add(self)

    @property
    def lone_inode(self) -> int:
        """The inode of the TCP listener, if no worker has registered: then each connection is ours. Else 0."""
        return 0 if self._places else self._inode

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def elsewhere(self, loop_context: LoopContext) -> int:
        """The port of the worker whose turn it is, if this library's connections are dealt out by refusals; else 0."""
        place = self.turn() if is_dealt(loop_context.library) else None
        return 0 if place is None else place.port

    def turn(self) -> Place | None:
        """Where the worker listens whose turn it is; None if it is ours. It is called for each connection."""
        while True:  # we are among them
            worker = self._turns[0]
            self._turns.rotate(-1)
            if worker is None:
                return None
            if not _has_ended(worker) and self._tell(worker):
                return self._places[worker]

    def busy(self) -> list[int]:
        """The ports of workers that have been told of a connection, and whose loops have not turned since."""
        found = []
        for worker, since in list(self._told.items()):
            if not _has_unread(worker):
                del self._told[worker]
            elif self._loop.time() - since >= GRACE_S:
                found.append(self._places[worker].port)
        if found:  # who else is will be known when the same client asks again
            for worker in self._places:
                self._tell(worker)
        return found

    def workers(self) -> list[tuple[int, int, bool]]:
        """Of each worker the process (see `owner_of`), where it listens, and whether it is busy, in their order."""
        now = self._loop.time()
        return [
            (owner_of(worker)[0], self._places[worker].port, self._is_busy(worker, now))
            for worker in self._turns
            if worker is not None
        ]

    def _is_busy(self, worker: socket.socket, now: float) -> bool:
        return now - self._told.get(worker, now) >= GRACE_S and _has_unread(worker)

    def _tell(self, worker: socket.socket) -> bool:
        """Tell a worker that a connection comes; false if it is busy."""
        since = self._told.get(worker)
        if since is not None and _has_unread(worker):
            return self._loop.time() - since < GRACE_S
        try:
            worker.send(_COMES)
        except OSError:
            return False
        self._told[worker] = self._loop.time()
        return True

    def close(self) -> None:
        """Give the name up, and forget all workers."""
        self._acceptor.close()
        if not self._loop.is_closed():
            for worker in self._workers():
                self._loop.remove_reader(worker.fileno())
        self._close_all()

    def _left_to_parent(self) -> None:
        self._acceptor.forget()
        self._close_all()

    def _close_all(self) -> None:
        self._socket.close()
        for timer in self._callers.values():
            timer.cancel()
        for worker in self._workers():
            worker.close()
        self._callers.clear()
        self._places.clear()
        self._told.clear()
        self._turns = deque([None])

    def _workers(self) -> list[socket.socket]:
        return [*self._callers, *self._places]

    def _called(self, worker: socket.socket) -> None:
        try:
            why = Speaker(worker, self._address, self._port).why_not()
        except OSError as exc:  # it comes again
            _warn("a worker of port %d is heard later: %s", self._port, exc)
            worker.close()
            return
        if why:  # another user, say
            self._refuse(worker, why)
            worker.close()
            return
        if len(self._callers) >= _CALLERS_MOST:
            self._drop(next(iter(self._callers)))
        with contextlib.suppress(OSError):
            worker.send(b"%s%d\n" % (_OF_FRONT, self._descriptor))
        self._callers[worker] = self._loop.call_later(SPEAK_S, self._drop, worker)
        self._loop.add_reader(worker.fileno(), self._said, worker)

    def _refuse(self, worker: socket.socket, why: str) -> None:
        """Tell it that it is not believed."""
        _warn("a process is not taken for a worker of port %d: %s", self._port, why)
        with contextlib.suppress(OSError):
            worker.send(_REFUSAL)

    def _drop(self, worker: socket.socket) -> None:
        """Forget a worker, or who has called and is none yet."""
        self._loop.remove_reader(worker.fileno())
        if (timer := self._callers.pop(worker, None)) is not None:
            timer.cancel()
        elif self._places.pop(worker, None) is not None:
            self._turns.remove(worker)
        self._told.pop(worker, None)
        worker.close()

    def _said(self, worker: socket.socket) -> None:
        try:
            word = worker.recv(_WORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        match _numbers(_OF_WORKER, word):
            case [port, inode, descriptor] if 0 < port < 65536:
                try:
                    why = _why_not(worker, self._address, self._port, descriptor)
                except OSError as exc:  # it comes again
                    _warn("a worker of port %d is heard later: %s", self._port, exc)
                else:
                    if not why:
                        self._believe(worker, Place(port, inode))
                        return
                    self._refuse(worker, why)
        self._drop(worker)  # it has ended; or its word is none of ours; or it is not to be trusted

    def _believe(self, worker: socket.socket, place: Place) -> None:
        """From now on it has its turns."""
        if (timer := self._callers.pop(worker, None)) is not None:
            timer.cancel()
            self._turns.append(worker)
        self._places[worker] = place


class Registration:
    """A worker's: the front sends it connections until this is closed.

    It comes again after a rest if it is lost, unless the front has ended, or one of both does not trust the other.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        port: int,
        descriptor: int,
        own_port: int,
        reserved: socket.socket | None = None,
    ) -> None:
        """
        :param address: the one that the TCP listeners are bound to
        :param descriptor: this worker's TCP listener
        :param own_port: where this worker listens
        :param reserved: the socket that has this port; it is closed with the registration
        :raises OSError: there is no register, or not one to be trusted
        """
        self._loop = loop
        self._address = address
        self._port = port
        self._own_port = own_port
        self._reserved = reserved
        inode = 0 if reserved is None else os.fstat(reserved.fileno()).st_ino
        self._word = b"%s%d %d %d\n" % (_OF_WORKER, own_port, inode, descriptor)
        self._socket: socket.socket | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._call()
        _open.add(self)

    @property
    def port(self) -> int:
        """Where the front sends connections; 0 while this worker is not registered."""
        return self._own_port if self._socket is not None else 0

    def close(self) -> None:
        """Get no more connections. Those that are there live on."""
        if self._reserved is not None:
            self._reserved.close()
        self._leave()

    def _left_to_parent(self) -> None:
        """In a forked child: the readers are the parent's."""
        if self._reserved is not None:
            self._reserved.close()
        if self._rest is not None:
            self._rest.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _call(self) -> None:
        """Call at the register; later, if there is no room for that now.

        :raises OSError: there is no register, or not one to be trusted
        """
        self._rest = None
        called = None
        try:
            called = socket.socket(socket.AF_UNIX, _REGISTER, 0)
            called.connect(_NAME % (self._address.encode(), self._port))
            if why := Speaker(called, self._address, self._port).why_not():
                raise PermissionError(why)
            with contextlib.suppress(ConnectionError):  # it has closed the connection; _said() hears why
                called.send(self._word)
        except BaseException as exc:
            if called is not None:
                called.close()
            # EAGAIN: the register's backlog is full.
            if isinstance(exc, OSError) and (kernel.lacks_resources(exc) or exc.errno == errno.EAGAIN):
                _warn("a process registers later as a worker of port %d: %s", self._port, exc)
                self._call_later()
                return
            raise
        self._socket = called
        self._loop.add_reader(called.fileno(), self._said, called)

    def _call_later(self) -> None:
        self._rest = self._loop.call_later(REST_S, self._call_again)

    def _call_again(self) -> None:
        try:
            self._call()
        except OSError as exc:  # whoever comes after the front has no name yet, or is not to be trusted
            logger.debug("no RDMA client of port %d is sent to this process: %s", self._port, exc)

    def _leave(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _said(self, front: socket.socket) -> None:
        try:
            word = _recv(front)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == _COMES:  # to have read it is the answer
            return
        if not word:
            self._leave()
            self._call_later()
            return
        match _numbers(_OF_FRONT, word):
            case [descriptor]:
                try:
                    why = _why_not(front, self._address, self._port, descriptor)
                except OSError as exc:
                    _warn("a process registers later as a worker of port %d: %s", self._port, exc)
                    self._leave()
                    self._call_later()
                    return
                if not why:
                    return
                _warn("no RDMA client of port %d is sent to this process: %s", self._port, why)
            case _ if word == _REFUSAL:
                _warn("no RDMA client of port %d is sent to this process: the front refuses it", self._port)
        self._leave()  # its word is none of ours, or says that we are not believed; or it is not to be trusted


def _recv(front: socket.socket) -> bytes:
    """A word of the front's; b"" if it has gone."""
    try:
        return front.recv(_WORD_BYTES)
    except ConnectionResetError:
        # It has closed the connection with ours unread. The kernel says that first, and keeps what was said before.
        return front.recv(_WORD_BYTES)


def _has_unread(worker: socket.socket) -> bool:
    """Whether it has not read all that it was sent."""
    return any(fcntl.ioctl(worker, termios.TIOCOUTQ, bytes(4)))  # SIOCOUTQ, for sockets


def _has_ended(worker: socket.socket) -> bool:
    """Whether it has closed its end: the loop may not know yet, and the worker's port may be another program's."""
    try:
        return not worker.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _numbers(greeting: bytes, word: bytes) -> list[int]:
    """What follows a greeting; nothing if that is none of ours."""
    words = word.removeprefix(greeting).split()
    return list(map(int, words)) if word.startswith(greeting) and all(map(bytes.isdigit, words)) else []


def _why_not(peer: socket.socket, address: str, port: int, descriptor: int) -> str:
    """Why this process is not to be trusted as much as our TCP listener; "" if it is."""
    speaker = Speaker(peer, address, port)
    return speaker.why_not() or speaker.why_not_with(descriptor)


def _warn(text: str, *args: object) -> None:
    log_rate.warn(logger, text, text, *args)


_open: weakref.WeakSet[Register | Registration] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: these are the parent's, and must not stay open here when the parent closes them."""
    for each in list(_open):
        with contextlib.suppress(OSError):
            each._left_to_parent()


os.register_at_fork(after_in_child=_forked)
