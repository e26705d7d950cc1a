"""Who is at the other end of a connection that a server has: what the transport, the kernel and TLS say of it.

Of this, an address may be another's, by a proxy, and a user's number is that of this host. What a caller says of
itself, its metadata, is not in here.
"""

from __future__ import annotations

import asyncio
import datetime  # noqa: F401  before msgspec, see credit.py
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["Peer"]

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred


class Peer(msgspec.Struct, frozen=True):
    """Who calls. Its text is that of the address.

    :ivar address: as ``get_extra_info("peername")`` of asyncio: of a Unix socket mostly an empty text
    :ivar transport: "rdma", "tcp", "unix" or "memory"; for the last, user, group and process are our own
    :ivar certificate: that which it has shown by TLS, and the server's context has verified, as
        ``ssl.SSLSocket.getpeercert()``: with its "subject", its "subjectAltName", and the "issuer" who has signed it.
        None: there is none, or it is not asked for (``ssl.CERT_REQUIRED``)
    :ivar user: the number of its user, if it is on this host, and the kernel says so: over Unix sockets, and over the
        embedded device. None: nobody knows
    :ivar group: that of its group, over Unix sockets
    :ivar process: that of the process that has connected, over Unix sockets, if it can be seen from here. It may have
        ended since, and another have its number
    """

    address: Any
    transport: str
    certificate: Mapping[str, Any] | None = None
    user: int | None = None
    group: int | None = None
    process: int | None = None

    def __str__(self) -> str:
        return str(self.address)


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """Who is at the other end of this connection."""
    asked = transport.get_extra_info("outer", transport).get_extra_info
    process = group = None
    user, sock = asked("rdma_peer_user"), asked("socket")
    if (kind := asked("fabric")) == "memory":
        process, user, group = os.getpid(), os.getuid(), os.getgid()
    elif kind == "rdma":
        pass
    elif sock is not None and sock.family == socket.AF_UNIX:
        kind = "unix"
        known = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, group = _CREDENTIALS.unpack(known)
        process = process or None  # of another PID namespace, which has no number here
    else:
        kind = "tcp"
    return Peer(asked("peername"), kind, asked("peercert") or None, user, group, process)
