"""What the manual says is so: its programs print what it claims, its links lead somewhere, no error lacks a page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rdmanet import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]

# What each program of a page prints, in the order of the page.
PRINTED = {
    "tutorial.md": ["b'hello\\n'\nover {device}\n", "1000000 bytes\n"],
    "howto/migrate.md": [""],
    "howto/anyio.md": ["b'HELLO' by {device}\n"],
    "howto/remote-memory.md": ["board 4096 b'board'\nleft there: b'hello'\n"],
    "howto/verbs.md": ["b'hello'\nb'hello'\n"],
    "async-verbs.md": ["0\nb'it is done' b'hello' 7\n"],
}


def programs(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PRINTED)
def test_programs_print_what_they_should(page):
    codes = programs(ROOT / "docs" / page)
    assert len(codes) == len(PRINTED[page])
    for code, printed in zip(codes, PRINTED[page], strict=True):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT), "RDMANET_DEVICE": "soft0"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (done.returncode, done.stderr, done.stdout) == (0, "", printed.format(device="soft0"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            anchors = {
                re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
                for line in there.read_text().splitlines()
                if line.startswith("#")
            }
            assert heading in anchors, f"{page.name} links to {target}"


def test_every_error_has_a_page():
    classes = {
        name
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, OSError)
    }
    assert {page.stem for page in (ROOT / "docs/errors").glob("*.md")} == classes | {"index"}


def test_every_completion_status_is_explained():
    page = (ROOT / "docs/errors/CompletionError.md").read_text()
    for number, (name, *_) in errors._STATUS.items():
        assert number == 0 or f"| {number}: {name} |" in page
