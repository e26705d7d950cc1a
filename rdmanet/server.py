"""The listening side: an asyncio.AbstractServer over rdma_cm listeners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Protocol

from rdmanet import credit, log_rate
from rdmanet._core import CMID, CMEvent, CMEventType, process_id
from rdmanet.addresses import SockAddr
from rdmanet.admission import Admission, source_of, waiting_for
from rdmanet.driver import Driver
from rdmanet.errors import ProtocolError
from rdmanet.transport_socket import RdmaSocket

logger = logging.getLogger("rdmanet")


NOT_ACCEPTED = "the server could not accept the connection; its log says why"
"""What a stranger is told of our failures: what we lack, and where it went wrong, is for the log."""


class Accepted(Protocol):
    """The server's end of a connection: a transport."""

    def _accept(self, cm_id: CMID, hello: credit.Hello) -> None: ...

    def _teardown(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class RdmaServer(asyncio.AbstractServer):
    """Listeners and the connections they accepted (asyncio.Server, method by method)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_transport: Callable[[Driver, RdmaServer], Accepted],
        backlog: int,
        half_open_max: int | None = None,
    ) -> None:
        """`half_open_max`: so many connections at a time may be accepted and not known to stand; None: any number."""
        self._loop = loop
        self._pid = process_id()
        self._make_transport = make_transport
        self._backlog = backlog
        self._listeners: list[tuple[Driver, CMID]] = []
        self._sockets: list[RdmaSocket] = []
        self._transports: weakref.WeakSet[Accepted] = weakref.WeakSet()
        self._active = 0
        self._waiters: list[asyncio.Future[None]] | None = []
        self._serving = False
        self._serving_forever: asyncio.Future[None] | None = None
        self._admission = (
            None if half_open_max is None else Admission(loop, half_open_max, waiting_for(backlog))
        )
        self._half_open: dict[Accepted, _Visitor] = {}
        self.on_close: Callable[[], None] = lambda: None
        """Called when it stops listening: it is closed, or its device was removed."""

    def _add_listener(self, driver: Driver, address: SockAddr) -> None:
        cm_id = driver.create_id(lambda event: self._cm_event(driver, event))
        try:
            if len(address) == 4:
                cm_id.set_af_only()  # :: is IPv6's only, as in asyncio: 0.0.0.0 is another listener
            cm_id.bind_addr(address)
        except BaseException:
            driver.destroy_id(cm_id)
            raise
        self._listeners.append((driver, cm_id))
        assert cm_id.local_addr is not None  # it is bound
        self._sockets.append(RdmaSocket(cm_id.local_addr))
        driver.servers.add(self)

    def _cm_event(self, driver: Driver, event: CMEvent) -> None:
        if event.type is not CMEventType.CONNECT_REQUEST:
            if event.type is CMEventType.DEVICE_REMOVAL:
                logger.error("the device of %r was removed", self)
                self.close()
            return
        cm_id = event.id
        try:
            hello = credit.unpack_hello(event.private_data)
            if event.rnr_retry_count:
                # Our device would send the same to it for as long as it says that it has no receive.
                raise ProtocolError(f"it asks for {event.rnr_retry_count} RNR retries, and streams need none")
        except ProtocolError as exc:
            log_rate.warn(logger, "hello", "refused a connection from %s: %s", cm_id.peer_addr, exc)
            self._refuse(cm_id, credit.RefusalCode.PROTOCOL, str(exc))
            return
        if self._admission is None:
            self._accept(driver, cm_id, hello)
        else:
            visitor = _Visitor(self, driver, cm_id, hello)
            driver.adopt_id(cm_id, visitor._cm_event)
            self._admission.arrived(visitor)

    def _accept(
        self, driver: Driver, cm_id: CMID, hello: credit.Hello, visitor: _Visitor | None = None
    ) -> None:
        transport = self._make_transport(driver, self)
        if visitor is not None:
            self._half_open[transport] = visitor
            visitor.transport = transport
        try:
            transport._accept(cm_id, hello)
        except Exception as exc:
            # Out of memory, descriptors, queue pairs: this peer is refused, the others are not hurt.
            try:
                cm_id.reject(credit.pack_refusal(credit.RefusalCode.ERROR, NOT_ACCEPTED))
            except OSError:
                # There is nobody to be refused, which may well be why it failed.
                logger.debug("%s went away before it was accepted: %s", cm_id.peer_addr, exc)
            else:
                if (more := log_rate.due("accept")) is not None:
                    message = f"rdmanet: could not accept {cm_id.peer_addr}{more}"
                    self._loop.call_exception_handler({"message": message, "exception": exc})
            transport._teardown()

    def _stands(self, transport: Accepted) -> None:
        """Its peer has gone on, or it is over: it is not half open any more."""
        visitor = self._half_open.pop(transport, None)
        if visitor is not None and self._admission is not None:
            self._admission.left(visitor)

    def _refuse(self, cm_id: CMID, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            cm_id.reject(credit.pack_refusal(code, reason))
        cm_id.close()

    def _attach(self, transport: Accepted) -> None:
        self._active += 1
        self._transports.add(transport)

    def _detach(self, transport: Accepted) -> None:
        self._stands(transport)
        if transport in self._transports:
            self._transports.discard(transport)
            self._active -= 1
            if self._active == 0 and not self._listeners:
                self._wake_waiters()

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done() and not self._loop.is_closed():
                waiter.set_result(None)

    @property
    def sockets(self) -> tuple[RdmaSocket, ...]:
        """Socket-like objects, one a listener: getsockname() tells address and port."""
        return tuple(self._sockets)

    def close(self) -> None:
        """Stop listening; connections that were accepted live on (asyncio.Server.close).

        In a forked child nothing: the server is its parent's, and goes on there.
        """
        if self._is_foreign:
            return
        listeners, self._listeners = self._listeners, []
        for driver, cm_id in listeners:
            driver.destroy_id(cm_id)
            driver.servers.discard(self)
        self._sockets = []
        self._serving = False
        if self._admission is not None:
            self._admission.close()
        if self._serving_forever is not None and not self._loop.is_closed():
            self._serving_forever.cancel()
        if self._active == 0 and self._waiters is not None:
            self._wake_waiters()
        self.on_close()

    def close_clients(self) -> None:
        """Close every connection that this server accepted."""
        if self._is_foreign:
            return
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        """Abort every connection that this server accepted."""
        if self._is_foreign:
            return
        for transport in list(self._transports):
            transport.abort()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the server belongs to."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether connections are accepted; false in a forked child, whose copy of the server is dead."""
        return self._serving and not self._is_foreign

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a forked child's copy of its parent's server."""
        return self._pid != process_id()

    def _refuse_foreign(self) -> None:
        if self._is_foreign:
            raise RuntimeError(
                f"{self!r} was opened by process {self._pid}, and listens there only; start another after fork"
            )

    async def start_serving(self) -> None:
        """Begin to accept connections; later calls do nothing. It does not wait, so nothing is there to cancel.

        :raises RuntimeError: the server is closed, or a forked child's copy of its parent's
        """
        self._refuse_foreign()
        if not self._listeners:
            raise RuntimeError(f"server {self!r} is closed")
        if not self._serving:
            self._serving = True
            for _, cm_id in self._listeners:
                cm_id.listen(self._backlog)

    async def serve_forever(self) -> None:
        """Accept connections until cancelled; then the server and its connections are closed.

        As asyncio's since Python 3.12.7 and 3.13: one Ctrl-C is enough, whoever is connected.

        :raises RuntimeError: the server is closed, or a forked child's copy, or this is being awaited already
        """
        self._refuse_foreign()
        if self._serving_forever is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        await self.start_serving()
        self._serving_forever = self._loop.create_future()
        try:
            await self._serving_forever
        except asyncio.CancelledError:
            try:
                self.close()
                self.close_clients()
                await self.wait_closed()
            finally:
                raise
        finally:
            self._serving_forever = None

    async def wait_closed(self) -> None:
        """Wait until the server is closed and all its connections are gone (as asyncio since 3.12).

        Cancelling ends the waiting only. In a forked child there is nothing to wait for.
        """
        if self._waiters is None or self._is_foreign:
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _loop_ended(self) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(f"{s.getsockname()[0]}:{s.getsockname()[1]}" for s in self._sockets)
        state = "closed" if not self._serving else "forked" if self._is_foreign else "serving"
        return f"<RdmaServer {state} {names} connections={self._active}>"


class _Visitor:
    """Somebody whose Hello has come: waiting to be accepted, or accepted and yet to go on. See admission.py."""

    def __init__(self, server: RdmaServer, driver: Driver, cm_id: CMID, hello: credit.Hello) -> None:
        self._server = server
        self._driver = driver
        self._id = cm_id
        self._hello = hello
        self.source = source_of(cm_id.peer_addr[0]) if cm_id.peer_addr is not None else ""
        self.transport: Accepted | None = None

    def enter(self) -> None:
        self._server._accept(self._driver, self._id, self._hello, self)

    def turn_away(self) -> None:
        why = "too many connections are being made" if self._server._listeners else "the server is closed"
        code = credit.RefusalCode.BUSY if self._server._listeners else credit.RefusalCode.CLOSING
        log_rate.warn(logger, "half open", "refused a connection from %s: %s", self._id.peer_addr, why)
        with contextlib.suppress(OSError):
            self._id.reject(credit.pack_refusal(code, why))
        self._gone()

    def evict(self) -> None:
        assert self.transport is not None
        log_rate.warn(
            logger, "half open", "gave up a connection from %s, which did not go on", self._id.peer_addr
        )
        self.transport._teardown()

    def _cm_event(self, event: CMEvent) -> None:
        """While it waits: whatever it is, the peer does so no longer."""
        self._gone()

    def _gone(self) -> None:
        self._driver.destroy_id(self._id)
        if self._server._admission is not None:
            self._server._admission.left(self)
