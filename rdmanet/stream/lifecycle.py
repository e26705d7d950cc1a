# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The life of one connection, from the attempt to connect until nothing of it is left.

Theory
------
A ``Lifecycle`` connects parts that do not know each other, and carries out what they decide:

* ``Machine`` (machine.py, pure) has the states, and decides. Whatever happens is an event for it; it answers with
  actions, and `handle` carries them out.
* ``Connection`` (compiled) moves bytes, and calls ``data_received`` itself, so nothing here runs per message.
* ``Endpoint`` (establish.py) is the identifier and the queue pair. It reports that the connection is established
  (beginning.py goes on then), and what the connection manager says later.
* ``Regions`` (regions.py) is the memory that each side offers to the other.
* ``Reports`` (reports.py) is what these report to. It says which event that is.
* ``WritingHalf`` (writing.py) knows why a write is refused, and who waits for room.
* ``Callbacks`` (callbacks.py) calls the application's protocol.
* ``Deadlines`` (deadlines.py) limits what waits for the peer.
* ``Teardown`` (teardown.py) takes the connection apart, once, in the order of `steps_of_end`. When the program hears of
  the end is in ending.py.

The transport above gives commands, such as `close`, and reads the parts. While the connection exists, the loop context
and these parts refer to the life, and the life refers to the transport. `detach` cuts these references, so that an
ended connection is freed without the garbage collector.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rdmanet import credit
from rdmanet._core import CMID, process_id
from rdmanet.base.late_import import imported
from rdmanet.errors import name_peer
from rdmanet.protocol import Action, Event, State, TellingEvent, Told, Writing
from rdmanet.stream import ending, tls
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.callbacks import Callbacks, is_buffered
from rdmanet.stream.connection import Connection
from rdmanet.stream.deadlines import Deadlines
from rdmanet.stream.establish import Endpoint, Role
from rdmanet.stream.facts import Facts
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.machine import Machine
from rdmanet.stream.options import StreamConfig
from rdmanet.stream.parts import Life, facts_now, plain_row
from rdmanet.stream.readiness import Readiness
from rdmanet.stream.reports import Reports
from rdmanet.stream.teardown import FAREWELL_S, Teardown
from rdmanet.stream.writing import WritingHalf

if TYPE_CHECKING:
    from rdmanet.base.accounts import ConnectionInfo
    from rdmanet.stream.regions import Regions

# As plain numbers: each operator of an IntFlag calls Python functions.
_STOP_READING, _DISCARD_WRITES, _SEND_FIN, _SEND_ABORT, _DELIVER_EOF, _LOSE, _DISCONNECT, _RELEASE, _ = map(
    int, Action
)

# As globals: before Python 3.12 an enum takes twenty times as long to give a member.
_CLOSED, _CLOSING = State.CLOSED, State.CLOSING
_DRAINING = (State.DRAINING, State.DRAINING_TO_EOF)
_TOLD = (Told.LEFT_TO_DEVICE, Told.LOSS)
_CLOSE, _CLOSE_DUE, _EOF_DECLINED = Event.CLOSE, Writing.CLOSE_DUE, Event.EOF_DECLINED

_E = Event
_ABORT_CODES = {_E.PEER_VIOLATED: credit.AbortCode.PROTOCOL, _E.TIMED_OUT: credit.AbortCode.TIMEOUT}
_NAMES_PEER = frozenset(
    {_E.ABORT_RECEIVED, _E.DISCONNECTED, _E.CUT_OFF, _E.PEER_VIOLATED, _E.TIMED_OUT, _E.WRITE_DROPPED}
)
"""The events after which an error is the connection's, and not the program's own."""


