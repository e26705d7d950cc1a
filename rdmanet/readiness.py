"""A descriptor that shows whether there is something to read: for programs that poll() a connection's socket.

An epoll instance is readable while one of the descriptors in it is. This one has at most one in it: the bell, an
eventfd that has been rung for good, which all connections of a driver have in common. Hence a connection's readiness
is one descriptor; nobody can take its state away by reading it; and who takes it for the connection itself, a
subprocess that was given it as its input, say, gets an error (EINVAL) at the first read or write, and no bytes.
"""

from __future__ import annotations

import os
import select


def new_bell() -> int:
    """A descriptor that is readable for ever; whoever made it closes it."""
    return os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class Readiness:
    """One connection's descriptor.

    :ivar fd: readable as `show` said last, at first not
    """

    def __init__(self, bell: int) -> None:
        """:raises OSError: there are no descriptors left"""
        self._bell = bell
        self._shown = False
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()

    def show(self, readable: bool) -> None:
        """Let it be readable, or not; once it is closed this does nothing."""
        if readable == self._shown or self.fd < 0:
            return
        self._shown = readable
        if readable:
            self._epoll.register(self._bell, select.EPOLLIN)
        else:
            self._epoll.unregister(self._bell)

    def close(self) -> None:
        """Give the descriptor back; later calls do nothing."""
        self.fd = -1
        self._epoll.close()
