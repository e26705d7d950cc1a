"""What a one-sided operation has until it ends: a part in the peer's regions, and its own memory registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rdmanet._core import SGE, Blocks, Registration

if TYPE_CHECKING:
    from rdmanet._core import StreamEngine
    from rdmanet.stream.peer_memory import OfferedMemory, Part
    from rdmanet.wire.offers import RemoteRegion


class Owner(Protocol):
    """What is needed of the connection's ``Regions``."""

    @property
    def engine(self) -> StreamEngine: ...

    def begin_use(self, region: RemoteRegion) -> None: ...

    def end_use(self, region: RemoteRegion) -> None: ...


class Use:
    """What an operation has until it ends: a part in the peer's regions, and its own memory registered."""

    __slots__ = ("_regions", "_registration", "_remote", "_view")

    def __init__(self, regions: Owner, *remote: RemoteRegion) -> None:
        self._regions = regions
        self._remote: list[RemoteRegion] = []
        self._view: memoryview | None = None  # holds the memory
        self._registration: Registration | None = None
        try:
            for region in remote:
                regions.begin_use(region)
                self._remote.append(region)
        except BaseException:
            self.close()
            raise

    def register(self, buffer: Any) -> int:
        """Register a buffer; returns its length in bytes."""
        view = self._view = memoryview(buffer).cast("B")
        if length := len(view):
            self._registration = self._regions.engine.registrations.take(buffer, view)
        return length

    def part(self, offset: int, length: int) -> SGE:
        """A part of it, as a request names it."""
        assert self._view is not None and self._registration is not None
        return SGE(self._view, offset, length, lkey=self._registration.lkey)

    def add_rows(self, blocks: Blocks, remote: OfferedMemory, row_bytes: int, indices: Any) -> None:
        """Add the rows of the peer's region that `indices` name, and those here that they are for."""
        assert self._view is not None and self._registration is not None
        lkey, rows = self._registration.lkey, remote.length // row_bytes
        blocks.add_rows(self._view, lkey, remote.address, remote.rkey, row_bytes, rows, indices)

    def add_parts(self, blocks: Blocks, parts: Sequence[Part]) -> None:
        """Add parts of the peer's regions, and those here that they are for."""
        assert self._view is not None and self._registration is not None
        view, lkey = self._view, self._registration.lkey
        for remote, offset, here, length in parts:
            blocks.add(view[here : here + length], lkey, remote.address + offset, remote.rkey)

    def close(self) -> None:
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        finally:
            self._view = None
            for region in self._remote:
                self._regions.end_use(region)
