"""Pings: whether the program at the other end still answers.

Theory
------
When nothing has come for `seconds`, a side sends Ping, which any peer answers. If nothing comes for that long again,
the connection is lost. Whatever comes is an answer, and so is that the peer takes what was written: a side that cannot
write may have stopped reading (link.py). So is that bytes of the peer's memory come, by a long READ (transfers.py).

    heard ---- nothing for `seconds`, Ping ----> asked ---- nothing for `seconds` ----> late ---- nothing ----> lost
      ^                                            |                                      |
      +--------------------- something came -------+--------------------------------------+

`late` is for this side's own loop: if that was busy, what has come is not read yet when the timer fires. One more look,
a tenth of the time later, comes after that.

One timer a connection, and none without this. By default there is none, because the transports look for a lost host
themselves: RDMA by the device, TCP by the kernel (`link._watch_host`), and two ends of a Unix socket are on one
host. What this adds is the program: one that is stopped, or stuck, answers no Ping.
"""

from __future__ import annotations

import asyncio

from rdmanet.errors import shown
from rdmanet.rpc.link import Link

LATE_PART = 0.1


class Keepalive:
    """Watches a link, from now until `stop`.

    :param seconds: how long nothing may come before it asks, and again before it gives up
    """

    def __init__(self, link: Link, seconds: float) -> None:
        self._link = link
        self._seconds = seconds
        self._asked = 0  # 1: Ping was sent. 2: it is late
        self._unwritten = 0
        self._moved = 0
        self._heard_at = link.heard_at = link.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._look_in(seconds)

    def stop(self) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._timer = self._link.loop.call_later(seconds, self.look)

    def look(self) -> None:
        """See whether something has come."""
        link, seconds = self._link, self._seconds
        if link.is_over:
            return
        unwritten, before = link.transport.get_write_buffer_size(), self._unwritten
        moved, moved_before = link.moved, self._moved
        self._unwritten, self._moved = unwritten, moved
        if unwritten < before or moved != moved_before:
            link.heard_at = link.loop.time()
        silent = link.loop.time() - link.heard_at
        if link.heard_at > self._heard_at:
            self._heard_at = link.heard_at
            self._asked = 0
        if silent < seconds and not self._asked:
            self._look_in(seconds - silent)
        elif not self._asked:
            self._asked = 1
            link.ask()
            self._look_in(seconds)
        elif self._asked == 1:
            self._asked = 2
            self._look_in(seconds * LATE_PART)
        else:
            link.abort(TimeoutError(f"nothing came for {silent:.3g} s, nor an answer to a Ping"))


def checked_keepalive(call: str, keepalive: object) -> float | None:
    """The seconds of ``keepalive=``.

    :raises ValueError: it is nothing of the kind
    """
    if keepalive is None:
        return None
    if isinstance(keepalive, bool) or not isinstance(keepalive, (int, float)) or not keepalive > 0:
        raise ValueError(f"rpc.{call}: keepalive={shown(keepalive)} is not a number of seconds above 0")
    return keepalive
