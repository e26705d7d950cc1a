"""What is known of one connection or server at one moment, and who waits for whom there, in words. No I/O.

Theory
------
A connection that is slow waits for somebody: for its peer's program, which does not read; for its peer's device, or the
network; or for its own program. Which of these it is follows from a few numbers that a connection has anyway:

* bytes that were written and are not sent, and no credit: the peer's program does not read (docs/credits.md);
* the same, and all send slots in flight: the peer's device has not taken them;
* bytes that have come and were not read: this program.

`ConnectionInfo` has these numbers, and `waits` says in words what follows. It takes nothing but the numbers, so
`rdmanet ss` says the same of another process's connection: there the numbers come from that process, and the words are
its own.

Nothing is computed before somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar

_SMALL_FRAME_BYTES = 8192
_MANY_BYTES = 1 << 20
"""So much in small frames is worth a note."""
_WAITING = ("bytes_unsent", "sends_in_flight", "bytes_unread", "slots_leased")
"""Where these are 0, nobody waits: so it is with nearly all of thousands."""
_FEW_TIMES = 3
"""So many long stretches of a loop's work are worth one, the first of which may be imports,"""
_PART_HELD = 10
"""if they are at least this part of its time."""
_MANY_TIMES = 100
"""So many wake-ups or registrations are worth one."""
MOMENT_US = 1_000_000
"""Who has said or heard something within this time is not idle."""

Place = tuple[str, int]
"""An address and a port."""
_ANYWHERE = ("0.0.0.0", "::")


