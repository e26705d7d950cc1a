"""The key that one peer has to a region while the region is on offer to it: how the key is made, and how it ends.

Theory
------
The region's own key is valid on every connection of its protection domain, for as long as the region is registered. So
no peer is told that key, and a region on offer must give it no remote rights. The peer gets another key, bound to this
offer:

    window          if the device has memory windows of type 2. BIND_MW on the connection's queue pair makes a key that
                    is valid for this one peer; LOCAL_INV ends it
    registration    otherwise. The same memory is registered once more, with the rights on offer, and deregistered in
                    the end. This binds the key to the lifetime of the offer, but not to the connection

A binding begins and ends without depending on the peer. Binding is a work request, which waits behind earlier ones, and
the peer may hold those up: if the key is not made in time, the connection ends. At the end the peer is told, and has
some time to finish what it has begun. Then the key is invalidated, whatever the peer has said. Invalidating is a work
request, too. So if it takes more than another second (ten looks, since a busy loop comes late), the queue pair goes to
ERR, which ends the connection, and the window is given back. When it is OVER, nobody can begin anything with this key.

One thing may remain on the embedded device: a process that maps our memory, and was stopped in the middle of a copy,
finishes the piece that it was copying when it continues. Then the invalidation fails, and the connection with it.

                bound             left               acknowledged, or late                done
    BINDING ----------> GRANTED --------> REVOKING -------------------------> INVALIDATING ------> OVER
      |  |                                                                       ^    | stuck: the connection is cut off
      |  | left                        bound                                     |    +--------------------------> OVER
      |  +----> UNWANTED --------------------------------------------------------+
      |            | stuck: the connection is cut off
      +------------+---------------------------------------------------------------------------------------------> OVER

From each of these states it is OVER when the queue pair is in ERR and about to be destroyed. Completions and timers
drive it, not a coroutine: if whoever awaits its end is cancelled, it goes on. Until it is OVER, the region cannot be
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from rdmanet._core import MR, MW, PD, AccessFlags, Connection, MWType, StreamEngine, region_for_peers
from rdmanet.errors import ProtocolError, completion_error, shown

if TYPE_CHECKING:
    from rdmanet.wire.remote import RemoteMemory

STUCK_AFTER_S = 1.0  # in addition to the peer's time: for the queue pair to get to the invalidation
LOOKS = 10  # in that time, to post what waits for room

_REMOTE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_NAMED = {
    "read": AccessFlags.REMOTE_READ,
    "write": AccessFlags.REMOTE_WRITE,
    "atomic": AccessFlags.REMOTE_ATOMIC,
}
_REMOTE_CHANGES = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_FLUSHED = 5  # IBV_WC_WR_FLUSH_ERR
_RESPONSE_TIMEOUT = 20  # IBV_WC_RESP_TIMEOUT_ERR


class State(Enum):
    BINDING = auto()
    GRANTED = auto()
    UNWANTED = auto()
    REVOKING = auto()
    INVALIDATING = auto()
    OVER = auto()


class Event(Enum):
    BOUND = auto()
    LEFT = auto()
    ACKNOWLEDGED = auto()
    LATE = auto()
    INVALIDATED = auto()
    STUCK = auto()
    LOST = auto()


class Action(Enum):
    """In the order in which they are carried out."""

    GRANT = auto()
    INVALIDATE = auto()
    STOP = auto()  # the queue pair: from then on it executes nothing
    FREE = auto()
    CUT_OFF = auto()  # the connection


_S, _E, _A = State, Event, Action
_NOTHING: Final = ()

TABLE: Final[dict[State, dict[Event, tuple[State, tuple[Action, ...]]]]] = {
    _S.BINDING: {
        _E.BOUND: (_S.GRANTED, (_A.GRANT,)),
        _E.LEFT: (_S.UNWANTED, _NOTHING),
        _E.LATE: (_S.BINDING, _NOTHING),
        _E.STUCK: (_S.OVER, (_A.STOP, _A.FREE, _A.CUT_OFF)),
        _E.LOST: (_S.OVER, (_A.FREE,)),
    },
    _S.UNWANTED: {
        _E.BOUND: (_S.INVALIDATING, (_A.INVALIDATE,)),
        _E.LATE: (_S.UNWANTED, _NOTHING),
        _E.STUCK: (_S.OVER, (_A.STOP, _A.FREE, _A.CUT_OFF)),
        _E.LOST: (_S.OVER, (_A.FREE,)),
    },
    _S.GRANTED: {
        _E.LEFT: (_S.REVOKING, _NOTHING),
        _E.STUCK: (_S.GRANTED, _NOTHING),  # at the last moment
        _E.LOST: (_S.OVER, (_A.FREE,)),
    },
    _S.REVOKING: {
        _E.ACKNOWLEDGED: (_S.INVALIDATING, (_A.INVALIDATE,)),
        _E.LATE: (_S.INVALIDATING, (_A.INVALIDATE,)),
        _E.LOST: (_S.OVER, (_A.FREE,)),
    },
    _S.INVALIDATING: {
        _E.ACKNOWLEDGED: (_S.INVALIDATING, _NOTHING),  # after all
        _E.LATE: (_S.INVALIDATING, _NOTHING),
        _E.INVALIDATED: (_S.OVER, (_A.FREE,)),
        _E.STUCK: (_S.OVER, (_A.STOP, _A.FREE, _A.CUT_OFF)),
        _E.LOST: (_S.OVER, (_A.FREE,)),
    },
    _S.OVER: dict.fromkeys(Event, (_S.OVER, _NOTHING)),
}
_QUEUED: Final = (_S.BINDING, _S.UNWANTED, _S.INVALIDATING)  # in them a work request is on its way


class HeldOffer(NamedTuple):
    """What one peer has of memory that is on offer."""

    peer: tuple[object, ...] | None
    """Its address."""
    key: int | None
    """The key by which it reaches the memory; None while that is made."""
    length: int
    access: AccessFlags
    is_revoked: bool
    """The block of ``offer()`` has ended, and the peer has yet to let go."""


class BindingOwner(Protocol):
    """What a binding needs of its connection's ``Regions``."""

    @property
    def peer(self) -> tuple[object, ...] | None: ...

    @property
    def connection(self) -> Connection: ...

    @property
    def engine(self) -> StreamEngine: ...

    def submit(self, operation: Request) -> None:
        """Post it, or let it wait for its turn. Raises OSError if the connection is over."""

    def stop_queue_pair(self) -> None: ...

    def binding_stuck(self, error: OSError) -> None: ...

    def binding_over(self, binding: Binding) -> None: ...


