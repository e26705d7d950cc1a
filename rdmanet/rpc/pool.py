"""The connections of a client that reconnects, or that has several servers.

Theory
------
A pool looks like a channel (channel.py), and passes each call to one. It has slots; a slot has addresses, and at most
one connection, to the first of them that answers. With the policy "first" there is one slot for all addresses, with
"spread" one for each.

With "spread" a call goes to the connection with the fewest unfinished calls for its weight, by lot among equals.
Servers that fail count as busy, and are left out for a while (slot.py), if a failure speaks of the server: not of the
call (_OF_THE_SERVER), nor of this side, which has raised it (errors.own). A call that a server did not take
(UNAVAILABLE, and not begun) goes to a server that it has not been to, if there is one, also without `retry`.

Connections are made when calls want them. A call that finds none waits for the next, and starts a task in each slot
that connects. All waiting calls share it. When the last one has gone, the tasks are cancelled. So a client that nobody
uses has neither a task nor a timer.

    a slot       failures, counted since it served a call       waits before it connects
    new                  0                                       not at all
    a try failed         1, 2, ...                               `Retry.delay`
    connected            counted like a failure, until a call has its answer

The last line is for servers that accept connections and end them again. Without it, a client would not wait between
two of those.

With a resolver (resolving.py) the addresses change. A connection to a server that is gone from them takes no new calls,
and is closed when those that run have ended: at once, or with a later call.

What else a try raises is a mistake, such as an unknown option, or a name that is none. Waiting does not mend it: it is
raised at once, by `connect` as it is, and by a call as INTERNAL.

Otherwise a call is sent again only if its connection is over, and

    it has not begun (`Error.begun`)       always: it was not sent, or the server did not take it
    it may have begun                      if its method is idempotent, and no item has come
    it has a stream of the caller's        only while nothing was taken from that

or if it has failed with one of `Retry.codes`, and the same holds. Then it waits before (`Retry.delay`), and goes to a
server that it has not been to, if there is one. If its time would be over by then, it fails with that error.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime  # noqa: F401  before msgspec, see credit.py
import functools
import random
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Final

from rdmanet.base import log_rate
from rdmanet.base.pause import pause
from rdmanet.rpc.beginning import BEGINNING
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.dialing import Address, Dial, Weighted, first_of, named
from rdmanet.rpc.errors import Code, Error, not_sent
from rdmanet.rpc.hedging import hedged
from rdmanet.rpc.messenger import logger
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.resolving import Resolver, Resolving
from rdmanet.rpc.retry import Retry
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.slot import Slot
from rdmanet.rpc.streaming import Cut, Results
from rdmanet.rpc.tried import Tried, is_idempotent

_RETIRED_MOST: Final = 8
"""Connections that take no new calls, and still have some that run."""
_OF_THE_SERVER: Final = frozenset(
    {
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.RESOURCE_EXHAUSTED,
        Code.UNIMPLEMENTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    }
)
"""Errors that another server may not have given."""


class Pool:
    """The connections of a client.

    :param dial: connects to an address
    :param servers: with their weights
    :param retry: None: a connection that is lost is not replaced
    :param spread: whether each address has a connection
    :param resolver: says how the addresses change
    """

    def __init__(
        self,
        schema: Schema,
        dial: Dial,
        servers: list[Weighted],
        retry: Retry | None,
        spread: bool,
        resolver: Resolver | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.schema = schema
        self.peer: Any = None
        """The address of the server that got the last call."""
        self._dial = dial
        self._retry = retry
        self._how = retry or Retry()
        self._slots = (
            [Slot([address], weight) for address, weight in servers]
            if spread
            else [Slot([address for address, _ in servers])]
        )
        self._retired: list[Channel] = []
        self._waiting = 0
        self._changed: asyncio.Future[bool] = self.loop.create_future()
        """The next end of a task of a slot: whether it has tried to connect."""
        self._error: Error | None = None  # of that try
        self._is_spread = spread and (len(servers) > 1 or resolver is not None)
        self._resolving = None if resolver is None else Resolving(self.loop, resolver, self._servers_are)
        self._left: list[Channel] = []  # of servers that are gone, while they have calls
        self._is_open = False
        self._is_closed = False
        self._closing: asyncio.Future[None] = self.loop.create_future()

    # -- calls ---------------------------------------------------------------------------------------------

    def unary(self, call: CallDetails) -> Coroutine[Any, Any, Any]:
        """Make a call that has one result; as for `Channel`."""
        retry = self._retry
        if retry is None or retry.hedge_seconds is None or not self._may_be_hedged(call):
            return self._unary(Tried(call))
        return hedged(self.loop, self._unary, call, retry.hedge_seconds, self._has_other)

    async def _unary(self, tried: Tried) -> Any:
        while True:
            slot, channel = self._pick(tried.been) or await self._connected(tried, tried.call.deadline)
            tried.goes_to(slot, channel.peer)
            try:
                result = await channel.unary(tried.call)
            except Error as exc:
                if (seconds := self._repeats_after(slot, channel, tried, exc)) is None:
                    raise
            else:
                slot.failures = slot.row = 0
                return result
            await self._pause(seconds)

    def stream(self, call: CallDetails) -> Results:
        """Make a call that streams its results; as for `Channel`."""
        cut = Cut()
        return Results(cut, functools.partial(self._stream, cut, Tried(call)))

    async def _stream(self, cut: Cut, tried: Tried) -> AsyncGenerator[Any, None]:
        with cut:
            while True:
                slot, channel = self._pick(tried.been) or await self._connected(tried, tried.call.deadline)
                tried.goes_to(slot, channel.peer)
                items = channel.stream(tried.call)
                try:
                    async with contextlib.aclosing(items):
                        async for item in items:
                            tried.has_items = True
                            slot.failures = 0
                            yield item
                except Error as exc:
                    if (seconds := self._repeats_after(slot, channel, tried, exc)) is None:
                        raise
                else:
                    slot.failures = slot.row = 0
                    return
                await self._pause(seconds)

    def _pick(self, been: Sequence[object] = ()) -> tuple[Slot, Channel] | None:
        """The connection for the next call.

        :param been: to whose servers it has been; they are not asked again while there are others
        """
        if self._resolving is not None:
            self._resolving.look()
            if self._left:
                self._close_left()
        if len(self._slots) == 1:
            slot = self._slots[0]
            if (channel := slot.usable) is None:
                return None
        else:
            found = [(slot, channel) for slot in self._slots if (channel := slot.usable)]
            if not found:
                return None
            if len(found) < len(self._slots) and self._retry is not None:
                self._begin_connecting(self.loop.time())
            slot, channel = self._least([each for each in found if each[0] not in been] or found)
        self.peer = channel.peer
        return slot, channel

    def _least(self, found: list[tuple[Slot, Channel]]) -> tuple[Slot, Channel]:
        """The one that has the least to do for its weight, by lot among equals."""
        now = self.loop.time()
        kept = [each for each in found if not each[0].is_ejected(now)]
        if 2 * len(kept) >= len(found):  # else it is not the servers
            found = kept
        loads = [(len(channel.book) + slot.blamed(now)) / slot.weight for slot, channel in found]
        least = min(loads)
        equal = [each for each, load in zip(found, loads, strict=True) if load == least]
        if len(equal) == 1:
            return equal[0]
        return random.choices(equal, [slot.weight for slot, _ in equal])[0]

    def _repeats_after(self, slot: Slot, channel: Channel, tried: Tried, error: Error) -> float | None:
        """In how many seconds a call that has failed is made again; None: it is not."""
        if self._is_spread:
            if error._is_own:
                pass  # it was not heard
            elif error.code in _OF_THE_SERVER:
                slot.blame(self.loop.time(), self._how)
            else:
                slot.row = 0  # it has done what it was asked to
            if self._goes_elsewhere(slot, tried, error):
                return 0.0
        if error.code is Code.UNAVAILABLE and channel.refusal is None and channel.link.transport.is_closing():
            channel.refuse(f"the connection is lost: {error.text}")  # it is about to be told
        is_lost = error.code is Code.UNAVAILABLE and channel.refusal is not None
        if not is_lost and not error._is_own:
            slot.failures = 0  # the server has answered
        retry = self._retry
        if retry is None or not (is_lost or error.code in retry.codes):
            return None
        tried.failures += 1
        has_given_up = retry.attempts is not None and tried.failures >= retry.attempts
        if self._is_closed or has_given_up or not tried.may_be_repeated(self._retry, error):
            return None
        if is_lost:
            return 0.0  # it waits for the connection
        tried.been = (*tried.been, slot)
        seconds, deadline = retry.delay(tried.failures), tried.call.deadline
        return None if deadline is not None and self.loop.time() + seconds >= deadline else seconds

    def _may_be_hedged(self, call: CallDetails) -> bool:
        is_plain = call.stream is None and call.into is None
        return is_plain and self._is_spread and is_idempotent(call.method, self._retry)

    def _has_other(self, tried: Tried) -> bool:
        """Whether there is a server to which a call has not been, nor is now."""
        tried.been = (*tried.been, tried.at)
        return tried.at is not None and any(each.usable and each not in tried.been for each in self._slots)

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the client is closed."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.shield(self._closing)

    def _goes_elsewhere(self, slot: Slot, tried: Tried, error: Error) -> bool:
        """Whether the call is now made at a server that it has not been to."""
        if (
            self._is_closed
            or error.begun
            or error.code is not Code.UNAVAILABLE
            or not tried.may_be_repeated(self._retry, error)
        ):
            return False
        tried.at = slot
        return self._has_other(tried)

    # -- connecting ----------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Wait for the first connection.

        :raises OSError: there is none
        :raises Error: as for `connect`
        """
        try:
            await self._connected(Tried(), None)
            self._is_open = True
            return
        except Error as exc:
            if (cause := exc.__cause__) is None:
                raise
        try:
            raise cause
        finally:
            del cause  # whose traceback has this frame

    async def _connected(self, tried: Tried, deadline: float | None) -> tuple[Slot, Channel]:
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
                    if self._resolving is not None:
                        self._resolving.look(has_to_connect=True)
                    changed = self._changed  # before the tasks: an eager one may end at once
                    self._begin_connecting()
                    has_tried = await asyncio.shield(changed)
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

    def _give_up(self, tried: Tried, error: Error) -> None:
        """Raise the error of a failed try to connect, unless there is to be another one."""
        retry = self._retry
        if retry is None:
            most: float | None = len(self._slots)
        else:
            most = None if retry.attempts is None else retry.attempts * len(self._slots)
        code = error.__cause__.code if isinstance(error.__cause__, Error) else error.code
        if code is not Code.UNAVAILABLE or (most is not None and tried.failures >= most):
            raise not_sent(error.text, code) from error.__cause__

    def _begin_connecting(self, due: float | None = None) -> None:
        """Start the tasks of all slots that have no connection; of those alone that need not wait, if `due` is now."""
        for slot in self._slots:
            if slot.task is None and slot.usable is None:
                if due is None or slot.failures == 0 or slot.not_before <= due:
                    work = self._connect(slot)
                    work.send(None)
                    task = self.loop.create_task(work, name="rpc connect")
                    slot.task = None if task.done() else task

    def _stop_connecting(self) -> None:
        """Nobody waits any more."""
        wanted = not self._is_closed and any(slot.usable for slot in self._slots)
        for slot in self._slots:
            if slot.task is not None and (slot.is_sleeping or not wanted):
                slot.task.cancel()

    async def _connect(self, slot: Slot) -> None:
        """The task of a slot: one try."""
        has_tried = False

        async def dial(address: Address) -> Channel:
            slot.address = address
            return await self._dial(address)

        try:
            await BEGINNING
            if slot.failures and (seconds := slot.not_before - self.loop.time()) > 0:
                slot.is_sleeping = True
                await pause(self.loop, seconds)
                slot.is_sleeping = False
            retired, slot.channel = slot.channel, None
            if retired is not None:
                self._retire(retired)
            try:
                slot.channel = await first_of(slot.addresses, dial, self._how.connect_seconds)
            except BaseException as exc:
                this = asyncio.current_task()
                if isinstance(exc, asyncio.CancelledError) and this is not None and this.cancelling():
                    raise
                self._not_connected(slot, exc)
                if isinstance(exc, KeyboardInterrupt | SystemExit):
                    raise
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

    def _servers_are(self, servers: list[Weighted]) -> None:
        """The resolver has said which servers there are now."""
        if self._is_closed:
            return
        if not self._is_spread:
            (slot,) = self._slots
            slot.addresses = [address for address, _ in servers]
            if slot.address is not None and slot.address not in slot.addresses:
                slot.address = None
                if slot.task is not None:
                    slot.task.cancel()  # whoever waits begins anew
                if slot.channel is not None:
                    self._leave(slot.channel)
                    slot.channel = None
        else:
            known = {slot.addresses[0]: slot for slot in self._slots}
            self._slots = [
                known.pop(address) if address in known else Slot([address]) for address, _ in servers
            ]
            for slot, (_, weight) in zip(self._slots, servers, strict=True):
                slot.weight = weight
            for slot in known.values():
                if slot.task is not None:
                    slot.task.cancel()
                if slot.channel is not None:
                    self._leave(slot.channel)
            self._begin_connecting(self.loop.time())
        self._close_left()

    def _leave(self, channel: Channel) -> None:
        if channel.refusal is None:
            channel.refuse("the server is not among those of the resolver any more")
        self._left.append(channel)

    def _close_left(self) -> None:
        """Close the connections to servers that are gone whose calls have ended."""
        for channel in self._left:
            if not len(channel.book):
                channel.link.close()
        self._left = [channel for channel in self._left if len(channel.book)]

    def _not_connected(self, slot: Slot, exc: BaseException) -> None:
        """A try has failed: this is why, for all who wait."""
        text = f"there is no connection to {named(slot.addresses)}: "
        if isinstance(exc, OSError | Error):
            self._error = Error(Code.UNAVAILABLE, f"{text}{exc}")
        else:
            self._error = Error(Code.INTERNAL, f"{text}{type(exc).__name__}: {exc}")
            if any(each.usable for each in self._slots):  # nobody need wait
                log_rate.warn(logger, f"rpc connect {id(self)}", "%s", self._error.text)
        self._error.__cause__ = exc

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
        if not self._closing.done():
            self._closing.set_result(None)
        self._error = None  # its cause has frames that have this pool
        if self._resolving is not None:
            await self._resolving.close()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(channel.close() for channel in self.channels))

    @property
    def channels(self) -> list[Channel]:
        """All connections, also those that take no new calls."""
        return [*self._retired, *self._left, *(slot.channel for slot in self._slots if slot.channel)]

    def _refusal(self) -> str:
        channels = (slot.channel for slot in self._slots)
        return next((channel.refusal for channel in channels if channel and channel.refusal), "it is closed")

    def _named(self) -> str:
        return named([address for slot in self._slots for address in slot.addresses])
