"""The scope of an IPv6 address: the interface on which a link-local address is meant, as in fe80::1%eth0.

The same link-local address may be on every interface, so without the scope it says nothing. uvloop's getaddrinfo()
loses the scope of numeric addresses if it is asked for one kind of socket. So it is taken from the text here.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Any


def scope_of(host: str | bytes | bytearray | None) -> int:
    """The number of the interface that a host names after its "%"; 0 if it names none.

    :raises OSError: there is no such interface (ENODEV)
    """
    if not isinstance(host, str) or "%" not in host:
        return 0
    name = host.partition("%")[2]
    try:
        scope = int(name) if name.isascii() and name.isdecimal() else socket.if_nametoindex(name)
    except (OSError, ValueError):
        scope = 0
    if not 0 < scope < 1 << 32:
        raise OSError(errno.ENODEV, f"{host}: this host has no interface {name!r}")
    return scope


def with_scope(host: str | bytes | bytearray | None, addresses: Iterable[Any]) -> list[Any]:
    """What a resolver has found for a host, without duplicates, and with the scope that the host names."""
    found = list(dict.fromkeys(addresses))
    if not any(len(address) == 4 and not address[3] for address in found):
        return found
    scope = scope_of(host)
    return [(*address[:3], scope) if len(address) == 4 and not address[3] else address for address in found]
