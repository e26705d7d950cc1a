"""The pure ground's own tests: no device, no loop; each compiled pure module in both of its forms."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

import rdmanet.credit
import rdmanet.wire.placement
import rdmanet.wire.slots

# The same examples on every run: a failure here is to be seen by everybody.
settings.register_profile("rdmanet", derandomize=True, deadline=None, database=None)
settings.load_profile("rdmanet")

PACKAGE = Path(__file__).parents[2] / "rdmanet"


def _load_source(name: str) -> ModuleType:
    file = PACKAGE / f"{name}.py"
    loader = importlib.machinery.SourceFileLoader(f"{file.stem}_in_python", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # msgspec and pickle look there
    loader.exec_module(module)
    return module


def _if_compiled(module: ModuleType) -> ModuleType | None:
    return None if str(module.__file__).endswith(".py") else module


IN_PYTHON = _load_source("credit")
COMPILED = _if_compiled(rdmanet.credit)
PLACEMENT_IN_PYTHON = _load_source("wire/placement")
PLACEMENT_COMPILED = _if_compiled(rdmanet.wire.placement)
SLOTS = [_load_source("wire/slots"), *([rdmanet.wire.slots] if COMPILED is not None else [])]


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


@pytest.fixture(scope="session", params=["python", "compiled"])
def placement(request: pytest.FixtureRequest) -> ModuleType:
    """The module rdmanet.wire.placement in each of its forms."""
    if request.param == "python":
        return PLACEMENT_IN_PYTHON
    if PLACEMENT_COMPILED is None:
        pytest.skip("rdmanet.wire.placement is not built")
    return PLACEMENT_COMPILED


@pytest.fixture(scope="session")
def both_placements() -> tuple[ModuleType, ModuleType]:
    if PLACEMENT_COMPILED is None:
        pytest.skip("rdmanet.wire.placement is not built")
    return PLACEMENT_IN_PYTHON, PLACEMENT_COMPILED


@pytest.fixture(scope="session", params=SLOTS, ids=["python", "compiled"][: len(SLOTS)])
def slots(request: pytest.FixtureRequest) -> ModuleType:
    """The module rdmanet.wire.slots, likewise."""
    module: ModuleType = request.param
    return module


@pytest.fixture(scope="session")
def in_python() -> tuple[ModuleType, ModuleType]:
    """The modules rdmanet.credit and rdmanet.wire.slots, read as Python: their objects can be copied."""
    return IN_PYTHON, SLOTS[0]
