"""`rdmanet perf`: what it prints, what it refuses, and that it ends. No test says how fast anything is."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rdmanet.cli.command_line import main
from rdmanet.cli.perf.kinds import KINDS
from tests.support.perf import COMMAND, ENVIRONMENT, SHORT, one_line, perf, results


def test_verbs():
    found = results("verbs", "-s", 64, *SHORT)
    assert [result["test"] for result in found] == [
        name for name, kind in KINDS.items() if kind.family == "verbs"
    ]
    for result in found:
        assert result["messages"] == 200
        assert result["size"] == (8 if result["test"].startswith("atomic") else 64)
        assert result["messages_per_s"] > 0 and not result["interrupted"]
        latency = result["latency"]
        assert (latency is None) == result["test"].endswith("_bw")
        if latency:
            order = ["min_us", "p50_us", "p90_us", "p99_us", "p99_9_us", "p99_99_us", "max_us"]
            assert [latency[name] for name in order] == sorted(latency[name] for name in order)
            assert latency["count"] == 200 == sum(many for _, many in latency["cells"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["write_bw", "-b", "-q", 3, "-l", 4],
        ["send_bw", "-b", "-q", 2],
        ["read_bw", "-q", 2, "-o", 4, "-Q", 7],
        ["send_bw", "-e"],
        ["send_lat", "-e"],
        ["send_lat", "write_lat", "-t", 1],
        ["write_lat", "-c", "UC"],
        ["send_bw", "-c", "UC"],
        ["send_lat", "-c", "UD"],
        ["send_bw", "-c", "UD", "-q", 2],
        ["write_bw", "send_lat", "-I", 64, "-s", 64],
        ["send_bw", "-m", 512, "-t", 4, "-r", 32],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_ways_to_use_verbs(arguments):
    for result in results("-s", 256, *SHORT, *arguments):
        assert result["messages"] >= 200


def test_for_a_while_with_samples():
    [result] = results("write_lat", "-D", 0.5)
    assert result["seconds"] >= 0.5
    assert sum(sample["messages"] for sample in result["samples"]) == result["messages"]
    assert len(result["samples"]) >= 2


@pytest.mark.parametrize("api", ["protocol", "buffered", "streams"])
def test_streams_beside_sockets(api, loop, tmp_path):
    status, out, err = perf("streams", *SHORT, "--api", api, "--loop", loop, TMPDIR=str(tmp_path))
    assert (status, err) == (0, "")
    for name in (name for name, kind in KINDS.items() if kind.family == "stream"):
        assert re.search(rf"^{name} +\d+ +200 ", out, re.MULTILINE), out
    assert re.search(r"^ stream_lat +64 +p50 us( +[\d.]+ +[\d.]+ +[\d.]+x){1}", out, re.MULTILINE), out
    assert list(tmp_path.iterdir()) == []


def test_calls(loop, tmp_path):
    status, out, err = perf("rpc", *SHORT, "--loop", loop, "--csv", TMPDIR=str(tmp_path))
    assert status == 0 and all(line.startswith(" note: ") for line in err.splitlines())
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["test"] for row in rows] == [name for name, kind in KINDS.items() if kind.family == "rpc"]
    assert all(int(row["messages"]) == 200 and float(row["p99.99 us"]) > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_beside_the_csv():
    cpu = min(os.sched_getaffinity(0))
    status, out, err = perf("stream_lat", *SHORT, "--csv", "--cpus", f"{cpu},{cpu}")
    assert status == 0 and "they take turns, and every wait is a switch between them" in err
    assert [row["test"] for row in csv.DictReader(io.StringIO(out))] == ["stream_lat"]


def test_the_columns_of_perftest():
    status, out, err = perf("write_bw", "write_lat", "-s", "64,4k-8k", *SHORT)
    assert (status, err) == (0, "")
    assert " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]" in out
    assert (
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   "
        "99% percentile[usec]   99.9% percentile[usec]" in out
    )
    assert re.findall(r"^ (\d+) +200 ", out, re.MULTILINE) == ["64", "4096", "8192"] * 2
    assert out.count("RDMA_Write BW Test") == out.count("RDMA_Write Latency Test") == 1


# ---- Limits and earlier runs ------------------------------------------------------------------------------------


def test_limits_make_the_exit_status(tmp_path):
    assert perf("write_lat", *SHORT, "--require", "p99<100s", "rate>1")[0] == 0
    status, _, err = perf("write_lat", *SHORT, "--require", "write_lat:p50<0.0001ns", "max<1000s")
    assert status == 3
    assert "write_lat 64 B: p50 is" in one_line(err) and "write_lat:p50<0.0001ns was required" in err


def test_beside_an_earlier_run(tmp_path):
    old = tmp_path / "old.json"
    assert perf("write_lat", "write_bw", *SHORT, "--save", old)[0] == 0
    arguments = ["write_lat", "write_bw", *SHORT, "--compare", old]
    status, out, _ = perf(*arguments, "--require", "p50<1e6x", "bw>0.000001x")
    assert status == 0
    assert re.search(r"^ write_lat +64 +p50 +[\d.]+ +[\d.]+ +[\d.]+", out, re.MULTILINE), out
    assert re.search(r"^ write_bw +65536 +bw +[\d.]+ +[\d.]+ +[\d.]+", out, re.MULTILINE), out
    assert perf(*arguments, "--require", "p50<0.000001x")[0] == 3
    status, _, err = perf("read_lat", *SHORT, "--compare", old, "--require", "p50<2x")
    assert status == 1 and "has no p50 of read_lat" in one_line(err)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "rdmanet-perf/999"}', "\0"])
def test_a_file_that_is_no_result(tmp_path, text, capsys):
    old = tmp_path / "old.json"
    old.write_text(text)
    assert main(["perf", "write_lat", "--compare", str(old)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"is no result of rdmanet perf --json|this rdmanet reads", one_line(err))


def test_another_schema(tmp_path):
    old = tmp_path / "old.json"
    assert perf("write_lat", *SHORT, "--save", old)[0] == 0
    old.write_text(old.read_text().replace("rdmanet-perf/1", "rdmanet-perf/999"))
    assert "this rdmanet reads rdmanet-perf/1" in perf("write_lat", "--compare", old)[2]


def test_a_drawing(tmp_path):
    drawing = tmp_path / "drawn.svg"
    assert perf("write_lat", "write_bw", "tcp_lat", "-s", "64,1k", "-D", 0.3, "--plot", drawing)[0] == 0
    root = ElementTree.fromstring(drawing.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"percentiles", "bandwidth", "over time", "write_bw", "tcp_lat"} <= set(texts)
    assert "href" not in drawing.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.svg"]


@pytest.mark.parametrize("option", ["--save", "--plot"])
@pytest.mark.parametrize(
    ("place", "why"), [("no/file", "No such file or directory"), (".", "Is a directory")]
)
def test_a_place_where_nothing_can_be_written(tmp_path, option, place, why):
    """It is said before anything is measured."""
    status, out, err = perf("write_lat", *SHORT, option, tmp_path / place)
    assert (status, out) == (1, "") and why in one_line(err)
    assert not [*tmp_path.iterdir()] and [*tmp_path.parent.glob(f"{tmp_path.name}*")] == [tmp_path]


def test_no_other_file_is_touched(tmp_path):
    """What is written under another name first has a name that nobody else has."""
    saved, beside = tmp_path / "one.json", tmp_path / "one.json.new"
    beside.write_text("the user's")
    assert perf("write_lat", *SHORT, "--save", saved)[0] == 0
    assert beside.read_text() == "the user's" and {*tmp_path.iterdir()} == {saved, beside}


# ---- What is refused, and Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["one.example", "other.example"], 2, "only one of them can be the host"),
        (["wrte_lat"], 2, "there is no test 'wrte_lat'; tests: write_lat, "),
        (["strem_rr"], 2, "there is no test 'strem_rr'; tests: write_lat, "),
        (["server", "write_bw"], 2, "server takes no tests"),
        (["write_bw", "-n", "5", "-D", "1"], 2, "either -n or -D"),
        (["write_bw", "-a", "-s", "64"], 2, "either -a or -s"),
        (["write_bw", "--json", "--csv"], 2, "either --json or --csv"),
        (["write_bw", "-D", "0"], 2, "measures nothing"),
        (["write_bw", "--require", "bw>1x"], 2, "needs --compare"),
        (["127.0.0.1", "unix_bw"], 2, "does not reach another machine"),
        (["write_bw", "-n", "5", "-l", "2"], 1, "not a multiple of -l 2"),
        (["write_bw", "-l", "200"], 1, "cannot be more than -t 128"),
        (["read_bw", "-c", "UC"], 1, "needs a reliable connection"),
        (["write_bw", "-c", "UD"], 1, "can only be sent"),
        (["read_lat", "-q", "2"], 1, "several queue pairs (-q) are of bandwidth"),
        (["write_lat", "-b"], 1, "both directions (-b) are of bandwidth"),
        (["tcp_bw", "-b"], 1, "of verbs only"),
        (["tcp_bw", "--rate", "5"], 1, "a rate (--rate) is of latency"),
        (["tcp_bw", "--first"], 1, "are of the latency of streams and calls"),
        (["write_lat", "--first"], 1, "are of the latency of streams and calls"),
        (["tcp_lat", "--first", "--rate", "5"], 1, "either --rate or --first"),
        (["tcp_lat", "--connections", "5"], 1, "are of stream_rr, tcp_rr and unix_rr"),
        (["rpc_lat", "-e"], 1, "of verbs and streams"),
        (["write_bw", "--plan", "file"], 2, "either tests or --plan"),
        (["write_lat", "-e"], 1, "come without an event"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(arguments, status, why, capsys):
    assert main(["perf", *arguments]) == status
    out, err = capsys.readouterr()
    assert why in one_line(err)
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["send_bw", "-c", "UD", "-s", "1m"], "a datagram has at most"),
        (["write_bw", "-d", "nonsense"], "no device has"),
        (["write_bw", "-i", "99"], "has no port 99"),
        (["write_bw", *SHORT, "--json", "--require", "p99<1us"], "no test that was run measures that"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_device_says(arguments, why):
    status, _, err = perf(*arguments)
    assert status == 1
    assert why in one_line(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-s", "5z"],
        ["-s", "0"],
        ["-s", "64-8"],
        ["-s", "2g"],
        ["-n", "0"],
        ["-D", "nan"],
        ["-q", "-1"],
        ["-n", str((1 << 40) + 1)],
        ["-q", "1025"],
        ["-l", "16385"],
        ["-t", "16385"],
        ["-r", "16385"],
        ["-Q", "16385"],
        ["-o", "256"],
        ["-I", "4097"],
        ["--in-flight", "4097"],
        ["--connections", "1025"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "5g"],
        ["--turns", "0"],
        ["--most-memory", "5g"],
        ["--most-seconds", "x"],
        ["--cpus", "100000"],
        ["--require", "p98<3"],
        ["--require", "bw>3"],
        ["--require", "nonsense:bw>3GB/s"],
        ["--require", "p99=3"],
        ["-p", "65536"],
    ],
    ids=" ".join,
)
def test_arguments_that_are_none(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["perf", "write_bw", *arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"rdmanet perf: error: argument {arguments[0]}" in err


@pytest.mark.parametrize("kind", ["write_lat", "send_bw", "stream_lat", "tcp_bw", "rpc_lat"])
def test_interrupted_it_prints_what_was_measured(kind, interruptible):
    """Ctrl-C when the terminal shows that messages have come."""
    command = [*COMMAND, kind, "-s", "64,128", "-D", "1000", "--warm-up", "0", "--json"]
    terminal, its_end = os.openpty()
    with (
        open(terminal, "rb", buffering=0) as shown,
        subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=its_end, process_group=0
        ) as process,
    ):
        os.close(its_end)
        seen = b""
        while not re.search(rb"[1-9]\d* messages", seen):
            seen += shown.read(1000)
        assert f"{kind} 64 B: ".encode() in seen
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    [result] = json.loads(out)["results"]
    assert result["interrupted"] and result["messages"] > 0
    assert result["seconds"] < 1000


def test_its_server_ends_with_it():
    """Also if it is killed, and cannot say so."""
    with subprocess.Popen([*COMMAND, "write_lat", "-D", "100"], env=ENVIRONMENT) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (pids := children.read_text().split()):
            assert process.poll() is None
        ended = os.pidfd_open(int(pids[0]))
        process.kill()
    try:
        import select

        assert select.select([ended], [], [], 60)[0]
    finally:
        os.close(ended)
