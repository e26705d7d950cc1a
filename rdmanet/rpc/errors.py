"""What a call fails with: one exception, with one of gRPC's sixteen codes.

The codes, and their numbers, are those that gRPC made common, so that programs, dashboards and people need not learn
others. A service raises `Error` for what its callers are to know. Every other exception of a service is a mistake in
the service: the caller gets INTERNAL and nothing else, and the server's log has the traceback.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rdmanet.errors import printable, shown

__all__ = ["Code", "Error"]


class Code(enum.IntEnum):
    """Why a call failed. The numbers go over the wire, and never change."""

    CANCELLED = 1
    """The caller, or the server, has cancelled it."""
    UNKNOWN = 2
    """The other side has a code that this side does not know."""
    INVALID_ARGUMENT = 3
    """An argument is wrong, whatever the state of the service."""
    DEADLINE_EXCEEDED = 4
    """The call's time is over. It may have had its effect all the same."""
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    """A limit would be exceeded; the text names it."""
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    """The server does not have this method."""
    INTERNAL = 13
    """The service raised something else than an Error. The server's log has it."""
    UNAVAILABLE = 14
    """There is no connection any more, or the server takes no new calls. `Error.begun` says whether the call may have
    had its effect."""
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Error(Exception):
    """A call failed, and this is what the caller is told.

    A service raises it, and its caller gets an equal one. Of what a peer has sent, `text` is not escaped: use
    :func:`rdmanet.errors.printable` before you print it. str() of the error does so.

    :param code: a `Code`
    :param text: for a person
    :param details: for a program: anything that msgspec encodes. The caller gets it as the type that the method names
        in ``@rpc.method(details=...)``, and without one as dictionaries, lists, numbers and strings
    :ivar traceback: the server's, if the server sends them
    :ivar begun: False if the method has surely not begun: the call was not sent, or the server did not take it. It may
        be made again
    :ivar trailing_metadata: at the caller, what the method has said by `set_trailing_metadata`; else empty. If the
        caller does not accept it, for its length, say, it is empty, too
    """

    code: Code
    text: str
    details: Any
    traceback: str | None
    begun: bool
    trailing_metadata: Mapping[str, str | bytes] = MappingProxyType({})
    _is_own = False
    """Whether the caller's side has raised it, so that it says nothing of the server."""

    def __init__(self, code: Code, text: str = "", details: Any = None, traceback: str | None = None) -> None:
        if not isinstance(text, str):
            raise TypeError(f"rpc.Error: the text is {shown(text)}, not a str")
        super().__init__(code, text, details)
        self.code = Code(code)
        self.text = text
        self.details = details
        self.traceback = traceback
        self.begun = True

    def __str__(self) -> str:
        return f"{self.code.name}: {printable(self.text)}" if self.text else self.code.name

    def __eq__(self, other: object) -> bool:
        """Whether code, text and details are equal, wherever the errors come from."""
        if type(other) is not type(self):
            return NotImplemented
        return (self.code, self.text, self.details) == (other.code, other.text, other.details)

    def __hash__(self) -> int:
        return hash((self.code, self.text))

    def passed_on(self, with_traceback: bool) -> Error:
        """What the caller of a method gets that raises this, which may have come from another server.

        It does not say that the call was not sent: that was another call.
        """
        text = self.text
        for ending in (_NOT_SENT, _NOT_TAKEN):
            text = text.removesuffix(ending)
        return Error(self.code, text, self.details, self.traceback if with_traceback else None)

    def __reduce__(self) -> tuple[object, ...]:
        state: dict[str, object] = {"begun": self.begun}
        if self.trailing_metadata:
            state["trailing_metadata"] = dict(self.trailing_metadata)
        return type(self), (self.code, self.text, self.details, self.traceback), state


class ConnectError(Error, OSError):
    """There is no connection: UNAVAILABLE, and an OSError with the number of its cause, which says why."""


def no_connection(cause: OSError) -> ConnectError:
    """The error of who cannot connect."""
    error = ConnectError(Code.UNAVAILABLE, str(cause) or type(cause).__name__)
    error.errno, error.strerror, error.filename = cause.errno, cause.strerror, None
    error.begun = False
    return error


ENDS_THE_PROGRAM: Final = (KeyboardInterrupt, SystemExit)
"""What asyncio lets out of a task, and out of the loop. Whoever is owed an answer has it before."""


def not_begun(error: Error) -> Error:
    """The same error, of a call whose method has not begun."""
    error.begun = False
    return error


def own(error: Error) -> Error:
    """The same error, which the caller's side has raised: it says nothing of the server."""
    error._is_own = True
    return error


_NOT_SENT: Final = "; this call was not sent"
_NOT_TAKEN: Final = "; this call did not begin"


def not_sent(why: str, code: Code = Code.UNAVAILABLE) -> Error:
    """The error of a call that this side did not send."""
    return not_begun(Error(code, why + _NOT_SENT))


def not_taken(why: str) -> Error:
    """The error of a call that the server refuses."""
    return not_begun(Error(Code.UNAVAILABLE, why + _NOT_TAKEN))


def late() -> Error:
    """The error of a call whose time is over."""
    return Error(Code.DEADLINE_EXCEEDED, "the call took too long")


def code_of(number: int) -> Code:
    """The code with this number. One that a newer peer may have is UNKNOWN."""
    try:
        return Code(number)
    except ValueError:
        return Code.UNKNOWN
