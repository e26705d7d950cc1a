"""measure large arrays from process to process, beside TCP and Unix sockets

usage: python -m benchmarks.arrays [--quick] [--size MB] [--turns N] [KIND]...

Two processes of this host, each on a CPU of its own, on uvloop. There are two kinds of work:

    one array       the sender passes all of it to one write, and drains; the receiver has memory for all of it
    1 MiB one way   the sender writes so many messages, one after the other; the receiver has memory for one, which it
                    uses again for each, and either leaves the bytes alone or reads and writes each cache line

When the receiver has everything it answers with one byte. The time is that from the first write to the answer. The
tables have medians of turns, in which the kinds alternate, and by how much the sender's memory grew at most. KIND is
one of

    rdmanet         streams: write(memoryview), drain(), readinto_exactly() into a bytearray
    rdmanet-alloc   the same into memory of rdmanet.alloc(), where the peer writes it
    rdmanet-buffered, rdmanet-buffered-alloc
                    a BufferedProtocol receives into 256 KiB of its own, of either kind
    tcp, unix       asyncio's streams: write(memoryview), drain(), readexactly()
    tcp-sockets, unix-sockets
                    the loop's sock_sendall() and sock_recv_into(): no faster way of sockets is known on a loop
    tcp-buffered, unix-buffered
                    sock_sendall(); a BufferedProtocol receives into 256 KiB of its own

BufferedProtocols are measured with messages only.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

import rdmanet
from benchmarks.touch import library, toucher

HOST = "127.0.0.1"
MIB = 1 << 20
BUFFERED_BYTES = 256 << 10
SIZE_MB, TURNS, MESSAGES = 200, 3, 1000


@dataclass(frozen=True)
class Kind:
    """A way of bytes from one process to the other."""

    fabric: str
    way: str = "streams"
    alloc: bool = False


KINDS = {
    "rdmanet": Kind("rdmanet"),
    "rdmanet-alloc": Kind("rdmanet", alloc=True),
    "rdmanet-buffered": Kind("rdmanet", "buffered"),
    "rdmanet-buffered-alloc": Kind("rdmanet", "buffered", alloc=True),
    "tcp": Kind("tcp"),
    "tcp-sockets": Kind("tcp", "sockets"),
    "tcp-buffered": Kind("tcp", "buffered"),
    "unix": Kind("unix"),
    "unix-sockets": Kind("unix", "sockets"),
    "unix-buffered": Kind("unix", "buffered"),
}


@dataclass(frozen=True)
class Work:
    """What is sent: so many writes of a size, and an answer; the first of several rounds is not counted."""

    size: int
    count: int
    touched: bool = False
    rounds: int = 5


# Connected: how to send bytes, how to fill a buffer, and how to end.
End = tuple[
    Callable[[memoryview], Awaitable[Any]],
    Callable[[memoryview], Awaitable[Any]],
    Callable[[], Awaitable[Any]],
]


def of_streams(reader: Any, writer: Any) -> End:
    async def send(array: memoryview) -> None:
        writer.write(array)
        await writer.drain()

    async def fill(array: memoryview) -> None:
        if hasattr(reader, "readinto_exactly"):
            await reader.readinto_exactly(array)
        else:
            array[:] = await reader.readexactly(len(array))

    async def close() -> None:
        writer.close()
        await writer.wait_closed()

    return send, fill, close


def of_socket(connection: socket.socket) -> End:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)

    async def fill(array: memoryview) -> None:
        while array:
            array = array[await loop.sock_recv_into(connection, array) :]

    async def close() -> None:
        connection.close()

    return lambda array: loop.sock_sendall(connection, array), fill, close


def memory(kind: Kind, size: int) -> memoryview:
    return memoryview(rdmanet.alloc(size) if kind.alloc else bytearray(size))


# ---- the receiver


class Receiver(asyncio.BufferedProtocol):
    """Receives into memory of its own, and answers after `Work.size * Work.count` bytes."""

    def __init__(self, kind: Kind, work: Work) -> None:
        self.memory = memory(kind, BUFFERED_BYTES)
        self.touch = toucher(self.memory) if work.touched else None
        self.total = self.left = work.size * work.count
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.memory

    def buffer_updated(self, nbytes: int) -> None:
        if self.touch is not None:
            self.touch(nbytes)
        self.left -= nbytes
        if self.left == 0:
            self.left = self.total
            self.transport.write(b".")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


async def receive(name: str, work: Work) -> None:
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "socket"))
        if kind.way == "buffered":
            receiver = Receiver(kind, work)
            server = await listen(kind, path, lambda: receiver)
            await receiver.lost
            server.close()
            return
        send, fill, close = await accept(kind, path)
    array = memory(kind, work.size)
    touch = toucher(array) if work.touched else None
    for _ in range(work.rounds):
        for _ in range(work.count):
            await fill(array)
            if touch is not None:
                touch(work.size)
        await send(memoryview(b"."))
    await close()


async def listen(kind: Kind, path: str, factory: Callable[[], Any]) -> Any:
    """A server of protocols; it says where."""
    loop = asyncio.get_running_loop()
    server: Any
    if kind.fabric == "unix":
        server = await loop.create_unix_server(factory, path)
    elif kind.fabric == "tcp":
        server = await loop.create_server(factory, HOST, 0)
    else:
        server = await rdmanet.start_rdma_server(factory, HOST, 0)
    print(path if kind.fabric == "unix" else server.sockets[0].getsockname()[1], flush=True)
    return server


async def accept(kind: Kind, path: str) -> End:
    """Listen, say where, and take the one connection that comes."""
    loop = asyncio.get_running_loop()
    if kind.way == "sockets":
        listener = socket.socket(socket.AF_UNIX if kind.fabric == "unix" else socket.AF_INET)
        listener.bind(path if kind.fabric == "unix" else (HOST, 0))
        listener.listen()
        listener.setblocking(False)
        print(path if kind.fabric == "unix" else listener.getsockname()[1], flush=True)
        connection, _ = await loop.sock_accept(listener)
        listener.close()
        return of_socket(connection)
    accepted: asyncio.Future[End] = loop.create_future()

    def connected(reader: Any, writer: Any) -> None:
        accepted.set_result(of_streams(reader, writer))

    server: Any
    if kind.fabric == "unix":
        server = await asyncio.start_unix_server(connected, path)
    elif kind.fabric == "tcp":
        server = await asyncio.start_server(connected, HOST, 0)
    else:
        server = await rdmanet.start_rdma_stream_server(connected, HOST, 0)
    print(path if kind.fabric == "unix" else server.sockets[0].getsockname()[1], flush=True)
    end = await accepted
    server.close()
    return end


# ---- the sender


async def connect(kind: Kind, where: str) -> End:
    if kind.fabric == "rdmanet":
        return of_streams(*await rdmanet.open_rdma_connection(HOST, int(where)))
    if kind.way == "streams":
        if kind.fabric == "tcp":
            return of_streams(*await asyncio.open_connection(HOST, int(where)))
        return of_streams(*await asyncio.open_unix_connection(where))
    connection = socket.socket(socket.AF_UNIX if kind.fabric == "unix" else socket.AF_INET)
    connection.setblocking(False)
    address: Any = where if kind.fabric == "unix" else (HOST, int(where))
    await asyncio.get_running_loop().sock_connect(connection, address)
    return of_socket(connection)


async def send(name: str, where: str, work: Work) -> tuple[float, int]:
    """Bytes per second, and KiB by which this process grew."""
    send_array, fill, close = await connect(KINDS[name], where)
    array = memoryview(bytearray(work.size))
    for start in range(0, work.size, MIB):
        part = array[start : start + MIB]
        part[:] = os.urandom(len(part))
    before = own_kib()
    seconds = []
    for _ in range(work.rounds):
        begun = time.perf_counter()
        for _ in range(work.count):
            await send_array(array)
        await fill(memoryview(bytearray(1)))
        seconds.append(time.perf_counter() - begun)
    grown = max(own_kib() - before, 0)  # before the peer's memory is unmapped, which does not count
    await close()
    rate = work.size * work.count / statistics.median(seconds[1:])
    return rate, grown


def own_kib() -> int:
    """The most memory that this process had in KiB, without what is shared: the embedded device maps the peer's."""
    with open("/proc/self/status") as status:
        mapped = next(int(line.split()[1]) for line in status if line.startswith("RssShmem:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - mapped


# ---- both


def run(coroutine: Any, cpu: int) -> Any:
    """Run it on uvloop, on this of our CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[cpu % len(cpus)]})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def measured(name: str, work: Work) -> tuple[float, int]:
    def program(call: str) -> list[str]:
        return [sys.executable, "-c", f"from benchmarks import arrays; {call}"]

    with subprocess.Popen(
        program(f"arrays.run(arrays.receive({name!r}, arrays.{work}), 1)"), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        where = receiver.stdout.readline().strip()
        said = subprocess.run(
            program(f"print(*arrays.run(arrays.send({name!r}, {where!r}, arrays.{work}), 0))"),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
    if receiver.returncode:
        raise RuntimeError(f"the receiver of {name} ended with status {receiver.returncode}")
    return float(said[0]), int(said[1])


def measure(title: str, work: Work, names: list[str], turns: int) -> None:
    """Print a table of it."""
    figures: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            figures[name].append(measured(name, work))
    print(f"{title:40}  GB/s   (least, most)    sender grows by", flush=True)
    for name in names:
        rates = [rate / 1e9 for rate, _ in figures[name]]
        grown = max(kib for _, kib in figures[name]) / 1024
        print(
            f"{name:36} {statistics.median(rates):8.2f}   ({min(rates):.2f}, {max(rates):.2f})   {grown:8.1f} MiB",
            flush=True,
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arrays", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--size", type=int, metavar="MB", help=f"of the array (default: {SIZE_MB})")
    parser.add_argument("--turns", type=int, metavar="N", help=f"default: {TURNS}")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: KIND is one of {', '.join(KINDS)}")
    size = args.size or (20 if args.quick else SIZE_MB)
    turns = args.turns or (1 if args.quick else TURNS)
    messages, rounds = (50, 2) if args.quick else (MESSAGES, 5)
    names = args.kinds or list(KINDS)
    library()
    whole = [name for name in names if KINDS[name].way != "buffered"]
    if whole:
        measure(f"one array of {size} MiB", Work(size * MIB, 1, rounds=rounds), whole, turns)
    measure("1 MiB one way, untouched", Work(MIB, messages, rounds=rounds), names, turns)
    measure("1 MiB one way, touched", Work(MIB, messages, touched=True, rounds=rounds), names, turns)


if __name__ == "__main__":
    main()
