# cython: annotation_typing=False
"""Flow control: credits, and the frames that carry them.

Theory
------
Each side of a connection posts a ring of receives: `data_slots` for bytes and a few more for
control frames. A SEND that finds no posted receive kills a reliable connection (or stalls it, and
then kills it), so a side sends a frame only if it knows that a receive is posted for it. Two rules
ensure that, one for data and one for control frames.

*Data costs a credit.* A side grants credits for the receives it has posted, and the peer sends no
more data frames than it was granted. Counts are cumulative since the start of the connection,
modulo 2**32, never deltas: so a grant that is late, repeated or merged with a later one keeps its
meaning. The header of every frame contains them; a side that has no bytes to send sends them in a
Credit frame. A slot is granted again only after its bytes are consumed and its receive is posted
again, hence always

    posted receives >= credits granted and not yet used + control frames that may come.

*Control frames are bounded by construction*, because a side without credits must still be able to
grant some. At most two Credits, one Ping, one Pong, one Fin and one Abort may be unanswered at a
time. Every header counts the control frames that its sender has reaped (received, and posted their
receives again); the channel keeps order, so the n-th control frame is answered when that count
reaches n. The proof of liveness below needs two stricter rules: a Ping is answered only by its Pong, and
a Fin or an Abort is sent only once.

`Ledger` counts; the rest of this file packs and checks the bodies, whose classes are in base/bodies.py. The data engine
reads and writes headers itself (_pyx/receiving.pxi: `receive_frame`, _pyx/chaining.pxi: `chain_frame`), and a Credit
that says only a slot size (_pyx/ownring.pxi). `pack_header` and `unpack_header` are for tests.

The file has more than 500 lines: it is the whole of what `VERSION` stands for, and nearly a quarter of it is text.

Liveness
--------
A grant gets a frame of its own when it is at least as large as the credits that the peer has left:
if nothing is held back, that is half the ring; if the peer has none left, any grant. Suppose that
the side may not send it, because two Credits are unanswered. If the peer still has credits, it
either sends, and its header answers the Credits, or it has nothing to send and needs no grant. If
the peer has no credits left, its last data frame used the last credit granted. So that frame was
sent after the granting frame had arrived, and answered it and all earlier ones. The unanswered
Credits came later, granted nothing, and only carried updates of memory regions. This is the case
for the Ping: the header of the Pong answers everything. A Pong can always be sent: the next Ping is
sent only after the previous Pong was reaped, and its own header says so. Nothing is ever sent
merely because a Credit arrived, so two idle sides fall silent.

This file does no I/O and knows no device. It is Python that setup.py also compiles (credit.pxd has
the C types), so that the data engine uses the same code that the tests check in both forms. Hence
the plain style of Ledger: every number is a C integer there.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

from rdmanet.errors import ProtocolError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from rdmanet.base.bodies import Credit as Credit
    from rdmanet.base.bodies import Region as Region
    from rdmanet.base.bodies import Want as Want

VERSION: Final = 1
"""The version of this protocol: of everything that streams of two processes say to each other.

It moves by one with every release that changes a frame, a body or their meaning so that an older side would
misunderstand it; what only a `features` bit of the Hello switches on does not move it. Versions are compared for
equality, and the side that is asked refuses another one with a Refusal that says both. Hence magic, version and length,
and the Refusal, never change. The embedded device's protocol has its own version: soft/base/version.h.
"""
MAGIC: Final = b"RDMN"

# ---------------------------------------------------------------------------
# Frames: a header of 16 bytes, then bytes (Data) or a msgpack body
# ---------------------------------------------------------------------------


class Kind(IntEnum):
    """The kind of a frame. Data and Placed cost a credit; the others are control frames."""

    DATA = 1
    CREDIT = 2
    PING = 3
    PONG = 4
    FIN = 5
    ABORT = 6
    PLACED = 7
    """Tells of bytes that were written into memory that the receiver wanted them in (placement.py)."""


ALLOWANCE: Final = {Kind.CREDIT: 2, Kind.PING: 1, Kind.PONG: 1, Kind.FIN: 1, Kind.ABORT: 1}
"""Control frames of each kind that may be unanswered at a time."""

CONTROL_ALLOWANCE: Final = sum(ALLOWANCE.values())
"""The sum of all kinds, and the minimum of a peer's control_slots."""

