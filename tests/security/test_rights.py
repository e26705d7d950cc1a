"""Descriptors that come along with a message close where they are dropped, and one may be made to wait: strangers pass
none."""

import errno
import os
import signal
import socket

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

GUEST = 61003
LINGER_S = 30  # more than a guest's patience, on a busy machine, too
SO_PASSRIGHTS = 83


@pytest.fixture(autouse=True)
def needs_the_option():
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        except OSError as exc:
            unfit(f"this kernel passes descriptors to everybody: SO_PASSRIGHTS, of Linux 6.16: {exc}")


def without(guarded):
    return "" if guarded else "passed-rights"


@pytest.mark.parametrize("door", ["link", pytest.param("manager's name", marks=pytest.mark.long)])
def test_a_stranger_stops_no_engine(stage, guarded, door):
    named = ["named"] if door == "manager's name" else []
    options = ["sleeping", *named]  # or it might poll, and hear the guest without its engine
    server = stage.start("besieged", "127.0.0.1", *options, user=VICTIM, without=without(guarded))
    port = server.hear()["port"]
    guest = stage.start("guest", "127.0.0.1", port, user=GUEST)
    guest.hear()
    guest.tell(connect=1, keep=True)
    number = int(guest.hear()["answers"][0], 16)  # of the queue pair that serves it
    if named:
        name = ["stream", f"rdmanet-cm/::ffff:127.0.0.1/{port}"]
    else:
        name = ["seqpacket", f"rdmanet-soft/{number >> 8}"]

    for _ in range(3):  # turns of its loop: then it sleeps
        server.tell()
        server.hear()
    # The victim's is to be the last reference. An attacker keeps it busy for that; we hold it.
    server.stop()
    attacker = stage.start("lingerer", "to", LINGER_S, *name, user=ATTACKER)
    result = attacker.hear()
    os.kill(server.pid, signal.SIGCONT)
    if guarded:
        assert result == {"refused": errno.EPERM}
    else:
        assert result == {"passed": True}
        attacker.tell()
        assert attacker.hear() == {"taken": True}
    guest.tell(ask=True)
    assert (guest.hear()["answers"] == ["y"]) == guarded
    attacker.finish()


@pytest.mark.parametrize("door", ["link", "manager's name"])
def test_nor_does_who_has_a_name(stage, guarded, door):
    """Whom we connect to is a stranger as well, until it has proven something."""
    holder = stage.start("port_holder", "127.0.0.1", "bind")
    port = holder.hear()["port"]
    holder.finish()
    if door == "link":
        attacker = stage.start("lingerer", "as", 0, "seqpacket", f"rdmanet-soft/{port}")
        victim = stage.start("link_honest", without=without(guarded))
    else:
        attacker = stage.start("lingerer", "as", 0, "stream", f"rdmanet-cm/::ffff:127.0.0.1/{port}")
        victim = stage.start("cm_client", without=without(guarded))
    assert attacker.hear() == {"has": 1}
    victim.hear()
    victim.tell(port=port, to=["127.0.0.1", port])
    assert attacker.hear() == ({"refused": errno.EPERM} if guarded else {"passed": True})
