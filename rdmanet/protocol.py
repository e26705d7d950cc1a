"""The states of a connection, without I/O, clock or loop. What goes over the wire is in credit.py.

Words and tables only: stream/machine.py takes events by them. The application's asyncio protocol is called by
stream/callbacks.py and, for received bytes, by _pyx/sink.pxi.

Theory
------
Four things have states, and each a literal table below: the connection as its application sees it (`State`), our half
of it (`Writing`), which may end earlier, what the application has been told of the end (`Told`), and the end of what is
below (`Ending`). No flag elsewhere is a state. An event goes to the first two; the others have events of their own. An
event that these tables do not have is illegal: it raises and changes nothing. If the peer is to blame, it raises a
ProtocolError, which comes back as `Event.PEER_VIOLATED`.

This file is not compiled: Cython would build the tables by C code that runs once, and takes 30 to 50 KB of a wheel.

The rules that the tables spell out:

* Only the peer's Fin means end of file. If a connection ends without it, the reader never gets end of file, only the
  loss of the connection. So nobody takes half a file for a whole one.
* Bytes that came before the end are delivered before the end is reported (DRAINING), unless the application has closed
  and wants no more.
* `write_eof()` ends our half: Fin goes after the last byte. Receiving and granting go on.
* `close()` does not wait for the peer's application. It stops reading, sends what was written, then Fin, and is done
  when Fin's send has completed: the channel is reliable and ordered, so the bytes are in the peer's memory by then.
* A disconnection after the peer's Fin, or while we close, is an error only if some of our bytes are lost.
* `abort()` takes effect at once: no error here, ConnectionResetError at the peer.
* A connection that was established is lost exactly once.

                                   DELIVERED
    OPENING --> OPEN --> EOF_PENDING --> EOF_RECEIVED
        |       ^| |       |   |           |      |     1: close(), or eof_received() declined
        v       || |1      |   |1          |1     |     2: the peer, or the fabric, ends it
      UNHEARD --+| |       |   |           |      |
                2| +-------(---+-----------+      |2
                 |        2|   |                  |
                 |         |   +---> CLOSING -----(---- our Fin has completed, or 2 --+
                 v         v                      |                                   |
             DRAINING    DRAINING_TO_EOF          |                                   |
                 |         |                      |                                   |
                 +---------+----- DELIVERED ------+-----------------> CLOSED <--------+

`abort()` and an exception in a callback lead to CLOSED from everywhere.
"""

from enum import Enum, IntFlag, auto
from typing import Final

from rdmanet.errors import ProtocolError


class _Row(Enum):
    """The tables are looked up by their members. Enum's own hash is that of the name, by a call of Python code."""

    __hash__ = object.__hash__


class Event(_Row):
    """What happens to a connection."""

    # from below
    ACCEPTED = auto()
    """Both sides are ready, and the protocol is to be made with the client's first frame, which has not come."""
    ESTABLISHED = auto()
    """Both sides are ready, and the protocol is made."""
    FIN_RECEIVED = auto()
    ABORT_RECEIVED = auto()
    FIN_COMPLETED = auto()
    """Our Fin's send has completed, hence all sends before it."""
    DISCONNECTED = auto()
    """The connection is gone, ended by the peer or by the fabric; all our bytes had arrived."""
    CUT_OFF = auto()
    """The same, but some of our bytes are lost, or may be."""
    PEER_VIOLATED = auto()
    """The peer broke the protocol; `error` says how."""
    # from the lifecycle
    DELIVERED = auto()
    """No received byte is left to deliver. This may come at any time if it is true, and more than once."""
    TIMED_OUT = auto()
    """The time for connecting, or for closing, is over. Before CLOSING it is that of a close() which waits."""
    # from the application
    WRITE_EOF = auto()
    CLOSE = auto()
    CLOSE_LATER = auto()
    """It called close(), which has to wait: until there is a connection, or until TLS above has written the rest."""
    ABORT = auto()
    WRITE_DROPPED = auto()
    """It wrote when the connection was already gone, which it could not know."""
    EOF_DECLINED = auto()
    """eof_received() returned a false value, so the transport closes itself."""
    CALLBACK_RAISED = auto()
    """A callback of the protocol raised `error`."""


