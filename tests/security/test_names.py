"""Abstract names have no permissions: another user who takes the name of a port gets nothing by it, and keeps nobody
from the port."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit
from tests.support.unfit import may_unshare

ANOTHER = 61003
SECRET = "for the server only"
NAMES = ["::ffff:127.0.0.1", "::ffff:0.0.0.0", "::"]


def names_of(port):
    return [f"{address}/{port}" for address in NAMES]


def without(guarded):
    return "" if guarded else "name-owner"


def until_heard(taker):
    """The request reaches who has taken the name."""
    taker.tell(heard=SECRET)
    assert SECRET in taker.hear()["heard"]


@pytest.mark.parametrize("user", [None, VICTIM, ANOTHER], ids=["root", "the server's user", "a third user"])
def test_another_users_name_gets_no_request(stage, guarded, user):
    """A server on all addresses has the name of all of them; that of one of them is free for everybody."""
    server = stage.start("cm_server", "0.0.0.0", 0, "the server", user=VICTIM)
    port = server.hear()["port"]
    attacker = stage.start("name_taker", *names_of(port), user=ATTACKER)
    taken = attacker.hear()["has"]
    assert taken == 2, "all that the server has left"
    client = stage.start("cm_client", user=user, without=without(guarded))
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if guarded:
        assert client.hear()["reply"] == "the server"
        assert server.hear()["request"] == SECRET
        attacker.tell()
        assert attacker.hear() == {"visits": taken, "heard": ""}, "it looks who has the name, and goes"
        assert f"user {ATTACKER} holds the socket name" in client.finish()
    else:
        until_heard(attacker)
    server.finish()


def test_a_name_is_no_servers_port(stage, guarded):
    """All names of a port are taken; TCP's is free, and that counts."""
    with_port = stage.start("port_holder", "127.0.0.1", "bind", user=VICTIM)
    port = with_port.hear()["port"]
    with_port.finish()
    attacker = stage.start("name_taker", *names_of(port), user=ATTACKER)
    assert attacker.hear()["has"] == len(NAMES)
    server = stage.start("cm_server", "127.0.0.1", port, "the server", user=VICTIM, without=without(guarded))
    if not guarded:
        assert server.hear()["refused"] == errno.EADDRINUSE
        return
    assert server.hear()["port"] == port
    client = stage.start("cm_client", user=VICTIM)
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    assert client.hear()["reply"] == "the server"
    attacker.tell()
    assert attacker.hear() == {"visits": len(NAMES), "heard": ""}
    assert f"user {ATTACKER} holds the socket name" in server.finish()


def test_a_name_that_was_taken_and_let_go(stage):
    """The server has another name then: without any it would be taken for a TCP program, and get no clients."""
    with_port = stage.start("port_holder", "127.0.0.1", "bind", user=VICTIM)
    port = with_port.hear()["port"]
    with_port.finish()
    attacker = stage.start("name_taker", *names_of(port), user=ATTACKER)
    assert attacker.hear()["has"] == len(NAMES)
    server = stage.start("cm_server", "127.0.0.1", port, "the server", user=VICTIM)
    assert server.hear()["port"] == port
    attacker.finish()
    for user in (None, VICTIM, ANOTHER):
        client = stage.start("cm_client", user=user)
        client.hear()
        client.tell(to=["127.0.0.1", port], data=SECRET)
        assert client.hear()["reply"] == "the server"
        assert server.hear()["request"] == SECRET
        client.finish()
    assert f"user {ATTACKER} holds the socket name" in server.finish()


def test_ten_thousand_names(stage, network, guarded):
    if shutil.which("prlimit") is None:
        unfit("there is no prlimit")
    many = (*network, "prlimit", "--nofile=11000")
    attacker = stage.start("name_hoarder", 21000, 3400, user=ATTACKER, prefix=many)
    assert attacker.hear()["has"] == 3 * 3400
    server = stage.start("many_binder", 21000, 85, 40, user=VICTIM, prefix=network, without=without(guarded))
    result = server.hear()
    wanted = 40 - result["passed"]
    assert wanted > 30
    if guarded:
        assert (result["has"], result["errors"]) == (wanted, [])
    else:
        assert (result["has"], set(result["errors"])) == (0, {errno.EADDRINUSE})


