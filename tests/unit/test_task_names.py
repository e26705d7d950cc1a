"""Our tasks have names that say what they do: `python -m asyncio ps` of Python 3.14 shows them."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rdmanet"
WITHOUT = {"streams/trio_loop.py"}  # a task for each call of a program of Trio's, which has no such list


def unnamed(source: str) -> list[int]:
    """The lines that make a task without a name. `ensure_future` cannot give one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("create_task", "ensure_future")
        and not any(keyword.arg == "name" for keyword in node.keywords)
    ]


def test_each_task_has_a_name():
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert sum(text.count(".create_task(") for text in files.values()) > 10  # it sees them
    assert {
        name: lines for name, text in files.items() if name not in WITHOUT and (lines := unnamed(text))
    } == {}


def test_the_check_sees():
    assert unnamed("loop.create_task(work())\nasyncio.ensure_future(work())") == [1, 2]
    assert unnamed("loop.create_task(work(), name='work')") == []
