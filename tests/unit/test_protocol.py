"""The connection's life: the tables' own properties, then the stories that they tell."""

import errno
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmanet import protocol
from rdmanet.errors import ProtocolError
from rdmanet.protocol import (
    NOTHING,
    STATES,
    TELLING,
    WRITING,
    Action,
    Event,
    State,
    TellingEvent,
    Told,
    Writing,
)
from rdmanet.stream.machine import IllegalEvent, Machine

A, E, S, W = Action, Event, State, Writing
END = A.LOSE | A.DISCONNECT | A.RELEASE


def machine(*events: Event) -> Machine:
    """A machine after these events; established first unless they begin otherwise."""
    subject = Machine()
    for event in (E.ESTABLISHED, *events):
        subject.receive(event)
    return subject


def writes(subject: Machine) -> bool:
    """May the application's bytes be taken?"""
    return subject.writing is W.OPEN and not subject.opening


def reads(subject: Machine) -> bool:
    """Are received bytes to be delivered?"""
    return subject.state in (S.OPEN, S.EOF_PENDING, S.DRAINING, S.DRAINING_TO_EOF)


def disconnect(subject: Machine, undelivered: bool, error: BaseException | None = None) -> Action:
    """The connection is gone: are bytes of ours not known to have arrived?"""
    return subject.receive(E.CUT_OFF if undelivered else E.DISCONNECTED, error)


# ---------------------------------------------------------------------------
# The tables
# ---------------------------------------------------------------------------

LEGAL = {(state, event) for state, row in STATES.items() for event in row}


def test_every_state_has_a_row() -> None:
    assert list(STATES) == list(State)
    assert list(WRITING) == list(Writing)


def test_each_event_may_come_whatever_was_told() -> None:
    assert list(TELLING) == list(Told)
    for row in TELLING.values():
        assert set(row) == set(TellingEvent)


def test_connection_lost_is_called_once() -> None:
    """On each path of the table, for good; it may be held back, or scheduled before, and then it comes once, too."""
    seen = set()
    paths = [(Told.NOTHING, 0)]
    while paths:
        told, calls = paths.pop()
        if (told, calls) in seen:
            continue
        seen.add((told, calls))
        assert calls == (told is Told.LOSS)
        for event in TellingEvent:
            after, action = TELLING[told][event]
            loses = (
                A.LOSE in action and event is not TellingEvent.LEAVE
            )  # which only has it called in the next turn
            paths.append((after, calls + loses))
    assert {told for told, _ in seen} == set(Told)
    assert all(TELLING[told][TellingEvent.LOSE][0] is Told.LOSS for told in Told)


def test_room_is_told_at_last_if_the_reader_pauses() -> None:
    subject = machine(E.CUT_OFF)
    assert subject.tell(TellingEvent.READING_PAUSED) == NOTHING
    assert subject.tell(TellingEvent.ROOM) == NOTHING
    assert subject.tell(TellingEvent.READING_PAUSED) == A.RESUME_WRITING
    assert subject.tell(TellingEvent.READING_PAUSED) == NOTHING
    subject.tell(TellingEvent.ROOM)
    assert subject.tell(TellingEvent.LOSE) == A.LOSE
    assert subject.tell(TellingEvent.READING_PAUSED) == subject.tell(TellingEvent.LOSE) == NOTHING


def test_what_is_left_to_the_device_is_not_held_back() -> None:
    subject = machine(E.CLOSE)
    assert subject.tell(TellingEvent.LEAVE) == A.LOSE
    assert subject.tell(TellingEvent.LEAVE) == subject.tell(TellingEvent.HOLD_BACK) == NOTHING
    assert subject.tell(TellingEvent.LOSE) == A.LOSE


@pytest.mark.parametrize("event", [E.ABORT, E.CLOSE, E.DISCONNECTED, E.CUT_OFF, E.PEER_VIOLATED])
def test_these_may_come_at_any_time(event: Event) -> None:
    assert {state for state in State if event in STATES[state]} == set(State)


def test_actions_come_in_the_order_to_do_them() -> None:
    assert [action.name for action in ~NOTHING] == [
        "STOP_READING",
        "DISCARD_WRITES",
        "SEND_FIN",
        "SEND_ABORT",
        "DELIVER_EOF",
        "LOSE",
        "DISCONNECT",
        "RELEASE",
        "RESUME_WRITING",
    ]


def test_eof_is_told_only_where_fin_came() -> None:
    telling = {(state, event) for (state, event) in LEGAL if A.DELIVER_EOF in STATES[state][event][1]}
    assert telling == {(S.EOF_PENDING, E.DELIVERED), (S.DRAINING_TO_EOF, E.DELIVERED)}
    into = {
        state
        for (state, event) in LEGAL
        if STATES[state][event][0] in (S.EOF_PENDING, S.DRAINING_TO_EOF, S.EOF_RECEIVED)
        and event is not E.FIN_RECEIVED
    }
    assert into == {S.EOF_PENDING, S.DRAINING_TO_EOF, S.EOF_RECEIVED}


