"""The bytes of a connection, and the owner that it reports to.

``Connection`` is compiled (``_pyx/connection.pxi``): it frames, credits, sends and delivers, and decides nothing
about its own life. It reports what happens to its ``Owner``: ``Reports`` (reports.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from rdmanet._core import Connection as Connection

if TYPE_CHECKING:
    from rdmanet.stream.peer_memory import Posted

Failure: TypeAlias = "tuple[int, bool, int, Posted | None] | Exception"
"""A completion that failed, as (status, was it a send, vendor code, the operation or None), or the engine's error."""


class Owner(Protocol):
    """What a connection reports.

    The engine calls all of these, in its pass, so none may block. None is called after ``release()``. An exception of
    one ends the connection, unless its description says otherwise.
    """

    def heard_first(self) -> None:
        """The peer's first frame has come; only on the accepting side."""

    def control_received(self, kind: int, body: bytes, granted: int) -> None:
        """A Fin, an Abort, or a Credit with a body has come; its slot has been posted again.

        If this raises ProtocolError, the peer is to blame.
        """

    def control_sent(self, kind: int) -> None:
        """The send of a Fin or an Abort has completed, so the peer has it."""

    def flushed(self) -> None:
        """Everything that was written is posted. Called once after ``when_flushed()``."""

    def delivered(self) -> None:
        """The peer's device has everything that was written. Called once after ``when_delivered()``."""

    def drained(self) -> None:
        """Everything that was received is delivered. Called once after ``when_drained()``."""

    def unread_changed(self) -> None:
        """Called after a delivery if ``unread`` has changed since the previous one; only after ``watch_unread()``."""

    def credit_body(self, granted: int, room: int) -> tuple[bool, bytes]:
        """Return (whether there is more to say, the body for the next Credit, of at most ``room`` bytes)."""

    def memory_taken_back(self) -> None:
        """A read was given up whose bytes the peer may still place; ``placing_unanswered`` until it has answered."""

    def write_refused(self) -> None:
        """``write()`` was called after ``stop_writing()``. The caller of ``write()`` gets what this raises."""

    def pause_writing(self) -> None:
        """More bytes are buffered than the high-water mark."""

    def resume_writing(self) -> None:
        """No more bytes are buffered than the low-water mark."""

    def callback_raised(self, exc: BaseException, name: str) -> None:
        """The protocol's method of that name raised."""

    def fabric_failed(self, failure: Failure) -> None:
        """Nothing can be sent or received any more. Called once, after all completions that were there."""

    def protocol_broken(self, exc: BaseException) -> None:
        """The peer has broken the protocol. Called once; an Abort may still be sent from here."""

    def operation_done(self, operation: Posted) -> None:
        """A one-sided work request has completed."""

    def room_for_operations(self) -> None:
        """Requests of the connection's own have completed, so there is room for one-sided ones."""

    def operation_lost(self, operation: Posted) -> None:
        """A one-sided work request will not complete, because the queue pair is gone."""
