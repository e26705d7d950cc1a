"""What the developers' pages name is there: lines of docs/developers/message.md, files of the glossary, places."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "developers" / "message.md").read_text()
ROWS = re.findall(r"^\| `([\w/.]+)`: `(\w+)` \| `(.+)` \| .+ \|$", PAGE, re.MULTILINE)


def bodies(text: str, name: str, suffix: str) -> list[str]:
    """The text of each function of this name: up to the next definition, or in C to the brace that ends it.

    In C it may be a macro of one line.
    """
    if suffix in (".c", ".h"):
        return re.findall(rf"^[a-z].*\b{name}\((?:.*\n)*?\}}$|^#define {name}\(.*$", text, re.MULTILINE)
    # Up to what is indented no deeper and no continuation of the signature.
    definition = rf"^( *)(?:async def|def|cp?def [^=\n(]*?)\s*\b{name}\(.*\n(?:(?:\1[ )].*)?\n)*"
    return [found[0] for found in re.finditer(definition, text, re.MULTILINE)]


@pytest.mark.parametrize(("file", "function", "line"), ROWS, ids=[f"{file}-{name}" for file, name, _ in ROWS])
def test_the_line_is_there(file: str, function: str, line: str) -> None:
    path = ROOT / "rdmanet" / file
    found = bodies(path.read_text(), function, path.suffix)
    assert found, f"{file} has no function {function}"
    assert any(line in body for body in found), f"{function} in {file} does not have: {line}"


def test_the_page_is_read() -> None:
    assert len(ROWS) > 25
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE))


def test_a_function_ends_where_the_next_one_begins() -> None:
    cython = "cdef int one(self,\n             x) except -1:\n    first\n\n    second\n\ncdef int two(x):\n    third\n"
    assert bodies(cython, "one", ".pxi") == [cython.partition("cdef int two")[0]]
    assert bodies(cython, "three", ".pxi") == []
    c = "static int one(int x)\n{\n\treturn two(x);\n}\n\nint two(int x)\n{\n\treturn x;\n}\n"
    assert bodies(c, "two", ".c") == ["int two(int x)\n{\n\treturn x;\n}"]
    assert bodies(c, "one", ".c") == ["static int one(int x)\n{\n\treturn two(x);\n}"]


def test_the_files_of_the_glossary_are_there() -> None:
    text = (ROOT / "docs" / "developers" / "glossary.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| (`.+`) \|$", text, re.MULTILINE)
    files = {file for row in rows for file in re.findall(r"`([^`]+)`", row)}
    assert len(rows) > 40
    assert not [
        file for file in files if not (ROOT / "rdmanet" / file).exists() and not (ROOT / file).exists()
    ]


def test_the_places_to_look_are_there() -> None:
    """In each row of the table, each name is in one of the files, or folders, that the row names."""
    text = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## Where to look")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) >= 30
    missing = []
    for question, places in rows:
        words = re.findall(r"`([^`]+)`", places)
        files = [ROOT / "rdmanet" / word for word in words if "/" in word or word.endswith(".py")]
        missing += [(question, str(file)) for file in files if not file.exists()]
        inside = [path for file in files for path in (file.rglob("*.[ch]") if file.is_dir() else [file])]
        known = set(re.findall(r"\w+", " ".join(path.read_text() for path in inside if path.exists())))
        names = [word for word in words if "/" not in word and not word.endswith(".py")]
        missing += [(question, part) for name in names for part in name.split(".") if part not in known]
    assert not missing


def test_what_is_said_to_be_public_exists():
    """The statement of compatibility named lists that no module has."""
    page = (ROOT / "docs" / "developers" / "releasing.md").read_text()
    said = page.partition("## Versions")[2].partition("## ")[0]
    names = set(re.findall(r"`rdmanet((?:\.\w+)+)(?:\(\))?`", said))
    assert len(names) >= 5
    for name in names:
        *inside, last = name[1:].split(".")
        module = importlib.import_module(".".join(["rdmanet", *inside]))
        assert hasattr(module, last) or importlib.util.find_spec(f"rdmanet{name}"), name
