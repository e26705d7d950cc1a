# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""What the calls of a server take together, in number and bytes, and the share that each connection may always have.

Theory
------
Limits of one connection do not protect a server from many of them. Limits of the server alone protect it, but not its
clients from each other: one of them could use up everything. So both hold, and a share:

    first come   While all calls together are within a limit of the server, whoever comes gets what it asks for.
    shares       Beyond that, a connection may have its share: as much as the limit again, divided among the peers that
                 are connected, and the part of each among its connections. One call it may always have.

So there is never more than twice the limit, and one call for each connection. Who opens many connections takes only
from itself. A peer is a user of this host, or an address of another (admission.source_of).

Bytes are of whatever a call makes this side remember: its arguments, as they came and as they are decoded, memory that
is filled from the caller's, items that the method has not taken, and results that the caller has not. Frames that are
not complete count, too, before anybody knows of which call they are.
"""

from __future__ import annotations

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.limits import Limits, exceeded


class Holder:
    """What a call that is being executed holds.

    :ivar is_counted: between `begin` and `end`
    :ivar inline_bytes: what it holds that came in messages, or waits to be sent in one
    :ivar lent_bytes: what it holds of buffers by reference
    """

    def __init__(self) -> None:
        self.is_counted = False
        self.inline_bytes = 0
        self.lent_bytes = 0


class Shares:
    """What all connections of a server have.

    :ivar calls: that are unfinished
    :ivar held_bytes: by these, and by frames
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._calls_most = limits.server_calls
        self._inline_most = limits.inline_bytes
        self._lent_most = limits.lent_bytes
        self._bytes_most = limits.server_bytes
        self.calls = 0
        self.held_bytes = 0
        self._connections: dict[str, int] = {}  # of each peer

    def join(self, source: str) -> Share:
        """The share of a new connection of this peer."""
        self._connections[source] = self._connections.get(source, 0) + 1
        return Share(self, source)

    def leave(self, source: str) -> None:
        """A connection of this peer is gone. What its calls have, they keep to their ends."""
        self._connections[source] -= 1
        if not self._connections[source]:
            del self._connections[source]

    def part(self, source: str, limit: int) -> int:
        """How much of as much as this limit a connection of this peer may always have."""
        return limit // (max(1, len(self._connections)) * self._connections.get(source, 1))


class Share:
    """What the calls of one connection have.

    :ivar calls: that are unfinished
    :ivar inline_bytes: of messages, which `Limits.inline_bytes` bounds
    :ivar lent_bytes: by reference, which `Limits.lent_bytes` bounds
    :ivar frame_bytes: of the frame that is not complete
    """

    def __init__(self, shares: Shares, source: str) -> None:
        self._shares = shares
        self._source = source
        self.calls = 0
        self.inline_bytes = 0
        self.lent_bytes = 0
        self.frame_bytes = 0

    @property
    def limits(self) -> Limits:
        """The server's."""
        return self._shares.limits

    def leave(self) -> None:
        """The connection is gone."""
        self.frame_is(0)
        self._shares.leave(self._source)

    def begin(self, holder: Holder, nbytes: int) -> None:
        """A call begins, with so many bytes of arguments.

        :raises Error: RESOURCE_EXHAUSTED, and nothing is counted; the same holds for the methods below
        """
        shares = self._shares
        most = shares._calls_most
        if shares.calls >= most and self.calls and self.calls >= shares.part(self._source, most):
            raise exceeded("server_calls", most, f"the server has {shares.calls} unfinished calls")
        held, server_held = self.inline_bytes + nbytes, shares.held_bytes + nbytes
        if held > shares._inline_most or server_held > shares._bytes_most:
            holder.is_counted = True
            try:
                self.hold(holder, nbytes, "arguments")
            except Error:
                holder.is_counted = False
                raise
        else:  # what hold() does then: each call comes here
            self.inline_bytes, shares.held_bytes, holder.inline_bytes = held, server_held, nbytes
        holder.is_counted = True
        self.calls += 1
        shares.calls += 1

    def end(self, holder: Holder) -> None:
        """A call is over, and what it has held is free."""
        shares, inline_bytes, lent_bytes = self._shares, holder.inline_bytes, holder.lent_bytes
        self.calls -= 1
        shares.calls -= 1
        self.inline_bytes -= inline_bytes
        self.lent_bytes -= lent_bytes
        shares.held_bytes -= inline_bytes + lent_bytes
        holder.inline_bytes = holder.lent_bytes = 0
        holder.is_counted = False

    def hold(self, holder: Holder, nbytes: int, what: str) -> None:
        """So many bytes of messages are remembered for a call.

        :raises Error: also if the call has ended
        """
        if not holder.is_counted:
            raise Error(Code.CANCELLED, f"{nbytes} bytes of {what}: the call has ended")
        shares = self._shares
        held, most = self.inline_bytes + nbytes, shares._inline_most
        if held > most:
            raise exceeded("inline_bytes", most, f"{held} bytes of {what} in messages")
        if shares.held_bytes + nbytes > shares._bytes_most:
            self._check_share(nbytes, what)
        self.inline_bytes = held
        shares.held_bytes += nbytes
        holder.inline_bytes += nbytes

    def drop(self, holder: Holder, nbytes: int) -> None:
        """So many bytes that were held are free again. After the call's end they are anyway."""
        if holder.is_counted:
            holder.inline_bytes -= nbytes
            self.inline_bytes -= nbytes
            self._shares.held_bytes -= nbytes

    def hold_lent(self, holder: Holder, nbytes: int, what: str) -> None:
        """So much memory goes by reference, until the call ends.

        :raises Error: also if it has ended
        """
        if not holder.is_counted:
            raise Error(Code.CANCELLED, f"{nbytes} bytes of {what}: the call has ended")
        most, held = self._shares._lent_most, self.lent_bytes + nbytes
        if held > most:
            raise exceeded("lent_bytes", most, f"{what} of {held} bytes")
        if self._shares.held_bytes + nbytes > self._shares._bytes_most:
            self._check_share(nbytes, what)
        self.lent_bytes = held
        self._shares.held_bytes += nbytes
        holder.lent_bytes += nbytes

    def frame_is(self, nbytes: int) -> None:
        """So many bytes have come of a frame that is not complete."""
        more = nbytes - self.frame_bytes
        if self._shares.held_bytes + more > self._shares._bytes_most:
            self._check_share(more, "a message")
        self.frame_bytes = nbytes
        self._shares.held_bytes += more

    def _check_share(self, nbytes: int, what: str) -> None:
        """See whether this connection may have so many more bytes, although the server has as many as it may."""
        shares = self._shares
        most = shares._bytes_most
        own = self.inline_bytes + self.lent_bytes + self.frame_bytes + nbytes
        if nbytes > 0 and own > shares.part(self._source, most):
            text = f"the server has {shares.held_bytes + nbytes} bytes, with {nbytes} of {what}"
            raise exceeded("server_bytes", most, text)


class Held:
    """One thing that a call holds for a while: an item that waits until it can be sent."""

    __slots__ = ("_holder", "_nbytes", "_share")

    def __init__(self, share: Share, holder: Holder) -> None:
        self._share = share
        self._holder = holder
        self._nbytes = 0

    def hold(self, nbytes: int, what: str) -> None:
        """It has so many bytes.

        :raises Error: RESOURCE_EXHAUSTED
        """
        self._share.hold(self._holder, nbytes, what)
        self._nbytes = nbytes

    def drop(self) -> None:
        """It is not held any more."""
        nbytes, self._nbytes = self._nbytes, 0
        self._share.drop(self._holder, nbytes)
