"""A client's call: what goes with it, and what is kept until its answer has come."""

from __future__ import annotations

import asyncio
import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any, Final

import msgspec

from rdmanet.rpc.carried import Metadata
from rdmanet.rpc.lending import Into
from rdmanet.rpc.schema import Method
from rdmanet.rpc.streaming import Receiving, Sending


class CallOptions(msgspec.Struct, frozen=True):
    """What goes with a call, beside its arguments and its deadline.

    :ivar metadata: is sent along; None: nothing is
    :ivar into: where the result is to be written; None: into memory that is taken for it
    """

    metadata: Metadata | None = None
    into: Into | None = None


PLAIN: Final = CallOptions()


class Pending:
    """A call that has no answer yet.

    :ivar future: is to get the answer
    :ivar options: what goes with it
    :ivar received: the stream from the callee, if there is one
    :ivar sent: the stream to the callee, if there is one
    """

    __slots__ = ("future", "method", "number", "options", "received", "sent")

    def __init__(self, method: Method, future: asyncio.Future[Any], options: CallOptions) -> None:
        self.method = method
        self.future = future
        self.options = options
        self.number = -1
        self.received: Receiving | None = None
        self.sent: Sending | None = None

    def fail(self, error: BaseException) -> None:
        """The call has ended with this error."""
        if not self.future.done():
            self.future.set_exception(error)
            if self.received is not None:
                self.future.exception()  # who iterates gets it from there
        if self.received is not None:
            self.received.finish(error)
