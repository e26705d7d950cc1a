# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The calls of one connection, as each side counts them: no I/O, no loop.

Theory
------
The caller numbers its calls. A number is in use from Call until the callee's last message about it, which is exactly
one of Reply, Failure, or, for a method that streams, End. That holds for cancelled calls, too: Cancel asks for an early
answer, and does not do without one. So neither side ever has to guess whether a message is about an old call or a new
one, and the numbers in use bound what the callee does for this caller.

    at the caller                                              at the callee

    begin() --> OPEN --- last message ---> (gone)              begin() --> RUNNING -- answered() --> (gone)
                 |                            ^                              |                          ^
                 | abandon(), Cancel          |                              | answered(lending)        |
                 v                            |                              v                          |
             ABANDONED --- last message ------+                          LENDING -- Release, or late ---+

What may come for a call depends on its kind. "-" is a violation, which ends the connection; "drop" is a message that
crossed another one on the way.

    received by the caller   | UNARY | SERVER_STREAM | CLIENT_STREAM | BOTH | no such call
    Reply                    | last  | -             | last          | -    | -
    Failure                  | last  | last          | last          | last | -
    Item                     | -     | item          | -             | item | -
    End                      | -     | last          | -             | last | -
    Window                   | -     | -             | more          | more | -
    Initial                  | more  | more          | more          | more | -

An ABANDONED call keeps its column; what may come is dropped.

    received by the callee   | UNARY | SERVER_STREAM | CLIENT_STREAM | BOTH | LENDING        | no such call
    Call                     | -     | -             | -             | -    | -              | begin
    Cancel                   | cancel| cancel        | cancel        |cancel| drop           | drop
    Item                     | -     | -             | item          | item | drop           | drop
    End                      | -     | -             | end           | end  | drop           | drop
    Window                   | -     | more          | -             | more | drop           | drop
    Release                  | -     | -             | -             | -    | gone           | drop

After the caller's End, its Items and a second End are violations. An Item that no credit allowed is one as well. A
caller's Item for a call that the callee does not have any more is dropped: the answer is on its way.

The credit of a stream is a number of bytes, cumulative since the call began, as in TCP. An item costs its length in
msgpack and `ITEM_BYTES`, which stand for what a receiver needs to remember it. A sender may begin an item while it has
sent less than its credit. So a receiver holds at most a window and one message.
"""

from __future__ import annotations

from typing import Any, Final

from rdmanet.errors import ProtocolError
from rdmanet.rpc.limits import NUMBERS, exceeded
from rdmanet.rpc.method import Kind

_STREAMS_BACK: Final = frozenset({Kind.SERVER_STREAM, Kind.BOTH})

ITEM_BYTES: Final = 64
_LAST_NUMBER: Final = NUMBERS - 1


class Inflow:
    """The receiver's half of a stream: what the peer may send, has sent, and what the program has taken."""

    __slots__ = ("_granted", "_received", "_taken", "_window", "ended")

    def __init__(self, window: int) -> None:
        self._window = window
        self._granted = window
        self._received = 0
        self._taken = 0
        self.ended = False

    def arrived(self, number: int, size: int) -> None:
        """An item of so many bytes has come.

        :raises ProtocolError: it may not
        """
        if self.ended:
            raise ProtocolError(f"the peer sends an item of call {number} after the end of that stream")
        if self._received >= self._granted:
            raise ProtocolError(f"the peer sends an item of call {number} that it has no credit for")
        self._received += size

    def end(self, number: int) -> None:
        """The stream is complete.

        :raises ProtocolError: it was before
        """
        if self.ended:
            raise ProtocolError(f"the peer ends the stream of call {number} twice")
        self.ended = True

    def taken(self, size: int) -> int | None:
        """The program has taken an item. Returns the total that the peer is to be granted now, if it is time to."""
        self._taken += size
        due = self._taken + self._window
        if self.ended or due - self._granted < self._window // 2:
            return None
        self._granted = due
        return due


