"""What a client of a server can do with memory that was offered: to another one, or to itself and taken back."""

import os
import signal

import pytest

from .play import MAPPED_FIRST, TRANSPORTS, Play

PATIENCE = 0.5
BOUND_S = 30.0  # of what ends within PATIENCE and a second on a machine that is not busy


def guest_with_an_offer(play: Play):
    """An honest client that was offered a secret, and where."""
    guest = play.start("offer_guest")
    assert guest.hear() == {"connected": True}
    play.expect("made")
    play.owner.tell(client=0, do="offer", patience=PATIENCE)
    offer = guest.hear()
    return guest, offer


def is_served(guest) -> None:
    guest.tell(do="read")
    assert guest.hear() == {"data": "secret of the 0."}
    guest.tell(do="echo", text="still here")
    assert guest.hear() == {"echo": "still here"}


@TRANSPORTS
def test_the_right_key_on_another_connection(stage, guarded, way):
    """Even a process that has it can do nothing with it."""
    play = Play(stage, way, "" if guarded else "window-qp")
    guest, offer = guest_with_an_offer(play)
    thief = play.start("offer_thief")
    thief.tell(search=False, **offer)
    said = thief.hear()
    if guarded:
        assert said["status"] == "REM_ACCESS_ERR"
        assert "secret" not in said["data"]
        assert play.expect("lost")["lost"] == 1
    else:
        assert said == {"status": "SUCCESS", "data": "secret of the 0."}
    is_served(guest)


@MAPPED_FIRST
def test_a_search_for_the_key(stage, guarded, way):
    """Who is offered memory himself knows keys of the same device; with predictable ones 256 guesses are enough."""
    play = Play(stage, way, "" if guarded else "random-keys,window-qp", "offer")
    guest = play.start("offer_guest")
    assert guest.hear() == {"connected": True}
    offer = guest.hear()
    thief = play.start("offer_thief")
    # For each client a region and a window are made, one key after the other, the highest first. So is memory to send
    # from, for the second one.
    thief.tell(search=True, ahead=3, **offer)
    thief.hear()
    said = thief.hear()
    if guarded:
        assert said == {"tried": 256, "found": ""}
    else:
        assert said["found"] == "secret of the 0."
    is_served(guest)
    play.owner.tell(client=0, do="tell")
    counted = play.expect("memory")["wrong_keys"]
    if guarded and way == "stream":
        # It is on record: all of them by a number, and one line a second.
        assert counted == 257
        lines = [
            line
            for line in play.owner.errors().splitlines()
            if "asked for memory that it may not use" in line
        ]
        assert 1 <= len(lines) < 257


@TRANSPORTS
@pytest.mark.parametrize("how", ["acknowledges", "never"])
def test_writing_after_the_revocation(stage, guarded, way, how):
    """Whether it has said that it would not, or nothing at all: the owner's block ends, and with it the key."""
    play = Play(stage, way, "" if guarded else "window-life")
    holder = play.start("offer_holder", how)
    assert holder.hear() == {"connected": True}
    play.expect("made")
    play.owner.tell(client=0, do="offer", patience=PATIENCE)
    assert holder.hear() == {"first": "SUCCESS"}
    assert play.memory(0).startswith(b"granted ")
    play.owner.tell(client=0, do="leave")
    assert play.expect("taken_back")["seconds"] < BOUND_S
    holder.tell(go="on")
    said = holder.hear()
    if guarded:
        assert said == {"second": "REM_ACCESS_ERR"}
        assert play.memory(0).startswith(b"granted ")
    else:
        assert said == {"second": "SUCCESS"}
        assert play.memory(0).startswith(b"REVOKED!")