@dataclass
class ConnectionInfo:
    """A connection as it was when it was asked for.

    :ivar fabric: "rdma" or "tcp"
    :ivar reason: why
    :ivar role: "client" or "server"; "" if that is not known
    :ivar local: address and port of this side; None if they are not known
    :ivar peer: the same of the peer; the port of a client that found its server by name is 0 until the server's program
        has asked for it
    :ivar state: "opening", "unheard", "open", "eof_pending", "eof_received", "closing", "draining", "draining_to_eof"
        or "closed"; of TCP's "open" and "closing"
    :ivar reading: whether the program takes what comes
    :ivar paused: whether pause_writing() was called, so that drain() waits
    :ivar device: the name of the device; "" by TCP
    :ivar path: how the device reaches the peer: "memory", "tcp", or "adapter"; "" by TCP, and when it is over
    :ivar qp: the number of the queue pair; 0 by TCP
    :ivar error: why the connection is over; "" if it is not, or has ended in good order
    :ivar way: while a peer does not answer, by RDMA: from which GID it is to be reached, and which would be better
    :ivar far: why this process is far from its adapter, by the CPUs on which it may run
    :ivar stats: the counters of ``get_extra_info("rdma_stats")``, by TCP what the kernel tells; and ``bytes_unsent``,
        which were written and wait, ``bytes_unread``, which have come (by RDMA only whether there are any), and by RDMA
        ``send_slots``, how many frames may be in flight, and ``peer_qp``, the number of a client's queue pair; and
        while the peer has memory of ours by ``offer()``, ``offers``, how many, and ``bytes_offered``
    :ivar transport: the transport; None if the connection is over, or another process's
    """

    fabric: str
    reason: str
    role: str
    local: Place | None
    peer: Place | None
    state: str
    reading: bool = True
    paused: bool = False
    device: str = ""
    path: str = ""
    qp: int = 0
    error: str = ""
    way: str = ""
    far: str = ""
    stats: dict[str, int] = field(default_factory=dict)

    transport: ClassVar[Any] = None

    def facts(self) -> dict[str, Any]:
        """All that can be said in JSON: the attributes, without the transport."""
        facts = vars(self) | {"stats": dict(self.stats)}
        facts.pop("transport", None)
        return facts

    def waits(self) -> list[str]:
        """Who waits for whom, each in words with numbers; nothing if nobody waits."""
        stats = self.stats
        if self.state == "open" and self.reading and not self.paused and not any(map(stats.get, _WAITING)):
            return []
        if self.state == "opening":
            way = f" {self.way}: the peer has not answered, or is not reached from there" if self.way else ""
            return [f"the connection is being made{way}"]
        if self.state == "unheard":
            return ["the client has not begun to speak: connection_made() waits for that a moment"]
        if self.state == "closed":
            return [f"the connection is over: {self.error or 'it has ended in good order'}"]
        words = []
        if self.state.startswith("draining"):
            words.append(f"the connection is over: {self.error or 'the peer has ended it'}")
        sending = self._sending() if self.fabric == "rdma" else self._sending_by_tcp()
        if self.state == "closing" and sending:
            words.append("close() waits until what was written is sent")
        words += sending
        words += self._reading()
        return words

    def explain(self) -> str:
        """What the connection is, who waits for whom, and what has slowed it: a few lines of text."""
        lines = [self._line(), f"fabric: {self._fabric()}"]
        lines += [f"waits: {words}" for words in self.waits()] or [f"waits: nobody; {self._activity()}"]
        if offers := self.stats.get("offers"):
            has = f"{offers} of our regions, {size_text(self.stats['bytes_offered'])} in all"
            lines.append(f"offers: the peer has {has}: see get_extra_info('rdma_offers')")
        lines += [f"note: {words}" for words in self.notes()]
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """What has slowed the connection until now, though nobody may wait at this moment."""
        stats, notes = self.stats, [self.far] if self.far else []
        if not stats.get("us_without_credits") and stats.get("bytes_sent", 0) < _MANY_BYTES:
            return notes
        waited_us, open_us = stats.get("us_without_credits", 0), stats.get("us_open", 0)
        if waited_us > open_us // 100:
            often = "once" if stats["waits_for_credits"] == 1 else f"{stats['waits_for_credits']} times"
            notes.append(
                f"bytes have waited for credits {often}, {time_text(waited_us)} in all of"
                f" {time_text(open_us)}: the peer reads more slowly than this program writes"
            )
        frames, frame_bytes = stats.get("frames_sent", 0), stats.get("frame_bytes", 0)
        sent = stats.get("bytes_sent", 0) - stats.get("bytes_placed", 0)
        is_small = sent >= _MANY_BYTES and 0 < frame_bytes <= _SMALL_FRAME_BYTES
        if is_small and sent > frames * frame_bytes * 3 // 4:
            notes.append(
                f"the peer's receive slots hold {frame_bytes} bytes, so {size_text(sent)} took {frames} frames:"
                " small slots: give the peer a larger slot_bytes="
            )
        return notes

    def _line(self) -> str:
        role = f" ({self.role})" if self.role else ""
        return f"{place_text(self.local)} to {place_text(self.peer)}{role}: {self.state}"

    def _fabric(self) -> str:
        way = {"memory": "through memory", "tcp": "by TCP, which it uses itself", "adapter": "an adapter"}
        path = f", {way.get(self.path, self.path)}" if self.path else ""
        device = f", device {self.device}{path}" if self.device else ""
        return f"{self.fabric.upper()}{device}: {self.reason or 'no reason is known'}"

    def _activity(self) -> str:
        words = []
        for how in ("sent", "received"):
            moved, since = self.stats.get(f"bytes_{how}", 0), self.stats.get(f"us_since_{how}")
            last = f" ({time_text(since)} ago)" if moved and since is not None else ""
            words.append(f"{size_text(moved)} {how}{last}")
        return ", ".join(words)

    def _sending(self) -> list[str]:
        """For whom bytes wait that were written."""
        stats, words = self.stats, list[str]()
        unsent, in_flight = stats["bytes_unsent"], stats["sends_in_flight"]
        if not (unsent or in_flight or self.paused):
            return words
        credits, slots, ours = stats["credits"], stats["peer_slots"], stats["send_slots"]
        what = f"{size_text(unsent)} that were written wait"
        if unsent and not credits:
            words.append(f"{what} for the peer: credits 0 of {slots}: the peer does not read")
        elif unsent and in_flight >= ours:
            words.append(
                f"{what} for the device: {in_flight} of {ours} send slots are in flight: the send queue is full, and"
                " the peer's device has not acknowledged them"
            )
        elif unsent:
            words.append(
                f"{what} for the device to read them, or for the next pass of this loop: credits {credits}"
            )
        elif in_flight and stats.get("us_since_sent", 0) > MOMENT_US:
            words.append(
                f"{in_flight} frames are in flight for {time_text(stats['us_since_sent'])}: the peer's device does not"
                " acknowledge them: it may be stopped, or the network loses packets"
                + (f", or it is not reached {self.way}" if self.way else "")
            )
        if self.paused:
            words.append("this program's writers are paused (pause_writing), and drain() waits")
        return words

    def _sending_by_tcp(self) -> list[str]:
        words, unsent = [], self.stats.get("bytes_unsent", 0)
        if unsent:
            kernels = self.stats.get("bytes_in_kernel", 0)
            words.append(
                f"{size_text(unsent)} that were written wait for the peer: the kernel has {size_text(kernels)} more"
                " that the peer has not acknowledged, and takes nothing: the peer does not read"
            )
        return words

    def _reading(self) -> list[str]:
        """For whom bytes wait that have come."""
        stats = self.stats
        unread, held = stats.get("bytes_unread", 0), stats.get("slots_held", 0)
        if not unread:
            if stats.get("slots_leased"):
                return [f"{stats['slots_leased']} receive slots are leased by this program"]
            return [] if self.reading else ["reading is paused by this program (pause_reading)"]
        what = (
            f"bytes have come, in {held} receive slots,"
            if self.fabric == "rdma"
            else f"{size_text(unread)} have come,"
        )
        if not self.reading:
            return [f"{what} and reading is paused: they wait for resume_reading()"]
        return [f"{what} and this program has not read them: its task is busy, or does not call read()"]


