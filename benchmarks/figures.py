"""Put the figures of one run of `make bench` into the pages that have them: README and the manual's.

usage: python -m benchmarks.figures [RESULTS.json]

The repetitions that the pages need are kept in docs/figures.json, and all pages are made from that file: so they agree,
and anybody can see what lies behind a figure. Without RESULTS they are made from the file as it is, which a test
compares with them.

In a page, what stands between `<!-- figures: begin -->` and `<!-- figures: end -->` is replaced.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import BUFFERED, PROTOCOL, STREAMS
from benchmarks.chart import FABRICS, FRONT, GROUPS, Group, drawing
from benchmarks.report import Medians, goals, table

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "figures.json"
SPAN = re.compile(r"(<!-- figures: begin -->\n).*?(<!-- figures: end -->)", re.DOTALL)

README = [
    Group("round trip 64 B", PROTOCOL, "p50_us", "µs"),
    Group("round trip 64 B", STREAMS, "p50_us", "µs"),
    Group("polling off, round trip 64 B", PROTOCOL, "p50_us", "µs"),
    Group("one way 64 B", PROTOCOL, "messages_per_s", "M/s", 1e-6),
    Group("one way 64 KiB", STREAMS, "gb_per_s", "GB/s"),
    Group("one way 1 MiB", BUFFERED, "gb_per_s", "GB/s"),
    Group("one way 1 MiB", STREAMS, "gb_per_s", "GB/s"),
    Group("64 connections, 64 B", PROTOCOL, "messages_per_s", "M/s", 1e-6),
    Group("32 in flight, 64 B", PROTOCOL, "messages_per_s", "M/s", 1e-6),
    Group("one message each ms, 64 B", PROTOCOL, "p50_us", "µs"),
    Group("one message each ms, 64 B", PROTOCOL, "cpu_us", "µs of CPU, both sides"),
]


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """What the pages need of a record."""
    groups = [*README, *GROUPS, *FRONT]
    needed = {(group.case, f"uvloop {fabric}", group.api) for group in groups for fabric in FABRICS}
    metrics = {group.metric for group in groups}
    names = {"case", "variant", "api", "repetition", "probe_before_ns", "probe_after_ns", *metrics}
    return {
        "machine": record["machine"],
        "repetitions": record["repetitions"],
        "cases": [
            {"name": case["name"], "near_only": case["near_only"]}
            for case in record["cases"]
            if any(case["name"] == group.case for group in groups)
        ],
        "runs": [
            {name: _short(value) for name, value in run.items() if name in names}
            for run in record["runs"]
            if (run["case"], run["variant"], run["api"]) in needed
        ],
    }


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def pages(record: dict[str, Any]) -> dict[Path, str]:
    """Each page and drawing as it is to be, with the figures of a record."""
    docs = ROOT / "docs"
    texts = {
        ROOT / "README.md": f"{caption(record)}\n\n{table(_beside_sockets(record))}",
        docs / "index.md": f"{caption(record)}\n",
        docs / "performance.md": f"{caption(record)}\n\n{table(goals(Medians(record)))}",
    }
    return {
        **{page: SPAN.sub(rf"\g<1>{text}\g<2>", page.read_text()) for page, text in texts.items()},
        docs / "front.svg": drawing(record, FRONT),
        docs / "performance.svg": drawing(record),
    }


def caption(record: dict[str, Any]) -> str:
    """The machine, the load and the method, in lines of at most 120 columns."""
    machine = record["machine"]
    cpu = machine["cpu"].replace("(R)", "").replace(" Processor", "")
    kernel, day = machine["kernel"].partition("-")[0], machine["date"].partition(" ")[0]
    return (
        f"{cpu}, {machine['cpus']} virtual CPUs, Linux {kernel}, Python {machine['python']}, "
        f"uvloop {machine['versions']['uvloop']}, {day};\n"
        "two processes, each on a CPU of its own, nothing else running; "
        f"medians of {record['repetitions']} interleaved runs."
    )


def _beside_sockets(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    medians = Medians(record)
    yield "what", "interface", "rdmanet", "TCP", "Unix socket"
    for case, api, metric, unit, scale in README:
        values = (medians.get(case, f"uvloop {fabric}", api, metric) for fabric in ("rdmanet", "tcp", "unix"))
        number, _, of_what = unit.partition(" of ")
        what = f"the same, {of_what}" if of_what else case
        yield what, api, *(f"{scale * value:.3g} {number}" if value else "not measured" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("results", type=Path, nargs="?", help="what `make bench` has written")
    results = parser.parse_args().results
    if results is not None:
        record = kept(json.loads(results.read_text()))
        runs = ",\n".join(json.dumps(run) for run in record.pop("runs"))
        KEPT.write_text(f'{json.dumps(record)[:-1]}, "runs": [\n{runs}\n]}}\n')
    for page, text in pages(json.loads(KEPT.read_text())).items():
        page.write_text(text)


if __name__ == "__main__":
    main()
