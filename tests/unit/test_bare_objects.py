"""Objects that were never made raise when they are used; nothing that Python can write crashes the process."""

import os
import sys
from pathlib import Path

import pytest

from rdmanet import _core, credit
from tests.support.processes import Process

from .bare import bare, compiled

USER = Path(__file__).parent / "bare.py"
KINDS = [(module, kind) for module in (_core, credit) for kind in compiled(module)]


def test_there_are_such_types():
    assert {_core.QP, _core.Context, _core.SendWR, _core.Operation} <= {kind for _, kind in KINDS}


@pytest.fixture(scope="module")
def user():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Process(sys.executable, "-X", "faulthandler", USER, env=environment) as process:
        yield process


@pytest.mark.parametrize("module, kind", KINDS, ids=lambda it: getattr(it, "__name__", "").rpartition(".")[2])
def test_use(user, module, kind):
    user.say(f"{module.__name__} {kind.__name__}")
    status, out, err = user.hear()
    assert status == 0, err[-3000:]
    if module is _core:
        assert out == "", "a copy of what is one object"


@pytest.mark.parametrize(
    "kind", [_core.Library, _core.Device, _core.Context, _core.Completions, _core.WRSession]
)
def test_some_are_not_to_be_had(kind):
    """Those that mean nothing without what they were made from."""
    assert list(bare(kind)) == []
    with pytest.raises(TypeError):
        kind()
