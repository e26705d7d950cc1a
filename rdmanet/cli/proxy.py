"""pass connections on, between RDMA, TCP and Unix sockets

For servers and clients that do not speak RDMA: a proxy on each host joins their sockets to a connection over RDMA. It
listens on each LISTEN, and connects to the TO behind it for each connection that it accepts.

endpoints.py has the two kinds of address, relay.py what joins two connections. This module has the command: its pairs,
its limits, its counters, and its end.

It ends on SIGTERM or Ctrl-C: it listens no more, and lets the connections end by themselves for --grace seconds. What
is left then is reset, and on a second signal at once. SIGUSR1 prints the counters.
"""

import argparse
import asyncio
import contextlib
import math
import resource
import signal
import ssl
import sys
from collections.abc import Collection
from typing import Any

from rdmanet.base import log_rate
from rdmanet.cli import interrupts
from rdmanet.cli.command_line import INTERRUPTED
from rdmanet.cli.endpoints import (
    FORMS,
    Endpoint,
    EndpointError,
    Factory,
    Listener,
    Tls,
    check_target,
    connect,
    listen,
    parse,
    reason,
)
from rdmanet.cli.fabrics import loop_factory
from rdmanet.cli.relay import Relay, Side
from rdmanet.cli.text import argument, seconds, table
from rdmanet.cli.unix_owner import user_of

