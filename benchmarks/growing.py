"""measure what receive slots that grow cost a new connection

usage: python -m benchmarks.growing [--quick] [--turns N]

Two processes of this host, each on a CPU of its own, on uvloop. The client connects, sends 64 bytes and waits for them.
Then it sends 64 MiB in one write and waits for a line. It does so again and again, each time by a new connection. Both
sides' slots begin small and grow, as by default, or have their full size from the beginning (first_slot_bytes=65536).
The two kinds take turns. The table has medians over the connections: microseconds of the echo, milliseconds of the
64 MiB, and how long after its first bytes the server had registered the full ring.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import rdmanet
from benchmarks.connecting import HOST, program

SMALL, LARGE = 64, 64 << 20
FULL_SLOT_BYTES = 65536
KINDS: dict[str, dict[str, int]] = {"growing": {}, "full": {"first_slot_bytes": FULL_SLOT_BYTES}}
FULL_RING_BYTES = 1 << 20
"""Less than a full ring, and much more than a small one."""


class Server(asyncio.BufferedProtocol):
    """Echoes the first message; answers the second with what it saw of the ring."""

    def __init__(self) -> None:
        self.memory = bytearray(256 << 10)
        self.received = 0
        self.begun = self.grown = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.memory

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self.received <= SMALL:
            self.transport.write(self.memory[:nbytes])
            return
        self.begun = self.begun or time.perf_counter()
        if (
            not self.grown
            and self.transport.get_extra_info("rdma_stats")["bytes_registered"] >= FULL_RING_BYTES
        ):
            self.grown = time.perf_counter()
        if self.received == SMALL + LARGE:
            self.transport.write(b"%.9f\n" % (self.grown - self.begun))


async def serve(kind: str) -> None:
    """Print where, and serve until our standard input ends."""
    loop = asyncio.get_running_loop()
    server = await rdmanet.start_rdma_server(Server, HOST, 0, **KINDS[kind])
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


async def ask(kind: str, port: int, count: int) -> None:
    """Print the three times of each connection, in seconds."""
    payload = memoryview(bytes(LARGE))
    times = []
    for _ in range(count):
        reader, writer = await rdmanet.open_rdma_connection(HOST, port, **KINDS[kind])
        begun = time.perf_counter()
        writer.write(bytes(SMALL))
        await reader.readexactly(SMALL)
        echoed = time.perf_counter()
        writer.write(payload)
        grown = float(await reader.readline())
        times.append((echoed - begun, time.perf_counter() - echoed, grown))
        writer.close()
        await writer.wait_closed()
    print(json.dumps(times))


def measured(kind: str, count: int) -> list[tuple[float, float, float]]:
    with subprocess.Popen(
        program("growing", f"serve({kind!r})", -1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin and server.stdout
        port = int(server.stdout.readline())
        client = program("growing", f"ask({kind!r}, {port}, {count})", 0)
        said = subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True).stdout
        server.stdin.close()
    times: list[tuple[float, float, float]] = json.loads(said)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 5")
    args = parser.parse_args()
    figures: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.turns or (1 if args.quick else 5)):
        for kind in KINDS:
            figures[kind] += measured(kind, 2 if args.quick else 20)
    print(f"{'slots':10}{'echo of 64 B, us':>20}{'64 MiB, ms':>14}{'full ring after, ms':>22}")
    for kind, times in figures.items():
        echo, large, grown = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{kind:10}{echo * 1e6:20,.1f}{large * 1e3:14,.2f}{grown * 1e3:22,.3f}")


if __name__ == "__main__":
    main()
