"""Memory of another process that can't be mapped costs three tries, and the faster way."""

import re

MIB = 1 << 20


def test_a_segment_without_room(stage, guarded):
    """The attacker makes it large; his victim has a limit (RLIMIT_AS), and writes there."""
    attacker = stage.start("pair_end")
    # Each try is a line, so none may be left out.
    without = "log-rate" if guarded else "log-rate,map-tries"
    victim = stage.start("pair_end", without=without, RDMANET_SOFT_SILENCE="500")
    ends = [attacker, victim]
    numbers = [end.hear()["number"] for end in ends]
    for end, number in zip(ends, reversed(numbers), strict=True):
        end.tell(number=number, psn=1, timeout=14)
        assert end.hear() == {"connected": True}
    victim.tell(send="hello")
    assert victim.hear() == {"status": "SUCCESS"}
    attacker.hear()
    attacker.tell(offer=256 * MIB)
    memory = attacker.hear()
    victim.tell(room=64 * MIB)
    victim.hear()
    victim.tell(write="text", at=memory["address"], key=memory["key"])
    while "got" in (ended := victim.hear()):
        pass  # its receives: the queue pair is in ERR
    said = victim.finish()
    failures = len(re.findall("cannot map \\d+ bytes of another process's memory", said))
    if guarded:
        assert ended == {"status": "SUCCESS"}, "another way"
        assert failures == 3
        assert "its memory is reached by system calls, or through its owner" in said
    else:
        assert ended == {"status": "RETRY_EXC_ERR"}
        assert failures > 100
