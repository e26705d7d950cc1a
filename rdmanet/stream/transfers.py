"""Long READs and WRITEs of a connection, which are made in pieces.

Theory
------
A queue pair executes its requests one after the other. What is posted behind a READ of 256 MiB waits for all of it: the
frames of the stream, with the answers and Pings of a protocol on it, and other operations. A device also limits the
length of one request (`PortAttr.max_msg_sz`; 1 GiB on the embedded device, 8 MiB on rxe). So what is longer than
AT_ONCE_BYTES goes in pieces of PIECE_BYTES, of which at most IN_FLIGHT are posted: the next one waits here, and what is
short is posted ahead of it. Several transfers take turns, a piece each.

Measured on the embedded device, READs of 256 MiB: with two pieces of 4 MiB in flight it takes as long as one request,
with one piece, or with pieces of 1 MiB, an eighth longer, of 256 KiB a third. A message waits for two pieces, which
takes 2 ms. A WRITE of up to 4 MiB is executed by the thread that posts it, which is the loop's: so pieces are longer.

A transfer ends once: when its last piece has completed, or when one has failed and those behind it have ended, too.
Then its memory is given back. If it is cancelled, nothing more is posted for it, and it ends with its pieces in flight.
Completions drive it, not a coroutine, so nothing waits for a turn of the loop between two pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from rdmanet._core import SGE, Operation

if TYPE_CHECKING:
    from rdmanet._core import Connection

AT_ONCE_BYTES: Final = 1 << 20
"""The longest operation that is posted as it is: the embedded device may execute it while it is posted."""
PIECE_BYTES: Final = 5 << 20
IN_FLIGHT: Final = 2


class Local(Protocol):
    """The memory of this side, registered."""

    def part(self, offset: int, length: int) -> SGE: ...

    def close(self) -> None:
        """No device touches it any more."""


class Transfer:
    """A READ or a WRITE of any length.

    :param future: which is told of the end
    :param local: is closed then
    :param address: where the peer's memory begins, and `rkey` is its key
    """

    __slots__ = (
        "_address",
        "_error",
        "_in_flight",
        "_length",
        "_local",
        "_opcode",
        "_posted",
        "_rkey",
        "future",
    )

    def __init__(
        self, future: asyncio.Future[None], opcode: int, local: Local, length: int, address: int, rkey: int
    ) -> None:
        self.future = future
        self._opcode = opcode
        self._local: Local | None = local
        self._length = length
        self._address = address
        self._rkey = rkey
        self._posted = 0  # bytes
        self._in_flight = 0  # pieces
        self._error: BaseException | None = None

    @property
    def is_posted(self) -> bool:
        """Whether there is nothing left to post."""
        return self._posted == self._length or self._error is not None or self.future.done()

    def post(self, connection: Connection, pieces: Transfers) -> bool:
        """Post the next piece; False if there is no room now.

        :raises OSError: the connection is lost
        """
        assert self._local is not None
        length = min(PIECE_BYTES, self._length - self._posted)
        part, address = self._local.part(self._posted, length), self._address + self._posted
        operation = Operation.beside(None, self._opcode, part, address, self._rkey)
        if not operation.post(connection, self._length):
            return False
        operation.close_after(_Piece(operation, self, pieces, length))
        self._posted += length
        self._in_flight += 1
        return True

    def piece_ended(self, error: BaseException | None) -> None:
        """A piece has completed, or never will."""
        self._in_flight -= 1
        self.fail(error)

    def fail(self, error: BaseException | None) -> None:
        """Post nothing more, if there is an error; end, if nothing is in flight and nothing is to be posted."""
        self._error = self._error or error
        local = self._local
        if self._in_flight or not self.is_posted or local is None:
            return
        self._local = None
        try:
            local.close()
        finally:
            if not self.future.done():
                if self._error is None:
                    self.future.set_result(None)
                else:
                    self.future.set_exception(self._error)
            self._error = None


class Transfers:
    """Those of one connection.

    :ivar moved: bytes of all pieces that have completed
    """

    def __init__(self, connection: Connection) -> None:
        self.moved = 0
        self._connection = connection
        self._queue: deque[Transfer] = deque()  # those that have something to post
        self._in_flight = 0

    def begin(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        self.go_on()

    def cancel(self, transfer: Transfer) -> None:
        """Nobody awaits it any more: its future is done."""
        if transfer in self._queue:
            self._queue.remove(transfer)
        transfer.fail(None)

    def go_on(self) -> None:
        """Post as much as may be in flight, and as there is room for."""
        queue = self._queue
        while queue and self._in_flight < IN_FLIGHT:
            transfer = queue[0]
            try:
                if not transfer.is_posted:
                    if not transfer.post(self._connection, self):
                        return
                    self._in_flight += 1
            except OSError as exc:
                queue.popleft()
                transfer.fail(exc.with_traceback(None))
            else:
                queue.popleft()
                if not transfer.is_posted:
                    queue.append(transfer)

    def piece_ended(self, transfer: Transfer, length: int, error: BaseException | None) -> None:
        self._in_flight -= 1
        if error is None:
            self.moved += length
        elif transfer in self._queue:
            self._queue.remove(transfer)
        transfer.piece_ended(error)

    def close(self, error: BaseException) -> None:
        """The queue pair is destroyed: end what waits here."""
        queue, self._queue = self._queue, deque()
        for transfer in queue:
            transfer.fail(error)


class _Piece:
    """What an operation closes when it has ended: it tells the transfer."""

    __slots__ = ("_length", "_operation", "_pieces", "_transfer")

    def __init__(
        self, operation: Operation[None], transfer: Transfer, pieces: Transfers, length: int
    ) -> None:
        self._operation: Operation[None] | None = operation
        self._transfer = transfer
        self._pieces = pieces
        self._length = length

    def close(self) -> None:
        operation, self._operation = self._operation, None
        assert operation is not None
        try:
            operation.result()
        except Exception as exc:
            self._pieces.piece_ended(self._transfer, self._length, exc.with_traceback(None))
        else:
            self._pieces.piece_ended(self._transfer, self._length, None)
