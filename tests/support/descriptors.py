"""Tests of what happens when few descriptors are left."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Meanwhile this process may open so many descriptors more, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as some:
        free = [os.dup(some.fileno()) for _ in range(count + 1)]  # the kernel gives the least numbers
        first = some.fileno()
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sorted([first, *free])[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
