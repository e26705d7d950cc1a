"""docs/howto/logs.md has each line that is logged at INFO or above, under its logger and with its level."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rdmanet"
PAGE = (ROOT / "docs/howto/logs.md").read_text()
LEVELS = {"info": "INFO", "warning": "WARNING", "warn": "WARNING", "_warn": "WARNING"}
LEVELS |= {"error": "ERROR", "exception": "ERROR"}


def literals(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The level and the text of each call that logs a text of its own."""
    texts = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (level := level_of(node.func)):
            argument = node.args[2 if ast.unparse(node.func) == "log_rate.warn" else 0]
            text = argument.value if isinstance(argument, ast.Constant) else texts.get(ast.unparse(argument))
            if isinstance(text, str) and re.sub("%[a-z]", "", text).strip():
                yield level, text


def level_of(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return LEVELS.get(function.attr) if function.value.id in ("logger", "log_rate") else None
    return LEVELS.get(function.id) if isinstance(function, ast.Name) else None


def logged() -> Iterator[tuple[str, str, str]]:
    """The logger, the level and the text of each line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0]
        if part != "cli" and "logger" in (text := path.read_text()):
            name = f"rdmanet.{part}" if part in ("rpc", "tensors", "frameworks") else "rdmanet"
            for level, line in literals(ast.parse(text)):
                yield name, level, line
    for path in sorted(PACKAGE.rglob("*.pxi")):
        for level, line in re.findall(r"\blogger\.(\w+)\(\"([^\"]* [^\"]*)\"", path.read_text()):
            if level in LEVELS:
                yield "rdmanet", LEVELS[level], line


LINES = sorted(set(logged()))


def test_it_finds_what_is_logged():
    assert len(LINES) > 35
    assert ("rdmanet.rpc", "WARNING", "the connection with %s is ended: %s") in LINES


@pytest.mark.parametrize(("name", "level", "line"), LINES)
def test_each_line_is_on_the_page(name, level, line):
    [section] = re.findall(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    fixed = [re.escape(part) for part in re.split(r"%[a-z]", line)]
    if line.endswith("%s") and not line.endswith(": %s"):
        fixed.pop()  # the end of the line, which may be empty
    wanted = re.compile(r"[\w -]+".join(fixed).rstrip())
    rows = [row for row in section.splitlines() if any(map(wanted.fullmatch, re.findall("`([^`]+)`", row)))]
    assert any(f"| {level} |" in row or f"{level} " in row for row in rows), f"{line} is not there as {level}"
