"""Slots that grow and shrink, on a link that keeps the rules of a real one, and with the real ledgers.

A SEND takes the eldest receive, and one that is longer than its receive is an error at once. The sender always sends as
much as it may. What is arbitrary is when: who does what next. A small world is searched exhaustively; larger ones run
random schedules.
"""

import copy
from collections import deque
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmanet.errors import ProtocolError

DATA, CREDIT, PING = 1, 2, 3
SMALL, LARGE, LARGEST = 1024, 8192, 65536
WRAP = (1 << 32) - 5


class Side:
    """One side: it receives into slots that change, and sends what the peer's slots hold."""

    def __init__(self, credit: ModuleType, slots: ModuleType, data_slots: int, origin: int) -> None:
        hello = credit.Hello(SMALL, data_slots, 8, data_slots)
        self.ledger = credit.Ledger(hello, hello, origin)
        self.ours = slots.OurSlots(SMALL, origin)
        self.peers = slots.PeerSlots(SMALL, data_slots + 8, origin)
        self.posted: deque[int] = deque([SMALL] * (data_slots + 8))
        self.ours.posted_some(data_slots + 8)
        self.inbox: deque[tuple[int, int, int, int, tuple[int, int]]] = deque()
        self.wanted = 0  # a size to say in the next Credit
        self.held = 0
        self.longest = 0

    def post(self, count: int) -> None:
        self.posted.extend([self.ours.size] * count)
        self.ours.posted_some(count)

    def send(self, peer: "Side", kind: int, news: tuple[int, int] = (0, 0)) -> None:
        if kind == DATA:
            self.ledger.data_sent()
        else:
            self.ledger.control_sent(kind)
        size = self.peers.limit
        self.peers.sent_one()
        peer.inbox.append((kind, size, self.ledger.granted, self.ledger.reaped, news))

    # -- what may happen

    def can_send(self) -> bool:
        return bool(self.ledger.may_send(DATA))

    def speak(self, peer: "Side") -> bool:
        """One control frame, if one is due."""
        says = self.wanted and self.wanted != self.ours.size and self.ours.may_change()
        kind = self.ledger.control_due(bool(says))
        if not kind and self.ours.wants_frames() and self.ledger.may_send(PING):
            kind = PING
        if not kind:
            return False
        news = (0, 0)
        if kind == CREDIT and says:
            news = (self.ours.change(self.wanted), self.wanted)
            self.wanted = 0
        self.send(peer, kind, news)
        return True

    def receive(self) -> None:
        kind, size, granted, reaped, (number, slot) = self.inbox.popleft()
        assert self.posted, "a SEND found no receive"
        room = self.posted.popleft()
        assert size <= room, f"a SEND of {size} bytes found a receive of {room}"
        self.longest = max(self.longest, size)
        self.ours.received_one()
        self.ledger.frame_received(16 + 8, kind, 0 if kind == 5 else 8, granted, reaped)
        if kind == DATA:
            self.held += 1
        else:
            self.post(1)
        if slot:
            self.peers.hear(number, slot)
        assert self.ledger.posted_ok(len(self.posted))

    def consume(self) -> None:
        self.post(1)
        self.held -= 1
        self.ledger.slots_freed(1)

    def copy(self) -> "Side":
        other = copy.copy(self)
        other.ledger, other.ours, other.peers = (
            copy.copy(each) for each in (self.ledger, self.ours, self.peers)
        )
        other.posted, other.inbox = self.posted.copy(), self.inbox.copy()
        return other

    def key(self) -> tuple[Any, ...]:
        """All that the future depends on."""
        values = [vars(each) for each in (self.ledger, self.ours, self.peers)]
        plain = tuple(value for each in values for value in each.values())
        rest = (self.wanted, self.held, self.longest)
        return plain, tuple(self.posted), tuple(self.inbox), rest


def pair(credit: ModuleType, slots: ModuleType, data_slots: int, origin: int) -> tuple[Side, Side]:
    return Side(credit, slots, data_slots, origin), Side(credit, slots, data_slots, origin)


@pytest.mark.long
@pytest.mark.parametrize("plan", [(LARGE, LARGEST), (LARGE, SMALL, LARGE)], ids=["grows", "shrinks"])
def test_every_order_of_events_in_a_small_world(
    in_python: tuple[ModuleType, ModuleType], plan: tuple[int, ...]
) -> None:
    """One side sends, the other changes the size of its slots while frames are under way in both directions."""
    receiver, sender = pair(*in_python, 1, WRAP)
    for side in (
        receiver,
        sender,
    ):  # as few receives as the ledger allows, so that a change is reached by few frames
        side.posted = deque([SMALL] * (1 + 6))
        side.ours.posted = (side.ours.posted - 2) & 0xFFFF_FFFF
        side.peers.depth -= 2
    budget = 14
    seen: set[Any] = set()
    stack = [(receiver, sender, plan, budget)]
    states = longest = 0
    while stack:
        receiver, sender, plan, budget = stack.pop()
        key = (receiver.key(), sender.key(), plan, budget)
        if key in seen:
            continue
        seen.add(key)
        states += 1
        longest = max(longest, receiver.longest)
        moves = ["say", "answer"]
        if plan and not receiver.wanted:
            moves.append("want")
        if budget and sender.can_send():
            moves.append("send")
        if receiver.inbox:
            moves.append("receive")
        if sender.inbox:
            moves.append("hear")
        if receiver.held:
            moves.append("consume")
        for move in moves:
            r, s, p, b = receiver.copy(), sender.copy(), plan, budget
            if move == "say":
                if not r.speak(s):
                    continue
            elif move == "answer":
                if not s.speak(r):
                    continue
            elif move == "want":
                r.wanted, p = p[0], p[1:]
            elif move == "send":
                s.send(r, DATA)
                b -= 1
            elif move == "receive":
                r.receive()
            elif move == "hear":
                s.receive()
            else:
                r.consume()
            stack.append((r, s, p, b))
    assert states > 1000
    assert longest >= LARGE, "nothing was sent into a larger slot: the search is too small"


