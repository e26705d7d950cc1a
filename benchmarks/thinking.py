"""measure request and reply between programs that work for each message, beside Unix sockets and TCP

usage: python -m benchmarks.thinking [--work US]... [--sides 1|2] [--cpus same|own] [--pairs N] [--turns N] [KIND]...

Two processes of this host send 64 bytes back and forth by asyncio's Protocol, on uvloop. For each message each side
works for so many microseconds (with --sides 1 only the one that asks does). The table has, for each kind of transport
and each amount of work, what a round trip takes beyond the work itself, and the processor time of both processes for
each message; medians of turns, in which the kinds alternate. KIND is one of rdmanet, watching (rdmanet with
busy_poll=inf), unix, tcp; all by default.

--cpus same puts both processes on one processor; --pairs N has N pairs run at once, wherever the kernel puts them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rdmanet

HOST = "127.0.0.1"
MESSAGE = b"x" * 64
KINDS = ("rdmanet", "watching", "unix", "tcp")
WORK_US = (0, 20, 50, 80, 200)
WARM_UP_S, MEASURE_S = 0.2, 0.5


def work(seconds: float) -> None:
    """Use the processor for so long, whoever else has it meanwhile."""
    if seconds:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


class Answering(asyncio.Protocol):
    def __init__(self, seconds: float, over: asyncio.Event) -> None:
        self.seconds = seconds
        self.over = over

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        work(self.seconds)
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


class Asking(asyncio.Protocol):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.until = time.perf_counter() + WARM_UP_S + MEASURE_S
        self.begun = time.perf_counter()
        transport.write(MESSAGE)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.times.append(now - self.begun)
        if now > self.until:
            self.transport.close()
            return
        self.begun = now
        work(self.seconds)
        self.transport.write(MESSAGE)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


def options(kind: str) -> dict[str, Any]:
    return {"busy_poll": math.inf} if kind == "watching" else {}


async def answer(kind: str, seconds: float) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "socket"))

        def factory() -> Answering:
            return Answering(seconds, over)

        server: Any
        if kind == "unix":
            server = await loop.create_unix_server(factory, path)
        elif kind == "tcp":
            server = await loop.create_server(factory, HOST, 0)
        else:
            server = await rdmanet.start_rdma_server(factory, HOST, 0, **options(kind))
        print(path if kind == "unix" else server.sockets[0].getsockname()[1], flush=True)
        await over.wait()
        server.close()


async def ask(kind: str, seconds: float, where: str) -> None:
    loop = asyncio.get_running_loop()
    asking = Asking(seconds)

    def factory() -> Asking:
        return asking

    if kind == "unix":
        await loop.create_unix_connection(factory, where)
    elif kind == "tcp":
        await loop.create_connection(factory, HOST, int(where))
    else:
        await rdmanet.create_rdma_connection(factory, HOST, int(where), **options(kind))
    await asking.over.wait()
    times = asking.times
    kept = times[len(times) * 2 // 7 :]
    print(statistics.median(kept), len(times), flush=True)


def run(coroutine: Any, cpu: int) -> None:
    import uvloop

    if cpu >= 0:
        os.sched_setaffinity(0, [cpu])
    uvloop.run(coroutine)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, flush=True)


def start(kind: str, cpu: int, call: str) -> subprocess.Popen[str]:
    code = f"from benchmarks import thinking as t; t.run(t.{call}, {cpu})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def measure(
    kind: str, asked_s: float, answered_s: float, cpus: list[tuple[int, int]]
) -> tuple[float, float, float]:
    """The median round trip, the processor time of both sides for each, both in seconds; and messages in a second."""
    pairs = []
    for ask_cpu, answer_cpu in cpus:
        server = start(kind, answer_cpu, f"answer({kind!r}, {answered_s})")
        where = server.stdout.readline().strip()
        pairs.append((server, start(kind, ask_cpu, f"ask({kind!r}, {asked_s}, {where!r})")))
    medians, counts, used = [], 0, 0.0
    for server, client in pairs:
        median, count = client.stdout.readline().split()
        medians.append(float(median))
        counts += int(count)
        used += float(client.stdout.readline()) + float(server.stdout.readline())
        for process in (server, client):
            process.stdout.close()
            process.wait()
    return (
        statistics.median(medians),
        (used - IDLE_S * 2 * len(pairs)) / counts,
        counts / (WARM_UP_S + MEASURE_S),
    )


IDLE_S = 0.0  # what a process uses to start, import and end; measured first


def measure_start() -> float:
    used = []
    for _ in range(3):
        process = start("", -1, "asyncio.sleep(0)")
        used.append(float(process.stdout.readline()))
        process.stdout.close()
        process.wait()
    return min(used)


def main() -> None:
    global IDLE_S
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.thinking", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("kind", nargs="*", default=KINDS, help="rdmanet, watching, unix or tcp")
    parser.add_argument("--work", type=float, action="append", metavar="US")
    parser.add_argument("--sides", type=int, choices=(1, 2), default=2)
    parser.add_argument("--cpus", choices=("same", "own"), default="own")
    parser.add_argument("--pairs", type=int, default=1, metavar="N")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    args = parser.parse_args()
    both = sorted(os.sched_getaffinity(0))
    if args.pairs > 1:
        cpus = [(-1, -1)] * args.pairs
    else:
        cpus = [(both[0], both[0] if args.cpus == "same" else both[-1])]
    IDLE_S = measure_start()
    print("  work us  " + "".join(f"{kind:>28}" for kind in args.kind))
    print("           " + "   over us   CPU us     1/s   " * len(args.kind))
    for work_us in args.work or WORK_US:
        results: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in args.kind}
        answered = work_us if args.sides == 2 else 0.0
        for _ in range(args.turns):
            for kind in args.kind:
                results[kind].append(measure(kind, work_us / 1e6, answered / 1e6, cpus))
        row = f"{work_us:9.0f}  "
        for kind in args.kind:
            trip, used, rate = (statistics.median(column) for column in zip(*results[kind], strict=True))
            row += f"{trip * 1e6 - work_us - answered:9.1f}{used * 1e6:10.1f}{rate:9.0f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
