"""list the connections and servers of all processes that use rdmanet, and who waits for whom

Processes are found by the names of their sockets (base/onlookers.py), and asked there. Nobody is believed more than the
kernel says: the process and its user are those that SO_PEERCRED names, another user's sockets are passed over (root
sees all), and what a process says of itself is checked as anything from a stranger: sizes, types and ranges, and no
character is printed that is not printable. Who waits for whom is computed here, from the numbers.

A process that does not answer in time is listed with what the kernel says of it: stopped, busy, or asleep in a call
that blocks. With --watch its last answer is shown, too, and how old that is.
"""

import argparse
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from msgspec import UNSET, Struct, UnsetType, defstruct, json

from rdmanet.base.accounts import (
    ConnectionInfo,
    ServerInfo,
    accepted_at,
    columns_of,
    loop_notes,
    place_text,
    quiet_rows,
    size_text,
    time_text,
    why_held,
)
from rdmanet.base.cpus import is_any_far, why_far
from rdmanet.cli.asking import ANSWER_S, REFUSED, Answer, ask_all
from rdmanet.cli.columns import Block, Connections, as_json, info_of, possible_peers, printable
from rdmanet.cli.text import seconds, table

_TITLES = ["fabric", "state", "local", "peer", "sent", "received", "credits", "device", "qp"]
_STATES = {
    "T": "stopped: it was sent SIGSTOP",
    "t": "stopped by a debugger",
    "R": "busy: its loop has not turned in time",
    "D": "waiting for a disk, or the like",
    "S": "asleep, but its loop does not turn: it waits in a call that blocks, or is a blocking client that is not used",
}
_ENDED = ("", "X", "Z")
_FIELDS_MOST = 256
_OBJECTS = (
    1_000_000  # are made before the collector looks for cycles: a picture of 10,000 connections has none
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with all counters; a line for each picture"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds("not between 0.05 and 86400 seconds", 0.05, 86400),
        const=1.0,
        metavar="SECONDS",
        help="again every second, or every so many, with rates",
    )
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="only processes that do not answer, or where somebody waits, and only the connections on which",
    )
    parser.add_argument("--count", type=int, metavar="N", help="end after so many pictures")
    parser.add_argument("--pid", type=int, help="this process only")


@dataclass
class Process:
    """A process that uses rdmanet.

    :ivar user: the number of its user
    :ivar program: its command, as /proc shows it, but paths without their directories
    :ivar silent: why it does not answer; "" if it does
    :ivar answers: of its loops: the last ones, if it is silent
    :ivar age_s: how old these are
    """

    pid: int
    user: int
    program: str
    silent: str = ""
    answers: list[Answer] = field(default_factory=list)
    age_s: float = 0.0


class Picture:
    """What was seen the last time: for rates, and of processes that fall silent.

    :param is_last: there will be no other one
    """

    def __init__(self, is_last: bool = False) -> None:
        self._is_last = is_last
        self.taken_at = 0.0
        self.seconds = 0.0
        """Between the last two."""
        self._bytes: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._before: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._said: dict[int, tuple[float, list[Answer]]] = {}
        self._seen: dict[int, Process] = {}
        self._owners: dict[tuple[Any, ...], Process] = {}
        """The processes of connections, by their users and these, once somebody has asked for a peer."""
        self._is_any_far = False
        self._far: dict[tuple[int, int], str] = {}

    def take(self, pid: int | None) -> list[Process]:
        """Ask all processes."""
        now = time.monotonic()
        self.seconds, self.taken_at = now - self.taken_at, now
        processes: dict[int, Process] = {}
        for answer in ask_all(pid):
            process = processes.setdefault(answer.pid, Process(answer.pid, answer.user, _program(answer.pid)))
            if answer.failed:
                process.silent = process.silent or _why_silent(answer)
            else:
                process.answers.append(answer)
        for process in processes.values():
            if process.answers:
                self._said[process.pid] = now, process.answers
            elif process.pid in self._said:
                since, process.answers = self._said[process.pid]
                process.age_s = now - since
        self._said = {pid: said for pid, said in self._said.items() if pid in processes}
        self._before, self._bytes = self._bytes, {}
        self._seen = processes
        self._owners.clear()
        self._far.clear()
        said = {pid: [answer.connections for answer in each.answers] for pid, each in processes.items()}
        self._is_any_far = is_any_far(possible_peers(said))
        for process in processes.values() if not self._is_last else ():
            for answer in process.answers:
                for info in answer.connections:
                    self._bytes[_key(process, answer, info)] = _moved(info)
        return sorted(processes.values(), key=lambda process: process.pid)

    def notes(self, process: Process, info: ConnectionInfo) -> list[str]:
        """What has slowed a connection, also by where it and its peer may run, if that was seen, too."""
        if not self._is_any_far or info.fabric != "rdma" or (peer := self.peer(process, info)) is None:
            return info.notes()
        pids = process.pid, peer.pid
        if pids not in self._far:
            self._far[pids] = why_far(*pids)
        return info.notes() + ([self._far[pids]] if self._far[pids] else [])

    def peer(self, process: Process, info: ConnectionInfo) -> Process | None:
        """The other process at a connection, if it was seen. Of another user's no other is believed to be it."""
        if not self._owners:
            for each in self._seen.values():
                for answer in each.answers:
                    for one in answer.connections:
                        for ends in ((one.local, one.peer), (one.role, _call(one))):
                            self._owners[each.user, ends] = each
        far_role = "server" if info.role == "client" else "client"
        for ends in ((info.peer, info.local), (far_role, _call(info))):
            if (peer := self._owners.get((process.user, ends))) is not None:
                return None if peer is process else peer
        return None

    @property
    def says_no_more(self) -> bool:
        """Whether neither notes() nor rates() has something to say that a connection's numbers have not."""
        return not self._is_any_far and not self._before

    def rates(self, process: Process, answer: Answer, info: ConnectionInfo) -> tuple[float, float] | None:
        """Bytes a second, sent and received; None the first time."""
        if not self._before or not self.seconds or process.age_s:
            return None
        key = _key(process, answer, info)
        if key not in self._before:
            return None
        before, now = self._before[key], self._bytes[key]
        return max(0, now[0] - before[0]) / self.seconds, max(0, now[1] - before[1]) / self.seconds


