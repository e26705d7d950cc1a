"""sock_accept() and connect_accepted_socket(): programs that accept sockets themselves serve RDMA, too.

Theory
------
AnyIO's listeners accept a socket by loop.sock_accept(), and make a transport of it by connect_accepted_socket(). A
program that accepts may as well use the socket itself, and such a socket must be TCP's. So a listener offers RDMA only
after its first client, who came by TCP, went to connect_accepted_socket(): what a program did with one, it does with
all. From then on the listener has an RDMA listener and a door, as create_server() has them (serving.py). For a
client who came by RDMA sock_accept() returns a socket that stands for the connection (standins.py), which
connect_accepted_socket() takes. The program may wait in its next sock_accept() already when RDMA begins. So from its
first one on it waits here, where both kinds of clients wake it.

Nobody tells us that the program has closed its listener. Until that is found out the door stays, but clients believe it
only as long as the kernel knows the TCP listener.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import socket
import ssl
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rdmanet.loop.serving import DualServer
from rdmanet.loop.standins import Standins, Waiting

if TYPE_CHECKING:
    from rdmanet.loop.base import Base
    from rdmanet.loop.connecting import Factory
    from rdmanet.loop.settings import Settings
    from rdmanet.stream.server import RdmaServer
    from rdmanet.transport import RdmaTransport

BACKLOG = 100
"""How many RDMA connections may wait for sock_accept(). Those who come then are closed."""

Accepted = tuple[socket.socket, Any]


class Accepting:
    """The listeners of one loop whose clients the program accepts itself.

    :ivar settings: the options of listeners that are to offer RDMA
    """

    def __init__(
        self,
        base: Base,
        settings: Settings,
        standins: Standins,
        make_server: Callable[[Factory, int], Callable[[], RdmaServer]],
    ) -> None:
        """:param make_server: of a factory and a backlog; what it returns makes RDMA servers without listeners"""
        self._base = base
        self.settings = settings
        self._standins = standins
        self._make_server = make_server
        self._offers: dict[int, _Offer] = {}
        # Sockets that were accepted by TCP: their listeners, and the context of sock_accept().
        self._accepted: weakref.WeakKeyDictionary[
            socket.socket, tuple[weakref.ref[socket.socket], contextvars.Context]
        ] = weakref.WeakKeyDictionary()

    async def accept(self, listener: socket.socket) -> Accepted:
        """What sock_accept() returns for a listener of TCP's.

        :raises OSError: what accept(2) says; or RDMA cannot listen, and TCP is excluded
        """
        offer = self._offer_of(listener)
        if offer is None:
            # The loop says what is wrong with these.
            if listener.gettimeout() != 0 or isinstance(listener, ssl.SSLSocket):
                return await self._base.sock_accept(listener)  # type: ignore[no-any-return]
            self.sweep()
            offer = self._offers[id(listener)] = _Offer(
                self._base.loop, listener, self._standins, self._forget
            )
        accepted = await offer.accept(listener)
        if not offer.has_begun:
            self._accepted[accepted[0]] = (weakref.ref(listener), contextvars.copy_context())
        return accepted

    def becomes_transport(self, sock: socket.socket) -> None:
        """The program makes a transport of this socket: its listener offers RDMA from now on, if we know it."""
        place, context = self._accepted.pop(sock, (None, None))
        listener = None if place is None else place()
        if listener is None:
            return
        self.sweep()
        offer = self._offer_of(listener)
        if offer is None or offer.has_begun:
            return
        make_server = self._make_server(offer.waiting, BACKLOG)
        alive: set[DualServer] = set()  # the offer keeps it
        server = DualServer(_Bound(listener), self._base.loop, self.settings, make_server, alive)
        offer.begin(server, context)

    def sweep(self) -> None:
        """End the offers of listeners that the program has closed."""
        for offer in list(self._offers.values()):
            offer.end_if_closed()

    def _offer_of(self, listener: socket.socket) -> _Offer | None:
        offer = self._offers.get(id(listener))  # or that of another, which is garbage
        return offer if offer is not None and offer.listener is listener else None

    def _forget(self, offer: _Offer) -> None:
        if self._offers.get(offer.key) is offer:
            del self._offers[offer.key]


class _Bound:
    """A listener of the program's, in the place of a server of the loop's (see DualServer)."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = weakref.ref(listener)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        listener = self._listener()
        return () if listener is None or listener.fileno() < 0 else (listener,)

    def is_serving(self) -> bool:
        return bool(self.sockets)

    async def start_serving(self) -> None:
        """The program has done it."""

    def close(self) -> None:
        """The program does it."""


