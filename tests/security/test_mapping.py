"""Memory of another process that can't be mapped costs three tries, and the faster way."""

import re

MIB = 1 << 20


def test_a_segment_without_room(stage, guarded):
    """The attacker makes it large; his victim has a limit (RLIMIT_AS), and writes there."""
    attacker = stage.start("pair_end")
    victim = stage.start("pair_end", without="" if guarded else "map-tries", RDMANET_SOFT_SILENCE="500")
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
    failures = said.count("can't be mapped") + sum(map(int, re.findall(r"and (\d+) more", said)))
    if guarded:
        assert ended == {"status": "SUCCESS"}, "another way"
        assert failures <= 4, "three tries, and that it is given up"
    else:
        assert ended == {"status": "RETRY_EXC_ERR"}
        assert failures > 100
