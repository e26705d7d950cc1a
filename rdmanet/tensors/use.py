"""What a list of blocks uses until it ends: the peer's memory, and ours, which stays registered and alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdmanet._core import Registration, address_of
from rdmanet.tensors.messages import Why

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmanet.stream.peer_memory import OfferedMemory
    from rdmanet.tensors.link import Dialled
    from rdmanet.tensors.memory import Memory

    Find = Callable[[int, int, bool], Memory | None]


class Use:
    """What a list has until it ends: the peer's memory in use, and its own registered and alive.

    :ivar remotes: the peer's memory, by its grant
    """

    __slots__ = (
        "_find",
        "_lkey",
        "_memories",
        "_memory",
        "_regions",
        "_registrations",
        "_views",
        "link",
        "remotes",
    )

    def __init__(self, link: Dialled, find: Find) -> None:
        self.link = link
        self.remotes: dict[bytes, OfferedMemory] = {}
        self._regions = link.regions
        self._find = find
        self._registrations: list[Registration] = []
        self._memories: set[Memory] = set()
        self._memory: Memory | None = None  # the last one, and its key: blocks that follow are often in it
        self._lkey = 0
        self._views: list[memoryview] = []

    def hold(self, grant: bytes, remote: OfferedMemory) -> None:
        """From now on the peer's memory is in use: its owner waits until it is not, for some time."""
        if remote.revoked:
            raise self.link.refusal(Why.ENDED)
        self._regions.begin_use(remote._region)
        self.remotes[grant] = remote

    def keep(self, memory: Memory) -> None:
        """From now on memory of ours is in use."""
        if memory not in self._memories:
            memory.begin_use(self)
            self._memories.add(memory)

    def register(self, array: Any, view: memoryview, writable: bool) -> int:
        """The device's key to our memory."""
        self._views.append(view)
        address, nbytes = address_of(view), view.nbytes
        if self._memory is not None and self._memory.serves(address, nbytes, writable):
            return self._lkey
        engine = self._regions.engine
        memory = self._find(address, nbytes, writable)
        if memory is None:
            registration = engine.registrations.take(array, view)
            self._registrations.append(registration)
            return registration.lkey
        self.keep(memory)
        self._memory, self._lkey = memory, memory.registered.region_in(engine.pd).lkey
        return self._lkey

    def abort(self) -> None:
        """End the list, by the end of the connection."""
        self.link.transport.abort()

    def close(self) -> None:
        for registration in self._registrations:
            registration.close()
        for memory in self._memories:
            memory.end_use(self)
        for remote in self.remotes.values():
            self._regions.end_use(remote._region)
        self._registrations.clear()
        self._memories.clear()
        self._views.clear()
        self._memory = None