class Action(IntFlag):
    """What the lifecycle must do. `for action in actions` yields the actions in the order to carry them out."""

    STOP_READING = 1
    """Deliver nothing any more. Bytes that still come are dropped, and their slots are granted again."""
    DISCARD_WRITES = 2
    """Drop what is written and not posted. A paused protocol gets resume_writing(), unless connection_lost() comes."""
    SEND_FIN = 4
    """Send Fin as soon as everything written is posted."""
    SEND_ABORT = 8
    DELIVER_EOF = 16
    """Call eof_received(); report a false value as EOF_DECLINED."""
    LOSE = 32
    """Call connection_lost(machine.error), after the callbacks that are due before it."""
    DISCONNECT = 64
    RELEASE = 128
    """Free what the connection holds, received bytes included."""
    RESUME_WRITING = 256
    """Call resume_writing()."""


class State(_Row):
    """The connection as its application sees it."""

    OPENING = auto()
    UNHEARD = auto()
    """The accepting side waits for the client's first frame, for a short time; connection_made() is not called yet."""
    OPEN = auto()
    EOF_PENDING = auto()
    """The peer's Fin came; bytes before it are not all delivered."""
    EOF_RECEIVED = auto()
    """eof_received() was called; we may still write."""
    CLOSING = auto()
    """Fin is due or on its way; then the connection is over."""
    DRAINING = auto()
    """It is over, without the peer's Fin; bytes that had come are delivered first."""
    DRAINING_TO_EOF = auto()
    """It is over, after the peer's Fin; bytes that had come are delivered first, then end of file."""
    CLOSED = auto()


class Writing(_Row):
    """Our half of the connection."""

    OPEN = auto()
    CLOSE_DUE = auto()
    """close() was called, and waits: what is written until then is sent before the Fin."""
    FIN_DUE = auto()
    """Fin is due, or on its way."""
    FIN_DELIVERED = auto()
    OVER = auto()
    """There is no connection to write to."""


class Ending(_Row):
    """How far the end of what is below has got: of the queue pair, and of memory. teardown.py carries it out."""

    CONNECTED = auto()
    FAREWELL = auto()
    """Our Abort is on its way; then the connection is disconnected."""
    LAST_WORDS = auto()
    """The same, but then everything is released."""
    DISCONNECTED = auto()
    """There is no connection any more, but received bytes may be left to deliver."""
    RELEASED = auto()


class EndingEvent(_Row):
    """What brings it further."""

    ABORT_POSTED = auto()
    DISCONNECT = auto()
    """The connection is over."""
    HEARD = auto()
    """The peer has our Abort, or its time is up, or it is gone."""
    RELEASE = auto()
    """Nobody needs the connection any more."""


class Told(_Row):
    """What the application has been told of the end."""

    NOTHING = auto()
    ROOM_HELD_BACK = auto()
    """resume_writing() was due, but connection_lost() will do: unless the reader pauses, and so keeps that back."""
    LEFT_TO_DEVICE = auto()
    """As over TCP: connection_lost() is called in the next turn, while the device sends the rest."""
    LOSS_HELD_BACK = auto()
    """connection_lost() waits until the peer has our Abort, because it may write to the program's memory until then."""
    LOSS = auto()
    """connection_lost() is being called, or was."""


class TellingEvent(_Row):
    """What decides that."""

    ROOM = auto()
    """It may write again, but the connection is over, and it reads what is left: connection_lost() is near."""
    READING_PAUSED = auto()
    LEAVE = auto()
    """It has closed, and expects TCP; everything is posted, from memory of ours."""
    HOLD_BACK = auto()
    """Our Abort is on its way, and the peer may write to the program's memory until it has that."""
    LOSE = auto()


_S, _E, _A, _W = State, Event, Action, Writing
_T, _I, _N, _B = Told, TellingEvent, Ending, EndingEvent

NOTHING: Final = Action(0)
_DROP: Final = _A.STOP_READING | _A.DISCARD_WRITES
_CUT: Final = _A.DISCARD_WRITES | _A.DISCONNECT
_END: Final = _A.LOSE | _A.DISCONNECT | _A.RELEASE
_FREE: Final = _A.LOSE | _A.RELEASE  # where DISCONNECT was asked for already
_FAIL: Final = _A.DISCONNECT | _A.RELEASE  # where nobody was told of a connection

