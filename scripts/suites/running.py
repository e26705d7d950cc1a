# SPDX-License-Identifier: Apache-2.0
"""Run steps, repeat what failed, and say what came of it.

No step's failure keeps the others from running. When all are done and the machine is quiet, each test that failed is
run again, alone in a new process, three times. It is a failure if it fails again once; else it is unsteady, and is
named and shown in whole. More than three unsteady tests are a failure too. A crash is never repeated.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from suites.steps import Result, Step, Trouble, result_to, tail

REPEATS = 3
MOST_UNSTEADY = 3
ENOUGH_FAILURES = 5  # that repeated: the rest is believed
PROGRESS_S = 15

COLUMNS = ("step", "passed", "failed", "unsteady", "skipped", "seconds")


def run_steps(
    steps: Sequence[Step],
    *,
    at_a_time: int = 2,
    done: Callable[[Result], None] = lambda result: None,
    report: Path | None = None,
    quiet: bool = False,
) -> bool:
    """Run them all; true if the run is green. Steps that are `alone` come first, one after the other.

    `done` is called with each result when its failures have been repeated. `report` is a file for the results as JSON.
    """
    single = os.environ.pop("SUITES_RESULT", None)  # ours, and not of what runs in our steps
    with tempfile.TemporaryDirectory(prefix="suites-") as logs:
        results = asyncio.run(_run_all(steps, at_a_time, Path(logs), done))
    if report:
        report.write_text(json.dumps([result_to(result) for result in results], indent=1))
    if single:
        assert len(results) == 1, "a nested run has one step"
        Path(single).write_text(json.dumps(result_to(results[0])))
    if not quiet:
        print(f"\n{table(results)}\n")
    return is_green(results)


def is_green(results: Sequence[Result]) -> bool:
    """At most three tests are unsteady, and none fails."""
    return (
        not any(result.failed for result in results)
        and sum(len(result.unsteady) for result in results) <= MOST_UNSTEADY
    )


async def _run_all(
    steps: Sequence[Step], at_a_time: int, logs: Path, done: Callable[[Result], None]
) -> list[Result]:
    # As Ctrl-C, which is ignored in the background of a script: the steps are cancelled, and end what they started.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.monotonic()
    results: dict[int, Result] = {}
    running: dict[int, Step] = {}
    places = asyncio.Semaphore(at_a_time)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    async def run(number: int) -> None:
        async with places:
            step = running[number] = steps[number]
            say(f"{step.name}: begins")
            result = results[number] = await step.run(logs)
            del running[number]
            bad = len(result.troubles) + len(result.failed)
            say(f"{step.name}: {result.passed} passed, {bad} failed, {result.seconds:.0f} s")
            if not result.troubles:
                done(result)

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if running:
                say("; ".join(f"{step.name}: {step.progress}" for step in running.values()))

    telling = asyncio.create_task(tell())
    for number, step in enumerate(steps):
        if step.alone:
            await run(number)
    await asyncio.gather(*(run(number) for number, step in enumerate(steps) if not step.alone))
    telling.cancel()

    ordered = [results[number] for number in range(len(steps))]
    for result in ordered:
        if result.troubles:
            await _repeat(result, ordered, logs, say)
            done(result)
    return ordered


async def _repeat(result: Result, results: Sequence[Result], logs: Path, say: Callable[[str], None]) -> None:
    """Sort a result's troubles into those that repeat and those that do not."""
    for number, trouble in enumerate(result.troubles):
        folder = logs / "again" / f"{results.index(result)}-{number}"
        if sum(len(each.failed) for each in results) >= ENOUGH_FAILURES:
            result.failed.append(trouble)
            continue
        failure = trouble if trouble.is_final else await _again(trouble, folder, say)
        if failure is None:
            result.unsteady.append(trouble)
            once = f"{trouble.what} once, and passed {REPEATS} times"
            say(f"UNSTEADY {result.name}: {trouble.name} {once}\n{trouble.output}")
        else:
            result.failed.append(failure)
            say(f"FAILED {result.name}: {failure.name} {failure.what}\n{tail(failure.output, 150)}")
    result.troubles.clear()


async def _again(trouble: Trouble, logs: Path, say: Callable[[str], None]) -> Trouble | None:
    """What came of it when it was repeated, if it did not pass each time."""
    assert trouble.again
    for turn in range(1, REPEATS + 1):
        say(f"again, {turn} of {REPEATS}: {trouble.name}")
        folder = logs / str(turn)
        folder.mkdir(parents=True, exist_ok=True)
        result = await trouble.again.run(folder)
        if result.troubles or not result.passed + result.skipped:
            again = (
                result.troubles[0] if result.troubles else Trouble(trouble.name, "failed", "it did not run")
            )
            return Trouble(trouble.name, again.what, again.output)
    return None


# ---- What is printed ---------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """The results as a table, what was unsteady or failed, and a line of sums."""
    rows = [COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for kind in ("unsteady", "failed"):
        for result in results:
            for trouble in getattr(result, kind):
                lines.append(f"{kind}: {result.name}: {trouble.name} ({trouble.what})")
    for result in results:
        lines += [f"skipped: {result.name}: {count} because: {why}" for why, count in result.reasons.items()]
    passed, failed, skipped = (
        sum(count(result) for result in results)
        for count in (lambda r: r.passed + len(r.unsteady), lambda r: len(r.failed), lambda r: r.skipped)
    )
    lines += ["", f"{passed} passed, {failed} failed, {skipped} skipped"]
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, ...]:
    counts = (result.passed, len(result.failed), len(result.unsteady), result.skipped)
    return (result.name, *map(str, counts), f"{result.seconds:.0f}")
