# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""How a server takes leave of a client, so that no call is lost between the two.

Theory
------
Goaway tells a client to begin no more calls, but calls may be under way that it has sent before. And whoever closes a
TCP or Unix connection to which the other side still writes takes back what that has not read: answers, or Goaway. So a
server says what it has to say, sends Ping behind it, and waits for the Pong, which any client sends. Then the client
has read all of that; what it has sent before is here.

    state       how it begins                            a Call that comes
    open                                                 is taken
    asked       drain(): Goaway, Ping                    is taken
    refusing    refuse(): Goaway with the number of      is answered with Failure, which says that it has not begun
                the calls that were taken. Or Pong
                came, or did not come in HEAR_S
    ending      finish(), when all answers were sent:    the same
                Ping. The connection is closed when
                Pong comes, or HEAR_S later

So a client that runs loses no call by `drain`: what crosses Goaway is executed. One that does not answer in time knows
by the number what has not begun: all of its calls after the first so many, whether it has got Failure for them or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import TEXT_MOST, Goaway, OutGoaway, Pong

HEAR_S: Final = 2.0
"""How long a client may take to answer, each time. One that runs takes much less than that."""


class Parting:
    """Takes leave of one client.

    :param on_refusing: called when calls are not taken any more
    :ivar taken: Calls that have come, and were not refused because the server ends
    :ivar refusal: why no more are taken; None while they are
    """

    def __init__(self, link: Link, on_refusing: Callable[[], None]) -> None:
        self.taken = 0
        self.refusal: str | None = None
        self._link = link
        self._on_refusing = on_refusing
        self._is_ending = False
        self._reason = ""
        self._asked = 0  # the token of its last Ping
        self._timer: asyncio.TimerHandle | None = None

    def drain(self, reason: str) -> None:
        """Tell the client to begin no more calls, and take those that it has begun."""
        self._reason = reason
        self._link.send(OutGoaway(reason[:TEXT_MOST]))
        self._ask()

    def refuse(self, reason: str) -> None:
        """Take no more calls."""
        if self.refusal is None:
            self.refusal = reason
            self._link.send(Goaway(reason[:TEXT_MOST], self.taken))
            self._on_refusing()

    def finish(self, reason: str) -> None:
        """Close the connection when the client has read all answers. Take no more calls."""
        if not self._is_ending:
            self.refuse(reason)
            self._is_ending = True
            self._ask()

    def answered(self, pong: Pong) -> None:
        """Pong has come."""
        if self._timer is not None and self._asked <= pong.token <= self._link.asked:
            self._timer.cancel()
            self._goes_on()

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self) -> None:
        self.stop()
        self._asked = self._link.ask()
        self._timer = self._link.loop.call_later(HEAR_S, self._goes_on)

    def _goes_on(self) -> None:
        """The client has heard what was said, or has had its time."""
        self._timer = None
        if self._is_ending:
            self._link.close()
        else:
            self.refuse(self._reason)
