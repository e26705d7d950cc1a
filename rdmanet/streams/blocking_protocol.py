"""The protocol of a blocking stream's connection: between asyncio's callbacks and calls that wait in C."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import cast

from rdmanet._core import BlockingEnd
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.streams.private_loop import PrivateLoop


class BlockingProtocol(BlockingEnd, asyncio.Protocol):
    """It has the connection's bytes, and knows its end."""

    transport: RdmaTransport

    def __init__(self, private: PrivateLoop, made: Callable[[BlockingProtocol], None] | None = None) -> None:
        super().__init__()
        self._private = private
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(RdmaTransport, transport)
        life = self.transport._life
        self.connected(life.connection, life.loop_context.fd)
        self._private.end = self
        made, self._made = self._made, None
        if made is not None:
            made(self)

    def eof_received(self) -> bool:
        self.eof = True
        self.changed()
        return True  # our half goes on

    def resume_writing(self) -> None:
        self.changed()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.error = exc
        self.changed()

    def why_unwritable(self) -> BaseException:
        """Why nothing can be written, although this side has not ended its half."""
        # While received bytes wait to be read, the machine knows of the end before connection_lost() is called.
        return (
            self.error
            or self.transport._life.machine.error
            or ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
        )

    async def until(self, what: int) -> None:
        """Wait until a call may go on (`may_go_on`)."""
        while not self.may_go_on(what):
            await self._next_change()

    async def until_lost(self) -> None:
        while not self.lost:
            await self._next_change()

    async def _next_change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.notify(waiter)
        await waiter
