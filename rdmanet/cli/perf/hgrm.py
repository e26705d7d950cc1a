"""--hgrm: percentiles in the text that HdrHistogram writes, and its plotters read: a file for each test and size.

The values are microseconds. A line has a value, the part of the messages that took at most as long, how many these are,
and 1 / (1 - part). There is one for each cell of the histogram that is not empty.
"""

from collections.abc import Iterator
from pathlib import Path

from rdmanet.cli.perf.results import Latency, Result

CELLS_AN_OCTAVE = 128
"""Those of rdmanet/_pyx/histogram.pxi."""


def lines(latency: Latency) -> Iterator[str]:
    yield "       Value     Percentile TotalCount 1/(1-Percentile)"
    yield ""
    seen = 0
    for nanoseconds, many in latency.cells:
        seen += many
        value = min(nanoseconds / 1e3, latency.max_us)
        if seen == latency.count:
            yield f"{latency.max_us:12.3f} {1.0:14.12f} {seen:10d}"
        else:
            part = seen / latency.count
            yield f"{value:12.3f} {part:14.12f} {seen:10d} {1 / (1 - part):14.2f}"
    yield f"#[Mean    = {latency.mean_us:12.3f}, StdDeviation   = {latency.deviation_us:12.3f}]"
    yield f"#[Max     = {latency.max_us:12.3f}, Total count    = {latency.count:12d}]"
    yield f"#[Buckets = {34:12d}, SubBuckets     = {CELLS_AN_OCTAVE:12d}]"


def files(results: list[Result]) -> Iterator[tuple[str, str]]:
    """Name and text of each. Those of one test and size, measured several times, are numbered."""
    taken: dict[str, int] = {}
    for result in results:
        if result.latency is None:
            continue
        name = f"{result.test}-{result.size}"
        taken[name] = taken.get(name, 0) + 1
        number = f"-{taken[name]}" if taken[name] > 1 else ""
        yield f"{name}{number}.hgrm", "\n".join(lines(result.latency)) + "\n"


def write(directory: Path, results: list[Result]) -> None:
    """:raises OSError: it cannot be written"""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files(results):
        (directory / name).write_text(text)
