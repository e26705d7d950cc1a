"""A server in a flood of connections that say nothing, and of strangers without its secret.

It has 1,024 descriptors. 3,000 connections come and stay as long as they may, and 500 strangers try to get in: at the
connection manager and at a queue pair's port, by TCP, from its own host and from another one; and at the abstract
Unix sockets of both. Without the limit for strangers it runs out of descriptors. With it nobody else notices.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.security.conftest import Stage, unfit
from tests.support.processes import Process

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import two_hosts  # noqa: E402

pytestmark = pytest.mark.long

SILENT = 3000
UNINVITED = 500
SECRET = "5eed" * 16
PROMPT_S = 0.5  # for an honest client's connection, at any time
PATIENCE_S = 4 * PROMPT_S  # the same where other suites have the processors
MEMORY_BYTES = 16 << 20
NOISE_BYTES = 6 << 20  # the connections of the honest, whose buffers come and go


Hosts = tuple[two_hosts.Host, two_hosts.Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts.two_hosts() as both:
            yield both
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


@dataclass(frozen=True)
class Door:
    """Where the flood goes, and who honest guests are: by TCP they come from the other host, by name from this one."""

    kind: str  # of socket, as flood.py has them
    of: str  # manager, queues, link
    by_name: bool

    def address(self, ip: str, port: int, queue_pair: int) -> list[object]:
        if self.of == "manager":
            return [f"rdmanet-cm/::ffff:{ip}/{port}"] if self.by_name else [ip, port]
        return [f"rdmanet-soft/{queue_pair >> 8}"] if self.by_name else [ip, queue_pair >> 8]


MANAGER, QUEUES = Door("tcp", "manager", False), Door("tcp", "queues", False)
MANAGER_NAME, LINK = Door("stream", "manager", True), Door("packets", "link", True)


class Memory:
    """The most that a process had resident since this was made, and the change."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
        self.before = self.peak

    @property
    def peak(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    @property
    def grown(self) -> int:
        return self.peak - self.before


def connect(guests: list[Process], each: int, **how: bool) -> tuple[list[float], list[str]]:
    """All of them at the same time, each so often."""
    for guest in guests:
        guest.tell(connect=each, **how)
    heard = [guest.hear() for guest in guests]
    return [took for said in heard for took in said["took"]], [
        text for said in heard for text in said["answers"]
    ]


def ways(guests: list[Process]) -> set[str]:
    for guest in guests:
        guest.tell(ways=True)
    return {way for guest in guests for way in guest.hear()["ways"]}


class Siege:
    """A server, its guests (one of whom has four connections already), and who is about to come."""

    def __init__(self, stage: Stage, hosts: Hosts, door: Door, flooder: int, guarded: bool) -> None:
        here, other = hosts
        ip = here.addresses[4]

        def start(host: two_hosts.Host, script: str, *arguments: object, **environment: str) -> Process:
            without = "" if guarded else "strangers,reserve"
            return stage.start(script, *arguments, prefix=tuple(host.prefix), without=without, **environment)

        secret = {"RDMANET_SOFT_SECRET": SECRET}
        self.server = start(here, "besieged", ip, *(["named"] if door == MANAGER_NAME else []), **secret)
        port = self.server.hear()["port"]
        near = here if door.by_name else other
        self.old, *self.fresh = [start(near, "guest", ip, port, **secret) for _ in range(3)]
        for guest in (self.old, *self.fresh):
            guest.hear()
        _, answers = connect([self.old], 4, keep=True)
        where = door.address(ip, port, queue_pair=int(answers[-1], 16))
        self.flood = start(hosts[flooder], "flood", SILENT, door.kind, *where)
        at = [ip, port] if door.of == "manager" else where  # the manager's clients find its name themselves
        self.uninvited = start(hosts[flooder], "uninvited", UNINVITED, door.of, *at)
        self.flood.hear()
        self.uninvited.hear()


@pytest.mark.parametrize(
    ("door", "flooder"),
    [(MANAGER, 0), (MANAGER, 1), (QUEUES, 0), (QUEUES, 1), (MANAGER_NAME, 0), (LINK, 0)],
    ids=["manager-here", "manager-other", "queues-here", "queues-other", "manager-name", "link"],
)
def test_a_flood_is_not_noticed(stage: Stage, hosts: Hosts, door: Door, flooder: int, guarded: bool) -> None:
    siege = Siege(stage, hosts, door, flooder, guarded)
    memory = Memory(siege.server.pid)
    began = time.monotonic()

    siege.flood.tell(go=True)
    if not guarded:
        siege.flood.hear()
        took, answers = connect(siege.fresh, 1)
        siege.server.tell(how=True)
        assert siege.server.hear()["refused"] > 0
        assert min(took) > PROMPT_S
        return

    siege.uninvited.tell(go=True)
    siege.flood.hear()  # it is half through
    during = connect(siege.fresh, 3)
    made = siege.flood.hear()["made"]
    turned_away = siege.uninvited.hear()
    after = connect(siege.fresh, 3)
    siege.old.tell(ask=True)
    old_answers = siege.old.hear()["answers"]
    siege.server.tell(how=True)
    files = siege.server.hear()
    siege.flood.tell(closed=True)
    closed = siege.flood.hear()["closed"]

    # All that was to come has come, and was turned away.
    assert made == SILENT
    assert closed >= SILENT * 3 // 4
    assert sum(turned_away.values()) == UNINVITED
    assert "in" not in turned_away and turned_away.keys() & {"refused", "closed"}
    # Nobody else has noticed.
    took, answers = [*during[0], *after[0]], [*during[1], *after[1]]
    assert answers == ["y"] * 12, siege.server.errors()
    print(f"the slowest of {len(took)} honest connections took {max(took):.3f} s, of {PROMPT_S} s")
    assert max(took) < PATIENCE_S
    assert ways(siege.fresh) == ({"mapped"} if door.by_name else {"stream"})
    assert old_answers == ["y"] * 4
    assert files["refused"] == 0 and files["opened"] > 0
    assert memory.grown <= MEMORY_BYTES + NOISE_BYTES
    # It was said, but not more than once in a second for each cause.
    errors = siege.server.errors().splitlines()
    causes = Counter(re.sub(r"\d+", "", line.partition(" (and ")[0]) for line in errors)
    assert causes and max(causes.values()) <= time.monotonic() - began + 2, causes
