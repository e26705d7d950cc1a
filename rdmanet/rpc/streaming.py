"""The two halves of a stream of items, on either side of a call.

`Receiving` keeps what has come until the program takes it, and grants credit as it is taken. `Sending` takes items from
an iterator of the program's, and sends them as credit allows. The counts are those of calls.py.

A method that waits for an item while nothing goes the other way, either, is not left waiting for ever (`watch`).

The streams of a connection let others run when all together have sent as much as it handles in a turn (TURN_COST): an
iterator need not await, a peer may take all that it gives, and may have a thousand streams. Then they go on in turns.

A caller gets `Results`. Who is cancelled while it waits for the next of them ends the call, so that no method runs
whose caller is gone. A generator that was cancelled is complete, as far as Python knows; `Results` says what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final

from rdmanet.rpc.calls import ITEM_BYTES, Inflow, Outflow
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.failures import unsendable
from rdmanet.rpc.framing import COST_BYTES
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import Item, OutItem, OutItemBringing, Window, raw
from rdmanet.rpc.messenger import logger
from rdmanet.rpc.packing import Packed, Packing
from rdmanet.rpc.shares import Held
from rdmanet.rpc.stats import Counter

END_S: Final = 1.0
"""How long a call waits for the end of its caller's stream, after it has cancelled that."""


