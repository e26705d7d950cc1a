"""measure calls of rdmanet.rpc, beside the streams below them and beside other RPC libraries

usage: python -m benchmarks.rpc [--quick] [--turns N] [--cases WORD] [KIND]...

Two processes of this host on uvloop, each on a CPU of its own. A call takes bytes and returns them (64 B, 64 KiB), or
takes a large memoryview and returns its length (argument), or returns a large one into memory of the caller (result).
`streams` writes and reads the same bytes without any message around them. Small calls are made one after another, 32
and 256 at a time. KIND is one of rpc, rpc-tcp, rpc-unix, streams, and, over a Unix socket, grpc.aio, grpclib, pycapnp
and thriftpy2, and ray (calls of an actor), where they are installed; all by default. Two tables have medians of turns,
in which the kinds alternate: the time of a call, and the CPU time of both processes together; "-" is what is left out.
It ends with how many functions of Python run for a call of 64 B.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import rdmanet
from benchmarks.rpc_peers import GIVE, LARGE, MOST_BYTES, PEERS, filled, lacks
from rdmanet import rpc

HOST = "127.0.0.1"
KINDS = ("rpc", "rpc-tcp", "rpc-unix", "streams", *PEERS)
CASES = {
    "64 B, 1 at a time": (64, 1, 3000),
    "64 B, 32 at a time": (64, 32, 10_000),
    "64 B, 256 at a time": (64, 256, 10_240),
    "64 KiB, 1 at a time": (64 << 10, 1, 1000),
    "1 MiB argument": (1 << 20, 1, 200),
    "4 MiB argument": (4 << 20, 1, 60),
    "64 MiB argument": (64 << 20, 1, 6),
    "64 MiB result": (64 << 20, 1, 6),
}
"""Bytes, calls at a time, and how many calls."""


class Echo(rpc.Service):
    async def echo(self, data: bytes) -> bytes:
        return data

    async def take(self, data: memoryview) -> int:
        return data.nbytes

    async def give(self, size: int) -> memoryview:
        return memoryview(filled(size))


Call = Callable[[], Awaitable[Any]]


# ---- Servers: each prints where it is, and ends with its standard input --------------------------------------


async def serve(kind: str) -> None:
    path = str(Path(tempfile.mkdtemp()) / "socket")
    async with contextlib.AsyncExitStack() as stack:
        if kind == "streams":
            server: Any = await rdmanet.start_rdma_stream_server(serve_stream, HOST, 0)
            where = str(server.sockets[0].getsockname()[1])
        elif kind in PEERS:
            server, where = await PEERS[kind][0](path), path
        elif kind == "rpc-unix":
            await stack.enter_async_context(await rpc.serve(Echo(), path, transport="unix"))
            where = path
        else:
            transport = "tcp" if kind == "rpc-tcp" else "rdma"
            server = await stack.enter_async_context(await rpc.serve(Echo(), HOST, 0, transport=transport))
            where = str(server.sockets[0].getsockname()[1])
        print(where, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


async def serve_stream(reader: Any, writer: Any) -> None:
    """Requests of 9 bytes and data: a length, and whether so many bytes are asked for. Large data is not sent back."""
    buffers: dict[int, bytearray] = {}
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(9)
            size = int.from_bytes(head[:8], "big")
            if head[8]:
                writer.write(filled(size))
            elif size < LARGE:
                writer.write(await reader.readexactly(size))
            else:
                if size not in buffers:
                    buffers[size] = bytearray(size)
                await reader.readinto_exactly(buffers[size])
                writer.write(head[:8])
    writer.close()


# ---- Clients ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(kind: str, where: str, size: int, asks: bool) -> AsyncIterator[Call]:
    """A call of this size.

    :param asks: it asks for so many bytes
    """
    data = filled(size)
    if kind == "streams":
        reader, writer = await rdmanet.open_rdma_connection(HOST, int(where))
        mine = bytearray(size)

        async def by_stream() -> None:
            writer.write(size.to_bytes(8, "big") + bytes([asks]))
            if asks:
                return await reader.readinto_exactly(mine)
            writer.write(data)
            await writer.drain()
            await reader.readexactly(size if size < LARGE else 8)

        yield by_stream
        writer.close()
    elif kind in PEERS:
        request = GIVE + b"%d" % size if asks else data
        async with PEERS[kind][1](where) as method:
            yield lambda: method(request)
    else:
        at: tuple[Any, ...] = (where,) if kind == "rpc-unix" else (HOST, int(where))
        transport = {"rpc": "rdma", "rpc-tcp": "tcp", "rpc-unix": "unix"}[kind]
        async with rpc.connect(Echo, *at, transport=transport) as client:
            if asks:
                filling = rpc.options(client, into=bytearray(size))
                yield lambda: filling.give(size)
            elif size < LARGE:
                yield lambda: client.echo(data)
            else:
                yield lambda: client.take(memoryview(data))


async def measure(call: Call, at_a_time: int, count: int, pids: list[int]) -> tuple[float, float]:
    """Microseconds per call, and microseconds of CPU time of these processes."""

    async def worker() -> None:
        for _ in range(count // at_a_time):
            await call()

    for _ in range(2):  # the second: large arguments take turns with two areas of memory
        await call()
    used, started = sum(map(cpu_ns, pids)), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_a_time)))
    took, used = time.perf_counter() - started, sum(map(cpu_ns, pids)) - used
    calls = count // at_a_time * at_a_time
    return took / calls * 1e6, used / calls / 1e3


def cpu_ns(pid: int) -> int:
    """The CPU time that the threads of a process have had."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


