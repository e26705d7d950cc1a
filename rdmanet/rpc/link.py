"""One connection, as messages: an asyncio protocol over a transport of any kind.

Theory
------
A link turns bytes into messages, and gives each to the handler of its kind. The other way, the first message of a turn
of the loop is written at once, so that a single call does not wait. Further ones of the same turn are collected, and
written together at its end: many small messages cost one write. They are written before that if they are more than
COLLECT_BYTES, so that the transport can say when it has enough. To learn of the end costs the loop one turn more. So
the only call of a connection, and the answer to the only one, are sent alone: if the turn before had but one message,
too, nobody waits for the end of this one.

A message that is longer than COLLECT_BYTES by itself is written beside its header, and not joined with it, which would
copy it; so is long memory in one. What is longer than LEAST_BYTES is written in pieces (long_writes.py), and until its
end the link is as if the transport had paused it. The rest of a long message that comes goes straight to where it stays
(long_bodies.py).

When the transport pauses writing, senders wait for their `turns`. A server also stops reading: what it would read are
calls, whose answers it cannot send, and gives no more messages to its handlers. A client does not stop for that, so one
of the two always goes on. Of the Pings that come while a side cannot write, it answers the last.

A loop reads much at a time: uvloop's up to 8 MiB of one socket, which may be 300,000 calls. So that no peer takes the
loop from the others, a link handles TURN_COST of messages in a turn (framing.Frames), 64 small ones or 64 KiB. Then it
stops reading, and goes on in the next turn. A peer of which less comes at a time is never stopped. When a connection is
lost, a client handles all that had come before; a server does not begin calls whose callers are gone.

Over RDMA the peer can offer memory on this connection (regions.py). A message names an offer by its number, and may
come before it or after it: `offered()` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rdmanet.errors import ProtocolError
from rdmanet.rpc.buffer import over
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.framing import HEADER_BYTES, LONG_BYTES
from rdmanet.rpc.limits import NUMBERS, Limits, exceeded
from rdmanet.rpc.long_bodies import LongBody
from rdmanet.rpc.long_writes import LongWrites
from rdmanet.rpc.messages import HELLO_BYTES, Framer, Ping, Pong, encode, parts_of
from rdmanet.rpc.paging import LEAST_BYTES
from rdmanet.rpc.reads import Reads
from rdmanet.rpc.turns import Rounds, Turns
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.wire.offers import ALIVE_MAX

logger = logging.getLogger("rdmanet.rpc")

COLLECT_BYTES = 64 << 10
TURN_COST = 64
HOST_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""The same times as over RDMA, in seconds and as a number."""
CLOSE_S = 10.0
LOANS_MOST = ALIVE_MAX // 2
"""How many loans of ours there may be: half of what a connection allows. That the peer has let go of an old one may not
have been heard yet."""

Handlers = Mapping[type, Callable[[Any], None]]


