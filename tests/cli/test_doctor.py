"""doctor and gids: what a machine lacks is named, with the command that mends it; a ping tells reachable from open."""

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rdmanet
from rdmanet import _core
from rdmanet.cli import checks, command_line, doctor
from rdmanet.loop import choice, kernel
from tests.cli.test_commands import ENVIRONMENT, run, spoken
from tests.support.processes import Process
from tests.support.waiting import loop_turns, until_seen


@pytest.fixture
def machine(tmp_path):
    """A root directory with an RDMA device in it, in the state in which all is well."""
    for directory in ("proc/sys/kernel/yama", "dev/infiniband", "sys/class/infiniband/mlx5_0"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "proc/modules").write_text("".join(f"{name} 1 0 - Live 0x0\n" for name in checks._MODULES))
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.1.0-18-amd64\n")
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("0\n")
    for node in ("uverbs0", "rdma_cm"):
        (tmp_path / "dev/infiniband" / node).touch()
    return tmp_path


def found(check, root):
    return [(finding.status, finding.found, finding.advice) for finding in check(root)]


def test_this_machine_has_the_embedded_device():
    status, out, err = run("doctor", "--json")
    findings = json.loads(out)["findings"]
    assert {finding["check"] for finding in findings} >= {
        "libraries",
        "memlock",
        "ports",
        "gids",
        "fork",
        "mapped",
        "direct",
    }
    assert status == any(finding["status"] == "fail" for finding in findings)
    assert not [finding for finding in findings if finding["status"] == "ok" and "Errno" in finding["found"]]
    assert err == ""
    assert all(finding["advice"] for finding in findings if finding["status"] in ("fail", "warn"))
    assert any(
        "embedded" in f["found"] and f["status"] == "ok" for f in findings if f["check"] == "libraries"
    )
    printed = run("doctor")[1]
    others = ("fork", "processes")  # which come and go
    assert all(finding["found"] in printed for finding in findings if finding["check"] not in others)


def test_a_healthy_machine_has_no_failure(machine):
    for check in (checks.modules, checks.nodes, checks.forks):
        assert {status for status, *_ in found(check, machine)} == {"ok"}, check


@pytest.fixture
def dumpable():
    """Set whether this process is dumpable, until the test is over."""
    libc = ctypes.CDLL(None)
    before = libc.prctl(3, 0, 0, 0, 0)
    yield lambda yes: libc.prctl(4, int(yes), 0, 0, 0)
    libc.prctl(4, before, 0, 0, 0)


def test_who_maps_this_process(monkeypatch, dumpable):
    """Each reason why nobody does; without one, processes like this do."""
    root = Path("/")
    dumpable(True)
    monkeypatch.delenv("RDMANET_SOFT_TRANSPORT", raising=False)
    [(status, text, _)] = found(checks.mapped, root)
    assert status == "ok" and "map this one's memory" in text
    monkeypatch.setattr(checks, "_overflow_user", lambda root: os.geteuid())
    [(status, text, _)] = found(checks.mapped, root)
    assert status == "info" and "without a name" in text
    dumpable(False)
    [(status, text, advice)] = found(checks.mapped, root)
    assert status == "info" and "not dumpable" in text and "exec" in advice
    monkeypatch.setenv("RDMANET_SOFT_TRANSPORT", "stream")
    [(status, text, _)] = found(checks.mapped, root)
    assert status == "info" and "use TCP" in text


def test_a_process_that_may_not_be_looked_at(tmp_path, monkeypatch, dumpable):
    """The kernel refuses, which it never does to root."""
    monkeypatch.delenv("RDMANET_SOFT_TRANSPORT", raising=False)
    dumpable(True)
    (tmp_path / "proc/self").mkdir(parents=True)
    [(status, text, _)] = found(checks.mapped, tmp_path)
    assert status == "info" and "No such file" in text


def test_a_module_that_is_missing(machine):
    (machine / "proc/modules").write_text("ib_core 1 0 - Live 0x0\nib_uverbs 1 0 - Live 0x0\n")
    assert [advice for status, _, advice in found(checks.modules, machine) if status == "fail"] == [
        "modprobe rdma_ucm"
    ]


def test_no_device_no_complaint(tmp_path):
    [(status, text, _)] = found(checks.modules, tmp_path)
    assert status == "info" and "embedded" in text
    assert found(checks.nodes, tmp_path) == []


