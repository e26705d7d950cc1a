"""docs/developers/features.md names an API that exists, features.toml tests that exist, and no row says nothing."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rdmanet import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "developers" / "features.md").read_text()
TESTS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "features.toml").read_text())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# (what, API, row) of all tables that have these columns.
ROWS = [
    row for row in map(cells, re.findall(r"^\|.*", PAGE, re.MULTILINE)) if re.match(r"[A-Z]+-\w+$", row[-1])
]
CALLED = {row[-1]: row for row in ROWS}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- Tests -------------------------------------------------------------------------------------------


@functools.cache
def names_in(file: str) -> set[str]:
    """Functions of a module that pytest collects."""
    return {
        node.name
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", TESTS)
def test_its_tests_exist(row):
    assert row in CALLED and TESTS[row], f"the page has no row {row}, or it has no tests"
    for test in TESTS[row]:
        file, _, name = test.partition("::")
        assert name in names_in(file), test


# ---- API ---------------------------------------------------------------------------------------------


def resolve(path: str) -> Any:
    """What `rdmanet.path` is: an attribute, a module, or a field of a record."""
    found: Any = importlib.import_module("rdmanet")
    for name in path.split("."):
        if dataclasses.is_dataclass(found) and name in {field.name for field in dataclasses.fields(found)}:
            return None
        if not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def exists(name: str) -> None:
    """Fail unless this is a command, an environment variable, a target, an extra, a file or a name of the package."""
    if match := re.fullmatch(r"rdmanet ([\w-]+)", name):
        module = Path(cli.__file__).parent / match[1].replace("-", "_")
        assert module.with_suffix(".py").exists() or (module / "__init__.py").exists()
    elif match := re.fullmatch(r"make ([\w-]+)", name):
        assert re.search(rf"^{match[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif re.fullmatch(r"RDMANET_\w+", name):
        assert f"`{name}=" in (ROOT / "docs" / "environment.md").read_text()
    elif match := re.fullmatch(r"rdmanet\[(\w+)\]", name):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert match[1] in project["optional-dependencies"]
    elif "/" in name:
        assert (ROOT / name).exists()
    elif match := re.fullmatch(r"([\w.]+)\((\w+)=\)", name):
        assert match[2] in inspect.signature(resolve(match[1])).parameters
    elif re.fullmatch(r"[\w.]+", name) and not name.startswith(("asyncio.", "loop.", "__")):
        resolve(name)


@pytest.mark.parametrize("row", CALLED)
def test_its_names_exist(row):
    for name in quoted(CALLED[row][1]):
        exists(name)


@pytest.mark.parametrize(
    "wrong",
    [
        "verbs.QP.no_such",
        "no_such",
        "create_rdma_connection(no_such=)",
        "rdmanet/no_such.c",
        "rdmanet no-such",
        "make no-such",
        "RDMANET_NO_SUCH",
        "rdmanet[no_such]",
    ],
)
def test_the_check_sees(wrong):
    with pytest.raises((AssertionError, AttributeError, ImportError)):
        exists(wrong)


# ---- Rows --------------------------------------------------------------------------------------------


def test_no_row_says_nothing():
    """Each has a test, or says that there is none, or why."""
    assert len(CALLED) == len(ROWS), "two rows of one name"
    for row in ROWS:
        assert len(row) == 3, row
        assert row[0] and row[1], row
        assert row[2] in TESTS or re.search(r"all of this page|`make ", row[1]), row[2]
