"""A process that has mapped a server's arena writes over it, and the server goes on for everybody else.

Who has mapped it is of the same user, and may end its own connection and those that it scribbles over. What it must
not be able to do, by a word here and there, is to end the server for all. tests/c/test_scribbles.c has the words one by
one; here they are as programs meet them.
"""

from typing import Any

import pytest

from tests.support.processes import Process

from .conftest import Stage

MAPPED = {"RDMANET_SOFT_TRANSPORT": "direct", "RDMANET_SOFT_SILENCE": "1000"}
HURTFUL = [0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x5EED1E55]
LONG = 30  # seconds, for what must happen
SHORT = 3  # for what must not, if the attack has reached its target


class Play:
    def __init__(self, stage: Stage, *arguments: object, without: str = "") -> None:
        self.stage, self.without = stage, without
        self.victim = stage.start("scribbles_victim", *arguments, without=without, **MAPPED)
        said = self.victim.hear()
        self.port, self.pid = said["port"], said["pid"]

    def client(self) -> Process:
        client = self.stage.start("scribbles_client", self.port, without=self.without, **MAPPED)
        assert client.hear() == {"connected": True}
        return client

    def attacker(self) -> tuple[Process, dict[str, Any]]:
        attacker = self.stage.start("scribbles_attacker", self.port, without=self.without, **MAPPED)
        return attacker, attacker.hear()

    def engine_ns(self) -> int:
        self.victim.tell(alive=True)
        ran: int = self.victim.hear()["engine_ns"]
        return ran


def echo(client: Process, count: int, within: float = LONG) -> dict[str, Any]:
    client.tell(echo=count, within=within)
    return client.hear()


def expect_echo(client: Process, count: int = 100) -> None:
    assert echo(client, count) == {"echoed": count, "lost": None}


def test_ports(stage: Stage, guarded: bool) -> None:
    """The numbers of the queue pairs to come are made of a word that everybody can write."""
    play = Play(stage, without="" if guarded else "own-facts")
    old = play.client()
    expect_echo(old)
    attacker, _ = play.attacker()
    attacker.tell(scribble="ports", value=0x5EED)
    assert attacker.hear() == {"written": 64}
    new = stage.start("scribbles_client", play.port, without=play.without, **MAPPED)
    if guarded:
        assert new.hear() == {"connected": True}
        expect_echo(new)
        expect_echo(old)
        play.victim.finish()
    else:
        said = new.hear()
        assert "refused" in said or echo(new, 1, SHORT)["echoed"] in (None, 0)


def test_channels(stage: Stage, guarded: bool) -> None:
    """A client finds out how to wake the server in a word that every process can write."""
    play = Play(stage, without="" if guarded else "own-facts")
    old = play.client()
    expect_echo(old)
    attacker, found = play.attacker()
    attacker.tell(scribble="channels", value=0x5EED)
    assert attacker.hear() == {"written": found["cqs"]}
    assert found["cqs"]
    if guarded:
        expect_echo(old)
        expect_echo(play.client())
        play.victim.finish()
    else:
        assert echo(old, 1, SHORT)["echoed"] is None


def test_another_connection(stage: Stage) -> None:
    """It ends, and the others don't."""
    play = Play(stage)
    clients = [play.client() for _ in range(3)]
    for client in clients:
        expect_echo(client)
    attacker, _ = play.attacker()
    attacker.tell(scribble="connection", values=HURTFUL)
    assert attacker.hear()["written"] > len(HURTFUL) * 64
    ended = [client for client in clients if echo(client, 100, 10)["echoed"] != 100]
    assert len(ended) <= 1
    expect_echo(play.client())
    for client in clients:
        if client not in ended:
            expect_echo(client)
    play.victim.finish()


@pytest.mark.parametrize("receives", ["rings", pytest.param("shared", marks=pytest.mark.long)])
def test_everything(stage: Stage, receives: str) -> None:
    """Each word that means anything, with each of some values: afterwards new clients are served."""
    play = Play(stage, receives)
    written = 0
    for value in HURTFUL:
        old = play.client()
        expect_echo(old, 10)
        attacker, found = play.attacker()
        assert found["qps"] and found["keys"] and found["cqs"]
        before = play.engine_ns()
        attacker.tell(scribble="all", value=value)
        written += attacker.hear()["written"]
        attacker.tell(watch=True)
        assert attacker.hear() == {"right_again": True}
        expect_echo(play.client(), 10)
        assert play.engine_ns() - before < 1e9  # it is there, and doesn't go round and round
        old.close()
        attacker.close()
    assert written > len(HURTFUL) * 4096
    assert "that only we may write: restored" in play.victim.finish()
