"""Dask over RDMA: what `distributed` calls a comm backend, for addresses that begin with ``rdma://``.

Importing it imports distributed, which does so itself when it meets such an address: by the entry point ``rdma`` of the
group ``distributed.comm.backends`` (pyproject.toml). docs/howto/dask.md is for its users.

A message
---------
distributed makes a list of frames of each message, and messages of frames. Small frames are pickled objects; large ones
are the memory of arrays, and what comes of them at the other side keeps their memory. A message is this, in 64-bit
numbers of the machine's byte order, as in distributed's own backends::

    preface:  the length of the head; how many bytes to leave free in front of it; from which length on a frame is lent
    head:     the number of frames, the length of each, and the first frames in whole
    rest:     each other frame that is not lent, which is received into memory of its own
    a byte:   for up to 32 lent frames, when they are there

The sender decides which frames are in the head: all until the second one whose memory is kept (`_first_kept`). So an
array keeps no other array alive, nor much else; and it is aligned, by the bytes that are left free.

A large frame is *lent*: the receiver allocates memory for it, and offers that to the sender, which writes there by RDMA
from where the array lies (docs/howto/remote-memory.md). Nothing else copies it, and both sides run only three times,
however long it is; its bytes in the stream would take both sides in turn, a ring's length at a time, which is slow
where processors are busy. Over TLS nothing is lent, since RDMA goes past it. Who receives a message that would have
shorter frames lent, or any over TLS, drops the connection.

So `write` of a large frame ends when the peer has read the message: a sender never queues more than one.

Errors
------
After a read or write that failed or was cancelled nobody knows what is on its way, so the connection is aborted.
distributed expects a CommClosedError of what the connection or the peer is to blame for, and the cancellation itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import dask
from dask.utils import parse_timedelta
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.registry import Backend
from distributed.comm.utils import ensure_concrete_host, from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.system import MEMORY_LIMIT
from distributed.utils import ensure_ip, ensure_memoryview, get_ip

from rdmanet import (
    RdmaServer,
    RdmaStreamReader,
    RdmaStreamWriter,
    RdmaTransport,
    open_rdma_connection,
    start_rdma_stream_server,
)
from rdmanet._core import unfilled

logger = logging.getLogger(__name__)

_PREFACE: Final = struct.Struct("QQQ")
_NUMBER: Final = struct.Struct("Q")
_ALIGNED_BYTES: Final = 16  # as malloc() does
_UNSPLIT: Final = 1 << 62  # the longest frame: distributed cuts them for TCP's sake
_LENT_BYTES: Final = 1 << 20  # a frame of so many bytes takes as long either way, on idle processors
_LENT_AT_ONCE: Final = 32
_NEVER: Final = (1 << 64) - 1
_THERE: Final = b"\1"
_JOINED_BYTES: Final = 128 << 10  # messages up to this are copied into one write
_JOINED_BYTES_MOST: Final = 32 << 20  # and up to this those whose frames are mostly shorter than
_FRAGMENT_BYTES: Final = 32 << 10


class RdmaComm(Comm):
    """A connection, as distributed uses it: one task reads, and one writes."""

    max_shard_size = _UNSPLIT

    def __init__(
        self,
        reader: RdmaStreamReader,
        writer: RdmaStreamWriter,
        local_address: str,
        peer_address: str,
        deserialize: bool = True,
    ) -> None:
        super().__init__(deserialize=deserialize)
        self._local_addr = local_address  # these two names are known to distributed
        self._peer_addr = peer_address
        self._reader = reader
        self._writer = writer
        self._lends_from = _LENT_BYTES if isinstance(writer.transport, RdmaTransport) else _NEVER
        self._is_closed = False
        self._extra = {
            name: value
            for name in ("peercert", "cipher")
            if (value := writer.get_extra_info(name)) is not None
        }
        self._forgotten = weakref.finalize(
            self, _abort_forgotten, writer.transport, asyncio.get_running_loop(), repr(self)
        )
        self._forgotten.atexit = False

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    @property
    def extra_info(self) -> dict[str, Any]:
        """Over TLS the peer's certificate, "peercert", and the "cipher"."""
        return self._extra

    async def read(self, deserializers: Any = None) -> Any:
        """The next message."""
        if self._is_closed:
            raise CommClosedError(f"read() of {self!r}")
        try:
            frames = await self._read_frames()
        except (EOFError, OSError, MemoryError) as exc:
            raise self._failed(exc) from exc
        except BaseException:
            self.abort()
            raise
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except EOFError as exc:  # of an object's own: it is cut short
            raise self._failed(exc) from exc

    async def _read_frames(self) -> list[memoryview]:
        reader = self._reader
        head_bytes, free, lent_from = _PREFACE.unpack(await reader.readexactly(_PREFACE.size))
        if lent_from < self._lends_from:
            raise EOFError(f"the peer lends frames from {lent_from} bytes on, fewer than {self._lends_from}")
        _refuse_more_than_memory(head_bytes + free)
        head = host_array(free + head_bytes)[free:]
        await reader.readinto_exactly(head)
        frames, lent = _frames_of_head(head, lent_from)
        for frame in frames:
            if frame.obj is not head.obj and frame.nbytes and frame.nbytes < lent_from:
                await reader.readinto_exactly(frame)
        for first in range(0, len(lent), _LENT_AT_ONCE):
            await self._receive_lent(lent[first : first + _LENT_AT_ONCE])
        return frames

    async def _receive_lent(self, memories: Sequence[memoryview]) -> None:
        """Let the peer write what it sends of these lengths there."""
        async with contextlib.AsyncExitStack() as offers:
            try:
                for memory in memories:
                    # When the byte is here, the peer has written, and nothing is to be waited for.
                    offer = self._writer.offer(memory, access="write", revoke_timeout=0)
                    await offers.enter_async_context(offer)
                await self._reader.readexactly(len(_THERE))
            except BaseException:
                self.abort()  # now, while the memory is not given back
                raise

    async def _send_lent(self, views: Sequence[memoryview]) -> None:
        for view in views:
            memory = await self._reader.next_offer()
            if memory is None:
                raise EOFError("the peer has closed the connection")
            if memory.length != view.nbytes:
                raise EOFError(f"the peer has memory of {memory.length} bytes for a frame of {view.nbytes}")
            await memory.write(0, view)
        self._writer.write(_THERE)

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Send a message. It returns its length in bytes, when the memory of its objects has been read."""
        if self._is_closed:
            raise CommClosedError(f"write() of {self!r}")
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
            frame_split_size=self.max_shard_size,
        )
        pieces, lent, total_bytes = _pieces_of(frames, self._lends_from)
        try:
            self._writer.writelines(pieces)
            for first in range(0, len(lent), _LENT_AT_ONCE):
                await self._send_lent(lent[first : first + _LENT_AT_ONCE])
            await self._writer.drain()
        except (EOFError, OSError) as exc:
            raise self._failed(exc) from exc
        except BaseException:
            self.abort()
            raise
        return total_bytes

    def _failed(self, exc: BaseException) -> CommClosedError:
        self.abort()
        return CommClosedError(f"in {self!r}: {type(exc).__name__}: {exc}")

    async def close(self) -> None:
        """Send what was written, and close the connection."""
        self._is_closed = True
        self._forgotten.detach()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # it was lost: then it is closed
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close the connection at once. What is on its way is lost, and the peer sees a reset."""
        self._is_closed = True
        self._forgotten.detach()
        self._writer.transport.abort()

    def closed(self) -> bool:
        """Whether it was closed, at either side; what the peer had written before is read first."""
        if not self._is_closed and (self._writer.is_closing() or self._reader.at_eof()):
            self.abort()
        return self._is_closed


