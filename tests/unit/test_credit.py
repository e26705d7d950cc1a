"""The ledger: two of them on a fake link that keeps every rule a real one has.

The link is ordered and loses nothing, and a frame that finds no receive posted is an error at once
(RNR with no retries). What is arbitrary is when: each step of a schedule lets one side write, take
a frame off the link, consume slots, or say what is due.
"""

from collections import deque
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmanet.errors import ProtocolError

DATA, CREDIT, PING, PONG, FIN, ABORT = range(1, 7)
SLOT_BYTES = 512
WRAP = (1 << 32) - 3


class Side:
    """What the engine does around a ledger, with lists for rings."""

    def __init__(self, module: ModuleType, ours: Any, peers: Any, origin: int, speaks_first: bool) -> None:
        self.ledger = module.Ledger(ours, peers, origin)
        self.posted = ours.data_slots + ours.control_slots
        self.inbox: deque[tuple[int, int, int, int]] = deque()
        self.peer: Side
        self.may_speak = speaks_first
        self.backlog = 0  # data frames to send
        self.news = 0  # news of regions to send
        self.news_received = 0
        self.data_received = 0
        self.slots_held = 0
        self.sent: dict[int, int] = dict.fromkeys(range(1, 7), 0)

    def transmit(self, kind: int, length: int) -> None:
        if kind == DATA:
            self.ledger.data_sent()
        else:
            self.ledger.control_sent(kind)
        self.sent[kind] += 1
        self.check()
        self.peer.inbox.append((kind, length, self.ledger.granted, self.ledger.reaped))

    def flush(self, most: int = 1 << 30) -> None:
        while self.may_speak and self.backlog and most and self.ledger.may_send(DATA):
            self.backlog -= 1
            most -= 1
            self.transmit(DATA, 1)

    def speak(self) -> None:
        while self.may_speak and (kind := self.ledger.control_due(self.news > 0)):
            carried = min(self.news, 3) if kind == CREDIT else 0
            self.news -= carried
            self.transmit(kind, 8 if kind in (PING, PONG) else carried)

    def finish(self) -> None:
        if self.may_speak and not self.backlog and self.ledger.may_send(FIN):
            self.transmit(FIN, 0)

    def receive(self, most: int = 1) -> None:
        for _ in range(min(most, len(self.inbox))):
            kind, length, granted, reaped = self.inbox.popleft()
            assert self.posted > 0, "RNR: a frame came and no receive was posted"
            self.posted -= 1
            if kind == DATA:
                self.slots_held += 1
                self.data_received += 1
            else:
                self.posted += 1
                if kind == CREDIT:
                    self.news_received += length
            assert self.ledger.frame_received(16 + length, kind, length, granted, reaped) == kind
            self.may_speak = True
            self.check()

    def consume(self, count: int) -> None:
        count = min(count, self.slots_held)
        self.slots_held -= count
        self.posted += count
        self.ledger.slots_freed(count)
        self.check()

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.posted_ok(self.posted)
        assert ledger.held() == self.slots_held
        assert ledger.outstanding() + ledger.held() <= ledger.data_slots
        assert ledger.credits() <= ledger.peer_slots
        assert ledger.in_flight == sum(ledger.control_in_flight(kind) for kind in range(2, 7))
        assert ledger.in_flight <= 6
        assert ledger.control_in_flight(CREDIT) == ledger.credits_in_flight <= 2
        assert all(ledger.control_in_flight(kind) <= 1 for kind in (PING, PONG, FIN, ABORT))


def pair(
    module: ModuleType, slots: tuple[int, int], first: tuple[int, int], origin: int
) -> tuple[Side, Side]:
    hellos = [
        module.Hello(SLOT_BYTES, count, 8, min(count, credits))
        for count, credits in zip(slots, first, strict=True)
    ]
    a = Side(module, hellos[0], hellos[1], origin, True)
    b = Side(module, hellos[1], hellos[0], origin, False)
    a.peer, b.peer = b, a
    a.transmit(CREDIT, 0)
    return a, b


def settle(*sides: Side) -> None:
    """Fair scheduling from here on: both sides read, neither pauses. It must come to rest."""
    for _ in range(100_000):
        before = [(dict(side.sent), side.ledger.received, side.ledger.reaped) for side in sides]
        for side in sides:
            side.flush()
            side.receive(len(side.inbox))
            side.consume(side.slots_held)
            side.speak()
        if before == [(side.sent, side.ledger.received, side.ledger.reaped) for side in sides]:
            return
    raise AssertionError("never comes to rest")


