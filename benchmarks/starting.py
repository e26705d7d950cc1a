"""measure a program that starts, says 64 bytes to a server and ends, beside the same over TCP

usage: python -m benchmarks.starting [--quick] [--turns N] [KIND]...

A program of one loop connects to a server on this host, writes 64 bytes, reads them back, closes and ends. `whole` is
the time from its start to its end, and `CPU` what it used of a processor. In a program that connects ten times, `first`
is the time of the first connection with its echo and close, and `later` that of the others. KIND is one of nothing
(Python alone), tcp, rdmanet, run (the program over TCP, run by rdmanet.run(), which loads the rest of rdmanet for its
first connection); all by default. The table has medians of turns, in which the kinds alternate, in milliseconds.

Modules are compiled beforehand, as by pip: the first turn does not count, and what it compiles is kept in a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rdmanet

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"

CLIENT = """
import asyncio, time
{imports}
connect = {connect}
async def main():
    for _ in range({connections}):
        begun = time.perf_counter()
        reader, writer = await connect("127.0.0.1", {port})
        writer.write(bytes(64))
        await reader.readexactly(64)
        writer.close()
        await writer.wait_closed()
        print((time.perf_counter() - begun) * 1000)
{run}(main())
"""
KINDS = {
    "nothing": None,
    "tcp": {"imports": "", "connect": "asyncio.open_connection", "run": "asyncio.run"},
    "rdmanet": {"imports": "import rdmanet", "connect": "rdmanet.open_rdma_connection", "run": "asyncio.run"},
    "run": {"imports": "import rdmanet", "connect": "asyncio.open_connection", "run": "rdmanet.run"},
}


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


def program(kind: str, port: int, connections: int) -> str:
    fields = KINDS[kind]
    return CLIENT.format(**fields, port=port, connections=connections) if fields else ""


async def measured(code: str, environment: dict[str, str]) -> tuple[float, float, list[float]]:
    """Milliseconds of time and of processors, and what it has printed. This process serves meanwhile."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=subprocess.PIPE
    )
    said, _ = await process.communicate()
    whole, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"a client ended with {process.returncode}")
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return whole * 1000, used * 1000, [float(word) for word in said.split()]


async def measure(kinds: list[str], turns: int) -> dict[str, list[list[float]]]:
    figures: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    server = await asyncio.start_server(echo, HOST, 0)  # over RDMA, too
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(turns + 1):
            for kind in kinds:
                whole, used, _ = await measured(program(kind, port, 1), environment)
                _, _, times = await measured(program(kind, port, 10), environment)
                if turn:
                    several = [times[0], statistics.median(times[1:])] if times else []
                    figures[kind].append([whole, used, *several])
    server.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.starting", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one turn: to see that it runs")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 15")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: KIND is one of {', '.join(KINDS)}")
    turns = args.turns or (1 if args.quick else 15)
    figures = rdmanet.run(measure(args.kinds or list(KINDS), turns))
    print(f"{'ms':10}{'whole':>10}{'CPU':>10}{'first':>10}{'later':>10}")
    for kind, rows in figures.items():
        columns = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{kind:10}" + "".join(f"{figure:10.2f}" for figure in columns))


if __name__ == "__main__":
    main()
