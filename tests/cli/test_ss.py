"""`rdmanet ss`: another process is seen, who waits for whom there, and that it does not answer."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rdmanet.base.accounts import ConnectionInfo, ServerInfo, columns_of, row_of
from rdmanet.cli import ss as ss_command
from rdmanet.cli.asking import Answer
from rdmanet.cli.columns import Block, Connections
from rdmanet.cli.command_line import main
from rdmanet.cli.ss import _merged as merged
from rdmanet.cli.ss import _why_silent as why_silent
from tests.support.processes import Process

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
COMMAND = (sys.executable, "-m", "rdmanet", "ss")


@pytest.fixture
def watched(loop):
    with Process(
        sys.executable, HERE / "watched_peer.py", loop, env=ENVIRONMENT, keep_errors=True
    ) as process:
        process.ports = process.hear()
        yield process


def ss(*arguments):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def seen(process):
    """What is said of this process."""
    [found] = json.loads(ss("--json", "--pid", process.pid))["processes"]
    return found


def connections(found):
    return [info for loop in found["loops"] for info in loop["connections"]]


def test_a_process_and_its_connections(watched):
    found = seen(watched)
    assert (found["pid"], found["user"], found["silent"]) == (watched.pid, os.geteuid(), "")
    assert "watched_peer.py" in found["program"]
    [loop] = found["loops"]
    by_rdma = {info["role"]: info for info in loop["connections"] if info["fabric"] == "rdma"}
    assert by_rdma["client"]["peer"] == by_rdma["server"]["local"] == ["127.0.0.1", watched.ports["port"]]
    assert by_rdma["client"]["reason"] == "the server on this host offers RDMA"
    assert by_rdma["server"]["stats"]["bytes_received"] == 5
    assert all(info["device"] and info["qp"] and info["path"] == "memory" for info in by_rdma.values())
    [by_tcp] = [info for info in loop["connections"] if info["fabric"] == "tcp" and info["role"] == "client"]
    assert by_tcp["peer"] == ["127.0.0.1", watched.ports["plain"]]
    assert by_tcp["reason"].startswith("no program on this host offers RDMA there")
    [server] = [server for server in loop["servers"] if server["fabric"] == "rdma and tcp"]
    assert server["places"] == [["127.0.0.1", watched.ports["port"]]] and server["connections"] == 1
    assert loop["engines"][0]["wakeups"] >= 0


def test_it_names_who_waits_for_whom(watched):
    watched.tell(do="do not read")
    watched.hear()
    said = {info["role"]: info["waits"] for info in connections(seen(watched)) if info["fabric"] == "rdma"}
    assert re.search("wait for the peer: credits 0 of .*: the peer does not read", said["client"][0])
    assert "reading is paused: they wait for resume_reading()" in said["server"][0]
    text = ss("--pid", watched.pid)
    assert f"process {watched.pid}, user {os.geteuid()}: " in text and "why TCP: no program on this" in text
    assert f"serving: 127.0.0.1:{watched.ports['port']} by RDMA and TCP" in text
    assert "      waits: " in text and "the peer does not read" in text


def test_only_who_waits(watched):
    """The others are left out, of processes and of connections; and the other end of each is named."""
    watched.tell(do="do not read")
    watched.hear()
    found = json.loads(ss("--json", "--waiting", "--pid", watched.pid))["processes"]
    assert {info["role"] for info in connections(found[0])} == {"client", "server"}
    assert all(info["waits"] and info["fabric"] == "rdma" for info in connections(found[0]))
    assert "serving" not in ss("--waiting", "--pid", watched.pid)


def test_nobody_waits(monkeypatch, capsys):
    quiet = ConnectionInfo(
        "rdma", "", "client", ("127.0.0.1", 1), ("127.0.0.1", 2), "open", stats={"bytes_sent": 1}
    )
    silent = Answer(2, 0, "it broke off")
    for answers, said in (
        ([], "nobody waits\n"),
        ([silent], f"process 2, user 0: {ss_command._program(2)}\n"),
    ):
        found = [Answer(1, 0, connections=Connections([quiet])), *answers]
        monkeypatch.setattr(ss_command, "ask_all", lambda pid, found=found: found)
        assert main(["ss", "--waiting"]) == 0
        assert capsys.readouterr().out.startswith(said)


def test_the_peer_of_a_connection_that_waits_is_named(monkeypatch):
    """Though its client has no port of its own, so that its address says nothing."""
    at, qp, stats = ("127.0.0.1", 1), 0x100, dict.fromkeys(("bytes_unsent", "sends_in_flight", "credits"), 0)
    stats |= {"bytes_unread": 1}
    client = ConnectionInfo("rdma", "", "client", ("127.0.0.1", 40000), at, "open", qp=qp, stats=stats)
    server = ConnectionInfo("rdma", "", "server", at, ("127.0.0.1", 0), "open", qp=2, stats={"peer_qp": qp})
    answers = [Answer(pid, 0, connections=Connections([info])) for pid, info in ((1, client), (2, server))]
    monkeypatch.setattr(ss_command, "ask_all", lambda _: answers)
    picture = ss_command.Picture(is_last=True)
    text = ss_command._as_text(picture, picture.take(None))
    assert text.count("peer: process") == 1 and f"      peer: process 2: {ss_command._program(2)}" in text
    liar = Answer(3, 7, connections=Connections([server]))
    answers.append(liar)  # another user's may say anything
    text = ss_command._as_text(picture, picture.take(None))
    assert text.count("      peer: process 2: ") == 1
    answers.remove(liar)
    answers[1].user = 7
    text = ss_command._as_text(picture, picture.take(None))
    assert "peer: process" not in text


def test_memory_that_is_registered_each_time(watched):
    watched.tell(do="read")
    watched.hear()
    [engine] = [engine for engine in seen(watched)["loops"][0]["engines"] if engine["registrations"]]
    assert engine["registrations"] >= 200 > engine["registrations_reused"]
    note = "memory was registered 200 times to read or write a peer's, and found registered 0 times: pass the same"
    assert [text for text in engine["notes"] if text.startswith(note)]
    assert f"    note: {note}" in ss("--pid", watched.pid)


def test_a_stopped_process_is_listed_and_answers_later(watched):
    watched.stop()
    found = seen(watched)
    assert found["silent"].startswith("stopped: it was sent SIGSTOP") and not connections(found)
    assert "  does not answer: stopped" in ss("--pid", watched.pid)
    watched.send_signal(signal.SIGCONT)
    watched.tell(do="nothing")
    watched.hear()
    assert not seen(watched)["silent"]


def test_a_process_that_is_stopped_and_asked_often_is_still_listed(watched):
    """Nobody accepts, so the queue of its socket is full at last."""
    watched.stop()
    lines = ss("--json", "--watch", "0.05", "--count", "14", "--pid", watched.pid).splitlines()
    assert [json.loads(line)["processes"][0]["silent"][:7] for line in lines] == ["stopped"] * 14
    watched.send_signal(signal.SIGCONT)


def test_a_process_whose_loop_is_blocked(watched):
    watched.tell(do="block")
    watched.hear()
    assert "its loop does not turn: it waits in a call that blocks" in seen(watched)["silent"]
    watched.tell(do="go on")
    watched.hear()


def test_a_process_whose_loop_computes(watched):
    watched.tell(do="compute")
    watched.hear()
    assert "busy: its loop has not turned in time" in seen(watched)["silent"]
    watched.tell(do="go on")
    watched.hear()


def test_a_process_without_descriptors(watched):
    """It turns, and can accept nobody who asks."""
    watched.tell(do="take all descriptors")
    watched.hear()
    while not (found := seen(watched)["silent"]):  # a connection had given its socket back
        pass
    assert re.match(
        r"it has \d+ of \d+ descriptors open \(ulimit -n\), and none to accept connections with", found
    )
    watched.tell(do="go on")
    watched.hear()


def test_a_loop_that_sleeps(watched):
    """It is asleep when nobody writes to it, and each look of ours wakes it."""
    while not (engine := seen(watched)["loops"][0]["engines"][0])["us_asleep"] or engine["polling"]:
        pass
    while seen(watched)["loops"][0]["engines"][0]["us_asleep"] <= engine["us_asleep"]:
        pass
    assert re.search(
        r"^  loop on \S+: sleeping; asleep for \S+ \S+ in all, polling for \S+ \S+; \d+ wake-ups$",
        ss("--pid", watched.pid),
        re.MULTILINE,
    )


def test_watching_shows_rates_and_the_last_answer_of_who_falls_silent(watched):
    with Process(*COMMAND, "--json", "--watch", "0.05", "--pid", watched.pid, env=ENVIRONMENT) as command:
        first, second = (command.hear()["processes"][0] for _ in range(2))
        assert "sent_per_s" not in connections(first)[0] and "sent_per_s" in connections(second)[0]
        watched.stop()
        while not (found := command.hear()["processes"][0])["silent"]:
            pass
        assert found["age_s"] > 0 and len(connections(found)) == len(connections(first))
        watched.send_signal(signal.SIGCONT)
        watched.send_signal(signal.SIGKILL)
        while command.hear()["processes"]:
            pass


def test_a_server_counts_what_its_loop_has_by_tcp():
    """Its process leaves that to us. The last answer of a silent process is shown again and again."""
    place, peer = ("127.0.0.1", 80), ("127.0.0.1", 9)
    both, half = (ServerInfo([place], fabric, True, 1) for fabric in ("rdma and tcp", "rdma"))
    other = ServerInfo([("127.0.0.1", 81)], "rdma and tcp", True, 0)
    by_tcp = [ConnectionInfo("tcp", "", "server", at, peer, "open") for at in (place, place, peer, None)]
    by_rdma = ConnectionInfo("rdma", "", "server", place, peer, "open")
    answers = [
        Answer(1, 0, servers=[both, other], connections=Connections(by_tcp)),
        Answer(1, 0, servers=[half], connections=Connections([by_rdma])),
    ]
    for _ in range(2):
        [one] = merged(answers)
        assert [server.connections for server in one.servers] == [3, 0]


def test_the_ends_of_a_connection_are_found_though_the_client_has_no_port(monkeypatch):
    """So that it is seen where both run."""
    at, qp = ("127.0.0.1", 1), 0x100
    client = ConnectionInfo("rdma", "", "client", ("127.0.0.1", 40000), at, "open", qp=qp)
    server = ConnectionInfo("rdma", "", "server", at, ("127.0.0.1", 0), "open", qp=2, stats={"peer_qp": qp})
    untold = ConnectionInfo("rdma", "", "server", at, ("127.0.0.1", 0), "open", qp=3)
    answers = [
        Answer(1, 0, connections=Connections([client])),
        Answer(2, 0, connections=Connections([server, untold])),
    ]
    picture = ss_command.Picture()
    monkeypatch.setattr(ss_command, "ask_all", lambda _: answers)
    monkeypatch.setattr(ss_command, "is_any_far", lambda pairs: True)
    monkeypatch.setattr(ss_command, "why_far", lambda *pids: f"{pids} are far apart")
    monkeypatch.setattr(ConnectionInfo, "notes", lambda _: [])
    one, two = picture.take(None)
    assert picture.notes(one, client) == ["(1, 2) are far apart"]
    assert picture.notes(two, server) == ["(2, 1) are far apart"]
    assert picture.notes(two, untold) == []


class Port(int):
    """Whose comparisons are calls, which are counted."""

    def __eq__(self, other):
        return int(self) == other

    __hash__ = int.__hash__


def picture_of(count, port=Port):
    """So many connections by TCP, and a tenth as many servers, of one loop."""
    places = [("127.0.0.1", port(number)) for number in range(count)]
    servers = [ServerInfo([place], "rdma and tcp", True, 0) for place in places[::10]]
    halves = [ServerInfo([place], "rdma", True, 0) for place in places[::10]]
    made = [ConnectionInfo("tcp", "", "server", place, ("127.0.0.2", 1), "open") for place in places]
    answers = [Answer(1, 0, servers=servers + halves, connections=Connections(made))]
    return [ss_command.Process(1, 0, "program", answers=answers)]


def calls_of(function, *arguments):
    """How many calls a function makes, of Python's functions, of C's, and of generators that go on."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return calls


