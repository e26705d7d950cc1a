"""The pages have the figures of docs/figures.json, and no others."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.chart import FABRICS, FRONT, GROUPS
from benchmarks.figures import KEPT, PLAN, README, caption, kept, pages, record_of
from rdmanet.cli.perf.options import add_arguments
from rdmanet.cli.perf.plan import lines_of
from rdmanet.cli.perf.results import Result

RECORD = json.loads(KEPT.read_text())
PAGES = pages(RECORD)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_as_its_figures_make_it(page: Path) -> None:
    assert page.read_text() == PAGES[page], "`python -m benchmarks.figures` makes it anew"


def _doubled(part: Any) -> Any:
    """With each median twice as long."""
    if isinstance(part, list):
        return [_doubled(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {name: 2 * value if name == "p50_us" else _doubled(value) for name, value in part.items()}


def test_other_figures_make_other_pages() -> None:
    others = pages(_doubled(RECORD))
    assert [page.name for page in PAGES if others[page] != PAGES[page]] == [
        "README.md",
        "performance.md",
        "front.svg",
        "performance.svg",
    ]


def test_how_many_turns_there_were() -> None:
    assert caption(record_of(RECORD) | {"repetitions": 1}).endswith(": one turn.")
    assert caption(record_of(RECORD) | {"repetitions": 5}).endswith(": medians of 5 turns.")


def _planned() -> set[tuple[str, str, str]]:
    """Case, variant and interface of all that the plan measures."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    _, lines = lines_of(parser.parse_args(["--plan", str(PLAN)]))
    results = [
        Result(run.kind, run.size, 1, 1.0, 1.0, 1.0, settings=run.settings)
        for line in lines
        for run in line.runs
    ]
    report = {
        "machine": {"loop": "uvloop 1", "date": "2026-01-01T00:00:00+0000"},
        "results": [msgspec.to_builtins(result) for result in results],
    }
    return {(run["case"], run["variant"], run["api"]) for run in record_of(report)["runs"]}


def test_the_plan_measures_what_the_pages_show() -> None:
    shown = {
        (group.case, f"uvloop {over}", group.api) for group in (*README, *GROUPS, *FRONT) for over in FABRICS
    }
    assert shown <= _planned()


def test_nothing_that_a_page_needs_is_lost() -> None:
    """What is kept of a record is kept of itself, too."""
    assert kept(RECORD) == RECORD
