# SPDX-License-Identifier: Apache-2.0
"""What a step is: something that is run, counts its tests, and can run one of them again alone.

    Pytest     a run of pytest, in one process or several that share the files of tests
    Command    any other command; what it says tells which of its parts failed

A step never raises for what goes wrong in it: that is `Trouble` in its `Result`.

A process of pytest that hangs or crashes takes only one test along. Its file of events (tests/support/recording.py)
says which; a new process runs those that have not run.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]

# A sanitizer's report, or a crash of an interpreter, wherever it was printed. That is never luck.
CRASH = re.compile(
    r"==\d+==\s?ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|^\S+:\d+:\d+: runtime error: "
    r"|Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)",
    re.MULTILINE,
)
HUNG = re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!\n")  # faulthandler's first line, behind pytest's dots
SIGNALS_OF_A_CRASH = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
STATUSES = (0, 1, 2, 5)  # of pytest: passed, failed, not all collected, none chosen
MOST_RESTARTS = 5
PR_SET_PDEATHSIG = 1
GRACE_S = 10  # for a process that was told to say where it is


@dataclass(frozen=True)
class Trouble:
    """A test, or part of a step, that did not pass."""

    name: str
    what: str  # failed, hung, crashed, out of time
    output: str
    again: "Step | None" = None  # what repeats it; None: nothing to repeat

    @property
    def is_final(self) -> bool:
        """A crash is never repeated away."""
        return self.again is None or self.what not in ("failed", "hung")


@dataclass
class Result:
    """What a step came to. `unsteady` names tests that failed once, and passed whenever they were repeated."""

    name: str
    passed: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why tests were skipped, and how many for each
    left_out: int = 0
    seconds: float = 0
    troubles: list[Trouble] = field(default_factory=list)
    failed: list[Trouble] = field(default_factory=list)  # troubles that repeated
    unsteady: list[Trouble] = field(default_factory=list)


class Step(Protocol):
    """Something that is run by `run_steps`."""

    @property
    def name(self) -> str: ...

    @property
    def alone(self) -> bool:
        """Nothing else runs beside it."""
        ...

    @property
    def progress(self) -> str: ...

    async def run(self, logs: Path) -> Result: ...


# ---- Processes --------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a process ended: its status is None if it was ended for being out of time."""

    status: int | None
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


async def run_process(
    command: Sequence[str],
    log: Path,
    *,
    limit: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    shows: bool = False,
) -> Ended:
    """Run a command in a session of its own, with its output in `log`; nothing of that session is left when it ends."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if shows else output,
            stderr=asyncio.subprocess.STDOUT if shows else output,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        showing = asyncio.create_task(show(process.stdout, output)) if process.stdout else None
        try:
            async with asyncio.timeout(limit):
                status: int | None = await process.wait()
        except TimeoutError:
            status = None
            signal_session(process.pid, signal.SIGABRT)  # faulthandler says where it was
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
        finally:
            signal_session(process.pid, signal.SIGKILL)
            await process.wait()
        if showing:
            await showing
    return Ended(status, log)


def end_with_parent() -> None:
    """A run that is inside another one, and is killed with it, leaves no worker behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def show(stream: asyncio.StreamReader, output: object) -> None:
    async for line in stream:
        output.write(line)  # type: ignore[attr-defined]
        sys.stdout.buffer.write(line)
        sys.stdout.flush()


