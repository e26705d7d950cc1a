"""One connection between two endpoints: claims of memory, its lists of blocks, and its end.

Theory
------
`Dialled` is the side that has made the connection, and `Served` the one that has accepted it (messages.py). A claim
names a grant. `Served` looks it up, has a key made for this connection (`Grant.claim`), and puts the memory on offer on
it, under the claim's number. `Dialled` keeps the offer, for all further operations by that grant, until the owner takes
it back. A connection can have 256 offers, so of those that have not been used for long, it lets go when there are
CLAIMS_MOST. The owner counts an offer until it has taken it back, so claims wait while RETURNING_MOST are on that way.

A list is executed at once as far as the device does that (_pyx/blocks.pxi); the task that awaits it lets the loop turn
once, and every so often. What is left goes on by the completions, in turns with other lists.

A list of blocks is awaited until no device touches its memory any more, also if it is cancelled. Then what is in flight
has SETTLE_S to end. If it has not, as when the peer's host is gone, the connection is aborted, which ends it by force.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from rdmanet._core import Blocks, FastPath
from rdmanet.credit import OtherVersionError
from rdmanet.errors import ProtocolError, RdmaError, RegionRevokedError
from rdmanet.stream.bindings import State
from rdmanet.stream.blocks import fast_path
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.tensors.descriptor import Descriptor
from rdmanet.tensors.memory import SETTLE_S
from rdmanet.tensors.messages import (
    VERSION,
    Claim,
    Framer,
    Hello,
    Message,
    Notify,
    Refused,
    Release,
    Why,
    packed,
)
from rdmanet.wire.offers import ALIVE_MAX

if TYPE_CHECKING:
    from rdmanet.stream.bindings import Binding
    from rdmanet.stream.regions import Regions
    from rdmanet.tensors.memory import Grant, Memory

logger = logging.getLogger("rdmanet.tensors")

CLAIMS_MOST: Final = 200
"""What a connection keeps claimed."""
RETURNING_MOST: Final = 32
"""What it has let go of, and the owner has yet to take back."""
KEYS_MOST: Final = 1024
"""Keys of one connection that the owner is making, keeps, or has yet to end: many more than a peer of ours needs, which
claims and lets go of no more than CLAIMS_MOST at a time."""


class Notification(NamedTuple):
    """What a peer has said with a write.

    :ivar memory: which has been written to
    """

    memory: Memory
    payload: bytes
    peer: Any
    """Its address."""


class Link(asyncio.Protocol):
    """What both sides have in common.

    :ivar endpoint: the peer's, as it has said; done with its Hello
    :ivar lost: done when the connection is over
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: bytes) -> None:
        self._loop = loop
        self._ours = endpoint
        self._framer = Framer()
        self._transport: RdmaTransport | None = None
        self._writable: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self.endpoint: asyncio.Future[bytes] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    @property
    def transport(self) -> RdmaTransport:
        assert self._transport is not None
        return self._transport

    @property
    def regions(self) -> Regions:
        """The memory on offer on the connection."""
        return self.transport._regions

    @property
    def is_over(self) -> bool:
        """Whether the connection ends or has ended: the device says so before the loop calls `connection_lost`.

        An operation that has failed may be told of it sooner than the transport.
        """
        return self.lost.done() or self.transport.is_closing() or self.regions.connection.broken

    def say(self, message: Message) -> None:
        if not self.lost.done():
            self.transport.write(packed(message))

    def lost_error(self) -> ConnectionResetError:
        """What an operation gets whose connection is gone."""
        why = self._error or self.regions.why_over
        error = ConnectionResetError(errno.ECONNRESET, f"the connection was lost: {why or 'it was closed'}")
        error.__cause__ = why
        return error

    def handle(self, message: Message) -> None:
        raise NotImplementedError

    # -- asyncio's callbacks ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(RdmaTransport, transport)
        self.say(Hello(VERSION, self._ours))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._framer.feed(data):
                if self.transport.is_closing():
                    return
                if not self.endpoint.done():
                    self._greeted(message)
                else:
                    self.handle(message)
        except ProtocolError as exc:
            logger.warning("%r: the peer broke the protocol: %s", self, exc)
            self._error = self._error or exc.with_traceback(None)
            if isinstance(exc, OtherVersionError):
                self.transport.close()  # our Hello is sent before that: the peer can say so, too
            else:
                self.transport.abort()

    def _greeted(self, message: Message) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError(f"the peer begins with a {type(message).__name__}, and not with a Hello")
        if message.version != VERSION:
            raise OtherVersionError(
                f"the peer speaks version {message.version} of this protocol, and not {VERSION}"
            )
        self.endpoint.set_result(message.endpoint)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._error = self._error or (None if exc is None else exc.with_traceback(None))
        self.resume_writing()
        if not self.endpoint.done():
            self.endpoint.set_exception(self.lost_error())
            self.endpoint.exception()  # whoever waits may be gone
        if not self.lost.done():
            self.lost.set_result(None)

    def __repr__(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"<{type(self).__name__} link with {peer}>"


class Served(Link):
    """The side whose memory is used.

    :param grants: by their numbers
    :param on_notified: is told of each notification
    :param on_over: is told when the connection is over
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: bytes,
        grants: dict[bytes, Grant],
        on_notified: Callable[[Served, Notification], None],
        links: set[Served],
    ) -> None:
        super().__init__(loop, endpoint)
        self._grants = grants
        self._on_notified = on_notified
        self._links = links
        self._claims: dict[int, tuple[Grant, Binding]] = {}
        self._keys = 0  # also those that are claimed no more, and have yet to end
        self._deaf_for: set[object] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._links.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._links.discard(self)
        self._claims.clear()

    def pause_writing(self) -> None:
        """Whoever does not read our answers is not heard either: they would pile up here."""
        super().pause_writing()
        self.be_deaf(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.hear_again(self)

    def be_deaf(self, reason: object) -> None:
        """Hear nothing of the peer, until each of these reasons is gone."""
        if not self._deaf_for:
            self.transport.pause_reading()
        self._deaf_for.add(reason)

    def hear_again(self, reason: object) -> None:
        """This is no reason any more."""
        if reason in self._deaf_for:
            self._deaf_for.remove(reason)
            if not self._deaf_for and not self.transport.is_closing():
                self.transport.resume_reading()

    def handle(self, message: Message) -> None:
        if isinstance(message, Notify):
            claim = self._claims.get(message.number)
            if claim is not None and "w" in claim[0].mode:  # otherwise it has ended since
                peer = self.transport.get_extra_info("peername")
                self._on_notified(self, Notification(claim[0].memory, message.payload, peer))
        elif isinstance(message, Claim):
            self._claimed(message)
        elif isinstance(message, Release):
            if (claim := self._claims.pop(message.number, None)) is not None:
                grant, binding = claim
                grant.let_go(binding)
        else:
            raise ProtocolError(f"a {type(message).__name__} from the side that made the connection")

    def _claimed(self, claim: Claim) -> None:
        number = claim.number
        if number in self._claims:
            raise ProtocolError(f"the peer claims by the number {number} twice")
        grant = self._grants.get(claim.grant)
        if grant is None:
            self.say(Refused(number, Why.ENDED))
            return
        if len(self._claims) >= ALIVE_MAX or self._keys >= KEYS_MOST:
            self.say(Refused(number, Why.TOO_MANY))
            return
        try:
            binding = grant.claim(self.regions)
        except (OSError, ValueError) as exc:  # no memory may be locked, say
            logger.warning("%r: memory cannot be put on offer: %s", self, exc)
            self.say(Refused(number, Why.FAILED))
            return
        self._claims[number] = grant, binding
        self._keys += 1
        binding.granted.add_done_callback(functools.partial(self._made, number, binding))
        binding.over.add_done_callback(functools.partial(self._ended, number, binding))

    def _made(self, number: int, binding: Binding, key: asyncio.Future[int]) -> None:
        if self.lost.done() or key.cancelled() or key.exception() is not None:
            return  # it is over, or will be
        if binding.state is not State.GRANTED:
            return  # its grant has ended since
        try:
            self.regions.announce(binding, str(number))
        except RdmaError as exc:
            logger.warning("%r: memory cannot be put on offer: %s", self, exc)
            grant, _ = self._claims[number]
            self._refused(number, binding, Why.TOO_MANY)
            grant.let_go(binding)

    def _ended(self, number: int, binding: Binding, _: object) -> None:
        self._keys -= 1
        self._refused(number, binding, Why.ENDED)

    def _refused(self, number: int, binding: Binding, why: Why) -> None:
        """A claim has ended. Of an offer that was never sent the peer hears only this; otherwise it knows already."""
        claim = self._claims.get(number)
        # Otherwise it was let go of, and the number may be another's.
        if claim is not None and claim[1] is binding:
            del self._claims[number]
            self.say(Refused(number, why))


class _Claimed:
    """A grant that was claimed, and the memory, once that is on offer."""

    __slots__ = ("answer", "awaited", "grant", "number", "remote")

    def __init__(self, number: int, grant: bytes, answer: asyncio.Future[OfferedMemory | Why]) -> None:
        self.number = number
        self.grant = grant
        self.answer = answer
        self.awaited = 0  # by so many, who are about to use it
        self.remote: OfferedMemory | None = None


class Dialled(Link):
    """The side that uses the other's memory.

    :ivar fast: the way of operations that have nothing to wait for; None before `open_fast_path`, and after the end
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: bytes) -> None:
        super().__init__(loop, endpoint)
        self._claims: dict[bytes, _Claimed] = {}  # by the grant; the least recently used first
        self._numbers: dict[int, _Claimed] = {}
        self._last_number = 0
        self._returning: set[OfferedMemory] = set()  # what was let go of, until the owner has taken it back
        self._returned: asyncio.Future[None] = loop.create_future()  # one of them was
        self._active: dict[Blocks, Collection[OfferedMemory]] = {}
        self.fast: FastPath | None = None
        self.claims = 0

    def open_fast_path(self, endpoint: bytes, find: Callable[[int, int, bool], Memory | None]) -> None:
        """The peer is this endpoint, and our registered memory is found so."""
        self.fast = fast_path(self.regions.connection, endpoint, Descriptor, self.claimed, find)

    # -- claims ----------------------------------------------------------------------------------------------

    def claimed(self, grant: bytes) -> OfferedMemory | None:
        """The memory of a grant that was claimed before, and is still on offer."""
        claimed = self._claims.pop(grant, None)
        if claimed is None:
            return None
        self._claims[grant] = claimed
        return claimed.remote

    async def claim(self, grant: bytes) -> OfferedMemory:
        """The memory of a grant.

        :raises RegionRevokedError: the grant has ended, or there never was one
        :raises RdmaError: there are too many of one side or the other, or the owner cannot put it on offer
        :raises ConnectionResetError: the connection is lost
        """
        while (claimed := self._claims.get(grant)) is None:
            if self.lost.done():
                raise self.lost_error()
            if len(self._returning) >= RETURNING_MOST:
                await asyncio.shield(self._returned)
                continue
            self._make_room()
            self._last_number = (self._last_number + 1) & 0xFFFF_FFFF
            claimed = _Claimed(self._last_number, grant, self._loop.create_future())
            self._claims[grant] = self._numbers[claimed.number] = claimed
            self.claims += 1
            self.say(Claim(claimed.number, grant))
        claimed.awaited += 1
        try:
            answer = await asyncio.shield(claimed.answer)
        finally:
            claimed.awaited -= 1
        if isinstance(answer, Why):
            raise self.refusal(answer)
        return answer

    def refusal(self, why: Why) -> OSError:
        """What an operation gets whose claim has ended like this."""
        if self.is_over:
            return self.lost_error()
        if why is Why.ENDED:
            return RegionRevokedError(
                errno.EACCES,
                "the owner does not grant this (any more): its lease is over, it was revoked, or its memory is closed",
            )
        if why is Why.TOO_MANY:
            return RdmaError(
                errno.ENOBUFS, "the owner has granted this connection all that it can have at a time"
            )
        return RdmaError(errno.EIO, "the owner cannot put this memory on offer; its log says why")

    def _make_room(self) -> None:
        if len(self._claims) < CLAIMS_MOST:
            return
        if self.fast is not None and self.fast.grant is not None:
            self.claimed(self.fast.grant)  # it was used last, without a word
        for claimed in self._claims.values():
            if claimed.remote is not None and not claimed.awaited and not claimed.remote.is_used:
                self._forget(claimed)
                self._returning.add(claimed.remote)
                self.say(Release(claimed.number))
                return
        raise RdmaError(
            errno.ENOBUFS,
            f"{len(self._claims)} descriptors of this peer's are in use at once: describe more memory by each of them,"
            " and take slices",
        )

    def _forget(self, claimed: _Claimed) -> None:
        self._numbers.pop(claimed.number, None)
        if self.fast is not None:
            self.fast.forget(claimed.grant)
        if self._claims.get(claimed.grant) is claimed:
            del self._claims[claimed.grant]

    def number_of(self, grant: bytes) -> int | None:
        """By which a grant is claimed now."""
        claimed = self._claims.get(grant)
        return None if claimed is None else claimed.number

    def handle(self, message: Message) -> None:
        if not isinstance(message, Refused):
            raise ProtocolError(f"a {type(message).__name__} from the side that accepted the connection")
        claimed = self._numbers.get(message.number)
        if claimed is not None and not claimed.answer.done():
            self._forget(claimed)
            claimed.answer.set_result(message.why)

    def region_offered(self, remote: OfferedMemory) -> None:
        claimed = self._numbers.get(int(remote.name)) if remote.name.isdecimal() else None
        if claimed is not None and not claimed.answer.done():  # else nobody has asked for it
            claimed.remote = remote
            claimed.answer.set_result(remote)

    def region_revoked(self, remote: OfferedMemory) -> None:
        self._has_returned(remote)
        for claimed in [each for each in self._claims.values() if each.remote is remote]:
            self._forget(claimed)
        for blocks, remotes in list(self._active.items()):
            if any(each is remote for each in remotes):
                blocks.stop(self.refusal(Why.ENDED))

    def _has_returned(self, *remotes: OfferedMemory) -> None:
        self._returning.difference_update(remotes)
        self._returned.set_result(None)
        self._returned = self._loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.fast = None  # it refers to us
        self._has_returned(*self._returning)
        claims, self._claims = self._claims, {}
        self._numbers.clear()
        for claimed in claims.values():
            if not claimed.answer.done():
                claimed.answer.set_result(Why.ENDED)  # of the connection: see refusal()

    # -- lists of blocks -------------------------------------------------------------------------------------

    async def carry_out(self, blocks: Blocks, remotes: Collection[OfferedMemory]) -> None:
        """Read or write a list. When this ends, however it does, no device touches its memory any more."""
        self._active[blocks] = remotes
        try:
            if any(remote.revoked for remote in remotes):  # while others were claimed
                blocks.stop(self.refusal(Why.ENDED))
            while not blocks.done:
                if self.regions.begin_at_once(blocks):
                    await asyncio.sleep(0)  # others on the loop have their turn
                else:
                    future = blocks.future = self._loop.create_future()
                    self.regions.begin_list(blocks)
                    await future
            error, blocks.error = blocks.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame
        finally:
            if not blocks.done:
                blocks.stop()
            if not blocks.done:
                await self._settled(blocks)
            del self._active[blocks]

    async def _settled(self, blocks: Blocks) -> None:
        """Wait until nothing of a list is in flight. The caller is cancelled already."""
        ended = blocks.future = self._loop.create_future()
        timer = self._loop.call_later(SETTLE_S, self.transport.abort)
        try:
            while not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            ended.exception()  # of what nobody awaits
        finally:
            timer.cancel()

    async def notify(self, number: int, payload: bytes) -> None:
        """Tell the owner; wait while it is slow to hear."""
        while self._writable is not None:
            await asyncio.shield(self._writable)
        if self.lost.done():
            raise self.lost_error()
        self.say(Notify(number, payload))
