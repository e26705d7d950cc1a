"""Limit a server's half-open connections: those that it has accepted and that are not yet established, or not by TLS.

This module only decides; `server.ConnectRequest` does what it says.

Theory
------
A server posts a connection's receive ring before it accepts, when nobody knows whether the peer will go on. With the
usual sizes the ring takes 2.6 MiB, which an adapter locks. The connection is established when the peer's next message
arrives. A peer that asks and then falls silent would hold that memory until the connection manager gives up, and a
thousand such peers would hold the memory of the machine. So a server has a few places for half-open connections, as
many as fit into HALF_OPEN_BYTES. A request that finds no free place waits, and meanwhile costs only its identifier.

An honest peer needs its place for one round trip. A place is revoked

    after 5 s without progress
    after 1 s, if a request is waiting
    after 0.25 s, if a request is waiting from a source that holds at least two places fewer

always from the oldest visitor of the source that holds the most places. The next place goes to the oldest waiting
request of the source that holds the fewest. If this process was stopped or its loop was busy, a visitor's next message
may have arrived unread. So a place is revoked only if the loop has run on time for the last 0.1 s; otherwise it waits
that long again, four times at most. A loop that is on time may have more unread than it takes in one turn, in a storm
of clients for example. So what has come is read before a place is revoked: its visitor's message may be there.

A server with TLS keeps the place until the TLS handshake is done: whoever cannot finish that must not hold more memory
than a stranger. It has the whole time of a handshake if nobody waits, instead of the 5 s, and its clock starts anew
when the connection is established, HANDSHAKE_GRACE_S later, because computing takes it longer than a round trip.

On the embedded device a waiting request takes a descriptor, so their number is limited (to WAITING_MAX or a quarter of
the descriptors, whichever is less, or to the server's backlog if that is more). Beyond it the oldest request of the
source with the most waiting is refused.

A source is a user of this host, for all its addresses, if the kernel says whose the request is. Otherwise it is an
address, and an IPv6 address counts as its /48, the size of one site. So a flood from one user or address does not keep
out clients of others. It does keep out clients of the same user or address, and so does a flood from very many
addresses: only the secret could tell them apart, and that is checked before all this. Requests that come by the
listener's name have an Admission of their own, because their users are proven and few: nothing that comes by TCP takes
their places.

Requests with a bad Hello do not get this far: server.py refuses them itself.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Final, Protocol

HALF_OPEN_BYTES: Final = 16 << 20
PLACES_MIN: Final = 4
WAITING_MAX: Final = 1024
PATIENCE_S: Final = 5.0
OTHERS_WAIT_S: Final = 1.0
UNFAIR_S: Final = 0.25
HANDSHAKE_GRACE_S: Final = 0.75
LAST_LOOK_S: Final = 0.1
"""How long the loop must have run on time before a place is revoked; part of the patience, if that is longer."""
LATE_S: Final = 0.05
"""A timer that is this late shows that the loop stood still."""
LOOKS_AGAIN_MAX: Final = 4
RESOLUTION_S: Final = 0.001
"""A timer of uvloop may be that early."""


class Visitor(Protocol):
    """A peer that asks for a connection."""

    @property
    def source(self) -> str:
        """Its source: source_of() of its address and user."""

    def enter(self) -> None:
        """Accept the connection, and call Admission.left() when it is established or over."""

    def turn_away(self) -> None:
        """Refuse it: too many are waiting."""

    def look(self) -> bool:
        """Act on what has come for it, and for others, unread. False: there is more than can be read now."""

    def evict(self) -> None:
        """End the connection: it was accepted, but made no progress in time."""


def source_of(address: str, user: int | None = None) -> str:
    """The source that a peer counts as: its user, if it is on this host and known, or its numeric address."""
    if user is not None:
        return f"user {user} of this host"
    if ":" not in address:
        return address
    number = IPv6Address(address)
    return str(number.ipv4_mapped or IPv6Address(int(number) >> 80 << 80))


def places_for(connection_bytes: int) -> int:
    """How many connections that take this much memory may be half open."""
    return max(PLACES_MIN, HALF_OPEN_BYTES // connection_bytes)


def waiting_for(backlog: int) -> int:
    """How many requests may wait for a place, for a server with this backlog."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = WAITING_MAX if descriptors == resource.RLIM_INFINITY else min(WAITING_MAX, descriptors // 4)
    return max(backlog, limit, 1)


class Line:
    """Visitors in the order in which they came, and the same for each source.

    Nothing is counted anew: each visitor that comes or goes asks who is next.

    :ivar since: a time for each visitor
    """

    def __init__(self) -> None:
        self.since: dict[Visitor, float] = {}
        self._of: dict[str, dict[Visitor, int]] = {}  # by source, each with its number; no source is empty
        self._came = 0

    def add(self, visitor: Visitor, since: float) -> None:
        """It is the last now."""
        self.since[visitor] = since
        self._came += 1
        self._of.setdefault(visitor.source, {})[visitor] = self._came

    def discard(self, visitor: Visitor) -> bool:
        """Whether it was there."""
        if self.since.pop(visitor, None) is None:
            return False
        its = self._of[visitor.source]
        del its[visitor]
        if not its:
            del self._of[visitor.source]
        return True

    def clear(self) -> None:
        """Forget them all."""
        self.since.clear()
        self._of.clear()

    def count(self, source: str) -> int:
        """How many of this source there are."""
        return len(self._of.get(source, ()))

    def eldest_of_the_busiest(self) -> Visitor:
        """The first of the source that has the most; if several have, the one that came first. There must be one."""
        if len(self._of) == 1:  # as nearly always: no function is called
            return next(iter(self.since))
        return self._first_by(lambda source: -len(self._of[source]))

    def eldest_of_the_least(self, other: Line) -> Visitor:
        """The first of the source that has the fewest in the other line; if several have, the one that came first."""
        if len(self._of) == 1:
            return next(iter(self.since))
        return self._first_by(other.count)

    def _first_by(self, order: Callable[[str], int]) -> Visitor:
        source = min(self._of, key=lambda source: (order(source), next(iter(self._of[source].values()))))
        return next(iter(self._of[source]))


