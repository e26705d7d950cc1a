"""A soak of a few hundred transfers; `python -m tests.soak.tensors` is the long one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.embedded_only("its processes are on this host's addresses")
@pytest.mark.parametrize("defer_us", [0, 3000])  # the second: what is cut short is in flight
def test_each_byte_is_right(defer_us: int) -> None:
    command = [sys.executable, "-m", "tests.soak.tensors", "--transfers", "450", "--seed", "1"]
    root = Path(__file__).parents[2]
    env = os.environ | {"RDMANET_SOFT_DEFER": str(defer_us)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = set(re.findall(r"\d+ ([a-z ]+)", done.stdout))
    wanted = {"cut short", "kills", "reads", "revoked", "writes"}
    if defer_us:  # else each may have ended before it was revoked
        wanted.add("refused")
    assert wanted <= seen, done.stdout
