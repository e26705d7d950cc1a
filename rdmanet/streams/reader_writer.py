"""StreamReader and StreamWriter over RDMA.

Both are subclasses of asyncio's, between asyncio's own StreamReaderProtocol and our transport. The reader's methods are
compiled (_pyx/reader.pxi, _pyx/readrequest.pxi), and take bytes from where the device put them. The writer only
replaces what depends on asyncio's transports.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast

from rdmanet import credit
from rdmanet._core import CompiledReader, CompiledWriter, IntoReader
from rdmanet.errors import shown
from rdmanet.stream.in_the_clear import tell_of_failure
from rdmanet.stream.options import REVOKE_TIMEOUT_S, refuse_unbuilt
from rdmanet.stream.tls import start_tls
from rdmanet.streams.offered import OfferIterator, OfferQueue
from rdmanet.transport import RdmaTransport, create_rdma_connection

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from rdmanet._core import MR, AccessFlags
    from rdmanet.stream.peer_memory import OfferedMemory
    from rdmanet.stream.registered import RegisteredMemory
    from rdmanet.transport import RdmaServer

_LIMIT = 2**16


class RdmaStreamReader(CompiledReader, asyncio.StreamReader):
    """asyncio.StreamReader over RDMA: the same methods, errors and limit, without its copies.

    What is unread stays in the connection's receive slots. ``read()`` and the others return awaitables that are not
    coroutines of Python, but can be awaited, made a task, and cancelled as such. A read that is cancelled takes
    nothing: its bytes are unread again. There are ``readinto()`` and ``readinto_exactly()``, for memory of the
    program's own, and ``lease()``, to look at bytes where they were received.
    """

    def __init__(self, limit: int = _LIMIT, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(limit, asyncio.get_event_loop() if loop is None else loop)
        self._offered = OfferQueue()

    async def next_offer(self) -> OfferedMemory | None:
        """Wait for memory that the peer offers, and take it; None when the connection has ended.

        This is to ``offers()`` what ``readline()`` is to ``async for line in reader``. The offers are the reader's,
        since the peer sends them, but they are beside its bytes: they come in the order in which they were made, and
        may overtake bytes that nobody has read. They go on after the peer's end of file.

        Each offer is taken once. Any number of tasks may wait. What nobody takes is kept until the peer revokes it, at
        most 256 offers; after that it is not given out any more. An offer that was taken and is revoked says so by
        ``OfferedMemory.revoked``, and refuses to be used.

        If it is cancelled, no offer is lost. It raises the OSError with which the connection was lost, if it was;
        RuntimeError if the stream is encrypted, because remote memory would not be.
        """
        return await self._offered.next()

    def offers(self) -> AsyncIterator[OfferedMemory]:
        """The peer's offers, as they come: ``async for remote in reader.offers()``.

        It ends when the connection has ended, and otherwise raises what ``next_offer()`` raises. What one iteration has
        not taken, because it was left or cancelled, is there for the next.
        """
        return OfferIterator(self._offered)


class RdmaStreamWriter(CompiledWriter, asyncio.StreamWriter):
    """asyncio.StreamWriter over an RdmaTransport, or over TLS over one."""

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: _ReaderProtocol,
        reader: RdmaStreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, reader, loop)
        self._into = reader._into
        if isinstance(transport, RdmaTransport):
            self._connection = transport._life.connection
        else:
            self.__class__ = _TlsWriter

    def __del__(self) -> None:
        """As asyncio's, which Python 3.11.2 lacks: a stream that is forgotten is closed."""
        if not self.transport.is_closing():
            if self._loop.is_closed():  # type: ignore[attr-defined]
                warnings.warn("loop is closed", ResourceWarning, stacklevel=2)
            else:
                self.close()
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)

    _drain_as_asyncio = asyncio.StreamWriter.drain

    def close(self) -> None:
        """Close the stream, like asyncio's: what was written is delivered first.

        From then on, ``drain()`` raises ConnectionResetError as soon as everything that was written has left, as it
        does when the connection is lost; or the OSError that the reader got.
        """
        super().close()
        self.__class__ = _ClosedWriter  # from here on: what it does would cost each message

    def offer(
        self,
        memory: MR | RegisteredMemory | ReadableBuffer,
        *,
        access: AccessFlags | str = "read",
        name: str = "",
        revoke_timeout: float = REVOKE_TIMEOUT_S,
    ) -> AbstractAsyncContextManager[credit.Region]:
        """Let the peer read or write ``memory`` with RDMA while the block runs: ``async with writer.offer(array)``.

        This is ``RdmaTransport.offer``; its description has the arguments, the errors, and what cancelling does. The
        peer gets it by ``RdmaStreamReader.next_offer()``, or its protocol by ``region_offered()``.

        :raises RuntimeError: the stream is encrypted, and remote memory would not be
        """
        if not isinstance(self.transport, RdmaTransport):
            raise RuntimeError(f"offer(): {_NOT_ENCRYPTED}")
        return self.transport.offer(memory, access=access, name=name, revoke_timeout=revoke_timeout)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, like asyncio's. Cancelling one wait does not affect others.

        Raises the OSError with which the connection was lost, if it was.
        """
        closed: asyncio.Future[None] = self._protocol._get_close_waiter(self)  # type: ignore[attr-defined]
        if not closed.done():
            # Not shield(): from Python 3.14 on, it reports an error that comes after its caller was cancelled.
            await asyncio.wait([closed])
        closed.result()

    async def start_tls(
        self,
        sslcontext: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        ssl_handshake_timeout: float | None = None,
        ssl_shutdown_timeout: float | None = None,
    ) -> None:
        """Encrypt the stream from now on, like asyncio's, on every event loop.

        The writer of a server's callback is the server's side. What has come and nobody has read is the beginning of
        TLS. Raises what ``rdmanet.start_tls`` raises; the connection is closed then, and also if this is cancelled.
        """
        protocol: _ReaderProtocol = self._protocol  # type: ignore[attr-defined]
        await self.drain()
        before = self.transport
        try:
            transport = await start_tls(
                before,
                protocol,
                sslcontext,
                server_side=protocol.of_server,
                server_hostname=server_hostname,
                ssl_handshake_timeout=ssl_handshake_timeout,
                ssl_shutdown_timeout=ssl_shutdown_timeout,
            )
        except BaseException as exc:
            tell_of_failure(before, protocol, exc)
            raise
        self._transport = transport
        protocol.is_over(transport)
        self._reader._transport = transport  # type: ignore[attr-defined]
        self.__class__ = _TlsWriter

    def __repr__(self) -> str:
        # By the name that programs know: over TLS and after close() it is of another class.
        return f"<RdmaStreamWriter transport={self._transport!r} reader={self._reader!r}>"  # type: ignore[attr-defined]


_NOT_ENCRYPTED = (
    "the stream is encrypted (TLS), and RDMA goes past TLS: what is read and written in memory on offer would not be"
    " encrypted. Offer it over a connection without TLS"
)


class _TlsWriter(RdmaStreamWriter):
    """A writer over TLS: asyncio's methods, which know nothing of the connection below."""

    drain = asyncio.StreamWriter.drain
    close = asyncio.StreamWriter.close


