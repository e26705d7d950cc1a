"""measure request and reply beside other ways between two Python processes of one host

usage: python -m benchmarks.peers [--quick] [--turns N] [--peer NAME]...

Two processes, each on a CPU of its own. One writes each cache line of a message and sends it; the other reads each, and
sends a message of the same size, made in the same way. Both poll, or both sleep. The table has the median of the turns'
median round trips in microseconds. benchmarks/peer_worker.py shows how each peer is used.

The peers are installed from PyPI into build/peers, in the versions of requirements/peers.txt, whose hashes pip checks.
One that does not install, or does not work, has the reason instead of figures.
"""

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.touch import BUILD, library

ROOT = Path(__file__).parents[1]
PYTHON = BUILD / "peers" / "bin" / "python"
# What installs it; rdmanet is in this environment, and shared memory in every Python.
PACKAGES = {"pyzmq": "pyzmq", "iceoryx2": "iceoryx2", "zenoh": "eclipse-zenoh", "ucxx": "ucxx-cu12"}
PEERS = ("rdmanet", *PACKAGES, "shared_memory")
MODES = ("polling", "sleeping")
COUNTS = {64: 20_000, 64 << 10: 5000, 1 << 20: 500}
TURNS, TIMEOUT_S = 3, 60.0


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
        if name in PACKAGES and (why := pip("--constraint", "requirements/peers.txt", PACKAGES[name])):
            found[name] = why
    return found


def round_trip_s(name: str, mode: str, size: int, count: int) -> float:
    """Raises NotMeasured."""
    cpus = sorted(os.sched_getaffinity(0))
    python = str(PYTHON) if name in PACKAGES else sys.executable
    with tempfile.TemporaryDirectory() as where:

        def start(role: str, cpu: int) -> subprocess.Popen[bytes]:
            arguments = [name, role, mode, str(size), str(count), str(cpus[cpu % len(cpus)]), where]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one, or these")
    args = parser.parse_args()
    names = args.peer or list(PEERS)
    turns = args.turns or (1 if args.quick else TURNS)
    library()
    missing = install(names)
    cases = [(mode, size) for mode in MODES for size in COUNTS]
    figures: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(turns):
        for mode, size in cases:
            for name in names:
                if name in missing:
                    continue
                try:
                    count = COUNTS[size] // (50 if args.quick else 1)
                    seconds = round_trip_s(name, mode, size, count)
                except NotMeasured as why:
                    missing[name] = f"{mode}, {size} B: {why}"
                else:
                    figures.setdefault((name, mode, size), []).append(seconds)
    columns = [f"{mode} {size >> 10} KiB" if size >= 1 << 10 else f"{mode} {size} B" for mode, size in cases]
    print(f"{'round trip, us':16}" + "".join(f"{column:>20}" for column in columns))
    for name in names:
        cells = [figures.get((name, *case)) for case in cases]
        texts = ["-" if not cell else f"{statistics.median(cell) * 1e6:,.1f}" for cell in cells]
        print(f"{name:16}" + "".join(f"{text:>20}" for text in texts))
    for name, why in missing.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
