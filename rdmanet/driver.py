"""One a loop and verbs library: its reader, its connection manager's events, its data engines.

Theory
------
An event loop should know one file descriptor of ours, however many connections there are. So a
driver nests in one epoll instance the event channel of the connection manager and the completion
channel of each device in use, and registers that with ``loop.add_reader``. Everything a connection
waits for arrives there: address resolution, connection requests, completions.

Drivers belong to loops, and loops come and go (``asyncio.run`` makes one a call). A driver must not
outlive its loop, nor keep it alive. Loops have no hook for their end, but the way every loop is
ended closes the asynchronous generators that were begun on it (``loop.shutdown_asyncgens``): the
driver begins one, its lifeline, whose end is the driver's end. A loop that is closed without that is
noticed when the next driver is made, or by the garbage collector.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from rdmanet._core import (
    CMID,
    CMEvent,
    CMEventChannel,
    CMEventType,
    Context,
    Library,
    StreamEngine,
    process_id,
)

logger = logging.getLogger("rdmanet")

CMHandler = Callable[[CMEvent], None]


class Tenant(Protocol):
    """Who lives on a driver and is told when its loop ends: a transport, a server."""

    def _loop_ended(self) -> None: ...


_ATTRIBUTE = "_rdmanet_drivers"
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_drivers_lock = threading.Lock()  # loops of other threads make theirs meanwhile


async def driver_for(loop: asyncio.AbstractEventLoop, library: Library) -> Driver:
    """The driver of this loop for this library, made when there is none."""
    drivers: dict[str, Driver] | None = getattr(loop, _ATTRIBUTE, None)
    if drivers is None:
        drivers = {}
        # On the loop itself: a cycle the collector sees, where a global table would keep it alive.
        setattr(loop, _ATTRIBUTE, drivers)
    driver = drivers.get(library.name)
    if driver is None or driver.closed:
        with _drivers_lock:
            others = list(_drivers)
        for other in others:
            if other.loop.is_closed():
                other.close()
        driver = drivers[library.name] = Driver(loop, library)
        await driver.tie_to_loop()
    return driver


def end_drivers(loop: asyncio.AbstractEventLoop) -> None:
    """End what a loop has of ours, without running it."""
    for driver in list(getattr(loop, _ATTRIBUTE, {}).values()):
        driver.close()


class Driver:
    """What all connections of one loop through one verbs library share."""

    # Look at the connection manager at least once in so many wake-ups by completions.
    _FAIRNESS = 16

    def __init__(self, loop: asyncio.AbstractEventLoop, library: Library) -> None:
        self.loop = loop
        self.library = library
        self.closed = True  # until there is something to close
        self.pid = process_id()
        self.engines: dict[Context, StreamEngine] = {}
        self._engine_row: tuple[StreamEngine, ...] = ()  # the same, ready to be gone through
        self.transports: set[Tenant] = set()
        self.servers: set[Tenant] = set()
        self._handlers: dict[CMID, CMHandler] = {}
        self._wakes = 0
        self._lifeline: AsyncGenerator[None, None] | None = None
        self.cm = CMEventChannel(library)
        try:
            self._epoll = select.epoll()
        except OSError:
            self.cm.close()
            raise
        self.closed = False
        self._epoll.register(self.cm.fd, select.EPOLLIN)
        loop.add_reader(self._epoll.fileno(), self._readable)
        with _drivers_lock:
            _drivers.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, and we are its parent's."""
        return self.pid != process_id()

    async def tie_to_loop(self) -> None:
        """End when the loop ends its asynchronous generators."""

        async def lifeline() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                self.close()

        self._lifeline = lifeline()
        await self._lifeline.__anext__()

    # -- devices ---------------------------------------------------------------------------------

    def engine_for(self, context: Context, busy_poll: float | None = None) -> StreamEngine:
        """The data engine on the device that `context` has open."""
        engine = self.engines.get(context)
        if engine is None:
            engine = self.engines[context] = StreamEngine(self.loop, context, busy_poll)
            self._engine_row = tuple(self.engines.values())
            self._epoll.register(engine.channel.fd, select.EPOLLIN)
        elif busy_poll is not None:
            engine.set_busy_poll(busy_poll)
        return engine

    # -- connection manager ----------------------------------------------------------------------

    def create_id(self, handler: CMHandler) -> CMID:
        """A connection identifier whose events go to `handler`."""
        cm_id = self.cm.create_id()
        self._handlers[cm_id] = handler
        return cm_id

    def adopt_id(self, cm_id: CMID, handler: CMHandler) -> None:
        """Send the events of an identifier that a connection request made to `handler`."""
        self._handlers[cm_id] = handler

    def destroy_id(self, cm_id: CMID) -> None:
        """Forget and destroy; no event of it will be seen any more."""
        self._handlers.pop(cm_id, None)
        cm_id.close()

    def _readable(self) -> None:
        """The loop's one reader: completions first, they are the frequent and urgent ones."""
        self._wakes += 1
        found = False
        for engine in self._engine_row:
            found = engine.channel_ready() or found
        if not found or self._wakes % self._FAIRNESS == 0:
            self._cm_events()

    def _cm_events(self) -> None:
        # A forked child may run its parent's loop. Nothing here is the child's, and not even the reader
        # may be removed: the epoll instance under the loop is the parent's too.
        while not self.closed and not self.foreign:
            event = self.cm.get_event()
            if event is None:
                return
            cm_id = event.listen_id if event.listen_id is not None else event.id
            handler = self._handlers.get(cm_id)
            if handler is None:
                if event.type is CMEventType.CONNECT_REQUEST:
                    event.id.close()  # refuses it
                continue
            try:
                handler(event)
            except Exception as exc:
                self.loop.call_exception_handler(
                    {"message": f"rdmanet: {event.type.name} was not handled", "exception": exc}
                )

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Tear down every connection and server, then the devices. Called once the loop is ending."""
        if self.closed:
            return
        self.closed = True
        drivers: dict[str, Driver] = getattr(self.loop, _ATTRIBUTE, {})
        if drivers.get(self.library.name) is self:
            del drivers[self.library.name]
        if self.foreign:
            return
        if not self.loop.is_closed():
            self.loop.remove_reader(self._epoll.fileno())
        for tenant in [*self.servers, *self.transports]:
            try:
                tenant._loop_ended()
            except Exception:
                logger.exception("%r did not end with its loop", tenant)
        for cm_id in list(self._handlers):
            self.destroy_id(cm_id)
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()
        self._engine_row = ()
        self.cm.close()
        self._epoll.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()
