"""One connection, as messages: an asyncio protocol over a transport of any kind.

Theory
------
A link turns bytes into messages, and gives each to the handler of its kind; the other way it collects the messages of a
turn (messenger.py). Long memory in a message is written beside it, and not joined with it, which would copy it. What is
longer than LEAST_BYTES is written in pieces (long_writes.py), and until its end the link is as if the transport had
paused it; not so `bytes` over RDMA, which the transport sends from where they are, however long. The rest of a long
message that comes goes straight to where it stays (long_bodies.py).

When the transport pauses writing, senders wait for their `turns`. A server also stops reading: what it would read are
calls, whose answers it cannot send, and gives no more messages to its handlers. A client does not stop for that, so one
of the two always goes on. Of the Pings that come while a side cannot write, it answers the last.

When a connection is lost, a client handles all that had come before; a server does not begin calls whose callers are
gone.

Over RDMA the peer can offer memory on this connection (regions.py). A message names an offer by its number, and may
come before it or after it: `offered()` waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from rdmanet.rpc.buffer import over
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.framing import HEADER_BYTES
from rdmanet.rpc.limits import NUMBERS, Limits, exceeded
from rdmanet.rpc.long_writes import LongWrites
from rdmanet.rpc.messages import Hello, Ping, Pong, parts_of
from rdmanet.rpc.messenger import TAIL_BYTES, TURN_COST, Handlers, Messenger
from rdmanet.rpc.paging import LEAST_BYTES
from rdmanet.rpc.reads import Reads
from rdmanet.rpc.turns import Rounds
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.wire.offers import ACCEPTED_MAX, ALIVE_MAX

HOST_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""The same times as over RDMA, in seconds and as a number."""
CLOSE_S = 10.0
UNIX_BYTES = 2 << 20
"""The send buffer of a Unix socket with long messages. Both sides sleep each time when it is full, and when it is
empty. By itself it has 208 KiB: then 64 MiB take twice as long."""
LOANS_MOST = ALIVE_MAX // 2
"""How many loans of ours there may be: half of what a connection allows. That the peer has let go of an old one may not
have been heard yet."""


class InnerLinks(Protocol):
    """What a link tells the connections within it (inner.py)."""

    def resume(self) -> None: ...
    def lost(self, error: BaseException | None) -> None: ...


