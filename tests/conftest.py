"""What all tests share: the device they run on, and the proof that they leave nothing behind.

pytest                                                     on the embedded device
pytest --device rxe0 --address 10.77.0.1 tests/verbs       on a device of the kernel, the same tests
pytest --across 4                                          between two hosts, under scripts/two_hosts.py: the other
                                                           processes of tests/streams, tests/verbs and tests/tensors
                                                           run on the other

On a device of the kernel a skip is a claim about that device. `--expected-skips FILE` holds the suite to a list
of them: a skip that is not in the list fails the run, and so does a line of the list whose test was not skipped.
"""

import functools
import gc
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rdmanet import _core
from rdmanet.cli import soft_run

# For tests.support, last: under scripts/asan there is another rdmanet than the one in this tree.
sys.path.append(str(Path(__file__).parents[1]))

from tests.support import recording, threads  # noqa: E402

LOOPS = ("asyncio", "uvloop", "trio", "own")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(recording)
    parser.addoption("--device", default="embedded", help="a device's name; by default the embedded one")
    parser.addoption("--address", help="an IP address of that device; by default found by its GIDs")
    parser.addoption(
        "--loop",
        action="append",
        choices=LOOPS,
        help="of the tests that run on several loops, those on this one only; may be given several times",
    )
    parser.addoption(
        "--across",
        type=int,
        choices=(4, 6),
        help="between the hosts of scripts/two_hosts.py, by addresses of this family",
    )
    parser.addoption(
        "--failures-at-once",
        action="store_true",
        help="show each when it happens, in case the run does not end",
    )
    parser.addoption("--require-device", action="store_true", help="fail where there is no such device")
    parser.addoption(
        "--expected-skips", type=Path, metavar="FILE", help="the skips that are right on a device"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: not for `make test` nor the kernel's devices, but for `make test-all`"
    )
    for marker in (
        "quick_on(loop): long on each other loop: what it takes is time, and little of it is the loop's",
        "once: about our side of a stream: it runs on the embedded device, and on one of the kernel's",
        "not_on_iwarp(why): about something that iWARP lacks or does otherwise",
        "not_on_siw(why): about something that the kernel's soft-iWARP does otherwise",
        "not_on_rxe(why): about something that the kernel's soft-RoCE does otherwise",
        "embedded_only(why): about something that devices of the kernel have not, or that takes no device",
    ):
        config.addinivalue_line("markers", marker)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what is to run in the background. Some tests press Ctrl-C, here and in their own processes.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (name := config.getoption("--device")) != "embedded":
        # For the stream tests' own processes too.
        os.environ["RDMANET_DEVICE"] = name
        os.environ["RDMANET_TEST_HOST"] = config.getoption("--address") or "127.0.0.1"
    if family := config.getoption("--across"):
        if "RDMANET_TEST_HERE" not in os.environ:
            raise pytest.UsageError("--across takes two hosts: run it by scripts/two_hosts.py")
        for name, addresses in (("HOST", "HERE"), ("PEER", "THERE")):
            at = os.environ[f"RDMANET_TEST_{addresses}"].split()
            os.environ[f"RDMANET_TEST_{name}"] = at[family == 6]
    if config.getoption("--failures-at-once"):
        config.pluginmanager.register(FailuresAtOnce(config))
    if listed := config.getoption("--expected-skips"):
        config.pluginmanager.register(ExpectedSkips(listed, name))


def pytest_collection_finish() -> None:
    import hypothesis  # noqa: F401  its plugin does so later, and asks the collector about objects made till now

    look_no_more_at_what_is_there()


def pytest_runtest_logstart(nodeid: str) -> None:
    global _file
    if _file != (_file := nodeid.partition("::")[0]):
        look_no_more_at_what_is_there()


_file = ""


def look_no_more_at_what_is_there() -> None:
    """What pytest keeps of all tests, and of those that are over, is never garbage. The collector took a sixth of the
    time, as it looked at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m "not long"` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parameters = {item: item.name.partition("[")[2].rstrip("]").split("-") for item in items}
    if wanted := config.getoption("--loop"):
        # A test's first parameter is its loop, if it has one.
        other = {*LOOPS} - {*wanted}
        config.hook.pytest_deselected(items=[item for item in items if parameters[item][0] in other])
        items[:] = [item for item in items if parameters[item][0] not in other]
    for item in items:
        if (marker := item.get_closest_marker("quick_on")) and marker.args[0] not in parameters[item]:
            item.add_marker(pytest.mark.long)


# ---- The device ------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the rules of the device under test do not allow, before anything is set up for it."""
    device = device_under_test(item.config)
    iwarp = device.transport_type == _core.TransportType.IWARP  # also with RDMANET_SOFT_RULES=iwarp
    kernel = not device.library.embedded_device
    for name, is_so, who in (
        ("not_on_iwarp", iwarp, "iWARP "),
        ("not_on_siw", iwarp and kernel, "siw "),
        ("not_on_rxe", not iwarp and kernel, "rxe "),
        ("embedded_only", kernel, ""),
    ):
        if is_so and (marker := item.get_closest_marker(name)):
            pytest.skip(who + marker.args[0])


