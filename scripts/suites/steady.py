# SPDX-License-Identifier: Apache-2.0
"""Run tests again and again beside load, and say which fail how often.

usage: python -m suites.steady [-n N] [PYTEST ARGUMENT ...]

Each run is one process of pytest. A third of the N runs is beside two busy processes, a third on one processor, and a
third beside two other runs of the suite.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from suites.steps import ROOT, Pytest, tail

BUSY = (sys.executable, "-c", "while True: pass")
SUITE = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", "tests")
LOADS = {"two busy processes": (BUSY, BUSY), "one processor": (), "two suites": (SUITE, SUITE)}


@asynccontextmanager
async def load(name: str) -> AsyncIterator[None]:
    """Processes that keep the machine busy; one that ends is started again."""

    async def keep(command: tuple[str, ...]) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    keeping = [asyncio.create_task(keep(command)) for command in LOADS[name]]
    try:
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def run(runs: int, arguments: list[str]) -> int:
    failures: Counter[tuple[str, str, str]] = Counter()
    shown: dict[str, str] = {}
    ran = 0
    with tempfile.TemporaryDirectory(prefix="steady-") as folder:
        for name in LOADS:
            share = -(-runs // len(LOADS))
            prefix = ("taskset", "--cpu-list", "0") if name == "one processor" else ()
            async with load(name):
                for turn in range(share):
                    step = Pytest(f"{name} {turn}", arguments, prefix=prefix, limit=3600)
                    result = await step.run(Path(folder))
                    ran += result.passed
                    for trouble in result.troubles:
                        failures[trouble.name, name, trouble.what] += 1
                        shown.setdefault(trouble.name, trouble.output)
                    print(f"{name}, {turn + 1} of {share}: {len(result.troubles)} failed", flush=True)
        for test, text in shown.items():
            print(f"\n==== {test}\n{tail(text, 80)}")
        print(f"\n{'times':>5}  {'of':>4}  beside")
        for (test, name, what), count in failures.most_common():
            print(f"{count:>5}  {share:>4}  {name}: {test} ({what})")
    print(f"{ran} passed, {failures.total()} failed")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.steady")
    parser.add_argument("-n", type=int, default=30, help="how many runs (default: 30)")
    args, pytest_arguments = parser.parse_known_args()
    return asyncio.run(run(args.n, pytest_arguments))


if __name__ == "__main__":
    sys.exit(main())
