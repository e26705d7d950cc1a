# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""What the parts of a connection report to its life, and which event of its states each report is.

Theory
------
A lost peer shows in an event of the connection manager (`Endpoint._cm_event`) or in a completion that failed
(`_pyx/completing.pxi`), and a local device that has failed in one of its events (`loop_context.py`). Each of these
ends in `cut_off`. To programs that expect TCP a peer that is killed, or aborts, looks as it does there: its system
sends end of file, unless bytes for it are lost.

The engine calls most of this in its pass, in the middle of completions, and what is to come after them is left to the
loop. The parts have this object, and it has the life: so that is freed when the parts have forgotten this.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Any

from rdmanet import _core, credit
from rdmanet._core import QP, CMEvent
from rdmanet.base import log_rate
from rdmanet.errors import CompletionResetError, completion_error
from rdmanet.protocol import Event, State, Told
from rdmanet.stream import beginning, ending
from rdmanet.stream.connection import Failure
from rdmanet.stream.parts import Life

if TYPE_CHECKING:
    from rdmanet._core import AsyncEvent
    from rdmanet.stream.peer_memory import Posted

logger = logging.getLogger("rdmanet")

# As globals: before Python 3.12 an enum takes twenty times as long to give a member.
_FIN, _ABORT = credit.Kind.FIN, credit.Kind.ABORT
_UNHEARD, _CLOSED, _CLOSING = State.UNHEARD, State.CLOSED, State.CLOSING
_DELIVERED, _DISCONNECTED = Event.DELIVERED, Event.DISCONNECTED
_FIN_RECEIVED, _FIN_COMPLETED = Event.FIN_RECEIVED, Event.FIN_COMPLETED


