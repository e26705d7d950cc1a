"""Ctrl-C during an import: it raises KeyboardInterrupt, and whatever it has interrupted, nothing crashes later."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("module", "places"),
    [
        pytest.param(
            "rdmanet.base.bodies", (), marks=pytest.mark.long
        ),  # a fork for each of some hundred functions
        # The others that import msgspec: a program may load one of them first.
        ("rdmanet.wire.qpinfo", ("datetime",)),
        ("rdmanet.wire.remote", ("datetime",)),
    ],
)
def test_ctrl_c_during_an_import_breaks_nothing(module: str, places: tuple[str, ...]) -> None:
    """msgspec 0.22 ignores that an import of its own was interrupted, and its decoders crash then."""
    script = HERE / "interrupted_import.py"
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, script, module, *places],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    outcomes = json.loads(done.stdout)
    assert any("datetime" in place for place, _ in outcomes)
    assert places or any("msgspec" in place for place, _ in outcomes)
    # Others may lose it: callbacks of weak references cannot raise, and some C code ignores what a __hash__ raises.
    lost = [place for place, status in outcomes if status == 1]
    assert not any("datetime" in place or "msgspec" in place for place in lost), lost
    # On Python 3.12 msgspec 0.22 itself cannot be imported again: "initialization of _core did not return an extension
    # module".
    right = (0, 1, 3) if sys.version_info[:2] == (3, 12) else (0, 1)
    assert [(place, status) for place, status in outcomes if status not in right] == []
