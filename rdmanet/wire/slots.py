# cython: annotation_typing=False
"""Receive slots that grow and shrink: what a SEND may hold.

Theory
------
A connection that says little needs little memory, so its receives are small at first. When its peer sends much, it
posts larger ones. A SEND that is longer than its receive kills the connection, so the sender must know how long each
receive is. It can know, because it can count: the receives of a queue pair are consumed in the order in which they were
posted, and each SEND takes one, control frames included. So SEND number k finds receive number k.

R receives, S sends. R says in a Credit: "from my receive number n on, a slot holds so many bytes". n is always the
number of the receive that R posts next, and from then on R posts receives of the new size. S counts with the new size
from its SEND number n on; with a smaller one as soon as it hears of it.

Why that is safe: S sends only what it has credits or an allowance for, by headers that it has received. When R made
such a header, it had posted a receive for everything that the header allows. The queue pair keeps order, so all headers
that S knows when it hears of n were made before n was posted. Hence S has not sent number n yet.

R says nothing new until SEND number n - 1 has come, so S remembers at most one size to come.

When R has said a smaller size, it has larger receives posted, whose memory it wants back. Only SENDs of S's use them
up. So R asks S for some (by Pings, which S answers) until SEND number n - 1 has come.

Only a queue pair with receives of its own can do this: a shared queue has one size.

This file is pure, and valid Python that is also compiled (slots.pxd), as credit.py is. Numbers count modulo 2**32.
"""

from typing import Final

from rdmanet.credit import SLOT_BYTES_MAX, SLOT_BYTES_MIN
from rdmanet.errors import ProtocolError

FIRST_SLOT_BYTES: Final = 1024
"""What a slot holds at first. All control frames fit, if region updates are split."""

_LEAST = 512
_MOST = 1 << 24
_MASK = 0xFFFF_FFFF
assert (_LEAST, _MOST) == (SLOT_BYTES_MIN, SLOT_BYTES_MAX)


class OurSlots:
    """The receiver's side: of which size to post receives.

    Call ``posted_some()`` and ``received_one()`` for all receives. RuntimeError is our own fault.

    :ivar size: what a receive that is posted now holds
    """

    def __init__(self, size: int, origin: int = 0) -> None:
        self.size = size
        self.posted = origin
        self.received = origin
        self._from = origin
        self._waits = False  # for receive number _from - 1 to complete
        self._shrinks = False

    def posted_some(self, count: int) -> int:
        """So many receives were posted. Returns 0."""
        self.posted = (self.posted + count) & _MASK
        return 0

    def received_one(self) -> int:
        """A receive has completed. Returns 0."""
        self.received = (self.received + 1) & _MASK
        if self.received == self._from:
            self._waits = False
        return 0

    def may_change(self) -> bool:
        """Whether another size may be said now."""
        return not self._waits

    def wants_frames(self) -> bool:
        """Whether larger receives are posted than those that are posted now."""
        return self._waits and self._shrinks

    def change(self, size: int) -> int:
        """Another size is said in a Credit now, and holds at once. Returns the number of the receive to name there."""
        if not self.may_change() or size == self.size:
            raise RuntimeError(f"slots of {self.size} bytes cannot be of {size} bytes now")
        self._shrinks = size < self.size
        self.size = size
        self._from = self.posted
        self._waits = self.posted != self.received
        return self.posted


class PeerSlots:
    """The sender's side: how much the next SEND may hold.

    Call ``sent_one()`` for each SEND that is posted. ProtocolError is the peer's fault.

    :ivar limit: the bytes that the next SEND may have after its header
    """

    def __init__(self, limit: int, depth: int, origin: int = 0) -> None:
        self.limit = limit
        self.depth = depth  # receives that the peer can have posted
        self.sent = origin
        self._from = 0
        self._next = 0  # the larger size that holds from that SEND on, or 0

    def hear(self, number: int, size: int) -> int:
        """Take in a Credit's fields. Returns 0."""
        ahead = (number - self.sent) & _MASK
        if size < _LEAST or size > _MOST:
            raise ProtocolError(
                f"the peer says that its slots hold {size} bytes, {_LEAST} to {_MOST} are possible"
            )
        if self._next:
            raise ProtocolError(
                f"the peer says that its slots hold {size} bytes before they hold {self._next}"
            )
        if ahead > self.depth:
            raise ProtocolError(
                f"the peer says that its slots hold {size} bytes from receive {number} on: "
                f"{self.sent} were used, and it has {self.depth}"
            )
        if size <= self.limit or ahead == 0:
            self.limit = size
        else:
            self._from = number
            self._next = size
        return 0

    def sent_one(self) -> int:
        """A SEND was posted. Returns what the next one may hold."""
        self.sent = (self.sent + 1) & _MASK
        if self._next and self.sent == self._from:
            self.limit = self._next
            self._next = 0
        return self.limit
