"""create_connection: RDMA where the peer takes it, TCP in all other cases.

Theory
------
Whatever is not ours goes to the loop's own method, with the arguments that the program gave: sockets that exist, a
local address. For the rest the addresses of the host are gone through in the order that TCP has. At each of them RDMA
is tried if it is offered there (choice.py), then TCP, and only then the next address. So who is reached does not depend
on the fabric. The TCP socket is connected here, and given to the loop's own method once: what fails after that, TLS or
the program's factory, has nothing to do with the address, and another one is not tried.

If there is one address, nothing is to be kept in order, so TCP is the loop's own from the beginning. That is the
fastest way, and most connections go it. Happy eyeballs are the loop's own, too: RDMA is tried at the first address, and
the rest is left to the loop.

A server on this host has its door asked first, which shows that its loop runs, unless it has just answered another
connection. If there is no connection soon after, it is asked again (inquiry.py), and the attempt ends if it does not
answer any more. On another host nothing but the attempt itself shows whether RDMA works, and its failure may take
seconds. So TCP starts `HEAD_START_S` later, and what is there first is taken (RFC 8305 does so for two families of
addresses). The protocol is made once, for the winner. The loser is closed without a word.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdmanet.base.scopes import with_scope
from rdmanet.loop import doors, loading, workers
from rdmanet.loop.annotation import of_client
from rdmanet.loop.base import Base
from rdmanet.loop.choice import Chance, Chooser
from rdmanet.loop.inquiry import Inquiry
from rdmanet.loop.limit import Limit

if TYPE_CHECKING:
    from rdmanet.loop.settings import Settings
    from rdmanet.stream.loop_context import LoopContext
    from rdmanet.stream.options import StreamConfig
    from rdmanet.stream.tls import Layer
    from rdmanet.transport import RdmaTransport

HEAD_START_S = 0.05
"""How much later TCP starts than RDMA, to a peer on another host."""
PATIENCE_S = 5.0
"""How long an attempt by RDMA may take."""

# Of refusals by a device or a door of another version, and by a device of another secret (errors.py, doors.py).
_LASTING = ("install the same version", "requires a secret", "has another secret", "has no secret")
# How several addresses are tried. uvloop does not know all of these.
_OF_SEVERAL = {"happy_eyeballs_delay", "interleave", "all_errors"}
# What create_connection(sock=) does not take.
_NOT_OF_SOCKETS = _OF_SEVERAL | {"proto", "flags"}

SockAddr = tuple[str, int] | tuple[str, int, int, int]
Factory = Callable[[], asyncio.BaseProtocol]
Connected = tuple[asyncio.BaseTransport, asyncio.BaseProtocol]
_T = TypeVar("_T")


class Wanted:
    """A call of create_connection() with a host and a port: its arguments.

    :ivar kwds: those that only the loop's own method knows, and those of TLS
    """

    __slots__ = ("factory", "family", "flags", "host", "kwds", "port", "proto", "ssl")

    def __init__(
        self, factory: Factory, host: str, port: int | str, family: int, proto: int, flags: int, ssl: Any,
        kwds: dict[str, Any],
    ) -> None:  # fmt: skip
        self.factory, self.host, self.port = factory, host, port
        self.family, self.proto, self.flags, self.ssl, self.kwds = family, proto, flags, ssl, kwds

    @property
    def has_happy_eyeballs(self) -> bool:
        """Whether the loop's own method is to try several addresses at once."""
        kwds = self.kwds
        return kwds.get("happy_eyeballs_delay") is not None or kwds.get("interleave") is not None

    def is_the_loops(self, addresses: list[SockAddr]) -> bool:
        """Whether the loop's own method is to connect by TCP, not only to make a transport of a connected socket."""
        if len(addresses) > 1 or (self.kwds and self.kwds.keys() & _OF_SEVERAL):
            return self.has_happy_eyeballs
        return not any(addresses[0][2:])  # flow labels and scopes are not in its arguments

    def by_name(self) -> dict[str, Any]:
        """The arguments for the base, besides host, port and family."""
        kwds = {"proto": self.proto, "flags": self.flags, **self.kwds}
        if self.ssl:
            kwds["ssl"] = self.ssl
            if kwds.get("server_hostname") is None:
                kwds["server_hostname"] = self.host
        return kwds

    def by_socket(self) -> dict[str, Any]:
        """The arguments for the base, besides a socket."""
        return {name: value for name, value in self.by_name().items() if name not in _NOT_OF_SOCKETS}


