"""What names a part of another process's memory, and an endpoint: small messages that travel by any channel. No I/O.

Theory
------
A descriptor says which endpoint has the memory, which grant of it this is, which bytes of the grant, and, of an array,
the type of its items and its shape. The grant is named by 128 random bits: who has them may use the memory, within the
mode, until the grant ends; nobody guesses them. No address and no key of a device is in it: the owner makes a key for
one connection, when the grant is first used there (link.py). So a descriptor is good on any device and any number of
hosts, and one that was copied is worth nothing when its grant has ended.

Nothing in it is trusted. What is read here is checked for its form. That its numbers are within the grant, and that its
mode is the grant's, the owner's device enforces, whatever the descriptor says. Both messages begin with the number of
their version, so that another one is told from rubbish.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import math
import re
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import msgspec

from rdmanet.errors import shown
from rdmanet.wire.remote import bounds

__all__ = ["Address", "AddressError", "Descriptor", "DescriptorError", "Mode"]

VERSION: Final = 1
ID_BYTES: Final = 16
BYTES_MOST: Final = 1024
"""Of an encoded descriptor, or address."""
DIMENSIONS_MOST: Final = 32
_BYTES_WITHIN: Final = 1 << 62

Mode = Literal["r", "w", "rw", "a", "rwa"]
Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=_BYTES_WITHIN)]
_DTYPE: Final = re.compile(r"[|<>](?:[biufcSVmM]|U)(\d{1,6})(?:\[\w{1,8}\])?\Z")
_HEX_SHOWN: Final = 8
_T = TypeVar("_T")


class DescriptorError(ValueError):
    """These bytes are no descriptor, or it is one of another version, or of another endpoint's memory."""


class AddressError(ValueError):
    """These bytes are no address of an endpoint, or one of another version."""


class _Head(msgspec.Struct, array_like=True):
    """What any version begins with."""

    version: int


class Descriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of another process's memory, as `Memory.describe` has encoded it.

    A slice of it describes some of its rows: those of the first dimension of an array, or bytes.

    :ivar version: of its form
    :ivar endpoint: whose memory it is: `Address.endpoint`
    :ivar grant: which grant it is of
    :ivar mode: what may be done with it: read "r", write "w", "rw", atomic operations "a", or "rwa"
    :ivar offset: where it begins within the grant, in bytes
    :ivar nbytes: how many bytes it is
    :ivar dtype: the type of an array's items, as ``numpy.dtype.str`` has it; None: they are bytes
    :ivar shape: of an array; None: it is none
    """

    version: int
    endpoint: Id
    grant: Id
    mode: Mode
    offset: _Count
    nbytes: _Count
    dtype: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=DIMENSIONS_MOST)] | None = None

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The descriptor that `Memory.describe` or bytes() has encoded.

        :raises DescriptorError: these bytes do not encode one
        """
        found = _decoded(data, cls, "a descriptor", DescriptorError)
        if found.offset + found.nbytes >= _BYTES_WITHIN:
            raise DescriptorError(
                f"{found.nbytes} bytes at {found.offset} are more than any memory has: this is no descriptor"
            )
        if (found.dtype is None) != (found.shape is None):
            raise DescriptorError(f"a descriptor of {found.dtype!r} and the shape {found.shape}")
        if found.dtype is not None and found.shape is not None:
            item = _DTYPE.match(found.dtype)
            if item is None:
                raise DescriptorError(
                    f"a descriptor of {shown(found.dtype)}, which is no plain type of items"
                )
            size = int(item[1]) * (4 if found.dtype[1] == "U" else 1)
            if math.prod(found.shape) * size != found.nbytes:
                raise DescriptorError(
                    f"an array of the shape {found.shape} and {found.dtype!r} does not have {found.nbytes} bytes"
                )
        return found

    def __bytes__(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def __len__(self) -> int:
        """How many rows it has."""
        if self.shape is None:
            return self.nbytes
        if not self.shape:
            raise TypeError("an array without dimensions has no rows")
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        """Some of its rows.

        :raises IndexError: they are not all in it
        :raises ValueError: the slice has a step
        """
        if not isinstance(rows, slice):
            raise TypeError(f"a descriptor takes a slice of rows, and not {shown(rows)}")
        count = len(self)
        start, stop = bounds(rows, count, "rows")
        row_bytes = self.nbytes // count if count else 0
        shape = None if self.shape is None else (stop - start, *self.shape[1:])
        return msgspec.structs.replace(
            self,
            offset=self.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
            shape=shape,
        )

    def __repr__(self) -> str:
        what = f"{self.nbytes} bytes" if self.shape is None else f"{self.dtype!r} {self.shape}"
        return f"<Descriptor of {what}, mode={self.mode!r}, of endpoint {short(self.endpoint)}>"


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an endpoint is, as `Endpoint.address` has encoded it.

    :ivar version: of its form
    :ivar endpoint: a random number that it has drawn, and that its descriptors have
    :ivar host: of its host, as the other side reaches it
    :ivar port: where it listens
    """

    version: int
    endpoint: Id
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The address that `Endpoint.address` has encoded.

        :raises AddressError: these bytes do not encode one
        """
        return _decoded(data, cls, "an address of an endpoint", AddressError)

    def __bytes__(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def __repr__(self) -> str:
        return f"<Address of endpoint {short(self.endpoint)} at {self.host}:{self.port}>"


def short(id_: bytes) -> str:
    """An endpoint's number, as errors show it."""
    return id_.hex()[:_HEX_SHOWN]


def of_another(endpoint: bytes, expected: bytes) -> str:
    """Why an endpoint is not the one that was meant."""
    return f"endpoint {short(endpoint)}, and not {short(expected)}"


def _decoded(data: Any, type_: type[_T], what: str, error: type[ValueError]) -> _T:
    try:
        size = memoryview(data).nbytes
    except TypeError:
        raise TypeError(f"{shown(data)} is not {what}: it is not bytes") from None
    if size > BYTES_MOST:
        raise error(f"{size} bytes are not {what}: none has more than {BYTES_MOST}")
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version == VERSION:
            return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise error(f"these {size} bytes are not {what}: {exc}") from None
    raise error(f"{what} of version {version}: this release reads version {VERSION}")