class Lifecycle(Life):
    """The life of one connection. `Life` (parts.py) says what each part is."""

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
        self.loop_context, self.loop, self.config = loop_context, loop_context.loop, config
        self.on_made, self.on_over = on_made, on_over
        self.facts = Facts()
        reports = Reports(self)
        self.machine = Machine()
        self.callbacks = Callbacks(self.loop, transport, context, protocol_factory)
        self.connection = Connection(reports, config.reference_writes, config.unread_bytes)
        self.endpoint = Endpoint(role, loop_context, config, self.connection, reports)
        self.known_regions: Regions | None = None
        self.writing = WritingHalf(self.loop, self.machine, self.connection, self.callbacks, self)
        self.deadlines = Deadlines(
            loop_context.waits, self.machine, self.connection, config.close_timeout, reports
        )
        self.teardown = Teardown(self.loop, self)
        self.readiness: Readiness | None = None
        loop_context.connections.add(self)

    @property
    def regions(self) -> Regions:
        """See `Life`. When the connection is over, it is as if these had been there before."""
        regions = self.known_regions
        if regions is None:
            regions = self.known_regions = imported(_regions)(
                self.connection, self.loop_context, Reports(self)
            )
            if self.machine.over:
                regions.close()
            if self.teardown.released:
                regions.disown()
        return regions

    def info(self) -> ConnectionInfo:
        """The connection as it is now."""
        held = () if self.known_regions is None else self.known_regions.held()
        return imported(_info_of)(facts_now(self), self.callbacks.transport, self.endpoint.id, held)

    def row(self) -> tuple[list[str], tuple[Any, ...]]:
        """The same for `rdmanet ss`: the names of its counters, and what row_of() makes of it (base/accounts.py)."""
        row = plain_row(self)
        if row is None:
            info = self.info()
            row = list(info.stats), imported(_row_of)(info)
        return row

    def __repr__(self) -> str:
        return repr(self.callbacks.transport)

    @property
    def unclosed(self) -> bool:
        """Whether it holds something that only its end would give back."""
        return not self.teardown.released and self.endpoint.id is not None and not self.loop_context.foreign

    # -- the beginning -------------------------------------------------------------------------------------

    async def connect(self, address: SockAddr, local: SockAddr | None) -> None:
        """The connecting side, from an address to connection_made(). If it raises, or is cancelled, nothing is left.

        Raises what ``Endpoint.connect`` raises.
        """
        try:
            await self.endpoint.connect(address, local, self.callbacks.context)
        except BaseException:
            if self.machine.opening:
                self.release_now()
            else:
                self.abort()
            raise
        if self.teardown.released:  # it has ended at once
            self.loop.call_soon(self.callbacks.let_go)

    def accept(self, cm_id: CMID, hello: credit.Hello) -> None:
        """The accepting side. It goes on when ESTABLISHED comes."""
        self.endpoint.accept(cm_id, hello, self.callbacks.context)

    # -- what the application wants ------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        before, paused = self.callbacks.protocol, self.connection.protocol_paused
        begins_tls = tls.is_tls(protocol)
        if begins_tls and paused:
            self.writing.resume()  # from now on TLS buffers what it writes, and tells it when to pause
        self.callbacks.protocol = protocol
        self.connection.bind(protocol, is_buffered(protocol))
        if begins_tls:
            tls.begin_over(before, protocol, paused)
        elif paused and self.connection.borrows_memory:
            self.writing.pause()  # memory that is still being read is the new protocol's business, too

    def write_eof(self) -> None:
        """End our half: Fin goes after what was written."""
        if not self.is_closing():
            self.connection.stop_writing()
            self.writing.eof_written = True
            self.handle(Event.WRITE_EOF)

    def is_closing(self) -> bool:
        """Whether close() was called, or the connection is over.

        A program that expects TCP does not know that before it has read what had come, or has written in vain: AnyIO
        asks a closing transport for no more bytes, and StreamWriter.drain() waits for a turn of the loop only if it is.
        """
        machine = self.machine
        if machine.writing is _CLOSE_DUE or self.writing.late_writes:
            return True
        return machine.closing and not (self.config.ends_when_read and machine.state in _DRAINING)

    def close(self) -> None:
        """Stop reading, send what was written and Fin, and end."""
        if self.machine.opening:
            # Server.close_clients(): the peer may be connected already. If it is not, it gets no more time than a round
            # trip takes, because somebody may wait for the end of the server.
            self.handle(Event.CLOSE_LATER)
            if self.endpoint.role is Role.SERVER:
                self.deadlines.begin_close_when_made(FAREWELL_S)
        else:
            self._close(_CLOSE)

    def _close(self, event: Event) -> None:
        """Close, but later if TLS above has more to write."""
        if self.writing.waits_for_tls():
            self.handle(Event.CLOSE_LATER)
            self.connection.reading = False
            self.deadlines.begin_close()
        else:
            self.connection.stop_writing()
            self.handle(event)

    def pause_reading(self) -> None:
        """Deliver nothing. If that keeps connection_lost() back after a loss, a writer is woken nevertheless."""
        self.connection.reading = False
        if self.machine.tell(TellingEvent.READING_PAUSED):
            self.loop.call_soon(self.writing.resume, context=self.callbacks.context)

    def abort(self) -> None:
        """End at once. As over TCP, what has been left to the device is not taken back."""
        if not self._is_ending:
            self.handle(Event.ABORT)

    def fail(self, exc: BaseException) -> None:
        """The same; connection_lost() gets this error."""
        if not self._is_ending:
            self.handle_error(Event.CALLBACK_RAISED, exc, "")

    @property
    def _is_ending(self) -> bool:
        """Whether connection_lost() has been called, or is due, so that the program can end nothing any more."""
        return self.machine.state is _CLOSED or self.machine.told in _TOLD

    def callback_raised(self, exc: BaseException, name: str) -> None:
        """The protocol's method of that name raised."""
        self.callbacks.report(exc, f"Fatal error: protocol.{name}() call failed.")
        self.fail(exc)

    def readiness_fd(self) -> int:
        """A descriptor that shows whether there is something to read (readiness.py), made on the first call.

        -1 when the connection is over, or another process's.
        """
        if self.loop_context.foreign or not self.teardown.wanted:
            return -1
        if self.readiness is None:
            self.readiness = Readiness(self.loop_context.bell(), self.machine, self.connection)
        self.connection.engine.drain()  # the caller looks at it now, and the loop may not have run for a while
        self.connection.watch_unread()
        self.readiness.look()
        return self.readiness.fd

    # -- events for the machine, actions from it -----------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Carry out what the machine answers, in Action's order."""
        self.handle_error(event, None, "")

    def handle_error(self, event: Event, error: BaseException | None, reason: str) -> None:
        """The same for an event with a cause. The reason is what an Abort tells the peer."""
        if self.loop_context.pid != process_id():
            return  # after a fork: the connection is the parent's, and goes on there
        machine = self.machine
        actions = int(machine.receive(event, error))
        if machine.error is not None and event in _NAMES_PEER:
            name_peer(machine.error, self.facts.get("peername"))
        if self.readiness is not None:
            self.readiness.look()
        if not actions:
            return
        try:
            if actions & _STOP_READING:
                self.connection.stop_reading()
            if actions & _DISCARD_WRITES:
                self.connection.discard_writes()
            if actions & _SEND_FIN:
                self.connection.when_flushed()
            if machine.state is _CLOSING:
                self.deadlines.begin_close()  # also where write_eof() had asked for the Fin already
                if self.config.lost_peer == "eof":
                    ending.leave_to_device(self)
            if actions & _SEND_ABORT:
                self._say_abort(event, reason)
            if actions & _DELIVER_EOF:
                self._deliver_eof()
        finally:  # whatever is raised there must not prevent the end: the machine is in its new state
            self._end(actions)

    def _say_abort(self, event: Event, reason: str) -> None:
        """Send Abort. The disconnection waits until that has completed, or it would overtake it."""
        if event is Event.PEER_VIOLATED and self.connection.shared is not None:
            return  # on a shared queue it gets no time: it may take receives of the others
        code = _ABORT_CODES.get(event, credit.AbortCode.ABORTED)
        said = self.connection.say_abort(credit.pack_abort(code, reason))
        if said and not self.loop.is_closed():
            self.teardown.abort_posted()

    def _deliver_eof(self) -> None:
        try:
            keep_open = self.callbacks.tell("eof_received")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.callback_raised(exc, "eof_received")
            return
        if not keep_open and not self.machine.closing:
            self._close(_EOF_DECLINED)

    def _end(self, actions: int) -> None:
        if actions & _LOSE:
            self.loop.call_soon(ending.lose, self, context=self.callbacks.context)
        if actions & _DISCONNECT:
            self.connection.stop_posting()
            self.teardown.disconnect()
            if self.machine.state is not _CLOSED:
                # Bytes are left to deliver. An error does not wait for a paused reader, because a writer in drain()
                # must learn of it. After a clean end there is nothing to learn except the bytes.
                if self.machine.error is not None:
                    self.connection.reading = True
                self.connection.when_drained()
        if actions & _RELEASE and not actions & _LOSE:
            self.teardown.release()
        self.loop_context.parting.look()

    # -- the end -------------------------------------------------------------------------------------------

    def release_now(self) -> None:
        """Give everything back at once. Later calls do nothing."""
        self.teardown.release_now()

    def is_sending(self) -> bool:
        """Whether the peer's device may not have all our bytes yet, and may still get them."""
        if self.machine.over or self.machine.opening:
            return False
        return self.connection.undelivered or self.machine.state is _CLOSING

    def when_delivered(self) -> None:
        self.connection.when_delivered()

    def _loop_ended(self) -> None:
        ending.loop_ended(self)

    # what `Teardown` asks for

    def disconnect(self) -> None:
        ending.disconnect(self)

    def steps_of_end(self) -> list[Callable[[], None]]:
        return ending.steps_of_end(self)

    def report(self, exc: BaseException, message: str) -> None:
        self.callbacks.report(exc, message)

    def detach(self) -> None:
        """Everything is given back: forget those who refer to this."""
        self.endpoint.disown()
        self.writing.disown()
        self.deadlines.disown()
        if self.known_regions is not None:
            self.known_regions.disown()
        self.loop_context.left(self)
        self.facts.close()
        if not self.endpoint.connecting:  # else the caller of connect() is still to ask for the protocol
            self.callbacks.let_go()
        ending.tell_over(self)


# Imported at their first use; see stream/whole.py.


def _regions() -> type[Regions]:
    from rdmanet.stream.regions import Regions

    return Regions


def _info_of() -> Callable[..., ConnectionInfo]:
    from rdmanet.stream.explaining import info_of

    return info_of


def _row_of() -> Callable[[ConnectionInfo], tuple[Any, ...]]:
    from rdmanet.base.accounts import row_of

    return row_of
