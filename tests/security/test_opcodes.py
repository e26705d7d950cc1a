"""Receives that are completed by something else than a message: nothing of what they held before gets out.

Three things stand in the way, and each is enough against the attack as it once worked: a completion must be a plain
SEND's, it is read no further than it goes, and no receive is posted with an old header in it. The control has a
device that reports every receive as a SEND's (so the first is off); a SEND with 32 bits then passes for a message. A
WRITE must fail even there, by the other two.
"""

import pytest

from .play import TRANSPORTS, Play

RINGS = pytest.mark.parametrize("ring", ["own", "shared"])
NOT_A_SEND = "a receive was completed by something else than a SEND"


def tried(play: Play, *attacks: str) -> dict[str, dict]:
    """Each of them, on a connection of its own: what came of it."""
    liar = play.start("offer_liar", *attacks)
    said = {}
    for attack in attacks:
        said[attack] = liar.hear()
        assert said[attack]["attack"] == attack
    liar.finish()
    return said


def is_refused(said: dict, ring: str, words: str) -> bool:
    """On a shared queue a peer that breaks the rules gets no Abort."""
    return said["echoed"] == "" and said["words"] == (words if ring == "own" else None)


@TRANSPORTS
@RINGS
def test_a_message_with_32_bits(stage, guarded, way, ring):
    play = Play(stage, way, "" if guarded else "recv-opcode", "offer", ring)
    said = tried(play, "imm:21")["imm:21"]
    assert said["sent"] == "SUCCESS"
    if guarded:
        assert is_refused(said, ring, NOT_A_SEND)
    else:
        assert said["echoed"] == "frame"


@TRANSPORTS
@RINGS
def test_writes_that_complete_a_receive(stage, guarded, way, ring):
    """Of no bytes, of as many as a header has, and more: none is echoed, and each costs its connection."""
    attacks = ("write:0", "write:16", "write:23", "write:200")
    play = Play(stage, way, "" if guarded else "recv-opcode", "offer", ring)
    for attack, said in tried(play, *attacks).items():
        assert said["sent"] == "SUCCESS", attack
        assert said["echoed"] == "", attack
        if guarded:
            assert is_refused(said, ring, NOT_A_SEND), attack
    lost = [play.expect("lost") for _ in attacks]
    assert {each["error"] for each in lost} == {"ProtocolError"}


@TRANSPORTS
@RINGS
def test_less_than_a_header(stage, way, ring):
    """The rest of it, from the message before, is neither used nor told."""
    attacks = [f"send:{size}" for size in range(16)]
    play = Play(stage, way, "", "offer", ring)
    for size, said in enumerate(tried(play, *attacks).values()):
        assert said["sent"] == "SUCCESS"
        assert is_refused(said, ring, f"a frame of {size} bytes is shorter than its 16-byte header")
    for _ in attacks:
        assert play.expect("lost")["error"] == "ProtocolError"
