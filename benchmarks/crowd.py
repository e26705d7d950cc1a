"""Compare the cost of a message on a few busy connections of a server with and without many idle connections.

usage: python -m benchmarks.crowd [--idle N]... [--repetitions N] [--seconds S] [--output FILE]

For each number of idle connections (by default none, 500 and 5000) there is a server, a client with the busy
connections, and processes that hold the idle ones: they send one message over each, and then do nothing. All of them
run from the beginning to the end, and take turns: within a repetition each server answers its client's messages, in a
changing order, so that compared numbers were measured within seconds of each other. The clients are on one CPU, the
servers on another, the holders on any.

    messages/s     echoes of all busy connections together
    CPU            of server and client, for one echo, including the server's engine
    idle CPU       of server and holders, while there is no traffic
    memory         of the server for each idle connection: registered, and private beyond that of the server without any
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS, Pair, Process, machine
from benchmarks.cases import PROTOCOL, Case, Variant

CROWDS = (0, 500, 5000)
BUSY = 10
HOLDERS = 10
SPARE = 1024
"""Descriptors of a process in addition to those of its connections."""

RATE, CPU = "messages_per_s", "cpu_us"
GOAL = (0.95, 1.05)
"""Ratios of with to without idle connections: the rate is at least the first, the CPU at most the second."""
MEMORY_GOAL = 64 * 1024
"""Bytes that an idle connection costs the server at most, registered and private ones together."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crowd", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--idle", type=int, action="append", metavar="N", help="idle connections (default: 500, 5000)"
    )
    parser.add_argument("--repetitions", type=int, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of each measurement")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results)")
    args = parser.parse_args()

    crowds = sorted({0, *(args.idle or CROWDS)})
    allow_descriptors(crowds[-1] + SPARE)
    cpus = sorted(os.sched_getaffinity(0))
    pinned = (cpus[0], cpus[1]) if len(cpus) > 1 else (-1, -1)
    case = Case("busy ones", "many", 64, seconds=args.seconds, apis=(PROTOCOL,), connections=BUSY)
    variant = Variant("rdmanet", args.loop)

    with ExitStack() as stack:
        places = {}
        for idle in crowds:
            say(f"{idle} idle connections")
            places[idle] = stack.enter_context(Place(variant, pinned, case, idle))
        say("nobody says anything")
        resting = {idle: places[idle].rest(5 * args.seconds) for idle in crowds}
        runs = []
        for repetition in range(args.repetitions):
            for idle in turns(crowds, repetition):
                say(f"repetition {repetition + 1}/{args.repetitions}, {idle} idle")
                runs.append({"idle": idle, "repetition": repetition, **places[idle].run()})
    print(file=sys.stderr)

    record = {"machine": machine(), "busy": BUSY, "resting": resting, "runs": runs}
    output = args.output or RESULTS / time.strftime("crowd-%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    table, reached = report(crowds, resting, runs)
    print(table)
    print(f"every repetition is in {output}", file=sys.stderr)
    return 0 if reached else 1


def say(what: str) -> None:
    print(f"\r{what}\x1b[K", end="", file=sys.stderr, flush=True)


def turns(crowds: Sequence[int], repetition: int) -> list[int]:
    """The order of a round, so that none is always first, or always after the same one."""
    order = [*crowds[repetition % len(crowds) :], *crowds[: repetition % len(crowds)]]
    return order[::-1] if repetition % 2 else order


def allow_descriptors(count: int) -> None:
    """Raise the limit to what the processes that we start need: they inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count > soft:
        if hard != resource.RLIM_INFINITY and count > hard:
            raise SystemExit(
                f"this takes {count} descriptors a process, and the limit is {hard}: ulimit -Hn {count}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class Place:
    """A server with its idle connections, and the client with the busy ones."""

    def __init__(self, variant: Variant, pinned: tuple[int, int], case: Case, idle: int) -> None:
        self.variant, self.pair, self.case, self.idle = variant, Pair(variant, *pinned), case, idle
        self.holders: list[Process] = []

    def __enter__(self) -> "Place":
        with ExitStack() as stack:
            stack.enter_context(self.pair)
            self.address = self.pair.server.call("listen", case=self.case.as_dict(), api=PROTOCOL)
            each, rest = divmod(self.idle, HOLDERS)
            for number in range(HOLDERS):
                if count := each + (number < rest):
                    holder = Process(self.variant, -1)
                    stack.callback(holder.stop)
                    self.holders.append(holder)
                    settings = Case("idle ones", "idle", connections=count).as_dict()
                    holder.call("open_idle", case=settings, address=self.address)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def rest(self, seconds: float) -> dict[str, Any]:
        processes = [self.pair.server, *self.holders]
        for process in processes:
            process.send("rest", seconds=seconds)
        server, *holders = [process.receive() for process in processes]
        return {
            "server_cpu_percent": server["cpu_percent"],
            "server_descriptors": server["descriptors"],
            "server_private_bytes": server["private_bytes"],
            "registered_bytes": server["registered_bytes"],
            "holders_cpu_percent": sum(holder["cpu_percent"] for holder in holders),
        }

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = self.pair.client.call(
            "run", case=self.case.as_dict(), api=PROTOCOL, address=self.address
        )
        return result


def report(
    crowds: Sequence[int], resting: dict[int, dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> tuple[str, bool]:
    """A table, and whether the goals are reached."""
    found = {(run["repetition"], run["idle"]): run for run in runs}
    repetitions = sorted({run["repetition"] for run in runs})
    rows = [
        "| idle connections | messages/s | relative to none | CPU µs per message | relative to none "
        "| server's idle CPU % | descriptors | registered KiB each | private KiB each |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    reached = True
    for idle in crowds:
        of = {
            key: statistics.median(found[at, idle][key] / found[at, 0][key] for at in repetitions)
            for key in (RATE, CPU)
        }
        memory = memory_of_each(resting, idle)
        reached = reached and of[RATE] >= GOAL[0] and of[CPU] <= GOAL[1] and sum(memory) <= MEMORY_GOAL
        each = {key: statistics.median(found[at, idle][key] for at in repetitions) for key in (RATE, CPU)}
        rest = resting[idle]
        rows.append(
            f"| {idle} | {each[RATE]:,.0f} | {of[RATE]:.3f} | {each[CPU]:.3f} | {of[CPU]:.3f} "
            f"| {rest['server_cpu_percent']:.3f} | {rest['server_descriptors']} "
            f"| {memory[0] / 1024:.1f} | {memory[1] / 1024:.1f} |"
        )
    return "\n".join(rows), reached


def memory_of_each(resting: dict[int, dict[str, Any]], idle: int) -> tuple[float, float]:
    """(registered, private) bytes of an idle connection."""
    if idle == 0:
        return 0.0, 0.0
    more = resting[idle]["server_private_bytes"] - resting[0]["server_private_bytes"]
    return resting[idle]["registered_bytes"], more / idle


if __name__ == "__main__":
    sys.exit(main())