def row_of(info: ConnectionInfo) -> tuple[Any, ...]:
    """What ``facts()`` says without names: the attributes in their order, and the numbers of the counters."""
    return (
        info.fabric,
        info.reason,
        info.role,
        info.local,
        info.peer,
        info.state,
        info.reading,
        info.paused,
        info.device,
        info.path,
        info.qp,
        info.error,
        info.way,
        info.far,
        list(info.stats.values()),
    )


def quiet_rows(names: Sequence[str]) -> Callable[[Sequence[Any]], bool]:
    """What tells whether a row is of a connection that has neither `waits()` nor `notes()`, as nearly all have.

    No number is too small for that: a row with the greatest of several rows speaks for all of them.

    :param names: of the row's counters
    """
    zeros = itemgetter(
        *(names.index(name) for name in (*_WAITING, "us_without_credits") if name in names),
        slice(0, 0),  # nothing: so it makes a tuple, also of one name or none
    )
    few = names.index("bytes_sent") if "bytes_sent" in names else None

    def is_quiet(row: Sequence[Any]) -> bool:
        numbers = row[-1]
        if row[5] != "open" or not row[6] or row[7] or row[13] or not numbers:
            return False
        return not any(zeros(numbers)) and (few is None or numbers[few] < _MANY_BYTES)

    return is_quiet


def rows_of(infos: Iterable[ConnectionInfo]) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
    """For each the names of its counters, and what `row_of` says."""
    return ((list(info.stats), row_of(info)) for info in infos)


