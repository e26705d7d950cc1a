# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""From an address, or from a request, to an established connection.

Theory
------
The connecting side resolves the address and the route, creates a queue pair, posts its whole receive ring, and calls
``rdma_connect`` with a Hello in the private data. The accepting side checks that Hello, posts its own ring, and accepts
with its Hello. Then the connecting side sends first, a Credit frame if it has nothing else to say, because iWARP
demands that (rdma_connect(3)). The accepting side holds back its writes until that frame has arrived. Nothing here
blocks: each step ends with an event on the loop context's file descriptor. The embedded device has nothing to wait for
when it resolves: it does that at once, without events.

An ``Endpoint`` (rdma_cm's word, rdma_create_ep(3)) is the identifier and the queue pair that a connection keeps all its
life. It also gets the connection manager's later events: that the peer has disconnected, for example.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from rdmanet import _core, credit
from rdmanet._core import (
    CMID,
    CQ,
    STREAM_SHARED_OWN,
    CMEvent,
    CMEventType,
    StreamEngine,
    stream_queue_depths,
)
from rdmanet.errors import ProtocolError, endpoint
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.connection import Connection
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.options import StreamConfig

logger = logging.getLogger("rdmanet")

SHARED_RNR_RETRY = 7
"""Retry forever: a peer that overruns its credits consumes other connections' receives."""
_FEATURES = credit.FEATURE_PLACEMENT | credit.FEATURE_GROWTH | credit.FEATURE_SOLICITS
# As globals: before Python 3.12 an enum takes twenty times as long to give a member.
_ESTABLISHED, _DISCONNECTED = CMEventType.ESTABLISHED, CMEventType.DISCONNECTED
_CHANGES_NOTHING = (CMEventType.TIMEWAIT_EXIT, CMEventType.ADDR_CHANGE)
MAX_RESOLVE_S = 2_000_000
"""rdma_cm counts milliseconds, in an int."""


class Role(Enum):
    """Which side of a connection this is."""

    CLIENT = auto()
    """The side that connects, and sends the first frame."""
    SERVER = auto()


CLIENT, SERVER = Role.CLIENT, Role.SERVER


class ElsewhereError(ConnectionRefusedError):
    """The server refuses the connection here, and takes it at another port of the same address.

    :ivar port: the port
    """

    def __init__(self, text: str, port: int) -> None:
        super().__init__(errno.ECONNREFUSED, text)
        self.port = port


class SourcePortTakenError(OSError):
    """The connection manager chose a source port that the transport below it cannot have: another may be free."""


class EndpointOwner(Protocol):
    """What an endpoint reports to: ``Reports`` (reports.py)."""

    def established(self, event: CMEvent) -> None:
        """Both sides are ready. What this raises reaches the caller of ``connect()``, or ``establishing_failed``."""

    def establishing_failed(self, error: BaseException) -> None:
        """``established`` raised on the accepting side, where nobody waits for it."""

    def on_connection_error(self, error: OSError) -> None:
        """The connection, or the peer's attempt at one, is over."""

    @property
    def has_ended(self) -> bool:
        """Whether that would change nothing any more."""

    def ends_cleanly(self) -> bool:
        """The peer has disconnected. If we have closed, too, and lose nothing, end, and return true."""


class Endpoint:
    """A connection identifier and its queue pair.

    :ivar role: which side this is
    :ivar id: the identifier, once there is one
    :ivar connecting: ``connect`` has not returned
    :ivar connected: the connection has been established, and we have not disconnected it
    """

    def __init__(
        self,
        role: Role,
        loop_context: LoopContext,
        config: StreamConfig,
        connection: Connection,
        owner: EndpointOwner,
    ) -> None:
        self.role = role
        self.id: CMID | None = None
        self.connecting = False
        self.connected = self._was_connected = False
        self._loop_context = loop_context
        self._config = config
        self._connection = connection
        self._owner: EndpointOwner | None = owner
        self._cq: CQ | None = None  # the queue in which room is reserved for the queue pair's completions
        self._waiter: asyncio.Future[None] | None = None
        self._awaited: CMEventType | None = None
        self._late: TimeoutError | None = None  # the time for connecting is up
        self._hello: credit.Hello | None = None

    # -- connecting ----------------------------------------------------------------------------------------

    async def connect(self, address: SockAddr, local: SockAddr | None, context: contextvars.Context) -> None:
        """Connect to ``address``. When this returns, the owner's ``established`` has returned.

        Raises TimeoutError after ``connect_timeout``, other OSErrors, and what ``established`` raised. If this raises
        or is cancelled, what it has begun is still there, and the owner must take it apart.
        """
        self.connecting = True
        timeout, timer = self._config.connect_timeout, None
        resolve_ms = 2000 if timeout is None else max(1, int(min(timeout, MAX_RESOLVE_S) * 1000))
        if timeout is not None:
            # Not asyncio.timeout(): it costs several times as much, and here there is always a waiter to be told.
            timer = self._loop_context.waits.begin(float(timeout), self._overdue, address)
        try:
            cm_id = self.id = self._loop_context.create_id(self._cm_event)
            if self._config.by_name_alone:
                cm_id.set_by_name_alone()
            resolved = cm_id.resolve_at_once(local, address)
            if resolved is None:
                await self._step(
                    CMEventType.ADDR_RESOLVED, lambda: cm_id.resolve_addr(local, address, resolve_ms)
                )
                await self._step(CMEventType.ROUTE_RESOLVED, lambda: cm_id.resolve_route(resolve_ms))
            elif not resolved:
                await self._step(CMEventType.ROUTE_RESOLVED, lambda: None)  # its event says why not
            if self._config.beside_tcp:
                self._check_device(cm_id)
            self._prepare(cm_id, context)
            waiter = self._begin_step(_ESTABLISHED)
            self._request(cm_id, local)
            await waiter
        finally:
            self.connecting = False
            self._waiter = self._awaited = self._late = None
            if timer is not None:
                timer.cancel()

    def _check_device(self, cm_id: CMID) -> None:
        """Raise an error if the device that reaches the address must not be used beside TCP."""
        context = cm_id.context
        assert context is not None
        if not context.library.embedded_device and context.transport_type is _core.TransportType.IWARP:
            raise OSError(
                errno.EPROTONOSUPPORT,
                f"device {context.name} does iWARP, whose ports are TCP's: a TCP server may be listening there",
            )

    def _request(self, cm_id: CMID, local: SockAddr | None) -> None:
        hello = credit.pack_hello(self.hello())
        try:
            _ask(cm_id, hello)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or (local is not None and local[1]):
                raise
            raise SourcePortTakenError(*exc.args) from None

    def _overdue(self, address: SockAddr) -> None:
        """The time for connecting is up. If a step has just ended, the next one raises this."""
        timeout = self._config.connect_timeout
        self._late = TimeoutError(errno.ETIMEDOUT, f"no connection to {endpoint(address)} within {timeout} s")
        self.fail(self._late)

    async def _step(self, awaited: CMEventType, begin: Callable[[], None]) -> None:
        """Begin something and wait for its event; any other event of the identifier is its failure."""
        waiter = self._begin_step(awaited)
        try:
            begin()
            await waiter
        finally:
            self._waiter = self._awaited = None

    def _begin_step(self, awaited: CMEventType) -> asyncio.Future[None]:
        """What the event of a step that begins now ends."""
        if self._late is not None:
            raise self._late
        self._awaited = awaited
        waiter = self._waiter = self._loop_context.loop.create_future()
        return waiter

    def fail(self, error: BaseException) -> bool:
        """Make ``connect()`` raise this error; False if nobody waits in ``connect()``."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        return waiter is not None

    # -- accepting -----------------------------------------------------------------------------------------

    def accept(self, cm_id: CMID, hello: credit.Hello, context: contextvars.Context) -> None:
        """Accept a request whose Hello has been checked. It goes on when ESTABLISHED comes."""
        self.id = cm_id
        self._loop_context.adopt_id(cm_id, self._cm_event)
        self._prepare(cm_id, context, bool(hello.features & credit.FEATURE_GROWTH))
        answer = credit.pack_hello(self.hello())
        self.agree(hello)
        shares = self._connection.shared is not None
        cm_id.accept(private_data=answer, rnr_retry_count=SHARED_RNR_RETRY if shares else 0)

    def heard_first(self) -> None:
        """The client's first frame has come, perhaps before its word that it is ready (RTU), which may be lost."""
        if self.role is SERVER and not self.connected and self.id is not None:
            try:  # not contextlib.suppress(): see disconnect()
                self.id.notify()
            except OSError:
                pass  # it is over, or the library is too old: an event will tell

    # -- both ----------------------------------------------------------------------------------------------

    def hello(self) -> credit.Hello:
        """What the peer must know about our receives, which exist."""
        if self._hello is None:
            self._hello = self._new_hello()
        return self._hello

    def _new_hello(self) -> credit.Hello:
        connection, slots = self._connection, self._config.data_slots
        first = slots if connection.shared is None else min(STREAM_SHARED_OWN, slots)
        features = _FEATURES
        if self.role is CLIENT and self._config.goes_elsewhere:
            features |= credit.FEATURE_ELSEWHERE
        return credit.Hello(connection.first_slot_bytes, slots, credit.CONTROL_SLOTS, first, features)

    def agree(self, hello: credit.Hello) -> None:
        """Take in what the peer says about its receives. From now on its frames may come."""
        ledger = credit.Ledger(self.hello(), hello, withhold=self._connection.shared is not None)
        self._hello = None  # nobody asks for ours again
        self._connection.agree(
            ledger,
            hello.slot_bytes,
            hello.data_slots + hello.control_slots,
            bool(hello.features & credit.FEATURE_SOLICITS),
        )

    def _prepare(self, cm_id: CMID, context: contextvars.Context, may_grow: bool = True) -> None:
        """Create a queue pair with its receives posted, on the device that the address belongs to.

        The peer may turn out not to know slots that grow. Then they stay small.
        """
        device = cm_id.context
        assert device is not None
        config, connection = self._config, self._connection
        engine = self._loop_context.engine_for(device, config.busy_poll)
        shared_slots = config.shared_slots if config.shared_receive and _shares(engine) else None
        first_bytes = config.first_slot_bytes if may_grow else None
        connection.attach(engine, context, config.slot_bytes, config.data_slots, shared_slots, first_bytes)
        if connection.shared is not None:
            cq = connection.shared.cq
        else:
            cq = self._cq = engine.reserve(sum(stream_queue_depths(config.data_slots)))
        connection.start(connection.create_qp(cm_id, cq))

    # -- what the connection manager says ------------------------------------------------------------------

    def _cm_event(self, event: CMEvent) -> None:
        """An event of our identifier."""
        kind, owner = event.type, self._owner
        if owner is None:
            return
        if kind is self._awaited or kind is _ESTABLISHED:
            self._step_done(event, owner, kind is _ESTABLISHED)
        elif kind not in _CHANGES_NOTHING:
            waiter = self._waiter
            if waiter is None:
                if not owner.has_ended and self._connection.qp is not None:
                    self._connection.engine.drain()  # what has come before, the last of a clean end among it
                if self._is_established_unsaid():
                    self._step_done(event, owner, True)
                if owner.has_ended:
                    return  # by our own end: the peer has only answered
                if kind is _DISCONNECTED and owner.ends_cleanly():
                    return  # most connections end so, and need no error that says why
            if self._connection.qp is not None:
                self._loop_context.hear_device(
                    self._connection.engine
                )  # it may know the reason, and end the connection for that
            if waiter is None:
                owner.on_connection_error(_lost_error(event))
            elif not waiter.done():
                owner.on_connection_error(_connect_error(event))

    def _is_established_unsaid(self) -> bool:
        """Whether the client was ready and said so by its frames only, before it ended: its RTU was lost."""
        return self.role is SERVER and not self._was_connected and self._connection.has_heard

    def _step_done(self, event: CMEvent, owner: EndpointOwner, established: bool) -> None:
        waiter, self._waiter = self._waiter, None
        try:
            if established:
                self.connected = self._was_connected = True
                owner.established(event)
        except (SystemExit, KeyboardInterrupt):
            if waiter is not None:
                waiter.cancel()  # if the loop runs again, nobody waits in vain
            raise
        except BaseException as exc:
            if waiter is None:
                owner.establishing_failed(exc)
            elif not waiter.done():  # else connect() was cancelled, and ends what there is
                waiter.set_exception(exc)
            return
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the end -------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Tell the peer that the connection is over, if there was one. Later calls do nothing."""
        if self.connected and self.id is not None:
            self.connected = False
            try:  # not contextlib.suppress(), which calls Python functions at each end
                self.id.disconnect(told=False)
            except OSError:
                pass

    def destroy_queue_pair(self) -> None:
        """Destroy the queue pair. From then on the device touches no memory of this connection."""
        try:
            self._connection.part_from_shared()
        finally:
            if self._connection.qp is not None:
                self._connection.qp.close()
        if self._cq is not None:
            depths = stream_queue_depths(self._config.data_slots)
            self._connection.engine.unreserve(self._cq, sum(depths))
            self._cq = None

    def destroy_id(self) -> None:
        """Destroy the identifier. No event comes after this."""
        if self.id is not None:
            self._loop_context.destroy_id(self.id)

    def disown(self) -> None:
        """Forget the owner, which refers to us."""
        self._owner = None


def _shares(engine: StreamEngine) -> bool:
    """Whether the device has shared receive queues, which are asked for."""
    if not engine.can_share:
        logger.warning(
            "device %s has no shared receive queues: each connection has a ring of its own",
            engine.pd.context.name,
        )
    return engine.can_share


def _ask(cm_id: CMID, hello: bytes) -> None:
    cm_id.connect(private_data=hello, retry_count=7, rnr_retry_count=0)


def _connect_error(event: CMEvent) -> OSError:
    """What an event that ends an attempt to connect means, as the exception a socket user expects."""
    if event.type is CMEventType.REJECTED:
        # With the peer's own reason, if the peer is one of ours.
        address = event.id.peer_addr
        peer = "" if address is None else f" {endpoint(address)}"
        with contextlib.suppress(ProtocolError):
            refusal = credit.unpack_refusal(event.private_data)
            text = f"the peer{peer} refuses the connection: {refusal.reason} (code {refusal.code})"
            if refusal.code == credit.RefusalCode.ELSEWHERE and refusal.port:
                return ElsewhereError(text, refusal.port)
            return ConnectionRefusedError(errno.ECONNREFUSED, text)
    error = event.error()
    if error is not None:
        return error
    return ConnectionError(errno.EPROTO, f"unexpected {event!r} while connecting")


def _lost_error(event: CMEvent) -> OSError:
    """What an event that ends a connection means."""
    error = event.error()
    if error is None or event.type is CMEventType.REJECTED:
        # Too late for a refusal: the peer has closed before it knew that the connection was established.
        return ConnectionResetError(errno.ECONNRESET, f"connection lost: {event!r}")
    return error
