"""asyncio transports over RDMA: ``create_rdma_connection`` and ``start_rdma_server``.

Here are the functions that make the transports of clients. Those for servers are in stream/listening.py, and names of
this module, too: a program that only connects does not import them. The transport itself is stream/rdma_transport.py.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import ssl as ssl_module
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdmanet.errors import endpoint, shown
from rdmanet.stream.addresses import SockAddr, libraries_for, merged, numeric, resolve
from rdmanet.stream.establish import CLIENT, ElsewhereError, SourcePortTakenError
from rdmanet.stream.loop_context import LoopContext, known_loop_context, loop_context_for
from rdmanet.stream.options import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DATA_SLOTS,
    FIRST_SLOT_BYTES,
    KEEPALIVE,
    SLOT_BYTES,
    Keepalive,
    StreamConfig,
    config_of,
    refuse_unbuilt,
    refuse_unknown,
)
from rdmanet.stream.rdma_transport import RdmaTransport as RdmaTransport
from rdmanet.stream.tls import Layer, Tls

if TYPE_CHECKING:
    from rdmanet.stream.listening import RdmaServer as RdmaServer
    from rdmanet.stream.listening import listen as listen
    from rdmanet.stream.listening import server_of as server_of
    from rdmanet.stream.listening import start_rdma_server as start_rdma_server

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
        refuse_unknown("create_rdma_connection", unbuilt)
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
            config = config.replaced(goes_elsewhere=False)
        except SourcePortTakenError as exc:
            ports_left -= 1
            if not ports_left:
                raise
            logger.debug("%s: trying another source port", exc)
        else:
            return transport


# ---------------------------------------------------------------------------
# Local addresses
# ---------------------------------------------------------------------------


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


_OF_SERVERS = ("RdmaServer", "listen", "server_of", "start_rdma_server")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import what servers take when one of these is first used."""
        if name not in _OF_SERVERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rdmanet.stream import listening

        found = globals()[name] = getattr(listening, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_SERVERS})
