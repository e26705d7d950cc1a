"""The awaitable connection manager: clients, listeners, and the phases of a connection.

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
The connection manager answers each step with an event on the identifier's channel. An `AsyncCMChannel` reads the
channel whenever it is readable, and queues each event at its `AsyncCMID`; a phase waits for the events that end it. So
no event is lost while no task waits, and a phase that fails raises the event's error.

An identifier that is created without a channel gets its own. A connection that arrives at a listener is moved to its
own channel before the program gets it: it outlives the listener, and events of other connections do not delay it.

**Cancelling** resolve, connect or accept cannot undo the step, so the identifier can then only be closed, which ends
the attempt. Waiting for a request, or for the end of a connection, can be cancelled and started again at any time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator

from rdmanet._core import (  # isort: skip
    CMID, PD, SRQ, CMEvent, CMEventType, Context, Library, PortSpace, QPCap, QPInitAttr, QPType,
)  # fmt: skip
from rdmanet.base.closable import Closable
from rdmanet.base.notifier import Notifier
from rdmanet.errors import cm_error
from rdmanet.verbs_async.cm_channel import Address, AsyncCMChannel, EventQueue, context_of
from rdmanet.verbs_async.queues import AsyncCQ, AsyncQP

logger = logging.getLogger("rdmanet")

__all__ = ["AsyncCMID"]

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

# REJECTED as well: the kernel reports only that if the peer closes before it knows that the connection is established.
_ENDS = frozenset({CMEventType.DISCONNECTED, CMEventType.DEVICE_REMOVAL, CMEventType.REJECTED})

_REJECT_BYTES = 148
"""How much private data a rejection takes on InfiniBand and RoCE; iWARP takes more."""


_REACHED = {
    "resolve_addr": "its address is resolved",
    "resolve_route": "its route is resolved",
    "connect": "it is connected",
    "accept": "it is connected",
}
"""What an identifier has come to after each phase."""


def _milliseconds(timeout: float) -> int:
    """Seconds in the form that librdmacm takes: milliseconds as a C int, at least 1."""
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout}: it must be at least 0 seconds")
    return max(1, int(min(timeout * 1000, 2**31 - 1)))


class AsyncCMID(Closable):
    """An identifier of the connection manager: one connection, step by step.

    Cancelling a step (resolve, connect, accept) does not undo it: the identifier can then only be closed, which ends
    the attempt. Waiting for an event, or for the end, can be cancelled and started again.

    :param channel: the channel of its events; by default its own
    :param library: the library of its own channel; by default the embedded device's
    :param notifier: the loop of its own channel; by default the running one
    :param ps: PortSpace.TCP for connections, UDP for datagrams
    :raises RuntimeError: no known kind of event loop is running
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
            self._begin(channel, channel.channel.create_id(ps), b"", ps)
        except BaseException:
            if own:
                channel.close()
            raise
        self._own_channel = own

    def _begin(self, channel: AsyncCMChannel, id: CMID, private_data: bytes, ps: PortSpace) -> None:
        self.id = id
        self._ps = ps
        self._is_request = self._is_answered = False
        self.private_data = private_data
        """The peer's private data, from its request, its reply or its rejection."""
        self.reply: CMEvent | None = None
        """The event with which the peer has answered connect(), with all that it says, such as the peer's `qp_num`. For
        datagrams (PortSpace.UDP) `qp_num`, `qkey` and `ah_attr` are what to send to."""
        self.qp: AsyncQP | None = None
        self._channel = channel
        self._own_channel = False
        self._events = EventQueue(channel)
        self._phase: str | None = None  # the phase that has begun and not ended
        self._reached = "nothing is resolved yet"  # for the errors of a step that does not come next
        self._end: CMEvent | None = None  # the event that ended the connection
        self._parting = False  # this side has asked for the end
        channel._ids[id] = self

    @classmethod
    def _requested(cls, channel: AsyncCMChannel, event: CMEvent) -> AsyncCMID:
        assert event.id is not None
        self = cls.__new__(cls)
        self._begin(channel, event.id, event.private_data, PortSpace.TCP)  # as its listener
        self._is_request = True
        self._reached = "it is a request that waits for an answer"
        return self

    @property
    def channel(self) -> AsyncCMChannel:
        """The channel of its events."""
        return self._channel

    @property
    def context(self) -> Context:
        """The context of its device.

        :raises ValueError: it has none before an address is resolved
        """
        return context_of(self)

    @property
    def local_addr(self) -> Address | None:
        """(ip, port), or (ip, port, flowinfo, scope_id); None until it is bound or resolved."""
        return self.id.local_addr

    @property
    def peer_addr(self) -> Address | None:
        """The address of the peer, in the same form."""
        return self.id.peer_addr

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.id.closed

    # -- events --

    def _event(self, event: CMEvent) -> None:
        if event.type is CMEventType.DISCONNECTED and not self._parting:
            # Without an answer the peer would wait for a minute or more before it considers the connection ended.
            with contextlib.suppress(OSError):
                self.id.disconnect()
        if event.type in _ENDS:
            self._end = event
        self._events.put(event)

    async def event(self) -> CMEvent:
        """The next event that no phase has consumed. Cancelling loses none.

        :raises ValueError: the identifier is closed
        """
        events = self._events
        events.home.check(self)
        while not events.events:
            self._needs_to_be_open()
            await events.more()
        return events.events.popleft()

    @contextlib.contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        self._events.home.check(self)
        if self._phase is not None:
            raise ValueError(f"{self!r}: {self._phase}() did not finish; close it")
        self._phase = name
        try:
            with self._where():
                yield
        except Exception:
            self._phase = None
            raise
        self._phase = None  # not when it was cancelled
        self._reached = _REACHED[name]

    @contextlib.contextmanager
    def _where(self) -> Iterator[None]:
        """EINVAL may mean that a step does not come next: say what came last."""
        try:
            yield
        except OSError as exc:
            if exc.errno != errno.EINVAL or repr(self.id) in str(exc):  # that is an identifier which was used
                raise
            raise OSError(errno.EINVAL, f"{exc.strerror} ({self!r}: {self._reached})") from exc

    async def _until(self, *wanted: CMEventType) -> CMEvent:
        while True:
            event = await self.event()
            if event.type in wanted:
                return event
            if event.type in _FAILURES:
                self.private_data = event.private_data
                raise event.error() or cm_error(event.type.name, event.status)

    def _needs_to_be_open(self) -> None:
        if self.id.closed:
            raise ValueError("this AsyncCMID is closed")

    # -- phases of a client --

    async def resolve_addr(
        self, address: Address, *, source: Address | None = None, timeout: float = 2.0
    ) -> None:
        """Find the device that reaches an address.

        :param timeout: in seconds; inf is the longest that librdmacm takes
        :raises OSError: no device reaches it, or there was no answer in time
        :raises ValueError: the timeout is negative
        """
        with self._in_phase("resolve_addr"):
            self.id.resolve_addr(source, address, _milliseconds(timeout))
            await self._until(CMEventType.ADDR_RESOLVED)

    async def resolve_route(self, *, timeout: float = 2.0) -> None:
        """Find the route to the address, after resolve_addr().

        :param timeout: in seconds
        :raises OSError: there is none, or there was no answer in time
        """
        with self._in_phase("resolve_route"):
            self.id.resolve_route(_milliseconds(timeout))
            await self._until(CMEventType.ROUTE_RESOLVED)

    async def resolve(self, address: Address, *, source: Address | None = None, timeout: float = 2.0) -> None:
        """resolve_addr(), then resolve_route().

        :param timeout: for each of them, in seconds
        :raises OSError: one of them failed
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
        """Create this connection's queue pair. Receives can be posted at once. close() closes it."""
        recv_cq = recv_cq or cq
        qp = self.id.create_qp(pd, QPInitAttr(cq.cq, recv_cq.cq, cap or QPCap(), qp_type, False, srq))
        try:
            self.qp = AsyncQP(qp, cq, recv_cq)
        except BaseException:
            qp.close()
            raise
        return self.qp

    def _needs_qp(self, call: str, qp_num: int) -> None:
        """Without a queue pair the peer would wait for one that never comes."""
        self._needs_to_be_open()
        if self._ps is PortSpace.TCP and self.id.qp is None and not qp_num:
            raise ValueError(
                f"{call}() on {self!r} needs a queue pair: call create_qp() first, or pass qp_num= of one of your own"
            )

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
        """Request a connection; returns the private data of the peer's reply. `reply` has all that the peer says.

        With a queue pair that create_qp() did not create (`qp_num`) it returns when the peer has accepted: the
        connection manager does not move that queue pair. Modify it to INIT, RTR and RTS, each with what
        CMID.init_qp_attr() says, then call establish(). See rdma_establish(3).

        For datagrams (PortSpace.UDP) there is no connection: `reply` says where the peer receives.

        :param private_data: at most 56 bytes, for datagrams 180; the peer gets it with the request
        :param responder_resources: how many READs and atomics the peer may have in flight to this side
        :param initiator_depth: how many READs and atomics this side may have in flight to the peer
        :param qp_num: the queue pair, if create_qp() did not create it
        :raises ConnectionRefusedError: no program listens, or the peer rejected the request; see `private_data`
        :raises TimeoutError: there was no answer
        :raises ValueError: there is no queue pair: neither create_qp() was called, nor `qp_num` given
        :raises OSError: EINVAL: the identifier has asked for a connection before. Each needs an identifier of its own.
            EADDRINUSE: on soft-iWARP, a TCP connection has the source port that the connection manager chose. Another
            identifier may get another port
        """
        self._needs_qp("connect", qp_num)
        with self._in_phase("connect"):
            self.id.connect(
                private_data,
                responder_resources=responder_resources,
                initiator_depth=initiator_depth,
                retry_count=retry_count,
                rnr_retry_count=rnr_retry_count,
                qp_num=qp_num,
            )
            event = await self._until(CMEventType.ESTABLISHED, CMEventType.CONNECT_RESPONSE)
        self.reply = event
        self.private_data = event.private_data
        return event.private_data

    def establish(self) -> None:
        """Complete a connection whose queue pair create_qp() did not create, once that is in RTS: see connect().

        The peer's accept() returns then. This does nothing where the device has connected the queue pair itself, as
        iWARP's devices do.

        :raises ValueError: connect() has not returned, or the identifier is closed
        :raises OSError: EOPNOTSUPP if the library is too old; the peer has gone
        """
        self._needs_to_be_open()
        if self.reply is None:
            raise ValueError(f"{self!r}: connect() has not returned")
        if self.reply.type is CMEventType.CONNECT_RESPONSE:
            self.id.establish()

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
        """Accept a request, and wait until the connection is established.

        With a queue pair that create_qp() did not create (`qp_num`), move it to RTS first: see connect(). The peer's
        word that it is ready may get lost: see notify().

        :param private_data: at most 196 bytes, for the peer
        :param qp_num: the queue pair, if create_qp() did not create it
        :raises ValueError: there is no queue pair: neither create_qp() was called, nor `qp_num` given
        :raises OSError: the peer has gone meanwhile
        """
        self._needs_qp("accept", qp_num)
        self._is_answered = True
        with self._in_phase("accept"):
            self.id.accept(
                private_data,
                responder_resources=responder_resources,
                initiator_depth=initiator_depth,
                rnr_retry_count=rnr_retry_count,
                qp_num=qp_num,
            )
            await self._until(CMEventType.ESTABLISHED)

    def notify(self) -> None:
        """Say that the peer has sent something while accept() waits, which returns then. See `CMID.notify()`.

        :raises ValueError: the identifier is closed
        :raises OSError: EINVAL: it is not accepted, or the connection is over; EOPNOTSUPP if the library is too old
        """
        self._needs_to_be_open()
        self.id.notify()

    def reject(self, private_data: bytes = b"") -> None:
        """Reject a request, and close. A client that has gone meanwhile needs no answer: then this only closes.

        :param private_data: at most 148 bytes, for the peer
        :raises ValueError: the private data is too long for any message; the request can still be answered
        :raises OSError: EINVAL: it is too long for this one, or this is no request that waits for an answer
        """
        try:
            with self._where():
                self.id.reject(private_data)
        except OSError as exc:
            if not self._has_gone(exc, private_data):
                raise
        self.close()

    def _has_gone(self, exc: OSError, private_data: bytes) -> bool:
        """Whether rejecting has failed because the client went.

        The kernel says EINVAL then, and reports no event before a request is accepted. So all other reasons for EINVAL
        are excluded: this is no request, or was answered, or the data is too long.
        """
        may_be = self._is_request and not self._is_answered and len(private_data) <= _REJECT_BYTES
        return (exc.errno == errno.ECONNRESET and self._is_request) or (exc.errno == errno.EINVAL and may_be)

    # -- the end of a connection --

    async def disconnected(self) -> None:
        """Wait until either side has ended the connection. Its requests have then completed, or complete as flushed.

        :raises ValueError: the identifier is closed, or was closed meanwhile
        """
        self._events.home.check(self)
        while self._end is None:
            self._needs_to_be_open()
            await self._events.more()

    async def disconnect(self) -> None:
        """End the connection, and wait until it has ended. The queue pair's requests complete as flushed.

        :raises OSError: there is no connection
        """
        if self._end is None:
            with self._where():
                self.id.disconnect()
            self._parting = True
        await self.disconnected()

    def migrate(self, channel: AsyncCMChannel | None = None) -> None:
        """Move to another channel, by default to its own new one. Events that were not read yet move along.

        If the channel belongs to another loop, the identifier belongs to that loop from now on: nothing may be waiting
        for it here.

        :raises ValueError: something waits for it here, or the channel belongs to another library
        """
        own = channel is None
        events = self._events
        if channel is not None and channel.notifier is not events.notifier and events.awaited:
            raise ValueError(f"{self!r} is still awaited on its present loop, and cannot leave it")
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
        """Destroy the queue pair, then the identifier, and the channel if it is its own. This ends all that is pending.

        Waiting operations fail with CompletionResetError, waiting phases with ValueError.
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