class _Offer:
    """What a program waits for at one listener: clients by TCP, and from `begin` on by RDMA, too.

    :ivar key: the listener's
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        standins: Standins,
        forget: Callable[[_Offer], None],
    ) -> None:
        """:param forget: called at the offer's end"""
        self.key = id(listener)
        self._loop = loop
        self._listener = weakref.ref(listener, self._collected)
        self._family = listener.family
        self._standins = standins
        self._forget = forget
        self._server: DualServer | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._failure: OSError | None = None
        self._arrived: collections.deque[RdmaTransport] = collections.deque()
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_rdmas_turn = False
        self._read_fd = -1

    @property
    def listener(self) -> socket.socket | None:
        """None if it is garbage."""
        return self._listener()

    @property
    def has_begun(self) -> bool:
        """Whether RDMA is offered."""
        return self._server is not None

    def begin(self, server: DualServer, context: contextvars.Context | None) -> None:
        """Listen for RDMA, beside what the program does. Connections run in copies of this context."""
        self._server = server
        self._beginning = self._loop.create_task(
            self._begin(server), name="offer RDMA to accepted sockets", context=context
        )

    async def _begin(self, server: DualServer) -> None:
        try:
            await server.start_serving()
        except OSError as exc:
            self._failure = exc  # TCP alone is excluded
            self._wake()

    def waiting(self) -> Waiting:
        """The factory of the connections."""
        return _Arriving(self._has_arrived)

    def _has_arrived(self, transport: RdmaTransport) -> None:
        if self.end_if_closed() or len(self._arrived) >= BACKLOG:
            transport.abort()
            return
        self._arrived.append(transport)
        self._wake()

    async def accept(self, listener: socket.socket) -> Accepted:
        """The next client, of either kind. Cancelling it loses none."""
        while True:
            if self._failure is not None:
                raise self._failure
            accepted = self._next(listener)
            if accepted is not None:
                return accepted
            await self._wait(listener)

    def _next(self, listener: socket.socket) -> Accepted | None:
        """A client who is there already. Where there are many of both kinds, they take turns."""
        self._is_rdmas_turn = not self._is_rdmas_turn
        if not (self._is_rdmas_turn and self._arrived):
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sock, address = listener.accept()
                sock.setblocking(False)
                return sock, address
        if not self._arrived:
            return None
        stand_in = socket.socket(self._family, socket.SOCK_STREAM)  # if that fails, the client stays
        stand_in.setblocking(False)
        transport = self._arrived.popleft()
        self._standins.keep(stand_in, transport, None)
        return stand_in, transport.get_extra_info("peername")

    async def _wait(self, listener: socket.socket) -> None:
        waiter = self._loop.create_future()
        if not self._waiters:
            self._read_fd = listener.fileno()
            self._loop.add_reader(self._read_fd, self._wake)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if not self._waiters:  # by its number: the program may have closed the listener meanwhile
                self._loop.remove_reader(self._read_fd)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end_if_closed(self) -> bool:
        """Whether the listener is closed; then RDMA is no longer offered, and who was not accepted is aborted."""
        listener = self._listener()
        if listener is not None and listener.fileno() >= 0:
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._forget(self)
        if self._beginning is not None:
            self._beginning.cancel()
        if self._server is not None:
            self._server.close()
        while self._arrived:
            self._arrived.popleft().abort()

    def _collected(self, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and RDMA with it
            self._loop.call_soon_threadsafe(self._end)


class _Arriving(Waiting):
    """The protocol of a connection that nobody has accepted yet."""

    def __init__(self, arrived: Callable[[RdmaTransport], object]) -> None:
        super().__init__()
        self._arrived = arrived

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arrived(transport)