def run(args: argparse.Namespace) -> int:
    gc.set_threshold(_OBJECTS)
    left = args.count if args.count is not None else (None if args.watch else 1)
    picture = Picture(is_last=left == 1)
    while left is None or left > 0:
        processes = picture.take(args.pid)
        if args.waiting:
            processes = [*filter(None, map(_waiting, processes))]
        if args.json:
            # In UTF-8 as all JSON, though the locale may not have the name of some process.
            for piece in _as_json(picture, processes):
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.write(b"\n")
        else:
            if args.watch and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            if processes or not args.waiting:
                print(_as_text(picture, processes) if processes else _nobody(args.pid))
            else:
                print("nobody waits")
        sys.stdout.flush()
        left = None if left is None else left - 1
        if left is None or left > 0:
            time.sleep(max(0.0, picture.taken_at + (args.watch or 1.0) - time.monotonic()))
    gc.freeze()  # the interpreter's end looks for cycles, too
    return 0


def _waiting(process: Process) -> Process | None:
    """A process with nothing but those who wait there; None if nobody does."""
    answers = []
    for answer in process.answers:
        found = replace(
            answer,
            engines=[engine for engine in answer.engines if why_held(engine)],
            servers=[server for server in answer.servers if server.waiting],
            connections=Connections(),
            calls=[calls for calls in answer.calls if calls.under_way],
        )
        for block in answer.connections.blocks:
            is_quiet = quiet_rows(block.counters)
            rows = [row for row in block.rows() if not is_quiet(row) and info_of(row, block.counters).waits()]
            if rows:
                found.connections.blocks.append(Block(block.counters, len(rows), *columns_of(rows)))
        if found.engines or found.servers or found.calls or len(found.connections):
            answers.append(found)
    return replace(process, answers=answers) if answers or process.silent else None


# -- what is printed ---------------------------------------------------------------------------------------


def _nobody(pid: int | None) -> str:
    """That there is nothing to see, of one process or of all."""
    if pid is not None and not os.path.exists(f"/proc/{pid}"):
        return f"there is no process {pid}"
    if pid is None:
        who = "no process" if os.geteuid() == 0 else "no process of this user"
        return f"{who} in this network namespace uses rdmanet"
    whose = "" if os.geteuid() == 0 else ", or is another user's"
    return (
        f"process {pid} ({_program(pid)}) does not use rdmanet: its loop is not switched, or has had no connection and"
        f" no server yet; or it is in another network namespace{whose}"
    )


def _as_text(picture: Picture, processes: list[Process]) -> str:
    return "\n\n".join("\n".join(_lines_of(picture, process)) for process in processes)


