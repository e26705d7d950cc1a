"""Runs an actor's script: as the user that it is to be, with `say`, `hear` and `argv` at hand.

Everything that an actor may import is imported first, since another user may not be let into the tree.
"""

import asyncio  # noqa: F401
import ctypes
import json
import os
import socket  # noqa: F401
import struct  # noqa: F401
import sys
from pathlib import Path
from typing import Any

import uvloop  # noqa: F401

import rdmanet  # noqa: F401
from rdmanet import _core


def say(**facts: Any) -> None:
    """One line for the test."""
    print(json.dumps(facts), flush=True)


def hear() -> dict[str, Any] | None:
    """One line from the test; None: it is over."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def main() -> None:
    script = Path(sys.argv[1])
    code = compile(script.read_text(), str(script), "exec")
    _core.Library.embedded().devices()  # loads the library
    if user := os.environ.get("ACTOR_USER"):
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    if os.environ.get("ACTOR_DUMPABLE"):  # as a program is that a user starts; who was root isn't
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    sys.path.insert(0, str(script.parent))
    exec(code, {"__name__": "__main__", "say": say, "hear": hear, "argv": sys.argv[2:]})


main()