class Binding:
    """One peer's key to one of our regions.

    :ivar granted: the key, as soon as it is valid; an OSError if it never will be
    :ivar over: done when nobody has a key any more
    :ivar number: the number of the offer, once it has one
    :ivar mr: the region
    :ivar part: that part of it which the key is to
    :ivar rights: what the peer may do with it
    """

    def __init__(
        self,
        owner: BindingOwner,
        mr: MR,
        rights: AccessFlags,
        loop: asyncio.AbstractEventLoop,
        closes_region: bool = False,
        part: RemoteMemory | None = None,
    ) -> None:
        """
        :param closes_region: the region is this binding's own, and is closed when it is over
        :param part: of the region, to which alone there is a key
        """
        self.state = State.BINDING
        self.number: int | None = None
        self.granted: asyncio.Future[int] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self._owner = owner
        self._loop = loop
        self.mr = mr
        self.part = mr.to_remote() if part is None else part
        self.rights = rights
        self._closes_region = closes_region
        self._key: _Window | _Registration | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        mr._offered(1)

    def held(self) -> HeldOffer:
        """What the peer has by it."""
        made = self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None
        is_revoked = self.state not in (State.BINDING, State.GRANTED)
        key = self.granted.result() if made else None
        return HeldOffer(self._owner.peer, key, self.part.length, self.rights, is_revoked)

    def begin(self, patience_s: float) -> None:
        """Start making the key, which may take ``patience_s`` seconds. If it fails, it raises OSError and is over."""
        try:
            self._key = _key_for(self._owner, self.mr, self.part, self.rights)
            self._key.bind(self._bound)
        except BaseException:
            self.lost()
            raise
        if self.state is State.BINDING:
            self._timer = self._loop.call_later(patience_s, self._late)

    def leave(self, told: bool, patience_s: float) -> None:
        """Begin to take the key back.

        :param told: the peer knows of the offer, and has ``patience_s`` seconds to let go
        """
        if self.state is State.OVER:
            return
        self._stop_timer()
        self._timer = self._loop.call_later(patience_s if told else 0, self._late)
        self._receive(Event.LEFT)
        if not told and self.state is State.REVOKING:
            self._receive(Event.ACKNOWLEDGED)

    def acknowledged(self) -> None:
        """The peer has let go."""
        self._receive(Event.ACKNOWLEDGED)

    def lost(self) -> None:
        """The queue pair executes nothing any more, or the key was never made."""
        self._receive(Event.LOST)

    def _bound(self) -> None:
        self._receive(Event.BOUND)

    def _late(self) -> None:
        # After this timer, not beside it: the loop may have been kept from its timers for longer than both.
        self._looks = LOOKS
        self._timer = self._loop.call_later(STUCK_AFTER_S / LOOKS, self._look)
        self._receive(Event.LATE)

    def _look(self) -> None:
        self._timer = None
        self._owner.engine.drain()  # it may have been done long ago
        self._looks -= 1
        if not self._looks or self.state not in _QUEUED:
            return self._receive(Event.STUCK)
        self._timer = self._loop.call_later(STUCK_AFTER_S / LOOKS, self._look)

    def _receive(self, event: Event) -> None:
        before = self.state
        self.state, actions = TABLE[before][event]
        if Action.GRANT in actions:
            assert self._key is not None
            self._stop_timer()
            if not self.granted.done():
                self.granted.set_result(self._key.rkey)
        if Action.INVALIDATE in actions:
            assert self._key is not None
            # If nothing can be posted any more, the queue pair is about to be destroyed, or STUCK follows.
            with contextlib.suppress(OSError):
                self._key.invalidate(lambda: self._receive(Event.INVALIDATED))
        if Action.STOP in actions:
            self._owner.stop_queue_pair()
        stuck: OSError | None = None
        if Action.CUT_OFF in actions:
            stuck = TimeoutError(
                errno.ETIMEDOUT,
                "a key that the peer had could not be taken back in time"
                if before is State.INVALIDATING
                else "a region could not be put on offer in time, since the peer holds up what was sent before: "
                "the connection is cut off",
            )
        if Action.FREE in actions:
            self._free(stuck)
        if stuck is not None:
            self._owner.binding_stuck(stuck)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free(self, error: OSError | None) -> None:
        self._stop_timer()
        key, self._key = self._key, None
        try:
            if key is not None:
                key.close()
        finally:
            self.mr._offered(-1)
            self._owner.binding_over(self)
            if not self._loop.is_closed():
                if not self.granted.done():
                    lost = ConnectionResetError(
                        errno.ECONNRESET, "the connection ended before a region was on offer"
                    )
                    self.granted.set_exception(lost if error is None else error)
                    self.granted.exception()  # whoever waited for it may be gone
                if not self.over.done():
                    self.over.set_result(None)
            if self._closes_region:
                self.mr.close()

    def __repr__(self) -> str:
        return f"<Binding {self.state.name.lower()} of {self.mr!r}>"


