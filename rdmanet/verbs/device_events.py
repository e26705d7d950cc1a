"""The asynchronous events of a device, for any number of readers.

Theory
------
A context has one queue of events, and reading an event takes it from all other readers. But contexts are shared: the
connection manager opens a device once per process, for the streams of all loops and threads and for the program's own
identifiers. So whoever reads an event passes it to every reader (`Context.add_listener`), and each reader has a feed,
which keeps the events that others have read. The feed signals them by an eventfd of its own, because the queue's
descriptor is no longer readable then. Reading and passing on are one atomic step: a concurrent reader waits for it, and
so sees every event that has happened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from rdmanet._core import Context

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from rdmanet._core import AsyncEvent

__all__ = ["EventFeed"]


class EventFeed:
    """All events of a context from now on, for one reader. One thread reads; any thread may add events.

    :ivar fds: one of them is readable when there may be an event. They belong to this feed, so that one loop can watch
        two feeds of a context
    """

    # If the reader does not keep up, the oldest events are dropped.
    MOST = 1024

    def __init__(self, context: Context) -> None:
        self.context = context
        self.closed = False
        self._lock = threading.Lock()  # the number of a closed eventfd may belong to another file
        self._heard: deque[AsyncEvent] = deque(maxlen=self.MOST)
        self._rung = False  # the bell is readable
        with contextlib.ExitStack() as undo:
            queue = os.dup(context.async_fd)
            undo.callback(os.close, queue)
            os.set_blocking(queue, False)  # whoever opened the device: a read that waits would hold the loop
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.fds = (queue, self._bell)
            undo.pop_all()
        context.add_listener(self)

    def __call__(self, event: AsyncEvent) -> None:
        """Add an event that some reader has read."""
        with self._lock:
            if not self.closed:
                self._heard.append(event)
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def next(self) -> AsyncEvent | None:
        """The next event, or None if there is none; then wait for `fds`.

        :raises OSError: the device is gone, and reports nothing any more
        """
        if not self._heard:
            with self._lock:
                if self._rung and not self.closed:
                    self._rung = False
                    os.eventfd_read(self._bell)
            self.context.get_async_event()  # which adds the event to this feed, too
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """Stop listening. Nobody may be waiting for `fds`."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.context.remove_listener(self)
            for fd in self.fds:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fds"):
            self.close()
