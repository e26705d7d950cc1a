"""Who is linked with a listener that is there by name asks it in memory. So nobody holds that up who fills the queue of
the name, and the kernel is asked about the process at the other end as about one that is connected to by the name."""

import os
import signal

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

DATA = "for the server only"


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be all of these")


class Linked:
    """A TCP program; a server of the same user, there by the port's name; and a client that is linked with it."""

    def __init__(self, stage, without: str = "", by_link: bool = True) -> None:
        program = stage.start("port_holder", "127.0.0.1", "listen", user=VICTIM)
        self.port = program.hear()["port"]
        self.server = stage.start("name_server", self.port, user=VICTIM, ACTOR_DUMPABLE="1")
        assert self.server.hear()["listens"]
        self.client = stage.start("name_asker", self.port, user=VICTIM, without=without, ACTOR_DUMPABLE="1")
        self.client.hear()
        assert not self.ask(), "the first one has no link"
        for _ in range(100 if by_link else 1):  # until they are linked, both ways
            if self.ask():
                return
        assert not by_link

    def ask(self) -> bool:
        """Connect once more. Whether it was by the link."""
        self.client.tell(data=DATA)
        heard = self.server.hear()
        assert heard["request"] == DATA
        assert self.client.hear()["reply"] == "by name"
        return heard["by_link"]


def test_who_is_linked_passes_those_who_fill_the_queue(stage, guarded):
    """The server does not run for a while, and another user fills the queue of its name meanwhile."""
    linked = Linked(stage, "" if guarded else "handover", by_link=guarded)
    flood = stage.start("flood", 6000, "stream", f"rdmanet-cm/::ffff:127.0.0.1/{linked.port}", user=ATTACKER)
    flood.hear()
    os.kill(linked.server.pid, signal.SIGSTOP)
    try:
        flood.tell()
        flood.hear()  # half of it, or less
        assert flood.hear()["made"] < 6000, "the queue is full"
        linked.client.tell(data=DATA)
        if not guarded:
            said = linked.client.hear()
            assert said.get("error") and "too many wait to be accepted there" in linked.client.finish()
            return
    finally:
        os.kill(linked.server.pid, signal.SIGCONT)
    heard = linked.server.hear()
    assert (heard["request"], heard["by_link"]) == (DATA, True)
    assert linked.client.hear()["reply"] == "by name"


def test_a_linked_process_that_is_locked_up_gets_no_more_requests(stage, guarded):
    """It has the name, and not the TCP listener. What it has mapped it keeps, but it speaks for nobody any more."""
    linked = Linked(stage, "" if guarded else "name-process")
    linked.server.tell(become=["landlock"])
    assert linked.server.hear()["became"]
    if not guarded:
        assert linked.ask()
        return
    linked.client.tell(data=DATA)
    said = linked.client.hear()
    assert said.get("error") == "ConnectionRefusedError", said
    assert "in a process in a sandbox or container" in linked.client.finish()
    linked.server.close()