class Reports:
    """The owner of one connection's parts: of its bytes, its endpoint, its regions and its deadlines."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.facts = life.facts

    def __repr__(self) -> str:
        return repr(self._life)

    # -- its bytes: see connection.py ----------------------------------------------------------------------

    def heard_first(self) -> None:
        self._life.endpoint.heard_first()
        # Not now: more of what the peer says may follow.
        if self._life.machine.state is _UNHEARD:
            self._life.loop.call_soon(beginning.begin_late, self._life)

    def control_received(self, kind: int, body: bytes, granted: int) -> None:
        life = self._life
        if kind == _FIN:
            life.handle(_FIN_RECEIVED)
            life.connection.when_drained()
        elif kind == _ABORT:
            abort = credit.unpack_abort(body)
            reason = f": {abort.reason}" if abort.reason else ""
            error = ConnectionResetError(errno.ECONNRESET, f"the peer aborted the connection{reason}")
            unsent = life.connection.get_write_buffer_size()  # the peer's device has the rest
            if abort.code == credit.AbortCode.ABORTED and self._is_taken_for_eof(error, unsent):
                self._end_as_tcp()
            else:
                life.handle_error(Event.ABORT_RECEIVED, error, "")
        elif not life.machine.over:
            life.regions.credit_received(body, granted)

    def control_sent(self, kind: int) -> None:
        life = self._life
        if kind == _FIN:
            life.handle(_FIN_COMPLETED)
            life.writing.tell_half_closed()
        elif life.teardown.in_farewell:
            life.loop.call_soon(life.teardown.heard)

    def flushed(self) -> None:
        life = self._life
        if not life.connection.send_control(_FIN):
            life.connection.when_flushed()
        elif life.machine.state is _CLOSING and life.config.lost_peer == "eof":
            ending.leave_to_device(life)

    def delivered(self) -> None:
        self._life.loop_context.parting.look()

    def drained(self) -> None:
        if self._life.machine.state is not _CLOSED:
            self._life.handle(_DELIVERED)

    def unread_changed(self) -> None:
        if self._life.readiness is not None:
            self._life.readiness.look()

    def memory_taken_back(self) -> None:
        self._life.deadlines.begin_answer()

    def write_refused(self) -> None:
        self._life.writing.refused()

    def pause_writing(self) -> None:
        self._life.writing.pause()

    def resume_writing(self) -> None:
        self._life.writing.room()

    def callback_raised(self, exc: BaseException, name: str) -> None:
        self._life.callback_raised(exc, name)

    def credit_body(self, granted: int, room: int) -> tuple[bool, bytes]:
        return self._life.regions.credit_body(granted, room)

    def operation_done(self, operation: Posted) -> None:
        self._life.regions.operation_done(operation)

    def room_for_operations(self) -> None:
        if self._life.known_regions is not None:
            self._life.known_regions.post_waiting()

    def operation_lost(self, operation: Posted) -> None:
        self._life.regions.operation_lost(operation)

    # -- failures ------------------------------------------------------------------------------------------

    def fabric_failed(self, failure: Failure) -> None:
        life = self._life
        if life.machine.over or life.machine.opening:
            return
        if isinstance(failure, OSError) or (
            isinstance(failure, tuple) and failure[0] == _core.WCStatus.WR_FLUSH_ERR
        ):
            # This says only that the connection is over. The device's events may say why.
            life.loop_context.hear_device(life.connection.engine)
            if life.machine.over:
                return
        if isinstance(failure, Exception):
            if not isinstance(failure, OSError):
                self.report(failure, "rdmanet: the data engine failed, the connection is closed")
            self.cut_off(failure)
            return
        assert self.qp is not None
        self.cut_off(_failed_completion(failure, self.qp))

    def protocol_broken(self, exc: BaseException) -> None:
        # As text: a record that a handler keeps is not to keep the exception, and by its traceback the reader's memory.
        log_rate.warn(logger, "protocol", "%s: the peer broke the protocol: %s", repr(self), str(exc))
        # The peer learns which rule it broke, and by what of its own. Of other errors it learns only that there was
        # one: the text of an application's exception is none of its business.
        self._life.handle_error(Event.PEER_VIOLATED, exc, str(exc))
        self._life.endpoint.fail(exc)

    def cut_off(self, error: BaseException) -> None:
        """The connection is over. Completions that are there come first: the peer's Fin may be among them."""
        connection = self._life.connection
        connection.engine.drain()
        if self._is_taken_for_eof(error, connection.undelivered):
            self._end_as_tcp()
        else:
            self._life.handle_error(Event.CUT_OFF if connection.undelivered else _DISCONNECTED, error, "")

    def _is_taken_for_eof(self, error: BaseException, lost: int) -> bool:
        """Whether this loss looks like end of file.

        :param lost: whether bytes of ours are
        """
        machine = self._life.machine
        return (
            self._life.config.lost_peer == "eof"
            and not machine.opening
            and machine.state is not _CLOSED
            and isinstance(error, ConnectionResetError)
            and not lost
        )

    def _end_as_tcp(self) -> None:
        """End of file after what was received, unless that has come, and then the end, without an error."""
        if self._life.machine.state is State.OPEN:
            self._life.handle(_FIN_RECEIVED)
        self._life.handle(_DISCONNECTED)

    # -- its endpoint: see establish.py --------------------------------------------------------------------

    def established(self, event: CMEvent) -> None:
        beginning.established(self._life, event)

    def establishing_failed(self, error: BaseException) -> None:
        beginning.failed(self._life, error)

    def on_connection_error(self, error: OSError) -> None:
        """An event says that the connection, or the attempt at one, is over."""
        life = self._life
        if life.teardown.released or life.endpoint.fail(error):
            return
        if life.machine.state is _UNHEARD:
            life.connection.engine.drain()  # what it has said counts
            if life.connection.has_heard:
                beginning.begin_late(life)
        if life.machine.opening:
            life.release_now()  # the accepting side: the peer went away before the connection was made
        elif life.teardown.in_farewell:
            life.teardown.heard()  # nobody is there to hear it
        elif life.machine.state is not _CLOSED:
            self.cut_off(error)

    @property
    def has_ended(self) -> bool:
        """Whether an event that ends the connection would change nothing any more."""
        return self._life.machine.state is _CLOSED and not self._life.teardown.in_farewell

    def ends_cleanly(self) -> bool:
        life = self._life
        if life.machine.state is not _CLOSING or life.connection.undelivered:
            return False
        life.handle(_DISCONNECTED)
        return True

    # -- its device: see loop_context.py -------------------------------------------------------------------

    @property
    def qp(self) -> QP | None:
        return self._life.connection.qp

    def port_event(self, event: AsyncEvent) -> None:
        """Something has happened to a port of the device. It ends nothing; the protocol may want to know."""
        life = self._life
        if event.port_num == life.facts.get("rdma_port") and life.machine.state is not _CLOSED:
            self.tell("port_event", event)

    # -- its regions: see regions.py -----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._life.machine.over

    @property
    def error(self) -> BaseException | None:
        return self._life.machine.error

    def listens_for(self, name: str) -> bool:
        return self._life.callbacks.listens_for(name)

    def tell(self, name: str, argument: Any) -> None:
        """Call a method that a protocol may have besides asyncio's, unless connection_lost() was the last."""
        if self._life.machine.told is Told.LOSS:
            return
        try:
            self._life.callbacks.tell(name, argument)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._life.callback_raised(exc, name)

    def report(self, exc: BaseException, message: str) -> None:
        self._life.callbacks.report(exc, message)

    # -- its deadlines -------------------------------------------------------------------------------------

    def never_made(self) -> None:
        self._life.release_now()

    def closing_is_late(self, error: TimeoutError) -> None:
        self._life.handle_error(Event.TIMED_OUT, error, "closing made no progress")


def _failed_completion(failure: tuple[int, bool, int, Posted | None], qp: QP) -> OSError:
    """The error that a failed completion stands for."""
    status, was_send, vendor_err, operation = failure
    if operation is not None:
        error = operation.failure(status, vendor_err, qp.qp_num)
    else:
        error = completion_error(status, "send" if was_send else "receive", vendor_err, qp.qp_num)
    if isinstance(error, CompletionResetError) and qp.peer_gone:
        return CompletionResetError(error.status, error.opcode, vendor_err, error.qp_num, True)
    return error
