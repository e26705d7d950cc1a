"""--plot: one self-contained SVG. Latency and bandwidth against the size, percentiles, and what happened over time.

Each panel has a line for each test, and is left out if it would be empty. Sizes, times and rates have logarithmic axes;
percentiles are spread by 1 / (1 - p), as hdrhistogram does, so that the tail is as wide as the rest.
"""

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from rdmanet.cli.perf.results import Report, Result

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 34, 44
COLOURS = [
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#7f7f7f",
    "#bcbd22",
]
LINES = 10
"""So many results are drawn each; of more, percentiles and the run over time of the first size of each test."""
Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """One drawing.

    :ivar lines: name and points
    :ivar ticks: marks of the x axis: where, and what is written there; None for powers of ten
    """

    title: str
    across: str
    up: str
    lines: dict[str, Points]
    log_across: bool = True
    log_up: bool = True
    ticks: list[tuple[float, str]] | None = None


def drawing(report: Report) -> str:
    panels = [panel for panel in _panels(report.results) if panel.lines]
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    height = max(1, len(panels)) * HEIGHT + 30
    machine = report.machine
    said = f"rdmanet {machine.rdmanet}, {machine.cpu}, Linux {machine.kernel}, {machine.date}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        lines += _draw(panel, index * HEIGHT, colours)
    lines.append(f'<text x="8" y="{height - 10}" fill="#555">{escape(said)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panels(results: list[Result]) -> Iterator[Panel]:
    sizes = sorted({result.size for result in results})
    ticks = [(float(size), _size(size)) for size in sizes]
    latency: dict[str, Points] = {}
    bandwidth: dict[str, Points] = {}
    spectra: dict[str, Points] = {}
    over_time: dict[str, Points] = {}
    firsts: set[str] = set()
    for result in results:
        name = result.test if len(sizes) == 1 else f"{result.test} {_size(result.size)}"
        if result.latency is not None:
            latency.setdefault(result.test, []).append((result.size, result.latency.p50_us))
            latency.setdefault(f"{result.test} p99", []).append((result.size, result.latency.p99_us))
            if len(results) <= LINES or result.test not in firsts:
                spectra[name] = list(_spectrum(result.latency.cells, result.latency.count))
        else:
            bandwidth.setdefault(result.test, []).append((result.size, result.gb_per_s))
        if len(results) > LINES and result.test in firsts:
            continue
        firsts.add(result.test)
        over_time[name] = [
            (sample.at_s, sample.messages / sample.seconds) for sample in result.samples if sample.seconds
        ]
    yield Panel("latency (half a round trip for verbs)", "bytes", "µs", latency, ticks=ticks)
    yield Panel("bandwidth", "bytes", "GB/s", bandwidth, ticks=ticks)
    marks = [
        (1.0, "0"),
        (2.0, "50 %"),
        (10.0, "90 %"),
        (100.0, "99 %"),
        (1e3, "99.9 %"),
        (1e4, "99.99 %"),
        (1e5, ""),
    ]
    yield Panel("percentiles", "of the messages", "µs", spectra, ticks=marks)
    yield Panel(
        "over time",
        "seconds",
        "messages/s",
        {name: points for name, points in over_time.items() if len(points) > 1},
        log_across=False,
    )


def _spectrum(cells: Iterable[tuple[float, int]], count: int) -> Iterator[tuple[float, float]]:
    seen = 0
    for nanoseconds, many in cells:
        part = seen / count
        yield 1 / (1 - part), nanoseconds / 1e3
        seen += many


def _size(nbytes: int) -> str:
    for shift, unit in ((20, "M"), (10, "K")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


class _Axis:
    """From values to places.

    :param begin: the place of the least value
    """

    def __init__(self, values: list[float], log: bool, begin: float, end: float) -> None:
        self.log, self.begin, self.end = log, begin, end
        there = [value for value in values if value > 0] if log else values
        low, high = (min(there), max(there)) if there else (1.0, 10.0)
        if log:
            self.low, self.high = math.floor(math.log10(low) * 4) / 4, math.ceil(math.log10(high) * 4) / 4
        else:
            self.low, self.high = 0.0, high
        if self.low == self.high:
            self.high += 1.0

    def at(self, value: float) -> float:
        place = math.log10(max(value, 1e-12)) if self.log else value
        part = (place - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, part))

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [mantissa * 10.0**power for power in powers for mantissa in (1, 2, 5)]
            return [(value, f"{value:g}") for value in values if self.low <= math.log10(value) <= self.high]
        step = 10.0 ** math.floor(math.log10(self.high)) if self.high > 0 else 1.0
        step = step if self.high / step >= 4 else step / 4
        return [(index * step, f"{index * step:g}") for index in range(int(self.high / step) + 1)]


def _draw(panel: Panel, top: float, colours: dict[str, str]) -> Iterator[str]:
    points = [point for line in panel.lines.values() for point in line]
    across = _Axis([x for x, _ in points], panel.log_across, LEFT, WIDTH - RIGHT)
    up = _Axis([y for _, y in points], panel.log_up, top + HEIGHT - BOTTOM, top + TOP)
    yield f'<text x="{LEFT}" y="{top + 20}" font-weight="bold" font-size="13">{escape(panel.title)}</text>'
    for value, text in up.ticks():
        y = up.at(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    last = -math.inf
    for value, text in panel.ticks or across.ticks():
        x = across.at(value)
        if x - last < 34:
            continue
        last = x
        yield f'<line x1="{x:.1f}" y1="{up.begin}" x2="{x:.1f}" y2="{up.end}" stroke="#f0f0f0"/>'
        yield f'<text x="{x:.1f}" y="{up.begin + 15}" text-anchor="middle">{escape(text)}</text>'
    yield (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{up.begin + 32}" text-anchor="middle">{escape(panel.across)}</text>'
    )
    yield f'<text x="{LEFT - 6}" y="{top + 20}" text-anchor="end">{escape(panel.up)}</text>'
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = colours[name]
        places = [(across.at(x), up.at(y)) for x, y in line]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        if len(places) <= 40:
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in places)
        y = top + TOP + 8 + 15 * number
        if y < up.begin:
            yield f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 8}" width="9" height="9" fill="{colour}"/>'
            yield f'<text x="{WIDTH - RIGHT + 26}" y="{y}">{escape(name)}</text>'
