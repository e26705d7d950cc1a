"""A descriptor that shows whether there is something to read, for programs that poll() a connection's socket.

It is an epoll instance, which is readable while one of the descriptors in it is. It contains at most one: the bell, an
eventfd that is always readable and shared by all connections of a loop. So the readiness of a connection takes one
descriptor, and reading cannot change its state. A program that takes it for the connection itself, for example a
subprocess that got it as its input, gets EINVAL on the first read or write, and no bytes.
"""

from __future__ import annotations

import os
import select

from rdmanet._core import Connection
from rdmanet.protocol import State
from rdmanet.stream.machine import Machine


def new_bell() -> int:
    """A descriptor that is always readable. The caller closes it."""
    return os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class Readiness:
    """One connection's descriptor.

    :ivar fd: readable as `look` finds; at first not
    """

    def __init__(self, bell: int, machine: Machine, connection: Connection) -> None:
        """:raises OSError: there are no descriptors left"""
        self._bell = bell
        self._machine = machine
        self._connection = connection
        self._shown = False
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()

    def look(self) -> None:
        """Make the descriptor readable or not, as there is something to read; after close() this does nothing."""
        readable = self._machine.state is not State.OPEN or self._connection.unread
        if readable == self._shown or self.fd < 0:
            return
        self._shown = readable
        if readable:
            self._epoll.register(self._bell, select.EPOLLIN)
        else:
            self._epoll.unregister(self._bell)

    def close(self) -> None:
        """Close the descriptor; later calls do nothing."""
        self.fd = -1
        self._epoll.close()
