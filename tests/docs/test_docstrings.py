"""Everything public says what it is, what it raises, and, where it is awaited, what cancelling it does."""

import ast
import dataclasses
import enum
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rdmanet
from rdmanet import cm, errors, rpc, tensors, testing, verbs, verbs_async
from rdmanet.base import notifier
from rdmanet.tensors import blocking

ROOT = Path(__file__).parents[2]
MODULES = (rdmanet, verbs, cm, verbs_async, notifier, errors, rpc, tensors, blocking, testing)


def public_names(module: Any) -> list[str]:
    return getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]


def ours(thing: Any) -> bool:
    return callable(thing) and str(getattr(thing, "__module__", "")).startswith("rdmanet")


THINGS = {
    f"{thing.__module__}.{thing.__qualname__}": thing
    for module in MODULES
    for name in public_names(module)
    if ours(thing := getattr(module, name))
}
CLASSES = {name: thing for name, thing in THINGS.items() if isinstance(thing, type)}


def said(thing: Any) -> str:
    """A docstring, without the signature that Cython writes in front."""
    doc = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return re.sub(r"\A[\w.]+\(.*\)( -> .*)?$", "", doc, count=1, flags=re.MULTILINE).strip()


def fields(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(kind.__struct_fields__) if issubclass(kind, msgspec.Struct) else set()


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class has that is public, and is ours, and not one of an enumeration's values."""
    for name in dir(kind):
        base = next((base for base in kind.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and base.__module__.startswith("rdmanet"):
            thing = vars(base)[name]
            if not (issubclass(kind, enum.Enum) and isinstance(thing, kind)):
                yield name, thing


@pytest.mark.parametrize("name", THINGS)
def test_it_says_what_it_is(name: str) -> None:
    thing = THINGS[name]
    assert said(thing), "says nothing"
    if isinstance(thing, type):
        silent = []
        of_the_class = "\n".join(map(said, thing.__mro__))
        for member, what in members(thing):
            # What is a field of a struct of C has its manual page.
            if member in fields(thing) and "struct ibv_" in of_the_class:
                continue
            of_its_own = "" if member in fields(thing) else said(what)
            if not of_its_own and not re.search(rf":(ivar|param) {member}:", of_the_class):
                silent.append(member)
        assert silent == []


# ---- The stubs ----------------------------------------------------------------------------------------

COMPILED = sorted(thing.__name__ for thing in THINGS.values() if thing.__module__ == "rdmanet._core")


def stubs(body: list[ast.stmt], of: str = "") -> Iterator[tuple[str, str]]:
    """(name, docstring) of the functions and classes of a stub that have a docstring."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if doc := ast.get_docstring(node):
                yield f"{of}{node.name}", doc
            if isinstance(node, ast.ClassDef):
                yield from stubs(node.body, f"{of}{node.name}.")


STUBS = dict(stubs(ast.parse(runpy.run_path(str(ROOT / "scripts/document-stub"))["stub"]()).body))


@pytest.mark.parametrize("name", COMPILED)
def test_its_stub_says_the_same(name: str) -> None:
    """Readers of a wheel's stub, as editors show it, and of help() read the same sentences."""
    thing = getattr(rdmanet._core, name)
    there = {name: said(thing)}
    if isinstance(thing, type):
        for member, what in members(thing):
            if member in vars(thing) and member not in fields(thing) and what is not None:
                there[f"{name}.{member}"] = said(what)
    # An attribute without code has no docstring of its own when compiled; its class describes it.
    assert {of: text for of, text in there.items() if text and STUBS.get(of) != text} == {}


# ---- What is awaited ----------------------------------------------------------------------------------


def awaited(thing: Any) -> bool:
    return inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(inspect.unwrap(thing))


AWAITED = {
    f"{name}.{member}".rstrip("."): f"{said(what)}\n{said(thing)}"
    for name, thing in THINGS.items()
    for member, what in [("", thing), *(members(thing) if isinstance(thing, type) else ())]
    if callable(what) and awaited(what)
}


@pytest.mark.parametrize("name", AWAITED)
def test_it_says_what_cancelling_does(name: str) -> None:
    assert re.search("cancel", AWAITED[name], re.IGNORECASE)


# ---- What raises --------------------------------------------------------------------------------------

# Compiled code has no syntax tree here; its source is Python enough to be read by its indentation.
SOURCES = sorted(
    path
    for part in ("*.py", "streams/*.py", "verbs_async/*.py", "_pyx/*.pxi")
    for path in (ROOT / "rdmanet").glob(part)
)
DEFINED = re.compile(
    r"^(?P<indent> *)(?:(?:cdef )?class (?P<kind>\w+)|(?:async )?def (?P<name>\w+)\()", re.MULTILINE
)


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of all that are public, and of public classes; a text ends where it is indented less."""
    kind = ""
    for found in DEFINED.finditer(source):
        if found["kind"]:
            kind = found["kind"] if not found["indent"] else kind
            continue
        of = kind if found["indent"] else ""
        if len(found["indent"]) > 4 or found["name"].startswith("_") or (of and of not in PUBLIC_CLASSES):
            continue
        end = re.compile(rf"^ {{0,{len(found['indent'])}}}[^\s)]", re.MULTILINE).search(source, found.end())
        yield f"{of}.{found['name']}".lstrip("."), source[found.start() : end.start() if end else None]


PUBLIC_CLASSES = {kind.__name__ for kind in CLASSES.values()}
PUBLIC_FUNCTIONS = {thing.__name__ for thing in THINGS.values()}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_says_what_it_raises(path: Path) -> None:
    silent = []
    for name, text in functions(path.read_text()):
        if "." not in name and name not in PUBLIC_FUNCTIONS:
            continue
        doc = (re.search(r'"""(.*?)"""', text, re.DOTALL) or [""])[0]
        if re.search(r"\braise [A-Z]\w+\(", text.replace(doc, "")) and not re.search(
            "raises? ", doc, re.IGNORECASE
        ):
            silent.append(name)
    assert silent == []
