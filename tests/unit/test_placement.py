"""Direct placement: small worlds in which every order is tried, large ones at random, and each rule taken away.

placement_world.py says what a world is. Every one here is explored with placement.py in both of its forms. A mutant
breaks one rule; if exploring its world found nothing wrong, the world would be too small, or the rule superfluous.
"""

import random
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from .conftest import PLACEMENT_IN_PYTHON
from .placement_sides import FIXED, Read, ReadOf, Script, Side, Violation, fixed, loose, pattern, slots
from .placement_world import Parts, World, explore, wander

PYTHON = PLACEMENT_IN_PYTHON


def test_constants(placement: ModuleType) -> None:
    """The public names, the private copies for C and those in placement.pxd are the same numbers."""
    text = (Path(__file__).parents[2] / "rdmanet" / "wire" / "placement.pxd").read_text()
    assert dict(re.findall(r"WANT_(\w+) = (\d+)", text)) == {"OVER": str(placement.OVER)}
    assert len({placement.NAMED, placement.SAID, placement.UNWANTED, placement.OVER}) == 4
    if hasattr(placement, "_FIXED"):  # only C has them where it is compiled
        for name in ("FIXED", "NAMED", "SAID", "UNWANTED", "OVER", "WANTS_MAX"):
            assert getattr(placement, f"_{name}") == getattr(placement, name)


# ---------------------------------------------------------------------------
# Every order
# ---------------------------------------------------------------------------

