"""The cases, the transports they run over, and the goals."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PROTOCOL, BUFFERED, STREAMS = "protocol", "buffered", "streams"
ALL = (PROTOCOL, BUFFERED, STREAMS)


@dataclass(frozen=True)
class Variant:
    """A transport on a loop."""

    fabric: str
    loop: str

    @property
    def name(self) -> str:
        return f"{self.loop} {self.fabric}"


VARIANTS = [
    Variant("rdmanet", "uvloop"),
    Variant("rdmanet", "asyncio"),
    Variant("tcp", "uvloop"),
    Variant("unix", "uvloop"),
    Variant("tcp", "asyncio"),
    Variant("unix", "asyncio"),
]


@dataclass(frozen=True)
class Case:
    """One kind of traffic. `options` are keywords for rdmanet's calls; sockets have no such options."""

    name: str
    kind: str
    """ping: one in flight; flood: one way; many: several connections; idle: nothing at all."""
    size: int = 64
    seconds: float = 0.25
    apis: tuple[str, ...] = ALL
    connections: int = 1
    depth: int = 1
    pause_s: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    near_only: bool = False
    """Judged only where both probes say that the CPUs were near each other."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


KIB, MIB = 1 << 10, 1 << 20

CASES = [
    Case("round trip 64 B", "ping", 64),
    Case("round trip 1 KiB", "ping", KIB),
    Case("round trip 64 KiB", "ping", 64 * KIB),
    Case("one way 64 B", "flood", 64, near_only=True),
    Case("one way 64 KiB", "flood", 64 * KIB, near_only=True),
    Case("one way 1 MiB", "flood", MIB, near_only=True),
    Case("64 connections, 64 B", "many", 64, connections=64, near_only=True),
    Case("32 in flight, 64 B", "ping", 64, depth=32, near_only=True),
    Case("one message each ms, 64 B", "ping", 64, seconds=1.0, apis=(PROTOCOL,), pause_s=0.001),
    Case("polling off, round trip 64 B", "ping", 64, apis=(PROTOCOL,), options={"busy_poll": 0}),
    Case("200 idle connections", "idle", seconds=5.0, apis=(PROTOCOL,), connections=200),
]


class Goal(NamedTuple):
    """Ours against theirs: `now` and `later` bound their ratio, which reads "times better"."""

    case: str
    metric: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    now: float
    later: float


UV = "uvloop rdmanet"
GOALS = [
    Goal("round trip 64 B", "p50_us", (UV, PROTOCOL), ("uvloop tcp", PROTOCOL), 10, 40),
    Goal("round trip 64 B", "p50_us", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 9, 37),
    Goal("round trip 64 B", "p50_us", (UV, STREAMS), ("asyncio tcp", STREAMS), 8, 20),
    Goal("one way 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop tcp", PROTOCOL), 6, 18),
    Goal("one way 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 2, 5),
    Goal("one way 64 KiB", "gb_per_s", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 2, 3.5),
    Goal("one way 1 MiB", "gb_per_s", (UV, BUFFERED), ("uvloop tcp", BUFFERED), 3, 8),
    Goal("one way 1 MiB", "gb_per_s", (UV, BUFFERED), ("uvloop unix", BUFFERED), 2, 5),
    Goal("64 connections, 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop tcp", PROTOCOL), 3, 7),
    Goal("64 connections, 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 2, 4),
    Goal("32 in flight, 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop tcp", PROTOCOL), 5, 13),
    Goal("32 in flight, 64 B", "messages_per_s", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 2, 5),
    Goal("one message each ms, 64 B", "p50_us", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 1 / 1.1, 1),
    Goal("one message each ms, 64 B", "cpu_us", (UV, PROTOCOL), ("uvloop unix", PROTOCOL), 1 / 2, 1 / 1.5),
    Goal(
        "polling off, round trip 64 B",
        "p50_us",
        (UV, PROTOCOL),
        ("uvloop unix", PROTOCOL),
        1 / 1.05,
        1 / 0.95,
    ),
]

HIGHER_IS_BETTER = {"messages_per_s", "gb_per_s"}
NEAR_NS = 200.0
"""A cache line's round trip below this: the CPUs are on one core complex (0.1 us there, 0.46 us across)."""
