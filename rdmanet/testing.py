"""Test RDMA programs where things go wrong: a pytest plugin on the embedded device.

With rdmanet installed pytest finds it by itself; otherwise ``-p rdmanet.testing``. docs/testing.md has
the faults and two examples. pytest's side of it, which loads in every run, is the module _rdmanet_pytest.

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

Nothing here touches a test that asks for none of it, or is even imported for it.
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

pytest_plugins = ("_rdmanet_pytest",)  # for `-p rdmanet.testing`


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


# ---- What fixtures and marks do -------------------------------------------------------------------------


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
