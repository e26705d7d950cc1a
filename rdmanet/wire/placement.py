# cython: annotation_typing=False
"""Direct placement: bytes of the stream that are written where the reader wants them.

Theory
------
A reader that names registered memory tells the peer so: a *Want* maps a range of positions of the stream to memory.
The peer may then write bytes of that range there by RDMA WRITE, and say so in a *Placed* frame behind it. No slot has
these bytes, and no CPU of the reader's copies them.

One direction of the stream is described here: S sends bytes, R receives them. The position in the stream decides,
and nothing else, and both sides judge by the same predicate. S counts the bytes that it has posted, R those that it has
seen; DATA and placed bytes count alike. The queue pair keeps order, so R's count at a frame is what S's was when
it posted the frame. Thus both judge a Want the same way, however frames cross. There are two kinds:

                    loose                               fixed
    for             a read that may return less         a read of a known number of bytes
    position        the next byte, when it is said      the first byte that has not come, or a later one
    open at once    one, alone                          up to four
    current         at its position, so once            from its position on, up to its end, any number of times
    passed          after its position                  at its end
    DATA in it      ends it                             leaves it open: S may place what comes behind

S uses a Want only if it is not passed at S's count. R lets go of memory only if its Want is passed at R's count, which
is never ahead of S's. So no WRITE follows the frame that made R let go. Positions only grow, so a Want that has been
passed can never be current again.

A Want obliges S to nothing: it may send DATA at any time. So nothing can wait for a Want for ever. Wants are said in
Credit frames, which are bounded. To take Wants back, R says *Unwant* in a Credit, with the last serial number that it
has said, and says no Want until S has answered. S never posts a WRITE without its Placed directly behind, so all that
was placed has been told before the answer.

Memory is R's again when its Want is OVER:

    NAMED --------> SAID --------> UNWANTED --------+
      |               |                |            v
      +---------------+----------------+--------> OVER      passed; answered; the peer's Fin or Abort; no queue pair

These checks of a peer's numbers protect the books of both sides. Only the key protects the memory: see landing.pxi.

This file is pure, and valid Python that is also compiled (placement.pxd), as credit.py is.
"""

from __future__ import annotations

from typing import Final

from rdmanet import credit
from rdmanet.errors import ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rdmanet.base.bodies import Want

WANTS_MAX: Final = 4
"""Wants that may be open at a time."""
FIXED: Final = 1
"""Want.flags: a fixed one."""

NAMED: Final = 1
SAID: Final = 2
UNWANTED: Final = 3
OVER: Final = 4

_FIXED = 1
_NAMED = 1
_SAID = 2
_UNWANTED = 3
_OVER = 4
_WANTS_MAX = 4
_SERIAL_MAX = 0xFFFF_FFFF


class PeerWant:
    """A Want of the peer's, which is not passed."""

    def __init__(self, want: Want) -> None:
        self.serial = want.serial
        self.position = want.position
        self.address = want.address
        self.length = want.length
        self.rkey = want.rkey
        self.fixed = (want.flags & FIXED) != 0


