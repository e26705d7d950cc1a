"""What the loop's own methods are, for ours that replace them.

They are looked up at each call: a program or its tests may replace one, in its class or on the loop.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rdmanet.loop import loading
from rdmanet.loop.annotation import Making, nothing_to_make

if TYPE_CHECKING:
    from rdmanet.stream.waits import Waits

Method = Callable[..., Awaitable[Any]]


class Base:
    """The methods of the loop that ours replaces, and those that its create_connection() calls.

    :ivar create_connection: and the others, of the same names: the base's, which may change
    :ivar getaddrinfo: the loop's own where the base asks that, so the program may have replaced it
    """

    create_connection: Method
    create_server: Method
    connect_accepted_socket: Method
    getaddrinfo: Method
    sock_accept: Method
    sock_connect: Method

    def __init__(self, loop: asyncio.AbstractEventLoop, above: Any) -> None:
        """:param above: super(), as seen from the class that overrides these"""
        self.loop = loop
        self._above = above
        self._asks_loop = isinstance(loop, asyncio.BaseEventLoop)  # uvloop's asks nobody
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that nobody awaits: inquiries, and attempts that have lost and have not ended yet."""
        self.asking: dict[tuple[str, int], list[asyncio.Future[Any]]] = {}
        """Doors that are being asked by an inquiry, by address and port, with the others that wait for that answer."""

    @functools.cached_property
    def waits(self) -> Waits:
        """What limits the time of attempts to connect by RDMA, whose modules are loaded."""
        found: Waits = loading.load().waits.Waits(self.loop)
        return found

    def close(self) -> None:
        """Wait for nothing any more."""
        if "waits" in self.__dict__:
            self.waits.close()

    def __getattr__(self, name: str) -> Any:
        of_loop = name == "getaddrinfo" and self._asks_loop
        return getattr(self.loop if of_loop else self._above, name)

    async def connect(self, sock: socket.socket, address: Any) -> None:
        """Connect a socket by TCP, by the loop's sock_connect() where the base's create_connection() calls that."""
        if not self._asks_loop:
            await self.sock_connect(sock, address)
            return
        call = Making(nothing_to_make, {})  # so the loop's leaves it to TCP
        try:
            await self.loop.sock_connect(sock, address)
        finally:
            call.end()