def run(a: Side, b: Side, schedule: list[int], with_news: bool) -> None:
    """Interpret a schedule. A step is a number: who, what, and how much."""
    asked = [0, 0]
    news = [0, 0]
    for step in schedule:
        who, what, much = step & 1, (step >> 1) % 6, 1 + (step >> 4) % 8
        side = (a, b)[who]
        if what == 0:
            side.backlog += much
            asked[who] += much
        elif what == 1:
            side.flush(much)
        elif what == 2:
            side.receive(much)
        elif what == 3:
            side.consume(much)
        elif what == 4:
            side.speak()
        elif with_news:
            side.news += much
            news[who] += much
    settle(a, b)
    for side in (a, b):
        side.finish()
    settle(a, b)
    assert [a.data_received, b.data_received] == asked[::-1]
    assert [a.news_received, b.news_received] == news[::-1]
    assert a.ledger.fin_received and b.ledger.fin_received
    for side in (a, b):
        # A grant never costs more than a frame each; a Ping is for news alone.
        assert side.sent[CREDIT] <= 1 + side.data_received + side.news_received + side.peer.news_received
        if not with_news:
            assert side.sent[PING] == side.sent[PONG] == 0


slot_counts = st.one_of(st.integers(1, 5), st.sampled_from([8, 16, 64]))
geometries = st.tuples(slot_counts, slot_counts)
schedules = st.lists(st.integers(0, 127), max_size=150)


@pytest.mark.parametrize("with_news", [False, True], ids=["grants", "news"])
@settings(max_examples=60)
@given(
    slots=geometries,
    first=st.tuples(st.integers(0, 64), st.integers(0, 64)),
    origin=st.sampled_from([0, WRAP]),
    schedule=schedules,
)
def test_every_byte_gets_through_under_any_schedule(
    credit: ModuleType,
    with_news: bool,
    slots: tuple[int, int],
    first: tuple[int, int],
    origin: int,
    schedule: list[int],
) -> None:
    run(*pair(credit, slots, first, origin), schedule, with_news)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 64])
def test_long_schedules(credit: ModuleType, slots: int) -> None:
    import random

    for seed in range(4):
        rng = random.Random(seed * 1000 + slots)
        # Moods: for a while a step of some kind is rare, so that rings fill and allowances run out.
        schedule: list[int] = []
        for _ in range(12):
            weights = [rng.choice([0, 1, 8]) for _ in range(12)]
            if any(weights):
                for pick in rng.choices(range(12), weights, k=120):
                    schedule.append((pick % 2) | (pick // 2) << 1 | rng.randrange(8) << 4)
        run(*pair(credit, (slots, slots), (slots, slots), WRAP), schedule, seed % 2 == 1)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 64])
def test_both_full_and_nobody_reads_then_one_reads(credit: ModuleType, slots: int) -> None:
    a, b = pair(credit, (slots, slots), (slots, slots), 0)
    b.receive()
    for side in (a, b):
        side.backlog = 10 * slots
        side.flush()
        side.speak()
    for side in (a, b):
        side.receive(1000)
        side.speak()
    assert a.ledger.credits() == b.ledger.credits() == 0
    assert a.slots_held == b.slots_held == slots
    # Only b reads: a's bytes flow although b can send no data itself.
    for _ in range(100):
        b.consume(slots)
        b.speak()
        a.receive(1000)
        a.speak()
        a.flush()
        b.receive(1000)
    assert b.data_received == 10 * slots
    assert a.data_received == slots
    settle(a, b)
    assert a.data_received == 10 * slots


def test_idle_sides_fall_silent(credit: ModuleType) -> None:
    a, b = pair(credit, (4, 4), (4, 4), 0)
    settle(a, b)
    assert sum(a.sent.values()) == 1 and sum(b.sent.values()) == 0


def test_a_stream_costs_two_grants_a_ring(credit: ModuleType) -> None:
    a, b = pair(credit, (64, 64), (64, 64), 0)
    a.backlog = 6400
    while a.backlog:
        a.flush(8)
        b.receive(8)
        b.consume(8)
        b.speak()
        a.receive(8)
    assert b.sent[CREDIT] <= 200
    assert a.sent[CREDIT] == 1


def test_answers_carry_the_grants(credit: ModuleType) -> None:
    a, b = pair(credit, (8, 8), (8, 8), 0)
    for _ in range(1000):
        for x, y in ((a, b), (b, a)):
            x.backlog = 1
            x.flush()
            assert not x.backlog
            y.receive(2)
            y.consume(1)
    assert a.sent[CREDIT] == 1 and b.sent[CREDIT] == 0


