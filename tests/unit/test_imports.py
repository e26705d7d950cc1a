"""No module of ours warns while it is imported, whatever Python runs it: a program's users read such warnings.

Those of rdmanet.frameworks import what is not installed here; make frameworks tries them.
"""

import pathlib
import subprocess
import sys

PROGRAM = """
import importlib, pkgutil
import rdmanet
for module in pkgutil.walk_packages(rdmanet.__path__, "rdmanet."):
    if not module.name.endswith("__main__") and not module.name.startswith("rdmanet.frameworks."):
        importlib.import_module(module.name)
        print(module.name)
"""

WITHOUT_THE_LOCK = """
import sys
sys._is_gil_enabled = lambda: False
import rdmanet.verbs
"""


def test_without_a_warning():
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"rdmanet.rpc", "rdmanet.loop", "rdmanet.testing"} <= {*done.stdout.split()}


def test_make_compiles_them_for_users_who_cannot_write_here():
    """Else each of their processes compiles all modules anew, which takes it longer than all else at its start."""
    tree = pathlib.Path(__file__).parents[2]
    deepest = max((tree / "rdmanet").rglob("*.py"), key=lambda module: len(module.parts))
    for changed in ("rdmanet/errors.py", str(deepest.relative_to(tree))):
        would = subprocess.run(
            ["make", "--dry-run", "--what-if", changed, "build"],
            cwd=tree,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "compileall -q rdmanet" in would.stdout, changed


def test_needs_the_global_lock():
    """Of a build of CPython that has none, and that PYTHON_GIL=0 keeps from switching it on."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_LOCK], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "ImportError: rdmanet needs Python's global lock (GIL), which PYTHON_GIL=0" in done.stderr