def test_an_illegal_event_changes_nothing() -> None:
    for state, writing, event in product(State, Writing, Event):
        subject = Machine()
        subject.state, subject.writing = state, writing
        of_writing = (E.WRITE_EOF, E.CLOSE, E.CLOSE_LATER, E.EOF_DECLINED, E.FIN_COMPLETED)
        legal = (event in (E.FIN_COMPLETED, E.CLOSE_LATER) or event in STATES[state]) and (
            event not in of_writing or event in WRITING[writing]
        )
        if legal:
            subject.receive(event)
        else:
            blamed = ProtocolError if event in (E.FIN_RECEIVED, E.ABORT_RECEIVED) else IllegalEvent
            with pytest.raises(blamed, match=f"{event.name} in {state.name}"):
                subject.receive(event, ValueError())
            assert (subject.state, subject.writing, subject.error) == (state, writing, None)


class Transport:
    """Takes the actions, counts them, and feeds only events that a real one would."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.done: list[Action] = []
        self.fin_came = False

    def feed(self, event: Event, error: BaseException | None = None) -> None:
        try:
            actions = self.machine.receive(event, error)
        except (IllegalEvent, ProtocolError):
            return
        self.fin_came |= event is E.FIN_RECEIVED
        self.done.extend(actions)
        if A.DELIVER_EOF in actions:
            assert self.fin_came


@settings(max_examples=500)
@given(events=st.lists(st.sampled_from(list(Event)), max_size=40))
def test_any_story_ends_well(events: list[Event]) -> None:
    transport = Transport()
    for event in [E.ESTABLISHED, *events]:
        over = transport.machine.state is S.CLOSED
        before = len(transport.done)
        transport.feed(event)
        assert not (over and len(transport.done) > before), "nothing is done after the end"
    for event in (E.CUT_OFF, E.DELIVERED, E.CUT_OFF):
        transport.feed(event)
    subject = transport.machine
    assert subject.state is S.CLOSED and subject.writing is W.OVER
    assert subject.closing and not writes(subject) and not reads(subject)
    for action in (A.LOSE, A.RELEASE, A.DISCONNECT):
        assert transport.done.count(action) == 1, action
    for action in (A.SEND_FIN, A.SEND_ABORT, A.DELIVER_EOF):
        assert transport.done.count(action) <= 1, action
    assert transport.done.index(A.LOSE) < transport.done.index(A.RELEASE)
    if A.DELIVER_EOF in transport.done:
        assert transport.done.index(A.DELIVER_EOF) < transport.done.index(A.LOSE)
    if A.SEND_FIN in transport.done and A.SEND_ABORT in transport.done:
        assert transport.done.index(A.SEND_FIN) < transport.done.index(A.SEND_ABORT)


@settings(max_examples=200)
@given(
    events=st.lists(
        st.sampled_from([event for event in Event if event not in (E.CLOSE, E.ABORT, E.FIN_RECEIVED)]),
        max_size=20,
    )
)
def test_without_fin_and_close_the_end_is_an_error(events: list[Event]) -> None:
    transport = Transport()
    for event in [E.ESTABLISHED, *events, E.DISCONNECTED, E.DELIVERED]:
        transport.feed(event)
    assert A.DELIVER_EOF not in transport.done
    assert isinstance(transport.machine.error, OSError)


# ---------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------


def test_eof_after_the_last_byte() -> None:
    subject = machine(E.FIN_RECEIVED)
    assert reads(subject) and writes(subject) and not subject.closing
    assert subject.receive(E.DELIVERED) == A.DELIVER_EOF
    assert writes(subject) and not reads(subject)


def test_eof_declined_closes() -> None:
    subject = machine(E.FIN_RECEIVED, E.DELIVERED)
    assert subject.receive(E.EOF_DECLINED) == A.STOP_READING | A.SEND_FIN
    assert subject.closing
    assert subject.receive(E.FIN_COMPLETED) == END
    assert subject.error is None


def test_eof_declined_by_a_callback_that_closed() -> None:
    subject = machine(E.FIN_RECEIVED, E.DELIVERED, E.CLOSE)
    assert subject.receive(E.EOF_DECLINED) == NOTHING


def test_write_eof_keeps_receiving() -> None:
    subject = machine()
    assert subject.receive(E.WRITE_EOF) == A.SEND_FIN
    assert subject.receive(E.WRITE_EOF) == NOTHING
    assert not writes(subject) and reads(subject) and not subject.closing
    assert subject.receive(E.FIN_COMPLETED) == NOTHING
    assert reads(subject)
    subject.receive(E.FIN_RECEIVED)
    assert subject.receive(E.DELIVERED) == A.DELIVER_EOF


def test_close_waits_for_fin_and_nothing_else() -> None:
    subject = machine()
    assert subject.receive(E.CLOSE) == A.STOP_READING | A.SEND_FIN
    assert subject.closing and not writes(subject) and not reads(subject)
    assert subject.receive(E.CLOSE) == NOTHING
    assert subject.receive(E.FIN_RECEIVED) == NOTHING
    assert subject.receive(E.FIN_COMPLETED) == END
    assert subject.error is None
    assert subject.receive(E.DISCONNECTED) == NOTHING


def test_close_after_write_eof() -> None:
    assert machine(E.WRITE_EOF, E.FIN_COMPLETED).receive(E.CLOSE) == A.STOP_READING | END
    subject = machine(E.WRITE_EOF)
    assert subject.receive(E.CLOSE) == A.STOP_READING
    assert subject.receive(E.FIN_COMPLETED) == END


@pytest.mark.parametrize(
    "before", [(), (E.FIN_RECEIVED,), (E.FIN_RECEIVED, E.DELIVERED), (E.CLOSE,), (E.WRITE_EOF,)]
)
def test_abort_is_at_once_and_no_error_here(before: tuple[Event, ...]) -> None:
    subject = machine(*before)
    actions = subject.receive(E.ABORT)
    assert actions & END == END and A.SEND_ABORT in actions and A.DISCARD_WRITES in actions
    assert A.SEND_FIN not in actions
    assert subject.error is None


def test_abort_is_a_reset_at_the_peer_after_what_came_before() -> None:
    subject = machine()
    assert subject.receive(E.ABORT_RECEIVED) == A.DISCARD_WRITES | A.DISCONNECT
    assert reads(subject) and not writes(subject) and subject.closing
    assert subject.receive(E.DELIVERED) == A.LOSE | A.RELEASE
    assert isinstance(subject.error, ConnectionResetError)
    assert subject.error.errno == errno.ECONNRESET


@pytest.mark.parametrize("undelivered", [False, True])
def test_an_end_without_fin_is_an_error(undelivered: bool) -> None:
    cause = ConnectionResetError(errno.ECONNRESET, "retries exceeded")
    subject = machine()
    assert disconnect(subject, undelivered=undelivered, error=cause) == A.DISCARD_WRITES | A.DISCONNECT
    assert subject.receive(E.DELIVERED) == A.LOSE | A.RELEASE
    assert subject.error is cause


@pytest.mark.parametrize("undelivered", [False, True])
def test_an_end_after_fin(undelivered: bool) -> None:
    """Pending bytes and end of file are delivered either way; bytes of ours that are lost are an error."""
    subject = machine(E.FIN_RECEIVED)
    disconnect(subject, undelivered=undelivered)
    assert reads(subject)
    assert subject.receive(E.DELIVERED) == A.DELIVER_EOF | A.LOSE | A.RELEASE
    assert isinstance(subject.error, ConnectionResetError if undelivered else type(None))
    assert subject.receive(E.EOF_DECLINED) == NOTHING


@pytest.mark.parametrize("undelivered", [False, True])
@pytest.mark.parametrize("before", [(E.FIN_RECEIVED, E.DELIVERED), (E.CLOSE,), (E.FIN_RECEIVED, E.CLOSE)])
def test_an_end_that_nothing_waits_for(before: tuple[Event, ...], undelivered: bool) -> None:
    subject = machine(*before)
    assert disconnect(subject, undelivered=undelivered) & END == END
    assert isinstance(subject.error, ConnectionResetError if undelivered else type(None))


def test_a_write_after_the_end_that_was_not_told_yet() -> None:
    subject = machine(E.FIN_RECEIVED, E.DISCONNECTED, E.WRITE_DROPPED, E.DELIVERED)
    assert isinstance(subject.error, ConnectionResetError)


def test_closing_while_draining_keeps_the_cause() -> None:
    subject = machine(E.CUT_OFF)
    assert subject.receive(E.CLOSE) == A.STOP_READING | A.LOSE | A.RELEASE
    assert isinstance(subject.error, ConnectionResetError)


def test_close_times_out() -> None:
    subject = machine(E.CLOSE)
    assert subject.receive(E.TIMED_OUT) == A.DISCARD_WRITES | A.SEND_ABORT | END
    assert isinstance(subject.error, TimeoutError)
    assert subject.receive(E.TIMED_OUT) == NOTHING


def test_a_violation_is_told_after_what_came_before() -> None:
    blame = ProtocolError("a frame of unknown kind")
    subject = machine()
    assert A.SEND_ABORT in subject.receive(E.PEER_VIOLATED, blame)
    assert subject.receive(E.DELIVERED) == A.LOSE | A.RELEASE
    assert subject.error is blame


def test_the_first_cause_is_kept() -> None:
    subject = machine(E.ABORT_RECEIVED)
    first = subject.error
    assert isinstance(first, ConnectionError)
    subject.receive(E.CALLBACK_RAISED, ZeroDivisionError())
    assert subject.error is first


@pytest.mark.parametrize("before", [(E.FIN_RECEIVED,), (E.FIN_RECEIVED, E.DELIVERED)])
def test_a_second_fin_is_a_violation(before: tuple[Event, ...]) -> None:
    subject = machine(*before)
    with pytest.raises(ProtocolError, match="FIN_RECEIVED in EOF"):
        subject.receive(E.FIN_RECEIVED)


@pytest.mark.parametrize("before", [(), (E.FIN_RECEIVED,), (E.FIN_RECEIVED, E.DELIVERED), (E.CLOSE,)])
def test_a_callback_that_raises_ends_its_connection(before: tuple[Event, ...]) -> None:
    error = ZeroDivisionError()
    subject = machine(*before)
    assert subject.receive(E.CALLBACK_RAISED, error) & END == END
    assert subject.error is error


@pytest.mark.parametrize("before", [(), (E.ACCEPTED,)])
@pytest.mark.parametrize("event", [E.DISCONNECTED, E.CUT_OFF, E.TIMED_OUT, E.PEER_VIOLATED, E.CLOSE, E.ABORT])
def test_what_was_never_made_is_never_lost(event: Event, before: tuple[Event, ...]) -> None:
    subject = Machine()
    for each in before:
        assert subject.receive(each) == NOTHING
    assert subject.opening
    assert not writes(subject) and not reads(subject)
    assert subject.receive(event) == A.DISCONNECT | A.RELEASE
    assert (subject.error is None) == (event in (E.CLOSE, E.ABORT))
    assert subject.state is S.CLOSED


def test_a_protocol_that_is_made_with_the_first_frame() -> None:
    subject = Machine()
    subject.receive(E.ACCEPTED)
    assert subject.state is S.UNHEARD and subject.opening and not subject.closing
    with pytest.raises(IllegalEvent):
        subject.receive(E.ACCEPTED)
    assert subject.receive(E.ESTABLISHED) == NOTHING
    assert subject.state is S.OPEN and not subject.opening


@pytest.mark.parametrize("before", [(), (E.FIN_RECEIVED,), (E.FIN_RECEIVED, E.DELIVERED)])
def test_a_close_that_waits_takes_what_is_written_until_then(before: tuple[Event, ...]) -> None:
    """TLS above a paused transport, say."""
    subject = machine(*before)
    assert subject.receive(E.CLOSE_LATER) == NOTHING
    assert subject.writable and not subject.closing
    assert subject.receive(E.CLOSE_LATER) == subject.receive(E.WRITE_EOF) == NOTHING
    assert subject.receive(E.CLOSE) == A.STOP_READING | A.SEND_FIN
    assert not subject.writable and subject.closing


def test_a_close_that_waits_comes_although_the_connection_is_over() -> None:
    """Else the reader, which is paused, would keep it."""
    subject = machine(E.FIN_RECEIVED, E.CLOSE_LATER, E.DISCONNECTED)
    assert subject.over and not subject.writable and subject.writing is W.CLOSE_DUE
    assert subject.receive(E.CLOSE) == A.STOP_READING | A.LOSE | A.RELEASE
    assert subject.writing is W.OVER


@pytest.mark.parametrize("before", [(), (E.FIN_RECEIVED,), (E.FIN_RECEIVED, E.DELIVERED)])
@pytest.mark.parametrize("gone", [False, True])
def test_a_close_that_waits_has_its_time(before: tuple[Event, ...], gone: bool) -> None:
    subject = machine(*before, E.CLOSE_LATER)
    actions = subject.receive(E.DISCONNECTED) if gone else NOTHING
    actions |= subject.receive(E.TIMED_OUT)
    assert A.LOSE | A.RELEASE in actions and subject.state is S.CLOSED


def test_a_close_before_there_is_a_connection_waits_for_it() -> None:
    subject = Machine()
    assert subject.receive(E.CLOSE_LATER) == NOTHING
    assert subject.receive(E.ESTABLISHED) == NOTHING
    assert subject.receive(E.CLOSE) == A.STOP_READING | A.SEND_FIN


def test_repr() -> None:
    assert repr(machine(E.CLOSE)) == "<Machine CLOSING writing=FIN_DUE>"
    assert "error=ConnectionResetError" in repr(machine(E.CUT_OFF))


def test_the_tables_are_not_compiled() -> None:
    """Their C would be 30 to 50 KB of a wheel (docs/developers/releasing.md). A build removes older files."""
    assert protocol.__file__.endswith(".py")
