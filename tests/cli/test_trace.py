"""`rdmanet trace`: files of strangers are read with care, and events are chosen."""

import json
import shutil
import struct
import subprocess

import pytest

from rdmanet.cli.command_line import main

EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "connection 0x7, peer's 0x9"}},
    {"ph": "X", "name": "sent Data", "pid": 1, "tid": 7, "ts": 2, "dur": 0.1, "args": {"bytes": 3}},
    {"ph": "X", "name": "received Data", "pid": 2, "tid": 9, "ts": 3, "dur": 0.1, "args": {"bytes": 3}},
    {"ph": "X", "name": "no credits", "pid": 1, "tid": 8, "ts": 1, "dur": 50, "args": {}},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace"
    path.write_text(json.dumps({"traceEvents": EVENTS}))
    return str(path)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((), ["no credits  for 50.0 µs", "sent Data  bytes 3", "received Data  bytes 3"]),
        (("--pid", "2"), ["received Data  bytes 3"]),
        (("--connection", "0x9"), ["sent Data  bytes 3", "received Data  bytes 3"]),
        (("--name", "sent,credits"), ["no credits  for 50.0 µs", "sent Data  bytes 3"]),
    ],
)
def test_events_are_chosen(file, capsys, chosen, said):
    assert main(["trace", file, *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=4)[4] for line in lines] == said


@pytest.mark.parametrize("connection", ["7", "9"])
def test_both_ends_of_an_iwarp_connection(tmp_path, capsys, connection):
    """A device does not know the queue pair of its peer there: a pair of addresses is named instead."""
    names = ((1, 7, "0xbeef"), (2, 9, "0xbeef"), (1, 8, "0xbee"))
    named = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": track,
            "args": {"name": f"connection {track:#x} of pair {pair}"},
        }
        for pid, track, pair in names
    ]
    path = tmp_path / "trace"
    path.write_text(json.dumps({"traceEvents": named + EVENTS[1:]}))
    assert main(["trace", str(path), "--connection", connection]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=4)[4] for line in lines] == ["sent Data  bytes 3", "received Data  bytes 3"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents":[{}]}',
        '{"traceEvents":[{"ph":"X","name":"x","pid":1,"tid":"a","ts":0}]}',
        '{"traceEvents":[{"ph":"X","name":"x","pid":1,"tid":1.5,"ts":0}]}',
        '{"traceEvents":[{"ph":"X","name":"x","pid":1,"tid":1,"ts":NaN}]}',
        f'{{"traceEvents":[{{"ph":"X","name":"x","pid":1,"tid":1,"ts":1{"0" * 400}}}]}}',
    ],
)
def test_a_file_that_is_no_trace(tmp_path, capsys, text):
    path = tmp_path / "trace"
    path.write_text(text)
    assert main(["trace", str(path)]) == 1
    assert f"trace: {path} is no trace: " in capsys.readouterr().err


def test_a_track_without_a_name(tmp_path, capsys):
    path = tmp_path / "trace"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "?", "pid": 1, "tid": 8}, *EVENTS[1:]]}))
    assert main(["trace", str(path), "--connection", "7"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_escape_is_printed(tmp_path, capsys):
    path = tmp_path / "trace"
    event = {"ph": "X", "name": "\x1b[2Jx", "pid": 1, "tid": 1, "ts": 0, "args": {"\x1b": "\x07"}}
    path.write_text(json.dumps({"traceEvents": [event]}))
    assert main(["trace", str(path)]) == 0
    assert all(character.isprintable() or character == "\n" for character in capsys.readouterr().out)


def test_there_is_no_such_file(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_connection_that_is_no_number(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "file", "--connection", "first"])
    assert "'first' is no number of a queue pair" in capsys.readouterr().err


# -- pcapng ------------------------------------------------------------------------------------------------

FRAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "server.py"}},
    *EVENTS[:1],
    {"ph": "X", "name": "sent Data", "pid": 1, "tid": 7, "ts": 4294967.5, "dur": 0.001,
     "args": {"bytes": 3, "credits": 15, "frame": 1}},
    {"ph": "s", "name": "frame", "cat": "frame", "id": "0x9.1", "pid": 1, "tid": 7, "ts": 4294967.5},
    {"ph": "X", "name": "received Data", "pid": 2, "tid": 9, "ts": 4294969, "dur": 0.001,
     "args": {"bytes": 3, "credits": 16, "frame": 1}},
    {"ph": "X", "name": "é: no credits", "pid": 1, "tid": 7, "ts": 5e6, "dur": 50, "args": {}},
]  # fmt: skip


