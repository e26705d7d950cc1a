"""One a loop and verbs library: its reader, its connection manager's events, its data engines, its devices' events.

Theory
------
An event loop should know one file descriptor of ours, however many connections there are. So a
driver nests in one epoll instance the event channel of the connection manager and the completion
channel of each device in use, and registers that with ``loop.add_reader``. Everything a connection
waits for arrives there: address resolution, connection requests, completions, the device's own events, and what
the embedded device warns of.

A device may fail. Its completions would say so one by one, or not at all; its event (DEVICE_FATAL, or the connection
manager's DEVICE_REMOVAL) says it once. Then all connections on it end with a DeviceLostError, at once, and its engine
is given up, so that the next connection opens the device anew, or another one. The engine itself goes with the last
of its connections. What a device tells of a queue pair or a completion queue ends the connections on that; what it
tells of a port is told to them, and ends nothing, as the device goes on trying while a port is down.

Drivers belong to loops, and loops come and go (``asyncio.run`` makes one a call). A driver must not
outlive its loop, nor keep it alive. Loops have no hook for their end, but the way every loop is
ended closes the asynchronous generators that were begun on it (``loop.shutdown_asyncgens``): the
driver begins one, its lifeline, whose end is the driver's end. A loop that is closed without that is
noticed when the next driver is made, or by the garbage collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import select
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Protocol, cast

from rdmanet._core import (
    CMID,
    QP,
    AsyncEvent,
    CMEvent,
    CMEventChannel,
    CMEventType,
    Context,
    EventType,
    Library,
    StreamEngine,
    process_id,
)
from rdmanet.device_events import EventFeed
from rdmanet.device_log import DeviceLog
from rdmanet.errors import DeviceLostError, event_error
from rdmanet.readiness import new_bell

logger = logging.getLogger("rdmanet")

CMHandler = Callable[[CMEvent], None]


class Tenant(Protocol):
    """Who lives on a driver and is told when its loop ends: a transport, a server."""

    def _loop_ended(self) -> None: ...


class Connection(Tenant, Protocol):
    """A transport, as the events of its device see it."""

    qp: QP | None

    def _fallen(self, error: OSError) -> None:
        """It is over, by this."""

    def _port_event(self, event: AsyncEvent) -> None:
        """Something has happened to a port of its device."""


# After these a queue pair is in the error state.
_QP_FAILURES = frozenset((EventType.QP_FATAL, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR))

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
    # Events of the connection manager in one turn of the loop. The descriptor stays readable if there are more.
    _CM_EVENTS = 64

    def __init__(self, loop: asyncio.AbstractEventLoop, library: Library) -> None:
        self.loop = loop
        self.library = library
        self.closed = True  # until there is something to close
        self.pid = process_id()
        self.engines: dict[Context, StreamEngine] = {}
        self._engine_row: tuple[StreamEngine, ...] = ()  # the same, ready to be gone through
        self._lost_engines: list[StreamEngine] = []  # until the last of their connections is gone
        self._feeds: dict[StreamEngine, EventFeed] = {}
        self._rare: dict[int, Callable[[], None]] = {}  # descriptors, but those of completions
        self.transports: set[Tenant] = set()
        self.servers: set[Tenant] = set()
        self._handlers: dict[CMID, CMHandler] = {}
        self._wakes = 0
        self._lifeline: AsyncGenerator[None, None] | None = None
        self._bell: int | None = None
        self._told_foreign = False
        self.cm = CMEventChannel(library)
        try:
            self._epoll = select.epoll()
        except OSError:
            self.cm.close()
            raise
        self.closed = False
        self._log = DeviceLog(library)
        if self._log.fd is not None:
            self._watch_rare(self._log.fd, self._log.pass_on)
        self._watch_rare(self.cm.fd, self._cm_events)
        # In a context of nobody's: whoever is first to use the loop's driver does not use it alone.
        contextvars.Context().run(loop.add_reader, self._epoll.fileno(), self._readable)
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

    def bell(self) -> int:
        """What the readiness of all connections shows; made when one is first asked for."""
        if self._bell is None:
            self._bell = new_bell()
        return self._bell

    # -- devices ---------------------------------------------------------------------------------

    def engine_for(self, context: Context, busy_poll: float | None = None) -> StreamEngine:
        """The data engine on the device that `context` has open."""
        engine = self.engines.get(context)
        if engine is None:
            engine = self._new_engine(context, busy_poll)
        elif busy_poll is not None:
            engine.set_busy_poll(busy_poll)
        return engine

    def _new_engine(self, context: Context, busy_poll: float | None) -> StreamEngine:
        with contextlib.ExitStack() as undo:
            feed = EventFeed(context)
            undo.callback(feed.close)
            engine = StreamEngine(self.loop, context, busy_poll)
            undo.callback(engine.close)
            self._epoll.register(engine.channel.fd, select.EPOLLIN)
            for fd in feed.fds:
                self._watch_rare(fd, lambda: self.hear_device(engine))
                undo.callback(self._forget_rare, fd)
            undo.pop_all()
        self._feeds[engine] = feed
        self.engines[context] = engine
        self._engine_row = tuple(self.engines.values())
        return engine

    def lose_device(self, context: Context, event: str) -> None:
        """The device has failed: so have all connections on it. What it has open is given up.

        :param event: that says so, by name
        """
        engine = self.engines.pop(context, None)
        if engine is None:
            return
        self._engine_row = tuple(self.engines.values())
        self._lost_engines.append(engine)
        engine.lose_device()
        self._epoll.unregister(engine.channel.fd)
        feed = self._feeds.pop(engine)
        for fd in feed.fds:
            self._forget_rare(fd)
        feed.close()
        connections = connections_on(engine)
        logger.error("%s; connections: %d", DeviceLostError(context.name, event).strerror, len(connections))
        for connection in connections:
            connection._fallen(DeviceLostError(context.name, event))
        self._close_lost_soon()

    def left(self, transport: Tenant) -> None:
        """A transport that holds nothing any more."""
        self.transports.discard(transport)
        if self._lost_engines:
            self._close_lost_soon()

    def _close_lost_soon(self) -> None:
        if not self.loop.is_closed():  # not now: it may be the engine itself that we are called by
            self.loop.call_soon(self._close_lost)

    def _close_lost(self) -> None:
        if self.closed or self.foreign:
            return
        for engine in self._lost_engines.copy():
            if not engine.connections:
                self._lost_engines.remove(engine)
                engine.close()

    def hear_device(self, engine: StreamEngine) -> None:
        """Take what the device has to tell, and act by it."""
        while not self.closed and not self.foreign and (feed := self._feeds.get(engine)) is not None:
            try:
                event = feed.next()
            except OSError as exc:  # the kernel's last word of a device that was taken out
                self.lose_device(engine.pd.context, f"ibv_get_async_event: {exc}")
                return
            if event is None:
                return
            self._device_event(engine, event)

    def _device_event(self, engine: StreamEngine, event: AsyncEvent) -> None:
        kind, device = event.event_type, engine.pd.context.name
        if kind is EventType.DEVICE_FATAL:
            self.lose_device(engine.pd.context, kind.name)
        elif kind is EventType.CQ_ERR:
            if event.cq is not None:
                engine.lose_queue(event.cq, event_error(kind.name, device, "a completion queue"))
                for connection in connections_on(engine):
                    if connection.qp is not None and connection.qp.send_cq is event.cq:
                        connection._fallen(event_error(kind.name, device, "a completion queue"))
        elif kind in _QP_FAILURES:
            # One that another thread has read may be of a queue pair that has been closed meanwhile.
            if event.qp is not None and not event.qp.closed:
                for connection in connections_on(engine):
                    if connection.qp is event.qp:
                        connection._fallen(event_error(kind.name, device, f"queue pair {event.qp.qp_num:#x}"))
        elif event.port_num is not None:
            level = logging.WARNING if kind is EventType.PORT_ERR else logging.INFO
            logger.log(level, "port %d of %s: %s", event.port_num, device, kind.name)
            for connection in connections_on(engine):
                connection._port_event(event)

    def _watch_rare(self, fd: int, act: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._rare[fd] = act

    def _forget_rare(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._rare[fd]

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
        if (not found or self._wakes % self._FAIRNESS == 0) and not self.closed and not self.foreign:
            for fd, _ in self._epoll.poll(0):
                if (act := self._rare.get(fd)) is not None:
                    act()
        if self.foreign and not self._told_foreign:
            self._told_foreign = True
            logger.error(
                "process %d runs the event loop of process %d, from which it was forked: something has come for one of "
                "its RDMA listeners or connections, and only that process can take it; open them after fork",
                process_id(),
                self.pid,
            )

    def _cm_events(self) -> None:
        # A forked child may run its parent's loop. Nothing here is the child's, and not even the reader
        # may be removed: the epoll instance under the loop is the parent's too.
        for _ in range(
            self._CM_EVENTS
        ):  # who floods us with requests does not keep the others' bytes waiting
            if self.closed or self.foreign:
                return
            event = self.cm.get_event()
            if event is None:
                return
            if event.type is CMEventType.DEVICE_REMOVAL and (context := event.id.context) is not None:
                self.lose_device(context, event.type.name)
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
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        self._rare.clear()
        for engine in [*self.engines.values(), *self._lost_engines]:
            engine.close()
        self.engines.clear()
        self._lost_engines.clear()
        self._engine_row = ()
        self.cm.close()
        self._epoll.close()
        if self._bell is not None:
            os.close(self._bell)
        self._log.close()  # last: what was said of all that is logged, too

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()


def connections_on(engine: StreamEngine) -> list[Connection]:
    """The connections of an engine: all are transports."""
    return cast(list[Connection], engine.connections)
