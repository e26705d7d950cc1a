"""Memory that an endpoint has registered, and what of it is granted to others.

Theory
------
A grant is what one descriptor stands for: a part of the memory, a mode, and an end. Nothing of the device's belongs to
it until a peer claims it on a connection. Then that connection gets a key of its own to this part (stream/bindings.py):
a `Binding`. So one grant has as many keys as connections use it, and no key is good for more than the grant.

A grant ends when its lease does, when it is revoked, or with the memory. From then on nobody can claim it. The peers
that have a key have RETURN_S to let go, which their side of the connection does by itself as soon as nothing of theirs
is under way. Then the device invalidates the key, whatever the peer does; if it cannot, the connection ends. So when
`revoke` returns, nobody can touch the memory by that grant.

Operations of the endpoint's own use the registration, too, if their arrays lie in the memory. It is closed after them:
a device that finds it gone meanwhile ends the connection. Those that have not ended in SETTLE_S lose their connection.
"""

from __future__ import annotations

import asyncio
import errno
import math
import secrets
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from rdmanet._core import AccessFlags, address_of
from rdmanet.errors import shown
from rdmanet.stream.bindings import has_windows
from rdmanet.stream.options import REVOKE_TIMEOUT_S
from rdmanet.stream.registered import RegisteredMemory
from rdmanet.tensors.arrays import bytes_of, dtype_and_shape
from rdmanet.tensors.descriptor import ID_BYTES, VERSION, Descriptor, Mode
from rdmanet.tensors.dmabuf import DmaBuf, RegisteredDmaBuf

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmanet.stream.bindings import Binding, HeldOffer
    from rdmanet.stream.regions import Regions

RETURN_S: Final = 0.25
"""How long a peer has to let go of memory. One that runs takes much less than that."""
SETTLE_S: Final = 1.0
"""How long an operation has to end that is cancelled, or whose memory is closed."""
RIGHTS: Final[dict[str, AccessFlags]] = {
    "r": AccessFlags.REMOTE_READ,
    "w": AccessFlags.REMOTE_WRITE,
    "rw": AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE,
    "a": AccessFlags.REMOTE_ATOMIC,
    "rwa": AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC,
}


class Use(Protocol):
    """An operation of the endpoint's own."""

    def abort(self) -> None:
        """End it, by the end of its connection."""


