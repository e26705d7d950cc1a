"""aiohttp's own tests of its client, server and connector, from its source distribution, with every loop switched.

`make libraries` unpacks them into build/libraries/aiohttp; switched.py switches the loops. There is no difference: what
passes over TCP passes here. test_run_app's graceful ends are not among them: three count a connection that is closed,
and whose connection_lost() is to come. websockets' source distribution has no tests. aiohttp's conftest is content
without blockbuster, which comes without a wheel.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "build/libraries/aiohttp/tests"

# {module: at least so many tests, and connections by RDMA}. Counted were 159 by RDMA and none by TCP in
# test_web_functional, and 2 and 7 in test_connector, most of whose connections are mocks.
MODULES = {
    "test_client_functional": (330, 300),
    "test_web_functional": (155, 140),
    "test_connector": (180, 2),
}


@pytest.mark.parametrize("module", MODULES)
def test_those_of_aiohttp(module):
    least, connections = MODULES[module]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "tests/libraries/others.ini", "--rootdir", TESTS]
        + ["--confcutdir", TESTS, "-p", "tests.libraries.switched", f"{module}.py"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    made = re.search(r"connections by RDMA: (\d+)", done.stdout)
    assert passed is not None and int(passed[1]) >= least
    assert made is not None and int(made[1]) >= connections
