"""What one side lets the other side make it do and remember, and the errors that name a limit.

Each side has limits of its own, and says in its Hello those that the other side can keep to. A side that keeps to them
gets an error of its own before anything is sent. What a peer sends beyond them is refused for that call alone
(RESOURCE_EXHAUSTED) where the call can be told apart, and ends the connection where it cannot.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.messages import MESSAGE_BYTES_LEAST

__all__ = ["Limits"]

NUMBERS: Final = 1 << 32
"""Calls and methods have numbers of 32 bits."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one side of a connection.

    :ivar message_bytes: the longest message that is received. It bounds arguments and results that go inline
    :ivar calls: calls of one connection that may be unfinished at a time, in each direction
    :ivar server_calls: the same for all connections of a server together
    :ivar stream_bytes: how much of a stream may be on its way or unread; one item more than that may be
    :ivar inline_bytes: how many bytes of arguments, as they came in messages, all unfinished calls of one connection
        may have
    :ivar lent_bytes: how much memory one call of the peer may make this side allocate for arguments by reference and
        for the copy of a result, and how much all calls of its connection may
    :ivar metadata_bytes: the longest metadata of a call, in msgpack
    :ivar hello_seconds: how long a peer may take to say its Hello
    :ivar lent_seconds: how long a caller may take to read a result that is lent to it
    """

    message_bytes: int = 256 << 20
    calls: int = 1024
    server_calls: int = 16384
    stream_bytes: int = 256 << 10
    inline_bytes: int = 1 << 30
    lent_bytes: int = 4 << 30
    metadata_bytes: int = 8 << 10
    hello_seconds: float = 10.0
    lent_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "message_bytes",
            "calls",
            "server_calls",
            "stream_bytes",
            "inline_bytes",
            "lent_bytes",
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
        for name in ("hello_seconds", "lent_seconds"):
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
    return Error(Code.RESOURCE_EXHAUSTED, f"{what}: the limit {name} is {limit}")
