"""Two sides that place bytes, small enough to try every order in which things can happen.

A `World` has two sides, "a" and "b" (placement_sides.py), and a channel each way, which keeps order and loses nothing.
What each does is its script's; when is arbitrary. `World.steps()` are all that can happen next:

    post data N, post place N       N bytes of what is to be written, as DATA or by a WRITE with its Placed
    speak                           the control frame that is due
    land                            the device executes the next WRITE, however many frames before it are unheard
    hear                            the next frame is taken in, and what came is given to the read that waits
    begin                           the next read
    pause, resume                   what comes stays where it is meanwhile
    cancel, switch, close           the read is given up: by its task; for another reader; with the connection
    finish                          Fin or Abort
    lose                            the connection is lost, on both sides

`explore()` tries all orders, `wander()` some at random. A world is a value: its pickle is how it is copied, and by its
pickle it is known again.
"""

import hashlib
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

from rdmanet.errors import ProtocolError

from .placement_sides import CREDIT, WRITE, Script, Side, Violation


@dataclass
class Parts:
    """What a world is made of: the module placement, and the class of its sides."""

    placement: Any
    side: type[Side] = field(default=Side)


class World:
    def __init__(self, parts: Parts, a: Script, b: Script, may_lose: bool = False) -> None:
        self.a, self.b = (parts.side(parts.placement, *args) for args in (("a", a, b), ("b", b, a)))
        self.a.peer, self.b.peer = self.b, self.a
        self.may_lose = may_lose
        self.a.transmit(CREDIT, 0)  # who connects speaks first
        self.b.hear()

    def steps(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for side in (self.a, self.b):
            if side.dead:
                continue
            found += [(side.letter, "post", how, n) for how, n in side.posts()]
            for possible, what in (
                (side.finishes(), "finish"),
                (side.due(), "speak"),
                (side.lands(), "land"),
                (any(item[0] != WRITE for item in side.channel), "hear"),
                (side.begins(), "begin"),
                (side.pauses and not side.paused, "pause"),
                (side.paused, "resume"),
                (side.cancels and side.may_stop(), "cancel"),
                (side.switches and side.may_stop(), "switch"),
                (side.script.closes and not side.closed, "close"),
            ):
                if possible:
                    found.append((side.letter, what))
        if self.may_lose and not self.a.dead:
            found.append(("", "lose"))
        return found

    def do(self, step: tuple[Any, ...]) -> None:
        """Raises Violation."""
        name, what, *arguments = step
        try:
            if what == "lose":
                for side in (self.a, self.b):
                    side.die()
            else:
                getattr(self.a if name == "a" else self.b, what)(*arguments)
        except (ProtocolError, RuntimeError) as error:
            raise Violation(str(error)) from error

    def follow(self, schedule: str) -> "World":
        """Do what is written there, step by step: "b begin, b speak, a post place 2", with any number of bytes."""
        for text in schedule.split(","):
            step = tuple(int(word) if word.isdigit() else word for word in text.split())
            if step[:3] not in [possible[:3] for possible in self.steps()]:
                raise LookupError(f"{text.strip()!r} cannot happen; these can: {self.steps()}")
            self.do(step)
        return self

    def check_over(self) -> None:
        self.a.check_over()
        self.b.check_over()


def explore(world: World, most: int = 1_000_000) -> int:
    """Try all orders. Returns how many states there are; raises Violation, with the steps that led there."""
    first = pickle.dumps(world)
    known = {_digest(first)}
    heap: list[tuple[bytes, Any]] = [(first, None)]
    while heap:
        state, path = heap.pop()
        world = pickle.loads(state)
        steps = world.steps()
        try:
            if not steps:
                world.check_over()
            for i, step in enumerate(steps):
                if i:
                    world = pickle.loads(state)
                world.do(step)
                after = pickle.dumps(world)
                if (digest := _digest(after)) not in known:
                    known.add(digest)
                    heap.append((after, (step, path)))
        except Violation as violation:
            raise Violation(f"{violation}, after: {_words(path, step if steps else ())}") from violation
        if len(known) > most:
            raise RuntimeError(f"more than {most} states")
    return len(known)


def wander(world: World, rng: random.Random, most: int = 100_000) -> None:
    """Do what can happen, in a random order, until nothing can. For a while each, some steps are rare."""
    done: Any = None
    weights: dict[Any, float] = {}
    for count in range(most):
        steps = world.steps()
        if not steps:
            break
        if count % 50 == 0:
            weights = {}
        step = rng.choices(steps, [weights.setdefault(s[:2], rng.choice([0.01, 1, 8])) for s in steps])[0]
        done = (step, done)
        try:
            world.do(step)
        except Violation as violation:
            raise Violation(f"{violation}, after: {_words(done)}") from violation
    else:
        raise Violation(f"never comes to rest: {_words(done)[-500:]}")
    try:
        world.check_over()
    except Violation as violation:
        raise Violation(f"{violation}, after: {_words(done)}") from violation


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=12).digest()


def _words(path: Any, *last: tuple[Any, ...]) -> str:
    found = [step for step in last if step]
    while path is not None:
        step, path = path
        found.insert(0, step)
    return ", ".join(" ".join(map(str, step)).strip() for step in found)
