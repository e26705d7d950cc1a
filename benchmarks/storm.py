"""measure a storm: 1,000 clients of 20 processes connect at once, and do so again when the server has restarted

usage: python -m benchmarks.storm [--quick] [--turns N]

A server echoes. Each client connects, has 64 bytes echoed, and keeps its connection. (Its process has connected to
itself before, so that its modules are loaded: benchmarks/starting.py measures that.) `all` is the time from the word to
begin until the last client has its echo; `CPU` is what the clients used until then. Then the server's process is killed
and another one listens at the same port. Each client sees that its connection is lost and connects again until it is
there; `again` is the time from the new server's word that it listens until the last client has its echo again. All run
on uvloop, over TCP, and switched by rdmanet. `by RDMA` says how many connections of a turn took it; a client that finds
the new server's TCP listener before its door takes TCP. The two kinds alternate, and the table has medians of the
turns, and of each turn's ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import rdmanet

HOST = "127.0.0.1"
FABRICS = ("rdma", "tcp")
COLUMNS = ("all", "CPU", "by RDMA", "again", "by RDMA")
RETRY_S = 0.02
BACKLOG = 4096
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(100):
            writer.write(data)
    writer.close()


async def serve(port: int) -> None:
    """Print our port, and serve until we are killed."""
    server = await asyncio.start_server(echo, HOST, port, backlog=BACKLOG, reuse_address=True)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


async def client(port: int) -> Pair:
    """Connect until somebody answers, and have bytes echoed."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(bytes(64))
            await reader.readexactly(64)
            return reader, writer
        await asyncio.sleep(RETRY_S)


async def storm(port: int, clients: int) -> None:
    """When a line of standard input comes, connect; when the server is gone, again.

    Each time, print the milliseconds of CPU time and how many took RDMA, when all are there.
    """
    loop = asyncio.get_running_loop()
    async with await asyncio.start_server(echo, HOST, 0) as own:
        _, writer = await client(own.sockets[0].getsockname()[1])
        writer.close()
        await writer.wait_closed()
    print(flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    tasks = [client(port) for _ in range(clients)]
    for _ in range(2):
        before = time.process_time()
        found = await asyncio.gather(*tasks)
        by_rdma = sum(writer.get_extra_info("fabric") == "rdma" for _, writer in found)
        print((time.process_time() - before) * 1e3, by_rdma, flush=True)
        tasks = [again(port, reader) for reader, _ in found]
    for task in tasks:
        task.close()
    await loop.run_in_executor(None, sys.stdin.readline)


async def again(port: int, reader: asyncio.StreamReader) -> Pair:
    """The same when the server has gone."""
    with contextlib.suppress(OSError):
        while await reader.read(100):
            pass
    return await client(port)


def run(fabric: str, coroutine: Any) -> None:
    import uvloop

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if fabric == "tcp":
        uvloop.run(coroutine)
    else:
        rdmanet.run(coroutine, loop_factory=uvloop.Loop)


class Process(subprocess.Popen[str]):
    def __init__(self, fabric: str, call: str) -> None:
        code = f"from benchmarks import storm; storm.run({fabric!r}, storm.{call})"
        super().__init__(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        assert self.stdout
        if not (line := self.stdout.readline()):
            sys.exit(f"a process has ended with status {self.wait()}")
        return line.strip()

    def tell(self) -> None:
        assert self.stdin
        self.stdin.write("\n")
        self.stdin.flush()

    def end(self) -> None:
        self.kill()
        self.communicate()


def turn(fabric: str, processes: int, clients: int) -> list[float]:
    """What the columns of the table have."""
    with contextlib.ExitStack() as stack:
        server = Process(fabric, "serve(0)")
        stack.callback(server.end)
        port = int(server.hear())
        storms = [Process(fabric, f"storm({port}, {clients})") for _ in range(processes)]
        for each in storms:
            stack.callback(each.end)
        for each in storms:
            each.hear()
        begun = time.perf_counter()
        for each in storms:
            each.tell()
        first = [list(map(float, each.hear().split())) for each in storms]
        first_s = time.perf_counter() - begun
        server.end()
        server = Process(fabric, f"serve({port})")
        stack.callback(server.end)
        server.hear()
        begun = time.perf_counter()
        second = [list(map(float, each.hear().split())) for each in storms]
        again_s = time.perf_counter() - begun
    used, by_rdma = (sum(column) for column in zip(*first, strict=True))
    return [first_s * 1e3, used, by_rdma, again_s * 1e3, sum(each[1] for each in second)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storm", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one turn of 40 clients: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 5")
    args = parser.parse_args()
    processes, clients = (4, 10) if args.quick else (20, 50)
    rows: dict[str, list[list[float]]] = {fabric: [] for fabric in FABRICS}
    for number in range(args.turns or (1 if args.quick else 5)):
        for fabric in FABRICS if number % 2 == 0 else reversed(FABRICS):
            rows[fabric].append(turn(fabric, processes, clients))
    print(f"{'ms':8}" + "".join(f"{name:>10}" for name in COLUMNS))
    for fabric, figures in rows.items():
        medians = [statistics.median(column) for column in zip(*figures, strict=True)]
        print(f"{fabric:8}" + "".join(f"{median:10.1f}" for median in medians))
    pairs = list(zip(*rows.values(), strict=True))
    ratios = [statistics.median(r[index] / t[index] for r, t in pairs) for index in (0, 1, 3)]
    print("ratio   {:10.2f}{:10.2f}{:>10}{:10.2f}".format(*ratios[:2], "", ratios[2]))


if __name__ == "__main__":
    main()
