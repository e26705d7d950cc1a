"""Make tables of a results file: every case over every transport, and which goals were reached.

usage: python -m benchmarks.report FILE
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.cases import GOALS, HIGHER_IS_BETTER, NEAR_NS

# metric, heading, how a number is written
COLUMNS = {
    "p50_us": ("p50 µs", "{:.2f}"),
    "p99_us": ("p99 µs", "{:.1f}"),
    "messages_per_s": ("messages/s", "{:,.0f}"),
    "gb_per_s": ("GB/s", "{:.3g}"),
    "cpu_us": ("CPU µs per message", "{:.2f}"),
    "cpu_s_per_gb": ("CPU s per GB", "{:.3g}"),
    "server_cpu_percent": ("server CPU %", "{:.2f}"),
    "client_cpu_percent": ("client CPU %", "{:.2f}"),
    "server_threads": ("server threads", "{:.0f}"),
    "client_threads": ("client threads", "{:.0f}"),
    "client_descriptors": ("client fds", "{:.0f}"),
}


def near(run: dict[str, Any]) -> bool:
    probes = (run["probe_before_ns"], run["probe_after_ns"])
    return all(probe is None or probe < NEAR_NS for probe in probes)


class Medians:
    """Medians over the repetitions; cases that depend on the CPUs' distance use near runs, if any."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.near_only = {case["name"] for case in record["cases"] if case["near_only"]}
        self.runs: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        for run in record["runs"]:
            if "error" not in run:
                self.runs[run["case"], run["variant"], run["api"]].append(run)

    def chosen(self, case: str, variant: str, api: str) -> list[dict[str, Any]]:
        runs = self.runs.get((case, variant, api), [])
        if case in self.near_only:
            return [run for run in runs if near(run)] or runs
        return runs

    def get(self, case: str, variant: str, api: str, metric: str) -> float | None:
        samples = [run[metric] for run in self.chosen(case, variant, api) if metric in run]
        return statistics.median(samples) if samples else None


def markdown(record: dict[str, Any]) -> str:
    medians = Medians(record)
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    runs = record["runs"]
    parts = [
        f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, Python {machine['python']}, "
        f"{versions}; rdmanet {machine['commit']}, {machine['date']}.\n"
        f"Medians of {record['repetitions']} interleaved repetitions, server on CPU "
        f"{record['pinning']['server']}, client on CPU {record['pinning']['client']}; the CPUs were near "
        f"each other in {sum(map(near, runs))} of {len(runs)} runs.\n"
    ]
    judged = list(goals(medians))
    if len(judged) > 1:
        parts += ["## Goals\n", table(judged)]
    for case in record["cases"]:
        rows = list(_case_rows(medians, case))
        if len(rows) > 1:
            parts += [f"## {case['name']}\n", table(rows)]
    return "\n".join(parts)


def goals(medians: Medians) -> Iterable[tuple[str, ...]]:
    yield "case", "rdmanet", "compared with", "", "times better", "goal", "later", "CPUs near"
    for goal in GOALS:
        ours = medians.get(goal.case, *goal.ours, goal.metric)
        theirs = medians.get(goal.case, *goal.theirs, goal.metric)
        if not ours or not theirs:
            continue
        ratio = ours / theirs if goal.metric in HIGHER_IS_BETTER else theirs / ours
        heading, form = COLUMNS[goal.metric]
        sides = [medians.chosen(goal.case, *side) for side in (goal.ours, goal.theirs)]
        yield (
            f"{goal.case}, {goal.ours[1]}, {heading}",
            form.format(ours),
            f"{goal.theirs[0]} {goal.theirs[1]}",
            form.format(theirs),
            f"{ratio:.2f}",
            f"{goal.now:.3g} {'reached' if ratio >= goal.now else 'missed'}",
            f"{goal.later:.3g} {'reached' if ratio >= goal.later else 'missed'}",
            " and ".join(f"{sum(map(near, runs))}/{len(runs)}" for runs in sides),
        )


def _case_rows(medians: Medians, case: dict[str, Any]) -> Iterable[list[str]]:
    keys = [key for key in medians.runs if key[0] == case["name"]]
    metrics = [
        metric for metric in COLUMNS if any(metric in run for key in keys for run in medians.runs[key])
    ]
    yield ["transport", "interface", *(COLUMNS[metric][0] for metric in metrics)]
    for _, variant, api in sorted(keys, key=lambda key: (key[2], "rdmanet" not in key[1])):
        row = [variant, api]
        for metric in metrics:
            value = medians.get(case["name"], variant, api, metric)
            row.append("" if value is None else COLUMNS[metric][1].format(value))
        yield row


def table(rows: Iterable[Iterable[str]]) -> str:
    header, *body = (list(row) for row in rows)
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    with open(sys.argv[1]) as results:
        print(markdown(json.load(results)))