def test_slots_held_back_do_not_starve_the_peer(credit: ModuleType) -> None:
    """An application that keeps most of the ring leased while it waits for more gets more."""
    a, b = pair(credit, (64, 64), (64, 64), 0)
    a.backlog = 65
    a.flush()
    b.receive(100)
    b.consume(1)
    b.speak()
    a.receive(10)
    a.flush()
    b.receive(10)
    assert b.data_received == 65


def test_news_to_a_peer_that_says_nothing(credit: ModuleType) -> None:
    """A thousand pieces of news need no data frame and no credit."""
    a, b = pair(credit, (1, 1), (0, 0), 0)
    settle(a, b)
    a.news = 1000
    settle(a, b)
    assert b.news_received == 1000
    assert a.sent[PING] > 0 and a.sent[PING] == b.sent[PONG]


# ---------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------


def ledger(
    module: ModuleType, slots: int = 4, peer_slots: int = 4, credits: int = 4, granted: int = 4
) -> Any:
    return module.Ledger(
        module.Hello(SLOT_BYTES, slots, 8, granted), module.Hello(SLOT_BYTES, peer_slots, 8, credits)
    )


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ((15, DATA, 0, 4, 0), "15 bytes"),
        ((0, DATA, 0xFFFF_FFF0, 4, 0), "0 bytes"),
        ((17, DATA, 2, 4, 0), "announces 2 more"),
        ((16, DATA, 0, 4, 0), "0 bytes, 1 to 512"),
        ((16 + 513, DATA, 513, 4, 0), "513 bytes, 1 to 512"),
        ((16 + 513, CREDIT, 513, 4, 0), "Credit of 513"),
        ((16 + 513, ABORT, 513, 4, 0), "Abort of 513"),
        ((16 + 7, PING, 7, 4, 0), "Ping of 7"),
        ((16, PONG, 0, 4, 0), "Pong of 0"),
        ((17, FIN, 1, 4, 0), "Fin of 1"),
        ((16, 0, 0, 4, 0), "unknown kind or flags 0x0"),
        ((16, 7, 0, 4, 0), "unknown kind or flags 0x7"),
        ((17, DATA | 1 << 8, 1, 4, 0), "unknown kind or flags 0x101"),
        ((17, DATA, 1, 5, 0), "a peer with 4 slots granted 5 credits"),
        ((17, DATA, 1, 0x7FFF_FFFF, 0), "granted 2147483647 credits"),
        ((17, DATA, 1, 4, 1), "the peer reaped 1 control frames, but only 0 were sent"),
        ((24, PONG, 8, 4, 0), "Pong without a Ping"),
    ],
)
def test_bad_frames_are_the_peers_fault(credit: ModuleType, frame: tuple[int, ...], message: str) -> None:
    subject = ledger(credit)
    with pytest.raises(ProtocolError, match=message):
        subject.frame_received(*frame)
    assert (subject.received, subject.reaped, subject.peer_granted) == (0, 0, 4)


def test_a_control_frame_is_no_longer_than_it_need_be(credit: ModuleType) -> None:
    """However long the slots are: what is read at once has a bound."""
    hello = credit.Hello(65536, 4, 8, 4)
    for kind in (CREDIT, ABORT):
        subject = credit.Ledger(hello, hello)
        with pytest.raises(ProtocolError, match="of 4081 bytes, at most 4080 are allowed"):
            subject.frame_received(16 + 4081, kind, 4081, 4, 0)
        subject.frame_received(16 + 4080, kind, 4080, 4, 0)


def test_data_beyond_the_grant(credit: ModuleType) -> None:
    subject = ledger(credit, granted=1)
    subject.frame_received(17, DATA, 1, 4, 0)
    with pytest.raises(ProtocolError, match="without credit"):
        subject.frame_received(17, DATA, 1, 4, 0)


def test_data_after_fin(credit: ModuleType) -> None:
    subject = ledger(credit)
    subject.frame_received(16, FIN, 0, 4, 0)
    with pytest.raises(ProtocolError, match="after Fin"):
        subject.frame_received(17, DATA, 1, 4, 0)
    with pytest.raises(ProtocolError, match="second Fin"):
        subject.frame_received(16, FIN, 0, 4, 0)
    subject.frame_received(16, CREDIT, 0, 4, 0)