async def client(kind: str, where: str, case: str, server: int, quick: bool) -> None:
    size, at_a_time, count = CASES[case]
    async with connected(kind, where, size, case.endswith("result")) as call:
        count = max(at_a_time, count // 10) if quick else count
        server = int(Path(where).read_text()) if kind == "ray" else server  # which it has begun
        print(*await measure(call, at_a_time, count, [os.getpid(), server]))


async def functions_per_call() -> int:
    """How many functions of Python client and server run for a call of 64 B, in one process."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    async with await rpc.serve(Echo(), HOST, 0) as server:
        async with rpc.connect(Echo, *server.sockets[0].getsockname()[:2]) as echo:
            await echo.echo(bytes(64))
            sys.setprofile(counted)
            for _ in range(100):
                await echo.echo(bytes(64))
            sys.setprofile(None)
    return round(count / 100)


# ---- The table ----------------------------------------------------------------------------------------------


def pinned(cpu: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    cpus = sorted(os.sched_getaffinity(0))
    taskset = ["taskset", "-c", str(cpus[cpu % len(cpus)])]
    command = [*taskset, sys.executable, "-m", "benchmarks.rpc", *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options)


def one(kind: str, case: str, quick: bool) -> tuple[float, float]:
    with pinned(0, "--serve", kind, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        where = server.stdout.readline().strip()
        arguments = ["--client", kind, where, case, str(server.pid), *(["--quick"] if quick else [])]
        with pinned(1, *arguments) as process:
            assert process.stdout is not None
            took, used = process.stdout.read().split()
        server.stdin.close()
    return float(took), float(used)


def table(title: str, kinds: list[str], found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{title:24}" + "".join(f"{kind:>10}" for kind in kinds))
    for case, figures in found.items():
        medians = (f"{statistics.median(figures[kind]):.1f}" if figures[kind] else "-" for kind in kinds)
        print(f"{case:24}" + "".join(f"{median:>10}" for median in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, and one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", default="", metavar="WORD", help="only those with this in their names")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import uvloop

    if options.serve:
        return uvloop.run(serve(options.serve))
    if options.client:
        kind, where, case, server = options.client
        return uvloop.run(client(kind, where, case, int(server), options.quick))
    kinds = options.kinds or list(KINDS)
    for kind in set(kinds) & set(PEERS):
        if (why := lacks(kind)) is not None:
            kinds.remove(kind)
            print(why)
    cases = [case for case in CASES if options.cases in case]
    times: dict[str, dict[str, list[float]]] = {case: {kind: [] for kind in kinds} for case in cases}
    used: dict[str, dict[str, list[float]]] = {case: {kind: [] for kind in kinds} for case in cases}
    for _ in range(1 if options.quick else options.turns):
        for case in cases:
            for kind in kinds:
                size, at_a_time, _ = CASES[case]
                numbered = kind != "streams"  # answers that say which call they are for
                if size > MOST_BYTES.get(kind, size) or (at_a_time > 1 and not numbered):
                    continue
                took, cpu = one(kind, case, options.quick)
                times[case][kind].append(took)
                used[case][kind].append(cpu)
    table("us per call", kinds, times)
    table("us of CPU per call", kinds, used)
    print(f"{uvloop.run(functions_per_call())} functions of Python per call of 64 B, on both sides")


if __name__ == "__main__":
    main()
