"""Accepting at the listening sockets that the loop has for itself: its doors, and the registers of its workers.

Theory
------
A listener stays readable as long as somebody waits there, and a loop says so in each of its turns. If accept() fails
because no descriptor or memory is left, or for another lasting reason, the loop would do nothing else any more. So it
looks away for `REST_S`, as asyncio does from its TCP listeners. Those who wait are served then, or have given up.

Anybody may connect to these listeners, as often as they like. So a turn of the loop accepts `AT_ONCE` at most, and if
`MANY` have come, the loop looks away for `PAUSE_S`. A flood takes a part of the loop's time then, and not a part of
each turn; and a loop that sleeps now and then gets a processor soon when there is something to do.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

REST_S = 1.0
"""For how long nobody is accepted after accept() has failed."""
AT_ONCE = 64
"""How many are accepted in one turn of the loop."""
MANY = 16
PAUSE_S = 0.001
"""For how long nobody is accepted after `MANY`."""


class Acceptor:
    """Accepts what comes to one listener, from its creation until it is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        accepted: Callable[[socket.socket], object],
    ) -> None:
        """
        :param listener: it is non-blocking, listens, and stays the caller's
        :param accepted: called with each connection, which is non-blocking; the callee closes it
        """
        self._loop = loop
        self._listener = listener
        self._accepted = accepted
        self._resting: asyncio.TimerHandle | None = None
        self._begin()

    def close(self) -> None:
        """Accept nobody any more. The caller closes the listener after this."""
        self.forget()
        if not self._loop.is_closed() and self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    def forget(self) -> None:
        """In a forked child, in the place of close(): the loop is the parent's."""
        if self._resting is not None:
            self._resting.cancel()

    def _begin(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._arrived)

    def _arrived(self) -> None:
        for count in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # Nobody is left, or the first in the queue has gone.
                if count >= MANY:
                    self._look_away(PAUSE_S)
                return
            except OSError:
                self._look_away(REST_S)
                return
            connection.setblocking(False)
            self._accepted(connection)
            if self._listener.fileno() < 0:
                return
        self._look_away(PAUSE_S)

    def _look_away(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._resting = self._loop.call_later(seconds, self._begin)