def test_more_control_than_allowed(credit: ModuleType) -> None:
    subject = ledger(credit)
    subject.frame_received(16, CREDIT, 0, 4, 0)
    subject.frame_received(16, CREDIT, 0, 4, 0)
    with pytest.raises(ProtocolError, match="2 Credits"):
        subject.frame_received(16, CREDIT, 0, 4, 0)
    subject.frame_received(24, PING, 8, 4, 0)
    with pytest.raises(ProtocolError, match="Ping before"):
        subject.frame_received(24, PING, 8, 4, 0)
    subject.control_sent(PONG)
    subject.frame_received(16, CREDIT, 0, 4, 0)
    with pytest.raises(ProtocolError, match="Ping before"):
        subject.frame_received(24, PING, 8, 4, 0)  # the Pong is not reaped
    subject.frame_received(24, PING, 8, 4, 1)
    subject.frame_received(16, ABORT, 0, 4, 1)
    with pytest.raises(ProtocolError, match="second Abort"):
        subject.frame_received(16, ABORT, 0, 4, 1)


def test_no_more_control_of_ours_than_allowed(credit: ModuleType) -> None:
    """Two Credits, and one of each other kind, may be on their way."""
    subject = ledger(credit)
    for kind, most in ((CREDIT, 2), (PING, 1), (FIN, 1)):
        for _ in range(most):
            assert subject.may_send(kind)
            subject.control_sent(kind)
        assert not subject.may_send(kind)
        with pytest.raises(RuntimeError, match=f"control frame {kind} cannot be sent now"):
            subject.control_sent(kind)


def test_a_pong_reaps_its_ping(credit: ModuleType) -> None:
    subject = ledger(credit)
    subject.control_sent(PING)
    with pytest.raises(ProtocolError, match="Pong without a Ping"):
        subject.frame_received(24, PONG, 8, 4, 0)
    subject.frame_received(17, DATA, 1, 4, 1)
    assert not subject.may_send(PING), "reaped is not yet answered"
    subject.frame_received(24, PONG, 8, 4, 1)
    assert subject.may_send(PING)


def test_late_and_merged_counts_heal(credit: ModuleType) -> None:
    subject = ledger(credit)
    subject.control_sent(CREDIT)
    subject.control_sent(CREDIT)
    for _ in range(3):
        subject.data_sent()
    subject.frame_received(17, DATA, 1, 7, 2)
    assert (subject.credits(), subject.credits_in_flight) == (4, 0)
    for granted in (5, 2, 0):  # the last two grant less than was used since
        subject.frame_received(17, DATA, 1, granted, 1)
    assert (subject.credits(), subject.credits_in_flight, subject.peer_reaped) == (4, 0, 2)


def test_what_must_be_posted(credit: ModuleType) -> None:
    """A receive for each credit that is out, and for each control frame that may come."""
    subject = ledger(credit, slots=4, granted=3)
    assert subject.posted_ok(3 + 6) and not subject.posted_ok(3 + 5)
    subject.frame_received(17, DATA, 1, 4, 0)
    assert subject.posted_ok(2 + 6) and not subject.posted_ok(2 + 5)
    subject.data_sent()
    assert subject.posted_ok(3 + 6) and not subject.posted_ok(3 + 5), "the header grants the fourth"


@pytest.mark.parametrize(
    ("slots", "received", "freed", "due"),
    [(1, 1, 1, True), (8, 4, 4, True), (8, 4, 3, False), (8, 7, 1, True), (8, 8, 1, True), (8, 8, 0, False)],
)
def test_when_a_grant_is_due(credit: ModuleType, slots: int, received: int, freed: int, due: bool) -> None:
    subject = ledger(credit, slots=slots, granted=slots)
    for _ in range(received):
        subject.frame_received(17, DATA, 1, 4, 0)
    subject.slots_freed(freed)
    assert subject.grant_due() == due
    assert subject.control_due(False) == (CREDIT if due else 0)


def test_a_ping_asks_for_answers_when_the_peer_may_send_no_data(credit: ModuleType) -> None:
    """A data frame of the peer's would answer our Credits. It has no credits left, and we may send no third Credit."""
    subject = ledger(credit, slots=2, granted=2)
    for _ in range(2):
        subject.control_sent(CREDIT)
    subject.frame_received(17, DATA, 1, 4, 0)
    subject.slots_freed(1)
    assert subject.grant_due() and subject.control_due(False) == 0, "the peer has a credit"
    subject.frame_received(17, DATA, 1, 4, 0)
    assert subject.control_due(False) == PING


