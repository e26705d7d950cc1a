"""Other people's programs, killed in mid-run: the other end is told, and nothing is left of either.

`make foreign` runs whole lists of them to their end; the tests here end them from outside.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from rdmanet import _core
from rdmanet.cli.soft_run import environment, library_directory

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from foreign import Program, free_port, started  # noqa: E402

PROGRAMS = {
    "ibv_rc_pingpong": "ibv_rc_pingpong -p {port} -g 0 -n 1000000000 {address}",
    "ibv_rc_pingpong -e": "ibv_rc_pingpong -p {port} -g 0 -n 1000000000 -e {address}",
    "ib_write_bw": "ib_write_bw -F -p {port} -D 60 {address}",
    "ib_send_bw": "ib_send_bw -F -p {port} -D 60 {address}",
    "ib_send_bw --run_infinitely": "ib_send_bw -F -p {port} --run_infinitely {address}",
    # Not with -R: its server is connected twice, and waits for ever for a client that dies in between.
    "ib_read_bw": "ib_read_bw -F -p {port} -D 60 {address}",
}
ENDS = [
    ("client", signal.SIGKILL),
    ("server", signal.SIGKILL),
    ("both", signal.SIGKILL),
    ("client", signal.SIGTERM),
    ("server", signal.SIGINT),
]
ENDS_WITHIN = 20.0  # of the survivor: retry budgets run out


def until(condition, what, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it never came to {what}"
        time.sleep(0.01)


def descriptors_of(pid):
    """The paths of its descriptors; none if the process is gone or we may not look at it."""
    found = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found[f"/proc/{pid}/fd/{fd}"] = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        pass
    return found


def names_of(pid):
    """The device's abstract sockets that this process has."""
    inodes = {
        found[1] for to in descriptors_of(pid).values() if (found := re.fullmatch(r"socket:\[(\d+)\]", to))
    }
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {words[7] for words in lines if len(words) > 7 and words[6] in inodes and "rdmanet" in words[7]}


def memfds_of(pid, name=""):
    """The inodes of the device's memory that this process has open or mapped."""
    found = set()
    try:
        for path, to in descriptors_of(pid).items():
            if to.startswith(f"/memfd:rdmanet{name}"):
                found.add(os.stat(path).st_ino)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if f"/memfd:rdmanet{name}" in line:
                found.add(int(line.split()[4]))
    except OSError:
        pass
    return found


def are_connected(one, other):
    """Whether each has the other's arena: before that, one may not have connected its queue pair yet.

    Then the other would wait for ever for a peer that dies, as on an adapter.
    """
    return len(memfds_of(one, "-arena") & memfds_of(other, "-arena")) == 2


@pytest.mark.parametrize(("victim", "number"), ENDS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_in_mid_run(name, victim, number, interruptible):
    command = PROGRAMS[name]
    if not shutil.which(command.split()[0]):
        pytest.skip(f"{command.split()[0]} is not installed")
    variables = environment(library_directory(Path(_core.Library.embedded().path)))
    port = free_port()
    with (
        started(command.format(port=port, address=""), variables) as server,
        started_when_ready(server, command.format(port=port, address="127.0.0.1"), port, variables) as client,
    ):
        pids = [server.process.pid, client.process.pid]
        until(lambda: are_connected(*pids), "talking")
        names = names_of(pids[0]) | names_of(pids[1])
        memory = memfds_of(pids[0]) | memfds_of(pids[1])
        assert names and memory
        for end, program in (("server", server), ("client", client)):
            if victim in (end, "both"):
                program.process.send_signal(number)
        statuses = [program.wait(ENDS_WITHIN) for program in (server, client)]

    assert None not in statuses, "the survivor never noticed"
    assert 0 not in statuses, "the survivor took it for a good end"
    assert -number in statuses
    assert not any(name in Path("/proc/net/unix").read_text().split() for name in names)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        assert not memfds_of(pid) & memory, f"process {pid} holds memory of the dead"


def started_when_ready(server: Program, command, port, variables):
    until(lambda: server.has_port(port) or server.process.poll() is not None, "listening")
    assert server.process.poll() is None, f"the server has ended:\n{server.output()}"
    return started(command, variables)


def test_many_at_once():
    """Twenty pairs of different programs, all at the same time: each finds its own peer, and comes to its end."""
    commands = [
        "ibv_rc_pingpong -p {port} -g 0 -c -e {address}",
        "ibv_ud_pingpong -p {port} -g 0 -n 200 -s 512 -e {address}",
        "ib_send_bw -F -p {port} -n 200 -e {address}",
        "ib_read_bw -F -p {port} -n 200 -e {address}",
    ] * 5
    if absent := {command.split()[0] for command in commands if not shutil.which(command.split()[0])}:
        pytest.skip(f"not installed: {', '.join(absent)}")
    variables = environment(library_directory(Path(_core.Library.embedded().path)))
    with contextlib.ExitStack() as stack:
        servers, clients = [], []
        for command in commands:
            port = free_port()
            server = stack.enter_context(started(command.format(port=port, address=""), variables))
            until(lambda server=server, port=port: server.has_port(port), "listening")
            servers.append((command, server, port))
        for command, _, port in servers:
            client = stack.enter_context(started(command.format(port=port, address="127.0.0.1"), variables))
            clients.append((command, client, port))
        for command, program, _ in clients + servers:  # a server of a client that failed waits for another
            assert program.wait(120) == 0, f"{command}:\n{program.output()}"
