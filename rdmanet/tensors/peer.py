"""Another endpoint, whose memory this one reads and writes.

Theory
------
There is one `Peer` for each endpoint that this one has an address of, and at most one connection to it, which all
tasks share. It is made by the first operation that needs one, and made again after it was lost; an operation that was
under way then has failed, and is not tried again. The peer's own operations on our memory go by the connection that
the peer makes: who accepts a connection does not know who has made it, and who makes it knows whom it has reached.

An operation looks at its descriptors and arrays before anything is sent. Then it is one list of blocks (stream/
blocks.py), whatever it consists of. An array that lies in memory of `Endpoint.register` has a key of the device's
already; any other is registered for the operation.

Mostly there is nothing to find out: the descriptor's grant was used before, and the array lies in registered memory.
Then the fast path (_pyx/fastpath.pxi) has the list in one call, and where the device has executed a single block by
then, nothing is suspended. Whatever it does not know goes the general way, which also says what is wrong.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

from rdmanet._core import Blocks
from rdmanet.errors import RegionRevokedError, shown
from rdmanet.stream.blocks import new_list, numbers_of
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.tensors.arrays import bytes_of
from rdmanet.tensors.descriptor import Address, Descriptor, DescriptorError, of_another, short
from rdmanet.tensors.link import Dialled
from rdmanet.tensors.messages import NOTIFICATION_BYTES_MOST
from rdmanet.tensors.use import Use
from rdmanet.transport import create_rdma_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmanet.tensors.memory import Memory
    from rdmanet.tensors.use import Find

    Described = Descriptor | bytes | bytearray | memoryview

_WRITE: Final = 0  # enum ibv_wr_opcode
_READ: Final = 4
_REMOTE_WRITE: Final = 2  # enum ibv_access_flags
_REMOTE_READ: Final = 4
_ATOMIC_BYTES: Final = 8
_COUNTERS: Final = (
    "reads",
    "writes",
    "atomics",
    "bytes_read",
    "bytes_written",
    "notifications",
    "failed",
    "cancelled",
    "connections",
    "claims",
)


class Peer:
    """Another endpoint, as `Endpoint.connect` returns it.

    Each operation is awaited until it is done. When it has ended, in whatever way, no device touches the caller's
    memory any more; that holds for one that is cancelled, too, and for ``asyncio.timeout()``. It raises

    - DescriptorError if a descriptor is none, or of another endpoint's memory; PermissionError if it is not for this;
    - IndexError or ValueError if lengths do not fit; TypeError or BufferError if an array is none, or not contiguous;
    - RegionRevokedError if what is described has ended, before or meanwhile;
    - ConnectionError, TimeoutError or another OSError if the peer cannot be reached, or is lost.

    After an error or a cancellation the blocks of an operation may be done, or not, or in part.

    :ivar address: where it is
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: bytes,
        address: Address,
        find: Find,
        connecting: dict[str, Any],
    ) -> None:
        """
        :param endpoint: our own
        :param find: our registered memory that has so many bytes from this address on, and is to be written to or not
        :param connecting: arguments of create_rdma_connection()
        """
        self.address = address
        self._loop = loop
        self._ours = endpoint
        self._find = find
        self._connecting = connecting
        self._link: Dialled | None = None
        self._links: set[Dialled] = set()  # also those that are over, until the loop has told of it
        self._dialling: asyncio.Task[Dialled] | None = None
        self._is_closed = False
        self._counters = dict.fromkeys(_COUNTERS, 0)

    # -- operations --------------------------------------------------------------------------------------------

    async def read(self, descriptor: Described, into: Any) -> None:
        """RDMA READ what a descriptor says into an array of as many bytes.

        Where the device has read it at once, the loop turns only every so often.
        """
        blocks = self._begun(_READ, descriptor, into)
        if blocks is None:
            await self._move("read", _READ, [self._checked("read", "r", descriptor, into)])
        elif blocks.is_to_await:
            await self._await_rest(blocks, "read")

    async def write(self, array: Any, descriptor: Described, *, notify: bytes | None = None) -> None:
        """RDMA WRITE an array to where a descriptor says, which has as many bytes.

        When it returns, the bytes are in the peer's memory.

        :param notify: the peer's `Endpoint.notifications` gets this, after the bytes; at most 16 KiB
        """
        blocks = self._begun(_WRITE, descriptor, array) if notify is None else None
        if blocks is None:
            await self.write_many(((array, descriptor),), notify=notify)
        elif blocks.is_to_await:
            await self._await_rest(blocks, "write")

    async def read_many(self, blocks: Iterable[tuple[Described, Any]]) -> None:
        """The same for many pairs of a descriptor and an array, in any order.

        They are one list of chained requests, in which a block costs a fraction of what a `read` does.
        """
        pairs = list(blocks)
        if not await self._move_known("read", _READ, pairs):
            await self._move("read", _READ, [self._checked("read", "r", each, into) for each, into in pairs])

    async def write_many(
        self, blocks: Iterable[tuple[Any, Described]], *, notify: bytes | None = None
    ) -> None:
        """The same for many pairs of an array and a descriptor, in any order.

        :param notify: see `write`; the notification names the memory of the first block
        """
        if notify is not None and len(notify) > NOTIFICATION_BYTES_MOST:
            raise ValueError(
                f"write: a notification of {len(notify)} bytes: it has at most {NOTIFICATION_BYTES_MOST}; write what"
                " is longer"
            )
        pairs = [(each, array) for array, each in blocks]
        if notify is None and await self._move_known("write", _WRITE, pairs):
            return
        checked = [self._checked("write", "w", each, array) for each, array in pairs]
        if notify is not None and not (checked and checked[0][0].nbytes):
            raise ValueError("write: a notification is about a block that has bytes, and there is none")
        await self._move("write", _WRITE, checked, notify)

    async def read_rows(self, descriptor: Described, indices: Iterable[SupportsIndex], into: Any) -> None:
        """RDMA READ many rows of the array that a descriptor says: ``into[i]`` becomes row ``indices[i]``.

        :param indices: whole numbers; an array of 64-bit integers is the fastest
        :param into: as many rows as there are indices, of the same length as the peer's
        """
        described = self._described("read_rows", "r", descriptor)
        view = bytes_of(into, "read_rows", writable=True)
        numbers = numbers_of(indices)
        rows = len(described)
        row_bytes = described.nbytes // rows if rows else 0
        if view.nbytes != len(numbers) * row_bytes:
            raise ValueError(
                f"read_rows: {len(numbers)} rows of {row_bytes} bytes do not go into {view.nbytes} bytes"
            )
        if not row_bytes or not view.nbytes:
            if len(numbers):
                raise IndexError(f"read_rows: there are no rows in {described!r}")
            return
        checked = [(described, into, view)]
        del view  # which this frame would hold in an error's traceback
        await self._move("read", _READ, checked, rows=(row_bytes, rows, numbers))

    async def fetch_and_add(self, descriptor: Described, add: int) -> int:
        """Add to the 8 bytes that a descriptor says, modulo 2 ** 64; returns what was there before.

        It is one step for all who use atomic operations on these bytes over the same device (`DeviceAttr.atomic_cap`
        says whether the owner's processor is among them). The bytes are a number without sign, in the byte order of
        both machines, at a multiple of 8 in the owner's memory. If it is cancelled, the number may be changed all the
        same. See `OfferedMemory.fetch_and_add` for what else it raises.

        :param descriptor: of mode "a" or "rwa"; a slice of it, if that has more than 8 bytes
        :param add: it may be negative
        """
        return await self._atomic(OfferedMemory.fetch_and_add, descriptor, add)

    async def compare_and_swap(self, descriptor: Described, compare: int, swap: int) -> int:
        """Store ``swap`` in the 8 bytes that a descriptor says, if they equal ``compare``; returns what was there.

        What is said of `fetch_and_add` holds here, too. Cancelling it does, as well.
        """
        return await self._atomic(OfferedMemory.compare_and_swap, descriptor, compare, swap)

    async def _atomic(
        self, operation: Callable[..., Coroutine[Any, Any, int]], descriptor: Described, *numbers: int
    ) -> int:
        call = operation.__name__
        described = self._described(call, "a", descriptor)
        if described.nbytes != _ATOMIC_BYTES:
            raise ValueError(
                f"{call}: {described!r} has {described.nbytes} bytes: take a slice of {_ATOMIC_BYTES}"
            )
        self._counters["atomics"] += 1
        try:
            link = self._link
            if link is None or link.is_over or self._is_closed:
                link = await self._linked()
            remote = link.claimed(described.grant)
            if remote is None:
                remote = await link.claim(described.grant)
            return await operation(remote, described.offset, *numbers)
        except (OSError, asyncio.CancelledError) as exc:
            self._count_failure(exc)
            raise

    def statistics(self) -> dict[str, int]:
        """Counters since it was connected to first: operations, bytes, connections that were made, grants claimed."""
        link = self._link
        return self._counters | {"claims": self._counters["claims"] + (0 if link is None else link.claims)}

    async def close(self) -> None:
        """Close the connection, once nothing is under way by it. Operations after that raise ValueError."""
        self._is_closed = True
        dialling, self._dialling = self._dialling, None
        if dialling is not None:
            dialling.cancel()
            await asyncio.wait([dialling])
        links = list(self._links)
        for link in links:
            link.transport.abort()
        for link in links:
            await asyncio.shield(link.lost)

    # -- what they have in common ------------------------------------------------------------------------------

    def _described(self, call: str, needed: str, descriptor: Described) -> Descriptor:
        described = descriptor if isinstance(descriptor, Descriptor) else Descriptor.from_bytes(descriptor)
        if described.endpoint != self.address.endpoint:
            raise DescriptorError(
                f"{call}: the descriptor is of memory of {of_another(described.endpoint, self.address.endpoint)}"
            )
        if needed not in described.mode:
            raise PermissionError(f"{call}: {described!r} is not for this")
        return described

    def _checked(
        self, call: str, needed: str, descriptor: Described, array: Any
    ) -> tuple[Descriptor, Any, memoryview]:
        described = self._described(call, needed, descriptor)
        view = bytes_of(array, call, writable=needed == "r")
        if view.nbytes != described.nbytes:
            raise ValueError(
                f"{call}: {shown(array)} has {view.nbytes} bytes, and {described!r} {described.nbytes}"
            )
        return described, array, view

    def _begun(self, opcode: int, descriptor: Described, array: Any) -> Blocks | None:
        """A list of one block, on its way, or mostly done; None: it goes the general way."""
        link = self._link
        if link is None or (fast := link.fast) is None:
            return None
        blocks = fast.move(opcode, descriptor, array)
        if blocks is not None:
            counters = self._counters
            if opcode == _READ:
                counters["reads"] += 1
                counters["bytes_read"] += blocks.moved
            else:
                counters["writes"] += 1
                counters["bytes_written"] += blocks.moved
        return blocks

    async def _await_rest(self, blocks: Blocks, call: str) -> None:
        """Await what the fast path has just begun; or let the loop turn, for whatever else is ready."""
        if blocks.done:
            await asyncio.sleep(0)
            return
        link = self._link
        assert link is not None and link.fast is not None and link.fast.grant is not None
        try:
            use = self._used(link, blocks, [link.fast.grant], [link.fast.memory])
        except BaseException:
            link.transport.abort()  # it may be in flight, and nothing says that its memory is used
            raise
        await self._finish(link, blocks, use, call)

    async def _move_known(self, call: str, opcode: int, pairs: list[tuple[Described, Any]]) -> bool:
        """Move these blocks, if the fast path knows all of them; returns whether it did."""
        link = self._link
        if link is None or (fast := link.fast) is None or link.is_over:
            return False
        blocks = new_list(None, opcode)
        found = fast.fill(blocks, pairs)
        if found is None:
            return False
        self._counters[f"{call}s"] += 1
        await self._finish(link, blocks, self._used(link, blocks, *found), call)
        return True

    def _used(
        self, link: Dialled, blocks: Blocks, grants: Collection[bytes], memories: Collection[Memory]
    ) -> Use:
        """What is used of the peer's memory and of ours, until this list ends."""
        use = Use(link, self._find)
        try:
            for grant in grants:
                remote = link.claimed(grant)
                assert remote is not None
                use.hold(grant, remote)
            for memory in memories:
                use.keep(memory)
        except BaseException:
            use.close()
            raise
        blocks.close_after(use)
        return use

    async def _finish(self, link: Dialled, blocks: Blocks, use: Use, call: str) -> None:
        """Carry out what is left of a list, and count it."""
        moved = blocks.moved
        try:
            await link.carry_out(blocks, use.remotes.values())
        except (OSError, asyncio.CancelledError) as exc:
            self._count_failure(exc)
            raise
        finally:
            self._counters["bytes_read" if call == "read" else "bytes_written"] += blocks.moved - moved

    def _count_failure(self, error: BaseException) -> None:
        self._counters["failed" if isinstance(error, OSError) else "cancelled"] += 1

    async def _move(
        self,
        call: str,
        opcode: int,
        checked: list[tuple[Descriptor, Any, memoryview]],
        notify: bytes | None = None,
        rows: tuple[int, int, Any] | None = None,
    ) -> None:
        counters = self._counters
        counters[f"{call}s"] += 1
        try:
            link = self._link
            if link is None or link.is_over or self._is_closed:
                link = await self._linked()
            use = Use(link, self._find)
            blocks = new_list(None, opcode)
            try:
                for described in [each[0] for each in checked]:
                    if described.nbytes and described.grant not in use.remotes:
                        remote = link.claimed(described.grant)
                        if remote is None:
                            remote = await link.claim(described.grant)
                        use.hold(described.grant, remote)
                self._fill(blocks, use, call, opcode, checked, rows)
            except BaseException:
                use.close()
                raise
            blocks.close_after(use)
            try:
                await link.carry_out(blocks, use.remotes.values())
            finally:
                counters["bytes_read" if opcode == _READ else "bytes_written"] += blocks.moved
            if notify is not None:
                number = link.number_of(checked[0][0].grant)
                if number is None:
                    raise RegionRevokedError(
                        f"{call}: written, but the owner has taken its memory back since"
                    )
                await link.notify(number, notify)
                counters["notifications"] += 1
        except (OSError, asyncio.CancelledError) as exc:
            self._count_failure(exc)
            raise
        finally:
            checked.clear()  # an error's traceback has this frame, and would keep the caller's memory exported

    def _fill(
        self,
        blocks: Blocks,
        use: Use,
        call: str,
        opcode: int,
        checked: list[tuple[Descriptor, Any, memoryview]],
        rows: tuple[int, int, Any] | None,
    ) -> None:
        """Put all that was checked into a list of blocks. The peer's memory has been claimed."""
        right = _REMOTE_READ if opcode == _READ else _REMOTE_WRITE
        for at in range(len(checked)):  # no other names for arrays: a traceback has this frame, too
            described, offset = checked[at][0], checked[at][0].offset
            if not described.nbytes:
                continue
            remote = use.remotes[described.grant]
            remote.check(call, right, offset, described.nbytes)
            lkey, there = use.register(*checked[at][1:], opcode == _READ), remote.address + offset
            if rows is None:
                blocks.add(checked[at][2], lkey, there, remote.rkey)
            else:
                blocks.add_rows(checked[at][2], lkey, there, remote.rkey, *rows)

    # -- its connection ----------------------------------------------------------------------------------------

    async def connected(self) -> None:
        """Make the connection, if there is none."""
        if self._link is None or self._link.is_over:
            await self._linked()

    async def _linked(self) -> Dialled:
        """The connection, which is made if there is none. Those who wait for it share the attempt."""
        if self._is_closed:
            raise ValueError(f"{self!r} is closed")
        if self._dialling is None:
            self._dialling = self._loop.create_task(self._dial(), name="tensors connect")
            self._dialling.add_done_callback(self._dialled)
        dialling = self._dialling
        await asyncio.wait([dialling])
        if dialling.cancelled():
            raise ValueError(f"{self!r} was closed meanwhile")
        return dialling.result()

    def _dialled(self, dialling: asyncio.Task[Dialled]) -> None:
        if self._dialling is dialling:
            self._dialling = None
        if not dialling.cancelled():
            dialling.exception()  # all who have waited may be cancelled

    async def _dial(self) -> Dialled:
        address = self.address
        link: Dialled
        _, link = await create_rdma_connection(
            lambda: Dialled(self._loop, self._ours), address.host, address.port, **self._connecting
        )
        try:
            async with asyncio.timeout(self._connecting["connect_timeout"]):
                endpoint = await asyncio.shield(link.endpoint)
            if endpoint != address.endpoint:
                raise ConnectionRefusedError(
                    f"at {address.host}:{address.port} is now {of_another(endpoint, address.endpoint)}: it was started"
                    " anew; ask for its address again"
                )
        except BaseException:
            link.transport.abort()
            await asyncio.shield(link.lost)
            raise
        if self._link is not None:
            self._counters["claims"] += self._link.claims
        link.open_fast_path(endpoint, self._find)
        self._link = link
        self._links.add(link)
        link.lost.add_done_callback(functools.partial(self._lost, link))  # which keeps this object meanwhile
        self._counters["connections"] += 1
        return link

    def _lost(self, link: Dialled, _: object) -> None:
        self._links.discard(link)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "connected" if self._is_connected() else "not connected"
        return f"<Peer {short(self.address.endpoint)} at {self.address.host}:{self.address.port}, {state}>"

    def _is_connected(self) -> bool:
        return self._link is not None and not self._link.lost.done()
