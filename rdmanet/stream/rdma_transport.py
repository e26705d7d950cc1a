"""RdmaTransport: asyncio's face over a connection.

A transport is what asyncio sees, and decides nothing. ``Lifecycle`` (lifecycle.py) has the connection's parts, and
decides what happens to it. ``Connection`` (compiled) moves the bytes. A transport's ``write`` is the connection's
method, and the connection calls ``data_received`` (_pyx/sink.pxi), so no frame of this file runs per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rdmanet import credit
from rdmanet.protocol import State
from rdmanet.stream import ending
from rdmanet.stream.establish import Role
from rdmanet.stream.lifecycle import Lifecycle
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.options import REVOKE_TIMEOUT_S, StreamConfig
from rdmanet.stream.tls import face_of
from rdmanet.stream.transport_socket import RdmaSocket

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from rdmanet._core import MR, QP, AccessFlags, SharedRing, StreamEngine
    from rdmanet.stream.regions import Regions
    from rdmanet.stream.registered import RegisteredMemory
    from rdmanet.stream.server import ConnectRequest


class RdmaTransport(asyncio.Transport):
    """An asyncio transport over an RDMA connection (asyncio.Transport, method by method)."""

    # What asyncio's own code asks of transports.
    _start_tls_compatible = True

    def __init__(
        self,
        loop_context: LoopContext,
        config: StreamConfig,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        role: Role,
        context: contextvars.Context | None = None,
        on_made: Callable[[], None] = lambda: None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """
        :param role: CLIENT, if ``_connect`` is to be called; SERVER, if ``_accept``
        :param context: the context of the protocol's callbacks; by default a copy of the caller's
        :param on_made: called when the connection is established
        :param on_over: called once, when the connection, or the attempt, is over for its program
        """
        self._loop, self._on_over = loop_context.loop, on_over
        if context is None:
            context = contextvars.copy_context()
        life = self._life = Lifecycle(
            self, loop_context, config, protocol_factory, role, context, on_made, self._over
        )
        self._machine = life.machine
        self._connection = life.connection
        # The connection's own methods, without a frame of Python between.
        if type(self).write is RdmaTransport.write:
            self.write = self._connection.write  # type: ignore[method-assign]
            self.writelines = self._connection.writelines  # type: ignore[method-assign]

    def _over(self) -> None:
        """From now on the class's write() is called, which says why it refuses."""
        self.__dict__.pop("write", None)
        self.__dict__.pop("writelines", None)
        on_over = self._on_over
        del self._on_over  # it may refer to us
        on_over()

    # -- for those who make it -----------------------------------------------------------------------------

    def _accept(self, request: ConnectRequest) -> None:
        """The accepting side. It goes on when ESTABLISHED comes."""
        self._life.facts.peers_qp = request.peers_qp
        self._life.accept(request.id, request.hello)

    def _end_now(self, error: Exception | None = None) -> None:
        """abort(), without a word to the peer; connection_lost() gets this error. Later calls do nothing."""
        ending.end_now(self._life, error)

    def _close_above(self) -> None:
        """close(), but if there is TLS above, it sends what it has buffered, and says good-bye, first."""
        face = face_of(self._life.callbacks.protocol)
        if face is None:
            self.close()
        elif not face.is_closing():
            face.close()

    # -- the parts -----------------------------------------------------------------------------------------

    @property
    def engine(self) -> StreamEngine:
        """The data engine that the connection is on."""
        return self._connection.engine

    @property
    def qp(self) -> QP | None:
        """The connection's queue pair; None before there is one."""
        return self._connection.qp

    @property
    def shared(self) -> SharedRing | None:
        """The shared receive queue that the connection receives from; None if it has a ring of its own."""
        return self._connection.shared

    # -- asyncio.BaseTransport -----------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, by its name; ``default`` if it is not known.

        ``sockname`` and ``peername`` are addresses. ``socket`` stands for asyncio's socket. ``fabric`` is "rdma", and
        ``fabric_reason`` says why. ``rdma_device`` and
        ``rdma_library`` are names, ``rdma_port`` and ``rdma_qp`` are the numbers of the device's port and of the queue
        pair. ``rdma_peer_user`` is the user of this host who has connected to this server, if the kernel tells.
        ``rdma_pd`` is the protection domain in which to register memory for ``offer``. ``rdma_shared_receive``
        is the state of its shared receive queue, if it has one. ``rdma_stats`` are counters of this connection:
        ``bytes_sent`` in all, of which ``bytes_borrowed`` were read from the program's memory into the peer's slots,
        and ``bytes_placed`` into memory that the peer named, both without a copy; ``bytes_received``, of which
        ``bytes_placed_here`` came into memory that a read of ours had named; ``wants_open``, how many reads have named
        memory that the peer may still write to; ``frames_sent``, ``frames_received`` and ``control_frames_sent``. Of
        now: ``credits``, the frames that may be sent; ``peer_slots``; ``sends_in_flight``; ``slots_held``, with bytes
        that are not read, or not granted again; ``slots_leased``, shown by ``RdmaStreamReader.lease``;
        ``slots_borrowed`` of a shared queue; ``bytes_registered``; ``frame_bytes``, which the next frame can hold.
        Times in microseconds: ``us_open``, since it was established; ``us_without_credits``, for which bytes have
        waited for credits, ``waits_for_credits`` times; ``us_since_sent`` and ``us_since_received``, since its last
        bytes: these are as exact as the loop's turns are short. ``rdma_offers`` is what the peer has by `offer`, as
        in ``RegisteredMemory.offers()``.
        """
        facts = self._life.facts
        if name == "rdma_stats":
            return self._connection.stats() if facts else default
        if name == "rdma_offers":
            regions = self._life.known_regions
            held = [] if regions is None else regions.held()
            return held if facts else default
        if name == "rdma_peer_user":
            cm_id = self._life.endpoint.id
            user = None if cm_id is None else cm_id.peer_user
            return default if user is None else user
        if name == "rdma_shared_receive":
            return default if self.shared is None else self.shared.stats()
        if name == "socket" and facts and name not in (kept := facts.kept()):
            kept[name] = RdmaSocket(kept["sockname"], facts.get("peername"), self)
        return facts.get(name, default)

    def explain(self) -> str:
        """What the connection is, and who waits for whom, with numbers: a few lines of text.

        Nothing is computed before this is called. docs/howto/watch.md explains the answers. ``rdmanet.connections()``
        has the same, and the numbers, for all connections of the process.
        """
        return self._life.info().explain()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        self._life.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The current protocol; None when the connection has ended and nobody else keeps the protocol."""
        return self._life.callbacks.protocol  # type: ignore[return-value]

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._life.is_closing()

    def close(self) -> None:
        """Stop reading, send what was written and end of file, and close the connection.

        ``connection_lost(None)`` is called when the peer's device (not its application) has everything, or
        ``connection_lost(TimeoutError)`` when nothing moved for ``close_timeout`` seconds.
        """
        self._life.close()

    # -- asyncio.ReadTransport -----------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether bytes that arrive are delivered (asyncio.ReadTransport.is_reading)."""
        return self._connection.reading and not self.is_closing()

    def pause_reading(self) -> None:
        """Stop calling data_received. Bytes that have arrived keep their slots, so the peer runs out of credits."""
        self._life.pause_reading()

    def resume_reading(self) -> None:
        """Call data_received again, from the event loop, not from within this call."""
        self._connection.reading = True

    # -- asyncio.WriteTransport ----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data``, a bytes-like object; never blocks (asyncio.WriteTransport.write).

        The device may read a ``bytes`` object of 16 KiB or more in place, after this returns, and also a memoryview of
        256 KiB or more of an object that it keeps alive. If that is memory that can change (an array, say),
        ``pause_writing()`` is called at once, and ``resume_writing()`` when all of it has been read: change it no
        sooner. If ``pause_writing()`` is not called, the memory has been copied. With streams, ``await writer.drain()``
        waits as long as necessary; a drain that is cancelled promises nothing. Everything else is consumed or copied
        before this returns, a bytearray too. After ``close()``, or when the connection is lost, ``data`` is dropped.

        Raises RuntimeError after ``write_eof()`` and during ``sendfile()``; TypeError unless ``data`` is bytes-like;
        BufferError, or what its class raises, if it is not contiguous.
        """
        # This is called only once the connection is over. Until then the instance has the connection's own method.
        self._connection.write(data)
        self._life.writing.refused()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send all buffers of an iterable, in one step; they coalesce like successive writes.

        Nothing is sent if one of them is not bytes-like (TypeError). ``pause_writing()`` is called after the last one,
        so what the protocol does there, be it ``close()`` or another ``write()``, comes after all of them. Raises what
        ``write()`` raises.
        """
        self._connection.writelines(list_of_data)
        self._life.writing.refused()

    def get_write_buffer_size(self) -> int:
        """How many bytes write() has accepted that have not been given to the device, or that it reads in place.

        Of the latter it counts only those in memory that can change.
        """
        return self._connection.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low-water and the high-water mark, in bytes: ``(low, high)``."""
        return self._connection.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the marks for pause_writing and resume_writing, in bytes of get_write_buffer_size().

        The defaults are those of asyncio.WriteTransport.set_write_buffer_limits: ``high`` is 64 KiB (or four times
        ``low``), ``low`` a quarter of ``high``. Raises ValueError unless high >= low >= 0.
        """
        self._connection.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        """True: a connection has two independent halves."""
        return True

    def write_eof(self) -> None:
        """Send end of file after what was written; receiving goes on (asyncio.WriteTransport.write_eof)."""
        self._life.write_eof()

    def abort(self) -> None:
        """Close the connection at once: unsent bytes are dropped, and the peer gets ConnectionResetError."""
        self._life.abort()

    # -- memory regions ------------------------------------------------------------------------------------

    def offer(
        self,
        memory: MR | RegisteredMemory | ReadableBuffer,
        *,
        access: AccessFlags | str = "read",
        name: str = "",
        revoke_timeout: float = REVOKE_TIMEOUT_S,
    ) -> contextlib.AbstractAsyncContextManager[credit.Region]:
        """Let the peer, and nobody else, use ``memory`` with RDMA while the block runs.

        The next credit message announces the region. The peer's protocol gets it by ``region_offered(remote)``, and the
        peer's stream by ``RdmaStreamReader.next_offer()``. ``access`` is "read", "write", "atomic", several of
        them ("read,write"), or AccessFlags.

        ``memory`` is a registered region, or what ``RdmaServer.register()`` returns, or any contiguous buffer, an array
        for example, which is registered for this block. Register a region with ``AccessFlags.MW_BIND``, and with
        LOCAL_WRITE if the peer may change it, but with no remote rights of its own.

        The peer gets a key that is valid only for this connection and this block. (If the device has no memory windows
        of type 2, the memory is registered once more, and the key is valid for this block, but on every connection of
        its protection domain.)

        Entering the block waits until the key is made, which is queued behind what was sent before. If the peer holds
        that up for ``revoke_timeout`` seconds and one more, the connection is cut off, and TimeoutError is raised.

        Leaving the block revokes the offer. The peer is told, and has ``revoke_timeout`` seconds to finish what it has
        begun; then the device invalidates its key, whatever the peer does. If even that is held up for one more
        second, the connection is cut off. When the block has ended, nobody else can touch the memory, with one
        exception on the embedded device: a process that shares its memory with this one, and was stopped in the middle
        of an access, may finish that access when it continues, at most 256 KiB of what it was offered. In this case the
        connection is cut off (TimeoutError) and a warning is logged.

        If the wait is cancelled, the revocation goes on. Until it is done, a region cannot be closed (OSError, EBUSY),
        and a buffer cannot be resized. If the connection ends, the wait ends too.

        Each side of a connection can have 256 regions on offer at a time.

        Raises ValueError for memory that cannot be offered like this, and for a ``revoke_timeout`` that is not finite;
        TypeError for what is no memory; BufferError for a buffer that is not contiguous, or that is read-only when the
        peer is to change it; RdmaError for one region too many; TimeoutError as described; OSError if the connection is
        over, if a buffer cannot be registered, or if the device has no atomic operations (EOPNOTSUPP).
        """
        return self._life.regions.offer(memory, access, name, revoke_timeout)

    # -- for asyncio's SSLProtocol, RdmaSocket, streams/ and rpc/ ------------------------------------------

    @property
    def _regions(self) -> Regions:
        """The memory on offer, for who needs more than `offer`."""
        return self._life.regions

    def _kept_alive(self) -> tuple[bool, float, float, int]:
        """Whether keep-alive is on; idle and interval, in seconds, and count."""
        return self._connection.kept_alive

    def _keep_alive(self, on: bool, idle: float, interval: float, count: int) -> None:
        self._connection.keep_alive(on, idle, interval, count)

    def _ring_bytes(self) -> int:
        """How many bytes may lie in its receive slots, and how many in the slots that it sends from."""
        config = self._life.config
        return config.slot_bytes * config.data_slots

    def _force_close(self, exc: BaseException | None) -> None:
        """abort(), with the error that connection_lost() is to get: asyncio's SSLProtocol calls this."""
        if exc is None:
            self.abort()
        else:
            self._life.fail(exc)

    def _readiness_fd(self) -> int:
        """A descriptor that shows whether there is something to read, or -1."""
        return self._life.readiness_fd()

    @property
    def _closed_and_flushed(self) -> bool:
        """close() or abort() was called, and nothing is left to send: asyncio's connections are lost then."""
        return self._machine.state in (State.CLOSING, State.CLOSED) and not self.get_write_buffer_size()

    def _for_file(self) -> contextlib.AbstractContextManager[Callable[[bytes], None]]:
        """A block in which only the function that it yields can write: see streams/files.py."""
        return self._life.writing.reserved(lambda data: self.write(data))

    async def _until_room(self) -> None:
        """Wait while more bytes are buffered than the high-water mark.

        :raises OSError: the connection is over, or closed
        """
        await self._life.writing.until_room()

    async def _end_writing(self) -> None:
        """write_eof(), and wait until the peer's device knows of it, or the connection is over."""
        self.write_eof()
        await self._life.writing.until_half_closed()

    def __repr__(self) -> str:
        is_foreign = self._life.loop_context.foreign
        state = "forked" if is_foreign else self._machine.state.name.lower()
        facts = self._life.facts
        peer, device = facts.get("peername"), facts.get("rdma_device")
        buffered = self.get_write_buffer_size()
        told = f"{state} peer={peer} device={device}"
        is_open = self._machine.state is not State.CLOSED and not is_foreign
        if is_open and facts and self.qp is not None and not self.qp.closed:
            stats = self._connection.stats()
            told += f" qp={self.qp.qp_num:#x} credits={stats['credits']}/{stats['peer_slots']}"
        return f"<RdmaTransport {told} write_buffer={buffered} bytes>"

    def __del__(self) -> None:
        life = getattr(self, "_life", None)  # there is none where __init__ raised
        if life is not None and life.unclosed:
            warnings.warn(f"unclosed transport {self!r}", ResourceWarning, stacklevel=2, source=self)
            life.release_now()
