"""A transport within one process and one loop, for tests: no socket, no device, and the same bytes as over these.

Theory
------
Servers have names, which each loop has for itself. A connection is two transports, of which each keeps what it has
written until its peer has taken it: at most RECEIVE_BYTES in a turn of the loop, so that long messages come in parts.
What is kept is the write buffer of asyncio's flow control. A peer that has stopped reading takes nothing.

    write()    ... in the turns after it, data_received() of the peer
    close()    takes nothing more, and ends when the peer has all: eof_received() there, connection_lost(None) here
    abort()    drops what the peer has not taken: connection_lost(None) here, and ConnectionResetError there

A listener can freeze its connections, for tests of whoever has to notice that: nothing passes, an end neither.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from rdmanet.errors import shown

RECEIVE_BYTES: Final = 256 << 10
"""How much comes in a turn of the loop, as from a socket."""
HIGH_BYTES: Final = 64 << 10
"""At more than this in the write buffer, the protocol is to write no more."""

_LISTENERS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Listener]]] = WeakKeyDictionary()
_NUMBERS: Final = itertools.count(1)

Factory = Callable[[], asyncio.BaseProtocol]


class Name:
    """What a listener has in the place of a socket."""

    def __init__(self, name: str) -> None:
        self._name = name

    def getsockname(self) -> str:
        """The name by which clients find the server."""
        return self._name


class Listener(asyncio.AbstractServer):
    """A server, as asyncio's, by a name.

    :ivar transports: the server's side of each connection that lives
    :ivar is_frozen: nothing passes on them
    """

    def __init__(self, name: str, factory: Factory) -> None:
        self.name = name
        self.transports: set[MemoryTransport] = set()
        self.is_frozen = False
        self._factory = factory
        self._loop = asyncio.get_running_loop()

    def accept(self) -> MemoryTransport:
        """The server's side of a new connection."""
        transport = MemoryTransport(self, self._factory(), "", self.name)
        self.transports.add(transport)
        return transport

    def freeze(self, is_frozen: bool) -> None:
        """From now on nothing passes, or everything does again."""
        self.is_frozen = is_frozen
        for transport in self.transports:
            transport.look()
            transport.peer.look()

    @property
    def sockets(self) -> tuple[Name, ...]:
        """Its name, while it listens."""
        return (Name(self.name),) if self.is_serving() else ()

    def is_serving(self) -> bool:
        return _LISTENERS.get(self._loop, {}).get(self.name) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close(self) -> None:
        """Take no more connections. Those that there are live on."""
        if self.is_serving():
            del _LISTENERS[self._loop][self.name]

    async def wait_closed(self) -> None:
        """Return at once."""

    async def start_serving(self) -> None:
        """It does from the beginning."""

    async def serve_forever(self) -> None:
        """It does without this."""
        raise NotImplementedError


