"""Test RDMA programs where things go wrong: a pytest plugin on the embedded device.

With rdmanet installed pytest finds it by itself; otherwise ``-p rdmanet.testing``. docs/testing.md has
the faults and two examples.

Fixtures
    rdma_device       the embedded device; ``--rdma-device NAME`` takes another one, without faults
    rdma_address      an IP address that leads to it
    rdma_faults       sets faults, ends them with the test, and knows how many have come to pass
    rdma_seed         the seed of this run, with the mark rdma_seeds
    rdma_peer         runs a script as another process, to be frozen or killed
    rdma_no_leaks     fails a test that leaves queue pairs, memory regions or other objects behind

Marks
    rdma_faults("loss=5%", ...)    these faults for the whole test, which fails when none has come to pass
    rdma_seeds(20)                 run the test with so many seeds; the failing one stands in its name
    rdma_rules("iwarp")            on a device that follows iWARP's rules

Nothing here touches a test that asks for none of it.
"""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from rdmanet._core import Device, Library, devices, live_objects

__all__ = ["Faults", "Peer"]

FAULTS_VARIABLE = "RDMANET_SOFT_CHAOS"
RULES_VARIABLE = "RDMANET_SOFT_RULES"

_FAULTS = pytest.StashKey["Faults"]()


# ---- Faults ----------------------------------------------------------------------------------------


class Faults:
    """The faults of this process: of every context that is open, or will be while they last.

    A fault is text such as ``"loss=5%"`` or ``"fail=send:3:REM_OP_ERR"``; docs/testing.md has them all.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._library = Library.embedded()
        self._seed = seed
        self._text = ""
        self._last = ""
        self._happened = 0

    @property
    def text(self) -> str:
        """The faults in force, as the device understands them: enough to repeat a run."""
        return self._text

    @property
    def happened(self) -> int:
        """How many faults have come to pass in this test so far."""
        return self._happened + self._library.faults_happened()

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a child process that is to have the same faults."""
        return {**os.environ, FAULTS_VARIABLE: self._text}

    def set(self, *faults: str) -> None:
        """These faults from now on, instead of those before. What they count starts anew.

        :raises ValueError: one makes no sense; the message says what would
        """
        seed = [] if self._seed is None else [f"seed={self._seed}"]
        self._apply(", ".join([*seed, *faults]) if faults else "")

    def _apply(self, text: str) -> None:
        happened = self._library.faults_happened()
        self._library.set_faults(text)  # which counts anew
        self._happened += happened
        self._text = text
        self._last = text or self._last

    def clear(self) -> None:
        """No faults from now on. What was posted before still meets those it was posted with."""
        self.set()

    @contextlib.contextmanager
    def __call__(self, *faults: str) -> Iterator["Faults"]:
        """These faults for the time of a ``with`` block, then those from before."""
        before = self._text
        self.set(*faults)
        try:
            yield self
        finally:
            self._apply(before)

    def __repr__(self) -> str:
        return f"<Faults {self._text!r}, {self.happened} happened>"

    def _report(self) -> str:
        return f"{FAULTS_VARIABLE}={self._last!r}, {self.happened} have come to pass"

    def _end(self) -> None:
        self._library.set_faults(None)


# ---- Other processes ---------------------------------------------------------------------------------


class Peer:
    """A Python script in another process, which says and hears lines.

    A frozen peer is not a dead one: its memory can be written to and its receives are used, only nobody polls there.
    When a peer dies, whoever is connected to it is told.
    """

    def __init__(self, script: str | os.PathLike[str], *arguments: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", os.fspath(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.name = Path(script).name

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def say(self, line: str) -> None:
        """A line for its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = 10) -> str:
        """The next line of its standard output.

        :raises TimeoutError: it says nothing
        :raises EOFError: it has ended, or closed its output
        """
        stdout = self._process.stdout
        assert stdout is not None
        line = b""
        deadline = time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{self.name} says nothing for {timeout} s")
            byte = os.read(stdout.fileno(), 1)
            if not byte:
                raise EOFError(f"{self.name} says no more; its status is {self._process.poll()}")
            line += byte
        return line[:-1].decode()

    def freeze(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, without a word to anybody (SIGKILL)."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout: float = 10) -> int:
        """Its exit status; minus the signal's number if it was killed by one."""
        return self._process.wait(timeout)

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __repr__(self) -> str:
        return f"<Peer {self.name} pid {self.pid}>"


# ---- The plugin -----------------------------------------------------------------------------------------


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test whose faults never came to pass has not tested what it says."""
    result = yield
    marker = item.get_closest_marker("rdma_faults")
    faults = item.stash.get(_FAULTS, None)
    if marker and faults and not marker.kwargs.get("may_miss") and not faults.happened:
        pytest.fail(
            f"none of its faults has come to pass: {faults._last!r} (may_miss=True says that this is fine)",
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


@pytest.fixture(autouse=True)
def _rdma_marks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Does what the marks say, before other fixtures open anything."""
    rules = request.node.get_closest_marker("rdma_rules")
    with contextlib.ExitStack() as stack:
        if rules is not None:
            stack.enter_context(_rules(rules.args[0]))
        if request.node.get_closest_marker("rdma_faults") is not None:
            request.getfixturevalue("rdma_faults")
        yield


@contextlib.contextmanager
def _rules(rules: str) -> Iterator[None]:
    if Library.embedded().live().get("contexts"):
        pytest.fail(
            "the device's rules cannot be changed while this process has a context open", pytrace=False
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RULES_VARIABLE, rules)
        yield


@pytest.fixture
def rdma_device(request: pytest.FixtureRequest) -> Device:
    """The device under test: the embedded one, or what ``--rdma-device`` names."""
    name = request.config.getoption("--rdma-device")
    if name is None:
        return Library.embedded().devices()[0]
    found = {device.name: device for device in devices()}
    if name not in found:
        pytest.fail(f"there is no device {name}; there are {sorted(found)}", pytrace=False)
    return found[name]


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
    if request.config.getoption("--rdma-device") is not None:
        pytest.skip("only the embedded device can be made to fail")
    marker = request.node.get_closest_marker("rdma_faults")
    faults = Faults(rdma_seed)
    faults.set(*(marker.args if marker else ()))
    request.node.stash[_FAULTS] = faults
    yield faults
    faults._end()


@pytest.fixture
def rdma_peer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Start a script in another process: ``rdma_peer("server.py", "argument")``.

    A relative path is relative to the test's file. The peer has the same faults; one that still runs when the
    test ends is killed.
    """
    here = request.path.parent
    started: list[Peer] = []

    def start(script: str | os.PathLike[str], *arguments: str) -> Peer:
        faults = request.node.stash.get(_FAULTS, None)
        environment = dict(os.environ) if faults is None else faults.environment
        peer = Peer(here / script, *arguments, environment=environment)
        started.append(peer)
        return peer

    yield start
    for peer in started:
        peer.close()


def _left_since(before: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in live_objects().items() if count}) - before


@pytest.fixture
def rdma_no_leaks() -> Iterator[None]:
    """The test ends with the verbs objects it began with, by kind; what others let go of takes a moment."""
    before = Counter(live_objects())
    yield
    deadline = time.monotonic() + 2
    while (left := _left_since(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if left:
        pytest.fail(f"left behind by this test: {dict(left)}", pytrace=False)
