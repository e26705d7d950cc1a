"""What doctor says of programs that run: the fabric to one is tried, and those that are asked say what they have."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from rdmanet.base.accounts import ConnectionInfo
from rdmanet.cli import asking, checks, running
from rdmanet.cli.asking import Answer
from rdmanet.cli.columns import Connections
from rdmanet.cli.ss import Process as Seen
from rdmanet.loop import choice, doors, kernel, loop_factory, trust
from tests.cli.test_commands import ENVIRONMENT, run
from tests.support.processes import Process

SERVER = """
import asyncio, rdmanet
from rdmanet.loop import doors
doors.VERSION += {newer}
async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), '127.0.0.1', 0)
    port = server.sockets[0].getsockname()[1]
    {more}
    print(port, flush=True)
    await server.serve_forever()
{run}(main())
"""
TAKE_ALL = """
    import os, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
"""
FOR_RDMA, FOR_TCP = "rdmanet.run", "asyncio.run"


@contextlib.contextmanager
def server(run=FOR_RDMA, newer=0, more=""):
    code = SERVER.format(run=run, newer=newer, more=more)
    with Process(sys.executable, "-c", code, env=ENVIRONMENT) as process:
        process.port = int(process.line())
        yield process


def findings(*arguments):
    """Doctor's findings by check, and whether one failed that is not of another program on this machine."""
    status, out, _ = run("doctor", "--json", *arguments)
    found = json.loads(out)["findings"]
    failed = {each["check"] for each in found if each["status"] == "fail"}
    assert status == bool(failed)
    return bool(failed - {"processes"}), {each["check"]: each for each in found}


def test_a_program_that_takes_rdma():
    with server() as there:
        failed, found = findings(f"127.0.0.1:{there.port}")
    assert (failed, found["fabric"]["status"], found["ping"]["status"]) == (False, "ok", "ok")
    assert "take RDMA to 127.0.0.1: the server on this host offers RDMA" in found["fabric"]["found"]


def test_a_program_of_another_version():
    """It offers RDMA, and what it says is only understood when it is tried."""
    with server(newer=1) as there:
        failed, found = findings(f"127.0.0.1:{there.port}")
    assert (failed, found["fabric"]["status"]) == (True, "fail")
    ours, theirs = doors.VERSION, doors.VERSION + 1
    assert f"door speaks version {theirs}, this side speaks version {ours}" in found["fabric"]["found"]
    assert found["fabric"]["advice"].startswith("install the same version of rdmanet on both sides")


def test_a_program_without_descriptors():
    """It would take RDMA, and is not to be started otherwise."""
    with server(more=TAKE_ALL) as there:
        _, found = findings(f"127.0.0.1:{there.port}")
        silent = f"process {there.pid} does not answer: it has "
    assert silent in found["fabric"]["found"] and found["ping"]["status"] == "fail"
    # Which of these, the device says.
    assert any(words in found["ping"]["found"] for words in (silent, "the server has no descriptors left"))
    assert {found[name]["advice"].split(":")[0] for name in ("fabric", "ping")} == {
        "raise the limit of descriptors"
    }


def test_a_program_by_tcp_that_runs_is_not_to_be_started():
    with server(run=FOR_TCP) as there:
        failed, found = findings(f"127.0.0.1:{there.port}")
    assert (failed, found["fabric"]["status"], found["ping"]["status"]) == (False, "warn", "info")
    assert "take TCP to 127.0.0.1: no program on this host offers RDMA there" in found["fabric"]["found"]
    assert found["fabric"]["advice"] == "start the server with `rdmanet run`, or on rdmanet.run()"
    assert "a program answers by TCP, and offers no RDMA" in found["ping"]["found"]
    assert not [each for each in found.values() if "that is to listen there" in each["advice"]]


def test_nobody_listens():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        failed, found = findings(f"127.0.0.1:{bound.getsockname()[1]}")
    assert failed and "get no connection" in found["fabric"]["found"]
    assert "start the program that is to listen there" in found["ping"]["advice"]


