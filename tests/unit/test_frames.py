"""Frames and private data: what is packed comes back, and anything else is refused by name."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmanet.errors import ProtocolError

u32 = st.integers(0, 0xFFFF_FFFF)
junk = st.binary(max_size=80)


def test_constants(credit: ModuleType) -> None:
    """The enums, the ledger's private copies and the C names in credit.pxd are the same numbers."""
    text = (Path(__file__).parents[2] / "rdmanet" / "credit.pxd").read_text()
    for name, number in re.findall(r"FRAME_(\w+) = (\d+)", text):
        ours = credit.Kind[name] if name in credit.Kind.__members__ else getattr(credit, name)
        assert ours == int(number), name
    assert {name for name, _ in re.findall(r"FRAME_(\w+) = (\d+)", text)} >= set(credit.Kind.__members__)
    if hasattr(credit, "_DATA"):  # only C has them where it is compiled
        assert all(getattr(credit, f"_{kind.name}") == kind for kind in credit.Kind)
        assert credit._HEADER_BYTES == credit.HEADER_BYTES
        assert credit._PING_BYTES == credit.PING_BYTES
        assert credit._CONTROL_BODY_MAX == credit.CONTROL_BYTES_MAX - credit.HEADER_BYTES
        assert credit._CREDIT_ALLOWANCE == credit.ALLOWANCE[credit.Kind.CREDIT]
        assert credit._CONTROL_ALLOWANCE == credit.CONTROL_ALLOWANCE
    assert credit.CONTROL_ALLOWANCE <= credit.CONTROL_SLOTS
    assert credit.HEADER_BYTES == 16


# ---------------------------------------------------------------------------
# Header
# ---------------------------------------------------------------------------


def test_header_bytes(credit: ModuleType) -> None:
    header = credit.pack_header(credit.Kind.DATA, 0x0102, 0xFFFF_FFFE, 7)
    assert header == bytes.fromhex("01000000 02010000 feffffff 07000000")


@given(kind=u32, length=u32, granted=u32, reaped=u32, rest=junk)
def test_header_round_trip(
    credit: ModuleType, kind: int, length: int, granted: int, reaped: int, rest: bytes
) -> None:
    frame = credit.pack_header(kind, length, granted, reaped) + rest
    assert credit.unpack_header(frame) == (kind, length, granted, reaped)
    assert credit.unpack_header(memoryview(frame)).kind == kind


