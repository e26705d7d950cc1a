"""Which connections may be half open, for how long, and which is next; with a simulated clock."""

import heapq
import itertools

import pytest

from rdmanet.stream import admission
from rdmanet.stream.admission import Admission, source_of


class Clock:
    """As much of an event loop as is needed."""

    def __init__(self):
        self.now = 0.0
        self.timers = []
        self.order = itertools.count()

    def time(self):
        return self.now

    def is_closed(self):
        return False

    def call_at(self, when, callback):
        timer = Timer(callback)
        heapq.heappush(self.timers, (when, next(self.order), timer))
        return timer

    def advance(self, seconds):
        until = self.now + seconds
        while self.timers and self.timers[0][0] <= until:
            when, _, timer = heapq.heappop(self.timers)
            self.now = max(self.now, when)
            if timer.callback is not None:
                timer.callback()
        self.now = until

    def turn(self, seconds, read):
        """One turn of a loop: those who read come before the timers that are due."""
        self.now += seconds
        due = []
        while self.timers and self.timers[0][0] <= self.now:
            due.append(heapq.heappop(self.timers)[2])
        read()
        for timer in due:
            if timer.callback is not None:
                timer.callback()

    def stand_still(self, seconds):
        """Something else keeps the loop for so long."""
        self.now += seconds


class Timer:
    def __init__(self, callback):
        self.callback = callback

    def cancel(self):
        self.callback = None


class Visitor:
    def __init__(self, door, source):
        self.door, self.source, self.fate = door, source, "waits"

    def enter(self):
        assert self.fate == "waits"
        self.fate = "inside"

    def turn_away(self):
        assert self.fate == "waits"
        self.fate = "refused"
        self.door.left(self)

    def look(self):
        return True

    def evict(self):
        assert self.fate == "inside"
        self.fate = "evicted"
        self.door.left(self)

    def goes_on(self):
        assert self.fate == "inside"
        self.fate = "stands"
        self.door.left(self)

    def owes_a_handshake(self):
        assert self.fate == "inside"
        self.door.goes_on(self)


class Server:
    def __init__(self, places=4, waiting=100, handshake_s=0.0):
        self.clock = Clock()
        self.door = Admission(self.clock, places, waiting, handshake_s)

    def come(self, source, count):
        visitors = [Visitor(self.door, source) for _ in range(count)]
        for visitor in visitors:
            self.door.arrived(visitor)
        return visitors


def fates(visitors):
    return [visitor.fate for visitor in visitors]


def test_an_honest_crowd_all_get_in():
    """Nobody is evicted or refused, however many come at once."""
    server = Server()
    crowd = server.come("a", 100)
    for _ in range(100):
        inside = [visitor for visitor in crowd if visitor.fate == "inside"]
        assert len(inside) <= 4
        for visitor in inside:
            server.clock.advance(0.02)
            visitor.goes_on()
    assert fates(crowd) == ["stands"] * 100
    server.clock.advance(admission.PATIENCE_S)
    assert not server.clock.timers


def test_one_timer_is_enough_for_all_who_come_and_go_in_time():
    """Setting and stopping one for each would take longer than the rest that is done for it here."""
    server = Server()
    for _ in range(100):
        (visitor,) = server.come("a", 1)
        server.clock.advance(0.001)
        visitor.goes_on()
    assert len(server.clock.timers) == 1
    server.come("a", 1)
    server.door.close()
    server.clock.advance(2 * admission.PATIENCE_S)
    assert not server.clock.timers


def test_a_closed_server_has_no_timer_when_the_last_has_gone():
    server = Server()
    (visitor,) = server.come("a", 1)
    server.door.close()
    visitor.goes_on()
    assert all(timer.callback is None for _, _, timer in server.clock.timers)


def test_who_never_goes_on_has_five_seconds():
    server = Server()
    silent = server.come("a", 3)
    server.clock.advance(admission.PATIENCE_S - 0.1)
    assert fates(silent) == ["inside"] * 3
    server.clock.advance(0.2)
    assert fates(silent) == ["evicted"] * 3


