"""measure libraries, unmodified, on the event loop's switch beside the same over the loop's TCP

usage: build/libraries/bin/python -m benchmarks.libraries [--quick] [--turns N] [--library NAME]...

A server and a client of one library run in two processes, on uvloop, each on a CPU of its own. They are the same
programs over RDMA and over TCP, and both pairs are there all the time: each case alternates between them, and the table
has medians of the turns. CPU is that of both processes for each operation. benchmarks/library_worker.py shows how each
library is used; the server of redis-py is a small one in Python (StreamReader and StreamWriter), not Redis. HTTPS runs
on asyncio's loop: over TCP uvloop has a TLS of its own. It runs in the environment that `make libraries` makes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import select
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.library_worker import CASES, ON_ASYNCIO, PACKAGES

ROOT = Path(__file__).parents[1]
FABRICS = ("rdma", "tcp")
TURNS, SECONDS, WARM_UP_S, TIMEOUT_S = 5, 0.8, 0.2, 60.0


class Took(NamedTuple):
    """An operation's part of the time, and of the processors' time, in microseconds."""

    time_us: float
    cpu_us: float


class Worker:
    """One side, and what it is told."""

    def __init__(self, side: str, library: str, fabric: str, cpu: int) -> None:
        self.name = f"{library}'s {side} over {fabric}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.library_worker", side, library, fabric, str(cpu)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select() knows of each line
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    def hear(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
            sys.exit(f"{self.name}: no answer within {TIMEOUT_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, *words: object) -> Any:
        self.say(*words)
        return self.hear()


class Pair:
    """A server and a client of one library over one fabric."""

    def __init__(self, stack: ExitStack, library: str, fabric: str, cpus: list[int]) -> None:
        self.server = stack.enter_context(Worker("server", library, fabric, cpus[0]))
        self.client = stack.enter_context(Worker("client", library, fabric, cpus[-1]))
        self.client.say(self.server.hear())

    def run(self, case: str, seconds: float) -> Took:
        self.client.ask(case, WARM_UP_S)
        before = self.server.ask("cpu")
        seen = self.client.ask(case, seconds)
        cpu_s = seen["cpu"] + self.server.ask("cpu") - before
        return Took(seen["seconds"] / seen["done"] * 1e6, cpu_s / seen["done"] * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.libraries", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("--library", action="append", choices=CASES, help="only this one, or these")
    args = parser.parse_args()
    turns = args.turns or (1 if args.quick else TURNS)
    seconds = SECONDS / 4 if args.quick else SECONDS
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        print("one CPU only: the server and the client share it", file=sys.stderr)

    print(f"medians of {turns} turns; µs per operation; ratio: RDMA's to TCP's, below 1 is faster")
    print(f"{'':44}{'time':>26}{'':9}{'CPU of both sides':>26}")
    print(f"{'':44}{'RDMA':>10}{'TCP':>10}{'ratio':>8}{'':5}{'RDMA':>10}{'TCP':>10}{'ratio':>8}")
    for library in args.library or CASES:
        print(heading(library))
        with ExitStack() as stack:
            pairs = {fabric: Pair(stack, library, fabric, cpus) for fabric in FABRICS}
            for case, (_, title) in CASES[library].items():
                took: dict[str, list[Took]] = {fabric: [] for fabric in FABRICS}
                for turn in range(turns):
                    for fabric in FABRICS if turn % 2 == 0 else reversed(FABRICS):
                        took[fabric].append(pairs[fabric].run(case, seconds))
                print(row(title, took), flush=True)


def heading(library: str) -> str:
    packages = PACKAGES.get(library, (library,))
    text = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return text + ", on asyncio's loop" * (library in ON_ASYNCIO)


def row(title: str, took: dict[str, list[Took]]) -> str:
    text = f"    {title:40}"
    for index in range(len(Took._fields)):
        rdma, tcp = (statistics.median(each[index] for each in took[fabric]) for fabric in FABRICS)
        text += f"{rdma:10.1f}{tcp:10.1f}{rdma / tcp:8.2f}" + " " * 5
    return text.rstrip()


if __name__ == "__main__":
    main()
