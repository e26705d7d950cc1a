# cython: nonecheck=True, auto_pickle=False
"""The caller's side of one connection: from a call to its end.

Theory
------
A `Channel` is a connection of a client: its link, the book of its calls, and what it knows of the server. A call takes
a number, sends Call, and waits for a future that the message with the answer resolves. It ends in one of four ways:

    the answer comes            the result, or the Error that it carries
    the time is over            DEADLINE_EXCEEDED; Cancel is sent
    the caller is cancelled     CancelledError; Cancel is sent
    the connection is lost      UNAVAILABLE

After Cancel the number stays in the book until the answer comes, which nobody waits for. So the server never does more
for this client than the limit allows, and no answer finds the wrong call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from rdmanet.rpc.awaiting import turn
from rdmanet.rpc.calls import ITEM_BYTES, CallerBook, Inflow, Outflow
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error, late, not_begun, not_sent, own
from rdmanet.rpc.fetching import Fetching
from rdmanet.rpc.framing import PlainReply, call_head
from rdmanet.rpc.keepalive import Keepalive
from rdmanet.rpc.lending import Loans, goes_by_reference, lend, memory_in_message, prepared
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import (
    MAGIC,
    NIL,
    VERSION,
    End,
    Failure,
    Goaway,
    Hello,
    Initial,
    Item,
    OutCall,
    OutHello,
    Ping,
    Pong,
    Reply,
    Window,
    check_hello,
)
from rdmanet.rpc.method import Method
from rdmanet.rpc.outgoing import Gathered, Outgoing
from rdmanet.rpc.packing import Packed, Packing
from rdmanet.rpc.paging import LEAST_BYTES
from rdmanet.rpc.pending import CallDetails, Pending, pump
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.stats import Counter, counters_of, ending_of
from rdmanet.rpc.streaming import Cut, Receiving, Results, Sending, ended, item_of
from rdmanet.rpc.tails import last_argument
from rdmanet.rpc.turns import Turns
from rdmanet.rpc.unary import Calling, Unary


class Channel(Calling):
    """A client's connection.

    :param counters: of the methods; None: it has its own
    :ivar link: the protocol of its transport
    :ivar book: its unfinished calls
    """

    _who = "server"  # what its errors call the other side

    def __init__(
        self,
        schema: Schema,
        limits: Limits,
        keepalive: float | None = None,
        counters: list[Counter] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.schema = schema
        self.limits, self._most = limits, limits.decoded_bytes
        self._counters = counters or []
        self.book: CallerBook = CallerBook(limits.calls)
        self.refusal: str | None = None
        """Why no new calls can begin."""
        self._refusal_code = Code.UNAVAILABLE
        self._taken: int | None = None  # how many of its calls the server has taken, which is going away
        self.service = ""  # the server's name for it
        self._numbers: list[int | None] = []  # the server's, by our own
        self._fitted: list[Method] = []  # by our numbers, if the server has another version
        self._stream_bytes = 0
        self._greeting: asyncio.Future[None] = self.loop.create_future()
        self._keepalive_seconds = keepalive
        self._keepalive: Keepalive | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {Hello: self._on_hello}
        self._places = Turns(self.loop)
        self.link = Link(self.loop, limits, self._handlers, self._made, self._lost)
        self.fetching = Fetching(self.link, limits, self._release)

    # -- the connection ------------------------------------------------------------------------------------

    def _made(self) -> None:
        most = self.limits.message_bytes, self.limits.calls, self.limits.stream_bytes
        self.link.send(OutHello(MAGIC, VERSION, self.schema.name, self.schema.digest, *most))

    @property
    def peer(self) -> Any:
        """The server's address, as ``get_extra_info("peername")``."""
        return self.link.peer

    async def greeted(self) -> None:
        """Wait for the server's Hello."""
        try:
            async with asyncio.timeout(self.limits.hello_seconds):
                await self._greeting
        except TimeoutError:
            text = f"the {self._who} did not say Hello in {self.limits.hello_seconds} s"
            raise not_begun(Error(Code.UNAVAILABLE, text)) from None
        except Error:  # refers to this frame by its traceback, and must not be kept
            self._greeting = self.loop.create_future()
            self._greeting.set_result(None)
            raise

    def _on_hello(self, hello: Hello) -> None:
        check_hello(hello)
        if self._greeting.done():  # it took too long
            return
        try:
            self._numbers, self._fitted = self.schema.agreed(hello, self._who)
        except Error as exc:
            self._greeting.set_exception(exc)
            self.link.close()
            return
        self._counters = self._counters or counters_of(self.schema)
        self._stream_bytes = hello.stream_bytes
        self.service = hello.service
        self.link.hears(hello)
        self.book.calls_max = min(self.limits.calls, hello.calls)
        self._handlers.clear()
        self._handlers |= {
            Reply: self._on_reply,
            PlainReply: self._on_plain_reply,
            Failure: self._on_failure,
            Item: self._on_item,
            End: self._on_end,
            Window: self._on_window,
            Initial: self._on_initial,
            Goaway: self._on_goaway,
            Ping: self.link.answer,
            Pong: lambda _: None,
        }
        if self._keepalive_seconds is not None:
            self._keepalive = Keepalive(self.link, self._keepalive_seconds)
        self._greeting.set_result(None)

    def refuse(self, reason: str) -> None:
        """From now on no new calls can begin."""
        self.refusal = reason
        self._places.end()

    def _on_goaway(self, message: Goaway) -> None:
        self.refuse(f"the {self._who} takes no new calls ({message.reason})")
        if message.taken is not None:
            self._taken = message.taken

    def _lost(self, error: BaseException | None) -> None:
        if self._keepalive is not None:
            self._keepalive.stop()
        self.refusal = self.refusal or f"the connection is closed: {error or 'the peer has closed it'}"
        self._places.end()
        lost = self.link.lost_error()
        if not self._greeting.done():
            self._greeting.set_exception(lost)
            self._greeting.exception()
        for pending in self.book.lost():
            pending.lose(lost, self._taken, self.refusal)

    async def close(self) -> None:
        """Close the connection, and wait until it is gone. Pending calls get CANCELLED."""
        self.refusal, self._refusal_code = "the client was closed", Code.CANCELLED
        self._places.end()
        for pending in self.book.lost():
            pending.fail(Error(Code.CANCELLED, "the client was closed"))
        self.link.close()
        try:
            await asyncio.shield(self.link.closed)
        except asyncio.CancelledError:
            self.link.abort()
            raise

    # -- calls ---------------------------------------------------------------------------------------------

    def unary(self, call: CallDetails) -> Coroutine[Any, Any, Any]:
        """Make a call that has one result; it begins when it is awaited.

        Not a coroutine of its own: that would be one more frame to resume for each call.
        """
        if self._fitted:
            call = call.fitted(self._fitted)
        method, arguments = call.method, call.arguments
        if 0 <= (at := method.bytes_at) < len(arguments):
            if type(arguments[at]) is bytes and len(arguments[at]) < self.link.tail_bytes:
                return Unary(self, call, arguments)  # the quick answer for most
            if (tail := last_argument(self.link, call, at)) is not None:
                return Unary(self, call, (*arguments[:at], b""), tail=tail)
        arguments, loans, are_apart = prepared(self.link, method, arguments)
        if method.brings and not loans:
            packing = Packing(arguments, method.label)
            if packing.nbytes < LEAST_BYTES and not goes_by_reference(self.link, packing.nbytes):
                return Unary(self, call, packing.raw, memory_in_message(self.link, packing))
        elif not loans:
            if method.stream is None:
                return Unary(self, call, arguments, apart=are_apart)
            return self._call(call, arguments, apart=are_apart)
        return self._call_lending(call, arguments, loans)

    async def _call_lending(self, call: CallDetails, arguments: tuple[Any, ...], loans: Loans) -> Any:
        if call.waits and self._is_full():
            await turn(self, call)  # with nothing on loan
        async with contextlib.AsyncExitStack() as block:
            sent, memory = await self._lend(call, arguments, loans, block)
            result = await self._call(call, sent, loans, memory, apart=True)
        return result  # not before: Cython 3.3 keeps for ever what is returned from a block whose end is cancelled

    def stream(self, call: CallDetails) -> Results:
        """Make a call that streams its results. It begins with the first one that is asked for."""
        if self._fitted:
            call = call.fitted(self._fitted)
        return Results(cut := Cut(), functools.partial(self._stream, cut, call))

    async def _lend(
        self, call: CallDetails, arguments: tuple[Any, ...], loans: Loans, block: contextlib.AsyncExitStack
    ) -> tuple[Any, Any]:
        counter = self._counters[call.method.number]
        try:
            async with asyncio.timeout_at(call.deadline):
                found = await lend(self.link, call.method, arguments, loans, block, counter)
        except TimeoutError:
            raise not_begun(late()) from None
        except Error as exc:
            not_begun(exc)
            raise
        return found

    def _begin(
        self,
        pending: Pending,
        call: CallDetails,
        arguments: Any,
        memory: Any = None,
        inflow: Inflow | None = None,
        outflow: Outflow | None = None,
        apart: bool = False,
        tail: bytes | memoryview | None = None,
    ) -> asyncio.TimerHandle | None:
        """Take a number, and send Call. Returns the timer of the deadline.

        :param arguments: a tuple, or what it is in msgpack, and the memory of its arrays
        :param apart: some of it may be `Apart`; `tail` is the last one, in place of which there is b""
        :raises Error: it was not sent, and has not begun
        """
        method, deadline, metadata, link = call.method, call.deadline, call.metadata, self.link
        try:
            if link.is_over or self.refusal is not None:
                self.refusal = self.refusal or "the connection is closed"
                raise not_sent(self.refusal, self._refusal_code)
            there = self._numbers[method.number]
            if there is None:
                raise own(Error(Code.UNIMPLEMENTED, f"the {self._who} does not have {method.label}"))
            pending.begun_at = self.loop.time()
            left_us = None if deadline is None else int((deadline - pending.begun_at) * 1e6)
            if left_us is not None and left_us <= 0:
                raise own(late())
            number = pending.number = self.book.begin(method.kind, pending, inflow, outflow)
            pending.place = self.book.begun
            if self._places.busy:
                self._is_full()  # for those that were woken with this one
            if call.response is not None:
                pending.response = call.response.emptied()
            try:
                asks, is_alone = call.response is not None, len(self.book) == 1
                if memory is None and metadata is None and tail is None and not (asks or apart):
                    length = link.send_plain(call_head(number, there, left_us), arguments, is_alone)
                else:
                    message = OutCall(number, there, left_us, arguments)
                    if memory is not None or metadata is not None or asks:
                        message = message.extended(metadata, memory, asks)
                    if tail is not None:
                        length = link.send_tailed(message, tail)
                    else:
                        length = (
                            link.send_apart(message) if apart else link.send_plain(b"", message, is_alone)
                        )
            except BaseException:
                self.book.withdraw(number)
                if self._places.busy:
                    self._places.resume()
                raise
        except Error as exc:
            not_begun(exc)
            raise
        pending.counter.begun += 1
        pending.counter.sent_bytes += length
        return None if deadline is None else self.loop.call_at(deadline, self._time_is_over, pending)

    async def _call(
        self,
        call: CallDetails,
        arguments: Any,
        loans: Sequence[tuple[int, Outgoing | Gathered]] = (),
        memory: Any = None,
        apart: bool = False,
        tail: bytes | memoryview | None = None,
    ) -> Any:
        """Make a call with these arguments, buffers as they are sent; `tail` as for `_begin`."""
        method, into = call.method, call.into
        if self._has_to_wait(call):
            await turn(self, call)
        future: asyncio.Future[Any] = self.loop.create_future()
        counter = self._counters[method.number]
        pending = Pending(method, future, counter, into)
        pumping: asyncio.Task[None] | None = None
        if method.stream is None:
            timer = self._begin(pending, call, arguments, memory, apart=apart, tail=tail)
        else:
            outflow = Outflow(self._stream_bytes)
            timer = self._begin(pending, call, arguments, memory, None, outflow, apart, tail)
            pumping = self._pump(pending, outflow, call.stream)
        try:
            try:
                result = await future
            except asyncio.CancelledError:
                self._gives_up(pending)
                raise
            if pending.returned:
                for _, going in loans:
                    going.returned = True
            if method.result_is_apart and type(result) is not bytes:
                result = await self.fetching.take(pending, result, call.deadline)
            counter.ok += 1
            counter.seconds += self.link.heard_at - pending.begun_at
        except BaseException as exc:
            counter.count_failed(ending_of(exc), self.loop.time() - pending.begun_at)
            raise
        finally:
            del future, pending  # which have the error, and that has this frame
            if timer is not None:
                timer.cancel()
            if pumping is not None:
                await ended(pumping)
        return result

    async def _stream(self, cut: Cut, call: CallDetails) -> AsyncGenerator[Any, None]:
        method, memory = call.method, None
        arguments: Any = call.arguments
        async with contextlib.AsyncExitStack() as block:
            block.enter_context(cut)
            if self._has_to_wait(call):
                await turn(self, call)
            if method.buffers or method.brings:
                arguments, loans, _ = prepared(self.link, method, arguments)
                arguments, memory = await self._lend(call, arguments, loans, block)
                if self._has_to_wait(call):  # for others that began meanwhile
                    await turn(self, call)
            pending = Pending(method, self.loop.create_future(), self._counters[method.number])
            inflow = Inflow(self.limits.stream_bytes)
            decode = functools.partial(method.decode_streamed, most=self.limits.decoded_bytes)
            received = pending.received = Receiving(self.link, inflow, decode)
            outflow = None if method.stream is None else Outflow(self._stream_bytes)
            is_apart = bool(method.buffers or method.brings)
            timer = self._begin(pending, call, arguments, memory, inflow, outflow, is_apart)
            received.number = pending.number
            pumping = None if outflow is None else self._pump(pending, outflow, call.stream)
            try:
                async for item in received:
                    yield item
                pending.counter.ok += 1
                pending.counter.seconds += self.loop.time() - pending.begun_at
            except BaseException as exc:
                pending.counter.count_failed(ending_of(exc), self.loop.time() - pending.begun_at)
                raise
            finally:
                self._abandon(pending)
                if timer is not None:
                    timer.cancel()
                if pumping is not None:
                    await ended(pumping)

    def _pump(self, pending: Pending, outflow: Outflow, items: Any) -> asyncio.Task[None]:
        """The task that sends the caller's stream. If the stream raises, so does the call."""
        packed = pending.method.label if pending.method.stream_brings else None
        sending = pending.sent = Sending(self.link, outflow, pending.counter, packed=packed)
        sending.number = pending.number
        work = pump(self.link, pending, items, self._abandon)
        work.send(None)
        return self.loop.create_task(work, name=f"rpc stream to {pending.method.label}")

    # -- messages ------------------------------------------------------------------------------------------

    def _on_reply(self, message: Reply) -> None:
        number, returned = message.number, message.returned
        self._take(number, message.result, returned, message.memory, message.metadata, None)

    def _on_plain_reply(self, message: PlainReply) -> None:
        self._take(message.number, message.result, False, None, NIL, message.tail)

    def _take(self, number: Any, result: Any, returned: Any, memory: Any, metadata: Any, tail: Any) -> None:
        """Take a Reply, whose fields these are (messages.py, framing.PlainReply)."""
        pending = self.book.reply(number)
        if self._places.busy:
            self._places.resume()
        if pending is None:
            self._release(number)  # its result may be on loan
            return
        future = pending.future
        pending.returned = returned
        pending.counter.received_bytes += len(result)
        if tail is not None:
            pending.counter.received_bytes += len(tail)
        if type(memory) is memoryview:
            pending.counter.received_bytes += memory.nbytes
        if future.done():
            if pending.method.result_is_apart:
                self._release(number)
            return
        if pending.response is not None and not pending.heard(metadata, self.limits):
            self._release(number)
            return
        if memory is not None:
            if pending.method.result_brings:
                future.set_result(Packed(result, memory))
                return
            self._release(number)  # that of what this version does not know
        try:
            if tail is None:
                future.set_result(pending.method.decode_result(result, self._most))
            else:
                future.set_result(pending.method.tailed_result(result, tail, self._most))
        except BaseException as exc:  # also what the constructor of a class has raised
            pending.fail(exc)
            if isinstance(exc, ENDS_THE_PROGRAM):
                raise
        finally:
            del future, pending  # which have the error, and that has this frame

    def _on_failure(self, message: Failure) -> None:
        pending = self.book.failure(message.number)
        if self._places.busy:
            self._places.resume()
        if pending is not None:
            pending.failed(message, self.limits)

    def _on_item(self, message: Item) -> None:
        item = item_of(message)
        pending = self.book.item(message.number, len(item) + ITEM_BYTES)
        if pending is not None and pending.received is not None:
            pending.counter.received_bytes += len(item)
            pending.received.put(item)

    def _on_end(self, message: End) -> None:
        pending = self.book.end(message.number)
        if self._places.busy:
            self._places.resume()
        if (
            pending is not None
            and pending.received is not None
            and pending.heard(message.metadata, self.limits)
        ):
            if not pending.future.done():
                pending.future.set_result(None)
            pending.received.finish()

    def _on_window(self, message: Window) -> None:
        pending = self.book.window(message.number, message.total)
        if pending is not None and pending.sent is not None:
            pending.sent.allowed()

    def _on_initial(self, message: Initial) -> None:
        pending = self.book.initial(message.number)
        refused = None if pending is None else pending.heard_initial(message, self.limits)
        if refused is not None and self._abandon(pending):
            pending.fail(refused)