def _lines_of(picture: Picture, process: Process) -> Iterator[str]:
    yield f"process {process.pid}, user {process.user}: {process.program}"
    if process.silent:
        old = f"; what follows is {process.age_s:.0f} s old" if process.answers else ""
        yield f"  does not answer: {process.silent}{old}"
    for answer in _merged(process.answers):
        for server in answer.servers:
            yield "  " + server.explain().replace("\n", "\n    ")
        for engine in answer.engines:
            polls = "polling" if engine.get("polling") else "sleeping"
            asleep, polled = (time_text(engine.get(f"us_{what}", 0)) for what in ("asleep", "polling"))
            yield (
                f"  loop on {engine['device']}: {polls}; asleep for {asleep} in all, polling for {polled};"
                f" {engine.get('wakeups', 0)} wake-ups"
            )
            yield from (f"    note: {words}" for words in loop_notes(engine))
        for calls in answer.calls:
            yield "  " + calls.explain().replace("\n", "\n  ")
        yield from _connection_lines(picture, process, answer)


def _connection_lines(picture: Picture, process: Process, answer: Answer) -> Iterator[str]:
    if not len(answer.connections):
        return
    rows, below = [_TITLES], []
    for info in answer.connections:
        rates = picture.rates(process, answer, info)
        rows.append(_row(info, rates))
        texts = [f"waits: {words}" for words in info.waits()] + [
            f"note: {words}" for words in picture.notes(process, info)
        ]
        if info.fabric == "tcp":
            texts.insert(0, f"why TCP: {info.reason or 'no reason is known'}")
        if texts and (peer := picture.peer(process, info)) is not None:
            texts.append(f"peer: process {peer.pid}: {peer.program}")
        below.append(texts)
    lines = table(rows).split("\n")
    yield from lines[:2]
    for line, texts in zip(lines[2:], below, strict=True):
        yield line
        for text in texts:
            yield f"      {text}"


def _row(info: ConnectionInfo, rates: tuple[float, float] | None) -> list[str]:
    stats = info.stats
    moved = [size_text(count) for count in _moved(info)]
    if rates is not None:
        moved = [f"{size_text(int(rate))}/s, {total}" for rate, total in zip(rates, moved, strict=True)]
    credits = f"{stats.get('credits', 0)}/{stats.get('peer_slots', 0)}" if info.fabric == "rdma" else ""
    device = f"{info.device} ({info.path})" if info.path else info.device
    qp = f"{info.qp:#x}" if info.qp else ""
    places = [place_text(info.local), place_text(info.peer)]
    return [info.fabric, info.state, *places, *moved, credits, device, qp]


class _Shown(Struct):
    """A connection in JSON: what ConnectionInfo has, in its order, and what follows from it.

    :ivar stats: a struct of `_stats_class`
    """

    fabric: str
    reason: str
    role: str
    local: Any
    peer: Any
    state: str
    reading: bool
    paused: bool
    device: str
    path: str
    qp: int
    error: str
    way: str
    far: str
    stats: Any
    waits: Sequence[str] = ()
    notes: Sequence[str] = ()
    peer_pid: int | UnsetType = UNSET
    sent_per_s: float | UnsetType = UNSET
    received_per_s: float | UnsetType = UNSET


@lru_cache(maxsize=256)
def _stats_class(names: tuple[str, ...]) -> Callable[..., Any]:
    """What makes an object in JSON of numbers that have these names. To make a dict of each takes twice as long.

    That has those names that cannot be fields of a class, such as __slots__, or are more than a class is fast with.
    """
    are_fields = len(set(names)) == len(names) <= _FIELDS_MOST and all(
        name.isidentifier() and not name.startswith("_") and not iskeyword(name) for name in names
    )
    if not are_fields:
        return lambda *numbers: dict(zip(names, numbers, strict=False))
    return defstruct("Stats", [(name, int, UNSET) for name in names])


def _as_json(picture: Picture, processes: list[Process]) -> Iterator[bytes]:
    """In pieces: all of it at once would be as much memory again."""
    yield b'{"processes":['
    for number, process in enumerate(processes):
        said: dict[str, Any] = {"pid": process.pid, "user": process.user, "program": process.program}
        said |= {"silent": process.silent, "age_s": round(process.age_s, 3)}
        yield (b"," if number else b"") + json.encode(said)[:-1] + b',"loops":['
        for number, answer in enumerate(_merged(process.answers)):
            loop = {
                "loop": answer.loop,
                "engines": [engine | {"notes": loop_notes(engine)} for engine in answer.engines],
                "servers": answer.servers,
                "calls": answer.calls,
            }
            yield (b"," if number else b"") + json.encode(loop)[:-1] + b',"connections":['
            yield from _connections_as_json(picture, process, answer)
            yield b"]}"
        yield b"]}"
    yield b"]}"


