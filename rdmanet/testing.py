"""A pytest plugin that tests RDMA programs under faults, on the embedded device.

pytest finds it by itself if rdmanet is installed; otherwise use ``-p rdmanet.testing``. docs/testing.md lists the
faults, and has two examples. The part that pytest loads in every run is the module _rdmanet_pytest.

Fixtures
    rdma_device       the embedded device; ``--rdma-device NAME`` takes another one, which has no faults
    rdma_address      an IP address of it
    rdma_faults       sets faults, clears them at the end of the test, and counts those that happened
    rdma_seed         the seed of this run, with the mark rdma_seeds
    rdma_peer         runs a script as another process, which can be frozen or killed
    rdma_no_leaks     fails a test that leaves queue pairs, memory regions or other objects behind

Marks
    rdma_faults("loss=5%", ...)    sets these faults for the whole test, which fails if one of them never happened
    rdma_seeds(20)                 runs the test with this many seeds; the test's name contains the seed
    rdma_rules("iwarp")            runs the test on a device that follows iWARP's rules
    rdma_only                      a connection of rdmanet's event loop fails rather than take TCP

The plugin does not affect tests that use none of this, and is not even imported for them.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmanet._core import Device, Library, devices, live_objects

__all__ = ["Faults", "Peer"]

FAULTS_VARIABLE = "RDMANET_SOFT_CHAOS"
RULES_VARIABLE = "RDMANET_SOFT_RULES"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """For ``-p rdmanet.testing``: load the plugin, by the name of the entry point, which may come later."""
    if not pluginmanager.has_plugin("rdmanet"):
        import _rdmanet_pytest

        pluginmanager.register(_rdmanet_pytest, "rdmanet")


# ---- Faults ----------------------------------------------------------------------------------------


class Faults:
    """The faults of this process: they apply to every context that is open, or is opened while they are set.

    A fault is a text such as ``"loss=5%"`` or ``"fail=send:3:REM_OP_ERR"``; docs/testing.md lists them all.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._library = Library.embedded()
        self._seed = seed
        self._text = ""
        self._last = ""
        self._happened = 0
        self._counts: Counter[str] = Counter()

    @property
    def text(self) -> str:
        """The faults that are set, in the device's own syntax: enough to repeat a run."""
        return self._text

    @property
    def happened(self) -> int:
        """How many faults have happened in this test so far."""
        return self._happened + self._library.faults_happened()

    @property
    def counts(self) -> dict[str, int]:
        """The faults that were set in this test so far, each with how often it has happened.

        Each counts by itself, so that a fault that happens does not hide one that never does.
        """
        counts = self._counts.copy()
        counts.update(self._library.faults())
        return dict(counts)

    @property
    def environment(self) -> dict[str, str]:
        """An environment that gives a child process the same faults."""
        return {**os.environ, FAULTS_VARIABLE: self._text}

    def set(self, *faults: str) -> None:
        """Replace the faults by these. Their counters start anew.

        :raises ValueError: one is malformed; the message says what is allowed
        """
        seed = [] if self._seed is None else [f"seed={self._seed}"]
        self._apply(", ".join([*seed, *faults]) if faults else "")

    def _apply(self, text: str) -> None:
        happened, counts = self._library.faults_happened(), self.counts
        self._library.set_faults(text)  # which resets its counters
        self._happened += happened
        self._counts = Counter(counts)
        self._text = text
        self._last = text or self._last

    def clear(self) -> None:
        """Clear all faults. Requests that are already posted still meet the faults they were posted with."""
        self.set()

    @contextlib.contextmanager
    def __call__(self, *faults: str) -> Iterator["Faults"]:
        """Set these faults for the length of a ``with`` block, then restore those from before."""
        before = self._text
        self.set(*faults)
        try:
            yield self
        finally:
            self._apply(before)

    def __repr__(self) -> str:
        return f"<Faults {self._text!r}, {self.happened} happened>"

    def _report(self) -> str:
        each = [f"{fault} {count}" for fault, count in self.counts.items()]
        return f"{FAULTS_VARIABLE}={self._last!r}, {self.happened} happened" + (
            f" ({', '.join(each)})" if len(each) > 1 else ""
        )

    def _missed(self, faults: list[str]) -> list[str]:
        """Those of these faults that have never happened."""
        counts = self.counts
        return [fault for fault in faults if not counts[fault]]

    def _end(self) -> None:
        self._library.set_faults(None)


# ---- Other processes ---------------------------------------------------------------------------------


class Peer:
    """A Python script in another process, with lines of text as input and output.

    A frozen peer is not dead: its memory can still be written to, and its receives are consumed, but it does not poll.
    When a peer dies, those connected to it are notified.
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
        """Its process id."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = 10) -> str:
        """Read the next line of its standard output.

        :raises TimeoutError: it printed no line in time
        :raises EOFError: it has ended, or closed its output
        """
        stdout = self._process.stdout
        assert stdout is not None
        line = b""
        deadline = time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{self.name} printed no line within {timeout} s")
            byte = os.read(stdout.fileno(), 1)
            if not byte:
                raise EOFError(f"{self.name} closed its output; its exit status is {self._process.poll()}")
            line += byte
        return line[:-1].decode()

    def freeze(self) -> None:
        """Stop it (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it continue (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout: float = 10) -> int:
        """Wait for its exit status; if a signal killed it, that is minus the signal's number."""
        return self._process.wait(timeout)

    def close(self) -> None:
        """Kill it if it is still running."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __repr__(self) -> str:
        return f"<Peer {self.name} pid {self.pid}>"


# ---- The implementation of fixtures and marks ------------------------------------------------------------


@contextlib.contextmanager
def _rules(rules: str) -> Iterator[None]:
    if Library.embedded().live().get("contexts"):
        pytest.fail(
            "the device's rules cannot be changed while this process has a context open", pytrace=False
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RULES_VARIABLE, rules)
        yield


def _device(name: str | None) -> Device:
    if name is None:
        return Library.embedded().devices()[0]
    found = {device.name: device for device in devices()}
    if name not in found:
        pytest.fail(f"there is no device {name}; there are {sorted(found)}", pytrace=False)
    return found[name]


@contextlib.contextmanager
def _peers(here: Path, faults_of_the_test: Callable[[], Faults | None]) -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(script: str | os.PathLike[str], *arguments: str) -> Peer:
        faults = faults_of_the_test()
        environment = dict(os.environ) if faults is None else faults.environment
        peer = Peer(here / script, *arguments, environment=environment)
        started.append(peer)
        return peer

    try:
        yield start
    finally:
        for peer in started:
            peer.close()


def _left_since(before: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in live_objects().items() if count}) - before


@contextlib.contextmanager
def _no_leaks() -> Iterator[None]:
    before = Counter(live_objects())
    yield
    deadline = time.monotonic() + 2
    while (left := _left_since(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if left:
        pytest.fail(f"left behind by this test: {dict(left)}", pytrace=False)
