"""attacks.toml: each attack of it has tests, and controls that try it without the guard."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ATTACKS: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "attacks.toml").read_text())
CONTROL = "[control]"


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    found = ast.parse((ROOT / file).read_text()).body
    return {node.name: node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@functools.cache
def marks_in(file: str) -> dict[str, str]:
    """What is assigned in a module, by name: marks, for one."""
    found = ast.parse((ROOT / file).read_text()).body
    assigned = [node for node in found if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assigned}


def is_control(name: str) -> bool:
    """Whether a test has a variant without the guard, or says that it is one."""
    file, _, test = name.partition("::")
    node = functions_of(file)[test.removesuffix(CONTROL)]
    if not test.endswith(CONTROL):
        return (ast.get_docstring(node) or "").startswith("The control")
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    marks += [marks_in(file).get(mark, "") for mark in marks]
    return any(each.arg == "guarded" for each in node.args.args) or any("'control'" in mark for mark in marks)


@pytest.mark.parametrize("attack", ATTACKS)
def test_its_tests_and_controls_exist(attack: str) -> None:
    tests, controls = ATTACKS[attack]["tests"], ATTACKS[attack]["controls"]
    assert tests and controls
    for name in tests + controls:
        file, _, test = name.partition("::")
        assert test.startswith("test_") and test.removesuffix(CONTROL) in functions_of(file), name
    for name in controls:
        assert is_control(name), name
    assert not any(name.endswith(CONTROL) for name in tests)


def test_what_is_no_control() -> None:
    """A test that has no variant without a guard, one that does not say so, and one that is not there."""
    assert not is_control("tests/security/test_opcodes.py::test_less_than_a_header[control]")
    assert not is_control("tests/security/test_opcodes.py::test_less_than_a_header")
    with pytest.raises(KeyError):
        is_control("tests/security/test_opcodes.py::test_nothing[control]")