WORLDS: dict[str, tuple[Script, Script]] = {
    "a fixed read": (Script(4), Script(reads=(fixed(4),))),
    "a fixed read of less than comes": (Script(4, ends="fin"), Script(reads=(fixed(2),))),
    "a fixed read of more than comes": (Script(2, ends="fin"), Script(reads=(fixed(3),))),
    "two buffers": (Script(3, ends="fin"), Script(reads=(fixed(1, 2),))),
    "more buffers than Wants": (Script(5, slots=1), Script(reads=(fixed(1, 1, 1, 1, 1),), slots=1)),
    "loose reads": (Script(3, ends="fin"), Script(reads=(loose(2), loose(3)))),
    "a loose read before a fixed one": (Script(4), Script(reads=(loose(2), fixed(2)))),
    "a loose read of more than comes": (Script(1), Script(reads=(loose(2),))),
    "reads of slots between": (Script(4), Script(reads=(fixed(2), slots(1), loose(2)))),
    "cancelled": (Script(2, ends="fin"), Script(reads=(fixed(2),), cancels=1)),
    "cancelled, and little comes": (Script(1), Script(reads=(fixed(2),), cancels=1)),
    "cancelled, and asked again": (Script(2), Script(reads=(loose(2), fixed(2)), cancels=1, slots=1)),
    "cancelled twice": (Script(2, slots=1), Script(reads=(fixed(2), fixed(2)), cancels=2, slots=1)),
    "switched": (Script(2), Script(reads=(fixed(2), fixed(1)), switches=1)),
    "switched with two buffers": (Script(2), Script(reads=(fixed(1, 1), slots(1)), switches=1, slots=1)),
    "paused": (Script(2), Script(reads=(fixed(1), loose(2)), pauses=1)),
    "paused and cancelled": (Script(2, slots=1), Script(reads=(fixed(2),), pauses=1, cancels=1, slots=1)),
    "the reader closes": (Script(2, ends="fin", slots=1), Script(reads=(fixed(2),), closes=True, slots=1)),
    "the writer aborts": (Script(3, ends="abort"), Script(reads=(fixed(2), loose(1)))),
    "the reader aborts": (Script(3), Script(reads=(fixed(2), loose(1)), ends="abort")),
    "one slot": (Script(4, slots=1), Script(reads=(fixed(3),), slots=1)),
    "other news": (Script(2, slots=1), Script(reads=(fixed(2),), cancels=1, slots=1, news=2)),
    "a peer that ignores Wants": (
        Script(3, places=False, slots=1),
        Script(reads=(fixed(2), loose(2)), cancels=1, slots=1),
    ),
    "both ways": (Script(1, reads=(fixed(1),), slots=1), Script(1, reads=(loose(1),), slots=1)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_every_order(placement: ModuleType, name: str) -> None:
    assert explore(World(Parts(placement), *WORLDS[name])) > 20


def test_lost_at_any_moment(placement: ModuleType) -> None:
    world = World(Parts(placement), Script(2), Script(reads=(fixed(2),), cancels=1), may_lose=True)
    assert explore(world) > 1000


# Each was a counterexample to some weaker rule. What is written here leads there; from there, every order is tried.
ASKED = "b begin, b speak, a hear"
MOMENTS: dict[str, tuple[Script, Script, str]] = {
    "two Wants cross a DATA that is exactly as long as the first": (
        Script(3),
        Script(reads=(fixed(2, 1),)),
        "b begin, b speak, a post data 2, a hear",
    ),
    "Placed into the first in part, then DATA up to its end": (
        Script(4),
        Script(reads=(fixed(2, 2),)),
        f"{ASKED}, a post place 1, a post data 1",
    ),
    "Want, Unwant, Want at the same position, and a Placed under way": (
        Script(3),
        Script(reads=(fixed(2), fixed(2)), cancels=1),
        f"{ASKED}, a post place 1, b cancel, b speak",
    ),
    "Placed waits for a credit while an Unwant is answered": (
        Script(2, slots=1),
        Script(reads=(fixed(2), fixed(2)), cancels=1, slots=1),
        f"{ASKED}, a post data 1, b cancel, b speak",
    ),
    "a loose Want is used in part, and there is more to place": (
        Script(4),
        Script(reads=(loose(3), loose(3))),
        f"{ASKED}, a post place 1",
    ),
    "DATA into the middle of a fixed range, placing behind it": (
        Script(4),
        Script(reads=(fixed(4),)),
        f"{ASKED}, a post data 1, a post place 2",
    ),
    "a WRITE has landed, its Placed is not heard, and the next read is named": (
        Script(3),
        Script(reads=(fixed(2), fixed(2)), switches=1),
        f"{ASKED}, a post place 1, b land, b switch, b begin",
    ),
    "cancelled with a WRITE under way": (
        Script(3),
        Script(reads=(fixed(3),), cancels=1),
        f"{ASKED}, a post place 1, b cancel",
    ),
    "closed with a WRITE under way": (
        Script(3, ends="fin", slots=1),
        Script(reads=(fixed(3),), closes=True, slots=1),
        f"{ASKED}, a post place 1, b close",
    ),
    "Fin behind a WRITE, and the Want has room": (
        Script(2, ends="fin"),
        Script(reads=(fixed(3),), cancels=1),
        f"{ASKED}, a post place 2, a finish",
    ),
    "Fin crosses a Want": (
        Script(1, ends="fin"),
        Script(reads=(fixed(3),), cancels=1),
        "a post data 1, a finish, b begin, b speak, b cancel",
    ),
    "the writer aborts behind a WRITE": (
        Script(2, ends="abort"),
        Script(reads=(fixed(3),), cancels=1),
        f"{ASKED}, a post place 1, a finish",
    ),
    "the reader aborts with a WRITE under way": (
        Script(2),
        Script(reads=(fixed(3),), ends="abort"),
        f"{ASKED}, a post place 1, b finish",
    ),
    "no credit, and all Credits used": (
        Script(3, slots=1),
        Script(reads=(fixed(3),), cancels=1, slots=1, news=2),
        "a post data 1, b speak, b speak, b begin",
    ),
    "one Credit is left": (
        Script(2, slots=1),
        Script(reads=(fixed(2),), cancels=1, slots=1, news=1),
        "b speak, b begin, b speak, b cancel",
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_from_moments_that_broke_weaker_rules(placement: ModuleType, name: str) -> None:
    *scripts, schedule = MOMENTS[name]
    assert explore(World(Parts(placement), *scripts).follow(schedule)) > 1


# ---------------------------------------------------------------------------
# Each rule taken away
# ---------------------------------------------------------------------------


class UsesALooseWantTwice(PYTHON.PeerWants):
    def _is_passed(self, want: Any) -> bool:
        return self.position >= want.position + want.length


class NeverPasses(PYTHON.PeerWants):
    """A Want that crossed bytes is used for those that come next."""

    def _is_passed(self, want: Any) -> bool:
        return False

    def current(self) -> Any:
        return self._open[0] if self._open else None

    def room(self, want: Any) -> int:
        return want.length

    def target(self, want: Any) -> int:
        return want.address


class GoesByArrival(PYTHON.PeerWants):
    """What is sent next goes to the Want, wherever in the stream it was said."""

    def _hear_one(self, want: Any) -> int:
        return super()._hear_one(msgspec.structs.replace(want, position=max(want.position, self.position)))


class CountsPlacedBytesOnly(Side):
    def post(self, how: str, count: int) -> None:
        before = self.peer_wants
        if how == "data":
            self.peer_wants = PYTHON.PeerWants(0)
        super().post(how, count)
        self.peer_wants = before


class KeepsWhatIsTakenBack(PYTHON.PeerWants):
    def hear(self, wants: Any, unwanted: int) -> int:
        kept = self._open.copy()
        super().hear(wants, unwanted)
        if unwanted:
            self._open[:] = kept
            self.count = len(kept)
        return 0


class NeverAnswers(PYTHON.PeerWants):
    def answered(self) -> int:
        super().answered()
        return 0


class AnswersWhenItHappensToSpeak(Side):
    def has_news(self) -> bool:
        due, self.peer_wants.answer_due = self.peer_wants.answer_due, 0
        try:
            return super().has_news()
        finally:
            self.peer_wants.answer_due = due


class WritesWithoutACredit(Side):
    """The Placed follows when there is one."""

    waiting: tuple[int, int] | None = None

    def posts(self) -> list[tuple[str, int]]:
        want = self.peer_wants.current()
        left = self.script.writes - self.written
        if self.waiting:
            return [("told", 0)] if self.ledger.may_send(1) else []
        if want is not None and left and not self.ledger.may_send(1):
            return [("untold", min(left, self.peer_wants.room(want)))]
        return super().posts()

    def post(self, how: str, count: int) -> None:
        if how == "told":
            waiting, self.waiting = self.waiting, None
            self.transmit(7, 16, waiting)
        elif how == "untold":
            want = self.peer_wants.current()
            self.write(want, pattern(self.written, count))
            self.peer_wants.sent(count)
            self.written += count
            self.waiting = want.serial, self.peer_wants.position
        else:
            super().post(how, count)


class LetsGoWithoutAnAnswer(PYTHON.OurWants):
    def unwant(self) -> int:
        super().unwant()
        for want in self._open:
            want.state = PYTHON.OVER
        return self._sweep()


class TakesNothingBack(PYTHON.OurWants):
    def unwant(self) -> int:
        return 0


class SaysMoreBeforeTheAnswer(PYTHON.OurWants):
    def may_name(self, fixed: bool) -> bool:
        return not self._ended and self.count == sum(want.state == PYTHON.UNWANTED for want in self._open)

    def next_to_say(self) -> Any:
        return next((want for want in self._open if want.state == PYTHON.NAMED), None)

    def name(self, address: int, length: int, fixed: bool) -> Any:
        want = PYTHON.OurWant(self.position, address, length, fixed)
        self._open.append(want)
        self.count += 1
        return want


class HoldsALooseWantUntilItIsFull(PYTHON.OurWants):
    def _pass(self) -> int:
        for want in self._open:
            if self.position >= want.position + want.length:
                want.state = PYTHON.OVER
        return self._sweep()


class LetsGoOfAFixedWantAtItsFirstByte(PYTHON.OurWants):
    def _pass(self) -> int:
        for want in self._open:
            if self.position > want.position:
                want.state = PYTHON.OVER
        return self._sweep()


class DoesNotCountData(PYTHON.OurWants):
    def received(self, count: int) -> int:
        return 0


class NamesEachBufferAtTheSamePosition(PYTHON.OurWants):
    def name(self, address: int, length: int, fixed: bool) -> Any:
        want = super().name(address, length, fixed)
        want.position = self.position
        return want


class NamesALooseOneBesideOthers(PYTHON.OurWants):
    def may_name(self, fixed: bool) -> bool:
        return not self._ended and not self.unanswered and self.count < 4

    def name(self, address: int, length: int, fixed: bool) -> Any:
        return super().name(address, length, False)


class NamesFive(PYTHON.OurWants):
    def may_name(self, fixed: bool) -> bool:
        return not self._ended and not self.unanswered and self.count < 5


class IgnoresTheEnd(PYTHON.OurWants):
    def end(self) -> int:
        self._ended = True
        return 0


class NamesBeforeItTakesWhatHasCome(Side):
    def begin(self) -> None:
        what = self.script.reads[self.number] if self.number < len(self.script.reads) else slots(1)
        if what.kind == FIXED and self.inbox and not self.ended:
            self.reading = Read(what, self.number, self.consumed)
            self.name(self.reading)
            self.number += 1
            self.go_on()
        else:
            super().begin()


class IsDoneWhenTheBytesAreThere(Side):
    """A read returns when its memory has them, whatever was heard."""

    def land(self) -> None:
        super().land()
        read = self.reading
        if read is not None and not read.stopped and bytes(read.memory) == pattern(read.start, read.size):
            read.have = read.size
            self.wants.end()
            self.wants._ended = False
            self.returns(read)
            self.let_go()


class LosesWhatAStoppedReadHad(Side):
    def stop(self, read: Any) -> None:
        read.have = 0
        super().stop(read)


class DoesNotCopyOutWhenStopped(Side):
    def stop(self, read: Any) -> None:
        inbox = self.inbox
        self.inbox = []
        super().stop(read)
        self.inbox += inbox


class DoesNotCopyOutWhatComesAfterwards(Side):
    def came(self, address: int, length: int, data: bytes | None, has_slot: bool = False) -> None:
        super().came(address, length, None if address else data, has_slot)


class ClosesWithoutTakingBack(Side):
    def close(self) -> None:
        self.reading = None
        super().close()


MUTANTS: dict[type, str] = {
    UsesALooseWantTwice: "loose reads",
    NeverPasses: "two buffers",
    GoesByArrival: "two Wants cross a DATA that is exactly as long as the first",
    CountsPlacedBytesOnly: "a fixed read",
    KeepsWhatIsTakenBack: "cancelled",
    NeverAnswers: "cancelled, and little comes",
    AnswersWhenItHappensToSpeak: "cancelled, and little comes",
    WritesWithoutACredit: "Placed waits for a credit while an Unwant is answered",
    LetsGoWithoutAnAnswer: "cancelled",
    TakesNothingBack: "cancelled, and little comes",
    SaysMoreBeforeTheAnswer: "switched",
    HoldsALooseWantUntilItIsFull: "a loose read of more than comes",
    LetsGoOfAFixedWantAtItsFirstByte: "a fixed read",
    DoesNotCountData: "a fixed read",
    NamesEachBufferAtTheSamePosition: "two buffers",
    NamesALooseOneBesideOthers: "two buffers",
    NamesFive: "more buffers than Wants",
    IgnoresTheEnd: "a fixed read of more than comes",
    NamesBeforeItTakesWhatHasCome: "a fixed read",
    IsDoneWhenTheBytesAreThere: "a fixed read of less than comes",
    LosesWhatAStoppedReadHad: "cancelled",
    DoesNotCopyOutWhenStopped: "paused and cancelled",
    DoesNotCopyOutWhatComesAfterwards: "cancelled",
    ClosesWithoutTakingBack: "the reader closes",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_without_a_rule_something_goes_wrong(mutant: type) -> None:
    where = MUTANTS[mutant]
    parts = SimpleNamespace(placement=PYTHON, side=Side)
    if issubclass(mutant, Side):
        parts.side = mutant
    else:
        base = mutant.__mro__[1].__name__
        parts.placement = SimpleNamespace(
            **{"PeerWants": PYTHON.PeerWants, "OurWants": PYTHON.OurWants, "OVER": PYTHON.OVER, base: mutant}
        )
    a, b, *schedule = WORLDS[where] if where in WORLDS else MOMENTS[where]
    with pytest.raises(Violation):
        world = World(parts, a, b)
        if schedule:
            world.follow(*schedule)
        explore(world)


# ---------------------------------------------------------------------------
# Large worlds
# ---------------------------------------------------------------------------


def some_script(rng: random.Random) -> Script:
    def read() -> ReadOf:
        kind = rng.choice([fixed, fixed, loose, slots])
        if kind is fixed:
            return fixed(*(rng.randrange(1, 12) for _ in range(rng.choice([1, 1, 2, 6]))))
        return kind(rng.randrange(1, 12))

    return Script(
        writes=rng.randrange(80),
        places=rng.random() < 0.9,
        ends=rng.choice(["", "fin", "fin"]) if rng.random() < 0.95 else "abort",
        reads=tuple(read() for _ in range(rng.randrange(12))),
        slots=rng.choice([1, 2, 3, 8]),
        cancels=rng.randrange(5),
        switches=rng.randrange(3),
        pauses=rng.randrange(3),
        closes=rng.random() < 0.2,
        news=rng.choice([0, 0, 1, 10]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_orders(placement: ModuleType, seed: int) -> None:
    for i in range(25):
        rng = random.Random(1000 * seed + i)
        a, b = some_script(rng), some_script(rng)
        wander(World(Parts(placement), a, b, may_lose=rng.random() < 0.05), rng)
