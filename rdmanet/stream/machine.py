# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The state machine of one connection: what an event means by the tables of protocol.py. Without I/O, clock or loop."""

import errno
import os
from typing import Final

from rdmanet.errors import ProtocolError
from rdmanet.protocol import (
    NOTHING,
    STATES,
    TELLING,
    TOGETHER,
    WRITING,
    Action,
    Event,
    State,
    TellingEvent,
    Told,
    Writing,
)


class IllegalEvent(RuntimeError):
    """An impossible event: the lifecycle is at fault. The machine has not changed."""


class Machine:
    """The state machine of one connection.

    `receive(event)` returns actions. Carry them out before the next event is received. The exception is DELIVER_EOF,
    which may call the application, which may close or abort: the actions of that come first. LOSE and RELEASE never
    come twice.
    """

    def __init__(self) -> None:
        self.state = _OPENING
        self.writing = _WRITING_OPEN
        self.told = _TOLD_NOTHING
        self.error: BaseException | None = None
        """What connection_lost() gets; in OPENING, what those get who wait for the connection."""

    def receive(self, event: Event, error: BaseException | None = None) -> "Action":
        """Take an event, and return the actions. `error` is its cause, if the lifecycle knows a better one.

        Of several causes the first is kept. An illegal event changes nothing, and raises ProtocolError if only the
        peer can have caused it, otherwise IllegalEvent.
        """
        change = _known.get((self.state, self.writing, event)) or _change(self.state, self.writing, event)
        self.state, self.writing, actions, blame = change
        if blame is not None and self.error is None:
            self.error = error if error is not None else _error(blame, event)
        return actions

    def tell(self, event: TellingEvent) -> "Action":
        """The same for what the application is told of the end: LOSE is to call connection_lost(), once."""
        self.told, action = TELLING[self.told][event]
        return action

    @property
    def opening(self) -> bool:
        """Whether connection_made() is still to come."""
        return self.state in _UNMADE

    @property
    def closing(self) -> bool:
        """Whether close() has taken effect, or the connection is over."""
        return self.state is _CLOSING or self.state in _GONE

    @property
    def over(self) -> bool:
        """Whether there is no connection any more, though received bytes may be left to deliver."""
        return self.state in _GONE

    @property
    def writable(self) -> bool:
        """Whether our half takes bytes: it does while a close() waits, too."""
        return self.writing in _WRITABLE and self.state not in _GONE

    def __repr__(self) -> str:
        error = f" error={self.error!r}" if self.error is not None else ""
        return f"<Machine {self.state.name} writing={self.writing.name}{error}>"


# Before Python 3.12 an enum takes twenty times as long to give a member as a module to give a global.
_OPENING, _CLOSING, _CLOSED, _TOLD_NOTHING = State.OPENING, State.CLOSING, State.CLOSED, Told.NOTHING
_WRITING_OPEN, _CLOSE_DUE, _OVER = Writing.OPEN, Writing.CLOSE_DUE, Writing.OVER
_WRITABLE: Final = frozenset({_WRITING_OPEN, _CLOSE_DUE})
_UNMADE: Final = frozenset({_OPENING, State.UNHEARD})
_GONE: Final = frozenset({State.DRAINING, State.DRAINING_TO_EOF, _CLOSED})
"""No frame is sent any more; our half is over, unless a close() still waits: that one comes."""
_OF_STATE: Final[frozenset[Event]] = frozenset().union(*STATES.values())
_OF_WRITING: Final[frozenset[Event]] = frozenset().union(*WRITING.values())

_ERRNO: Final[dict[type[OSError], int]] = {
    ConnectionResetError: errno.ECONNRESET,
    TimeoutError: errno.ETIMEDOUT,
    ProtocolError: errno.EPROTO,
}

_Outcome = tuple[State, Writing, Action, type[OSError] | None]
_known: Final[dict[tuple[State, Writing, Event], _Outcome]] = {}
"""What `_change` has answered: most lives have the same few events."""


def _change(state: State, writing: Writing, event: Event) -> _Outcome:
    """What an event means by the tables: both states, the actions, the kind of error. Raises as `Machine.receive`."""
    key, actions, blame, half_actions = (state, writing, event), NOTHING, None, NOTHING
    try:
        if event in _OF_STATE:
            state, actions, blame = STATES[state][event]
        if event in _OF_WRITING:
            writing, half_actions = WRITING[writing][event]
    except KeyError:
        message = f"{event.name} in {key[0].name} (writing: {key[1].name})"
        if event in (Event.FIN_RECEIVED, Event.ABORT_RECEIVED):
            raise ProtocolError(f"the peer's frame may not come now: {message}") from None
        raise IllegalEvent(message) from None
    if (state, writing) in TOGETHER:
        state, more, _ = TOGETHER[state, writing]
        actions |= more
    if state in _GONE and (state is _CLOSED or writing is not _CLOSE_DUE):
        writing = _OVER
    else:
        actions |= half_actions
    _known[key] = change = state, writing, actions, blame
    return change


def _error(kind: type[OSError], event: Event) -> OSError:
    number = _ERRNO[kind]
    return kind(number, f"{os.strerror(number)} ({event.name.lower().replace('_', ' ')})")
