"""The life of one connection, from the attempt to connect until nothing of it is left.

Theory
------
A ``Lifecycle`` connects parts that do not know each other, and carries out what they decide:

* ``Machine`` (protocol.py, pure) has the states, and decides. Whatever happens is an event for it; it answers with
  actions, and `_handle` carries them out.
* ``Connection`` (compiled) moves bytes, and reports to its owner (connection.py): this class. It calls the protocol's
  ``data_received`` itself, so nothing here runs per message.
* ``Endpoint`` (establish.py) is the identifier and the queue pair. It reports that the connection is established, and
  what the connection manager says later.
* ``Regions`` (regions.py) is the memory that each side offers to the other.
* ``WritingHalf`` (writing.py) knows why a write is refused, and who waits for room.
* ``Callbacks`` (callbacks.py) calls the application's protocol.
* ``Teardown`` (teardown.py) takes the connection apart, once, in the order that ``__init__`` gives.

A lost peer shows in an event of the connection manager (`Endpoint._cm_event`) or in a completion that failed
(`_pyx/completing.pxi`), and a local device that has failed in one of its events (`loop_context.py`). Each of these
ends in `cut_off`.

A server by TCP makes a protocol when its kernel has long had the connection, and mostly the client's first bytes, too.
So it hardly ever sees a connection that is idle only because the client has just come. uvicorn closes idle ones when it
ends, and whoever had just connected would get no answer. With ``waits_to_hear`` the accepting side therefore makes its
protocol when the first frame has come (`_begin_late`), and the connecting side leaves that frame to its program for a
few turns of the loop (`_speak_first`). A client that says nothing has held up nobody: the server waits `FIRST_WORD_S`
at most.

A connection of a program that expects TCP is left to the device when it is closed and everything has been posted
(`_leave_to_device`): connection_lost() is called in the next turn, as over TCP, and neither abort() nor an exception
ends anything then. What the device may still touch is kept until it is done, or until a close takes too long.

The transport above gives it commands, such as `close`, and reads its parts. While the connection exists, the loop
context and these parts refer to the life, and the life refers to the transport. `_detach` cuts these references, so
that an ended connection is freed without the garbage collector.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import warnings
from collections.abc import Callable
from typing import Any, cast

from rdmanet import credit
from rdmanet._core import CMID, QP, AsyncEvent, CMEvent, StreamEngine, WCStatus
from rdmanet.base import log_rate
from rdmanet.errors import CompletionResetError, completion_error, name_peer
from rdmanet.stream import tls
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.callbacks import Callbacks, is_buffered
from rdmanet.stream.connection import Connection, Failure
from rdmanet.stream.establish import Endpoint, Role
from rdmanet.stream.facts import Facts
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.options import KEEPALIVE, StreamConfig
from rdmanet.stream.peer_memory import Posted
from rdmanet.stream.protocol import Action, Event, Machine, State, TellingEvent, Told, Writing
from rdmanet.stream.readiness import Readiness
from rdmanet.stream.regions import Regions
from rdmanet.stream.teardown import FAREWELL_S, Teardown
from rdmanet.stream.writing import WritingHalf

logger = logging.getLogger("rdmanet")


# As plain numbers: each operator of an IntFlag calls Python functions.
_STOP_READING, _DISCARD_WRITES, _SEND_FIN, _SEND_ABORT, _DELIVER_EOF, _LOSE, _DISCONNECT, _RELEASE, _ = map(
    int, Action
)


_NAMES_PEER = frozenset(
    (
        Event.ABORT_RECEIVED,
        Event.DISCONNECTED,
        Event.CUT_OFF,
        Event.PEER_VIOLATED,
        Event.TIMED_OUT,
        Event.WRITE_DROPPED,
    )
)
"""The events after which an error is the connection's, and not the program's own."""


FIRST_WORD_S = 0.01
"""How long an accepting side waits for a client's first frame. Mostly it comes at once."""
FIRST_WORD_TURNS = 4
"""For how many turns of its loop a client leaves the first frame to its program, whose tasks have to be woken."""


