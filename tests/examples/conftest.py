"""Examples and C programs, started as programs, on the device under test."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from foreign import started  # noqa: E402


class Programs:
    """Starts programs, and ends them with the test, however it goes."""

    def __init__(self, device, c_environment, eventually, stack):
        self._device = device
        self._c_environment = c_environment
        self._eventually = eventually
        self._stack = stack

    def ours(self, name, *arguments):
        """An example."""
        script = [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "error",
            ROOT / "examples" / name,
            "-d",
            self._device.name,
        ]
        return self._start([*script, *arguments], os.environ | {"PYTHONPATH": str(ROOT)})

    def c(self, name, *arguments):
        """A program of the distribution's; the test is skipped where it is not installed."""
        if not shutil.which(name):
            pytest.skip(f"{name} is not installed")
        return self._start([name, *arguments], self._c_environment)

    def _start(self, command, environment):
        return self._stack.enter_context(started([str(word) for word in command], environment))

    def wait(self, program, condition):
        """Wait until the condition holds, or fail if the program ends first."""
        self._eventually(lambda: condition() or program.process.poll() is not None)
        assert condition(), program.output()

    def port(self, program):
        """The port of our server, from a whole line: under PYTHONUNBUFFERED print() writes word by word."""
        listening = re.compile(r"^listening on .*?(\d+)\n", re.MULTILINE)
        self.wait(program, lambda: listening.search(program.output()))
        return int(listening.search(program.output())[1])

    def wait_for_listener(self, program, port):
        """Until a server can be called by rdma_cm at this port. Programs are known to say so before it is true."""
        if self._device.library.embedded_device:
            self.wait(program, lambda: program.has_port(port))
        else:
            self.wait(program, lambda: _listens(self._device, port))

    def succeed(self, *programs):
        """Wait for them to exit with status 0; return what each has printed."""
        for program in programs:
            assert program.wait(100) == 0, "\n---\n".join(each.output() for each in programs)
            assert "Exception ignored" not in program.output(), program.output()
        return [program.output() for program in programs]


def _listens(device, port):
    """Does an identifier at this port of a kernel's device, by what iproute2 tells?"""
    show = ["rdma", "resource", "show", "cm_id"]
    identifiers = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    listener = rf"^link {re.escape(device.name)}/.* state LISTEN .* src-addr \S+:{port}\b"
    return re.search(listener, identifiers, re.MULTILINE) is not None


@pytest.fixture
def programs(device, c_environment, eventually):
    with contextlib.ExitStack() as stack:
        yield Programs(device, c_environment, eventually, stack)