def test_a_handshake_has_its_own_time_while_nobody_waits():
    server = Server(handshake_s=60.0)
    (slow,) = server.come("a", 1)
    server.clock.advance(1.0)
    slow.owes_a_handshake()
    server.clock.advance(60.0 + admission.PATIENCE_S)
    assert slow.fate == "inside"
    server.clock.advance(1.0)
    assert slow.fate == "evicted"


def test_a_handshake_has_a_second_and_three_quarters_if_somebody_waits():
    """From the time when the connection was established."""
    server = Server(handshake_s=60.0)
    silent = server.come("a", 4)
    server.clock.advance(0.5)
    for visitor in silent:
        visitor.owes_a_handshake()
    (honest,) = server.come("a", 1)
    server.clock.advance(admission.HANDSHAKE_GRACE_S + admission.OTHERS_WAIT_S - 0.1)
    assert fates(silent) == ["inside"] * 4
    server.clock.advance(0.2)
    assert fates(silent) == ["evicted", "inside", "inside", "inside"]
    assert honest.fate == "inside"


def test_who_has_left_owes_no_handshake():
    server = Server()
    (gone,) = server.come("a", 1)
    server.door.left(gone)
    server.door.goes_on(gone)
    server.clock.advance(10.0)
    assert gone.fate == "inside"  # nobody tells it: it is gone


def test_one_second_if_somebody_of_the_same_address_waits():
    server = Server()
    silent = server.come("a", 4)
    (honest,) = server.come("a", 1)
    server.clock.advance(admission.OTHERS_WAIT_S - 0.1)
    assert honest.fate == "waits"
    server.clock.advance(0.2)
    assert honest.fate == "inside"
    assert fates(silent) == ["evicted", "inside", "inside", "inside"]


def test_who_comes_from_elsewhere_waits_a_quarter():
    """However many of the crowded address came before."""
    server = Server()
    silent = server.come("a", 80)
    (honest,) = server.come("b", 1)
    server.clock.advance(admission.UNFAIR_S + 0.01)
    assert honest.fate == "inside"
    assert fates(silent[:5]) == ["evicted", "inside", "inside", "inside", "waits"]


def test_a_flood_in_each_turn_of_the_loop_does_not_keep_a_place_from_being_taken_back():
    server = Server(waiting=8)
    silent = server.come("a", 4)
    server.come("a", 8)
    (honest,) = server.come("b", 1)
    while honest.fate == "waits" and server.clock.now < 2 * admission.UNFAIR_S:
        server.clock.turn(0.001, lambda: server.come("a", 1))
    assert honest.fate == "inside"
    assert fates(silent) == ["evicted", "inside", "inside", "inside"]


def test_who_waits_later_waits_no_longer_because_of_one_who_has_left():
    """The clock was set for that one, and all were alone."""
    server = Server()
    (gone,) = server.come("a", 1)
    server.clock.advance(1.0)
    silent = server.come("a", 3)
    server.clock.advance(admission.PATIENCE_S - 1.05)
    gone.goes_on()
    server.clock.advance(0.1)
    silent += server.come("a", 1)
    (honest,) = server.come("b", 1)
    server.clock.advance(admission.LAST_LOOK_S + 0.05)
    assert honest.fate == "inside"
    assert fates(silent) == ["evicted", "inside", "inside", "inside"]


def test_one_place_is_nobodys_more_than_its_share():
    server = Server()
    crowd = [server.come(name, 1)[0] for name in "abcd"]
    (late,) = server.come("e", 1)
    server.clock.advance(admission.UNFAIR_S + 0.01)
    assert late.fate == "waits"
    server.clock.advance(admission.OTHERS_WAIT_S)
    assert late.fate == "inside"
    assert fates(crowd) == ["evicted", "inside", "inside", "inside"]


@pytest.mark.parametrize("until", [0.9, 0.98, 1.04, 60])
def test_what_came_while_our_loop_stood_still_is_looked_at_first(until):
    """Whenever it goes on: shortly before the place would be taken back, or long after."""
    server = Server()
    crowd = server.come("a", 8)
    server.clock.stand_still(until)
    server.clock.advance(0)
    assert fates(crowd) == ["inside"] * 4 + ["waits"] * 4
    for visitor in crowd[:3]:
        visitor.goes_on()
    server.clock.advance(0.3)
    assert fates(crowd) == ["stands"] * 3 + ["evicted"] + ["inside"] * 4


