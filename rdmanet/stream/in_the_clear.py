"""What a connection has received in the clear when TLS begins on it, and nobody has read.

Theory
------
A program that agrees on TLS in the clear (STARTTLS) reads the peer's answer, and then begins. Whatever has come behind
that answer is the beginning of TLS: a peer may send its first record at once. But it may also be text that an attacker
on the way has inserted. If it stays in a StreamReader, the program reads it after the handshake, and takes it for what
TLS protects. So it leaves the reader and goes to TLS: if it is no record, the handshake fails. The same holds on every
transport: RDMA's, TCP's, and TLS's own, for TLS in TLS. (Newer Pythons' asyncio does so by itself, for the stream that
start_tls() is given; then nothing is left here.)

Bytes that a protocol was given, by data_received() or buffer_updated(), are the program's. Nobody can take these back.

This module loads no device: it is for connections by TCP, too.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any


def hand_over(before: Any, protocol: Any, below: Any) -> None:
    """TLS begins: give it what streams' readers have not read. It may not have had connection_made() yet.

    :param before: the protocol that the transport had
    :param protocol: the one that is to be above TLS; mostly the same
    :param below: an SSLProtocol of asyncio's or of uvloop's
    """
    feed(below, _take(before) + (b"" if protocol is before else _take(protocol)))


def feed(protocol: Any, data: bytes) -> None:
    """Give these bytes to a protocol that takes them by buffers of its own."""
    left = memoryview(data)
    while left:
        room = memoryview(protocol.get_buffer(len(left)))
        taken = min(len(room), len(left))
        room[:taken] = left[:taken]
        protocol.buffer_updated(taken)
        left = left[taken:]


def hand_over_by(transport: Any, before: Any, protocol: Any) -> None:
    """The same, when the loop's start_tls() has given the transport its SSLProtocol, and reading is paused."""
    below = transport.get_protocol()
    if below is not before:
        hand_over(before, protocol, below)


def _take(protocol: Any) -> bytes:
    """The unread bytes of a stream's protocol; b"" of others."""
    sink = getattr(protocol, "_rdma_sink", None)
    unread: bytes = b"" if sink is None else sink.take_unread()
    reader = getattr(protocol, "_stream_reader", None)
    if isinstance(reader, asyncio.StreamReader) and reader._buffer:  # type: ignore[attr-defined]
        unread += bytes(reader._buffer)  # type: ignore[attr-defined]
        reader._buffer.clear()  # type: ignore[attr-defined]
        reader._paused = False  # type: ignore[attr-defined]
    return unread


def tell_of_failure(
    transport: asyncio.BaseTransport, protocol: asyncio.StreamReaderProtocol, exc: BaseException
) -> None:
    """After start_tls(): tell a stream that its connection is lost, if it is.

    asyncio does not tell the protocol of all ends of a handshake, and wait_closed() would wait for ever.
    """
    if not transport.is_closing():
        return
    if not isinstance(exc, Exception):
        exc = ConnectionAbortedError(
            errno.ECONNABORTED, "start_tls() was cancelled, the connection is closed"
        )
    protocol.connection_lost(exc)
