# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The sending half of a connection, as its application uses it: what may still be written, and who waits for it.

The bytes themselves are in `Connection`, which says when it refuses a write. Why it did is known here. It also says
when the protocol is to pause, and when there is room again: `tell_room` (_pyx/writing.pxi) decides that.

TLS above keeps what it has to write, its farewell among it, until it is resumed, and relies on asyncio's transports to
take writes after close() for as long as they have something in their buffers. So a close() waits for that
(`waits_for_tls`), and takes effect when TLS has been resumed and is not paused again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from rdmanet.protocol import Event, State, TellingEvent, Told, Writing
from rdmanet.stream import tls
from rdmanet.stream.callbacks import Callbacks
from rdmanet.stream.connection import Connection
from rdmanet.stream.machine import Machine

logger = logging.getLogger("rdmanet")

_LATE_WRITES_QUIET = 5  # asyncio.constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES


class WritingOwner(Protocol):
    """A life, as our half of it sees it."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


class WritingHalf:
    """Our half of one connection.

    :ivar eof_written: write_eof() was called
    :ivar late_writes: how many were dropped, because the connection is closed or over; counted up to a few
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        machine: Machine,
        connection: Connection,
        callbacks: Callbacks,
        owner: WritingOwner,
    ) -> None:
        self.eof_written = False
        self.late_writes = 0
        self._loop = loop
        self._machine = machine
        self._connection = connection
        self._callbacks = callbacks
        self._owner: WritingOwner | None = owner  # until `disown`
        self._reserved = False
        self._for_file = False
        self._for_room: list[asyncio.Future[None]] | None = None
        self._half_closed: asyncio.Future[None] | None = None

    # -- writes that are refused ---------------------------------------------------------------------------

    def refused(self) -> None:
        """A write is refused: as with asyncio's, an error after write_eof(), silence after close(), then a warning.

        :raises RuntimeError: the program could have known
        """
        if self._reserved:
            raise RuntimeError("unable to write; sendfile is in progress")
        if self.eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._machine.state in (State.DRAINING, State.DRAINING_TO_EOF) and self._owner is not None:
            self._owner.handle(Event.WRITE_DROPPED)
            self._connection.reading = True  # a writer learns of the end, even if the reader is paused
            tls.close_face(self._callbacks.protocol)
        if self.late_writes >= _LATE_WRITES_QUIET:
            logger.warning("write() on a closed RDMA transport: the data is dropped")
        else:
            self.late_writes += 1

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

    # -- room ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Call pause_writing(). If a write of `reserved` is the cause, the protocol may not write there."""
        if self._for_file:
            self._reserve(True)
        self._callbacks.pause_writing()

    def room(self) -> None:
        """There is room again: wake who waits for it, and have resume_writing() called.

        Not now if a callback may be running (abort() in data_received, for example), because a context cannot be
        entered twice. The loop calls connection_lost, too, after this.
        """
        machine, context = self._machine, self._callbacks.context
        self._wake_until_room()
        if machine.state is State.CLOSED:
            return  # after abort() there is nothing to write to: as in asyncio, connection_lost() ends all waits
        if machine.over and machine.error is not None and self._connection.reading:
            machine.tell(TellingEvent.ROOM)  # connection_lost() comes when what was received is delivered
        elif machine.closing:
            self._loop.call_soon(self.resume, context=context)
        else:
            context.run(self.resume)

    def resume(self) -> None:
        """Call resume_writing(), in the protocol's context. A close() that has waited for TLS comes then."""
        if self._machine.told is Told.LOSS:
            return  # that ends all waits
        self._callbacks.resume_writing()
        close_due = self._machine.writing is Writing.CLOSE_DUE
        if close_due and not self._connection.protocol_paused and self._owner is not None:
            self._owner.close()

    def waits_for_tls(self) -> bool:
        """Whether a close() has to wait until TLS above has written the rest."""
        paused = self._connection.protocol_paused and self._machine.writable
        return paused and tls.is_tls(self._callbacks.protocol)

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
            if self._for_room is None:
                self._for_room = []
            self._for_room.append(waiter)
            await waiter
        if machine.closing:
            raise machine.error or ConnectionResetError(errno.ECONNRESET, "the connection is closed")

    def _wake_until_room(self) -> None:
        waiters, self._for_room = self._for_room, None
        for waiter in waiters or ():
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
        if self._half_closed is not None:
            self.tell_half_closed()
        if self._for_room:
            self._wake_until_room()

    def disown(self) -> None:
        """Forget the owner, which refers to us."""
        self._owner = None
