# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""What each side counts of each method. No I/O, no clock.

A client counts for all of its connections together, and a server for all of its clients. A call counts when it was
sent, or taken, and again when it has ended. So a call that a client makes again on another connection counts twice, and
one that was not sent, or that an interceptor has answered, does not count.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py

import msgspec

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.schema import Schema

__all__ = ["MethodStats"]


class MethodStats(msgspec.Struct, frozen=True):
    """What one side has counted of a method.

    :ivar begun: calls
    :ivar running: how many of them have not ended
    :ivar ended: how many of them have ended with "OK", and with each `Code`, by its name; those with none are left out
    :ivar seconds: how long the calls took that have ended, all together: at a client from Call to its answer, at a
        server from Call to the end of its task
    :ivar sent_bytes: of messages: calls, results, and items of streams
    :ivar received_bytes: of arguments, results and items in messages
    :ivar lent_bytes: of arguments and results by reference
    """

    begun: int
    running: int
    ended: dict[str, int]
    seconds: float
    sent_bytes: int
    received_bytes: int
    lent_bytes: int


class Counter:
    """The counters of a method, as they are counted.

    :ivar ok: calls that have a result
    :ivar failed: calls that have failed, by the numbers of codes
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ok = 0
        self.failed: dict[int, int] = {}
        self.seconds = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.lent_bytes = 0

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self.begun - self.ok - sum(self.failed.values())

    def count_failed(self, code: int, seconds: float) -> None:
        """A call has ended with this code, after so many seconds."""
        self.failed[code] = self.failed.get(code, 0) + 1
        self.seconds += seconds


def counters_of(schema: Schema) -> list[Counter]:
    """New counters for all methods, in the order of their numbers."""
    return [Counter() for _ in schema.numbered]


def counted(schema: Schema, counters: list[Counter]) -> dict[str, MethodStats]:
    """What was counted until now, by the names of the methods."""
    return {
        method.name: MethodStats(
            counter.begun,
            counter.running,
            ({"OK": counter.ok} if counter.ok else {})
            | {Code(code).name: count for code, count in sorted(counter.failed.items())},
            counter.seconds,
            counter.sent_bytes,
            counter.received_bytes,
            counter.lent_bytes,
        )
        for method, counter in zip(schema.numbered, counters, strict=True)
    }


def ending_of(exc: BaseException) -> int:
    """With which code a call ends that raises this at its caller."""
    if isinstance(exc, Error):
        code = getattr(exc, "code", None)  # a class of the program's may not have called Error's constructor
        return int(code if isinstance(code, Code) else Code.UNKNOWN)
    return int(Code.UNKNOWN if isinstance(exc, Exception) else Code.CANCELLED)
