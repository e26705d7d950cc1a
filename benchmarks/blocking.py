"""measure blocking streams beside a blocking Unix socket and TCP: round trips of 64 bytes, and 1 MiB one way

usage: python -m benchmarks.blocking [--turns N]

Two processes of this host, each on a CPU of its own. The kinds of streams take turns. Each turn prints the median round
trip, what the fastest and the slowest tenth took, and the bandwidth of writes of 1 MiB that are read into one buffer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rdmanet

HOST = "127.0.0.1"
MESSAGE, LARGE = b"x" * 64, 1 << 20
TURNS, WARM_UP, ROUND_TRIPS, LARGE_ONES = 5, 2000, 10_000, 2000
KINDS = ("rdmanet", "unix", "tcp")


@contextlib.contextmanager
def accepted(kind: str) -> Iterator[Any]:
    """Listen, say where, and yield the one connection that comes."""
    if kind == "rdmanet":
        with rdmanet.listen_rdma_stream(HOST) as listener:
            print(listener.getsockname()[1], flush=True)
            with listener.accept() as stream:
                yield stream
        return
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "socket"))
        with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as listener:
            listener.bind(path if kind == "unix" else (HOST, 0))
            listener.listen()
            print(path if kind == "unix" else listener.getsockname()[1], flush=True)
            connection, _ = listener.accept()
            with connection:
                if kind == "tcp":
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield connection


def connected(kind: str, where: str) -> Any:
    if kind == "rdmanet":
        return rdmanet.open_rdma_stream(HOST, int(where))
    if kind == "tcp":
        connection = socket.create_connection((HOST, int(where)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(where)
    return connection


def fill(stream: Any, buffer: memoryview) -> None:
    """Read until `buffer` is full."""
    readinto = stream.readinto if hasattr(stream, "readinto") else stream.recv_into
    filled = 0
    while filled < len(buffer):
        n = readinto(buffer[filled:])
        if not n:
            raise EOFError
        filled += n


def serve(kind: str) -> None:
    with accepted(kind) as stream:
        for _ in range(WARM_UP + ROUND_TRIPS):
            stream.sendall(stream.recv(len(MESSAGE)))
        buffer = memoryview(bytearray(LARGE))
        for _ in range(LARGE_ONES):
            fill(stream, buffer)
        stream.sendall(b".")


def ask(kind: str, where: str) -> tuple[list[float], float]:
    """Round trips in seconds, and bytes per second one way."""
    times = []
    with connected(kind, where) as stream:
        for _ in range(WARM_UP + ROUND_TRIPS):
            begun = time.perf_counter()
            stream.sendall(MESSAGE)
            stream.recv(len(MESSAGE))
            times.append(time.perf_counter() - begun)
        large = bytearray(LARGE)
        begun = time.perf_counter()
        for _ in range(LARGE_ONES):
            stream.sendall(large)
        stream.recv(1)
        return times[WARM_UP:], LARGE_ONES * LARGE / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.blocking", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--turns", type=int, default=TURNS, metavar="N", help=f"turns of each kind (default: {TURNS})"
    )
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    for kind in KINDS * args.turns:
        command = [sys.executable, "-c", f"from benchmarks import blocking; blocking.pinned_serve({kind!r})"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            os.sched_setaffinity(0, cpus[:1])
            times, bandwidth = ask(kind, server.stdout.readline().strip())
            os.sched_setaffinity(0, cpus)
        tenths = statistics.quantiles(times, n=10)
        microseconds = [f"{t * 1e6:.1f}" for t in (statistics.median(times), tenths[0], tenths[-1])]
        print(
            f"{kind:8}  median {microseconds[0]:>6} us  10 % below {microseconds[1]:>6}  "
            f"10 % above {microseconds[2]:>6}   1 MiB one way {bandwidth / 1e9:5.2f} GB/s",
            flush=True,
        )


def pinned_serve(kind: str) -> None:
    """The other process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:2] or os.sched_getaffinity(0))
    serve(kind)


if __name__ == "__main__":
    main()