MAX_CONNECTIONS = 1000
CONNECT_TIMEOUT_S = 10.0
GRACE_S = 10.0
_DESCRIPTORS = 6  # of one relay, at most
_DESCRIPTORS_BESIDE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rdmanet proxy [OPTION ...] LISTEN TO [LISTEN TO ...]"
    parser.add_argument(
        "endpoints", nargs="+", type=argument(parse), metavar="LISTEN TO", help=f"each is one of {FORMS}"
    )
    parser.add_argument(
        "--max-connections",
        type=_count,
        default=MAX_CONNECTIONS,
        metavar="N",
        help="reset those who come when so many are connected, over all pairs (default: %(default)s)",
    )
    parser.add_argument(
        "--connect-timeout",
        type=seconds("no number of seconds", 0),
        default=CONNECT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long connecting to TO may take (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=seconds("no number of seconds", 0),
        default=GRACE_S,
        metavar="SECONDS",
        help="how long connections may live on after SIGTERM or Ctrl-C (default: %(default)g)",
    )
    parser.add_argument(
        "--loop", choices=["uvloop", "asyncio"], help="the event loop (default: uvloop if it is installed)"
    )
    parser.add_argument(
        "--server-user",
        type=argument(user_of),
        action="append",
        default=[],
        metavar="USER",
        help="a user, by name or number, who may listen at a TO of unix: too, beside root, the proxy's own user,"
        " and the owner of a directory that others may not write",
    )
    tls = parser.add_argument_group("TLS", "for endpoints whose scheme is tls or rdma+tls")
    for name, what in (
        ("cert", "the certificate of LISTEN, with those of its issuers (PEM)"),
        ("key", "its key; by default in the file of --cert"),
        ("client-ca", "accept only clients whose certificates these have issued"),
        ("ca", "trust these in checking TO's certificate (default: the system's)"),
        ("client-cert", "a certificate to show to TO"),
        ("client-key", "its key; by default in the file of --client-cert"),
    ):
        tls.add_argument(f"--{name}", metavar="FILE", help=what)
    tls.add_argument(
        "--server-name", metavar="NAME", help="the name in TO's certificate (default: TO's host)"
    )


def run(args: argparse.Namespace) -> int:
    if len(args.endpoints) % 2:
        print(
            f"proxy: {args.endpoints[-1]} is no pair: give a LISTEN and a TO for each, with a space between",
            file=sys.stderr,
        )
        return 2
    pairs = list(zip(args.endpoints[::2], args.endpoints[1::2], strict=True))
    try:
        tls = _tls(args, pairs)
        factory, _ = loop_factory(args.loop)
        _allow_descriptors(args.max_connections)
        proxy = Proxy(pairs, tls, args.max_connections, args.connect_timeout, args.server_user)
        return interrupts.run(_serve(proxy, args.grace), factory)
    except (EndpointError, ImportError) as exc:
        print(f"proxy: {exc}", file=sys.stderr)
        return 1


# ---------------------------------------------------------------------------
# The proxy
# ---------------------------------------------------------------------------


class Proxy:
    """Pairs of endpoints, and the connections that are passed on between them."""

    def __init__(
        self,
        pairs: list[tuple[Endpoint, Endpoint]],
        tls: Tls,
        max_connections: int,
        connect_timeout: float,
        server_users: Collection[int],
    ) -> None:
        self.tls = tls
        self.connect_timeout = connect_timeout
        self.server_users = server_users
        self._max_connections = max_connections
        self._pairs = [Pair(self, *pair) for pair in pairs]
        self._idle = asyncio.Event()
        self._idle.set()

    async def listen(self) -> None:
        """Accept connections from now on.

        :raises EndpointError: on one of its endpoints it cannot; then it listens on none
        """
        self.tls.tell_of_failures(_tell_of_handshake)
        try:
            for pair in self._pairs:
                await check_target(pair.target)
                await pair.listen()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        for pair in self._pairs:
            pair.close()

    def abort(self) -> int:
        """End all connections at once; how many there were."""
        relays = [relay for pair in self._pairs for relay in pair.relays]
        for relay in relays:
            relay.abort()
        return len(relays)

    async def until_idle(self) -> None:
        """Wait until there is no connection."""
        await self._idle.wait()

    def describe(self) -> str:
        """A line for each pair."""
        return "\n".join(map(str, self._pairs))

    def counters(self) -> str:
        """A table of what each pair has done."""
        head = ("pair", "now", "total", "refused", "unconnected", "lost", "bytes to", "bytes from")
        return table([head, *(pair.counters() for pair in self._pairs)], indent="")

    # -- for its pairs -------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether one more connection may be."""
        return sum(len(pair.relays) for pair in self._pairs) < self._max_connections

    def look_for_end(self) -> None:
        """The number of connections has changed."""
        if any(pair.relays for pair in self._pairs):
            self._idle.clear()
        else:
            self._idle.set()


class Pair:
    """From where connections come to where they go, and what has been counted of them. A relay's Owner.

    :ivar relays: those that are under way
    """

    def __init__(self, proxy: Proxy, source: Endpoint, target: Endpoint) -> None:
        self.target = target
        self.relays: set[Relay] = set()
        self._proxy = proxy
        self._source = source
        self._listener: Listener | None = None
        self._total = self._refused = self._unconnected = self._lost = 0
        self._bytes_to = self._bytes_from = 0  # of relays that have ended

    async def listen(self) -> None:
        """Accept connections from now on."""
        self._listener = await listen(self._source, self._accept, self._proxy.tls)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def __str__(self) -> str:
        sources = self._listener.endpoints if self._listener is not None else [self._source]
        return f"{', '.join(map(str, sources))} -> {self.target}"

    def counters(self) -> tuple[str, ...]:
        """A row of Proxy.counters()."""
        numbers = (
            len(self.relays),
            self._total,
            self._refused,
            self._unconnected,
            self._lost,
            self._bytes_to + sum(relay.near.received for relay in self.relays),
            self._bytes_from + sum(relay.far.received for relay in self.relays),
        )
        return (str(self), *map(str, numbers))

    def _accept(self) -> Side:
        return Relay(self).near

    # -- relay.Owner ---------------------------------------------------------------------------------------

    def admits(self, relay: Relay) -> bool:
        if not self._proxy.has_room():
            self._refused += 1
            self._say("refused", f"refused {relay.near.peer}: --max-connections are connected")
            return False
        self._total += 1
        self.relays.add(relay)
        self._proxy.look_for_end()
        return True

    async def connect(self, factory: Factory) -> None:
        proxy = self._proxy
        await connect(self.target, factory, proxy.tls, proxy.connect_timeout, proxy.server_users)

    def unconnected(self, relay: Relay, why: str) -> None:
        self._unconnected += 1
        why = self._with_hint(relay, why)
        self._say("unconnected", f"cannot connect {relay.near.peer} to {self.target}: {why}")

    def lost(self, relay: Relay, why: str) -> None:
        self._lost += 1
        self._say("lost", f"lost {self._with_hint(relay, why)}")

    def ended(self, relay: Relay) -> None:
        self._bytes_to += relay.near.received
        self._bytes_from += relay.far.received
        self.relays.discard(relay)
        self._proxy.look_for_end()

    def _with_hint(self, relay: Relay, why: str) -> str:
        """asyncio's servers do not say that they demand a certificate: they end the connection."""
        silent = self.target.encrypted and not relay.far.received
        if not silent or self._proxy.tls.shows_certificate or "certificate" in why:
            return why
        return f"{why} (if {self.target} demands a certificate, give --client-cert)"

    def _say(self, cause: str, what: str) -> None:
        """On standard error, at most once a second for each cause."""
        if (ending := log_rate.due(f"proxy {cause}")) is not None:
            _tell(f"{self._source}: {what}{ending}")


# ---------------------------------------------------------------------------
# Its life
# ---------------------------------------------------------------------------


async def _serve(proxy: Proxy, grace: float) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_tell_of_failure)
    signals = Signals(loop)
    loop.add_signal_handler(signal.SIGUSR1, lambda: _say(proxy.counters()))
    await proxy.listen()
    print(proxy.describe(), flush=True)
    await signals.wait(1)
    proxy.close()
    await _first_of(signals.wait(2), proxy.until_idle(), timeout=grace)
    if left := proxy.abort():
        _tell(f"reset {left} connections that had not ended")
        await proxy.until_idle()
    return INTERRUPTED if signals.first is signal.SIGINT else 0