def test_our_own_faults(credit: ModuleType) -> None:
    subject = ledger(credit, credits=1)
    subject.data_sent()
    with pytest.raises(RuntimeError, match="0 credits"):
        subject.data_sent()
    for kind in (0, DATA, PONG, 7):
        with pytest.raises(RuntimeError):
            subject.control_sent(kind)
    with pytest.raises(RuntimeError, match="1 slots freed, but only 0 were held"):
        subject.slots_freed(1)
    subject.control_sent(FIN)
    with pytest.raises(RuntimeError):
        subject.control_sent(FIN)
    assert subject.may_send(CREDIT)
    subject.control_sent(ABORT)
    assert not any(subject.may_send(kind) for kind in range(8))
    assert subject.control_due(True) == 0


def test_no_data_after_our_fin(credit: ModuleType) -> None:
    subject = ledger(credit)
    subject.control_sent(FIN)
    assert not subject.may_send(DATA)
    with pytest.raises(RuntimeError, match="fin_sent=True"):
        subject.data_sent()


FIELDS = (
    "peer_granted sent granted grantable received peer_reaped reaped in_flight credits_in_flight "
    "ping_waiting pong_owed fin_sent fin_received abort_sent abort_received"
).split()

near = st.integers(-3, 8).map(lambda n: n & 0xFFFF_FFFF)
counts = st.one_of(near, st.integers(0, 0xFFFF_FFFF))
calls = st.one_of(
    st.tuples(
        st.just("frame_received"),
        st.tuples(st.integers(0, 24), st.integers(0, 8), st.integers(0, 9), counts, counts),
    ),
    st.tuples(
        st.just("frame_received"),
        st.sampled_from([(17, DATA, 1), (16, CREDIT, 0), (24, PING, 8), (24, PONG, 8), (16, FIN, 0)]).flatmap(
            lambda frame: st.tuples(*map(st.just, frame), near, near)
        ),
    ),
    st.tuples(st.just("data_sent"), st.just(())),
    st.tuples(st.just("control_sent"), st.tuples(st.integers(0, 7))),
    st.tuples(st.just("slots_freed"), st.tuples(st.integers(0, 4))),
)


def outcome(subject: Any, name: str, arguments: tuple[int, ...]) -> Any:
    try:
        result = getattr(subject, name)(*arguments)
    except (ProtocolError, RuntimeError) as error:
        result = type(error).__name__, str(error)
    fields = [int(getattr(subject, field)) for field in FIELDS]
    asked = [
        int(answer)
        for answer in (
            subject.credits(),
            subject.outstanding(),
            subject.held(),
            subject.grant_due(),
            subject.control_due(False),
            subject.control_due(True),
            *(subject.may_send(kind) for kind in range(8)),
            *(subject.control_in_flight(kind) for kind in range(8)),
        )
    ]
    assert subject.credits() <= subject.peer_slots
    assert subject.outstanding() + subject.held() <= subject.data_slots
    assert subject.in_flight <= 6
    return result, fields, asked


@pytest.mark.parametrize("origin", [0, WRAP])
def test_withheld_slots_are_granted_when_they_are_there(
    both_credits: tuple[ModuleType, ModuleType], origin: int
) -> None:
    """A side with a shared ring promises fewer at first, then more or fewer than were consumed."""
    for module in both_credits:
        subject = module.Ledger(
            module.Hello(SLOT_BYTES, 8, 8, 2), module.Hello(SLOT_BYTES, 4, 8, 4), origin, withhold=True
        )
        assert (subject.outstanding(), subject.held(), subject.grant_due()) == (2, 6, False)
        for _ in range(2):
            subject.frame_received(17, DATA, 1, (origin + 4) % 2**32, origin)
        with pytest.raises(ProtocolError, match="without credit"):
            subject.frame_received(17, DATA, 1, (origin + 4) % 2**32, origin)
        subject.slots_freed(5)
        assert subject.grant_due()
        subject.control_sent(CREDIT)
        assert (subject.outstanding(), subject.held()) == (5, 3)
        with pytest.raises(RuntimeError, match="4 slots freed, but only 3 were held"):
            subject.slots_freed(4)


@settings(max_examples=200)
@given(sequence=st.lists(calls, max_size=30), origin=st.sampled_from([0, WRAP]))
def test_both_forms_agree_on_anything(
    both_credits: tuple[ModuleType, ModuleType], sequence: list[Any], origin: int
) -> None:
    forms = [
        module.Ledger(module.Hello(SLOT_BYTES, 3, 8, 3), module.Hello(SLOT_BYTES, 4, 8, 4), origin)
        for module in both_credits
    ]
    for name, arguments in sequence:
        if name == "frame_received":
            byte_len, kind, length, granted, reaped = arguments
            arguments = (byte_len, kind, length, (granted + origin) % 2**32, (reaped + origin) % 2**32)
        one, other = (outcome(subject, name, arguments) for subject in forms)
        assert one == other
