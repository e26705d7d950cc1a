"""Who speaks for a server's TCP listener: nobody but who has it. A server's user says too little, since a container or
sandbox may have the same; and the port of a worker that has ended is anybody's."""

import os
import shutil

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

ANOTHER = 61003
# The attacker has the user of the server and of most clients, and is locked up.
BOXES = {
    "user namespace": f"{VICTIM},sandbox",
    "pid namespace": f"pids,{VICTIM}",
    "both": f"{VICTIM},sandbox,pids",
    "mount namespace": f"mounts,{VICTIM}",
    "ipc namespace": f"ipc,{VICTIM}",
    "all but the network": f"mounts,ipc,pids,{VICTIM},seccomp",
    "seccomp": f"{VICTIM},seccomp",
    "landlock": f"{VICTIM},landlock",
    "chroot": f"chroot,{VICTIM}",
}
SHOWN = {"user namespace", "pid namespace", "both", "all but the network"}  # before it has said anything
boxes = pytest.mark.parametrize("box", BOXES)
CLIENTS = {"the server's user": VICTIM, "root": None, "a third user": ANOTHER}
MET_BY = [(box, "the server's user") for box in BOXES]
MET_BY += [("pid namespace", "root"), ("landlock", "root")]
MET_BY += [
    (box, "a third user") for box in ("user namespace", "mount namespace", "landlock", "seccomp", "chroot")
]


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be all of these")


def impostor(stage, roles, what, address, port):
    attacker = stage.start("impostor", roles, what, address, port)
    attacker.hear()
    return attacker


def request(client, port):
    client.tell(port=port)
    return client.hear()


@pytest.mark.parametrize(("box", "who"), MET_BY)
def test_a_box_puts_up_no_door(stage, guarded, box, who):
    """The server knows nothing of RDMA, so its door's name is free for everybody."""
    server = stage.start("switch_server", "0.0.0.0", 0, "plain", user=VICTIM, ACTOR_DUMPABLE="1")
    port = server.hear()["port"]
    impostor(stage, BOXES[box], "door", "0.0.0.0", port)
    kind = () if guarded else ("trusting",)
    client = stage.start("switch_client", *kind, user=CLIENTS[who], ACTOR_DUMPABLE="1")
    said = request(client, port)
    if guarded:
        assert said["reply"] == "the server" and said["fabric"] == "tcp", said
    else:
        assert said["reply"] == "the impostor", said


@boxes
def test_a_box_is_no_worker(stage, guarded, box):
    kind = () if guarded else ("trusting",)
    server = stage.start("switch_server", "127.0.0.1", 0, *kind, user=VICTIM, ACTOR_DUMPABLE="1")
    port = server.hear()["port"]
    attacker = impostor(stage, BOXES[box], "worker", "127.0.0.1", port)
    client = stage.start(
        "switch_client", *(() if guarded else ("careless",)), user=VICTIM, ACTOR_DUMPABLE="1"
    )
    replies = [request(client, port) for _ in range(20)]
    attacker.tell()
    got = attacker.hear()["requests"]
    if guarded:
        assert got == 0 and {said["fabric"] for said in replies} == {"rdma"}
        assert box in SHOWN or "a process is not taken for a worker" in server.finish()
    else:
        assert got > 10


