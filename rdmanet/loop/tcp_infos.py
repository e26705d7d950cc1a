"""What is known of connections that a switched loop has by TCP: their `ConnectionInfo` (base/accounts.py).

asyncio's loop knows its transports; uvloop's does not tell, so those that annotation.py has made are remembered. The
rest comes from the kernel when somebody asks (tcp(7): TCP_INFO, SIOCOUTQ, SIOCINQ): no connection pays for it before.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import weakref
from collections.abc import Iterator
from typing import Any

from rdmanet.base.accounts import ConnectionInfo, Place, rows_of
from rdmanet.loop.annotation import BY_CLIENT

# struct tcp_info: milliseconds since data was sent and received; bytes that were received, not sent yet, sent, and sent
# again (since Linux 4.19).
_LAST = struct.Struct("=44xI4xI")
_BYTES = struct.Struct("=128xQ8xI52xQQ")
_INFO_BYTES = 256
_INT = struct.Struct("i")


def tcp_infos(loop: Any, made: weakref.WeakValueDictionary[int, Any]) -> Iterator[ConnectionInfo]:
    """The connections of a loop by TCP.

    :param made: the transports that were made for a loop which does not tell
    """
    for transport in tcp_transports(loop, made):
        info = _info_of(transport)
        if info is not None:
            yield info


def tcp_rows(
    loop: Any, made: weakref.WeakValueDictionary[int, Any]
) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
    """The same as rows, with the names of their counters."""
    return rows_of(tcp_infos(loop, made))


def tcp_sides(loop: Any, made: weakref.WeakValueDictionary[int, Any]) -> Iterator[str]:
    """The side of each; the kernel is not asked, so one that somebody keeps is counted until that knows of its end."""
    return (_side(transport) for transport in tcp_transports(loop, made) if not transport.is_closing())


def tcp_transports(loop: Any, made: weakref.WeakValueDictionary[int, Any]) -> Iterator[Any]:
    """The transports themselves."""
    known: Any = getattr(loop, "_transports", made)
    for each in known.valuerefs():
        transport = each()
        if transport is not None and transport.get_extra_info("fabric") == "tcp":
            yield transport


def _side(transport: Any) -> str:
    return "server" if transport.get_extra_info("fabric_reason") == BY_CLIENT else "client"


def _info_of(transport: Any) -> ConnectionInfo | None:
    """None if it has ended, and somebody keeps it."""
    reason = transport.get_extra_info("fabric_reason") or ""
    info = ConnectionInfo(
        fabric="tcp",
        reason=reason,
        role=_side(transport),
        local=_place(transport.get_extra_info("sockname")),
        peer=_place(transport.get_extra_info("peername")),
        state="closing" if transport.is_closing() else "open",
        reading=transport.is_reading(),
        stats={"bytes_unsent": transport.get_write_buffer_size()},
    )
    try:
        info.stats |= _by_kernel(transport.get_extra_info("socket").fileno(), info.peer)
    except (OSError, ValueError, AttributeError):
        return None
    info.transport = transport  # type: ignore[misc]
    return info


class _Borrowed(socket.SocketType):
    """A socket of a descriptor that is somebody else's: it is never closed, whatever ends the function that asks."""

    __del__ = socket.SocketType.detach


def _by_kernel(fd: int, peer: Place | None) -> dict[str, int]:
    """:raises OSError: it is not connected to this peer any more"""
    sock = _Borrowed(fileno=fd)
    if _place(sock.getpeername()) != peer:
        raise ConnectionResetError
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    in_kernel, unread = (_asked(fd, question) for question in (termios.TIOCOUTQ, termios.FIONREAD))
    stats = {"bytes_in_kernel": in_kernel, "bytes_unread": unread}
    if len(told) >= _BYTES.size:
        received, not_sent, sent, again = _BYTES.unpack_from(told)
        sent_ms, heard_ms = _LAST.unpack_from(told)
        stats |= {"bytes_sent": sent - again + not_sent, "bytes_received": received}
        stats |= {"us_since_sent": sent_ms * 1000, "us_since_received": heard_ms * 1000}
    return stats


def _asked(fd: int, question: int) -> int:
    number: int = _INT.unpack(fcntl.ioctl(fd, question, bytes(_INT.size)))[0]
    return number


def _place(address: Any) -> Place | None:
    return (address[0], address[1]) if isinstance(address, tuple) and len(address) >= 2 else None
