"""A process that takes the TCP port of a dead peer is not that peer: it gets no message for it."""

import os

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

PSN = 0x123456
TEXT = "for the peer alone"
HELLO = 72
NOWHERE = 20000 << 8  # no queue pair has such a port
SECRET = {"RDMANET_SOFT_SECRET": "5e" * 32}


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be two users")


def tell(end, number):
    end.tell(number=number, psn=PSN, timeout=14)
    assert end.hear() == {"connected": True}


def inherit(stage, network, user, listens, without="", **environment):
    """The peer dies before it is connected to, and the user has its port: the victim, and what the heir got."""
    victim, peer = (
        stage.start(
            "pair_end", VICTIM, without=lacks, prefix=network, RDMANET_SOFT_TRANSPORT="stream", **environment
        )
        for lacks in (without, "")
    )
    numbers = [end.hear()["number"] for end in (victim, peer)]
    if listens:
        # It listens, but neither connects to the victim nor lets it in: else it would take it along when it dies.
        tell(peer, NOWHERE)
        peer.stop()
    tell(victim, numbers[1])
    peer.close()
    port = numbers[1] >> 8
    heir = stage.start("port_heir", port, TEXT, user=user, prefix=network)
    assert heir.hear() == {"port": port}
    victim.tell(send=TEXT)
    return victim, heir.hear()


def knows_who_reserves():
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= (6, 8)


@pytest.mark.parametrize("listens", [True, False])
def test_another_user_who_has_the_port(stage, network, guarded, listens):
    if not listens and not knows_who_reserves():
        unfit("the kernel doesn't tell whose a reserved port is")
    victim, heard = inherit(stage, network, ATTACKER, listens, without="" if guarded else "tcp-holder")
    if not guarded:
        assert heard["hello"] == HELLO
        assert TEXT in heard["got"]
        return
    assert heard == {"hello": 0, "got": ""}
    assert victim.hear() == {"status": "RETRY_EXC_ERR"}
    assert f"belonged to user {VICTIM} and now belongs to user {ATTACKER}: not trusted" in victim.finish()


@pytest.mark.parametrize("secret", [{}, SECRET], ids=["none", "secret"])
def test_the_same_user_who_has_the_port(stage, network, secret):
    """A container with the victim's user id, say: only a secret distinguishes it from the peer."""
    victim, heard = inherit(stage, network, VICTIM, False, **secret)
    assert heard["hello"] == HELLO
    if not secret:
        assert TEXT in heard["got"]
        return
    assert heard["got"] == ""
    # The queue pair fails as soon as the peer is denied. A request that is posted later is flushed.
    assert victim.hear()["status"] in ("REM_ABORT_ERR", "WR_FLUSH_ERR")
    assert "does not prove that it knows the secret" in victim.finish()


def test_a_number_of_no_queue_pair(stage, guarded):
    """A peer may give any number as its own: the port in it may be a service's, and gets no word of ours."""
    service = stage.start("port_heir", 0, TEXT)
    port = service.hear()["port"]
    victim = stage.start(
        "pair_end", VICTIM, without="" if guarded else "tcp-range", RDMANET_SOFT_TRANSPORT="stream"
    )
    victim.hear()
    tell(victim, port << 8 | 1)
    victim.tell(send=TEXT)
    if guarded:
        assert victim.hear() == {"status": "RETRY_EXC_ERR"}
        service.tell()
        assert service.hear() == {"came": 0}
    else:
        assert service.hear()["hello"] == HELLO
