"""asyncio transports over RDMA: ``create_rdma_connection`` and ``start_rdma_server``.

Theory
------
A transport is three things that know nothing of each other, and this file, which connects them:

* ``StreamConnection`` (the data engine, compiled) moves bytes. ``write`` and the delivery to
  ``data_received`` are its business alone; no frame of this file runs per message.
* ``Machine`` (protocol.py, pure) knows the life of a connection. Everything that is not a byte is an
  event for it, and it answers with actions. ``_handle`` carries them out; nothing else here decides.
* ``Driver`` brings the connection manager's events.

How a connection is made: ``rdma_resolve_addr``, ``rdma_resolve_route``, a queue pair with the whole
receive ring posted, ``rdma_connect`` with a Hello in its private data; the other side checks the
Hello, posts its own ring and accepts with its Hello. The connecting side then speaks first, with a
Credit frame, because iWARP demands that (rdma_connect(3)); the accepting side holds its writes until
that has come. Nothing in this blocks: every step is an event on the driver's file descriptor.

How it is taken apart: ``_TEARDOWN``, in that order, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import operator
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rdmanet import credit, log_rate
from rdmanet._core import (
    CMID,
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    STREAM_DATA_SLOTS_MAX,
    STREAM_SHARED_OWN,
    STREAM_SHARED_SLOTS_MAX,
    AccessFlags,
    AsyncEvent,
    CMEvent,
    CMEventType,
    QPCap,
    QPInitAttr,
    StreamConnection,
    StreamEngine,
    WCStatus,
    stream_half_open_bytes,
    stream_queue_depths,
)
from rdmanet.addresses import SockAddr, libraries_for, merged, resolve, wildcards
from rdmanet.admission import places_for
from rdmanet.driver import Driver, driver_for
from rdmanet.errors import CompletionResetError, ProtocolError, completion_error, endpoint
from rdmanet.leases import Lease, patience, rights_of
from rdmanet.memory import OfferedMemory, Operation, Posted
from rdmanet.offers import Offers, RemoteRegion
from rdmanet.protocol import Action, Event, Machine, State, Writing
from rdmanet.readiness import Readiness
from rdmanet.server import RdmaServer as RdmaServer
from rdmanet.transport_socket import RdmaSocket

logger = logging.getLogger("rdmanet")

_P = TypeVar("_P", bound=asyncio.BaseProtocol)

SLOT_BYTES = 65536
DATA_SLOTS = 16
SHARED_SLOTS = 256
SHARED_RNR_RETRY = 7  # without end: a peer that sends what it was not granted takes receives from the others
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0
REVOKE_TIMEOUT_S = 10.0
# For our Abort to arrive, or a peer's last step towards a connection: who is stopped or gone must not keep our memory.
_FAREWELL_S = 1.0
_LATE_WRITES_QUIET = 5  # asyncio.constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How a connection is built; times in seconds, sizes in bytes."""

    slot_bytes: int = SLOT_BYTES
    data_slots: int = DATA_SLOTS
    connect_timeout: float | None = CONNECT_TIMEOUT_S
    close_timeout: float | None = CLOSE_TIMEOUT_S
    busy_poll: float | None = None
    shared_receive: bool = False
    shared_slots: int = SHARED_SLOTS

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("shared_slots", self.shared_slots, 0, STREAM_SHARED_SLOTS_MAX),
            ("slot_bytes", self.slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("data_slots", self.data_slots, 1, STREAM_DATA_SLOTS_MAX),
        ):
            if not least <= operator.index(value) <= most:
                raise ValueError(f"{name}={value!r} is not between {least} and {most}")


# ---------------------------------------------------------------------------
# The public functions
# ---------------------------------------------------------------------------


async def create_rdma_connection(
    protocol_factory: Callable[[], _P],
    host: str | None = None,
    port: int | str | None = None,
    *,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    local_addr: tuple[str, int] | None = None,
    device: str | None = None,
    connect_timeout: float | None = CONNECT_TIMEOUT_S,
    close_timeout: float | None = CLOSE_TIMEOUT_S,
    busy_poll: float | None = None,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
    all_errors: bool = False,
    **unbuilt: Any,
) -> tuple[RdmaTransport, _P]:
    """Open a byte stream over RDMA to ``host:port``; returns ``(transport, protocol)``.

    As ``loop.create_connection`` (asyncio doc, "Opening network connections"): ``protocol_factory``
    is called once, when the connection exists, and ``connection_made`` before this returns. Numeric
    addresses touch no thread; names are resolved by ``loop.getaddrinfo``. ``local_addr`` is the
    ``(host, port)`` to bind, ``device`` a device's name (default: ``RDMANET_DEVICE``, else the real
    device that reaches the address, else the embedded one; loopback prefers the embedded one).

    ``connect_timeout`` bounds each address tried and ``close_timeout`` a close without progress, in
    seconds, None for no bound. ``busy_poll`` bounds how long completions are watched after the last
    message, in seconds: None adapts, 0 never watches. It holds for the loop's whole device.

    ``data_slots`` receives of ``slot_bytes`` bytes each are this side's ring: what the peer may send before
    this side's loop comes round, in frames, and the longest frame. A connection has memory for twice as many
    and eight more, for receiving, sending and control frames. The peer's ring may be another. 512 bytes to
    16 MiB, and 1 to 104 slots, are possible.

    Raises ConnectionRefusedError (nobody listens, or the peer refuses: the text has its reason),
    TimeoutError, other OSError; ValueError for sizes that cannot be; NotImplementedError names keywords of
    ``create_connection`` that are not built yet. With several addresses the errors are merged into one
    OSError, or raised as an ExceptionGroup with ``all_errors``.

    Cancelling it undoes what was begun; if the connection had just been made it is aborted.
    """
    _refuse_unbuilt("create_rdma_connection", unbuilt)
    loop = asyncio.get_running_loop()
    if host is None or port is None:
        raise ValueError("host and port are needed")
    config = StreamConfig(
        slot_bytes=slot_bytes,
        data_slots=data_slots,
        connect_timeout=connect_timeout,
        close_timeout=close_timeout,
        busy_poll=busy_poll,
    )
    addresses = await resolve(loop, host, port, family, proto, flags)
    local: SockAddr | None = None
    if local_addr is not None:
        local = (await resolve(loop, local_addr[0], local_addr[1], family, proto, flags))[0]
    failures: list[Exception] = []
    for address in addresses:
        for library in libraries_for(address, device):
            transport = RdmaTransport(await driver_for(loop, library), config, protocol_factory)
            try:
                await transport._connect(address, local)
            except (OSError, RuntimeError) as exc:
                if not isinstance(exc, OSError):
                    raise
                failures.append(exc)
                continue
            logger.debug("connected to %s by device %s", address, transport.get_extra_info("rdma_device"))
            return transport, cast(_P, transport.get_protocol())
    raise merged(f"create_rdma_connection to {host}:{port}", failures, all_errors)


