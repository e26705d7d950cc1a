"""The threads of this process that a test may have left behind."""

import os
from collections.abc import Iterator


def names() -> Iterator[str]:
    for task in _tasks():
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # uvloop's pool for getaddrinfo is the process's for good, the kernel's for libuv's io_uring is the kernel's.
        # Trio keeps idle threads for ten seconds.
        if not name.startswith(("libuv-worker", "iou-", "Trio thread")):
            yield name


def _tasks() -> list[str]:
    """The numbers of all threads. While one ends, the kernel may leave out others."""
    while True:
        tasks = os.listdir("/proc/self/task")
        with open("/proc/self/status") as status:
            if f"Threads:\t{len(tasks)}\n" in status:
                return tasks