@pytest.fixture
def capture(tmp_path):
    """Returns the pcapng file of events."""

    def capture(events):
        trace, made = tmp_path / "trace", tmp_path / "all.pcapng"
        trace.write_text(json.dumps({"traceEvents": events}))
        assert main(["trace", str(trace), "--output", str(made)]) == 0
        return made

    return capture


def blocks_of(data):
    """Type and body of each block."""
    while data:
        kind, length = struct.unpack_from("<II", data)
        assert length % 4 == 0 and struct.unpack_from("<I", data, length - 4)[0] == length
        yield kind, data[8 : length - 4]
        data = data[length:]


def test_a_capture_has_a_packet_for_each_event(capture):
    found = list(blocks_of(capture(FRAMES).read_bytes()))
    assert [kind for kind, _ in found] == [0x0A0D0D0A, 1, 6, 1, 6, 6]
    interface, high, low, captured, length = struct.unpack_from("<IIIII", found[2][1])
    assert (interface, (high << 32) + low, captured, length) == (0, 4294967500, 57, 57)
    assert b"1 server.py" in found[1][1] and found[2][1][20 + 48 : 20 + 57] == b"sent Data"


@pytest.mark.parametrize(
    "event",
    [
        {"name": "x" * 70000, "tid": 1, "ts": 0},
        {"name": "\ud800", "tid": 1 << 63, "ts": -1},
        {"name": "", "tid": -1, "ts": 1e19, "dur": -5},
        {"name": "sent", "tid": 1, "ts": 0.5, "args": {"bytes": "x", "credits": -1, "frame": 1 << 70}},
    ],
)
def test_a_capture_of_a_strangers_events(capture, event):
    assert len(list(blocks_of(capture([{"ph": "X", "pid": 1.5, "args": {}} | event]).read_bytes()))) == 3


def test_a_capture_has_nothing_that_a_terminal_would_act_on(capture):
    """tshark prints the names of events and of interfaces as they are."""
    escape = "\x1b[2J\u202e\x9b"
    process = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"é{escape}"}}
    event = {"ph": "X", "name": f"sent é{escape}", "pid": 1, "tid": 7, "ts": 0, "args": {}}
    _, (_, interface), (_, packet) = blocks_of(capture([process, event]).read_bytes())
    shown = "é\ufffd[2J\ufffd\ufffd".encode()
    assert b"1 " + shown in interface and b"sent " + shown in packet


@pytest.mark.skipif(not shutil.which("tshark"), reason="tshark is not installed")
def test_wireshark_shows_a_capture(capture, capsys):
    with pytest.raises(SystemExit):
        main(["trace", "--dissector"])
    dissector = capsys.readouterr().out.strip()
    names = ["event", "direction", "pid", "qp", "peer", "frame", "bytes", "credits", "duration"]
    fields = [word for name in names for word in ("-e", f"rdmanet.{name}")]

    def shown(*arguments):
        command = ["tshark", "-X", f"lua_script:{dissector}", "-r", str(capture(FRAMES)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split("\t") for line in done.stdout.splitlines()]

    assert shown("-T", "fields", *fields) == [
        ["sent Data", "1", "1", "0x00000007", "0x00000009", "1", "3", "15", "1"],
        ["received Data", "2", "2", "0x00000009", "0x00000000", "1", "3", "16", "1"],
        ["é: no credits", "0", "1", "0x00000007", "0x00000009", "0", "0", "0", "50000"],
    ]
    columns = ["_ws.col.Info", "frame.interface_name", "frame.time_epoch", "frame.packet_flags_direction"]
    columns = [word for name in columns for word in ("-e", name)]
    [row] = shown("-Y", "rdmanet.credits < 16 && rdmanet.frame > 0", "-T", "fields", *columns)
    assert row == ["sent Data, 3 bytes, credits 15", "1 server.py", "4.294967500", "0x00000002"]
    assert not shown("-Y", "_ws.malformed || _ws.lua.error")
