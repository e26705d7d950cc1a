"""The pages have the figures of docs/figures.json, and no others."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import KEPT, kept, pages

RECORD = json.loads(KEPT.read_text())
PAGES = pages(RECORD)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_as_its_figures_make_it(page: Path) -> None:
    assert page.read_text() == PAGES[page], "`python -m benchmarks.figures` makes it anew"


def test_other_figures_make_other_pages() -> None:
    runs = [run | {"p50_us": 2 * run["p50_us"]} if "p50_us" in run else run for run in RECORD["runs"]]
    others = pages(RECORD | {"runs": runs})
    assert [page.name for page in PAGES if others[page] != PAGES[page]] == [
        "README.md",
        "performance.md",
        "front.svg",
        "performance.svg",
    ]


def test_nothing_that_a_page_needs_is_lost() -> None:
    """What is kept of a record is kept of itself, too."""
    assert kept(RECORD) == RECORD