CONTROL_SLOTS: Final = 8
"""Receives that are posted for control frames: two more than can arrive, so that a pass over the
completions may take a few before it posts their receives again."""

HEADER: Final = Struct("<IIII")
HEADER_BYTES: Final = HEADER.size
PING_BYTES: Final = 8
PLACED_BODY: Final = Struct("<IIQ")
"""A Placed's body: the Want's serial number, zero, and the position in the stream after the bytes."""
PLACED_BYTES: Final = PLACED_BODY.size
CONTROL_BYTES_MAX: Final = 4096
"""The size of a control frame with its header. Longer region updates take several frames."""


class Header(NamedTuple):
    """The header of a frame.

    The kind is the first byte; the next three are reserved for flags, which version 1 does not have.
    They are read as one number, so that a frame with a flag set is a frame of unknown kind.
    """

    kind: int
    length: int
    granted: int
    reaped: int


def pack_header(kind: int, length: int, granted: int, reaped: int) -> bytes:
    return HEADER.pack(kind, length, granted, reaped)


def unpack_header(frame: bytes | bytearray | memoryview) -> Header:
    """Parse a frame's header; Ledger.frame_received() checks the numbers."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is shorter than its {HEADER_BYTES}-byte header")
    return Header(*HEADER.unpack_from(frame))


# ---------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------

SLOT_BYTES_MIN: Final = 512
"""A Credit with one region of the longest name fits."""
SLOT_BYTES_MAX: Final = 1 << 24
DATA_SLOTS_MAX: Final = 65535
NAME_BYTES_MAX: Final = 255
REASON_BYTES_MAX: Final = 120
"""So that it fits, with its frame, into the 148 bytes of InfiniBand's reject message."""
HELLO_BYTES_MAX: Final = 56
"""The private data of a connect request in InfiniBand's port space RDMA_PS_TCP."""

FEATURE_PLACEMENT: Final = 1
"""Hello.features: this side knows direct placement. It is used if both sides do."""
FEATURE_GROWTH: Final = 2
"""The same for slots that grow (slots.py)."""
FEATURE_SOLICITS: Final = 4
"""Hello.features: this side marks all its SENDs as solicited (IBV_SEND_SOLICITED); its peer may arm for those only."""
FEATURE_ELSEWHERE: Final = 8
"""Hello.features: this side connects, and understands a Refusal with a port. It goes there once."""


class Hello(NamedTuple):
    """The parameters of a side, sent once, in the connection manager's private data."""

    slot_bytes: int
    data_slots: int
    control_slots: int = CONTROL_SLOTS
    credits: int = 0
    features: int = 0


class RefusalCode(IntEnum):
    """Why a connection was refused."""

    PROTOCOL = 1
    VERSION = 2
    BUSY = 3
    CLOSING = 4
    ERROR = 5
    ELSEWHERE = 6
    """Another process of the same server takes this connection, at Refusal.port."""


class Refusal(NamedTuple):
    """Why a connection was refused, sent in the connection manager's reject message.

    The port is there only with ELSEWHERE, which only a side with FEATURE_ELSEWHERE gets.
    """

    code: int
    reason: str
    port: int = 0


REGION_ACCESS_MASK: Final = 2 | 4 | 8
"""IBV_ACCESS_REMOTE_WRITE, _READ and _ATOMIC: the access rights that a region may have."""


class AbortCode(IntEnum):
    """Why a side ended the connection without Fin."""

    ABORTED = 1
    PROTOCOL = 2
    TIMEOUT = 3
    CALLBACK = 4


class Abort(NamedTuple):
    """The reason of the sender for ending the connection."""

    code: int
    reason: str


