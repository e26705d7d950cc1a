"""What all tests share: the device they run on, and the proof that they leave nothing behind.

pytest                              on the embedded device
pytest --device rxe0 tests/device   on a device of the kernel, the same tests
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rdmanet import _core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="embedded", help="a device's name; by default the embedded one")
    parser.addoption("--address", help="an IP address of that device; by default found by its GIDs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "not_on_iwarp(why): about something that iWARP lacks or does otherwise"
    )


@pytest.fixture(autouse=True)
def rules(request: pytest.FixtureRequest) -> None:
    """With RDMANET_SOFT_RULES=iwarp, or on siw, what goes against iWARP's rules is skipped."""
    marker = request.node.get_closest_marker("not_on_iwarp")
    if marker and request.getfixturevalue("device").transport_type == _core.TransportType.IWARP:
        pytest.skip(f"iWARP {marker.args[0]}")


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


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest, device: _core.Device) -> str:
    """An IP address that leads to the device under test."""
    if given := request.config.getoption("--address"):
        return str(given)
    with device.open() as context:
        addresses = [entry.address for entry in context.gid_table()]
    return str(next(found for found in addresses if found.version == 4))


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """librdmacm keeps a kernel's device open from its first use on; that is no test's leak."""
    if request.config.getoption("--device") != "embedded":
        library = request.getfixturevalue("device").library
        with _core.CMEventChannel(library) as channel, channel.create_id() as id:
            id.bind_addr((request.getfixturevalue("address"), 0))


# ---- Leaks ---------------------------------------------------------------------------------------


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}"
        except FileNotFoundError:  # the listing's own
            pass


def _mappings() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            # The null region's windows are made once, and the process's for good.
            if "memfd:rdmanet" in line and "memfd:rdmanet-null" not in line:
                yield line.split(maxsplit=5)[5].strip()


def _threads() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name != "libuv-worker":  # uvloop's pool for getaddrinfo is the process's for good
            yield name


def _holdings() -> dict[str, Counter[str]]:
    return {
        "objects": Counter(_core.live_objects()),
        "descriptors": Counter(_descriptors()),
        "mappings": Counter(_mappings()),
        "threads": Counter(_threads()),
    }


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Every test ends with the objects, descriptors, mappings and threads it began with."""
    before = _holdings()
    yield
    # What another thread or process lets go of takes a moment.
    deadline = time.monotonic() + 2
    while (left := _left(before, _holdings())) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left, "left behind by this test"


def _left(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {kind: more for kind in before if (more := after[kind] - before[kind])}


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
