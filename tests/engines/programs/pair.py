"""Two processes of one program: what the programs of this directory share.

The process that soft-run starts is the initiator. It starts the target, which runs under soft-run as well since the
environment is inherited, and they exchange addresses over a pipe. What is wrong raises, and the exit status tells.
"""

import contextlib
import functools
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"  # this process' address
BLOCK = 1 << 20
LARGE = 1 << 27
PART = 1 << 16
PATIENCE_S = 60.0
TRANSFERS = int(os.environ.get("RDMANET_TEST_TRANSFERS", "500"))
KILLS = int(os.environ.get("RDMANET_TEST_KILLS", "5"))
SOON_S = 5.0  # on a busy machine; no time-out of an engine or of an adapter is as short
COUNTERS = Path("/sys/class/infiniband/soft0/ports/1/hw_counters")
CARRIED = ("bytes_mapped", "bytes_cma", "bytes_engine", "bytes_local", "bytes_bounced", "bytes_stream")


def carried(names: tuple[str, ...] = CARRIED) -> int:
    """How many bytes the device has carried for this process' own requests, by whatever path."""
    return sum(int((COUNTERS / name).read_text()) for name in names)


@contextlib.contextmanager
def carrying(size: int) -> Iterator[None]:
    """What runs inside transfers so many bytes, and the device carries at least these."""
    before = carried()
    yield
    assert carried() - before >= size, f"the device has carried {carried() - before} bytes, not {size}"


def random_bytes(size: int) -> Any:
    """The same in each BLOCK if they are more."""
    return np.resize(np.frombuffer(os.urandom(min(size, BLOCK)), np.uint8), size)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Ask again until it is true: engines without threads of their own proceed only when they are asked."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := condition():
            return found
    raise TimeoutError(f"{what}: not within {PATIENCE_S:g} seconds")


def hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"the other process has said nothing for {PATIENCE_S:g} seconds")
    return pipe.recv()


@contextlib.contextmanager
def target(main: Callable[[Connection], None]) -> Iterator[tuple[Connection, Any]]:
    """The other process, which runs main(pipe), and must end well unless it is killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        with contextlib.suppress(OSError):
            ours.send("end")
        process.join(PATIENCE_S)
    assert process.exitcode is not None, "the target has not ended"
    assert process.exitcode in (0, -9), f"the target has ended with {process.exitcode}"


def seeded() -> random.Random:
    """Chance, whose seed is printed and can be given."""
    seed = int(os.environ.get("SEED", time.time_ns()))
    print(f"SEED={seed}", flush=True)
    return random.Random(seed)


def random_sizes(one: Any, transfer: Callable[[bool, int, int, int], None]) -> None:
    """Small and large transfers, at any address; both memories are compared after each hundred.

    transfer(reads, here, there, size) makes one, and checks that the device has carried it.
    """
    chance = seeded()
    theirs = np.frombuffer(one.ask("bytes"), np.uint8).copy()
    ours = one.memory[:] = random_bytes(BLOCK)
    ours = ours.copy()
    for number in range(TRANSFERS):
        size = min(BLOCK, int(2 ** chance.uniform(0, 20.5)))
        a, b = (chance.randint(0, BLOCK - size) for _ in range(2))
        reads = chance.random() < 0.5
        transfer(reads, a, b, size)
        if reads:
            ours[a : a + size] = theirs[b : b + size]
        else:
            theirs[b : b + size] = ours[a : a + size]
        assert one.memory[a : a + size].tobytes() == ours[a : a + size].tobytes()
        if number % 100 == 99 or number == TRANSFERS - 1:
            assert one.memory.tobytes() == ours.tobytes()
            assert one.ask("bytes") == theirs.tobytes()
    print(f"{TRANSFERS} transfers, every byte compared")


KILLER = """
import os, sys, time
print("ready", flush=True)
process, delay = int(sys.argv[1]), float(sys.stdin.readline())
time.sleep(delay)
print(time.monotonic(), flush=True)
os.kill(process, 9)
"""


class Killer:
    """Another process, which kills a target a moment after it is told to. A thread of ours might get no turn: an engine
    may hold the GIL while it transfers.
    """

    def __init__(self, process: Any) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-S", "-c", KILLER, str(process.pid)]
        self.killer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.killer.stdout and self.killer.stdout.readline() == "ready\n"

    def begin(self, delay_s: float) -> None:
        assert self.killer.stdin
        self.killer.stdin.write(f"{delay_s}\n")
        self.killer.stdin.flush()

    def killed_at(self) -> float:
        """By time.monotonic(), which is the same for all processes."""
        return float(self.killer.communicate(timeout=PATIENCE_S)[0])


def kills(
    serve: Callable[[Connection], None],
    connected: Callable[[Connection], contextlib.AbstractContextManager[Callable[[], str | None]]],
) -> None:
    """Kill one target after the other in the middle of a transfer: each time the engine must say so, and soon.

    connected(pipe) is a block that is connected to a target. What it yields transfers LARGE bytes, in many requests,
    and returns the error's text, if there is one. A kill counts if the device had carried a part of the transfer that
    failed, and not all of it: one between two transfers does not.
    """
    chance = seeded()
    waits, again, parts, texts, between = [], [], [], set(), 0
    while len(waits) < KILLS:
        with target(serve) as (pipe, process), connected(pipe) as transfer:
            killer = Killer(process)
            for _ in range(2):  # what is called "read" and "write"
                began = time.monotonic()
                assert transfer() is None
            killer.begin(chance.uniform(1, 4) * (time.monotonic() - began))
            end = time.monotonic() + PATIENCE_S
            while True:
                before = carried()
                if (text := transfer()) is not None:
                    break
                assert time.monotonic() < end, "no transfer has failed"
            ended = time.monotonic()
            part = (carried() - before) / LARGE
            killed_at = killer.killed_at()
            assert transfer() is not None
            done = time.monotonic()
            process.join(PATIENCE_S)
            assert process.exitcode == -signal.SIGKILL
        print(
            f"{part:.0%} carried; error after {ended - killed_at:.3f} s: {text}", file=sys.stderr, flush=True
        )
        if not 0 < part < 1:
            between += 1
            assert between < 5 + KILLS, "most kills come between transfers"
            continue
        texts.add(text)
        waits.append(ended - killed_at)
        again.append(done - ended)
        parts.append(part)
    print(f"{KILLS} of {KILLS} kills in the middle of a transfer of {LARGE} bytes, and {between} between two")
    print(f"carried by then: {min(parts):.0%} to {max(parts):.0%}")
    print(
        f"from the kill to the error: at most {max(waits):.3f} s, half within {statistics.median(waits):.3f} s"
    )
    print(f"the next transfer's error: within {max(again):.3f} s")
    print(f"errors: {', '.join(sorted(texts))}")
    assert max(waits + again) < SOON_S


def run(
    cases: tuple[Callable[[Any], None], ...],
    serve: Callable[..., None],
    initiator: Callable[[Connection], Any],
    transfers: Callable[[Connection], contextlib.AbstractContextManager[Any]] | None = None,
) -> None:
    """Do what the program is asked for: one of its cases, or kills while it transfers."""
    if sys.argv[1] == "kills" and transfers is not None:
        kills(functools.partial(serve, size=LARGE), transfers)
    else:
        with target(serve) as (pipe, _):
            {case.__name__: case for case in cases}[sys.argv[1]](initiator(pipe))
    print("done")
