"""Servers of byte streams over RDMA: ``start_rdma_server``, which ``rdmanet.transport`` has, too.

A program that only connects needs none of this. So this module is imported for the first server, and imports all that
it takes to make others and connections, to read and write, and to end in whatever way: afterwards nothing is imported
any more (rdmanet/__init__.py says why). `server_of` and `listen` are for the modules above, which make servers of
their own kinds.
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
from typing import Any, cast

from rdmanet._core import stream_half_open_bytes
from rdmanet.errors import endpoint, shown
from rdmanet.stream import whole  # noqa: F401
from rdmanet.stream.addresses import SockAddr, libraries_for, merged, resolve, wildcards
from rdmanet.stream.admission import places_for
from rdmanet.stream.establish import SERVER
from rdmanet.stream.loop_context import loop_context_for
from rdmanet.stream.options import (
    CLOSE_TIMEOUT_S,
    DATA_SLOTS,
    FIRST_SLOT_BYTES,
    KEEPALIVE,
    SHARED_SLOTS,
    SLOT_BYTES,
    Keepalive,
    StreamConfig,
    refuse_unbuilt,
    refuse_unknown,
)
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.stream.server import ConnectRequest
from rdmanet.stream.server import RdmaServer as RdmaServer
from rdmanet.stream.tls import Layer, Tls

logger = logging.getLogger("rdmanet")


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
    refuse_unknown("start_rdma_server", unbuilt)
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
