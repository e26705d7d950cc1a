"""asyncio's SSLProtocol, but everything that has arrived is decrypted into a single bytes object.

TLS has records of at most 16 KiB. asyncio reads each into an object of its own, joins these, and asks for another until
an exception says that there is none. Here they are read one behind the other (_pyx/decrypting.pxi): a copy less, and
mostly no exception. That is all that differs.

The method that does it, and what it uses, are not in asyncio's manual. They are the same in Python 3.11 to 3.13. In a
Python whose SSLProtocol never calls it, connections work as asyncio's do.
"""

from __future__ import annotations

from asyncio.sslproto import SSLAgainErrors, SSLProtocol
from typing import Any

from rdmanet import _core


class Protocol(SSLProtocol):
    """SSLProtocol, which reads so for protocols that get bytes by data_received(), and for others as asyncio does."""

    _app_protocol: Any
    _call_eof_received: Any
    _do_read: Any
    _incoming: Any
    _loop: Any
    _sslobj: Any
    _start_shutdown: Any

    def _do_read__copied(self) -> None:
        data, is_closed = _core.decrypted(self._sslobj, self._incoming, SSLAgainErrors)
        if not is_closed and (self._incoming.pending or self._sslobj.pending()):
            self._loop.call_soon(self._do_read)  # it is longer than what it came in: it was compressed
        if data:
            self._app_protocol.data_received(data)
        if is_closed:
            self._call_eof_received()
            self._start_shutdown()


KINDS = (SSLProtocol, Protocol)
"""Those to whose MemoryBIO received bytes may go without their get_buffer()."""
