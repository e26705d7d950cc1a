"""A round trip by blocking streams, and by asyncio's beside it: python -m benchmarks.blocking

Two processes on this host, 64 bytes there and back, asyncio's own loop on both sides. The two kinds take turns; of each
turn the median is told, and the fastest and the slowest tenth.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

import rdmanet

HOST = "127.0.0.1"
MESSAGE = b"x" * 64
TURNS, WARM_UP, ROUND_TRIPS = 5, 100, 2000


def serve_blocking() -> None:
    with rdmanet.listen_rdma_stream(HOST) as listener:
        print(listener.getsockname()[1], flush=True)
        with listener.accept() as stream:
            while data := stream.recv(len(MESSAGE)):
                stream.write(data)


async def serve_asyncio() -> None:
    over = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(len(MESSAGE)):
            writer.write(data)
        writer.close()
        over.set()

    async with await rdmanet.start_rdma_stream_server(echo, HOST, 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await over.wait()


def ask_blocking(port: int) -> list[float]:
    times = []
    with rdmanet.open_rdma_stream(HOST, port) as stream:
        for _ in range(WARM_UP + ROUND_TRIPS):
            begun, left = time.perf_counter(), len(MESSAGE)
            stream.write(MESSAGE)
            while left:
                left -= len(stream.recv(left))
            times.append(time.perf_counter() - begun)
    return times


async def ask_asyncio(port: int) -> list[float]:
    times = []
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    for _ in range(WARM_UP + ROUND_TRIPS):
        begun = time.perf_counter()
        writer.write(MESSAGE)
        await reader.readexactly(len(MESSAGE))
        times.append(time.perf_counter() - begun)
    writer.close()
    await writer.wait_closed()
    return times


def main() -> None:
    for kind in ("blocking", "asyncio") * TURNS:
        command = [sys.executable, "-m", "benchmarks.blocking", kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            times = ask_blocking(port) if kind == "blocking" else asyncio.run(ask_asyncio(port))
        tenths = [time * 1e6 for time in statistics.quantiles(times[WARM_UP:], n=10)]
        print(f"{kind:8} {tenths[4]:6.0f} µs, a tenth below {tenths[0]:.0f}, a tenth above {tenths[8]:.0f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["blocking"]:
        serve_blocking()
    elif sys.argv[1:] == ["asyncio"]:
        asyncio.run(serve_asyncio())
    else:
        main()
