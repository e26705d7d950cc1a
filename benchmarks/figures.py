"""Put the figures of one run of `rdmanet perf` into the pages that have them: README and the manual's.

usage: python -m benchmarks.figures [--measure | RESULTS.json]

benchmarks/figures.plan says what is measured, and `--measure` measures it: some five minutes, on a machine that does
nothing else. The results, without histograms and samples, are kept in docs/figures.json, and all pages are made from
that file: so they agree, and anybody can see what lies behind a figure. Without RESULTS they are made from the file as
it is, which a test compares with them.

What `rdmanet perf` does not measure (connecting, starting, libraries, other ways between two processes) stands in the
pages beside the name of the benchmark that does.

In a page, what stands between `<!-- figures: begin -->` and `<!-- figures: end -->` is replaced.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import BUFFERED, CASES, PROTOCOL, STREAMS
from benchmarks.chart import FRONT, Group, drawing
from benchmarks.report import Medians, goals, table

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "figures.json"
PLAN = ROOT / "benchmarks" / "figures.plan"
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


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """A report of `rdmanet perf --json` without histograms and samples, in short numbers."""
    if "runs" in report:  # of `make bench`
        return report
    results = []
    for result in report["results"]:
        latency = result["latency"]
        short = result | {"samples": [], "latency": latency and latency | {"cells": []}}
        results.append(_short(short))
    return report | {"results": results}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def record_of(report: dict[str, Any]) -> dict[str, Any]:
    """The report in the form of `make bench`'s results, of which tables and drawings are made."""
    near_only = {case.name: case.near_only for case in CASES}
    runs = [_run(result) for result in report["results"]]
    machine, version = report["machine"], report["machine"]["loop"].removeprefix("uvloop ")
    names = dict.fromkeys(run["case"] for run in runs)
    return {
        "machine": machine | {"versions": {"uvloop": version}, "date": machine["date"].replace("T", " ")},
        "by": "`rdmanet perf`",
        "repetitions": 1 + max(result["turn"] for result in report["results"]),
        "cases": [{"name": name, "near_only": near_only[name]} for name in names],
        "runs": runs,
    }


def _run(result: dict[str, Any]) -> dict[str, Any]:
    over, _, _ = result["test"].partition("_")
    run = {
        "case": _case(result),
        "variant": f"uvloop {'rdmanet' if over == 'stream' else over}",
        "api": result["settings"]["api"],
        "repetition": result["turn"],
        "probe_before_ns": result["cache_line_ns"],
        "probe_after_ns": result["cache_line_ns"],
        "messages_per_s": result["messages_per_s"],
        "gb_per_s": result["gb_per_s"],
        "cpu_us": result["client_cpu_us"] + result["server_cpu_us"],
    }
    if result["latency"]:
        run["p50_us"] = result["latency"]["p50_us"]
    return run


def _case(result: dict[str, Any]) -> str:
    """The name of what was measured, as cases.py has it."""
    size, settings, test = _size(result["size"]), result["settings"], result["test"]
    if test.endswith("_bw"):
        return f"one way {size}"
    if test.endswith("_rr"):
        many = settings["connections"]
        return f"{many} connections, {size}" if many > 1 else f"{settings['in_flight']} in flight, {size}"
    if settings["events"]:
        return f"polling off, round trip {size}"
    return f"one message each ms, {size}" if settings["rate"] == 1000 else f"round trip {size}"


def _size(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >> shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def pages(report: dict[str, Any]) -> dict[Path, str]:
    """Each page and drawing as it is to be, with the figures of a report."""
    record = report if "runs" in report else record_of(report)
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
        f"{record.get('by', '`make bench`')}: {turns_text(record['repetitions'])}."
    )


def turns_text(turns: int) -> str:
    return "one turn" if turns == 1 else f"medians of {turns} turns"


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
    parser.add_argument("results", type=Path, nargs="?", help="what `rdmanet perf --save` has written")
    parser.add_argument("--measure", action="store_true", help="measure now")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of --measure (default: 5)")
    args = parser.parse_args()
    results: Path | None = args.results
    if args.measure:
        results = ROOT / "build" / "figures.json"
        results.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "rdmanet", "perf", "--plan", str(PLAN), "--turns", str(args.turns)]
        subprocess.run([*command, "--save", str(results)], check=True)
    if results is not None:
        report = kept(json.loads(results.read_text()))
        lines = ",\n".join(json.dumps(result) for result in report.pop("results"))
        KEPT.write_text(f'{json.dumps(report)[:-1]}, "results": [\n{lines}\n]}}\n')
    for page, text in pages(json.loads(KEPT.read_text())).items():
        page.write_text(text)


if __name__ == "__main__":
    main()