@settings(max_examples=300)
@given(
    schedule=st.lists(st.integers(0, 255), min_size=50, max_size=600),
    data_slots=st.integers(1, 6),
    origin=st.sampled_from([0, WRAP]),
)
def test_any_schedule(
    credit: ModuleType, slots: ModuleType, schedule: list[int], data_slots: int, origin: int
) -> None:
    """Both sides send, and change the sizes of their slots at any time."""
    sides = pair(credit, slots, data_slots, origin)
    for step in schedule:
        side, peer = sides[step & 1], sides[1 - (step & 1)]
        what, size = (step >> 1) % 8, (SMALL, LARGE, LARGEST)[(step >> 4) % 3]
        if what in (0, 1):
            if side.can_send():
                side.send(peer, DATA)
        elif what == 2:
            side.speak(peer)
        elif what in (3, 4):
            if side.inbox:
                side.receive()
        elif what in (5, 6):
            if side.held:
                side.consume()
        else:
            side.wanted = size
    # From here on both are fair, and both want the same.
    for side in sides:
        side.wanted = LARGEST
    for _ in range(4 * (data_slots + 8)):
        for side, peer in (sides, sides[::-1]):
            while side.inbox:
                side.receive()
            while side.held:
                side.consume()
            while side.speak(peer):
                pass
            if side.ours.size != LARGEST and not side.wanted:
                side.wanted = LARGEST
            if side.can_send():
                side.send(peer, DATA)
    assert all(side.peers.limit == LARGEST for side in sides)


@settings(max_examples=200)
@given(
    schedule=st.lists(st.integers(0, 5), max_size=100),
    data_slots=st.integers(1, 6),
    origin=st.sampled_from([0, WRAP]),
    both=st.booleans(),
)
def test_an_idle_peer_uses_up_the_large_receives(
    credit: ModuleType, slots: ModuleType, schedule: list[int], data_slots: int, origin: int, both: bool
) -> None:
    """It has nothing to send but answers. Then nobody says anything."""
    sides = pair(credit, slots, data_slots, origin)
    for side, peer in (sides, sides[::-1]):  # the rings have grown, and all is said
        side.wanted = LARGE
        while side.speak(peer):
            peer.receive()
    for _ in range(2 * (data_slots + 8)):
        for side, peer in (sides, sides[::-1]):
            side.send(peer, DATA)
            peer.receive()
            peer.consume()
            while peer.speak(side):
                side.receive()
    assert all(set(side.posted) == {LARGE} for side in sides)
    for side in sides if both else sides[:1]:
        side.wanted = SMALL
    for step in schedule:
        side, peer = sides[step & 1], sides[1 - (step & 1)]
        if step >> 1 == 0:
            side.speak(peer)
        elif side.inbox:
            side.receive()
    frames = 0
    while any(side.speak(peer) or side.inbox for side, peer in (sides, sides[::-1])):
        for side in sides:
            while side.inbox:
                side.receive()
                frames += 1
                assert frames < 200, "they go on for ever"
    assert all(set(side.posted) == {SMALL} for side in sides[: 1 + both])
    assert sides[1].peers.limit == SMALL
    assert not any(side.ours.wants_frames() for side in sides)


def test_what_is_said_is_checked(slots: ModuleType) -> None:
    peers = slots.PeerSlots(SMALL, 24, WRAP)
    for size in (0, 511, (1 << 24) + 1):
        with pytest.raises(ProtocolError, match="512 to 16777216 are possible"):
            peers.hear(WRAP, size)
    with pytest.raises(ProtocolError, match="it has 24"):
        peers.hear((WRAP + 25) & 0xFFFF_FFFF, LARGE)
    with pytest.raises(ProtocolError, match="were used"):
        peers.hear(WRAP - 1, LARGE)
    peers.hear((WRAP + 24) & 0xFFFF_FFFF, LARGE)
    with pytest.raises(ProtocolError, match="before they hold 8192"):
        peers.hear((WRAP + 24) & 0xFFFF_FFFF, LARGEST)
    assert [peers.sent_one() for _ in range(25)] == [SMALL] * 23 + [LARGE] * 2
    peers.hear(peers.sent, 512)
    assert peers.limit == 512


def test_the_receiver_says_one_thing_at_a_time(slots: ModuleType) -> None:
    ours = slots.OurSlots(SMALL, WRAP)
    ours.posted_some(9)
    assert ours.change(LARGE) == 4
    assert ours.size == LARGE, "it holds at once"
    for _ in range(9):
        assert not ours.may_change()
        with pytest.raises(RuntimeError, match="cannot be of 65536 bytes now"):
            ours.change(LARGEST)
        ours.received_one()
    assert not ours.wants_frames(), "it has grown"
    assert ours.change(SMALL) == 4
    assert ours.size == SMALL
    assert not ours.wants_frames(), "nothing is posted of the old size"
    assert ours.may_change(), "nothing is posted of the old size"
