"""What a peer may say of direct placement: anything. It is taken in, or refused as the peer's fault."""

from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rdmanet.credit
from rdmanet.credit import Credit, Want
from rdmanet.errors import ProtocolError

U32, U64 = 2**32 - 1, 2**64 - 1

small = st.integers(0, 12)
u32 = st.one_of(small, st.integers(U32 - 3, U32), st.integers(0, U32))
u64 = st.one_of(small, st.integers(U64 - 20, U64), st.integers(0, U64))
serials = st.one_of(st.integers(1, 12), st.integers(1, U32))
wants = st.builds(
    Want,
    serials,
    st.one_of(small, u64),
    st.one_of(st.just(4096), u64),
    st.one_of(small, u64),
    u32,
    st.one_of(st.sampled_from([0, 1, 1]), u32),
)


def refusal(call: Any, *arguments: Any) -> tuple[Any, str]:
    """What the call returned, and what the peer is told; only ProtocolError may be raised."""
    try:
        return call(*arguments), ""
    except ProtocolError as error:
        return None, str(error)


# ---- Wants and Unwants

hearings = st.one_of(
    st.tuples(st.just("hear"), st.lists(wants, max_size=3).map(tuple), st.one_of(st.just(0), serials)),
    st.tuples(st.just("hear"), st.just(()), st.sampled_from(["last", "last", "before"])),
    st.tuples(st.just("follow"), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("sent"), st.integers(1, 9)),
    st.tuples(st.just("answered")),
    st.tuples(st.just("finish")),
)


def told(module: ModuleType, sequence: list[Any]) -> list[Any]:
    """What a PeerWants says and is after each of these; it is checked as well."""
    subject = module.PeerWants(0)
    last, finished, seen = 0, False, []
    for what, *arguments in sequence:
        if what == "follow":  # a Want that a correct peer may say
            length, fixed = arguments
            arguments = [(Want(last % U32 + 1, subject.position, 4096, length, 7, int(fixed)),), 0]
        elif what == "hear" and arguments[1] in ("last", "before"):
            arguments = [(), last if arguments[1] == "last" else max(last - 1, 0)]
        call = subject.hear if what == "follow" else getattr(subject, what)
        _, refused = answer = refusal(call, *arguments)
        if what in ("hear", "follow") and not refused and not finished and arguments[0]:
            last = arguments[0][-1].serial
        finished = finished or what == "finish"
        want = subject.current()
        where = None
        if want is not None:
            where = want.serial, subject.room(want), subject.target(want)
            assert want.position <= subject.position < want.position + want.length
            assert 1 <= where[1] <= want.length
            assert want.address <= where[2] and where[2] + where[1] == want.address + want.length <= 1 << 64
        assert 0 <= subject.count <= module.WANTS_MAX
        assert not (finished and (subject.count or subject.answer_due))
        seen.append((answer, where, subject.count, subject.answer_due, subject.position))
        if refused:
            break  # the connection ends
    return seen


@settings(max_examples=400)
@given(sequence=st.lists(hearings, max_size=25))
def test_any_wants(both_placements: tuple[ModuleType, ModuleType], sequence: list[Any]) -> None:
    one, other = (told(module, sequence) for module in both_placements)
    assert one == other


