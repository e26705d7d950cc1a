"""What one side lets the other side make it do and remember, and the errors that name a limit.

Each side has limits of its own, and says in its Hello those that the other side can keep to. A side that keeps to them
gets an error of its own before anything is sent. What a peer sends beyond them is refused for that call alone
(RESOURCE_EXHAUSTED) where the call can be told apart, and ends the connection where it cannot.
"""

from __future__ import annotations

import math
import os
from typing import Final

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.errors import Code, Error, own
from rdmanet.rpc.messages import MESSAGE_BYTES_LEAST

__all__ = ["Limits"]

NUMBERS: Final = 1 << 32
"""Calls and methods have numbers of 32 bits."""


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one side of a connection. Those named ``server_`` are for all connections of a server together.

    When one of these is reached, each connection may still have a share: as much again is divided among the peers that
    are connected, and the part of each among its connections; one call it may always have. A peer is a user of this
    host, or an address of another host (of IPv6, a /48).

    :ivar message_bytes: the longest message that is received. It bounds arguments and results that go inline
    :ivar decoded_bytes: how much memory the objects may take that one message becomes, beside its texts and bytes: it
        is estimated before they are made
    :ivar calls: calls of one connection that may be unfinished at a time, in each direction
    :ivar server_calls: the same for a server
    :ivar objects: service objects that may be lent on one connection at a time: those that this side lends, and those
        that it gets
    :ivar stream_bytes: how much of a stream may be on its way or unread; one item more than that may be
    :ivar inline_bytes: how many bytes all unfinished calls of one connection may have of what comes and goes in
        messages: arguments, items that were not taken, results that the peer does not read
    :ivar lent_bytes: the same of what goes by reference: memory that is allocated for arguments, and results on loan,
        copied or not. It bounds one argument, too
    :ivar server_bytes: how many bytes of both kinds there may be in a server, and in messages that have not come to
        their ends. The default is a quarter of the host's memory
    :ivar metadata_bytes: the longest metadata of a call, in msgpack; and so of what its method says beside the result
    :ivar stream_seconds: how long a method waits for an item of its caller's stream while none goes the other way,
        either. Then the call ends with DEADLINE_EXCEEDED
    :ivar hello_seconds: how long a peer may take to say its Hello
    :ivar lent_seconds: how long a caller may take to read a result that is lent to it, and to offer the memory of an
        argument; and how long nothing may come of memory that this side reads. Then the connection ends
    """

    message_bytes: int = 256 << 20
    decoded_bytes: int = 64 << 20
    calls: int = 1024
    server_calls: int = 16384
    objects: int = 64
    stream_bytes: int = 256 << 10
    inline_bytes: int = 1 << 30
    lent_bytes: int = 4 << 30
    server_bytes: int = msgspec.field(default_factory=_quarter_of_memory)
    metadata_bytes: int = 8 << 10
    stream_seconds: float = 300.0
    hello_seconds: float = 10.0
    lent_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "message_bytes",
            "decoded_bytes",
            "calls",
            "server_calls",
            "objects",
            "stream_bytes",
            "inline_bytes",
            "lent_bytes",
            "server_bytes",
            "metadata_bytes",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < 1 << 53:
                raise ValueError(f"Limits: {name}={shown(value)} is not a whole number of 1 or more")
        if not MESSAGE_BYTES_LEAST <= self.message_bytes < NUMBERS:
            raise ValueError(
                f"Limits: message_bytes={self.message_bytes} is not between {MESSAGE_BYTES_LEAST} and {NUMBERS - 1}"
            )
        if not self.calls < NUMBERS:
            raise ValueError(f"Limits: calls={self.calls} is more than {NUMBERS - 1}")
        for name in ("stream_seconds", "hello_seconds", "lent_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits: {name}={shown(getattr(self, name))} is not more than 0 seconds")


DEFAULT: Final = Limits()

_LONGEST_S: Final = ((1 << 53) - 1) / 1e6
"""285 years: what a Call can say."""


def seconds(timeout: float | None) -> float | None:
    """A time-out of the program's; None for one that never ends.

    :raises TypeError: it is no number
    :raises ValueError: it is NaN
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={shown(timeout)} is no number of seconds")
    if math.isnan(timeout):
        raise ValueError("timeout=nan is no number of seconds")
    return max(0, timeout) if timeout < _LONGEST_S else None


def exceeded(name: str, limit: int, what: str) -> Error:
    """The error for one thing too many, or too large: it names the limit and how to change it.

    :param name: the field of `Limits`
    :param what: what there would be, with its number
    """
    return own(Error(Code.RESOURCE_EXHAUSTED, f"{what}: the limit {name} is {limit}"))
