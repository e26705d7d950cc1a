"""A soak of a few hundred calls; `python -m tests.soak.calls` is the long one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.embedded_only("its processes are on this host's addresses")
@pytest.mark.parametrize("options", [(), ("--upgrade",)])
def test_each_reply_is_right_and_given_once(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.soak.calls", "--calls", "1300", "--seed", "1", *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    (ended,) = re.findall(r"(\d+) upgrades" if options else r"(\d+) kills", done.stdout)
    assert int(ended) == 2, done.stdout