def signal_session(leader: int, number: int) -> None:
    """A session's processes are one process group, unless they made others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


# ---- pytest -----------------------------------------------------------------------------------------------


@dataclass
class Pytest:
    """A run of pytest: `options` choose how, `paths` and `marks` choose what."""

    name: str
    paths: Sequence[str] = ()
    marks: str = ""
    options: Sequence[str] = ()
    prefix: Sequence[str] = ()  # of the command: a script that runs it elsewhere, or otherwise
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    root: Path = ROOT
    workers: int = 1
    limit: float = 1500
    alone: bool = False
    _seen: "list[Events]" = field(default_factory=list)

    @property
    def progress(self) -> str:
        ended, bad = sum(len(events.ended) for events in self._seen), sum(len(e.bad) for e in self._seen)
        of = max((events.collected for events in self._seen), default=0)
        return f"{ended:,} of {of:,}{f', {bad} failed' if bad else ''}" if of else "collecting"

    async def run(self, logs: Path) -> Result:
        began = time.monotonic()
        folder = logs / self.name.replace(" ", "-").replace("/", "-")
        (folder / "claims").mkdir(parents=True, exist_ok=True)
        result = Result(self.name)
        self._seen.clear()
        await asyncio.gather(*(self._work(number, folder, began, result) for number in range(self.workers)))
        result.passed = sum(list(events.ended.values()).count("passed") for events in self._seen)
        for events in self._seen:
            result.reasons.update(events.skipped)
        result.skipped = result.reasons.total()
        result.left_out = max((events.deselected for events in self._seen), default=0)
        result.seconds = time.monotonic() - began
        return result

    def repeating(self, test: str) -> "Pytest":
        """This test alone, as it is run here."""
        return Pytest(
            f"{self.name}, {test}",
            (test,),
            options=self.options,
            prefix=self.prefix,
            environment=self.environment,
            python=self.python,
            root=self.root,
            limit=600,
        )

    def command(self, *more: str) -> list[str]:
        marks = ["-m", self.marks] if self.marks else []
        pytest = [self.python, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-q"]
        return [*self.prefix, *pytest, *self.options, *marks, *more, *self.paths]

    async def _work(self, number: int, folder: Path, began: float, result: Result) -> None:
        """One worker: as many processes, one after the other, as it takes to run what it takes."""
        done: set[str] = set()
        for turn in range(MOST_RESTARTS + 1):
            at = folder / f"{number}-{turn}"
            without = at.with_suffix(".without")
            without.write_text("\n".join(done))
            events = Events(at.with_suffix(".events"), self)
            self._seen.append(events)
            more = [f"--events={events.path}", f"--without={without}"]
            if self.workers > 1:
                more.append(f"--claims={folder / 'claims'}")
            watching = asyncio.create_task(events.follow())
            ended = await run_process(
                self.command(*more),
                at.with_suffix(".log"),
                limit=max(1, self.limit - (time.monotonic() - began)),
                environment={
                    "SUITES_WORKER": str(number),
                    "PYTHONPATH": str(self.root),
                    **self.environment,
                },
                cwd=self.root,
            )
            watching.cancel()
            events.read()
            known = {
                trouble.name for trouble in result.troubles
            }  # what can't be collected, each worker tells
            result.troubles += [
                Trouble(test, "crashed" if CRASH.search(text) else "failed", text, self.repeating(test))
                for test, text in events.bad.items()
                if test not in known
            ]
            done |= events.ended.keys()
            if ended.status is None:
                where = f"not done within {self.limit:.0f} s; it was at {events.running or 'no test'}"
                result.troubles.append(Trouble(self.name, "out of time", f"{where}\n{tail(ended.output)}"))
                return
            if events.finished is not None:
                if ended.status != events.finished or ended.status not in STATUSES:
                    what = f"its tests are done, but pytest exited with {ended.status}"
                    result.troubles.append(Trouble(self.name, "crashed", f"{what}\n{tail(ended.output)}"))
                return
            if not events.running:
                what = f"pytest exited with {ended.status} between tests"
                result.troubles.append(Trouble(self.name, "crashed", f"{what}\n{tail(ended.output)}"))
                return
            done.add(events.running)
            hung = HUNG.search(ended.output)
            how = "hung" if hung else "crashed"
            text = f"pytest exited with {ended.status}\n{tail(ended.output, 200)}"
            result.troubles.append(Trouble(events.running, how, text, self.repeating(events.running)))
        what = f"{MOST_RESTARTS + 1} processes hung or crashed; the rest was not run"
        result.troubles.append(Trouble(self.name, "crashed", what))


class Events:
    """What a process of pytest has written down so far. A failure is shown when it is read."""

    def __init__(self, path: Path, step: Pytest) -> None:
        self.path = path
        self.step = step
        self.collected = 0
        self.deselected = 0
        self.running = ""
        self.finished: int | None = None
        self.ended: dict[str, str] = {}
        self.bad: dict[str, str] = {}
        self.skipped: list[str] = []  # the reasons
        self.took: dict[str, float] = {}
        self._rest = b""
        self._at = 0

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.read()

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: dict[str, object]) -> None:
        match event:
            case {"collected": int(collected), "deselected": int(deselected)}:
                self.collected, self.deselected = collected, deselected
            case {"began": str(test)}:
                self.running = test
            case {"ended": str(test), "outcome": str(outcome), "text": str(text), "seconds": seconds}:
                self.running = ""
                self.ended[test] = outcome
                self.took[test] = float(str(seconds))
                if outcome == "failed":
                    self.bad[test] = text
                    print(f"\n{self.step.name}: FAILED {test}\n{tail(text, 60)}", flush=True)
                elif outcome == "skipped":
                    self.skipped.append(text)
            case {"finished": int(status)}:
                self.finished = status


def tail(text: str, lines: int = 60) -> str:
    kept = text.rstrip().split("\n")
    return "\n".join(kept if len(kept) <= lines else ["…", *kept[-lines:]])


# ---- other commands ----------------------------------------------------------------------------------------


@dataclass
class Command:
    """Any command. It passes or fails as one, unless `parts` finds in its output what passed and what failed.

    A command that runs steps itself (`make test`) leaves its Result where the variable SUITES_RESULT says, and has
    repeated already what failed.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT
    limit: float = 900
    alone: bool = False
    parts: "Callable[[str], Parts] | None" = None
    repeat: Callable[[str], Sequence[str]] | None = None  # the command that runs one part again
    nested: bool = False
    progress: str = "running"

    async def run(self, logs: Path) -> Result:
        began = time.monotonic()
        name = re.sub(r"\W+", "-", self.name)
        report = logs / f"{name}.json"
        ended = await run_process(
            self.command,
            logs / f"{name}.log",
            limit=self.limit,
            environment={**self.environment, **({"SUITES_RESULT": str(report)} if self.nested else {})},
            cwd=self.root,
            shows=self.nested,
        )
        result = Result(self.name)
        if self.nested and report.exists():
            result = result_from(json.loads(report.read_text()), self.name)
        elif self.parts and (parts := self.parts(ended.output)).passed | parts.failed.keys():
            result.passed, result.skipped = len(parts.passed), parts.skipped
            result.troubles += [self._part(part, text) for part, text in parts.failed.items()]
        else:
            result.passed = int(ended.status == 0)
        if ended.status is None:
            where = f"not done within {self.limit:.0f} s\n{tail(ended.output)}"
            result.troubles.append(Trouble(self.name, "out of time", where))
        elif ended.status and not result.troubles and not result.failed:
            result.troubles.append(self._whole(ended))
        result.seconds = time.monotonic() - began
        return result

    def _part(self, part: str, text: str) -> Trouble:
        assert self.repeat is not None
        again = Command(
            f"{self.name}, {part}", self.repeat(part), self.environment, self.root, min(self.limit, 600)
        )
        return Trouble(part, "crashed" if CRASH.search(text) else "failed", text, again)

    def _whole(self, ended: Ended) -> Trouble:
        text = f"exited with {ended.status}\n{tail(ended.output, 100)}"
        crashed = CRASH.search(ended.output) or -(ended.status or 0) in SIGNALS_OF_A_CRASH
        again = Command(self.name, self.command, self.environment, self.root, self.limit)
        return Trouble(self.name, "crashed" if crashed else "failed", text, None if self.nested else again)


