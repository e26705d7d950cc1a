"""Copies of memory and of arrays, as steps of which each copies a piece (paging.in_turns). No I/O.

What lies between two fields of a record is not copied. The memory may have had what the peer is not to know, so there
are zeros then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from rdmanet.rpc.buffer import bytes_of

PIECE_BYTES: Final = 1 << 20

Steps = list[Callable[[], None]]


def done(steps: Steps) -> None:
    """Do these, all in one moment."""
    for step in steps:
        step()


def of_bytes(there: memoryview, here: memoryview, piece_bytes: int = PIECE_BYTES) -> Steps:
    """What copies memory to other memory of that length."""

    def copy(start: int) -> None:
        there[start : start + piece_bytes] = here[start : start + piece_bytes]

    return [functools.partial(copy, start) for start in range(0, there.nbytes, piece_bytes)]


def of_array(there: memoryview, array: Any, piece_bytes: int = PIECE_BYTES) -> Steps:
    """What copies an array into memory of its length, in C order."""
    if array.flags.c_contiguous:
        return of_bytes(there, bytes_of(array), piece_bytes)
    whole = sys.modules["numpy"].ndarray(array.shape, array.dtype, there)
    return [functools.partial(_copy, *parts) for parts in _parts(whole, array, piece_bytes)]


def _parts(there: Any, here: Any, piece_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Parts of two arrays: so many rows at a time as have about piece_bytes, or parts of a row that is longer."""
    if here.nbytes <= piece_bytes or here.ndim == 0:
        yield there, here
    elif (step := piece_bytes * len(here) // here.nbytes) > 0:
        for start in range(0, len(here), step):
            yield there[start : start + step], here[start : start + step]
    else:
        for row in range(len(here)):
            yield from _parts(there[row, ...], here[row, ...], piece_bytes)


def _copy(there: Any, here: Any) -> None:
    if here.dtype.names is not None:
        bytes_of(there)[:] = bytes(there.nbytes)
    _copy_fields(there, here)


def _copy_fields(there: Any, here: Any) -> None:
    """One by one: from NumPy 2.5 on, an assignment of records copies what lies between them, too."""
    if here.dtype.names is None:
        there[...] = here
    else:
        for name in here.dtype.names:
            _copy_fields(there[name], here[name])