class Grant:
    """What one descriptor lets others do.

    :ivar memory: of which it is a part: so many bytes from `offset` on
    """

    def __init__(
        self, memory: Memory, id_: bytes, mode: Mode, offset: int, nbytes: int, lease: float | None
    ) -> None:
        self.memory = memory
        self.mode = mode
        self._id = id_
        self._offset = offset
        self._nbytes = nbytes
        self._keys: dict[Binding, Regions] = {}
        self._ending: set[asyncio.Future[None]] = set()
        self._timer = None if lease is None else memory.loop.call_later(lease, self.end)

    def claim(self, regions: Regions) -> Binding:
        """Begin to make a key for one connection.

        :raises OSError: the memory cannot be registered there, or the connection is over
        """
        if "a" in self.mode:
            regions.check_atomics("describe()")
        registered = self.memory.registered
        if isinstance(registered, RegisteredDmaBuf) and not has_windows(regions.engine):
            raise OSError(
                errno.EOPNOTSUPP,
                "this device has no memory windows that confine a peer, and a dma-buf cannot be granted without",
            )
        binding = regions.bind(registered, RIGHTS[self.mode], REVOKE_TIMEOUT_S, self._offset, self._nbytes)
        self._keys[binding] = regions
        binding.over.add_done_callback(lambda _: self._keys.pop(binding, None))
        return binding

    def let_go(self, binding: Binding) -> None:
        """End one of its keys, unless that has begun."""
        regions = self._keys.pop(binding, None)
        if regions is not None and not binding.over.done() and regions.take_back(binding, RETURN_S):
            self._ending.add(binding.over)
            binding.over.add_done_callback(self._key_ended)

    def _key_ended(self, over: asyncio.Future[None]) -> None:
        self._ending.discard(over)
        if not self._ending:
            self.memory.ending.pop(self._id, None)

    def end(self) -> set[asyncio.Future[None]]:
        """From now on nobody can claim it. Returns what is done when nobody has a key any more."""
        self.memory.grants.pop(self._id, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for binding in list(self._keys):
            self.let_go(binding)
        if self._ending:
            self.memory.ending[self._id] = self
        return set(self._ending)


class Memory:
    """Registered memory of an `Endpoint`, from `Endpoint.register` until `close`: also ``async with``.

    Reads and writes of the endpoint's own, into arrays that lie in it, need no other registration.

    :ivar nbytes: its length in bytes
    :ivar dtype: the type of the array's items, as ``numpy.dtype.str`` has it; None: they are bytes
    :ivar shape: of the array; None: it is none
    """

    def __init__(
        self,
        array: Any,
        endpoint: bytes,
        grants: dict[bytes, Grant],
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[Memory], None],
    ) -> None:
        self.dtype: str | None = None
        self.shape: tuple[int, ...] | None = None
        self.address: int | None = None  # None: operations of our own do not reach it
        self.is_readonly = False
        if isinstance(array, DmaBuf):
            self.registered: RegisteredMemory = RegisteredDmaBuf(array)
            self.nbytes = self.registered.length
        else:
            self.dtype, self.shape = dtype_and_shape(array, "register()")
            view = bytes_of(array, "register()", writable=False)
            if not view.nbytes:
                raise ValueError("register(): the array has no bytes")
            self.nbytes = view.nbytes
            self.registered = RegisteredMemory(view)
            self.address = address_of(view)
            self.is_readonly = view.readonly
        self.grants = grants
        self.ending: dict[bytes, Grant] = {}  # that nobody can claim any more, while there are keys of theirs
        self.loop = loop
        self._endpoint = endpoint
        self._on_close = on_close
        self._uses: set[Use] = set()
        self._unused: asyncio.Future[None] = loop.create_future()
        self.is_closed = False
        self._closing: asyncio.Task[None] | None = None

    # -- for operations of our own ---------------------------------------------------------------------------

    def serves(self, address: int, nbytes: int, writable: bool) -> bool:
        """Whether its registration is for these bytes, and lets a device write to them."""
        if self.is_closed or self.address is None or (writable and self.is_readonly):
            return False
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def begin_use(self, use: Use) -> None:
        """An operation uses its registration, until `end_use`."""
        self._uses.add(use)

    def end_use(self, use: Use) -> None:
        """It has ended: no device touches the memory for it."""
        self._uses.discard(use)
        if self.is_closed and not self._uses and not self._unused.done():
            self._unused.set_result(None)

    # -- for others ------------------------------------------------------------------------------------------

    def describe(self, part: slice | None = None, *, mode: Mode = "r", lease: float | None = None) -> bytes:
        """Let whoever has the result read or write this memory. Send it to them by any channel.

        :param part: some rows of the array's first dimension, or some of the bytes; None: all of it
        :param mode: "r", "w", "rw", or with atomic operations "a" or "rwa", which not all devices have
        :param lease: after so many seconds it ends; None: when it is revoked, or the memory is closed
        :raises IndexError: the part is not within the array
        :raises ValueError: the mode is another, the lease is no positive number, or the memory is closed
        :raises TypeError: it is for writing, and the array is read-only
        """
        if self.is_closed:
            raise ValueError("describe(): this memory is closed")
        if mode not in RIGHTS:
            raise ValueError(f"describe(): mode {shown(mode)} is none of 'r', 'w', 'rw', 'a' and 'rwa'")
        if mode != "r" and self.is_readonly:
            raise TypeError(
                f"describe(): the array is read-only, so nobody else can have it by mode {mode!r}"
            )
        if lease is not None and not 0 < lease < math.inf:
            raise ValueError(
                f"describe(): a lease of {shown(lease)}: it is a positive number of seconds, or None"
            )
        id_ = secrets.token_bytes(ID_BYTES)
        whole = Descriptor(VERSION, self._endpoint, id_, mode, 0, self.nbytes, self.dtype, self.shape)
        given = whole if part is None else whole[part]
        self.grants[id_] = Grant(self, id_, mode, given.offset, given.nbytes, lease)
        return bytes(
            Descriptor(VERSION, self._endpoint, id_, mode, 0, given.nbytes, given.dtype, given.shape)
        )

    async def revoke(self, descriptor: bytes | Descriptor | None = None) -> None:
        """End what a descriptor stands for, or all that there is of this memory.

        When it returns, nobody can touch the memory by it. A peer that does not let go in a quarter of a second has its
        key taken, and with that its connection, if it used it. Cancelling ends only the wait. It
        waits, too, for the keys of what has ended before, by its lease, say.

        :raises DescriptorError: these bytes are no descriptor
        """
        if descriptor is None:
            grants = [grant for grant in self.grants.values() if grant.memory is self]
            grants += self.ending.values()
        else:
            if not isinstance(descriptor, Descriptor):
                descriptor = Descriptor.from_bytes(descriptor)
            found = self.grants.get(descriptor.grant) or self.ending.get(descriptor.grant)
            grants = [found] if found is not None and found.memory is self else []
        ending = set().union(*(grant.end() for grant in grants))
        if ending:
            await asyncio.wait(ending)

    def held(self) -> list[HeldOffer]:
        """Who has a key to it: an item for each connection and each grant that it has claimed."""
        return self.registered.offers()

    async def close(self) -> None:
        """Revoke all that is granted of it, and deregister it. Then its owner may resize or free it.

        Operations of this endpoint's own that use its registration have a second to end; then their connections end.
        Cancelling ends only the wait. A second call waits as the first one does.
        """
        if self._closing is None:
            self.is_closed = True
            self._closing = self.loop.create_task(self._close(), name="tensors deregister")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.revoke()
        while left := [binding.over for binding in self.registered.bindings if not binding.over.done()]:
            await asyncio.wait(left)  # of grants that had ended before
        if self._uses:
            timer = self.loop.call_later(SETTLE_S, self._abort_uses)
            await self._unused
            timer.cancel()
        self._on_close(self)
        self.registered.close()

    def _abort_uses(self) -> None:
        for use in list(self._uses):
            use.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        what = f"{self.nbytes} bytes" if self.shape is None else f"{self.dtype!r} {self.shape}"
        return f"<Memory of {what}{', closed' if self.is_closed else ''}>"
