# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""Messages of a connection, as they are written and as they come: compiled, since each call passes through it.

Theory
------
The first message of a turn of the loop is written at once, so that a single call does not wait. Further ones of the
same turn are collected, and written together at its end: many small messages cost one write. They are written before
that if they are more than COLLECT_BYTES, so that the transport can say when it has enough. To learn of the end costs
the loop one turn more. So the only call of a connection, and the answer to the only one, are sent alone: if the turn
before had but one message, too, nobody waits for the end of this one. A message that is longer than COLLECT_BYTES by
itself is written beside its header, and not joined with it, which would copy it. Long bytes that are the last argument
or the result are not even encoded, but written behind the rest of their message (`send_tailed`).

A loop reads much at a time: uvloop's up to 8 MiB of one socket, which may be 300,000 calls. So that no peer takes the
loop from the others, a connection handles TURN_COST of messages in a turn (framing.Frames), 64 small ones or 64 KiB.
Then it stops reading, and goes on in the next turn. A peer of which less comes at a time is never stopped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rdmanet.errors import ProtocolError
from rdmanet.rpc.framing import HEADER_BYTES, LONG_BYTES, Outbox, framed
from rdmanet.rpc.limits import NUMBERS, Limits, exceeded
from rdmanet.rpc.long_bodies import LongBody
from rdmanet.rpc.long_writes import LongWrites
from rdmanet.rpc.messages import HELLO_BYTES, Framer, bin_head, encode
from rdmanet.rpc.turns import Turns

logger = logging.getLogger("rdmanet.rpc")

COLLECT_BYTES = 64 << 10
_COLLECT_BYTES = COLLECT_BYTES  # for C
TURN_COST = 64
TAIL_BYTES = 16 << 10
"""To copy fewer takes less time than to write them apart. Over RDMA so many are sent from where they are."""

_NO_BYTES = encode(b"")

Handlers = Mapping[type, Callable[[Any], None]]