class _ClosedWriter(RdmaStreamWriter):
    """A writer whose close() was called."""

    async def drain(self) -> None:
        await asyncio.sleep(0)  # what was written goes out in this turn
        # asyncio's transports call connection_lost() at this point. Ours do so when the peer's device has everything,
        # which takes longer.
        over = cast(RdmaTransport, self.transport)._closed_and_flushed
        await super().drain()
        if over:
            raise ConnectionResetError("Connection lost")


class _ReaderProtocol(asyncio.StreamReaderProtocol):
    """asyncio's protocol, but the server's callback gets our writer."""

    def __init__(
        self,
        reader: RdmaStreamReader,
        client_connected_cb: Callable[[RdmaStreamReader, RdmaStreamWriter], Awaitable[None] | None] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(reader, None, loop=loop)
        self._connected_cb = client_connected_cb
        self._rdma_sink = reader._into
        self._offered = reader._offered
        self._handed_reader: RdmaStreamReader | None = reader

    @property
    def of_server(self) -> bool:
        """Whether a server has accepted the connection."""
        return self._connected_cb is not None

    def is_over(self, transport: asyncio.Transport) -> None:
        """TLS has begun: this transport is above it."""
        self._transport = transport
        self._over_ssl = True
        self._offered.end(RuntimeError(f"next_offer(): {_NOT_ENCRYPTED}"))

    def region_offered(self, remote: OfferedMemory) -> None:
        self._offered.put(remote)

    def region_revoked(self, remote: OfferedMemory) -> None:
        self._offered.remove(remote)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._rdma_sink.loses(exc)
        super().connection_lost(exc)
        self._offered.end(exc)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not isinstance(transport, RdmaTransport):
            self._offered.end(RuntimeError(f"next_offer(): {_NOT_ENCRYPTED}"))
        reader, self._handed_reader = self._handed_reader, None
        if self._connected_cb is None or reader is None:
            return
        loop = asyncio.get_running_loop()
        # This is what asyncio's connection_made() does if it gets the callback itself. Up to Python 3.12 the protocol
        # keeps the writer, and so the reader, until the peer's end of file or connection_lost(). Later, only the
        # callback has the writer, and a writer that nobody keeps closes its connection.
        writer = RdmaStreamWriter(transport, self, reader, loop)  # type: ignore[arg-type]
        if hasattr(self, "_stream_writer"):
            self._stream_writer: RdmaStreamWriter | None = writer
        try:
            result = self._connected_cb(reader, writer)
            if asyncio.iscoroutine(result):
                self._task = loop.create_task(result, name=getattr(result, "__qualname__", None))
                self._task.add_done_callback(functools.partial(_callback_ended, transport))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            _callback_failed(transport, exc)  # a plain function's: asyncio would leave the connection open

    def eof_received(self) -> bool | None:
        # A TCP transport whose peer has ended is kept by those who use it, and closed when nobody does. So from here on
        # the writer is the callback's alone.
        if getattr(self, "_stream_writer", None) is not None:
            self._stream_writer = None
        return super().eof_received()


def _callback_ended(transport: Any, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        transport.close()
    elif (exc := task.exception()) is not None:
        _callback_failed(transport, exc)


def _callback_failed(transport: Any, exc: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": "Unhandled exception in client_connected_cb", "exception": exc, "transport": transport}
    )
    transport.close()


def with_compiled_reader(protocol: asyncio.BaseProtocol) -> asyncio.BaseProtocol:
    """Make an asyncio.StreamReader one of ours, and its StreamReaderProtocol, before connection_made() is called.

    ``asyncio.open_connection`` and ``start_server`` make both themselves. Only these exact classes, with nothing read
    yet, are changed: a subclass may depend on how its base works.
    """
    if type(protocol) is not asyncio.StreamReaderProtocol:
        return protocol
    state = vars(protocol)
    reader: Any = protocol._stream_reader  # type: ignore[attr-defined]
    is_exact = type(reader) is asyncio.StreamReader
    if not is_exact or reader._buffer or reader._eof or reader._exception:
        return protocol
    # What asyncio's __init__() has set is ours from here on, as attributes of the class; the rest stays.
    into, offered = IntoReader(reader._loop, reader._limit), OfferQueue()
    reader.__class__ = RdmaStreamReader
    reader._into, reader._offered = into, offered
    protocol.__class__ = _ReaderProtocol
    callback = state.get("_client_connected_cb")
    state.update(
        _client_connected_cb=None,
        _connected_cb=callback,
        _rdma_sink=into,
        _offered=offered,
        _handed_reader=None if callback is None else reader,
        _strong_reader=None,
    )
    return protocol


async def open_rdma_connection(
    host: str | None = None, port: int | str | None = None, *, limit: int = _LIMIT, **kwds: Any
) -> tuple[RdmaStreamReader, RdmaStreamWriter]:
    """``asyncio.open_connection`` over RDMA; returns ``(reader, writer)``.

    ``limit`` limits the reader's buffer, in bytes, as in asyncio. The other keywords, the errors and the effect of
    cancelling are those of ``create_rdma_connection``.
    """
    if kwds:
        refuse_unbuilt("open_rdma_connection", kwds)
    loop = asyncio.get_running_loop()
    reader = RdmaStreamReader(limit, loop)
    protocol = _ReaderProtocol(reader, None, loop)
    transport, _ = await create_rdma_connection(lambda: protocol, host, port, **kwds)
    return reader, RdmaStreamWriter(transport, protocol, reader, loop)


async def start_rdma_stream_server(
    client_connected_cb: Callable[[RdmaStreamReader, RdmaStreamWriter], Awaitable[None] | None],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = _LIMIT,
    **kwds: Any,
) -> RdmaServer:
    """``asyncio.start_server`` over RDMA.

    ``client_connected_cb(reader, writer)`` is called for each connection; a coroutine function runs as a task.
    ``limit`` limits the buffer of each reader, in bytes. The other keywords, the errors and the effect of cancelling
    are those of ``start_rdma_server``.

    Raises TypeError if the callback cannot be called.
    """
    refuse_unbuilt("start_rdma_stream_server", kwds)
    if not callable(client_connected_cb):
        raise TypeError(
            f"start_rdma_stream_server(client_connected_cb, host, port): the callback comes first, "
            f"not {shown(client_connected_cb)}"
        )
    loop = asyncio.get_running_loop()

    def factory() -> asyncio.BaseProtocol:
        return _ReaderProtocol(RdmaStreamReader(limit, loop), client_connected_cb, loop)

    from rdmanet.transport import start_rdma_server  # which clients do not take

    return await start_rdma_server(factory, host, port, **kwds)