class PeerWants:
    """The sender's side: what the peer wants.

    Call ``sent()`` for all bytes posted, whether as DATA or placed, and ``current()`` before that to learn where they
    may go. ProtocolError is the peer's fault.

    :ivar position: the position in the stream of the next byte that will be posted
    :ivar count: how many Wants are open
    :ivar answer_due: the Unwant that the next Credit has to answer, or 0
    """

    def __init__(self, origin: int = 0) -> None:
        self.position = origin
        self.count = 0
        self.answer_due = 0
        self._open: list[PeerWant] = []
        self._last = 0
        self._unwanted = 0
        self._finished = False

    def hear(self, wants: tuple[Want, ...], unwanted: int) -> int:
        """Take in a Credit's fields. Returns 0."""
        if self._finished:
            return 0
        if unwanted:
            if unwanted != self._last or unwanted == self._unwanted:
                raise ProtocolError(
                    f"Wants up to {unwanted} are taken back, the last one said was {self._last}"
                )
            self._unwanted = self.answer_due = unwanted
            self._open.clear()
            self.count = 0
        for want in wants:
            self._hear_one(want)
        return 0

    def _hear_one(self, want: Want) -> int:
        serial = want.serial
        if self.answer_due:
            raise ProtocolError(f"Want {serial} came before the answer to an Unwant")
        if serial <= self._last:
            raise ProtocolError(f"Want {serial} came after Want {self._last}")
        if want.length == 0 or want.address + want.length > 1 << 64 or want.position + want.length > 1 << 64:
            raise ProtocolError(
                f"Want {serial}: {want.length} bytes at {want.address:#x} for position {want.position}"
            )
        if want.flags & ~FIXED:
            raise ProtocolError(f"Want {serial}: unknown flags {want.flags:#x}")
        fixed = (want.flags & FIXED) != 0
        if not fixed and want.position > self.position:
            raise ProtocolError(
                f"Want {serial} is for position {want.position}, but only {self.position} bytes were sent"
            )
        self._last = serial
        room = PeerWant(want)
        if self._is_passed(room):
            return 0
        if self.count == _WANTS_MAX:
            raise ProtocolError(f"Want {serial} is one more than {_WANTS_MAX} at a time")
        if self.count and not (fixed and self._open[self.count - 1].fixed):
            raise ProtocolError(f"Want {serial}: a loose Want beside another one")
        if self.count and want.position < self._open[self.count - 1].position:
            raise ProtocolError(f"Want {serial} is for an earlier position than the one before")
        self._open.append(room)
        self.count += 1
        return 0

    def _is_passed(self, want: PeerWant) -> bool:
        if self.position < want.position:
            return False
        if want.fixed:
            return self.position - want.position >= want.length
        return self.position > want.position

    def current(self) -> PeerWant | None:
        """The Want that the next byte may be placed into, or None."""
        if self.count == 0:
            return None
        want = self._open[0]
        return None if self.position < want.position else want

    def room(self, want: PeerWant) -> int:
        """How many bytes may be placed into the current Want now."""
        return want.length - (self.position - want.position)

    def target(self, want: PeerWant) -> int:
        """The address for the next byte."""
        return want.address + (self.position - want.position)

    def sent(self, count: int) -> int:
        """So many bytes were posted. Returns 0."""
        self.position += count
        while self.count and self._is_passed(self._open[0]):
            del self._open[0]
            self.count -= 1
        return 0

    def answered(self) -> int:
        """The answer that goes into a Credit now, or 0."""
        answer = self.answer_due
        self.answer_due = 0
        return answer

    def finish(self) -> int:
        """Our Fin or Abort is posted: nothing is placed any more. Returns 0."""
        self._finished = True
        self._open.clear()
        self.count = 0
        self.answer_due = 0
        return 0


class OurWant:
    """Memory that a read has named.

    :ivar position: the position in the stream of its first byte
    :ivar state: NAMED, SAID, UNWANTED or OVER
    :ivar used: whether the peer has placed bytes into it
    """

    def __init__(self, position: int, address: int, length: int, fixed: bool) -> None:
        self.serial = 0
        self.position = position
        self.address = address
        self.length = length
        self.rkey = 0
        self.fixed = fixed
        self.state = NAMED
        self.used = False

    def as_said(self) -> Want:
        """For a Credit."""
        return credit.Want(
            self.serial, self.position, self.address, self.length, self.rkey, FIXED if self.fixed else 0
        )


