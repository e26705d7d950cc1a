"""Compare the device between two hosts, which uses TCP, with plain C sockets in the same run.

usage: python -m benchmarks.hosts [--quick] [--repetitions N] [--realtime]

The hosts are network namespaces joined by veth (this needs root or user namespaces; see scripts/two_hosts.py).
tcp_peer.c and perftest's programs on the embedded device take turns, the server on one CPU and the client on another. A
ratio is computed within each repetition; the table has the medians of both. Polling is compared with polling, and
sleeping with sleeping.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.compiling import HERE, compiled
from rdmanet import _core
from rdmanet.cli.soft_run import environment, library_directory

PATIENCE_S = 60.0
KIB, MIB = 1 << 10, 1 << 20
BANDWIDTH, ROUND_TRIP = "GB/s", "µs per round trip"
PORT = 18600


class Contest(NamedTuple):
    """One kind of traffic: the arguments of tcp_peer, and the programs that do the same on the device."""

    name: str
    unit: str
    tcp: str
    programs: tuple[str, ...]
    goal: float
    """The ratio of ours to theirs: at least this for a bandwidth, at most this for a round trip."""


def bulk(size: int, count: int) -> Contest:
    options = f"-F -s {size} -n {count}"
    programs = tuple(f"{program} {options}" for program in ("ib_write_bw", "ib_send_bw", "ib_read_bw"))
    return Contest(f"bulk, {size // KIB} KiB", BANDWIDTH, f"bulk {size} {count}", programs, 0.8)


def ping(name: str, tcp: str, option: str, count: int) -> Contest:
    programs = (f"ib_send_lat -F -s 64 -n {count}{option}", f"ibv_rc_pingpong -g 0 -s 64 -n {count}{option}")
    return Contest(name, ROUND_TRIP, f"{tcp} 64 {count}", programs, 1.3)


def contests(share: float) -> list[Contest]:
    count = int(20_000 * share)
    return [
        bulk(64 * KIB, count),
        bulk(MIB, count // 16),
        ping("64 B, both polling", "ping-polling", "", count),
        ping("64 B, both sleeping", "ping", " -e", count),
        # Where a program of sockets sleeps in recv, one of verbs polls, so this is what it comes to.
        ping("64 B, sockets sleeping, verbs polling", "ping", "", count),
    ]


# --- two hosts ------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """A program failed, or printed nothing."""


class Hosts:
    """Starts programs here and there, each on the CPU of its host."""

    def __init__(self, realtime: bool) -> None:
        self.far = shlex.split(os.environ["RDMANET_TEST_FAR"])
        self.address = os.environ["RDMANET_TEST_THERE"].split()[0]
        cpus = sorted(os.sched_getaffinity(0))
        first = ["chrt", "--rr", "1"] if realtime else []
        self.cpus = [[*first, "taskset", "-c", str(cpu)] for cpu in (cpus[0], cpus[-1])]
        self.environment = environment(library_directory(Path(_core.Library.embedded().path)))

    def here(self, command: list[str]) -> str:
        """Its output until it ends, which must be with success."""
        try:
            return subprocess.run(
                [*self.cpus[0], *command],
                env=self.environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE_S,
            ).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
            raise Trouble(f"{shlex.join(command)}: {exc}\n{exc.stdout}{exc.stderr}") from None

    @contextmanager
    def there(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*self.far, *self.cpus[1], *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def wait_for_port(self, port: int, server: subprocess.Popen[str]) -> None:
        """Wait until a process of this network listens on the port."""
        deadline = time.monotonic() + PATIENCE_S
        listening = re.compile(rf":{port:04X} \S+ 0A ")
        tables = [Path(f"/proc/{server.pid}/net/{name}") for name in ("tcp", "tcp6")]
        while not any(listening.search(table.read_text()) for table in tables):
            if server.poll() is not None or time.monotonic() > deadline:
                raise Trouble(f"{shlex.join(map(str, server.args))} does not listen")  # type: ignore[arg-type]
            time.sleep(0.02)

    def verbs(self, program: str) -> str:
        """A program of perftest or rdma-core, its client's output."""
        command = [*program.split(), "-p", str(PORT)]
        with self.there(command) as server:
            self.wait_for_port(PORT, server)
            said = self.here([*command, self.address])
            server.wait(PATIENCE_S)
        return said


def figure_of(program: str, said: str) -> float:
    """The measurement of a verbs program, in the contest's unit."""
    if program.startswith("ibv_"):
        found = re.search(r"= ([\d.]+) usec/iter", said)
        return float(found[1]) if found else float("nan")
    rows = [line.split() for line in said.splitlines() if re.match(r"\s*\d+\s+\d+\s+[\d.]+\s+[\d.]+", line)]
    if not rows:
        raise Trouble(f"{program} said\n{said}")
    if "_bw" in program:
        return float(rows[-1][3]) * MIB / 1e9
    return float(rows[-1][4]) * 2  # the median, of one way


def measure(hosts: Hosts, contest: Contest, plain: Path, port: str) -> Iterator[tuple[str, float]]:
    kind, *numbers = contest.tcp.split()
    yield "plain C", float(hosts.here([str(plain), kind, hosts.address, port, *numbers]))
    for program in contest.programs:
        yield program.split()[0], figure_of(program, hosts.verbs(program))


# --- the table ------------------------------------------------------------------------------------------------


def table(cases: list[Contest], seen: dict[tuple[str, str], list[float]]) -> str:
    lines = ["| case | program | | relative to plain C | goal |", "| --- | --- | ---: | ---: | --- |"]
    for contest in cases:
        plain = seen[contest.name, "plain C"]
        lines.append(
            f"| {contest.name} | plain C sockets | {statistics.median(plain):.3g} {contest.unit} | | |"
        )
        for program in (program.split()[0] for program in contest.programs):
            ours = seen[contest.name, program]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
            at_least = contest.unit == BANDWIDTH
            reached = ratio >= contest.goal if at_least else ratio <= contest.goal
            goal = (
                f"at {'least' if at_least else 'most'} {contest.goal}: {'reached' if reached else 'missed'}"
            )
            lines.append(
                f"| {contest.name} | {program} | {statistics.median(ours):.3g} {contest.unit}"
                f" | {ratio:.2f} | {goal} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short repetition: to see that it runs")
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: 7, or 1 with --quick")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run before the machine's other processes (root), if they disturb",
    )
    args = parser.parse_args()
    if "RDMANET_TEST_FAR" not in os.environ:
        two_hosts = HERE.parent / "scripts" / "two_hosts.py"
        os.execv(
            sys.executable,
            [sys.executable, str(two_hosts), sys.executable, "-m", "benchmarks.hosts", *sys.argv[1:]],
        )
    repetitions = args.repetitions or (1 if args.quick else 7)
    cases = contests(0.1 if args.quick else 1)

    plain = compiled("tcp_peer", "tcp_peer.c")
    hosts = Hosts(args.realtime)
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    with hosts.there([str(plain), "serve"]) as server:
        assert server.stdout
        port = server.stdout.readline().strip()
        try:
            for repetition in range(repetitions):
                for contest in cases:
                    print(f"\r{repetition + 1}/{repetitions}  {contest.name}\x1b[K", end="", file=sys.stderr)
                    for name, figure in measure(hosts, contest, plain, port):
                        seen[contest.name, name].append(figure)
        except Trouble as exc:
            print(f"\n{exc}", file=sys.stderr)
            return 1
    print(f"\r{os.cpu_count()} CPUs, medians of {repetitions} repetitions\x1b[K", file=sys.stderr)
    print(table(cases, seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
