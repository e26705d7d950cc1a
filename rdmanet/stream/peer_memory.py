"""Memory that the peer has offered on a connection.

An `OfferedMemory` is a `RemoteMemory` that belongs to an offer. Reading and writing it is one-sided: the peer's program
does not notice. Accesses of both sides to the same bytes at the same time are not ordered; the two programs have to
agree who may touch what when. `Regions.operate` (regions.py) posts an operation and awaits it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, SupportsIndex, TypeVar

from rdmanet.base import bodies  # noqa: F401  so that whoever has this module has all that imports msgspec
from rdmanet.errors import RegionRevokedError, shown
from rdmanet.stream.blocks import numbers_of
from rdmanet.wire.offers import RemoteRegion
from rdmanet.wire.remote import RemoteMemory

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from _typeshed import ReadableBuffer

    from rdmanet._core import Connection

_RDMA_WRITE = 0  # enum ibv_wr_opcode
_RDMA_READ = 4
_COMPARE_AND_SWAP = 5
_FETCH_AND_ADD = 6
_REMOTE_WRITE = 2  # enum ibv_access_flags
_REMOTE_READ = 4
_REMOTE_ATOMIC = 8
_NAMED = {_REMOTE_READ: "read", _REMOTE_WRITE: "write", _REMOTE_ATOMIC: "atomic"}
"""The rights, as offer(access=) calls them."""
_ATOMIC_BYTES = 8
_E = TypeVar("_E", bound=OSError)


class _Operator(Protocol):
    """What can carry out a one-sided operation: the regions of a connection."""

    def operate(
        self,
        remote: OfferedMemory,
        opcode: int,
        offset: int,
        buffer: Any,
        compare_add: int = 0,
        swap: int = 0,
    ) -> Coroutine[Any, Any, None]: ...

    def read_parts(self, parts: Sequence[Part], buffer: Any) -> Coroutine[Any, Any, None]: ...

    def operate_on_rows(
        self, remote: OfferedMemory, opcode: int, row_bytes: int, indices: Any, buffer: Any
    ) -> Coroutine[Any, Any, None]: ...

    def atomic(
        self, remote: OfferedMemory, opcode: int, offset: int, compare_add: int, swap: int
    ) -> Coroutine[Any, Any, int]: ...

    def check_atomics(self, call: str) -> None:
        """Raise OSError (EOPNOTSUPP) if the device has no atomic operations."""

    def name_peer(self, error: _E) -> _E:
        """The same error, with the peer's address in its text."""


class Posted(Protocol):
    """A work request other than a frame of the byte stream. It may wait in the regions' queue before it is posted."""

    def post(self, connection: Connection) -> bool:
        """Post it there; False if there is no room now."""

    def end(self, error: BaseException | None) -> None:
        """It has completed, or the connection is over."""

    def failure(self, status: int, vendor_err: int, qp_num: int) -> OSError:
        """The exception for its completion, which failed."""


class Part(NamedTuple):
    """A part of an offer, and where it goes."""

    remote: OfferedMemory
    offset: int
    here: int
    length: int


async def read_parts(parts: Sequence[Part], into: Any) -> None:
    """RDMA READ parts of offers of one connection into one memory, as one operation.

    :raises OSError: as for `OfferedMemory.read_into`
    """
    for part in parts:
        part.remote.check("read_parts", _REMOTE_READ, part.offset, part.length)
    await parts[0].remote._operator.read_parts(parts, into)