class Signals:
    """Counts SIGTERM and SIGINT.

    :ivar first: the first of them; None before it comes
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first: signal.Signals | None = None
        self._count = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background
                loop.add_signal_handler(number, self._heard, number)

    async def wait(self, count: int) -> None:
        """Until so many have come."""
        if self._count < count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((count, waiter))
            await waiter

    def _heard(self, number: signal.Signals) -> None:
        self._count += 1
        self.first = self.first or number
        for count, waiter in self._waiting:
            if count <= self._count and not waiter.done():
                waiter.set_result(None)


async def _first_of(*work: Any, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each, name="wait for the end") for each in work]
    limit = None if math.isinf(timeout) else timeout
    await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _tell(what: str) -> None:
    _say(f"proxy: {what}")


def _say(what: str) -> None:
    """In one piece: several proxies may share their standard error."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def _tell_of_handshake(why: str) -> None:
    if (ending := log_rate.due("proxy handshake")) is not None:
        _tell(f"a client has failed to connect by TLS: {why}{ending}")


def _tell_of_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the loop has to say of failures that no caller hears of: descriptors have run out, for example."""
    error = context.get("exception")
    if isinstance(error, OSError):
        if (ending := log_rate.due(f"proxy {context['message']}")) is not None:
            _tell(f"{context['message']}: {reason(error)}{ending}")
    else:
        loop.default_exception_handler(context)


# ---------------------------------------------------------------------------
# Its arguments
# ---------------------------------------------------------------------------


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of connections")
    return int(text)


def _tls(args: argparse.Namespace, pairs: list[tuple[Endpoint, Endpoint]]) -> Tls:
    """
    :raises EndpointError: a file cannot be used, or one is missing
    """
    sources = [source for source, _ in pairs if source.encrypted]
    if sources and not args.cert:
        raise EndpointError(f"{sources[0]} needs a certificate: give --cert")
    listening = None
    if args.cert:
        listening = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _load(listening.load_cert_chain, args.cert, args.key)
        if args.client_ca:
            listening.verify_mode = ssl.CERT_REQUIRED
            _load(listening.load_verify_locations, args.client_ca)
    connecting = ssl.create_default_context()
    if args.ca:
        connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody else
        _load(connecting.load_verify_locations, args.ca)
    if args.client_cert:
        _load(connecting.load_cert_chain, args.client_cert, args.client_key)
    return Tls(listening, connecting, args.server_name, bool(args.client_cert))


def _load(load: Any, *files: str | None) -> None:
    try:
        load(*files)
    except OSError as exc:
        raise EndpointError(f"{' and '.join(filter(None, files))}: {reason(exc)}") from exc


def _allow_descriptors(connections: int) -> None:
    """Raise this process's limit of descriptors, as far as it may, to what so many connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS * connections + _DESCRIPTORS_BESIDE
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _tell(
            f"{connections} connections can need {needed} descriptors, and this process may have {allowed}: "
            f"lower --max-connections, or raise `ulimit -Hn`"
        )
