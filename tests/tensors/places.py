"""Where these tests are, and their other processes: on one host, or on two of them (--across in tests/conftest.py)."""

import os
import shlex
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
_FAR = shlex.split(os.environ.get("RDMANET_TEST_FAR", "")) if "RDMANET_TEST_PEER" in os.environ else []
IS_FAR = bool(_FAR) or os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream"
"""The device carries what goes to other processes by TCP."""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(HERE.parents[1]),
    "RDMANET_TEST_HOST": os.environ.get("RDMANET_TEST_PEER", HOST),
}


def script(name: str, *arguments: str) -> list[str]:
    """The command of another process, which has this `ENVIRONMENT`."""
    return [*_FAR, sys.executable, str(HERE / name), *arguments]