class Link(Messenger, asyncio.Protocol):
    """One side of a connection.

    :param handlers: what to do with the messages of each kind. A handler raises ProtocolError if the peer may not send
        it
    :param on_made: called when the connection is there
    :param on_lost: called once, when it is gone, with what ended it
    :param is_server: whether it stops reading while it cannot write
    :param on_unfinished: is told how much has come of a long message, whenever that changes. It raises ProtocolError if
        there is no memory for it
    :ivar closed: done when the connection is gone
    :ivar loans_left: how many more buffers can be lent now
    :ivar parts_left: how many more arrays of theirs where they lie (parts.py)
    :ivar offers_most: how many offers the peer accepts
    :ivar paused: whether the transport wants no more for now
    :ivar asked: the token of the last Ping
    :ivar inners: the connections within this one; None if there was none yet
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        handlers: Handlers,
        on_made: Callable[[], None],
        on_lost: Callable[[BaseException | None], None],
        is_server: bool = False,
        on_unfinished: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(loop, limits, handlers, is_server, on_unfinished)
        self.peer: Any = None
        self._on_made = on_made
        self._on_lost = on_lost
        self._rounds: Rounds | None = None
        self._unanswered: Ping | None = None
        self.asked = 0
        self._long = LongWrites(loop, self._long_has_ended)
        self._is_widened = False
        self._close_timer: asyncio.TimerHandle | None = None
        self.loans_left = LOANS_MOST
        self.parts_left = 0
        self.offers_most = ALIVE_MAX
        self._offers: dict[int, OfferedMemory] = {}
        self._last_offer = 0
        self._awaited: dict[int, list[asyncio.Future[OfferedMemory]]] = {}
        self.reads = Reads(self, limits.lent_seconds)
        self.inners: InnerLinks | None = None

    def rounds(self) -> Rounds:
        """The turns of the streams that are sent here: all together send TURN_COST in a turn of the loop."""
        if self._rounds is None:
            self._rounds = Rounds(self.loop, TURN_COST)
        return self._rounds

    def hears(self, hello: Hello) -> None:
        """The peer has said what it accepts."""
        self.longest = hello.message_bytes
        self.offers_most = max(ALIVE_MAX, min(hello.offers, ACCEPTED_MAX))
        self.parts_left = max(0, self.offers_most // 2 - LOANS_MOST)

    # -- messages ------------------------------------------------------------------------------------------

    def send_apart(self, message: msgspec.Struct) -> int:
        """The same as `send` for a message that may have long memory `Apart`, which is not copied."""
        parts = parts_of(message)
        if len(parts) == 1:  # it has none
            return self.send(message, parts[0])
        length = sum(map(len, parts))
        if length > self.longest:
            raise exceeded("message_bytes", self.longest, f"a message of {length} bytes to the peer")
        if self.is_over:
            return length
        parts[0] = length.to_bytes(HEADER_BYTES, "big") + parts[0]
        self._flush()
        if length < LEAST_BYTES or (self.lends and _lie_in_bytes(parts)):
            self._write(parts)
        else:
            if not self.paused:
                self._pause()
            if not self._is_widened:
                self._is_widened = True
                _widen(self.transport)
            self._before = self._long
            self._long.begin(self.transport, parts)
        return length

    def _long_has_ended(self) -> None:
        """Nothing is left of long messages, and what was behind them."""
        self._before = None
        if self.is_over:
            self.transport.close()
        if not self._long.is_full:
            self._resume()

    def ask(self) -> int:
        """Send a Ping. Returns its token: a Pong with this one, or with that of a later Ping, says that it was read.

        A peer that cannot write answers the last of several only.
        """
        self.asked += 1
        self.send(Ping(self.asked))
        return self.asked

    def answer(self, ping: Ping) -> None:
        """Answer a Ping, when the transport takes it."""
        if self.paused:
            self._unanswered = ping
        else:
            self.send(Pong(ping.token))

    def close(self) -> None:
        """Send what was written, and close the connection: at once, if the peer takes nothing for CLOSE_S seconds."""
        if not self.is_over:
            self._flush()
            self.is_over = True
            if not self._long.nbytes:
                self.transport.close()
            self._let_senders_go()
            self._wait_for_close()

    @property
    def _unsent(self) -> int:
        return self.transport.get_write_buffer_size() + self._long.nbytes

    def _let_senders_go(self) -> None:
        self.turns.end()
        if self._rounds is not None:
            self._rounds.end()

    def _wait_for_close(self) -> None:
        self._close_timer = self.loop.call_later(CLOSE_S, self._close_is_late, self._unsent)

    def _close_is_late(self, unsent: int) -> None:
        if self._unsent < unsent:
            self._wait_for_close()
        else:
            self.transport.abort()

    # -- asyncio's protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.lends = isinstance(transport, RdmaTransport)
        if self.lends:
            self.tail_bytes = TAIL_BYTES
        self.peer = transport.get_extra_info("peername")
        if not self.lends:
            _watch_host(transport)
        self._on_made()

    def eof_received(self) -> bool:
        """Close the connection: a peer that sends no more makes no calls, and answers none."""
        self._handle_all()
        self.close()
        return self._long.nbytes > 0 and self.transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        self._long.is_full = True
        self._pause()

    def _pause(self) -> None:
        self.paused = True
        self.turns.pause()
        self._read_or_not()

    def resume_writing(self) -> None:
        self._long.is_full = False
        if self._long.nbytes:
            self._long.go_on()
        else:
            self._resume()

    def _resume(self) -> None:
        self.paused = False
        if self._is_server and self._framer.is_behind and not self.is_over:
            self._end_turn()  # and go on in the next one
        else:
            self._read_or_not()
        if (ping := self._unanswered) is not None:
            self._unanswered = None
            self.answer(ping)
        if not self.paused and self.inners is not None:
            self.inners.resume()
        if not self.paused:  # by that answer
            self.turns.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handle_all()
        self.is_over = True
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.error = self.error or exc
        if self.error is not None:
            # Its traceback has frames that have this link. And where a Cancel could not be written, its context is the
            # CancelledError that was being handled, with the caller's frames, and what these have.
            self.error.__traceback__ = self.error.__context__ = None
        self._collected.clear()
        self._framer.drop()  # a link goes by the garbage collector
        self._long.drop()
        self.reads.stop()
        self._let_senders_go()
        for waiter in [waiter for waiters in self._awaited.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(self.lost_error())
                waiter.exception()  # whoever waits may be cancelled before it looks
        self._awaited.clear()
        self._offers.clear()
        if not self.closed.done():
            self.closed.set_result(None)
        if self.inners is not None:
            self.inners.lost(self.error)
        self._on_lost(self.error)

    def lost_error(self) -> Error:
        """What a call gets whose connection is gone."""
        error = Error(Code.UNAVAILABLE, f"the connection was lost: {self.error or 'the peer has closed it'}")
        error.__cause__ = self.error
        return error

    # -- memory that the peer offers -----------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """How many bytes have come by long READs of the peer's memory, or a number that does not change."""
        return cast(RdmaTransport, self.transport)._regions.moved if self.lends else 0

    @property
    def place_bytes(self) -> int:
        """From this length on, the device had better put what comes into memory that it is told of."""
        return cast(RdmaTransport, self.transport)._regions.engine.place_bytes if self.lends else 0

    def region_offered(self, remote: OfferedMemory) -> None:
        self._offers[remote.id] = remote
        self._last_offer = remote.id
        for waiter in self._awaited.pop(remote.id, ()):
            if not waiter.done():
                waiter.set_result(remote)

    def region_revoked(self, remote: OfferedMemory) -> None:
        if self._offers.get(remote.id) is remote:
            del self._offers[remote.id]

    async def offered(self, number: int) -> OfferedMemory:
        """The peer's offer of this number, when it has come. Offers come in the order of their numbers.

        :raises Error: FAILED_PRECONDITION if it was revoked, INVALID_ARGUMENT if there can be none, UNAVAILABLE if the
            connection is lost
        """
        if (found := self._offers.get(number)) is not None:
            return found
        if self.is_over:
            raise self.lost_error()
        if not self.lends:
            raise Error(Code.INVALID_ARGUMENT, "the peer lends memory on a connection that has no RDMA")
        if (self._last_offer - number) % NUMBERS < NUMBERS // 2:
            raise over()
        waiter: asyncio.Future[OfferedMemory] = self.loop.create_future()
        self._awaited.setdefault(number, []).append(waiter)
        try:
            return await waiter
        finally:
            waiters = self._awaited.get(number)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._awaited[number]
            del waiter  # which has the error, and that has this frame


def _lie_in_bytes(parts: list[bytes | bytearray | memoryview]) -> bool:
    """Whether all that is long is in `bytes`, which nobody can change."""
    return all(len(part) < LEAST_BYTES or type(memoryview(part).obj) is bytes for part in parts)


def _widen(transport: asyncio.BaseTransport) -> None:
    """Let a Unix socket take as much at a time as the kernel allows, or UNIX_BYTES; TCP's grow by themselves."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BYTES)


def _watch_host(transport: asyncio.BaseTransport) -> None:
    """Have the kernel look after the peer's host, as it is done over RDMA (docs/howto/keepalive.md)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in HOST_KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
