"""A device's asynchronous events, as an async iterator."""

from __future__ import annotations

import contextlib
from typing import Self

from rdmanet._core import AsyncEvent, Context
from rdmanet.base.closable import Closable
from rdmanet.base.notifier import Future, Home, Notifier, current_notifier, wake
from rdmanet.verbs.device_events import EventFeed

__all__ = ["DeviceEvents"]


class DeviceEvents(Closable):
    """The asynchronous events of a device, its ports, queues and queue pairs, as an async iterator.

        async for event in DeviceEvents(context): ...

    Every iterator gets all events from its creation on; if it is not read for long, it keeps the last 1024. Nothing
    else may read the context's events meanwhile. The iteration ends when it is closed.
    """

    def __init__(self, context: Context, *, notifier: Notifier | None = None) -> None:
        self.context = context
        self._notifier = current_notifier() if notifier is None else notifier
        self._home = Home()
        self._feed = EventFeed(context)
        self._waiting: list[Future] = []
        self._listening = False
        self._closed = False

    def _listen(self, on: bool) -> None:
        if on is not self._listening:
            for fd in self._feed.fds:
                if on:
                    self._notifier.add_reader(fd, self._readable)
                else:
                    self._notifier.remove_reader(fd)
        self._listening = on

    def _readable(self) -> None:
        # The descriptor stays readable until some reader takes the event.
        self._listen(False)
        wake(self._waiting)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncEvent:
        """The next event. Cancelling loses none."""
        self._home.check(self)
        while not self._closed:
            event = self._feed.next()
            if event is not None:
                return event
            future = self._notifier.create_future()
            self._waiting = [other for other in self._waiting if not other.done()]  # those of cancelled calls
            self._waiting.append(future)
            self._listen(True)
            await future
        raise StopAsyncIteration

    def close(self) -> None:
        """End the iteration, also for waiting tasks. The context stays open."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._listen(False)
        self._feed.close()
        wake(self._waiting)

    def __repr__(self) -> str:
        return f"<DeviceEvents of {self.context!r}{' closed' if self._closed else ''}>"
