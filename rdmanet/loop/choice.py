"""Which fabric a connection takes, RDMA or TCP, and why.

Theory
------
A choice costs a few system calls, because most connections of a program go to peers that know nothing of RDMA, and must
take no longer for being asked about. It never waits, and never sends anything to a peer.

On this host, the peer's door (doors.py) says whether it takes RDMA. What it has said to one connection is good for
others for `KEPT_S`, if it is still so: the loop has turned just then. Whether it is still so, the kernel is asked again
after `SURE_S`, which is less than a connection waits for its server: a connection that is begun within that time gets
the server of those that wait already, and the device asks for each of them who has the listener's name. So a connection
that follows another one makes no choice of its own: it takes that one's way, with its device and options (`Kept`).
By default RDMA is chosen only if the embedded device will map the peer's memory, which it can for a process of the same
user: without that, RDMA between two processes of one host is emulated over TCP, and slower than TCP.

Of connections that are begun at the same time, one asks the door, and the answer is all of theirs: it comes while they
wait, as their own would. So a storm of clients costs a server one question for each process. If the answer is none that
may be shared, since the server has workers or nobody has answered, each of them asks for itself.

Other hosts have no doors that we could see. RDMA is tried if this host has an adapter, while TCP stands by (see
connecting.py), and what came of it is remembered for `MEMORY_S`.

A program connects to the same few peers again and again. If one was to be reached by TCP, all that led there is
remembered for a second, except whether the peer has a sign (doors.py): that is looked for at each connection, so a
server that begins to offer RDMA is found at once. Nothing else is done for such a connection, whose cost shows.

A server whose loop is busy, or whose process is stopped, does not answer a knock at its door. One connection waits for
that. Its knock stays, and tells when the loop turns again, or has ended. Until then all others take TCP at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any

from rdmanet.base import environment, log_rate
from rdmanet.loop import doors, kernel, trust
from rdmanet.loop.annotation import of_client
from rdmanet.loop.peers import Peers, Selection

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from rdmanet.stream.addresses import SockAddr
    from rdmanet.stream.loop_context import LoopContext
    from rdmanet.stream.options import StreamConfig

logger = logging.getLogger("rdmanet")

MEMORY_S = 60.0
"""For how long the fabric of a peer on another host is remembered."""
SLOW_S = 10.0
"""For how long TCP is used to a server of this host that answered a knock, but made no connection in time; or whose
door or device speaks another version, or whose device has another secret."""
KEPT_S = 0.1
"""For how long the answer of a door is kept, from when the connection was there that it was given to."""
SURE_S = 0.001
"""For how long what the kernel says of that server's TCP listener is good for other connections."""
DESCRIPTORS_LEAST = 64
"""How many descriptors a process must be allowed to have for RDMA. The device takes some twenty, and a connection a few
while it is made: a program that gets along with fewer by TCP would have none left."""
_PEERS_KEPT = 4096
_SILENT_KEPT = 64  # each takes a descriptor
_LOOK_AGAIN_S = 1.0  # for adapters, and at RDMANET_REQUIRE, which come and go rarely
_OFFERED = "the server on this host offers RDMA"
_ADAPTERS = "/sys/class/infiniband"
_RNIC = b"4:"  # RDMA_NODE_RNIC, which iWARP's devices are


class Chance:
    """RDMA is to be tried. (To make a dataclass takes longer than all else that a loop imports.)

    :ivar door: the peer's, if it is on this host; `doors.knock` closes it
    :ivar reason: why
    :ivar alone: TCP need not stand by
    :ivar place: where the door has led, if that is known already
    :ivar asked: if the peer is on this host: what was asked, the arguments of `Chooser.choose`
    :ivar others: those who wait for the answer of the door, which another connection is asking just now: where it
        leads, or None, if it cannot say
    """

    __slots__ = ("alone", "asked", "door", "others", "place", "reason")

    is_kept = False
    """`place` was said to an earlier connection."""
    way: tuple[LoopContext, StreamConfig] | None = None
    """By what that connection was made."""

    def __init__(
        self,
        door: doors.Found | None,
        reason: str,
        alone: bool = True,
        place: doors.Place | None = None,
        asked: tuple[str, SockAddr] | None = None,
        others: list[asyncio.Future[doors.Place | None]] | None = None,
    ) -> None:
        self.door, self.reason, self.alone = door, reason, alone
        self.place, self.asked, self.others = place, asked, others


class _Plain:
    """A peer that TCP is to reach.

    :ivar facts: what annotation.of_client() says of its transports
    :ivar until: when this is too old, by time.monotonic()
    :ivar signs: it holds as long as there are none of these
    """

    __slots__ = ("facts", "signs", "until")

    def __init__(self, facts: dict[str, str], until: float, signs: tuple[bytes, ...]) -> None:
        self.facts, self.until, self.signs = facts, until, signs


