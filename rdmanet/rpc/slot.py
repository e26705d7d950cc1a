"""A server of a client that has several: its connection, and what is held against it.

Theory
------
A server that fails at once has no unfinished calls, and would get nearly all. Two things keep calls from it:

    each failure     counts as an unfinished call, whose weight halves every FAILURE_HALVES_S. So one that fails now and
                     then gets fewer calls than the others
    several in a row `Retry.eject_failures` of them, and it gets none for `eject_seconds`: it is ejected. Then it gets
                     calls again; if the first one fails, it is ejected for twice as long, up to `eject_most_seconds`

A call that it serves ends the row, also by an error that is the call's. If more than half of the connected
servers would be ejected, none is: then it is not the servers (pool.py).
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from rdmanet.rpc.channel import Channel
from rdmanet.rpc.dialing import Address
from rdmanet.rpc.retry import Retry

FAILURE_HALVES_S: Final = 2.0


class Slot:
    """A place for one connection.

    :ivar failures: tries to connect since it has served a call
    :ivar not_before: when it may try again, on the loop's clock, if there are any
    :ivar task: is connecting
    :ivar address: to which it is connected, or is connecting; None if the resolver does not name that any more
    :ivar weight: of its server among the others
    :ivar row: how many calls in a row have failed by the server's fault
    """

    __slots__ = (
        "_blame",
        "_blamed_at",
        "_ejected_until",
        "address",
        "addresses",
        "channel",
        "failures",
        "is_sleeping",
        "not_before",
        "row",
        "task",
        "weight",
    )

    def __init__(self, addresses: list[Address], weight: float = 1.0) -> None:
        self.addresses = addresses
        self.weight = weight
        self.row = 0
        self.address: Address | None = None
        self.channel: Channel | None = None
        self.failures = 0
        self.not_before = 0.0
        self.is_sleeping = False
        self.task: asyncio.Task[None] | None = None
        self._blame = 0.0  # failed calls, by the weight that they had at:
        self._blamed_at = 0.0
        self._ejected_until = 0.0

    def blame(self, now: float, how: Retry) -> None:
        """A call has failed, and it may be the server's fault."""
        self._blame, self._blamed_at = self._weight(now) + 1, now
        if self.is_ejected(now):
            return  # calls that were there before say nothing new
        self.row += 1
        if how.eject_failures is not None and (times := self.row - how.eject_failures) >= 0:
            seconds = how.eject_seconds * 2.0 ** min(times, 1000)
            self._ejected_until = now + min(seconds, how.eject_most_seconds)
        else:
            self._ejected_until = 0.0

    def is_ejected(self, now: float) -> bool:
        """Whether it gets no calls now while others do."""
        return self.ejected_for(now) > 0

    def ejected_for(self, now: float) -> float:
        """For how many seconds more; 0: it is not."""
        return max(0.0, self._ejected_until - now) if self.row > 0 else 0.0

    def blamed(self, now: float) -> int:
        """As how many unfinished calls its failures count now."""
        return round(self._weight(now)) if self._blame else 0

    def _weight(self, now: float) -> float:
        return self._blame * math.exp2((self._blamed_at - now) / FAILURE_HALVES_S)

    @property
    def usable(self) -> Channel | None:
        """Its connection, if that takes new calls."""
        channel = self.channel
        return None if channel is None or channel.refusal is not None else channel
