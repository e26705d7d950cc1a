"""`Buffer`: memory that goes by reference as an argument or a result.

Theory
------
A Buffer is made around memory by the side that has it, and handed to the other side: as an argument of a call, or as a
result. The other side gets a Buffer, too, which stands for that memory, and decides what to read, when, and into what.
How it reads is its source's business: by RDMA READ where the connection has that; where the bytes came with the
message, from there.

What a method annotates as `bytes` or `memoryview` goes by the same ways; then the bytes are there before the method
runs, or before the call returns.

A Buffer has a life. An argument can be read until the call ends, a result until it is released. After that the owner's
memory is the owner's alone again, and reading raises `Error` (FAILED_PRECONDITION).

The owner may keep a Buffer and hand it over in many calls, also at the same time. Its memory is registered with the
device for the first of them, and stays so until the owner releases the Buffer. What the other side gets for a call is
a key of that call (lending.py), so keeping a Buffer gives nobody more than before.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol, Self, TypeVar

from rdmanet.errors import shown
from rdmanet.rpc.errors import Code, Error

__all__ = ["Buffer"]


class Source(Protocol):
    """Where a Buffer's bytes are."""

    async def read_into(self, memory: Any, offset: int) -> None:
        """Fill `memory`, a writable buffer, from this offset. The range has been checked."""

    def release(self) -> None:
        """Nothing will be read any more. Later calls do nothing."""


class Registered(Protocol):
    """Memory that devices know."""

    def close(self) -> None:
        """Deregister it. Raises OSError (EBUSY) while a peer has a key to it."""


_R = TypeVar("_R", bound=Registered)


