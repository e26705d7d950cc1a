"""The memory that a stream's peer offers, until the program takes it.

A protocol is told of an offer by ``region_offered()``, at once, and may drop it. A stream waits to be asked. So its
protocol puts offers into an ``OfferQueue``, and the program takes them out, each once, the oldest first.

What nobody takes is bounded without a limit of its own. A peer can have 768 offers at a time (offers.ACCEPTED_MAX), and
an offer that it takes back leaves the queue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdmanet.stream.peer_memory import OfferedMemory


class OfferQueue:
    """The offers that the program has not taken. Any number of tasks may wait for the next one."""

    def __init__(self) -> None:
        self._untaken: dict[int, OfferedMemory] = {}  # by the offer's number, the oldest first
        self._changed: asyncio.Event | None = None  # until somebody waits: most programs never do
        self._is_over = False
        self._error: BaseException | None = None

    async def next(self) -> OfferedMemory | None:
        """Wait for an offer, and take it; None if there will be no more. Cancelling it takes nothing.

        Raises the error that `end` was given, if any.
        """
        while True:
            while self._untaken:
                offer = self._untaken.pop(next(iter(self._untaken)))
                if not offer.revoked:
                    return offer
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return None
            if self._changed is None:
                self._changed = asyncio.Event()
            self._changed.clear()
            await self._changed.wait()

    def put(self, offer: OfferedMemory) -> None:
        """The peer has offered this."""
        if not self._is_over:
            self._untaken[offer.id] = offer
            self._wake()

    def remove(self, offer: OfferedMemory) -> None:
        """The peer has revoked this. Who has taken it sees that by `OfferedMemory.revoked`."""
        self._untaken.pop(offer.id, None)

    def end(self, error: BaseException | None) -> None:
        """There will be no more offers, for this reason. What nobody has taken is dropped. Later calls do nothing."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._untaken.clear()
            self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()


class OfferIterator:
    """``async for remote in ...``, over an `OfferQueue`. It keeps nothing: a second one goes on where it was left."""

    def __init__(self, queue: OfferQueue) -> None:
        self._queue = queue

    def __aiter__(self) -> OfferIterator:
        return self

    async def __anext__(self) -> OfferedMemory:
        offer = await self._queue.next()
        if offer is None:
            raise StopAsyncIteration
        return offer
