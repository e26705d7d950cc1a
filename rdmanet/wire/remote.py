"""Where the peer's memory is: an address, a length and a key, and how to name the parts of it.

A `RemoteMemory` is what one side tells the other about a region: as 20 bytes, as msgpack, or inside any message of the
program. It is a value: it opens and holds nothing. Slicing it and naming its fields is only arithmetic. An operation on
the result touches that range of the peer's memory:

    remote[64:128]                              a range
    remote.array("<u8")[4]                      an element
    remote.struct(Header).sequence              a field of a ctypes structure or of a numpy dtype
    remote.struct_array(Entry)[7].key           a field of one of many

A range outside of the memory raises IndexError with the numbers. `unchecked` variants leave the check to the device
that owns the memory: there the operation fails, and the queue pair with it.

The two programs have to agree how long the memory stays registered, and who may touch which bytes when. This module is
pure: numbers in, numbers out. READs and WRITEs are made by peer_memory.py on a connection of the byte stream, and by
verbs_async/queues.py on a queue pair.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see bodies.py
import operator
import re
import struct
from collections.abc import Iterator
from typing import Any, Final, Self

import msgspec

from rdmanet.errors import shown

__all__ = ["RemoteArray", "RemoteMemory", "RemoteStruct"]

_FORM: Final = struct.Struct("!QQI")
_ADDRESSES: Final = 1 << 64


class RemoteMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of the peer's memory, and the key to it.

    :param address: where it begins, in the peer's address space
    :param length: its length in bytes
    :param rkey: the key of the region, or of the window
    :raises ValueError: a number is out of range; if msgspec decodes it, this is a ValidationError
    """

    address: int
    length: int
    rkey: int

    def __post_init__(self) -> None:
        if not 0 <= self.rkey < 1 << 32:
            raise ValueError(f"rkey {self.rkey} is not a number of 32 bits")
        if self.length < 0 or not 0 <= self.address <= _ADDRESSES - self.length:
            raise ValueError(f"{self.length} bytes at address {self.address:#x} are not in 64 bits")

    # ---- Its two forms on the wire ----

    def __bytes__(self) -> bytes:
        """20 bytes in network order: address, length, rkey."""
        return _FORM.pack(self.address, self.length, self.rkey)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The RemoteMemory that bytes() has encoded.

        :raises ValueError: these bytes do not encode one
        """
        if len(data) != _FORM.size:
            raise ValueError(f"a RemoteMemory has {_FORM.size} bytes, not {len(data)}")
        return cls(*_FORM.unpack(data))

    def to_msgpack(self) -> bytes:
        """[address, length, rkey] in msgpack. msgspec encodes it in the same way inside other messages."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_msgpack(cls, data: bytes | bytearray | memoryview) -> Self:
        """The RemoteMemory that to_msgpack() has encoded.

        :raises msgspec.DecodeError: these bytes do not encode one; this is a ValueError, too
        """
        return msgspec.msgpack.decode(data, type=cls)

    # ---- Parts of it ----

    @property
    def memory(self) -> RemoteMemory:
        """This object. Arrays and structures have this attribute, too."""
        return self

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: int | slice) -> RemoteMemory:
        """The bytes [start:stop], or the byte at an index. Negative numbers count from the end.

        :raises IndexError: they are not all inside
        :raises ValueError: the slice has a step, but one operation reaches only contiguous memory
        """
        start, stop = bounds(key, self.length, "bytes")
        return RemoteMemory(self.address + start, stop - start, self.rkey)

    def unchecked(self, offset: int, length: int) -> RemoteMemory:
        """The bytes [offset:offset + length], even if they are outside. Addresses are modulo 2 ** 64."""
        return RemoteMemory((self.address + offset) % _ADDRESSES, length, self.rkey)

    def array(self, item: Any, *, unchecked: bool = False) -> RemoteArray:
        """This memory as an array of as many items as fit.

        :param item: a dtype as a string ("<u8") or from numpy, or a ctypes type
        :param unchecked: do not check indices
        :raises ValueError: the items have no size, or the string is not a dtype
        :raises TypeError: item is something else
        """
        return RemoteArray(self, item, unchecked=unchecked)

    def struct(self, kind: Any, *, unchecked: bool = False) -> RemoteStruct:
        """The structure at the beginning of this memory. Its attributes are the fields.

        :param kind: a ctypes.Structure (or Union), or a numpy dtype with fields
        :param unchecked: do not check that it fits
        :raises IndexError: it does not fit
        :raises TypeError: kind is something else
        """
        return RemoteStruct(self, kind, unchecked=unchecked)

    def struct_array(self, kind: Any, *, unchecked: bool = False) -> RemoteArray:
        """This memory as an array of as many structures as fit.

        :param kind: a ctypes.Structure (or Union), or a numpy dtype with fields
        :param unchecked: do not check indices
        :raises TypeError: kind is something else
        """
        _fields(kind)
        return RemoteArray(self, kind, unchecked=unchecked)

    def __repr__(self) -> str:
        return f"<RemoteMemory {self.length} bytes at {self.address:#x}, rkey {self.rkey:#x}>"


