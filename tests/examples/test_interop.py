"""Examples that are ports of C programs talk to those programs, as server and as client.

On the embedded device and on a kernel's: pytest --device rxe0 --address 10.77.0.1 tests/examples/test_interop.py
"""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from foreign import free_port  # noqa: E402

WHO = ["we serve C", "C serves us", pytest.param("we serve us", marks=pytest.mark.long)]


@pytest.fixture
def gid_index(device, address):
    """Of the address under test."""
    with device.open() as context:
        return next(entry.gid_index for entry in context.gid_table() if str(entry.address) == address)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("sleep", [[], ["-e"]], ids=["polling", "sleeping"])
@pytest.mark.not_on_siw("connects queue pairs by rdma_cm only")
def test_rc_pingpong(programs, device, gid_index, who, sleep):
    """Both send and receive all; a message has several packets, and a part of one."""

    def start(by, *arguments):
        options = ["-g", gid_index, "-s", 4100, "-n", 200, *sleep, *arguments]
        if by == "C":
            return programs.c("ibv_rc_pingpong", "-d", device.name, *options)
        return programs.ours("rc_pingpong.py", *options)

    by, _, to = who.split()
    if by == "C":
        port = free_port()
        server = start("C", "-p", port)
        programs.wait(server, lambda: server.has_port(port))
    else:
        server = start("us", "-p", 0)
        port = programs.port(server)
    client = start(to, "-p", port, "127.0.0.1")
    outputs = programs.succeed(server, client)
    for output in outputs:
        assert "1640000 bytes in" in output and "200 iters in" in output
    numbers = [re.findall(r"address: .* QPN (0x\w+), PSN (0x\w+)", output) for output in outputs]
    assert numbers[0] == numbers[1][::-1], "one's own is the other's remote"


@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.long), 60000])
@pytest.mark.parametrize("who", WHO)
def test_rping(programs, address, who, size):
    """Each ping is fetched by the server, shown, and put back; the client compares."""

    def start(by, *arguments):
        options = ["-a", address, "-S", size, "-C", 7, *arguments]
        if by == "C":
            # -v and -V: it prints and compares, as ours does. -d: it says how far it comes.
            return programs.c("rping", "-v", "-V", "-d", *options)
        return programs.ours("rping.py", *options)

    by, _, to = who.split()
    if by == "C":
        port = free_port()
        server = start("C", "-s", "-p", port)
        programs.wait_for_listener(server, port)
    else:
        server = start("us", "-s", "-p", 0)
        port = programs.port(server)
    outputs = programs.succeed(server, start(to, "-c", "-p", port))
    pings = [re.findall(r"^(?:server )?ping data: (.*)", output, re.MULTILINE) for output in outputs]
    assert pings[0] == pings[1]
    assert [ping.split(":")[0] for ping in pings[0]] == [f"rdma-ping-{number}" for number in range(7)]
    assert {len(ping) for ping in pings[0]} == {size - 1}