def as_text(count):
    return ss_command._as_text(ss_command.Picture(), picture_of(count))


def as_json(count):
    """The servers' connections are counted first. Ports are what JSON takes then."""
    found = picture_of(count)
    merged(found[0].answers)
    return [*ss_command._as_json(ss_command.Picture(), picture_of(count, int))]


def test_connections_that_are_encoded_together_are_said_as_others_are(monkeypatch):
    """Those of which there is nothing to say but their columns."""
    places = ("127.0.0.1", 1), ("::1", 7), None
    infos = [
        ConnectionInfo(
            "rdma", 'a "100%d" ä', "client", places[0], place, "open", qp=qp, stats={"bytes_sent": qp, "%": 5}
        )
        for qp, place in enumerate(places)
    ]
    block = Block(("bytes_sent", "%"), len(infos), *columns_of([*map(row_of, infos)]))
    process = ss_command.Process(1, 0, "a program", answers=[Answer(1, 0)])
    process.answers[0].connections.blocks += block, block
    found = b"".join(ss_command._as_json(ss_command.Picture(), [process]))
    monkeypatch.setattr(ss_command.Picture, "says_no_more", False)
    assert b"".join(ss_command._as_json(ss_command.Picture(), [process])) == found
    [loop] = json.loads(found)["processes"][0]["loops"]
    assert [info["stats"] for info in loop["connections"]] == 2 * [info.stats for info in infos]


