"""The connections of a client that reconnects, or that has several servers.

Theory
------
A pool looks like a channel (channel.py), and passes each call to one. It has slots; a slot has addresses, and at most
one connection, to the first of them that answers. With the policy "first" there is one slot for all addresses, with
"spread" one for each, and a call goes to the connection with the fewest unfinished calls.

Connections are made when calls want them. A call that finds none waits for the next, and starts a task in each slot
that connects. All waiting calls share it. When the last one has gone, the tasks are cancelled. So a client that nobody
uses has neither a task nor a timer.

    a slot       failures, counted since it served a call       waits before it connects
    new                  0                                       not at all
    a try failed         1, 2, ...                               `Retry.delay`
    connected            counted like a failure, until a call has its answer

The last line is for servers that accept connections and end them again. Without it, a client would not wait between
two of those.

A call is sent again only if its connection is over, and

    it has not begun (`Error.begun`)       always: it was not sent, or the server did not take it
    it may have begun                      if its method is idempotent, and no item has come
    it has a stream of the caller's        only while nothing was taken from that
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import msgspec

from rdmanet.errors import endpoint
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.errors import Code, Error, not_sent
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.retry import Retry
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.streaming import Cut, Results

Address = tuple[str, int | None]
"""(host, port); of a Unix socket (path, None)."""
Dial = Callable[[Address], Awaitable[Channel]]

_RETIRED_MOST: Final = 8
"""Connections that take no new calls, and still have some that run."""


class Slot:
    """A place for one connection.

    :ivar failures: tries to connect since it has served a call
    :ivar not_before: when it may try again, on the loop's clock, if there are any
    :ivar task: is connecting
    """

    __slots__ = ("addresses", "channel", "failures", "is_sleeping", "not_before", "task")

    def __init__(self, addresses: list[Address]) -> None:
        self.addresses = addresses
        self.channel: Channel | None = None
        self.failures = 0
        self.not_before = 0.0
        self.is_sleeping = False
        self.task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> Channel | None:
        """Its connection, if that takes new calls."""
        channel = self.channel
        return None if channel is None or channel.refusal is not None else channel


class Pool:
    """The connections of a client.

    :param dial: connects to an address
    :param retry: None: a connection that is lost is not replaced
    :param spread: whether each address has a connection
    """

    def __init__(
        self, schema: Schema, dial: Dial, addresses: list[Address], retry: Retry | None, spread: bool
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.schema = schema
        self.peer: Any = None
        """The address of the server that got the last call."""
        self._dial = dial
        self._retry = retry
        self._slots = [Slot([address]) for address in addresses] if spread else [Slot(addresses)]
        self._retired: list[Channel] = []
        self._waiting = 0
        self._changed: asyncio.Future[bool] = self.loop.create_future()
        """The next end of a task of a slot: whether it has tried to connect."""
        self._error: Error | None = None  # of that try
        self._is_open = False
        self._is_closed = False

    # -- calls ---------------------------------------------------------------------------------------------

    async def unary(self, call: CallDetails) -> Any:
        """Make a call that has one result; as for `Channel`."""
        tried = _Tried(call)
        while True:
            slot, channel = self._pick() or await self._connected(tried, call.deadline)
            try:
                result = await channel.unary(tried.call)
            except Error as exc:
                self._failed(slot, channel, tried, exc)
            else:
                slot.failures = 0
                return result

    def stream(self, call: CallDetails) -> Results:
        """Make a call that streams its results; as for `Channel`."""
        cut = Cut()
        return Results(cut, self._stream(cut, _Tried(call)))

    async def _stream(self, cut: Cut, tried: _Tried) -> AsyncGenerator[Any, None]:
        with cut:
            while True:
                slot, channel = self._pick() or await self._connected(tried, tried.call.deadline)
                items = channel.stream(tried.call)
                try:
                    async with contextlib.aclosing(items):
                        async for item in items:
                            tried.has_items = True
                            slot.failures = 0
                            yield item
                except Error as exc:
                    self._failed(slot, channel, tried, exc)
                else:
                    slot.failures = 0
                    return

    def _pick(self) -> tuple[Slot, Channel] | None:
        """The connection for the next call."""
        if len(self._slots) == 1:
            slot = self._slots[0]
            if (channel := slot.usable) is None:
                return None
        else:
            found = [(len(channel.book), slot, channel) for slot in self._slots if (channel := slot.usable)]
            if not found:
                return None
            if len(found) < len(self._slots) and self._retry is not None:
                self._begin_connecting(self.loop.time())
            _, slot, channel = min(found, key=lambda each: each[0])
        self.peer = channel.peer
        return slot, channel

    def _failed(self, slot: Slot, channel: Channel, tried: _Tried, error: Error) -> None:
        """A call has failed. Returns, if it is to be made again."""
        if error.code is not Code.UNAVAILABLE or channel.refusal is None:
            slot.failures = 0  # the server has answered
            raise error
        tried.failures += 1
        if self._is_closed or self._retry is None or not tried.may_be_repeated(error):
            raise error
        if self._retry.attempts is not None and tried.failures >= self._retry.attempts:
            raise error

    # -- connecting ----------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Wait for the first connection.

        :raises OSError: there is none
        :raises Error: as for `connect`
        """
        try:
            await self._connected(_Tried(), None)
            self._is_open = True
        except Error as exc:
            if isinstance(exc.__cause__, (OSError, Error)):
                raise exc.__cause__ from None
            raise

    async def _connected(self, tried: _Tried, deadline: float | None) -> tuple[Slot, Channel]:
        """Wait for a connection. Cancelling it ends the wait at once.

        :raises Error: DEADLINE_EXCEEDED; UNAVAILABLE if the client gives up; CANCELLED if it is closed
        """
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                while (found := self._pick()) is None:
                    if self._is_closed:
                        raise not_sent("the client was closed", Code.CANCELLED)
                    if self._retry is None and self._is_open:
                        raise not_sent(self._refusal())
                    self._begin_connecting()
                    has_tried = await asyncio.shield(self._changed)
                    if has_tried and not self._pick():  # it failed, or that connection is over already
                        tried.failures += 1
                        self._give_up(tried, self._error or Error(Code.UNAVAILABLE, self._refusal()))
                return found
        except TimeoutError:
            text = f"the call took too long: there is no connection to {self._named()}"
            raise not_sent(text, Code.DEADLINE_EXCEEDED) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._stop_connecting()

    def _give_up(self, tried: _Tried, error: Error) -> None:
        """Raise the error of a failed try to connect, unless there is to be another one."""
        retry = self._retry
        if retry is None:
            most: float | None = len(self._slots)
        else:
            most = None if retry.attempts is None else retry.attempts * len(self._slots)
        code = error.__cause__.code if isinstance(error.__cause__, Error) else Code.UNAVAILABLE
        if code is not Code.UNAVAILABLE or (most is not None and tried.failures >= most):
            raise not_sent(error.text, code) from error.__cause__

    def _begin_connecting(self, due: float | None = None) -> None:
        """Start the tasks of all slots that have no connection; of those alone that need not wait, if `due` is now."""
        for slot in self._slots:
            if slot.task is None and slot.usable is None:
                if due is None or slot.failures == 0 or slot.not_before <= due:
                    slot.task = self.loop.create_task(self._connect(slot), name="rpc connect")

    def _stop_connecting(self) -> None:
        """Nobody waits any more."""
        wanted = not self._is_closed and any(slot.usable for slot in self._slots)
        for slot in self._slots:
            if slot.task is not None and (slot.is_sleeping or not wanted):
                slot.task.cancel()

    async def _connect(self, slot: Slot) -> None:
        """The task of a slot: one try."""
        has_tried = False
        try:
            if slot.failures and (seconds := slot.not_before - self.loop.time()) > 0:
                slot.is_sleeping = True
                await asyncio.sleep(seconds)
                slot.is_sleeping = False
            retired, slot.channel = slot.channel, None
            if retired is not None:
                self._retire(retired)
            try:
                slot.channel = await first_of(slot.addresses, self._dial, self._seconds)
            except (OSError, Error) as exc:
                text = f"there is no connection to {named(slot.addresses)}: {exc}"
                self._error = Error(Code.UNAVAILABLE, text)
                self._error.__cause__ = exc
            else:
                self._error = None
            has_tried = True
            slot.failures += 1
            if self._retry is not None:
                slot.not_before = self.loop.time() + self._retry.delay(slot.failures)
        finally:
            slot.task, slot.is_sleeping = None, False
            changed, self._changed = self._changed, self.loop.create_future()
            changed.set_result(has_tried)

    @property
    def _seconds(self) -> float:
        return (self._retry or Retry()).connect_seconds

    def _retire(self, channel: Channel) -> None:
        """This connection takes no new calls. The server closes it when those that run have ended."""
        self._retired = [each for each in self._retired if not each.link.is_over]
        if not channel.link.is_over:
            self._retired.append(channel)
            if len(self._retired) > _RETIRED_MOST:
                self._retired.pop(0).link.close()

    async def close(self) -> None:
        """Close all connections, and wait until they are gone. Pending calls get CANCELLED."""
        self._is_closed = True
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        channels = self._retired + [slot.channel for slot in self._slots if slot.channel is not None]
        await asyncio.gather(*(channel.close() for channel in channels))

    def _refusal(self) -> str:
        channels = (slot.channel for slot in self._slots)
        return next((channel.refusal for channel in channels if channel and channel.refusal), "it is closed")

    def _named(self) -> str:
        return named([address for slot in self._slots for address in slot.addresses])