class Attempt:
    """One attempt at an RDMA connection, whose protocol is made only if nobody has given it up.

    :ivar settings: those of the loop when the program has called
    :ivar is_made: the program's factory was called: there is no way back to TCP
    :ivar protocol: what was made for the transport, which may have another by the time that connect() returns
    :ivar limit: it ends the attempt, unless the protocol is made before
    :ivar why_tcp: why it is TCP, if TCP stood by and is taken
    :ivar layer: TLS, if the program wants that
    :ivar place: where the server's door has led us
    :ivar way: by what the embedded device has made the connection, if it has: for others (choice.py)
    """

    is_made = is_given_up = False
    protocol: asyncio.BaseProtocol | None = None
    limit: Limit | None = None
    why_tcp = "TCP was there first"
    layer: Layer | None = None
    place: doors.Place | None = None
    way: tuple[LoopContext, StreamConfig] | None = None
    _inquiry: Inquiry | None = None

    def __init__(self, base: Base, settings: Settings, chooser: Chooser, wanted: Wanted) -> None:
        self._base, self.settings, self._chooser, self._wanted = base, settings, chooser, wanted

    def make_protocol(self) -> asyncio.BaseProtocol:
        """What the transport has for a factory."""
        limit, inquiry, place = self.limit, self._inquiry, self.place
        if self.is_given_up or (limit is not None and limit.has_ended):
            raise ConnectionAbortedError("the attempt was given up")
        if place is not None and place.inode and (why := place.why_left()):
            raise ConnectionAbortedError(why)
        self.is_made = True
        if inquiry is not None:
            inquiry.close()
        if limit is not None:  # the loop may have been blocked until the time was up
            limit.lift()
        self.protocol = self._make_own() if self.layer is None else self.layer.make()
        return self.protocol

    def _make_own(self) -> asyncio.BaseProtocol:
        """The program's protocol."""
        made: asyncio.BaseProtocol = loading.modules.reader_writer.with_compiled_reader(
            self._wanted.factory()
        )
        return made

    async def connect(self, address: SockAddr, chance: Chance) -> RdmaTransport:
        """Connect.

        :raises SilentError: the server's loop does not answer
        :raises OSError: RDMA does not reach the peer, or an error of the factory if `is_made`
        """
        self.place = chance.place if chance.door is None else await self._chooser.ask(chance, self._base.loop)
        modules, wanted = loading.modules, self._wanted
        if wanted.ssl is not None or wanted.kwds:
            self.layer = self._layer(modules.tls)
        way = chance.way
        if way is not None and not way[0].closed:
            return await self._connect_by(*way, address)
        failure: OSError = ConnectionRefusedError("no RDMA device reaches it")
        config = self.settings.config(chance.reason)
        for library in modules.addresses.libraries_for(address, None):
            if (self.place is None or chance.is_kept) and library.embedded_device is not chance.is_kept:
                continue
            loop_context = await modules.loop_context.loop_context_for(self._base.loop, library)
            try:
                transport = await self._connect_by(loop_context, config, address)
                if library.embedded_device:
                    self.way = loop_context, config
                return transport
            except OSError as exc:
                if self.is_made or isinstance(exc, doors.SilentError):
                    raise
                failure = exc
        raise failure

    def _layer(self, tls: Any) -> Layer | None:
        """TLS, as the arguments say."""
        kwds, wanted = self._wanted.kwds, self._wanted
        found = tls.Tls.of_client(
            wanted.ssl, wanted.host, kwds.get("server_hostname"),
            kwds.get("ssl_handshake_timeout"), kwds.get("ssl_shutdown_timeout"),
        )  # fmt: skip
        return None if found is None else cast("Layer", tls.Layer(found, self._base.loop, self._make_own))

    async def _connect_by(
        self, loop_context: LoopContext, config: StreamConfig, address: SockAddr
    ) -> RdmaTransport:
        """Connect by one library; where a door has led us, as long as the server's loop turns there."""
        connect: Callable[..., Coroutine[Any, Any, RdmaTransport]] = loading.modules.transport.connect
        place = self.place
        if place is None:
            return await connect(loop_context, config, self.make_protocol, address)
        is_dealt = workers.is_dealt(loop_context.library)  # then the door does not say where
        while True:
            there = address if place.port == address[1] else (address[0], place.port, *address[2:])
            limit = self.limit
            inquiry = self._inquiry = Inquiry(self._base, address[1], place, is_dealt, limit)
            try:
                transport = await connect(loop_context, config, self.make_protocol, there)
                doors.saw_turn(address[0], place.port)
                return transport
            except asyncio.CancelledError:
                if inquiry.answer is None or limit is None or limit.is_late or not limit.was_it():
                    raise
                self.place = place = inquiry.place()
            finally:
                inquiry.close()