def test_a_loop_that_is_always_late_takes_places_back_too():
    server = Server()
    crowd = server.come("a", 5)
    for _ in range(2 + admission.LOOKS_AGAIN_MAX):
        assert fates(crowd) == ["inside"] * 4 + ["waits"]
        server.clock.stand_still(1.2)
        server.clock.advance(0)
    assert "evicted" in fates(crowd)


class Unread(Visitor):
    """Its word lies behind so many others: each look reads some of them."""

    behind = 0

    def look(self):
        self.behind -= 1
        if not self.behind:
            self.goes_on()
        return self.behind <= 0


@pytest.mark.parametrize("behind", [1, 2, 1 + admission.LOOKS_AGAIN_MAX])
def test_what_is_unread_is_read_before_a_place_is_taken_back(behind):
    """Also if the loop is on time, and has more to read than it takes in one turn."""
    server = Server()
    unread = Unread(server.door, "a")
    unread.behind = behind
    server.door.arrived(unread)
    silent = server.come("a", 4)
    server.clock.advance(admission.OTHERS_WAIT_S + admission.LOOKS_AGAIN_MAX * (admission.LAST_LOOK_S + 0.01))
    assert unread.fate == "stands"
    assert fates(silent) == ["inside"] * 4


def test_a_flood_that_is_never_read_to_its_end_takes_places_back_too():
    server = Server()
    unread = Unread(server.door, "a")
    unread.behind = 1000
    server.door.arrived(unread)
    server.come("a", 4)
    server.clock.advance(2 * admission.OTHERS_WAIT_S)
    assert unread.fate == "evicted"


def test_who_cannot_be_accepted_has_left_before_it_is_in():
    """The dead, of a crowd that went together: one after another, and none within another's."""

    class Dead(Visitor):
        depth = 0

        def enter(self):
            Dead.depth += 1
            assert Dead.depth == 1
            super().enter()
            self.goes_on()
            Dead.depth -= 1

    server = Server()
    crowd = server.come("a", 4)
    dead = [Dead(server.door, "a") for _ in range(90)]
    for visitor in dead:
        server.door.arrived(visitor)
    last = server.come("a", 1)
    crowd[0].goes_on()
    assert fates(dead) == ["stands"] * 90
    assert fates(last) == ["inside"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::3", "2001:db8:1:ffff::1", True),
        ("2001:db8:1:2::3", "2001:db8:2:2::3", False),
    ],
)
def test_what_one_source_is(one, other, same):
    assert (source_of(one) == source_of(other)) is same


def test_a_user_is_one_source_whatever_its_address():
    assert source_of("127.0.0.1", 1000) == source_of("::1", 1000) != source_of("127.0.0.1", 0)
    assert source_of("127.0.0.1", 0) != source_of("127.0.0.1")


def test_too_many_wait():
    """The eldest of the address that has the most of them is refused; others keep their turn."""
    server = Server(waiting=10)
    (quiet,) = server.come("b", 1)
    crowd = server.come("a", 3)
    first = server.come("b", 1)
    flood = server.come("a", 20)
    assert quiet.fate == "inside" and fates(crowd) == ["inside"] * 3
    assert fates(first) == ["waits"]
    assert fates(flood) == ["refused"] * 11 + ["waits"] * 9


def test_who_gives_up_waiting():
    server = Server()
    server.come("a", 4)
    one, two = server.come("a", 2)
    server.door.left(one)
    server.door.left(one)
    server.clock.advance(admission.OTHERS_WAIT_S + 0.01)
    assert (one.fate, two.fate) == ("waits", "inside")  # nobody tells it: it is gone


def test_closing_refuses_who_waits():
    server = Server()
    inside, waiting = server.come("a", 4), server.come("a", 3)
    server.door.close()
    assert fates(waiting) == ["refused"] * 3
    assert fates(inside) == ["inside"] * 4
    server.clock.advance(admission.PATIENCE_S + 0.1)
    assert fates(inside) == ["evicted"] * 4


@pytest.mark.parametrize(
    ("each", "places"), [(2_700_000, 6), (34_000, 493), (16 << 20, 4), (3 << 30, 4), (1, 16 << 20)]
)
def test_places_are_what_16_mebibytes_hold(each, places):
    assert admission.places_for(each) == places