# The least and the most of each field that is a number.
_HELLO_BOUNDS: Final = (
    (SLOT_BYTES_MIN, SLOT_BYTES_MAX),
    (1, DATA_SLOTS_MAX),
    (CONTROL_ALLOWANCE, 255),
    (0, 0xFFFF),
    (0, 0xFFFF_FFFF),
)
_REFUSAL_BOUNDS: Final = ((0, 0xFFFF), None, (0, 0xFFFF))
_ABORT_BOUNDS: Final = ((0, 0xFFFF), None)


class OtherVersionError(ProtocolError):
    """The peer speaks another version of the protocol: RefusalCode.VERSION."""


@lru_cache(maxsize=64)  # most connections of a program have the same, and so have their peers
def pack_hello(hello: Hello) -> bytes:
    """The private data of a connect request or its acceptance."""
    _check_hello(hello)
    return _pack_private(_pack(*hello))


@lru_cache(maxsize=64)
def unpack_hello(data: bytes) -> Hello:
    """Parse a peer's Hello; a ProtocolError says what is wrong with it."""
    hello: Hello = _unpack(Hello, _HELLO_BOUNDS, _unpack_private(data, "hello"))
    _check_hello(hello)
    return hello


def pack_refusal(code: int, reason: str) -> bytes:
    """The private data of a reject message; a long reason is truncated."""
    return _pack_private(_pack(code, _cut(reason)))


def pack_elsewhere(port: int, reason: str) -> bytes:
    """The private data of a reject message that sends the peer to another port of the same address."""
    return _pack_private(_pack(RefusalCode.ELSEWHERE, _cut(reason), port))


def unpack_refusal(data: bytes) -> Refusal:
    """Parse a peer's refusal, whatever its version; its reason is made safe to print."""
    refusal: Refusal = _unpack(
        Refusal, _REFUSAL_BOUNDS, _unpack_private(data, "refusal", of_any_version=True)
    )
    return Refusal(refusal.code, printable(refusal.reason, REASON_BYTES_MAX), refusal.port)


def pack_credit(credit: Credit) -> bytes:
    packed: bytes = _bodies().pack(credit)
    return packed


def unpack_credit(
    body: bytes | memoryview, granted: int, placement: bool = False, growth: bool = False
) -> Credit:
    """Parse a Credit's body; `granted` is that of the frame's header. An empty body is a pure grant.

    `placement`, `growth`: both sides have agreed on that.

    The region that a name, an address or an id belongs to is checked here as far as it can be
    without knowing the others; offers.py knows them.
    """
    if not len(body):
        empty: Credit = _bodies().Credit(granted)
        return empty
    credit: Credit = _bodies().unpack_credit(body)
    if not placement and (credit.wants or credit.unwanted or credit.answered):
        raise ProtocolError("a Credit has news of direct placement, which was not agreed on")
    if not growth and (credit.slots_from or credit.slot_bytes):
        raise ProtocolError("a Credit has news of slots that grow, which was not agreed on")
    if credit.granted != granted:
        raise ProtocolError(f"a Credit grants {credit.granted} credits, but its header grants {granted}")
    for region in credit.regions:
        check_region(region)
    for what, ids in (
        ("offers", tuple(region.id for region in credit.regions)),
        ("revokes", credit.revoked),
        ("acknowledges", credit.acked),
    ):
        if len(set(ids)) != len(ids):
            raise ProtocolError(f"a Credit {what} a region twice")
    return credit


def check_region(region: Region) -> None:
    """Raise ProtocolError for an impossible region, whether received or about to be sent."""
    if region.address + region.length > 1 << 64:
        raise ProtocolError(
            f"region {region.id}: {region.length} bytes at {region.address:#x} end beyond the address space"
        )
    if not region.access or region.access & ~REGION_ACCESS_MASK:
        raise ProtocolError(f"region {region.id}: access {region.access:#x} is not remote access")
    if (name_bytes := len(region.name.encode())) > NAME_BYTES_MAX:
        raise ProtocolError(
            f"region {region.id}: its name has {name_bytes} bytes, at most {NAME_BYTES_MAX} are allowed"
        )


