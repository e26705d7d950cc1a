"""Files over a transport: ``sendfile``.

``loop.sendfile`` is for asyncio's own transports: its fallback insists on a private base class that a compiled
transport cannot have, and uvloop has none. So there is a function here with the same meaning.

Reading a file may block, and there is no readiness to wait for. What is in the page cache is read at once
(``preadv2`` with ``RWF_NOWAIT``, which fails rather than wait for the disk); for what is not, the loop's default
executor is asked, as asyncio does for everything. So a thread is started only where the disk has to be waited for.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from typing import IO

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
    """Send a file over an RDMA transport; returns how many bytes that were (``loop.sendfile``).

    ``file`` is open in binary mode; sending begins at ``offset``, and ends with the file or after ``count`` bytes.
    The position in the file is behind what was sent when this returns or raises. Nobody else may write meanwhile:
    ``write()`` raises RuntimeError, as it does while asyncio sends a file, and so does another ``sendfile()``.
    Receiving goes on; a protocol that answers from ``data_received()`` pauses reading first. With ``fallback=False``
    it raises ``asyncio.SendfileNotAvailableError``, since bytes pass through this process.

    Raises RuntimeError when the transport is closing or was told ``write_eof()``, the OSError that ended the
    connection, TypeError and ValueError for arguments that make no sense.

    Cancelling it leaves what it has written to go out.
    """
    if not isinstance(transport, RdmaTransport):
        raise TypeError(
            f"sendfile() takes an RdmaTransport, not {transport!r}: loop.sendfile() is for others"
        )
    _check(file, offset, count)
    if transport.is_closing():
        raise RuntimeError(f"{transport!r} is closing")
    if not fallback:
        raise asyncio.SendfileNotAvailableError("there is no way from a file to a device but by this process")
    read = _reader(file, offset)
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, count or _CHUNK_BYTES)))
    sent = 0
    try:
        with transport._for_file() as write:
            while count is None or sent < count:
                room = buffer if count is None else buffer[: count - sent]
                length = await read(room, offset + sent)
                if length == 0:
                    break
                await transport._until_room()
                write(room[:length])
                sent += length
    finally:
        file.seek(offset + sent)
    return sent


def _check(file: IO[bytes], offset: int, count: int | None) -> None:
    if "b" not in getattr(file, "mode", "b"):
        raise ValueError(f"{file!r} is not open in binary mode")
    if not isinstance(offset, int) or not isinstance(count, int | None):
        raise TypeError(f"offset={offset!r} and count={count!r} are numbers of bytes")
    if offset < 0 or (count is not None and count <= 0):
        raise ValueError(f"offset={offset!r} must not be negative, and count={count!r} must be positive")


def _reader(file: IO[bytes], offset: int) -> _Read:
    """How to read from the file without blocking the loop."""
    loop = asyncio.get_running_loop()
    try:
        fd = file.fileno()
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:  # io.UnsupportedOperation is one: there is no descriptor
        regular = False
    if not regular:
        file.seek(offset)
        return lambda room, _: loop.run_in_executor(None, file.readinto, room)  # type: ignore[attr-defined]

    async def read(room: memoryview, position: int) -> int:
        await asyncio.sleep(0)  # others have their turn, however fast the peer is
        try:
            return os.preadv(fd, [room], position, os.RWF_NOWAIT)
        except OSError:
            # It is not in the page cache, or the file system does not know: what is wrong else is found out there.
            return await loop.run_in_executor(None, os.preadv, fd, [room], position)

    return read
