"""Where messages begin and end in what a connection receives."""

from collections.abc import Callable
from typing import Any, Final

from typing_extensions import Buffer

HEADER_BYTES: Final = 4
COST_BYTES: Final = 1024
"""A message costs its reader one unit, and one more for each so many bytes (`Frames.budget`)."""
LONG_BYTES: Final = 65536

class Frames:
    budget: float
    gives_plain: bool
    unfinished_bytes: int
    def __init__(
        self, decode: Callable[[Any], Any], message_bytes: int, first_bytes: int | None = None
    ) -> None: ...
    @property
    def is_behind(self) -> bool: ...
    def keep(self, data: Buffer) -> None: ...
    def room(self) -> memoryview | None: ...
    def came(self, nbytes: int) -> None: ...
    def drop(self) -> None: ...
    def feed(self, data: Buffer = b"") -> list[Any]: ...

def is_kept(memory: object) -> bool: ...
def framed(body: bytes, head: bytes = b"") -> bytes: ...

class PlainCall:
    number: int
    method: int
    timeout_us: int
    arguments: bytes | memoryview
    tail: bytes | None

class PlainReply:
    number: int
    result: bytes | memoryview
    tail: bytes | None

def call_head(number: int, method: int, timeout_us: int | None) -> bytes: ...
def reply_head(number: int) -> bytes: ...
def with_tail(value: bytes, tail: bytes) -> bytes: ...