async def create_connection(
    base: Base,
    settings: Settings,
    chooser: Chooser,
    by_tcp: Callable[..., Awaitable[Connected]],
    wanted: Wanted,
) -> Connected:
    """Connect to a host and a port.

    :param by_tcp: the loop's own method; it is given what its transport is to know, too
    """
    host = wanted.host
    reasons: list[str] = []
    failures: list[OSError] = []
    addresses = _numeric(wanted) or await _resolve(base, wanted)
    is_the_loops = wanted.is_the_loops(addresses)
    for address in addresses[:1] if is_the_loops else addresses:
        chance = chooser.choose(host, address)
        attempt = Attempt(base, settings, chooser, wanted)
        taken: RdmaTransport | socket.socket | str = ""
        try:
            if isinstance(chance, str):
                reason = chance
            else:
                reason = chance.reason
                taken = await try_rdma(base, chooser, attempt, address, chance)
                if isinstance(taken, str):
                    reason = taken
            if isinstance(taken, str):
                if is_the_loops or chooser.excludes_tcp():
                    reasons.append(reason)
                    continue
                taken = await _tcp_socket(base, address)
            elif isinstance(taken, socket.socket):
                reason = attempt.why_tcp
        except OSError as exc:
            if attempt.is_made:
                raise
            failures.append(exc)
            reasons.append(f"neither RDMA nor TCP reached {address[0]}")
            continue
        if isinstance(taken, socket.socket):
            chooser.tell(host, address[1], "tcp", reason)
            return await _over_socket(by_tcp, wanted, taken, reason)
        chooser.tell(host, address[1], "rdma", reason)
        if attempt.layer is not None:
            return await attempt.layer.done(taken)
        assert attempt.protocol is not None
        return taken, attempt.protocol
    if len(failures) == len(addresses) and not wanted.has_happy_eyeballs:
        raise _of_all(failures, wanted.kwds.get("all_errors"))
    reason = "; ".join(dict.fromkeys(reasons))
    chooser.refuse_tcp(host, wanted.port, reason)
    place = (host, wanted.port) if wanted.has_happy_eyeballs else addresses[0][:2]
    known, named = of_client(reason), wanted.by_name()
    with chooser.told_of(host, addresses[0], reason):
        return await by_tcp(known, wanted.factory, *place, family=wanted.family, **named)


