"""measure a dictionary of many arrays in one call, beside one array of that size

usage: python -m benchmarks.state_dict [--quick] [--arrays N] [--size MB] [--turns N] [--transport NAME] [KIND]...

Two processes of this host, each on a CPU of its own. A call takes arrays and says how many bytes they have (argument),
or returns them (result). The kinds alternate:

    argument, one       one array
    argument, dict      N arrays of the same size together, in one dictionary
    result, one         one array, which the service keeps
    result, dict        N arrays, which the service keeps

The table has medians of turns: the time of a call, the bandwidth beside that of one array, the CPU time of each
process, and the longest time for which either loop stood still, by the CPU time of its thread: a busy machine takes the
CPU from a loop, too, and that is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import uvloop
from numpy.typing import NDArray

from rdmanet import rpc

HOST = "127.0.0.1"
TICK_S = 0.001
LIMITS = rpc.Limits(lent_seconds=600)  # on a busy machine a gigabyte may take longer than by default
ARRAYS, SIZE_MB, TURNS, CALLS = 200, 1024, 3, 3
KINDS = ("argument, one", "argument, dict", "result, one", "result, dict")

Floats = NDArray[numpy.float32]


def made(count: int, size: int) -> dict[str, Floats]:
    """So many arrays, which have about so many bytes together; all their pages are there."""
    return {f"layer{index}.weight": numpy.full(size // count // 4, index, "f4") for index in range(count)}


class Watch:
    """The longest time for which a loop's thread was busy in one turn."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.longest = 0.0
        self._begin()

    def _begin(self) -> None:
        self._before = time.thread_time()
        self._handle = self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._before)
        self._handle = self.loop.call_later(TICK_S, self._begin)

    def stop(self) -> float:
        self._handle.cancel()
        return self.longest


class Model(rpc.Service):
    """Arrays that are pushed and pulled."""

    def __init__(self, count: int, size: int) -> None:
        self.one = made(1, size)["layer0.weight"]
        self.many = made(count, size)
        self.watch: Watch | None = None

    async def push_one(self, array: Floats) -> int:
        return array.nbytes

    async def push(self, state: dict[str, Floats]) -> int:
        return sum(array.nbytes for array in state.values())

    async def pull_one(self) -> Floats:
        return self.one

    async def pull(self) -> dict[str, Floats]:
        return self.many

    async def begin(self) -> float:
        """Watch the loop. Returns the CPU time of this process."""
        self.watch = Watch()
        return time.process_time()

    async def end(self) -> tuple[float, float]:
        """The longest stop, and the CPU time of this process."""
        assert self.watch is not None
        return self.watch.stop(), time.process_time()


@dataclass
class Figures:
    """What was measured of one kind, in seconds."""

    call: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    stop_client: float = 0.0
    stop_server: float = 0.0


async def serve(count: int, size: int, transport: str) -> None:
    async with await rpc.serve(Model(count, size), HOST, 0, transport=transport, limits=LIMITS) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def measure(
    port: int, count: int, size: int, transport: str, turns: int, calls: int, kinds: list[str]
) -> None:
    one, many = made(1, size)["layer0.weight"], made(count, size)
    found = {kind: Figures() for kind in kinds}
    async with rpc.connect(Model, HOST, port, transport=transport, limits=LIMITS) as model:
        work = {
            "argument, one": lambda: model.push_one(one),
            "argument, dict": lambda: model.push(many),
            "result, one": model.pull_one,
            "result, dict": model.pull,
        }
        for turn in range(turns + 1):  # the first one is not counted
            for kind, figures in found.items():
                for _ in range(calls):
                    before, watch = await model.begin(), Watch()
                    begun, mine = time.perf_counter(), time.process_time()
                    result: Any = await work[kind]()
                    took, used = time.perf_counter() - begun, time.process_time() - mine
                    del result
                    stop = watch.stop()
                    stop_there, after = await model.end()
                    if turn:
                        figures.call.append(took)
                        figures.client.append(used)
                        figures.server.append(after - before)
                        figures.stop_client = max(figures.stop_client, stop)
                        figures.stop_server = max(figures.stop_server, stop_there)
    columns = f"{'of one':>8} {'CPU: client':>12} {'server':>8} {'stop: client':>13} {'server':>8}"
    print(f"{'ms':20} {'call':>8} {'GB/s':>6} {columns}")
    for kind, figures in found.items():
        took = statistics.median(figures.call)
        single = found.get(f"{kind.partition(',')[0]}, one", figures)
        part = statistics.median(single.call) / took
        cpu = statistics.median(figures.client) * 1e3, statistics.median(figures.server) * 1e3
        stops = f"{figures.stop_client * 1e3:13.1f} {figures.stop_server * 1e3:8.1f}"
        print(
            f"{kind:20} {took * 1e3:8.1f} {size / took / 1e9:6.2f} {part:8.2f} {cpu[0]:12.1f} {cpu[1]:8.1f} {stops}"
        )


def pinned(cpu: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[cpu % len(cpus)]})


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[int]:
    """Another process that serves. Yields its port."""
    command = [sys.executable, "-m", "benchmarks.state_dict", "--serve", *arguments]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state_dict", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one turn of one call")
    parser.add_argument("--arrays", type=int, default=ARRAYS, metavar="N", help=f"default: {ARRAYS}")
    parser.add_argument("--size", type=int, default=SIZE_MB, metavar="MB", help=f"default: {SIZE_MB}")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("--transport", default="rdma")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="; ".join(KINDS))
    args = parser.parse_args()
    size = args.size << 20
    if args.serve:
        pinned(1)
        return uvloop.run(serve(args.arrays, size, args.transport))
    turns, calls = (1, 1) if args.quick else (args.turns, CALLS)
    given = ["--arrays", str(args.arrays), "--size", str(args.size), "--transport", args.transport]
    with server(given) as port:
        pinned(0)
        how = args.transport, turns, calls, args.kinds or list(KINDS)
        uvloop.run(measure(port, args.arrays, size, *how))


if __name__ == "__main__":
    main()
