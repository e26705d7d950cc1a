"""measure what a connection by TCP takes on the switched loop, beside the loop itself

usage: python -m benchmarks.falling_back [--quick] [--turns N]

A client connects to a server of the same host that knows nothing of RDMA, again and again: over uvloop and over
asyncio's loop, as they are and switched by rdmanet. Client and server have a CPU each. The client connects either at
once when its last connection has ended, or after it has computed for 100 µs. The difference is that the server is awake
in the first case, since it is ending the last connection, and asleep in the second. The kinds alternate within one
process, each for some hundred connections a turn. The table has the time from the call of create_connection() to its
end: the median of a turn, and of these the median of all turns; the ratio is that of each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import rdmanet

HOST = "127.0.0.1"
CONNECTIONS = 300
PAUSES_US = (0, 100)


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, HOST, 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def serve(cpu: int) -> None:
    """Print our port, and serve until our standard input ends."""
    import uvloop

    os.sched_setaffinity(0, {cpu})
    uvloop.run(_serve())


async def turn(port: int, connections: int, pause_us: int) -> float:
    """The median time of a connection, in microseconds."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    for _ in range(connections):
        until = time.perf_counter() + pause_us / 1e6
        while time.perf_counter() < until:
            pass
        begun = time.perf_counter()
        transport, protocol = await loop.create_connection(Client, HOST, port)
        took.append((time.perf_counter() - begun) * 1e6)
        transport.abort()
        await protocol.lost
    return statistics.median(took)


def measured(turns: int, connections: int) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """By the name of a loop and the pause: the figures of its turns as it is, and switched."""
    import uvloop

    cpus = sorted(os.sched_getaffinity(0))
    code = f"from benchmarks import falling_back; falling_back.serve({cpus[-1]})"
    bases: dict[str, Callable[[], Any]] = {"uvloop": uvloop.Loop, "asyncio": asyncio.SelectorEventLoop}
    loops = {name: (base(), rdmanet.loop_factory(base)) for name, base in bases.items()}
    kinds = list(itertools.product(bases, PAUSES_US))
    figures: dict[tuple[str, int], tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin and server.stdout
        port = int(server.stdout.readline())
        os.sched_setaffinity(0, {cpus[0]})
        for number in range(turns + 1):
            for name, pause_us in kinds:
                for loop, column in zip(loops[name], figures[name, pause_us], strict=True):
                    figure = loop.run_until_complete(turn(port, connections, pause_us))
                    if number > 0:  # the first is for what happens once
                        column.append(figure)
        server.stdin.close()
    for pair in loops.values():
        for loop in pair:
            loop.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.falling_back", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 15")
    args = parser.parse_args()
    figures = measured(args.turns or (1 if args.quick else 15), 20 if args.quick else CONNECTIONS)
    print(f"{'µs':20}{'as it is':>10}{'switched':>10}{'ratio':>10}")
    for (name, pause_us), (plain, switched) in figures.items():
        ratio = statistics.median(after / before for before, after in zip(plain, switched, strict=True))
        medians = statistics.median(plain), statistics.median(switched)
        kind = f"{name} after {pause_us} µs" if pause_us else name
        print(f"{kind:20}{medians[0]:10.1f}{medians[1]:10.1f}{ratio:10.2f}")


if __name__ == "__main__":
    main()
