"""The pytest plugin of rdmanet: its options, marks and fixtures; what they do is in rdmanet.testing.

Where rdmanet is installed pytest loads this in every run, of every project. So it lies outside of the package and
imports nothing of it, until a test asks for one of its fixtures or has one of its marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rdmanet.testing import Faults, Peer
    from rdmanet.verbs import Device

_FAULTS: pytest.StashKey[Faults] = pytest.StashKey()
_MARKED: pytest.StashKey[list[str]] = pytest.StashKey()  # the faults of the test's mark


# ---- Hooks ------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rdmanet")
    group.addoption(
        "--rdma-device",
        metavar="NAME",
        help="the device of the fixture rdma_device; by default the embedded one, which alone can be made to fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "rdma_faults(*faults, may_miss=False): make these things go wrong during the test",
        "rdma_seeds(count): run the test with so many seeds for its faults",
        'rdma_rules(rules): let the embedded device follow these rules, "roce" or "iwarp"',
        "rdma_only: let rdmanet's event loop fail rather than take TCP; the embedded device counts as RDMA",
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("rdma_seeds")
    if marker is None:
        return
    count = marker.args[0]
    if "rdma_seed" not in metafunc.fixturenames:
        metafunc.fixturenames.append("rdma_seed")
    metafunc.parametrize("rdma_seed", range(1, count + 1), indirect=True, ids=lambda seed: f"seed{seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the marks say is done before other fixtures open anything; tests without marks have nothing of it."""
    names: list[str] | None = getattr(item, "fixturenames", None)
    if names is None or "_rdma_marks" in names:
        return
    if any(item.get_closest_marker(mark) for mark in ("rdma_rules", "rdma_faults", "rdma_only")):
        names.insert(0, "_rdma_marks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test whose faults never came to pass has not tested what it says."""
    result = yield
    marker = item.get_closest_marker("rdma_faults")
    faults = item.stash.get(_FAULTS, None)
    if marker and faults and not marker.kwargs.get("may_miss"):
        missed = faults._missed(item.stash[_MARKED])
        if missed:
            pytest.fail(
                f"these of its faults have never come to pass: {', '.join(missed)} "
                "(may_miss=True says that this is fine)",
                pytrace=False,
            )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    faults = item.stash.get(_FAULTS, None)
    if report.failed and faults and faults._last:
        report.sections.append(("rdma faults", faults._report()))
    return report


# ---- Fixtures -----------------------------------------------------------------------------------------------


@pytest.fixture
def _rdma_marks(request: pytest.FixtureRequest) -> Iterator[None]:
    rules = request.node.get_closest_marker("rdma_rules")
    with contextlib.ExitStack() as stack:
        if rules is not None:
            from rdmanet.testing import _rules

            stack.enter_context(_rules(rules.args[0]))
        if request.node.get_closest_marker("rdma_only") is not None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("RDMANET_REQUIRE", "no-tcp")  # for the test's other processes, too
        if request.node.get_closest_marker("rdma_faults") is not None:
            request.getfixturevalue("rdma_faults")
        yield


@pytest.fixture
def rdma_device(request: pytest.FixtureRequest) -> Device:
    """The device under test: the embedded one, or what ``--rdma-device`` names."""
    from rdmanet.testing import _device

    return _device(request.config.getoption("--rdma-device"))


@pytest.fixture
def rdma_address(rdma_device: Device) -> str:
    """An IP address that leads to the device under test: this host's loopback, where that does."""
    with rdma_device.open() as context:
        addresses = [entry.address for entry in context.gid_table()]
    return str(min(addresses, key=lambda found: (not found.is_loopback, found.is_link_local, found.version)))


@pytest.fixture
def rdma_seed(request: pytest.FixtureRequest) -> int | None:
    """The seed of this run, as the mark ``rdma_seeds`` counts them; None without it."""
    return getattr(request, "param", None)


@pytest.fixture
def rdma_faults(request: pytest.FixtureRequest, rdma_seed: int | None) -> Iterator[Faults]:
    """Makes things go wrong until the test ends; begins with the faults of its mark."""
    from rdmanet.testing import Faults

    if request.config.getoption("--rdma-device") is not None:
        pytest.skip("only the embedded device can be made to fail")
    marker = request.node.get_closest_marker("rdma_faults")
    faults = Faults(rdma_seed)
    faults.set(*(marker.args if marker else ()))
    request.node.stash[_FAULTS] = faults
    request.node.stash[_MARKED] = list(faults.counts)
    yield faults
    faults._end()


@pytest.fixture
def rdma_peer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Start a script in another process: ``rdma_peer("server.py", "argument")``.

    A relative path is relative to the test's file. The peer has the same faults; one that still runs when the
    test ends is killed.
    """
    from rdmanet.testing import _peers

    with _peers(request.path.parent, lambda: request.node.stash.get(_FAULTS, None)) as start:
        yield start


@pytest.fixture
def rdma_no_leaks() -> Iterator[None]:
    """The test ends with the verbs objects it began with, by kind; what others let go of takes a moment."""
    from rdmanet.testing import _no_leaks

    with _no_leaks():
        yield
