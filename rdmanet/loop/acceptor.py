"""Accepting at the listening sockets that the loop has for itself: its doors, and the registers of its workers.

Theory
------
A listener stays readable as long as somebody waits there, and a loop says so in each of its turns. If accept() fails
because no descriptor or memory is left, or for another lasting reason, the loop would do nothing else any more. So it
looks away for `REST_S`, as asyncio does from its TCP listeners. Those who wait are served then, or have given up.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

REST_S = 1.0
"""For how long nobody is accepted after accept() has failed."""
_AT_ONCE = 64  # in one turn of the loop


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
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return  # nobody is left, or the first in the queue has gone
            except OSError:
                self._loop.remove_reader(self._listener.fileno())
                self._resting = self._loop.call_later(REST_S, self._begin)
                return
            connection.setblocking(False)
            self._accepted(connection)
            if self._listener.fileno() < 0:
                return
