"""A pytest plugin for scripts/suites: it writes down what happens, and shares the tests out among processes.

    --events FILE     one JSON object a line: what was collected; each test when it begins, and how it ended; the end
    --without FILE    leave out the tests whose ids are in this file, one a line: those that have run already
    --claims FOLDER   take only files of tests that no other process with the same folder has taken

A process that is killed, or hangs, leaves a file of events without an end: its last test that began and did not end is
the one that did it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites", "running under scripts/suites")
    group.addoption(
        "--events", type=Path, metavar="FILE", help="append what happens to this file, as JSON lines"
    )
    group.addoption(
        "--without", type=Path, metavar="FILE", help="leave out the tests whose ids are in this file"
    )
    group.addoption(
        "--claims", type=Path, metavar="FOLDER", help="share the files of tests with other processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if events := config.getoption("--events"):
        config.pluginmanager.register(Recorder(events))
    if claims := config.getoption("--claims"):
        config.pluginmanager.register(Sharer(claims))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (without := config.getoption("--without")) and without.exists():
        done = set(without.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]


class Recorder:
    """Writes events. Each is one write() to a file that is open for appending, so none is lost by a crash."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.process = os.getpid()
        self.deselected = 0
        self.outcome: dict[str, Any] = {}

    def write(self, **event: object) -> None:
        if os.getpid() == self.process:  # and not in a child that a test has forked
            os.write(self.fd, json.dumps(event).encode() + b"\n")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=len(session.items), deselected=self.deselected)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(began=report.nodeid)
            self.write(ended=report.nodeid, outcome="failed", seconds=0, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome = {"ended": nodeid, "outcome": "passed", "seconds": 0.0, "text": ""}
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome["seconds"] += report.duration
        if report.failed:
            self.outcome["outcome"] = "failed"
            captured = [f"---- {name} ----\n{text}" for name, text in report.sections]
            head = f"---- {report.nodeid}, {report.when} ----"
            self.outcome["text"] += "\n".join([head, report.longreprtext, *captured, ""])
        elif report.skipped and self.outcome["outcome"] == "passed":
            self.outcome["outcome"] = "skipped"
            self.outcome["text"] = why_skipped(report)

    def pytest_runtest_logfinish(self) -> None:
        self.write(**self.outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(finished=int(exitstatus))


def why_skipped(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


class Sharer:
    """Runs the files of tests that this process is the first to take, each in a file named for it."""

    def __init__(self, claims: Path) -> None:
        self.claims = claims
        self.name = os.environ.get("SUITES_WORKER", str(os.getpid()))

    def claim(self, file: str) -> bool:
        """The process that takes the place of one that died has its name, and so its files."""
        path = self.claims / file.replace("/", "%")
        try:
            with path.open("x") as claim:
                claim.write(self.name)
        except FileExistsError:
            return path.read_text() == self.name
        return True

    def mine(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for file, group in groupby(items, lambda item: item.nodeid.partition("::")[0]):
            if self.claim(file):
                yield from group

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """pytest's own, but for the choice: a test's teardown must know which test is really next."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        for item, following in with_next(self.mine(session.items)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return True


def with_next(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    iterator = iter(items)
    item = next(iterator, None)
    while item is not None:
        following = next(iterator, None)
        yield item, following
        item = following