class Outflow:
    """The sender's half of a stream: what the peer allows, and what was sent."""

    __slots__ = ("_allowed", "sent_bytes")

    def __init__(self, window: int) -> None:
        self._allowed = window
        self.sent_bytes = 0

    @property
    def open(self) -> bool:
        """Whether an item may be sent now."""
        return self.sent_bytes < self._allowed

    def sent(self, size: int) -> None:
        """An item of so many bytes is on its way."""
        self.sent_bytes += size

    def allow(self, number: int, total: int) -> None:
        """The receiver allows so much in total.

        :raises ProtocolError: it allowed more before
        """
        if total < self._allowed:
            raise ProtocolError(f"the peer takes back credit of call {number}: {total} after {self._allowed}")
        self._allowed = total


class CallerBook:
    """The calls that this side has made. For each there is an owner, who is told what comes.

    :param calls_max: how many may be unfinished at a time
    """

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        self.begun = 0
        """Calls since the connection began: the place of the last one among them."""
        self._calls: dict[int, tuple[Kind, Any, Inflow | None, Outflow | None]] = {}
        self._last = 0

    def __len__(self) -> int:
        """Unfinished calls, abandoned ones included."""
        return len(self._calls)

    def begin(
        self, kind: Kind, owner: Any, inflow: Inflow | None = None, outflow: Outflow | None = None
    ) -> int:
        """A call begins; returns its number.

        :raises Error: RESOURCE_EXHAUSTED
        """
        calls = self._calls
        if len(calls) >= self.calls_max:
            raise exceeded("calls", self.calls_max, f"this connection has {len(calls)} unfinished calls")
        number = self._after(self._last)
        while number in calls:
            number = self._after(number)
        self._last = number
        self.begun += 1
        calls[number] = kind, owner, inflow, outflow
        return number

    def _after(self, number: int) -> int:
        return 0 if number == _LAST_NUMBER else number + 1

    def withdraw(self, number: int) -> None:
        """The last Call was not sent after all."""
        del self._calls[number]
        self.begun -= 1

    def abandon(self, number: int) -> bool:
        """Nobody waits for this call any more. True: its Cancel is to be sent."""
        found = self._calls.get(number)
        if found is None or found[1] is None:
            return False
        self._calls[number] = found[0], None, found[2], found[3]
        return True

    def reply(self, number: int) -> Any:
        """Reply has come, and ends the call. Returns the owner, unless it is abandoned.

        :raises ProtocolError: it may not; the same holds for the methods below
        """
        found = self._calls.pop(number, None)
        if found is None or found[0] in _STREAMS_BACK:
            if found is not None:
                self._calls[number] = found  # its owner is to hear why the connection ends
            raise self._violation(number, found, "Reply")
        return found[1]

    def failure(self, number: int) -> Any:
        """Failure has come, and ends the call."""
        found = self._calls.pop(number, None)
        if found is None:
            raise self._violation(number, found, "Failure")
        return found[1]

    def end(self, number: int) -> Any:
        """End has come, and ends the call."""
        found = self._calls.get(number)
        if found is None or found[0] not in _STREAMS_BACK:
            raise self._violation(number, found, "End")
        del self._calls[number]
        return found[1]

    def item(self, number: int, size: int) -> Any:
        """An item of so many bytes has come."""
        found = self._calls.get(number)
        if found is None or found[2] is None:
            raise self._violation(number, found, "Item")
        found[2].arrived(number, size)
        return found[1]

    def window(self, number: int, total: int) -> Any:
        """Credit for our stream has come."""
        found = self._calls.get(number)
        if found is None or found[3] is None:
            raise self._violation(number, found, "Window")
        found[3].allow(number, total)
        return found[1]

    def initial(self, number: int) -> Any:
        """Initial metadata has come."""
        found = self._calls.get(number)
        if found is None:
            raise self._violation(number, found, "Initial")
        return found[1]

    def lost(self) -> list[Any]:
        """The connection is gone: returns the owners of all calls that are not abandoned."""
        owners = [found[1] for found in self._calls.values() if found[1] is not None]
        self._calls.clear()
        return owners

    def _violation(self, number: int, found: Any, name: str) -> ProtocolError:
        if found is None:
            return ProtocolError(f"the peer sends {name} for call {number}, which is not pending")
        return ProtocolError(f"the peer sends {name} for call {number}, which is {found[0].name}")


