"""mypy --strict accepts a program with calls, and finds each wrong argument in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("checked.py")


@pytest.mark.long
def test_mypy_finds_wrong_arguments():
    """Long: mypy reads all of rdmanet for it."""
    pytest.importorskip("mypy", reason="mypy is of the group check")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(PROGRAM)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = [int(line) for line in re.findall(r"checked\.py:(\d+): error", done.stdout)]
    lines = PROGRAM.read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert sorted(set(found)) == wrong, done.stdout + done.stderr
