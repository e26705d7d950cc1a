"""What was measured, in the form in which it is written as JSON, and read again to compare.

`Report` is the whole file. Its field `schema` names this form; a change that old readers would misunderstand gets
another number. All times are microseconds, and all rates are for one second, unless the name says otherwise. What was
not measured is null.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from rdmanet.cli.perf.conditions import Spent, asleep, preempted
from rdmanet.cli.perf.control import Done, PerfError, Settings
from rdmanet.cli.perf.kinds import KINDS

SCHEMA: Final = "rdmanet-perf/1"
MOST_FILE_BYTES = 64 << 20


class Latency(msgspec.Struct):
    """Times of single messages, in microseconds: half a round trip of WRITE and SEND, else the whole time.

    :ivar cells: the histogram: [nanoseconds, how many]
    """

    count: int
    min_us: float
    mean_us: float
    deviation_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    p99_9_us: float
    p99_99_us: float
    max_us: float
    cells: list[tuple[float, int]] = []


class Sample(msgspec.Struct):
    """What a part of the run has shown: for the least and the greatest over time, and for drawings.

    :ivar at_s: its end, from the beginning of the measurement
    """

    at_s: float
    messages: int
    seconds: float
    p50_us: float | None = None
    p99_us: float | None = None


class Result(msgspec.Struct):
    """One test with one size.

    :ivar messages: how many were sent, on all queue pairs, in both directions
    :ivar lost: how many of them the other side has not received (UC, UD)
    :ivar gb_per_s: 10**9 bytes; perftest prints 2**20
    :ivar min_gb_per_s: the least of all samples
    :ivar client_cpu_us: CPU time for each message
    :ivar client_preempted: how often its process was taken off its CPU
    :ivar client_slept: how often it slept
    :ivar device: those of both sides, of verbs
    :ivar interrupted: Ctrl-C ended it: it has what was measured until then
    :ivar wrong: what made the measurement wrong, in words
    :ivar settings: how it was measured
    :ivar turn: which one of --turns, from 0 on
    :ivar cache_line_ns: how far apart the two CPUs were then: the round trip of a cache line
    """

    test: str
    size: int
    messages: int
    seconds: float
    messages_per_s: float
    gb_per_s: float
    latency: Latency | None = None
    min_gb_per_s: float | None = None
    peak_gb_per_s: float | None = None
    client_cpu_us: float = 0.0
    server_cpu_us: float = 0.0
    client_cpu_s_per_gb: float = 0.0
    server_cpu_s_per_gb: float = 0.0
    lost: int = 0
    client_preempted: int = 0
    server_preempted: int = 0
    client_slept: int = 0
    server_slept: int = 0
    device: str = ""
    samples: list[Sample] = []
    interrupted: bool = False
    wrong: list[str] = []
    settings: Settings | None = None
    turn: int = 0
    cache_line_ns: float | None = None

    @property
    def cpu_us(self) -> float:
        """Of both sides."""
        return self.client_cpu_us + self.server_cpu_us


class Machine(msgspec.Struct):
    """Where this was."""

    cpu: str
    cpus: int
    kernel: str
    python: str
    rdmanet: str
    date: str
    loop: str = ""
    client_cpu: int | None = None
    server_cpu: int | None = None
    host: str = ""
    """The other machine; "" if both processes were on this one."""
    cache_line_ns: float | None = None
    """How far apart the two CPUs are: the round trip of a cache line."""


class Report(msgspec.Struct):
    schema: Annotated[str, msgspec.Meta(pattern="^rdmanet-perf/[0-9]+$")]
    machine: Machine
    settings: Settings
    results: list[Result]
    wrong: list[str] = []


def latency_of(found: Any) -> Latency | None:
    """Of a Histogram; None if it is empty."""
    if not found.count:
        return None
    at = {percent: found.percentile(percent) / 1e3 for percent in (50, 90, 99, 99.9, 99.99)}
    return Latency(
        count=found.count,
        min_us=found.min_ns / 1e3,
        mean_us=found.mean_ns / 1e3,
        deviation_us=found.deviation_ns / 1e3,
        p50_us=at[50],
        p90_us=at[90],
        p99_us=at[99],
        p99_9_us=at[99.9],
        p99_99_us=at[99.99],
        max_us=found.max_ns / 1e3,
        cells=found.filled(),
    )


def note_conditions(result: Result, client: Spent, server: Done) -> None:
    """How often the processes were taken off their CPUs, or slept, and whether that makes the result wrong."""
    result.client_preempted, result.server_preempted = client.preempted, server.preempted
    result.client_slept, result.server_slept = client.slept, server.slept
    kind = KINDS[result.test]
    settings = result.settings
    seldom = settings is not None and (settings.events or settings.rate or settings.first)
    if kind.over == "rdmanet" and kind.latency and not seldom:
        result.wrong += asleep(client.slept, result.messages, "client")
        result.wrong += asleep(server.slept, result.messages, "server")
    result.wrong += preempted(client.preempted, client.seconds, "client")
    result.wrong += preempted(server.preempted, server.seconds, "server")


def read_report(path: Path) -> Report:
    """A file that --json wrote.

    :raises PerfError: it is not one
    :raises OSError: it cannot be read
    """
    with path.open("rb") as file:
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise PerfError(f"{path}: more than {MOST_FILE_BYTES} bytes")
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise PerfError(f"{path} is no result of rdmanet perf --json: {exc}") from None
    if report.schema != SCHEMA:
        raise PerfError(f"{path} has the schema {report.schema}, this rdmanet reads {SCHEMA}")
    return report


def find(report: Report, result: Result) -> Result | None:
    """The old result of the same test and size: that with the same settings, if there are several."""
    same = [old for old in report.results if (old.test, old.size) == (result.test, result.size)]
    alike = [old for old in same if _how(old) == _how(result)]
    return next(iter(middle(alike or same)), None)


def _how(result: Result) -> Settings | None:
    """How it was measured, but for how long."""
    if result.settings is None:
        return None
    return msgspec.structs.replace(result.settings, seconds=0.0, iterations=0, warm_up_s=0.0)


def middle(results: list[Result]) -> list[Result]:
    """Of each test, size and settings one result: that of the turn whose number is the median."""
    turns: dict[Any, list[Result]] = {}
    for result in results:
        turns.setdefault((result.test, result.size, result.settings), []).append(result)
    return [sorted(each, key=_main)[(len(each) - 1) // 2] for each in turns.values()]


def _main(result: Result) -> float:
    return value_of(result, KINDS[result.test].metric) or 0.0


# ---- The numbers that people name ---------------------------------------------------------------------------

Better = Literal["less", "more"]
METRICS: Final[dict[str, tuple[str, Better]]] = {
    "min": ("us", "less"),
    "avg": ("us", "less"),
    "p50": ("us", "less"),
    "p90": ("us", "less"),
    "p99": ("us", "less"),
    "p99.9": ("us", "less"),
    "p99.99": ("us", "less"),
    "max": ("us", "less"),
    "bw": ("GB/s", "more"),
    "minbw": ("GB/s", "more"),
    "rate": ("/s", "more"),
    "cpu": ("us", "less"),
    "lost": ("", "less"),
}
"""By name: the unit, and which direction is better."""

_LATENCY: Final = {
    "min": "min_us",
    "avg": "mean_us",
    "p50": "p50_us",
    "p90": "p90_us",
    "p99": "p99_us",
    "p99.9": "p99_9_us",
    "p99.99": "p99_99_us",
    "max": "max_us",
}


def value_of(result: Result, metric: str) -> float | None:
    """The number of that name; None if this test does not measure it."""
    if metric in _LATENCY:
        return None if result.latency is None else float(getattr(result.latency, _LATENCY[metric]))
    fields = {
        "bw": "gb_per_s",
        "minbw": "min_gb_per_s",
        "rate": "messages_per_s",
        "cpu": "cpu_us",
        "lost": "lost",
    }
    value = getattr(result, fields[metric])
    return None if value is None else float(value)


def csv_rows(results: list[Result]) -> Iterator[list[str]]:
    """A header, and a row for each result."""
    yield [
        "test",
        "bytes",
        "messages",
        "seconds",
        *(f"{name} {unit}".strip() for name, (unit, _) in METRICS.items()),
    ]
    for result in results:
        numbers = [value_of(result, metric) for metric in METRICS]
        yield [
            result.test,
            str(result.size),
            str(result.messages),
            f"{result.seconds:.6f}",
            *("" if number is None else f"{number:.6g}" for number in numbers),
        ]
