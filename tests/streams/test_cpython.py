"""CPython's own tests of asyncio's streams, from the interpreter's test package, with our reader in asyncio's place."""

import importlib.util
import os
import subprocess
import sys

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


@pytest.mark.skipif(
    importlib.util.find_spec("test") is None or importlib.util.find_spec("test.test_asyncio") is None,
    reason="this interpreter came without CPython's tests",
)
def test_streams_of_cpython():
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, "PYTHONASYNCIODEBUG": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 60