@pytest.mark.parametrize("size", [0, 1, 15])
def test_short_header(credit: ModuleType, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {size} bytes"):
        credit.unpack_header(bytes(size))


# ---------------------------------------------------------------------------
# Hello and Refusal
# ---------------------------------------------------------------------------


@given(
    slot_bytes=st.integers(512, 1 << 24),
    data_slots=st.integers(1, 65535),
    control_slots=st.integers(6, 255),
    credits=st.integers(0, 65535),
    features=u32,
    padding=st.integers(0, 140),
)
def test_hello_round_trip(
    credit: ModuleType,
    slot_bytes: int,
    data_slots: int,
    control_slots: int,
    credits: int,
    features: int,
    padding: int,
) -> None:
    hello = credit.Hello(slot_bytes, data_slots, control_slots, min(credits, data_slots), features)
    packed = credit.pack_hello(hello)
    assert len(packed) <= credit.HELLO_BYTES_MAX
    assert credit.unpack_hello(packed + bytes(padding)) == hello


def private(body: Any, magic: bytes = b"RDMN", version: int = 1, extra: int = 0) -> bytes:
    packed = msgspec.msgpack.encode(body)
    return magic + bytes([version, len(packed) + extra]) + packed


GOOD = [4096, 64, 8, 64, 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the private data has 0 bytes, at least 6"),
        (b"RDMN\x01", "the private data has 5 bytes, at least 6"),
        (bytes(56), "this is not an rdmanet peer"),
        (b"GET / HTTP/1.1\r\n", "this is not an rdmanet peer"),
        (private(GOOD, version=2), "speaks version 2, this side speaks version 1"),
        (private(GOOD, version=0), "speaks version 0"),
        (private(GOOD, extra=1), "hello: it announces .* bytes and has"),
        (private([511, 64, 8, 64, 0]), ">= 512 - at `slot_bytes`"),
        (private([(1 << 24) + 1, 64, 8, 64, 0]), "`slot_bytes`"),
        (private([4096, 0, 8, 0, 0]), "`data_slots`"),
        (private([4096, 65536, 8, 0, 0]), "`data_slots`"),
        (private([4096, 64, 5, 64, 0]), ">= 6 - at `control_slots`"),
        (private([4096, 64, 256, 64, 0]), "`control_slots`"),
        (private([4096, 64, 8, -1, 0]), "`credits`"),
        (private([4096, 64, 8, 65, 0]), "65 credits exceed the 64 data_slots"),
        (private([4096, 64, 8, 64, 1 << 32]), "`features`"),
        (private([4096, "64", 8, 64, 0]), "`data_slots`"),
        (private([4096, True, 8, 64, 0]), "`data_slots`"),
        (private([4096]), "hello: "),
        (private([*GOOD, 1]), "hello: "),
        (private({}), "hello: Expected `array`"),
        (b"RDMN\x01\x00", "hello: "),
        (b"RDMN\x01\x01\xc1", "hello: "),
    ],
)
def test_bad_hello(credit: ModuleType, data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        credit.unpack_hello(data)


def test_impossible_hello_is_not_sent(credit: ModuleType) -> None:
    with pytest.raises(ProtocolError, match="65 credits exceed"):
        credit.pack_hello(credit.Hello(4096, 64, 8, 65))


def test_refusal(credit: ModuleType) -> None:
    packed = credit.pack_refusal(credit.RefusalCode.VERSION, "ä" * 1000)
    assert len(packed) <= 148
    refusal = credit.unpack_refusal(packed + bytes(10))
    assert refusal.code == credit.RefusalCode.VERSION
    assert refusal.reason == "ä" * 60
    with pytest.raises(ProtocolError, match="refusal: "):
        credit.unpack_refusal(packed[:-1])


def test_a_refusal_that_names_a_port(credit: ModuleType) -> None:
    packed = credit.pack_elsewhere(65535, "ä" * 1000)
    assert len(packed) <= 148
    assert credit.unpack_refusal(packed) == credit.Refusal(credit.RefusalCode.ELSEWHERE, "ä" * 60, 65535)
    # Others are as they were before there was a port.
    assert credit.pack_refusal(credit.RefusalCode.BUSY, "why") == private([3, "why"])
    for port in (65536, -1, "1", None):
        with pytest.raises(ProtocolError, match="refusal: "):
            credit.unpack_refusal(private([6, "why", port]))


# ---------------------------------------------------------------------------
# Credit and Abort
# ---------------------------------------------------------------------------


def region(
    credit: ModuleType, id: int = 1, address: int = 4096, length: int = 10, access: int = 6, name: str = ""
) -> Any:
    return credit.Region(id, address, length, 77, access, name)


def test_a_grant_needs_no_body(credit: ModuleType) -> None:
    assert credit.unpack_credit(b"", 9) == credit.Credit(9)


@given(data=st.data(), granted=u32, revoked=st.lists(u32, unique=True), acked=st.lists(u32, unique=True))
def test_credit_round_trip(
    credit: ModuleType, data: st.DataObject, granted: int, revoked: list[int], acked: list[int]
) -> None:
    regions = data.draw(
        st.lists(
            st.builds(
                credit.Region,
                u32,
                st.integers(0, (1 << 64) - (1 << 20)),
                st.integers(1, 1 << 20),
                u32,
                st.sampled_from([2, 4, 6, 8, 14]),
                st.text(max_size=60),
            ),
            max_size=5,
            unique_by=lambda region: region.id,
        )
    )
    body = credit.Credit(granted, tuple(regions), tuple(revoked), tuple(acked))
    assert credit.unpack_credit(credit.pack_credit(body), granted) == body
    assert credit.unpack_credit(memoryview(credit.pack_credit(body)), granted) == body


def test_the_widest_region(credit: ModuleType) -> None:
    widest = credit.Region(2**32 - 1, 2**64 - 2**63, 2**63, 2**32 - 1, 14, "n" * 255)
    body = credit.pack_credit(credit.Credit(2**32 - 1, (widest,), (2**32 - 1,), (2**32 - 1,)))
    assert len(body) <= credit.SLOT_BYTES_MIN
    assert credit.unpack_credit(body, 2**32 - 1).regions == (widest,)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([2, 8, [], [], []], "grants 8 credits, but its header grants 9"),
        ([6, 9, [], [], []], "credit: Invalid value"),
        ([9, [], [], []], "credit: "),
        ([2], "credit: "),
        ([2, 9, [], [], [], [], 0, 0, 0, 0, 0], "credit: "),
        ([2, 9, [], [], [], [[1, 0, 0, 1, 0, 0]]], "news of direct placement, which was not agreed on"),
        ([2, 9, [], [], [], [], 0, 0, 16, 1024], "news of slots that grow, which was not agreed on"),
        ([2, 9, [], [-1], []], "at `revoked"),
        ([2, 9, [], [], [1 << 32]], "at `acked"),
        ([2, 9, [], [3, 3], []], "revokes a region twice"),
        ([2, 9, [], [], [3, 3]], "acknowledges a region twice"),
        ([2, 9, [[1, 0, 1, 0, 2, ""], [1, 0, 1, 0, 2, ""]], [], []], "offers a region twice"),
        ([2, 9, [[1, 0, 0, 0, 2, ""]], [], []], "at `regions"),
        ([2, 9, [[1, 0, 1, 0, 0, ""]], [], []], "access 0x0"),
        ([2, 9, [[1, 0, 1, 0, 1, ""]], [], []], "access 0x1 "),
        ([2, 9, [[1, 2**64 - 1, 2, 0, 2, ""]], [], []], "beyond the address space"),
        ([2, 9, [[1, 0, 1, 0, 2, "ä" * 128]], [], []], "its name has 256 bytes"),
        ([2, 9, [[1, 0, 1, 0, 2, "", 0]], [], []], "at `regions"),
        ([2, 9, [[1, 0, 1, 0, 2]], [], []], "at `regions"),
    ],
)
def test_bad_credit(credit: ModuleType, body: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        credit.unpack_credit(msgspec.msgpack.encode(body), 9)


def test_abort(credit: ModuleType) -> None:
    assert credit.unpack_abort(b"").code == credit.AbortCode.ABORTED
    abort = credit.unpack_abort(credit.pack_abort(credit.AbortCode.PROTOCOL, "x\udc80" + "y" * 500))
    assert abort.code == credit.AbortCode.PROTOCOL
    assert abort.reason.startswith("x?y") and len(abort.reason) == credit.REASON_BYTES_MAX
    with pytest.raises(ProtocolError, match="abort: "):
        credit.unpack_abort(b"\x93\x06\x01\x02")


@given(reason=st.text(max_size=300))
def test_reasons_can_be_printed(credit: ModuleType, reason: str) -> None:
    """What a peer has chosen is one line without escapes and with an end, and says what it was."""
    shown = credit.unpack_abort(msgspec.msgpack.encode([6, 1, reason])).reason
    assert shown.isprintable()
    assert len(shown) <= 10 * credit.REASON_BYTES_MAX + 3  # each character may become \U00012345
    if reason.isprintable() and len(reason) <= credit.REASON_BYTES_MAX:
        assert shown == reason
    if len(packed := msgspec.msgpack.encode([1, reason])) < 256:
        assert credit.unpack_refusal(b"RDMN\1%c%b" % (len(packed), packed)).reason == shown


@settings(max_examples=300)
@given(data=junk, good=st.booleans(), cut=st.integers(0, 60), flip=st.integers(0, 8 * 60))
def test_any_bytes_are_read_or_refused(
    credit: ModuleType, data: bytes, good: bool, cut: int, flip: int
) -> None:
    """Random bytes, and good frames with a bit flipped or an end cut off."""
    readers = [
        (credit.unpack_hello, credit.pack_hello(credit.Hello(*GOOD))),
        (credit.unpack_refusal, credit.pack_refusal(1, "why")),
        (
            lambda body: credit.unpack_credit(body, 9),
            credit.pack_credit(credit.Credit(9, (region(credit),), (2,), (3,))),
        ),
        (credit.unpack_abort, credit.pack_abort(1, "why")),
    ]
    for read, packed in readers:
        if good:
            spoilt = bytearray(packed)
            spoilt[flip // 8 % len(packed)] ^= 1 << flip % 8
            data = bytes(spoilt[: max(0, len(spoilt) - cut // 4)])
        try:
            read(data)
        except ProtocolError as error:
            assert str(error)


def test_deep_nesting_is_refused(credit: ModuleType) -> None:
    with pytest.raises(ProtocolError):
        credit.unpack_credit(b"\x91" * 100_000, 9)


numbers = st.sampled_from(
    [0, 2, 6, 127, 128, 255, 256, 512, 65535, 65536, 1 << 24, (1 << 32) - 1, 1 << 32, -1]
)
values = st.lists(numbers | st.text(max_size=40) | st.sampled_from([None, True, 1.0, b"x"]), max_size=7)


def wide(value: object) -> bytes:
    """A value in a longer form than msgspec's."""
    if isinstance(value, str):
        text = value.encode()
        return b"\xda" + len(text).to_bytes(2, "big") + text
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return b"\xcf" + value.to_bytes(8, "big") if value >> 32 else b"\xce" + value.to_bytes(4, "big")
    return msgspec.msgpack.encode(value)


def agree(credit: ModuleType, body: bytes) -> None:
    """As each kind of body, these bytes mean what msgspec says that they mean, or are refused in its words."""

    def outcome(function: Any, *arguments: Any) -> tuple[Any, ...]:
        try:
            return tuple(function(*arguments))
        except ProtocolError as error:
            return type(error), str(error)

    for kind, bounds, tag in (
        (credit.Hello, credit._HELLO_BOUNDS, None),
        (credit.Refusal, credit._REFUSAL_BOUNDS, None),
        (credit.Abort, credit._ABORT_BOUNDS, 6),
    ):
        ours = outcome(credit._unpack, kind, bounds, body, tag)
        assert ours == outcome(credit._bodies().unpack_fields, kind, bounds, body, tag)


@given(values=values, are_wide=st.booleans(), more=st.binary(max_size=2))
def test_what_is_unpacked_here_is_what_msgspec_would_have_unpacked(
    credit: ModuleType, values: list[Any], are_wide: bool, more: bytes
) -> None:
    packed = [wide(value) if are_wide else msgspec.msgpack.encode(value) for value in values]
    agree(credit, b"%c%b" % (0x90 | len(values), b"".join(packed)) + more)


@pytest.mark.parametrize("pack", [msgspec.msgpack.encode, wide])
@pytest.mark.parametrize("values", [[4096, 16, 8, 3, 1 << 31], [300, "busy", 65535], [6, 3, "a" * 33]])
def test_each_wrong_bit_and_each_truncation_is_as_msgspec_has_it(
    credit: ModuleType, values: list[Any], pack: Any
) -> None:
    right = b"%c%b" % (0x90 | len(values), b"".join(map(pack, values)))
    for end in range(len(right) + 1):
        agree(credit, right[:end])
    for bit in range(8 * len(right)):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        agree(credit, bytes(wrong))


def test_what_is_packed_here_is_what_msgspec_would_have_packed(credit: ModuleType) -> None:
    for number in (0, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1):
        for text in ("", "a" * 31, "a" * 32, "\N{SNOWMAN}" * 40):
            assert credit._pack(6, number, text) == msgspec.msgpack.encode((6, number, text))