def _abort_forgotten(transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop, text: str) -> None:
    """A comm was not closed, and is garbage. The collector may run in any thread."""
    logger.warning("aborted a connection that nobody closed: %s", text)
    with contextlib.suppress(RuntimeError):  # its loop is closed
        loop.call_soon_threadsafe(transport.abort)


# ---------------------------------------------------------------------------
# Frames
# ---------------------------------------------------------------------------


def _pieces_of(frames: Sequence[Any], lent_from: int) -> tuple[list[Any], list[memoryview], int]:
    """What is written of a message of these frames to the stream, and what is lent; and the length of all, in bytes."""
    views = [ensure_memoryview(frame) for frame in frames]
    index = struct.pack(f"{1 + len(views)}Q", len(views), *(view.nbytes for view in views))
    lent = [view for view in views if view.nbytes >= lent_from]
    streamed = [view for view in views if view.nbytes < lent_from]
    in_head, kept = _first_kept(streamed)
    before_kept = len(index) + sum(view.nbytes for view in streamed[:kept])
    head_bytes = before_kept + sum(view.nbytes for view in streamed[kept:in_head])
    preface = _PREFACE.pack(head_bytes, -before_kept % _ALIGNED_BYTES, lent_from)
    pieces = [preface + index, *streamed]
    stream_bytes = len(preface) + len(index) + sum(view.nbytes for view in streamed)
    if stream_bytes < _JOINED_BYTES or (
        stream_bytes < _JOINED_BYTES_MOST and stream_bytes < len(pieces) * _FRAGMENT_BYTES
    ):
        pieces = [b"".join(pieces)]
    return pieces, lent, stream_bytes + sum(view.nbytes for view in lent)