class _Tried:
    """A call, and what has become of it so far.

    :ivar failures: connections, and tries to connect, that have failed under it
    :ivar has_items: an item of its result has come
    """

    __slots__ = ("call", "failures", "has_items", "sent")

    call: CallDetails

    def __init__(self, call: CallDetails | None = None) -> None:
        self.failures = 0
        self.has_items = False
        self.sent: _Once | None = None
        if call is not None:
            if call.method.stream is not None:
                self.sent = _Once(call.stream)
                call = msgspec.structs.replace(call, stream=self.sent)
            self.call = call

    def may_be_repeated(self, error: Error) -> bool:
        """Whether it can be sent again after its connection was lost."""
        if self.has_items or (self.sent is not None and self.sent.is_begun):
            return False
        return not error.begun or self.call.method.options.idempotent


class _Once:
    """The caller's stream, which can be iterated once. It knows whether it was."""

    __slots__ = ("_items", "is_begun")

    def __init__(self, items: Any) -> None:
        self._items = items
        self.is_begun = False

    def __aiter__(self) -> Any:
        self.is_begun = True
        return aiter(self._items)


async def first_of(addresses: list[Address], dial: Dial, seconds: float) -> Channel:
    """Connect to the first of several servers that answers.

    :param seconds: how long each may take
    :raises OSError: none does
    :raises Error: none does, and one has refused; this is why
    """
    failed: list[OSError | Error] = []
    for address in addresses:
        try:
            async with asyncio.timeout(seconds):
                return await dial(address)
        except TimeoutError as exc:
            failed.append(exc if str(exc) else TimeoutError(f"no answer in {seconds:g} s"))
        except (OSError, Error) as exc:
            failed.append(exc)
    for found in failed:
        if isinstance(found, Error) and (found.code is not Code.UNAVAILABLE or len(addresses) == 1):
            raise found
    if len(addresses) == 1:
        raise failed[0]
    reasons = "; ".join(f"{named([address])}: {exc}" for address, exc in zip(addresses, failed, strict=True))
    raise ConnectionError(f"none of {len(addresses)} servers answers: {reasons}") from failed[-1]


def named(addresses: list[Address]) -> str:
    """Addresses as text."""
    return " or ".join(
        address[0] if address[1] is None else endpoint((address[0], address[1])) for address in addresses
    )
