"""docs/developers/shared-words.md has each word that two threads or processes share, and no other.

Of the structures in the arena that is every field, atomic or not; of all else in the device's headers and sources, what
is `_Atomic`. Two words are neither: they lie in a page that other processes reach by its address.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOFT = ROOT / "rdmanet" / "soft"
PAGE = ROOT / "docs" / "developers" / "shared-words.md"
IN_THE_ARENA = {
    "rn_slot", "rn_slot_sge", "rn_entry", "rn_pool_block", "rn_qp_block", "rn_cq_block", "rn_mr_entry", "rn_arena_head",
}  # fmt: skip
REACHED_BY_THE_KERNEL = {"witness.c:value", "witness.c:scratch"}
HEAD = ["word", "writer", "reader", "order", "why"]


def declared(line: str) -> list[str]:
    """The names that a line declares, without pointers to something and parameters."""
    line = re.sub(r"alignas\(\w+\)", "", line)
    line = re.sub(r"\(\*_Atomic ([^()]*)\)\([^()]*\)", r"\1", line)  # a pointer to a function
    if "(" in line or ";" not in line:
        return []
    names = line.split(";")[0].split(",")
    return [found[1] for name in names if (found := re.search(r"(\w+)(?:\[[^]]*\])*$", name.strip()))]


def shared_words() -> set[str]:
    words = set(REACHED_BY_THE_KERNEL)
    for header in SOFT.glob("*/*.h"):
        inside: list[str] = []
        for line in without_comments(header).splitlines():
            if begins := re.match(r"\s*(?:extern )?(?:struct|union) ?(\w*) {", line):
                inside.append(begins[1])
            elif re.match(r"\s*}.*;|^}", line):
                del inside[-1:]
            elif inside and inside[-1] in IN_THE_ARENA and header.name == "arena.h":
                words |= {f"{inside[-1]}.{name}" for name in declared(line) if name != "end"}
            elif is_atomic(line):
                words |= {".".join([*inside[-1:], name]) for name in declared(line)}
    for source in SOFT.glob("*/*.c"):
        for line in without_comments(source).splitlines():
            if is_atomic(line):  # and not declared by a header as well
                words |= {f"{source.name}:{name}" for name in declared(line) if name not in words}
    return words


def without_comments(file: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)


def is_atomic(line: str) -> bool:
    """The declaration of an atomic word, not of a pointer to one."""
    return "_Atomic" in line and not re.search(r"_Atomic [\w ]+\*|^static inline|\*_Atomic \*", line)


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    cells = [re.split(r" \| ", line) for line in lines]
    return [row for row in cells if len(row) == len(HEAD) and row != HEAD and not row[0].startswith("--")]


def words_of(row: list[str]) -> list[str]:
    """`a.b`, `.c`: the second is a field of the same structure; `a.c:b`, `.d`: a variable of the same file."""
    names, before = [], ""
    for name in re.findall(r"`([\w.:]+)`", row[0]):
        if not name.startswith("."):
            before = re.sub(r"\w+$", "", name)
        names.append(before + name.lstrip(".") if name.startswith(".") else name)
    return names


def test_each_word_has_a_line_and_each_line_a_word():
    named = [word for row in rows() for word in words_of(row)]
    assert sorted({word for word in named if named.count(word) > 1}) == []
    assert sorted(shared_words() - set(named)) == []
    assert sorted(set(named) - shared_words()) == []


def test_each_line_says_who_how_and_why():
    for row in rows():
        assert all(cell.strip() for cell in row), row
        assert re.search(r"relaxed|acquire|release|acq_rel|seq_cst|plain", row[3]), row


def test_the_headers_are_read():
    assert {
        "rn_slot.owner_sequence",
        "rn_qp_block.rq_offset",
        "rn_lock.held",
        "rn_theirs",
        "segment.base",
        "fork.c:handlers",
        "witness.c:lent",
    } <= shared_words()
