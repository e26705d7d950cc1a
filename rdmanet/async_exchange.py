"""Queue pairs that are introduced to each other over a byte stream, where there is no connection manager.

    reader, writer = await asyncio.open_connection(host, port)
    peer = await exchange(qp, reader, writer)       # and so does the peer
    await qp.send(b"hello")

Theory
------
Each side has to know the other's queue pair before it can connect its own, and may not send before the other has
connected, too: a request for a queue pair that is not yet ready is lost and costs a time-out. So each side writes its
QPInfo and reads the peer's, connects, then writes that it has done so and reads the same of the peer. Both do the same
things in the same order, so there is neither a server nor a client in this; and whoever gets past the last
step knows that both are connected.

What is read comes from a stranger until it has been checked. Everything has one length, so nothing that a stranger says
makes us read more; what is no QPInfo, or another word, ends the attempt. The stream is the program's, before and after.
"""

from __future__ import annotations

from typing import Any, Protocol

from rdmanet._core import QP
from rdmanet.async_queues import AsyncQP
from rdmanet.errors import ProtocolError
from rdmanet.qpinfo import QPInfo

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
    """Connect a queue pair with the one for which the other end of a stream calls this as well.

    When it returns, both are connected, and either may send at once; receives for that are posted before, in INIT.

    It begins where the stream is, takes 38 bytes from it, and leaves it open. asyncio's streams do, over TCP or
    anything else, and any two objects with `readexactly()`, `write()` and `drain()`. Several queue pairs are introduced
    by as many calls, one after the other.

    Cancelled, or after an error, it may be that only one side is connected: close the stream, so that the peer learns
    of it, and the queue pair.

    :param qp: from RESET or INIT; not of datagrams, which have no peer
    :param port_num: this, sgid_index, psn and mtu are those of QP.info(): what the peer gets to know
    :param connecting: the other arguments of QP.connect(): access, timeout, retry_cnt ...
    :returns: what the peer has said of its queue pair
    :raises ProtocolError: the other end does not do the same
    :raises ConnectionResetError: the stream ended before both were connected
    :raises OSError: the device refused, or the stream failed
    """
    if isinstance(qp, AsyncQP):
        qp = qp.qp
    await _write(writer, bytes(qp.info(port_num=port_num, sgid_index=sgid_index, psn=psn, mtu=mtu)))
    said = await _read(reader, _INFO_BYTES)
    try:
        peer = QPInfo.from_bytes(said)
    except ValueError as exc:
        raise ProtocolError(f"the other end says {said!r}, which is no QPInfo: {exc}") from None
    qp.connect(peer, **connecting)
    await _write(writer, _CONNECTED)
    said = await _read(reader, len(_CONNECTED))
    if said != _CONNECTED:
        raise ProtocolError(f"the other end says {said!r} instead of {_CONNECTED!r}")
    return peer


async def _write(writer: _Writer, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _read(reader: _Reader, length: int) -> bytes:
    try:
        return await reader.readexactly(length)
    except EOFError:  # asyncio's IncompleteReadError is one
        raise ConnectionResetError("the stream ended before both queue pairs were connected") from None
