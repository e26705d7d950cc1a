"""Sockets that stand for RDMA connections, for programs that connect a socket first and make a transport of it later.

Theory
------
aiohttp connects a socket by loop.sock_connect(), and gives it to create_connection(sock=). So sock_connect() makes the
RDMA connection, where a failure belongs, and leaves the socket as it is: a real one, not connected. The connection
waits beside it, not read from, until create_connection() takes it and closes the socket.

A program that does anything else with the socket wants TCP: sock_sendall(), add_reader() and the like give the RDMA
connection up, and connect the socket. (For one that was accepted, see accepting.py, there is no other connection.) If
the socket is thrown away, so is the connection. Nobody tells us that it was closed: that is found out when it is
collected, or when the loop connects the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import weakref
from typing import TYPE_CHECKING, Any

from rdmanet.loop.base import Base
from rdmanet.loop.choice import Chooser
from rdmanet.loop.connecting import Attempt, SockAddr, Wanted, try_rdma
from rdmanet.loop.settings import Settings
from rdmanet.stream.in_the_clear import feed

if TYPE_CHECKING:
    from rdmanet.transport import RdmaTransport

_ITS_OWN = "the socket is the program's"


class Waiting(asyncio.Protocol):
    """The protocol of a connection that nobody has taken yet. It keeps what it is told."""

    def __init__(self) -> None:
        self._data = b""
        self._is_eof = False
        self._lost: tuple[Exception | None] | None = None

    def connection_made(self, transport: Any) -> None:
        transport.pause_reading()
        # After its end a transport keeps no protocol. But who takes it then is still to be told of that by us.
        transport.waiting = self

    def data_received(self, data: bytes) -> None:
        self._data += data  # the end of a connection does not wait for a reader

    def eof_received(self) -> bool:
        self._is_eof = True
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)

    def hand_over(self, transport: RdmaTransport, protocol: asyncio.BaseProtocol) -> None:
        """Make this protocol the transport's, and tell it all that has happened."""
        callbacks = transport._life.callbacks
        tell = functools.partial(asyncio.get_running_loop().call_soon, context=callbacks.context)
        del transport.waiting  # type: ignore[attr-defined]
        transport.set_protocol(protocol)
        transport.resume_reading()  # from the loop, so the protocol may pause it again at once
        callbacks.connection_made(transport)
        told: Any = protocol
        if self._data:
            tell(_deliver, told, self._data)
        if self._is_eof:
            tell(told.eof_received)
        if self._lost is not None:
            tell(told.connection_lost, *self._lost)


