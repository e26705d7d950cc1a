"""docs/rules.md names tests that exist, and every test of a rule has its row."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERBS = ROOT / "tests" / "verbs"
PAGE = (ROOT / "docs" / "rules.md").read_text()


@functools.cache
def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named() -> set[tuple[str, str]]:
    """(file, test) as the rows name them: `file::test`, and further tests of the same file behind it."""
    found = set()
    for row in re.findall(r"^\|.*", PAGE, re.MULTILINE):
        file = ""
        for name in re.findall(r"`((?:\w+::)?test_\w+)`", row):
            if "::" in name:
                file, _, name = name.partition("::")
            assert file, row
            rules = VERBS / f"test_rules_{file}.py"
            path = rules if rules.exists() else VERBS / f"test_{file}.py"
            # `errors` and `states` have no test_rules_ file; a name may be of either where both exist.
            if rules.exists() and name not in names_in(rules):
                path = VERBS / f"test_{file}.py"
            found.add((path.name, name))
    return found


def test_the_page_names_what_exists() -> None:
    for file, name in sorted(named()):
        assert name in names_in(VERBS / file), f"docs/rules.md: {file}::{name}"


def test_every_rule_has_its_row() -> None:
    rows = named()
    missing = [
        f"{path.name}::{name}"
        for path in sorted(VERBS.glob("test_rules_*.py"))
        for name in sorted(names_in(path))
        if (path.name, name) not in rows
    ]
    assert not missing