class OurWants:
    """The receiver's side: what our reads want.

    :ivar position: the position in the stream of the next byte that comes
    :ivar count: how many Wants are not OVER
    :ivar unwant_due: the Unwant that the next Credit has to say, or 0
    :ivar unanswered: the Unwant that the peer has not answered, or 0
    :ivar target: where the bytes of the last Placed frame are,
    :ivar placed: and how many they are
    """

    def __init__(self, origin: int = 0) -> None:
        self.position = origin
        self.count = 0
        self.unwant_due = 0
        self.unanswered = 0
        self.target = 0
        self.placed = 0
        self._open: list[OurWant] = []
        self._last = 0
        self._ended = False

    def may_name(self, fixed: bool) -> bool:
        """Whether one more Want may be named now."""
        if self._ended or self.unanswered or self._last == _SERIAL_MAX:
            return False
        if self.count == 0:
            return True
        return fixed and self._open[self.count - 1].fixed and self.count < _WANTS_MAX

    def name(self, address: int, length: int, fixed: bool) -> OurWant:
        """Name memory for the next bytes that have not come, or for those behind the last Want's."""
        if not self.may_name(fixed) or length == 0:
            raise RuntimeError("this memory cannot be named now")
        position = self.position
        if self.count:
            last = self._open[self.count - 1]
            position = last.position + last.length
        want = OurWant(position, address, length, fixed)
        self._open.append(want)
        self.count += 1
        return want

    def next_to_say(self) -> OurWant | None:
        """The first Want that a Credit may say now. Its key is made, and then ``say()`` is called."""
        if self._ended or self.unanswered:
            return None
        for want in self._open:
            if want.state == _NAMED:
                return want
        return None

    def say(self, want: OurWant, rkey: int) -> Want:
        """The Want goes into a Credit."""
        self._last += 1
        want.serial = self._last
        want.rkey = rkey
        want.state = _SAID
        return want.as_said()

    def drop(self, want: OurWant) -> int:
        """It is not going to be said, because it can be given no key. Returns 0."""
        if want.state != _NAMED:
            raise RuntimeError("a Want that was said has to be taken back")
        want.state = _OVER
        return self._sweep()

    def unwant(self) -> int:
        """Take all Wants back. What was not said is over at once. Returns 0."""
        said = False
        for want in self._open:
            if want.state == _NAMED:
                want.state = _OVER
            elif want.state == _SAID:
                want.state = _UNWANTED
                said = True
        self._sweep()
        if said:
            self.unwant_due = self.unanswered = self._last
        return 0

    def unwanted(self) -> int:
        """The Unwant that goes into a Credit now, or 0."""
        unwant = self.unwant_due
        self.unwant_due = 0
        return unwant

    def hear(self, answered: int) -> int:
        """Take in a Credit's field. Returns 0."""
        if answered == 0 or self._ended:
            return 0
        if answered != self.unanswered or self.unwant_due:
            raise ProtocolError(f"the peer answers Unwant {answered}, {self.unanswered} was said")
        self.unanswered = 0
        for want in self._open:
            if want.state == _UNWANTED:
                want.state = _OVER
        self._sweep()
        return 0

    def received(self, count: int) -> int:
        """So many bytes came in a DATA frame. Returns 0."""
        self.position += count
        if self.count:
            self._pass()
        return 0

    def place(self, serial: int, upto: int) -> OurWant:
        """A Placed frame came. Returns its Want; ``target`` and ``placed`` say which memory has bytes now.

        If the Want is UNWANTED, the bytes have to be copied out before anything else happens.
        """
        for want in self._open:
            if want.serial == serial and (want.state == _SAID or want.state == _UNWANTED):
                break
        else:
            raise ProtocolError(f"bytes were placed into Want {serial}, which is not open")
        if self.position < want.position or (self.position != want.position and not want.fixed):
            raise ProtocolError(
                f"bytes from position {self.position} on were placed into Want {serial} for {want.position}"
            )
        if upto <= self.position or upto - want.position > want.length:
            raise ProtocolError(
                f"bytes from {self.position} to {upto} were placed into Want {serial} "
                f"of {want.length} bytes for {want.position}"
            )
        self.target = want.address + (self.position - want.position)
        self.placed = upto - self.position
        want.used = True
        self.position = upto
        self._pass()
        return want

    def end(self) -> int:
        """The peer's Fin or Abort came, or there is no queue pair any more. Returns 0."""
        self._ended = True
        self.unwant_due = self.unanswered = 0
        for want in self._open:
            want.state = _OVER
        self._sweep()
        return 0

    def _pass(self) -> int:
        for want in self._open:
            if self.position > want.position and (
                not want.fixed or self.position - want.position >= want.length
            ):
                want.state = _OVER
        return self._sweep()

    def _sweep(self) -> int:
        self._open = [want for want in self._open if want.state != _OVER]
        self.count = len(self._open)
        return 0