def test_a_process_that_is_stopped_and_one_by_tcp(monkeypatch):
    here, there = ("127.0.0.1", 1), ("127.0.0.1", 2)
    why = "the server offers RDMA, but is user 7's, whose memory cannot be mapped"
    made = [
        ConnectionInfo("tcp", reason, "client", here, there, "open") for reason in (why, why, doors.NOBODY)
    ]
    made.append(ConnectionInfo("rdma", "", "client", here, there, "open"))
    seen = [
        Seen(1, 0, "stopped", silent="stopped: it was sent SIGSTOP"),
        Seen(2, 0, "old", silent="it speaks version 0 of this, and `rdmanet ss` version 1"),
        Seen(3, 0, "talks", answers=[Answer(3, 0, connections=Connections(made))]),
    ]
    monkeypatch.setattr(running.Picture, "take", lambda picture, pid: seen)
    found = [(each.status, each.found) for each in running.processes(Path("/"))]
    assert found == [
        ("warn", "1 (stopped) does not answer: stopped: it was sent SIGSTOP"),
        ("fail", "2 (old) does not answer: it speaks version 0 of this, and `rdmanet ss` version 1"),
        ("ok", "3 (talks): connections by RDMA: 1, by TCP: 3"),
        ("info", "3 (talks): 1 by TCP: no program on this host offers RDMA there"),
        ("warn", f"3 (talks): 2 by TCP: {why}"),
    ]
    assert all(each.advice for each in running.processes(Path("/")) if each.status in ("warn", "fail"))


@pytest.fixture
def no_proc(monkeypatch):
    """Nothing is mounted there."""

    def missing(path, *args):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(trust.posix, "readlink", missing)
    names_in = kernel.names_in
    monkeypatch.setattr(kernel, "names_in", lambda path: [] if path == "/proc" else names_in(path))
    monkeypatch.setattr(trust, "_namespace", missing)
    monkeypatch.setattr(asking, "open", missing, raising=False)


def test_proc_that_is_missing_is_the_cause(no_proc, monkeypatch, tmp_path):
    monkeypatch.delenv("RDMANET_SOFT_TRANSPORT", raising=False)

    async def part(reader, writer):
        await reader.read()
        writer.close()

    async def tried():
        async with await asyncio.start_server(part, "127.0.0.1", 0) as there:
            return await running.reach("127.0.0.1", there.sockets[0].getsockname()[1])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        finding = runner.run(tried())
    assert (
        finding.status == "warn"
        and "/proc, by which its memory is found, is not mounted here" in finding.found
    )
    assert "mount -t proc" in finding.advice
    for check in (checks.mapped, running.processes):
        [finding] = check(tmp_path)
        assert finding.status == "warn" and "proc is not mounted" in finding.found
        assert "mount -t proc" in finding.advice
    [finding] = checks.direct(tmp_path)
    assert (finding.status, "see `mapped`" in finding.found) == ("info", True)


def test_proc_of_other_numbers(monkeypatch):
    monkeypatch.setattr(trust.posix, "readlink", lambda path: "1")
    assert trust.why_no_proc() == "/proc, by which its memory is found, shows another pid namespace"


def test_tcp_that_is_excluded(monkeypatch):
    monkeypatch.setenv("RDMANET_REQUIRE", "no-tcp")
    with server(run=FOR_TCP) as there, asyncio.Runner(loop_factory=loop_factory) as runner:
        finding = runner.run(running.reach("127.0.0.1", there.port))
    assert finding.status == "fail" and "which RDMANET_REQUIRE=no-tcp excludes" in finding.found
    assert finding.advice.startswith("start the server with")


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (doors.NOBODY, "info"),
        ("the peers that RDMA is for do not include it", "info"),
        ("RDMA was tried: the server's loop did not answer within 0.3 s", "warn"),
        ("the device requires a secret", "fail"),
        ("whatever it is", "warn"),
        (choice.why_no_adapter() or "this host has no RDMA adapter for others", "warn"),
    ],
)
def test_how_bad_a_reason_is(reason, status):
    assert running.advice(reason)[0] == status and running.advice(reason)[1]
