"""run the cases over every transport, interleaved, and keep every repetition

usage: python -m benchmarks [--quick] [--repetitions N] [--case TEXT]... [--variant TEXT]... [--output FILE]

Each repetition starts new processes for each transport, two of them, each pinned to a CPU. Within a repetition the
transports take turns case by case, so that compared numbers were measured within seconds of each other. A probe
measures the round trip of a cache line before and after each run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, VARIANTS, Case, Variant
from benchmarks.chart import drawing
from benchmarks.compiling import HERE, compiled
from benchmarks.report import markdown

RESULTS = HERE / "results"
CASE_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two short repetitions: to see that it runs")
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: 7, or 2 with --quick")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases with TEXT in their name")
    parser.add_argument("--variant", action="append", metavar="TEXT", help="only transports with TEXT in it")
    parser.add_argument("--api", action="append", help="protocol, buffered or streams")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results)")
    args = parser.parse_args()

    cases = [c for c in CASES if not args.case or any(text in c.name for text in args.case)]
    variants = [v for v in VARIANTS if not args.variant or any(text in v.name for text in args.variant)]
    if args.quick:
        cases = [replace(case, seconds=case.seconds / 5) for case in cases]
    repetitions = args.repetitions or (2 if args.quick else 7)
    cpus = sorted(os.sched_getaffinity(0))
    pinned = (cpus[0], cpus[1]) if len(cpus) > 1 else (-1, -1)
    probe = Probe(*pinned)

    runs: list[dict[str, Any]] = []
    begin_s = time.perf_counter()
    for repetition in range(repetitions):
        with ExitStack() as stack:
            pairs = {v: stack.enter_context(Pair(v, *pinned)) for v in variants}
            for case in cases:
                for api in case.apis:
                    if args.api and api not in args.api:
                        continue
                    for variant in variants:
                        before_ns = probe()
                        try:
                            metrics = pairs[variant].run(case, api)
                        except WorkerError as exc:
                            print(f"\n{case.name}, {variant.name} {api}: {exc}", file=sys.stderr)
                            pairs[variant].restart()
                            metrics = {"error": str(exc)}
                        runs.append(
                            {
                                "case": case.name,
                                "variant": variant.name,
                                "api": api,
                                "repetition": repetition,
                                "probe_before_ns": before_ns,
                                "probe_after_ns": probe(),
                                **metrics,
                            }
                        )
                elapsed = time.perf_counter() - begin_s
                print(
                    f"\r{elapsed:5.0f} s  repetition {repetition + 1}/{repetitions}  {case.name}\x1b[K",
                    end="",
                    file=sys.stderr,
                )
    print(file=sys.stderr)

    record = {
        "machine": machine(),
        "pinning": {"server": pinned[0], "client": pinned[1]},
        "repetitions": repetitions,
        "cases": [case.as_dict() for case in cases],
        "runs": runs,
    }
    output = args.output or RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    table = markdown(record)
    output.with_suffix(".md").write_text(table)
    output.with_suffix(".svg").write_text(drawing(record))
    print(table)
    print(f"every repetition is in {output}", file=sys.stderr)
    return 1 if any("error" in run for run in runs) else 0


# --- two processes ------------------------------------------------------------------------------------


class WorkerError(Exception):
    """A worker ended, was silent for too long, or reported an exception."""


class Process:
    """A worker and the commands to it."""

    def __init__(self, variant: Variant, cpu: int, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.worker", variant.fabric, variant.loop, str(cpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HERE.parent,
        )

    def send(self, command: str, **args: Any) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps([command, args]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the worker ended with status {self.process.wait()}") from None

    def receive(self) -> Any:
        import select

        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], CASE_TIMEOUT_S)[0]:
            raise WorkerError(f"no answer within {CASE_TIMEOUT_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def call(self, command: str, **args: Any) -> Any:
        self.send(command, **args)
        return self.receive()

    def stop(self) -> None:
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # a command that a dead worker did not read
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Pair:
    """A server and a client of one transport."""

    def __init__(self, variant: Variant, server_cpu: int, client_cpu: int) -> None:
        self.variant, self.cpus = variant, (server_cpu, client_cpu)

    def __enter__(self) -> "Pair":
        self.server, self.client = (Process(self.variant, cpu) for cpu in self.cpus)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.stop()
        self.server.stop()

    def restart(self) -> None:
        for process in (self.client, self.server):
            process.process.kill()
        self.__exit__()
        self.__enter__()

    def run(self, case: Case, api: str) -> dict[str, Any]:
        settings = case.as_dict()
        address = self.server.call("listen", case=settings, api=api)
        if case.kind == "idle":
            self.client.call("open_idle", case=settings, address=address)
            for process in (self.server, self.client):
                process.send("rest", seconds=case.seconds)
            sides = {"server": self.server.receive(), "client": self.client.receive()}
            self.client.call("close_idle")
            metrics = {f"{side}_{key}": value for side, seen in sides.items() for key, value in seen.items()}
        else:
            metrics = self.client.call("run", case=settings, api=api, address=address)
        self.server.call("close")
        return metrics


# --- the machine --------------------------------------------------------------------------------------


class Probe:
    """Nanoseconds that a cache line takes from one CPU to the other and back; None with one CPU."""

    def __init__(self, one: int, other: int) -> None:
        self.cpus = [str(one), str(other)]
        if one >= 0:
            self.program = compiled("cacheline", "cacheline.c", "-pthread")

    def __call__(self) -> float | None:
        if self.cpus[0].startswith("-"):
            return None
        return float(subprocess.run([self.program, *self.cpus], check=True, capture_output=True).stdout)


def machine() -> dict[str, Any]:
    cpu = ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    versions = {}
    for package in ("uvloop", "msgspec", "Cython"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


if __name__ == "__main__":
    sys.exit(main())