class Messenger:
    """One side of a connection, as far as each of its messages needs it; link.py has the rest.

    :param handlers: what to do with the messages of each kind. A handler raises ProtocolError if the peer may not send
        it
    :param is_server: whether it stops reading while it cannot write
    :param on_unfinished: is told how much has come of a long message, whenever that changes. It raises ProtocolError if
        there is no memory for it
    :ivar closed: done when the connection is gone
    :ivar error: what has ended it
    :ivar is_over: nothing more is sent or handled
    :ivar paused: whether the transport wants no more for now
    :ivar lends: whether it is by RDMA
    :ivar longest: of the peer's limit, when it is known
    :ivar tail_bytes: fewer bytes are encoded with their message
    :ivar heard_at: when something came, on the loop's clock
    :ivar turns: senders that wait for the transport
    """

    transport: asyncio.Transport
    peer: Any

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        handlers: Handlers,
        is_server: bool,
        on_unfinished: Callable[[int], None] | None,
    ) -> None:
        self.loop = loop
        self.closed: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.paused = False
        self.is_over = False
        self.lends = False
        self.heard_at = 0.0
        self.longest = NUMBERS - 1
        self.tail_bytes = COLLECT_BYTES
        self.turns = Turns(loop)
        self._framer = Framer(limits.message_bytes, HELLO_BYTES if is_server else limits.message_bytes)
        self._framer.budget = TURN_COST
        self._framer.gives_plain = True
        self._handlers = handlers
        self._is_server = is_server
        self._on_unfinished = on_unfinished
        self._unfinished_bytes = 0
        self._is_reading = True
        self._has_had_turn = False  # no more is handled in this turn
        self._in_turn = False  # something was written in this turn
        self._had_one = True  # message in the last turn that was looked at, sent or received
        self._collected = Outbox()
        self._before: LongWrites | None = None  # a long message: what is written goes behind that

    def send(self, message: Any, body: bytes | bytearray | memoryview | None = None) -> int:
        """Send a message; returns the length of its body. Once the connection is over, it goes nowhere.

        :param body: it, if it is encoded already; nobody changes it any more
        :raises Error: RESOURCE_EXHAUSTED if the peer does not accept one of this length
        :raises TypeError: it contains what msgspec does not encode
        """
        return self._send(b"", encode(message) if body is None else body)

    def _send(self, head: bytes, body: bytes | bytearray | memoryview) -> int:
        """The same for a message that is encoded: `head`, and the rest of it."""
        length = len(head) + len(body)
        if length > self.longest:
            raise exceeded("message_bytes", self.longest, f"a message of {length} bytes to the peer")
        if self.is_over:
            return length
        if length > _COLLECT_BYTES:
            self._flush()
            self._write((length.to_bytes(HEADER_BYTES, "big") + head, body))
        else:
            self._send_short(head, body if type(body) is bytes else bytes(body))
        return length

    def _send_short(self, head: bytes, body: bytes) -> None:
        """Write a short message now, or at the end of the turn."""
        if self._in_turn:
            self._collected.put(head, body)
            if self._collected.nbytes > _COLLECT_BYTES:
                self._flush()
        else:
            self._in_turn = True
            self.loop.call_soon(self._turn_ends)
            (self.transport if self._before is None else self._before).write(framed(body, head))

    def send_plain(self, head: bytes, value: Any, is_alone: bool) -> int:
        """The same as `send` for a Call or Reply of which `call_head` or `reply_head` has made the beginning.

        :param is_alone: it is the only call of the connection, or the answer to the only one
        """
        body = encode(value)
        length = len(head) + len(body)
        if length > _COLLECT_BYTES or length > self.longest or self.is_over:
            return self._send(head, body)
        if is_alone and self._had_one and not self._in_turn:
            if not self._has_had_turn:
                self._framer.budget = TURN_COST  # what this answers, or is answered by, comes in another turn
            (self.transport if self._before is None else self._before).write(framed(body, head))
        else:
            self._send_short(head, body)
        return length

    def send_tailed(self, message: msgspec.Struct, tail: bytes | memoryview) -> int:
        """The same as `send` for a message that ends with these bytes, and has b"" in their place. They are not copied.

        :param tail: nobody changes it any more
        """
        size = len(tail)
        start = encode(message)[: -len(_NO_BYTES)] + bin_head(size)
        length = len(start) + size
        if length > self.longest:
            raise exceeded("message_bytes", self.longest, f"a message of {length} bytes to the peer")
        if not self.is_over:
            self._flush()
            self._write((length.to_bytes(HEADER_BYTES, "big") + start, tail))
        return length

    def _write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write these as they are, one by one: the peer knows what comes before the long ones are under way.

        Not by asyncio's writelines(), which in Python 3.12.1 and 3.13.0 pauses nobody, and may watch a closed socket.
        """
        to = self.transport if self._before is None else self._before
        for part in parts:
            to.write(part)

    def _turn_ends(self) -> None:
        self._in_turn = False
        if not self._has_had_turn:
            self._framer.budget = TURN_COST  # else a peer that sends little at a time is stopped now and then
        self._had_one = self._collected.nbytes == 0
        self._flush()

    def _flush(self) -> None:
        if self._collected.nbytes and not self.is_over:
            (self.transport if self._before is None else self._before).write(self._collected.take())

    # -- the connection's end --------------------------------------------------------------------------------

    def violated(self, error: ProtocolError) -> None:
        """The peer has broken the protocol: end the connection."""
        logger.warning("the connection with %s is ended: %s", self.peer, error)
        self.abort(error)

    def abort(self, error: BaseException | None = None) -> None:
        """End the connection now, for this reason."""
        if self.error is None:
            self.error = error
        self.is_over = True
        if not self.closed.done():  # asyncio's TLS cannot be aborted then, in Python 3.11.2
            self.transport.abort()

    # -- what comes ------------------------------------------------------------------------------------------

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
                    this: Any = self  # it is a Link
                    self.transport.set_protocol(LongBody(this, self._framer.room))

    def body_came(self, nbytes: int) -> None:
        """So many bytes of a long body have come, straight into the framer's room for it."""
        if self.is_over:
            return
        self.heard_at = self.loop.time()
        framer = self._framer
        framer.came(nbytes)
        if framer.is_behind:
            this: Any = self
            self.transport.set_protocol(this)
        if self._has_had_turn or (self.paused and self._is_server):
            self._read_or_not()
        elif framer.is_behind or self._on_unfinished is not None:
            self._handle()

    def _handle(self, data: bytes = b"") -> None:
        """Give the messages that have come to their handlers, as many as may be handled in this turn."""
        handlers, framer, is_spent = self._handlers, self._framer, False
        try:
            messages = framer.feed(data)
            is_spent = framer.budget <= 0  # before a handler that answers at once (send_plain)
            if len(messages) > 1:
                self._had_one = False
            if framer.unfinished_bytes != self._unfinished_bytes and self._on_unfinished is not None:
                self._unfinished_bytes = framer.unfinished_bytes
                self._on_unfinished(self._unfinished_bytes)
            for message in messages:
                handler = handlers.get(type(message))
                if handler is None:
                    name = type(message).__name__.removeprefix("Plain")
                    raise ProtocolError(f"the peer may not send {name}")
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