def _first_kept(views: Sequence[memoryview]) -> tuple[int, int]:
    """How many frames are in the head, and which is the first one there whose memory will be kept.

    Of memory that is not of a `bytes` object an array is made, and keeps all that it was received with: the head, if
    what else is there is little beside it. One object may be in several frames, which stay together.
    """
    kept, before = len(views), 0
    for index, view in enumerate(views):
        if not isinstance(view.obj, bytes):
            if kept == len(views) and before <= max(2048, view.nbytes * 0.05):
                kept = index
            elif kept == len(views) or view.obj is not views[kept].obj:
                return index, min(kept, index)
        before += view.nbytes
    return len(views), kept


def _frames_of_head(head: memoryview, lent_from: int) -> tuple[list[memoryview], list[memoryview]]:
    """The frames of a message: those in its head, and memory for the others; and of these the ones that are lent.

    :raises EOFError: it is no head
    """
    try:
        (count,) = _NUMBER.unpack_from(head)
        at = _NUMBER.size * (1 + count)
        lengths = struct.unpack(f"{count}Q", head[_NUMBER.size : at])
    except struct.error:
        raise EOFError(f"the peer sent {head.nbytes} bytes that are no head of a message") from None
    _refuse_more_than_memory(sum(lengths))
    frames, lent = [], []
    for length in lengths:
        if length >= lent_from:
            frames.append(memoryview(unfilled(length)))
            lent.append(frames[-1])
        elif at < head.nbytes:
            frames.append(head[at : at + length])
            at += length
        else:
            frames.append(host_array(length))
    if at != head.nbytes:
        raise EOFError(f"the peer sent a head of {head.nbytes} bytes whose frames end at {at}")
    return frames, lent


def _refuse_more_than_memory(nbytes: int) -> None:
    if nbytes > MEMORY_LIMIT:
        raise MemoryError(f"the peer sends a message of {nbytes} bytes, and there are {MEMORY_LIMIT} here")


# ---------------------------------------------------------------------------
# Connecting and listening
# ---------------------------------------------------------------------------


def _tls_context(address: str, arguments: dict[str, Any]) -> ssl.SSLContext | None:
    """The context for TLS among the arguments that distributed's Security makes; None: no TLS.

    :raises RuntimeError: there is none, and Dask's configuration demands encryption
    """
    context: ssl.SSLContext | None = arguments.get("ssl_context")
    if context is None and arguments.get("require_encryption"):
        raise RuntimeError(
            f"Dask's configuration requires encryption, and there is no certificate for {address}: give Security() one"
        )
    return context


