"""Connections that a listener of AnyIO's or Trio's has, and that wait for ``accept()``."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from rdmanet.base import log_rate
from rdmanet.base.notifier import Future, Notifier
from rdmanet.errors import shown
from rdmanet.stream.server import RdmaServer
from rdmanet.streams.buffering import BufferingProtocol

logger = logging.getLogger("rdmanet")


class AcceptQueue:
    """At most ``backlog`` connections; one that comes beyond is aborted.

    :ivar server: the server that they come to, once there is one
    :ivar closed: the listener is closed: there will be no more
    """

    server: RdmaServer

    def __init__(self, backlog: int, home: Notifier) -> None:
        """
        :param home: the loop of whoever accepts
        """
        if backlog < 1:
            raise ValueError(f"backlog={shown(backlog)} is not a positive integer")
        self.closed = False
        self._backlog = backlog
        self._home = home
        self._arrived: deque[BufferingProtocol] = deque()
        self._waiter: Future | None = None

    def factory(self) -> BufferingProtocol:
        """The protocol of a new connection."""
        return BufferingProtocol(self._arrive, home=self._home)

    def serves(self, server: RdmaServer) -> None:
        """The server listens."""
        self.server = server
        server.on_close = self._wake

    async def next(self, library: Any) -> BufferingProtocol:
        """Wait for a connection. Cancelling it loses none.

        :param library: AnyIO or Trio: its ClosedResourceError is raised when the listener is closed, its
            BrokenResourceError when the device is gone
        """
        while not self.closed:
            if self._arrived:
                return self._arrived.popleft()
            if not self.server.sockets:
                raise library.BrokenResourceError("the device that was listened on is gone")
            self._waiter = self._home.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise library.ClosedResourceError("this listener is closed")

    def close(self) -> None:
        """Stop listening, and abort the connections that wait."""
        self.closed = True
        self.server.close()
        while self._arrived:
            self._arrived.popleft().transport.abort()
        self._wake()

    def _arrive(self, protocol: BufferingProtocol) -> None:
        if self.closed or len(self._arrived) >= self._backlog:
            why = "aborted a connection: the listener is closed, or %d wait to be accepted"
            log_rate.warn(logger, "backlog", why, self._backlog)
            protocol.transport.abort()
            return
        self._arrived.append(protocol)
        self._wake()

    def _wake(self) -> None:
        waiter: Any = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
