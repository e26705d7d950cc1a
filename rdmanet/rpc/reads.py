"""READs of memory that the peer lends: if nothing of them comes, the connection ends.

Theory
------
A READ cannot be taken back. Its call may end, by a deadline, say, but the memory that it reads into is kept until the
device has completed it. That may take for ever where the peer's process has to answer, as on the embedded device if it
cannot map the peer's memory: a peer that is stopped, or wants it so, would keep that memory, and the call, too, if that
has no deadline. Nothing but the end of the connection ends such a READ. So a connection looks every `seconds`. If a
loan was being read at the last look, and is still, and meanwhile no READ has ended and no piece of a long one has come
(transfers.py, blocks.py), it looks once more after a tenth of that: this side's own loop may have been busy. Then it
ends.

One timer a connection, while it reads, and until the look after that.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Sequence
from typing import Any, Final, Protocol

from rdmanet.errors import RegionRevokedError
from rdmanet.rpc.buffer import over
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.parts import Places
from rdmanet.stream.peer_memory import OfferedMemory, Part, read_parts

LATE_PART: Final = 0.1


class Owner(Protocol):
    """What is needed of the link.

    :ivar moved: bytes that have come by long READs, and by those of parts
    """

    loop: asyncio.AbstractEventLoop
    is_over: bool

    @property
    def moved(self) -> int: ...

    def abort(self, error: BaseException) -> None: ...


class Reads:
    """Those of one link.

    :param seconds: how long nothing may come of what is read
    """

    def __init__(self, link: Owner, seconds: float) -> None:
        self._link = link
        self._seconds = seconds
        self._read: set[OfferedMemory] = (
            set()
        )  # loans that are being read, or were until a call was cancelled
        self._before: set[OfferedMemory] = set()  # those at the last look
        self._ended = 0
        self._progress = 0
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, remote: OfferedMemory, memory: Any, offset: int) -> None:
        """Fill memory from a loan.

        :raises OSError: as for `OfferedMemory.read_into`
        """
        await self._watched((remote,), remote.read_into(memory, offset))

    async def read_parts(self, parts: Sequence[Part], memory: Any) -> None:
        """The same for parts of loans, which are one operation."""
        await self._watched([part.remote for part in parts], read_parts(parts, memory))

    async def _watched(self, remotes: Sequence[OfferedMemory], reading: Awaitable[Any]) -> None:
        self._read.update(remotes)
        if self._timer is None:
            self._look_in(self._seconds)
        try:
            await reading
        except asyncio.CancelledError:
            raise  # what the device has begun goes on
        except BaseException:
            self._has_ended(remotes)
            raise
        self._has_ended(remotes)

    def stop(self) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._read.clear()
        self._before.clear()

    def _has_ended(self, remotes: Sequence[OfferedMemory]) -> None:
        self._ended += 1
        self._read.difference_update(remote for remote in remotes if not remote.is_used)

    def _look_in(self, seconds: float) -> None:
        if not self._link.is_over and seconds < math.inf:
            self._timer = self._link.loop.call_later(seconds, self.look)

    def look(self) -> None:
        """See whether something has come."""
        self._timer = None
        used = {remote for remote in self._read if remote.is_used}
        progress = self._ended + self._link.moved
        stalled = bool(used & self._before) and progress == self._progress
        if stalled and self._is_late:
            text = f"nothing has come of memory that the peer lends for {self._seconds} s: the limit lent_seconds"
            self._link.abort(TimeoutError(text))
            return
        self._read, self._before, self._progress, self._is_late = used, set(used), progress, stalled
        if used:
            self._look_in(self._seconds * LATE_PART if stalled else self._seconds)


class Reader(Owner, Protocol):
    """The link, of which somebody reads."""

    reads: Reads
    transport: asyncio.Transport

    def lost_error(self) -> Error: ...


async def read_offer(link: Reader, remote: OfferedMemory, memory: Any, offset: int) -> None:
    """Fill memory from an offer of the peer's.

    :raises Error: FAILED_PRECONDITION if it was revoked, UNAVAILABLE if the connection is lost
    """
    await _done(link, link.reads.read(remote, memory, offset))


async def read_loans(
    link: Reader, places: Places, remotes: Sequence[OfferedMemory], memory: memoryview, place: int
) -> None:
    """Fill memory from a place of a message's memory, which is on loan, perhaps in parts.

    :param remotes: the offers, in the order of `Places.offers`
    :raises Error: as for `read_offer`
    """
    runs = [run for run in places.runs(place, place + memory.nbytes) if run.end > run.place]
    if len(runs) == 1 and runs[0].end - place == memory.nbytes:
        await read_offer(link, remotes[runs[0].number], memory, runs[0].offset)
    elif runs:
        parts = [
            Part(remotes[run.number], run.offset, run.place - place, run.end - run.place) for run in runs
        ]
        await _done(link, link.reads.read_parts(parts, memory))


async def _done(link: Reader, reading: Awaitable[None]) -> None:
    try:
        await reading
    except RegionRevokedError as exc:
        if link.is_over or link.transport.is_closing():  # which takes all offers back
            raise link.lost_error() from exc
        raise over() from exc
    except OSError as exc:
        if exc.errno == errno.ENOMEM:
            raise
        raise Error(Code.UNAVAILABLE, f"the peer's memory could not be read: {exc}") from exc
