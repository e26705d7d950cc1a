"""CPython's own tests of asyncio's streams, with our reader in asyncio's place, and of its TLS, over RDMA.

They are in the interpreter's test package, which not every interpreter has.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import asyncio, asyncio.streams, sys, unittest
from rdmanet.streams import RdmaStreamReader
from test.test_asyncio import test_streams

asyncio.StreamReader = asyncio.streams.StreamReader = RdmaStreamReader
program = unittest.main(module=test_streams, argv=["test_streams"], exit=False)
print("ran", program.result.testsRun)
sys.exit(not program.result.wasSuccessful())
"""


# Debian's has them in a package of its own. CI's interpreters have them, or these tests fail there.
pytestmark = pytest.mark.skipif(
    os.environ.get("CI") != "true"
    and (importlib.util.find_spec("test") is None or importlib.util.find_spec("test.test_asyncio") is None),
    reason="this interpreter came without CPython's tests",
)


def run(*command: object) -> list[str]:
    """Run Python; returns the words of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONASYNCIODEBUG": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.once
def test_streams_of_cpython():
    assert int(run("-c", RUN)[-1]) >= 60


@pytest.mark.once
@pytest.mark.long  # a minute under a sanitizer, and three in a virtual machine
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_tls_of_cpython(loop):
    """cpython_tls.py says how, and what it leaves out."""
    assert int(run(Path(__file__).with_name("cpython_tls.py"), loop)[-1]) >= 25
