"""From callbacks to calls: a protocol that keeps what comes until somebody asks for it.

asyncio pushes: the transport calls ``data_received``. Other streams pull: AnyIO's ``receive()``, for one. Between the
two stands this protocol. It holds about ``_LIMIT_BYTES`` at most, then it pauses reading: what comes after that keeps
its slots, the peer runs out of credits, and its writers wait.

The calls that wait return when there may be something to see, and raise nothing but what cancels them; the attributes
say what there is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from rdmanet.transport import RdmaTransport

_LIMIT_BYTES = 65536


class PullProtocol(asyncio.Protocol):
    """One connection's received bytes, its end, and whether there is room to write."""

    transport: RdmaTransport

    def __init__(self, made: Callable[[PullProtocol], None] | None = None) -> None:
        self.eof = False
        """The peer has ended its half; what came before may be yet to take."""
        self.lost = False
        """The connection is over: `error` says why, or is None."""
        self.error: Exception | None = None
        self._made = made
        self._chunks: deque[bytes] = deque()
        self._taken = 0  # of the first chunk
        self._held = 0
        self._paused = False
        self._room = True
        self._waiting: dict[str, list[asyncio.Future[None]]] = {"readable": [], "writable": [], "lost": []}

    # -- what a stream asks -----------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether waiting for bytes is over: there are some, or there will be no more."""
        return self._held > 0 or self.eof or self.lost

    @property
    def writable(self) -> bool:
        """Whether waiting for room is over."""
        return self._room or self.lost

    @property
    def broken(self) -> BaseException | None:
        """Why nothing can be written though we did not end it, if that is so.

        The transport knows of the end before it tells us, where bytes are left that nobody asks for.
        """
        if self.error is not None:
            return self.error
        if self.lost or self.transport.is_closing():
            return ConnectionResetError("the peer has closed the connection")
        return None

    def take(self, most: int) -> bytes:
        """Bytes that have come, at most so many, without copying more than these; b"" if there are none."""
        if not self._chunks:
            return b""
        first = self._chunks[0]
        if self._taken == 0 and len(first) <= most:
            piece = first
        else:
            piece = first[self._taken : self._taken + most]
        self._taken += len(piece)
        if self._taken == len(first):
            self._chunks.popleft()
            self._taken = 0
        self._held -= len(piece)
        if self._paused and self._held < _LIMIT_BYTES:
            self._paused = False
            self.transport.resume_reading()
        return piece

    def take_into(self, buffer: memoryview) -> int:
        """Fill a buffer of bytes, as far as they have come; how many that were."""
        filled = 0
        while filled < len(buffer) and (piece := self.take(len(buffer) - filled)):
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    async def wait_readable(self) -> None:
        """Until `readable`, or `wake`; cancelling it loses nothing."""
        if not self.readable:
            await self._wait("readable")

    async def wait_writable(self) -> None:
        """Until `writable`, or `wake`; cancelling it changes nothing."""
        if not self.writable:
            await self._wait("writable")

    async def wait_lost(self) -> None:
        """Until `lost`; cancelling it changes nothing."""
        while not self.lost:
            await self._wait("lost")

    def wake(self) -> None:
        """Let all go on who wait for something to read or for room: their stream is closed."""
        self._tell("readable")
        self._tell("writable")

    async def _wait(self, what: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[what].append(waiter)
        try:
            await waiter
        finally:
            self._waiting[what].remove(waiter)

    def _tell(self, what: str) -> None:
        for waiter in self._waiting[what]:
            if not waiter.done():
                waiter.set_result(None)

    # -- what asyncio tells -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(RdmaTransport, transport)
        made, self._made = self._made, None
        if made is not None:
            made(self)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held += len(data)
        if self._held >= _LIMIT_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._tell("readable")

    def eof_received(self) -> bool:
        self.eof = True
        self._tell("readable")
        return True  # our half goes on

    def pause_writing(self) -> None:
        self._room = False

    def resume_writing(self) -> None:
        self._room = True
        self._tell("writable")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.error = exc
        for what in self._waiting:
            self._tell(what)
