"""A trace keeps the rules of the Trace Event Format, so that Perfetto and Chrome show all of it."""

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import HOST

from rdmanet.stream import tracing
from tests.support.processes import Process

EVENT = struct.Struct("=QIIQQ")
METADATA = {"process_name", "thread_name"}
FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "name", "pid", "tid", "ts", "s", "args"},
    "s": {"ph", "name", "pid", "tid", "ts", "cat", "id"},
    "f": {"ph", "name", "pid", "tid", "ts", "cat", "id", "bp"},
}
"""Those of each phase that is written: all are needed, and no others."""


def check(trace: dict[str, Any]) -> None:
    """:raises AssertionError: a rule is broken"""
    assert trace["displayTimeUnit"] in ("ms", "ns") and isinstance(trace["otherData"], dict)
    events = trace["traceEvents"]
    for event in events:
        assert event.keys() == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        assert all(type(event[name]) is int and 0 <= event[name] < 1 << 53 for name in ("pid", "tid")), event
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in METADATA and isinstance(event["args"]["name"], str)
            continue
        assert type(event["ts"]) in (int, float) and event["ts"] >= 0, event
        assert event.get("dur", 0) >= 0 and event.get("s", "t") in ("t", "p", "g"), event
        assert event.get("bp", "e") == "e" and isinstance(event.get("id", ""), str)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            ends = (event["ts"], round(event["ts"] + event["dur"], 3))
            slices.setdefault((event["pid"], event["tid"]), []).append(ends)
    for track in slices.values():
        check_nesting(track)
    for event in events:  # an arrow is tied to the slice around it
        if event["ph"] in "sf":
            track = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in track), event
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    assert named == {(event["pid"], event["tid"]) for event in events}


def check_nesting(track: list[tuple[float, float]]) -> None:
    """Of two slices of a track one is within the other, or they do not touch."""
    around: list[float] = []
    for begin, end in sorted(track, key=lambda ends: (ends[0], -ends[1])):
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], f"a slice to {end} is half in one to {around[-1]}"
        around.append(end)


def trace_of(*ring: tuple[int, ...]) -> dict[str, Any]:
    taken = b"".join(EVENT.pack(*event) for event in ring)
    events = [*tracing.events(taken, os.getpid())]
    return {"displayTimeUnit": "ns", "otherData": {}, "traceEvents": json.loads(json.dumps(events))}


OPENED, ENDED, WITHOUT, WANTED, ASLEEP, SENT, RECEIVED, COMPLETED = 1, 2, 3, 4, 5, 17, 33, 49


def test_frames_that_follow_at_once_do_not_overlap():
    """A clock is read in 20 ns."""
    check(trace_of((1000, OPENED, 7, 9, 0), *((2000 + 20 * n, SENT, 7, n, 64) for n in range(1, 9))))


def test_waits_hold_whole_frames():
    check(
        trace_of(
            (1000, OPENED, 7, 9, 0),
            (2000, WITHOUT, 7, 1, 0),
            (2020, RECEIVED + 1, 7, 0, 3 << 32),
            (2040, WITHOUT, 7, 0, 0),
            (2060, SENT, 7, 1, 64),
            (2080, WITHOUT, 7, 1, 0),
            (3000, ENDED, 7, 0, 0),
        )
    )


def test_every_kind_of_event():
    check(
        trace_of(
            (900, ASLEEP, 0, 1, 0xFFFF_FFFF_FFFF),
            (1000, OPENED, 7, 9, 0),
            (1100, WANTED, 7, 1 << 20, 0),
            (1200, SENT, 7, 1, 64),
            (1300, COMPLETED, 7, 64, 0),
            (1400, RECEIVED, 7, 1, 64),
            (1500, ASLEEP, 0, 0, 0xFFFF_FFFF_FFFF),
            (1600, ENDED, 7, 0, 0),
        )
    )


def test_a_ring_that_has_lost_the_beginning():
    """A connection without its opening has a name, too."""
    check(trace_of((1200, SENT, 7, 4, 64), (1300, WITHOUT, 7, 0, 0)))


PROGRAM = f"""
import asyncio, rdmanet
async def echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await rdmanet.start_rdma_stream_server(echo, {HOST!r}, 0)
    host, port = server.sockets[0].getsockname()[:2]
    async def client():
        reader, writer = await rdmanet.open_rdma_connection(host, port)
        for size in (64, 100_000, 2_000_000):
            writer.write(bytes(size))
            await reader.readexactly(size)
        writer.close()
        await writer.wait_closed()
    await asyncio.gather(*(client() for _ in range(3)))
    server.close()
asyncio.run(main())
"""


def environment(path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RDMANET_TRACE": str(path)}


def test_what_a_program_leaves(tmp_path):
    with Process(sys.executable, "-c", PROGRAM, env=environment(tmp_path / "trace")) as process:
        assert process.wait() == 0
    trace = json.loads((tmp_path / f"trace.{process.pid}").read_text())
    check(trace)
    assert {event["ph"] for event in trace["traceEvents"]} == set(FIELDS)


CHILD = (
    PROGRAM.replace("asyncio.run(main())", "def child():\n    asyncio.run(main())")
    + """
import multiprocessing, sys
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
    print(process.pid)
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_writes_its_trace_at_its_end(tmp_path, method):
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    with Process(sys.executable, str(program), method, env=environment(tmp_path / "trace")) as process:
        child = int(process.line())
        assert process.wait() == 0
    check(json.loads((tmp_path / f"trace.{child}").read_text()))
