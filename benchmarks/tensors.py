"""measure reads of another process's memory by rdmanet.tensors, beside copies from shared memory

usage: python -m benchmarks.tensors [--quick] [--turns N]

Two processes of this host, each on a CPU of its own if there are two, on uvloop. The owner has registered 64 MiB of
rdmanet.alloc(), and sleeps. The user reads into registered memory of its own:

    read        one block, awaited: 64 B to 64 MiB
    read_rows   1,000 rows of 4 and of 64 KiB, by their numbers, in one call
    read_many   the same blocks as pairs of a descriptor and an array

What is beside them is the same bytes, copied by NumPy from shared memory. It has nothing to wait for, and checks
nothing, so no transfer can be faster. The times are medians of turns, in which the kinds alternate. `CPU` is
the time of the user's processor, per turn.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy
import uvloop

import rdmanet
from rdmanet import tensors

KIB, MIB = 1 << 10, 1 << 20
ALL = 64 * MIB
COUNT = 1000
TURNS = 30


@dataclass
class Case:
    """What is measured, and the copy of the same bytes."""

    name: str
    move: Callable[[], Awaitable[None]]
    copy: Callable[[], object]
    calls: int
    """So many in one turn: short ones are too short for the clock."""


async def measured(case: Case, turns: int) -> tuple[float, float, float]:
    """Medians of the seconds of a transfer, of the processor's share in it, and of the copy."""
    took, used, copied = [], [], []
    for turn in range(turns + 2):
        began, ran = time.perf_counter(), time.process_time()
        for _ in range(case.calls):
            await case.move()
        took.append((time.perf_counter() - began) / case.calls)
        used.append((time.process_time() - ran) / case.calls)
        began = time.perf_counter()
        for _ in range(case.calls):
            case.copy()
        copied.append((time.perf_counter() - began) / case.calls)
        if turn < 2:  # the first touch of the memory, and the first claim
            del took[:], used[:], copied[:]
    return statistics.median(took), statistics.median(used), statistics.median(copied)


def cases(peer: tensors.Peer, whole: tensors.Descriptor, mine: Any, shared: Any) -> list[Case]:
    found = []

    def read(nbytes: int, calls: int) -> None:
        part, here, there = whole[:nbytes], mine[:nbytes], shared[:nbytes]
        found.append(
            Case(
                f"read {shown(nbytes)}",
                lambda: peer.read(part, here),
                lambda: numpy.copyto(here, there),
                calls,
            )
        )

    def blocks(nbytes: int) -> None:
        order = numpy.random.default_rng(1).permutation(COUNT)
        rows = mine[: COUNT * nbytes].reshape(COUNT, nbytes)
        table = tensors.Descriptor(
            whole.version, whole.endpoint, whole.grant, "r", 0, rows.nbytes, "|u1", rows.shape
        )
        pairs = [(table[at : at + 1], row) for at, row in zip(order.tolist(), rows, strict=True)]
        source = shared[: COUNT * nbytes].reshape(COUNT, nbytes)

        def copy() -> object:
            return numpy.take(source, order, axis=0, out=rows, mode="clip")

        name = f"{COUNT} x {shown(nbytes)}"
        found.append(Case(f"read_rows {name}", lambda: peer.read_rows(table, order, rows), copy, 1))
        found.append(Case(f"read_many {name}", lambda: peer.read_many(pairs), copy, 1))
        read(rows.nbytes, 1)

    for nbytes, calls in ((64, 100), (4 * KIB, 100), (64 * KIB, 20), (MIB, 5), (ALL, 1)):
        read(nbytes, calls)
    blocks(4 * KIB)
    blocks(64 * KIB)
    return found


def shown(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def pin(number: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})


async def own() -> None:
    async with tensors.open() as endpoint:
        array = numpy.frombuffer(rdmanet.alloc(ALL), "u1")
        array[:] = 1
        async with endpoint.register(array) as memory:
            print(endpoint.address().hex(), memory.describe().hex(), flush=True)
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            loop.add_reader(sys.stdin, ended.set)
            await ended.wait()
            loop.remove_reader(sys.stdin)


async def use(address: bytes, descriptor: bytes, turns: int) -> None:
    shared = numpy.frombuffer(mmap.mmap(-1, ALL), "u1")
    shared[:] = 1
    async with tensors.open() as endpoint:
        peer = await endpoint.connect(address)
        mine = numpy.zeros(ALL, "u1")
        async with endpoint.register(mine):
            whole = tensors.Descriptor.from_bytes(descriptor)
            print(f"{'':<24}{'time':>12}{'CPU':>12}{'copy':>12}{'time/copy':>12}")
            for case in cases(peer, whole, mine, shared):
                took, used, copied = await measured(case, turns)
                print(
                    f"{case.name:<24}{took * 1e6:>9.1f} us{used * 1e6:>9.1f} us{copied * 1e6:>9.1f} us"
                    f"{took / copied:>12.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 turns")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        pin(1)
        uvloop.run(own())
        return
    command = [sys.executable, "-m", "benchmarks.tensors", "--own"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin and owner.stdout
        address, descriptor = map(bytes.fromhex, owner.stdout.readline().split())
        pin(0)
        uvloop.run(use(address, descriptor, 3 if args.quick else args.turns))
        owner.stdin.close()


if __name__ == "__main__":
    main()
