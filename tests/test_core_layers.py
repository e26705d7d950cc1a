"""No part of `_core` uses one on a higher floor, and none are in a circle.

`_core` is one extension module in parts, `rdmanet/_pyx/*.pxi`, which the compiler sees as one file.
docs/architecture.md lists the floors; parts of one floor may use each other, in no circle. A part uses another if it
names a function, a class, a constant or a variable of that one, or a field or a method of one of its classes. Whose
field or method it is follows from the types that declarations give; what has no declared type (the parameter of a
`def`, say) is not followed.

EXCUSED has the uses that go upward, or would close a circle. It only shrinks: one that is no more fails, too.

And a field of a class is written in one part, so that one file says all that it can be. WRITTEN_IN_SEVERAL has those of
which that is not so yet; it only shrinks, too. What a field refers to (a list's items, say) is not looked at.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PARTS = Path(__file__).parents[1] / "rdmanet" / "_pyx"

# The list in docs/architecture.md, from the top down: "- the floor: `part`, `part`.".
TEXT = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
FLOORS = re.findall(
    r"^- (?:the|a|an) .*?: (`.*?)\.\n(?=- |\n)",
    TEXT.partition("### The parts of _core")[2],
    re.MULTILINE | re.DOTALL,
)
FLOOR = {
    part: floor for floor, parts in enumerate(reversed(FLOORS)) for part in re.findall(r"`(\w+)`", parts)
}

EXCUSED: dict[str, set[str]] = {
    "counters": {"library"},
    "library": {"device"},
    "memory": {"workrequest"},
    "workrequest": {"bufferpool"},
    "inflight": {"awaited", "operation"},
    "completion": {"collecting", "queuepair", "srq"},
    "queuepair": {"qpcreating", "qpposting", "wrsession"},
    "qpposting": {"operation"},
    "cmevent": {"cm"},
    "operation": {"awaited"},
}
"""Uses that a part may not have, by its name."""

WRITTEN_IN_SEVERAL: dict[str, str] = {
    "CMEventChannel": "children",
    "CMID": "channel ptr",
    "CompletionWatcher": "pending",
    "Context": "gone",
    "CQ": "awake last_qp ptr reserved",
    "_Elements": "others",
    "_Engine": "dirty empty_rings loop ready stalled",
    "Immediate": "inner",
    "IntoReader": "in_row lost paused waiter",
    "Library": "channels",
    "MR": "addr exports length",
    "MW": "mr",
    "Operation": "binding cell_mr future queue",
    "QP": "ptr xrcd",
    "ReadRequest": "has_view",
    "SharedRing": "kept_next",
    "Sink": "callback",
    "Watcher": "completion_count completion_next keeping learned messages polls scheduled unheard wakeups",
    "WC": "rare wr_id",
}
"""Fields that several parts write, by their class."""

DEFINES = ("cdef", "cpdef", "ctypedef", "def", "class")
KINDS = ("extern", "class", "struct", "enum")
WORDS = {*DEFINES, *KINDS, "inline", "readonly", "public", "const"}


@dataclass
class Class:
    part: str
    base: str
    members: dict[str, str] = field(default_factory=dict)
    """Fields and methods, and what they are declared with."""


def statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each logical line: how deep it is, and its names and operators. Docstrings and comments are left out."""
    depth, words = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type in (tokenize.NAME, tokenize.OP):
            words.append(token.string)
        elif token.type == tokenize.STRING and "f" in re.split("[\"']", token.string, maxsplit=1)[0].lower():
            for inner in re.findall(r"\{([^{}]*)\}", token.string):  # up to Python 3.11 it is one token
                words += re.findall(r"\w+|[^\w\s]", inner)
        elif token.type == tokenize.NEWLINE:
            if words:
                yield depth, words
            words = []


def declared(words: list[str]) -> list[str]:
    """The names that a line declares: a function, a class, or several fields of one type."""
    if "class" in words[:2] or words[:2] == ["ctypedef", "struct"]:
        return [next(word for word in words if word not in WORDS)]
    for before, star, name in zip(words, words[1:], words[2:], strict=False):
        if (before, star) == ("(", "*"):
            return [name]  # a pointer to a function
    end = next((i for i, word in enumerate(words) if word in ("(", "=", ":", "[", ",")), len(words))
    if end == 0 or words[end - 1] in WORDS:
        return []  # of an enum without a name
    further = zip(words[end:], words[end + 1 :], strict=False) if words[end : end + 1] != ["("] else ()
    return [words[end - 1], *(name for comma, name in further if comma == "," and name.isidentifier())]


def declared_with(words: list[str]) -> str:
    return next((word for word in words if word not in WORDS), "")


