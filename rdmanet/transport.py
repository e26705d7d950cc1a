"""asyncio transports over RDMA: ``create_rdma_connection`` and ``start_rdma_server``.

A transport is asyncio's face over a connection, and decides nothing. ``Lifecycle`` (lifecycle.py) has the connection's
parts, and decides what happens to it. ``Connection`` (compiled) moves the bytes. A transport's ``write`` is the
connection's method, and the connection calls ``data_received`` (_pyx/sink.pxi), so no frame of this file runs per
message.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import itertools
import logging
import ssl as ssl_module
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdmanet import credit
from rdmanet._core import (
    MR,
    QP,
    AccessFlags,
    SharedRing,
    StreamEngine,
    stream_half_open_bytes,
)
from rdmanet.addresses import SockAddr, libraries_for, merged, resolve, wildcards
from rdmanet.admission import places_for
from rdmanet.errors import endpoint
from rdmanet.establish import Role
from rdmanet.lifecycle import Lifecycle
from rdmanet.loop_context import LoopContext, loop_context_for
from rdmanet.options import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DATA_SLOTS,
    FIRST_SLOT_BYTES,
    KEEPALIVE,
    REVOKE_TIMEOUT_S,
    SHARED_SLOTS,
    SLOT_BYTES,
    Keepalive,
    StreamConfig,
)
from rdmanet.protocol import State
from rdmanet.registered import RegisteredMemory
from rdmanet.server import ConnectRequest
from rdmanet.server import RdmaServer as RdmaServer
from rdmanet.tls import Layer, Tls, face_of
from rdmanet.transport_socket import RdmaSocket

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger("rdmanet")

_P = TypeVar("_P", bound=asyncio.BaseProtocol)


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
    keepalive: Keepalive | bool | None = KEEPALIVE,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
    first_slot_bytes: int = FIRST_SLOT_BYTES,
    all_errors: bool = False,
    ssl: ssl_module.SSLContext | bool | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    **unbuilt: Any,
) -> tuple[Any, _P]:
    """Open a byte stream over RDMA to ``host:port``; returns ``(transport, protocol)``.

    It works like ``loop.create_connection`` (asyncio doc, "Opening network connections"): ``protocol_factory`` is
    called once, when the connection exists, and ``connection_made`` is called before this returns. Numeric addresses
    need no thread; names are resolved by ``loop.getaddrinfo``. ``local_addr`` is the ``(host, port)`` to bind to;
    of a name with several addresses, those of the family of the address to connect to are tried.
    ``device`` is the name of a device. By default it is ``RDMANET_DEVICE``, or else the real device that reaches the
    address, or else the embedded one; for loopback addresses the embedded one comes first.

    ``connect_timeout`` limits each attempt at an address, and ``close_timeout`` limits how long a close may go without
    progress; both are in seconds, and None means no limit. ``busy_poll`` is how long completions are polled after
    each message, in seconds: None adapts to the traffic, 0 turns polling off, ``math.inf`` polls always. It applies to
    everything that this loop does on the device.

    ``keepalive`` is ``(idle, interval, count)``, as with TCP: after ``idle`` seconds without a message, the peer's host
    is asked whether it is there, and if it has not answered within ``interval * count`` seconds, or the device gives it
    up sooner, the connection is lost. None or False switches that off. It is the host that answers, or its adapter: a
    program that is stopped or busy is not given up. See docs/howto/keepalive.md.

    This side's ring is ``data_slots`` receives, and eight more for control frames. The peer can send that many frames
    before this side's loop runs again, and no frame is longer than a slot. A slot holds ``first_slot_bytes`` bytes
    until the peer sends longer messages, and then more, at most ``slot_bytes``. While the connection sends, it has as
    many slots of ``slot_bytes`` to send from. The peer's ring may have other sizes. ``slot_bytes`` is between 512 bytes
    and 16 MiB, ``data_slots`` between 1 and 104.

    The transport is an RdmaTransport. With ``ssl``, a context or True, the connection is encrypted, and the transport
    is the one that asyncio has for TLS. ``server_hostname`` (by default ``host``) is the name that the certificate must
    have. ``ssl_handshake_timeout`` and ``ssl_shutdown_timeout`` are in seconds, 60 and 30 by default.

    Raises ConnectionRefusedError if nobody listens, or if the peer refuses (the text has its reason); TimeoutError and
    other OSErrors, among them ``ssl.SSLError``, and ConnectionAbortedError if the TLS handshake takes too long;
    ValueError for sizes out of range, or arguments of TLS that do not fit; NotImplementedError, which names the
    keywords of ``create_connection`` that are not implemented yet. If several addresses were tried, their errors are
    merged into one OSError, or, with ``all_errors``, raised as an ExceptionGroup.

    Cancelling it undoes what has been begun; if the connection has just been made, it is aborted.
    """
    refuse_unbuilt("create_rdma_connection", unbuilt)
    _refuse_unknown("create_rdma_connection", unbuilt)
    loop = asyncio.get_running_loop()
    if host is None or port is None:
        raise ValueError("host and port are needed")
    tls = Tls.of_client(ssl, host, server_hostname, ssl_handshake_timeout, ssl_shutdown_timeout)
    layer = None if tls is None else Layer(tls, loop, protocol_factory)
    make = protocol_factory if layer is None else layer.make
    is_made = False

    def factory() -> asyncio.BaseProtocol:
        nonlocal is_made
        is_made = True
        return make()

    config = StreamConfig(
        slot_bytes=slot_bytes,
        data_slots=data_slots,
        first_slot_bytes=first_slot_bytes,
        connect_timeout=connect_timeout,
        close_timeout=close_timeout,
        busy_poll=busy_poll,
        keepalive=keepalive,  # type: ignore[arg-type]  # StreamConfig checks it
    )
    addresses = await resolve(loop, host, port, family, proto, flags)
    ours: list[SockAddr] | None = None
    if local_addr is not None:
        ours = await resolve(loop, local_addr[0], local_addr[1], family, proto, flags)
    failures: list[Exception] = []
    for address in addresses:
        sources = _sources_for(address, ours)
        if not sources:
            failures.append(_no_source(address, local_addr))
            continue
        for library, local in itertools.product(libraries_for(address, device), sources):
            loop_context = await loop_context_for(loop, library)
            transport = RdmaTransport(loop_context, config, factory, Role.CLIENT)
            try:
                await transport._connect(address, local)
            except OSError as exc:
                if is_made:
                    raise  # the factory's, or the connection's: the address has answered
                failures.append(exc)
                continue
            logger.debug("connected to %s by device %s", address, transport.get_extra_info("rdma_device"))
            if layer is None:
                return transport, cast(_P, transport.get_protocol())
            face, protocol = await layer.done(transport)
            return face, cast(_P, protocol)
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
    keep_alive: bool | None = None,
    close_timeout: float | None = CLOSE_TIMEOUT_S,
    busy_poll: float | None = None,
    keepalive: Keepalive | bool | None = KEEPALIVE,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
    first_slot_bytes: int = FIRST_SLOT_BYTES,
    shared_receive: bool = False,
    shared_slots: int = SHARED_SLOTS,
    ssl: ssl_module.SSLContext | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    **unbuilt: Any,
) -> RdmaServer:
    """Listen for byte streams over RDMA; returns an ``asyncio.AbstractServer``.

    It works like ``loop.create_server``: ``host`` is an address, several addresses, or None for all. Port 0 or None
    takes a free port, and ``server.sockets`` says which. Without ``device``, every device that owns the address
    listens; the embedded device has every address of this host. If a TCP server uses the same port, start that one
    first: see docs/howto/migrate.md. ``reuse_address`` is accepted and has no effect, because a port is free as soon as
    its listener is gone. ``slot_bytes`` and ``data_slots`` size the ring of each connection, as in
    ``create_rdma_connection``; ``close_timeout``, ``busy_poll`` and ``keepalive`` are as there, too. ``keep_alive`` is
    that of ``loop.create_server``: True stands for ``keepalive`` as it is by default, False for none.

    With ``shared_receive`` the connections have no rings of their own. They receive from one shared receive queue, so
    that many idle connections cost little. Each always has ``min(2, data_slots)`` data slots, and six for control
    frames. While it is busy it borrows from ``shared_slots`` (0 to 4096) common ones, up to ``data_slots`` together.
    Memory to send from is lent while something is in flight. Servers of one loop and device share a queue if their
    sizes are the same. A peer that breaks the protocol is cut off without being told why. If the device has no shared
    receive queues, each connection has its own ring, and a warning is logged; ``get_extra_info("rdma_shared_receive")``
    tells the two apart.

    With ``ssl``, a server's context, the connections are encrypted. ``connection_made()`` is called after the TLS
    handshake, for which a client has ``ssl_handshake_timeout`` seconds (60 by default). It has less while other clients
    wait to be accepted, and the server has given its memory for half-open connections away (docs/howto/tls.md).
    ``ssl_shutdown_timeout`` limits the closing of TLS, in seconds (30 by default).

    Raises TypeError for a coroutine function (``start_rdma_stream_server`` takes one), and for an ``ssl`` that is no
    context; OSError if it cannot listen on one of the addresses (the text names it; an address that this host does not
    have is skipped if there is another); ValueError for sizes out of range, for an empty list of hosts, and for times
    of TLS that are not positive or without ``ssl``; ``ssl.SSLError`` for a client's context; NotImplementedError, which
    names the keywords that are not implemented yet. Cancelling it closes the listeners that it has made.
    """
    refuse_unbuilt("start_rdma_server", unbuilt)
    _refuse_unknown("start_rdma_server", unbuilt)
    if asyncio.iscoroutinefunction(protocol_factory):
        raise TypeError(
            "start_rdma_server() takes a protocol factory; for a coroutine function that is given "
            "a reader and a writer use start_rdma_stream_server()"
        )
    loop = asyncio.get_running_loop()
    config = StreamConfig(
        slot_bytes=slot_bytes,
        data_slots=data_slots,
        first_slot_bytes=first_slot_bytes,
        close_timeout=close_timeout,
        busy_poll=busy_poll,
        keepalive=keepalive if keep_alive is None else keep_alive and (keepalive or True),  # type: ignore[arg-type]
        shared_receive=bool(shared_receive),
        shared_slots=shared_slots,
    )

    tls = Tls.of_server(ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    server = server_of(loop, protocol_factory, config, backlog, tls)
    await listen(server, host, port, family=family, flags=flags, device=device, start_serving=start_serving)
    return server


def server_of(
    loop: asyncio.AbstractEventLoop,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    config: StreamConfig,
    backlog: int,
    tls: Tls | None,
) -> RdmaServer:
    """A server without listeners, which makes transports and their protocols."""
    context = contextvars.copy_context()

    def accept(request: ConnectRequest) -> None:
        # Each connection has a copy of the caller's context, as with loop.create_server().
        factory, on_made = protocol_factory, request.stands
        if tls is not None:
            layer = Layer(tls, loop, protocol_factory)
            factory, on_made = layer.make, request.goes_on
            layer.when_done(request.stands)
        transport = RdmaTransport(
            request.loop_context, config, factory, Role.SERVER, context.copy(), on_made, request.over
        )
        request.taken_by(transport)
        try:
            transport._accept(request)
        except Exception as exc:
            request.fail(exc)
            transport._end_now()

    each = stream_half_open_bytes(config.slot_bytes, config.data_slots, config.shared_receive)
    return RdmaServer(loop, accept, backlog, places_for(each), 0.0 if tls is None else tls.handshake_timeout)


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
    """Give a server the listeners that start_rdma_server() would give it. If that fails, close the server."""
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
                        server._add_listener(await loop_context_for(loop, library), address)
                    except OSError as exc:
                        failure = _listen_error(exc, address, library.name)
                        if exc.errno not in _NOT_ITS_ADDRESS:
                            raise failure from exc
                        absent.append(failure)
        if not server._listeners:
            if not absent:
                raise ValueError(f"start_rdma_server: host={host!r} names no address")
            raise merged(f"start_rdma_server on {host}:{port}", absent, False)
        for passed_over in absent:
            # It is normal that one library does not own an address on which another one listens.
            logger.debug("start_rdma_server: %s", passed_over)
        if start_serving:
            await server.start_serving()
    except BaseException:
        server.close()
        raise


# ---------------------------------------------------------------------------
# The transport
# ---------------------------------------------------------------------------


class RdmaTransport(asyncio.Transport):
    """An asyncio transport over an RDMA connection (asyncio.Transport, method by method)."""

    # What asyncio's own code asks of transports.
    _start_tls_compatible = True

    def __init__(
        self,
        loop_context: LoopContext,
        config: StreamConfig,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        role: Role,
        context: contextvars.Context | None = None,
        on_made: Callable[[], None] = lambda: None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """
        :param role: CLIENT, if ``_connect`` is to be called; SERVER, if ``_accept``
        :param context: the context of the protocol's callbacks; by default a copy of the caller's
        :param on_made: called when the connection is established
        :param on_over: called when nothing is left of the connection, or of the attempt
        """

        def over() -> None:
            # From now on the class's write() is called, which says why it refuses.
            self.__dict__.pop("write", None)
            self.__dict__.pop("writelines", None)
            on_over()

        self._loop = loop_context.loop
        if context is None:
            context = contextvars.copy_context()
        life = self._life = Lifecycle(
            self, loop_context, config, protocol_factory, role, context, on_made, over
        )
        self._machine = life.machine
        self._connection = life.connection
        # The connection's own methods, without a frame of Python between.
        if type(self).write is RdmaTransport.write:
            self.write = self._connection.write  # type: ignore[method-assign]
            self.writelines = self._connection.writelines  # type: ignore[method-assign]

    # -- for those who make it -----------------------------------------------------------------------------

    async def _connect(self, address: SockAddr, local: SockAddr | None) -> None:
        """The connecting side, from an address to connection_made()."""
        await self._life.connect(address, local)

    def _accept(self, request: ConnectRequest) -> None:
        """The accepting side. It goes on when ESTABLISHED comes."""
        self._life.accept(request.id, request.hello)

    def _end_now(self, error: Exception | None = None) -> None:
        """abort(), without a word to the peer; connection_lost() gets this error. Later calls do nothing."""
        self._life.end_now(error)

    def _close_above(self) -> None:
        """close(), but if there is TLS above, it sends what it has buffered, and says good-bye, first."""
        face = face_of(self._life.callbacks.protocol)
        if face is None:
            self.close()
        elif not face.is_closing():
            face.close()

    # -- the parts -----------------------------------------------------------------------------------------

    @property
    def engine(self) -> StreamEngine:
        """The data engine that the connection is on."""
        return self._connection.engine

    @property
    def qp(self) -> QP | None:
        """The connection's queue pair; None before there is one."""
        return self._connection.qp

    @property
    def shared(self) -> SharedRing | None:
        """The shared receive queue that the connection receives from; None if it has a ring of its own."""
        return self._connection.shared

    # -- asyncio.BaseTransport -----------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, by its name; ``default`` if it is not known.

        ``sockname`` and ``peername`` are addresses. ``socket`` stands for asyncio's socket. ``fabric`` is "rdma", and
        ``fabric_reason`` says why. ``rdma_device`` and
        ``rdma_library`` are names, ``rdma_port`` and ``rdma_qp`` are the numbers of the device's port and of the queue
        pair. ``rdma_pd`` is the protection domain in which to register memory for ``offer``. ``rdma_shared_receive``
        is the state of its shared receive queue, if it has one. ``rdma_stats`` are counters of this connection:
        ``bytes_sent`` in all, of which ``bytes_borrowed`` were read from the program's memory into the peer's slots,
        and ``bytes_placed`` into memory that the peer named, both without a copy; ``bytes_received``, of which
        ``bytes_placed_here`` came into memory that a read of ours had named; ``wants_open``, how many reads have named
        memory that the peer may still write to; ``frames_sent``, ``frames_received`` and ``control_frames_sent``. Of
        now: ``credits``, the frames that may be sent; ``peer_slots``; ``sends_in_flight``; ``slots_held``, with bytes
        that are not read, or not granted again; ``slots_leased``, shown by ``RdmaStreamReader.lease``;
        ``slots_borrowed`` of a shared queue; ``bytes_registered``.
        """
        facts = self._life.facts
        if name == "rdma_stats":
            return self._connection.stats() if facts else default
        if name == "rdma_shared_receive":
            return default if self.shared is None else self.shared.stats()
        if name == "socket" and facts and name not in facts:
            facts[name] = RdmaSocket(facts["sockname"], facts.get("peername"), self)
        return facts.get(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        self._life.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The current protocol."""
        protocol = self._life.callbacks.protocol
        assert protocol is not None
        return protocol

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._machine.closing or self._life.close_when_resumed

    def close(self) -> None:
        """Stop reading, send what was written and end of file, and close the connection.

        ``connection_lost(None)`` is called when the peer's device (not its application) has everything, or
        ``connection_lost(TimeoutError)`` when nothing moved for ``close_timeout`` seconds.
        """
        self._life.close()

    # -- asyncio.ReadTransport -----------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether bytes that arrive are delivered (asyncio.ReadTransport.is_reading)."""
        return self._connection.reading and not self.is_closing()

    def pause_reading(self) -> None:
        """Stop calling data_received. Bytes that have arrived keep their slots, so the peer runs out of credits."""
        self._connection.reading = False

    def resume_reading(self) -> None:
        """Call data_received again, from the event loop, not from within this call."""
        self._connection.reading = True

    # -- asyncio.WriteTransport ----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data``, a bytes-like object; never blocks (asyncio.WriteTransport.write).

        The device may read a ``bytes`` object of 16 KiB or more in place, after this returns, and also a memoryview of
        256 KiB or more of an object that it keeps alive. If that is memory that can change (an array, say),
        ``pause_writing()`` is called at once, and ``resume_writing()`` when all of it has been read: change it no
        sooner. If ``pause_writing()`` is not called, the memory has been copied. With streams, ``await writer.drain()``
        waits as long as necessary; a drain that is cancelled promises nothing. Everything else is consumed or copied
        before this returns, a bytearray too. After ``close()``, or when the connection is lost, ``data`` is dropped.

        Raises RuntimeError after ``write_eof()`` and during ``sendfile()``; TypeError unless ``data`` is bytes-like.
        """
        # This is called only once the connection is over. Until then the instance has the connection's own method.
        self._connection.write(data)
        self._life._write_refused()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send all buffers of an iterable, in one step; they coalesce like successive writes.

        Nothing is sent if one of them is not bytes-like (TypeError). ``pause_writing()`` is called after the last one,
        so what the protocol does there, be it ``close()`` or another ``write()``, comes after all of them. Raises what
        ``write()`` raises.
        """
        self._connection.writelines(list_of_data)
        self._life._write_refused()

    def get_write_buffer_size(self) -> int:
        """How many bytes write() has accepted that have not been given to the device, or that it reads in place.

        Of the latter it counts only those in memory that can change.
        """
        return self._connection.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low-water and the high-water mark, in bytes: ``(low, high)``."""
        return self._connection.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the marks for pause_writing and resume_writing, in bytes of get_write_buffer_size().

        The defaults are those of asyncio.WriteTransport.set_write_buffer_limits: ``high`` is 64 KiB (or four times
        ``low``), ``low`` a quarter of ``high``. Raises ValueError unless high >= low >= 0.
        """
        self._connection.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        """True: a connection has two independent halves."""
        return True

    def write_eof(self) -> None:
        """Send end of file after what was written; receiving goes on (asyncio.WriteTransport.write_eof)."""
        self._life.write_eof()

    def abort(self) -> None:
        """Close the connection at once: unsent bytes are dropped, and the peer gets ConnectionResetError."""
        self._life.abort()

    # -- memory regions ------------------------------------------------------------------------------------

    def offer(
        self,
        memory: MR | RegisteredMemory | ReadableBuffer,
        *,
        access: AccessFlags | str = "read",
        name: str = "",
        revoke_timeout: float = REVOKE_TIMEOUT_S,
    ) -> contextlib.AbstractAsyncContextManager[credit.Region]:
        """Let the peer, and nobody else, read or write ``memory`` with RDMA while the block runs.

        The next credit message announces the region. The peer's protocol gets it by ``region_offered(remote)``, and the
        peer's stream by ``RdmaStreamReader.next_offer()``. ``access`` is "read", "write", "read,write", or AccessFlags.

        ``memory`` is a registered region, or what ``RdmaServer.register()`` returns, or any contiguous buffer, an array
        for example, which is registered for this block. Register a region with ``AccessFlags.MW_BIND``, and with
        LOCAL_WRITE if the peer may write, but with no remote rights of its own.

        The peer gets a key that is valid only for this connection and this block. (If the device has no memory windows
        of type 2, the memory is registered once more, and the key is valid for this block, but on every connection of
        its protection domain.)

        Entering the block waits until the key is made, which is queued behind what was sent before. If the peer holds
        that up for ``revoke_timeout`` seconds and one more, the connection is cut off, and TimeoutError is raised.

        Leaving the block revokes the offer. The peer is told, and has ``revoke_timeout`` seconds to finish what it has
        begun; then the device invalidates its key, whatever the peer does. If even that is held up for one more
        second, the connection is cut off. When the block has ended, nobody else can touch the memory, with one
        exception on the embedded device: a process that shares its memory with this one, and was stopped in the middle
        of an access, may finish that access when it continues, at most 256 KiB of what it was offered. In this case the
        connection is cut off (TimeoutError) and a warning is logged.

        If the wait is cancelled, the revocation goes on. Until it is done, a region cannot be closed (OSError, EBUSY),
        and a buffer cannot be resized. If the connection ends, the wait ends too.

        Each side of a connection can have 256 regions on offer at a time.

        Raises ValueError for memory that cannot be offered like this, and for a ``revoke_timeout`` that is not finite;
        TypeError for what is no memory; BufferError for a buffer that is not contiguous, or that is read-only when the
        peer is to write; RdmaError for one region too many; TimeoutError as described; OSError if the connection is
        over, or if a buffer cannot be registered.
        """
        return self._life.regions.offer(memory, access, name, revoke_timeout)

    # -- for asyncio's SSLProtocol, RdmaSocket, and streams/ -----------------------------------------------

    def _kept_alive(self) -> tuple[bool, float, float, int]:
        """Whether keep-alive is on; idle and interval, in seconds, and count."""
        return self._connection.kept_alive

    def _keep_alive(self, on: bool, idle: float, interval: float, count: int) -> None:
        self._connection.keep_alive(on, idle, interval, count)

    def _force_close(self, exc: BaseException | None) -> None:
        """abort(), with the error that connection_lost() is to get: asyncio's SSLProtocol calls this."""
        if exc is None:
            self.abort()
        else:
            self._life.fail(exc)

    def _readiness_fd(self) -> int:
        """A descriptor that shows whether there is something to read, or -1."""
        return self._life.readiness_fd()

    @property
    def _closed_and_flushed(self) -> bool:
        """close() or abort() was called, and nothing is left to send: asyncio's connections are lost then."""
        return self._machine.state in (State.CLOSING, State.CLOSED) and not self.get_write_buffer_size()

    def _for_file(self) -> contextlib.AbstractContextManager[Callable[[bytes], None]]:
        """A block in which only the function that it yields can write: see streams/files.py."""
        return self._life.writing.reserved(lambda data: self.write(data))

    async def _until_room(self) -> None:
        """Wait while more bytes are buffered than the high-water mark.

        :raises OSError: the connection is over, or closed
        """
        await self._life.writing.until_room()

    async def _end_writing(self) -> None:
        """write_eof(), and wait until the peer's device knows of it, or the connection is over."""
        self.write_eof()
        await self._life.writing.until_half_closed()

    def __repr__(self) -> str:
        is_foreign = self._life.foreign
        state = "forked" if is_foreign else self._machine.state.name.lower()
        facts = self._life.facts
        peer, device = facts.get("peername"), facts.get("rdma_device")
        buffered = self.get_write_buffer_size()
        told = f"{state} peer={peer} device={device}"
        is_open = self._machine.state is not State.CLOSED and not is_foreign
        if is_open and facts and self.qp is not None and not self.qp.closed:
            stats = self._connection.stats()
            told += f" qp={self.qp.qp_num:#x} credits={stats['credits']}/{stats['peer_slots']}"
        return f"<RdmaTransport {told} write_buffer={buffered} bytes>"

    def __del__(self) -> None:
        life = getattr(self, "_life", None)  # there is none where __init__ raised
        if life is not None and life.unclosed:
            warnings.warn(f"unclosed transport {self!r}", ResourceWarning, stacklevel=2, source=self)
            life.release_now()