def test_device_nodes(machine, monkeypatch):
    node = machine / "dev/infiniband/uverbs0"
    monkeypatch.setattr(os, "access", lambda path, mode: path != node)
    [(text, advice)] = [(t, a) for status, t, a in found(checks.nodes, machine) if status == "fail"]
    assert str(node) in text and f"user {os.geteuid()}" in text
    assert f"chmod 666 {node}" in advice
    node.unlink()
    [(text, advice)] = [(t, a) for status, t, a in found(checks.nodes, machine) if status == "fail"]
    assert "no uverbs node" in text and "modprobe ib_uverbs" in advice


def test_memlock(machine, tmp_path_factory, monkeypatch):
    limits = [(8 << 20, 8 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[0])
    [(status, text, advice)] = found(checks.memlock, machine)
    assert (status, "8192 KiB" in text, "ulimit -l unlimited" in advice) == ("warn", True, True)
    [(status, *_)] = found(checks.memlock, tmp_path_factory.mktemp("no_hardware"))
    assert status == "ok"
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    [(status, *_)] = found(checks.memlock, machine)
    assert status == "ok"


def test_forks(machine, monkeypatch):
    monkeypatch.delenv("RDMAV_FORK_SAFE", raising=False)
    monkeypatch.delenv("IBV_FORK_SAFE", raising=False)
    (machine / "proc/sys/kernel/osrelease").write_text("5.4.0-150-generic\n")
    [(status, _, advice)] = found(checks.forks, machine)
    assert (status, "RDMAV_FORK_SAFE=1" in advice) == ("warn", True)
    monkeypatch.setenv("RDMAV_FORK_SAFE", "1")
    [(status, *_)] = found(checks.forks, machine)
    assert status == "ok"


def entry(address, index, gid_type=_core.GIDType.ROCE_V2):
    ip = ipaddress.ip_address(address)
    gid = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
    return _core.GIDEntry(gid, index, 1, gid_type, 0)


def test_the_address_to_choose():
    v1 = _core.GIDType.ROCE_V1
    table = [
        entry("fe80::1", 0, v1),
        entry("fe80::1", 1),
        entry("10.0.0.1", 2, v1),
        entry("10.0.0.1", 3),
        entry("2001:db8::1", 4),
        entry("127.0.0.1", 5),
    ]
    assert _core.best_gid(table).gid_index == 3
    assert _core.best_gid(table[:2] + table[4:]).gid_index == 4
    assert _core.best_gid(table[:2]).gid_index == 1
    assert _core.best_gid([]) is None


def test_gids_lists_what_devices_lists():
    status, out, _ = run("gids", "--json")
    assert status == 0
    rows = json.loads(out)["gids"]
    with _core.Library.embedded().devices()[0].open() as context:
        table = context.gid_table()
        name = context.name
    mine = [row for row in rows if row["device"] == name]
    assert [(row["index"], row["address"]) for row in mine] == [(e.gid_index, str(e.address)) for e in table]
    assert sum(row["preferred"] for row in mine) == 1
    status, out, _ = run("gids", name)
    assert status == 0 and "127.0.0.1" in out and "lo" in out
    status, out, err = run("gids", "nosuchdevice")
    assert (status, out, err) == (1, "", f"gids: no device is named nosuchdevice; devices: {name}\n")
    assert run("gids", "nosuchdevice", "--json") == (status, out, err)


@pytest.mark.parametrize(
    "text, parsed",
    [
        ("host", ("host", doctor.PORT)),
        ("host:9000", ("host", 9000)),
        ("10.0.0.1:9000", ("10.0.0.1", 9000)),
        ("fe80::1", ("fe80::1", doctor.PORT)),
        ("[fe80::1]", ("fe80::1", doctor.PORT)),
        ("[fe80::1]:9000", ("fe80::1", 9000)),
    ],
)
def test_names_of_peers(text, parsed):
    assert doctor._peer(text) == parsed


def test_a_name_that_there_is_not(monkeypatch):
    def getaddrinfo(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("nowhere.invalid", "x" * 64):
        finding, is_doctor = asyncio.run(doctor._ping(name, 1))
        assert (
            finding.status == "fail"
            and not is_doctor
            and finding.found.startswith(f"the host name {name} cannot be resolved: ")
        )
        assert "doctor ADDRESS" in finding.advice


def assert_no_other_fails(status, out):
    """But for other programs of this machine, of other versions."""
    failed = {found["check"] for found in json.loads(out)["findings"] if found["status"] == "fail"}
    assert failed <= {"processes"} and status == bool(failed)


def test_ping():
    with spoken("doctor", "--serve", 0) as server:
        port = int(re.search(r":(\d+)", server.line())[1])
        status, out, _ = run("doctor", "--json", f"127.0.0.1:{port}")
    ping = json.loads(out)["findings"][-1]
    assert (ping["check"], ping["status"]) == ("ping", "ok")
    assert_no_other_fails(status, out)
    assert "100 round trips of 64 bytes" in ping["found"]
    assert '"fabric"' not in out  # which would be TCP, as doctor serves direct calls only
    status, out, _ = run("doctor", "--json", f"127.0.0.1:{port}")
    ping = json.loads(out)["findings"][-1]
    assert (status, ping["status"]) == (1, "fail")
    assert f"127.0.0.1 port {port} refused: " in ping["found"]
    assert ping["advice"].startswith("start the program that is to listen there; ")


class Program:
    """One that is not `doctor --serve`: it greets who connects, and notes what it `got`."""

    def __init__(self, greeting):
        self._greeting = greeting
        self.got = asyncio.get_running_loop().create_future()

    async def serve(self, reader, writer):
        writer.write(self._greeting)
        self.got.set_result(await reader.read())
        writer.close()


@pytest.fixture(params=[b"", b"220 mail.example.org ESMTP\r\n"], ids=["silent", "greets"])
async def program(request, monkeypatch):
    monkeypatch.setattr(doctor, "_GREETING_S", 0.1)
    return Program(request.param)


async def test_a_program_gets_no_byte(program):
    """doctor connects to a program that is not `doctor --serve`, and says so."""
    async with await rdmanet.start_rdma_stream_server(program.serve, "127.0.0.1", 0) as server:
        finding, is_doctor = await doctor._ping("127.0.0.1", server.sockets[0].getsockname()[1])
        assert await program.got == b""
    assert (
        finding.status == "ok"
        and not is_doctor
        and "connected" in finding.found
        and "not `rdmanet doctor" in finding.found
    )


@pytest.fixture
def far(monkeypatch):
    """This host's addresses are taken for those of another one."""
    monkeypatch.setattr(kernel, "is_of_this_host", lambda address: False)
    monkeypatch.setattr(choice, "adapters", list)


async def assert_not_tried(host, program, address):
    """Doctor sends nothing to a TCP program at an address of `host` that a name marks as an RDMA program's."""
    async with await asyncio.start_server(program.serve, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with socket.socket(socket.AF_UNIX) as name:
            name.bind(f"\0rdmanet-cm/::ffff:{address}/{port}")
            finding, is_doctor = await doctor._ping(host, port)
        assert await program.got == b""
    assert finding.status == "warn" and not is_doctor and "was not tried" in finding.found


async def test_a_tcp_program_of_another_host_gets_no_byte(far, program):
    """Not even if its user says by a name that it is an RDMA program: names of other hosts are not seen."""
    await assert_not_tried("127.0.0.1", program, "127.0.0.1")


async def test_each_address_of_a_name_is_judged_by_itself(program, monkeypatch):
    """The name's first address is of this host, where nobody listens, and its second is a TCP program's elsewhere."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        hosts = ["127.0.0.1", "127.0.0.2"] if host == "two.example" else [host]
        return [entry for each in hosts for entry in real(each, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(kernel, "is_of_this_host", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(choice, "adapters", list)
    await assert_not_tried("two.example", program, "127.0.0.2")


async def test_who_comes_early_hears_where_the_others_listen(monkeypatch):
    """By TCP, before doctor's RDMA servers listen."""
    start = rdmanet.start_rdma_stream_server
    early = asyncio.get_running_loop().create_future()

    async def start_after(serve, host, port, **options):
        if not early.done():
            early.set_result(await asyncio.open_connection("127.0.0.1", port))
            await loop_turns(50)
        return await start(serve, host, port, **options)

    monkeypatch.setattr(rdmanet, "start_rdma_stream_server", start_after)
    serving = asyncio.ensure_future(doctor._serve(0))
    reader, writer = await early
    greeting, far = doctor._BY_TCP.unpack(await reader.readexactly(doctor._BY_TCP.size))
    assert greeting.startswith(b"rdmanet doctor") and far not in (0, writer.get_extra_info("peername")[1])
    writer.close()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def test_an_adapter_whose_ports_are_tcps_is_left_out(monkeypatch, capsys):
    """Of the port that doctor has by TCP; as soft-iWARP is."""
    start, ports = rdmanet.start_rdma_stream_server, []

    async def start_beside_iwarp(serve, host, port, *, device=None):
        ports.append(port)
        if port == ports[0] and device is None:
            raise OSError(errno.EADDRINUSE, "rdma_listen: Address already in use")
        return await start(serve, host, port, device=device)

    monkeypatch.setattr(rdmanet, "start_rdma_stream_server", start_beside_iwarp)
    serving = asyncio.ensure_future(doctor._serve(0))
    await until_seen(lambda: serving.done() or "answering pings" in capsys.readouterr().out)
    finding, is_doctor = await doctor._ping("127.0.0.1", ports[0])
    assert is_doctor and finding.status == "ok", finding
    assert ports[1] == ports[0] and ports[2] == ports[0] + 1
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def without_ports(monkeypatch, *devices):
    """No device can have the port; and these devices there are."""

    async def refuse(*_, **__):
        raise OSError(errno.EADDRINUSE, "rdma_listen: Address already in use")

    monkeypatch.setattr(rdmanet, "start_rdma_stream_server", refuse)
    monkeypatch.setattr(rdmanet.verbs, "devices", lambda: devices)


def test_no_device_is_left_for_the_port(monkeypatch, capsys):
    without_ports(monkeypatch)
    assert command_line.main(["doctor", "--serve", "0"]) == 1
    assert "cannot answer pings at port 0: Address already in use" in capsys.readouterr().err


def test_a_broken_adapter_is_left_out(monkeypatch):
    class Broken:
        name, library, transport_type = "broken0", SimpleNamespace(embedded_device=False), None

        def open(self):
            raise OSError(errno.EIO, "ibv_open_device: Input/output error")

    embedded = SimpleNamespace(name="soft0", library=SimpleNamespace(embedded_device=True))
    without_ports(monkeypatch, Broken(), embedded)
    assert [*doctor._without_iwarp()] == [("soft0", None)]


def test_the_peers_time_begins_when_everything_is_imported():
    """Importing takes seconds on a slow machine."""
    program = (
        "import asyncio, sys\n"
        "from rdmanet.cli import doctor\n"
        "async def connect(host, port):\n"
        "    before = set(sys.modules)\n"
        "    import rdmanet\n"
        "    rdmanet.open_rdma_connection\n"
        "    print(sorted(set(sys.modules) - before))\n"
        "doctor._connect = connect\n"
        "asyncio.run(doctor._ping('127.0.0.1', 1))\n"
    )
    said = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert said.stdout == "[]\n", said


async def test_ping_of_another_host(far):
    """doctor says by TCP where its embedded device listens for other hosts."""
    with spoken("doctor", "--serve", 0) as server:
        port = int(re.search(r":(\d+)", server.line())[1])
        finding, is_doctor = await doctor._ping("127.0.0.1", port)
    assert is_doctor and "100 round trips of 64 bytes" in finding.found, finding
    finding, is_doctor = await doctor._ping("127.0.0.1", port)
    assert finding.status == "fail" and "refused" in finding.found, finding


def test_a_program_on_the_switch():
    program = (
        "import asyncio, rdmanet\n"
        "async def main():\n"
        "    server = await asyncio.start_server(lambda reader, writer: writer.close(), '127.0.0.1', 0)\n"
        "    print(server.sockets[0].getsockname()[1], flush=True)\n"
        "    await server.serve_forever()\n"
        "rdmanet.run(main())"
    )
    with Process(sys.executable, "-c", program, env=ENVIRONMENT) as server:
        status, out, _ = run("doctor", "--json", f"127.0.0.1:{server.line()}")
    fabric, ping = json.loads(out)["findings"][-2:]
    assert "take RDMA" in fabric["found"] and "connected" in ping["found"]
    assert_no_other_fails(status, out)


def test_who_answers_pings_takes_no_host(capsys):
    assert command_line.main(["doctor", "--serve", "0", "127.0.0.1"]) == 2
    assert "takes no HOST" in capsys.readouterr().err