def last_assignment(words: list[str]) -> int:
    """Where the last `=` or `+=` of a statement is, outside of brackets: 0 if there is none."""
    depth = found = 0
    for i, word in enumerate(words):
        depth += (word in "([{") - (word in ")]}")
        if depth == 0 and word.endswith("=") and word not in ("==", "!=", "<=", ">="):
            found = i
    return 0 if words[0] in DEFINES else found


class Uses:
    """What each part uses, from their texts."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.home: dict[str, str] = {}
        self.classes: dict[str, Class] = {}
        blocks = {part: list(self._blocks(part, text)) for part, text in texts.items()}
        self.of = {part: self._used(blocks[part]) - {part} for part in texts}
        self.writers: dict[tuple[str, str], set[str]] = {}
        """By (class, field): the parts that write it."""
        for part in texts:
            for written in self._written(blocks[part]):
                self.writers.setdefault(written, set()).add(part)

    def _blocks(self, part: str, text: str) -> Iterator[tuple[str, list[list[str]]]]:
        """Note what a part defines. Yield its functions and methods: (the class, the lines)."""
        inside = kind = ""
        block: tuple[str, list[list[str]]] = ("", [])
        for depth, words in statements(text):
            if depth == 0:
                kind = next((word for word in KINDS if word in words[:3]), "function")
                names = declared(words) if words[0] in DEFINES else words[:1] if words[1:2] == ["="] else []
                if kind == "class":
                    [inside] = names
                    self.classes[inside] = Class(part, words[words.index("(") + 1] if "(" in words else "")
                if kind != "extern":
                    self.home |= dict.fromkeys(names, part)
            elif kind == "class" and depth == 1 and words[0] in DEFINES:
                of = declared_with(words) if words[0] != "def" else ""
                self.classes[inside].members |= dict.fromkeys(declared(words), of)
            elif kind == "enum":
                self.home[words[0]] = part
            if depth == 0 or (kind == "class" and depth == 1):
                yield block
                block = (inside if kind == "class" else "", [])
            block[1].append(words)
        yield block

    def _member(self, name: str, of: str) -> tuple[str, str] | None:
        """The class that a field or a method is of, a base class perhaps, and what it is declared with."""
        while of in self.classes:
            if name in self.classes[of].members:
                return of, self.classes[of].members[name]
            of = self.classes[of].base
        return None

    def _used(self, blocks: list[tuple[str, list[list[str]]]]) -> set[str]:
        found = set[str]()
        for owner, lines in blocks:
            types, own = self._scope(owner, lines)
            for words in lines:
                for i, word in enumerate(words):
                    if word.isidentifier() and (i == 0 or words[i - 1] != "."):
                        if word in self.home and word not in own and not _is_keyword(words, i):
                            found.add(self.home[word])
                        found |= {self.classes[of].part for of, _ in self._followed(words, i, types)}
        return found

    def _written(self, blocks: list[tuple[str, list[list[str]]]]) -> Iterator[tuple[str, str]]:
        """The fields that are assigned to."""
        for owner, lines in blocks:
            types, _ = self._scope(owner, lines)
            for words in lines:
                end = last_assignment(words)
                index = 0  # how deep within `a[...]`
                for i, word in enumerate(words[:end]):
                    index += (word == "[") - (word == "]")
                    follows = index or words[i - 1 : i] == ["."]
                    for of, name in () if follows else self._followed(words[:end], i, types)[-1:]:
                        # The last of `a.b.c`; not if it is `a.b.c[i]`, or `a.b(c)`.
                        after = i + words[i:end].index(name) + 1
                        if words[after : after + 1] not in (["["], ["("], ["."]):
                            yield of, name

    def _followed(self, words: list[str], i: int, types: dict[str, str]) -> list[tuple[str, str]]:
        """The (class, member)s in `a.b.c`, if it is known what `a` is: by a declaration, or a cast, `(<A>a).b`."""
        found = list[tuple[str, str]]()
        of, after = types.get(words[i], ""), i + 1
        if i > 2 and (words[i - 3], words[i - 1]) == ("<", ">") and words[after : after + 1] == [")"]:
            of, after = words[i - 2], i + 2
        while words[after : after + 1] == ["."] and (member := self._member(words[after + 1], of)):
            found.append((member[0], words[after + 1]))
            of, after = member[1], after + 2
        return found

    def _scope(self, owner: str, lines: list[list[str]]) -> tuple[dict[str, str], set[str]]:
        """What names of a function are declared with, and its own names, which hide those of the module."""
        types, own = {"self": owner}, {"self"}
        for i, words in enumerate(lines):
            if i and words[0] == "cdef":
                own.update(declared(words))
                types |= dict.fromkeys(declared(words), declared_with(words))
            elif words[1:2] == ["="]:
                own.add(words[0])
            elif i == 0 and "(" in words and "class" not in words[:2]:
                for of, name in zip(words[words.index("(") :], words[words.index("(") + 1 :], strict=False):
                    if name.isidentifier() and name not in self.classes:
                        own.add(name)
                        types.setdefault(name, of)
        return types, own


def _is_keyword(words: list[str], i: int) -> bool:
    """Whether it is the name of an argument: `f(name=1)`."""
    return i > 0 and words[i - 1] in ("(", ",") and words[i + 1 : i + 2] == ["="]


def upward(uses: dict[str, set[str]], floors: dict[str, int]) -> dict[str, set[str]]:
    found = {a: {b for b in others if floors[b] > floors[a]} for a, others in uses.items()}
    return {a: others for a, others in found.items() if others}


def circle(uses: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


CORE = Uses({path.stem: path.read_text() for path in sorted(PARTS.glob("*.pxi"))})
USES = CORE.of


def test_every_part_has_a_floor() -> None:
    assert len(FLOORS) > 10
    assert FLOOR.keys() == USES.keys()
    assert sum(map(len, USES.values())) > 300  # it sees them


def test_no_part_uses_a_higher_floor() -> None:
    left = {part: others - EXCUSED.get(part, set()) for part, others in USES.items()}
    assert not upward(left, FLOOR)
    assert not circle(left)


def test_an_excuse_is_needed() -> None:
    gone = {part: others - USES[part] for part, others in EXCUSED.items()}
    assert not {part: others for part, others in gone.items() if others}, "this use is no more"
    for part, others in EXCUSED.items():
        for other in others:
            excused = {a: them - EXCUSED.get(a, set()) for a, them in USES.items()}
            excused[part] = excused[part] | {other}
            assert FLOOR[other] > FLOOR[part] or circle(excused), f"{part} may use {other}"


def test_a_field_is_written_in_one_part() -> None:
    several: dict[str, set[str]] = {}
    for (of, name), parts in CORE.writers.items():
        if len(parts) > 1:
            several.setdefault(of, set()).add(name)
    assert len(CORE.writers) > 500  # it sees them
    assert several == {of: set(names.split()) for of, names in WRITTEN_IN_SEVERAL.items()}


def test_the_check_sees() -> None:
    low = """
