"""What all tests share: the device they run on, and the proof that they leave nothing behind.

pytest                              on the embedded device
pytest --device rxe0 tests/device   on a device of the kernel, the same tests
"""

import gc
import os
import time
from collections.abc import Callable, Iterator

import pytest

from rdmanet import _core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="embedded", help="a device's name; by default the embedded one")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> _core.Device:
    """The device under test."""
    name = request.config.getoption("--device")
    if name == "embedded":
        return _core.Library.embedded().devices()[0]
    found = {device.name: device for device in _core.devices()}
    if name not in found:
        pytest.exit(
            f"there is no device {name}; there are {sorted(found)}, missing: {_core.Library.missing()}"
        )
    return found[name]


# ---- Leaks ---------------------------------------------------------------------------------------


def _open_fds() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            pass
    return found


def _mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split(maxsplit=5)[5].strip() for line in maps if "memfd:rdmanet" in line]


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return sorted(names)


def _holdings() -> dict[str, object]:
    return {
        "objects": _core.live_objects(),
        "descriptors": _open_fds(),
        "mappings": _mappings(),
        "threads": _threads(),
    }


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Every test ends with the objects, descriptors, mappings and threads it began with."""
    before = _holdings()
    yield
    # What another thread or process lets go of takes a moment.
    deadline = time.monotonic() + 2
    while (after := _holdings()) != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    left = {kind: (before[kind], after[kind]) for kind in before if before[kind] != after[kind]}
    assert not left, "left behind by this test (before, after)"


# ---- Waiting ---------------------------------------------------------------------------------------


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Call until it is true; the test fails when it does not become so in time."""

    def wait(condition: Callable[[], object], timeout: float = 5, what: str = "") -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
            time.sleep(0.001)

    return wait
