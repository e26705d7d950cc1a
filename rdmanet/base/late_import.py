"""Imports that are made when somebody first asks for what they have, also if no descriptor is left then.

Theory
------
explain(), connections() and metrics() import what they take when they are first called (stream/whole.py), and so does
an answer to `rdmanet ss` (onlookers.py). To read a module takes a descriptor, one at a time, and a program that has
none left is one that asks. So the limit of this process is raised meanwhile, by as much as nobody else is likely to
take. Where the hard limit is reached, too, a spare one is given up meanwhile, which a process holds as long as it may
be asked. This does not help if another thread takes it in that moment, such as the embedded device's for a new peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_MORE = 64
_holders = 0
_spare = -1
_lock = threading.RLock()  # a finalizer may let it go while its thread takes it


def hold_spare() -> None:
    """Hold a spare descriptor, if there is one, until `let_spare_go` was called as often as this."""
    global _holders
    with _lock:
        _holders += 1
        _renew()


def let_spare_go() -> None:
    """See `hold_spare`."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _give_up()


def imported(load: Callable[[], _T]) -> _T:
    """What `load` returns, which imports it.

    :raises OSError: no descriptor is left, the limit cannot be raised, and no spare one is held
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
            if more == soft:
                _give_up()
            return load()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            _renew()


def _renew() -> None:
    global _spare
    if _spare < 0 < _holders:
        with contextlib.suppress(OSError):
            _spare = os.eventfd(0, os.EFD_CLOEXEC)


def _give_up() -> None:
    global _spare
    if _spare >= 0:
        os.close(_spare)
        _spare = -1


def _forked() -> None:
    """In the child, the thread that had the lock is gone."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
