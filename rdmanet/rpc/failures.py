"""What a caller is told when its call fails, and how it is sent.

A method may raise anything: an `Error`, an Exception that is a mistake, a BaseException of a library, an `Error` whose
class has not called its constructor. Whatever it is, the caller is owed one answer, so nothing in here raises because
of what it is given. The one exception is what ends the program (`ENDS_THE_PROGRAM`), and that after the answer was
sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback

from msgspec import Raw

from rdmanet.base import log_rate
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import MESSAGE_BYTES_LEAST, NIL, TEXT_MOST, Failure, OutFailure, raw
from rdmanet.rpc.messenger import logger
from rdmanet.rpc.shares import Holder, Share


def error_of(exc: BaseException, with_traceback: bool) -> Error | None:
    """What the caller is told of what a method has raised. None: no more than `mistake`, and it is to be logged."""
    if isinstance(exc, Error):
        # A class of the program's may not have called Error's constructor, or have changed what that has set.
        with contextlib.suppress(Exception):
            return exc.passed_on(with_traceback)
    return None


def mistake(exc: BaseException, with_traceback: bool) -> Error:
    """What the caller is told of what is no Error."""
    told = "".join(traceback.format_exception(exc)) if with_traceback else None
    return Error(Code.INTERNAL, "the service failed", None, told)


def unsendable(label: str, exc: Exception) -> Error:
    """What the caller is told of a result or item that cannot be sent as what the method declares. It is logged."""
    report(label, exc)
    return Error(Code.INTERNAL, str(exc))


def send_failure(
    link: Link, number: int, error: Error, begun: bool = True, metadata: Raw | None = None
) -> None:
    """Answer a call with an error, and with this trailing metadata."""
    code = int(error.code)
    text = error.text.encode("utf-8", "backslashreplace").decode()  # names of files may need it
    text = text[:TEXT_MOST]
    try:
        told = number, code, text, raw(error.details), error.traceback, begun
        link.send(OutFailure(*told) if metadata is None else Failure(*told, metadata))
    except BaseException as exc:  # the details cannot be sent, or are too long
        most = link.longest - MESSAGE_BYTES_LEAST // 2
        link.send(OutFailure(number, code, text[: most // 4], NIL, None, begun))
        if isinstance(exc, ENDS_THE_PROGRAM):
            raise


async def when_read(link: Link, share: Share, holder: Holder, error: Error) -> Error:
    """Wait until the peer reads, if this error is long, and return the one that is to be sent then.

    Meanwhile it counts. It goes at once, and without its details, if there is no room for it, or if this is cancelled.
    """
    try:
        details = raw(error.details)
    except BaseException:  # which `send_failure` gets as well
        return error
    nbytes = len(details) + len(error.text) + len(error.traceback or "")
    if nbytes <= TEXT_MOST:
        return error
    with contextlib.suppress(Error, asyncio.CancelledError):
        share.hold(holder, nbytes, "errors that are not read")
        await link.turns.wait()
        return error
    return Error(error.code, error.text)


def report(label: str, exc: BaseException) -> None:
    """Log what a method has raised that is no Error."""
    if (more := log_rate.due(label)) is not None:
        logger.error("%s raised what is no rpc.Error%s", label, more, exc_info=exc)