@functools.cache
def device_under_test(config: pytest.Config) -> _core.Device:
    name = config.getoption("--device")
    if name == "embedded":
        return _core.Library.embedded().devices()[0]
    found = {device.name: device for device in _core.devices()}
    if name not in found:
        why = f"there is no device {name}; there are {sorted(found)}, missing: {_core.Library.missing()}"
        if config.getoption("--require-device"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return found[name]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> _core.Device:
    """The device under test."""
    return device_under_test(request.config)


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest, device: _core.Device) -> str:
    """An IP address that leads to the device under test."""
    if given := request.config.getoption("--address"):
        return str(given)
    if given := os.environ.get("RDMANET_TEST_HOST"):
        return given
    with device.open() as context:
        addresses = [entry.address for entry in context.gid_table()]
    return str(next(found for found in addresses if found.version == 4))


@pytest.fixture(scope="session")
def c_environment(device: _core.Device) -> dict[str, str]:
    """What a C program has to see to run on the device under test; for the embedded one, what soft-run shows it."""
    if not device.library.embedded_device:
        return dict(os.environ)
    return soft_run.environment(soft_run.library_directory(Path(device.library.path)))


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """Open a kernel's device before the first test: librdmacm keeps it open from then on, and no test has leaked it."""
    if request.config.getoption("--device") != "embedded":
        library = request.getfixturevalue("device").library
        with _core.CMEventChannel(library) as channel, channel.create_id() as id:
            id.bind_addr((request.getfixturevalue("address"), 0))


@pytest.fixture(scope="session")
def fewer(device: _core.Device) -> Callable[[int], int]:
    """This many on the embedded device; a tenth on a kernel's, which runs on an emulated processor."""
    return lambda count: count if device.library.embedded_device else max(2, count // 10)


# ---- Leaks ---------------------------------------------------------------------------------------


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}"
        except FileNotFoundError:  # the listing's own
            pass


def _mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        names = re.findall(r"/memfd:rdmanet.*", maps.read())
    # The null region's windows are made once, and the process's for good.
    return [name for name in names if not name.startswith("/memfd:rdmanet-null")]


def _holdings(device: _core.Device) -> dict[str, Counter[str]]:
    return {
        "objects": Counter(_core.live_objects()),
        "descriptors": Counter(_descriptors()),
        "mappings": Counter(_mappings() if device.library.embedded_device else ()),  # others have none
        "threads": Counter(threads.names()),
    }


@pytest.fixture(autouse=True)
def no_leaks(device: _core.Device) -> Iterator[None]:
    """Every test ends with the objects, descriptors, mappings and threads it began with."""
    before = _holdings(device)
    yield
    # What another thread or process lets go of takes a moment.
    deadline = time.monotonic() + 20
    while (left := _left(before, _holdings(device))) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left, "left behind by this test"


def _left(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {kind: more for kind in before if (more := after[kind] - before[kind])}


# ---- Failures ---------------------------------------------------------------------------------------


class FailuresAtOnce:
    """Shows a failure when it happens, because a run that is killed never reaches its summary; the summary omits it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            captured = [f"---- {name} ----\n{text}" for name, text in report.sections]
            text = "\n".join([f"---- {report.nodeid}, {report.when} ----", report.longreprtext, *captured])
            self.config.get_terminal_writer().write(f"\n{text}\n", flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.config.option.tbstyle = "no"


# ---- Skips -----------------------------------------------------------------------------------------


class ExpectedSkips:
    """Compares what was skipped with a list of lines "device | test | reason".

    Tests are named without their parameters. A line with `*` is about several tests, of which at least one must be
    skipped.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device
        self.skipped: set[tuple[str, str]] = set()
        self.ran: set[str] = set()
        lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
        rows = (tuple(field.strip() for field in line.split("|")) for line in lines if line)
        self.expected = {(test, reason) for device, test, reason in rows if device == self.device}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.split("[")[0]
        self.ran.add(test)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped.add((test, report.longrepr[2].removeprefix("Skipped: ")))

    @property
    def surprises(self) -> list[str]:
        new = [skip for skip in self.skipped if not any(self._is_about(row, skip) for row in self.expected)]
        old = [
            (test, reason)
            for test, reason in self.expected
            if any(fnmatchcase(ran, test) for ran in self.ran)
            and not any(self._is_about((test, reason), skip) for skip in self.skipped)
        ]
        return [
            *(f"skipped, not in the list:  {self.device} | {test} | {why}" for test, why in sorted(new)),
            *(f"in the list, not skipped:  {self.device} | {test} | {why}" for test, why in sorted(old)),
        ]

    @staticmethod
    def _is_about(row: tuple[str, str], skip: tuple[str, str]) -> bool:
        return row[1] == skip[1] and fnmatchcase(skip[0], row[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.surprises and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.surprises:
            terminalreporter.section(f"{self.path.name} is wrong about {self.device}", red=True)
            terminalreporter.write_line("\n".join(self.surprises))


# ---- Waiting ---------------------------------------------------------------------------------------


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Call `condition` until it is true; fail the test if that takes too long."""

    def wait(condition: Callable[[], object], timeout: float = 60, what: str = "") -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
            time.sleep(0.001)

    return wait