class Receiving:
    """The items of a stream, as the program takes them. One task may iterate at a time.

    :param decode: from an item's msgpack to the item
    :param on_taken: is told the cost of each item that is taken
    :ivar has_ended: nothing more that comes is kept
    """

    def __init__(
        self,
        link: Link,
        inflow: Inflow,
        decode: Callable[[Any], Any],
        on_taken: Callable[[int], None] | None = None,
    ) -> None:
        self.number = -1
        self.inflow = inflow
        self._link = link
        self._decode = decode
        self._on_taken = on_taken
        self._items: deque[bytes | Packed] = deque()
        self._put = 0
        self._moved = -1  # how much has, when somebody waited at the last look
        self._waiter: asyncio.Future[None] | None = None
        self.has_ended = False
        self._error: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = math.inf
        self._other: Outflow | None = None

    def put(self, item: bytes | Packed) -> None:
        """An item has come, and was counted."""
        if not self.has_ended:
            self._items.append(item)
            self._put += 1
            self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """There will be no more. What has come is taken first, and then this error, if there is one."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wake()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def watch(self, seconds: float, sent: Outflow | None) -> None:
        """End the stream with an error when somebody has waited so long for an item, or up to twice that.

        :param sent: the stream that goes the other way, if there is one. As long as it moves, nobody waits in vain
        """
        if seconds < math.inf:
            self._seconds, self._other = seconds, sent
            self._look_again()

    def _look_again(self) -> None:
        self._timer = self._link.loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        before, other = self._moved, self._other
        self._moved = (
            self._put + (0 if other is None else other.sent_bytes) if self._waiter is not None else -1
        )
        if self._moved != before or self._waiter is None:
            self._look_again()
        else:
            text = f"nothing has come of the caller's stream for {self._seconds} s: the limit stream_seconds"
            self._timer = None
            self.finish(Error(Code.DEADLINE_EXCEEDED, text))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Receiving:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self.has_ended:
                if (error := self._error) is None:
                    raise StopAsyncIteration
                self._error = another(error)
                try:
                    raise error
                finally:
                    del error
            if self._waiter is not None:
                raise RuntimeError("another task is waiting for the next item of this stream")
            self._waiter = self._link.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if self._on_taken is not None:
            self._on_taken(len(item) + ITEM_BYTES)
        if (total := self.inflow.taken(len(item) + ITEM_BYTES)) is not None and not self.has_ended:
            self._link.send(Window(self.number, total))
        return self._decode(item)


def another(error: BaseException) -> BaseException:
    """What is raised the next time, in the place of an error that is raised now.

    It refers to the frames that it goes through, and these to what has kept it: to keep it any longer makes a cycle.
    """
    if isinstance(error, Error):
        with contextlib.suppress(Exception):  # a class of the program's may lack some of these
            found = Error(error.code, error.text, error.details, error.traceback)
            found.begun, found.__cause__ = error.begun, error.__cause__
            found.trailing_metadata = error.trailing_metadata
            return found
    return Error(Code.CANCELLED, f"this stream has ended, by {type(error).__name__}")


class Sending:
    """Items of the program's on their way to the peer.

    :param held: counts an item that has to wait; None: nobody does
    :param packed: what begins the text of errors if items have arrays in them (packing.py); None: they have none
    """

    def __init__(
        self,
        link: Link,
        outflow: Outflow,
        counter: Counter,
        held: Held | None = None,
        packed: str | None = None,
    ) -> None:
        self.number = -1
        self.outflow = outflow
        self._link = link
        self._rounds = link.rounds()
        self._counter = counter
        self._held = held
        self._packed = packed
        self._error: Error | None = None
        self._waiter: asyncio.Future[None] | None = None

    def allowed(self) -> None:
        """The peer has granted more."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self, error: Error) -> None:
        """Send no more, and raise this instead."""
        self._error = error
        self.allowed()

    async def send(self, items: AsyncIterator[Any]) -> None:
        """Send all items of an iterator, and close it whatever happens."""
        async with contextlib.AsyncExitStack() as stack:
            if (close := getattr(items, "aclose", None)) is not None:
                stack.push_async_callback(close)
            has_turn = False
            async for item in items:
                waits = self._link.turns.busy or self._rounds.waits(has_turn) or not self.outflow.open
                held = self._held if waits else None
                if self._packed is not None:
                    item = self._pack(item, self._packed)
                elif held is not None:
                    item = raw(item)
                if held is not None:
                    held.hold(len(item), "items that are not read")
                while not self.outflow.open and not self._link.is_over and self._error is None:
                    self._waiter = self._link.loop.create_future()
                    await self._waiter
                if self._rounds.waits(has_turn):
                    await self._rounds.wait()
                has_turn = True
                if self._link.turns.busy:
                    await self._link.turns.wait()
                if self._link.is_over:
                    raise self._link.lost_error()
                if held is not None:
                    held.drop()
                if self._error is not None:
                    raise self._error
                if type(item) is Packed:
                    length = self._link.send(OutItemBringing(self.number, item.raw, item.memory))
                    self.outflow.sent(len(item) + ITEM_BYTES)
                else:
                    length = self._link.send(OutItem(self.number, item))
                    self.outflow.sent(length - item_head(self.number) + ITEM_BYTES)
                self._counter.sent_bytes += length
                if self._rounds.spent(1 + length // COST_BYTES):
                    has_turn = False
                    try:
                        await asyncio.sleep(0)
                    finally:
                        self._rounds.resume()

    def _pack(self, item: Any, what: str) -> Any:
        """An item in msgpack, with the memory of its arrays if it has some.

        :raises TypeError: an array cannot be sent as what it is. A method's caller is told that, as of a result
        """
        try:
            packing = Packing(item, what)
        except (TypeError, BufferError) as exc:
            if self._held is None:
                raise
            raise unsendable(what, exc) from exc
        return Packed(packing.raw, packing.gathered()) if packing.nbytes else packing.raw


def item_of(message: Item) -> bytes | Packed:
    """What is kept of an Item until the program takes it."""
    if message.memory is None:
        return bytes(message.item)
    return Packed(bytes(message.item), memoryview(bytes(message.memory)))


_left: set[asyncio.Task[None]] = set()
"""Tasks of streams that have not ended in time. The loop alone would not keep them."""


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel the task of a caller's stream, and wait until it has ended. One that does not end is left to itself."""
    task.cancel()
    task.add_done_callback(_taken)
    done, _ = await asyncio.wait([task], timeout=END_S)
    if not done:
        _left.add(task)
        task.add_done_callback(_left.discard)
        logger.warning("%s was cancelled %s s ago, and has not ended", task.get_name(), END_S)


def _taken(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # its call has that: nobody need be told that it was never retrieved


class Cut:
    """A block that remembers whether it was cancelled."""

    is_cut = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_cut = kind is not None and issubclass(kind, asyncio.CancelledError)


class Results:
    """The results of a call that streams them.

    :param cut: the block in which the items are generated
    :param generate: gives the generator of them. That of a compiled function warns if it is never asked for one
    """

    __slots__ = ("_cut", "_generate", "_items", "__weakref__")

    def __init__(self, cut: Cut, generate: Callable[[], AsyncGenerator[Any, None]]) -> None:
        self._cut = cut
        self._generate = generate
        self._items: AsyncGenerator[Any, None] | None = None

    def __aiter__(self) -> Results:
        return self

    def __anext__(self) -> Awaitable[Any]:
        if self._cut.is_cut:
            raise Error(
                Code.CANCELLED, "this stream has ended: a task was cancelled that waited for its next item"
            )
        return self._begun().__anext__()

    def _begun(self) -> AsyncGenerator[Any, None]:
        if self._items is None:
            self._items = self._generate()
            del self._generate  # which has the arguments
        return self._items

    async def aclose(self) -> None:
        """End the call."""
        await self._begun().aclose()


def item_head(number: int) -> int:
    """How many bytes of an Item are not its item: those of the array, the kind, and the number."""
    return 2 + (1 if number < 0x80 else 2 if number < 0x100 else 3 if number < 0x1_0000 else 5)