async def start_rdma_server(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    family: int = 0,
    flags: int = 0,
    backlog: int = 100,
    device: str | None = None,
    start_serving: bool = True,
    reuse_address: bool | None = None,
    close_timeout: float | None = CLOSE_TIMEOUT_S,
    busy_poll: float | None = None,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
    shared_receive: bool = False,
    shared_slots: int = SHARED_SLOTS,
    **unbuilt: Any,
) -> RdmaServer:
    """Listen for byte streams over RDMA; returns an ``asyncio.AbstractServer``.

    As ``loop.create_server``: ``host`` is an address, several, or None for all; port 0 or None takes
    a free port and ``server.sockets`` tells which. Without ``device`` every device that owns the
    address listens; the embedded device has every address of this host. Where TCP is served on the same port,
    its server comes first: see docs/howto/migrate.md.
    ``reuse_address`` is accepted and means nothing: a port is free as soon as its listener is gone.
    ``slot_bytes`` and ``data_slots`` are the ring of each connection, as of ``create_rdma_connection``.

    With ``shared_receive`` the connections have no rings of their own: they receive from one shared receive
    queue, so that many idle ones cost little. Each is sure of ``min(2, data_slots)`` data slots and six for
    control frames, and borrows from ``shared_slots`` (0 to 4096) that all have in common while it is busy, up
    to ``data_slots`` together. Memory to send from is lent while something is in flight. Servers of one loop
    and device share if their sizes are the same. A peer that breaks the protocol is cut off without last words.
    Where the device has no shared receive queues each connection has its ring, with a warning in the log;
    ``get_extra_info("rdma_shared_receive")`` tells.

    Raises TypeError for a coroutine function (that is ``start_rdma_stream_server``), OSError when
    one of the addresses cannot be listened on (the text names it; an address that the host does not have is
    passed over if there is another), NotImplementedError naming keywords that are not built yet. Cancelling it
    closes the listeners it has made.
    """
    _refuse_unbuilt("start_rdma_server", unbuilt)
    if asyncio.iscoroutinefunction(protocol_factory):
        raise TypeError(
            "start_rdma_server() takes a protocol factory; for a coroutine function that is given "
            "a reader and a writer use start_rdma_stream_server()"
        )
    loop = asyncio.get_running_loop()
    config = StreamConfig(
        slot_bytes=slot_bytes,
        data_slots=data_slots,
        close_timeout=close_timeout,
        busy_poll=busy_poll,
        shared_receive=bool(shared_receive),
        shared_slots=shared_slots,
    )

    context = contextvars.copy_context()

    def make_transport(driver: Driver, server: RdmaServer) -> RdmaTransport:
        # Each connection has a copy of the caller's context, as of loop.create_server().
        return RdmaTransport(driver, config, protocol_factory, server, context.copy())

    each = stream_half_open_bytes(slot_bytes, data_slots, config.shared_receive)
    server = RdmaServer(loop, make_transport, backlog, places_for(each))
    await listen(server, host, port, family=family, flags=flags, device=device, start_serving=start_serving)
    return server


async def listen(
    server: RdmaServer,
    host: str | Sequence[str] | None,
    port: int | str | None,
    *,
    family: int = 0,
    flags: int = 0,
    device: str | None = None,
    start_serving: bool = True,
) -> None:
    """Give a server its listeners, as of start_rdma_server(); it is closed when that fails."""
    loop = server.get_loop()
    absent: list[Exception] = []
    hosts: Iterable[str] = (
        wildcards(family) if host in (None, "") else [host] if isinstance(host, str) else host or ()
    )
    try:
        for name in hosts:
            for address in await resolve(loop, name, port or 0, family, 0, flags):
                for library in libraries_for(address, device):
                    try:
                        server._add_listener(await driver_for(loop, library), address)
                    except OSError as exc:
                        failure = _listen_error(exc, address, library.name)
                        if exc.errno not in _NOT_ITS_ADDRESS:
                            raise failure from exc
                        absent.append(failure)
        if not server._listeners:
            raise merged(f"start_rdma_server on {host}:{port}", absent, False)
        for passed_over in absent:
            # That one library does not own an address which another one listens on is no news.
            logger.debug("start_rdma_server: %s", passed_over)
        if start_serving:
            await server.start_serving()
    except BaseException:
        server.close()
        raise


# ---------------------------------------------------------------------------
# The transport
# ---------------------------------------------------------------------------


# What an RdmaTransport is to isinstance(), see RdmaTransport.__class__.
_Face = type("RdmaTransport", (asyncio.Transport,), {"__slots__": (), "__module__": __name__})