_RESET: Final = ConnectionResetError
_TIMEOUT: Final = TimeoutError

_Change = tuple[State, Action, type[OSError] | None]

# In OPENING and UNHEARD connection_made() has not been called, so connection_lost() will not be called, either.
_NEVER_MADE: Final[dict[Event, _Change]] = {
    _E.DISCONNECTED: (_S.CLOSED, _FAIL, _RESET),
    _E.CUT_OFF: (_S.CLOSED, _FAIL, _RESET),
    _E.PEER_VIOLATED: (_S.CLOSED, _FAIL, ProtocolError),
    _E.TIMED_OUT: (_S.CLOSED, _FAIL, _TIMEOUT),
    _E.CLOSE: (_S.CLOSED, _FAIL, None),
    _E.ABORT: (_S.CLOSED, _FAIL, None),
}

# The application's own end of an established connection.
_OUR_END: Final[dict[Event, _Change]] = {
    _E.TIMED_OUT: (_S.CLOSED, _DROP | _A.SEND_ABORT | _END, _TIMEOUT),
    _E.CLOSE: (_S.CLOSING, _A.STOP_READING, None),
    _E.ABORT: (_S.CLOSED, _DROP | _A.SEND_ABORT | _END, None),
    _E.CALLBACK_RAISED: (_S.CLOSED, _DROP | _A.SEND_ABORT | _END, _RESET),
}

# The end was reported once, and the first cause stays. Events that still come from below only repeat it.
_REPEATS: Final = (_E.ABORT_RECEIVED, _E.DISCONNECTED, _E.CUT_OFF, _E.PEER_VIOLATED, _E.WRITE_EOF)

