"""measure calls of rdmanet.rpc, beside the streams below them and beside grpc.aio

usage: python -m benchmarks.rpc [--quick] [--turns N] [KIND]...

Two processes of this host on uvloop, each on a CPU of its own. A call takes bytes and returns them (64 B, 64 KiB), or
takes a large memoryview and returns its length (1 MiB, 64 MiB). `streams` writes and reads the same bytes without any
message around them. Small ones are made one after another and 32 at a time. The table has microseconds per call,
medians of turns, in which the kinds alternate. KIND is one of rpc, rpc-tcp, rpc-unix, streams, and grpc.aio over a Unix
socket where it is installed; all by default. It ends with how many functions of Python run for a call of 64 B.
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
from rdmanet import rpc

HOST = "127.0.0.1"
KINDS = ("rpc", "rpc-tcp", "rpc-unix", "streams", "grpc.aio")
CASES = {
    "64 B, 1 at a time": (64, 1, 3000),
    "64 B, 32 at a time": (64, 32, 10_000),
    "64 KiB, 1 at a time": (64 << 10, 1, 1000),
    "1 MiB argument": (1 << 20, 1, 200),
    "64 MiB argument": (64 << 20, 1, 6),
}
"""Bytes, calls at a time, and how many calls."""
LARGE = 1 << 20


class Echo(rpc.Service):
    async def echo(self, data: bytes) -> bytes:
        return data

    async def take(self, data: memoryview) -> int:
        return data.nbytes


Call = Callable[[bytes], Awaitable[Any]]


# ---- Servers: each prints where it is, and ends with its standard input --------------------------------------


async def serve(kind: str) -> None:
    path = str(Path(tempfile.mkdtemp()) / "socket")
    async with contextlib.AsyncExitStack() as stack:
        if kind == "streams":
            server: Any = await rdmanet.start_rdma_stream_server(serve_stream, HOST, 0)
            where = str(server.sockets[0].getsockname()[1])
        elif kind == "grpc.aio":
            where = await serve_grpc(f"unix:{path}")
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
    """Requests of 9 bytes and data: the length, and whether the data is to be sent back."""
    buffers: dict[int, bytearray] = {}
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(9)
            size = int.from_bytes(head[:8], "big")
            if size < LARGE:
                writer.write(await reader.readexactly(size))
            else:
                await reader.readinto_exactly(buffers.setdefault(size, bytearray(size)))
                writer.write(head[:8])
    writer.close()


async def serve_grpc(where: str) -> str:
    import grpc.aio  # type: ignore[import-not-found]

    async def echo(request: bytes, context: Any) -> bytes:
        return request if len(request) < LARGE else b"%d" % len(request)

    handler = grpc.unary_unary_rpc_method_handler(echo)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Echo", {"echo": handler})])
    server.add_insecure_port(where)
    await server.start()
    serve_grpc.server = server  # type: ignore[attr-defined]  # which would stop
    return where


# ---- Clients ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(kind: str, where: str) -> AsyncIterator[Call]:
    if kind == "streams":
        reader, writer = await rdmanet.open_rdma_connection(HOST, int(where))

        async def by_stream(data: bytes) -> None:
            writer.write(len(data).to_bytes(8, "big") + b"\0")
            writer.write(data)
            await writer.drain()
            await reader.readexactly(len(data) if len(data) < LARGE else 8)

        yield by_stream
        writer.close()
    elif kind == "grpc.aio":
        import grpc.aio

        async with grpc.aio.insecure_channel(where, [("grpc.max_send_message_length", -1)]) as channel:
            yield channel.unary_unary("/Echo/echo")
    else:
        at: tuple[Any, ...] = (where,) if kind == "rpc-unix" else (HOST, int(where))
        transport = {"rpc": "rdma", "rpc-tcp": "tcp", "rpc-unix": "unix"}[kind]
        async with rpc.connect(Echo, *at, transport=transport) as client:
            yield lambda data: client.echo(data) if len(data) < LARGE else client.take(memoryview(data))


async def measure(call: Call, size: int, at_a_time: int, count: int) -> float:
    """Microseconds per call."""
    data = bytes(size)

    async def worker() -> None:
        for _ in range(count // at_a_time):
            await call(data)

    await call(data)
    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return (time.perf_counter() - started) / (count // at_a_time * at_a_time) * 1e6


async def client(kind: str, where: str, case: str, quick: bool) -> None:
    size, at_a_time, count = CASES[case]
    async with connected(kind, where) as call:
        print(await measure(call, size, at_a_time, max(at_a_time, count // 10) if quick else count))


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


def one(kind: str, case: str, quick: bool) -> float:
    with pinned(0, "--serve", kind, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        where = server.stdout.readline().strip()
        with pinned(1, "--client", kind, where, case, *(["--quick"] if quick else [])) as process:
            assert process.stdout is not None
            text = process.stdout.read()
        server.stdin.close()
    return float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, and one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import uvloop

    if options.serve:
        return uvloop.run(serve(options.serve))
    if options.client:
        return uvloop.run(client(*options.client, options.quick))
    kinds = options.kinds or list(KINDS)
    if "grpc.aio" in kinds:
        try:
            import grpc.aio  # noqa: F401
        except ImportError:
            kinds.remove("grpc.aio")
            print("grpc.aio is not installed: pip install grpcio")
    turns = 1 if options.quick else options.turns
    print(f"{'us per call':22}" + "".join(f"{kind:>12}" for kind in kinds))
    for case in CASES:
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(turns):
            for kind in kinds:
                if kind != "streams" or CASES[case][1] == 1:  # whose answers have no numbers
                    found[kind].append(one(kind, case, options.quick))
        medians = (f"{statistics.median(found[kind]):.1f}" if found[kind] else "-" for kind in kinds)
        print(f"{case:22}" + "".join(f"{median:>12}" for median in medians), flush=True)
    print(f"{uvloop.run(functions_per_call())} functions of Python per call of 64 B, on both sides")


if __name__ == "__main__":
    main()
