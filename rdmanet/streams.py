"""StreamReader and StreamWriter over RDMA.

The reader is asyncio's own, fed by asyncio's own StreamReaderProtocol, so everything that is known
of them holds. The writer is a subclass that only replaces what depends on asyncio's transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, cast

from rdmanet.transport import RdmaServer, RdmaTransport, create_rdma_connection, start_rdma_server

_LIMIT = 2**16


class RdmaStreamWriter(asyncio.StreamWriter):
    """asyncio.StreamWriter over an RdmaTransport."""

    def close(self) -> None:
        """As asyncio's: what was written is delivered first.

        From then on ``drain()`` raises ConnectionResetError as soon as all that was written has left, as it does when
        the connection was lost; or the OSError that the reader was told.
        """
        super().close()
        self.__class__ = (
            _ClosedWriter  # until now drain() is asyncio's own: a wrapper would cost each message
        )

    async def wait_closed(self) -> None:
        """As asyncio's; cancelling it does not spoil it for the next who waits."""
        await asyncio.shield(self._protocol._get_close_waiter(self))  # type: ignore[attr-defined]

    async def start_tls(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not built yet, so there is nothing to cancel.

        :raises NotImplementedError: always
        """
        raise NotImplementedError("RdmaStreamWriter.start_tls() is not supported yet")


class _ClosedWriter(RdmaStreamWriter):
    """A writer whose close() was called."""

    async def drain(self) -> None:
        await asyncio.sleep(0)  # what was written goes out in this turn
        # asyncio's protocol is told of the end then; ours when the peer's device has everything, which takes longer.
        over = cast(RdmaTransport, self.transport)._closed_and_flushed
        await super().drain()
        if over:
            raise ConnectionResetError("Connection lost")


class _ReaderProtocol(asyncio.StreamReaderProtocol):
    """asyncio's, with our writer for the server's callback."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        client_connected_cb: Callable[[asyncio.StreamReader, RdmaStreamWriter], Awaitable[None] | None]
        | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(reader, None, loop=loop)
        self._connected_cb = client_connected_cb
        self._handed_reader: asyncio.StreamReader | None = reader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        reader, self._handed_reader = self._handed_reader, None
        if self._connected_cb is None or reader is None:
            return
        loop = asyncio.get_running_loop()
        # What asyncio's connection_made does when it is given the callback itself. Up to Python 3.12 the
        # protocol keeps the writer, and so the reader, until connection_lost(); since then it is the
        # callback's own, and a writer that nobody keeps closes its connection.
        writer = RdmaStreamWriter(cast(asyncio.WriteTransport, transport), self, reader, loop)
        if hasattr(self, "_stream_writer"):
            self._stream_writer = writer
        result = self._connected_cb(reader, writer)
        if asyncio.iscoroutine(result):
            task = self._task = loop.create_task(result)

            def ended(task: asyncio.Task[None]) -> None:
                if task.cancelled():
                    cast(RdmaTransport, transport).close()
                    return
                exc = task.exception()
                if exc is not None:
                    loop.call_exception_handler(
                        {
                            "message": "Unhandled exception in client_connected_cb",
                            "exception": exc,
                            "transport": transport,
                        }
                    )
                    cast(RdmaTransport, transport).close()

            task.add_done_callback(ended)


async def open_rdma_connection(
    host: str | None = None, port: int | str | None = None, *, limit: int = _LIMIT, **kwds: Any
) -> tuple[asyncio.StreamReader, RdmaStreamWriter]:
    """``asyncio.open_connection`` over RDMA; returns ``(reader, writer)``.

    ``limit`` bounds the reader's buffer, in bytes, as asyncio's does. The other keywords, the errors
    and what cancelling means are those of ``create_rdma_connection``.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = _ReaderProtocol(reader, None, loop)
    transport, _ = await create_rdma_connection(lambda: protocol, host, port, **kwds)
    return reader, RdmaStreamWriter(cast(asyncio.WriteTransport, transport), protocol, reader, loop)


async def start_rdma_stream_server(
    client_connected_cb: Callable[[asyncio.StreamReader, RdmaStreamWriter], Awaitable[None] | None],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = _LIMIT,
    **kwds: Any,
) -> RdmaServer:
    """``asyncio.start_server`` over RDMA.

    ``client_connected_cb(reader, writer)`` is called for each connection; if it is a coroutine
    function it runs as a task. ``limit`` bounds each reader's buffer, in bytes. The other keywords,
    the errors and what cancelling means are those of ``start_rdma_server``.

    Raises TypeError for a callback that cannot be called.
    """
    if not callable(client_connected_cb):
        raise TypeError(
            f"start_rdma_stream_server(client_connected_cb, host, port): the callback comes first, "
            f"not {client_connected_cb!r}"
        )
    loop = asyncio.get_running_loop()

    def factory() -> asyncio.BaseProtocol:
        return _ReaderProtocol(asyncio.StreamReader(limit=limit, loop=loop), client_connected_cb, loop)

    return await start_rdma_server(factory, host, port, **kwds)
