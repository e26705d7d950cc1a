"""A soak of a few seconds; `make soak` is the long one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.embedded_only("its processes are on this host's addresses")
def test_every_connection_ends() -> None:
    command = [sys.executable, "-m", "tests.soak", "--seconds", "6", "--connections", "20", "--seed", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [
        int(number)
        for number in re.findall(r"(\d+) (?:conversations|were cut|pieces lent|stops|kills)", done.stdout)
    ]
    assert len(counts) == 5 and all(counts), done.stdout
