"""What a forked child shares with its parent: memory that devices use, by views that existed; no object."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import rdmanet
import rdmanet.verbs as v

device = v.Library.embedded().devices()[0]
with device.open() as context, v.PD(context) as pd, pd.alloc_mr(4096) as mr:
    own = bytearray(64)
    views = {"alloc_mr": memoryview(mr), "alloc": memoryview(rdmanet.alloc(4096)), "reg_mr": memoryview(own)}
    with pd.reg_mr(own):
        child = os.fork()
        if child == 0:
            try:
                mr.sge()
            except RuntimeError as exc:
                for view in views.values():
                    view[0] = 7
            os._exit(0)
        os.waitpid(child, 0)
        print({name: view[0] for name, view in views.items()})
    views.clear()
"""


@pytest.mark.once
def test_memory_for_devices_is_shared_with_a_forked_child():
    """As docs/howto/verbs.md says; memory of the program's that is registered is the child's own copy."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "{'alloc_mr': 7, 'alloc': 7, 'reg_mr': 0}\n"