@pytest.mark.parametrize("held", ["listen", "bind"])
def test_a_held_port_is_taken(stage, guarded, held):
    """Another user has the TCP port. A listener by name would silently get no clients."""
    attacker = stage.start("port_holder", "127.0.0.1", held, user=ATTACKER)
    port = attacker.hear()["port"]
    server = stage.start("cm_server", "127.0.0.1", port, "the server", user=VICTIM, without=without(guarded))
    if guarded:
        assert server.hear()["refused"] == errno.EADDRINUSE
    else:
        assert server.hear()["port"] == port


def test_beside_a_tcp_program_of_ones_own(stage):
    """Who has the TCP port may be reached by name, by every user: he could be by TCP. His own programs have to see that
    it is none of his sandboxes."""
    program = stage.start("port_holder", "127.0.0.1", "listen", user=VICTIM)
    port = program.hear()["port"]
    server = stage.start("cm_server", "127.0.0.1", port, "by name", user=VICTIM, ACTOR_DUMPABLE="1")
    assert server.hear()["port"] == port
    for user in (None, VICTIM, ANOTHER):
        client = stage.start("cm_client", user=user)
        client.hear()
        client.tell(to=["127.0.0.1", port], data=SECRET)
        assert client.hear()["reply"] == "by name"
        assert server.hear()["request"] == SECRET
        client.finish()
    server.finish()


def test_who_has_no_name_proves_nothing(stage, guarded):
    """In a namespace of users all those outside are called the same: the server, and the attacker."""
    if os.geteuid() != 0:
        unfit("only root can be another user")
    prefix = ("unshare", "--user", "--map-root-user")
    if not may_unshare(*prefix[1:]):
        unfit("no user namespace is to be had")
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    server = stage.start("cm_server", "0.0.0.0", 0, "the server", user=VICTIM)
    port = server.hear()["port"]
    attacker = stage.start("name_taker", *names_of(port), user=ATTACKER)
    assert attacker.hear()["has"] == 2
    client = stage.start("cm_client", without=without(guarded), prefix=prefix)
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if guarded:
        assert client.hear()["reply"] == "the server"
        attacker.tell()
        assert attacker.hear() == {"visits": 2, "heard": ""}
        assert f"user {overflow} holds the socket name" in client.finish()
    else:
        until_heard(attacker)


BOXES = {
    "user namespace": [VICTIM, "sandbox", "bare"],
    "pid namespace": [VICTIM, "sandbox", "pids", "bare"],
    "landlock": [VICTIM, "landlock"],
    "root directory": ["chroot", VICTIM],
    "not dumpable": [VICTIM, "undumpable"],
}


def boxed(stage, roles, names, script="boxed_name_taker"):
    """One of the same user as the server and its client, locked up."""
    if os.geteuid() != 0:
        unfit("only root can be all of these")
    attacker = stage.start(script, ",".join(map(str, roles)), *names)
    return attacker, attacker.hear()["has"]


@pytest.mark.parametrize("box", BOXES)
def test_a_box_of_the_same_user_gets_no_request(stage, guarded, box):
    server = stage.start("cm_server", "0.0.0.0", 0, "the server", user=VICTIM, ACTOR_DUMPABLE="1")
    port = server.hear()["port"]
    attacker, taken = boxed(stage, BOXES[box], names_of(port))
    assert taken == 2
    without = "" if guarded else "name-process"
    client = stage.start("cm_client", user=VICTIM, without=without, ACTOR_DUMPABLE="1")
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if guarded:
        assert client.hear()["reply"] == "the server"
        attacker.tell()
        assert attacker.hear() == {"visits": taken, "heard": ""}, "it looks who has the name, and goes"
        said = client.finish()
        assert f"user {VICTIM} holds the socket name" in said
        assert ", in a process in a sandbox or container, or not dumpable, and has no right" in said
    else:
        until_heard(attacker)