class MemoryTransport(asyncio.Transport):
    """One side of a connection.

    :ivar peer: the other side
    """

    peer: MemoryTransport

    def __init__(
        self, listener: Listener, protocol: asyncio.BaseProtocol, peername: str, sockname: str
    ) -> None:
        super().__init__({"peername": peername, "sockname": sockname, "fabric": "memory"})
        self._listener = listener
        self._loop = listener.get_loop()
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4
        self._has_paused = False  # the protocol's writing
        self._is_reading = True
        self._is_closing = False  # nothing more is written
        self._is_over = False  # connection_lost() was called, or is about to be
        self._is_due = False  # `_pass` is about to be called
        self._is_reset = False  # nothing follows but connection_lost() of the peer

    # -- what a protocol writes ------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data: {shown(data)} is no bytes-like object")
        if self._is_closing or self.peer._is_over or not len(data):
            return
        self._unsent.append(memoryview(bytes(data)))
        self._unsent_bytes += len(self._unsent[-1])
        if self._unsent_bytes > self._high and not self._has_paused:
            self._has_paused = True
            self._protocol.pause_writing()
        self.look()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_BYTES if low is None else 4 * low
        low = high // 4 if low is None else low
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be >= low ({low}) must be >= 0")
        self._high, self._low = high, low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.look()
            self.peer.look()  # what it has written goes nowhere

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        if not self._is_over:
            self._is_closing = self._is_reset = True
            self._drop()
            self._ends(None)
            self.look()

    # -- what the other side has written ---------------------------------------------------------------------

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
        self.peer.look()

    def look(self) -> None:
        """See in the next turn whether something can pass to the peer."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        """Give the peer what it takes in a turn."""
        self._is_due = False
        peer = self.peer
        if self._listener.is_frozen:
            return
        if self._is_reset:
            peer._ends(ConnectionResetError(errno.ECONNRESET, "the connection was reset by the peer"))
        if peer._is_closing:
            self._drop()
        elif self._unsent and peer._is_reading:
            peer._call(self._give)
        if self._unsent:
            if peer._is_reading:
                self.look()
        elif self._is_closing:
            self._ends(None)
            if peer._is_reading and not peer._is_closing and not peer._call(self._ends_there):
                peer.close()

    def _ends_there(self) -> bool | None:
        protocol: Any = self.peer._protocol
        return protocol.eof_received()  # type: ignore[no-any-return]

    def _give(self) -> None:
        protocol: Any = self.peer._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            room = memoryview(protocol.get_buffer(-1)).cast("B")
            data = self._taken(min(len(room), RECEIVE_BYTES))
            room[: len(data)] = data
            protocol.buffer_updated(len(data))
        else:
            protocol.data_received(self._taken(RECEIVE_BYTES))

    def _taken(self, most: int) -> bytes:
        """The first bytes that were written, which pass now."""
        parts, unsent = [], self._unsent
        while unsent and most > 0:
            part = unsent.popleft()
            if len(part) > most:
                unsent.appendleft(part[most:])
                part = part[:most]
            most -= len(part)
            parts.append(part)
        data = b"".join(parts)
        self._unsent_bytes -= len(data)
        self._resume()
        return data

    def _drop(self) -> None:
        """The peer takes nothing any more."""
        self._unsent.clear()
        self._unsent_bytes = 0
        self._resume()

    def _resume(self) -> None:
        """Tell the protocol in the next turn, as a socket would, that it may write again."""
        if self._has_paused and self._unsent_bytes <= self._low:
            self._has_paused = False
            self._loop.call_soon(self._resumes)

    def _resumes(self) -> None:
        if not self._has_paused and not self._is_over:
            self._protocol.resume_writing()

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call the protocol. What it raises ends the connection, as any transport of asyncio."""
        try:
            return function()
        except Exception as exc:
            context = {"message": "a protocol has raised", "exception": exc, "transport": self}
            self._loop.call_exception_handler(context)
            self.abort()
            return None

    def _ends(self, error: Exception | None) -> None:
        """This side is over: the protocol hears it in the next turn."""
        if not self._is_over:
            self._is_over = self._is_closing = True
            if self.peer._is_over:
                self._listener.transports -= {self, self.peer}
            self._loop.call_soon(self._protocol_ends, error)

    def _protocol_ends(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)


async def connect(factory: Factory, name: str) -> None:
    """Connect to the server of this name.

    :raises ConnectionRefusedError: this loop has none
    """
    found = _LISTENERS.get(asyncio.get_running_loop(), {}).get(name)
    if found is None:
        text = f"no server of this event loop has the name {shown(name)} in memory"
        raise ConnectionRefusedError(errno.ECONNREFUSED, text)
    here, there = MemoryTransport(found, factory(), name, ""), found.accept()
    here.peer, there.peer = there, here
    found.get_loop().call_soon(there._protocol.connection_made, there)
    here._protocol.connection_made(here)


async def listen(factory: Factory, name: str | None) -> Listener:
    """Listen by this name; None takes a free one.

    :raises OSError: EADDRINUSE: another server of this loop has it
    """
    names = _LISTENERS.setdefault(asyncio.get_running_loop(), {})
    name = f"server {next(_NUMBERS)}" if name is None else name
    if name in names:
        raise OSError(errno.EADDRINUSE, f"another server of this event loop has the name {shown(name)}")
    names[name] = listener = Listener(name, factory)
    return listener
