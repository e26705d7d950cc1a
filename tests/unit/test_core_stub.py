"""What _core.pyi promises is there: every name, and every number of every enumeration."""

import ast
import enum
from pathlib import Path

import pytest

from rdmanet import _core

STUB = ast.parse((Path(__file__).parents[2] / "rdmanet/_core.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("declared", CLASSES, ids=lambda node: node.name)
def test_class(declared: ast.ClassDef) -> None:
    found = getattr(_core, declared.name)
    assert isinstance(found, type)
    values = {
        target.id: ast.literal_eval(node.value)
        for node in declared.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if issubclass(found, enum.Enum):
        assert values == {member.name: member.value for member in found.__members__.values()}
    fields = getattr(found, "__dataclass_fields__", {})
    for node in declared.body:
        if isinstance(node, ast.FunctionDef) and node.name != "__buffer__":  # a slot before Python 3.12
            assert hasattr(found, node.name), node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.target.id in fields or hasattr(found, node.target.id), node.target.id


def test_functions() -> None:
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(_core, node.name))


def test_records_have_the_declared_fields() -> None:
    for declared in CLASSES:
        fields = getattr(getattr(_core, declared.name), "__dataclass_fields__", None)
        if fields is not None:
            names = [
                node.target.id
                for node in declared.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            ]
            inherited = getattr(getattr(_core, declared.name).__base__, "__dataclass_fields__", {})
            assert [*inherited, *names] == list(fields), declared.name
