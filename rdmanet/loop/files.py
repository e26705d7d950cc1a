"""``loop.sendfile`` over TCP and TLS, for uvloop, which has none.

It works as asyncio's fallback does: the file is read piece by piece, and each piece is written when the transport has
room for it. Only a transport's protocol hears whether there is room. So a stand-in takes the protocol's place, and
tells the protocol all that it hears. Reading is paused meanwhile, as in asyncio.
"""

from __future__ import annotations

import asyncio
from typing import IO, Any

from rdmanet.streams.files import check, pass_on


async def sendfile(transport: Any, file: IO[bytes], offset: int, count: int | None, fallback: bool) -> int:
    """asyncio's loop.sendfile(), for any transport.

    :raises SendfileNotAvailableError: without `fallback`
    """
    check(file, offset, count)
    if transport.is_closing():
        raise RuntimeError("Transport is closing")
    if not fallback:
        raise asyncio.SendfileNotAvailableError(
            "uvloop has no sendfile(): the bytes have to be copied through this process (fallback=True)"
        )
    if isinstance(transport.get_protocol(), _StandIn):
        raise RuntimeError("sendfile is in progress already")
    stand_in = _StandIn(transport)
    try:
        return await pass_on(file, offset, count, transport.write, stand_in.until_room)
    finally:
        stand_in.leave()


class _StandIn(asyncio.Protocol):
    """The protocol of a transport while a file is sent."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._protocol = transport.get_protocol()
        self._was_reading = transport.is_reading()
        self._waiter: asyncio.Future[None] | None = None
        transport.pause_reading()
        transport.set_protocol(self)

    async def until_room(self) -> None:
        """Wait while more bytes are buffered than the high-water mark.

        :raises ConnectionError: the connection is over, or closed
        """
        _, high = self._transport.get_write_buffer_limits()
        # Beyond the mark every transport has paused its protocol. So resume_writing() will come, or connection_lost().
        while not self._transport.is_closing() and self._transport.get_write_buffer_size() > high:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._transport.is_closing():
            raise ConnectionResetError("the connection was closed while a file was sent")

    def leave(self) -> None:
        """Give the transport back to its protocol."""
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._protocol)
        if self._was_reading and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._wake()
        self._protocol.resume_writing()

    def eof_received(self) -> bool | None:
        keep: bool | None = self._protocol.eof_received()
        return keep

    def connection_lost(self, exc: Exception | None) -> None:
        self._wake()
        self._protocol.connection_lost(exc)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