@pytest.mark.parametrize("shown", [as_text, as_json])
def test_twice_as_many_connections_are_twice_the_work(shown):
    few, many = (calls_of(shown, count) for count in (500, 1000))
    assert 1000 < few < many < 2.2 * few


@pytest.mark.parametrize("failed", ["late", "it broke off"])
def test_a_process_that_ends_while_it_is_asked(failed):
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert why_silent(Answer(process.pid, 0, failed)) == "it has ended"  # nobody has waited for it
    assert why_silent(Answer(process.pid, 0, failed)) == "it has ended"
    assert why_silent(Answer(os.getpid(), 0, failed)) != "it has ended"


FEW_DESCRIPTORS = """
import json, resource
from rdmanet.cli import asking, ss

ss.Picture().take(0)  # imports what it needs
with open("/proc/self/fd/0") as last:
    resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, last.fileno() + 1))
print(json.dumps([(answer.pid, answer.failed) for answer in asking.ask_all({pid})]))
"""


def test_all_are_asked_though_there_are_descriptors_for_few(watched):
    """Nobody may hide others from root by many names. This process has two sockets, for its loop and its device."""
    program = FEW_DESCRIPTORS.replace("{pid}", str(watched.pid))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[watched.pid, ""]] * 2


def test_json_is_utf_8_whatever_the_locale_is(monkeypatch):
    """One process with a name that the locale does not have hides no other."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    found = [ss_command.Process(1, 0, program) for program in ("é", "plain")]
    monkeypatch.setattr(ss_command.Picture, "take", lambda picture, pid: found)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["ss", "--json"]) == 0
    said = json.loads(out.buffer.getvalue())["processes"]
    assert [process["program"] for process in said] == ["é", "plain"]


def test_nobody_is_there(monkeypatch, capsys):
    """Who asks for one process is not told of all: others may well use it."""
    monkeypatch.setattr(ss_command, "ask_all", lambda pid: [])

    def said(*arguments):
        assert main(["ss", *arguments]) == 0
        return capsys.readouterr().out

    assert "in this network namespace uses rdmanet\n" in said()
    assert said("--pid", str(2**31 - 1)) == f"there is no process {2**31 - 1}\n"
    assert said("--pid", str(os.getpid())).startswith(f"process {os.getpid()} (")


def test_wrong_arguments():
    done = subprocess.run([*COMMAND, "--watch", "0"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and "not between 0.05 and 86400 seconds" in done.stderr
