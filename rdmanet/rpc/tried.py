"""What has become of a call that may be made again (pool.py)."""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any

import msgspec

from rdmanet.rpc.pending import CallDetails


class Tried:
    """A call, and what has become of it so far.

    :ivar failures: connections, and tries to connect, that have failed under it
    :ivar has_items: an item of its result has come
    :ivar been: whose servers did not take it, or have failed it
    """

    __slots__ = ("been", "call", "failures", "has_items", "sent")

    call: CallDetails

    def __init__(self, call: CallDetails | None = None) -> None:
        self.failures = 0
        self.has_items = False
        self.been: tuple[object, ...] = ()
        self.sent: Once | None = None
        if call is not None:
            if call.method.stream is not None:
                self.sent = Once(call.stream)
                call = msgspec.structs.replace(call, stream=self.sent)
            self.call = call


class Once:
    """The caller's stream, which can be iterated once. It knows whether it was."""

    __slots__ = ("_items", "is_begun")

    def __init__(self, items: Any) -> None:
        self._items = items
        self.is_begun = False

    def __aiter__(self) -> Any:
        self.is_begun = True
        return aiter(self._items)
