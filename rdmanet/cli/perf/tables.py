"""What people see: a table for each test of verbs, as perftest prints it, and one for streams and calls.

The columns of perftest come first, in its widths and units (MB is 2**20 bytes, and a latency is half a round trip), so
that its output and this one can be laid beside each other. What it does not have stands right of them.
"""

from collections.abc import Iterator

from rdmanet.cli.perf.control import Run
from rdmanet.cli.perf.kinds import KINDS
from rdmanet.cli.perf.results import Report, Result, find, value_of
from rdmanet.cli.text import table

LINE = "-" * 87
MIB = 2**20 / 1e9
"""In GB."""
_BW = (
    " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]   "
    "BW min[MB/sec]   CPU[usec/msg]"
)
_LAT = (
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   "
    "99% percentile[usec]   99.9% percentile[usec]   99.99% percentile[usec]   CPU[usec/msg]"
)
OTHERS = [
    "test",
    "bytes",
    "messages",
    "p50 us",
    "p99",
    "p99.9",
    "p99.99",
    "max",
    "GB/s",
    "min",
    "messages/s",
    "CPU us/msg",
    "CPU s/GB",
]
_WIDTHS = [12, 8, 9, 7, 7, 7, 7, 8, 6, 6, 10, 11, 11]


def family_of(kind_name: str) -> str:
    """Tests of one family stand below one head."""
    kind = KINDS[kind_name]
    return kind.name if kind.family == "verbs" else "others"


def head(runs: list[Run], device: str, line: str = "") -> Iterator[str]:
    """Above the table of a test, whose sizes these are.

    :param line: that of the plan
    """
    kind, settings = KINDS[runs[0].kind], runs[0].settings
    if line:
        yield f"{LINE}\n {line}"
    if kind.family != "verbs":
        yield LINE
        yield "  ".join(
            title.ljust(width) if index == 0 else title.rjust(width)
            for index, (title, width) in enumerate(zip(OTHERS, _WIDTHS, strict=True))
        ).rstrip()
        return
    yield LINE
    yield f"                    {kind.title}"
    yield f" Number of qps   : {settings.queue_pairs}\t\tDevice         : {device}"
    yield f" Connection type : {settings.connection}\t\tUsing SRQ      : OFF"
    yield f" TX depth        : {1 if kind.latency else settings.depth}"
    if not kind.latency:
        yield f" CQ Moderation   : {', then '.join(dict.fromkeys(str(run.settings.every) for run in runs))}"
    if settings.list_size > 1 and not kind.latency:
        yield f" Post List       : {settings.list_size}"
    yield f" Max inline data : {settings.inline}[B]"
    yield f" Completions     : {'events' if settings.events else 'polled'}"
    if settings.both_ways:
        yield " Directions      : both, added up"
    yield LINE
    yield _LAT if kind.latency else _BW


def row(result: Result) -> str:
    """One measurement."""
    kind, found = KINDS[result.test], result.latency
    if kind.family != "verbs":
        return _other(result)
    if found is None:
        peak, least = result.peak_gb_per_s or result.gb_per_s, result.min_gb_per_s or result.gb_per_s
        return (
            f" {result.size:<7} {result.messages:<13}  {peak / MIB:<18.2f} {result.gb_per_s / MIB:<20.2f} "
            f"{result.messages_per_s / 1e6:<15.6f} {least / MIB:<16.2f} {result.cpu_us:.3f}"
        )
    return (
        f" {result.size:<7} {found.count:<12}   {found.min_us:<14.2f} {found.max_us:<12.2f} {found.p50_us:<18.2f} "
        f"{found.mean_us:<14.2f} {found.deviation_us:<15.2f} {found.p99_us:<22.2f} {found.p99_9_us:<24.2f} "
        f"{found.p99_99_us:<25.2f} {result.cpu_us:.2f}"
    )