class RdmaTransport(StreamConnection):
    """An asyncio transport over an RDMA connection (asyncio.Transport, method by method)."""

    # What asyncio's own code asks of transports.
    _start_tls_compatible = False

    @property  # type: ignore[misc]
    def __class__(self) -> type[asyncio.Transport]:  # type: ignore[override]
        """An asyncio.Transport, for isinstance(); type() tells the truth.

        A compiled object's memory and that of asyncio's base class, which has a slot, cannot be one object's.
        """
        return _Face

    def __init__(
        self,
        driver: Driver,
        config: StreamConfig,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        server: RdmaServer | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self._driver = driver
        self._loop = driver.loop
        self._config = config
        self._factory = protocol_factory
        self._server = server
        self._machine = Machine()
        self._context = contextvars.copy_context() if context is None else context
        self._protocol: asyncio.BaseProtocol | None = None
        self._id: CMID | None = None
        self._cq: CQ | None = None
        self._connected = False
        self._torn_down = False
        self._released = False
        self._close_when_made = False
        self._waiter: asyncio.Future[None] | None = None
        self._half_closed: asyncio.Future[None] | None = None
        self._for_room: list[asyncio.Future[None]] = []
        self._awaited: CMEventType | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._farewell: asyncio.TimerHandle | None = None
        self._close_progress = -1
        self._extra: dict[str, Any] = {}
        self._offers = Offers()
        self._regions: dict[RemoteRegion, OfferedMemory] = {}
        self._last_words = (int(credit.AbortCode.ABORTED), "")  # what an Abort of ours says
        self._late_writes = 0
        self._eof_written = False
        self._sending_file = False
        self._leases: set[Lease] = set()
        self._leases_told: dict[int, Lease] = {}  # by the offer's number: the peer knows of them
        self._queued_operations: list[Posted] = []
        self._readiness: Readiness | None = None
        driver.transports.add(self)

    # -- connecting --------------------------------------------------------------------------------

    async def _connect(self, address: SockAddr, local: SockAddr | None) -> None:
        """The connecting side, from an address to connection_made."""
        timeout = self._config.connect_timeout
        resolve_ms = 2000 if timeout is None else max(1, int(timeout * 1000))
        try:
            async with asyncio.timeout(timeout):
                cm_id = self._id = self._driver.create_id(self._cm_event)
                await self._step(
                    CMEventType.ADDR_RESOLVED, lambda: cm_id.resolve_addr(local, address, resolve_ms)
                )
                await self._step(CMEventType.ROUTE_RESOLVED, lambda: cm_id.resolve_route(resolve_ms))
                self._prepare(cm_id)
                hello = credit.pack_hello(self._hello())
                await self._step(
                    CMEventType.ESTABLISHED,
                    lambda: cm_id.connect(private_data=hello, retry_count=7, rnr_retry_count=0),
                )
        except BaseException as exc:
            if self._machine.state is State.OPENING:
                self._teardown()
            else:
                self.abort()
            if isinstance(exc, TimeoutError) and not exc.args:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"no connection to {endpoint(address)} within {timeout} s"
                ) from None
            raise

    async def _step(self, awaited: CMEventType, begin: Callable[[], None]) -> None:
        """Begin something and wait for its event; any other event of the id is its failure."""
        self._awaited = awaited
        waiter = self._waiter = self._loop.create_future()
        try:
            begin()
            await waiter
        finally:
            self._waiter = self._awaited = None

    def _accept(self, cm_id: CMID, hello: credit.Hello) -> None:
        """The accepting side; goes on when ESTABLISHED comes."""
        self._id = cm_id
        if self._server is not None:
            self._server._attach(self)
        self._driver.adopt_id(cm_id, self._cm_event)
        self._prepare(cm_id)
        ours = self._hello()
        shares = self.shared is not None
        self._agree(credit.Ledger(ours, hello, withhold=shares), hello.slot_bytes)
        cm_id.accept(private_data=credit.pack_hello(ours), rnr_retry_count=SHARED_RNR_RETRY if shares else 0)

    def _hello(self) -> credit.Hello:
        slots = self._config.data_slots
        first = slots if self.shared is None else min(STREAM_SHARED_OWN, slots)
        return credit.Hello(self._config.slot_bytes, slots, credit.CONTROL_SLOTS, first)

    def _prepare(self, cm_id: CMID) -> None:
        """A queue pair with its receives posted, on the device that the address belongs to."""
        context = cm_id.context
        assert context is not None
        engine = self._engine = self._driver.engine_for(context, self._config.busy_poll)
        shared_slots = self._config.shared_slots if self._shares(engine) else None
        self._attach(engine, self._context, self._config.slot_bytes, self._config.data_slots, shared_slots)
        if self.shared is not None:
            cq, srq = self.shared.cq, self.shared.srq
        else:
            cq, srq = engine.reserve(sum(stream_queue_depths(self._config.data_slots))), None
            self._cq = cq
        self._start(self._create_queue_pair(cm_id, engine, cq, srq))

    def _shares(self, engine: StreamEngine) -> bool:
        """Whether to receive from a shared queue: asked for, and to be had."""
        if not self._config.shared_receive:
            return False
        if not engine.can_share:
            logger.warning(
                "device %s has no shared receive queues: each connection has a ring of its own",
                engine.pd.context.name,
            )
        return engine.can_share

    def _create_queue_pair(self, cm_id: CMID, engine: StreamEngine, cq: CQ, srq: SRQ | None) -> QP:
        sends, receives = stream_queue_depths(self._config.data_slots)
        if srq is not None:
            receives = 0
        for inline in (engine.max_inline, 64, 0):
            cap = QPCap(
                max_send_wr=sends,
                max_recv_wr=receives,
                max_send_sge=2,
                max_recv_sge=1,
                max_inline_data=inline,
            )
            try:
                qp = cm_id.create_qp(engine.pd, QPInitAttr(cap=cap, send_cq=cq, recv_cq=cq, srq=srq))
            except OSError as exc:
                # The largest inline size is the one limit that ibv_query_device does not tell.
                if exc.errno != errno.EINVAL or inline == 0:
                    raise
            else:
                engine.max_inline = inline
                return qp
        raise AssertionError("unreachable: the last attempt raises")

    def _cm_event(self, event: CMEvent) -> None:
        """An event of our connection identifier."""
        if self._torn_down:
            return
        waiter, self._waiter = self._waiter, None
        kind = event.type
        if kind is self._awaited or kind is CMEventType.ESTABLISHED:
            try:
                if kind is CMEventType.ESTABLISHED:
                    self._established(event)
            except Exception as exc:
                if waiter is not None and not waiter.done():
                    waiter.set_exception(exc)
                else:
                    self._report(exc, "rdmanet: a connection could not be begun")
                    self._teardown()
                return
            except BaseException:
                if waiter is not None:
                    waiter.cancel()  # KeyboardInterrupt, say: whoever runs the loop again is not kept waiting
                raise
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif kind in (CMEventType.TIMEWAIT_EXIT, CMEventType.ADDR_CHANGE):
            self._waiter = waiter
        else:
            self._waiter = waiter
            if self.qp is not None:
                self._driver.hear_device(self._engine)  # it may have told why
            if waiter is None:
                self._fallen(_lost_error(event))
            elif not waiter.done():
                self._fallen(_connect_error(event))

    def _fallen(self, error: OSError) -> None:
        """An event says that it is over: the connection, or the attempt at one."""
        if self._torn_down:
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            if not waiter.done():
                waiter.set_exception(error)
        elif self._machine.state is State.OPENING:
            # The accepting side: the peer went away before the connection was made.
            self._teardown()
        elif self._farewell is not None:
            self._farewell_ended()  # nobody is there to hear it
        elif self._machine.state is not State.CLOSED:
            self._cut_off(error)

    def _port_event(self, event: AsyncEvent) -> None:
        """A port of the device, perhaps ours, went down, say: which ends nothing, so only who asks is told."""
        if event.port_num == self._extra.get("rdma_port") and self._machine.state is not State.CLOSED:
            self._tell("port_event", event)

    def _established(self, event: CMEvent) -> None:
        """Both sides are ready: make the protocol and tell it. Bytes may have come already."""
        assert self._id is not None
        self._connected = True
        connecting = self._server is None
        if self._server is not None:
            self._server._stands(self)
        if connecting:
            hello = credit.unpack_hello(event.private_data)
            self._agree(credit.Ledger(self._hello(), hello), hello.slot_bytes)
        self._extra_info(self._id)
        protocol = self._context.run(self._factory)
        self._machine.receive(Event.ESTABLISHED)
        self._protocol = protocol
        self._open(protocol, _is_buffered(protocol), connecting)
        if connecting:
            self._send_control(credit.Kind.CREDIT)
        try:
            self._context.run(protocol.connection_made, cast(asyncio.Transport, self))
        except Exception as exc:
            self._report(
                exc, "connection_made() failed"
            )  # and the connection lives, as asyncio's and uvloop's do
        self._hear_early()
        if self._close_when_made:
            self._stop_timers()
            self.close()

    def _extra_info(self, cm_id: CMID) -> None:
        context = cm_id.context
        assert context is not None and self.qp is not None
        self._extra = {
            "sockname": cm_id.local_addr,
            "peername": cm_id.peer_addr,
            "rdma_device": context.name,
            "rdma_library": self._driver.library.name,
            "rdma_port": cm_id.port_num,
            "rdma_qp": self.qp.qp_num,
            "rdma_pd": self._engine.pd,
        }

    # -- what asyncio.Transport has and the engine has not --------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Optional facts: sockname, peername, socket, rdma_device, rdma_library, rdma_port, rdma_qp,
        rdma_pd (to register memory for ``offer``), rdma_stats (counters of this connection),
        rdma_shared_receive (None, or how the shared receive queue stands)."""
        if name == "rdma_stats":
            return self._stats() if self._extra else default
        if name == "rdma_shared_receive":
            return default if self.shared is None else self.shared.stats()
        if name == "socket" and self._extra and name not in self._extra:
            self._extra[name] = RdmaSocket(self._extra["sockname"], self._extra.get("peername"), self)
        return self._extra.get(name, default)

    # -- a descriptor that shows whether there is something to read: see readiness.py ------------------

    def _readiness_fd(self) -> int:
        """It, made when there is none; -1 when the connection is over, or another process's."""
        if self._is_foreign or self._released or self._torn_down:
            return -1
        if self._readiness is None:
            self._readiness = Readiness(self._driver.bell())
        self._engine.drain()  # who asks now looks now, and the loop may not have come round for long
        self._tell_unread()
        self._unread_changed()
        return self._readiness.fd

    def _unread_changed(self) -> None:
        if self._readiness is not None:
            self._readiness.show(self._unread or self._machine.state is not State.OPEN)

    def _close_readiness(self) -> None:
        if self._readiness is not None:
            self._readiness.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        self._protocol = protocol
        self._bind(protocol, _is_buffered(protocol))

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The current protocol."""
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._machine.closing

    def is_reading(self) -> bool:
        """Whether what arrives is delivered (asyncio.ReadTransport.is_reading)."""
        return self._reading and not self.is_closing()

    def pause_reading(self) -> None:
        """Stop data_received. What has arrived keeps its slots, so the peer runs out of credits."""
        self._reading = False

    def resume_reading(self) -> None:
        """Let data_received go on; it is called from the event loop, not from here."""
        self._reading = True

    def can_write_eof(self) -> bool:
        """True: a connection has two independent halves."""
        return True

    def write_eof(self) -> None:
        """End our half after what is written; receiving goes on (asyncio.WriteTransport.write_eof)."""
        if not self.is_closing():
            self._stop_writing()
            self._eof_written = True
            self._handle(Event.WRITE_EOF)

    @contextlib.contextmanager
    def _for_file(self) -> Iterator[Callable[[memoryview], None]]:
        """Refuse all writes but those by what this gives: see files.py."""
        if self._sending_file:
            raise RuntimeError("sendfile is in progress already")
        self._hold_writes(True)
        try:
            yield self._write_of_file
        finally:
            self._hold_writes(False)

    def _write_of_file(self, data: memoryview) -> None:
        self._hold_writes(False)
        try:
            self.write(data)
        finally:
            self._hold_writes(True)

    def _hold_writes(self, held: bool) -> None:
        self._sending_file = held
        if held:
            self._stop_writing()
        elif self._machine.can_write:
            self._allow_writing()

    @property
    def _closed_and_flushed(self) -> bool:
        """close() or abort() was called, and nothing is left to send: asyncio's connections are lost then."""
        return self._machine.state in (State.CLOSING, State.CLOSED) and not self.get_write_buffer_size()

    async def _until_room(self) -> None:
        """Wait while more is written than set_write_buffer_limits() has as the upper limit.

        :raises OSError: the connection is over, or closed
        """
        if self.get_write_buffer_size() > self.get_write_buffer_limits()[1] and not self.is_closing():
            waiter = self._loop.create_future()
            self._for_room.append(waiter)
            await waiter
        if self.is_closing():
            raise self._machine.error or ConnectionResetError(errno.ECONNRESET, "the connection is closed")

    def _tell_room(self) -> None:
        waiters, self._for_room = self._for_room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _end_writing(self) -> None:
        """write_eof(), and wait until the peer's device knows, or the connection is over."""
        self.write_eof()
        if self._machine.writing is Writing.FIN_DUE:
            self._half_closed = self._loop.create_future()
            await self._half_closed

    def _tell_half_closed(self) -> None:
        if self._half_closed is not None and not self._half_closed.done():
            self._half_closed.set_result(None)

    def close(self) -> None:
        """Stop reading, send what is written, say end of file, and be gone.

        ``connection_lost(None)`` comes when the peer's device has it all (not its application), or
        ``connection_lost(TimeoutError)`` when nothing moved for ``close_timeout`` seconds.
        """
        if self._machine.state is State.OPENING:
            # Server.close_clients(): the peer may be connected already. If not it has no more time than a round trip
            # takes; whoever waits for the server's end waits for no stranger.
            self._close_when_made = True
            if self._close_timer is None and self._server is not None:
                self._close_timer = self._loop.call_later(_FAREWELL_S, self._never_made)
        else:
            self._stop_writing()
            self._handle(Event.CLOSE)

    def _never_made(self) -> None:
        self._close_timer = None
        if self._machine.state is State.OPENING:
            self._teardown()

    def abort(self) -> None:
        """Be gone at once: unsent bytes are dropped, the peer gets ConnectionResetError."""
        if self._machine.state is not State.CLOSED:
            self._handle(Event.ABORT)

    def _force_close(self, exc: BaseException | None) -> None:
        """abort(), with what connection_lost() is to be told: asyncio's SSLProtocol calls this."""
        if exc is None:
            self.abort()
        elif self._machine.state is not State.CLOSED:
            self._handle(Event.CALLBACK_RAISED, exc)

    def __repr__(self) -> str:
        state = self._machine.state.name.lower()
        peer = self._extra.get("peername")
        device = self._extra.get("rdma_device")
        buffered = self.get_write_buffer_size()
        told = f"{state} peer={peer} device={device}"
        if (
            self._machine.state is not State.CLOSED
            and self._extra
            and self.qp is not None
            and not self.qp.closed
        ):
            stats = self._stats()
            told += f" qp={self.qp.qp_num:#x} credits={stats['credits']}/{stats['peer_slots']}"
        return f"<RdmaTransport {told} write_buffer={buffered} bytes>"

    def __del__(self) -> None:
        if not getattr(self, "_torn_down", True) and self._id is not None and not self._is_foreign:
            warnings.warn(f"unclosed transport {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._teardown()

    # -- events for the machine, actions from it -------------------------------------------------------

    def _handle(self, event: Event, error: BaseException | None = None) -> None:
        """Carry out what the machine answers, in Action's order."""
        if self._is_foreign:
            return  # after a fork: the connection is the parent's, and goes on there
        actions = self._machine.receive(event, error)
        if self._readiness is not None and self._machine.state is not State.OPEN:
            self._readiness.show(True)
        if not actions:
            return
        if actions & Action.STOP_READING:
            self._stop_reading()
        if actions & Action.DISCARD_WRITES:
            self._discard_writes()
        if actions & Action.SEND_FIN:
            self._when_flushed()
        if self._machine.state is State.CLOSING:
            self._begin_close_timer()  # also where write_eof() had asked for the Fin already
        if actions & Action.SEND_ABORT and not (event is Event.PEER_VIOLATED and self.shared is not None):
            self._say_abort()  # on a shared queue who breaks the rules gets no time: it may take others' receives
        try:
            if actions & Action.DELIVER_EOF:
                self._deliver_eof()
        finally:  # a KeyboardInterrupt there does not spare us the end
            self._end(actions)

    def _end(self, actions: Action) -> None:
        if actions & Action.LOSE:
            self._loop.call_soon(self._lose, context=self._context)
        if actions & Action.DISCONNECT:
            self._stop_posting()
            if self._farewell is None:
                self._part()
            if self._machine.state is not State.CLOSED:
                # Bytes are left to deliver. An error doesn't wait for a paused reader: a writer in drain()
                # must hear of it. After a clean end there is nothing to hear but the bytes themselves.
                if self._machine.error is not None:
                    self._reading = True
                self._when_drained()
        if actions & Action.RELEASE and not actions & Action.LOSE:
            self._release_when_heard()

    def _say_abort(self) -> None:
        """Tell the peer why. A disconnection goes another way and would overtake it: that waits until it is heard."""
        said = self._send_control(credit.Kind.ABORT, credit.pack_abort(*self._last_words))
        if said and not self._loop.is_closed():
            self._farewell = self._loop.call_later(_FAREWELL_S, self._farewell_ended)

    def _farewell_ended(self) -> None:
        """The peer has our Abort, or had its time: now the rest of the end, as far as it is due."""
        if self._farewell is None:
            return
        self._farewell.cancel()
        self._farewell = None
        if self._released or self._torn_down:
            self._teardown()
            return
        self._part()

    def _part(self) -> None:
        self._say_goodbye()
        if self._machine.state is not State.CLOSED:
            # Whoever waits for remote memory waits for nothing now, and may be why the reader is paused.
            self._end_leases()
            self._destroy_queue_pair()
            self._lose_operations()
            self._fail_waiters()

    def _release_when_heard(self) -> None:
        self._released = True
        if self._farewell is None:
            self._teardown()

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a forked child's copy of its parent's transport."""
        return self._driver.foreign

    def _deliver_eof(self) -> None:
        keep_open: bool | None = False
        try:
            eof_received = getattr(self._protocol, "eof_received", None)
            if eof_received is not None:
                keep_open = self._context.run(eof_received)
        except Exception as exc:
            self._callback_raised(exc, "eof_received")
            return
        if not keep_open and not self._machine.closing:
            self._stop_writing()
            self._handle(Event.EOF_DECLINED)

    def _lose(self) -> None:
        """The last callback, then the end of everything that the connection held."""
        protocol = self._protocol
        if self._torn_down:
            return
        self._offers.lost()  # now, though the peer may be yet to hear of the end
        try:
            if protocol is not None:
                protocol.connection_lost(cast("Exception | None", self._machine.error))
        except Exception as exc:
            self._loop.call_exception_handler(
                {
                    "message": "connection_lost() failed",
                    "exception": exc,
                    "transport": self,
                    "protocol": protocol,
                }
            )
        finally:
            self._close_readiness()
            self._release_when_heard()

    def _begin_close_timer(self) -> None:
        timeout = self._config.close_timeout
        if timeout is not None and self._close_timer is None:
            self._close_progress = self._progress
            self._close_timer = self._loop.call_later(timeout, self._close_timer_fired)

    def _close_timer_fired(self) -> None:
        self._close_timer = None
        if self._machine.state is State.CLOSED:
            return
        if self._progress != self._close_progress:
            self._begin_close_timer()
            return
        self._last_words = (credit.AbortCode.TIMEOUT, "closing made no progress")
        self._handle(
            Event.TIMED_OUT,
            TimeoutError(
                errno.ETIMEDOUT,
                f"closing made no progress for {self._config.close_timeout} s, "
                f"{self.get_write_buffer_size()} bytes were not sent",
            ),
        )

    # -- hooks: what the engine tells --------------------------------------------------------------------

    def _control_received(self, kind: int, body: bytes, granted: int) -> None:
        if kind == credit.Kind.FIN:
            self._handle(Event.FIN_RECEIVED)
            self._when_drained()
        elif kind == credit.Kind.ABORT:
            abort = credit.unpack_abort(body)
            reason = f": {abort.reason}" if abort.reason else ""
            error = ConnectionResetError(errno.ECONNRESET, f"the peer aborted the connection{reason}")
            self._handle(Event.ABORT_RECEIVED, error)
        else:
            if self._machine.writing is not Writing.OVER:
                self._credit_received(body, granted)

    def _control_sent(self, kind: int) -> None:
        if kind == credit.Kind.FIN:
            self._handle(Event.FIN_COMPLETED)
            self._tell_half_closed()
        elif self._farewell is not None:
            # By the loop: this is the engine, in the midst of our completions.
            self._loop.call_soon(self._farewell_ended)

    def _flushed(self) -> None:
        if not self._send_control(credit.Kind.FIN):
            self._when_flushed()

    def _drained(self) -> None:
        if self._machine.state is not State.CLOSED:
            self._handle(Event.DELIVERED)

    def _pause_writing(self) -> None:
        try:
            self._protocol.pause_writing()  # type: ignore[union-attr]
        except Exception as exc:
            self._report(exc, "pause_writing() failed")

    def _resume_writing(self) -> None:
        # By the loop where a callback of ours may be running (abort() in data_received, for one): a
        # context cannot be entered twice, and connection_lost comes by the loop too, behind it.
        self._tell_room()
        if self._machine.closing:
            self._loop.call_soon(self._resume_protocol, context=self._context)
        else:
            self._context.run(self._resume_protocol)

    def _resume_protocol(self) -> None:
        try:
            self._protocol.resume_writing()  # type: ignore[union-attr]
        except Exception as exc:
            self._report(exc, "resume_writing() failed")

    def _callback_raised(self, exc: BaseException, name: str) -> None:
        self._report(exc, f"Fatal error: protocol.{name}() call failed.")
        if self._machine.state is not State.CLOSED:
            self._handle(Event.CALLBACK_RAISED, exc)

    def _report(self, exc: BaseException, message: str) -> None:
        self._loop.call_exception_handler(
            {"message": message, "exception": exc, "transport": self, "protocol": self._protocol}
        )

    def _fabric_failed(self, failure: tuple[int, bool, int, Posted | None] | Exception) -> None:
        if self._is_over or self._machine.state is State.OPENING:
            return
        if isinstance(failure, OSError) or (
            isinstance(failure, tuple) and failure[0] == WCStatus.WR_FLUSH_ERR
        ):
            # That it is over, and no more; the device may have told why.
            self._driver.hear_device(self._engine)
            if self._is_over:
                return
        if isinstance(failure, Exception):
            if not isinstance(failure, OSError):
                self._report(failure, "rdmanet: the data engine failed, the connection is closed")
            self._cut_off(failure)
            return
        status, was_send, vendor_err, operation = failure
        assert self.qp is not None
        if operation is not None:
            error = operation.failure(status, vendor_err, self.qp.qp_num)
        else:
            error = completion_error(status, "send" if was_send else "receive", vendor_err, self.qp.qp_num)
        if isinstance(error, CompletionResetError) and self.qp.peer_gone:
            error = CompletionResetError(error.status, error.opcode, vendor_err, error.qp_num, True)
        self._cut_off(error)

    @property
    def _is_over(self) -> bool:
        """Whether there is no connection any more, though bytes of it may be left to deliver."""
        return self._machine.writing is Writing.OVER

    def _protocol_broken(self, exc: BaseException) -> None:
        log_rate.warn(logger, "protocol", "%r: the peer broke the protocol: %s", self, exc)
        # Which rule, and by what of its own. Of no other error the peer is told more than that there was one: what an
        # application's exception says is none of its business.
        self._last_words = (credit.AbortCode.PROTOCOL, str(exc))
        waiter = self._waiter
        self._handle(Event.PEER_VIOLATED, exc)
        if waiter is not None and not waiter.done():
            waiter.set_exception(exc)

    def _cut_off(self, error: BaseException) -> None:
        """The connection is over. Completions that are there first: the peer's Fin may be among them."""
        self._engine.drain()
        self._handle(Event.CUT_OFF if self._undelivered else Event.DISCONNECTED, error)

    def _write_refused(self) -> None:
        """As asyncio's transports: an error after write_eof, silence after close, a warning when it goes on."""
        if self._sending_file:
            raise RuntimeError("unable to write; sendfile is in progress")
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._machine.state in (State.DRAINING, State.DRAINING_TO_EOF):
            self._handle(Event.WRITE_DROPPED)
        if self._late_writes >= _LATE_WRITES_QUIET:
            logger.warning("write() on a closed RDMA transport: the data is dropped")
        self._late_writes += 1

    # -- memory regions ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def offer(
        self,
        mr: MR,
        *,
        access: AccessFlags | str = "read",
        name: str = "",
        revoke_timeout: float = REVOKE_TIMEOUT_S,
    ) -> AsyncIterator[credit.Region]:
        """Let the peer read or write ``mr`` with RDMA while the block runs, and nobody else.

        The region is announced with the next credit message; the peer's protocol hears of it by
        ``region_offered(remote)``. ``access`` is "read", "write", "read,write", or AccessFlags.
        Register ``mr`` with ``AccessFlags.MW_BIND``, and with LOCAL_WRITE too if the peer is to write, but
        with no remote rights of its own: the peer gets a key that is good for this connection and this
        block only (where the device has no memory windows of type 2, for this block only: then the memory is
        registered once more).

        Entering the block waits until the key is made, behind what was sent before. If the peer holds that up for
        ``revoke_timeout`` seconds and one more, the connection is cut off and TimeoutError is raised.

        Leaving the block revokes the offer: the peer is told, has ``revoke_timeout`` seconds to finish what it has
        begun, and then its key is invalidated by the device, whatever the peer does; if even that is held up for
        a second longer, the connection is cut off. When the block has ended the memory is the owner's alone, with one
        exception on the embedded device: a process that shares its memory with this one, and was stopped in the
        midst of an access, may finish that when it goes on, at most 256 KiB of what it was offered. Then the
        connection is cut off (TimeoutError) and a warning is logged.

        Cancelling the wait leaves the revocation under way, and ``mr`` cannot be closed before it is through
        (OSError, EBUSY). If the connection ends, so does the wait.

        256 regions may be on offer at a time, by each side of a connection.

        Raises ValueError for memory that cannot be offered so, or a ``revoke_timeout`` without end; RdmaError for
        one region too many; TimeoutError as above; OSError if the connection is over.
        """
        rights = rights_of(access, mr, self._engine)
        timeout = patience(revoke_timeout)
        lease = Lease(self, mr, rights, self._loop)
        self._leases.add(lease)
        lease.begin(timeout)
        region: credit.Region | None = None
        try:
            key = await lease.granted
            part = mr.to_remote()
            region = self._offers.offer(part.address, part.length, key, rights, name)
            lease.number = region.id
            self._leases_told[region.id] = lease
            self._have_news()
            yield region
        finally:
            await self._revoke(lease, region, timeout)

    async def _revoke(self, lease: Lease, region: credit.Region | None, timeout: float) -> None:
        """Take an offer back, and wait until nobody can use it any more."""
        if self._is_foreign:
            return
        told = region is not None and not self._offers.revoke(region.id)
        if told:
            self._have_news()
        lease.leave(told, timeout)
        await asyncio.shield(lease.over)  # cancelling ends the waiting only

    def _lease_over(self, lease: Lease) -> None:
        self._leases.discard(lease)
        if lease.number is not None and self._leases_told.get(lease.number) is lease:
            del self._leases_told[lease.number]

    def _stop_queue_pair(self) -> None:
        """To ERR, after which it takes nothing of the peer's."""
        if self.qp is not None and not self.qp.closed:
            with contextlib.suppress(OSError):  # a device that is gone takes nothing either
                self.qp.to_error()

    def _lease_stuck(self, error: OSError) -> None:
        if not self._is_over:
            self._cut_off(error)

    def _end_leases(self) -> None:
        """The queue pair is about to be destroyed. First its windows: rxe waits fifty seconds for bound ones."""
        leases, self._leases = self._leases, set()
        if leases:
            self._stop_queue_pair()
        for lease in leases:
            try:
                lease.lost()
            except OSError as exc:
                self._report(exc, "rdmanet: a peer's key could not be given back")

    def _credit_body(self, granted: int, room: int) -> tuple[bool, bytes]:
        body = self._offers.next_credit_body(room, granted)
        return self._offers.pending, b"" if body is None else credit.pack_credit(body)

    def _credit_received(self, body: bytes, granted: int) -> None:
        news = self._offers.received(credit.unpack_credit(body, granted))
        for region_id in news.acked:
            if (lease := self._leases_told.pop(region_id, None)) is not None:
                lease.acknowledged()
        if hasattr(self._protocol, "region_offered"):  # who has no use for them is spared the memory
            for region in news.offered:
                remote = self._regions[region] = OfferedMemory.of(self, region)
                self._tell("region_offered", remote)
        for region in news.revoked:
            if (known := self._regions.pop(region, None)) is not None:
                self._tell("region_revoked", known)
        if self._offers.pending:
            self._have_news()

    def _tell(self, name: str, news: OfferedMemory | AsyncEvent) -> None:
        """Call what a protocol may have besides asyncio's methods."""
        callback = getattr(self._protocol, name, None)
        if callback is None:
            return
        try:
            self._context.run(callback, news)
        except Exception as exc:
            self._callback_raised(exc, name)

    async def _operate(self, remote: OfferedMemory, opcode: int, offset: int, buffer: Any) -> None:
        """One RDMA READ or WRITE through a region; see OfferedMemory."""
        region = remote._region
        self._offers.begin(region)
        operation = Operation(
            self._loop.create_future(), opcode, remote.address + offset, remote.rkey, buffer, self
        )
        # Kept apart from the waiter: cancelling the await must not free what the device may touch.
        operation.on_end = lambda: self._operation_ended(region)
        try:
            operation.map_local()
            if self._queued_operations or not operation.post():
                self._queued_operations.append(operation)
        except BaseException:
            operation.end(None)
            raise
        await operation.done

    @property
    def _pd(self) -> PD:
        return self._engine.pd

    def _operation_ended(self, region: RemoteRegion) -> None:
        self._offers.end(region)
        if self._offers.pending and self._machine.state is not State.CLOSED:
            self._have_news()

    def _submit(self, request: Posted) -> None:
        """Post what ends or begins an offer, before all one-sided operations that wait."""
        if not request.post():
            self._queued_operations.insert(0, request)

    def _operation_done(self, operation: Posted) -> None:
        operation.end(None)
        while self._queued_operations:
            first = self._queued_operations[0]
            try:
                if not first.post():
                    return
            except OSError as exc:
                self._queued_operations.pop(0)
                first.end(exc)
            else:
                self._queued_operations.pop(0)

    def _operation_lost(self, operation: Posted) -> None:
        operation.end(
            self._machine.error or ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        )

    # -- the end -------------------------------------------------------------------------------------------

    def _loop_ended(self) -> None:
        """The loop is going away under us. While it still runs, whoever waits is told."""
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        if self._torn_down or self._released:
            self._teardown()
            return
        machine = self._machine
        made = machine.state is not State.OPENING
        if made and machine.state is not State.CLOSED and (not machine.closing or self._undelivered):
            unclosed = f"unclosed transport {self!r}"
            if machine.error is None:
                machine.error = ConnectionAbortedError(errno.ECONNABORTED, "the event loop has ended")
        else:
            unclosed = ""
        machine.receive(Event.ABORT)
        if made and not self._loop.is_closed():
            self._context.run(self._lose)
        else:
            self._teardown()
        if unclosed:  # last: it may be made an exception
            warnings.warn(unclosed, ResourceWarning, stacklevel=2, source=self)

    def _teardown(self) -> None:
        """Undo everything, in the one order that is safe; later calls do nothing."""
        if self._torn_down:
            return
        self._torn_down = True
        for step in self._TEARDOWN:
            try:
                step(self)
            except Exception as exc:
                # What one step cannot give back must not keep the others from theirs.
                self._report(exc, f"rdmanet: {step.__name__} failed")

    def _stop_timers(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None

    def _say_goodbye(self) -> None:
        if self._connected and self._id is not None:
            with contextlib.suppress(OSError):
                self._id.disconnect()

    def _destroy_queue_pair(self) -> None:
        # From here on the device touches no memory of this connection.
        self._part_from_shared()
        if self.qp is not None:
            self.qp.close()
        if self._cq is not None:
            self._engine.unreserve(self._cq, sum(stream_queue_depths(self._config.data_slots)))
            self._cq = None

    def _fail_waiters(self) -> None:
        operations, self._queued_operations = self._queued_operations, []
        for operation in operations:
            self._operation_lost(operation)
        if not self._loop.is_closed():
            self._tell_half_closed()
            self._tell_room()
        self._offers.lost()
        self._regions.clear()

    def _destroy_id(self) -> None:
        if self._id is not None:
            self._driver.destroy_id(self._id)

    def _leave(self) -> None:
        self._driver.left(self)
        if self._server is not None:
            self._server._detach(self)

    # The order in which a connection is taken apart. The peer's keys before the queue pair that they are bound
    # to, which is in ERR then; the queue pair before the memory that it writes into; the identifier after its
    # queue pair (rdma_destroy_id(3)); whoever waits is told last.
    _TEARDOWN: tuple[Callable[[RdmaTransport], None], ...] = (
        _stop_timers,
        _say_goodbye,
        _end_leases,
        _destroy_queue_pair,
        StreamConnection._release,
        _destroy_id,
        _fail_waiters,
        _close_readiness,
        _leave,
    )


# ---------------------------------------------------------------------------
# Protocols, keywords, errors
# ---------------------------------------------------------------------------


def _is_buffered(protocol: asyncio.BaseProtocol) -> bool:
    """Whether a protocol is given its bytes by get_buffer().

    asyncio's loop asks for the base class; uvloop asks for the method. Who has the methods of that base class, and no
    data_received(), can have meant nothing else.
    """
    if isinstance(protocol, asyncio.BufferedProtocol):
        return True
    return hasattr(protocol, "get_buffer") and not hasattr(protocol, "data_received")


def _refuse_unbuilt(call: str, given: dict[str, Any]) -> None:
    """Keywords of asyncio's functions that have no meaning here yet."""
    known = {
        "ssl", "sock", "server_hostname", "ssl_handshake_timeout", "ssl_shutdown_timeout", "happy_eyeballs_delay",
        "interleave", "reuse_port", "keep_alive", "keepalive",
    }  # fmt: skip
    for name in given:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    named = [name for name, value in given.items() if value not in (None, False)]
    if named:
        raise NotImplementedError(f"{call}() does not support {', '.join(named)} yet")


# The device does not have the address, or the host does not have its family, as of asyncio's servers.
_NOT_ITS_ADDRESS = (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAFNOSUPPORT)


def _listen_error(error: OSError, address: SockAddr, library: str) -> OSError:
    """Why one of a server's addresses cannot be listened on, and what to do about it."""
    remedy = ""
    if error.errno == errno.EADDRINUSE:
        remedy = (
            ": another RDMA server has this port, or a TCP program of another user, or one that does not listen yet;"
            f" `ss -ltnp sport = {address[1]}` shows who. Beside a TCP server of one's own TCP listens first"
        )
    elif error.errno == errno.EACCES:
        remedy = ": ports below 1024 need root, or CAP_NET_BIND_SERVICE (net.ipv4.ip_unprivileged_port_start)"
    return OSError(
        error.errno, f"cannot listen on {endpoint(address)} ({library} library): {error.strerror}{remedy}"
    )


def _connect_error(event: CMEvent) -> OSError:
    """What an event that ends an attempt to connect means, as the exception a socket user expects."""
    if event.type is CMEventType.REJECTED:
        # The peer's own words, if they are one of ours.
        address = event.id.peer_addr
        peer = "" if address is None else f" {endpoint(address)}"
        with contextlib.suppress(ProtocolError):
            refusal = credit.unpack_refusal(event.private_data)
            return ConnectionRefusedError(
                errno.ECONNREFUSED,
                f"the peer{peer} refuses the connection: {refusal.reason} (code {refusal.code})",
            )
    error = event.error()
    return (
        error
        if error is not None
        else ConnectionError(errno.EPROTO, f"unexpected {event!r} while connecting")
    )


def _lost_error(event: CMEvent) -> OSError:
    """What an event that ends a connection means."""
    error = event.error()
    if error is None or event.type is CMEventType.REJECTED:
        # Too late for a refusal: the peer has closed before it knew that the connection stands.
        return ConnectionResetError(errno.ECONNRESET, f"connection lost: {event!r}")
    return error
