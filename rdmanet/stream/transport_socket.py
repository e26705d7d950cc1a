"""A substitute for the socket that programs ask for: ``get_extra_info("socket")``, and a server's ``sockets``.

There is no socket, but this object answers what programs ask of one: addresses, options, whether there is something to
read. It has the methods of asyncio's own substitute, ``asyncio.trsock.TransportSocket``, and refuses the same ones.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import weakref
from typing import Any, NoReturn, Protocol

from rdmanet.errors import shown
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.options import KEEPALIVE_COUNT_MOST, KEEPALIVE_MOST_S

_KEEPALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): (0, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): (1, KEEPALIVE_MOST_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): (2, KEEPALIVE_MOST_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): (3, KEEPALIVE_COUNT_MOST),
}
"""Options of the keep-alive: which of its settings they are, and the most that they can be."""
_BUFFERS = ((socket.SOL_SOCKET, socket.SO_RCVBUF), (socket.SOL_SOCKET, socket.SO_SNDBUF))


class Connected(Protocol):
    """The connection that it belongs to: a transport."""

    def _readiness_fd(self) -> int: ...

    def is_closing(self) -> bool: ...

    def write_eof(self) -> None: ...

    def close(self) -> None: ...

    def _kept_alive(self) -> tuple[bool, float, float, int]: ...

    def _keep_alive(self, on: bool, idle: float, interval: float, count: int) -> None: ...

    def _ring_bytes(self) -> int: ...


class RdmaSocket:
    """The substitute for the socket of a connection or a listener; asyncio's TransportSocket, method by method."""

    __slots__ = ("_options", "_peername", "_sockname", "_transport", "family")

    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(
        self, sockname: SockAddr, peername: SockAddr | None = None, transport: Connected | None = None
    ) -> None:
        self._sockname = sockname
        self._peername = peername
        # A weak reference: the transport holds this object.
        self._transport = None if transport is None else weakref.ref(transport)
        self._options: dict[tuple[int, int], int | bytes] = {}
        self.family = socket.AF_INET6 if len(sockname) == 4 else socket.AF_INET

    def getsockname(self) -> SockAddr:
        """The local address."""
        return self._sockname

    def getpeername(self) -> SockAddr:
        """The peer's address; OSError(ENOTCONN) on a listener."""
        if self._peername is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._peername

    def fileno(self) -> int:
        """A descriptor that ``poll()`` reports readable while received bytes wait for delivery, and after the end.

        The end is the peer's end of file, the loss of the connection, or ``close()``. The first call creates the
        descriptor; it is closed with the connection. It is -1 after that, for listeners, and in a forked child. This
        call takes into account what has arrived so far; the event loop must run for later bytes to be seen, so do not
        block the loop to wait for them. The descriptor carries no data: reading or writing it fails with EINVAL, also
        in a subprocess.

        :raises OSError: no descriptors are left
        """
        connection = self._connection()
        return -1 if connection is None else connection._readiness_fd()

    def setsockopt(self, level: int, option: int, value: Any = None, length: int | None = None) -> None:
        """SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL and TCP_KEEPCNT do what they do with TCP, in whole seconds.

        Other options, and all of listeners, are stored and have no effect: this transport always sends at once, and
        its ring is as large as ``slot_bytes`` and ``data_slots`` said when it was made.

        :raises OSError: a time or a count is out of TCP's range (EINVAL)
        """
        if (connection := self._kept_alive()) is not None and (level, option) in _KEEPALIVE:
            number = value if isinstance(value, int) else int.from_bytes(bytes(value or b""), sys.byteorder)
            settings: list[Any] = list(connection._kept_alive())
            place, most = _KEEPALIVE[level, option]
            if place and not 1 <= number <= most:
                raise OSError(errno.EINVAL, f"setsockopt: {number} is not between 1 and {most}")
            settings[place] = number if place else bool(number)
            connection._keep_alive(*settings)
            return
        self._options[level, option] = (
            bytes(length or 0) if value is None else value if isinstance(value, int) else bytes(value)
        )

    def getsockopt(self, level: int, option: int, length: int = 0) -> int | bytes:
        """The value that was set, or 0; what is so for some. With ``length``, as at most that many bytes.

        TCP_NODELAY is always 1. SO_RCVBUF and SO_SNDBUF of a connection are ``slot_bytes * data_slots``, whatever was
        set: its ring takes in so many bytes when it has grown, and up to so many are with the device and no longer in
        ``get_write_buffer_size()``.
        """
        value = self._truths().get((level, option), self._options.get((level, option), 0))
        if length:
            return (value.to_bytes(4, sys.byteorder, signed=True) if isinstance(value, int) else value)[
                :length
            ]
        return value if isinstance(value, int) else int.from_bytes(value[:4], sys.byteorder, signed=True)

    def _truths(self) -> dict[tuple[int, int], int]:
        """Options that are what they are, whatever was set."""
        connection = self._kept_alive()
        kept = () if connection is None else connection._kept_alive()
        ring = {} if connection is None else dict.fromkeys(_BUFFERS, connection._ring_bytes())
        return {
            **{key: math.ceil(kept[place]) for key, (place, _) in _KEEPALIVE.items() if kept},
            **ring,
            (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
            (socket.SOL_SOCKET, socket.SO_TYPE): self.type,
            (socket.SOL_SOCKET, socket.SO_PROTOCOL): self.proto,
            (socket.SOL_SOCKET, socket.SO_DOMAIN): self.family,
            (socket.SOL_SOCKET, socket.SO_ACCEPTCONN): int(self._peername is None),
        }

    def shutdown(self, how: int) -> None:
        """``SHUT_WR``: the transport's ``write_eof()``. ``SHUT_RDWR``: its ``close()``.

        :raises OSError: ``SHUT_RD`` (EOPNOTSUPP); not connected, or no longer (ENOTCONN)
        """
        connection = self._connection()
        if connection is None or connection.is_closing():
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how == socket.SHUT_WR:
            connection.write_eof()
        elif how == socket.SHUT_RDWR:
            connection.close()
        elif how == socket.SHUT_RD:
            raise OSError(
                errno.EOPNOTSUPP,
                "the receiving half of an RDMA connection cannot be shut down: use pause_reading() or close()",
            )
        else:
            raise OSError(errno.EINVAL, f"shutdown({shown(how)}): use SHUT_WR or SHUT_RDWR")

    def dup(self) -> NoReturn:
        """There is no socket to duplicate.

        :raises OSError: always (EOPNOTSUPP)
        """
        raise OSError(
            errno.EOPNOTSUPP,
            "an RDMA connection has no socket that could be duplicated: hand over its transport, "
            "and give it another protocol by set_protocol()",
        )

    def get_inheritable(self) -> bool:
        """False: child processes do not inherit it."""
        return False

    def settimeout(self, value: float | None) -> None:
        """0 is accepted.

        :raises ValueError: value is not 0: a transport does not block
        """
        if value != 0:
            raise ValueError("settimeout(): only 0 timeout is allowed on transport sockets")

    def gettimeout(self) -> float | None:
        """Always 0: it does not block."""
        return 0

    def setblocking(self, flag: bool) -> None:
        """False is accepted.

        :raises ValueError: flag is true: a transport does not block
        """
        if flag:
            raise ValueError("setblocking(): transport sockets cannot be blocking")

    def _kept_alive(self) -> Connected | None:
        """The connection, if it has a keep-alive."""
        connection = self._connection()
        return connection if connection is not None and hasattr(connection, "_keep_alive") else None

    def _connection(self) -> Connected | None:
        return None if self._transport is None else self._transport()

    def __getstate__(self) -> NoReturn:
        raise TypeError("an RdmaSocket cannot be serialized: its connection belongs to this process")

    def __repr__(self) -> str:
        return f"<RdmaSocket laddr={self._sockname} raddr={self._peername}>"
