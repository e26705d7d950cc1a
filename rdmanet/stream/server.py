"""The listening side: an asyncio.AbstractServer over rdma_cm listeners.

The Hello of each request is checked. The request is refused with a reason (`_refuse`, `ConnectRequest.turn_away` and
`.fail`), or passed on when `Admission` has a place for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rdmanet import credit
from rdmanet._core import CMID, CMEvent, CMEventType, Context, process_id
from rdmanet.base import log_rate
from rdmanet.errors import ProtocolError, endpoint
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.admission import Admission, source_of, waiting_for
from rdmanet.stream.explaining import Accepted, ExplainedServer
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.registered import RegisteredMemory
from rdmanet.stream.transport_socket import RdmaSocket

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger("rdmanet")


_REQUEST = CMEventType.CONNECT_REQUEST
NOT_ACCEPTED = "the server could not accept the connection; its log says why"
"""All that a stranger learns about our failures. What was missing, and where, is in the log."""
PORT_TRIES = 16
"""How many free ports a listener tries, if TCP programs have the ones that it is given."""
NOT_GONE_ON = (
    "the connection was accepted, but the client was slow to go on, and others may be waiting for its place"
)


class RdmaServer(ExplainedServer, asyncio.AbstractServer):
    """Listeners, and the connections that they have accepted (asyncio.Server, method by method)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[ConnectRequest], None],
        backlog: int,
        half_open_max: int | None = None,
        handshake_s: float = 0.0,
    ) -> None:
        """
        :param on_request: gets each request with a valid Hello, and answers it now or later; if it raises, the peer is
            refused
        :param half_open_max: how many accepted connections may be half open at a time; None: any number
        :param handshake_s: for how long they may be half open in addition, in seconds, for a TLS handshake
        """
        self._loop = loop
        self._pid = process_id()
        self._on_request = on_request
        self._backlog = backlog
        self._listeners: list[tuple[LoopContext, CMID]] = []
        # Listeners for which any free port will do, and the addresses that they were asked for.
        self._anywhere: dict[CMID, SockAddr] = {}
        self._sockets: list[RdmaSocket] = []
        self._transports: set[Accepted] = set()  # each until it is over
        self._active = 0
        self._waiters: list[asyncio.Future[None]] | None = []
        self._serving = False
        self._serving_forever: asyncio.Future[None] | None = None
        # Those that come by TCP or on an adapter, and those that come by name (admission.py).
        self._admission = self._admission_by_name = None
        if half_open_max is not None:
            self._admission, self._admission_by_name = (
                Admission(loop, half_open_max, waiting_for(backlog), handshake_s) for _ in range(2)
            )
        self._half_open: set[ConnectRequest] = set()
        self.elsewhere: Callable[[LoopContext], int] | None = None
        """Called for each request of a client that goes elsewhere, with the context of the listener that it came to:
        the port at which another process of this server takes it; 0 if this one does."""
        self.on_close: Callable[[], None] = lambda: None
        """Called when it stops listening: it is closed, or its device was removed."""

    def _add_listener(self, loop_context: LoopContext, address: SockAddr) -> None:
        cm_id = self._bind(loop_context, address)
        self._listeners.append((loop_context, cm_id))
        assert cm_id.local_addr is not None  # it is bound
        self._sockets.append(RdmaSocket(cm_id.local_addr))
        loop_context.servers.add(self)

    def _bind(self, loop_context: LoopContext, address: SockAddr) -> CMID:
        cm_id = loop_context.create_id(lambda event: self._cm_event(loop_context, event))
        try:
            if len(address) == 4:
                cm_id.set_af_only()  # as in asyncio, :: is for IPv6 only, and 0.0.0.0 has another listener
            cm_id.bind_addr(address)
        except BaseException:
            loop_context.destroy_id(cm_id)
            raise
        if not address[1]:
            self._anywhere[cm_id] = address
        return cm_id

    def _cm_event(self, loop_context: LoopContext, event: CMEvent) -> None:
        if event.type is not _REQUEST:
            if event.type is CMEventType.DEVICE_REMOVAL:
                logger.error("the device of %r was removed", self)
                self.close()
            return
        cm_id = event.id
        try:
            hello = credit.unpack_hello(event.private_data)
            if event.rnr_retry_count:
                # Our device would send the same message again for as long as the peer says that it has no receive.
                raise ProtocolError(f"it asks for {event.rnr_retry_count} RNR retries, and streams need none")
        except ProtocolError as exc:
            log_rate.warn(logger, "hello", "refused a connection from %s: %s", cm_id.peer_addr, exc)
            is_other = isinstance(exc, credit.OtherVersionError)
            self._refuse(
                cm_id, credit.RefusalCode.VERSION if is_other else credit.RefusalCode.PROTOCOL, str(exc)
            )
            return
        if self.elsewhere is not None and hello.features & credit.FEATURE_ELSEWHERE:
            if port := self.elsewhere(loop_context):
                self._reject(cm_id, credit.pack_elsewhere(port, f"another process takes it, at port {port}"))
                return
        request = ConnectRequest(self, loop_context, cm_id, hello, event.qp_num)
        if request.admission is None:
            request.enter()
        else:
            loop_context.adopt_id(cm_id, request._cm_event)
            request.admission.arrived(request)

    def _refuse(self, cm_id: CMID, code: int, reason: str) -> None:
        self._reject(cm_id, credit.pack_refusal(code, reason))

    def _reject(self, cm_id: CMID, refusal: bytes) -> None:
        with contextlib.suppress(OSError):
            cm_id.reject(refusal)
        cm_id.close()

    def _attach(self, transport: Accepted) -> None:
        self._active += 1
        self._transports.add(transport)

    def _detach(self, transport: Accepted) -> None:
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
        """One socket-like object per listener: getsockname() returns its address and port."""
        return tuple(self._sockets)

    def register(self, memory: ReadableBuffer) -> RegisteredMemory:
        """Register an array, or other contiguous memory, once, to offer it to each client: ``offer(registered)``.

        It is registered now with the devices that the server listens on, before any client has come, and stays
        registered until the RegisteredMemory is closed. Close it before the event loop ends. A kernel's device that is
        not known yet, since the server listens on all addresses, registers it with the first client to which it is
        offered there; so does a device that comes later.

        :raises BufferError: it is not contiguous
        :raises OSError: it cannot be registered: too much memory is locked, for example
        :raises RuntimeError: the server is closed, or this is a forked child
        """
        self._refuse_foreign()
        if not self._listeners:
            raise RuntimeError(f"server {self!r} is closed")
        registered = RegisteredMemory(memory)
        try:
            for loop_context, cm_id in self._listeners:
                context = cm_id.context or _only_device(loop_context)
                if context is not None:
                    registered.region_in(loop_context.engine_for(context).pd)
        except BaseException:
            registered.close()
            raise
        return registered

    def close(self) -> None:
        """Stop listening; accepted connections live on (asyncio.Server.close).

        In a forked child this does nothing: the server belongs to the parent, and goes on there.
        """
        if self._is_foreign:
            return
        self.on_close()  # before others can have the listeners' names
        listeners, self._listeners = self._listeners, []
        for loop_context, cm_id in listeners:
            loop_context.destroy_id(cm_id)
            loop_context.servers.discard(self)
        self._sockets = []
        self._anywhere.clear()
        self._serving = False
        for admission in (self._admission, self._admission_by_name):
            if admission is not None:
                admission.close()
        if self._serving_forever is not None and not self._loop.is_closed():
            self._serving_forever.cancel()
        if self._active == 0 and self._waiters is not None:
            self._wake_waiters()

    def close_clients(self) -> None:
        """Call close() on every connection that this server has accepted."""
        if self._is_foreign:
            return
        for transport in list(self._transports):
            transport._close_above()

    def abort_clients(self) -> None:
        """Call abort() on every connection that this server has accepted."""
        if self._is_foreign:
            return
        for transport in list(self._transports):
            transport.abort()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the server belongs to."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether it accepts connections; false in a forked child, whose copy of the server does nothing."""
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
        """Begin to accept connections; later calls do nothing. It does not wait, so there is nothing to cancel.

        :raises RuntimeError: the server is closed, or this is a forked child
        :raises OSError: listening failed: the address is in use, for example
        """
        self._refuse_foreign()
        if not self._listeners:
            raise RuntimeError(f"server {self!r} is closed")
        if not self._serving:
            self._serving = True
            for listener in list(self._listeners):
                if listener in self._listeners:
                    self._listen(*listener)

    def _listen(self, loop_context: LoopContext, cm_id: CMID) -> None:
        """Listen by this device, on another free port if a TCP program has this one: soft-iWARP sees that only now."""
        for left in reversed(range(PORT_TRIES)):
            try:
                return self._listen_there(loop_context, cm_id)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE or cm_id not in self._anywhere or not left:
                    raise
            index = self._listeners.index((loop_context, cm_id))
            taken, cm_id = cm_id, self._bind(loop_context, self._anywhere.pop(cm_id))
            assert cm_id.local_addr is not None  # it is bound
            self._listeners[index], self._sockets[index] = (loop_context, cm_id), RdmaSocket(cm_id.local_addr)
            loop_context.destroy_id(taken)  # not sooner: its port would be given again

    def _listen_there(self, loop_context: LoopContext, cm_id: CMID) -> None:
        """soft-iWARP needs TCP's port, and gets it if it is the embedded device that has it."""
        try:
            cm_id.listen(self._backlog)
        except OSError as exc:
            address = cm_id.local_addr
            rivals = [
                index
                for index, (other, its_id) in enumerate(self._listeners)
                if other.library.embedded_device and its_id.local_addr == address
            ]
            if exc.errno != errno.EADDRINUSE or loop_context.library.embedded_device or not rivals:
                raise
            for index in reversed(rivals):
                self._remove_listener(index)
            cm_id.listen(self._backlog)
            assert address is not None  # it is bound
            logger.info(
                "the embedded device does not listen on %s: an adapter needs TCP's port", endpoint(address)
            )

    def _serve_where_possible(self) -> OSError | None:
        """start_serving(), but leave out what cannot listen, which may be all; returns the last reason."""
        failure: OSError | None = None
        self._serving = True
        for index in reversed(range(len(self._listeners))):
            loop_context, cm_id = self._listeners[index]
            try:
                cm_id.listen(self._backlog)
            except OSError as exc:
                failure = exc
                self._remove_listener(index)
                logger.debug("no RDMA listener by %s: %s", loop_context.library.name, exc)
        return failure

    def _remove_listener(self, index: int) -> None:
        loop_context, cm_id = self._listeners.pop(index)
        del self._sockets[index]
        self._anywhere.pop(cm_id, None)
        loop_context.destroy_id(cm_id)
        if all(other is not loop_context for other, _ in self._listeners):
            loop_context.servers.discard(self)

    async def serve_forever(self) -> None:
        """Accept connections until it is cancelled; then close the server and its connections, and wait for them.

        This is what asyncio does since Python 3.12.7 and 3.13: one Ctrl-C is enough, even while clients are connected.

        :raises RuntimeError: the server is closed, or this is a forked child, or this method is already being awaited
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
        """Wait until the server is closed and all its connections have ended (like asyncio since 3.12).

        Cancelling it only ends the wait. In a forked child it returns at once.
        """
        if self._waiters is None or self._is_foreign:
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _loop_ended(self) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(endpoint(sock.getsockname()) for sock in self._sockets) or "closed"
        state = (
            "forked "
            if self._is_foreign
            else "serving "
            if self._serving
            else "idle "
            if self._sockets
            else ""
        )
        return f"<RdmaServer {state}{names} connections={self._active}>"


class ConnectRequest:
    """A request with a valid Hello. It waits to be accepted, or has been accepted and is half open: see admission.py.

    :ivar loop_context: reads the events of its identifier
    :ivar id: the identifier that came with the request
    :ivar hello: the peer's Hello, checked
    :ivar peers_qp: the number of its queue pair
    :ivar source: what Admission counts it as: `source_of` the peer's address and user
    :ivar admission: the one that it is counted in; None: nobody counts
    """

    def __init__(
        self, server: RdmaServer, loop_context: LoopContext, cm_id: CMID, hello: credit.Hello, peers_qp: int
    ) -> None:
        self.loop_context = loop_context
        self.id = cm_id
        self.hello = hello
        self.peers_qp = peers_qp
        peer = cm_id.peer_addr
        self.source = "" if peer is None else source_of(peer[0], cm_id.peer_user)
        self.admission = server._admission_by_name if cm_id.peer_by_name else server._admission
        self._server = server
        self._transport: Accepted | None = None

    # -- for whoever answers it ----------------------------------------------------------------------------

    def taken_by(self, transport: Accepted) -> None:
        """This transport is about to accept it. It calls ``stands`` or ``goes_on`` when established."""
        self._transport = transport
        self._server._attach(transport)

    def goes_on(self) -> None:
        """The connection is established, but the peer has yet to show, in a TLS handshake, that it is wanted."""
        if self in self._server._half_open and self.admission is not None:
            self.admission.goes_on(self)

    def stands(self) -> None:
        """The connection is no longer half open."""
        if self in self._server._half_open:
            self._server._half_open.discard(self)
            if self.admission is not None:
                self.admission.left(self)

    def over(self) -> None:
        """The connection has ended, or was never established."""
        self.stands()
        transport, self._transport = self._transport, None  # it refers to us
        if transport is not None:
            self._server._detach(transport)

    def fail(self, error: Exception) -> None:
        """It could not be accepted: refuse the peer, and log the reason. The identifier lives on."""
        if refuse_failed(self.id):
            if (more := log_rate.due("accept")) is not None:
                message = f"rdmanet: could not accept {self.id.peer_addr}{more}"
                self._server._loop.call_exception_handler({"message": message, "exception": error})
        else:
            # The peer has gone, which may well be the reason of the failure.
            logger.debug("%s went away before it was accepted: %s", self.id.peer_addr, error)

    # -- for Admission -------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Pass it on, to be answered."""
        if self.admission is not None:
            self._server._half_open.add(self)
        try:
            self._server._on_request(self)
        except Exception as exc:
            # Memory, descriptors or queue pairs have run out: this peer is refused, and the others are not affected.
            self.fail(exc)
            self.stands()
            self.loop_context.destroy_id(self.id)

    def turn_away(self) -> None:
        """Refuse it: too many requests are waiting, or the server is closed."""
        why = "too many connections are being made" if self._server._listeners else "the server is closed"
        code = credit.RefusalCode.BUSY if self._server._listeners else credit.RefusalCode.CLOSING
        log_rate.warn(logger, "half open", "refused a connection from %s: %s", self.id.peer_addr, why)
        with contextlib.suppress(OSError):
            self.id.reject(credit.pack_refusal(code, why))
        self._gone()

    def look(self) -> bool:
        """Act on what has come. False: there is more than can be read now."""
        return self.loop_context.hear_all()

    def evict(self) -> None:
        """End the connection: it was accepted, but not established in time."""
        assert self._transport is not None
        log_rate.warn(
            logger, "half open", "gave up a connection from %s, which did not go on", self.id.peer_addr
        )
        # The kernel's manager goes on repeating an acceptance that is rejected afterwards, and its identifier cannot be
        # destroyed meanwhile: the loop would stand still for a minute. There its end says no, without words.
        if self.loop_context.library.embedded_device:
            with contextlib.suppress(OSError):  # too late, if only its TLS handshake is not done
                self.id.reject(credit.pack_refusal(credit.RefusalCode.BUSY, NOT_GONE_ON))
        self._transport._end_now(ConnectionAbortedError(errno.ECONNABORTED, "the peer did not go on in time"))

    def _cm_event(self, event: CMEvent) -> None:
        """An event while it waits. Whatever it is, the peer no longer waits."""
        self._gone()

    def _gone(self) -> None:
        self.loop_context.destroy_id(self.id)
        if self.admission is not None:
            self.admission.left(self)


def refuse_failed(cm_id: CMID) -> bool:
    """Refuse a peer because of a failure on this side; False if the peer has already gone."""
    try:
        cm_id.reject(credit.pack_refusal(credit.RefusalCode.ERROR, NOT_ACCEPTED))
    except OSError:
        return False
    return True


def _only_device(loop_context: LoopContext) -> Context | None:
    """The device of a listener on all addresses, if its library has only one: the embedded device."""
    if not loop_context.library.embedded_device:
        return None
    cm_id = loop_context.cm.create_id()
    try:
        cm_id.bind_addr(("127.0.0.1", 0))
        return cm_id.context
    finally:
        cm_id.close()
