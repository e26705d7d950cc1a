"""All executions of a small concurrent program that C11 allows: a checker for litmus tests.

A thread is a generator function. It yields what it does to shared words, is sent what each read returns, and returns
what it has seen. `run` gives every combination of results (and the words' last values) that an execution can have.

The model is RC11 (Lahav and others, "Repairing Sequential Consistency in C/C++11", 2017), with C++20's release
sequences. An execution is a graph of events: what each read reads from (rf), and the order of the writes of each word
(mo). It counts if it keeps coherence, the atomicity of read-modify-writes, and the order of seq_cst operations. That
allows more than ARMv8 does, and what compilers make of it for ARMv8, RISC-V and x86 keeps it: what does not happen here
does not happen there.

There is one exception. RC11 forbids a read to see a write that depends on it, or that comes after it in some thread's
program without an order (load buffering), which ARM does for relaxed operations. So a test says nothing about a *read*
that must come before a later relaxed *write* of the same thread. Each word that hands something over in the device is
written by a release or a read-modify-write of that strength, which orders reads before it.

Events are added one at a time, reads after what they read from, and a graph that is wrong already is given up: removing
the last events of a right one leaves a right one. Equal graphs that are reached in several orders count once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Order(IntEnum):
    RELAXED = 0
    ACQUIRE = 1
    RELEASE = 2
    ACQ_REL = 3
    SEQ_CST = 7

    @property
    def acquires(self) -> bool:
        return bool(self & 1)

    @property
    def releases(self) -> bool:
        return bool(self & 2)


RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = Order


@dataclass(frozen=True)
class Read:
    """until: wait for a value of which that is true; an execution in which none comes is left out."""

    word: str
    order: Order = RELAXED
    until: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Write:
    word: str
    value: Any
    order: Order = RELAXED


@dataclass(frozen=True)
class Change:
    """A read-modify-write. change: from the old value to the new one; None: it fails, and is a read."""

    word: str
    change: Callable[[Any], Any]
    order: Order = SEQ_CST


@dataclass(frozen=True)
class Fence:
    order: Order = SEQ_CST


Action = Read | Write | Change | Fence
Thread = Callable[[], Generator[Action, Any, Any]]
Id = tuple[int, int]  # thread, place in it; thread -1: the words' first values


@dataclass(frozen=True)
class Event:
    id: Id
    word: str | None
    order: Order
    reads: Id | None = None  # from that write
    value: Any = None  # that it writes
    writes: bool = False

    @property
    def is_fence(self) -> bool:
        return self.word is None


@dataclass(frozen=True)
class Graph:
    """events: of each thread; modifications: each word's writes in order."""

    events: tuple[tuple[Event, ...], ...]
    modifications: tuple[tuple[str, tuple[Id, ...]], ...]


class Relation:
    """Between the events 0 to n - 1: a row of bits for each."""

    def __init__(self, size: int, rows: list[int] | None = None) -> None:
        self.rows = rows if rows is not None else [0] * size

    def add(self, a: int, b: int) -> None:
        self.rows[a] |= 1 << b

    def __or__(self, other: Relation) -> Relation:
        return Relation(0, [a | b for a, b in zip(self.rows, other.rows, strict=True)])

    def then(self, other: Relation) -> Relation:
        rows = []
        for row in self.rows:
            reached = 0
            while row:
                low = row & -row
                reached |= other.rows[low.bit_length() - 1]
                row ^= low
            rows.append(reached)
        return Relation(0, rows)

    def between(self, sources: int, targets: int) -> Relation:
        return Relation(0, [row & targets if sources >> i & 1 else 0 for i, row in enumerate(self.rows)])

    def maybe(self) -> Relation:
        return Relation(0, [row | 1 << i for i, row in enumerate(self.rows)])

    def closed(self) -> Relation:
        rows = list(self.rows)
        for k in range(len(rows)):
            for i in range(len(rows)):
                if rows[i] >> k & 1:
                    rows[i] |= rows[k]
        return Relation(0, rows)

    @property
    def is_irreflexive(self) -> bool:
        return not any(row >> i & 1 for i, row in enumerate(self.rows))


