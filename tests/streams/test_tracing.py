"""RDMANET_TRACE: what connections do is in a file, which joins with the peer's."""

import json
import os
import signal
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from harness import HOST, Net

from rdmanet import _core
from rdmanet.stream import tracing
from tests.support.processes import Process
from tests.support.waiting import until_seen

ROOT = Path(__file__).parents[2]
EVENT = struct.Struct("=QIIQQ")


@pytest.fixture
def traced():
    """Who traces, until the test is over."""
    yield _core.trace_begin
    _core.trace_end()


def taken() -> list[dict[str, Any]]:
    return list(tracing.events(_core.trace_taken()[0], os.getpid()))


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["ph"] in "Xi"]


async def test_what_a_connection_does(net: Net, traced):
    traced(1 << 12)
    client, server = await net.pair()
    client.transport.write(b"one")
    await server.until_received(3)
    await until_seen(lambda: not client.transport.get_extra_info("rdma_stats")["sends_in_flight"])
    qp = client.transport.get_extra_info("rdma_qp")
    client.transport.close()
    await server.until_lost()
    await until_seen(lambda: "ended" in names([event for event in taken() if event["tid"] == qp]))
    events = taken()
    ours = names([event for event in events if event["tid"] == qp])
    assert {"opened", "sent Data", "completed Data", "sent Fin"} <= {*ours}
    assert (ours[0] == "opened" or "sent" in ours[0]) and ours[-1] == "ended"
    sent, received = ([each for each in events if each["ph"] == phase] for phase in "sf")
    assert [each["id"] for each in sent] == [each["id"] for each in received] != []
    [frame] = [event for event in events if event["name"] == "sent Data"]
    assert frame["args"]["bytes"] == 3 and frame["args"]["frame"] == 1 and frame["args"]["credits"] > 0


async def test_the_time_without_credits(net: Net, traced):
    traced(1 << 16)
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(bytes(8 << 20))
    await until_seen(lambda: not client.transport.get_extra_info("rdma_stats")["credits"])
    server.transport.resume_reading()
    await server.until_received(8 << 20)
    [waited, *_] = [event for event in taken() if event["name"] == "no credits"]
    assert waited["tid"] == client.transport.get_extra_info("rdma_qp") and waited["dur"] > 0


def test_both_ends_are_known_where_a_device_does_not_know_its_peer():
    """On iWARP: by their addresses. Frames may come before the connection is open."""
    opened, paired, sent, received = 1, 6, 16 + 1, 32 + 1
    first = [
        (900, paired, 2, 0xBEEF, 0),
        (1000, opened, 2, 0, 0),
        (1100, sent, 2, 1, 8),
        (1900, received, 2, 1, 9),
    ]
    second = [
        (950, paired, 2, 0xBEEF, 1),
        (1200, received, 2, 1, 8),
        (1300, opened, 2, 0, 0),
        (1800, sent, 2, 1, 9),
    ]
    shown = [
        list(tracing.events(b"".join(EVENT.pack(*event) for event in ring), pid))
        for pid, ring in ((1, first), (2, second))
    ]
    ends = [{event["ph"]: event["id"] for event in events if event["ph"] in "sf"} for events in shown]
    assert ends[0]["s"] == ends[1]["f"] != ends[1]["s"] == ends[0]["f"]
    for events in shown:
        [name] = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert name == "connection 0x2 of pair 0xbeef"


def test_nobody_lacks_credits_after_the_end():
    ring = [(1000, 3, 7, 1, 0), (3000, 2, 7, 0, 0), (9000, 1, 8, 9, 0)]
    shown = tracing.events(b"".join(EVENT.pack(*event) for event in ring), os.getpid())
    assert [event["dur"] for event in shown if event["name"] == "no credits"] == [2.0]


