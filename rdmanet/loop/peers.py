"""Which peers may be reached by RDMA: the patterns of ``peers=`` and RDMANET_PEERS.

A pattern is ``HOST``, ``HOST:PORT``, ``NETWORK`` or ``NETWORK:PORT``; an IPv6 address or network with a port is in
brackets. ``*`` is any host, or any port, and a host name may contain ``*``. ``!`` before a pattern excludes. ``auto``
is the default: it selects what is sure to be safe (see doors.py and choice.py). An exclusion always wins.

    auto                              the default
    auto !*:5432                      the same, but never port 5432
    10.1.0.0/16 db*.example.org:6379  these, whatever it costs
    !*                                nobody
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ipaddress  # imported with the first pattern that has an address: most programs have none

AUTO = "auto"


class Selection(Enum):
    """What the patterns say about a peer."""

    EXCLUDED = "excluded"
    AUTO = "auto"
    """RDMA, if it is certain that the peer expects it and that it is faster."""
    NAMED = "named"
    """RDMA, if the peer expects it."""


class _Pattern:
    def __init__(
        self, host: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network | None, port: int | None
    ) -> None:
        self.host, self.network, self.port = host, network, port

    def matches(self, host: str, address: str, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is not None:
            import ipaddress

            ip = ipaddress.ip_address(address.partition("%")[0])
            return ip in self.network
        return self.host == "*" or fnmatch.fnmatch(host.lower(), self.host)


class Peers:
    """The patterns, read once.

    :ivar words: as they were given
    """

    def __init__(self, patterns: str | Iterable[str] | None = None) -> None:
        """
        :param patterns: as text, separated by spaces or commas, or one by one; None means ``auto``
        :raises ValueError: a pattern makes no sense
        """
        words = patterns.replace(",", " ").split() if isinstance(patterns, str) else list(patterns or ())
        self.words = tuple(words)
        self._excluded = [_read(word[1:]) for word in words if word.startswith("!")]
        selected = [word for word in words if not word.startswith("!")]
        self._auto = AUTO in selected or not selected
        self._named = [_read(word) for word in selected if word != AUTO]
        self._everybody = not self._excluded and not self._named

    def select(self, host: str, address: str, port: int) -> Selection:
        """What the patterns say about a peer.

        :param host: its name, as the program gave it
        :param address: its IP address
        """
        if self._everybody:
            return Selection.AUTO
        if any(pattern.matches(host, address, port) for pattern in self._excluded):
            return Selection.EXCLUDED
        if any(pattern.matches(host, address, port) for pattern in self._named):
            return Selection.NAMED
        return Selection.AUTO if self._auto else Selection.EXCLUDED

    def exclude(self, address: str, port: int) -> bool:
        """Whether a `!` pattern matches this address and port: for servers, whose clients are not known yet."""
        return any(pattern.matches(address, address, port) for pattern in self._excluded)


def _read(text: str) -> _Pattern:
    host, port = _split(text)
    if not host:
        raise ValueError(f"peers: {text!r} has no host; write *{text} for any")
    number: int | None = None
    if port not in ("", "*"):
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"peers: {text!r} has no port from 1 to 65535; * is any")
        number = int(port)
    network = None
    if "/" in host or _is_address(host):
        import ipaddress

        try:
            network = ipaddress.ip_network(host, strict=False)
        except ValueError as exc:
            raise ValueError(f"peers: {text!r} is no network: {exc}") from None
    return _Pattern(host.lower(), network, number)


def _split(text: str) -> tuple[str, str]:
    """Host and port; "" for no port."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"peers: {text!r} is not of the form [ADDRESS]:PORT")
        return host, rest[1:]
    if text.count(":") > 1:  # an IPv6 address or network without a port
        if not _is_address(text.partition("/")[0]):
            raise ValueError(
                f"peers: {text!r} is no IPv6 address, and a host has one port at most: "
                "write HOST:PORT or [ADDRESS]:PORT"
            )
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
