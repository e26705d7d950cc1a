"""Lists of blocks on a connection: READs and WRITEs of many ranges of the peer's memory, each list awaited as one.

A list (`Blocks`, _pyx/blocks.pxi) has its ranges, and posts as many as there is room for. Here the lists of one
connection take turns at that room, behind the connection's other operations (regions.py). A list ends once; when it is
cancelled or fails, nothing more is posted for it, and it ends with what is in flight.
"""

from __future__ import annotations

import array
import operator
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

from rdmanet._core import Blocks, FastPath
from rdmanet.stream.transfers import AT_ONCE_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rdmanet._core import Connection


class Lists:
    """Those of one connection that have something to post."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: deque[Blocks] = deque()

    def begin_at_once(self, blocks: Blocks) -> bool:
        """Post what the device executes at once, if nobody waits: see `Blocks.begin`."""
        return not self._queue and blocks.begin(self._connection)

    def begin(self, blocks: Blocks) -> None:
        self._queue.append(blocks)
        self.go_on()

    def go_on(self) -> None:
        """Post what there is room for."""
        queue = self._queue
        while queue:
            blocks = queue.popleft()
            try:
                if not blocks.post(self._connection):
                    queue.append(blocks)
                    return
            except OSError as exc:
                blocks.stop(exc.with_traceback(None))

    def close(self, error: BaseException) -> None:
        """The queue pair is destroyed: end what waits here."""
        queue, self._queue = self._queue, deque()
        for blocks in queue:
            blocks.end(error)


def new_list(future: asyncio.Future[None] | None, opcode: int) -> Blocks:
    """An empty list, which tells this future of its end, if there is one."""
    return Blocks(future, opcode, AT_ONCE_BYTES, PIECE_BYTES)


def fast_path(
    connection: Connection,
    endpoint: bytes,
    descriptors: type[Any],
    claimed: Callable[[bytes], Any],
    find: Callable[[int, int, bool], Any],
) -> FastPath:
    """What a connection reads and writes at once, by descriptors of this class, of this endpoint's memory."""
    return FastPath(connection, endpoint, descriptors, claimed, find, AT_ONCE_BYTES, PIECE_BYTES)


def numbers_of(indices: Iterable[SupportsIndex]) -> memoryview | array.array[int]:
    """The indices as `Blocks.add_rows` takes them. An array of such numbers is not copied.

    :raises TypeError: one of them is no whole number
    :raises IndexError: one of them has more than 64 bits
    """
    try:
        view = memoryview(indices)  # type: ignore[arg-type]
    except (TypeError, BufferError, ValueError):
        pass
    else:
        if view.ndim == 1 and view.itemsize == 8 and view.format in ("l", "q") and view.c_contiguous:
            return view
    try:
        return array.array("q", map(operator.index, indices))
    except OverflowError:
        raise IndexError("an index has more than 64 bits, and is no row") from None