class OfferedMemory(RemoteMemory, frozen=True, eq=False):
    """A region of the peer's memory, with `name`, `length` in bytes and `access`, until it is revoked.

    Every operation raises RegionRevokedError once the peer has begun to revoke the region or the connection is gone,
    IndexError with the numbers when offset and length leave the region, and PermissionError when the region was not
    offered for it. These checks are local, and leave the connection alone. Cancelling an operation releases only its
    awaiter: what the device has begun runs to its end, and the buffer is kept until then. A long READ or WRITE goes in
    pieces (transfers.py), and the rest of them is not begun then.
    """

    _operator: _Operator
    _region: RemoteRegion

    @classmethod
    def of(cls, operator: _Operator, region: RemoteRegion) -> OfferedMemory:
        """The object for `region`, whose operations `operator` carries out."""
        offer = region.region
        return cls(offer.address, offer.length, offer.rkey, operator, region)

    @property
    def revoked(self) -> bool:
        """Whether the peer has revoked it, or the connection is gone."""
        return self._region.revoked

    @property
    def is_used(self) -> bool:
        """Whether operations of ours are under way, also those that nobody awaits any more."""
        return self._region.operations > 0

    @property
    def id(self) -> int:
        """The offer's number on its connection."""
        return self._region.region.id

    @property
    def name(self) -> str:
        """The name that the peer gave it."""
        return self._region.region.name

    @property
    def access(self) -> int:
        """The IBV_ACCESS_REMOTE_* flags of the offer."""
        return self._region.region.access

    async def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """RDMA READ `length` bytes (default: to the end) from `offset`.

        The peer has chosen the length of the region: if you do not trust it, give a `length`.

        :raises IndexError: the bytes are not within the region
        """
        if length is None:
            length = self.length - offset
        if length < 0:
            raise IndexError(f"read: {length} bytes at offset {offset} are not within {self!r}")
        self.check("read", _REMOTE_READ, offset, length)
        buffer = bytearray(length)
        await self._operator.operate(self, _RDMA_READ, offset, buffer)
        return bytes(buffer)

    async def read_into(self, buffer: bytearray | memoryview, offset: int = 0) -> int:
        """RDMA READ from `offset` directly into `buffer` until it is full; returns its length in bytes.

        Memory that is passed again as the same memoryview, or is of a region of the connection's domain, is not
        registered again.

        :raises TypeError: `buffer` is read-only
        """
        view = memoryview(buffer)
        if view.readonly:
            raise TypeError(f"read_into: {shown(buffer)} is read-only")
        length = view.nbytes
        self.check("read_into", _REMOTE_READ, offset, length)
        await self._operator.operate(self, _RDMA_READ, offset, buffer)
        return length

    async def read_rows(
        self, indices: Iterable[SupportsIndex], into: bytearray | memoryview | ReadableBuffer
    ) -> None:
        """RDMA READ many rows: ``into[i]`` becomes row ``indices[i]`` of this memory, an array of rows of that length.

        All of them are one operation, in which a row costs a fraction of what a `read_into` does. Rows of the same
        length follow each other in the region, from its beginning. They are read in any order. ``indices`` may be any
        whole numbers; an array of 64-bit integers is the fastest.

        :param into: contiguous; of one dimension, such as a bytearray, it is as many rows as there are indices
        :raises IndexError: an index is negative, or the region has no such row
        :raises TypeError: `into` is read-only, or an index is no whole number
        :raises ValueError: `into` does not have as many rows as there are indices
        """
        view = memoryview(into)
        if view.readonly:
            raise TypeError(f"read_rows: {shown(into)} is read-only")
        numbers = numbers_of(indices)
        count, nbytes = len(numbers), view.nbytes
        assert view.shape is not None
        if (nbytes % count if count else nbytes) or (view.ndim > 1 and view.shape[0] != count):
            raise ValueError(f"read_rows: an array of {view.shape} does not have {count} rows")
        self.check("read_rows", _REMOTE_READ, 0, 0)
        if nbytes:
            await self._operator.operate_on_rows(self, _RDMA_READ, nbytes // count, numbers, into)

    async def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """RDMA WRITE `data` to `offset`; when it returns, the bytes are in the peer's memory.

        As for `read_into`, memory that is passed again as the same memoryview is not registered again.
        """
        self.check("write", _REMOTE_WRITE, offset, memoryview(data).nbytes)
        await self._operator.operate(self, _RDMA_WRITE, offset, data)

    async def compare_and_swap(self, offset: int, compare: int, swap: int) -> int:
        """Store ``swap`` in the 8 bytes at ``offset`` if they equal ``compare``; returns what was there before.

        It is one step for all who use atomic operations on these bytes over the same device (`DeviceAttr.atomic_cap`
        says whether the owner's CPU is among them). The bytes are a number without sign, in the byte order of the
        machine, which must be the same on both sides. If it is cancelled, the number may be changed all the same.

        :raises ValueError: the bytes do not begin at a multiple of 8 in the owner's memory, or a number has more than
            64 bits or a sign
        :raises OSError: EOPNOTSUPP where the device has no atomic operations, as those of iWARP
        """
        for number in (compare, swap):
            if not 0 <= number < 1 << 64:
                raise ValueError(f"compare_and_swap: {number} is not a number of 64 bits without sign")
        self._check_atomic("compare_and_swap", offset)
        return await self._operator.atomic(self, _COMPARE_AND_SWAP, offset, compare, swap)

    async def fetch_and_add(self, offset: int, add: int) -> int:
        """Add to the 8 bytes at ``offset``, modulo 2 ** 64; returns what was there before. ``add`` may be negative.

        What is said of `compare_and_swap` holds here, too.

        :raises ValueError: the bytes do not begin at a multiple of 8 in the owner's memory
        :raises OSError: EOPNOTSUPP where the device has no atomic operations, as those of iWARP
        """
        self._check_atomic("fetch_and_add", offset)
        return await self._operator.atomic(self, _FETCH_AND_ADD, offset, index(add) % (1 << 64), 0)

    def _check_atomic(self, call: str, offset: int) -> None:
        self._operator.check_atomics(call)
        self.check(call, _REMOTE_ATOMIC, offset, _ATOMIC_BYTES)
        if (address := self.address + offset) % _ATOMIC_BYTES:
            raise ValueError(
                f"{call}: the bytes at offset {offset} of {self!r} are at address {address:#x}, which is not a multiple"
                f" of {_ATOMIC_BYTES}: use an offset with {address % _ATOMIC_BYTES} less, or have the owner offer"
                " memory that is aligned"
            )

    def check(self, call: str, needed: int, offset: int, length: int) -> None:
        """Raise what an operation of these rights on these bytes would."""
        if self.revoked:
            error = RegionRevokedError(errno.EACCES, f"{call}: the peer has revoked {self!r}")
            raise self._operator.name_peer(error)
        if not self.access & needed:
            lacks = f"its offer(access=) lacks {_NAMED[needed]!r}"
            text = f"{call}: the peer did not offer {self!r} for this: {lacks}"
            raise self._operator.name_peer(PermissionError(errno.EACCES, text))
        if offset < 0 or offset + length > self.length:
            raise IndexError(f"{call}: {length} bytes at offset {offset} are not within {self!r}")

    def __repr__(self) -> str:
        revoked = " revoked" if self.revoked else ""
        access = ", ".join(name for right, name in _NAMED.items() if self.access & right)
        return f"<OfferedMemory {self.name!r} id={self.id} {self.length} bytes, access={access!r}{revoked}>"
