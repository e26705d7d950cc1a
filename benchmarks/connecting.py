"""measure how many connections a second a client makes, beside TCP and Unix sockets

usage: python -m benchmarks.connecting [--quick] [--turns N] [KIND]...

Two processes of this host, each on a CPU of its own, on uvloop. The client connects, writes one byte, waits for the
same byte, and closes; the server echoes. It does so one after another, and then 50 at a time. The table has medians of
turns, in which the kinds alternate. KIND is one of rdmanet, tcp, unix; all by default.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rdmanet

HOST = "127.0.0.1"
KINDS = ("rdmanet", "tcp", "unix")
AT_A_TIME = (1, 50)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Once(asyncio.Protocol):
    """Done when its byte has come back and the connection is closed."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(b"x")

    def data_received(self, data: bytes) -> None:
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_exception(exc) if exc else self.done.set_result(None)


async def serve(kind: str) -> None:
    """Print where, and serve until our standard input ends."""
    loop = asyncio.get_running_loop()
    if kind == "unix":
        where = str(Path(tempfile.mkdtemp()) / "socket")
        server: Any = await loop.create_unix_server(Echo, where, backlog=1024)
    elif kind == "tcp":
        server = await loop.create_server(Echo, HOST, 0, backlog=1024)
    else:
        server = await rdmanet.start_rdma_server(Echo, HOST, 0, backlog=1024)
    if kind != "unix":
        where = str(server.sockets[0].getsockname()[1])
    print(where, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


async def connect_once(kind: str, where: str) -> None:
    loop = asyncio.get_running_loop()
    if kind == "unix":
        _, protocol = await loop.create_unix_connection(Once, where)
    elif kind == "tcp":
        _, protocol = await loop.create_connection(Once, HOST, int(where))
    else:
        _, protocol = await rdmanet.create_rdma_connection(Once, HOST, int(where))
    await protocol.done


async def rates(kind: str, where: str, seconds: float) -> None:
    """Print the connections made in a second, one after another and many at a time."""

    async def connect_until(end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            await connect_once(kind, where)
            count += 1
        return count

    await connect_until(time.perf_counter() + seconds / 5)
    for number in AT_A_TIME:
        begun = time.perf_counter()
        counts = await asyncio.gather(*(connect_until(begun + seconds) for _ in range(number)))
        print(sum(counts) / (time.perf_counter() - begun), flush=True)


async def connect_when_asked(kind: str, where: str) -> None:
    """Make as many connections as each line of standard input says, one after another, and print an empty line."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        for _ in range(int(line)):
            await connect_once(kind, where)
        print(flush=True)


def run(coroutine: Any, cpu: int) -> None:
    import uvloop

    os.sched_setaffinity(0, {cpu})
    uvloop.run(coroutine)


def program(module: str, call: str, number: int) -> list[str]:
    """What runs a coroutine of a benchmark in a process of its own, on the CPU of this number of ours."""
    cpu = sorted(os.sched_getaffinity(0))[number]
    code = f"from benchmarks import {module}, connecting; connecting.run({module}.{call}, {cpu})"
    return [sys.executable, "-c", code]


def measured(kind: str, seconds: float) -> list[float]:
    with subprocess.Popen(
        program("connecting", f"serve({kind!r})", -1),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin and server.stdout
        where = server.stdout.readline().strip()
        client = program("connecting", f"rates({kind!r}, {where!r}, {seconds})", 0)
        said = subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True).stdout
        server.stdin.close()
    return [float(rate) for rate in said.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.connecting", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 3")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: KIND is one of {', '.join(KINDS)}")
    kinds = args.kinds or KINDS
    figures: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(args.turns or (1 if args.quick else 3)):
        for kind in kinds:
            figures[kind].append(measured(kind, 0.2 if args.quick else 1.0))
    print(f"{'connections/s':16}" + "".join(f"{number:>8} at a time" for number in AT_A_TIME))
    for kind in kinds:
        medians = [statistics.median(column) for column in zip(*figures[kind], strict=True)]
        print(f"{kind:16}" + "".join(f"{median:18,.0f}" for median in medians))


if __name__ == "__main__":
    main()