@dataclass
class Parts:
    """What a command's output says of its parts."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # and what each printed
    skipped: int = 0


def result_to(result: Result) -> dict[str, object]:
    """As JSON has it. Troubles that were repeated are in `failed` and `unsteady`."""
    return {
        "step": result.name,
        "passed": result.passed,
        "skipped": result.skipped,
        "reasons": result.reasons,
        "left_out": result.left_out,
        "seconds": round(result.seconds, 1),
        "failed": [plain(trouble) for trouble in result.failed],
        "unsteady": [plain(trouble) for trouble in result.unsteady],
    }


def plain(trouble: Trouble) -> dict[str, str]:
    return {"name": trouble.name, "what": trouble.what, "output": trouble.output}


def result_from(stored: dict[str, object], name: str) -> Result:
    def troubles(of: str) -> Iterator[Trouble]:
        for each in stored[of]:  # type: ignore[attr-defined]
            yield Trouble(each["name"], each["what"], each["output"])

    def number(of: str) -> float:
        return float(str(stored[of]))

    return Result(
        name,
        int(number("passed")),
        int(number("skipped")),
        Counter(stored["reasons"]),  # type: ignore[call-overload]
        int(number("left_out")),
        number("seconds"),
        failed=[*troubles("failed")],
        unsteady=[*troubles("unsteady")],
    )