# ---------------------------------------------------------------------------
# The two kinds of key
# ---------------------------------------------------------------------------


def has_windows(engine: StreamEngine) -> bool:
    """Whether keys can be bound to a connection on this engine's device."""
    return engine.has_windows()


def _key_for(owner: BindingOwner, mr: MR, part: RemoteMemory, rights: AccessFlags) -> _Window | _Registration:
    if has_windows(owner.engine):
        try:
            return _Window(owner, mr, part, rights)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # otherwise the device has windows, but its library does not
    return _Registration(owner, mr, part, rights)


class _Window:
    def __init__(self, owner: BindingOwner, mr: MR, part: RemoteMemory, rights: AccessFlags) -> None:
        self._owner, self._mr, self._part, self._rights = owner, mr, part, rights
        self._mw = MW(owner.engine.pd, MWType.TYPE_2)
        # The lowest byte is ours to choose. It must differ from the present one, which some devices refuse.
        before = self._mw.rkey
        self.rkey = before & ~0xFF | (before + 1 + os.urandom(1)[0] % 255) & 0xFF

    def bind(self, done: Callable[[], None]) -> None:
        bound = (self._mw, self._mr, self.rkey, self._rights, self._part.address, self._part.length)
        self._owner.submit(Request("BIND_MW", lambda connection, it: connection.post_bind(it, *bound), done))

    def invalidate(self, done: Callable[[], None]) -> None:
        key = self.rkey
        self._owner.submit(
            Request("LOCAL_INV", lambda connection, it: connection.post_invalidate(it, key), done)
        )

    def close(self) -> None:
        self._mw.close()


class _Registration:
    def __init__(self, owner: BindingOwner, mr: MR, part: RemoteMemory, rights: AccessFlags) -> None:
        access = rights | mr.access & AccessFlags.ZERO_BASED
        if rights & _REMOTE_CHANGES:
            access |= AccessFlags.LOCAL_WRITE
        memory: MR | memoryview = mr
        if part.length < mr.length:
            begin = part.address - mr.to_remote().address
            memory = memoryview(mr)[begin : begin + part.length]
        self._mr = region_for_peers(owner.engine.pd, memory, access)
        self.rkey = self._mr.rkey

    def bind(self, done: Callable[[], None]) -> None:
        done()

    def invalidate(self, done: Callable[[], None]) -> None:
        self._mr.close()
        done()

    def close(self) -> None:
        self._mr.close()


