"""A process that connects to a queue pair's TCP port in its peer's name injects nothing, and can't hinder the peer."""

import os

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

PEER = 61003
PSN, RANGE = 0x123456, 200
FORGED = "from the attacker"


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be three users")


def tell(end, number):
    end.tell(number=number, psn=PSN)
    assert end.hear() == {"connected": True}


def say(here, there, text):
    here.tell(send=text)
    assert here.hear() == {"status": "SUCCESS"}
    assert there.hear() == {"got": text, "status": "SUCCESS"}


def test_a_mapped_queue_pair_takes_no_tcp(stage, guarded):
    """The attacker knows everything, the sequence number too."""
    victim = stage.start("pair_end", VICTIM, without="" if guarded else "tcp-attach")
    peer = stage.start("pair_end", VICTIM)
    numbers = [end.hear()["number"] for end in (victim, peer)]
    tell(victim, numbers[1])
    tell(peer, numbers[0])
    say(victim, peer, "one way")
    say(peer, victim, "the other way")
    attacker = stage.start("attacher", *numbers, FORGED, PSN, RANGE, 0, user=ATTACKER)
    result = attacker.hear()
    if not guarded:
        assert result == {"attempts": 1, "sent": True}
        assert victim.hear()["got"] == FORGED
        return
    assert result == {"attempts": RANGE, "sent": False}
    say(peer, victim, "still there")
    say(victim, peer, "so am I")
    assert (
        "refused a TCP connection that claims to be from its peer, which maps its memory" in victim.finish()
    )


@pytest.mark.parametrize("user", [ATTACKER, VICTIM])
def test_a_peer_that_has_no_link_to_us(stage, guarded, user):
    """We map the peer, and it doesn't map us, or doesn't yet: its own user alone may come by TCP meanwhile."""
    victim = stage.start("pair_end", VICTIM, without="" if guarded else "tcp-attach")
    peer = stage.start("pair_end", VICTIM)
    other = stage.start("pair_end", VICTIM)
    numbers = [end.hear()["number"] for end in (victim, peer, other)]
    tell(peer, numbers[2])  # so it listens
    tell(victim, numbers[1])
    attacker = stage.start("attacher", *numbers[:2], FORGED, PSN, RANGE, 0, user=user)
    result = attacker.hear()
    if guarded and user == ATTACKER:
        assert result == {"attempts": RANGE, "sent": False}
        assert (
            "refused a TCP connection that claims to be from its peer, but comes from another user"
            in victim.finish()
        )
    else:
        assert result["sent"], "after the link has come"
        assert victim.hear()["got"] == FORGED


def test_a_search_for_the_sequence_number_ends(stage, guarded):
    """The peer is another user's, so TCP is its way; the attacker comes before it does."""
    victim = stage.start("pair_end", VICTIM, without="" if guarded else "tcp-attempts")
    peer = stage.start("pair_end", PEER)
    numbers = [end.hear()["number"] for end in (victim, peer)]
    tell(victim, numbers[1])
    attacker = stage.start("attacher", *numbers, FORGED, PSN - RANGE + 1, RANGE, 1, user=ATTACKER)
    result = attacker.hear()
    if not guarded:
        assert result == {"attempts": RANGE, "sent": True}
        assert victim.hear()["got"] == FORGED
        return
    assert result == {"attempts": RANGE, "sent": False}, "the right one was among them, and too late"
    tell(peer, numbers[0])
    say(peer, victim, "let in at once")
    say(victim, peer, "as ever")
    assert (
        "refused a TCP connection that claims to be from its peer, with a wrong sequence number"
        in victim.finish()
    )
