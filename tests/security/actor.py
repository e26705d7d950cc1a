"""Runs an actor's script: as the user that it is to be, with `say`, `hear` and `argv` at hand.

`say(number=5)` is a line for the test, `hear()` the next of the test's, or None when it is over.

Everything that the script imports is imported first: the other user may not be let into the tree.
"""

import ast
import ctypes
import importlib
import os
import pkgutil
import sys
from pathlib import Path

import uvloop  # noqa: F401

import rdmanet
from rdmanet import _core
from tests.support.lines import hear, tell


def import_for(script: ast.Module) -> None:
    """All that it imports, and all that rdmanet would import by and by."""
    for node in ast.walk(script):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            importlib.import_module(node.module)
    for name in dir(rdmanet):
        getattr(rdmanet, name)
    if "rdmanet.loop" in sys.modules:
        for module in pkgutil.iter_modules(sys.modules["rdmanet.loop"].__path__, "rdmanet.loop."):
            importlib.import_module(module.name)
        importlib.import_module("rdmanet.streams.reader_writer")
    _core.Library.embedded().devices()  # loads the library


def main() -> None:
    path = Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    script = ast.parse(path.read_text())
    import_for(script)
    code = compile(script, str(path), "exec")
    if user := os.environ.get("ACTOR_USER"):
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    if os.environ.get("ACTOR_DUMPABLE"):  # as a program is that a user starts; who was root isn't
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    exec(code, {"__name__": "__main__", "say": tell, "hear": hear, "argv": sys.argv[2:]})


main()
