"""asyncio's SSLProtocol, but it reads faster, and a lost connection loses nothing that has arrived.

TLS has records of at most 16 KiB. asyncio reads each into an object of its own, joins these, and asks for another until
an exception says that there is none. Here they are read one behind the other (_pyx/decrypting.pxi): a copy less, and
mostly no exception.

By TCP, bytes that TLS does not take, because its application has paused reading, stay in the kernel, where they outlive
the peer. Here they have been received, and `connection_lost` is the last that TLS hears. So what is left is read then.
And a peer that has ended TLS properly (close_notify), and aborts because we go on writing, has said all that it had to
say. By TCP who reads hears of no error then. (Who writes learns that the connection is lost, here as there.)

asyncio aborts the transport below if the peer sends on after we have closed. By TCP the kernel still delivers what was
written before. Here the transport is closed instead, which does the same.

When a handshake fails, OpenSSL has an alert for the peer: a certificate is missing, has expired, or is of nobody whom
we trust. asyncio drops it, so the peer learns only that it was reset. Here it is written, and the connection ends in
the loop's next turn, when the alert is on its way. The application hears of a peer's alert, and not of the loss that
follows it.

Python 3.11 cannot end TLS in TLS by an error: the transport that TLS has there (its face, see tls.py) passes the error
on to a method that takes none. A handshake that failed, or a close() that the peer did not answer, never ended. Here
such a transport is aborted.

What does this, and what it uses, is not in asyncio's manual. It is the same in Python 3.11 to 3.13. In a Python whose
SSLProtocol has no such methods, connections work as asyncio's do.
"""

from __future__ import annotations

import inspect
import ssl
from asyncio.sslproto import (
    AppProtocolState,
    SSLAgainErrors,
    SSLProtocol,
    SSLProtocolState,
    _SSLProtocolTransport,
)
from typing import Any

from rdmanet import _core

_IS_ENDED_BY_ERRORS = len(inspect.signature(SSLProtocol._abort).parameters) > 1
"""Whether TLS's face can be, as a transport: since Python 3.12."""


class Protocol(SSLProtocol):
    """SSLProtocol, which reads so for protocols that get bytes by data_received(), and for others as asyncio does."""

    _app_protocol: Any
    _app_reading_paused: bool
    _app_state: Any
    _call_eof_received: Any
    _eof_received: bool
    _do_read: Any
    _incoming: Any
    _loop: Any
    _outgoing: Any
    _sslobj: Any
    _start_shutdown: Any
    _state: Any
    _transport: Any

    _peer_goes_on = False
    _tls_error: ssl.SSLError | None = None

    def _do_read__copied(self) -> None:
        data, is_closed = _core.decrypted(self._sslobj, self._incoming, SSLAgainErrors)
        if not is_closed and (self._incoming.pending or self._sslobj.pending()):
            self._loop.call_soon(self._do_read)  # it is longer than what it came in: it was compressed
        if data:
            self._app_protocol.data_received(data)
        if is_closed:
            self._call_eof_received()
            self._start_shutdown()

    def eof_received(self) -> Any:  # typeshed says None, but it may be True
        if self._tls_error is not None:
            return None  # it is reported in the next turn; meanwhile the base would report a good end
        return super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._read_the_rest()
        has_all = self._app_state is AppProtocolState.STATE_EOF and not self._eof_received  # it is TLS's end
        told, self._tls_error = self._tls_error, None
        super().connection_lost(None if has_all else told or exc)

    def _read_the_rest(self) -> None:
        """Read all that has arrived. For a BufferedProtocol asyncio fills one buffer, and goes on in the next turn."""
        left = None
        while self._state in (SSLProtocolState.WRAPPED, SSLProtocolState.FLUSHING):
            now = self._incoming.pending, self._sslobj.pending()
            if not any(now) or now == left:
                return
            left = now
            self._app_reading_paused = False
            self._do_read()

    def _fatal_error(self, exc: BaseException, message: str = "Fatal error on transport") -> None:
        below = self._transport
        if isinstance(exc, ssl.SSLError) and below is not None:  # otherwise connection_lost() has told it
            self._tls_error = self._tls_error or exc
            if alert := self._outgoing.read():
                below.write(alert)
                self._loop.call_soon(self._fatal_error, exc, message)
                return
        is_to_abort = not _IS_ENDED_BY_ERRORS and isinstance(below, _SSLProtocolTransport)
        if is_to_abort:
            self._transport = None  # the base only reports the error
        super()._fatal_error(exc, message)
        if is_to_abort:
            self._transport = below
            below.abort()

    def _check_shutdown_timeout(self) -> None:
        is_late = self._state in (SSLProtocolState.FLUSHING, SSLProtocolState.SHUTDOWN)
        if is_late and not _IS_ENDED_BY_ERRORS and isinstance(self._transport, _SSLProtocolTransport):
            self._transport.abort()
        else:
            super()._check_shutdown_timeout()  # type: ignore[misc]

    def _on_shutdown_complete(self, shutdown_exc: Exception | None) -> None:
        if getattr(shutdown_exc, "reason", "") == "APPLICATION_DATA_AFTER_CLOSE_NOTIFY":
            self._peer_goes_on = True
        if self._peer_goes_on:
            shutdown_exc = None  # nobody is there to read it, and OpenSSL has another error for each time
        super()._on_shutdown_complete(shutdown_exc)  # type: ignore[misc]


KINDS = (SSLProtocol, Protocol)
"""Those to whose MemoryBIO received bytes may go without their get_buffer()."""