def columns_of(rows: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """The columns of rows whose counters have the same names; and behind them those of the counters.

    A column is a list with one value of each row; or that value, if all have the same, as in most columns of thousands
    of connections. An address has two: its host, which may be None, and its port.
    """
    *columns, numbers = _transposed(rows)
    for at in (4, 3):
        columns[at : at + 1] = _transposed([place or (None, 0) for place in columns[at]])
    return [*map(_column, columns)], [*map(_column, _transposed(numbers))]


def _transposed(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """zip(*rows), in a third of the time."""
    flat, width = [*chain.from_iterable(rows)], len(rows[0])
    return [flat[at::width] for at in range(width)]


def _column(values: list[Any]) -> Any:
    is_same = values[0] == values[-1] and values.count(values[0]) == len(values)
    return values[0] if is_same else values


@dataclass
class WorkerInfo:
    """A process that gets connections of a server's from the worker that has the door (loop/workers.py).

    :ivar pid: the process; 0 if it is in another pid namespace
    :ivar port: where it listens for them
    :ivar busy: whether it gets none, since its loop has not turned after it was told of one
    """

    pid: int
    port: int
    busy: bool = False

    def explain(self) -> str:
        """The same in words."""
        who = f"process {self.pid}" if self.pid else "a process of another pid namespace"
        return f"{who} (port {self.port}{', which is busy' if self.busy else ''})"


@dataclass
class DoorInfo:
    """How clients on this host find RDMA at an address of a server's: its door (loop/doors.py).

    :ivar place: where the server listens
    :ivar missing: why there is no RDMA; "" if there is
    :ivar front: the process that has the door; 0 if it is this one
    :ivar port: where this process listens for the connections that the front sends; 0 if it sends none
    :ivar workers: to whom this process sends connections, in turn with itself
    """

    place: Place
    missing: str = ""
    front: int = 0
    port: int = 0
    workers: list[WorkerInfo] = field(default_factory=list)

    def explain(self) -> str:
        """The same in words."""
        at = place_text(self.place)
        if self.missing:
            return f"no door at {at}: {self.missing}"
        if self.front:
            sends = (
                f"sends connections to port {self.port} of this one"
                if self.port
                else "sends none to this one"
            )
            return f"door at {at}: process {self.front} has it, and {sends}"
        if not self.workers:
            return f"door at {at}: this process has it"
        others = ", ".join(worker.explain() for worker in self.workers)
        return f"door at {at}: this process has it, and deals connections out to itself, {others}"


@dataclass
class ServerInfo:
    """A server as it was when it was asked for.

    :ivar places: where it listens
    :ivar fabric: "rdma", or "rdma and tcp"
    :ivar serving: whether it accepts connections
    :ivar connections: how many it has accepted that live
    :ivar half_open: how many of them are not established yet
    :ivar waiting: how many requests wait until fewer are
    :ivar backlog: how many may wait
    :ivar doors: of a server of the event loop: how clients on this host find RDMA at each address
    """

    places: list[Place]
    fabric: str
    serving: bool
    connections: int
    half_open: int = 0
    waiting: int = 0
    backlog: int = 0
    doors: list[DoorInfo] = field(default_factory=list)

    def has(self, info: ConnectionInfo) -> bool:
        """Whether it has accepted this connection: the kernel gives one to who listens at its address."""
        if info.role != "server" or info.local is None:
            return False
        host, port = info.local
        return any((each, port) in self.places for each in (host, *_ANYWHERE))

    def accepted(self, at: Mapping[Place, int]) -> int:
        """How many of these it `has`: of many connections, as `accepted_at` counts them, without a look at each."""
        anywhere = {port for host, port in self.places if host in _ANYWHERE}
        there = {place for place in self.places if place[1] not in anywhere}
        return sum(at.get(place, 0) for place in there | {("", port) for port in anywhere})

    def explain(self) -> str:
        """What the server does, and what it waits for: a few lines of text."""
        if not self.places:
            return f"closed: connections that live on: {self.connections}"
        state = "serving" if self.serving else "idle: start_serving() was not called"
        fabric = self.fabric.upper().replace(" AND ", " and ")
        lines = [f"{state}: {', '.join(map(place_text, self.places))} by {fabric}"]
        lines += [door.explain() for door in self.doors]
        lines.append(f"connections: {self.connections}, of which {self.half_open} are not established yet")
        if self.waiting:
            lines.append(
                f"waits: {self.waiting} requests (at most {self.backlog}) for {self.half_open} that are being made:"
                " clients do not go on, or this loop is too busy to answer them"
            )
        return "\n".join(lines)


def accepted_at(infos: Iterable[ConnectionInfo]) -> Mapping[Place, int]:
    """How many connections were accepted at each address, and at each port of any address: ("", port)."""
    at: Counter[Place] = Counter()
    for info in infos:
        if info.role == "server" and info.local is not None:
            at[info.local] += 1
            at["", info.local[1]] += 1
    return at


def loop_notes(engine: Mapping[str, int]) -> list[str]:
    """What slows all connections of a loop, by the counters of its data engine."""
    notes = [held] if (held := why_held(engine)) else []
    messages, wakeups = engine.get("messages", 0), engine.get("wakeups", 0)
    if messages >= _MANY_TIMES and wakeups * 2 > messages:
        notes.append(
            f"{wakeups} wake-ups for {messages} messages: it sleeps before nearly each, since they come less often than"
            " it polls for (busy_poll=), and to be woken takes some 20 µs"
        )
    made, reused = engine.get("registrations", 0), engine.get("registrations_reused", 0)
    if made >= _MANY_TIMES and made > reused:
        notes.append(
            f"memory was registered {made} times to read or write a peer's, and found registered {reused} times: pass"
            " the same memoryview each time"
        )
    return notes


def why_held(engine: Mapping[str, int]) -> str:
    """That a loop works for so long at a stretch that its connections wait; "" if it does not."""
    stretches, held_us = engine.get("long_stretches", 0), engine.get("us_in_long_stretches", 0)
    all_us = held_us + engine.get("us_asleep", 0) + engine.get("us_polling", 0)
    if stretches < _FEW_TIMES or held_us < all_us // _PART_HELD:
        return ""
    return (
        f"the loop did not look at its connections for 10 ms or more {stretches} times, {time_text(held_us)} in all,"
        f" {time_text(engine.get('us_longest_stretch', 0))} at most: a callback computes, or calls what blocks, or the"
        " process got no CPU"
    )


def place_text(place: Place | None) -> str:
    """An address and a port as people write them."""
    if place is None:
        return "?"
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def size_text(nbytes: int) -> str:
    """A number of bytes: 12 bytes, 3.4 KiB, 64.0 MiB, 2.0 GiB."""
    if nbytes < 1 << 10:
        return f"{nbytes} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if nbytes < 1 << (shift + 10):
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes / (1 << 30):.1f} GiB"


def time_text(microseconds: int) -> str:
    """A time as people read it: 12 µs, 3.4 ms, 5.6 s, 7 min, 8 h."""
    if microseconds < 1000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1e3:.1f} ms"
    if microseconds < 120_000_000:
        return f"{microseconds / 1e6:.1f} s"
    minutes = microseconds // 60_000_000
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