def region_bytes(region: Region) -> int:
    """How many bytes of a Credit's body it takes."""
    return len(_bodies().pack(region))


def pack_abort(code: int, reason: str) -> bytes:
    """The body of an Abort; a long reason is truncated."""
    return _pack(_ABORT, code, _cut(reason))


def unpack_abort(body: bytes | memoryview) -> Abort:
    """Parse an Abort's body; an empty one means that the sender gave no reason.

    Its reason is made fit to be printed.
    """
    if not len(body):
        return Abort(AbortCode.ABORTED, "")
    abort: Abort = _unpack(Abort, _ABORT_BOUNDS, bytes(body), _ABORT)
    return Abort(abort.code, printable(abort.reason, REASON_BYTES_MAX))


def _check_hello(hello: Hello) -> None:
    if hello.credits > hello.data_slots:
        raise ProtocolError(f"hello: {hello.credits} credits exceed the {hello.data_slots} data_slots")


def _pack_private(packed: bytes) -> bytes:
    return b"%b%c%c%b" % (MAGIC, VERSION, len(packed), packed)


def _unpack_private(data: bytes, name: str, of_any_version: bool = False) -> bytes:
    """Magic, version, length, body. The length is needed because some transports pad private data."""
    if len(data) < 6:
        raise ProtocolError(f"{name}: the private data has {len(data)} bytes, at least 6 are needed")
    if data[:4] != MAGIC:
        raise ProtocolError(f"{name}: it begins with {data[:4]!r}, so this is not an rdmanet peer")
    if data[4] != VERSION and not of_any_version:
        raise OtherVersionError(
            f"{name}: the peer speaks version {data[4]}, this side speaks version {VERSION}"
        )
    if len(data) - 6 < data[5]:
        raise ProtocolError(f"{name}: it announces {data[5]} bytes and has {len(data) - 6}")
    return data[6 : 6 + data[5]]


# A few numbers and a short text: what a connection says that moves only bytes is packed and unpacked here, in the
# shortest form that msgpack has for each, as msgspec packs it. What else a peer may have sent, msgspec judges
# (base/bodies.py).
_NUMBER_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4}
_TEXT: Final = 0xA0
_TEXT_OF_255: Final = 0xD9


def _pack(*values: int | str) -> bytes:
    """An array of numbers of 32 bits and texts of 255 bytes, each at most."""
    packed = [b"%c" % (0x90 | len(values))]
    for value in values:
        if isinstance(value, str):
            text = value.encode()
            packed.append(
                b"%c%b" % (_TEXT | len(text), text) if len(text) < 32 else b"\xd9%c%b" % (len(text), text)
            )
        elif value < 0x80:
            packed.append(b"%c" % value)
        else:
            code = 0xCC if value < 0x100 else 0xCD if value < 0x1_0000 else 0xCE
            packed.append(b"%c%b" % (code, value.to_bytes(_NUMBER_BYTES[code], "big")))
    return b"".join(packed)


def _unpack(
    kind: Any, bounds: tuple[tuple[int, int] | None, ...], body: bytes, tag: int | None = None
) -> Any:
    """Parse a body of this kind; a ProtocolError says what is wrong with it."""
    values = _values(body)
    begin = 0 if tag is None else 1
    most = len(bounds)
    if most - len(kind._field_defaults) <= len(values) - begin <= most and (not begin or values[0] == tag):
        if all(map(_fits, values[begin:], bounds)):
            return kind(*values[begin:])
    return _bodies().unpack_fields(kind, bounds, body, tag)


def _fits(value: int | str, bound: tuple[int, int] | None) -> bool:
    return (
        isinstance(value, str)
        if bound is None
        else not isinstance(value, str) and bound[0] <= value <= bound[1]
    )


