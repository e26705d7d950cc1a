"""Imports that are made when somebody first asks for what they have, also if no descriptor is left then.

Theory
------
explain() and connections() import what they take when they are first called (stream/whole.py), and so does an answer to
`rdmanet ss` (onlookers.py). To read a module takes a descriptor, and a program that has none left is one that asks. So
the limit of this process is raised meanwhile, by as much as nobody else is likely to take. This does not help where the
hard limit is reached, too.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_MORE = 64
_lock = threading.Lock()


def imported(load: Callable[[], _T]) -> _T:
    """What `load` returns, which imports it.

    :raises OSError: no descriptor is left, and the limit cannot be raised
    """
    try:
        return load()
    except OSError as exc:
        if exc.errno != errno.EMFILE:
            raise
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        more = soft + _MORE if hard == resource.RLIM_INFINITY else min(soft + _MORE, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        try:
            return load()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
