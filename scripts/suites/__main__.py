# SPDX-License-Identifier: Apache-2.0
"""Run suites, repeat what failed, and print a table.

usage: python -m suites test          what `make test` runs
       python -m suites test-all      the same with what is long
       python -m suites gate          what .ci/run runs
       python -m suites matrix [--resume] [NAME ...]

A NAME of the matrix may be the beginning of several. `--resume` runs only what has not passed on this commit.
build/matrix.json has the results.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from suites.running import run_steps
from suites.steps import ROOT, Result, Step, result_to
from suites.suites import GATE, MATRIX, SUITES, Missing, chosen

MATRIX_RESULTS = ROOT / "build" / "matrix.json"
LEFT_OUT = "left out here: {} tests that are long. `make test-all` runs them, too."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["test", "test-all", "gate", "matrix"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="suites of the matrix; all by default")
    parser.add_argument("--resume", action="store_true", help="run only what has not passed on this commit")
    args = parser.parse_intermixed_args()  # a name may come after --resume
    try:
        if args.what == "matrix":
            return matrix(args.names, resume=args.resume)
        names = GATE if args.what == "gate" else (args.what,)
        left_out = 0

        def done(result: Result) -> None:
            nonlocal left_out
            left_out += result.left_out

        with huge_pages():
            green = run_steps([SUITES[name]() for name in names], done=done)
    except Missing as exc:
        print(exc, file=sys.stderr)
        return 2
    if left_out and args.what == "test":
        print(LEFT_OUT.format(left_out))
    return 0 if green else 1


def matrix(names: list[str], *, resume: bool) -> int:
    """Each result is kept as soon as it is there, so a run that is interrupted can be resumed."""
    commit = this_commit()
    stored = json.loads(MATRIX_RESULTS.read_text()) if MATRIX_RESULTS.exists() else {}
    results: dict[str, dict[str, object]] = (
        stored.get("results", {}) if stored.get("commit") == commit else {}
    )
    steps: list[Step] = []
    missing: list[str] = []
    for name in chosen(names) if names else MATRIX:
        if resume and name in results and not results[name]["failed"]:
            print(f"{name}: has passed on {commit}")
            continue
        try:
            steps.append(SUITES[name]())
        except Missing as exc:
            missing.append(f"WARNING: {name} was not run: {exc}")

    def done(result: Result) -> None:
        results[result.name] = result_to(result)
        MATRIX_RESULTS.parent.mkdir(exist_ok=True)
        MATRIX_RESULTS.write_text(json.dumps({"commit": commit, "results": results}, indent=1))

    with huge_pages():
        green = run_steps(steps, done=done)
    print("\n".join(missing))
    return 0 if green else 1


def this_commit() -> str:
    """A commit's hash; with a mark if the tree differs from it."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    return f"{head}, changed" if changed else head


@contextmanager
def huge_pages() -> Iterator[None]:
    """Reserve some for the tests of memory in huge pages, as root; without them these are skipped."""
    control = Path("/proc/sys/vm/nr_hugepages")
    before = control.read_text()
    try:
        if int(before) < 32:
            control.write_text("32")
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        control.write_text(before)


if __name__ == "__main__":
    sys.exit(main())
