"""What all connections of one event loop through one verbs library share; above all the reader of their events.

Theory
------
An event loop should know few of our file descriptors, however many connections there are. The completion channel of
each device in use is one, because completions are frequent and urgent. What is rare is behind another, an epoll
instance: address resolution, connection requests, the device's own events, and the warnings of the embedded device. Who
waits without the loop, as blocking streams do, has one descriptor for all of them.

A device may fail. Its completions would report that one by one, or not at all; its event (DEVICE_FATAL, or the
connection manager's DEVICE_REMOVAL) reports it once. Then all connections on it end at once with a DeviceLostError, and
its engine is given up, so that the next connection opens the device anew, or another one. The engine is freed with the
last of its connections. An event of a queue pair or a completion queue ends the connections on it. An event of a port
is passed on to the connections and ends none, because the device goes on trying while a port is down.

Loops come and go (each ``asyncio.run`` makes one). A loop context must neither outlive its loop nor keep it alive.
Loops have no hook for their end. But whoever ends a loop properly closes the asynchronous generators that were begun on
it (``loop.shutdown_asyncgens``). So the loop context begins one, its lifeline, and ends when that is closed. If a loop
is closed without this, the creation of the next loop context notices it, or the garbage collector does.
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
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from rdmanet import _core
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
from rdmanet.base import watching
from rdmanet.base.environment import place_bytes
from rdmanet.errors import DeviceLostError, event_error
from rdmanet.stream import tracing
from rdmanet.stream.parting import Parting
from rdmanet.stream.readiness import new_bell
from rdmanet.stream.waits import Waits
from rdmanet.verbs.device_events import EventFeed
from rdmanet.verbs.device_log import DeviceLog

if TYPE_CHECKING:
    from rdmanet._core import AsyncEvent
    from rdmanet.base.accounts import ConnectionInfo, ServerInfo
    from rdmanet.base.call_accounts import CallsInfo
    from rdmanet.stream.tenants import Connected, DeviceUser, Listening

logger = logging.getLogger("rdmanet")
CMHandler = Callable[[CMEvent], None]

_REMOVAL, _REQUEST = CMEventType.DEVICE_REMOVAL, CMEventType.CONNECT_REQUEST
_ATTRIBUTE = "_rdmanet_loop_contexts"
_all: weakref.WeakSet[LoopContext] = weakref.WeakSet()
_all_lock = threading.Lock()  # other threads may create theirs at the same time


def known_loop_context(loop: asyncio.AbstractEventLoop, library: Library) -> LoopContext | None:
    """The context of this loop for this library, if there is one."""
    known: LoopContext | None = getattr(loop, _ATTRIBUTE, {}).get(library.name)
    return None if known is None or known.closed else known


async def loop_context_for(loop: asyncio.AbstractEventLoop, library: Library) -> LoopContext:
    """The same; created if there is none."""
    loop_context = known_loop_context(loop, library)
    if loop_context is None:
        with _all_lock:
            ended = [other for other in _all if other.loop.is_closed()]
        for other in ended:
            other.close()
        # On the loop itself: the collector sees this cycle, but a global table would keep the loop alive.
        setattr(loop, _ATTRIBUTE, getattr(loop, _ATTRIBUTE, {}))
        loop_context = getattr(loop, _ATTRIBUTE)[library.name] = LoopContext(loop, library)
        await loop_context.tie_to_loop()
    return loop_context


def run_until_sent(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop that is about to be closed, and was not shut down, until what was written is sent: see parting.py."""
    for loop_context in list(getattr(loop, _ATTRIBUTE, {}).values()):
        if loop_context.is_sending:
            with contextlib.suppress(RuntimeError):  # somebody has called stop()
                loop.run_until_complete(loop_context.until_sent())


def end_loop_contexts(loop: asyncio.AbstractEventLoop) -> None:
    """Close all contexts of a loop, without running the loop."""
    for loop_context in list(getattr(loop, _ATTRIBUTE, {}).values()):
        loop_context.close()


