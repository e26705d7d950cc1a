"""The twelve troubles that users have: `rdmanet ss` says of another process what explain() says in it.

That explain() names each cause is tested where the trouble is staged (tests/streams/test_explaining.py, of CPUs in
tests/unit/test_cpus.py, of loops that do not answer in test_ss.py). Here the numbers of each go the whole way: from the
process that is looked at, over its socket, to the text and the JSON.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rdmanet.base import onlookers
from rdmanet.base.accounts import ConnectionInfo, ServerInfo, loop_notes, rows_of
from rdmanet.base.call_accounts import CallsInfo
from rdmanet.cli import ss
from tests.security.test_ss import Liar

OPEN = ConnectionInfo(
    "rdma", "why", "client", ("127.0.0.1", 9), ("127.0.0.1", 80), "open", device="soft0", path="memory", qp=7
)
STATS = {
    "bytes_unsent": 0, "credits": 16, "peer_slots": 16, "sends_in_flight": 0, "send_slots": 16, "bytes_sent": 7,
    "bytes_received": 9,
}  # fmt: skip


@dataclass
class Staged:
    """What has the trouble: a connection, a server, or the engine of a loop."""

    connection: ConnectionInfo | None = None
    server: ServerInfo | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    modules: tuple[str, ...] = ()

    def headline(self) -> dict[str, Any]:
        return {"loop": 1, "library": "embedded", "engines": [self.engine] if self.engine else []}

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        return iter([] if self.connection is None else [self.connection])

    def connection_rows(self) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        return rows_of(self.connection_infos())

    def calls_infos(self) -> Iterator[CallsInfo]:
        return iter(())

    def server_infos(self) -> Iterator[ServerInfo]:
        return iter([] if self.server is None else [self.server])

    def explain(self) -> list[str]:
        """What is said in the process itself, without what is no trouble."""
        said = [each.explain() for each in (self.connection, self.server) if each is not None]
        lines = [line for text in said for line in text.splitlines() if line.startswith(("waits", "note"))]
        return lines + [f"note: {words}" for words in loop_notes(self.engine)]


def having(info: ConnectionInfo = OPEN, **stats: int) -> Staged:
    return Staged(replace(info, stats=STATS | stats))


TROUBLES = {
    "slow reader": (
        having(waits_for_credits=3, us_without_credits=1_500_000, us_open=60_000_000),
        "the peer reads more slowly than this program writes",
    ),
    "no credits": (having(bytes_unsent=9, credits=0), "credits 0 of 16: the peer does not read"),
    "far CPU": (having(replace(OPEN, far="far CPUs: this process ...")), "far CPUs: "),
    "wrong GID": (
        Staged(
            replace(OPEN, state="opening", way="from GID index 1 (127.0.0.1): use GID index 2 (10.0.0.1)")
        ),
        "being made from GID index 1 (127.0.0.1): use GID index 2 (10.0.0.1)",
    ),
    "fall back": (
        Staged(ConnectionInfo("tcp", "the client came by TCP", "server", OPEN.peer, OPEN.local, "open")),
        "the client came by TCP",
    ),
    "small slots": (
        having(bytes_sent=4 << 20, frames_sent=1024, frame_bytes=4096),
        "small slots: give the peer a larger slot_bytes=",
    ),
    "paused transport": (
        having(replace(OPEN, reading=False), bytes_unread=1, slots_held=4),
        "reading is paused: they wait for resume_reading()",
    ),
    "sleeping peer": (
        Staged(engine={"device": "soft0", "messages": 1000, "wakeups": 900}),
        "it sleeps before nearly each",
    ),
    "registration each time": (
        Staged(engine={"device": "soft0", "registrations": 200, "registrations_reused": 0}),
        "memory was registered 200 times",
    ),
    "lost peer": (
        having(sends_in_flight=2, us_since_sent=5_000_000),
        "2 frames are in flight for 5.0 s: the peer's device does not acknowledge them",
    ),
    "full send queue": (
        having(bytes_unsent=9, sends_in_flight=16),
        "16 of 16 send slots are in flight: the send queue is full",
    ),
    "busy worker": (
        Staged(server=ServerInfo([("127.0.0.1", 80)], "rdma", True, 8, half_open=5, waiting=3, backlog=100)),
        "this loop is too busy to answer them",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_cause_is_named(trouble):
    staged, words = TROUBLES[trouble]
    picture = ss.Picture()
    with Liar(b"".join(onlookers._lines_of(staged)), os.getpid()):
        [process] = [each for each in picture.take(os.getpid()) if each.pid == os.getpid()]
    text, as_json = ss._as_text(picture, [process]), b"".join(ss._as_json(picture, [process])).decode()
    assert not process.silent and words in text
    if staged.server is None:  # JSON has a server's numbers
        assert words in as_json
    for line in staged.explain():
        if "waits: nobody" not in line:
            assert line in text
