"""Examples that are ports of C programs talk to those programs, as server and as client.

On the embedded device and on a kernel's: pytest --device rxe0 --address 10.77.0.1 tests/examples/test_interop.py
"""

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from foreign import free_port, started  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


class Pair:
    """A server and a client on the device under test, one of them ours and one of them C's, or both ours."""

    def __init__(self, device, c_environment, eventually, stack):
        self.device = device
        self.c_environment = c_environment
        self.eventually = eventually
        self.stack = stack
        self.programs = []

    def ours(self, name, *arguments):
        script = [sys.executable, "-W", "error", str(ROOT / "examples" / name), "-d", self.device.name]
        return self._start([*script, *arguments], ENVIRONMENT)

    def c(self, name, *arguments):
        return self._start([name, *arguments], self.c_environment)

    def _start(self, command, environment):
        program = self.stack.enter_context(started(list(map(str, command)), environment))
        self.programs.append(program)
        return program

    def wait(self, program, condition):
        """Until the program is so far."""
        self.eventually(lambda: condition() or program.process.poll() is not None)
        assert condition(), program.output()

    def port(self, program):
        """That our server has taken."""
        listening = re.compile(r"^listening on .*?(\d+)$", re.MULTILINE)
        self.wait(program, lambda: listening.search(program.output()))
        return int(listening.search(program.output())[1])

    def succeed(self):
        """All come to their end; what each has printed, in the order in which they were started."""
        for program in self.programs:
            assert program.wait(100) == 0, "\n---\n".join(each.output() for each in self.programs)
            assert "Exception ignored" not in program.output(), program.output()
        return [program.output() for program in self.programs]


@pytest.fixture
def pair(device, c_environment, eventually):
    with contextlib.ExitStack() as stack:
        yield Pair(device, c_environment, eventually, stack)


@pytest.fixture
def gid_index(device, address):
    """Of the address under test."""
    with device.open() as context:
        return next(entry.gid_index for entry in context.gid_table() if str(entry.address) == address)


def needs(program):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("who", ["we serve C", "C serves us", "we serve us"])
@pytest.mark.parametrize("sleep", [[], ["-e"]], ids=["polling", "sleeping"])
@pytest.mark.not_on_siw("connects queue pairs by rdma_cm only")
def test_rc_pingpong(pair, device, gid_index, who, sleep):
    """Both send and receive all; the sizes are such that a message has several packets, and a part of one."""
    options = ["-g", gid_index, "-s", 4100, "-n", 200, *sleep]
    c = ["ibv_rc_pingpong", "-d", device.name, *options]
    if who != "we serve us":
        needs(c[0])
    if who == "C serves us":
        port = free_port()
        server = pair.c(*c, "-p", port)
        pair.wait(server, lambda: server.has_port(port))
        pair.ours("rc_pingpong.py", *options, "-p", port, "127.0.0.1")
    else:
        port = pair.port(pair.ours("rc_pingpong.py", *options, "-p", 0))
        client = pair.c if who == "we serve C" else pair.ours
        client(*(c if who == "we serve C" else ["rc_pingpong.py", *options]), "-p", port, "127.0.0.1")
    outputs = pair.succeed()
    for output in outputs:
        assert "1640000 bytes in" in output and "200 iters in" in output
    numbers = [re.findall(r"address: .* QPN (0x\w+), PSN (0x\w+)", output) for output in outputs]
    assert numbers[0] == numbers[1][::-1], "one's own is the other's remote"


@pytest.mark.parametrize("size", [64, 60000])
@pytest.mark.parametrize("who", ["we serve C", "C serves us", "we serve us"])
def test_rping(pair, address, who, size):
    """Each ping is fetched by the server, shown, and put back; the client compares."""
    options = ["-a", address, "-S", size, "-C", 7]
    if who != "we serve us":
        needs("rping")
    if who == "C serves us":
        port = free_port()
        server = pair.c("rping", "-s", "-d", "-v", *options, "-p", port)  # -d: it says when it listens
        pair.wait(server, lambda: "rdma_listen" in server.output())
        pair.ours("rping.py", "-c", *options, "-p", port)
    else:
        port = pair.port(pair.ours("rping.py", "-s", *options, "-p", 0))
        if who == "we serve C":
            pair.c("rping", "-c", "-v", "-V", *options, "-p", port)
        else:
            pair.ours("rping.py", "-c", *options, "-p", port)
    pings = [re.findall(r"^(?:server )?ping data: (.*)", output, re.MULTILINE) for output in pair.succeed()]
    assert pings[0] == pings[1]
    assert [ping.split(":")[0] for ping in pings[0]] == [f"rdma-ping-{number}" for number in range(7)]
    assert {len(ping) for ping in pings[0]} == {size - 1}