# ---------------------------------------------------------------------------
# Keywords, errors
# ---------------------------------------------------------------------------


_UNBUILT = {"sock", "happy_eyeballs_delay", "interleave", "reuse_port"}
"""The keywords of asyncio's functions that are not implemented yet."""


def refuse_unbuilt(call: str, given: dict[str, Any]) -> None:
    """Raise an error for keywords that are not implemented yet.

    :param call: what the program has called
    """
    named = [name for name, value in given.items() if name in _UNBUILT and value not in (None, False)]
    if named:
        raise NotImplementedError(
            f"{call}() does not support {', '.join(named)} yet: leave it out, or call asyncio's own function on the"
            " loop of rdmanet.run(), which takes TCP where RDMA cannot do this"
        )


def _refuse_unknown(call: str, given: dict[str, Any]) -> None:
    for name in given:
        if name not in _UNBUILT:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


def _sources_for(address: SockAddr, ours: list[SockAddr] | None) -> Sequence[SockAddr | None]:
    """The local addresses from which to connect to an address: those of its family. None: the system chooses."""
    return (None,) if ours is None else [local for local in ours if len(local) == len(address)]


def _no_source(address: SockAddr, local_addr: Any) -> OSError:
    """Why a connection to an address is not tried."""
    family = "IPv4" if len(address) == 2 else "IPv6"
    return OSError(
        errno.EADDRNOTAVAIL,
        f"no connection to {endpoint(address)}: local_addr={local_addr!r} has no {family} address to connect from",
    )


# The device does not have the address, or the host does not have its family; asyncio's servers skip these, too.
_NOT_ITS_ADDRESS = (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAFNOSUPPORT)


def _listen_error(error: OSError, address: SockAddr, library: str) -> OSError:
    """Why a server cannot listen on one of its addresses, and what to do about it."""
    remedy = ""
    if error.errno == errno.EADDRINUSE:
        remedy = (
            ": an RDMA server has this port, or a TCP program, or for a minute the old connections of a TCP program"
            " that did not set SO_REUSEADDR;"
            f" `ss -tanp sport = {address[1]}` shows which."
            " To share the port with a TCP server of your own, start the TCP server first."
        )
    elif error.errno == errno.EADDRNOTAVAIL and library == "embedded":
        remedy = ": no interface of this host has this address"
    elif error.errno == errno.EACCES:
        remedy = ": ports below 1024 need root, or CAP_NET_BIND_SERVICE (net.ipv4.ip_unprivileged_port_start)"
    return OSError(
        error.errno, f"cannot listen on {endpoint(address)} ({library} library): {error.strerror}{remedy}"
    )
