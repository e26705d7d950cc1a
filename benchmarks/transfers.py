"""measure READs from Python by rdmanet.tensors, beside NIXL on the same device, and copies from shared memory

usage: python -m benchmarks.transfers [--quick] [--turns N] [--kind KIND]... [--output RESULTS.json]

For each kind there are two processes of this host, each on a CPU of its own if there are two: an owner of 64 MiB, which
sleeps, and a user, who reads from there into an array of NumPy's. All that they register is set up before:

    rdmanet       `await peer.read()`, and of lists `read_rows()`, into registered memory, on uvloop. The owner's memory
                  is of `rdmanet.alloc()`, which the user's device maps
    rdmanet-numpy the same where the owner's memory is an array of NumPy's, as NIXL's is: the kernel copies from there
    nixl          NIXL's agent by UCX under `rdmanet soft-run`, which looks for the end all the time
    nixl-1ms      the same, which sleeps for 1 ms between two looks
    nixl-10ms     the same for 10 ms, as LMCache does
    nixl-cma      NIXL by what UCX chooses without the device: it copies from the other process by a system call
    memcpy        NumPy copies from shared memory: it checks nothing, and has nothing to wait for

All users take turns, a case each. Who has no turn is stopped (SIGSTOP), as NIXL's agents have threads that look for
work all the time. The first call of a turn is not counted. The table has the medians of the turns in microseconds;
the last line is how much of a processor it takes to wait for a notification, in percent. NIXL comes from
build/engines (`make engines`), or from the Python of RDMANET_TEST_ENGINES. A kind that does not work has the reason
instead of figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.transfer_worker import CASES, WAITING, Case

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ENGINES = os.environ.get("RDMANET_TEST_ENGINES", str(ROOT / "build" / "engines" / "bin" / "python"))
ON_THE_DEVICE = [sys.executable, "-m", "rdmanet", "soft-run", "--"]
KINDS = {
    "rdmanet": [sys.executable],
    "rdmanet-numpy": [sys.executable],
    "nixl": [*ON_THE_DEVICE, ENGINES],
    "nixl-1ms": [*ON_THE_DEVICE, ENGINES],
    "nixl-10ms": [*ON_THE_DEVICE, ENGINES],
    "nixl-cma": [ENGINES],
    "memcpy": [sys.executable],
}
TURNS = 15


class NotMeasured(Exception):
    """It is not installed, or does not work."""


class Side:
    """A process of one kind."""

    def __init__(self, kind: str, role: str, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if kind != "nixl-cma":
            environment["UCX_TLS"] = "ib"  # otherwise UCX carries a part of what is large by CMA
        command = [*KINDS[kind], "-m", "benchmarks.transfer_worker", kind, role, *arguments]
        try:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as exc:
            raise NotMeasured(str(exc)) from None

    def hear(self, word: str) -> list[str]:
        """What follows this word in the next line that begins with it: libraries say other things."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.split()[1:]
        said = self.process.stderr.read().strip().splitlines() or ["it said nothing"]
        raise NotMeasured(f"it ended with status {self.process.wait()}: {said[-1]}")

    def turn(self, case: Case, calls: int) -> tuple[float, float]:
        """Seconds that a call takes, and of a processor."""
        assert self.process.stdin is not None
        try:
            print(CASES.index(case), calls, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # hear() says why
        took, used = map(float, self.hear("took"))
        return took, used

    def stop(self) -> None:
        """It uses no processor until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measured(
    kinds: list[str], turns: int
) -> tuple[dict[str, dict[str, list[tuple[float, float]]]], dict[str, str]]:
    """The turns of each case and kind, and why kinds have none."""
    sides: list[Side] = []
    pairs: dict[str, tuple[Side, Side]] = {}
    missing: dict[str, str] = {}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {case.name: {} for case in CASES}
    try:
        for kind in kinds:
            before = len(sides)
            try:
                owner = Side(kind, "own")
                sides.append(owner)
                user = Side(kind, "use", *owner.hear("facts"))
                sides.append(user)
                user.hear("ready")
            except NotMeasured as why:
                missing[kind] = str(why)
                for side in sides[before:]:
                    side.process.kill()
            else:
                pairs[kind] = owner, user
                owner.stop()
                user.stop()
        for turn in range(-1, turns):  # the first one touches all memory, and is not counted
            for case in CASES:
                for kind, (owner, user) in list(pairs.items()):
                    owner.go_on()
                    user.go_on()
                    try:
                        figures = user.turn(case, case.calls)
                    except NotMeasured as why:
                        missing[kind] = f"{case.name}: {why}"
                        del pairs[kind]
                        owner.process.kill()
                        user.process.kill()
                        continue
                    owner.stop()
                    user.stop()
                    if turn >= 0:
                        found[case.name].setdefault(kind, []).append(figures)
    finally:
        for side in sides:
            side.end()
    return found, missing


def page(
    found: dict[str, dict[str, list[tuple[float, float]]]], kinds: list[str], missing: dict[str, str]
) -> str:
    """The table, in Markdown."""
    lines = ["| µs | " + " | ".join(kinds) + " |", "| --- |" + " ---: |" * len(kinds)]
    for name, each in found.items():
        cells = []
        for kind in kinds:
            turns = each.get(kind)
            if not turns:
                cells.append("-")
            elif name == WAITING:
                cells.append(f"{statistics.median(used / took for took, used in turns) * 100:.1f} %")
            else:
                cells.append(f"{statistics.median(took for took, _ in turns) * 1e6:,.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{kind} is not measured: {why}" for kind, why in missing.items())]
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this one, or these")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # or those that are stopped would be left
    kinds = args.kind or list(KINDS)
    found, missing = measured(kinds, args.turns or (1 if args.quick else TURNS))
    output = args.output or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-transfers.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"turns": found, "missing": missing}, indent=1) + "\n")
    text = page(found, kinds, missing)
    output.with_suffix(".md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
