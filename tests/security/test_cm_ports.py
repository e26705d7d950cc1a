"""No other process can take a listener's port, at any moment between its first call and its last."""

import pytest

from tests.security.conftest import ATTACKER, VICTIM

CYCLES = 5


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_no_other_user_has_the_port(stage, guarded, moments, tmp_path, address):
    """The listener closes its connections first, so that its port is full of old ones when it comes again."""
    name = f"moments-{tmp_path}"
    thief = stage.start("port_thief", name, "first", user=ATTACKER)
    thief.hear()
    victim = stage.start(
        "port_cycler",
        address,
        CYCLES,
        user=VICTIM,
        without="" if guarded else "port-sharing",
        LD_PRELOAD=moments,
        MOMENTS=name,
    )
    cycles = [victim.hear()]
    while len(cycles) < CYCLES and not cycles[-1]["errno"]:
        cycles.append(victim.hear())
    thief.tell()
    result = thief.hear()
    assert result["tried"] >= 4 * 5, "with each set of options, at five moments at least"
    assert result["calls"] == ["bind", "listen", "setsockopt"]
    if guarded:
        assert result["got"] == []
        assert cycles == [{"port": cycles[0]["port"], "errno": 0}] * CYCLES
        victim.finish()
    else:
        assert result["got"]
