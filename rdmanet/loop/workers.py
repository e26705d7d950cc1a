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

A port of the embedded device would be a TCP port, open to other hosts. So a worker *reserves* one: it listens there by
TCP itself, with a filter that has the kernel drop all that comes. Beside a TCP listener of our own user the embedded
device listens by its name alone, which only this host's programs reach (soft/cm/name.c).

Only processes of our own user are registered, and a worker registers only with one of our own user: the kernel says who
they are (SO_PEERCRED).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rdmanet.loop import kernel
from rdmanet.loop.acceptor import Acceptor

if TYPE_CHECKING:
    from rdmanet._core import Library
    from rdmanet.loop_context import LoopContext

_REGISTER = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_BACKLOG = 512
_NAME = b"\0rdmanet-stream/%s/%d/workers"
_GREETING = b"rdmanet-worker 1 "
_WORD_BYTES = 64
_CREDENTIALS = struct.Struct("iII")  # struct ucred
_SO_ATTACH_FILTER = 26  # Linux; socket has no name for it
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
        code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog
        reserved.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        reserved.bind((address, 0))
        reserved.listen(1)
    except BaseException:
        reserved.close()
        raise
    return reserved


class Register:
    """The front's: which workers listen where, and whose turn it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, port: int) -> None:
        """
        :param address: the one that the TCP listener is bound to
        :raises OSError: another process has this name (EADDRINUSE), or there are no descriptors left
        """
        self._loop = loop
        self._ports: dict[socket.socket, int] = {}  # of the workers that have said theirs
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

    def elsewhere(self, loop_context: LoopContext) -> int:
        """What `turn` says, if this library's connections are dealt out by refusals; else 0."""
        return self.turn() if is_dealt(loop_context.library) else 0

    def turn(self) -> int:
        """The port of the worker whose turn it is; 0 if it is ours. It is called for each connection."""
        while True:  # we are among them
            worker = self._turns[0]
            self._turns.rotate(-1)
            if worker is None:
                return 0
            if port := self._ports.get(worker):
                return port

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
        for worker in self._workers():
            worker.close()
        self._ports.clear()
        self._turns = deque([None])

    def _workers(self) -> list[socket.socket]:
        return [worker for worker in self._turns if worker is not None]

    def _called(self, worker: socket.socket) -> None:
        if not _is_ours(worker):
            worker.close()
            return
        self._turns.append(worker)
        self._loop.add_reader(worker.fileno(), self._said, worker)

    def _said(self, worker: socket.socket) -> None:
        try:
            word = worker.recv(_WORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        port = word.removeprefix(_GREETING).strip()
        if word.startswith(_GREETING) and port.isdigit() and 0 < int(port) < 65536:
            self._ports[worker] = int(port)
            return
        # It has ended; or its word is none of ours.
        self._loop.remove_reader(worker.fileno())
        self._turns.remove(worker)
        self._ports.pop(worker, None)
        worker.close()


class Registration:
    """A worker's: the front sends it connections until this is closed."""

    def __init__(self, address: str, port: int, own_port: int, reserved: socket.socket | None = None) -> None:
        """
        :param address: the one that the TCP listeners are bound to
        :param own_port: where this worker listens
        :param reserved: the socket that has this port; it is closed with the registration
        :raises OSError: there is no register, or not one of this user's, or there are no descriptors left
        """
        self._socket = socket.socket(socket.AF_UNIX, _REGISTER, 0)
        self._reserved = reserved
        try:
            self._socket.connect(_NAME % (address.encode(), port))
            if not _is_ours(self._socket):
                raise PermissionError("the register is another user's")
            self._socket.send(b"%s%d\n" % (_GREETING, own_port))
        except BaseException:
            self._socket.close()
            raise
        _open.add(self)

    def close(self) -> None:
        """Get no more connections. Those that are there live on."""
        self._socket.close()
        if self._reserved is not None:
            self._reserved.close()

    _left_to_parent = close


def _is_ours(peer: socket.socket) -> bool:
    pid, user, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    # The kernel shows that user for all who have no number in this user namespace.
    return bool(user == os.geteuid() and user != kernel.overflow_user() and pid > 0)


_open: weakref.WeakSet[Register | Registration] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: these are the parent's, and must not stay open here when the parent closes them."""
    for each in list(_open):
        with contextlib.suppress(OSError):
            each._left_to_parent()


os.register_at_fork(after_in_child=_forked)
