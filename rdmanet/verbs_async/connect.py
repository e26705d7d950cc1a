"""Connect two queue pairs without a connection manager: they exchange their addresses over a byte stream.

    reader, writer = await asyncio.open_connection(host, port)
    peer = await exchange(qp, reader, writer)       # and so does the peer
    await qp.send(b"hello")

Theory
------
Each side must know the peer's queue pair before it can connect its own, and must not send before the peer has
connected as well: a request for a queue pair that is not yet ready is lost, and costs a timeout. So each side writes
its QPInfo and reads the peer's, connects, writes that it has connected, and reads the same from the peer. Both sides
take the same steps in the same order, so neither is the server; and a side that completes the last step knows that
both are connected.

Input is untrusted until it has been checked. Every message has a fixed length, so no peer can make us read more; a
message that is not a QPInfo, or not the expected word, ends the attempt. The stream belongs to the program, before and
after.
"""

from __future__ import annotations

from typing import Any, Protocol

from rdmanet._core import QP
from rdmanet.errors import ProtocolError
from rdmanet.verbs_async.queues import AsyncQP
from rdmanet.wire.qpinfo import QPInfo

__all__ = ["exchange"]

_INFO_BYTES = len(bytes(QPInfo(0)))
_CONNECTED = b"connected\n"


class _Reader(Protocol):
    async def readexactly(self, n: int, /) -> bytes: ...


class _Writer(Protocol):
    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...


async def exchange(
    qp: AsyncQP | QP,
    reader: _Reader,
    writer: _Writer,
    *,
    port_num: int = 1,
    sgid_index: int | None = None,
    psn: int | None = None,
    mtu: int | None = None,
    **connecting: Any,
) -> QPInfo:
    """Connect a queue pair with that of the peer, which calls this at the other end of the stream.

    When it returns, both queue pairs are connected and either side may send at once. Post receives before, in INIT.

    It reads 38 bytes from the stream and leaves the stream open. asyncio's streams will do, over TCP or anything else,
    and so will any two objects with `readexactly()`, `write()` and `drain()`. For several queue pairs call it several
    times, one after the other.

    After a cancellation or an error possibly only one side is connected: close the queue pair, and the stream, so that
    the peer learns of it.

    :param qp: in RESET or INIT; not a datagram queue pair, which has no peer
    :param port_num: like sgid_index, psn and mtu an argument of QP.info(): what the peer is told
    :param connecting: the other arguments of QP.connect(): access, timeout, retry_cnt ...
    :returns: the QPInfo of the peer's queue pair
    :raises ProtocolError: the peer sent something else
    :raises ConnectionResetError: the stream ended before both queue pairs were connected
    :raises OSError: the device refused, or the stream failed
    """
    if isinstance(qp, AsyncQP):
        qp = qp.qp
    await _write(writer, bytes(qp.info(port_num=port_num, sgid_index=sgid_index, psn=psn, mtu=mtu)))
    said = await _read(reader, _INFO_BYTES)
    try:
        peer = QPInfo.from_bytes(said)
    except ValueError as exc:
        raise ProtocolError(f"the peer sent {said!r}, which is not a QPInfo: {exc}") from None
    qp.connect(peer, **connecting)
    await _write(writer, _CONNECTED)
    said = await _read(reader, len(_CONNECTED))
    if said != _CONNECTED:
        raise ProtocolError(f"the peer sent {said!r} instead of {_CONNECTED!r}")
    return peer


async def _write(writer: _Writer, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _read(reader: _Reader, length: int) -> bytes:
    try:
        return await reader.readexactly(length)
    except EOFError:  # asyncio's IncompleteReadError is one
        raise ConnectionResetError("the stream ended before both queue pairs were connected") from None
