"""Listeners of the awaitable connection manager.

A connection that arrives is moved to its own channel before the program gets it: it outlives the listener, and events
of other connections do not delay it.
"""

from __future__ import annotations

import collections
import errno
import logging
from typing import Self

from rdmanet._core import CMID, CMEvent, CMEventType, Context, Library
from rdmanet.base import log_rate
from rdmanet.base.closable import Closable
from rdmanet.base.notifier import Notifier
from rdmanet.errors import cm_error
from rdmanet.verbs_async.cm import AsyncCMID
from rdmanet.verbs_async.cm_channel import Address, AsyncCMChannel, EventQueue, context_of

logger = logging.getLogger("rdmanet")

__all__ = ["AsyncCMListener"]

_PORT_TRIES = 16


class AsyncCMListener(Closable):
    """Listens on an address as soon as it is created. Requests wait until the program takes them.

    :param address: (ip, port); port 0 takes a free port, and local_addr says which
    :param backlog: how many requests may wait; further ones are rejected
    :raises ValueError: backlog is less than 1
    :raises OSError: the address is in use (EADDRINUSE), or does not belong to this host
    """

    def __init__(
        self,
        address: Address,
        *,
        backlog: int = 128,
        library: Library | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        if backlog < 1:
            raise ValueError(f"backlog={backlog}: it must be at least 1")
        self._backlog = backlog
        self._channel = AsyncCMChannel(library, notifier=notifier)
        self._requests: collections.deque[AsyncCMID] = collections.deque()
        self._removal: CMEvent | None = None  # the device is gone
        self._events = EventQueue(self._channel)
        try:
            self.id = self._listening(address)
        except BaseException:
            self._channel.close()
            raise

    def _listening(self, address: Address) -> CMID:
        """Listen, on another free port if a TCP program has the first: soft-iWARP sees that only in listen()."""
        tried: list[CMID] = []  # they keep their ports until one is found
        try:
            while True:
                tried.append(self._channel.channel.create_id())
                tried[-1].bind_addr(address)
                try:
                    self._listen(tried[-1])
                except OSError as exc:
                    if exc.errno != errno.EADDRINUSE or address[1] or len(tried) == _PORT_TRIES:
                        raise
                else:
                    self._channel._ids[tried[-1]] = self
                    return tried.pop()
        finally:
            for cm_id in tried:
                cm_id.close()

    def _listen(self, cm_id: CMID) -> None:
        cm_id.listen(self._backlog)

    @property
    def context(self) -> Context:
        """The context of the device that the address belongs to, to prepare objects before the first request.

        :raises ValueError: the address is not a single device's, like 0.0.0.0; then each request has its own context
        """
        return context_of(self)

    @property
    def local_addr(self) -> Address:
        """The address it listens on, with the actual port."""
        address = self.id.local_addr
        assert address is not None, "it is bound"
        return address

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.id.closed

    def _event(self, event: CMEvent) -> None:
        if event.type is CMEventType.DEVICE_REMOVAL:
            self._removal = event
            self._events.tell()
        if event.type is not CMEventType.CONNECT_REQUEST or event.id is None:
            return
        if len(self._requests) < self._backlog:
            self._requests.append(AsyncCMID._requested(self._channel, event))
            self._events.tell()
        else:
            event.id.close()  # which rejects it

    async def get_request(self) -> AsyncCMID:
        """The next request: create_qp() and accept() it, or reject() it. Closing it rejects it as well.

        Cancelling loses no request.

        :raises ValueError: the listener is closed
        :raises OSError: EMFILE or ENFILE: no descriptor is left for its channel. The request is rejected, and the
            listener goes on. ENODEV: the device was removed
        """
        self._events.home.check(self)
        while True:
            if self.id.closed:
                raise ValueError("this AsyncCMListener is closed")
            if self._requests:
                break
            if self._removal is not None:
                raise self._removal.error() or cm_error(self._removal.type.name, self._removal.status)
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
        """The next request; the iteration ends when the listener is closed.

        A request for which no descriptor is left is rejected and logged; then this waits for the next one.
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
        """Stop listening. Requests that were not taken are rejected; connections live on."""
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