class Kept(Chance):
    """Where a door has led, for other connections. Times are by time.monotonic().

    :ivar until: until when that is good
    :ivar sure_until: until when nobody need be asked whether it is still so
    """

    __slots__ = ("sure_until", "until", "way")

    is_kept = True

    def __init__(
        self, chance: Chance, place: doors.Place, way: tuple[LoopContext, StreamConfig], until: float
    ) -> None:
        super().__init__(None, chance.reason, place=place, asked=chance.asked)
        self.way, self.until, self.sure_until = way, until, 0.0

    def holds(self) -> bool:
        """Whether the door would say the same.

        :raises OSError: there are no descriptors left
        """
        now = time.monotonic()
        if now >= self.until or self.place is None or not self.place.holds():
            return False
        self.sure_until = min(now + SURE_S, self.until)
        return True


class Chooser:
    """The choices of one loop."""

    def __init__(self, peers: Peers, excludes_tcp: Callable[[], str] = environment.excludes_tcp) -> None:
        """:param excludes_tcp: says by which setting TCP is not to be taken; "" if it may be"""
        self._peers = peers
        self.excludes_tcp = excludes_tcp
        self._told: dict[tuple[str, int], str] = {}
        self._remembered: dict[tuple[str, int], tuple[str, float]] = {}
        self._plain: dict[tuple[Any, ...], _Plain] = {}
        self._kept: dict[tuple[str, SockAddr], Kept] = {}
        # Doors that are being asked, with those who wait for that.
        self._asking: dict[tuple[str, SockAddr], list[asyncio.Future[doors.Place | None]]] = {}
        # Knocks that have not been answered, with their loop.
        self._silent: dict[tuple[str, int], tuple[socket.socket, asyncio.AbstractEventLoop]] = {}
        self._slow: dict[tuple[str, int], tuple[float, str]] = {}  # until when, and why
        self._lookout = doors.Lookout()
        self._no_adapter = ""
        self._look_again = 0.0

    def change(self, peers: Peers, excludes_tcp: Callable[[], str]) -> None:
        """Choose by these settings from now on. What is known of the peers stays; other choices are logged anew."""
        if peers.words != self._peers.words:
            self._told.clear()
        self._plain.clear()
        self._kept.clear()
        self._asking = {}  # what is asked just now is for those who began before
        self._peers = peers
        self.excludes_tcp = excludes_tcp

    def close(self) -> None:
        """Give back what is kept for the next choice. Later choices are possible."""
        self._lookout.close()
        for key in list(self._silent):
            self._forget_silent(key)

    def plain(self, *key: Any) -> dict[str, str] | None:
        """What a transport to this address is to know, if TCP is to reach it and that is known without choosing.

        :param key: the address and the port, and the host's name if it has one; they may be anything
        """
        try:
            known = self._plain.get(key)
        except TypeError:  # the loop says what is wrong with these
            return None
        if known is None or time.monotonic() > known.until:
            return None
        try:
            for sign in known.signs:  # not by sees(): these few lines are what most connections wait for
                if self._lookout.look(sign) != doors.NO_SIGN:
                    return None
        except OSError:  # there is no descriptor left to look with
            return None
        return known.facts

    def choose(self, host: str, place: SockAddr) -> Chance | str:
        """Choose for a new connection. A text means TCP, and says why.

        :param host: the peer's name, as the program gave it
        :param place: its address
        """
        kept = self._kept.get((host, place))
        if kept is not None and time.monotonic() < kept.sure_until and not (self._silent or self._slow):
            return kept
        address, port = place[:2]
        if any(place[2:]) or "%" in address:
            return self._choose(host, place)
        key = _key(host, place)
        facts = self.plain(*key)
        if facts is not None:
            return facts["fabric_reason"]
        chance = self._choose(host, place)
        if isinstance(chance, str) and not self.excludes_tcp():
            if len(self._plain) >= _PEERS_KEPT:
                self._plain.clear()
            until = time.monotonic() + _LOOK_AGAIN_S
            self._plain[key] = _Plain(of_client(chance), until, doors.signs(address, port))
        return chance

    def _choose(
        self, host: str, place: SockAddr, is_again: bool = False, for_itself: bool = False
    ) -> Chance | str:
        """:param for_itself: another connection's question does not count"""
        address, port = place[:2]
        selection = self._peers.select(host, address, port)
        if selection is Selection.EXCLUDED:
            return "the peers that RDMA is for do not include it"
        if "%" in address or tuple(place[3:]) not in ((), (0,)):
            return "an address with a zone is reached by TCP"
        if why := why_few_descriptors():
            return why
        if (self._silent or self._slow) and (why := self._why_not_now(address, port)):
            return why
        try:
            if (kept := self._kept.get((host, place))) is not None:
                if kept.holds():
                    return kept
                del self._kept[host, place]
            if not for_itself and (others := self._asking.get((host, place))) is not None:
                return Chance(None, _OFFERED, asked=(host, place), others=others)
            found = doors.find(address, port, self._lookout)
            if found is doors.NOBODY:
                return self._choose_far(address, port)
        except OSError as exc:
            if not kernel.lacks_resources(exc):
                raise
            return "no descriptor is left to look for an RDMA server on this host"
        if isinstance(found, doors.Found):
            why_not = "" if selection is Selection.NAMED else _unmapped(found)
            if why_not:
                if _has_ended(found) and not is_again:  # another one may listen there now
                    return self._choose(host, place, True, for_itself)
                return why_not
            return Chance(found, _OFFERED, asked=(host, place))
        return found

    async def ask(self, chance: Chance, loop: asyncio.AbstractEventLoop) -> doors.Place | None:
        """Where a chance leads: its door is asked, if it has one, for all who choose meanwhile. None: there is no door.

        :raises OSError: what doors.knock() raises
        """
        asking = self._asking
        if chance.door is None or chance.asked is None or chance.asked in asking:
            return chance.place if chance.door is None else await doors.knock(chance.door, loop)
        others = asking[chance.asked] = []
        place = None
        try:
            place = await doors.knock(chance.door, loop)
        finally:
            del asking[chance.asked]
            for other in others:
                if not other.done() and not loop.is_closed():
                    other.set_result(place)
        return place

    async def heard(self, chance: Chance, loop: asyncio.AbstractEventLoop) -> Chance | str:
        """A chance, or why it is TCP, for a connection that waits for the answer that another one gets."""
        assert chance.others is not None and chance.asked is not None
        waiter: asyncio.Future[doors.Place | None] = loop.create_future()
        chance.others.append(waiter)
        place = await waiter
        if place is None or not place.listener:
            return self._choose(*chance.asked, for_itself=True)
        return Chance(None, chance.reason, place=place, asked=chance.asked)

    def keep(
        self, chance: Chance, place: doors.Place | None, way: tuple[LoopContext, StreamConfig], peers: Peers
    ) -> None:
        """There is a connection where a door has led, by the embedded device, and this is how it was made.

        :param peers: of the settings by which it was made. If there are others now, it is no example for them
        """
        if peers is not self._peers:
            return
        if chance.asked is None or chance.place is not None or place is None or not place.listener:
            return
        if len(self._kept) >= _PEERS_KEPT:
            self._kept.clear()
        self._kept[chance.asked] = Kept(chance, place, way, time.monotonic() + KEPT_S)

    def choose_anew(self, asked: tuple[str, SockAddr]) -> Chance | str:
        """Choose again, since there was no connection where the door has led another one: ask it."""
        self._kept.pop(asked, None)
        return self.choose(*asked)

    def _choose_far(self, address: str, port: int) -> Chance | str:
        """For a peer without a door: it may be on another host."""
        now = time.monotonic()
        if now >= self._look_again:
            excluded = bool(self.excludes_tcp())
            self._no_adapter, self._look_again = why_no_adapter(excluded), now + _LOOK_AGAIN_S
        if self._no_adapter:
            return f"{doors.NOBODY}, and {self._no_adapter}"
        fabric, until = self._remembered.get((address, port), ("", 0.0))
        if until < now:
            return Chance(None, "an RDMA adapter may reach it", alone=False)
        if fabric == "tcp":
            return f"RDMA did not reach it within the last {MEMORY_S:.0f} s"
        return Chance(None, "an RDMA adapter reaches it", alone=True)

    def _why_not_now(self, address: str, port: int) -> str:
        """Why RDMA is not to be tried just now; "" if it is."""
        if self.excludes_tcp():
            return ""
        if (address, port) in self._silent:
            return "the server's loop has not answered yet"
        until, why = self._slow.get((address, port), (0.0, ""))
        if time.monotonic() < until:
            return why
        self._slow.pop((address, port), None)
        return ""

    def remember_silent(
        self, address: str, port: int, knock: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        """A knock at this server's door has not been answered; the connection is ours now."""
        key = (address, port)
        if key in self._silent or len(self._silent) >= _SILENT_KEPT:
            knock.close()
            return
        self._silent[key] = knock, loop
        loop.add_reader(knock.fileno(), self._forget_silent, key)

    def _forget_silent(self, key: tuple[str, int]) -> None:
        knock, loop = self._silent.pop(key)
        if not loop.is_closed():
            loop.remove_reader(knock.fileno())
        knock.close()

    def remember_slow(self, address: str, port: int) -> None:
        """This server on this host has answered a knock, but made no connection in time."""
        why = f"the server on this host made no RDMA connection in time within the last {SLOW_S:.0f} s"
        self._rest(address, port, why)

    def remember_refusing(self, address: str, port: int, why: str) -> None:
        """This server on this host refuses whoever runs what this process runs."""
        self._rest(address, port, f"RDMA was tried within the last {SLOW_S:.0f} s: {why}")

    def _rest(self, address: str, port: int, why: str) -> None:
        while len(self._slow) >= _PEERS_KEPT:
            self._slow.pop(next(iter(self._slow)))
        self._slow[address, port] = time.monotonic() + SLOW_S, why

    def remember(self, address: str, port: int, fabric: str) -> None:
        """This is how a peer on another host was reached."""
        self._remembered.pop((address, port), None)
        while len(self._remembered) >= _PEERS_KEPT:
            self._remembered.pop(next(iter(self._remembered)))
        self._remembered[address, port] = (fabric, time.monotonic() + MEMORY_S)

    def refuse_tcp(self, host: Any, port: int | str | None, reason: str) -> None:
        """Raise an error if TCP is excluded. It is logged, too: AnyIO, and so httpx, says that all attempts failed.

        :raises ConnectionRefusedError: it is
        """
        if setting := self.excludes_tcp():
            said = host, port, setting, reason
            log_rate.warn(logger, "only TCP", "only TCP reaches %s port %s, which %s excludes: %s", *said)
            raise ConnectionRefusedError(
                errno.ECONNREFUSED,
                f"only TCP reaches {host} port {port}, which {setting} excludes: {reason}",
            )

    @contextlib.contextmanager
    def told_of(self, host: str, place: SockAddr, reason: str) -> Iterator[None]:
        """While a connection is made by TCP. If that fails or is cancelled, nothing is told or known."""
        try:
            yield
        except BaseException:
            self._plain.pop(_key(host, place), None)
            raise
        self.tell(host, place[1], "tcp", reason)

    def tell(self, host: str, port: int, fabric: str, reason: str) -> None:
        """Log the first choice for a peer, and each other one after that: at WARNING, if it falls back to TCP."""
        before = self._told.get((host, port))
        if before == fabric:
            return
        if len(self._told) >= _PEERS_KEPT:
            self._told.clear()
        self._told[host, port] = fabric
        said = host, port, fabric.upper(), reason
        if before == "rdma":
            log_rate.warn(logger, "fall back", "connections to %s port %d take %s: %s", *said)
        else:
            logger.info("connections to %s port %d take %s: %s", *said)


def _key(host: str, place: SockAddr) -> tuple[Any, ...]:
    """By what a peer is remembered that TCP is to reach."""
    address, port = place[:2]
    return (address, port) if host == address else (address, port, host)


def why_no_adapter(is_tcp_excluded: bool = False) -> str:
    """Why no RDMA device of the kernel is to be used for peers on other hosts; "" if there is one. It loads no library.

    iWARP's ports are TCP's, so it is only for programs that exclude TCP.
    """
    names = kernel.names_in(_ADAPTERS)
    if not names:
        return "this host has no RDMA adapter for others"
    if is_tcp_excluded or not all(map(_is_iwarp, names)):
        return ""
    return f"this host's RDMA adapter for others ({', '.join(names)}) does iWARP, whose ports are TCP's"


def adapters() -> list[str]:
    """The RDMA devices of the kernel whose ports are not TCP's."""
    return [name for name in kernel.names_in(_ADAPTERS) if not _is_iwarp(name)]


def _is_iwarp(name: str) -> bool:
    try:
        return kernel.read(f"{_ADAPTERS}/{name}/node_type").startswith(_RNIC)
    except OSError as exc:
        if kernel.lacks_resources(exc):
            raise
        return False


def _unmapped(found: doors.Found) -> str:
    """Why the embedded device would not map the peer's memory; "" if it will."""
    speaker = found.speaker
    if speaker.user != os.geteuid():
        return f"the server offers RDMA, but is user {speaker.user}'s, whose memory cannot be mapped"
    if os.environ.get("RDMANET_SOFT_TRANSPORT") != "stream" and not trust.may_map(speaker.pid):
        why = trust.why_no_proc() or "this process may not map its memory"
        return f"the server offers RDMA, but {why}"
    return ""


def _has_ended(found: doors.Found) -> bool:
    """Whether the process that has this door has ended. It closes the connection."""
    with found.socket, contextlib.suppress(OSError):  # there may be no descriptor left to ask with
        return not found.speaker.lives()
    return False


def why_few_descriptors() -> str:
    """Why this process does without RDMA, if it may have too few descriptors; "" if it may have enough."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= DESCRIPTORS_LEAST:
        return ""
    return f"this process may have {limit} descriptors (`ulimit -n`), and RDMA needs {DESCRIPTORS_LEAST}"