def test_who_says_nothing_to_the_front_takes_no_descriptors(stage, guarded):
    """A process of the server's user that does not have the TCP listener: one in a sandbox, say."""
    if shutil.which("prlimit") is None:
        unfit("there is no prlimit")
    kind = () if guarded else ("patient",)
    prefix = ("prlimit", "--nofile=256")
    server = stage.start(
        "switch_server", "127.0.0.1", 0, *kind, user=VICTIM, prefix=prefix, ACTOR_DUMPABLE="1"
    )
    port = server.hear()["port"]
    crowd = stage.start("silent_workers", "127.0.0.1", port, 400, user=VICTIM, ACTOR_DUMPABLE="1")
    assert crowd.hear() == {"there": 400}
    if not guarded:
        crowd.tell(greeted=150, sent_away=400 - 256)  # for want of descriptors
        crowd.hear()
        server.tell()
        assert server.hear()["left"] < 4
        return
    crowd.tell(greeted=400, sent_away=400 - 64)
    crowd.hear()
    server.tell()
    assert server.hear()["left"] == 32
    client = stage.start("switch_client", user=VICTIM, ACTOR_DUMPABLE="1")
    said = request(client, port)
    assert (said["reply"], said["fabric"]) == ("the server", "rdma"), said


@pytest.mark.parametrize("who", CLIENTS)
def test_a_confined_server_is_reached_by_rdma(stage, who):
    """Services often are confined. Who may look sees that it has the TCP listener; a third user may not."""
    if shutil.which("setpriv") is None:
        unfit("there is no setpriv")
    prefix = ("setpriv", "--no-new-privs")
    server = stage.start("switch_server", "127.0.0.1", 0, user=VICTIM, prefix=prefix, ACTOR_DUMPABLE="1")
    client = stage.start("switch_client", user=CLIENTS[who], ACTOR_DUMPABLE="1")
    said = request(client, server.hear()["port"])
    assert said["reply"] == "the server"
    assert said["fabric"] == ("tcp" if who == "a third user" else "rdma"), said
    assert ("NoNewPrivs" in said["why"]) is (who == "a third user")


def test_the_port_of_a_worker_passes_to_another_user(stage, guarded):
    """A worker ends when the door has sent a client there. The client does not speak with who has its port now."""
    workers = [stage.start("switch_server", "127.0.0.1", 0, "shared")]
    port = workers[0].hear()["port"]
    workers.append(stage.start("switch_server", "127.0.0.1", port, "shared"))
    workers[1].hear()
    successor = stage.start("successor", user=ATTACKER)
    successor.hear()
    kind = "pausing" if guarded else "pausing,careless"
    client = stage.start("switch_client", *kind.split(","))
    client.tell(port=port)
    while (there := client.hear()["led"]) == port:  # it is the front's turn
        client.tell()
        client.hear()
        client.tell(port=port)
    workers[1].close()
    successor.tell(port=there)
    assert successor.hear()["has"] == there
    client.tell()
    said = client.hear()
    if guarded:
        assert said["reply"] == "the server" and said["fabric"] == "tcp", said
        assert "the worker at port" in said["why"]
    else:
        assert said["reply"] == "the successor", said


@pytest.mark.parametrize("box", [str(ATTACKER), BOXES["landlock"]], ids=["another user", "landlock"])
def test_the_name_of_a_kept_answer_passes_to_another(stage, guarded, box):
    """A server ends its RDMA, and its TCP listener stays. A client that still keeps what the door has said does not
    speak with who has taken the name of RDMA's listener."""
    server = stage.start("switch_server", "127.0.0.1", 0, user=VICTIM, ACTOR_DUMPABLE="1")
    port = server.hear()["port"]
    without = "" if guarded else "name-owner"
    client = stage.start("switch_client", "keeping", user=VICTIM, without=without, ACTOR_DUMPABLE="1")
    assert request(client, port)["fabric"] == "rdma"
    server.tell(tcp_alone=True)
    server.hear()
    attacker = stage.start("boxed_name_taker", box, f"::ffff:127.0.0.1/{port}")
    assert attacker.hear()["has"] == 1
    client.tell(port=port)
    if guarded:
        said = client.hear()
        assert (said["reply"], said["fabric"]) == ("the server", "tcp"), said
        attacker.tell()
        assert attacker.hear() == {"visits": 1, "heard": ""}, "it looks who has the name, and goes"
    else:
        attacker.tell(heard="\0")  # of its request
        assert attacker.hear()["heard"]