def consistent(graph: Graph) -> bool:
    """Does RC11 allow it?"""
    events = [event for thread in graph.events for event in thread]
    number = {event.id: i for i, event in enumerate(events)}
    size = len(events)
    sb, rf, mo, fr, rmw_rf = (Relation(size) for _ in range(5))
    same_word = Relation(size)
    for i, a in enumerate(events):
        for j, b in enumerate(events):
            if i != j and (
                a.id[0] == -1 != b.id[0] or (a.id[0] == b.id[0] and a.id[1] < b.id[1] and a.id[0] >= 0)
            ):
                sb.add(i, j)
            if a.word is not None and a.word == b.word:
                same_word.add(i, j)
    for _, writes in graph.modifications:
        for at, earlier in enumerate(writes):
            for later in writes[at + 1 :]:
                mo.add(number[earlier], number[later])
    for i, event in enumerate(events):
        if event.reads is not None:
            source = number[event.reads]
            rf.add(source, i)
            fr.rows[i] = mo.rows[source] & ~(1 << i)
            if event.writes:
                rmw_rf.add(source, i)
                # Nothing comes between what it reads and what it writes.
                if any(mo.rows[source] >> k & 1 and mo.rows[k] >> i & 1 for k in range(size)):
                    return False

    def having(what: Callable[[Event], bool]) -> int:
        return sum(1 << i for i, event in enumerate(events) if what(event))

    everything = (1 << size) - 1
    fences, sc = having(lambda e: e.is_fence), having(lambda e: e.order is SEQ_CST)
    releasing, acquiring = having(lambda e: e.order.releases), having(lambda e: e.order.acquires)
    carried = rmw_rf.closed().maybe().then(rf)  # a release sequence, and who reads from it
    before = sb.between(fences & releasing, everything) | Relation(0, [1 << i for i in range(size)])
    after = sb.between(everything, fences & acquiring) | Relation(0, [1 << i for i in range(size)])
    synchronizes = before.then(carried).then(after).between(releasing, acquiring)
    hb = (sb | synchronizes).closed()
    eco = (rf | mo | fr).closed()
    if not hb.then(eco.maybe()).is_irreflexive:
        return False
    other = Relation(0, [row & ~same for row, same in zip(sb.rows, same_word.rows, strict=True)])
    same = Relation(0, [row & same for row, same in zip(hb.rows, same_word.rows, strict=True)])
    scb = sb | other.then(hb).then(other) | same | mo | fr
    sc_ops, sc_fences = sc & ~fences, sc & fences
    one = Relation(0, [1 << i for i in range(size)])
    entering = one.between(sc_ops, sc_ops) | hb.maybe().between(sc_fences, everything)
    leaving = one.between(sc_ops, sc_ops) | hb.maybe().between(everything, sc_fences)
    psc = entering.then(scb).then(leaving) | (hb | hb.then(eco).then(hb)).between(sc_fences, sc_fences)
    return psc.closed().is_irreflexive


def replay(thread: Thread, values: list[Any]) -> tuple[Action | None, Any]:
    """What the thread does next after these results; or None and what it returns."""
    running = thread()
    try:
        action = next(running)
        for value in values:
            action = running.send(value)
    except StopIteration as end:
        return None, end.value
    return action, None


def extended(graph: Graph, threads: list[Thread], at: int, found: dict[Id, Any]) -> Iterator[Graph]:
    """The graph with the next event of this thread, in each way."""
    past = graph.events[at + 1]
    values = [found[event.reads] if event.reads is not None else None for event in past]
    action, _ = replay(threads[at], values)
    if action is None:
        return
    place = (at, len(past))
    words = dict(graph.modifications)

    def with_event(event: Event, modified: dict[str, tuple[Id, ...]]) -> Graph:
        events = (*graph.events[: at + 1], (*past, event), *graph.events[at + 2 :])
        return Graph(events, tuple(sorted(modified.items())))

    if isinstance(action, Fence):
        yield with_event(Event(place, None, action.order), words)
        return
    writes = words[action.word]
    if isinstance(action, Write):
        for i in range(1, len(writes) + 1):
            event = Event(place, action.word, action.order, None, action.value, True)
            yield with_event(event, words | {action.word: (*writes[:i], place, *writes[i:])})
        return
    for i, source in enumerate(writes):
        value = found[source]
        if isinstance(action, Read):
            if action.until is None or action.until(value):
                yield with_event(Event(place, action.word, action.order, source), words)
        elif (changed := action.change(value)) is None:
            yield with_event(Event(place, action.word, action.order, source), words)
        else:
            event = Event(place, action.word, action.order, source, changed, True)
            yield with_event(event, words | {action.word: (*writes[: i + 1], place, *writes[i + 1 :])})


def run(first: dict[str, Any], threads: list[Thread]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the threads return, and the words' last values, of each execution in which all threads come to their end."""
    start = tuple(
        Event((-1, i), word, RELAXED, None, value, True) for i, (word, value) in enumerate(first.items())
    )
    begin = Graph(
        (start, *((),) * len(threads)), tuple(sorted((event.word or "", (event.id,)) for event in start))
    )
    waiting, seen, ends = [begin], {begin}, []
    while waiting:
        graph = waiting.pop()
        found = {event.id: event.value for thread in graph.events for event in thread if event.writes}
        pasts = [[found[e.reads] if e.reads is not None else None for e in past] for past in graph.events[1:]]
        states = [replay(thread, past) for thread, past in zip(threads, pasts, strict=True)]
        if all(action is None for action, _ in states):
            last = {word: found[writes[-1]] for word, writes in graph.modifications}
            ends.append((tuple(result for _, result in states), last))
        for at in range(len(threads)):
            for longer in extended(graph, threads, at, found):
                if longer not in seen:
                    seen.add(longer)
                    if consistent(longer):
                        waiting.append(longer)
    return ends