@pytest.mark.parametrize(
    ("said", "unwanted", "message"),
    [
        ([Want(1, 0, 0, 0, 1, 1)], 0, "0 bytes"),
        ([Want(1, 0, U64, 2, 1, 1)], 0, "2 bytes at 0xffffffffffffffff"),
        ([Want(1, U64, 0, 2, 1, 1)], 0, "for position 18446744073709551615"),
        ([Want(1, 0, 0, 8, 1, 3)], 0, "unknown flags 0x3"),
        ([Want(1, 1, 0, 8, 1, 0)], 0, "only 0 bytes were sent"),
        ([Want(2, 0, 0, 8, 1, 1), Want(2, 8, 0, 8, 1, 1)], 0, "Want 2 came after Want 2"),
        ([Want(i, 0, 0, 8, 1, 1) for i in range(1, 6)], 0, "one more than 4"),
        ([Want(1, 0, 0, 8, 1, 0), Want(2, 8, 0, 8, 1, 1)], 0, "a loose Want beside another one"),
        ([Want(1, 0, 0, 8, 1, 1), Want(2, 0, 0, 8, 1, 0)], 0, "a loose Want beside another one"),
        ([Want(1, 8, 0, 8, 1, 1), Want(2, 0, 0, 8, 1, 1)], 0, "an earlier position"),
        ([], 1, "up to 1 are taken back, the last one said was 0"),
    ],
)
def test_what_is_refused(placement: ModuleType, said: list[Want], unwanted: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        placement.PeerWants(0).hear(tuple(said), unwanted)


def test_what_is_refused_after_an_unwant(placement: ModuleType) -> None:
    subject = placement.PeerWants(0)
    subject.hear((Want(1, 0, 0, 8, 1, 1),), 0)
    subject.hear((), 1)
    with pytest.raises(ProtocolError, match="Wants up to 1 are taken back"):
        subject.hear((), 1)
    with pytest.raises(ProtocolError, match="before the answer"):
        subject.hear((Want(2, 0, 0, 8, 1, 1),), 0)


# ---- Placed and answers

placings = st.one_of(
    st.tuples(st.just("name"), st.integers(1, 9), st.booleans()),
    st.tuples(st.just("say")),
    st.tuples(st.just("drop")),
    st.tuples(st.just("unwant")),
    st.tuples(st.just("unwanted")),
    st.tuples(st.just("received"), st.integers(1, 9)),
    st.tuples(st.just("place"), st.integers(1, 6), st.integers(1, 9).map(lambda n: ("ahead", n))),
    st.tuples(st.just("place"), st.integers(0, U32), u64),
    st.tuples(st.just("hear"), st.one_of(st.just("unanswered"), u32)),
    st.tuples(st.just("end")),
)


def placed(module: ModuleType, sequence: list[Any]) -> list[Any]:
    """What an OurWants says and is after each of these; it is checked as well."""
    subject = module.OurWants(0)
    named: list[Any] = []
    seen: list[Any] = []
    for what, *arguments in sequence:
        refused = ""
        if what == "name":
            length, fixed = arguments
            if subject.may_name(fixed):
                named.append(subject.name(1000 * (len(named) + 1), length, fixed))
        elif what == "say":
            if (want := subject.next_to_say()) is not None:
                subject.say(want, 7)
        elif what == "drop":
            if (want := subject.next_to_say()) is not None:
                subject.drop(want)
        elif what == "place":
            serial, upto = arguments
            position = subject.position
            want, refused = refusal(
                subject.place, serial, position + upto[1] if isinstance(upto, tuple) else upto
            )
            if not refused:
                assert want.serial == serial and want in named
                assert want.address <= subject.target
                assert subject.target + subject.placed <= want.address + want.length
                assert subject.placed == subject.position - position > 0
            else:
                assert subject.position == position
        elif what == "hear":
            serial = subject.unanswered if arguments[0] == "unanswered" else arguments[0]
            _, refused = refusal(subject.hear, serial)
        else:
            getattr(subject, what)(*arguments)
        states = [(want.state, want.used, want.serial) for want in named]
        assert subject.count == sum(want.state != module.OVER for want in named) <= module.WANTS_MAX
        if what == "end":
            assert subject.count == 0
        seen.append((refused, states, subject.position, subject.unwant_due, subject.unanswered))
        if refused:
            break
    return seen


@settings(max_examples=400)
@given(sequence=st.lists(placings, max_size=30))
def test_any_placing(both_placements: tuple[ModuleType, ModuleType], sequence: list[Any]) -> None:
    one, other = (placed(module, sequence) for module in both_placements)
    assert one == other


def said(module: ModuleType, *sizes: int, fixed: bool = True) -> Any:
    subject = module.OurWants(0)
    for size in sizes:
        subject.say(subject.name(4096, size, fixed), 7)
    return subject


@pytest.mark.parametrize(
    ("serial", "upto", "message"),
    [
        (3, 4, "into Want 3, which is not open"),
        (0, 4, "into Want 0, which is not open"),
        (1, 0, "bytes from 0 to 0"),
        (1, 9, "bytes from 0 to 9"),
        (1, U64, "bytes from 0 to 18446744073709551615"),
        (2, 9, "bytes from position 0 on were placed into Want 2 for 8"),
    ],
)
def test_what_cannot_have_been_placed(placement: ModuleType, serial: int, upto: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        said(placement, 8, 8).place(serial, upto)


def test_a_loose_want_is_used_once(placement: ModuleType) -> None:
    subject = said(placement, 8, fixed=False)
    subject.place(1, 3)
    with pytest.raises(ProtocolError, match="into Want 1, which is not open"):
        subject.place(1, 5)


def test_what_was_never_said_cannot_be_used(placement: ModuleType) -> None:
    subject = placement.OurWants(0)
    subject.name(4096, 8, True)
    with pytest.raises(ProtocolError, match="not open"):
        subject.place(0, 3)


@pytest.mark.parametrize("when", ["nothing was taken back", "the Unwant has not been said", "another one"])
def test_answers_to_nothing(placement: ModuleType, when: str) -> None:
    subject = said(placement, 8)
    if when != "nothing was taken back":
        subject.unwant()
    if when == "another one":
        subject.unwanted()
    with pytest.raises(ProtocolError, match="the peer answers Unwant"):
        subject.hear(2 if when == "another one" else 1)


def test_our_own_faults(placement: ModuleType) -> None:
    subject = said(placement, 8, fixed=False)
    for length, fixed in ((8, True), (8, False), (0, True)):
        with pytest.raises(RuntimeError, match="cannot be named now"):
            subject.name(4096, length, fixed)
    with pytest.raises(RuntimeError, match="has to be taken back"):
        subject.drop(subject.place(1, 3))


# ---- the Credit's body


@settings(max_examples=300)
@given(
    data=st.binary(max_size=120), flips=st.lists(st.integers(0, 8 * 90), max_size=3), cut=st.integers(0, 60)
)
def test_any_bytes_are_a_credit_or_refused(
    credit: ModuleType, data: bytes, flips: list[int], cut: int
) -> None:
    """Random bytes, and a good body with bits flipped and its end cut off."""
    good = bytearray(
        credit.pack_credit(credit.Credit(9, (), (2,), (3,), (credit.Want(1, 2, 3, 4, 5, 1),), 0, 6))
    )
    for flip in flips:
        good[flip // 8 % len(good)] ^= 1 << flip % 8
    for body in (data, bytes(good[: len(good) - cut // 4])):
        found, refused = refusal(lambda body: credit.unpack_credit(body, 9, True), body)
        assert refused or isinstance(found, credit.Credit)
        # Whoever has not agreed on placement takes none of it.
        plain, refused = refusal(lambda body: credit.unpack_credit(body, 9), body)
        assert refused or not (plain.wants or plain.unwanted or plain.answered)


@given(st.lists(wants, max_size=4).map(tuple), u32, u32)
def test_what_is_packed_comes_back(said: tuple[Want, ...], unwanted: int, answered: int) -> None:
    body = Credit(9, (), (), (), said, unwanted, answered)
    packed = rdmanet.credit.pack_credit(body)
    assert len(packed) <= rdmanet.credit.SLOT_BYTES_MIN
    assert rdmanet.credit.unpack_credit(packed, 9, placement=True) == body
    if said or unwanted or answered:
        with pytest.raises(ProtocolError, match="not agreed on"):
            rdmanet.credit.unpack_credit(packed, 9)


@pytest.mark.parametrize(
    "want",
    [
        [0, 0, 0, 1, 0, 0],
        [2**32, 0, 0, 1, 0, 0],
        [1, -1, 0, 1, 0, 0],
        [1, 0, 0, 1, 2**32, 0],
        [1, 0, 0, 1, 0],
        [],
    ],
    ids=repr,
)
def test_wants_that_are_none(want: list[int]) -> None:
    packed = msgspec.msgpack.encode([2, 9, [], [], [], [want], 0, 0])
    with pytest.raises(ProtocolError, match=r"credit: .*wants"):
        rdmanet.credit.unpack_credit(packed, 9, placement=True)
