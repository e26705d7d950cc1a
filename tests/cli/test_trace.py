"""`rdmanet trace`: files of strangers are read with care, and events are chosen."""

import json

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
