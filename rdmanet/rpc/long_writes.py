"""Long messages go to a connection's transport in pieces, and what is written after them waits here.

Theory
------
Transports take what is written in one go: asyncio's copies what the kernel does not take at once (before Python 3.12),
and that of TLS encrypts all of it. So the loop would wait for a message of 256 MiB for some tenths of a second. A long
message is written PIECE_BYTES at a time instead, as long as the transport takes more, and TURN_BYTES in a turn of the
loop. Its memory is not copied, so nobody may change it any more.

Messages cannot overtake each other. As long as there is one here, all others go behind it (`write`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

PIECE_BYTES: Final = 256 << 10
TURN_BYTES: Final = 1 << 20


class LongWrites:
    """What is still to be written on one connection.

    :param on_end: called when all of it was
    :ivar is_full: the transport has enough for now
    :ivar nbytes: how much is left
    """

    __slots__ = ("is_full", "nbytes", "_is_due", "_left", "_loop", "_on_end", "_transport")

    _transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self.is_full = False
        self.nbytes = 0
        self._loop = loop
        self._on_end = on_end
        self._left: deque[memoryview] = deque()
        self._is_due = False  # `_next_turn` is about to be called

    def begin(self, transport: asyncio.Transport, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write these, which follow each other, behind what is left."""
        self._transport = transport
        for part in parts:
            self.write(part)
        if not self._is_due:
            self.go_on()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write this behind what is left."""
        if data:
            self._left.append(memoryview(data))
            self.nbytes += len(data)

    def go_on(self) -> None:
        """The transport takes more."""
        left, room = self._left, TURN_BYTES
        if left and self._transport.is_closing():
            self.drop()
        while left and room > 0 and not self.is_full:
            piece = left[0][:PIECE_BYTES]
            if len(piece) < len(left[0]):
                left[0] = left[0][PIECE_BYTES:]
            else:
                left.popleft()
            self.nbytes -= len(piece)
            room -= len(piece)
            self._transport.write(piece)
        if not left:
            self._on_end()
        elif not self.is_full and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due = False
        if self._left and not self.is_full:
            self.go_on()

    def drop(self) -> None:
        """Nothing can be written any more."""
        self._left.clear()
        self.nbytes = 0