# {state: {event: (new state, actions, the kind of error it is, if it is one)}}
STATES: Final[dict[State, dict[Event, _Change]]] = {
    _S.OPENING: {
        _E.ACCEPTED: (_S.UNHEARD, NOTHING, None),
        _E.ESTABLISHED: (_S.OPEN, NOTHING, None),
        **_NEVER_MADE,
    },
    _S.UNHEARD: {_E.ESTABLISHED: (_S.OPEN, NOTHING, None), **_NEVER_MADE},
    _S.OPEN: {
        **dict.fromkeys((_E.DELIVERED, _E.WRITE_EOF, _E.WRITE_DROPPED), (_S.OPEN, NOTHING, None)),
        _E.FIN_RECEIVED: (_S.EOF_PENDING, NOTHING, None),
        _E.ABORT_RECEIVED: (_S.DRAINING, _CUT, _RESET),
        _E.DISCONNECTED: (_S.DRAINING, _CUT, _RESET),
        _E.CUT_OFF: (_S.DRAINING, _CUT, _RESET),
        _E.PEER_VIOLATED: (_S.DRAINING, _CUT | _A.SEND_ABORT, ProtocolError),
        **_OUR_END,
    },
    _S.EOF_PENDING: {
        **dict.fromkeys((_E.WRITE_EOF, _E.WRITE_DROPPED), (_S.EOF_PENDING, NOTHING, None)),
        _E.ABORT_RECEIVED: (_S.DRAINING_TO_EOF, _CUT, _RESET),
        _E.DISCONNECTED: (_S.DRAINING_TO_EOF, _CUT, None),
        _E.CUT_OFF: (_S.DRAINING_TO_EOF, _CUT, _RESET),
        _E.PEER_VIOLATED: (_S.DRAINING_TO_EOF, _CUT | _A.SEND_ABORT, ProtocolError),
        _E.DELIVERED: (_S.EOF_RECEIVED, _A.DELIVER_EOF, None),
        **_OUR_END,
    },
    _S.EOF_RECEIVED: {
        **dict.fromkeys((_E.DELIVERED, _E.WRITE_EOF, _E.WRITE_DROPPED), (_S.EOF_RECEIVED, NOTHING, None)),
        _E.ABORT_RECEIVED: (_S.CLOSED, _DROP | _END, _RESET),
        _E.DISCONNECTED: (_S.CLOSED, _DROP | _END, None),
        _E.CUT_OFF: (_S.CLOSED, _DROP | _END, _RESET),
        _E.PEER_VIOLATED: (_S.CLOSED, _DROP | _A.SEND_ABORT | _END, ProtocolError),
        _E.EOF_DECLINED: (_S.CLOSING, _A.STOP_READING, None),
        **_OUR_END,
    },
    # Nobody reads any more, so it makes no difference whether the peer's Fin has come.
    _S.CLOSING: {
        **dict.fromkeys(
            (_E.FIN_RECEIVED, _E.DELIVERED, _E.WRITE_EOF, _E.CLOSE, _E.WRITE_DROPPED, _E.EOF_DECLINED),
            (_S.CLOSING, NOTHING, None),
        ),
        _E.ABORT_RECEIVED: (_S.CLOSED, _A.DISCARD_WRITES | _END, _RESET),
        _E.DISCONNECTED: (_S.CLOSED, _A.DISCARD_WRITES | _END, None),
        _E.CUT_OFF: (_S.CLOSED, _A.DISCARD_WRITES | _END, _RESET),
        _E.PEER_VIOLATED: (_S.CLOSED, _A.DISCARD_WRITES | _A.SEND_ABORT | _END, ProtocolError),
        _E.TIMED_OUT: (_S.CLOSED, _A.DISCARD_WRITES | _A.SEND_ABORT | _END, _TIMEOUT),
        _E.ABORT: (_S.CLOSED, _A.DISCARD_WRITES | _A.SEND_ABORT | _END, None),
        _E.CALLBACK_RAISED: (_S.CLOSED, _A.DISCARD_WRITES | _A.SEND_ABORT | _END, _RESET),
    },
    _S.DRAINING: {
        **dict.fromkeys(_REPEATS, (_S.DRAINING, NOTHING, None)),
        _E.FIN_RECEIVED: (_S.DRAINING, NOTHING, None),
        _E.WRITE_DROPPED: (_S.DRAINING, NOTHING, None),
        _E.DELIVERED: (_S.CLOSED, _FREE, None),
        _E.TIMED_OUT: (_S.CLOSED, _A.STOP_READING | _FREE, _TIMEOUT),
        _E.CLOSE: (_S.CLOSED, _A.STOP_READING | _FREE, None),
        _E.ABORT: (_S.CLOSED, _A.STOP_READING | _FREE, None),
        _E.CALLBACK_RAISED: (_S.CLOSED, _A.STOP_READING | _FREE, _RESET),
    },
    _S.DRAINING_TO_EOF: {
        **dict.fromkeys(_REPEATS, (_S.DRAINING_TO_EOF, NOTHING, None)),
        _E.DELIVERED: (_S.CLOSED, _A.DELIVER_EOF | _FREE, None),
        _E.TIMED_OUT: (_S.CLOSED, _A.STOP_READING | _FREE, _TIMEOUT),
        _E.CLOSE: (_S.CLOSED, _A.STOP_READING | _FREE, None),
        _E.ABORT: (_S.CLOSED, _A.STOP_READING | _FREE, None),
        _E.WRITE_DROPPED: (_S.DRAINING_TO_EOF, NOTHING, _RESET),
        _E.CALLBACK_RAISED: (_S.CLOSED, _A.STOP_READING | _FREE, _RESET),
    },
    _S.CLOSED: dict.fromkeys(
        set(Event) - {_E.ACCEPTED, _E.ESTABLISHED, _E.FIN_COMPLETED, _E.CLOSE_LATER},
        (_S.CLOSED, NOTHING, None),
    ),
}

_ENDS_OURS: Final = (_E.WRITE_EOF, _E.CLOSE, _E.EOF_DECLINED)

