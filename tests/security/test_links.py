"""Which processes map a process's memory: those that may trace it anyhow, and no others, whatever they send."""

import os
import struct

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

ATTEMPTS = 24
ARENA = struct.pack("<Q", 0x524E4152454E0500)[
    2:
].hex()  # what every arena begins with, but for two bytes of sizes


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be all of these")


def attack(stage, port, *roles):
    attacker = stage.start("link_attacker", port, ATTEMPTS, *roles)
    result = attacker.hear()
    assert result["attempts"] == ATTEMPTS
    return result


def is_an_arena(result):
    return result["arenas"] == ATTEMPTS and result["magic"].endswith(ARENA)


# Who the victim is, who the attacker is, and what he is refused for when he comes for the first time.
NEIGHBOURS = {
    "another user": ([VICTIM], [ATTACKER], "user"),
    "another user namespace": ([VICTIM], [VICTIM, "sandbox"], "nonce"),
    "fewer capabilities": ([], ["bare"], "nonce"),
    "more than an ordinary user": ([VICTIM, "undumpable"], [VICTIM], "nonce"),
    "no name": ([VICTIM, "unmapped"], [ATTACKER], "user"),
    "no name, the same user": ([VICTIM, "unmapped"], [VICTIM], "user"),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_who_may_not_trace_may_not_map(stage, guarded, neighbours):
    victim_roles, attacker_roles, reason = NEIGHBOURS[neighbours]
    victim = stage.start("link_victim", *victim_roles, without="" if guarded else "link-proof")
    result = attack(stage, victim.hear()["port"], *attacker_roles)
    if not guarded:
        assert is_an_arena(result)
        return
    assert result["arenas"] == 0
    # Whoever comes again is refused at once, but for users that cost nothing to refuse.
    again = reason if reason == "user" else "again"
    assert result["refusals"] == [reason, reason, *[reason, again] * (ATTEMPTS // 2 - 1)]
    assert "not sharing memory with process" in victim.finish()


@pytest.mark.parametrize(
    "roles", [[], [VICTIM], ["bare"]], ids=["root", "a user", "root without capabilities"]
)
def test_an_equal_process_may(stage, roles):
    """That is the promise: it could do the same with ptrace(2)."""
    victim = stage.start("link_victim", *roles)
    assert is_an_arena(attack(stage, victim.hear()["port"], *roles))
    assert victim.finish() == ""


def test_nobody_may_where_all_goes_by_tcp(stage, guarded):
    victim = stage.start(
        "link_victim", VICTIM, without="" if guarded else "tcp-no-arena", RDMANET_SOFT_TRANSPORT="stream"
    )
    result = attack(stage, victim.hear()["port"], VICTIM)
    if guarded:
        assert result["arenas"] == 0 and set(result["refusals"]) == {"transport"}
    else:
        assert is_an_arena(result)


def test_an_equal_process_without_the_secret_may_not(stage):
    victim = stage.start("link_victim", VICTIM, RDMANET_SOFT_SECRET="5e" * 32)
    result = attack(stage, victim.hear()["port"], VICTIM)
    assert result["arenas"] == 0
    assert set(result["refusals"]) == {"secret", "again"}


@pytest.mark.parametrize("way", ["relay", "impostor"])
def test_nobody_comes_between(stage, guarded, way):
    """Two processes that may trace each other, and one in a sandbox that has the name that one of them looks for."""
    without = "" if guarded else "link-proof"
    server = stage.start("link_victim", VICTIM, without=without)
    client = stage.start("link_honest", VICTIM, without=without)
    attacker = stage.start("link_middle", way, server.hear()["port"], VICTIM, "sandbox")
    attacker.hear()
    client.hear()
    for _ in range(4):
        attacker.tell()
        client.tell(port=attacker.hear()["port"])
        client.hear()
        assert attacker.hear() == {"got": not guarded}
        client.tell()
    said = client.finish()
    assert ("not sharing memory with process" in said) == guarded