class Buffer:
    """Memory that a call hands over by reference.

    ``rpc.Buffer(array)`` stands for the memory of any C-contiguous buffer, which must not change while a call has it.
    Keep it for further calls, and the memory is registered with the device only once. Until ``release()``, or until
    nobody refers to the Buffer any more, the memory cannot be resized or freed.

    Arguments and results of this type are read by ``await buffer.read_into(array)``, or ``await buffer.read(0, 100)``.
    A result has to be released: ``async with await store.get("w") as data: await data.read_into(array)``.

    :param memory: a contiguous buffer
    :raises TypeError: it is no buffer, or an array that is more than one of NumPy
    :raises BufferError: it is not C-contiguous
    :ivar nbytes: its length in bytes
    """

    __slots__ = ("nbytes", "_given", "_memory", "_registered", "_source", "__weakref__")

    nbytes: int

    def __init__(self, memory: Any) -> None:
        check_plain(memory, "rpc.Buffer")
        view = memoryview(exported(memory, "rpc.Buffer"))
        if not view.c_contiguous:
            raise BufferError("rpc.Buffer: the memory is not C-contiguous")
        self._given = memory
        self._memory: memoryview | None = bytes_of(memory)
        self._registered: Registered | None = None
        self._source: Source | None = None
        self.nbytes = view.nbytes

    @classmethod
    def of(cls, source: Source, nbytes: int) -> Self:
        """A Buffer for memory that a source reads."""
        buffer = cls.__new__(cls)
        buffer._given = buffer._memory = buffer._registered = None
        buffer._source = source
        buffer.nbytes = nbytes
        return buffer

    @property
    def memory(self) -> memoryview | None:
        """The memory, if it is this process's."""
        return self._memory

    @property
    def array(self) -> Any:
        """The array that the Buffer was made of, as one that may be passed as an argument annotated as an array.

        Such a call finds the memory registered.

        :raises AttributeError: it was not made of an array
        """
        if not hasattr(self, "__array_interface__"):
            raise AttributeError(f"{self!r} was not made of an array")
        array, dtype = sys.modules["numpy"].asarray(self), getattr(self._given, "dtype", None)
        return array if dtype in (None, array.dtype) else array.view(dtype)  # one of ml_dtypes

    @property
    def __array_interface__(self) -> Any:
        return self._given.__array_interface__  # NumPy keeps the Buffer, and the Buffer keeps the array

    def registered(self, register: Callable[[memoryview], _R]) -> _R:
        """Its memory as devices know it: registered now, if it is not yet."""
        if self._registered is None:
            assert self._memory is not None
            self._registered = register(self._memory)
            # Not by __del__: in a cycle of garbage, the region may be finalized before this.
            weakref.finalize(self, _forgotten, self._registered).atexit = False
        return self._registered  # type: ignore[return-value]  # there is one function that registers

    def __len__(self) -> int:
        return self.nbytes

    async def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start:stop], by default to the end. Cancelling it reads nothing.

        :raises IndexError: they are not within the buffer
        :raises Error: FAILED_PRECONDITION if the call has ended or the buffer was released, UNAVAILABLE if the
            connection was lost
        """
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes:
            raise IndexError(f"read: {start}:{stop} is not within {self.nbytes} bytes")
        found = bytearray(stop - start)
        await self.read_into(found, start)
        return bytes(found)

    async def read_into(self, memory: Any, offset: int = 0) -> int:
        """Fill `memory`, an array for example, with the bytes from `offset`; returns how many these are.

        By RDMA the device writes them into `memory` itself. Pass the same memoryview again, and its registration is
        kept. If it is cancelled, the device may still write to `memory`, which is kept until it has ended.

        :raises TypeError: `memory` is no buffer, or read-only
        :raises IndexError: the buffer has fewer bytes
        :raises Error: as for `read`
        """
        memory = exported(memory, "read_into")
        view = memoryview(memory)
        if view.readonly:
            raise TypeError(f"read_into: {shown(memory)} is read-only")
        if not 0 <= offset <= self.nbytes - view.nbytes:
            raise IndexError(f"read_into: {view.nbytes} bytes at {offset} are not within {self.nbytes} bytes")
        if view.nbytes == 0:
            return 0
        if self._memory is not None:
            view.cast("B")[:] = self._memory[offset : offset + view.nbytes]
        elif self._source is not None:
            await self._source.read_into(memory, offset)  # itself: by it, a registration is known again
        else:
            raise over()
        return view.nbytes

    def release(self) -> None:
        """Let the owner have its memory back: nothing can be read any more. It may be called again.

        :raises BufferError: it is this process's memory, and a call has it that has not ended
        """
        if self._registered is not None:
            try:
                self._registered.close()
            except OSError as exc:
                if exc.errno != errno.EBUSY:
                    raise
                raise BufferError(f"{self!r} cannot be released: a call has it that has not ended") from None
            self._registered = None
        source, self._source = self._source, None
        self._memory = None
        if source is not None:
            source.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if (source := getattr(self, "_source", None)) is not None:
            source.release()

    def __repr__(self) -> str:
        where = "here" if self._memory is not None else "there" if self._source is not None else "released"
        return f"<rpc.Buffer of {self.nbytes} bytes, {where}>"


def _forgotten(registered: Registered) -> None:
    with contextlib.suppress(OSError):  # a peer is slow to let go: the registration ends when it has
        registered.close()


def check_plain(memory: Any, what: str) -> None:
    """Refuse arrays of classes that add something to NumPy's: only the numbers would arrive.

    Such a class may have a mask, a unit, or names beside the numbers, or another meaning of its operators.

    :raises TypeError: it is one; the text begins with `what`
    """
    type_, numpy = type(memory), sys.modules.get("numpy")
    if numpy is None or type_ is numpy.ndarray or not isinstance(memory, numpy.ndarray):
        return
    if type_ is not numpy.memmap and not _adds_nothing(memory, numpy.ndarray):
        raise TypeError(
            f"{what}: a {type_.__module__}.{type_.__qualname__} may be more than a numpy.ndarray, as which it would"
            " arrive: pass numpy.asarray() of it if its numbers are enough, and the rest beside it"
        )


def _adds_nothing(array: Any, ndarray: type) -> bool:
    """Whether it is of a class that only has another name, and without attributes of its own."""
    own = (base for base in type(array).__mro__ if base not in ndarray.__mro__)
    return not any(vars(base).keys() - _OF_EVERY_CLASS for base in own) and not getattr(
        array, "__dict__", None
    )


_OF_EVERY_CLASS: Final = vars(type("", (), {})).keys() | {"__firstlineno__", "__static_attributes__"}


def exported(memory: Any, what: str) -> Any:
    """A buffer: `memory`, or its bytes if NumPy exports its items as none: dates, and what ml_dtypes adds.

    :raises TypeError: it is none
    :raises ValueError: it is none any more
    :raises BufferError: it is such an array, and not C-contiguous; the text begins with `what`
    """
    try:
        memoryview(memory)
    except ValueError:
        if not hasattr(memory, "__array_interface__"):  # it was released, or closed
            raise
        if not memory.flags.c_contiguous:
            raise BufferError(f"{what}: the memory is not C-contiguous") from None
        return bytes_of(memory)
    return memory


def bytes_of(memory: Any) -> memoryview:
    """The bytes of an array, or of another C-contiguous buffer, where they are."""
    if hasattr(memory, "__array_interface__"):
        return memoryview(memory.reshape(-1).view("u1"))  # memoryview.cast does not know all types of items
    view = memoryview(memory)
    return view.cast("B") if view.nbytes else memoryview(b"")


def buffer_of(array: Any) -> Buffer | None:
    """The Buffer whose `Buffer.array` this is: all of it, and not a part."""
    base = array.base
    if type(base) is type(array):  # an array of ml_dtypes is a view of that which NumPy makes of a Buffer
        base = base.base
    if not isinstance(base, Buffer) or base.memory is None or base.nbytes != array.nbytes:
        return None
    there, here = base.__array_interface__["data"], array.__array_interface__["data"]
    return base if there[0] == here[0] else None


def over() -> Error:
    """The error of who reads a Buffer too late."""
    return Error(
        Code.FAILED_PRECONDITION, "this buffer can be read no more: its call has ended, or it was released"
    )