def _other(result: Result) -> str:
    found = result.latency
    times = [""] * 5
    if found is not None:
        values = (found.p50_us, found.p99_us, found.p99_9_us, found.p99_99_us, found.max_us)
        times = [_short(value) for value in values]
    least = "" if result.min_gb_per_s is None else _short(result.min_gb_per_s)
    cells = [
        result.test,
        str(result.size),
        str(result.messages),
        *times,
        _short(result.gb_per_s),
        least,
        f"{result.messages_per_s:.0f}",
        f"{_short(result.client_cpu_us)}+{_short(result.server_cpu_us)}",
        f"{_short(result.client_cpu_s_per_gb)}+{_short(result.server_cpu_s_per_gb)}",
    ]
    return "  ".join(
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ).rstrip()


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def beside_sockets(results: list[Result]) -> str:
    """How many times better streams and calls are over RDMA than the same over TCP and Unix sockets; "" if either is
    missing."""
    rows = [["", "bytes", "", "RDMA", "TCP", "ratio", "Unix", "ratio"]]
    for ours in results:
        kind = KINDS[ours.test]
        if kind.family == "verbs" or kind.over != "rdmanet":
            continue
        metric = kind.metric
        mine = value_of(ours, metric)
        unit = {"p50": "p50 us", "bw": "GB/s", "rate": "1/s"}[metric]
        cells = [ours.test, str(ours.size), unit, _cell(mine)]
        for over in ("tcp", "unix"):
            other = _of(results, ours, over)
            theirs = None if other is None else value_of(other, metric)
            ratio = ""
            if mine and theirs:
                ratio = f"{theirs / mine if kind.latency else mine / theirs:.2f}x"
            cells += [_cell(theirs), ratio]
        if cells[5] or cells[7]:
            rows.append(cells)
    return table(rows, indent=" ") if len(rows) > 1 else ""


def _cell(number: float | None) -> str:
    return "" if number is None else _short(number)


def _of(results: list[Result], ours: Result, over: str) -> Result | None:
    """The same over another fabric."""
    kind = KINDS[ours.test]
    for other in results:
        there = KINDS[other.test]
        alike = (there.family, there.measures, other.size, other.settings)
        if there.over == over and alike == (kind.family, kind.measures, ours.size, ours.settings):
            return other
    return None


# ---- --compare ----------------------------------------------------------------------------------------------


def compared(old: Report, results: list[Result]) -> str:
    """Ratios to an earlier run, with the noise: the standard deviation of the samples, relative to their mean, of the
    noisier run."""
    rows = [["test", "bytes", "metric", "before", "now", "ratio", "noise"]]
    for result in results:
        before = find(old, result)
        for metric in ("p50", "p99", "p99.9") if result.latency is not None else ("bw", "rate"):
            now = value_of(result, metric)
            was = None if before is None else value_of(before, metric)
            if now is None or not was or before is None:
                continue
            noise = max(_noise(result), _noise(before))
            said = f"{noise:.1%}" if noise else ""
            rows.append(
                [result.test, str(result.size), metric, _short(was), _short(now), f"{now / was:.3f}", said]
            )
        cpu = 0.0 if before is None else before.cpu_us
        if cpu:
            ratio = f"{result.cpu_us / cpu:.3f}"
            rows.append([result.test, str(result.size), "cpu", _short(cpu), _short(result.cpu_us), ratio, ""])
    if len(rows) == 1:
        return " no test and size of this run is in the earlier one"
    return table(rows, indent=" ")


def _noise(result: Result) -> float:
    values = [
        sample.p50_us if result.latency is not None else sample.messages / sample.seconds
        for sample in result.samples
        if sample.seconds > 0
    ]
    numbers = [value for value in values if value]
    if len(numbers) < 2:
        return 0.0
    mean = sum(numbers) / len(numbers)
    return float((sum((number - mean) ** 2 for number in numbers) / len(numbers)) ** 0.5 / mean)
