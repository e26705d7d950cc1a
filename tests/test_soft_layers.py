"""Nothing in the embedded device's C sources reaches upward.

rdmanet/soft/README.md lists the folders, which are the layers. What a file includes, and what its object needs, is in
its own folder or below. Where files of one folder call each other in a circle, the folder's entry says why.

Files and functions stay short enough to be read at a sitting.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rdmanet"
SOFT = PACKAGE / "soft"
ENTRIES = dict(
    re.findall(r"^- `(\w+)`: (.*?)\n(?=- `|\n)", (SOFT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
)
LAYERS = list(reversed(ENTRIES))  # the ground first
SOURCES = sorted(path for layer in LAYERS for path in (SOFT / layer).glob("*.[ch]"))

FILE_LINES, FUNCTION_LINES = 500, 60
LONGER: dict[str, str] = {}
"""Files (`folder/file.c`) and functions that are longer: why each can't be cut without harm."""


def height(path: str) -> int:
    return LAYERS.index(path.split("/")[0])


def upward(edges: dict[str, set[str]]) -> list[str]:
    return [f"{a} -> {b}" for a in sorted(edges) for b in sorted(edges[a]) if height(b) > height(a)]


def included(text: str) -> Iterator[str]:
    """What is included of the device; its own headers are included by folder."""
    return (name for name in re.findall(r'^#\s*include\s+"([^"]+)"', text, re.MULTILINE) if "/" in name)


def called(symbols: dict[str, str]) -> dict[str, set[str]]:
    """Which object needs a symbol that another defines, from nm's output for each."""
    home = {}
    needed: dict[str, set[str]] = {}
    for name, printed in symbols.items():
        for line in printed.splitlines():
            *_, kind, symbol = line.split()
            if kind == "U":
                needed.setdefault(name, set()).add(symbol)
            elif kind.isupper():
                home[symbol] = name
    return {
        name: {home[symbol] for symbol in wanted if symbol in home} - {name}
        for name, wanted in needed.items()
    }


def circle(edges: dict[str, set[str]], layer: str) -> list[str]:
    """The files of a circle inside a folder; none, if there is no circle."""
    inside = {
        a: {b for b in others if height(b) == height(a)}
        for a, others in edges.items()
        if height(a) == LAYERS.index(layer)
    }
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Each function of a C file, and its lines from its signature to its last brace."""
    start = 0
    name = ""
    for number, line in enumerate(text.splitlines()):
        if (match := re.match(r"(?=[A-Za-z_]).*?\b(\w+)\(", line)) and not line.endswith(";"):
            start, name = number, match[1]
        elif line == "}" and name:
            yield name, number - start + 1
            name = ""


def too_long(files: dict[str, str]) -> dict[str, int]:
    found = {path: lines for path, text in files.items() if (lines := text.count("\n")) > FILE_LINES}
    for text in files.values():
        found |= {name: lines for name, lines in functions(text) if lines > FUNCTION_LINES}
    return found


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    out = tmp_path_factory.mktemp("objects")

    def symbols(source: Path) -> str:
        made = out / f"{source.parent.name}-{source.stem}.o"
        where = [f"-I{PACKAGE}/abi", f"-I{SOFT}"]
        subprocess.run(
            ["cc", "-std=gnu11", "-D_GNU_SOURCE=", "-fPIC", *where, "-c", source, "-o", made], check=True
        )
        return subprocess.run(["nm", made], check=True, capture_output=True, text=True).stdout

    sources = [path for path in SOURCES if path.suffix == ".c"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return called(
            dict(
                zip(
                    (str(path.relative_to(SOFT)) for path in sources), pool.map(symbols, sources), strict=True
                )
            )
        )


def test_every_file_is_in_a_layer() -> None:
    assert {path.name for path in SOFT.iterdir() if path.is_dir()} == {*LAYERS, "preload"}
    assert not list(SOFT.glob("*.[ch]"))


def test_nothing_includes_upward() -> None:
    edges = {str(path.relative_to(SOFT)): set(included(path.read_text())) for path in SOURCES}
    assert sum(map(len, edges.values())) > 100  # it sees them
    assert upward(edges) == []


def test_each_header_is_read_once() -> None:
    """It says so; or, in abi/, has a name that no other header has."""
    headers = [path.read_text() for path in PACKAGE.rglob("*.h")]
    guards = [re.findall(r"^#ifndef (\w+_H)$", text, re.MULTILINE) for text in headers]
    assert len(headers) > 50  # it sees them
    assert [
        len(names) + text.count("\n#pragma once\n") for names, text in zip(guards, headers, strict=True)
    ] == [1] * len(headers)
    assert len({name for names in guards for name in names}) == sum(map(len, guards))


def test_nothing_calls_upward(calls: dict[str, set[str]]) -> None:
    assert sum(map(len, calls.values())) > 400
    assert upward(calls) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_circle_has_its_reason(calls: dict[str, set[str]], layer: str) -> None:
    found = circle(calls, layer)
    assert bool(found) == ("Circle:" in ENTRIES[layer]), (
        found or "README.md tells of a circle that is no more"
    )


def test_files_and_functions_are_short() -> None:
    files = {str(path.relative_to(SOFT)): path.read_text() for path in SOFT.rglob("*.[ch]")}
    assert sum(1 for text in files.values() for _ in functions(text)) > 1000  # it sees them
    found = too_long(files)
    assert not {name: lines for name, lines in found.items() if name not in LONGER}
    assert LONGER.keys() <= found.keys(), "an exception is none any more"


def test_the_checks_see() -> None:
    low, high = f"{LAYERS[0]}/a.c", f"{LAYERS[1]}/b.c"
    symbols = {low: "                 U b\n0000 T a\n", high: "                 U a\n0000 T b\n0000 t own\n"}
    edges = called(symbols)
    assert edges == {low: {high}, high: {low}}
    assert upward(edges) == [f"{low} -> {high}"]
    assert circle(edges, LAYERS[0]) == []
    assert circle({low: {f"{LAYERS[0]}/c.c"}, f"{LAYERS[0]}/c.c": {low}}, LAYERS[0])
    assert list(included(f'#include "{high}"\n#include <errno.h>\n#include "verbs.h"\n')) == [high]
    body = "\tx;\n" * FUNCTION_LINES
    assert too_long({low: f"int g(void);\n\nint f(int a,\n  int b)\n{{\n{body}}}\n"}) == {
        "f": FUNCTION_LINES + 4
    }
    assert too_long({low: "\n" * (FILE_LINES + 1)}) == {low: FILE_LINES + 1}