class RemoteArray:
    """Items of one size, one after the other.

    An index gives an item: a RemoteStruct or RemoteArray if the item is a structure or an array, otherwise a
    RemoteMemory. A slice gives a RemoteArray.

    :ivar item: the type of the items: a dtype, or a ctypes type
    :ivar itemsize: the size of an item in bytes
    :ivar memory: the range of all items, a RemoteMemory
    """

    __slots__ = ("item", "itemsize", "memory", "_length", "_unchecked")

    def __init__(
        self, memory: RemoteMemory, item: Any, *, length: int | None = None, unchecked: bool = False
    ) -> None:
        self.item = item
        self.itemsize = _size(item)
        if self.itemsize == 0:
            raise ValueError(f"items of {shown(item)} have no size")
        self._length = memory.length // self.itemsize if length is None else length
        self.memory = memory.unchecked(0, self._length * self.itemsize)
        self._unchecked = unchecked

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | slice) -> Any:
        if self._unchecked and not isinstance(key, slice):
            start, stop = operator.index(key), operator.index(key) + 1
        else:
            start, stop = bounds(key, self._length, f"items of {self.itemsize} bytes")
        memory = self.memory.unchecked(start * self.itemsize, (stop - start) * self.itemsize)
        if isinstance(key, slice):
            return RemoteArray(memory, self.item, unchecked=self._unchecked)
        return _typed(memory, self.item, self._unchecked)

    def __iter__(self) -> Iterator[Any]:
        # By the length. Python would go on until an IndexError, which never comes if nothing is checked.
        return (self[index] for index in range(self._length))

    def __repr__(self) -> str:
        return f"<RemoteArray of {self._length} items of {self.itemsize} bytes in {self.memory!r}>"


class RemoteStruct:
    """A structure: each field is an attribute, and also an item, for names that are taken.

    A field is a RemoteStruct or RemoteArray if it is a structure or an array, otherwise a RemoteMemory.

    :ivar memory: the range of the whole structure, a RemoteMemory
    """

    __slots__ = ("memory", "_kind", "_unchecked")

    def __init__(self, memory: RemoteMemory, kind: Any, *, unchecked: bool = False) -> None:
        _fields(kind)
        size = _size(kind)
        if size > memory.length and not unchecked:
            raise IndexError(f"a structure of {size} bytes leaves {memory!r}")
        self.memory = memory.unchecked(0, size)
        self._kind = kind
        self._unchecked = unchecked

    def __getitem__(self, name: str) -> Any:
        offset, kind = _fields(self._kind)[name]
        return _typed(self.memory.unchecked(offset, _size(kind)), kind, self._unchecked)

    def __getattr__(self, name: str) -> Any:
        if name in RemoteStruct.__slots__:  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{self!r} has no field {name!r}", name=name, obj=self) from None

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *_fields(self._kind)]

    def __repr__(self) -> str:
        return f"<RemoteStruct of {', '.join(_fields(self._kind))} in {self.memory!r}>"