class LoopContext:
    """What all connections of one loop through one verbs library share.

    :ivar waits: what limits the time of theirs
    :ivar connections: they, and attempts at them; `left` removes one
    :ivar servers: those that listen
    """

    modules: Sequence[str] = ("rdmanet.stream.bindings", "rdmanet.stream.explaining")  # see stream/whole.py
    _CM_EVENTS = 64  # in one turn of the loop; the descriptor stays readable if there are more

    def __init__(self, loop: asyncio.AbstractEventLoop, library: Library) -> None:
        self.loop, self.library, self.waits = loop, library, Waits(loop)
        self.closed = True  # until there is something to close
        tracing.begin()
        self.pid = process_id()
        self.engines: dict[Context, StreamEngine] = {}
        self._completions: dict[int, Callable[[], object]] = {}  # the engines' descriptors
        self._lost_engines: list[StreamEngine] = []  # kept until the last of their connections is gone
        self._feeds: dict[StreamEngine, EventFeed] = {}
        self._rare: dict[int, Callable[[], None]] = {}  # all other descriptors
        self._all: select.epoll | None = None  # for who waits without the loop
        self.connections: set[Connected] = set()
        self.parting = Parting(loop, self.connections)
        self.servers: set[Listening] = set()
        self._handlers: dict[CMID, CMHandler] = {}
        self._lifeline: AsyncGenerator[None, None] | None = None
        self._bell: int | None = None
        self._told_foreign = False
        self._watched: watching.Watched | None = None
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
        self._read(self._epoll.fileno(), self._rare_events)
        with _all_lock:
            _all.add(self)
        self._watched = watching.Watched(self, watching.Readers(loop, self._watch_rare, self._forget_rare))

    @property
    def fd(self) -> int:
        """A descriptor that is readable while any of ours is, for who waits without the loop.

        :raises OSError: there are no descriptors left
        """
        if self._all is None:
            self._all = select.epoll()
            for fd in (self._epoll.fileno(), *self._completions):
                self._all.register(fd, select.EPOLLIN)
        return self._all.fileno()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, and all this belongs to the parent."""
        return self.pid != process_id()

    async def tie_to_loop(self) -> None:
        """Arrange for close() when the loop closes its asynchronous generators."""

        async def lifeline() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                try:
                    await self.until_sent()
                finally:
                    self.close()

        self._lifeline = lifeline()
        await self._lifeline.__anext__()

    @property
    def is_sending(self) -> bool:
        """Whether a peer's device may not have all that was written, and may still get it."""
        return not (self.closed or self.foreign) and self.parting.is_sending

    async def until_sent(self) -> None:
        """Wait until the peers' devices have what was written."""
        if self.is_sending:
            await self.parting.until_sent()

    def headline(self) -> dict[str, Any]:
        """What is to be known besides: what the data engines do."""
        engines = [{"device": engine.pd.context.name, **engine.stats()} for engine in self.engines.values()]
        return {"loop": id(self.loop), "library": self.library.name, "engines": engines}

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        """The connections, and attempts at them, as they are now; a forked child has none."""
        return (connection.info() for connection in list(self.connections) if not self.foreign)

    def transports(self) -> Iterator[Any]:
        """The transports of those that are established."""
        lives: list[Any] = list(() if self.foreign else self.connections)
        return (found for life in lives if life.facts and (found := life.callbacks.transport) is not None)

    def connection_rows(self) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        """The same as rows, with the names of their counters."""
        return (connection.row() for connection in list(() if self.foreign else self.connections))

    def calls_infos(self) -> Iterator[CallsInfo]:
        """What `rdmanet.rpc` has under way on this loop."""
        return watching.calls_of(self.loop)

    def server_infos(self) -> Iterator[ServerInfo]:
        """The servers as they are now."""
        return (server.info() for server in list(self.servers) if not self.foreign)

    def bell(self) -> int:
        """The bell that all connections' readiness uses (readiness.py); created on the first call."""
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
            engine = StreamEngine(self.loop, self, context, busy_poll)
            undo.callback(engine.close)
            if (least := place_bytes()) is not None:
                engine.set_place_bytes(least)
            for fd in feed.fds:
                self._watch_rare(fd, lambda: self.hear_device(engine))
                undo.callback(self._forget_rare, fd)
            undo.pop_all()
        self._feeds[engine] = feed
        self.engines[context] = engine
        return engine

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """The loop's, for engines."""
        self._read(fd, callback)
        self._completions[fd] = callback
        if self._all is not None:
            self._all.register(fd, select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """The loop's, for engines."""
        if self._all is not None:
            self._all.unregister(fd)
        del self._completions[fd]
        if not self.loop.is_closed():
            self.loop.remove_reader(fd)

    def _read(self, fd: int, callback: Callable[[], object]) -> None:
        # In an empty contextvars.Context: the first to use this is not the only one.
        contextvars.Context().run(self.loop.add_reader, fd, callback)

    def heard_by_child(self) -> None:
        """For engines: a forked child runs its parent's loop, and something has come."""
        if not self._told_foreign:
            self._told_foreign = True
            logger.error(
                "process %d runs the event loop of process %d, from which it was forked: something has come for one of "
                "its RDMA listeners or connections, and only that process can take it; open them after fork",
                process_id(),
                self.pid,
            )

    def lose_device(self, context: Context, event: str) -> None:
        """The device has failed: end all connections on it, and give up its engine.

        :param event: the name of the event that reports it
        """
        engine = self.engines.pop(context, None)
        if engine is None:
            return
        self._lost_engines.append(engine)
        engine.lose_device()
        feed = self._feeds.pop(engine)
        for fd in feed.fds:
            self._forget_rare(fd)
        feed.close()
        users = users_of(engine)
        logger.error("%s; connections: %d", DeviceLostError(context.name, event).strerror, len(users))
        for user in users:
            user.on_connection_error(DeviceLostError(context.name, event))
        self._close_lost_soon()

    def left(self, connection: Connected) -> None:
        """Forget a connection that holds nothing any more."""
        self.connections.discard(connection)
        self.parting.look()
        if self._lost_engines:
            self._close_lost_soon()

    def _close_lost_soon(self) -> None:
        if not self.loop.is_closed():  # not now, because the engine itself may be calling
            self.loop.call_soon(self._close_lost)

    def _close_lost(self) -> None:
        if self.closed or self.foreign:
            return
        for engine in self._lost_engines.copy():
            if not engine.connections:
                self._lost_engines.remove(engine)
                engine.close()

    def hear_device(self, engine: StreamEngine) -> None:
        """Take all events that the device has, and act on them."""
        while not self.closed and not self.foreign and (feed := self._feeds.get(engine)) is not None:
            try:
                event = feed.next()
            except OSError as exc:  # the kernel's way to say that the device was removed
                self.lose_device(engine.pd.context, f"ibv_get_async_event: {exc}")
                return
            if event is None:
                return
            self._device_event(engine, event)

    def _device_event(self, engine: StreamEngine, event: AsyncEvent) -> None:
        types, kind, device = _core.EventType, event.event_type, engine.pd.context.name
        if kind is types.DEVICE_FATAL:
            self.lose_device(engine.pd.context, kind.name)
        elif kind is types.CQ_ERR:
            if event.cq is not None:
                engine.lose_queue(event.cq, event_error(kind.name, device, "a completion queue"))
                for user in users_of(engine):
                    if user.qp is not None and user.qp.send_cq is event.cq:
                        user.on_connection_error(event_error(kind.name, device, "a completion queue"))
        elif kind in (types.QP_FATAL, types.QP_REQ_ERR, types.QP_ACCESS_ERR):  # it is in the error state now
            # If another thread has read the event, its queue pair may have been closed meanwhile.
            if event.qp is not None and not event.qp.closed:
                for user in users_of(engine):
                    if user.qp is event.qp:
                        what = f"queue pair {event.qp.qp_num:#x}"
                        user.on_connection_error(event_error(kind.name, device, what))
        elif event.port_num is not None:
            level = logging.WARNING if kind is types.PORT_ERR else logging.INFO
            logger.log(level, "port %d of %s: %s", event.port_num, device, kind.name)
            for user in users_of(engine):
                user.port_event(event)

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
        """Send the events of an identifier that came with a connection request to `handler`."""
        self._handlers[cm_id] = handler

    def destroy_id(self, cm_id: CMID) -> None:
        """Destroy an identifier; its handler gets no more events."""
        self._handlers.pop(cm_id, None)
        cm_id.close()

    def _rare_events(self) -> None:
        """The loop's reader of what is rare."""
        if self.pid != process_id():  # `foreign`, without a call of Python code: this is a hot path
            self.heard_by_child()
            return
        # Completions first, whatever order the loop has found the two in: bytes have come before the end did.
        for channel_ready in list(self._completions.values()):
            channel_ready()
        for fd, _ in self._epoll.poll(0):
            if self.closed or self.pid != process_id():
                return
            if (act := self._rare.get(fd)) is not None:
                act()

    def hear_all(self) -> bool:
        """Act on what has come, without the loop. False: there is more than four turns take, of a flood for example."""
        for _ in range(4):
            self._rare_events()
            if self.closed or not self._epoll.poll(0):
                return True
        return False

    def _cm_events(self) -> None:
        # A forked child may run its parent's loop. Nothing here is the child's, and not even the reader may be removed:
        # the epoll instance under the loop is the parent's, too. The limit keeps a flood from keeping others waiting.
        for _ in range(self._CM_EVENTS):
            if self.closed or self.pid != process_id():
                return
            if (event := self.cm.get_event()) is None:
                return
            self._cm_event(event)

    def _cm_event(self, event: CMEvent) -> None:
        if event.type is _REMOVAL and (context := event.id.context) is not None:
            self.lose_device(context, event.type.name)
        cm_id = event.listen_id if event.listen_id is not None else event.id
        handler = self._handlers.get(cm_id)
        if handler is None:
            if event.type is _REQUEST:
                event.id.close()  # refuses it
            return
        try:
            handler(event)
        except Exception as exc:
            self.loop.call_exception_handler(
                {"message": f"rdmanet: {event.type.name} was not handled", "exception": exc}
            )

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End every connection and server, then give up the devices. Called when the loop ends."""
        if self.closed:
            return
        self.closed = True
        if self._watched is not None:
            self._watched.close(not self.foreign)
        loop_contexts: dict[str, LoopContext] = getattr(self.loop, _ATTRIBUTE, {})
        if loop_contexts.get(self.library.name) is self:
            del loop_contexts[self.library.name]
        if self.foreign:
            return
        if not self.loop.is_closed():
            self.loop.remove_reader(self._epoll.fileno())
        for tenant in [*self.servers, *self.connections]:
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
        self.waits.close()
        self.cm.close()
        self._epoll.close()
        if self._all is not None:
            self._all.close()
        if self._bell is not None:
            os.close(self._bell)
        self._log.close()  # last, so that warnings about all this are still logged

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()


def users_of(engine: StreamEngine) -> list[DeviceUser]:
    """The owners of the connections on this engine."""
    return [cast("DeviceUser", connection.owner) for connection in engine.connections]
