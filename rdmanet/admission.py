"""How many connections of a server may be half open: accepted, and not known to stand.

Theory
------
Who accepts a connection posts its receive ring first, before anybody knows whether the peer goes on with it; with the
usual sizes that is 2.6 MiB, which an adapter locks. The connection stands when the peer's next message has come. A
peer that asks and then falls silent would keep all of that until the connection manager gives up, and a thousand of
them would take the memory of the machine. So a server has a few places for such connections, as many as fit into
HALF_OPEN_BYTES. Whoever comes when all are taken waits, and costs no more than its identifier meanwhile.

Honest peers are there for a round trip. A place is taken back

    after 5 s, from whoever has not gone on
    after 1 s, if somebody waits
    after 0.25 s, if who waits comes from an address that has at least two places fewer

always from the eldest one of the address that has the most places; and the next one is let in who waits longest for
the address that has the fewest. Who has gone on may not have been heard yet, if our process was stopped or its loop
was busy: so the loop must have run on time for the last 0.1 s, or it looks for as long again, four times at most.

Who waits has a descriptor, on the embedded device, so only so many may (WAITING_MAX, a quarter of the descriptors, or
the server's backlog, if that is more); beyond it the eldest of the address with the most of them is refused. An IPv6
address counts as its /48, which is what one site has. So a flood from one address keeps nobody out who comes from
another. (From the same address it does, or from very many: nothing tells them apart but the secret, which is asked for
before all this.)
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import Final, Protocol

HALF_OPEN_BYTES: Final = 16 << 20
PLACES_MIN: Final = 4
WAITING_MAX: Final = 1024
PATIENCE_S: Final = 5.0
OTHERS_WAIT_S: Final = 1.0
UNFAIR_S: Final = 0.25
LAST_LOOK_S: Final = 0.1
"""Before a place is taken back; part of the patience, where there is time for it."""
LATE_S: Final = 0.05
"""A timer that comes so late tells that our loop stood still."""
LOOKS_AGAIN_MAX: Final = 4


class Visitor(Protocol):
    """Somebody who asks for a connection."""

    @property
    def source(self) -> str:
        """Where it comes from: source_of() its address."""

    def enter(self) -> None:
        """Accept the connection. Whatever becomes of it, Admission.left() is called."""

    def turn_away(self) -> None:
        """Refuse it: there are too many."""

    def evict(self) -> None:
        """It was accepted, and has not gone on in time: end it."""


def source_of(address: str) -> str:
    """What counts as one source, of a peer's numeric address."""
    if ":" not in address:
        return address
    number = IPv6Address(address)
    return str(number.ipv4_mapped or IPv6Address(int(number) >> 80 << 80))


def places_for(connection_bytes: int) -> int:
    """How many connections that take so much memory may be half open."""
    return max(PLACES_MIN, HALF_OPEN_BYTES // connection_bytes)


def waiting_for(backlog: int) -> int:
    """How many may wait for a place with a server of this backlog."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = WAITING_MAX if descriptors == resource.RLIM_INFINITY else min(WAITING_MAX, descriptors // 4)
    return max(backlog, limit, 1)


class Admission:
    """The places of one server, and who waits for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, places: int, waiting_max: int) -> None:
        self._loop = loop
        self._places = places
        self._waiting_max = waiting_max
        self._inside: dict[Visitor, float] = {}  # since when, the eldest first
        self._waiting: dict[Visitor, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_until = 0.0  # no place is taken back before
        self._looks_again = 0
        self._letting_in = False

    def arrived(self, visitor: Visitor) -> None:
        """Let it in, now or when there is a place; or have it refused, or another one."""
        self._waiting[visitor] = None
        if len(self._waiting) > self._waiting_max:
            self._eldest_of_the_busiest(self._waiting).turn_away()
        self._go_on()

    def left(self, visitor: Visitor) -> None:
        """Its connection stands, or is over, or it waits no longer. Calling it again does nothing."""
        self._waiting.pop(visitor, None)
        if self._inside.pop(visitor, None) is not None:
            self._go_on()

    def close(self) -> None:
        """Nobody is let in any more."""
        for visitor in list(self._waiting):
            visitor.turn_away()
        self._waiting.clear()
        if not self._inside:
            self._stop_timer()

    def _go_on(self) -> None:
        if self._letting_in:
            return  # one that can't be accepted has left before its enter() is over: the loop below goes on
        self._letting_in = True
        try:
            while self._waiting and len(self._inside) < self._places:
                visitor = self._next()
                del self._waiting[visitor]
                self._inside[visitor] = self._loop.time()
                visitor.enter()
        finally:
            self._letting_in = False
        self._set_timer()

    def _next(self) -> Visitor:
        """Who waits longest for the address that has the fewest places."""
        inside = Counter(visitor.source for visitor in self._inside)
        return min(self._waiting, key=lambda visitor: inside[visitor.source])

    def _eldest_of_the_busiest(self, visitors: Iterable[Visitor]) -> Visitor:
        counts = Counter(visitor.source for visitor in visitors)
        return max(visitors, key=lambda visitor: counts[visitor.source])

    def _due(self) -> tuple[Visitor, float]:
        """Whose place is taken back next, and when. There is somebody inside."""
        visitor = self._eldest_of_the_busiest(self._inside)
        patience = PATIENCE_S
        if self._waiting:
            patience = OTHERS_WAIT_S
            counts = Counter(each.source for each in self._inside)
            if counts[visitor.source] - counts[self._next().source] >= 2:
                patience = UNFAIR_S
        when = self._inside[visitor] + patience
        eldest = next(iter(self._inside))
        if (latest := self._inside[eldest] + PATIENCE_S) < when:
            return eldest, latest
        return visitor, when

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._inside and not self._loop.is_closed():
            when = max(self._due()[1] - LAST_LOOK_S, self._looks_until)
            self._timer = self._loop.call_at(when, self._expired)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if self._inside:
            visitor, when = self._due()
            now = self._loop.time()
            if when > self._looks_until:
                self._looks_until = max(when, now + LAST_LOOK_S)
                self._looks_again = 0
            elif now - self._looks_until > LATE_S and self._looks_again < LOOKS_AGAIN_MAX:
                self._looks_until = now + LAST_LOOK_S
                self._looks_again += 1
            elif self._looks_until <= now + 0.001:  # timers of uvloop are of whole milliseconds
                visitor.evict()
        self._set_timer()