def _values(packed: bytes) -> list[Any]:
    """What `_pack` has packed; an empty list for anything else."""
    values: list[Any] = []
    at, end = 1, len(packed)
    while at < end:
        code = packed[at]
        at += 1
        if code < 0x80:
            values.append(code)
        elif code in _NUMBER_BYTES:
            size = _NUMBER_BYTES[code]
            values.append(int.from_bytes(packed[at : at + size], "big"))
            at += size
        elif code & 0xE0 == _TEXT or (code == _TEXT_OF_255 and at < end):
            size = code & 0x1F
            if code == _TEXT_OF_255:
                size = packed[at]
                at += 1
            try:
                values.append(packed[at : at + size].decode())
            except UnicodeDecodeError:
                return []
            at += size
        else:
            return []
    return values if at == end and packed[0] == 0x90 | len(values) else []


_found_bodies: ModuleType | None = None


def _bodies() -> ModuleType:
    """base/bodies.py. It imports msgspec, which takes longer than a connection that says only bytes: see there."""
    global _found_bodies
    if _found_bodies is None:
        from rdmanet.base import bodies

        _found_bodies = bodies
    return _found_bodies


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in ("Credit", "Region", "Want"):
            found = globals()[name] = getattr(_bodies(), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _cut(reason: str) -> str:
    return reason.encode(errors="replace")[:REASON_BYTES_MAX].decode(errors="ignore")


# ---------------------------------------------------------------------------
# The ledger
# ---------------------------------------------------------------------------

_DATA = 1
_CREDIT = 2
_PING = 3
_PONG = 4
_FIN = 5
_ABORT = 6
_PLACED = 7
_HEADER_BYTES = 16
_PING_BYTES = 8
_PLACED_BYTES = 16
_CONTROL_BODY_MAX = 4080
_CREDIT_ALLOWANCE = 2
_CONTROL_ALLOWANCE = 6
_MASK = 0xFFFF_FFFF
# A count that seems to be this far ahead of the one known is behind it: counts of one connection
# never differ by more than two rings.
_LATE = 0x8000_0000


class Ledger:
    """The counts of one connection, for both directions.

    To send a frame: ask `may_send(kind)`, call `data_sent()` or `control_sent(kind)`, and put
    `granted` and `reaped` into its header as they then are. For a frame that came: post its receive
    again if it is control, then call `frame_received()`, before anything else is sent. When the
    bytes of data slots are consumed and their receives posted again, call `slots_freed()`. At the
    end of each pass send what `control_due()` asks for, until it asks for nothing.

    ProtocolError is the peer's fault and ends the connection, RuntimeError is ours.

    Counts begin at `origin`, which is 0 on the wire; tests begin just below the wrap.

    With `withhold` the slots beyond the credits of our Hello are not there to be granted at first: whoever
    has them to give says so by `slots_freed()`, for more or for fewer slots than were consumed.
    """

    def __init__(self, ours: Hello, peers: Hello, origin: int = 0, withhold: bool = False) -> None:
        self.peer_slots = peers.data_slots
        self.peer_granted = (origin + peers.credits) & _MASK
        self.sent = origin

        self.slot_bytes = ours.slot_bytes
        self.data_slots = ours.data_slots
        self.granted = (origin + ours.credits) & _MASK
        self.grantable = (origin + (ours.credits if withhold else ours.data_slots)) & _MASK
        self.received = origin
        self.placement = bool(ours.features & peers.features & FEATURE_PLACEMENT)
        self.growth = bool(ours.features & peers.features & FEATURE_GROWTH)

        self.peer_reaped = origin
        self.reaped = origin
        self._flight = 0  # kinds of our unanswered control frames, four bits each, the oldest lowest
        self.in_flight = 0
        self.credits_in_flight = 0
        self._untold_credits = 0  # Credits that came since we last told what we reaped
        self.ping_waiting = False
        self.pong_owed = False
        self.fin_sent = False
        self.fin_received = False
        self.abort_sent = False
        self.abort_received = False

    # -- how it stands --

    def credits(self) -> int:
        """How many data frames this side may send now."""
        return (self.peer_granted - self.sent) & _MASK

    def outstanding(self) -> int:
        """How many data frames the peer may still send, or has sent without their having been received."""
        return (self.granted - self.received) & _MASK

    def held(self) -> int:
        """How many data slots have unconsumed bytes, or have no receive posted again."""
        return self.data_slots - ((self.grantable - self.received) & _MASK)

    def control_in_flight(self, kind: int) -> int:
        """How many control frames of this kind were sent and not answered by the peer."""
        count = 0
        flight = self._flight
        while flight:
            if flight & 15 == kind:
                count += 1
            flight >>= 4
        return count

    def posted_ok(self, posted: int) -> bool:
        """The invariant: whether there is a receive for everything that the peer may send."""
        return posted >= ((self.granted - self.received) & _MASK) + _CONTROL_ALLOWANCE

    # -- sending --

    def may_send(self, kind: int) -> bool:
        if self.abort_sent:
            return False
        if kind == _DATA:
            return self.peer_granted != self.sent and not self.fin_sent
        if kind == _CREDIT:
            return self.credits_in_flight < _CREDIT_ALLOWANCE
        if kind == _PING:
            return not self.ping_waiting
        if kind == _PONG:
            return self.pong_owed
        if kind == _FIN:
            return not self.fin_sent
        return kind == _ABORT

    def data_sent(self) -> int:
        """Count a data frame whose header is about to be written."""
        if self.peer_granted == self.sent or self.fin_sent or self.abort_sent:
            raise RuntimeError(f"data sent with {self.credits()} credits, fin_sent={bool(self.fin_sent)}")
        self.sent = (self.sent + 1) & _MASK
        self.granted = self.grantable
        self._untold_credits = 0
        return 0

    def control_sent(self, kind: int) -> int:
        """Count a control frame whose header is about to be written."""
        if kind == _DATA or kind == _PLACED or not self.may_send(kind):
            raise RuntimeError(f"control frame {kind} cannot be sent now")
        if kind == _CREDIT:
            self.credits_in_flight += 1
        elif kind == _PING:
            self.ping_waiting = True
        elif kind == _PONG:
            self.pong_owed = False
        elif kind == _FIN:
            self.fin_sent = True
        else:
            self.abort_sent = True
        self._flight |= kind << (4 * self.in_flight)
        self.in_flight += 1
        self.granted = self.grantable
        self._untold_credits = 0
        return 0

    # -- receiving --

    def frame_received(self, byte_len: int, kind: int, length: int, granted: int, reaped: int) -> int:
        """Count a received frame, or raise ProtocolError for the peer's fault; returns its kind.

        `byte_len` is what the device says has come, the others are the header's.
        """
        if byte_len < _HEADER_BYTES:  # so what seems to be one was never sent, and is nobody's to read
            raise ProtocolError(
                f"a frame of {byte_len} bytes is shorter than its {_HEADER_BYTES}-byte header"
            )
        if byte_len - _HEADER_BYTES != length:
            raise ProtocolError(
                f"a frame of {byte_len} bytes whose {_HEADER_BYTES}-byte header announces {length} more"
            )
        if kind == _DATA or (kind == _PLACED and self.placement):
            if kind == _PLACED:
                if length != _PLACED_BYTES:
                    raise ProtocolError(f"a Placed of {length} bytes, it must have {_PLACED_BYTES}")
            elif length == 0 or length > self.slot_bytes:
                raise ProtocolError(f"a data frame of {length} bytes, 1 to {self.slot_bytes} are allowed")
            if self.granted == self.received:
                raise ProtocolError("a data frame without credit")
            if self.fin_received:
                raise ProtocolError("a data frame after Fin")
            self._header_received(granted, reaped)
            self.received = (self.received + 1) & _MASK
            return kind
        if kind == _PING or kind == _PONG:
            if length != _PING_BYTES:
                raise ProtocolError(f"a {_kind_name(kind)} of {length} bytes, it must have {_PING_BYTES}")
        elif kind == _FIN:
            if length != 0:
                raise ProtocolError(f"a Fin of {length} bytes, it must have none")
        elif kind == _CREDIT or kind == _ABORT:
            if length > self.slot_bytes or length > _CONTROL_BODY_MAX:
                raise ProtocolError(
                    f"a {_kind_name(kind)} of {length} bytes, "
                    f"at most {min(self.slot_bytes, _CONTROL_BODY_MAX)} are allowed"
                )
        else:
            raise ProtocolError(f"a frame of unknown kind or flags {kind:#x}")
        self._header_received(granted, reaped)
        self._control_received(kind)
        self.reaped = (self.reaped + 1) & _MASK
        return kind

    def slots_grown(self, slot_bytes: int) -> int:
        """Data frames may be as long as that from now on, if that is more; slots.py says which of them."""
        self.slot_bytes = max(self.slot_bytes, slot_bytes)
        return 0

    def slots_freed(self, count: int) -> int:
        """Count data slots that were consumed and whose receives are posted again: they may be granted."""
        if count > self.held():
            raise RuntimeError(f"{count} slots freed, but only {self.held()} were held")
        self.grantable = (self.grantable + count) & _MASK
        return 0

    def _header_received(self, granted: int, reaped: int) -> int:
        fresh = (granted - self.peer_granted) & _MASK
        if fresh and fresh < _LATE and ((granted - self.sent) & _MASK) > self.peer_slots:
            raise ProtocolError(
                f"a peer with {self.peer_slots} slots granted {(granted - self.sent) & _MASK} credits"
            )
        answered = (reaped - self.peer_reaped) & _MASK
        if answered and answered < _LATE:
            if answered > self.in_flight:
                raise ProtocolError(
                    f"the peer reaped {answered} control frames, but only {self.in_flight} were sent"
                )
            self.peer_reaped = reaped
            self.in_flight -= answered
            while answered:
                if self._flight & 15 == _CREDIT:
                    self.credits_in_flight -= 1
                self._flight >>= 4
                answered -= 1
        if fresh < _LATE:
            self.peer_granted = granted
        return 0

    def _control_received(self, kind: int) -> int:
        """Was the peer allowed to send it? What it sees unanswered is at least what we never told it."""
        if kind == _CREDIT:
            if self._untold_credits >= _CREDIT_ALLOWANCE:
                raise ProtocolError(f"more than {_CREDIT_ALLOWANCE} Credits unanswered")
            self._untold_credits += 1
        elif kind == _PING:
            if self.pong_owed or self.control_in_flight(_PONG):
                raise ProtocolError("a Ping before the Pong to the last one was reaped")
            self.pong_owed = True
        elif kind == _PONG:
            if not self.ping_waiting or self.control_in_flight(_PING):
                raise ProtocolError("a Pong without a Ping")
            self.ping_waiting = False
        elif kind == _FIN:
            if self.fin_received:
                raise ProtocolError("a second Fin")
            self.fin_received = True
        else:
            if self.abort_received:
                raise ProtocolError("a second Abort")
            self.abort_received = True
        return 0

    # -- what to say --

    def grant_due(self) -> bool:
        """Is there a grant worth a frame of its own: as much as the peer has left, or more?

        Where nothing is held back that is half the ring.
        """
        fresh = (self.grantable - self.granted) & _MASK
        return fresh != 0 and fresh >= ((self.granted - self.received) & _MASK)

    def control_due(self, credit_body: bool) -> int:
        """The kind of control frame to send now, or 0.

        `credit_body`: there is news of memory regions waiting for a Credit to ride in. A Credit
        that may not go while the peer has credits waits for the peer's next data frame; one that
        cannot count on any sends a Ping first.
        """
        if self.abort_sent:
            return 0
        if self.pong_owed:
            return _PONG
        if credit_body or self.grant_due():
            if self.credits_in_flight < _CREDIT_ALLOWANCE:
                return _CREDIT
            if not self.ping_waiting and (credit_body or self.granted == self.received):
                return _PING
        return 0


def _kind_name(kind: int) -> str:
    return Kind(kind).name.capitalize()