class Request:
    """BIND_MW or LOCAL_INV, in the form that ``Regions`` and the engine's log expect (memory.Posted)."""

    __slots__ = ("_done", "_post", "what")

    def __init__(
        self, what: str, post: Callable[[Connection, Request], bool], done: Callable[[], None]
    ) -> None:
        self.what = what
        self._post = post
        self._done = done

    def post(self, connection: Connection) -> bool:
        return self._post(connection, self)

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._done()  # otherwise the connection is over, and the binding with it

    def failure(self, status: int, vendor_err: int, qp_num: int) -> OSError:
        """The exception for its failed completion."""
        if self.what == "LOCAL_INV" and status == _RESPONSE_TIMEOUT:
            return TimeoutError(
                errno.ETIMEDOUT,
                "the peer was stopped while it used a region that was on offer to it, which is taken back: it may "
                "finish the piece that it was at when it goes on",
            )
        if self.what == "LOCAL_INV" and status != _FLUSHED:
            # Only the peer has the key, too, and can invalidate it with SEND_WITH_INV.
            return ProtocolError("the peer has invalidated the key of a region that is on offer to it")
        return completion_error(status, self.what, vendor_err, qp_num)


# ---------------------------------------------------------------------------
# What may be offered
# ---------------------------------------------------------------------------


def rights_of(access: AccessFlags | str) -> AccessFlags:
    """The remote rights that `access` names.

    :raises ValueError: they are none
    """
    if isinstance(access, str):
        rights = AccessFlags(0)
        for word in access.split(","):
            if word.strip() not in _NAMED:
                raise ValueError(
                    f"access {shown(access)}: use 'read', 'write', 'atomic', or several with commas"
                )
            rights |= _NAMED[word.strip()]
    else:
        rights = AccessFlags(access)
    if not rights or rights & ~_REMOTE:
        raise ValueError(
            f"offer(): {shown(rights)} are no remote rights: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC"
        )
    return rights


def region_of(buffer: Any, rights: AccessFlags, pd: PD) -> MR:
    """A region of a buffer that can be offered with these rights.

    :raises TypeError: it is no buffer
    :raises BufferError: it is read-only and the peer is to change it, or it is not contiguous
    :raises OSError: it cannot be registered
    """
    needed = AccessFlags.MW_BIND
    if rights & _REMOTE_CHANGES:
        needed |= AccessFlags.LOCAL_WRITE
    try:
        return region_for_peers(pd, buffer, needed)
    except TypeError:
        raise TypeError(
            f"offer(): {type(buffer).__name__!r} is neither a memory region nor an object with the buffer protocol"
        ) from None


def check_offerable(mr: MR, rights: AccessFlags, engine: StreamEngine) -> None:
    """Raise ValueError if `mr` cannot be offered with these rights; the text says why."""
    if mr.pd is not engine.pd:
        raise ValueError(
            f"offer(): {mr!r} is of another protection domain than the connection: "
            "register it with transport.get_extra_info('rdma_pd')"
        )
    if mr.access & _REMOTE:
        raise ValueError(
            f"offer(): {mr!r} has remote rights of its own: every connection of its protection domain that guesses "
            "its key could use them, at any time. Register it with AccessFlags.MW_BIND instead (and LOCAL_WRITE, if "
            "the peer is to change it); the peer gets a key of its own"
        )
    if rights & _REMOTE_CHANGES and not mr.access & AccessFlags.LOCAL_WRITE:
        raise ValueError(
            f"offer(): {mr!r} was registered without AccessFlags.LOCAL_WRITE, so no peer may change it"
        )
    if not mr.access & AccessFlags.MW_BIND and has_windows(engine):
        raise ValueError(
            f"offer(): {mr!r} was registered without AccessFlags.MW_BIND: no key for one peer can be made of it"
        )


def patience(revoke_timeout: float) -> float:
    """The revoke_timeout, checked.

    :raises ValueError: it is not a finite number of seconds
    """
    if not isinstance(revoke_timeout, int | float) or not 0 <= revoke_timeout < math.inf:
        raise ValueError(
            f"offer(): revoke_timeout is {shown(revoke_timeout)}, it must be a finite number of seconds: "
            "a peer that never lets go would keep the memory for ever"
        )
    return revoke_timeout
