"""Measure what it costs to be watched: `rdmanet ss --watch` and RDMANET_TRACE, beside the same programs unwatched.

usage: python -m benchmarks.watching [--quick] [--turns N] [--minutes N] [--before FOLDER] [--crowd N]

Pairs of processes, a server and a client, run the cases of `make bench-quick` in turns: unwatched; with
`rdmanet ss --watch` beside them, which looks at both each second; with a trace. `--before` adds a pair of another
tree, built, with nothing attached. Each ratio is that of a turn to the unwatched run of this turn: of the time, and of
the CPU time, of a message. The table has their medians, and the quartiles of those of the time: they say how far to
trust a median. Who is watched and who is not are the same two processes, since two pairs of processes differ by some
percent as they are; the others differ by that, too, so each turn has new processes. A turn takes a minute and a half.
After `--minutes` no other one begins, and if one fails, the table has those before it.

`--crowd N` measures something else: the longest round trip of one connection of a server that holds N others, while
`rdmanet ss` lists all of them, again and again, and while nothing does; and how long a list takes. A connection of a
server that holds no others runs in the same turns: what that waits for at most is the machine's doing. So the CPU time
is counted, too, which the thread of the server's loop works for a list at a stretch: the longest that a list can hold
up somebody who has a CPU. Beside it stands the longest of those stretches in which nobody else had that CPU: the work
itself, without the caches that others leave cold.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.__main__ import Pair, Process, WorkerError
from benchmarks.cases import CASES, PROTOCOL, STREAMS, Case, Variant
from benchmarks.crowd import SPARE, Place, allow_descriptors, say

PLAIN, WATCHED, TRACED, BEFORE = "unwatched", "ss --watch 1", "traced", "before"
GOALS = {WATCHED: 1.02, TRACED: 1.3}
BEFORE_GOAL = 1.01
"""Of this tree, with nothing attached, to the other one."""
LONGEST_MS, LIST_S = 2.0, 0.5
STRETCH_MS = 2.0
MEASURED = [(CASES[0], STREAMS)]
MEASURED += [(case, api) for case in CASES if case.kind != "idle" for api in case.apis if api == PROTOCOL]
"""What `make bench-quick` measures, but those that say nothing; by Protocol, and the first one by streams, too. That
without polling is the last: a loop's connections share how long it polls."""
SS = [sys.executable, "-m", "rdmanet", "ss"]


class WatchedPair(Pair):
    """A pair whose processes are started with something before them."""

    def __init__(self, cpus: tuple[int, int], prefix: list[str]) -> None:
        super().__init__(Variant("rdmanet", "uvloop"), *cpus)
        self.prefix = prefix

    def __enter__(self) -> "WatchedPair":
        self.server, self.client = (Process(self.variant, cpu, self.prefix) for cpu in self.cpus)
        return self


@contextmanager
def watching(is_on: bool) -> Iterator[None]:
    """With `rdmanet ss --watch`, from its first picture on."""
    if not is_on:
        yield
        return
    with subprocess.Popen([*SS, "--watch", "1", "--json"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        with subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL) as drain:
            try:
                yield
            finally:
                process.kill()
                drain.wait()


def measured(args: argparse.Namespace, cpus: tuple[int, int]) -> dict[Any, list[tuple[float, float]]]:
    """By case, interface and state: time and CPU time of a message, in microseconds, of each turn.

    :raises WorkerError: the first turn has failed
    """
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    ends = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="rdmanet-") as folder:
        for turn in range(args.turns):
            began = time.monotonic()
            try:
                for key, times in measured_once(args, cpus, turn, folder).items():
                    found[key].append(times)
            except WorkerError as exc:
                if not found:
                    raise
                print(f"\nturn {turn + 1}: {exc}: the table has the turns before it", file=sys.stderr)
                break
            if 2 * time.monotonic() - began > ends and turn + 1 < args.turns:
                print(f"\n{turn + 1} turns in {args.minutes:g} minutes", file=sys.stderr)
                break
    say("")
    return found


def measured_once(
    args: argparse.Namespace, cpus: tuple[int, int], turn: int, folder: str
) -> dict[Any, tuple[float, float]]:
    """The same of one turn.

    :raises WorkerError: a process does not answer
    """
    found: dict[Any, tuple[float, float]] = {}
    prefixes: dict[str, list[str]] = {PLAIN: []}
    prefixes[TRACED] = ["env", f"RDMANET_TRACE={folder}/trace"]
    if args.before is not None:
        prefixes[BEFORE] = ["env", "-C", str(args.before)]
    with ExitStack() as stack:
        pairs = {state: stack.enter_context(WatchedPair(cpus, prefix)) for state, prefix in prefixes.items()}
        pairs[WATCHED] = pairs[PLAIN]
        states = list(pairs)
        for case, api in MEASURED:
            for state in states[turn % len(states) :] + states[: turn % len(states)]:
                say(f"{turn + 1}/{args.turns}  {case.name}, {api}, {state}")
                with watching(state == WATCHED):
                    run = pairs[state].run(replace(case, seconds=args.seconds), api)
                time_us = 1e6 / run["messages_per_s"]
                if case.pause_s:  # else it is the pause
                    time_us = run["p50_us"]
                found[case.name, api, state] = time_us, run["cpu_us"]
    for trace in Path(folder).iterdir():
        trace.unlink()
    return found