# ---- Bounds and layouts ------------------------------------------------------------------------------


def bounds(key: int | slice, length: int, what: str) -> tuple[int, int]:
    """The range [start, stop) that a key names within a length. Unlike a list's, a slice is not cut to fit.

    :raises IndexError: the range is not inside, or ends before it begins
    :raises ValueError: the slice has a step
    """
    if not isinstance(key, slice):
        index = operator.index(key)
        start = index + length if index < 0 else index
        if not 0 <= start < length:
            raise IndexError(f"index {index} is not within {length} {what}")
        return start, start + 1
    if key.step not in (None, 1):
        raise ValueError(f"a step of {key.step}: what one element reaches is contiguous")
    start = 0 if key.start is None else operator.index(key.start)
    stop = length if key.stop is None else operator.index(key.stop)
    start += length if start < 0 else 0
    stop += length if stop < 0 else 0
    if not 0 <= start <= stop <= length:
        raise IndexError(f"{start}:{stop} is not within {length} {what}")
    return start, stop


_DTYPE = r"[<>=|]?(?:[biufcVSm?M](\d+)|([?bBhHiIlLqQefd]))"
_CODE_SIZES = {"l": 8, "L": 8}  # numpy's, on the 64-bit machines that RDMA is on


def _size(item: Any) -> int:
    if isinstance(item, str):
        found = re.fullmatch(_DTYPE, item)
        if found is None:
            raise ValueError(f'{shown(item)} is not the name of a dtype, such as "<u8"')
        if found[1]:
            return int(found[1])
        return _CODE_SIZES.get(found[2]) or struct.calcsize("=" + found[2])
    size = getattr(item, "itemsize", None)
    if isinstance(size, int):
        return size
    import ctypes  # here, because few programs have it, and every connection loads this module

    try:
        return ctypes.sizeof(item)
    except TypeError:
        raise TypeError(f"{shown(item)} is neither a dtype nor a ctypes type") from None


def _fields(kind: Any) -> dict[str, tuple[int, Any]]:
    """The fields of a structure: {name: (offset, type)}."""
    import ctypes

    if not (isinstance(kind, type) and issubclass(kind, (ctypes.Structure, ctypes.Union))):
        fields = getattr(kind, "fields", None)
        if fields is not None:  # a dtype's
            return {name: (field[1], field[0]) for name, field in fields.items()}
        raise TypeError(f"{shown(kind)} is neither a ctypes structure nor a dtype with fields")
    found = {}
    for base in reversed(kind.__mro__):
        for name, type_, *bits in base.__dict__.get("_fields_", ()):
            if not bits:  # bits have no address
                found[name] = (getattr(kind, name).offset, type_)
        for name in base.__dict__.get("_anonymous_", ()):
            outer, type_ = found[name]
            for inner, (offset, inner_type) in _fields(type_).items():
                found.setdefault(inner, (outer + offset, inner_type))
    return found


def _typed(memory: RemoteMemory, kind: Any, unchecked: bool) -> Any:
    """The object for an item or field of this kind."""
    import ctypes

    if isinstance(kind, type) and issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return RemoteStruct(memory, kind, unchecked=unchecked)
    if isinstance(kind, type) and issubclass(kind, ctypes.Array):
        item: Any = kind  # the type stubs of ctypes do not declare its length and item type
        return RemoteArray(memory, item._type_, length=item._length_, unchecked=unchecked)
    if getattr(kind, "fields", None) is not None:
        return RemoteStruct(memory, kind, unchecked=unchecked)
    if (nested := getattr(kind, "subdtype", None)) is not None:  # a dtype's array: (item, shape)
        base, shape = nested
        for extent in reversed(shape[1:]):
            base = _Row(base, extent)
        return RemoteArray(memory, base, length=shape[0], unchecked=unchecked)
    return memory


class _Row:
    """An item that is itself an array, as in a dtype of more than one dimension."""

    fields = None

    def __init__(self, item: Any, extent: int) -> None:
        self.itemsize = _size(item) * extent
        self.subdtype = (item, (extent,))
