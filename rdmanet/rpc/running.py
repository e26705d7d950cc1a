"""A call that a server executes: its task, and what is kept for it until its caller has the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rdmanet.rpc.context import Current
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.schema import Method
from rdmanet.rpc.streaming import Receiving, Sending


class Running:
    """A call that is being executed.

    :ivar late: its time is over
    :ivar received: the caller's stream, if there is one
    :ivar sent: the stream to the caller, if there is one
    :ivar current: what the method can ask for
    :ivar inline_bytes: of its arguments in the message
    :ivar taken_bytes: allocated for its arguments on loan
    :ivar released: is to be done when the caller has released the result that is on loan
    """

    __slots__ = (
        "current", "function", "inline_bytes", "late", "method", "number", "received", "released", "sent",
        "taken_bytes", "task", "_cancelled", "_started",
    )  # fmt: skip

    task: asyncio.Task[None]

    def __init__(
        self, number: int, method: Method, function: Callable[..., Any], current: Current, inline_bytes: int
    ) -> None:
        self.number = number
        self.method = method
        self.function = function
        self.current = current
        self.inline_bytes = inline_bytes
        self.late = False
        self.received: Receiving | None = None
        self.sent: Sending | None = None
        self.released: asyncio.Future[None] | None = None
        self.taken_bytes = 0
        self._started = False
        self._cancelled = False

    def start(self) -> None:
        """The task begins. Raises CancelledError if it was cancelled before that."""
        self._started = True
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Cancel the task, once: what it does then may take time, and is not to be cancelled as well.

        One that has not begun begins all the same, because it has to answer.
        """
        if self.released is not None:
            self.release()  # it has answered
        elif not self._cancelled:
            self._cancelled = True
            if self._started:
                self.task.cancel()

    def time_is_over(self) -> None:
        self.late = not self._cancelled
        self.cancel()

    def is_answered(self) -> None:
        """The call and the caller's stream are over, for a task that goes on."""
        self.current.is_over = True
        if self.received is not None:
            self.received.finish(Error(Code.CANCELLED, "the call whose stream this is has ended"))

    def release(self) -> None:
        """Nobody needs its result any more."""
        if self.released is not None and not self.released.done():
            self.released.set_result(None)
