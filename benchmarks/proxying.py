"""measure what `rdmanet proxy` costs: GET of 64 B from a Redis server, without it and through two proxies

usage: python -m benchmarks.proxying [--quick] [--turns N]

redis-benchmark asks a redis-server on this host by TCP without a proxy, and through two proxies, between which there is
RDMA, TLS over RDMA, or TCP. One client asks and waits, or 32 do at once.
Each row has requests a second, the median latency of a request, and the processor time of both proxies for a request:
medians of turns, in which the ways alternate.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
CERTIFICATES = ROOT / "tests" / "streams" / "certificates"
WAYS = {"no proxy": "", "two, RDMA": "rdma", "two, TLS over RDMA": "rdma+tls", "two, TCP": "tcp"}
LIMIT_S = 60
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def begun(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    process = stack.enter_context(
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    )
    stack.callback(process.send_signal, signal.SIGKILL)
    return process


def proxied(stack: ExitStack, scheme: str, redis: int) -> tuple[int, list[int]]:
    """The port of two proxies before Redis, with this between them, and their processes."""
    for_server: list[str] = []
    for_client: list[str] = []
    if scheme.endswith("tls"):
        for_server = ["--cert", str(CERTIFICATES / "server.pem")]
        for_client = ["--ca", str(CERTIFICATES / "authority.pem"), "--server-name", "localhost"]
    command = [sys.executable, "-m", "rdmanet", "proxy"]
    between, port = free_port(), free_port()
    processes = []
    for endpoints, options in (
        ((f"{scheme}://{HOST}:{between}", f"tcp://{HOST}:{redis}"), for_server),
        ((f"tcp://{HOST}:{port}", f"{scheme}://{HOST}:{between}"), for_client),
    ):
        process = begun(stack, *command, *options, *endpoints)
        assert process.stdout is not None
        if not process.stdout.readline():  # what it listens on
            raise SystemExit("a proxy has not started")
        processes.append(process.pid)
    return port, processes


def cpu_s(processes: list[int]) -> float:
    ticks = 0
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_A_SECOND


def measured(port: int, processes: list[int], clients: int, requests: int) -> tuple[float, float, float]:
    """Requests a second, the median of a request in µs, and the proxies' CPU for each in µs."""
    before = cpu_s(processes)
    command = ["redis-benchmark", "-h", HOST, "-p", str(port), "-c", str(clients), "-n", str(requests)]
    said = subprocess.run(
        [*command, "-d", "64", "-t", "get", "--csv"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    row = next(csv.DictReader(said.stdout.splitlines()))
    used = cpu_s(processes) - before
    return float(row["rps"]), 1000 * float(row["p50_latency_ms"]), 1e6 * used / requests


def until_it_answers(port: int) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((HOST, port)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxying", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short turn")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    args = parser.parse_args()
    requests = 300 if args.quick else 20_000
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        redis = free_port()
        begun(stack, "redis-server", "--port", str(redis), "--bind", HOST, "--save", "", "--dir", folder)
        until_it_answers(redis)
        ways = {
            name: proxied(stack, scheme, redis) if scheme else (redis, []) for name, scheme in WAYS.items()
        }
        for _ in range(1 if args.quick else args.turns):
            for clients in (1, 32):
                for name, (port, processes) in ways.items():
                    found.setdefault((clients, name), []).append(measured(port, processes, clients, requests))
    print(f"{'clients':>7}  {'proxies':<20}{'requests/s':>12}{'median µs':>12}{'CPU µs':>10}")
    for (clients, name), turns in found.items():
        rate, median, cpu = (statistics.median(values) for values in zip(*turns, strict=True))
        print(f"{clients:>7}  {name:<20}{rate:>12,.0f}{median:>12,.0f}{cpu:>10,.0f}")


if __name__ == "__main__":
    main()
