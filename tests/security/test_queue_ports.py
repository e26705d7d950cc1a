"""The TCP port of a queue pair is its process's user's, from before its number is known."""

import resource
import shutil

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

OPENINGS = 200
MOMENTS = 4  # of an opening: when the port is reserved, and shared, and when it is bound to and listened on


def test_no_other_user_has_the_port(stage, guarded, moments, tmp_path):
    name = f"moments-{tmp_path}"
    thief = stage.start("port_thief", name, user=ATTACKER)
    thief.hear()
    victim = stage.start(
        "queue_opener",
        OPENINGS if guarded else 5,
        user=VICTIM,
        without="" if guarded else "port-sharing",
        LD_PRELOAD=moments,
        MOMENTS=name,
    )
    errors = victim.hear()["errors"]
    thief.tell()
    result = thief.hear()
    if guarded:
        assert result["calls"] == ["bind", "listen", "setsockopt"]
        assert result["got"] == []
        assert errors == [0] * OPENINGS
        assert result["tried"] >= OPENINGS * MOMENTS * 4, "with each set of options, at each moment"
    else:
        assert result["got"]
        assert any(errors), "and the victim doesn't get it any more"


def take_names(stage, network, names):
    """All of them, by the attacker."""
    takers, each = 4, len(names) // 4
    needed = each + 100
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if shutil.which("prlimit") is None or hard < needed:
        unfit(f"{needed} descriptors are not to be had, or prlimit isn't there")
    taken = [
        stage.start(
            "name_taker_of_ports",
            *(names[number * each], each),
            user=ATTACKER,
            prefix=(*network, "prlimit", f"--nofile={needed}"),
        )
        for number in range(takers)
    ]
    return sum(taker.hear()["has"] for taker in taken)


@pytest.mark.parametrize("before", [0, 1])
def test_names_that_others_have(stage, network, before):
    """All of them, except those that others had before: then TCP is used in both directions."""
    ends = [stage.start("pair_end", VICTIM, prefix=network) for _ in range(before)]
    numbers = [end.hear()["number"] for end in ends]
    names = range(32768, 61000)
    assert take_names(stage, network, names) == len(names) - before
    ends += [stage.start("pair_end", VICTIM, prefix=network) for _ in range(2 - before)]
    numbers += [end.hear()["number"] for end in ends[before:]]
    for end, number in zip(ends, reversed(numbers), strict=True):
        end.tell(number=number, psn=1)
        assert end.hear() == {"connected": True}
    for here, there in (ends, ends[::-1]):
        here.tell(send="by TCP")
        assert here.hear() == {"status": "SUCCESS"}
        assert there.hear() == {"got": "by TCP", "status": "SUCCESS"}
    for end in ends[before:]:
        assert "has no name, and its peers use TCP" in end.finish()