class Admission:
    """The places of one server, and the requests that wait for one."""

    @property
    def waiting(self) -> int:
        """How many requests wait for a place."""
        return len(self._waiting.since)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, places: int, waiting_max: int, handshake_s: float = 0.0
    ) -> None:
        """
        :param handshake_s: for how long a TLS handshake may go on, in seconds
        """
        self._loop = loop
        self._handshake_s = handshake_s
        self._places = places
        self._waiting_max = waiting_max
        self._inside = Line()
        self._waiting = Line()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._looks_until = 0.0  # no place is revoked before this time
        self._looks_again = 0
        self._letting_in = False
        self._closed = False

    def arrived(self, visitor: Visitor) -> None:
        """Accept it, now or when there is a place. If too many wait, refuse one of them, not necessarily this one."""
        if not self._waiting.since and not self._letting_in and len(self._inside.since) < self._places:
            self._inside.add(visitor, self._loop.time())
            self._letting_in = True
            try:
                visitor.enter()
            finally:
                self._letting_in = False
            if self._timer is None:  # else it expires early enough: those who came before have less time
                self._set_timer()
            return
        self._waiting.add(visitor, self._loop.time())
        if len(self._waiting.since) > self._waiting_max:
            self._waiting.eldest_of_the_busiest().turn_away()
        self._go_on()

    def goes_on(self, visitor: Visitor) -> None:
        """Its connection is established, and it keeps its place until a TLS handshake is done."""
        if self._inside.discard(visitor):
            self._inside.add(visitor, self._loop.time() + HANDSHAKE_GRACE_S)
            self._set_timer()

    def left(self, visitor: Visitor) -> None:
        """Its connection is established or over, or it no longer waits. Calling this again does nothing."""
        if self._waiting.since:
            self._waiting.discard(visitor)
        if self._inside.discard(visitor) and (self._waiting.since or self._closed):
            self._go_on()

    def close(self) -> None:
        """Refuse all who wait."""
        for visitor in list(self._waiting.since):
            visitor.turn_away()
        self._waiting.clear()
        self._closed = True
        if not self._inside.since:
            self._stop_timer()

    def _go_on(self) -> None:
        if self._letting_in:
            return  # a visitor that cannot be accepted calls left() from enter(): the loop below goes on
        self._letting_in = True
        try:
            while self._waiting.since and len(self._inside.since) < self._places:
                visitor = self._waiting.eldest_of_the_least(self._inside)
                self._waiting.discard(visitor)
                self._inside.add(visitor, self._loop.time())
                visitor.enter()
        finally:
            self._letting_in = False
        self._set_timer()

    def _due(self) -> tuple[Visitor, float]:
        """Whose place is revoked next, and when. At least one place must be taken."""
        inside, waiting = self._inside, self._waiting
        visitor = inside.eldest_of_the_busiest()
        patience = PATIENCE_S + self._handshake_s
        if waiting.since:
            patience = OTHERS_WAIT_S
            ours, next_ones = visitor.source, waiting.eldest_of_the_least(inside).source
            if ours != next_ones and inside.count(ours) - inside.count(next_ones) >= 2:
                patience = UNFAIR_S
        when = inside.since[visitor] + patience
        eldest = next(iter(inside.since))
        if (latest := inside.since[eldest] + PATIENCE_S + self._handshake_s) < when:
            return eldest, latest
        return visitor, when

    def _set_timer(self) -> None:
        """Leave a timer that expires too early as it is. In each turn, a loop calls those who read before the timers
        that are due, so a flood would make us set it again for ever, and it would never expire. Most visitors leave
        long before it does, and no timer is set or stopped for them."""
        if not self._inside.since or self._loop.is_closed():
            self._stop_timer()
            return
        when = max(self._due()[1] - LAST_LOOK_S, self._looks_until)
        if self._timer is None or when < self._timer_at:
            self._stop_timer()
            self._timer, self._timer_at = self._loop.call_at(when, self._expired), when

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if self._inside.since:
            visitor, when = self._due()
            now = self._loop.time()
            if now < when - LAST_LOOK_S - RESOLUTION_S:
                pass  # whom it was set for is no longer the next
            elif when > self._looks_until:
                self._looks_until = max(when, now + LAST_LOOK_S)
                self._looks_again = 0
            elif self._looks_until <= now + RESOLUTION_S:
                self._look_at(visitor, now - self._looks_until > LATE_S)
        self._set_timer()

    def _look_at(self, visitor: Visitor, is_late: bool) -> None:
        """Revoke a place, if nothing has come from who has it, and if it is sure enough that nothing is unread."""
        since = self._inside.since[visitor]
        is_behind = not visitor.look() or is_late
        if self._inside.since.get(visitor) != since:
            return  # it has gone on, or has left
        if is_behind and self._looks_again < LOOKS_AGAIN_MAX:
            self._looks_until = self._loop.time() + LAST_LOOK_S
            self._looks_again += 1
        else:
            visitor.evict()
