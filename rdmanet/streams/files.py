"""Files over a transport: ``sendfile``.

``loop.sendfile`` works for asyncio's own transports only: its fallback requires a private base class, which a compiled
transport cannot have, and uvloop has no fallback. So this module has a function with the same meaning.

Reading a file may block, and files have no readiness to wait for. Bytes in the page cache are read at once (``preadv2``
with ``RWF_NOWAIT``, which fails rather than waiting for the disk); the rest is read by the loop's default executor, as
asyncio does for all bytes. So a thread is used only when the disk has to be waited for.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from typing import IO

from rdmanet.errors import shown
from rdmanet.transport import RdmaTransport

_CHUNK_BYTES = 65536
_Read = Callable[[memoryview, int], Awaitable[int]]


async def sendfile(
    transport: RdmaTransport,
    file: IO[bytes],
    offset: int = 0,
    count: int | None = None,
    *,
    fallback: bool = True,
) -> int:
    """Send a file over an RDMA transport, like ``loop.sendfile``; returns the number of bytes sent.

    ``file`` must be open in binary mode. Sending begins at ``offset``, and ends at the end of the file or after
    ``count`` bytes. When this returns or raises, the position in the file is behind what was sent. Nothing else may be
    written meanwhile: ``write()`` and another ``sendfile()`` raise RuntimeError, as they do while asyncio sends a file.
    Receiving goes on, so a protocol that answers from ``data_received()`` must pause reading first. With
    ``fallback=False`` it raises ``asyncio.SendfileNotAvailableError``, because the bytes pass through this process.

    Raises RuntimeError when the transport is closing or after ``write_eof()``, the OSError that ended the connection,
    and TypeError or ValueError for wrong arguments.

    If it is cancelled, what it has already written is still sent.
    """
    if not isinstance(transport, RdmaTransport):
        raise TypeError(
            f"sendfile() takes an RdmaTransport, not {shown(transport)}: use loop.sendfile() for others"
        )
    check(file, offset, count)
    if transport.is_closing():
        raise RuntimeError(f"{transport!r} is closing")
    if not fallback:
        raise asyncio.SendfileNotAvailableError(
            "a device cannot read files: the bytes have to be copied through this process (fallback=True)"
        )
    with transport._for_file() as write:
        return await pass_on(file, offset, count, write, transport._until_room)


async def pass_on(
    file: IO[bytes],
    offset: int,
    count: int | None,
    write: Callable[[bytes], object],
    until_room: Callable[[], Awaitable[None]],
) -> int:
    """Write a file, or a part of it; returns the number of bytes. The position in the file is behind them then.

    :param until_room: is awaited before each write
    """
    read = _reader(file, offset)
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, count or _CHUNK_BYTES)))
    sent = 0
    try:
        while count is None or sent < count:
            room = buffer if count is None else buffer[: count - sent]
            length = await read(room, offset + sent)
            if length == 0:
                break
            await until_room()
            write(bytes(room[:length]))  # the next read overwrites it
            sent += length
    finally:
        file.seek(offset + sent)
    return sent


def check(file: IO[bytes], offset: int, count: int | None) -> None:
    """Raise a ValueError or a TypeError for arguments that sendfile() does not take."""
    if "b" not in getattr(file, "mode", "b"):
        raise ValueError(f"{shown(file)} is not open in binary mode")
    if not isinstance(offset, int) or not isinstance(count, int | None):
        raise TypeError(
            f"offset={shown(offset)} and count={shown(count)} must be integers, count may be None"
        )
    if offset < 0 or (count is not None and count <= 0):
        raise ValueError(
            f"offset={shown(offset)} must not be negative, and count={shown(count)} must be positive"
        )


def _reader(file: IO[bytes], offset: int) -> _Read:
    """How to read from the file without blocking the loop."""
    loop = asyncio.get_running_loop()
    try:
        fd = file.fileno()
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:  # io.UnsupportedOperation is an OSError: there is no descriptor
        regular = False
    if not regular:
        file.seek(offset)
        return lambda room, _: loop.run_in_executor(None, file.readinto, room)  # type: ignore[attr-defined]

    async def read(room: memoryview, position: int) -> int:
        await asyncio.sleep(0)  # let other tasks run, however fast the peer is
        try:
            return os.preadv(fd, [room], position, os.RWF_NOWAIT)
        except OSError:
            # Not in the page cache, or not supported by the file system. Any other error will come up there again.
            return await loop.run_in_executor(None, os.preadv, fd, [room], position)

    return read
