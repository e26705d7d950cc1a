# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""A client's call: what goes with it, and what is kept until its answer has come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from msgspec import Raw

from rdmanet.errors import ProtocolError
from rdmanet.rpc.beginning import BEGINNING
from rdmanet.rpc.call_metadata import Metadata
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error, code_of, not_taken, own
from rdmanet.rpc.lending import Into, loan_of
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import NIL, Failure, Initial, OutEnd
from rdmanet.rpc.method import Method
from rdmanet.rpc.response import Response
from rdmanet.rpc.stats import Counter
from rdmanet.rpc.streaming import Receiving, Sending


class CallDetails:
    """A call, on its way from the client's object to the connection that sends it.

    :ivar arguments: one for each parameter, in their order
    :ivar stream: the caller's stream, if the method takes one
    :ivar deadline: when its time is over, on the loop's clock; None: it has no limit
    :ivar metadata: is sent along; None: nothing is
    :ivar into: where the result is to be written; None: into memory that is taken for it
    :ivar waits: at the limit of unfinished calls; else it fails there
    :ivar response: gets what the method says beside its result; None: nobody reads that
    """

    def __init__(
        self,
        method: Method,
        arguments: tuple[Any, ...],
        stream: Any = None,
        deadline: float | None = None,
        metadata: Metadata | None = None,
        into: Into | None = None,
        waits: bool = False,
        response: Response | None = None,
    ) -> None:
        self.method = method
        self.arguments = arguments
        self.stream = stream
        self.deadline = deadline
        self.metadata = metadata
        self.into = into
        self.waits = waits
        self.response = response

    def fitted(self, methods: list[Method]) -> CallDetails:
        """The same call of one of these methods, which are those of a server's version."""
        return self._changed(methods[self.method.number], self.stream, self.metadata, self.response)

    def streaming(self, stream: Any) -> CallDetails:
        """The same call with this stream."""
        return self._changed(self.method, stream, self.metadata, self.response)

    def carrying(self, metadata: Metadata | None, response: Response | None) -> CallDetails:
        """The same call with this metadata, and this response."""
        return self._changed(self.method, self.stream, metadata, response)

    def giving(self, arguments: tuple[Any, ...]) -> CallDetails:
        """The same call with these arguments."""
        same = self.stream, self.deadline, self.metadata, self.into, self.waits, self.response
        return CallDetails(self.method, arguments, *same)

    def _changed(
        self, method: Method, stream: Any, metadata: Metadata | None, response: Response | None
    ) -> CallDetails:
        into, waits = self.into, self.waits
        return CallDetails(method, self.arguments, stream, self.deadline, metadata, into, waits, response)


_OF_PYTHON: Final = (StopIteration, StopAsyncIteration, GeneratorExit)
"""What Python itself raises in coroutines and generators: in a caller it would look like the end of that."""


class Pending:
    """A call that has no answer yet.

    :ivar future: is to get the answer
    :ivar counter: counts it
    :ivar into: where the result is to be written, if the caller says that
    :ivar number: of the call, on its connection
    :ivar place: of the call among those of its connection, counted from 1
    :ivar begun_at: when it was sent, on the loop's clock
    :ivar received: the stream from the callee, if there is one
    :ivar sent: the stream to the callee, if there is one
    :ivar returned: the callee has let go of the arguments on loan
    :ivar response: as that of the call
    """

    def __init__(
        self, method: Method, future: asyncio.Future[Any], counter: Counter, into: Into | None = None
    ) -> None:
        self.method = method
        self.future = future
        self.counter = counter
        self.into = into
        self.number = -1
        self.place = 0
        self.begun_at = 0.0
        self.received: Receiving | None = None
        self.sent: Sending | None = None
        self.returned = False
        self.response: Response | None = None

    @property
    def has_loan(self) -> bool:
        """Whether a result has come that is on loan."""
        future = self.future
        if not self.method.result_is_apart or not future.done() or future.cancelled():
            return False
        return future.exception() is None and loan_of(future.result()) is not None

    def heard_initial(self, message: Initial, limits: Limits) -> Error | None:
        """Initial metadata has come. Returns why it is refused.

        :raises ProtocolError: the call did not ask for it
        """
        if self.response is None:
            raise ProtocolError(f"the peer sends Initial for call {message.number}, which did not ask for it")
        try:
            self.response.take_initial(message.metadata, limits)
        except Error as exc:
            return _refused("initial", exc)
        return None

    def heard(self, metadata: Raw, limits: Limits) -> bool:
        """Take the metadata of an answer. False: it is refused, and the call has failed."""
        if self.response is not None and metadata is not NIL:
            try:
                self.response.take_trailing(metadata, limits)
            except Error as exc:
                self.fail(_refused("trailing", exc))
                return False
        return True

    def failed(self, message: Failure, limits: Limits) -> None:
        """The server has answered with this."""
        details = None
        try:
            details = self.method.decode_details(message.details)
        finally:
            error = Error(code_of(message.code), message.text, details, message.traceback)
            error.begun = message.begun
            if message.metadata is not NIL:
                with contextlib.suppress(Error):  # the server's is the one to be told
                    said = self.response = self.response or Response()
                    said.take_trailing(message.metadata, limits)
                    error.trailing_metadata = said.trailing_metadata
            self.fail(error)

    def lose(self, lost: Error, taken: int | None, refusal: str) -> None:
        """The connection is gone, and there is no answer.

        :param taken: how many of its calls the server has taken; None: it has not said that
        """
        if taken is not None and self.place > taken:
            error = not_taken(refusal)
        else:
            text = f"{lost.text}; this call was sent, and may have had its effect"
            error = Error(Code.UNAVAILABLE, text)
        error.__cause__ = lost.__cause__
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The call has ended with this error."""
        if isinstance(error, _OF_PYTHON):
            name, who = type(error).__name__, "the caller's stream or by a result's class"
            mistake = RuntimeError(f"{self.method.label}: {name} was raised by {who}")
            mistake.__cause__ = error
            error = mistake
        if self.received is not None:  # who iterates gets it from there
            if not self.future.done():
                self.future.set_result(None)
            self.received.finish(error)
        elif not self.future.done():
            self.future.set_exception(error)


def _refused(what: str, exc: Error) -> Error:
    """The error of a call whose method says more than this side accepts."""
    return Error(exc.code, f"the method's {what} metadata: {exc.text}")


async def pump(link: Link, pending: Pending, items: Any, abandon: Callable[[Pending], bool]) -> None:
    """The task that sends the caller's stream. If the stream raises, so does the call.

    :param abandon: says that nobody waits for the answer any more; False: it has come
    """
    assert pending.sent is not None
    try:
        await BEGINNING
        await pending.sent.send(aiter(items))
        if not pending.future.done():
            link.send(OutEnd(pending.number))
    except asyncio.CancelledError as exc:  # the source's own, if somebody waits for the call
        if abandon(pending):
            pending.fail(cancelled(exc))
    except BaseException as exc:
        if abandon(pending):
            pending.fail(exc)
            if isinstance(exc, Error):
                own(exc)
        if isinstance(exc, ENDS_THE_PROGRAM):
            raise
    finally:
        del pending  # which has the error, and that has this frame


def cancelled(cause: BaseException) -> Error:
    """The error of a call whose stream was cancelled."""
    error = own(Error(Code.CANCELLED, "the caller's stream was cancelled"))
    error.__cause__ = cause
    return error