cdef enum:
    MOST = 4

cdef int check(int rc) except -1:
    return 0

cdef class Ring:
    cdef readonly uint32_t count, most
    cdef inline char *at(self, int i) noexcept:
        return NULL
"""
    high = """
cdef extern from "x.h":
    int check(int)

cdef class Holder(Base):
    cdef Ring ring
    cdef Holder other
"""
    texts = {"low": low, "high": high, "base": "cdef class Base:\n    cdef int first\n"}

    def uses(body: str) -> set[str]:
        return Uses({**texts, "part": body}).of["part"]

    assert Uses(texts).of == {"low": set(), "high": {"low", "base"}, "base": set()}
    assert uses("cdef int f():\n    return MOST  # high\n") == {"low"}
    assert uses('cdef int f():\n    """check"""\n    return f"{check(1)}"\n') == {"low"}
    assert uses("cdef int f(Holder a):\n    a.other.ring.count = 1\n") == {"low", "high"}
    assert uses("cdef int f(a):\n    (<Holder>a).first = 1\n") == {"high", "base"}
    assert uses("cdef int f(x):\n    cdef Holder a = x\n    a.ring.at(1)\n") == {"low", "high"}
    assert uses("cdef int f(int check):\n    return g(MOST=check)\n") == set()
    assert uses("cdef class A:\n    cdef Ring ring\n    def f(self):\n        return self.ring.most\n") == {
        "low"
    }

    def writes(body: str) -> set[tuple[str, str]]:
        writers = Uses({**texts, "part": body}).writers
        return {written for written, parts in writers.items() if "part" in parts}

    assert writes("cdef int f(Holder a):\n    a.other.ring.count += a.ring.most\n") == {("Ring", "count")}
    assert writes("cdef int f(Holder a):\n    a.ring, a.first = a.other = b(most=a.ring.most)\n") == {
        ("Holder", "ring"),
        ("Base", "first"),
        ("Holder", "other"),
    }
    assert writes("cdef int f(Holder a):\n    a.ring[a.first] = a.first == a.ring.at(1)\n") == set()
    assert writes("cdef int f(Holder a):\n    cdef int b = a.first, c = 0\n") == set()
    floors = {"low": 0, "high": 1}
    assert upward({"low": {"high"}, "high": {"low"}}, floors) == {"low": {"high"}}
    assert circle({"low": {"high"}, "high": {"low"}})
    assert not circle({"low": set(), "high": {"low"}})
