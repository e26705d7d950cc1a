"""Buffers and arrays as arguments and results: how they are declared, what is sent, and how that is checked.

Theory
------
The bytes of an array that is an argument or a result itself are a buffer like any other (messages.Array): in the
message, or on loan. So a C-contiguous array is not copied where it goes by reference. Others are copied into C order
first. The bytes of arrays inside of lists, structs and so on are in the memory of their message (packing.py).
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Final

from rdmanet.rpc.array_types import ArrayType as ArrayType
from rdmanet.rpc.array_types import declared as declared
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.describe import BUFFER, Description
from rdmanet.rpc.hints import members
from rdmanet.rpc.item_types import ITEM_BYTES as ITEM_BYTES
from rdmanet.rpc.messages import Array, Lent

_BUFFERS: Final = (bytes, memoryview, Buffer)


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


def array_in(type_: Any) -> ArrayType | None:
    """The array that a type accepts: the type is a union of it and None."""
    found = (declared(each, "") for each in members(type_))
    return next((each for each in found if isinstance(each, ArrayType)), None)


def described(type_: Any) -> Description | None:
    """The type as plain data (describe.py), if it is one of a buffer or an array."""
    if isinstance(type_, ArrayType):
        return type_.description
    return BUFFER if type_ in _BUFFERS else None
