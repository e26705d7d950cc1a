"""Two processes of one program: what the programs of this directory share.

The process that soft-run starts is the initiator. It starts the target, which runs under soft-run as well since the
environment is inherited, and they exchange addresses over a pipe. What is wrong raises, and the exit status tells.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 1 << 20
PATIENCE_S = 60.0
COUNTERS = Path("/sys/class/infiniband/soft0/ports/1/hw_counters")
CARRIED = ("bytes_mapped", "bytes_cma", "bytes_engine", "bytes_local", "bytes_bounced", "bytes_stream")


def carried() -> int:
    """How many bytes the device has carried for this process' own requests, by whatever path."""
    return sum(int((COUNTERS / name).read_text()) for name in CARRIED)


@contextlib.contextmanager
def carrying(size: int) -> Iterator[None]:
    """What runs inside transfers so many bytes, and the device carries at least these."""
    before = carried()
    yield
    assert carried() - before >= size, f"the device has carried {carried() - before} bytes, not {size}"


def random_bytes(size: int) -> Any:
    return np.frombuffer(os.urandom(size), np.uint8).copy()


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