class CalleeBook:
    """The calls of the peer that this side executes.

    :param calls_max: how many may be unfinished at a time
    :ivar calls: those that run, by their numbers
    :ivar lending: those whose results are on loan
    :ivar left: how many have been answered, and still have threads
    """

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        self.calls: dict[int, tuple[Kind, Any, Inflow | None, Outflow | None]] = {}
        self.lending: dict[int, Any] = {}
        self.left = 0

    def __len__(self) -> int:
        """Unfinished calls, those included whose results are on loan, and those that have threads."""
        return len(self.calls) + len(self.lending) + self.left

    def begin(
        self,
        number: int,
        kind: Kind,
        owner: Any,
        inflow: Inflow | None = None,
        outflow: Outflow | None = None,
    ) -> None:
        """Call has come, and its number is not in use (`check_unused`).

        :raises Error: RESOURCE_EXHAUSTED; it is not begun, and that is the answer
        """
        if len(self.calls) + len(self.lending) + self.left >= self.calls_max:
            raise exceeded("calls", self.calls_max, f"this connection has {len(self)} unfinished calls")
        self.calls[number] = kind, owner, inflow, outflow

    def check_unused(self, number: int) -> None:
        """Raise ProtocolError if a number is in use."""
        if number in self.calls or number in self.lending:
            raise ProtocolError(f"the peer begins call {number}, which is pending")

    def answered(self, number: int, lending: bool = False) -> None:
        """The last message about the call was sent. With `lending`, its result is on loan until it is released.

        Else this is no more than ``del calls[number]``, which whoever has much to do writes itself.
        """
        found = self.calls.pop(number)
        if lending:
            self.lending[number] = found[1]

    def cancel(self, number: int) -> Any:
        """Cancel has come. Returns the owner, if the call is running."""
        found = self.calls.get(number)
        return None if found is None else found[1]

    def item(self, number: int, size: int) -> Any:
        """An item of so many bytes has come. Returns the owner, if the call is running.

        :raises ProtocolError: it may not; the same holds for the methods below
        """
        found = self.calls.get(number)
        if found is None:
            return None
        if found[2] is None:
            raise ProtocolError(f"the peer sends Item for call {number}, which is {found[0].name}")
        found[2].arrived(number, size)
        return found[1]

    def end(self, number: int) -> Any:
        """The caller's stream is complete."""
        found = self.calls.get(number)
        if found is None:
            return None
        if found[2] is None:
            raise ProtocolError(f"the peer sends End for call {number}, which is {found[0].name}")
        found[2].end(number)
        return found[1]

    def window(self, number: int, total: int) -> Any:
        """Credit for the callee's stream has come."""
        found = self.calls.get(number)
        if found is None:
            return None
        if found[3] is None:
            raise ProtocolError(f"the peer sends Window for call {number}, which is {found[0].name}")
        found[3].allow(number, total)
        return found[1]

    def release(self, number: int) -> Any:
        """Release has come. Returns the owner, if its result was on loan."""
        if number in self.calls:
            raise ProtocolError(f"the peer releases the result of call {number}, which has none yet")
        return self.lending.pop(number, None)

    def end_loan(self, number: int, owner: Any) -> None:
        """This call's result is not on loan any more, whatever the caller says."""
        if self.lending.get(number) is owner:
            del self.lending[number]

    def lost(self) -> list[Any]:
        """The connection is gone: returns the owners of all calls. Their answers go nowhere."""
        owners = [found[1] for found in self.calls.values()] + list(self.lending.values())
        self.calls.clear()
        self.lending.clear()
        return owners