def test_writing_takes_little_memory(tmp_path, monkeypatch):
    ring = EVENT.pack(1000, 16 + 1, 7, 1, 64) * (1 << 13)
    monkeypatch.setattr(tracing, "trace_taken", lambda: (ring, 1 << 13))
    tracing.write(str(tmp_path / "first"))
    tracemalloc.start()
    try:
        tracing.write(str(tmp_path / "trace"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(json.loads((tmp_path / "trace").read_text())["traceEvents"]) == 2 + (1 << 13)  # and two names


async def test_the_ring_keeps_the_last_events(net: Net, traced):
    traced(8)
    client, server = await net.pair()
    for count in range(1, 21):
        client.transport.write(b"x")
        await server.until_received(count)
    ring, count = _core.trace_taken()
    times = [event[0] for event in EVENT.iter_unpack(ring)]
    assert len(times) == 8 < count and times == sorted(times)


async def test_nothing_is_kept_where_nobody_traces(net: Net):
    client, server = await net.pair()
    client.transport.write(b"one")
    await server.until_received(3)
    assert _core.trace_taken() == (b"", 0)


@pytest.mark.parametrize("room", [0, 3, 1 << 25])
def test_a_wrong_size(room: int):
    with pytest.raises(ValueError, match="it must be a power of two"):
        _core.trace_begin(room)


SERVER = f"""
import asyncio, sys, rdmanet
async def main():
    server = await rdmanet.start_rdma_stream_server(answer, {HOST!r}, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    server.close()
async def answer(reader, writer):
    writer.write(await reader.readline())
    await reader.read()
    writer.close()
asyncio.run(main())
"""
CLIENT = f"""
import asyncio, sys, rdmanet
async def main():
    reader, writer = await rdmanet.open_rdma_connection({HOST!r}, int(sys.argv[1]))
    writer.write(b"a line\\n")
    await reader.readline()
    writer.close()
    await writer.wait_closed()
asyncio.run(main())
"""


def environment(path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "RDMANET_TRACE": str(path)}


def run_both(path: Path) -> tuple[int, int]:
    """Both are traced: their numbers."""
    with Process(sys.executable, "-c", SERVER, env=environment(path)) as server:
        with Process(sys.executable, "-c", CLIENT, server.line(), env=environment(path)) as client:
            client.wait()
        server.tell()
        server.wait()
    return client.pid, server.pid


def test_two_processes_are_joined(tmp_path, capsys):
    from rdmanet.cli.command_line import main

    client, server = run_both(tmp_path / "trace")
    files = [str(tmp_path / f"trace.{pid}") for pid in (client, server)]
    assert sorted(map(str, tmp_path.iterdir())) == sorted(files)
    assert main(["trace", *files, "--output", str(tmp_path / "all")]) == 0
    events = json.loads((tmp_path / "all").read_text())["traceEvents"]
    ends = {(event["ph"], event["pid"]): event["id"] for event in events if event["ph"] in "sf"}
    assert ends["s", client] == ends["f", server] and ends["s", server] == ends["f", client]
    assert main(["trace", *files, "--name", "Data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = [(int(line.split()[2]), " ".join(line.split()[4:6])) for line in lines if "completed" not in line]
    assert said == [
        (client, "sent Data"), (server, "received Data"), (server, "sent Data"), (client, "received Data")
    ]  # fmt: skip
    [qp] = {line.split()[3] for line in lines if int(line.split()[2]) == client}
    assert main(["trace", *files, "--connection", qp]) == 0
    assert {int(line.split()[2]) for line in capsys.readouterr().out.splitlines()} == {client, server}


A_THREAD_BEFORE = f"""
import threading
first = threading.Thread(target=exec, args=({SERVER.replace("await asyncio.", "None and ")!r}, {{}}))
first.start()
first.join()
"""
CLEARED = "import os; os.environ.clear()\n    print(server."


@pytest.mark.parametrize(
    "program",
    [SERVER, A_THREAD_BEFORE + SERVER, SERVER.replace("print(server.", CLEARED)],
    ids=["as it is", "a thread's loop was the first", "its environment has gone"],
)
def test_a_signal_writes_what_there_is(tmp_path, program):
    path = tmp_path / "of-%p.json"
    with Process(sys.executable, "-c", program, env=environment(path)) as server:
        for _ in range(program.count("print(server")):
            server.line()
        server.send_signal(signal.SIGUSR2)
        written = tmp_path / f"of-{server.pid}.json"
        while not written.exists():
            assert server.process.poll() is None, "the signal has ended it"
        assert json.loads(written.read_text())["otherData"]["lost"] == 0
        server.tell()
        server.wait()


def test_where_it_cannot_be_written(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracing, "_named_by", str(tmp_path / "no" / "trace"))
    monkeypatch.setattr(tracing, "_traces_as", _core.process_id())
    tracing._write_or_tell()
    assert "RDMANET_TRACE: the trace cannot be written: " in caplog.text
