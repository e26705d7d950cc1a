"""measure request and reply, and one way, beside other ways between two Python processes of one host

usage: python -m benchmarks.peers [--quick] [--turns N] [--peer NAME]... [--output RESULTS.json]

Two processes, each on a CPU of its own. One writes each cache line of a message and sends it; the other reads each, and
sends a message of the same size, made in the same way. One way, it answers the last message only. Both poll, or both
sleep. The tables have the median of the turns: microseconds of a round trip, and of a message one way.
benchmarks/peer_worker.py shows how each peer is used. Beside RESULTS.json, by default in benchmarks/results, come the
tables as a page (.md) and a drawing (.svg).

The peers are installed from PyPI into build/peers, in the versions of requirements/, whose hashes pip checks. One that
does not install, or does not work, has the reason instead of figures.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chart import Bars, draw
from benchmarks.compiling import BUILD
from benchmarks.touch import library

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PYTHON = BUILD / "peers" / "bin" / "python"
# What installs it, and the versions; rdmanet is in this environment, and the others in every Python.
PACKAGES = {
    "pyzmq": ("pyzmq", "peers.txt"),
    "iceoryx2": ("iceoryx2", "peers.txt"),
    "zenoh": ("eclipse-zenoh", "peers.txt"),
    "ucxx": ("ucxx-cu12", "peers.txt"),
    "grpc_aio": ("grpcio", "rpc-peers.txt"),
}
PEERS = ("rdmanet", *PACKAGES, "shared_memory", "multiprocessing")
CANNOT_POLL = {"grpc_aio"}
WAYS = ("round-trip", "one-way")
WAITS = ("polling", "sleeping")
COUNTS = {64: 10_000, 4 << 10: 10_000, 64 << 10: 3000, 1 << 20: 300, 64 << 20: 10}
TURNS, TIMEOUT_S = 3, 60.0


class Case(NamedTuple):
    way: str
    waits: str
    size: int

    def __str__(self) -> str:
        return f"{self.way}, {self.waits}, {size_text(self.size)}"


CASES = [Case(way, waits, size) for way in WAYS for waits in WAITS for size in COUNTS]


def size_text(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


class NotMeasured(Exception):
    """It does not install, or does not work."""


def pip(*arguments: str) -> str:
    """Install something into build/peers. Returns why it does not install, or nothing."""
    command = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "--only-binary",
        ":all:",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def install(names: list[str]) -> dict[str, str]:
    """Set the environment up; why peers are not in it."""
    if not set(names) & set(PACKAGES):
        return {}
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", BUILD / "peers"], check=True)
    if why := pip("--requirement", "requirements/pip.txt"):
        return dict.fromkeys(PACKAGES, why)
    found = {}
    for name in names:
        if name in PACKAGES:
            package, versions = PACKAGES[name]
            if why := pip("--constraint", f"requirements/{versions}", package):
                found[name] = why
    return found


def seconds(name: str, case: Case, count: int) -> float:
    """What a message takes. Raises NotMeasured."""
    cpus = sorted(os.sched_getaffinity(0))
    python = str(PYTHON) if name in PACKAGES else sys.executable
    with tempfile.TemporaryDirectory() as where:

        def start(role: str, cpu: int) -> subprocess.Popen[bytes]:
            cpu = cpus[cpu % len(cpus)]
            arguments = [name, role, case.waits, case.way, *map(str, (case.size, count, cpu)), where]
            return subprocess.Popen(
                [python, "-m", "benchmarks.peer_worker", *arguments],
                bufsize=0,  # so that select() knows of each line
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

        server = start("serve", 1)
        client = None
        try:
            heard(server, "ready")
            client = start("ask", 0)
            return float(heard(client, "took"))
        finally:
            for process in (client, server):
                if process is not None:
                    process.kill()
                    process.communicate()


def heard(process: subprocess.Popen[bytes], word: str) -> str:
    """What follows this word in the next line that begins with it: libraries say other things."""
    assert process.stdout is not None and process.stderr is not None
    while True:
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            raise NotMeasured(f"no answer within {TIMEOUT_S:.0f} s")
        line = process.stdout.readline().decode()
        if not line:
            said = process.stderr.read().decode().strip().splitlines() or ["it said nothing"]
            raise NotMeasured(f"it ended with status {process.wait()}: {said[-1]}")
        if line.startswith(word):
            return line.removeprefix(word).strip()


def measured(
    names: list[str], missing: dict[str, str], turns: int, quick: bool
) -> tuple[dict[Case, dict[str, float]], dict[tuple[str, str, str], str]]:
    """The median of the turns, for each case and peer; and who failed in which way of which mode, and why."""
    found: dict[Case, dict[str, list[float]]] = {case: {} for case in CASES}
    failed: dict[tuple[str, str, str], str] = {}
    steps = [(case, name) for _ in range(turns) for case in CASES for name in names if name not in missing]
    for number, (case, name) in enumerate(steps, 1):
        if (name, *case[:2]) in failed or (case.waits == "polling" and name in CANNOT_POLL):
            continue
        if sys.stderr.isatty():
            print(f"\r{number} of {len(steps)}: {name}, {case}\x1b[K", end="", file=sys.stderr, flush=True)
        try:
            took = seconds(name, case, max(2, COUNTS[case.size] // (50 if quick else 1)))
        except NotMeasured as why:
            failed[name, *case[:2]] = f"{size_text(case.size)}: {why}"
        else:
            found[case].setdefault(name, []).append(took)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    medians = {
        case: {name: statistics.median(times) for name, times in each.items()} for case, each in found.items()
    }
    return medians, failed


def page(figures: dict[Case, dict[str, float]], names: list[str], missing: dict[str, str]) -> str:
    """The tables, in Markdown."""
    lines = []
    for way, title in zip(WAYS, ("round trip, µs", "one way, µs for each message"), strict=True):
        for waits in WAITS:
            cases = [case for case in CASES if (case.way, case.waits) == (way, waits)]
            lines += [f"| {title}, {waits} | " + " | ".join(size_text(case.size) for case in cases) + " |"]
            lines += ["| --- |" + " ---: |" * len(cases)]
            for name in names:
                cells = [figures[case].get(name) for case in cases]
                texts = ["-" if cell is None else f"{cell * 1e6:,.1f}" for cell in cells]
                lines += [f"| {name} | " + " | ".join(texts) + " |"]
            lines += [""]
    lines += [f"{name} is not measured: {why}" for name, why in missing.items()]
    return "\n".join(lines).strip() + "\n"


def bars(figures: dict[Case, dict[str, float]], names: list[str]) -> Iterator[Bars]:
    """A group for each case: round trips in microseconds, one way in GB/s or messages."""
    for case in CASES:
        each = {name: figures[case][name] for name in names if name in figures[case]}
        if case.way == "round-trip":
            unit, values = "µs (less is better)", {name: took * 1e6 for name, took in each.items()}
        elif case.size < 1 << 16:
            unit = "million messages/s (more is better)"
            values = {name: 1e-6 / took for name, took in each.items()}
        else:
            unit = "GB/s (more is better)"
            values = {name: case.size / took / 1e9 for name, took in each.items()}
        yield Bars(f"{case}: {unit}", values)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one, or these")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results)")
    args = parser.parse_args()
    names = args.peer or list(PEERS)
    library()
    missing = install(names)
    figures, failed = measured(names, missing, args.turns or (1 if args.quick else TURNS), args.quick)
    missing |= {", ".join(who): why for who, why in failed.items()}
    output = args.output or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-peers.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    record: list[dict[str, Any]] = [case._asdict() | {"seconds": figures[case]} for case in CASES]
    output.write_text(json.dumps(record, indent=1) + "\n")
    text = page(figures, names, missing)
    output.with_suffix(".md").write_text(text)
    output.with_suffix(".svg").write_text(draw(list(bars(figures, names))))
    print(text, end="")


if __name__ == "__main__":
    main()
