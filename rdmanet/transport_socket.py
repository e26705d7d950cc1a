"""What programs find where they look for a socket: ``get_extra_info("socket")``, and a server's ``sockets``.

There is none. What they ask of it has an answer nevertheless: addresses, options, whether there is something to read.
The names and the refusals are those of asyncio's own stand-in, ``asyncio.trsock.TransportSocket``.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import weakref
from typing import Any, NoReturn, Protocol

from rdmanet.addresses import SockAddr


class Connected(Protocol):
    """The connection behind it: a transport."""

    def _readiness_fd(self) -> int: ...

    def is_closing(self) -> bool: ...

    def write_eof(self) -> None: ...

    def close(self) -> None: ...


class RdmaSocket:
    """Stands where a socket would, of a connection or of a listener; asyncio's TransportSocket, method by method."""

    __slots__ = ("_options", "_peername", "_sockname", "_transport", "family")

    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(
        self, sockname: SockAddr, peername: SockAddr | None = None, transport: Connected | None = None
    ) -> None:
        self._sockname = sockname
        self._peername = peername
        # Not to keep it alive: the transport keeps us.
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
        """A descriptor that ``poll()`` finds readable while received bytes are not delivered, and from the end on.

        The end is the peer's end of file, the loss of the connection, or ``close()``. It is made at the first call,
        and closed with the connection: -1 from then on, for listeners, and in a forked child. What has arrived until
        now is seen by this call; what comes later, when the event loop comes round: do not block the loop to wait for
        it. It carries no data: reading and writing it fail with EINVAL, in a subprocess too.

        :raises OSError: there are no descriptors left
        """
        connection = self._connection()
        return -1 if connection is None else connection._readiness_fd()

    def setsockopt(self, level: int, option: int, value: Any = None, length: int | None = None) -> None:
        """Remembered, and without effect: this transport always sends at once, and notices itself who has died."""
        self._options[level, option] = (
            bytes(length or 0) if value is None else value if isinstance(value, int) else bytes(value)
        )

    def getsockopt(self, level: int, option: int, length: int = 0) -> int | bytes:
        """What was set; 1 for TCP_NODELAY, always; 0 else. With ``length`` as so many bytes at most."""
        value = self._truths().get((level, option), self._options.get((level, option), 0))
        if length:
            return (value.to_bytes(4, sys.byteorder, signed=True) if isinstance(value, int) else value)[
                :length
            ]
        return value if isinstance(value, int) else int.from_bytes(value[:4], sys.byteorder, signed=True)

    def _truths(self) -> dict[tuple[int, int], int]:
        """Options that are as they are."""
        return {
            (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
            (socket.SOL_SOCKET, socket.SO_TYPE): self.type,
            (socket.SOL_SOCKET, socket.SO_PROTOCOL): self.proto,
            (socket.SOL_SOCKET, socket.SO_DOMAIN): self.family,
            (socket.SOL_SOCKET, socket.SO_ACCEPTCONN): int(self._peername is None),
        }

    def shutdown(self, how: int) -> None:
        """``SHUT_WR``: the transport's ``write_eof()``. ``SHUT_RDWR``: its ``close()``.

        :raises OSError: ``SHUT_RD`` (EOPNOTSUPP); not connected, any more or at all (ENOTCONN)
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
                "an RDMA connection's receiving half cannot be shut down: pause_reading(), or close()",
            )
        else:
            raise OSError(errno.EINVAL, f"shutdown({how!r}): SHUT_WR or SHUT_RDWR")

    def dup(self) -> NoReturn:
        """There is no socket to duplicate.

        :raises OSError: always (EOPNOTSUPP)
        """
        raise OSError(
            errno.EOPNOTSUPP,
            "an RDMA connection cannot be duplicated, it has no socket: pass its transport on, "
            "with a protocol of the new user's by set_protocol()",
        )

    def get_inheritable(self) -> bool:
        """False: no child process has a part in it."""
        return False

    def settimeout(self, value: float | None) -> None:
        """0 is accepted.

        :raises ValueError: anything else: a transport does not block
        """
        if value != 0:
            raise ValueError("settimeout(): only 0 timeout is allowed on transport sockets")

    def gettimeout(self) -> float | None:
        """0: it does not block."""
        return 0

    def setblocking(self, flag: bool) -> None:
        """False is accepted.

        :raises ValueError: true: a transport does not block
        """
        if flag:
            raise ValueError("setblocking(): transport sockets cannot be blocking")

    def _connection(self) -> Connected | None:
        return None if self._transport is None else self._transport()

    def __getstate__(self) -> NoReturn:
        raise TypeError("an RdmaSocket cannot be serialized: its connection is this process's")

    def __repr__(self) -> str:
        return f"<RdmaSocket laddr={self._sockname} raddr={self._peername}>"
