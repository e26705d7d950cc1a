# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""A call that a server executes: its task, and what is kept for it until its caller has the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from rdmanet.rpc.calls import CalleeBook
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.lending import until_done
from rdmanet.rpc.limits import exceeded
from rdmanet.rpc.method import Method
from rdmanet.rpc.packing import Packed
from rdmanet.rpc.shares import Holder
from rdmanet.rpc.stats import Counter
from rdmanet.rpc.streaming import Receiving, Sending
from rdmanet.stream.peer_memory import OfferedMemory


def limited(method: Method, counter: Counter, deadline: float | None, now: float) -> float | None:
    """The deadline of a call, by its caller and by what the service says about the method.

    :raises Error: RESOURCE_EXHAUSTED; it has as many calls as it may
    """
    options = method.options
    if options.calls is not None and counter.running >= options.calls:
        raise exceeded(
            "calls of @rpc.method",
            options.calls,
            f"{method.label} has {counter.running} unfinished calls",
        )
    if options.timeout is None:
        return deadline
    own = now + options.timeout
    return own if deadline is None else min(own, deadline)


async def threads_end(book: CalleeBook, threads: list[asyncio.Future[None]]) -> None:
    """Wait until the threads of a call have ended that has its answer: until then it keeps what it has."""
    book.left += 1
    for thread in threads:
        with contextlib.suppress(asyncio.CancelledError):
            await until_done(thread)
    book.left -= 1


class Running(Holder):
    """A call that is being executed.

    :ivar call: what the method can ask for
    :ivar counter: counts it
    :ivar begun_at: when it came, on the loop's clock
    :ivar task: executes it
    :ivar late: its time is over
    :ivar code: with which it fails
    :ivar is_cancelled: it was, once
    :ivar received: the caller's stream, if there is one
    :ivar sent: the stream to the caller, if there is one
    :ivar released: is to be done when the caller has released the result that is on loan
    :ivar borrowed: the peer's memory of these; None: it has none
    :ivar taking: arguments are being taken
    :ivar packed: the arguments, if they have come with the memory of arrays, and are not decoded
    :ivar asks: the caller takes metadata back
    :ivar threads: those that it has left, and that have not ended (threads.py); None: there are none
    """

    def __init__(
        self,
        number: int,
        method: Method,
        function: Callable[..., Any],
        call: CallInfo,
        counter: Counter,
        begun_at: float,
    ) -> None:
        self.number = number  # what Holder has is 0 and False
        self.method = method
        self.function = function
        self.call = call
        self.counter = counter
        self.begun_at = begun_at
        self.task: asyncio.Task[None] = None  # type: ignore[assignment]
        self.late = False
        self.code: int | None = None
        self.received: Receiving | None = None
        self.sent: Sending | None = None
        self.released: asyncio.Future[None] | None = None
        self.is_cancelled = False
        self.borrowed: list[OfferedMemory] | None = None
        self.taking = False
        self.packed: Packed | None = None
        self.asks = False
        self.threads: list[asyncio.Future[None]] | None = None

    @property
    def has_returned(self) -> bool:
        """Whether it had arguments on loan, and reads nothing of them any more. Its Buffers have been released."""
        if not self.borrowed or self.taking:
            return False
        return not any(remote.is_used for remote in self.borrowed)

    def borrows(self, remotes: list[OfferedMemory]) -> None:
        """It has this memory of the peer's, too."""
        self.borrowed = [*(self.borrowed or ()), *remotes]

    def called(self, arguments: tuple[Any, ...]) -> Any:
        """Call a method that has parameters by keyword, or a stream."""
        method = self.method
        by_name: dict[str, Any] = {}
        if method.by_keyword:
            by_name = dict(zip(method.by_keyword, arguments[method.positional :], strict=True))
            arguments = arguments[: method.positional]
        if self.received is not None:
            assert method.stream is not None
            if (at := method.stream_at) is None:
                by_name[method.stream[0]] = self.received
            else:
                arguments = (*arguments[:at], self.received, *arguments[at:])
        return self.function(*arguments, **by_name)

    def cancel(self) -> None:
        """Cancel the task, once: what it does then may take time, and is not to be cancelled as well."""
        if self.released is not None:
            self.release()  # it has answered
        elif not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()

    def time_is_over(self) -> None:
        self.late = not self.is_cancelled
        self.cancel()

    def end_streams(self) -> None:
        """Both streams are over, for a task that goes on. They refer to the call, and it to them no more."""
        for stream in (self.received, self.sent):
            if stream is not None:
                stream.finish(Error(Code.CANCELLED, "the call whose stream this is has ended"))
        self.received = self.sent = None

    def release(self) -> None:
        """Nobody needs its result any more."""
        if self.released is not None and not self.released.done():
            self.released.set_result(None)
