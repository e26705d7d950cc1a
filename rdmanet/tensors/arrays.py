"""The bytes of arrays, where they are.

An array is anything with the buffer protocol, ``__array_interface__`` or ``__dlpack__`` (of memory that the processor
reaches): NumPy's, ``bytearray``, ``rdmanet.alloc()``, tensors of PyTorch. One request reaches contiguous memory, so an
array that is not C-contiguous is refused: a copy would not be the caller's array. One in the memory of a GPU is
refused, too (dmabuf.py). NumPy is imported for those alone that have no buffer protocol.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Final

from rdmanet.errors import shown

# Kinds of memory that the processor does not reach, by their numbers in DLPack.
_ELSEWHERE: Final = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI"}


def bytes_of(array: Any, call: str, *, writable: bool) -> memoryview:
    """The bytes of an array: a view of our own, which the caller cannot release.

    :raises TypeError: it is none, or read-only though it is to be written to; the text begins with `call`
    :raises BufferError: it is not C-contiguous
    """
    view = _view_of(array, call)
    if writable and view.readonly:
        raise TypeError(f"{call}: {shown(array)} is read-only")
    if not view.c_contiguous:
        raise BufferError(
            f"{call}: an array of the shape {view.shape} is not C-contiguous: give its contiguous parts, or a copy"
        )
    if view.ndim == 1 and view.format == "B":
        return view
    if not view.nbytes:
        return memoryview(bytearray() if writable else b"")
    try:
        return view.cast("B")
    except ValueError:  # it does not know all types of items
        return memoryview(_taken(array, call).reshape(-1).view("u1"))


def dtype_and_shape(array: Any, call: str) -> tuple[str, tuple[int, ...]] | tuple[None, None]:
    """The type of an array's items, as ``numpy.dtype.str`` has it, and its shape; None of what is plain bytes."""
    if not hasattr(array, "__array_interface__") and hasattr(array, "__dlpack__"):
        array = _taken(array, call)
    interface = getattr(array, "__array_interface__", None)
    if not isinstance(interface, dict):
        return None, None
    return interface["typestr"], tuple(interface["shape"])


def _view_of(array: Any, call: str) -> memoryview:
    try:
        return memoryview(array)
    except TypeError:
        pass
    except (BufferError, ValueError) as exc:  # of a type of items that has no format, say
        if not hasattr(array, "__array_interface__"):
            raise BufferError(f"{call}: {shown(array)}: {exc}") from None
    taken = _taken(array, call)
    if not taken.flags.c_contiguous:
        raise BufferError(
            f"{call}: an array of the shape {taken.shape} is not C-contiguous: give its contiguous parts, or a copy"
        )
    return memoryview(taken.reshape(-1).view("u1"))


def _refuse_other_devices(array: Any, call: str) -> None:
    where = "CUDA" if hasattr(array, "__cuda_array_interface__") else None
    if where is None and hasattr(array, "__dlpack_device__"):
        with contextlib.suppress(Exception):  # of an array without memory, say: NumPy asks again
            where = _ELSEWHERE.get(int(array.__dlpack_device__()[0]))
    if where is not None:
        raise TypeError(
            f"{call}: {type(array).__name__!r} is in a GPU's memory ({where}), which the processor does not reach:"
            " copy it to the processor's memory, or register a tensors.DmaBuf of it for peers"
        )


def _taken(array: Any, call: str) -> Any:
    """What has the memory of an array, as one of NumPy's."""
    _refuse_other_devices(array, call)
    if not hasattr(array, "__array_interface__") and not hasattr(array, "__dlpack__"):
        raise TypeError(f"{call}: {type(array).__name__!r} is no array, and has no buffer")
    numpy = importlib.import_module("numpy")
    try:
        return numpy.asarray(array) if hasattr(array, "__array_interface__") else numpy.from_dlpack(array)
    except Exception as exc:
        raise TypeError(f"{call}: {type(array).__name__!r} has no memory that NumPy can use: {exc}") from None
