"""asyncio transports over RDMA: ``create_rdma_connection`` and ``start_rdma_server``.

Here are the functions that make transports; the transport itself is stream/rdma_transport.py. `server_of` and `listen`
are for the modules above, which make servers of their own kinds.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import inspect
import itertools
import logging
import ssl as ssl_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from rdmanet._core import stream_half_open_bytes
from rdmanet.errors import endpoint, shown
from rdmanet.stream.addresses import SockAddr, libraries_for, merged, numeric, resolve, wildcards
from rdmanet.stream.admission import places_for
from rdmanet.stream.establish import CLIENT, SERVER, ElsewhereError, SourcePortTakenError
from rdmanet.stream.loop_context import LoopContext, known_loop_context, loop_context_for
from rdmanet.stream.options import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DATA_SLOTS,
    FIRST_SLOT_BYTES,
    KEEPALIVE,
    SHARED_SLOTS,
    SLOT_BYTES,
    Keepalive,
    StreamConfig,
    config_of,
)
from rdmanet.stream.rdma_transport import RdmaTransport as RdmaTransport
from rdmanet.stream.server import ConnectRequest
from rdmanet.stream.server import RdmaServer as RdmaServer
from rdmanet.stream.tls import Layer, Tls

logger = logging.getLogger("rdmanet")

_SOURCE_PORTS_TRIED = 16

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

    A server of several processes may send the client to another port of the same address, once. Then ``"peername"`` has
    that port.

    Raises ConnectionRefusedError if nobody listens, or if the peer refuses (the text has its reason); TimeoutError and
    other OSErrors, among them ``ssl.SSLError``, and ConnectionAbortedError if the TLS handshake takes too long;
    ValueError for sizes out of range, or arguments of TLS that do not fit; NotImplementedError, which names the
    keywords of ``create_connection`` that are not implemented yet. If several addresses were tried, their errors are
    merged into one OSError, or, with ``all_errors``, raised as an ExceptionGroup.

    Cancelling it undoes what has been begun; if the connection has just been made, it is aborted.
    """
    if unbuilt:
        refuse_unbuilt("create_rdma_connection", unbuilt)
        _refuse_unknown("create_rdma_connection", unbuilt)
    loop = asyncio.get_running_loop()
    if host is None or port is None:
        raise ValueError("host and port are needed")
    tls = Tls.of_client(ssl, host, server_hostname, ssl_handshake_timeout, ssl_shutdown_timeout)
    layer = None if tls is None else Layer(tls, loop, protocol_factory)
    make = protocol_factory if layer is None else layer.make
    is_made = False
    protocol: asyncio.BaseProtocol | None = None

    def factory() -> asyncio.BaseProtocol:
        nonlocal is_made, protocol
        is_made = True
        protocol = make()
        return protocol

    config = config_of(
        slot_bytes, data_slots, first_slot_bytes, connect_timeout, close_timeout, busy_poll, keepalive
    )
    addresses = numeric(host, port, family) or await resolve(loop, host, port, family, proto, flags)
    ours: list[SockAddr] | None = None
    if local_addr is not None:
        if isinstance(local_addr, str) or len(local_addr) < 2:
            raise TypeError(f"local_addr={shown(local_addr)} is not (host, port)")
        ours = await resolve(loop, local_addr[0], local_addr[1], family, proto, flags)
    failures: list[Exception] = []
    for address in addresses:
        sources = _sources_for(address, ours)
        if not sources:
            failures.append(_no_source(address, local_addr))
            continue
        for library, local in itertools.product(libraries_for(address, device), sources):
            loop_context = known_loop_context(loop, library) or await loop_context_for(loop, library)
            try:
                transport = await connect(loop_context, config, factory, address, local)
            except OSError as exc:
                if is_made:
                    raise  # the factory's, or the connection's: the address has answered
                failures.append(exc)
                continue
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("connected to %s by device %s", address, transport.get_extra_info("rdma_device"))
            if layer is None:
                return transport, cast(_P, protocol)  # the transport may have another by now
            face, above = await layer.done(transport)
            return face, cast(_P, above)
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

    It works like ``loop.create_server``: ``host`` is an address, several addresses, or None or "" for all. Port 0 or
    None takes a free port, and ``server.sockets`` says which. One of the two must be given. Without ``device``, every
    device that owns the address listens; the embedded device has every address of this host, and leaves the port to an
    adapter that needs TCP's, as soft-iWARP does. If a TCP server uses the same port, start that one first: see
    docs/howto/migrate.md. ``reuse_address`` is accepted and has no effect, because a port is free as soon as its
    listener is gone. ``slot_bytes`` and ``data_slots`` size the ring of each connection, as in
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
    have is skipped if there is another); ValueError for sizes out of range, for neither host nor port, for an empty
    list of hosts (``loop.create_server`` makes a server of it that nobody can reach), and for times of TLS that are not
    positive or without ``ssl``; ``ssl.SSLError`` for a client's context; NotImplementedError, which names the keywords
    that are not implemented yet. Cancelling it closes the listeners that it has made.
    """
    refuse_unbuilt("start_rdma_server", unbuilt)
    _refuse_unknown("start_rdma_server", unbuilt)
    if inspect.iscoroutinefunction(protocol_factory):
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


async def connect(
    loop_context: LoopContext,
    config: StreamConfig,
    factory: Callable[[], asyncio.BaseProtocol],
    address: SockAddr,
    local: SockAddr | None = None,
) -> RdmaTransport:
    """Connect by one library.

    A server may name another port of the address, where one of its processes listens. A client goes there once, and
    says then that it goes no further. So no server sends it in circles, and none sends it to another host.

    The connection manager chooses source ports without asking TCP. On iWARP they are TCP's, so one of them may belong
    to a connection of TCP, open or in TIME_WAIT. Then the connection manager is asked for another.
    """
    ports_left = _SOURCE_PORTS_TRIED
    while True:
        transport = RdmaTransport(loop_context, config, factory, CLIENT)
        try:
            await transport._life.connect(address, local)
        except ElsewhereError as exc:
            if not config.goes_elsewhere:
                raise
            logger.debug("%s sends us to port %d", endpoint(address), exc.port)
            address = cast(SockAddr, (address[0], exc.port, *address[2:]))
            config = replace(config, goes_elsewhere=False)
        except SourcePortTakenError as exc:
            ports_left -= 1
            if not ports_left:
                raise
            logger.debug("%s: trying another source port", exc)
        else:
            return transport


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
            request.loop_context, config, factory, SERVER, context.copy(), on_made, request.over
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
    # What connections of a client need only later, and some never: base/bodies.py has the reason.
    from rdmanet.stream import peer_memory  # noqa: F401

    loop = server.get_loop()
    absent: list[Exception] = []
    try:
        for address in await _addresses_of(loop, host, port, family, flags):
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
                raise ValueError(f"start_rdma_server: host={shown(host)} names no address")
            raise merged(f"start_rdma_server on {host}:{port}", absent, False)
        for passed_over in absent:
            # It is normal that one library does not own an address on which another one listens.
            logger.debug("start_rdma_server: %s", passed_over)
        if start_serving:
            await server.start_serving()
    except BaseException:
        server.close()
        raise


async def _addresses_of(
    loop: asyncio.AbstractEventLoop,
    host: str | Sequence[str] | None,
    port: int | str | None,
    family: int,
    flags: int,
) -> list[SockAddr]:
    """The addresses to listen on, each once, as loop.create_server() finds them.

    None among several hosts stands for all addresses, too, as it does there.
    """
    if host is None and port is None:
        raise ValueError("start_rdma_server: neither host nor port was specified")
    several = isinstance(host, Iterable) and not isinstance(host, str)
    hosts: Iterable[Any] = cast(Iterable[Any], host) if several else [None if host == "" else host]
    names = itertools.chain.from_iterable(wildcards(family) if name is None else [name] for name in hosts)
    found: dict[SockAddr, None] = {}
    for name in names:
        found.update(dict.fromkeys(await resolve(loop, name, port or 0, family, 0, flags)))
    return list(found)


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
            raise TypeError(f"{call}() got an unexpected keyword argument {shown(name)}")


def _sources_for(address: SockAddr, ours: list[SockAddr] | None) -> Sequence[SockAddr | None]:
    """The local addresses from which to connect to an address: those of its family. None: the system chooses."""
    return (None,) if ours is None else [local for local in ours if len(local) == len(address)]


def _no_source(address: SockAddr, local_addr: Any) -> OSError:
    """Why a connection to an address is not tried."""
    family = "IPv4" if len(address) == 2 else "IPv6"
    return OSError(
        errno.EADDRNOTAVAIL,
        f"no connection to {endpoint(address)}: local_addr={shown(local_addr)} has no {family} address to connect from",
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
