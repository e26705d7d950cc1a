"""Compare what `rdmanet perf` measures with what perftest's C programs do, on the embedded device of this machine.

usage: python -m benchmarks.perftest [--quick] [--turns N] [--device NAME]

`--device NAME` compares the bandwidth on another one, with few messages, since the processor of soft-RoCE's virtual
machine is emulated; each pair of figures is shown at once, should its time be over before the table:
`scripts/kernel-vm -- .venv/bin/python -m benchmarks.perftest --device rxe0 --turns 1`.

Both measure the same with the same options, in turns: the server on one CPU, the client on the other. perftest's
programs run as `rdmanet soft-run` runs them. The figure of a turn is the ratio of the two; the table has the medians of
figures and ratios. The goals are 10 % of bandwidth from 64 KiB on, and 0.35 µs of the latency of 64 B.
"""

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rdmanet import _core
from rdmanet.cli.soft_run import environment, library_directory

LEAST_RATIO = 0.9
MOST_ABOVE_US = 0.35
PATIENCE_S = 300.0
MIB = 2**20
EMULATED_BYTES = 16 * MIB
"""So many are sent where the processor is emulated."""


class Test(NamedTuple):
    """A test by its name in `rdmanet perf`; perftest's program has it, too."""

    name: str
    size: int
    iterations: int

    @property
    def latency(self) -> bool:
        return self.name.endswith("_lat")

    @property
    def options(self) -> list[str]:
        return ["-s", str(self.size), "-n", str(self.iterations)]

    @property
    def title(self) -> str:
        return f"{self.name} {self.size} B"


TESTS = [
    *(Test(f"{verb}_lat", 64, 500_000) for verb in ("write", "send", "read")),
    *(Test(f"{verb}_bw", 65536, 200_000) for verb in ("write", "read", "send")),
    *(Test(f"{verb}_bw", MIB, 15_000) for verb in ("write", "read", "send")),
]


class Trouble(Exception):
    """A program did not measure."""


def ours(test: Test, cpus: tuple[int, int], device: str | None) -> float:
    """In microseconds or GB/s."""
    command = [sys.executable, "-m", "rdmanet", "perf", test.name, *test.options, *_on(device), "--json"]
    command += ["--cpus", f"{cpus[0]},{cpus[1]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise Trouble(f"{' '.join(command)}: {done.stderr}")
    [result] = json.loads(done.stdout)["results"]
    return float(result["latency"]["p50_us"] if test.latency else result["gb_per_s"])


def _on(device: str | None) -> list[str]:
    return [] if device is None else ["-d", device]


def theirs(test: Test, cpus: tuple[int, int], device: str | None) -> float:
    """The same of perftest's program."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [f"ib_{test.name}", "-F", "-p", str(port), *test.options, *_on(device)]
    surroundings = None
    if device is None:
        surroundings = environment(library_directory(Path(_core.Library.embedded().path)))
    server = subprocess.Popen(
        ["taskset", "-c", str(cpus[0]), *command],
        env=surroundings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_listener(server, port)
        client = ["taskset", "-c", str(cpus[1]), *command, "127.0.0.1"]
        done = subprocess.run(client, env=surroundings, capture_output=True, text=True, timeout=PATIENCE_S)
        rows = [
            line.split() for line in done.stdout.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s", line)
        ]
        if not rows:
            raise Trouble(f"{' '.join(client)}: {done.stdout}{done.stderr}")
        server.wait(PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    return float(rows[-1][4]) if test.latency else float(rows[-1][3]) * MIB / 1e9


def _wait_for_listener(server: subprocess.Popen[bytes], port: int) -> None:
    """Connecting to see it would be taken for the client."""
    until = time.monotonic() + PATIENCE_S
    listening = re.compile(rf":{port:04X} \S+ 0A ")
    while not any(listening.search(Path(f"/proc/net/{table}").read_text()) for table in ("tcp", "tcp6")):
        if server.poll() is not None or time.monotonic() > until:
            raise Trouble(f"the server of perftest does not listen; it ended with {server.poll()}")
        time.sleep(0.02)


def measured(
    tests: list[Test], turns: int, cpus: tuple[int, int], device: str | None
) -> Iterator[tuple[Test, float, float]]:
    for turn in range(turns):
        for test in tests:
            say(f"{turn + 1}/{turns}  {test.title}")
            if turn % 2:  # neither always comes first
                our = ours(test, cpus, device)
                yield test, our, theirs(test, cpus, device)
            else:
                their = theirs(test, cpus, device)
                yield test, ours(test, cpus, device), their
    say("")


def say(what: str) -> None:
    print(f"\r{what}\x1b[K", end="", file=sys.stderr, flush=True)


def table(seen: dict[Test, list[tuple[float, float]]]) -> tuple[str, bool]:
    """The table, and whether all goals are reached."""
    lines = [
        "| test | rdmanet perf | perftest | ratio, or difference | least | greatest | goal |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    all_reached = True
    for test, pairs in seen.items():
        unit = "µs" if test.latency else "GB/s"
        apart = [our - their if test.latency else our / their for our, their in pairs]
        middle = statistics.median(apart)
        reached = middle <= MOST_ABOVE_US if test.latency else middle >= LEAST_RATIO
        goal = f"at most {MOST_ABOVE_US} µs above" if test.latency else f"at least {LEAST_RATIO}"
        all_reached &= reached
        our, their = (statistics.median(side) for side in zip(*pairs, strict=True))
        form = "{:+.2f} µs" if test.latency else "{:.2f}"
        cells = [form.format(number) for number in (middle, min(apart), max(apart))]
        lines.append(
            f"| {test.title} | {our:.3g} {unit} | {their:.3g} {unit} | {' | '.join(cells)} | {goal}:"
            f" {'reached' if reached else 'missed'} |"
        )
    return "\n".join(lines), all_reached


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perftest", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 5, or 1 with --quick")
    parser.add_argument("--device", metavar="NAME", help="another device than the embedded one")
    args = parser.parse_args()
    if not shutil.which("ib_write_bw"):
        print("perftest is not installed: apt-get install perftest", file=sys.stderr)
        return 1
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        print("two CPUs are needed: one for each process", file=sys.stderr)
        return 1
    tests = [test._replace(iterations=test.iterations // 20) for test in TESTS] if args.quick else TESTS
    if args.device is not None:
        tests = [test._replace(iterations=EMULATED_BYTES // test.size) for test in TESTS if not test.latency]
    seen: dict[Test, list[tuple[float, float]]] = {test: [] for test in tests}
    try:
        for test, our, their in measured(
            tests, args.turns or (1 if args.quick else 5), (allowed[0], allowed[1]), args.device
        ):
            seen[test].append((our, their))
            if args.device is not None:  # where a machine's time may be over before the table
                say(f"{test.title}: {our:.4g} GB/s, perftest {their:.4g}: {our / their:.2f}\n")
    except (Trouble, subprocess.TimeoutExpired) as exc:
        print(f"\n{exc}", file=sys.stderr)
        return 1
    text, all_reached = table(seen)
    print(text)
    return 0 if all_reached or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