class Standins:
    """The sockets of one loop that stand for RDMA connections.

    :ivar settings: the options of connections to come
    :ivar transports: by the ids of their sockets
    """

    def __init__(self, base: Base, settings: Settings, chooser: Chooser) -> None:
        self._base = base
        self.settings = settings
        self._chooser = chooser
        self.transports: dict[int, tuple[weakref.ref[socket.socket], RdmaTransport, SockAddr | None]] = {}
        self._attempts: set[int] = set()
        self._connecting: dict[int, asyncio.Future[None]] = {}
        self._reasons: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()

    def is_plain(self, sock: socket.socket, address: Any) -> bool:
        """Whether TCP is known to reach this address, so that the base may connect the socket. They may be anything.

        :raises OSError: there are no descriptors left
        """
        if self.transports or self._attempts or not isinstance(address, tuple) or len(address) != 2:
            return False
        facts = self._chooser.plain(*address)
        if facts is None:
            return False
        self._reasons[sock] = facts["fabric_reason"]
        return True

    async def connect(self, sock: socket.socket, address: Any) -> bool:
        """Connect for this socket by RDMA; or by TCP, if that is faster. False: nothing was connected.

        :raises ConnectionRefusedError: RDMA does not reach the peer, and TCP is excluded
        :raises OSError: EISCONN, the socket stands for a connection; EALREADY, one is being made
        """
        self.sweep()
        key = id(sock)
        if key in self.transports:
            raise OSError(errno.EISCONN, "the socket stands for an RDMA connection: use a new one")
        if key in self._attempts:
            raise OSError(errno.EALREADY, "the socket is being connected by another call: wait for that")
        self._attempts.add(key)
        try:
            return await self._connect(sock, address)
        finally:
            self._attempts.discard(key)

    async def _connect(self, sock: socket.socket, address: Any) -> bool:
        host, port = address[:2]
        if sock.getsockname()[1]:
            reason = "the program chose the local address"
        else:
            chance = self._chooser.choose(host, address)
            if not isinstance(chance, str):
                wanted = Wanted(Waiting, host, port, sock.family, 0, 0, None, {})
                attempt = Attempt(self._base, self.settings, self._chooser, wanted)

                async def by_tcp() -> socket.socket:
                    await self._base.sock_connect(sock, address)
                    return sock

                taken = await try_rdma(self._base, self._chooser, attempt, address, chance, by_tcp, _leave)
                if isinstance(taken, socket.socket):
                    self._chooser.tell(host, port, "tcp", attempt.why_tcp)
                    self._reasons[sock] = attempt.why_tcp
                    return True
                if not isinstance(taken, str):
                    self._chooser.tell(host, port, "rdma", chance.reason)
                    self.keep(sock, taken, address)
                    return True
                chance = taken
            reason = chance
        self._chooser.refuse_tcp(host, port, reason)
        self._chooser.tell(host, port, "tcp", reason)
        self._reasons[sock] = reason
        return False

    def sweep(self) -> None:
        """End the connections whose sockets the program has closed."""
        for key, (kept, transport, _) in list(self.transports.items()):
            sock = kept()
            if sock is not None and sock.fileno() < 0:
                del self.transports[key]
                transport.abort()

    def keep(self, sock: socket.socket, transport: RdmaTransport, address: SockAddr | None) -> None:
        """From now on this socket stands for this connection.

        :param address: to which it can be connected by TCP instead; None if it was accepted
        """
        key, loop = id(sock), self._base.loop

        def gone(_: object) -> None:
            entry = self.transports.pop(key, None)
            if entry is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
                    loop.call_soon_threadsafe(entry[1].abort)

        self.transports[key] = (weakref.ref(sock, gone), transport, address)

    def take(self, sock: socket.socket) -> RdmaTransport | None:
        """The connection that the socket stands for, if it does; then it no longer does."""
        entry = self.transports.pop(id(sock), None)
        return None if entry is None else entry[1]

    def reason(self, sock: socket.socket) -> str:
        """Why the socket is connected by TCP."""
        known = isinstance(sock, socket.socket)  # else the base says what is wrong
        return self._reasons.get(sock, _ITS_OWN) if known else _ITS_OWN

    async def use(self, sock: socket.socket) -> None:
        """The program uses the socket itself: connect it by TCP, if it stands for a connection.

        :raises ConnectionRefusedError: TCP is excluded; the socket stands for the connection as before
        """
        key = id(sock)
        entry = self.transports.get(key)
        if entry is not None:
            _, transport, address = entry
            self._refuse_tcp(address)
            del self.transports[key]
            transport.abort()
            if address is None:
                return  # what the program does next says that the socket is not connected
            begun = self._connecting[key] = self._base.loop.create_task(
                self._connect_by_tcp(sock, address), name="connect by TCP instead"
            )
            begun.add_done_callback(functools.partial(self._connected, key))
        if task := self._connecting.get(key):  # also if it was another call that began it
            await asyncio.wait([task])  # cancelling ends the wait only
            task.result()

    def _connected(self, key: int, begun: asyncio.Future[None]) -> None:
        del self._connecting[key]
        if not begun.cancelled():
            begun.exception()  # those who wait for it raise that, but they may all have been cancelled

    async def _connect_by_tcp(self, sock: socket.socket, address: SockAddr) -> None:
        try:
            await self._base.sock_connect(sock, address)
        except OSError as exc:
            if exc.errno != errno.EISCONN:  # it stood by, and has connected
                raise

    def use_now(self, sock: Any) -> None:
        """The same, for calls that cannot wait. The socket becomes writable when it is connected.

        :param sock: the socket, or its descriptor
        :raises ConnectionRefusedError: TCP is excluded; the socket stands for the connection as before
        """
        for kept, transport, address in list(self.transports.values()):
            found = kept()
            if found is not None and (found is sock or found.fileno() == sock):
                self._refuse_tcp(address)
                del self.transports[id(found)]
                transport.abort()
                if address is not None:
                    found.connect_ex(address)

    def _refuse_tcp(self, address: SockAddr | None) -> None:
        if address is not None:
            self._chooser.refuse_tcp(*address[:2], "the program uses the socket itself")


def _leave(sock: socket.socket) -> None:
    """RDMA was sooner, but TCP has connected, too. create_connection() closes the socket, which is the program's."""


def _deliver(protocol: Any, data: bytes) -> None:
    """Give bytes to a protocol of either kind."""
    if isinstance(protocol, asyncio.BufferedProtocol):
        feed(protocol, data)
    else:
        protocol.data_received(data)
