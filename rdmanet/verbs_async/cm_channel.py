"""The event channel of the awaitable connection manager: who hears which event.

A channel reads its events whenever its descriptor is readable, and gives each to the identifier that it is about
(cm.py), or to the listener that a request came to (cm_listener.py). These keep what has come in an `EventQueue`, where
their tasks wait, too; so no event is lost while no task waits.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Protocol

from rdmanet._core import CMID, CMEvent, CMEventChannel, CMEventType, Context, Library
from rdmanet.base.closable import Closable
from rdmanet.base.notifier import Future, Home, Notifier, current_notifier, wake

__all__ = ["AsyncCMChannel"]

Address = tuple[str, int] | tuple[str, int, int, int]


class Hears(Protocol):
    """Who has an identifier on a channel."""

    id: CMID

    def _event(self, event: CMEvent) -> None:
        """An event of it has come."""


class AsyncCMChannel(Closable):
    """An event channel that an event loop reads; it passes each event to the AsyncCMID concerned.

    :param library: the library of the devices; by default the embedded device's
    :param notifier: the loop; by default the running one
    """

    def __init__(self, library: Library | None = None, *, notifier: Notifier | None = None) -> None:
        self.notifier = current_notifier() if notifier is None else notifier
        self.home = Home()
        self.channel = CMEventChannel(library or Library.embedded())
        self._ids: dict[CMID, Hears] = {}
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
        """Read all pending events; there may be none."""
        while not self.channel.closed:
            event = self.channel.get_event()
            if event is None:
                return
            owner = self._ids.get(event.listen_id if event.listen_id is not None else event.id)
            if owner is not None:
                owner._event(event)
            elif event.type is CMEventType.CONNECT_REQUEST and event.id is not None:
                event.id.close()  # refuses it: its listener has gone

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


class EventQueue:
    """The events of one identifier that were not read yet, and the futures of those who wait for them."""

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
        """Wait until there may be another event, or there will be none."""
        self.waiting = [future for future in self.waiting if not future.done()]
        future = self.notifier.create_future()
        self.waiting.append(future)
        await future


def context_of(owner: Hears) -> Context:
    """The context of its device. Raises ValueError if it has none yet."""
    context = owner.id.context
    if context is None:
        raise ValueError(f"{owner!r} has no device yet: bind or resolve its address first")
    return context
