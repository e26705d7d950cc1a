"""Memory of the peer, as an object.

An `OfferedMemory` is a `RemoteMemory` that the peer has offered on a connection. Reading and writing
it is one-sided: the peer's program does not notice. What another side does to the same bytes at the
same time is not ordered with it; who may touch what when is the two programs' agreement.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, Protocol

from rdmanet._core import MR, PD, AccessFlags, WROpcode
from rdmanet.errors import CompletionError, RegionRevokedError, completion_error
from rdmanet.offers import RemoteRegion
from rdmanet.remote import RemoteMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_RDMA_WRITE = 0  # enum ibv_wr_opcode
_RDMA_READ = 4
_REMOTE_WRITE = 2  # enum ibv_access_flags
_REMOTE_READ = 4


class _Operator(Protocol):
    """Whoever can carry out a one-sided operation: a transport."""

    def _operate(
        self, remote: OfferedMemory, opcode: int, offset: int, buffer: Any
    ) -> Coroutine[Any, Any, None]: ...


class Posted(Protocol):
    """A work request that is no frame of the byte stream, in the engine's log or before that in a transport's queue."""

    def post(self) -> bool:
        """False: there is no place for it now."""

    def end(self, error: BaseException | None) -> None:
        """It has completed, or the connection is over."""

    def failure(self, status: int, vendor_err: int, qp_num: int) -> OSError:
        """The exception for its completion, which failed."""


class _Poster(Protocol):
    """Whoever has a queue pair to post on, and its protection domain."""

    @property
    def _pd(self) -> PD: ...

    def _post_operation(
        self,
        operation: Operation,
        opcode: int,
        local_address: int,
        length: int,
        lkey: int,
        remote_address: int,
        rkey: int,
        /,
    ) -> bool: ...


class OfferedMemory(RemoteMemory, frozen=True, eq=False):
    """A region of the peer's memory: `name`, `length` in bytes, `access`, and until when.

    Every operation raises RegionRevokedError once the peer has begun to revoke the region or the
    connection is gone (locally; the connection lives on), IndexError with the numbers when offset
    and length leave the region, PermissionError when the region was not offered for it. Cancelling
    one detaches the waiter: the operation itself runs to its end, and its buffer is kept until then.
    """

    _operator: _Operator
    _region: RemoteRegion

    @classmethod
    def of(cls, operator: _Operator, region: RemoteRegion) -> OfferedMemory:
        """What `region` is to whoever may use it through `operator`."""
        offer = region.region
        return cls(offer.address, offer.length, offer.rkey, operator, region)

    @property
    def revoked(self) -> bool:
        """Whether the peer has taken it back, or the connection is gone."""
        return self._region.revoked

    @property
    def id(self) -> int:
        """The offer's number on its connection."""
        return self._region.region.id

    @property
    def name(self) -> str:
        """What the peer called it."""
        return self._region.region.name

    @property
    def access(self) -> int:
        """IBV_ACCESS_REMOTE_* flags it was offered with."""
        return self._region.region.access

    async def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """RDMA READ `length` bytes (default: to the end) from `offset`.

        How long the region is the peer has said: if it is not to be trusted, say how much you want at most.

        :raises IndexError: they are not inside
        """
        if length is None:
            length = self.length - offset
        if length < 0:
            raise IndexError(f"cannot read {length} bytes")
        self._check("read", _REMOTE_READ, offset, length)
        buffer = bytearray(length)
        await self._operator._operate(self, _RDMA_READ, offset, buffer)
        return bytes(buffer)

    async def read_into(self, buffer: bytearray | memoryview, offset: int = 0) -> int:
        """RDMA READ from `offset` straight into `buffer`, filling it; returns its length in bytes."""
        view = memoryview(buffer).cast("B")
        self._check("read_into", _REMOTE_READ, offset, len(view))
        await self._operator._operate(self, _RDMA_READ, offset, view)
        return len(view)

    async def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """RDMA WRITE `data` at `offset`; when it returns the bytes are in the peer's memory."""
        view = memoryview(data).cast("B")
        self._check("write", _REMOTE_WRITE, offset, len(view))
        await self._operator._operate(self, _RDMA_WRITE, offset, view)

    def _check(self, call: str, needed: int, offset: int, length: int) -> None:
        if self.revoked:
            raise RegionRevokedError(errno.EACCES, f"{call}: {self!r} is not offered any more")
        if not self.access & needed:
            raise PermissionError(errno.EACCES, f"{call}: {self!r} was not offered for this")
        if offset < 0 or offset + length > self.length:
            raise IndexError(f"{call}: {length} bytes at offset {offset} leave {self!r}")

    def __repr__(self) -> str:
        revoked = " revoked" if self.revoked else ""
        return (
            f"<OfferedMemory {self.name!r} id={self.id} {self.length} bytes access={self.access:#x}{revoked}>"
        )


class Operation:
    """A one-sided work request: its local memory lives here until it completes."""

    __slots__ = ("done", "opcode", "remote_address", "rkey", "buffer", "poster", "local", "on_end")

    def __init__(
        self,
        done: asyncio.Future[None],
        opcode: int,
        remote_address: int,
        rkey: int,
        buffer: Any,
        poster: _Poster,
    ) -> None:
        self.done = done
        self.opcode = opcode
        self.remote_address = remote_address
        self.rkey = rkey
        self.buffer = buffer
        self.poster = poster
        self.local: MR | None = None
        self.on_end: Callable[[], None] | None = None

    def map_local(self) -> None:
        """Register the local memory for the time of the operation."""
        if len(self.buffer):
            access = AccessFlags.LOCAL_WRITE if not memoryview(self.buffer).readonly else AccessFlags(0)
            self.local = self.poster._pd.reg_mr(self.buffer, access)

    def post(self) -> bool:
        local = self.local
        if local is None:
            return self.poster._post_operation(self, self.opcode, 0, 0, 0, self.remote_address, self.rkey)
        return self.poster._post_operation(
            self, self.opcode, local.address, len(local), local.lkey, self.remote_address, self.rkey
        )

    def failure(self, status: int, vendor_err: int, qp_num: int) -> CompletionError:
        """The exception for its completion, which failed."""
        remote = (self.remote_address, len(self.buffer), self.rkey)
        return completion_error(status, WROpcode(self.opcode).name, vendor_err, qp_num, remote)

    def end(self, error: BaseException | None) -> None:
        if self.local is not None:
            self.local.close()
            self.local = None
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        if not self.done.done() and not self.done.get_loop().is_closed():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
