"""While a connection waits for a server on this host: does the server's loop still turn, and where?

Theory
------
The door has answered (doors.py), so the server's loop turned a moment ago. But the connection may have been sent to a
worker that is busy, or the loop that answered may be busy since. A busy loop cannot be told from one that has many
connections to make: neither answers this one. So after `ASK_S` the client knocks again. The door says which workers'
loops do not turn (workers.py), and where else to go. If it does not answer either, the attempt ends, and the connection
takes TCP. If the loops turn, the client goes on waiting, and asks again later. Nobody asks as long as others of this
process are connected there. Of those that would ask at the same time one does, and tells the others: a server that has
many connections to make is not to answer as many questions as well.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rdmanet.base.pause import pause
from rdmanet.loop import doors, kernel

if TYPE_CHECKING:
    from rdmanet.loop.base import Base
    from rdmanet.loop.limit import Limit

ASK_S = 0.15
"""How long a connection waits before the server is asked, and between questions."""


class Inquiry:
    """The questions of one connection that waits.

    :ivar answer: why it ended: where to go instead, or what has failed; None if it did not end by this
    """

    __slots__ = ("_base", "_door_port", "_is_dealt", "_limit", "_place", "_since", "_task", "_wait", "answer")

    def __init__(
        self, base: Base, door_port: int, place: doors.Place, is_dealt: bool, limit: Limit | None = None
    ) -> None:
        """
        :param door_port: the port that the server's door is of
        :param place: where the connection waits
        :param is_dealt: the server may have sent it on to a worker, and not said so here
        :param limit: that of the attempt to connect, which the answer ends
        """
        self.answer: doors.Place | OSError | None = None
        self._limit = limit
        self._base = base
        self._door_port = door_port
        self._place = place
        self._is_dealt = is_dealt
        self._since = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._wait = base.waits.begin(ASK_S, self._begin)

    def place(self) -> doors.Place:
        """Where to go instead.

        :raises OSError: the server does not answer, or not as one of ours
        """
        answer = self.answer
        assert answer is not None
        if isinstance(answer, OSError):
            self.answer = None
            raise answer
        return answer

    def close(self) -> None:
        """Ask no more."""
        self._wait.cancel()
        if self._task is not None:
            self._task.cancel()
        if isinstance(self.answer, doors.SilentError):  # nobody wants to know
            self.answer.knock.close()

    def _begin(self) -> None:
        self._task = self._base.loop.create_task(self._ask(), name="ask for another worker")
        self._base.tasks.add(self._task)
        self._task.add_done_callback(self._base.tasks.discard)

    async def _ask(self) -> None:
        place = self._place
        while True:
            if not doors.has_turned(place.address, place.port, self._since):
                try:
                    said = await self._said()
                except OSError as exc:
                    if not kernel.lacks_resources(exc):
                        self._end(exc)
                        return
                else:
                    if said is None:
                        return  # the server has gone, and the connection fails by itself
                    if place.port in said.busy or (self._is_dealt and said.busy):
                        self._end(said)
                        return
            self._since = time.monotonic()
            await pause(self._base.loop, ASK_S)

    async def _said(self) -> doors.Place | None:
        """What the door says to this question, or to another connection's; None: there is no door.

        :raises OSError: what doors.find() and doors.knock() raise
        """
        loop, asking, door = self._base.loop, self._base.asking, (self._place.address, self._door_port)
        while (others := asking.get(door)) is not None:
            waiter: asyncio.Future[_Told | None] = loop.create_future()
            others.append(waiter)
            if (told := await waiter) is None:
                continue
            try:
                result = told.result()
            except OSError:  # no descriptor is left for a copy, or it is closed already: ask
                continue
            if isinstance(result, OSError):
                raise result
            return result
        others = asking[door] = []
        outcome = None  # if this is cancelled, one of the others asks
        try:
            found = doors.find(*door)
            said = None if isinstance(found, str) else await doors.knock(found, loop)
            outcome = _Told(said, None)
            return said
        except OSError as exc:
            outcome = _Told(None, exc)
            raise
        finally:
            del asking[door]
            for other in others:
                if not other.done() and not loop.is_closed():
                    other.set_result(outcome)

    def _end(self, answer: doors.Place | OSError) -> None:
        self.answer = answer
        if self._limit is not None:
            self._limit.end()


class _Told:
    """What a question has led to."""

    def __init__(self, place: doors.Place | None, error: OSError | None) -> None:
        self._place, self._error = place, error

    def result(self) -> doors.Place | OSError | None:
        """The same for another one. A connection that is kept until the loop answers is copied.

        :raises OSError: there are no descriptors left
        """
        if isinstance(self._error, doors.SilentError):
            return doors.SilentError(self._error.knock.dup())
        return self._place if self._error is None else type(self._error)(*self._error.args)
