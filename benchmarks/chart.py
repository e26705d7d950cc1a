"""Draw a results file: rdmanet beside Unix sockets and TCP, all on uvloop, a group of bars for each case.

A drawing is one group wide, so that it can be read on the screen of a telephone.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from benchmarks.cases import HIGHER_IS_BETTER, PROTOCOL, STREAMS
from benchmarks.report import Medians

FABRICS = ("rdmanet", "unix", "tcp")
COLOURS = {"rdmanet": "#1f77b4", "unix": "#888888", "tcp": "#b4b4b4"}
"""Whoever has none here has that of "unix". In dark mode they are inverted, and still to be seen."""
WIDTH, ROW, BAR, MARGIN = 490, 22, 15, 16
LABEL, VALUE = 64, 90
"""What stands left and right of a bar."""


class Bars(NamedTuple):
    """A group of the drawing: its title, and a bar for each name."""

    title: str
    values: dict[str, float]


class Group(NamedTuple):
    """Bars of one metric, one for each fabric. `scale` makes the unit of the metric."""

    case: str
    api: str
    metric: str
    unit: str
    scale: float = 1.0


GROUPS = [
    Group("round trip 64 B", PROTOCOL, "p50_us", "µs"),
    Group("round trip 64 B", STREAMS, "p50_us", "µs"),
    Group("one way 64 B", PROTOCOL, "messages_per_s", "million messages/s", 1e-6),
    Group("one way 64 B", STREAMS, "messages_per_s", "million messages/s", 1e-6),
    Group("one way 64 KiB", PROTOCOL, "gb_per_s", "GB/s"),
    Group("one way 64 KiB", STREAMS, "gb_per_s", "GB/s"),
    Group("one way 1 MiB", PROTOCOL, "gb_per_s", "GB/s"),
    Group("one way 1 MiB", STREAMS, "gb_per_s", "GB/s"),
    Group("32 in flight, 64 B", PROTOCOL, "messages_per_s", "million messages/s", 1e-6),
    Group("64 connections, 64 B", PROTOCOL, "messages_per_s", "million messages/s", 1e-6),
]


FRONT = [
    Group("round trip 64 B", STREAMS, "p50_us", "µs"),
    Group("one way 1 MiB", STREAMS, "gb_per_s", "GB/s"),
]


def drawing(record: dict[str, Any], groups: list[Group] = GROUPS) -> str:
    medians = Medians(record)
    return draw([_bars(medians, group) for group in groups])


def _bars(medians: Medians, group: Group) -> Bars:
    better = "more" if group.metric in HIGHER_IS_BETTER else "less"
    title = f"{group.case}, {group.api}: {group.unit} ({better} is better)"
    values = {
        fabric: (medians.get(group.case, f"uvloop {fabric}", group.api, group.metric) or 0.0) * group.scale
        for fabric in FABRICS
    }
    return Bars(title, values)


def draw(groups: Sequence[Bars]) -> str:
    """An SVG of groups of bars, each to its own scale."""
    height = ROW * (max(len(group.values) for group in groups) + 1) + MARGIN
    names = {name for group in groups for name in group.values}
    label = max(LABEL, max((7 * len(name) + 8 for name in names), default=0))
    size = (WIDTH, len(groups) * height + MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for number, group in enumerate(groups):
        lines += _group(group, MARGIN, number * height + MARGIN, label)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _group(group: Bars, left: int, top: int, label: int) -> Iterator[str]:
    yield f'<text x="{left}" y="{top + 12}" font-weight="bold">{escape(group.title)}</text>'
    longest = max(group.values.values(), default=0.0) or 1.0
    for row, (name, value) in enumerate(group.values.items(), 1):
        y = top + row * ROW
        width = value / longest * (WIDTH - MARGIN - label - VALUE)
        colour = COLOURS.get(name, COLOURS["unix"])
        yield f'<text x="{left}" y="{y + 12}">{name}</text>'
        yield f'<rect x="{left + label}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
        shown = f"{value:.3g}" if value else "not measured"
        yield f'<text x="{left + label + width + 6:.1f}" y="{y + 12}">{shown}</text>'
