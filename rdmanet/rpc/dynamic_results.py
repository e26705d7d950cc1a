"""Arrays within results, for a client without the service's class: found by the server's schema.

A value is decoded as plain data, in which msgpack's value of an array tells nothing of itself. `Finder` goes through it
by its described type, and puts an `ArrayWithin` in place of each. The bytes of those that are wanted are read with the
result, and no others: a call may be made to see what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from rdmanet.rpc.describe import Description, Structs
from rdmanet.rpc.item_types import item_bytes
from rdmanet.rpc.messages import Placed
from rdmanet.rpc.packing import Block, Packed, Unpacking


class ArrayWithin:
    """An array within a result.

    :ivar placed: its type of items and its shape
    :ivar nbytes: its length
    :ivar where: the keys, fields and numbers of items on the way to it, with dots between them; "" if it is all
    :ivar data: its bytes, if they are wanted: filled when the call has ended
    """

    __slots__ = ("data", "nbytes", "placed", "where")

    def __init__(self, placed: Placed, nbytes: int, where: str) -> None:
        self.placed = placed
        self.nbytes = nbytes
        self.where = where
        self.data: memoryview | None = None


class Reading(Unpacking):
    """A result whose arrays are read as far as they are wanted.

    :param wants: says whether an array is
    """

    def __init__(self, packed: Packed, wants: Callable[[Placed], bool]) -> None:
        super().__init__(packed)
        self._wants = wants

    def found(self, placed: Placed, where: str) -> ArrayWithin:
        """There is an array at this place of the value.

        :raises ValueError: it cannot be
        """
        try:
            nbytes = math.prod(placed.shape) * item_bytes(placed.dtype)
        except RecursionError:
            raise ValueError("an array of records that are nested too deep") from None
        array = ArrayWithin(placed, nbytes, where)
        if isinstance(placed.place, bytes):
            if len(placed.place) != nbytes:
                raise ValueError(
                    f"an array of the shape {placed.shape} does not have {len(placed.place)} bytes"
                )
            array.data = memoryview(placed.place)
            return array
        self._claim(placed.place, nbytes)
        if nbytes == 0:
            array.data = memoryview(b"")
        elif self._wants(placed):
            self._places.check(placed.place, nbytes)
            block = Block(placed.place, nbytes)
            block.used = nbytes
            self.blocks.append(block)
            array.data = memoryview(block.memory)
        return array


class Finder:
    """Goes through values of described types.

    :param found: gives what is put in place of an array, of which it gets what has come, and where
    """

    def __init__(self, structs: Structs, found: Callable[[Placed, str], Any]) -> None:
        self._structs = structs
        self._found = found

    def __call__(self, value: Any, type_: Description, where: str = "") -> Any:
        """The value with that in place of its arrays. What does not fit its type is left as it is.

        :raises ValueError: what has come for an array is none
        """
        type_ = without_limits(type_)
        kind, *parts = [type_] if isinstance(type_, str) else type_
        if kind == "array":
            try:
                placed = msgspec.convert(value, Placed)
            except msgspec.ValidationError as exc:
                raise ValueError(f"what has come for an array is none: {exc}") from None
            return self._found(placed, where)
        if kind == "list" and isinstance(value, list):
            return [self(item, parts[0], _at(where, index)) for index, item in enumerate(value)]
        if kind == "tuple" and isinstance(value, list) and len(value) == len(parts):
            return [self(item, parts[index], _at(where, index)) for index, item in enumerate(value)]
        if kind == "dict" and isinstance(value, dict):
            return {key: self(item, parts[1], _at(where, key)) for key, item in value.items()}
        if kind == "struct":
            return self._struct(value, parts[0], where)
        if kind == "union":
            fitting = [each for each in map(without_limits, parts) if self._may_be(value, each)]
            return self(value, fitting[0], where) if len(fitting) == 1 else value
        return value

    def _struct(self, value: Any, name: str, where: str) -> Any:
        form, tag, _, fields = self._structs[name]
        if form == "map" and isinstance(value, dict):
            known = {field: type_ for field, type_, *_ in fields}
            return {f: self(v, known[f], _at(where, f)) if f in known else v for f, v in value.items()}
        if form == "map" or not isinstance(value, list):
            return value
        first = 0 if tag is None else 1
        found = [
            self(item, type_, _at(where, field))
            for item, (field, type_, *_) in zip(value[first:], fields, strict=False)
        ]
        return value[:first] + found + value[first + len(found) :]

    def _may_be(self, value: Any, type_: Description) -> bool:
        """Whether it looks like one of a type that can have arrays in it."""
        if isinstance(type_, str):
            return False
        kind, *parts = type_
        if kind == "array":
            return isinstance(value, list) and len(value) == 3 and isinstance(value[1], list)
        if kind != "struct":
            return isinstance(value, {"list": list, "tuple": list, "dict": dict}.get(kind, ()))
        form, tag, *_ = self._structs[parts[0]]
        if form == "map":
            return isinstance(value, dict) and (tag is None or value.get(tag[0]) == tag[1])
        return isinstance(value, list) and (tag is None or value[:1] == [tag[1]])


def _at(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def without_limits(type_: Description) -> Description:
    """A type without msgspec's constraints."""
    is_within = not isinstance(type_, str) and type_[0] == "within"
    return without_limits(type_[1]) if is_within else type_
