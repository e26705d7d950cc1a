"""docs/security.md names tests that exist, and each test of an attack is named there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TESTS = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")}
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)`", PAGE)))
OF_THE_STAGE = {"test_stage.py"}


@pytest.mark.parametrize("name", NAMED)
def test_what_it_names_exists(name: str) -> None:
    assert name in TESTS


def test_it_names_all() -> None:
    assert TESTS - OF_THE_STAGE <= set(NAMED)


def test_each_neighbour_has_a_test() -> None:
    """But for who is on the path, from whom nothing is kept."""
    rows = [row for row in re.findall(r"^\| \*\*.*", PAGE, re.MULTILINE) if "on the path" not in row]
    assert len(rows) == 7
    for row in rows:
        assert re.search(r"`(tests/\w+/)?test_", row), row
