"""The end of a loop: what was written is sent first, as TCP's kernel would still send it after a program has ended.

Whoever ends the loop sleeps until then. Two things can end its wait: the engine finds that a peer's device has all that
was written, or a connection is over. One connection that is sending is enough to wait for, so only that one is looked
at, and asked, each time; then the next one. When none of them is left this looks at all again: many connections that
end at once cost one look each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

PARTING_S = 1.0
"""How long the end of a loop waits: a peer may be stopped, or may not read."""


class Sender(Protocol):
    """A connection's life."""

    def is_sending(self) -> bool:
        """Whether the peer's device may not have all our bytes yet, and may still get them."""

    def when_delivered(self) -> None:
        """Call `Parting.look` when it has."""


class Parting:
    """Waits until no connection of a loop is sending.

    :ivar connections: they; its user's, and may change
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Collection[Sender]) -> None:
        self.loop, self.connections = loop, connections
        self._over: asyncio.Future[None] | None = None
        self._left: list[Sender] = []  # were sending when all were looked at; the last one is waited for

    @property
    def is_sending(self) -> bool:
        """Whether a peer's device may not have all that was written, and may still get it."""
        return any(each.is_sending() for each in self.connections)

    async def until_sent(self) -> None:
        """Wait until the peers' devices have what was written, for `PARTING_S` at most."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # Trio's
        over = self._over = self.loop.create_future()
        timer = self.loop.call_later(PARTING_S, self._end)
        try:
            self.look()
            await over
        finally:
            timer.cancel()
            self._over = None
            self._left.clear()

    def look(self) -> None:
        """Something was sent, or a connection is over."""
        if self._over is None:
            return
        left = self._left
        while left and not (left[-1] in self.connections and left[-1].is_sending()):
            left.pop()
        if not left:
            left += [each for each in self.connections if each.is_sending()]  # some may have written since
        if left:
            left[-1].when_delivered()  # again: it may have written something since
        else:
            self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