def _nothing() -> None:
    pass


class Lifecycle:
    """The life of one connection.

    More than 500 lines: it carries out each action of the machine and hears each report of the parts. These are sixty
    short methods, and what they decide is elsewhere.

    :ivar machine: its states, and the error that it ends with
    :ivar connection: its bytes
    :ivar endpoint: its identifier and its queue pair
    :ivar regions: the memory on offer
    :ivar writing: our half of it
    :ivar callbacks: its protocol
    :ivar facts: what get_extra_info() knows by name; empty until the connection is established
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop_context: LoopContext,
        config: StreamConfig,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        role: Role,
        context: contextvars.Context,
        on_made: Callable[[], None],
        on_over: Callable[[], None],
    ) -> None:
        """
        :param role: CLIENT, if ``connect`` is to be called; SERVER, if ``accept``
        :param context: the context of the protocol's callbacks
        :param on_made: called when the connection is established
        :param on_over: called once, when the connection, or the attempt, is over for its program
        """
        self._loop_context = loop_context
        self._loop = loop_context.loop
        self._config = config
        self._on_made = on_made
        self._on_over = on_over
        self.facts = Facts()
        self.machine = Machine()
        self.callbacks = Callbacks(self._loop, transport, context, protocol_factory)
        self.connection = Connection(self, config.reference_writes, config.unread_bytes)
        self.endpoint = Endpoint(role, loop_context, config, self.connection, self)
        self.regions = Regions(self.connection, loop_context, self)
        self.writing = WritingHalf(self._loop, self.machine, self.connection)
        self._teardown = Teardown(self._loop, self._disconnect, self._steps, self.report)
        self._connecting = False
        self._close_timer: asyncio.TimerHandle | None = None
        self._close_progress = -1
        self._answer_timer: asyncio.TimerHandle | None = None
        self._first_word_timer: asyncio.TimerHandle | None = None
        self._last_words = (int(credit.AbortCode.ABORTED), "")  # what an Abort of ours says
        self._readiness: Readiness | None = None
        loop_context.connections.add(self)

    @property
    def qp(self) -> QP | None:
        """The queue pair; None before there is one."""
        return self.connection.qp

    @property
    def engine(self) -> StreamEngine:
        """The data engine that the connection is on."""
        return self.connection.engine

    @property
    def wakes_by(self) -> int:
        """A descriptor that is readable when anything has happened to the connection, or to others of its loop."""
        return self._loop_context.fd

    @property
    def ring_bytes(self) -> int:
        """How many bytes its receive slots hold when they have grown; the slots that it sends from hold as many."""
        return self._config.slot_bytes * self._config.data_slots

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy of its parent's connection."""
        return self._loop_context.foreign

    @property
    def unclosed(self) -> bool:
        """Whether it holds something that only its end would give back."""
        return not self._teardown.released and self.endpoint.id is not None and not self.foreign

    def __repr__(self) -> str:
        return repr(self.callbacks.transport)

    # -- connecting ----------------------------------------------------------------------------------------

    async def connect(self, address: SockAddr, local: SockAddr | None) -> None:
        """The connecting side, from an address to connection_made(). If it raises, or is cancelled, nothing is left.

        Raises what ``Endpoint.connect`` raises.
        """
        self._connecting = True
        try:
            await self.endpoint.connect(address, local, self.callbacks.context)
        except BaseException:
            self._connecting = False
            if self.machine.opening:
                self.release_now()
            else:
                self.abort()
            raise
        self._connecting = False
        if self._teardown.released:  # it has ended at once
            self._loop.call_soon(self.callbacks.let_go)

    def accept(self, cm_id: CMID, hello: credit.Hello) -> None:
        """The accepting side. It goes on when ESTABLISHED comes."""
        self.endpoint.accept(cm_id, hello, self.callbacks.context)

    def established(self, event: CMEvent) -> None:
        """Both sides are ready: make the protocol and tell it. Bytes may have arrived already."""
        if self._teardown.released:
            return
        self._on_made()
        if self.endpoint.role is Role.CLIENT:
            self.endpoint.agree(credit.unpack_hello(event.private_data))
        elif self._config.waits_to_hear and not self.connection.has_heard:
            self.machine.receive(Event.ACCEPTED)
            self._first_word_timer = self._loop.call_later(FIRST_WORD_S, self._begin_late)
            return
        self._begin()

    def _heard_first(self) -> None:
        # Not now: the engine is calling, in the middle of completions, and more of what the peer says may follow.
        if self.machine.state is State.UNHEARD:
            self._loop.call_soon(self._begin_late)

    def _begin_late(self) -> None:
        """The accepting side has waited for the client's first frame, which has come, or is late."""
        if self.machine.state is not State.UNHEARD or self._teardown.released or self.foreign:
            return
        if self._first_word_timer is not None:
            self._first_word_timer.cancel()
        try:
            self._begin()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.establishing_failed(exc)

    def _begin(self) -> None:
        connects = self.endpoint.role is Role.CLIENT
        assert self.endpoint.id is not None
        self.facts.learn(self.endpoint.id, self.connection, self._config.reason)
        protocol = self.callbacks.make_protocol()
        self.machine.receive(Event.ESTABLISHED)
        self.connection.open(protocol, is_buffered(protocol), connects)
        self.connection.keep_alive(self._config.keepalive is not None, *(self._config.keepalive or KEEPALIVE))
        if connects:
            self._speak_first(FIRST_WORD_TURNS if self._config.waits_to_hear else 0)
        close_due = self.machine.writing is Writing.CLOSE_DUE
        if close_due:
            self._stop_timers()
        self.callbacks.connection_made()
        self._loop.call_soon(self.connection.greet)
        self.connection.hear_early()
        if close_due:
            self.close()

    def _speak_first(self, turns: int) -> None:
        """Send a Credit, unless the program writes something within so many turns of the loop."""
        if self._teardown.released or self.connection.has_said or self.foreign:
            return
        if turns:
            self._loop.call_soon(self._speak_first, turns - 1)
        else:
            self.connection.send_control(credit.Kind.CREDIT)

    def establishing_failed(self, error: BaseException) -> None:
        self.report(error, "rdmanet: a connection could not be begun")
        self.release_now()

    # -- what the application wants ------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        before, paused = self.callbacks.protocol, self.connection.protocol_paused
        begins_tls = tls.is_tls(protocol)
        if begins_tls and paused:
            self._resume_protocol()  # from now on TLS buffers what it writes, and tells it when to pause
        self.callbacks.protocol = protocol
        self.connection.bind(protocol, is_buffered(protocol))
        if begins_tls:
            tls.begin_over(before, protocol, paused)
        elif paused and self.connection.borrows_memory:
            self._pause_writing()  # memory that is still being read is the new protocol's business, too

    def is_closing(self) -> bool:
        """Whether close() was called, or the connection is over."""
        return self.machine.closing or self.machine.writing is Writing.CLOSE_DUE

    def write_eof(self) -> None:
        """End our half: Fin goes after what was written."""
        if not self.is_closing():
            self.connection.stop_writing()
            self.writing.eof_written = True
            self._handle(Event.WRITE_EOF)

    def close(self) -> None:
        """Stop reading, send what was written and Fin, and end."""
        if self.machine.opening:
            # Server.close_clients(): the peer may be connected already. If it is not, it gets no more time than a round
            # trip takes, because somebody may wait for the end of the server.
            self._handle(Event.CLOSE_LATER)
            if self._close_timer is None and self.endpoint.role is Role.SERVER:
                self._close_timer = self._loop.call_later(FAREWELL_S, self._never_made)
        elif not self._waits_for_tls():
            self.connection.stop_writing()
            self._handle(Event.CLOSE)

    def _waits_for_tls(self) -> bool:
        """Whether to close later, because TLS above has more to write.

        It keeps that, its farewell among it, until it is resumed, and relies on asyncio's transports to take writes
        after close() for as long as they have something in their buffers.
        """
        if not self.connection.protocol_paused or not self.machine.writable:
            return False
        if not tls.is_tls(self.callbacks.protocol):
            return False
        self._handle(Event.CLOSE_LATER)
        self.connection.reading = False
        self._begin_close_timer()
        return True

    def _never_made(self) -> None:
        self._close_timer = None
        if self.machine.opening:
            self.release_now()

    def pause_reading(self) -> None:
        """Deliver nothing. If that keeps connection_lost() back after a loss, a writer is woken nevertheless."""
        self.connection.reading = False
        if self.machine.tell(TellingEvent.READING_PAUSED):
            self._loop.call_soon(self._resume_protocol, context=self.callbacks.context)

    def abort(self) -> None:
        """End at once. As over TCP, what has been left to the device is not taken back."""
        if not self._is_ending:
            self._handle(Event.ABORT)

    def fail(self, exc: BaseException) -> None:
        """The same; connection_lost() gets this error."""
        if not self._is_ending:
            self._handle(Event.CALLBACK_RAISED, exc)

    @property
    def _is_ending(self) -> bool:
        """Whether connection_lost() has been called, or is due, so that the program can end nothing any more."""
        return self.machine.state is State.CLOSED or self.machine.told in (Told.LEFT_TO_DEVICE, Told.LOSS)

    def end_now(self, error: Exception | None = None) -> None:
        """End at once, and do not wait until the peer has heard of it; connection_lost() gets this error."""
        machine = self.machine
        made = not machine.opening
        if made and machine.state is not State.CLOSED and machine.error is None:
            machine.error = error
        machine.receive(Event.ABORT)
        if made and machine.told is not Told.LOSS and not self._loop.is_closed():
            self.callbacks.context.run(self._call_connection_lost)
        self.release_now()

    def readiness_fd(self) -> int:
        """A descriptor that shows whether there is something to read (readiness.py), made on the first call.

        -1 when the connection is over, or another process's.
        """
        if self.foreign or not self._teardown.wanted:
            return -1
        if self._readiness is None:
            self._readiness = Readiness(self._loop_context.bell())
        self.engine.drain()  # the caller looks at it now, and the loop may not have run for a while
        self.connection.watch_unread()
        self._unread_changed()
        return self._readiness.fd

    # -- events for the machine, actions from it -----------------------------------------------------------

    def _handle(self, event: Event, error: BaseException | None = None) -> None:
        """Carry out what the machine answers, in Action's order."""
        if self.foreign:
            return  # after a fork: the connection is the parent's, and goes on there
        machine = self.machine
        actions = int(machine.receive(event, error))
        if event in _NAMES_PEER:
            name_peer(machine.error, self.facts.get("peername"))
        if self._readiness is not None and machine.state is not State.OPEN:
            self._readiness.show(True)
        if not actions:
            return
        try:
            if actions & _STOP_READING:
                self.connection.stop_reading()
            if actions & _DISCARD_WRITES:
                self.connection.discard_writes()
            if actions & _SEND_FIN:
                self.connection.when_flushed()
            if machine.state is State.CLOSING:
                self._begin_close_timer()  # also where write_eof() had asked for the Fin already
                self._leave_to_device()
            if actions & _SEND_ABORT and not (
                event is Event.PEER_VIOLATED and self.connection.shared is not None
            ):
                # On a shared queue, a peer that breaks the rules gets no time: it may take receives of the others.
                self._say_abort()
            if actions & _DELIVER_EOF:
                self._deliver_eof()
        finally:  # whatever is raised there must not prevent the end: the machine is in its new state
            self._end(actions)

    def _end(self, actions: int) -> None:
        if actions & _LOSE:
            self._loop.call_soon(self._lose, context=self.callbacks.context)
        if actions & _DISCONNECT:
            self.connection.stop_posting()
            self._teardown.disconnect()
            if self.machine.state is not State.CLOSED:
                # Bytes are left to deliver. An error does not wait for a paused reader, because a writer in drain()
                # must learn of it. After a clean end there is nothing to learn except the bytes.
                if self.machine.error is not None:
                    self.connection.reading = True
                self.connection.when_drained()
        if actions & _RELEASE and not actions & _LOSE:
            self._teardown.release()

    def _say_abort(self) -> None:
        """Send Abort with the reason. The disconnection waits until that has completed, or it would overtake it."""
        said = self.connection.say_abort(credit.pack_abort(*self._last_words))
        if said and not self._loop.is_closed():
            self._teardown.abort_posted()

    def _deliver_eof(self) -> None:
        try:
            keep_open = self.callbacks.tell("eof_received")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._callback_raised(exc, "eof_received")
            return
        if not keep_open and not self.machine.closing and not self._waits_for_tls():
            self.connection.stop_writing()
            self._handle(Event.EOF_DECLINED)

    def _lose(self) -> None:
        """Call connection_lost(), but not before our Abort has left if the peer may write to memory until then."""
        if self._teardown.in_farewell and self.connection.lands:
            self.machine.tell(TellingEvent.HOLD_BACK)
        if self.machine.told is not Told.LOSS_HELD_BACK:
            self._call_connection_lost()

    def _call_connection_lost(self) -> None:
        """The last callback, then the end of everything that the connection held."""
        if self._teardown.released:
            return
        tells = self.machine.tell(TellingEvent.LOSE)
        if self.connection.lands:  # from here on, the program's memory is its own
            self.connection.end_keys()
            self.connection.lose_landings()
        self.regions.lost()  # now, though the peer may not have learned of the end yet
        try:
            if tells:
                self.callbacks.connection_lost(cast("Exception | None", self.machine.error))
        finally:
            self._close_readiness()
            self._teardown.release()

    def _leave_to_device(self) -> None:
        """Of programs that expect TCP: call connection_lost() in the next turn, if nothing is left to post.

        There the kernel has the rest then, here the device: `until_sent` waits for it when the loop ends. Not if the
        device uses the program's own memory.
        """
        if (
            self._config.lost_peer == "eof"
            and not self.connection.get_write_buffer_size()
            and not self.connection.borrows_memory
            and not self.connection.lands
            and self.machine.tell(TellingEvent.LEAVE)
        ):
            self._loop.call_soon(self._lose_as_tcp, context=self.callbacks.context)

    def _lose_as_tcp(self) -> None:
        if self.machine.error is not None or not self.machine.tell(TellingEvent.LOSE):
            return  # its end has been told, or is about to be
        try:
            self.callbacks.connection_lost(None)
        finally:
            self._tell_over()  # nobody waits for the device, as nobody waits for TCP's kernel

    def _begin_close_timer(self) -> None:
        timeout = self._config.close_timeout
        if timeout is not None and self._close_timer is None:
            self._close_progress = self.connection.progress
            self._close_timer = self._loop.call_later(timeout, self._close_timer_fired)

    def _close_timer_fired(self) -> None:
        self._close_timer = None
        if self.machine.state is State.CLOSED:
            return
        if self.connection.progress != self._close_progress:
            self._begin_close_timer()
            return
        self._last_words = (credit.AbortCode.TIMEOUT, "closing made no progress")
        error = TimeoutError(
            errno.ETIMEDOUT,
            f"closing made no progress for {self._config.close_timeout} s, "
            f"{self.connection.get_write_buffer_size()} bytes were not sent",
        )
        name_peer(error, self.facts.get("peername"))
        self._handle(Event.TIMED_OUT, error)

    # -- what the connection reports: see connection.py ----------------------------------------------------

    def _control_received(self, kind: int, body: bytes, granted: int) -> None:
        if kind == credit.Kind.FIN:
            self._handle(Event.FIN_RECEIVED)
            self.connection.when_drained()
        elif kind == credit.Kind.ABORT:
            abort = credit.unpack_abort(body)
            reason = f": {abort.reason}" if abort.reason else ""
            error = ConnectionResetError(errno.ECONNRESET, f"the peer aborted the connection{reason}")
            unsent = self.connection.get_write_buffer_size()  # the peer's device has the rest
            if abort.code == credit.AbortCode.ABORTED and self._is_taken_for_eof(error, unsent):
                self._end_as_tcp()
            else:
                self._handle(Event.ABORT_RECEIVED, error)
        else:
            if not self.is_over:
                self.regions.credit_received(body, granted)

    def _control_sent(self, kind: int) -> None:
        if kind == credit.Kind.FIN:
            self._handle(Event.FIN_COMPLETED)
            self.writing.tell_half_closed()
        elif self._teardown.in_farewell:
            # Not now: the engine is calling, in the middle of our completions.
            self._loop.call_soon(self._teardown.heard)

    def _flushed(self) -> None:
        if not self.connection.send_control(credit.Kind.FIN):
            self.connection.when_flushed()
        elif self.machine.state is State.CLOSING:
            self._leave_to_device()

    def _drained(self) -> None:
        if self.machine.state is not State.CLOSED:
            self._handle(Event.DELIVERED)

    def _unread_changed(self) -> None:
        if self._readiness is not None:
            self._readiness.show(self.connection.unread or self.machine.state is not State.OPEN)

    def _memory_taken_back(self) -> None:
        # The reads that were given up end when the peer has answered. One that never does holds them for as long as
        # closing may take.
        if self._config.close_timeout is not None and self._answer_timer is None:
            self._answer_timer = self._loop.call_later(
                self._config.close_timeout, self._answer_is_late, self.connection.placing_unanswered
            )

    def _answer_is_late(self, awaited: int) -> None:
        self._answer_timer = None
        self.engine.drain()
        unanswered = self.connection.placing_unanswered
        if not unanswered or self.is_over:
            return
        if unanswered != awaited:  # that one was answered
            self._memory_taken_back()
            return
        self.cut_off(
            TimeoutError(
                errno.ETIMEDOUT,
                f"the peer has not let go of a cancelled read's memory for {self._config.close_timeout} s",
            )
        )

    def _write_refused(self) -> None:
        """As with asyncio's transports: an error after write_eof(), silence after close(), a warning if it goes on."""
        self.writing.check_refusal()
        if self.machine.state in (State.DRAINING, State.DRAINING_TO_EOF):
            self._handle(Event.WRITE_DROPPED)
            self.connection.reading = True  # a writer learns of the end, even if the reader is paused
            tls.close_face(self.callbacks.protocol)
        self.writing.write_dropped()

    def _pause_writing(self) -> None:
        self.writing.pausing()
        try:
            self.callbacks.protocol.pause_writing()  # type: ignore[union-attr]
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc, "pause_writing() failed")

    def _resume_writing(self) -> None:
        # Not now if a callback may be running (abort() in data_received, for example), because a context cannot be
        # entered twice. The loop calls connection_lost, too, after this.
        self.writing.wake_until_room()
        if self.machine.state is State.CLOSED:
            return  # after abort() there is nothing to write to: as in asyncio, connection_lost() ends all waits
        if self.is_over and self.machine.error is not None and self.connection.reading:
            self.machine.tell(
                TellingEvent.ROOM
            )  # connection_lost() comes when what was received is delivered
            return
        if self.machine.closing:
            self._loop.call_soon(self._resume_protocol, context=self.callbacks.context)
        else:
            self.callbacks.context.run(self._resume_protocol)

    def _resume_protocol(self) -> None:
        if self.machine.told is Told.LOSS:
            return  # that ends all waits
        try:
            self.callbacks.protocol.resume_writing()  # type: ignore[union-attr]
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc, "resume_writing() failed")
        if self.machine.writing is Writing.CLOSE_DUE and not self.connection.protocol_paused:
            self.close()

    def _callback_raised(self, exc: BaseException, name: str) -> None:
        self.report(exc, f"Fatal error: protocol.{name}() call failed.")
        self.fail(exc)

    def _fabric_failed(self, failure: Failure) -> None:
        if self.is_over or self.machine.opening:
            return
        if isinstance(failure, OSError) or (
            isinstance(failure, tuple) and failure[0] == WCStatus.WR_FLUSH_ERR
        ):
            # This says only that the connection is over. The device's events may say why.
            self._loop_context.hear_device(self.engine)
            if self.is_over:
                return
        if isinstance(failure, Exception):
            if not isinstance(failure, OSError):
                self.report(failure, "rdmanet: the data engine failed, the connection is closed")
            self.cut_off(failure)
            return
        assert self.qp is not None
        self.cut_off(_failed_completion(failure, self.qp))

    def _protocol_broken(self, exc: BaseException) -> None:
        # As text: a record that a handler keeps is not to keep the exception, and by its traceback the reader's memory.
        log_rate.warn(logger, "protocol", "%s: the peer broke the protocol: %s", repr(self), str(exc))
        # The peer learns which rule it broke, and by what of its own. Of other errors it learns only that there was
        # one: the text of an application's exception is none of its business.
        self._last_words = (credit.AbortCode.PROTOCOL, str(exc))
        self._handle(Event.PEER_VIOLATED, exc)
        self.endpoint.fail(exc)

    def cut_off(self, error: BaseException) -> None:
        """The connection is over. Completions that are there come first: the peer's Fin may be among them."""
        self.engine.drain()
        if self._is_taken_for_eof(error, self.connection.undelivered):
            self._end_as_tcp()
        else:
            self._handle(Event.CUT_OFF if self.connection.undelivered else Event.DISCONNECTED, error)

    def _is_taken_for_eof(self, error: BaseException, lost: int) -> bool:
        """Whether this loss looks like end of file to programs that expect TCP.

        There the system of a peer that is killed, or aborts, sends end of file, unless bytes for it are lost.

        :param lost: whether bytes of ours are
        """
        return (
            self._config.lost_peer == "eof"
            and not self.machine.opening
            and self.machine.state is not State.CLOSED
            and isinstance(error, ConnectionResetError)
            and not lost
        )

    def _end_as_tcp(self) -> None:
        """End of file after what was received, unless that has come, and then the end, without an error."""
        if self.machine.state is State.OPEN:
            self._handle(Event.FIN_RECEIVED)
        self._handle(Event.DISCONNECTED)

    def _credit_body(self, granted: int, room: int) -> tuple[bool, bytes]:
        return self.regions.credit_body(granted, room)

    def _operation_done(self, operation: Posted) -> None:
        self.regions.operation_done(operation)

    def _room_for_operations(self) -> None:
        self.regions.post_waiting()

    def _operation_lost(self, operation: Posted) -> None:
        self.regions.operation_lost(operation)

    # -- what the connection manager and the device report -------------------------------------------------

    def on_connection_error(self, error: OSError) -> None:
        """An event says that the connection, or the attempt at one, is over."""
        if self._teardown.released or self.endpoint.fail(error):
            return
        if self.machine.state is State.UNHEARD:
            self.engine.drain()  # what it has said counts
            if self.connection.has_heard:
                self._begin_late()
        if self.machine.opening:
            self.release_now()  # the accepting side: the peer went away before the connection was made
        elif self._teardown.in_farewell:
            self._teardown.heard()  # nobody is there to hear it
        elif self.machine.state is not State.CLOSED:
            self.cut_off(error)

    @property
    def has_ended(self) -> bool:
        """Whether an event that ends the connection would change nothing any more."""
        return self.machine.state is State.CLOSED and not self._teardown.in_farewell

    def port_event(self, event: AsyncEvent) -> None:
        """Something has happened to a port of the device. It ends nothing; the protocol may want to know."""
        if event.port_num == self.facts.get("rdma_port") and self.machine.state is not State.CLOSED:
            self.tell("port_event", event)

    # -- what the regions need -----------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """Why the connection is over."""
        return self.machine.error

    @property
    def is_over(self) -> bool:
        """Whether there is no connection any more, though received bytes may be left to deliver."""
        return self.machine.over

    def listens_for(self, name: str) -> bool:
        return self.callbacks.listens_for(name)

    def tell(self, name: str, argument: Any) -> None:
        """Call a method that a protocol may have besides asyncio's, unless connection_lost() was the last."""
        if self.machine.told is Told.LOSS:
            return
        try:
            self.callbacks.tell(name, argument)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._callback_raised(exc, name)

    def report(self, exc: BaseException, message: str) -> None:
        self.callbacks.report(exc, message)

    # -- the end -------------------------------------------------------------------------------------------

    def release_now(self) -> None:
        """Give everything back at once. Later calls do nothing."""
        self._teardown.release_now()

    def _disconnect(self) -> None:
        """End the connection, and keep what it has received until that is delivered."""
        self.endpoint.disconnect()
        if self.machine.told is Told.LOSS_HELD_BACK:
            self._loop.call_soon(self._call_connection_lost, context=self.callbacks.context)
        if self.machine.state is not State.CLOSED:
            # Whoever waits for remote memory waits in vain now, and may be the reason why the reader is paused.
            self.regions.end_bindings()
            self.connection.end_keys()
            self.endpoint.destroy_queue_pair()
            self.connection.lose_operations()
            self.connection.lose_loans()
            self.connection.lose_landings()
            self._fail_waiters()

    def is_sending(self) -> bool:
        if self.is_over or self.machine.opening:
            return False
        return self.connection.undelivered or self.machine.state is State.CLOSING

    def _loop_ended(self) -> None:
        """The loop ends before the connection. While the loop still runs, those who wait are told."""
        if not self._teardown.wanted:
            self.release_now()
            return
        machine, transport = self.machine, self.callbacks.transport
        unclosed, error = "", None
        made = not machine.opening and machine.state is not State.CLOSED
        if made and machine.told is not Told.LOSS and (not machine.closing or self.connection.undelivered):
            unclosed = f"unclosed transport {transport!r}"
            error = ConnectionAbortedError(errno.ECONNABORTED, "the event loop has ended")
            name_peer(error, self.facts.get("peername"))
        self.end_now(error)
        if unclosed:  # last, because the program may turn warnings into exceptions
            warnings.warn(unclosed, ResourceWarning, stacklevel=2, source=transport)

    def _steps(self) -> tuple[Callable[[], None], ...]:
        """The order in which a connection is taken apart.

        The peer's keys before the queue pair that they are bound to, which is in ERR by then; the queue pair before the
        memory that it writes into; the identifier after its queue pair (rdma_destroy_id(3)); those who wait are told
        last.
        """
        return (
            self._stop_timers,
            self.endpoint.disconnect,
            self.regions.end_bindings,
            self.connection.end_keys,
            self.endpoint.destroy_queue_pair,
            self.connection.release,
            self.endpoint.destroy_id,
            self._fail_waiters,
            self._close_readiness,
            self._detach,
        )

    def _stop_timers(self) -> None:
        for timer in (self._close_timer, self._answer_timer, self._first_word_timer):
            if timer is not None:
                timer.cancel()
        self._close_timer = self._answer_timer = self._first_word_timer = None

    def _fail_waiters(self) -> None:
        self.regions.close()
        if not self._loop.is_closed():
            self.writing.over()

    def _close_readiness(self) -> None:
        if self._readiness is not None:
            self._readiness.close()

    def _detach(self) -> None:
        self.endpoint.disown()
        self.regions.disown()
        self._loop_context.left(self)
        self.facts.close()
        if not self._connecting:  # else the caller of connect() is still to ask for the protocol
            self.callbacks.let_go()
        self._tell_over()

    def _tell_over(self) -> None:
        on_over, self._on_over = self._on_over, _nothing
        on_over()


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