def _keepalive() -> tuple[float, float, int]:
    """As TCP's is set for Dask: a peer whose host is silent for this time is lost."""
    seconds = parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), default="seconds")
    return seconds / 4, seconds * 3 / 40, 10


class RdmaConnector(Connector):
    """Makes connections."""

    prefix = "rdma://"
    comm_class = RdmaComm

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> RdmaComm:
        """Connect to HOST:PORT."""
        host, port = parse_host_port(address)
        context = _tls_context(self.prefix + address, connection_args)
        tls: dict[str, Any] = {}
        if context is not None:
            tls = {"ssl": context, "server_hostname": connection_args.get("server_hostname")}
        try:
            reader, writer = await open_rdma_connection(host, port, keepalive=_keepalive(), **tls)
        except ssl.SSLError as exc:
            raise FatalCommClosedError(f"TLS with {self.prefix}{address}: {exc}") from exc
        local = _uri(self.prefix, *writer.get_extra_info("sockname")[:2])
        return self.comm_class(reader, writer, local, self.prefix + address, deserialize)


class RdmaListener(BaseListener):
    """Listens at HOST:PORT, and hands each connection to a handler when both sides have shaken hands."""

    prefix = "rdma://"
    comm_class = RdmaComm

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[RdmaComm], Awaitable[None]],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        self._context = _tls_context(self.prefix + address, connection_args)
        self._host, self._port = parse_host_port(address, default_port)
        self._default_host = default_host
        self._handler = comm_handler
        self._deserialize = deserialize
        self._allow_offload = allow_offload
        self._server: RdmaServer | None = None

    async def start(self) -> None:
        self._server = await start_rdma_stream_server(
            self._accepted,
            self._host,
            self._port,
            ssl=self._context,
            backlog=int(dask.config.get("distributed.comm.socket-backlog")),
            keepalive=_keepalive(),
        )

    def stop(self) -> None:
        """Accept no more. Connections live on; those that shake hands are aborted by abort_handshaking_comms()."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _accepted(self, reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        if self._server is None:
            # Stopped since: nobody else would end this, and the client waits for a handshake.
            writer.transport.abort()
            return
        local, peer = (
            _uri(self.prefix, *writer.get_extra_info(name)[:2]) for name in ("sockname", "peername")
        )
        comm = self.comm_class(reader, writer, local, peer, self._deserialize)
        comm.allow_offload = self._allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("the connection from %s ended before its handshake", peer)
            return
        await self._handler(comm)

    def get_host_port(self) -> tuple[str, int]:
        """Where it listens."""
        if self._server is None:
            raise ValueError(f"{type(self).__name__} has not been started, or was stopped")
        host, port = min((each.getsockname() for each in self._server.sockets), key=len)[:2]  # IPv4 first
        return host, port

    @property
    def listen_address(self) -> str:
        return _uri(self.prefix, *self.get_host_port())

    @property
    def contact_address(self) -> str:
        """An address by which others reach it, where it listens at all."""
        host, port = self.get_host_port()
        return _uri(self.prefix, ensure_concrete_host(host, self._default_host), port)


def _uri(prefix: str, host: str, port: int) -> str:
    return f"{prefix}{unparse_host_port(host, port)}"


class RdmaBackend(Backend):
    """What distributed gets for ``rdma://``: addresses are HOST:PORT, as with TCP."""

    def get_connector(self) -> RdmaConnector:
        return RdmaConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[RdmaComm], Awaitable[None]],
        deserialize: bool,
        **connection_args: Any,
    ) -> RdmaListener:
        return RdmaListener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        return self.get_address_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        host, port = parse_host_port(loc)
        return host, port

    def resolve_address(self, loc: str) -> str:
        host, port = parse_host_port(loc)
        return str(unparse_host_port(ensure_ip(host), port))

    def get_local_address_for(self, loc: str) -> str:
        host, _ = parse_host_port(loc)
        return str(unparse_host_port(get_ip(ensure_ip(host)), None))
