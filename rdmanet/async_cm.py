"""The connection manager for programs that `await`: clients, listeners, and the phases of a connection.

    async with AsyncCMID() as id:                       # a client
        await id.resolve(("192.0.2.7", 7471))
        qp = id.create_qp(pd, cq)                       # pd and cq are of id.context
        reply = await id.connect(b"hello")

    async with AsyncCMListener(("192.0.2.7", 7471)) as listener:
        async for id in listener:                       # a server: id.private_data is b"hello..."
            qp = id.create_qp(pd, cq)
            ...                                         # post the first receives
            await id.accept(b"welcome")

Theory
------
Every step of the connection manager is answered by an event on the identifier's channel. An `AsyncCMChannel`
reads the channel whenever it is readable, and gives each event to its `AsyncCMID`, where it waits in order; a
phase waits for the events that end it. So no event is lost while nobody looks, and a phase that fails raises what
the event says.

An identifier that is made without a channel has one of its own. A connection that came to a listener is moved
to one of its own before anybody sees it: it outlives the listener, and nobody else's events hold it up.

**Cancelling** resolve, connect or accept cannot call the step back, so all that can be done with the identifier
after that is to close it, which ends the attempt. Waiting for a request, or for the end of a connection, can be
cancelled and begun again at will.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Self

from rdmanet import log_rate
from rdmanet._core import (
    CMID,
    PD,
    SRQ,
    CMEvent,
    CMEventChannel,
    CMEventType,
    Context,
    Library,
    PortSpace,
    QPCap,
    QPInitAttr,
    QPType,
)
from rdmanet.async_queues import AsyncCQ, AsyncQP
from rdmanet.closing import Closing
from rdmanet.errors import cm_error
from rdmanet.notifier import Future, Home, Notifier, current_notifier, wake

logger = logging.getLogger("rdmanet")

__all__ = ["AsyncCMChannel", "AsyncCMID", "AsyncCMListener"]

_Address = tuple[str, int] | tuple[str, int, int, int]

_FAILURES = frozenset(
    {
        CMEventType.ADDR_ERROR,
        CMEventType.ROUTE_ERROR,
        CMEventType.CONNECT_ERROR,
        CMEventType.UNREACHABLE,
        CMEventType.REJECTED,
        CMEventType.DISCONNECTED,
        CMEventType.DEVICE_REMOVAL,
    }
)

# REJECTED as well: all that the kernel says when the peer closes before it knows that the connection stands.
_ENDS = frozenset({CMEventType.DISCONNECTED, CMEventType.DEVICE_REMOVAL, CMEventType.REJECTED})


def _milliseconds(timeout: float) -> int:
    """Of seconds, as librdmacm takes them: an int of C, at least 1."""
    if not timeout >= 0:
        raise ValueError(f"a timeout of {timeout} seconds")
    return max(1, int(min(timeout * 1000, 2**31 - 1)))


class AsyncCMChannel(Closing):
    """An event channel that is read by an event loop; it gives each event to the AsyncCMID that it is for.

    :param library: of the devices; by default the embedded device's
    :param notifier: the loop; by default the one that runs
    """

    def __init__(self, library: Library | None = None, *, notifier: Notifier | None = None) -> None:
        self.notifier = current_notifier() if notifier is None else notifier
        self.home = Home()
        self.channel = CMEventChannel(library or Library.embedded())
        self._ids: dict[CMID, AsyncCMID | AsyncCMListener] = {}
        self._fd = self.channel.fd
        try:
            self.notifier.add_reader(self._fd, self._readable)
        except BaseException:
            self.channel.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.channel.closed

    def _readable(self) -> None:
        """All events that are there; it may be none."""
        while not self.channel.closed:
            event = self.channel.get_event()
            if event is None:
                return
            owner = self._ids.get(event.listen_id if event.listen_id is not None else event.id)
            if owner is not None:
                owner._event(event)
            elif event.type is CMEventType.CONNECT_REQUEST and event.id is not None:
                event.id.close()  # refuses it: who listened has gone

    def close(self) -> None:
        """Stop reading, and free the channel.

        :raises OSError: EBUSY while identifiers are open on it
        """
        if self.channel.closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.notifier.remove_reader(self._fd)
        try:
            self.channel.close()
        except OSError:
            self.notifier.add_reader(self._fd, self._readable)
            raise

    def __repr__(self) -> str:
        return f"<AsyncCMChannel of {self.channel!r}, {len(self._ids)} identifiers>"


class _Events:
    """Events that wait to be taken, and who waits for them."""

    def __init__(self, channel: AsyncCMChannel) -> None:
        self.notifier = channel.notifier
        self.home = channel.home
        self.events: collections.deque[CMEvent] = collections.deque()
        self.waiting: list[Future] = []

    def put(self, event: CMEvent) -> None:
        self.events.append(event)
        self.tell()

    def tell(self) -> None:
        wake(self.waiting)

    @property
    def awaited(self) -> bool:
        return not all(future.done() for future in self.waiting)

    async def more(self) -> None:
        """Until there may be one more, or none ever."""
        self.waiting = [future for future in self.waiting if not future.done()]
        future = self.notifier.create_future()
        self.waiting.append(future)
        await future


def _context(owner: AsyncCMID | AsyncCMListener) -> Context:
    context = owner.id.context
    if context is None:
        raise ValueError(f"{owner!r}: its address has led to no device yet")
    return context


class AsyncCMID(Closing):
    """An identifier of the connection manager: one connection, step by step.

    Cancelling a step (resolve, connect, accept) does not call it back: all that can be done with the identifier then is
    to close it, which ends the attempt. Waiting for an event, or for the end, can be cancelled and begun again.

    :param channel: that its events come by; by default one of its own
    :param library: of that channel; by default the embedded device's
    :param notifier: the loop of that channel; by default the one that runs
    :param ps: PortSpace.TCP for connections, UDP for datagrams
    :raises RuntimeError: no loop runs that is known
    """

    def __init__(
        self,
        channel: AsyncCMChannel | None = None,
        *,
        library: Library | None = None,
        notifier: Notifier | None = None,
        ps: PortSpace = PortSpace.TCP,
    ) -> None:
        own = channel is None
        if channel is None:
            channel = AsyncCMChannel(library, notifier=notifier)
        try:
            self._begin(channel, channel.channel.create_id(ps), b"")
        except BaseException:
            if own:
                channel.close()
            raise
        self._own_channel = own

    def _begin(self, channel: AsyncCMChannel, id: CMID, private_data: bytes) -> None:
        self.id = id
        self.private_data = private_data
        """What the peer sent along: with its request, with its answer, or with its refusal."""
        self.qp: AsyncQP | None = None
        self._channel = channel
        self._own_channel = False
        self._events = _Events(channel)
        self._phase: str | None = None  # that was begun and has not ended
        self._end: CMEvent | None = None  # of the connection
        self._parting = False  # it was us who asked for that
        channel._ids[id] = self

    @classmethod
    def _requested(cls, channel: AsyncCMChannel, event: CMEvent) -> AsyncCMID:
        assert event.id is not None
        self = cls.__new__(cls)
        self._begin(channel, event.id, event.private_data)
        return self

    @property
    def channel(self) -> AsyncCMChannel:
        """That its events come by."""
        return self._channel

    @property
    def context(self) -> Context:
        """The device.

        :raises ValueError: there is none until an address is resolved
        """
        return _context(self)

    @property
    def local_addr(self) -> _Address | None:
        """(ip, port), or (ip, port, flowinfo, scope_id); None until it is bound or resolved."""
        return self.id.local_addr

    @property
    def peer_addr(self) -> _Address | None:
        """The same of the other side."""
        return self.id.peer_addr

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.id.closed

    # -- events --

    def _event(self, event: CMEvent) -> None:
        if event.type is CMEventType.DISCONNECTED and not self._parting:
            # The peer waits for the answer, a minute and more, before it takes the connection for ended.
            with contextlib.suppress(OSError):
                self.id.disconnect()
        if event.type in _ENDS:
            self._end = event
        self._events.put(event)

    async def event(self) -> CMEvent:
        """The next event that no phase has taken. Cancelling loses none.

        :raises ValueError: the identifier is closed
        """
        events = self._events
        events.home.check(self)
        while not events.events:
            if self.id.closed:
                raise ValueError("this AsyncCMID is closed")
            await events.more()
        return events.events.popleft()

    @contextlib.contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        self._events.home.check(self)
        if self._phase is not None:
            raise ValueError(f"{self!r}: {self._phase} was not finished; close it")
        self._phase = name
        try:
            yield
        except Exception:
            self._phase = None
            raise
        self._phase = None  # and not when it was cancelled

    async def _until(self, wanted: CMEventType) -> CMEvent:
        while True:
            event = await self.event()
            if event.type is wanted:
                return event
            if event.type in _FAILURES:
                self.private_data = event.private_data
                raise event.error() or cm_error(event.type.name, event.status)

    # -- phases of a client --

    async def resolve_addr(
        self, address: _Address, *, source: _Address | None = None, timeout: float = 2.0
    ) -> None:
        """Find the device that leads to an address.

        :param timeout: in seconds; inf is as long as can be said
        :raises OSError: none does, or no answer in time
        :raises ValueError: the timeout is negative
        """
        with self._in_phase("resolve_addr"):
            self.id.resolve_addr(source, address, _milliseconds(timeout))
            await self._until(CMEventType.ADDR_RESOLVED)

    async def resolve_route(self, *, timeout: float = 2.0) -> None:
        """Find the way there; after resolve_addr().

        :param timeout: in seconds
        :raises OSError: there is none, or no answer in time
        """
        with self._in_phase("resolve_route"):
            self.id.resolve_route(_milliseconds(timeout))
            await self._until(CMEventType.ROUTE_RESOLVED)

    async def resolve(
        self, address: _Address, *, source: _Address | None = None, timeout: float = 2.0
    ) -> None:
        """resolve_addr() and resolve_route().

        :param timeout: of each, in seconds
        :raises OSError: as of those
        """
        await self.resolve_addr(address, source=source, timeout=timeout)
        await self.resolve_route(timeout=timeout)

    def create_qp(
        self,
        pd: PD,
        cq: AsyncCQ,
        cap: QPCap | None = None,
        *,
        recv_cq: AsyncCQ | None = None,
        qp_type: QPType = QPType.RC,
        srq: SRQ | None = None,
    ) -> AsyncQP:
        """This connection's queue pair; receives can be posted at once. close() closes it."""
        recv_cq = recv_cq or cq
        qp = self.id.create_qp(pd, QPInitAttr(cq.cq, recv_cq.cq, cap or QPCap(), qp_type, False, srq))
        try:
            self.qp = AsyncQP(qp, cq, recv_cq)
        except BaseException:
            qp.close()
            raise
        return self.qp

    async def connect(
        self,
        private_data: bytes = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        retry_count: int = 7,
        rnr_retry_count: int = 7,
        qp_num: int = 0,
    ) -> bytes:
        """Ask for a connection; returns the private data of the peer's answer.

        :param private_data: 56 bytes at most; the peer sees it with its request
        :param responder_resources: READs and atomics that the peer may have in flight to us
        :param initiator_depth: READs and atomics that we may have in flight to the peer
        :raises ConnectionRefusedError: nobody listens, or the peer rejects it: its private_data is there
        :raises TimeoutError: there is no answer
        """
        with self._in_phase("connect"):
            self.id.connect(
                private_data,
                responder_resources=responder_resources,
                initiator_depth=initiator_depth,
                retry_count=retry_count,
                rnr_retry_count=rnr_retry_count,
                qp_num=qp_num,
            )
            event = await self._until(CMEventType.ESTABLISHED)
        self.private_data = event.private_data
        return event.private_data

    # -- phases of a server --

    async def accept(
        self,
        private_data: bytes = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        rnr_retry_count: int = 7,
        qp_num: int = 0,
    ) -> None:
        """Accept a request, and wait until the connection stands.

        :param private_data: 196 bytes at most; for the peer
        :raises OSError: the peer has gone meanwhile
        """
        with self._in_phase("accept"):
            self.id.accept(
                private_data,
                responder_resources=responder_resources,
                initiator_depth=initiator_depth,
                rnr_retry_count=rnr_retry_count,
                qp_num=qp_num,
            )
            await self._until(CMEventType.ESTABLISHED)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse a request, and close.

        :param private_data: 148 bytes at most; for the peer
        """
        self.id.reject(private_data)
        self.close()

    # -- the end of a connection --

    async def disconnected(self) -> None:
        """Wait until the connection has ended, by either side: requests have then completed, or do so as flushed.

        :raises ValueError: the identifier is closed, or was so meanwhile
        """
        self._events.home.check(self)
        while self._end is None:
            if self.id.closed:
                raise ValueError("this AsyncCMID is closed")
            await self._events.more()

    async def disconnect(self) -> None:
        """End the connection, and wait until it has: the queue pair's requests complete as flushed.

        :raises OSError: there is none
        """
        if self._end is None:
            self._parting = True
            self.id.disconnect()
        await self.disconnected()

    def migrate(self, channel: AsyncCMChannel | None = None) -> None:
        """Have events come by another channel, by default a new one of its own; those not read yet come along.

        Of another loop's channel the identifier is that loop's from now on: nobody may wait for it here.

        :raises ValueError: somebody waits for it here, or the channel is of another library
        """
        own = channel is None
        events = self._events
        if channel is not None and channel.notifier is not events.notifier and events.awaited:
            raise ValueError(f"{self!r} is awaited on the loop that it should leave")
        if channel is None:
            channel = AsyncCMChannel(self.id.library, notifier=self._channel.notifier)
        try:
            self.id.migrate(channel.channel)
        except BaseException:
            if own:
                channel.close()
            raise
        old, old_is_ours = self._channel, self._own_channel
        del old._ids[self.id]
        channel._ids[self.id] = self
        self._channel, self._own_channel = channel, own
        events.notifier, events.home = channel.notifier, channel.home
        if old_is_ours:
            old.close()

    def close(self) -> None:
        """Destroy the queue pair, then the identifier, and its channel if that is its own. It ends what is under way.

        Who waits is told: operations fail with CompletionResetError, phases with ValueError.
        """
        if self.id.closed:
            return
        if self.qp is not None:
            self.qp.close()
        self._channel._ids.pop(self.id, None)
        self.id.close()
        self._events.events.clear()
        self._events.tell()
        if self._own_channel:
            self._channel.close()

    def __repr__(self) -> str:
        return f"<AsyncCMID of {self.id!r}>"


class AsyncCMListener(Closing):
    """Listens at an address, from the moment it is made; requests wait until they are taken.

    :param address: (ip, port); port 0 takes a free one, and local_addr says which
    :param backlog: how many requests may wait; those that come when so many do are rejected
    :raises ValueError: backlog is less than 1
    :raises OSError: the address is another's (EADDRINUSE), or none of ours
    """

    def __init__(
        self,
        address: _Address,
        *,
        backlog: int = 128,
        library: Library | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        if backlog < 1:
            raise ValueError(f"a backlog of {backlog}: no request could ever wait to be taken")
        self._backlog = backlog
        self._channel = AsyncCMChannel(library, notifier=notifier)
        self._requests: collections.deque[AsyncCMID] = collections.deque()
        self._events = _Events(self._channel)
        try:
            self.id = self._channel.channel.create_id()
            try:
                self._channel._ids[self.id] = self
                self.id.bind_addr(address)
                self.id.listen(backlog)
            except BaseException:
                self.id.close()
                raise
        except BaseException:
            self._channel.close()
            raise

    @property
    def context(self) -> Context:
        """The device that the address belongs to, for what is to be ready before the first request comes.

        :raises ValueError: it is no one device's, as 0.0.0.0 may be; then each request has its own
        """
        return _context(self)

    @property
    def local_addr(self) -> _Address:
        """Where it listens, with the port that was free."""
        address = self.id.local_addr
        assert address is not None, "it is bound"
        return address

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.id.closed

    def _event(self, event: CMEvent) -> None:
        if event.type is not CMEventType.CONNECT_REQUEST or event.id is None:
            return
        if len(self._requests) < self._backlog:
            self._requests.append(AsyncCMID._requested(self._channel, event))
            self._events.tell()
        else:
            event.id.close()  # which rejects it

    async def get_request(self) -> AsyncCMID:
        """The next request: create_qp() and accept() it, or reject() it; closing it rejects it, too.

        Cancelling loses none.

        :raises ValueError: the listener is closed
        :raises OSError: EMFILE or ENFILE, when there is no descriptor for its channel. That request is rejected; the
            listener goes on
        """
        self._events.home.check(self)
        while True:
            if self.id.closed:
                raise ValueError("this AsyncCMListener is closed")
            if self._requests:
                break
            await self._events.more()
        request = self._requests.popleft()
        try:
            request.migrate()
        except BaseException:
            request.close()
            raise
        return request

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncCMID:
        """The next request; it ends when the listener is closed.

        A request for which there is no descriptor is rejected and logged, and the next one waited for.
        """
        while True:
            try:
                return await self.get_request()
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                log_rate.warn(logger, "listener", "rejected a connection: %s", exc)
            except ValueError:
                if self.id.closed:
                    raise StopAsyncIteration from None
                raise

    def close(self) -> None:
        """Stop listening. Requests that nobody has taken are rejected; connections live on."""
        if self.id.closed:
            return
        while self._requests:
            self._requests.popleft().close()
        self._channel._ids.pop(self.id, None)
        self.id.close()
        self._channel.close()
        self._events.tell()

    def __repr__(self) -> str:
        return f"<AsyncCMListener of {self.id!r}, {len(self._requests)} requests>"
