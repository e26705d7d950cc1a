"""The asynchronous events of a device, for as many readers as there are.

Theory
------
A context has one queue of events, and who reads one takes it from all others. But contexts are shared: the
connection manager opens a device once a process, for the streams of all loops and threads and for the program's own
identifiers. So whoever reads an event tells everybody (`Context.add_listener`), and each reader has a feed: it keeps
what others have read, and rings a bell of its own for it, as the queue's descriptor is not readable any more then.
Reading and telling is one step: who asks meanwhile waits for it, and so has heard of all that has happened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from rdmanet._core import AsyncEvent, Context

__all__ = ["EventFeed"]


class EventFeed:
    """One reader's events of a context: all that come from now on. One thread reads; events may come by any.

    :ivar fds: readable when there may be some, one or the other. They are this feed's own, so that two feeds
        of a context can be watched by one loop
    """

    # Of a reader that does not come, the oldest are forgotten.
    MOST = 1024

    def __init__(self, context: Context) -> None:
        self.context = context
        self.closed = False
        self._lock = threading.Lock()  # a bell that is closed may be another file's descriptor
        self._heard: deque[AsyncEvent] = deque(maxlen=self.MOST)
        with contextlib.ExitStack() as undo:
            queue = os.dup(context.async_fd)
            undo.callback(os.close, queue)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.fds = (queue, self._bell)
            undo.pop_all()
        context.add_listener(self)

    def __call__(self, event: AsyncEvent) -> None:
        """Somebody has read this one."""
        with self._lock:
            if not self.closed:
                self._heard.append(event)
                os.eventfd_write(self._bell, 1)

    def next(self) -> AsyncEvent | None:
        """The next event, or None when there is none; then wait for `fds`.

        :raises OSError: the device is gone, and tells no more
        """
        if not self._heard:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self.context.get_async_event()  # which tells us, too
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """Hear no more. Nobody may be waiting for `fds`."""
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