class Link(asyncio.Protocol):
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
    :ivar paused: whether the transport wants no more for now
    :ivar asked: the token of the last Ping
    """

    transport: asyncio.Transport

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
        self.loop = loop
        self.closed: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.paused = False
        self.is_over = False
        self.lends = False
        self.peer: Any = None
        self.heard_at = 0.0  # when something came, on the loop's clock
        self.longest = NUMBERS - 1  # of the peer's limit, when it is known
        self._framer = Framer(limits.message_bytes, HELLO_BYTES if is_server else limits.message_bytes)
        self._handlers = handlers
        self._on_made = on_made
        self._on_lost = on_lost
        self._is_server = is_server
        self._on_unfinished = on_unfinished
        self._unfinished_bytes = 0
        self.turns = Turns(loop)
        self._rounds: Rounds | None = None
        self._unanswered: Ping | None = None
        self.asked = 0
        self._framer.budget = TURN_COST
        self._is_reading = True
        self._has_had_turn = False  # no more is handled in this turn
        self._in_turn = False  # something was written in this turn
        self._had_one = True  # message in the last turn that was looked at, sent or received
        self._collected: list[bytes | bytearray | memoryview] = []
        self._collected_bytes = 0
        self._long = LongWrites(loop, self._long_has_ended)
        self._before: LongWrites | None = None  # it, while it has a message: what is written goes behind that
        self._close_timer: asyncio.TimerHandle | None = None
        self.loans_left = LOANS_MOST
        self._offers: dict[int, OfferedMemory] = {}
        self._last_offer = 0
        self._awaited: dict[int, list[asyncio.Future[OfferedMemory]]] = {}
        self.reads = Reads(self, limits.lent_seconds)

    def rounds(self) -> Rounds:
        """The turns of the streams that are sent here: all together send TURN_COST in a turn of the loop."""
        if self._rounds is None:
            self._rounds = Rounds(self.loop, TURN_COST)
        return self._rounds

    # -- messages ------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, body: bytes | bytearray | memoryview | None = None) -> int:
        """Send a message; returns the length of its body. Once the connection is over, it goes nowhere.

        :param body: it, if it is encoded already; nobody changes it any more
        :raises Error: RESOURCE_EXHAUSTED if the peer does not accept one of this length
        :raises TypeError: it contains what msgspec does not encode
        """
        if body is None:
            body = encode(message)
        length = len(body)
        if length > self.longest:
            raise exceeded("message_bytes", self.longest, f"a message of {length} bytes to the peer")
        if self.is_over:
            return length
        head = length.to_bytes(HEADER_BYTES, "big")
        if length > COLLECT_BYTES:
            self._flush()
            self._write((head, body))
        elif self._in_turn:
            self._collected += (head, body)
            self._collected_bytes += length
            if self._collected_bytes > COLLECT_BYTES:
                self._flush()
        else:
            self._in_turn = True
            self.loop.call_soon(self._turn_ends)
            (self._before or self.transport).write(head + body)
        return length

    def send_alone(self, message: msgspec.Struct) -> int:
        """The same as `send` for the only call of the connection, or the answer to the only one."""
        if self._in_turn or not self._had_one:
            return self.send(message)
        body = encode(message)
        length = len(body)
        if length > COLLECT_BYTES or length > self.longest or self.is_over:
            return self.send(message, body)
        if not self._has_had_turn:
            self._framer.budget = TURN_COST  # what this answers, or is answered by, comes in another turn
        (self._before or self.transport).write(length.to_bytes(HEADER_BYTES, "big") + body)
        return length

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
        if length < LEAST_BYTES:
            self._write(parts)
        else:
            if not self.paused:
                self._pause()
            self._before = self._long
            self._long.begin(self.transport, parts)
        return length

    def _write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write these as they are."""
        if self.lends and self._before is None:
            self.transport.writelines(parts)
        else:  # asyncio's writelines() in Python 3.12.1 and 3.13.0 pauses nobody, and may watch a closed socket
            to = self._before or self.transport
            for part in parts:
                to.write(part)

    def _long_has_ended(self) -> None:
        """Nothing is left of long messages, and what was behind them."""
        self._before = None
        if self.is_over:
            self.transport.close()
        if not self._long.is_full:
            self._resume()

    def _turn_ends(self) -> None:
        self._in_turn = False
        if not self._has_had_turn:
            self._framer.budget = TURN_COST  # else a peer that sends little at a time is stopped now and then
        self._had_one = not self._collected
        if self._collected:
            self._flush()

    def _flush(self) -> None:
        collected, self._collected, self._collected_bytes = self._collected, [], 0
        if collected and not self.is_over:
            (self._before or self.transport).write(b"".join(collected))

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

    def violated(self, error: ProtocolError) -> None:
        """The peer has broken the protocol: end the connection."""
        logger.warning("the connection with %s is ended: %s", self.peer, error)
        self.abort(error)

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

    def abort(self, error: BaseException | None = None) -> None:
        """End the connection now, for this reason."""
        if self.error is None:
            self.error = error
        self.is_over = True
        if not self.closed.done():  # asyncio's TLS cannot be aborted then, in Python 3.11.2
            self.transport.abort()

    # -- asyncio's protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.lends = isinstance(transport, RdmaTransport)
        self.peer = transport.get_extra_info("peername")
        if not self.lends:
            _watch_host(transport)
        self._on_made()

    def data_received(self, data: bytes) -> None:
        if self.is_over:
            return
        self.heard_at = self.loop.time()
        if self._has_had_turn or (self.paused and self._is_server):
            self._framer.keep(data)
            self._read_or_not()
        else:
            self._handle(data)
            if self._framer.unfinished_bytes and not self.is_over:
                room = self._framer.room()
                if room is not None and len(room) >= LONG_BYTES:
                    self.transport.set_protocol(LongBody(self, self._framer.room))

    def body_came(self, nbytes: int) -> None:
        """So many bytes of a long body have come, straight into the framer's room for it."""
        if self.is_over:
            return
        self.heard_at = self.loop.time()
        framer = self._framer
        framer.came(nbytes)
        if framer.is_behind:
            self.transport.set_protocol(self)
        if self._has_had_turn or (self.paused and self._is_server):
            self._read_or_not()
        elif framer.is_behind or self._on_unfinished is not None:
            self._handle()

    def _handle(self, data: bytes = b"") -> None:
        """Give the messages that have come to their handlers, as many as may be handled in this turn."""
        handlers, framer, is_spent = self._handlers, self._framer, False
        try:
            messages = framer.feed(data)
            is_spent = framer.budget <= 0  # before a handler that answers at once (send_alone)
            if len(messages) > 1:
                self._had_one = False
            if framer.unfinished_bytes != self._unfinished_bytes and self._on_unfinished is not None:
                self._unfinished_bytes = framer.unfinished_bytes
                self._on_unfinished(self._unfinished_bytes)
            for message in messages:
                handler = handlers.get(type(message))
                if handler is None:
                    raise ProtocolError(f"the peer may not send {type(message).__name__}")
                handler(message)
                if self.is_over:
                    return
        except ProtocolError as exc:
            self.violated(exc)
        except Exception as exc:  # a mistake of ours: the connection cannot go on, and the peer need not wait
            logger.error("the connection with %s is ended", self.peer, exc_info=exc)
            self.abort(exc)
        if is_spent and not self.is_over:
            self._end_turn()

    def _end_turn(self) -> None:
        """Let others have their turn, and go on then."""
        if not self._has_had_turn:
            self._has_had_turn = True
            self.loop.call_soon(self._next_turn)
        self._read_or_not()

    def _next_turn(self) -> None:
        self._has_had_turn = False
        self._framer.budget = TURN_COST
        if self._framer.is_behind and not self.is_over and not (self.paused and self._is_server):
            self.heard_at = self.loop.time()  # not before: it waited for us
            self._handle()
        self._read_or_not()

    def _read_or_not(self) -> None:
        """Read, unless there are messages to be handled first, or a server's answers cannot be sent."""
        wanted = not (self._framer.is_behind or (self.paused and self._is_server))
        if wanted != self._is_reading and not self.is_over:
            self._is_reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _handle_all(self) -> None:
        """A client's connection sends no more: handle what has come, in this turn."""
        if self._framer.is_behind and not self._is_server and not self.is_over:
            self._framer.budget = math.inf
            self._handle()

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
        if not self.paused:  # by that answer
            self.turns.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handle_all()
        self.is_over = True
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.error = self.error or exc
        if self.error is not None:  # whose traceback has frames that have this link
            self.error.__traceback__ = None
        self._collected.clear()
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
        return cast(RdmaTransport, self.transport)._regions.transfers.moved if self.lends else 0

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


def _watch_host(transport: asyncio.BaseTransport) -> None:
    """Have the kernel look after the peer's host, as it is done over RDMA (docs/howto/keepalive.md)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in HOST_KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
