"""docs/developers/shared-words.md has each word that two threads or processes share, and no other.

Of the structures in the arena that is every field, atomic or not; of all other structures of the device's headers, what
is `_Atomic`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOFT = ROOT / "rdmanet" / "soft"
PAGE = ROOT / "docs" / "developers" / "shared-words.md"
IN_THE_ARENA = {
    "rn_slot", "rn_slot_sge", "rn_entry", "rn_pool_block", "rn_qp_block", "rn_cq_block", "rn_mr_entry", "rn_arena_head",
}  # fmt: skip
HEAD = ["word", "writer", "reader", "order", "why"]


def declared(line: str) -> list[str]:
    """The names that a line declares, without pointers to something and parameters."""
    line = re.sub(r"alignas\(\w+\)", "", line)
    if "(" in line or ";" not in line:
        return []
    names = line.split(";")[0].split(",")
    return [found[1] for name in names if (found := re.search(r"(\w+)(?:\[[^]]*\])*$", name.strip()))]


def shared_words() -> set[str]:
    words: set[str] = set()
    for header in SOFT.glob("*/*.h"):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        inside: list[str] = []
        for line in text.splitlines():
            if begins := re.match(r"\s*(?:extern )?(?:struct|union) ?(\w*) {", line):
                inside.append(begins[1])
            elif re.match(r"\s*}.*;|^}", line):
                del inside[-1:]
            elif inside and inside[-1] in IN_THE_ARENA and header.name == "arena.h":
                words |= {f"{inside[-1]}.{name}" for name in declared(line) if name != "end"}
            elif (
                "_Atomic" in line
                and not re.search(r"_Atomic [\w ]+\*", line)
                and not line.startswith("static inline")
            ):
                words |= {".".join([*inside[-1:], name]) for name in declared(line)}
    return words


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    cells = [re.split(r" \| ", line) for line in lines]
    return [row for row in cells if len(row) == len(HEAD) and row != HEAD and not row[0].startswith("--")]


def words_of(row: list[str]) -> list[str]:
    """`a.b`, `.c`: the second is a field of the same structure."""
    names, struct = [], ""
    for name in re.findall(r"`([\w.]+)`", row[0]):
        struct = name.split(".")[0] if not name.startswith(".") else struct
        names.append(struct + name if name.startswith(".") else name)
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
    } <= shared_words()