@pytest.mark.parametrize("box", ["pid namespace", "landlock", "root directory"])
@pytest.mark.parametrize("user", [None, ANOTHER], ids=["root", "a third user"])
def test_a_box_gets_no_request_for_its_users_tcp_program(stage, guarded, box, user):
    """A TCP program has no name of that kind, so it is free, and its user says that the user listens there."""
    program = stage.start("port_holder", "127.0.0.1", "listen", user=VICTIM)
    port = program.hear()["port"]
    attacker, taken = boxed(stage, BOXES[box], names_of(port)[:1])
    assert taken == 1
    client = stage.start("cm_client", user=user, without="" if guarded else "name-process")
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if guarded:
        attacker.tell(visits=1)
        attacker.hear()  # it looks who has the name, and goes
        program.close()
        client.hear()  # TCP has reset it
        attacker.tell()
        assert attacker.hear()["heard"] == ""
        assert f"user {VICTIM} holds the socket name" in client.finish()
        return
    until_heard(attacker)


@pytest.mark.parametrize("user", [None, ANOTHER], ids=["root", "a third user"])
def test_who_has_the_pid_now_does_not_speak_for_a_box(stage, guarded, user):
    """The kernel tells the process that called listen, also when it has ended and a child of its has the socket. Who
    has its pid now is unconfined."""
    program = stage.start("port_holder", "127.0.0.1", "listen", user=VICTIM)
    port = program.hear()["port"]
    attacker, _ = boxed(stage, BOXES["landlock"], names_of(port)[:1], "orphaned_name_taker")
    attacker.wait()  # its child goes on
    stage.start("pid_taker", attacker.pid).hear()
    client = stage.start("cm_client", user=user, without="" if guarded else "name-life")
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if not guarded:
        until_heard(attacker)
        return
    assert client.hear()["error"] == "ConnectionRefusedError", "a TCP program gets no request"
    attacker.tell()
    said = attacker.hear()
    assert said["visits"] and not said["heard"]
    assert f"user {VICTIM} holds the socket name" in client.finish()


def test_fewer_capabilities_get_no_request(stage, guarded):
    """Root's container has its number, and not its power."""
    if os.geteuid() != 0:
        unfit("only root has capabilities")
    server = stage.start("cm_server", "0.0.0.0", 0, "the server", user=VICTIM)
    port = server.hear()["port"]
    attacker = stage.start("boxed_name_taker", "bare", *names_of(port))
    assert attacker.hear()["has"] == 2
    client = stage.start("cm_client", without="" if guarded else "name-process")
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    if guarded:
        assert client.hear()["reply"] == "the server"
    else:
        until_heard(attacker)


def test_a_box_keeps_no_server_from_its_port(stage, guarded):
    with_port = stage.start("port_holder", "127.0.0.1", "bind", user=VICTIM)
    port = with_port.hear()["port"]
    with_port.finish()
    _, taken = boxed(stage, BOXES["pid namespace"], names_of(port))
    assert taken == len(NAMES)
    without = "" if guarded else "name-process"
    server = stage.start("cm_server", "127.0.0.1", port, "the server", user=VICTIM, without=without)
    if guarded:
        assert server.hear()["port"] == port
        said = server.finish()
        assert f"user {VICTIM} holds the socket name" in said
        assert ", in a process that does not listen there or has other rights than ours" in said
    else:
        assert server.hear()["refused"] == errno.EADDRINUSE


@pytest.mark.parametrize("user", [None, VICTIM], ids=["root", "a user"])
def test_a_name_of_an_equal_is_believed(stage, user):
    """With no TCP listener: that a name is believed shows in who hears of the request."""
    with_port = stage.start("port_holder", "127.0.0.1", "bind", user=VICTIM)
    port = with_port.hear()["port"]
    with_port.finish()
    equal = stage.start("name_taker", *names_of(port)[:1], user=user, ACTOR_DUMPABLE="1")
    assert equal.hear()["has"] == 1
    client = stage.start("cm_client", user=user, ACTOR_DUMPABLE="1")
    client.hear()
    client.tell(to=["127.0.0.1", port], data=SECRET)
    until_heard(equal)