def _connections_as_json(picture: Picture, process: Process, answer: Answer) -> Iterator[bytes]:
    comma = b""
    for block in answer.connections.blocks:
        is_quiet = quiet_rows(block.counters) if picture.says_no_more else _never
        row = block.greatest() if len(set(block.counters)) == len(block.numbers) else None
        if row is not None and is_quiet(row):
            yield comma + as_json(block, _Shown.__struct_fields__)
        else:
            rows: list[Any] = [*block.rows()]
            stats_of = _stats_class(block.counters)
            shown = [_Shown(*(*row[:-1], stats_of(*row[-1]))) for row in rows]
            for row, one in zip(rows, shown, strict=True):
                if not is_quiet(row):
                    info = info_of(row, block.counters)
                    one.waits, one.notes = info.waits(), picture.notes(process, info)
                    if (one.waits or one.notes) and (peer := picture.peer(process, info)) is not None:
                        one.peer_pid = peer.pid
                    if (rates := picture.rates(process, answer, info)) is not None:
                        one.sent_per_s, one.received_per_s = rates
            yield comma + json.encode(shown)[1:-1]
        comma = b","


def _never(row: Any) -> bool:
    """That something may be said of each row."""
    return False


def _merged(answers: list[Answer]) -> list[Answer]:
    """One for each loop: what its loop contexts say, and its switch. Servers do not count what they have by TCP."""
    loops: dict[int, Answer] = {}
    for answer in answers:
        one = loops.setdefault(answer.loop, Answer(answer.pid, answer.user, loop=answer.loop))
        one.engines += answer.engines
        one.servers += answer.servers
        one.connections.blocks += answer.connections.blocks
        # Each of a loop's sources has said them.
        one.calls = [*{info.key: info for info in one.calls + answer.calls}.values()]
    for one in loops.values():
        both = {place for server in one.servers for place in _halves(server)}
        accepted = accepted_at(one.connections.by_tcp())
        one.servers = [
            replace(server, connections=server.connections + server.accepted(accepted))
            for server in one.servers
            if not _is_part(server, both)
        ]
    return list(loops.values())


def _halves(server: ServerInfo) -> Iterator[tuple[str, int]]:
    """Where a server that is listed as a whole listens for RDMA; nowhere if it is none."""
    if server.fabric == "rdma":
        return
    yield from server.places
    for door in server.doors:
        if door.port:  # of a worker; where the TCP listener is on ::, it listens at IPv4's, too
            yield from ((host, door.port) for host in (door.place[0], "0.0.0.0"))


def _is_part(server: ServerInfo, places: set[tuple[str, int]]) -> bool:
    """Whether this is the half by RDMA of a server that is listed as a whole."""
    return server.fabric == "rdma" and bool(server.places) and all(place in places for place in server.places)


# -- what the kernel says --------------------------------------------------------------------------------


def _why_silent(answer: Answer) -> str:
    state = _state(answer.pid)
    if state in _ENDED:
        return "it has ended"
    if answer.failed in ("late", REFUSED) and state not in ("T", "t") and (lacks := _lacks(answer.pid)):
        return lacks
    if answer.failed != "late":
        return answer.failed
    return f"{_STATES.get(state, 'its loop has not turned in time')} (waited {ANSWER_S} s)"


def _state(pid: int) -> str:
    """The state of a process, a letter; "" if it has ended, and nothing is left of it."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read(4096).rpartition(b")")[2].split()[0].decode("ascii", "replace")
    return ""


def _lacks(pid: int) -> str:
    """That a process has too few descriptors left to answer, which takes two; else ""."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/limits", "rb") as file:
        [line] = [line for line in file.read(1 << 14).splitlines() if line.startswith(b"Max open files ")]
        limit, count = int(line.split()[3]), len(os.listdir(f"/proc/{pid}/fd"))
        if count >= limit - 1:
            return (
                f"it has {count} of {limit} descriptors open (ulimit -n), and none to accept connections with"
            )
    return ""


def _program(pid: int) -> str:
    """The command of a process, its paths without their directories, or its name; it can only be printed."""
    for name in ("cmdline", "comm"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            words = file.read(4096).decode(errors="replace").strip("\0\n").split("\0")
            if shown := " ".join(os.path.basename(word) if word.startswith("/") else word for word in words):
                return printable(shown, 80)
    return "?"


def _call(info: ConnectionInfo) -> tuple[Any, ...]:
    """The server's place and the client's queue pair: both ends know them, even if the client has no port."""
    return (info.peer, info.qp) if info.role == "client" else (info.local, info.stats.get("peer_qp") or None)


def _key(process: Process, answer: Answer, info: ConnectionInfo) -> tuple[Any, ...]:
    return process.pid, answer.loop, info.local, info.peer, info.qp


def _moved(info: ConnectionInfo) -> tuple[int, int]:
    return info.stats.get("bytes_sent", 0), info.stats.get("bytes_received", 0)
