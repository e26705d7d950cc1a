"""Two connections, joined: what the peer of one sends, the peer of the other gets.

Bytes. `data_received` of one side is `write` of the other, so a chunk is passed on as the object that came. RDMA lets
the device read large ones where they lie.

Back-pressure. A side whose peer reads slowly calls `pause_writing`; the other side then stops reading, and its peer
learns of that by its own kernel, or by having no credits. So a relay holds the high-water mark and one chunk in each
direction, whatever the sizes.

Ends. Each of the two streams of a relay ends in one of three ways:

* Its sender ends it (`eof_received`). The end is passed on behind its bytes, and the other stream goes on. When both
  have ended, both connections are closed.
* Its sender is lost before it has said that this is all. Then the other peer must not take what it got for all: its
  connection is reset, and what was not sent is dropped. (A Unix socket cannot be reset; its peer sees an end of file.)
* Its sender has ended it, and is lost then. All its bytes are there, so the other connection is closed in good order.

A proxy may itself be lost, by SIGKILL for example. Then the kernel closes its sockets, and by default says that this is
the end of what they sent. So a TCP connection is one that a close resets (SO_LINGER of zero seconds) from its start,
and only a relay that closes it in good order takes that back, once all that was written is with the kernel. That is
when the transport is about to close its own descriptor. With TLS nobody hears of it before, so a relay keeps a second
descriptor, whose close is the last. If none is left, a close of that connection does not reset it: the end of the
proxy may be taken for the end of its stream, but nothing that a good close leaves with the kernel is lost.

TLS, as asyncio has it, knows no half-closed connection. So a stream's end closes a connection with TLS in both
directions, and the other stream, if it has not ended, is lost. Only TLS's own good-bye is the end of a stream: anybody
on the way can send a FIN of TCP.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from rdmanet.cli.endpoints import close_resets, reason
from rdmanet.errors import endpoint


class Owner(Protocol):
    """Who a relay belongs to, and whom it tells of itself."""

    def admits(self, relay: "Relay") -> bool:
        """Whether this one may be; it is reset otherwise."""

    def connect(self, factory: Callable[[], asyncio.BaseProtocol]) -> Awaitable[None]:
        """Make the far connection. What it raises is told to `unconnected`."""

    def unconnected(self, relay: "Relay", why: str) -> None:
        """There was no far connection to be had, and the near one is reset."""

    def lost(self, relay: "Relay", why: str) -> None:
        """A peer was lost in the middle of what it sent."""

    def ended(self, relay: "Relay") -> None:
        """Nothing is left of it."""


class Relay:
    """A connection that was accepted, and one that is made for it.

    :ivar near: the one that was accepted; the protocol that a server's factory returns
    :ivar far: the other
    """

    def __init__(self, owner: Owner) -> None:
        self.near, self.far = Side(self), Side(self)
        self.near.other, self.far.other = self.far, self.near
        self._owner = owner
        self._connecting: asyncio.Task[None] | None = None
        self._over = False

    def abort(self) -> None:
        """End it at once, so that neither peer takes what it got for all."""
        if self._connecting is not None:
            self._connecting.cancel()
        self.near.reset()
        self.far.reset()

    # -- what its sides tell -------------------------------------------------------------------------------

    def made(self, side: "Side") -> None:
        """A side has its transport."""
        if side is self.near:
            if self._owner.admits(self):
                side.hold()
                self._connecting = asyncio.get_running_loop().create_task(
                    self._connect(), name="connect to the target"
                )
                self._connecting.add_done_callback(self._connected)
            else:
                side.reset()
        elif self.near.lost and not self.near.complete:
            side.reset()
        else:
            self.near.go_on()
            self.far.passes_on()
            self.near.passes_on()
            if self.near.lost:
                side.close()

    def lost(self, side: "Side", error: Exception | None) -> None:
        """A side's connection is over."""
        if not side.complete and not side.closed:
            why = reason(error) if error is not None else "it ended without the end of its stream"
            self._owner.lost(self, f"{side.peer}: {why}")
        if side.complete:
            side.other.close()
        else:
            side.other.reset()
        if side is self.near and not side.complete and self._connecting is not None:
            self._connecting.cancel()  # does nothing, if it is done
        self._look_for_end()

    # -- the far connection --------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self._owner.connect(lambda: self.far)
        except (OSError, UnicodeError) as exc:
            if not self.near.lost:
                self._owner.unconnected(self, reason(exc))
        finally:
            if self.far.transport is None:
                self.near.reset()

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._look_for_end()
        if not task.cancelled():
            task.result()  # what is raised here is a bug, and told by the loop

    def _look_for_end(self) -> None:
        begun = self._connecting
        far_is_over = self.far.lost or self.far.transport is None
        if self.near.lost and far_is_over and (begun is None or begun.done()) and not self._over:
            self._over = True
            self._owner.ended(self)