async def _over_socket(
    by_tcp: Callable[..., Awaitable[Connected]], wanted: Wanted, sock: socket.socket, reason: str
) -> Connected:
    """Make a transport of a connected socket."""
    protocol: asyncio.BaseProtocol | None = None

    def make() -> asyncio.BaseProtocol:
        nonlocal protocol
        protocol = wanted.factory()
        return protocol

    try:
        return await by_tcp(of_client(reason), make, sock=sock, **wanted.by_socket())
    except BaseException:
        # No transport has taken the socket: arguments are wrong, or the factory has failed.
        if protocol is None:
            sock.close()
        raise


def _of_all(failures: list[OSError], all_errors: Any) -> Exception:
    """What the base raises after these."""
    if all_errors:
        return ExceptionGroup("create_connection failed", failures)
    if all(str(failure) == str(failures[0]) for failure in failures):
        return failures[0]
    return OSError(f"Multiple exceptions: {', '.join(map(str, failures))}")


async def try_rdma(
    base: Base,
    chooser: Chooser,
    attempt: Attempt,
    address: SockAddr,
    chance: Chance,
    tcp: Callable[[], Coroutine[Any, Any, socket.socket]] | None = None,
    lost: Callable[[socket.socket], object] = socket.socket.close,
) -> RdmaTransport | socket.socket | str:
    """The connection; or a TCP socket that was connected sooner; or why RDMA does not reach the peer.

    :param tcp: makes the TCP socket, if TCP has to stand by; by default a new one
    :param lost: called with a TCP socket that was connected, but later than RDMA
    :raises OSError: TCP was tried, too, and has failed; or an error of the factory if the attempt `is_made`
    """
    if chance.others is not None:
        heard = await chooser.heard(chance, base.loop)
        if isinstance(heard, str):
            return heard
        chance = heard
    if chance.alone or chooser.excludes_tcp():
        try:
            transport = await _in_time(base, attempt, address, chance)
        except OSError as exc:
            if attempt.is_made:
                raise
            if chance.is_kept and chance.asked is not None and not isinstance(exc, TimeoutError):
                chance_now = chooser.choose_anew(chance.asked)  # the server may have ended, or begun again
                if isinstance(chance_now, str):
                    return chance_now
                return await try_rdma(base, chooser, attempt, address, chance_now, tcp, lost)
            if chance.asked is None:
                chooser.remember(address[0], address[1], "tcp")
            elif isinstance(exc, doors.SilentError):
                chooser.remember_silent(address[0], address[1], exc.knock, base.loop)
            elif isinstance(exc, TimeoutError):
                chooser.remember_slow(address[0], address[1])
            elif _is_lasting(exc):
                chooser.remember_refusing(address[0], address[1], exc.strerror or str(exc))
            return _tried(exc)
        if not chance.is_kept and attempt.way is not None:
            chooser.keep(chance, attempt.place, attempt.way, attempt.settings.patterns)
        return transport
    try:
        winner = await _race(
            base, attempt, address, chance, tcp or (lambda: _tcp_socket(base, address)), lost
        )
    except OSError:
        chooser.remember(address[0], address[1], "tcp")
        raise
    chooser.remember(address[0], address[1], "tcp" if isinstance(winner, socket.socket) else "rdma")
    return winner


async def _in_time(base: Base, attempt: Attempt, address: SockAddr, chance: Chance) -> RdmaTransport:
    try:
        loading.load()
    except BaseException:
        if chance.door is not None:
            chance.door.socket.close()
        raise
    limit = attempt.limit = Limit(base.waits, PATIENCE_S)
    try:
        return await attempt.connect(address, chance)
    except asyncio.CancelledError:
        if limit.was_it():
            raise TimeoutError(f"no connection within {PATIENCE_S} s") from None
        raise
    finally:
        limit.lift()
        attempt.limit = None


