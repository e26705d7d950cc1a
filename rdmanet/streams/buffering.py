"""A protocol that keeps received bytes until a stream asks for them.

A transport calls ``data_received`` when bytes arrive. AnyIO's streams and Trio's return bytes when they are asked for
some. This protocol stands between the two. It holds about ``_LIMIT_BYTES``, then it pauses reading: bytes that arrive
later stay in their slots, the peer runs out of credits, and its writers wait.

The waiting methods return when there may be something to see. They raise nothing but what cancels them; the attributes
say what there is. `BufferedStream` is what both kinds of streams have in common above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from rdmanet.base.notifier import Future, Notifier
from rdmanet.transport import RdmaTransport

_LIMIT_BYTES = 65536


class BufferingProtocol(asyncio.Protocol):
    """One connection's received bytes, its end, and whether there is room to write."""

    transport: RdmaTransport

    def __init__(
        self, made: Callable[[BufferingProtocol], None] | None = None, *, home: Notifier | None = None
    ) -> None:
        """
        :param made: gets the protocol when the connection is made
        :param home: the loop of those who wait; None: asyncio's
        """
        self.eof = False
        """The peer has ended its half; bytes from before that may still have to be taken."""
        self.lost = False
        """The connection is over: `error` says why, or is None."""
        self.error: Exception | None = None
        self._made = made
        self._home = home
        self._chunks: deque[bytes] = deque()
        self._taken = 0  # of the first chunk
        self._held = 0
        self._paused = False
        self._room = True
        self._waiting: dict[str, list[Future]] = {"readable": [], "writable": [], "lost": []}

    # -- for streams ------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether there are bytes to take, or there will be no more."""
        return self._held > 0 or self.eof or self.lost

    @property
    def writable(self) -> bool:
        """Whether a writer may go on: there is room, or the connection is over."""
        return self._room or self.lost

    @property
    def broken(self) -> BaseException | None:
        """Why nothing can be written, although this side has not ended its half; None if writing is possible.

        While received bytes wait to be taken, the transport may know of the end before it calls ``connection_lost``.
        """
        if self.error is not None:
            return self.error
        if self.lost or self.transport.is_closing():
            return ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
        return None

    def take(self, most: int) -> bytes:
        """Received bytes, at most ``most``, copying no others; b"" if there are none."""
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

    async def wait_readable(self) -> None:
        """Wait until `readable`, or `wake`; cancelling it loses nothing."""
        if not self.readable:
            await self._wait("readable")

    async def wait_writable(self) -> None:
        """Wait until `writable`, or `wake`; cancelling it changes nothing."""
        if not self.writable:
            await self._wait("writable")

    async def wait_lost(self) -> None:
        """Wait until `lost`; cancelling it changes nothing."""
        while not self.lost:
            await self._wait("lost")

    def wake(self) -> None:
        """Wake everybody who waits for bytes or for room, because their stream is closed."""
        self._tell("readable")
        self._tell("writable")

    async def _wait(self, what: str) -> None:
        waiter: Future = (self._home or asyncio.get_running_loop()).create_future()
        self._waiting[what].append(waiter)
        try:
            await waiter
        finally:
            self._waiting[what].remove(waiter)

    def _tell(self, what: str) -> None:
        for waiter in self._waiting[what]:
            if not waiter.done():
                waiter.set_result(None)

    # -- for asyncio ------------------------------------------------------------------------------------

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


class BufferedStream:
    """A stream of AnyIO's or Trio's: which errors it raises, and where it lets other tasks run."""

    _library: Any
    """`anyio` or `trio`, which name these errors and checkpoints alike."""

    def __init__(self, protocol: BufferingProtocol) -> None:
        self._protocol = protocol
        self._transport = protocol.transport
        self._closed = False
        self._sent_eof = False

    async def _receive(self, most: int) -> bytes:
        """At least one byte, and at most so many; b"" at end of file."""
        protocol, library = self._protocol, self._library
        if protocol.readable or self._closed:
            await library.lowlevel.checkpoint()
        else:
            await library.lowlevel.checkpoint_if_cancelled()  # bytes that arrive just now would hide it
            await protocol.wait_readable()
        if self._closed:
            raise library.ClosedResourceError("this stream is closed")
        if data := protocol.take(most):
            return data
        if protocol.error is not None and not protocol.eof:
            raise library.BrokenResourceError(str(protocol.error)) from protocol.error
        return b""

    async def _send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, once there is room. If this is cancelled, nothing of it was sent."""
        waited = await self._until_room()
        # The program may change a memoryview at once; the transport would send from it later.
        self._transport.write(bytes(data) if isinstance(data, memoryview) else data)
        if not waited:
            await self._library.lowlevel.cancel_shielded_checkpoint()

    async def _until_room(self) -> bool:
        """Wait until bytes may be written; returns whether it had to."""
        await self._library.lowlevel.checkpoint_if_cancelled()
        self._check_sendable()
        if self._protocol.writable:
            return False
        await self._protocol.wait_writable()
        self._check_sendable()
        return True

    def _check_sendable(self) -> None:
        if self._closed or self._sent_eof:
            raise self._library.ClosedResourceError("this stream is closed for sending")
        if (broken := self._protocol.broken) is not None:
            raise self._library.BrokenResourceError(str(broken)) from broken

    async def _close(self) -> None:
        """Close, and wait until the peer's device has everything. If this is cancelled, drop what has not been sent."""
        self._closed = True
        self._protocol.wake()
        self._transport.close()
        try:
            await self._library.lowlevel.checkpoint()
            await self._protocol.wait_lost()
        except BaseException:
            self._transport.abort()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport!r}>"

    def __del__(self) -> None:
        transport = getattr(self, "_transport", None)
        if transport is not None and not self._closed and not transport.is_closing():
            forgotten(self, transport)


def forgotten(stream: object, transport: RdmaTransport) -> None:
    """A stream that was not closed is garbage: warn, and abort its connection. The collector may run in any thread."""
    warnings.warn(f"unclosed {stream!r}", ResourceWarning, stacklevel=3, source=stream)
    with contextlib.suppress(RuntimeError):
        transport._loop.call_soon_threadsafe(transport.abort)