def report(found: dict[Any, list[tuple[float, float]]], states: list[str]) -> tuple[str, bool]:
    """The table, and whether all goals are reached."""
    rows = [
        "| case | interface | state | time of a message | ratio | quartiles | CPU | ratio | goal |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    all_reached = True
    for case, api in dict.fromkeys((case.name, api) for case, api in MEASURED):
        plain = found[case, api, PLAIN]
        for state in states:
            turns = found[case, api, state]
            time_us, cpu_us = (statistics.median(column) for column in zip(*turns, strict=True))
            pairs = list(zip(turns, plain, strict=True))
            if state == BEFORE:  # what is asked is how much slower this tree is
                pairs = [(ours, theirs) for theirs, ours in pairs]
            by_time, by_cpu = ([ours[i] / theirs[i] for ours, theirs in pairs] for i in (0, 1))
            ratios = [statistics.median(by_time), statistics.median(by_cpu)]
            low, _, high = statistics.quantiles(by_time * 2, n=4)  # twice: of one turn there are none
            goal = BEFORE_GOAL if state == BEFORE else GOALS.get(state)
            said = ""
            if goal is not None:
                reached = max(ratios) <= goal
                all_reached &= reached
                said = f"{goal} {'reached' if reached else 'missed'}"
            rows.append(
                f"| {case} | {api} | {state} | {time_us:.3f} µs | {ratios[0]:.3f} | {low:.3f} to {high:.3f} |"
                f" {cpu_us:.3f} µs | {ratios[1]:.3f} | {said} |"
            )
    return "\n".join(rows), all_reached


# ---- --crowd -------------------------------------------------------------------------------------------------


def crowd(idle: int, turns: int, seconds: float, cpus: tuple[int, int]) -> bool:
    """Print what lists of so many connections do to another one. Whether the goals are reached."""
    allow_descriptors(idle + SPARE)
    case = Case("one connection", "ping", 64, seconds=seconds)
    states = ["no others", "alone", "beside `ss`"]
    longest: dict[str, list[float]] = {state: [] for state in states}
    lists_s: list[float] = []
    say(f"{idle} idle connections")
    variant = Variant("rdmanet", "uvloop")
    stretches_ms: list[list[float]] = []
    with Place(variant, cpus, case, 0) as empty, Place(variant, cpus, case, idle) as full:
        full.pair.server.call("longest_answer")
        for turn in range(turns):
            for state in states:
                say(f"{turn + 1}/{turns}  {state}")
                place = empty if state == states[0] else full
                client = place.pair.client
                client.send("run", case=case.as_dict(), api=PROTOCOL, address=place.address)
                until = time.monotonic() + seconds
                while state == states[2] and time.monotonic() < until:
                    began = time.monotonic()
                    subprocess.run([*SS, "--json"], stdout=subprocess.DEVNULL, check=True)
                    lists_s.append(time.monotonic() - began)
                longest[state].append(client.receive()["max_us"] / 1e3)
            stretches_ms += full.pair.server.call("longest_answer")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the lists: the workers have not ended
    say("")
    all_ms, kept_ms = zip(*stretches_ms, strict=True)
    list_s, stretch_ms = statistics.median(lists_s), max(all_ms)
    reached = list_s < LIST_S and max(longest[states[2]]) < LONGEST_MS and stretch_ms < STRETCH_MS
    print(f"| {idle} idle connections | {' | '.join(states)} | goal |")
    print("| --- | ---: | ---: | ---: | --- |")
    for title, of, goal in (
        (f"longest round trip of {turns} turns", max, f"under {LONGEST_MS} ms"),
        ("median of the longest", statistics.median, ""),
    ):
        print(f"| {title} | {' | '.join(f'{of(longest[state]):.2f} ms' for state in states)} | {goal} |")
    print(f"| a list | | | {list_s:.2f} s | under {LIST_S} s |")
    print(
        f"| longest work of the loop at a stretch, CPU time | | | {stretch_ms:.2f} ms | under {STRETCH_MS} ms |"
    )
    print(f"| the same while nobody else had its CPU | | | {max(kept_ms):.2f} ms | |")
    print(f"| the same, median of the lists | | | {statistics.median(kept_ms):.2f} ms | |")
    cpu_s = (used.ru_utime + used.ru_stime) / len(lists_s)
    print(f"| CPU time of the process that lists | | | {cpu_s:.2f} s | |")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 9, or 1 with --quick")
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="N", help="begin no turn that would end after N (15)"
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another tree, built")
    parser.add_argument("--crowd", type=int, metavar="N", help="lists of N connections instead")
    args = parser.parse_args()
    args.turns = args.turns or (1 if args.quick else 9)
    args.seconds = 0.3 if args.quick else 2.0
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[1]) if len(allowed) > 1 else (-1, -1)
    try:
        if args.crowd is not None:
            reached = crowd(args.crowd, args.turns, args.seconds, cpus)
        else:
            found = measured(args, cpus)
            states = list(dict.fromkeys(state for _, _, state in found))
            text, reached = report(found, sorted(states, key=[PLAIN, WATCHED, TRACED, BEFORE].index))
            print(text)
    except WorkerError as exc:
        print(f"\n{exc}", file=sys.stderr)
        return 1
    return 0 if reached or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
