"""Where messages begin and end in what a connection receives."""

from collections.abc import Callable
from typing import Any, Final

from typing_extensions import Buffer

HEADER_BYTES: Final = 4
COST_BYTES: Final = 1024
"""A message costs its reader one unit, and one more for each so many bytes (`Frames.budget`)."""
LONG_BYTES: Final = 65536

class Frames:
    """Takes what a connection receives, and gives what the bodies in it decode to."""

    budget: float
    gives_plain: bool
    unfinished_bytes: int
    def __init__(
        self, decode: Callable[[Any], Any], message_bytes: int, first_bytes: int | None = None
    ) -> None: ...
    @property
    def is_behind(self) -> bool:
        """Whether it keeps what may be a message, for which the budget did not suffice."""

    def keep(self, data: Buffer) -> None:
        """Take what has come, and give it with the next `feed`."""

    def room(self) -> memoryview | None:
        """The memory for what is missing of a long body; None if it is not known that there is one."""

    def came(self, nbytes: int) -> None:
        """So many bytes were put into the `room`."""

    def drop(self) -> None:
        """Nothing more will come: keep nothing of what has."""

    def feed(self, data: Buffer = b"") -> list[Any]:
        """The messages that are complete with these bytes, to which they may refer, as far as the budget suffices.

        :raises ProtocolError: the peer sent something else. The framer cannot be used any more
        """

def is_kept(memory: object) -> bool:
    """Whether it is the memory of a body that is used again when nobody else refers to it."""

def framed(body: bytes, head: bytes = b"") -> bytes:
    """A body with its length before it."""

class PlainCall:
    """A Call without metadata and memory."""

    number: int
    method: int
    timeout_us: int
    arguments: bytes | memoryview
    tail: bytes | None

class PlainReply:
    """A Reply with a result, and no more."""

    number: int
    result: bytes | memoryview
    tail: bytes | None

def call_head(number: int, method: int, timeout_us: int | None) -> bytes:
    """A Call until its arguments, if nothing follows these."""

def reply_head(number: int) -> bytes:
    """A Reply until its result, if nothing follows that."""

def with_tail(value: bytes, tail: bytes) -> bytes:
    """An argument list, or a result, in msgpack, with the tail in its place."""
