"""Which CPUs are far from each other, by affinity: the kernel's files are those of a machine with two nodes."""

import errno
import itertools
import json
import os
from dataclasses import replace

import pytest

from rdmanet.base import cpus
from rdmanet.base.accounts import ConnectionInfo
from rdmanet.cli import ss
from rdmanet.cli.asking import Answer
from rdmanet.cli.columns import Connections

ALLOWED = {1: "0-3", 2: "4-7", 3: "0-7", 4: "2-3", 5: "7", 6: "7"}
DEVICES = {"mlx5_0": "0", "mlx5_1": "1", "rxe0": "-1"}
STATS = dict.fromkeys(("bytes_unsent", "credits", "peer_slots", "sends_in_flight", "send_slots"), 0)
CLIENT, SERVER = ("127.0.0.1", 9), ("127.0.0.1", 80)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "ROOT", f"{tmp_path}/")
    files = {f"proc/{pid}/status": f"Name: x\nCpus_allowed_list:\t{text}\n" for pid, text in ALLOWED.items()}
    files |= {"sys/devices/system/node/online": "0-1\n"}
    files |= {
        f"sys/devices/system/node/node{n}/cpulist": f"{text}\n" for n, text in enumerate(("0-3", "4-7"))
    }
    files |= {f"sys/class/infiniband/{name}/device/numa_node": f"{node}\n" for name, node in DEVICES.items()}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    cpus._why_far_from.cache_clear()
    yield tmp_path
    cpus._why_far_from.cache_clear()


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1), (1, 3), (3, 2), (1, 4), (1, 99), (5, 99), (99, 5), (99, 98)]
)
def test_of_these_nothing_can_be_told(machine, one, other):
    assert cpus.why_far(one, other) == ""


def test_two_processes_on_other_nodes(machine):
    assert cpus.why_far(4, 2) == (
        "far CPUs: this process may only run on CPUs 2-3 (node 0), and its peer, process 2, on CPUs 4-7 (node 1): pin"
        " both to CPUs of one node (taskset, numactl --cpunodebind)"
    )
    assert cpus.why_far(5, 6).startswith(
        "one CPU: this process and its peer, process 6, may only run on CPU 7"
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_one_pair_of_those_that_run_alike_is_asked(machine, monkeypatch, count):
    for most in (64, 0):
        monkeypatch.setattr(cpus, "_PLACES_MOST", most)
        for pids in itertools.combinations(range(1, 7), count):
            pairs = [*itertools.permutations(pids, 2)]
            is_any_far = any(cpus.why_far(*pair) for pair in pairs)
            assert cpus.is_any_far(pairs) == (is_any_far or (most == 0 and bool(pairs)))


def test_pairs_without_end_hold_nobody_up(machine, monkeypatch):
    monkeypatch.setattr(cpus, "_PAIRS_MOST", 100)
    pairs = itertools.repeat((1, 3))
    assert cpus.is_any_far(pairs)
    assert not cpus.is_any_far(itertools.islice(pairs, 100))


def test_an_adapter_at_another_node(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    assert "may only run on CPUs 4,6 (node 1), and mlx5_0 is at node 0" in cpus.why_far_from("mlx5_0")
    assert cpus.why_far_from("mlx5_1") == cpus.why_far_from("rxe0") == cpus.why_far_from("none") == ""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4})
    assert cpus.why_far_from("mlx5_0") == ""


@pytest.mark.parametrize("lacking", ["numa_node", "online", "cpulist"])
def test_who_has_no_descriptor_left_asks_again(machine, monkeypatch, lacking):
    """What it could not read was remembered as "not far"."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    real = os.open

    def refused(path, flags):
        if path.endswith(lacking):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert cpus.why_far_from("mlx5_0") == ""
        assert cpus.why_far(1, 2) == "" or lacking == "numa_node"
    assert "mlx5_0 is at node 0" in cpus.why_far_from("mlx5_0")


def test_a_machine_without_nodes(machine):
    (machine / "sys/devices/system/node/online").unlink()
    assert cpus.why_far(1, 2) == ""


def picture_of(monkeypatch, *ends, users=(0, 0)):
    """What is seen of a client and a server, which are these processes."""
    places = ((CLIENT, SERVER), (SERVER, CLIENT))
    made = [
        ConnectionInfo("rdma", "", "", *place, "open", device="soft0", path="memory", stats=STATS)
        for place in places
    ]
    answers = [
        Answer(pid, user, connections=Connections([info]))
        for pid, user, info in zip(ends, users, made, strict=True)
    ]
    monkeypatch.setattr(ss, "ask_all", lambda pid: answers)
    picture = ss.Picture()
    return picture, picture.take(None)


def test_ss_names_far_cpus(machine, monkeypatch):
    picture, processes = picture_of(monkeypatch, 1, 2)
    text = ss._as_text(picture, processes)
    assert (
        "note: far CPUs: this process may only run on CPUs 0-3 (node 0), and its peer, process 2, on" in text
    )
    assert (
        "note: far CPUs: this process may only run on CPUs 4-7 (node 1), and its peer, process 1, on" in text
    )
    [loop] = json.loads(b"".join(ss._as_json(picture, processes)))["processes"][0]["loops"]
    assert loop["connections"][0]["notes"][0].startswith("far CPUs: ")
    assert "far CPUs" not in ss._as_text(*picture_of(monkeypatch, 1, 3))


def test_two_processes_are_looked_at_once(machine, monkeypatch):
    """However many connections they have, and also if they are near each other."""
    asked = []
    monkeypatch.setattr(ss, "is_any_far", lambda pairs: True)
    monkeypatch.setattr(ss, "why_far", lambda *pids: asked.append(pids) or "")
    picture, processes = picture_of(monkeypatch, 1, 3)
    for answer in processes[0].answers:
        answer.connections.blocks *= 3
    ss._as_text(picture, processes)
    assert sorted(asked) == [(1, 3), (3, 1)]


def test_processes_that_are_no_peers_are_not_far_from_each_other(machine, monkeypatch):
    """Two servers on one CPU, say: else each connection of thousands was looked at, with all that may be said of it."""
    info = ConnectionInfo("rdma", "", "server", SERVER, CLIENT, "open", stats=dict.fromkeys(STATS, 0))
    made = [replace(info, local=("127.0.0.1", port)) for port in (80, 81)]
    for infos, is_far in (
        (made, False),
        ([made[0], replace(info, role="client", local=CLIENT, peer=SERVER)], True),
    ):
        answers = [
            Answer(pid, 0, connections=Connections([one])) for pid, one in zip((5, 6), infos, strict=True)
        ]
        monkeypatch.setattr(ss, "ask_all", lambda pid, answers=answers: answers)
        picture = ss.Picture(is_last=True)
        picture.take(None)
        assert picture.says_no_more == (not is_far)


def test_another_users_process_is_no_peer(machine, monkeypatch):
    """It may say of any connection that it is the other end."""
    assert "far CPUs" not in ss._as_text(*picture_of(monkeypatch, 1, 2, users=(0, 7)))


def test_explain_names_an_adapter_that_is_far(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    far = cpus.why_far_from("mlx5_0")
    info = ConnectionInfo(
        "rdma", "", "client", CLIENT, SERVER, "open", far=far, stats=dict.fromkeys(STATS, 0)
    )
    assert f"note: {far}" in info.explain()