@MAPPED_FIRST
def test_who_is_stopped_cannot_keep_the_memory(stage, way):
    """Neither is the owner held up, nor is anything written when it goes on."""
    play = Play(stage, way, "")
    guest, _ = guest_with_an_offer(play)
    holder = play.start("offer_holder", "never")
    assert holder.hear() == {"connected": True}
    play.expect("made")
    play.owner.tell(client=1, do="offer", patience=PATIENCE)
    assert holder.hear() == {"first": "SUCCESS"}
    holder.stop()
    play.owner.tell(client=1, do="leave")
    assert play.expect("taken_back")["seconds"] < BOUND_S
    os.kill(holder.pid, signal.SIGCONT)
    holder.tell(go="on")
    assert holder.hear()["second"] != "SUCCESS"
    assert play.memory(1).startswith(b"granted ")
    is_served(guest)


@TRANSPORTS
def test_who_takes_nothing_cannot_keep_the_memory(stage, way):
    """A stream asks for no RNR retries: what finds no receive ends the connection, and nothing waits behind it."""
    play = Play(stage, way, "", "shared")
    guest, _ = guest_with_an_offer(play)
    holder = play.start("offer_holder", "starves")
    assert holder.hear() == {"connected": True}
    play.expect("made")
    play.owner.tell(client=1, do="offer", patience=PATIENCE)
    assert holder.hear() == {"first": "SUCCESS"}
    play.owner.tell(client=1, do="leave")
    said = [play.owner.hear()]
    while not {"taken_back", "lost"} <= {word for each in said for word in each}:
        said.append(play.owner.hear())
    together = {word: value for each in said for word, value in each.items()}
    assert together["seconds"] < BOUND_S
    assert (together["lost"], together["error"]) == (1, "CompletionResetError")
    assert play.memory(1).startswith(b"granted ")
    is_served(guest)


@TRANSPORTS
def test_who_takes_nothing_cannot_hold_up_an_offer(stage, way):
    """To make a key is a request as well, behind what finds no receive: that ends the connection."""
    play = Play(stage, way, "", "shared")
    guest, _ = guest_with_an_offer(play)
    holder = play.start("offer_holder", "is_deaf")
    assert holder.hear() == {"connected": True}
    play.expect("made")
    assert holder.hear() == {"sent": "SUCCESS"}
    play.expect("echoed")
    play.owner.tell(client=1, do="offer", patience=PATIENCE)
    said = [play.owner.hear()]
    while not {"refused", "lost"} <= {word for each in said for word in each}:
        said.append(play.owner.hear())
    together = {word: value for each in said for word, value in each.items()}
    assert (together["refused"], together["why"]) == (1, "ConnectionResetError")
    assert (together["lost"], together["error"]) == (1, "CompletionResetError")
    is_served(guest)


@MAPPED_FIRST
@pytest.mark.parametrize(
    ("how", "why"), [("hoards", "more than 768 regions"), ("rambles", "4080 are allowed")]
)
def test_regions_without_end(stage, way, how, why):
    """What one peer can make a server remember has a bound, and so has what it can make it read at once."""
    play = Play(stage, way, "")
    guest, _ = guest_with_an_offer(play)
    holder = play.start("offer_holder", how)
    assert holder.hear() == {"connected": True}
    play.expect("made")
    holder.tell(go=True)
    lost = play.expect("lost")
    assert (lost["lost"], lost["error"]) == (1, "ProtocolError")
    assert why in lost["text"]
    assert holder.hear()["told"] == (776 if how == "hoards" else 100)
    is_served(guest)


@TRANSPORTS
def test_who_invalidates_the_key_itself(stage, guarded, way):
    """The device allows it. By our rules it ends this connection, and no other."""
    play = Play(stage, way, "" if guarded else "recv-opcode")
    guest, _ = guest_with_an_offer(play)
    holder = play.start("offer_holder", "invalidates")
    assert holder.hear() == {"connected": True}
    play.expect("made")
    play.owner.tell(client=1, do="offer", patience=PATIENCE)
    assert holder.hear() == {"first": "SUCCESS"}
    assert holder.hear() == {"sent": "SUCCESS"}
    last = holder.hear()["last"]
    if guarded:
        assert last == 6  # an Abort
        lost = play.expect("lost")
        assert (lost["lost"], lost["error"]) == (1, "ProtocolError")
    else:
        assert last == 1  # the echo: it passed for a message
    is_served(guest)
