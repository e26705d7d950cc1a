# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The end of a connection: when it is disconnected, and when it gives everything back.

Theory
------
`Machine` decides what the application sees of the end. Below that there is a queue pair to disconnect and
memory to free, and one thing delays both: our Abort frame tells the peer the reason, and a disconnection, which takes
another path, would overtake it. So the disconnection waits until the Abort has arrived, or the peer's time is up. This
is the farewell. How far the end is says a state, `Ending`, whose table is with the others in protocol.py.

The steps that lead to RELEASED, and their order, are `steps_of_end` (ending.py). Each is taken once, even if others
raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rdmanet.protocol import ENDINGS, Action, Ending, EndingEvent

_CONNECTED, _RELEASED = Ending.CONNECTED, Ending.RELEASED
_FAREWELLS = (Ending.FAREWELL, Ending.LAST_WORDS)
_UNWANTED = (Ending.LAST_WORDS, Ending.RELEASED)
_DISCONNECT, _RELEASE = Action.DISCONNECT, Action.RELEASE
_DISCONNECT_NOW, _RELEASE_NOW, _HEARD = EndingEvent.DISCONNECT, EndingEvent.RELEASE, EndingEvent.HEARD

FAREWELL_S = 1.0
"""How long our Abort may take to arrive: a peer that is stopped or gone must not keep our memory."""


class Owner(Protocol):
    """The life of the connection."""

    def disconnect(self) -> None:
        """End the connection, and keep what it has received."""

    def steps_of_end(self) -> Iterable[Callable[[], None]]:
        """What frees everything that it holds, each when those before it have been called."""
        raise NotImplementedError

    def report(self, exc: BaseException, message: str) -> None:
        """A step has raised."""


class Teardown:
    """Takes one connection apart.

    :ivar state: how far it has got
    :ivar released: whether nothing is left to be taken apart
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self.state = _CONNECTED
        self.released = False
        self._loop = loop
        self._owner: Any = owner
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_farewell(self) -> bool:
        """Whether our Abort is on its way."""
        return self.state in _FAREWELLS

    @property
    def wanted(self) -> bool:
        """Whether somebody may still need the connection."""
        return self.state not in _UNWANTED

    def abort_posted(self) -> None:
        """Give our Abort time to arrive."""
        if self.state is _CONNECTED:
            self._timer = self._loop.call_later(FAREWELL_S, self.heard)
        self._receive(EndingEvent.ABORT_POSTED)

    def heard(self) -> None:
        """The peer has our Abort, or will not get it any more."""
        self._receive(_HEARD)

    def disconnect(self) -> None:
        """The connection is over; bytes of it may be left to deliver."""
        self._receive(_DISCONNECT_NOW)

    def release(self) -> None:
        """Free everything, after the farewell if there is one."""
        self._receive(_RELEASE_NOW)

    def release_now(self) -> None:
        """Free everything, whatever the peer has heard."""
        self._receive(_RELEASE_NOW)
        self._receive(_HEARD)

    def _receive(self, event: EndingEvent) -> None:
        self.state, action = ENDINGS[self.state][event]
        if self._timer is not None and not self.in_farewell:
            self._timer.cancel()
            self._timer = None
        if action is _DISCONNECT:
            self._owner.disconnect()
        elif action is _RELEASE:
            self.released = True
            for free in self._owner.steps_of_end():
                try:
                    free()
                except Exception as exc:
                    # If one fails, the others are called all the same.
                    self._owner.report(exc, f"rdmanet: {free.__name__} failed")
            self._owner = None  # it refers to us
