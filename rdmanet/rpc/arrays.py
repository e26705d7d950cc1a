"""Buffers and arrays as arguments and results: how they are declared, what is sent, and how that is checked.

Theory
------
An array is sent as the type of its items, its shape, and its bytes in C order (messages.Array). The bytes are a buffer
like any other: in the message, or on loan. So a C-contiguous array is not copied where it goes by reference. Others are
copied into C order first.

The receiver gets an array of its own, which it may change. Before it takes memory for one, it checks that

    the type is one of ITEM_BYTES      numbers and booleans of a fixed size. No objects, no records, no long double
    the method's annotation allows it  NDArray[numpy.float32] is exactly that type; ndarray is any of them
    there are few enough dimensions    DIMENSIONS_MOST, as the wire format says
    the shape fits the length          the product of the dimensions and of the item's size is the number of bytes

NumPy is not imported here. Whoever annotates a method with numpy.ndarray has imported it.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from typing import Annotated, Any, Final

from rdmanet._core import REUSED_BYTES, unfilled
from rdmanet.rpc.buffer import Buffer, check_plain
from rdmanet.rpc.describe import BUFFER, Description
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.messages import Array, Lent

_SIZES: Final = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
ITEM_BYTES: Final = {
    f"{order}{kind}{size}": size
    for kind, sizes in _SIZES.items()
    for size in sizes
    for order in ("|" if size == 1 else "<>")
}
"""The types of items that may be sent, as ``__array_interface__`` names them, and their sizes."""
_BUFFERS: Final = (bytes, memoryview, Buffer)
_BYTES_MOST: Final = 1 << 53


class ArrayType:
    """What an annotation says about an array.

    :ivar dtype: the type of its items, a key of ITEM_BYTES; None: any of them
    """

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype

    def contiguous(self, value: Any, what: str) -> Any:
        """An array that the program hands over: itself, or a copy if it is not C-contiguous.

        :raises TypeError: it is none, one of another type, or more than an array; the text says where
        """
        check_plain(value, what)
        array = value if isinstance(value, _numpy().ndarray) else _taken_for_array(value, what)
        dtype = array.dtype.str
        if dtype not in ITEM_BYTES:
            raise TypeError(
                f"{what}: an array of {array.dtype} cannot be sent: its items are no plain numbers"
            )
        if self.dtype not in (None, dtype):
            raise TypeError(f"{what}: an array of {dtype!r}, where the annotation says {self.dtype!r}")
        return _numpy().asarray(array, order="C")

    def check(self, array: Array, nbytes: int, code: Code, what: str) -> None:
        """Check what a peer has sent.

        :param nbytes: how many bytes of data there are
        :raises Error: with this code; the text begins with `what`
        """
        dtype, shape = array.dtype, array.shape
        if dtype not in ITEM_BYTES:
            raise Error(code, f"{what}: an array of {dtype!r} is not accepted")
        if self.dtype not in (None, dtype):
            raise Error(code, f"{what}: an array of {dtype!r}, where {self.dtype!r} is expected")
        size = ITEM_BYTES[dtype]
        if math.prod(shape) * size != nbytes:
            raise Error(
                code, f"{what}: an array of the shape {shape} and {dtype!r} does not have {nbytes} bytes"
            )
        if math.prod(filter(None, shape)) * size >= _BYTES_MOST:  # of no items, but too large for NumPy
            raise Error(code, f"{what}: an array of the shape {shape} is too large")

    def empty(self, array: Array) -> Any:
        """Memory for an array that was checked."""
        numpy = _numpy()
        nbytes = math.prod(array.shape) * ITEM_BYTES[array.dtype]
        if nbytes < REUSED_BYTES:
            return numpy.empty(array.shape, array.dtype)
        return numpy.ndarray(array.shape, array.dtype, unfilled(nbytes))


# ---- Annotations ---------------------------------------------------------------------------------------------


def is_buffer(type_: Any) -> bool:
    """Whether the bytes of this type may go by reference."""
    return type_ in _BUFFERS or isinstance(type_, ArrayType)


def wire_type(type_: Any) -> Any:
    """What is decoded for a value of this type."""
    if isinstance(type_, ArrayType):
        return Array
    if type_ is bytes:
        return bytes | Lent
    return memoryview | Lent if type_ in _BUFFERS else type_


def bytes_in(type_: Any) -> Any:
    """The type of bytes that a type accepts: a union of it with others, or Any."""
    if typing.get_origin(type_) is Annotated:
        return bytes_in(typing.get_args(type_)[0])
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        return next((each for each in map(bytes_in, typing.get_args(type_)) if each is not bytes), bytes)
    return type_ if type_ in (memoryview, bytearray) else bytes


def described(type_: Any) -> Description | None:
    """The type as plain data (describe.py), if it is one of a buffer or an array."""
    if isinstance(type_, ArrayType):
        return ["array", type_.dtype or "any"]
    return BUFFER if type_ in _BUFFERS else None


def declared(annotation: Any, where: str) -> Any:
    """An annotation, or its `ArrayType` if it is one of an array.

    :raises TypeError: it is of arrays that cannot be sent; the text begins with `where`
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return annotation
    plain = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    plain = _unaliased(plain)
    if plain is numpy.ndarray:
        return ArrayType(None)
    if typing.get_origin(plain) is not numpy.ndarray:
        return annotation
    items = (*typing.get_args(typing.get_args(plain)[-1]), Any)[0]
    if items is Any:
        return ArrayType(None)
    try:
        dtype = numpy.dtype(items)
    except TypeError:
        dtype = None
    if dtype is None or dtype.type is not items or dtype.str not in ITEM_BYTES:
        name = getattr(items, "__name__", items)
        raise TypeError(f"{where}: arrays of {name} cannot be sent: name one plain type of number")
    return ArrayType(dtype.str)


def _unaliased(type_: Any) -> Any:
    """What a `type` statement's name stands for; from NumPy 2.5 on, NDArray is one, on Python 3.12 and newer."""
    while isinstance(alias := typing.get_origin(type_) or type_, _ALIAS):
        arguments = typing.get_args(type_)
        type_ = alias.__value__[arguments] if arguments else alias.__value__
    return type_


_ALIAS: Any = getattr(typing, "TypeAliasType", ())  # new in Python 3.12


# ---- Other libraries -----------------------------------------------------------------------------------------


def _taken_for_array(value: Any, what: str) -> Any:
    """What is not an array of NumPy, but has the memory of one."""
    try:
        if hasattr(value, "__array_interface__"):
            if value.__array_interface__.get("mask") is not None:  # which NumPy ignores
                raise TypeError("it has a mask")
            return _numpy().asarray(value)
        if hasattr(value, "__dlpack__"):
            return _numpy().from_dlpack(value)
    except Exception as exc:
        raise TypeError(f"{what}: {type(value).__name__!r} has no memory that NumPy can use: {exc}") from None
    raise TypeError(f"{what}: {type(value).__name__!r} is no array")


def _numpy() -> Any:
    return sys.modules["numpy"]
