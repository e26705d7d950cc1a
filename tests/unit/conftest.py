"""The pure ground's own tests: no device, no loop; credit.py in both of its forms."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

import rdmanet.credit

# The same examples on every run: a failure here is to be seen by everybody.
settings.register_profile("rdmanet", derandomize=True, deadline=None, database=None)
settings.load_profile("rdmanet")

SOURCE = Path(__file__).parents[2] / "rdmanet" / "credit.py"


def _load_source() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("credit_in_python", str(SOURCE))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # msgspec looks annotations up there
    loader.exec_module(module)
    return module


IN_PYTHON = _load_source()
COMPILED = rdmanet.credit if not str(rdmanet.credit.__file__).endswith(".py") else None


@pytest.fixture(scope="session", params=["python", "compiled"])
def credit(request: pytest.FixtureRequest) -> ModuleType:
    """The module rdmanet.credit, read as Python and compiled by Cython."""
    if request.param == "python":
        return IN_PYTHON
    if COMPILED is None:
        pytest.skip("rdmanet.credit is not built")
    return COMPILED


@pytest.fixture(scope="session")
def both_credits() -> tuple[ModuleType, ModuleType]:
    if COMPILED is None:
        pytest.skip("rdmanet.credit is not built")
    return IN_PYTHON, COMPILED
