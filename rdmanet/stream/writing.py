"""The sending half of a connection, as its application uses it: what may still be written, and who waits for it.

The bytes themselves are in `Connection`, which calls its owner when it refuses a write. Why it did is known here.
`resume_writing()` is not called here: `tell_room` (_pyx/writing.pxi) decides, and `Lifecycle._resume_writing` calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterator

from rdmanet.stream.connection import Connection
from rdmanet.stream.protocol import Machine, Writing

logger = logging.getLogger("rdmanet")

_LATE_WRITES_QUIET = 5  # asyncio.constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES


class WritingHalf:
    """Our half of one connection.

    :ivar eof_written: write_eof() was called
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, machine: Machine, connection: Connection) -> None:
        self.eof_written = False
        self._loop = loop
        self._machine = machine
        self._connection = connection
        self._late_writes = 0
        self._reserved = False
        self._for_file = False
        self._for_room: list[asyncio.Future[None]] = []
        self._half_closed: asyncio.Future[None] | None = None

    # -- writes that are refused ---------------------------------------------------------------------------

    def check_refusal(self) -> None:
        """Raise the RuntimeError of a refused write, if it is one that the program could have known of."""
        if self._reserved:
            raise RuntimeError("unable to write; sendfile is in progress")
        if self.eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")

    def write_dropped(self) -> None:
        """Data was written after close() or the end: dropped in silence a few times, then with a warning."""
        if self._late_writes >= _LATE_WRITES_QUIET:
            logger.warning("write() on a closed RDMA transport: the data is dropped")
        self._late_writes += 1

    @contextlib.contextmanager
    def reserved(self, write: Callable[[bytes], None]) -> Iterator[Callable[[bytes], None]]:
        """Refuse all writes, except those by the function that this yields.

        :param write: the transport's write()
        :raises RuntimeError: it is reserved already
        """

        def write_reserved(data: bytes) -> None:
            self._reserve(False)
            try:
                write(data)
            finally:
                self._reserve(True)

        if self._for_file:
            raise RuntimeError("sendfile is in progress already")
        self._for_file = True
        self._reserve(True)
        try:
            yield write_reserved
        finally:
            self._for_file = False
            self._reserve(False)

    def pausing(self) -> None:
        """pause_writing() is about to be called, perhaps by a write of `reserved`: the protocol may not write there."""
        if self._for_file:
            self._reserve(True)

    def _reserve(self, reserved: bool) -> None:
        self._reserved = reserved
        if reserved:
            self._connection.stop_writing()
        elif self._machine.writable:
            self._connection.allow_writing()

    # -- waiting -------------------------------------------------------------------------------------------

    async def until_room(self) -> None:
        """Wait while more bytes are buffered than the high-water mark. Cancelling it changes nothing.

        :raises OSError: the connection is over, or closed
        """
        connection, machine = self._connection, self._machine
        if (
            connection.get_write_buffer_size() > connection.get_write_buffer_limits()[1]
            and not machine.closing
        ):
            waiter = self._loop.create_future()
            self._for_room.append(waiter)
            await waiter
        if machine.closing:
            raise machine.error or ConnectionResetError(errno.ECONNRESET, "the connection is closed")

    def wake_until_room(self) -> None:
        """Wake `until_room`."""
        waiters, self._for_room = self._for_room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until_half_closed(self) -> None:
        """After write_eof(): wait until the peer's device has our Fin, or the connection is over."""
        if self._machine.writing is Writing.FIN_DUE:
            self._half_closed = self._loop.create_future()
            await self._half_closed

    def tell_half_closed(self) -> None:
        """Wake `until_half_closed`."""
        if self._half_closed is not None and not self._half_closed.done():
            self._half_closed.set_result(None)

    def over(self) -> None:
        """Wake everybody who waits."""
        self.tell_half_closed()
        self.wake_until_room()