# {our half: {event: (our half, actions)}}; events that are in no row do not concern our half.
WRITING: Final[dict[Writing, dict[Event, tuple[Writing, Action]]]] = {
    _W.OPEN: {
        **dict.fromkeys(_ENDS_OURS, (_W.FIN_DUE, _A.SEND_FIN)),
        _E.CLOSE_LATER: (_W.CLOSE_DUE, NOTHING),
    },
    _W.CLOSE_DUE: {
        **dict.fromkeys((_E.WRITE_EOF, _E.CLOSE_LATER), (_W.CLOSE_DUE, NOTHING)),
        _E.CLOSE: (_W.FIN_DUE, _A.SEND_FIN),
        _E.EOF_DECLINED: (_W.FIN_DUE, _A.SEND_FIN),
    },
    _W.FIN_DUE: {
        **dict.fromkeys(_ENDS_OURS, (_W.FIN_DUE, NOTHING)),
        _E.FIN_COMPLETED: (_W.FIN_DELIVERED, NOTHING),
    },
    _W.FIN_DELIVERED: dict.fromkeys(_ENDS_OURS, (_W.FIN_DELIVERED, NOTHING)),
    _W.OVER: dict.fromkeys((*_ENDS_OURS, _E.FIN_COMPLETED), (_W.OVER, NOTHING)),
}

# What follows from the two states together.
TOGETHER: Final[dict[tuple[State, Writing], tuple[State, Action, None]]] = {
    (_S.CLOSING, _W.FIN_DELIVERED): (_S.CLOSED, _END, None),
}

# {told: {event: (told, action)}}
TELLING: Final[dict[Told, dict[TellingEvent, tuple[Told, Action]]]] = {
    _T.NOTHING: {
        _I.ROOM: (_T.ROOM_HELD_BACK, NOTHING),
        _I.READING_PAUSED: (_T.NOTHING, NOTHING),
        _I.LEAVE: (_T.LEFT_TO_DEVICE, _A.LOSE),
        _I.HOLD_BACK: (_T.LOSS_HELD_BACK, NOTHING),
        _I.LOSE: (_T.LOSS, _A.LOSE),
    },
    _T.ROOM_HELD_BACK: {
        **dict.fromkeys(TellingEvent, (_T.ROOM_HELD_BACK, NOTHING)),
        _I.READING_PAUSED: (_T.NOTHING, _A.RESUME_WRITING),
        _I.HOLD_BACK: (_T.LOSS_HELD_BACK, NOTHING),
        _I.LOSE: (_T.LOSS, _A.LOSE),
    },
    _T.LEFT_TO_DEVICE: {
        **dict.fromkeys(TellingEvent, (_T.LEFT_TO_DEVICE, NOTHING)),
        _I.LOSE: (_T.LOSS, _A.LOSE),
    },
    _T.LOSS_HELD_BACK: {
        **dict.fromkeys(TellingEvent, (_T.LOSS_HELD_BACK, NOTHING)),
        _I.LOSE: (_T.LOSS, _A.LOSE),
    },
    _T.LOSS: dict.fromkeys(TellingEvent, (_T.LOSS, NOTHING)),
}

# A disconnection takes another path than our Abort, and would overtake it: so it waits, and so does the release.
# {ending: {event: (ending, action)}}
ENDINGS: Final[dict[Ending, dict[EndingEvent, tuple[Ending, Action]]]] = {
    _N.CONNECTED: {
        _B.ABORT_POSTED: (_N.FAREWELL, NOTHING),
        _B.DISCONNECT: (_N.DISCONNECTED, _A.DISCONNECT),
        _B.HEARD: (_N.CONNECTED, NOTHING),
        _B.RELEASE: (_N.RELEASED, _A.RELEASE),
    },
    _N.FAREWELL: {
        **dict.fromkeys((_B.ABORT_POSTED, _B.DISCONNECT), (_N.FAREWELL, NOTHING)),
        _B.HEARD: (_N.DISCONNECTED, _A.DISCONNECT),
        _B.RELEASE: (_N.LAST_WORDS, NOTHING),
    },
    _N.LAST_WORDS: {
        **dict.fromkeys((_B.ABORT_POSTED, _B.DISCONNECT, _B.RELEASE), (_N.LAST_WORDS, NOTHING)),
        _B.HEARD: (_N.RELEASED, _A.RELEASE),
    },
    _N.DISCONNECTED: {
        **dict.fromkeys((_B.ABORT_POSTED, _B.DISCONNECT, _B.HEARD), (_N.DISCONNECTED, NOTHING)),
        _B.RELEASE: (_N.RELEASED, _A.RELEASE),
    },
    _N.RELEASED: dict.fromkeys(EndingEvent, (_N.RELEASED, NOTHING)),
}
