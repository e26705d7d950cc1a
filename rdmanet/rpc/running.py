"""A call that a server executes: its task, and what is kept for it until its caller has the answer."""

from __future__ import annotations

import asyncio
import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Callable
from typing import Any, cast

import msgspec

from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.schema import Method
from rdmanet.rpc.streaming import Receiving, Sending


class Running(msgspec.Struct, eq=False):
    """A call that is being executed.

    :ivar call: what the method can ask for
    :ivar inline_bytes: of its arguments in the message
    :ivar task: executes it
    :ivar late: its time is over
    :ivar received: the caller's stream, if there is one
    :ivar sent: the stream to the caller, if there is one
    :ivar released: is to be done when the caller has released the result that is on loan
    :ivar taken_bytes: allocated for its arguments on loan
    """

    number: int
    method: Method
    function: Callable[..., Any]
    call: CallInfo
    inline_bytes: int
    task: asyncio.Task[None] = cast(Any, None)
    late: bool = False
    received: Receiving | None = None
    sent: Sending | None = None
    released: asyncio.Future[None] | None = None
    taken_bytes: int = 0
    _started: bool = False
    _cancelled: bool = False

    def start(self) -> None:
        """The task begins. Raises CancelledError if it was cancelled before that."""
        if not self.task:  # an eager one begins before its creator has it
            self.task = cast("asyncio.Task[None]", asyncio.current_task())
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
        self.call.is_over = True
        if self.received is not None:
            self.received.finish(Error(Code.CANCELLED, "the call whose stream this is has ended"))

    def release(self) -> None:
        """Nobody needs its result any more."""
        if self.released is not None and not self.released.done():
            self.released.set_result(None)
