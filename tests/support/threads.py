"""The threads of this process that a test may have left behind."""

import contextlib
import os
import re

TASKS = "/proc/self/task"
NOT_OURS = "libuv-worker", "iou-", "Trio thread"
"""uvloop's pool for getaddrinfo is the process's for good, and the threads for libuv's io_uring are the kernel's.
Trio keeps idle threads for ten seconds."""


def names() -> list[str]:
    """Of all threads, each once.

    While a thread ends, the kernel's list may end with it, and leave out newer ones. So there must be as many as the
    kernel counts, and all must still be there after it has counted: else the one that has ended stands for another.
    """
    while True:
        tasks = os.listdir(TASKS)
        if len(tasks) == _count():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return [name for name in map(_name, tasks) if not name.startswith(NOT_OURS)]


def _count() -> int:
    with open("/proc/self/status") as status:
        return int(re.findall(r"^Threads:\t(\d+)$", status.read(), re.MULTILINE)[0])


def _name(task: str) -> str:
    with open(f"{TASKS}/{task}/comm") as comm:
        return comm.read().strip()
