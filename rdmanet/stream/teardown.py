"""The end of a connection: when it is disconnected, and when it gives everything back.

Theory
------
`protocol.Machine` decides what the application sees of the end. Below that there is a queue pair to disconnect and
memory to free, and one thing delays both: our Abort frame tells the peer the reason, and a disconnection, which takes
another path, would overtake it. So the disconnection waits until the Abort has arrived, or the peer's time is up. This
is the farewell. Five states say how far the end is:

    CONNECTED --------- DISCONNECT ----------> DISCONNECTED -- RELEASE --+
        |                                           ^                    |
        +-- ABORT_POSTED --> FAREWELL -- HEARD -----+                    v
        |                       |                                     RELEASED
        |                       +-- RELEASE --> LAST_WORDS -- HEARD -----^
        +---------------------------- RELEASE ---------------------------+

DISCONNECTED keeps what the connection has received until it is delivered; RELEASED keeps nothing. The steps that
lead to RELEASED, and their order, are the list in `Lifecycle.__init__` (lifecycle.py). Each is taken once, even if
others raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

FAREWELL_S = 1.0
"""How long our Abort may take to arrive: a peer that is stopped or gone must not keep our memory."""


class Ending(Enum):
    """How far the end of a connection has got."""

    __hash__ = object.__hash__  # ENDINGS is looked up by its members; Enum's own calls Python code

    CONNECTED = auto()
    FAREWELL = auto()
    """Our Abort is on its way; then the connection is disconnected."""
    LAST_WORDS = auto()
    """The same, but then everything is released."""
    DISCONNECTED = auto()
    """There is no connection any more, but received bytes may be left to deliver."""
    RELEASED = auto()


class Event(Enum):
    """What brings it further."""

    __hash__ = object.__hash__

    ABORT_POSTED = auto()
    DISCONNECT = auto()
    """The connection is over."""
    HEARD = auto()
    """The peer has our Abort, or its time is up, or it is gone."""
    RELEASE = auto()
    """Nobody needs the connection any more."""


class Action(Enum):
    """What is to be done."""

    NOTHING = auto()
    DISCONNECT = auto()
    RELEASE = auto()


_N, _E, _A = Ending, Event, Action

# {ending: {event: (new ending, action)}}
ENDINGS: Final[dict[Ending, dict[Event, tuple[Ending, Action]]]] = {
    _N.CONNECTED: {
        _E.ABORT_POSTED: (_N.FAREWELL, _A.NOTHING),
        _E.DISCONNECT: (_N.DISCONNECTED, _A.DISCONNECT),
        _E.HEARD: (_N.CONNECTED, _A.NOTHING),
        _E.RELEASE: (_N.RELEASED, _A.RELEASE),
    },
    _N.FAREWELL: {
        _E.ABORT_POSTED: (_N.FAREWELL, _A.NOTHING),
        _E.DISCONNECT: (_N.FAREWELL, _A.NOTHING),
        _E.HEARD: (_N.DISCONNECTED, _A.DISCONNECT),
        _E.RELEASE: (_N.LAST_WORDS, _A.NOTHING),
    },
    _N.LAST_WORDS: {
        _E.ABORT_POSTED: (_N.LAST_WORDS, _A.NOTHING),
        _E.DISCONNECT: (_N.LAST_WORDS, _A.NOTHING),
        _E.HEARD: (_N.RELEASED, _A.RELEASE),
        _E.RELEASE: (_N.LAST_WORDS, _A.NOTHING),
    },
    _N.DISCONNECTED: {
        _E.ABORT_POSTED: (_N.DISCONNECTED, _A.NOTHING),
        _E.DISCONNECT: (_N.DISCONNECTED, _A.NOTHING),
        _E.HEARD: (_N.DISCONNECTED, _A.NOTHING),
        _E.RELEASE: (_N.RELEASED, _A.RELEASE),
    },
    _N.RELEASED: dict.fromkeys(Event, (_N.RELEASED, _A.NOTHING)),
}


class Teardown:
    """Takes one connection apart.

    :ivar state: how far it has got
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        disconnect: Callable[[], None],
        steps: Sequence[Callable[[], None]],
        report: Callable[[Exception, str], None],
    ) -> None:
        """
        :param disconnect: ends the connection, and keeps what it has received
        :param steps: free everything that it holds; they are called in this order
        :param report: gets what a step raises, and a message
        """
        self.state = Ending.CONNECTED
        self._loop = loop
        self._disconnect = disconnect
        self._steps = steps
        self._report = report
        self._timer: asyncio.TimerHandle | None = None

    @property
    def released(self) -> bool:
        """Whether nothing is left to be taken apart."""
        return self.state is Ending.RELEASED

    @property
    def in_farewell(self) -> bool:
        """Whether our Abort is on its way."""
        return self.state in (Ending.FAREWELL, Ending.LAST_WORDS)

    @property
    def wanted(self) -> bool:
        """Whether somebody may still need the connection."""
        return self.state not in (Ending.LAST_WORDS, Ending.RELEASED)

    def abort_posted(self) -> None:
        """Give our Abort time to arrive."""
        if self.state is Ending.CONNECTED:
            self._timer = self._loop.call_later(FAREWELL_S, self.heard)
        self._receive(Event.ABORT_POSTED)

    def heard(self) -> None:
        """The peer has our Abort, or will not get it any more."""
        self._receive(Event.HEARD)

    def disconnect(self) -> None:
        """The connection is over; bytes of it may be left to deliver."""
        self._receive(Event.DISCONNECT)

    def release(self) -> None:
        """Free everything, after the farewell if there is one."""
        self._receive(Event.RELEASE)

    def release_now(self) -> None:
        """Free everything, whatever the peer has heard."""
        self._receive(Event.RELEASE)
        self._receive(Event.HEARD)

    def _receive(self, event: Event) -> None:
        self.state, action = ENDINGS[self.state][event]
        if self._timer is not None and not self.in_farewell:
            self._timer.cancel()
            self._timer = None
        if action is Action.DISCONNECT:
            self._disconnect()
        elif action is Action.RELEASE:
            for step in self._steps:
                try:
                    step()
                except Exception as exc:
                    # If one step fails, the others are taken all the same.
                    self._report(exc, f"rdmanet: {step.__name__} failed")
            del self._steps, self._disconnect, self._report  # they refer to our owner, and it to us
