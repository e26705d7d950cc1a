"""`rdmanet perf`: traffic at a rate, of first messages, of several at a time; several runs in turns; percentiles."""

import itertools
import re
import time

import msgspec
import pytest

from rdmanet.cli.command_line import main
from rdmanet.cli.perf.control import Settings
from rdmanet.cli.perf.paced import Schedule
from rdmanet.cli.perf.results import Report, Result, find, middle
from tests.support.perf import SHORT, one_line, perf, results

APIS = ("protocol", "buffered", "streams")


@pytest.fixture
def planned(tmp_path):
    """The results of what these lines say, measured in one run."""

    def run(lines, *options):
        plan = tmp_path / "plan"
        plan.write_text("\n".join(lines))
        return results("--plan", plan, "--warm-up", "0", *options)

    return run


def test_several_messages_under_way(planned, loop):
    ways = {"-n 30 --in-flight 7": 30, "-n 3 --in-flight 7": 3, "-n 6 --connections 5 --in-flight 1": 30}
    lines = [f"stream_rr tcp_rr unix_rr --api {api} {way}" for api in APIS for way in ways]
    found = planned(lines, "--loop", loop)
    assert [result["messages"] for result in found] == [
        count for count in ways.values() for _ in range(3)
    ] * 3
    assert all(result["messages_per_s"] > 0 and result["latency"] is None for result in found)


def test_messages_at_a_rate(planned, loop):
    """It takes as long as the messages are apart; what a busy machine delays is not lost, but late.

    A first one that is late brings the rest nearer. Without a rate all are there within a millisecond.
    """
    lines = [f"stream_lat tcp_lat --api {api}" for api in APIS]
    lines += ["write_lat send_lat read_lat send_bw rpc_lat -s 64"]
    found = planned(lines, "--loop", loop, "-n", "11", "--rate", "100")
    assert len(found) == 11
    for result in found:
        assert result["messages"] == 11 and result["settings"]["rate"] == 100
        assert result["seconds"] > 0.01


def test_the_time_ends_before_the_next_message_is_due(planned):
    lines = [f"tcp_lat --api {api}" for api in APIS]
    for result in planned([*lines, "rpc_tcp_lat"], "-D", "0.1", "--rate", "0.01"):
        assert result["messages"] == 1 and result["seconds"] < 50


def test_first_messages(planned, loop):
    lines = [f"stream_lat tcp_lat unix_lat --api {api}" for api in APIS]
    found = planned([*lines, "rpc_lat rpc_tcp_lat"], "-n", "5", "--first", "--loop", loop)
    assert [result["messages"] for result in found] == [5] * 11
    assert all(result["latency"]["count"] == 5 for result in found)


def test_sleeping_streams():
    [result] = results("stream_lat", "-e", *SHORT)
    assert result["client_slept"] > 0 and not any("slept" in words for words in result["wrong"])


def test_a_stall_counts_for_all_messages_that_it_delays(monkeypatch):
    now, times = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    schedule = Schedule(1000, lambda took_s: bool(times.append(took_s)))
    schedule.begin()
    for now in (0.0045, 0.0046, 0.0047):  # the second was due at 1 ms, the third at 2 ms
        assert not schedule.answered(now) and schedule.left_s() == 0.0
    assert times == pytest.approx([0.0045, 0.0036, 0.0027])
    now = 0.0032  # of a clock that this test turns back: the fourth is due at 3 ms, the fifth at 4 ms
    schedule.answered(now)
    assert schedule.left_s() == pytest.approx(0.0008)
    now = 0.0049  # a timer that is late delays all, and counts for none
    assert schedule.left_s() == 0.0
    now = 0.0050
    schedule.answered(now)
    assert times[3:] == pytest.approx([0.0002, 0.0001])
    assert schedule.left_s() == pytest.approx(0.0009)


