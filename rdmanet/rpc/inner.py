"""Connections within a connection: by each of them, the server calls an object that its client has lent it.

Theory
------
A service object that is an argument of a call is a number in the message. By this number the server connects back:
what it sends in Carry are the bytes of an inner connection, which is one as any other (link.py), and in which the
server is the client. So a callback is a call, with all that belongs to one.

    the client                                        the server
    lend()      ---- Call, with the number ----->     open(): Hello of the inner connection
                <--- Carry -----------------------
                ---- Carry ---------------------->    ... until one side closes the inner connection: Drop

An inner connection has a credit, as a stream has: each side may send WINDOW_BYTES more than the other has taken, which
says so by More. And it sends nothing while the transport of the whole wants no more. So what one side keeps for the
other is bounded, however slow that is.

After Drop, which either side may send, nothing comes any more from that side by this number. The other side's last
messages may have crossed it, and are dropped. The number is not used again (until 2**32 others were).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from rdmanet.errors import ProtocolError
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import Carry, Drop, More

WINDOW_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 64 << 10
"""Bytes of one Carry."""
HIGH_BYTES: Final = 64 << 10
"""At more than this in the write buffer, the protocol is to write no more."""
_HEAD_BYTES: Final = 16


class Inner(asyncio.Transport):
    """The transport of an inner connection.

    :ivar number: of the object
    :ivar within: whose transport it is. While a long message comes, the protocol is another one (long_bodies.py)
    """

    def __init__(self, inners: Inners, number: int, within: Link) -> None:
        super().__init__()
        self.number = number
        self.within = within
        self._inners = inners
        self._link = inners.link
        self._protocol: asyncio.BaseProtocol = within
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._sent, self._allowed = 0, WINDOW_BYTES
        self._has_paused = False
        self._come = bytearray()  # and was not taken: not in its pieces, which may be of no bytes
        self._received, self._taken, self._granted = 0, 0, WINDOW_BYTES
        self._is_reading = True
        self._is_closing = False
        self._is_over = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the transport of the whole says, which is ``"outer"``. It has no socket of its own."""
        if name in ("socket", "fabric"):
            return default
        outer = self._link.transport
        return outer if name == "outer" else outer.get_extra_info(name, default)

    # -- what the protocol writes ----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not len(data):
            return
        self._unsent.append(memoryview(bytes(data)))
        self._unsent_bytes += len(self._unsent[-1])
        self.send()
        if self._unsent_bytes > HIGH_BYTES and not self._has_paused:
            self._has_paused = True
            self._protocol.pause_writing()

    def send(self) -> None:
        """Send what may be sent now."""
        link, unsent = self._link, self._unsent
        most = min(PIECE_BYTES, link.longest - _HEAD_BYTES)
        while unsent and (room := min(most, self._allowed - self._sent)) > 0:
            if link.paused and self._sent:
                break  # what opens it goes always, as it is to come before the answer of the call
            piece = unsent[0][:room]
            if len(piece) < len(unsent[0]):
                unsent[0] = unsent[0][room:]
            else:
                unsent.popleft()
            self._unsent_bytes -= len(piece)
            self._sent += len(piece)
            link.send(Carry(self.number, bytes(piece)))
        if self._has_paused and self._unsent_bytes <= HIGH_BYTES // 4:
            self._has_paused = False
            link.loop.call_soon(self._resumes)
        if self._is_closing and not unsent:
            self._ends()

    def _resumes(self) -> None:
        if not self._has_paused and not self._is_over:
            self._protocol.resume_writing()

    def allow(self, total: int) -> None:
        """The peer takes so much in total.

        :raises ProtocolError: it has taken more before
        """
        if total < self._allowed:
            raise ProtocolError(
                f"the peer takes back credit of object {self.number}: {total} after {self._allowed}"
            )
        self._allowed = total
        self.send()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def can_write_eof(self) -> bool:
        return False

    # -- what comes --------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes have come.

        :raises ProtocolError: the peer had no credit for them
        """
        self._received += len(data)
        if self._received > self._granted:
            raise ProtocolError(f"the peer sends more of object {self.number} than it has credit for")
        self._come += data
        self._take()

    def _take(self) -> None:
        if self._come and (self._is_reading or self._is_closing) and not self._is_over:
            data = bytes(self._come)
            self._come.clear()
            self._taken += len(data)
            if not self._is_closing:
                self._give(data)
        due = self._taken + WINDOW_BYTES
        if due - self._granted >= WINDOW_BYTES // 2 and not self._is_over:
            self._granted = due
            self._link.send(More(self.number, due))

    def _give(self, data: bytes) -> None:
        while data:
            protocol: Any = self._protocol  # which may change meanwhile
            if not isinstance(protocol, asyncio.BufferedProtocol):
                protocol.data_received(data)
                return
            room = memoryview(protocol.get_buffer(-1)).cast("B")
            part, data = data[: len(room)], data[len(room) :]
            room[: len(part)] = part
            protocol.buffer_updated(len(part))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._come:
            self._link.loop.call_soon(self._take)

    # -- the end -----------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.send()

    def abort(self) -> None:
        self._is_closing = True
        self._ends()

    def _ends(self) -> None:
        """This side ends it."""
        if not self._is_over:
            self._link.send(Drop(self.number))
            self._is_over_now()
            self._link.loop.call_soon(self._protocol_ends, None)

    def dropped(self, error: BaseException | None = None) -> None:
        """The peer has ended it, or the connection of both is gone."""
        if self._is_over:
            return
        if self._come and not self._is_closing:
            data = bytes(self._come)
            self._come.clear()
            self._give(data)
        if not self._is_over:
            self._is_over_now()
            self._protocol_ends(error)

    def _is_over_now(self) -> None:
        self._is_over = self._is_closing = True
        self._unsent.clear()
        self._come.clear()
        self._unsent_bytes = 0
        self._inners.is_over(self.number)

    def _protocol_ends(self, error: Any) -> None:
        self._protocol.connection_lost(error)


class Inners:
    """The inner connections of one connection, at either side.

    :ivar open: those that there are, by the numbers of their objects
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.open: dict[int, Inner] = {}
        link.inners = self

    def hear(self) -> None:
        """From now on the peer may send messages of inner connections."""
        handlers: Any = self.link._handlers
        handlers |= {Carry: self._on_carry, More: self._on_more, Drop: self._on_drop}

    def begin(self, number: int, within: Link) -> Inner:
        """There is an inner connection."""
        inner = self.open[number] = Inner(self, number, within)
        within.connection_made(inner)
        return inner

    def found(self, number: int) -> Inner | None:
        """One for which Carry has come, and that is not open. None: what has come is dropped.

        :raises ProtocolError: there can be none
        """
        return None

    def is_over(self, number: int) -> None:
        """An inner connection has ended."""
        self.open.pop(number, None)

    def resume(self) -> None:
        """The transport takes more."""
        for inner in list(self.open.values()):
            inner.send()

    def lost(self, error: BaseException | None) -> None:
        """The connection is gone, and all inner ones."""
        for inner in list(self.open.values()):
            inner.dropped(error)

    def _on_carry(self, message: Carry) -> None:
        inner = self.open.get(message.number) or self.found(message.number)
        if inner is not None:
            inner.received(message.data)

    def _on_more(self, message: More) -> None:
        if (inner := self.open.get(message.number)) is not None:
            inner.allow(message.total)

    def _on_drop(self, message: Drop) -> None:
        if (inner := self.open.get(message.number)) is not None:
            inner.dropped()
