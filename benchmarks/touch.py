"""Work on bytes, in C (touch.c), so that what is measured is not Python's."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compiling import compiled


def library() -> Path:
    """Where it is; it is compiled if need be."""
    return compiled("touch.so", "touch.c", "-shared", "-fPIC")


def function(name: str, *types: Any) -> Any:
    found = getattr(ctypes.CDLL(str(library())), name)
    found.argtypes = types
    return found


def address_of(buffer: Any) -> int:
    """Of a writable buffer, which has to be kept."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def toucher(buffer: Any) -> Callable[[int], None]:
    """What reads and writes each cache line of the first n bytes of this writable buffer."""
    touch = function("touch", ctypes.c_void_p, ctypes.c_size_t)
    address = address_of(buffer)

    def touched(count: int, kept: Any = buffer) -> None:
        touch(address, count)

    return touched