async def _race(
    base: Base,
    attempt: Attempt,
    address: SockAddr,
    chance: Chance,
    connect: Callable[[], Coroutine[Any, Any, socket.socket]],
    lost: Callable[[socket.socket], object],
) -> RdmaTransport | socket.socket:
    """RDMA, or a TCP socket if that is there first. One that fails leaves it to the other.

    Once RDMA has made the program's protocol, there is no way back, and RDMA wins.

    :raises OSError: both have failed; it is TCP's error
    """
    rdma: asyncio.Task[RdmaTransport] | None = base.loop.create_task(
        _in_time(base, attempt, address, chance), name="connect by RDMA"
    )
    tcp: asyncio.Task[socket.socket] | None = None
    assert rdma is not None
    try:
        await asyncio.wait([rdma], timeout=HEAD_START_S)
        if not rdma.done() and not attempt.is_made:
            tcp = base.loop.create_task(connect(), name="connect by TCP")
            await asyncio.wait([rdma, tcp], return_when=asyncio.FIRST_COMPLETED)
        if not rdma.done() and (attempt.is_made or (tcp is not None and tcp.exception() is not None)):
            await asyncio.wait([rdma])
        if rdma.done() and (rdma.exception() is None or attempt.is_made):
            winner, rdma = rdma, None
            return winner.result()
        attempt.is_given_up = True
        if rdma.done():
            attempt.why_tcp = _tried(rdma.exception())
        if tcp is None:
            tcp = base.loop.create_task(connect(), name="connect by TCP")
        await asyncio.wait([tcp])
        taken, tcp = tcp, None
        return taken.result()
    finally:
        if rdma is not None:
            attempt.is_given_up = True
            _end(base, rdma, lambda transport: transport.abort())
        if tcp is not None:
            _end(base, tcp, lost)


def _is_lasting(error: OSError) -> bool:
    """Whether it comes from what the two processes run, so the next connection would get it, too."""
    if error.errno == errno.ELIBACC:
        return True
    return isinstance(error, ConnectionError) and any(why in str(error) for why in _LASTING)


def _tried(error: BaseException | None) -> str:
    return f"RDMA was tried: {getattr(error, 'strerror', None) or error}"


def _end(base: Base, task: asyncio.Task[_T], discard: Callable[[_T], object]) -> None:
    """Give up what has not won, at once. What it has made nevertheless is discarded."""

    def ended(task: asyncio.Task[_T]) -> None:
        base.tasks.discard(task)
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    task.cancel()
    base.tasks.add(task)
    task.add_done_callback(ended)


async def _tcp_socket(base: Base, address: SockAddr) -> socket.socket:
    """A connected TCP socket. It becomes a transport only if it wins."""
    sock = socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await base.connect(sock, address)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, OSError) and exc.errno and not isinstance(base.loop, asyncio.BaseEventLoop):
            # uvloop's create_connection() names no address, so the same error of all addresses is one error there.
            raise OSError(exc.errno, os.strerror(exc.errno)) from exc
        raise
    return sock


# -- addresses ---------------------------------------------------------------------------------------------


def _numeric(wanted: Wanted) -> list[SockAddr] | None:
    """The address of a host that is given by number: it needs no resolver, and no thread."""
    host, family = wanted.host, wanted.family
    if "%" in host:
        return None
    try:
        port = int(wanted.port)  # like the bases: a number of any type, or its digits
    except (TypeError, ValueError):
        return None
    is_v6 = ":" in host
    kind = socket.AF_INET6 if is_v6 else socket.AF_INET
    if family not in (0, kind):
        return None
    try:
        socket.inet_pton(kind, host)
    except (OSError, ValueError):
        return None
    return [(host, port, 0, 0) if is_v6 else (host, port)]


async def _resolve(base: Base, wanted: Wanted) -> list[SockAddr]:
    """The addresses of the host, as the loop's resolver gives them."""
    found: Iterable[Any] = await base.getaddrinfo(
        wanted.host, wanted.port, family=wanted.family, type=socket.SOCK_STREAM, proto=wanted.proto,
        flags=wanted.flags,
    )  # fmt: skip
    addresses: list[SockAddr] = with_scope(wanted.host, (entry[4] for entry in found))
    if not addresses:
        raise OSError("getaddrinfo() returned empty list")
    return addresses