def test_a_plan(tmp_path):
    plan = tmp_path / "plan"
    plan.write_text("# what is measured\n\nunix_lat tcp_bw -s 64,128  # two\ntcp_lat --api streams -n 10\n")
    found = results("--plan", plan, "-n", "20", "--warm-up", "0", "--turns", "2")
    assert [(each["test"], each["size"], each["messages"]) for each in found] == 2 * [
        ("unix_lat", 64, 20),
        ("unix_lat", 128, 20),
        ("tcp_bw", 64, 20),
        ("tcp_bw", 128, 20),
        ("tcp_lat", 64, 10),
    ]
    assert [each["turn"] for each in found] == [0] * 5 + [1] * 5
    assert {each["settings"]["api"] for each in found} == {"protocol", "streams"}
    status, out, err = perf("--plan", plan, "-n", "20", "--warm-up", "0", "--turns", "2")
    assert (status, err) == (0, "")
    assert out.count(" turn 2 of 2") == 1 and out.count(" tcp_lat --api streams -n 10") == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("wrte_lat\n", "line 1: there is no test 'wrte_lat'"),
        ("\nwrite_lat --nonsense\n", "line 2: unrecognized arguments: --nonsense"),
        ("write_lat -s 5z", "line 1: argument -s/--size: '5z' is no size"),
        ("write_lat --json", "--json is said once, beside --plan"),
        ("write_lat 'open", "line 1: No closing quotation"),
        ("one.example write_lat", "'one.example' is no test: the host is said once"),
        ("# nothing", "has 0 lines"),
        ("tcp_bw -n 5 -D 2", "either -n or -D"),
        ("\0", "line 1: "),
    ],
)
def test_a_plan_with_a_mistake(tmp_path, capsys, text, why):
    plan = tmp_path / "plan"
    plan.write_text(text)
    assert main(["perf", "--plan", str(plan)]) == 2
    out, err = capsys.readouterr()
    assert why in one_line(err) and out == ""


def test_the_median_of_the_turns():
    def result(turn, rate, api="protocol"):
        settings = msgspec.structs.replace(Settings(), api=api)
        return Result("tcp_rr", 64, 1, 1.0, rate, rate, settings=settings, turn=turn)

    turns = [result(0, 3.0), result(0, 9.0, "streams"), result(1, 1.0), result(2, 2.0)]
    assert [each.messages_per_s for each in middle(turns)] == [2.0, 9.0]
    report = Report("rdmanet-perf/1", None, Settings(), turns)
    assert find(report, result(0, 5.0, "streams")).messages_per_s == 9.0
    assert find(report, result(0, 5.0, "buffered")) is not None  # of another interface, but the only ones
    assert find(report, Result("tcp_rr", 128, 1, 1.0, 1.0, 1.0)) is None


def test_percentiles_for_the_plotters_of_hdrhistogram(tmp_path):
    folder = tmp_path / "of" / "today"
    assert perf("unix_lat", "unix_bw", "tcp_lat", "-s", "64,128", *SHORT, "--hgrm", folder)[0] == 0
    names = ["tcp_lat-128.hgrm", "tcp_lat-64.hgrm", "unix_lat-128.hgrm", "unix_lat-64.hgrm"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        head, empty, *lines = (folder / name).read_text().splitlines()
        assert head.split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"] and not empty
        rows = [[float(cell) for cell in line.split()] for line in lines if not line.startswith("#")]
        assert all(later[i] >= row[i] for row, later in itertools.pairwise(rows) for i in range(3))
        assert rows[-1][1:] == [1.0, 200.0]
        for value, part, total, inverse in rows[:-1]:
            assert part == pytest.approx(total / 200) and inverse == pytest.approx(1 / (1 - part), rel=0.01)
            assert value <= rows[-1][0]
        tail = [line for line in lines if line.startswith("#")]
        assert re.match(r"#\[Mean +=.*, StdDeviation +=.*\]$", tail[0])
        assert re.match(r"#\[Max +=.*, Total count +=  +200\]$", tail[1])
