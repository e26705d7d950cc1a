"""A program's memory, registered with each device that it is offered by: what `RdmaServer.register` returns.

A region belongs to a protection domain, and each device of a loop has one of its own. A server does not always know its
devices before its clients come. So this has one region for each domain that asks, made when it asks first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from rdmanet._core import MR, PD, AccessFlags, region_for_peers
from rdmanet.base.closable import Closable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from rdmanet.stream.bindings import Binding, HeldOffer


class RegisteredMemory(Closable):
    """Memory to offer to any number of peers, one after the other or at once, registered until ``close()``.

    ``async with writer.offer(memory)`` offers it, as ``RdmaTransport.offer()`` does. ``with`` closes it.
    """

    def __init__(self, buffer: ReadableBuffer) -> None:
        self._view: memoryview | None = memoryview(buffer)
        self._regions: dict[PD, MR] = {}
        self.bindings: WeakSet[Binding] = WeakSet()  # of regions.py

    @property
    def length(self) -> int:
        """Its length in bytes.

        :raises ValueError: it is closed
        """
        return self._memory().nbytes

    def offers(self) -> list[HeldOffer]:
        """Who has it: an item for each peer that it is on offer to, or that has yet to let go of it.

        What a peer reads or writes at the moment cannot be known: no processor of this host takes part.
        """
        return [binding.held() for binding in list(self.bindings) if not binding.over.done()]

    def region_in(self, pd: PD) -> MR:
        """Its region in this protection domain, which is made if there is none.

        :raises ValueError: it is closed
        :raises BufferError: it is not contiguous
        :raises OSError: it cannot be registered
        """
        self._memory()
        region = self._regions.get(pd)
        if region is None:
            region = self._regions[pd] = self._made_in(pd)
        return region

    def close(self) -> None:
        """Deregister it. From then on, its owner may resize or free it. A second call does nothing.

        :raises OSError: EBUSY while it is on offer, or while a peer has yet to let go of it. It stays registered
        """
        for pd in list(self._regions):
            self._regions[pd].close()
            del self._regions[pd]
        if self._view is not None:
            self._view.release()
            self._view = None

    def _made_in(self, pd: PD) -> MR:
        view = self._memory()
        access = AccessFlags.MW_BIND if view.readonly else AccessFlags.MW_BIND | AccessFlags.LOCAL_WRITE
        return region_for_peers(pd, view, access)

    def _memory(self) -> memoryview:
        if self._view is None:
            raise ValueError("this RegisteredMemory is closed")
        return self._view

    def __repr__(self) -> str:
        if self._view is None:
            return "<RegisteredMemory closed>"
        offers = self.offers()
        told = f"; on offer to {len(offers)}" if offers else ""
        return f"<RegisteredMemory of {self.length} bytes in {len(self._regions)} protection domains{told}>"
