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
import functools
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
        if len(addresses) > 1 or self.kwds.keys() & _OF_SEVERAL:
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
    """One attempt at an RDMA connection, whose protocol is made only if nobody has given it up."""

    def __init__(self, base: Base, settings: Settings, chooser: Chooser, wanted: Wanted) -> None:
        self.is_made = False
        """The program's factory was called: there is no way back to TCP."""
        self.protocol: asyncio.BaseProtocol | None = None
        """What was made for the transport, which may have another by the time that connect() returns."""
        self.is_given_up = False
        self.limit: asyncio.Timeout | None = None
        """It ends the attempt, unless the protocol is made before."""
        self.why_tcp = "TCP was there first"
        """Why it is TCP, if TCP stood by and is taken."""
        self.layer: Layer | None = None
        """TLS, if the program wants that."""
        self.place: doors.Place | None = None
        """Where the server's door has led us."""
        self.is_embedded = False
        """The embedded device has made the connection."""
        self._inquiry: Inquiry | None = None
        self._base, self._settings, self._chooser = base, settings, chooser
        self._wanted = wanted

    def make_protocol(self) -> asyncio.BaseProtocol:
        """What the transport has for a factory."""
        limit, inquiry = self.limit, self._inquiry
        is_over = (limit is not None and limit.expired()) or (
            inquiry is not None and inquiry.answer is not None
        )
        if self.is_given_up or is_over:
            raise ConnectionAbortedError("the attempt was given up")
        if self.place is not None and (why := self.place.why_left()):
            raise ConnectionAbortedError(why)
        self.is_made = True
        if inquiry is not None:
            inquiry.close()
        if limit is not None:  # the loop may have been blocked until the time was up
            limit.reschedule(None)
        self.protocol = self._make_own() if self.layer is None else self.layer.make()
        return self.protocol

    def _make_own(self) -> asyncio.BaseProtocol:
        """The program's protocol."""
        from rdmanet.streams.reader_writer import with_compiled_reader

        return with_compiled_reader(self._wanted.factory())

    async def connect(self, address: SockAddr, chance: Chance) -> RdmaTransport:
        """Connect.

        :raises SilentError: the server's loop does not answer
        :raises OSError: RDMA does not reach the peer, or an error of the factory if `is_made`
        """
        self.place = await self._chooser.ask(chance, self._base.loop)
        loading.load()
        from rdmanet.stream.addresses import libraries_for
        from rdmanet.stream.loop_context import loop_context_for
        from rdmanet.stream.tls import Layer, Tls

        wanted, kwds = self._wanted, self._wanted.kwds
        tls = Tls.of_client(
            wanted.ssl, wanted.host, kwds.get("server_hostname"),
            kwds.get("ssl_handshake_timeout"), kwds.get("ssl_shutdown_timeout"),
        )  # fmt: skip
        self.layer = None if tls is None else Layer(tls, self._base.loop, self._make_own)
        libraries = libraries_for(address, None)
        if self.place is None or chance.is_kept:
            libraries = [library for library in libraries if library.embedded_device is chance.is_kept]
        failure: OSError = ConnectionRefusedError("no RDMA device reaches it")
        config = self._settings.config(chance.reason)
        for library in libraries:
            loop_context = await loop_context_for(self._base.loop, library)
            try:
                transport = await self._connect_by(loop_context, config, address)
                self.is_embedded = library.embedded_device
                return transport
            except OSError as exc:
                if self.is_made or isinstance(exc, doors.SilentError):
                    raise
                failure = exc
        raise failure

    async def _connect_by(
        self, loop_context: LoopContext, config: StreamConfig, address: SockAddr
    ) -> RdmaTransport:
        """Connect by one library; where a door has led us, as long as the server's loop turns there."""
        from rdmanet.transport import connect

        place = self.place
        if place is None:
            return await connect(loop_context, config, self.make_protocol, address)
        is_dealt = workers.is_dealt(loop_context.library)  # then the door does not say where
        while True:
            there = cast(SockAddr, (address[0], place.port, *address[2:]))
            inquiry = self._inquiry = Inquiry(self._base, address[1], place, is_dealt)
            try:
                async with asyncio.timeout(None) as inquiry.limit:
                    transport = await connect(loop_context, config, self.make_protocol, there)
                doors.saw_turn(address[0], place.port)
                return transport
            except TimeoutError:
                if inquiry.answer is None:
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
        if isinstance(chance, str) and (is_the_loops or chooser.excludes_tcp()):
            reasons.append(chance)
            continue
        attempt = Attempt(base, settings, chooser, wanted)
        try:
            taken, reason = await _reach(base, chooser, attempt, address, chance, is_the_loops)
        except OSError as exc:
            if attempt.is_made:
                raise
            failures.append(exc)
            reasons.append(f"neither RDMA nor TCP reached {address[0]}")
            continue
        if taken is None:
            reasons.append(reason)
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


async def _reach(
    base: Base,
    chooser: Chooser,
    attempt: Attempt,
    address: SockAddr,
    chance: Chance | str,
    is_the_loops: bool,
) -> tuple[RdmaTransport | socket.socket | None, str]:
    """A connection to one address, and why it takes its fabric. None: it would be TCP, which is not for us to make.

    :raises OSError: the address is not reached
    """
    tcp = functools.partial(_tcp_socket, base, address)
    if isinstance(chance, str):
        reason = chance
    else:
        taken = await try_rdma(base, chooser, attempt, address, chance, tcp)
        if not isinstance(taken, str):
            return taken, attempt.why_tcp if isinstance(taken, socket.socket) else chance.reason
        reason = taken
    if is_the_loops or chooser.excludes_tcp():
        return None, reason
    return await tcp(), reason


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
    tcp: Callable[[], Coroutine[Any, Any, socket.socket]],
    lost: Callable[[socket.socket], object] = socket.socket.close,
) -> RdmaTransport | socket.socket | str:
    """The connection; or a TCP socket that was connected sooner; or why RDMA does not reach the peer.

    :param tcp: makes the TCP socket, if TCP has to stand by
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
            transport = await _in_time(attempt, address, chance)
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
        if attempt.is_embedded:
            chooser.keep(chance, attempt.place)
        return transport
    try:
        winner = await _race(base, attempt, address, chance, tcp, lost)
    except OSError:
        chooser.remember(address[0], address[1], "tcp")
        raise
    chooser.remember(address[0], address[1], "tcp" if isinstance(winner, socket.socket) else "rdma")
    return winner


async def _in_time(attempt: Attempt, address: SockAddr, chance: Chance) -> RdmaTransport:
    try:
        async with asyncio.timeout(PATIENCE_S) as attempt.limit:
            return await attempt.connect(address, chance)
    except TimeoutError as exc:
        if exc.args:
            raise
        raise TimeoutError(f"no connection within {PATIENCE_S} s") from None
    finally:
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
        _in_time(attempt, address, chance), name="connect by RDMA"
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
    for kind, rest in ((socket.AF_INET, ()), (socket.AF_INET6, (0, 0))):
        if family in (0, kind):
            try:
                socket.inet_pton(kind, host)
            except (OSError, ValueError):
                continue
            return [cast(SockAddr, (host, port, *rest))]
    return None


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
