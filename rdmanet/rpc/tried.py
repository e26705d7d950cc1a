"""What has become of a call that may be made again (pool.py)."""

from __future__ import annotations

from typing import Any

from rdmanet.rpc.errors import Error
from rdmanet.rpc.method import Method
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.retry import Retry


class Tried:
    """A call, and what has become of it so far.

    :ivar failures: connections, and tries to connect, that have failed under it
    :ivar has_items: an item of its result has come
    :ivar been: whose servers did not take it, or have failed it, or are slow
    :ivar at: whose server has it now, or had it last
    """

    __slots__ = ("at", "been", "call", "failures", "has_items", "sent")

    call: CallDetails

    def __init__(self, call: CallDetails | None = None) -> None:
        self.failures = 0
        self.has_items = False
        self.been: tuple[object, ...] = ()
        self.at: object = None
        self.sent: Once | None = None
        if call is not None:
            if call.method.stream is not None:
                self.sent = Once(call.stream)
                call = call.streaming(self.sent)
            self.call = call

    def goes_to(self, at: object, peer: Any) -> None:
        """It is made at this server, whose address interceptors are to see (`CallInfo.peer`)."""
        self.at = at
        if self.call.response is not None:
            self.call.response._peer = peer

    def may_be_repeated(self, retry: Retry | None, error: Error) -> bool:
        """Whether it does no harm to make it again after this error."""
        if self.has_items or (self.sent is not None and self.sent.is_begun):
            return False
        return not error.begun or is_idempotent(self.call.method, retry)


def is_idempotent(method: Method, retry: Retry | None) -> bool:
    """Whether a method may be called twice. One that takes an object may not: that is lent to one connection."""
    if method.objects:
        return False
    return method.options.idempotent or (retry is not None and method.name in retry.methods)


class Once:
    """The caller's stream, which can be iterated once. It knows whether it was."""

    __slots__ = ("_items", "is_begun")

    def __init__(self, items: Any) -> None:
        self._items = items
        self.is_begun = False

    def __aiter__(self) -> Any:
        self.is_begun = True
        return aiter(self._items)
