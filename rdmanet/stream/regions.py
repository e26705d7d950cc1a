"""The memory regions of a connection: those on offer to the peer, and those that the peer offers.

Theory
------
Three things come together here. ``Offers`` (pure) keeps track of the regions of both sides, and knows what the next
Credit frame has to say about them. A ``Binding`` (bindings.py) is one of our keys that the peer has, from BIND_MW to
LOCAL_INV. An ``Operation`` (_pyx/operation.pxi) is one of our RDMA READs or WRITEs, a ``Transfer`` (transfers.py) a
long one, in pieces, and ``Blocks`` (blocks.py) are many. Bindings and operations are work requests on the connection's
own queue pair, behind the frames of the stream. The queue pair has room for a few at a time; the others wait in a queue
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rdmanet import credit, errors
from rdmanet._core import MR, AccessFlags, AtomicCap, Blocks, Operation
from rdmanet.stream.bindings import Binding, HeldOffer, State, check_offerable, patience, region_of, rights_of
from rdmanet.stream.blocks import Lists, new_list
from rdmanet.stream.registered import RegisteredMemory
from rdmanet.stream.transfers import AT_ONCE_BYTES, Transfer, Transfers
from rdmanet.stream.uses import Use
from rdmanet.wire.offers import Offers, RemoteRegion

if TYPE_CHECKING:
    from rdmanet._core import StreamEngine
    from rdmanet.stream.connection import Connection
    from rdmanet.stream.loop_context import LoopContext
    from rdmanet.stream.peer_memory import OfferedMemory, Part, Posted


_CELLS_KEPT = 16
_RDMA_READ = 4  # enum ibv_wr_opcode
_E = TypeVar("_E", bound=OSError)


class Known(Protocol):
    """What get_extra_info() knows by name."""

    def get(self, name: str) -> Any: ...


class RegionsOwner(Protocol):
    """What the regions need of their connection: ``Reports`` has it."""

    @property
    def is_over(self) -> bool: ...

    @property
    def error(self) -> BaseException | None:
        """Why the connection is over."""

    @property
    def facts(self) -> Known: ...

    def cut_off(self, error: BaseException) -> None: ...

    def tell(self, name: str, argument: Any, /) -> None:
        """Call this method of the protocol, if there is one."""

    def listens_for(self, name: str) -> bool:
        """Whether the protocol has a method of this name."""

    def report(self, exc: BaseException, message: str) -> None: ...


class Regions:
    """The regions on offer on one connection, in both directions."""

    def __init__(self, connection: Connection, loop_context: LoopContext, owner: RegionsOwner) -> None:
        self.connection = connection
        self._loop_context = loop_context
        self._loop = loop_context.loop
        self._owner: RegionsOwner | None = owner  # until `disown`
        self._peer: tuple[object, ...] | None = None  # from then on; the peer's address
        self._offers = Offers()
        self._remote: dict[RemoteRegion, OfferedMemory] = {}
        self._bindings: set[Binding] = set()
        self._bindings_told: dict[int, Binding] = {}  # those that the peer knows of, by the offer's number
        self._cells: list[memoryview] = []  # for the answers of atomic operations
        self._has_atomics: bool | None = None
        # Work requests for which the queue pair had no room: those of bindings, which go first, and operations.
        self._bindings_waiting: deque[Posted] = deque()
        self._waiting: deque[Posted] = deque()
        self.transfers = Transfers(connection)
        self._lists = Lists(connection)
        self._reading: set[Blocks] = set()  # lists of `read_parts`
        self._read = 0  # bytes, by those that have ended

    @property
    def engine(self) -> StreamEngine:
        """The data engine that the connection is on."""
        return self.connection.engine

    # -- ours ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def offer(
        self, memory: object, access: AccessFlags | str, name: str, revoke_timeout: float
    ) -> AsyncIterator[credit.Region]:
        """See ``RdmaTransport.offer``."""
        rights = rights_of(access)
        timeout = patience(revoke_timeout)
        if rights & AccessFlags.REMOTE_ATOMIC:
            self.check_atomics("offer()")
        binding = self.bind(memory, rights, timeout)
        try:
            yield await self.announced(binding, name)
        finally:
            if self.take_back(binding, timeout):
                await asyncio.shield(binding.over)  # cancelling only ends the wait

    def bind(
        self,
        memory: object,
        rights: AccessFlags,
        patience_s: float,
        offset: int = 0,
        length: int | None = None,
    ) -> Binding:
        """Begin to make a key to this memory, or to a part of it, which may take so many seconds."""
        is_ours = False
        if isinstance(memory, MR):
            mr = memory
        elif isinstance(memory, RegisteredMemory):
            mr = memory.region_in(self.engine.pd)
        else:
            mr, is_ours = region_of(memory, rights, self.engine.pd), True
        if not is_ours:
            check_offerable(mr, rights, self.engine)
        part = mr.to_remote(offset, length)
        binding = Binding(self, mr, rights, self._loop, closes_region=is_ours, part=part)
        self._bindings.add(binding)
        if isinstance(memory, RegisteredMemory):
            memory.bindings.add(binding)
        binding.begin(patience_s)
        return binding

    async def announced(self, binding: Binding, name: str = "", most: int | None = None) -> credit.Region:
        """Wait for the key, and tell the peer of it. Whatever happens, `take_back` the binding then.

        :param most: as for `Offers.offer`
        """
        await binding.granted
        if binding.state is State.OVER:  # the connection has ended since
            raise self.name_peer(ConnectionResetError(errno.ECONNRESET, "the connection was closed"))
        return self.announce(binding, name, most)

    def announce(self, binding: Binding, name: str = "", most: int | None = None) -> credit.Region:
        """Tell the peer of a key that is granted."""
        key, part = binding.granted.result(), binding.part
        try:
            region = self._offers.offer(part.address, part.length, key, binding.rights, name, most)
        except ConnectionResetError as exc:
            self.name_peer(exc)
            raise
        binding.number = region.id
        self._bindings_told[region.id] = binding
        self.connection.credit_body_due()
        return region

    def take_back(self, binding: Binding, patience_s: float) -> bool:
        """Begin to take an offer back: the peer has so many seconds to let go. Nobody can use it when it is `over`.

        False: it is another process's, and this one cannot.
        """
        if self._loop_context.foreign:
            return False
        told = binding.number is not None and not self._offers.revoke(binding.number)
        if told:
            self.connection.credit_body_due()
        binding.leave(told, patience_s)
        return True

    @property
    def peer(self) -> tuple[object, ...] | None:
        """The peer's address, also when the connection is over."""
        return self._peer if self._owner is None else self._owner.facts.get("peername")

    def held(self) -> list[HeldOffer]:
        """What the peer has of our memory."""
        return [binding.held() for binding in list(self._bindings)]  # another thread may ask

    def stop_queue_pair(self) -> None:
        """Move the queue pair to ERR. From then on it executes no request of the peer."""
        qp = self.connection.qp
        if qp is not None and not qp.closed:
            with contextlib.suppress(OSError):  # a device that is gone executes nothing either
                qp.to_error()

    def binding_stuck(self, error: OSError) -> None:
        """A key could not be made or taken back in time."""
        if self._owner is not None and not self._owner.is_over:
            self._owner.cut_off(error)

    def binding_over(self, binding: Binding) -> None:
        """Forget a binding: nobody has its key any more."""
        self._bindings.discard(binding)
        if binding.number is not None and self._bindings_told.get(binding.number) is binding:
            del self._bindings_told[binding.number]

    # -- the peer's ----------------------------------------------------------------------------------------

    def credit_body(self, granted: int, room: int) -> tuple[bool, bytes]:
        """What the next Credit says, in at most ``room`` bytes, and whether there is more to say.

        That is news of direct placement first, then as much of regions as there is room for.
        """
        news, more = self.connection.placement_news() if self.connection.places else (None, False)
        if news is None:
            body = self._offers.next_credit_body(room, granted)
            return self._offers.pending, b"" if body is None else credit.pack_credit(body)
        placement = credit.Credit(granted, (), (), (), *news)
        room -= len(credit.pack_credit(placement)) - len(credit.pack_credit(credit.Credit(granted)))
        body = self._offers.next_credit_body(room, granted)
        if body is not None:
            placement = credit.Credit(granted, body.regions, body.revoked, body.acked, *news)
        return self._offers.pending or more, credit.pack_credit(placement)

    def credit_received(self, body: bytes, granted: int) -> None:
        """Take in what the peer's Credit says about regions and direct placement. Raises ProtocolError."""
        assert self._owner is not None  # no frame comes when the connection has been taken apart
        connection = self.connection
        unpacked = credit.unpack_credit(body, granted, connection.places, connection.grows)
        if unpacked.slot_bytes or unpacked.slots_from:
            connection.hear_slots(unpacked.slots_from, unpacked.slot_bytes)
        if connection.places:
            connection.hear_placement(unpacked.wants, unpacked.unwanted, unpacked.answered)
        news = self._offers.received(unpacked)
        for region_id in news.acked:
            if (binding := self._bindings_told.pop(region_id, None)) is not None:
                binding.acknowledged()
        if news.offered and self._owner.listens_for("region_offered"):  # else they would only take memory
            from rdmanet.stream.peer_memory import OfferedMemory  # it imports msgspec, see base/bodies.py

            for region in news.offered:
                remote = self._remote[region] = OfferedMemory.of(self, region)
                self._owner.tell("region_offered", remote)
        for region in news.revoked:
            if (known := self._remote.pop(region, None)) is not None:
                self._owner.tell("region_revoked", known)
        if self._offers.pending:
            self.connection.credit_body_due()

    async def operate(
        self,
        remote: OfferedMemory,
        opcode: int,
        offset: int,
        buffer: Any,
        compare_add: int = 0,
        swap: int = 0,
    ) -> None:
        """Execute one one-sided operation on a region that the peer offers; see OfferedMemory.

        If this is cancelled, what is posted goes on, and keeps its buffer until it has ended.
        """
        use = Use(self, remote._region)
        try:
            length = use.register(buffer)
            address, rkey, future = remote.address + offset, remote.rkey, self._loop.create_future()
            if length > AT_ONCE_BYTES:
                transfer = Transfer(future, opcode, use, length, address, rkey)
            else:
                transfer = None
                part = use.part(0, length) if length else ()
                operation = Operation.beside(future, opcode, part, address, rkey, compare_add, swap)
                # Not in the waiting coroutine: cancelling it must not free what the device may still touch.
                operation.close_after(use)
                if self._bindings_waiting or self._waiting or not operation.post(self.connection):
                    self._waiting.append(operation)
        except BaseException as exc:
            use.close()
            if isinstance(exc, OSError):
                self.name_peer(exc)
            raise
        if transfer is None:
            await future
            return
        self.transfers.begin(transfer)
        try:
            await future
        except asyncio.CancelledError:
            self.transfers.cancel(transfer)
            raise

    async def operate_on_rows(
        self, remote: OfferedMemory, opcode: int, row_bytes: int, indices: Any, buffer: Any
    ) -> None:
        """The same on the rows of a region that `indices` name (numbers_of), in one list; see OfferedMemory."""
        use = Use(self, remote._region)
        await self._execute(
            self._listed(use, opcode, buffer, lambda blocks: use.add_rows(blocks, remote, row_bytes, indices))
        )

    async def read_parts(self, parts: Sequence[Part], buffer: Any) -> None:
        """READ parts of the peer's regions, in one list; see `peer_memory.read_parts`."""
        use = Use(self, *{part.remote._region for part in parts})
        blocks = self._listed(use, _RDMA_READ, buffer, lambda blocks: use.add_parts(blocks, parts))
        self._reading.add(blocks)
        try:
            await self._execute(blocks)
        finally:
            self._reading.discard(blocks)
            self._read += blocks.moved

    def _listed(self, use: Use, opcode: int, buffer: Any, add: Callable[[Blocks], None]) -> Blocks:
        """A list of one-sided operations on a buffer. `add` adds them; the list closes `use` when it ends."""
        blocks = new_list(self._loop.create_future(), opcode)
        try:
            use.register(buffer)
            add(blocks)
        except BaseException as exc:
            use.close()
            if isinstance(exc, OSError):
                self.name_peer(exc)
            raise
        blocks.close_after(use)
        return blocks

    async def _execute(self, blocks: Blocks) -> None:
        future = blocks.future
        self.begin_list(blocks)
        try:
            await future
        except asyncio.CancelledError:
            blocks.stop()
            raise

    @property
    def moved(self) -> int:
        """How many bytes long operations and `read_parts` have moved; of a cancelled one, until then."""
        return self.transfers.moved + self._read + sum(blocks.moved for blocks in self._reading)

    def begin_at_once(self, blocks: Blocks) -> bool:
        """Read or write what of a list can be at once: see `Blocks.begin`. If False, `begin_list` goes on."""
        return not (self._bindings_waiting or self._waiting) and self._lists.begin_at_once(blocks)

    def begin_list(self, blocks: Blocks) -> None:
        """Read or write what is in a list. Its future is told of the end."""
        self._lists.begin(blocks)

    async def atomic(
        self, remote: OfferedMemory, opcode: int, offset: int, compare_add: int, swap: int
    ) -> int:
        """The same for an atomic operation; returns the number that was there before."""
        # The same memoryview each time is registered once. A cancelled operation keeps its own.
        cell = self._cells.pop() if self._cells else memoryview(bytearray(8))
        await self.operate(remote, opcode, offset, cell, compare_add, swap)
        before = int.from_bytes(cell, sys.byteorder)
        if len(self._cells) < _CELLS_KEPT:
            self._cells.append(cell)
        return before

    def check_atomics(self, call: str) -> None:
        """Raise OSError (EOPNOTSUPP) if the device has no atomic operations."""
        context = self.engine.pd.context
        if self._has_atomics is None:
            self._has_atomics = context.query_device().atomic_cap is not AtomicCap.NONE
        if not self._has_atomics:
            raise OSError(
                errno.EOPNOTSUPP,
                f"{call}: device {context.name} has no atomic operations: let one side alone change the number, or use"
                " messages",
            )

    def name_peer(self, error: _E) -> _E:
        """The same error, with the peer's address in its text."""
        errors.name_peer(error, self._peer if self._owner is None else self._owner.facts.get("peername"))
        return error

    def begin_use(self, region: RemoteRegion) -> None:
        """An operation on a region of the peer's begins."""
        self._offers.begin(region)

    def end_use(self, region: RemoteRegion) -> None:
        """It has ended."""
        self._offers.end(region)
        if self._offers.pending:
            self.connection.credit_body_due()

    # -- work requests -------------------------------------------------------------------------------------

    def submit(self, request: Posted) -> None:
        """Post what begins or ends a binding, ahead of all operations that wait, and behind others of its kind.

        :raises OSError: the connection is over
        """
        if self._bindings_waiting or not request.post(self.connection):
            self._bindings_waiting.append(request)

    def operation_done(self, operation: Posted) -> None:
        """A work request has completed, so there is room for another one."""
        operation.end(None)
        self.post_waiting()

    def post_waiting(self) -> None:
        """Post what has waited for room, as much as there is room for."""
        self.transfers.go_on()  # first: they leave room for the others
        while waiting := self._bindings_waiting or self._waiting:
            first = waiting[0]
            try:
                if not first.post(self.connection):
                    return
            except OSError as exc:
                waiting.popleft()
                first.end(exc)
            else:
                waiting.popleft()
        self._lists.go_on()

    def operation_lost(self, operation: Posted) -> None:
        """A work request will not complete: the queue pair is gone."""
        operation.end(self._why_over())

    @property
    def why_over(self) -> BaseException | None:
        """The error by which the connection has ended, as far as it is known here."""
        return None if self._owner is None else self._owner.error

    def _why_over(self) -> BaseException:
        closed = ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        return self.why_over or self.name_peer(closed)

    # -- the end -------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """The connection is over: no region is on offer, and new operations fail on this side."""
        self._offers.lost()

    def end_bindings(self) -> None:
        """Give back all keys, before the queue pair is destroyed: rxe waits fifty seconds for bound windows."""
        bindings, self._bindings = self._bindings, set()
        if bindings:
            self.stop_queue_pair()
        for binding in bindings:
            try:
                binding.lost()
            except OSError as exc:
                assert self._owner is not None  # which disowns us after this
                self._owner.report(exc, "rdmanet: a peer's key could not be given back")

    def close(self) -> None:
        """The queue pair is destroyed: end what waited for it."""
        waiting = [*self._bindings_waiting, *self._waiting]
        self._bindings_waiting.clear()
        self._waiting.clear()
        for operation in waiting:
            self.operation_lost(operation)
        self.transfers.close(self._why_over())
        self._lists.close(self._why_over())
        self._offers.lost()
        self._remote.clear()
        self._cells.clear()

    def disown(self) -> None:
        """Forget the owner, which refers to us."""
        if self._owner is not None:
            self._peer = self._owner.facts.get("peername")
        self._owner = None
