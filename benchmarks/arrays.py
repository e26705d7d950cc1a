"""measure one large array from process to process, beside TCP and Unix sockets

usage: python -m benchmarks.arrays [--size MB] [--turns N] [KIND]...

Two processes of this host, each on a CPU of its own, on uvloop. The sender has an array, passes all of it to one write,
and drains; the receiver reads it into an array of its own, which it reuses, and answers with one byte. The time is that
from the write to the answer. The table has medians of turns, in which the kinds alternate, and by how much the sender's
memory grew at most. KIND is one of

    rdmanet      streams: write(memoryview), drain(), readinto_exactly()
    tcp, unix    asyncio's streams: write(memoryview), drain(), readexactly()
    tcp-sockets, unix-sockets
                 the loop's sock_sendall() and sock_recv_into(): no faster way of sockets is known on a loop
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

import rdmanet

HOST = "127.0.0.1"
KINDS = ("rdmanet", "tcp", "tcp-sockets", "unix", "unix-sockets")
SIZE_MB, TURNS, ARRAYS = 200, 3, 5  # the first array of a turn is not counted

# Connected: how to send an array, how to fill one, and how to end. One byte is sent and filled like an array.
End = tuple[Callable[[memoryview], Awaitable[Any]], Callable[[memoryview], Awaitable[Any]], Callable[[], Any]]


def of_streams(reader: Any, writer: Any) -> End:
    async def send(array: memoryview) -> None:
        writer.write(array)
        await writer.drain()

    async def fill(array: memoryview) -> None:
        if hasattr(reader, "readinto_exactly"):
            await reader.readinto_exactly(array)
        else:
            array[:] = await reader.readexactly(len(array))

    return send, fill, writer.close


def of_socket(connection: socket.socket) -> End:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)

    async def fill(array: memoryview) -> None:
        while array:
            array = array[await loop.sock_recv_into(connection, array) :]

    return lambda array: loop.sock_sendall(connection, array), fill, connection.close


async def accept(kind: str, directory: str) -> End:
    """Listen, say where, and take the one connection that comes."""
    loop = asyncio.get_running_loop()
    path = str(Path(directory, "socket"))
    if kind.endswith("-sockets"):
        listener = socket.socket(socket.AF_UNIX if kind.startswith("unix") else socket.AF_INET)
        listener.bind(path if kind.startswith("unix") else (HOST, 0))
        listener.listen()
        listener.setblocking(False)
        print(path if kind.startswith("unix") else listener.getsockname()[1], flush=True)
        connection, _ = await loop.sock_accept(listener)
        listener.close()
        return of_socket(connection)
    accepted: asyncio.Future[End] = loop.create_future()

    def connected(reader: Any, writer: Any) -> None:
        accepted.set_result(of_streams(reader, writer))

    server: Any
    if kind == "unix":
        server = await asyncio.start_unix_server(connected, path)
    elif kind == "tcp":
        server = await asyncio.start_server(connected, HOST, 0)
    else:
        server = await rdmanet.start_rdma_stream_server(connected, HOST, 0)
    print(path if kind == "unix" else server.sockets[0].getsockname()[1], flush=True)
    end = await accepted
    server.close()
    return end


async def connect(kind: str, where: str) -> End:
    if kind == "rdmanet":
        return of_streams(*await rdmanet.open_rdma_connection(HOST, int(where)))
    if kind == "tcp":
        return of_streams(*await asyncio.open_connection(HOST, int(where)))
    if kind == "unix":
        return of_streams(*await asyncio.open_unix_connection(where))
    connection = socket.socket(socket.AF_UNIX if kind.startswith("unix") else socket.AF_INET)
    connection.setblocking(False)
    address: Any = where if kind.startswith("unix") else (HOST, int(where))
    await asyncio.get_running_loop().sock_connect(connection, address)
    return of_socket(connection)


async def receive(kind: str, size: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        send, fill, close = await accept(kind, directory)
    array = memoryview(bytearray(size))
    for _ in range(ARRAYS):
        await fill(array)
        await send(memoryview(b"."))
    close()


async def send(kind: str, where: str, size: int) -> tuple[float, int]:
    """Bytes per second, and KiB by which this process grew."""
    send_array, fill, close = await connect(kind, where)
    array = memoryview(bytearray(size))
    for start in range(0, size, 1 << 20):
        array[start : start + (1 << 20)] = os.urandom(1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(ARRAYS):
        begun = time.perf_counter()
        await send_array(array)
        await fill(memoryview(bytearray(1)))
        seconds.append(time.perf_counter() - begun)
    close()
    return size / statistics.median(seconds[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def run(coroutine: Any, cpu: int) -> Any:
    """Run it on uvloop, on this of our CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[cpu % len(cpus)]})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def measured(kind: str, size: int) -> tuple[float, int]:
    call = f"from benchmarks import arrays; arrays.run(arrays.%s({kind!r}, %s{size}), %d)"
    with subprocess.Popen(
        [sys.executable, "-c", call % ("receive", "", 1)], stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        where = receiver.stdout.readline().strip()
        code = "print(*" + (call % ("send", f"{where!r}, ", 0)).removeprefix(
            "from benchmarks import arrays; "
        )
        said = subprocess.run(
            [sys.executable, "-c", f"from benchmarks import arrays; {code})"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
    return float(said[0]), int(said[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arrays", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", type=int, default=SIZE_MB, metavar="MB", help=f"default: {SIZE_MB}")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: KIND is one of {', '.join(KINDS)}")
    kinds = args.kinds or list(KINDS)
    figures: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}
    for _ in range(args.turns):
        for kind in kinds:
            figures[kind].append(measured(kind, args.size << 20))
    print(f"{args.size} MiB in one write          GB/s   (least, most)    sender grows by")
    for kind in kinds:
        rates = [rate / 1e9 for rate, _ in figures[kind]]
        grown = max(kib for _, kib in figures[kind]) / 1024
        print(
            f"{kind:24} {statistics.median(rates):8.2f}   ({min(rates):.2f}, {max(rates):.2f})   {grown:8.1f} MiB"
        )


if __name__ == "__main__":
    main()