class Side(asyncio.Protocol):
    """One connection of a relay.

    :ivar transport: None before there is one
    :ivar peer: its peer, for messages
    :ivar complete: its peer has sent all that it will send
    :ivar lost: its connection is over
    :ivar closed: we have ended it
    :ivar received: how many bytes its peer has sent
    """

    other: "Side"

    def __init__(self, relay: Relay) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        self.complete = False
        self.lost = False
        self.closed = False
        self.received = 0
        self._relay = relay
        self._kept: socket.socket | None = None  # a TCP connection's socket, once more
        self._is_reset = False
        self._early: list[bytes] = []
        self._write: Callable[[bytes], None] = self._keep

    # -- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.peer = _name_of_peer(self.transport)
        if (sock := _tcp_socket(self.transport)) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            try:
                self._kept = socket.socket(sock.family, sock.type, sock.proto, os.dup(sock.fileno()))
            except OSError:
                # There are no descriptors left, so nobody could take back later what it has from its listener.
                close_resets(sock, False)
            else:
                close_resets(self._kept, True)
        self._relay.made(self)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._write(data)

    def eof_received(self) -> bool:
        assert self.transport is not None
        if not _said_good_bye(self.transport):
            return False  # connection_lost is next
        self.complete = True
        self.other.end_writing()
        # TLS closes the connection, whatever is returned, and logs a warning if it should stay.
        return self.transport.can_write_eof()

    def pause_writing(self) -> None:
        self.other.hold()

    def resume_writing(self) -> None:
        self.other.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._kept is not None:
            if exc is None and (self.closed or self.complete) and not self._is_reset:
                close_resets(self._kept, False)
            self._kept.close()
        self._relay.lost(self, exc)

    # -- what the other side, and the relay, ask for -------------------------------------------------------

    def passes_on(self) -> None:
        """From now on the other side gets what comes."""
        assert self.other.transport is not None
        self._write = self.other.transport.write
        early, self._early = self._early, []
        for data in early:
            self._write(data)
        if self.complete:
            self.other.end_writing()

    def hold(self) -> None:
        """Read no more for a while."""
        if self.transport is not None and not self.complete and not self.lost:
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        # asyncio would report an end of file once more.
        if self.transport is not None and not self.complete and not self.lost:
            self.transport.resume_reading()

    def end_writing(self) -> None:
        """The other peer has sent all that it will send."""
        if self.transport is None or self.lost or self.closed:
            return
        if self.complete:
            self.close()
            self.other.close()
        elif self.transport.can_write_eof():
            if not self.transport.is_closing():
                self.transport.write_eof()
        else:
            self.close()

    def close(self) -> None:
        """Send what was written, and end the connection."""
        if self.transport is not None and not self.lost and not self.closed:
            self.closed = True
            self.transport.close()

    def reset(self) -> None:
        """End the connection at once, in a way that its peer cannot take for the end of the stream."""
        if self.transport is not None and not self.lost:
            self.closed = self._is_reset = True
            if (sock := _tcp_socket(self.transport)) is not None:
                with contextlib.suppress(OSError):  # the socket is closed already
                    close_resets(sock, True)
            self.transport.abort()

    def _keep(self, data: bytes) -> None:
        # uvloop begins to read after connection_made, and so forgets that it was told to pause there.
        self._early.append(data)
        self.hold()


def _name_of_peer(transport: asyncio.Transport) -> str:
    """Asked at the beginning: TLS forgets its connection when that is lost."""
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return endpoint(name)
    # The kernel forgets the address of a peer that resets its connection before it is accepted.
    return "a peer that had gone" if _tcp_socket(transport) is not None else "a Unix socket"


def _said_good_bye(transport: asyncio.Transport) -> bool:
    """Whether the peer of TLS has sent its close_notify, now that nothing more comes; true without TLS."""
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    try:
        return tls is None or tls.read(1) == b""
    except ssl.SSLError:  # it would wait for more
        return False


def _tcp_socket(transport: asyncio.Transport) -> socket.socket | None:
    """The socket of a TCP connection, with TLS or without; None for other connections."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    is_tcp = sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
    return sock if is_tcp and transport.get_extra_info("rdma_device") is None else None
