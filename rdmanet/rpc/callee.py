# cython: nonecheck=True, auto_pickle=False
"""The callee's side of one connection: what its messages mean.

executing.py has what becomes of a Call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

from msgspec import Raw

from rdmanet.errors import ProtocolError
from rdmanet.rpc.builtin import names_of
from rdmanet.rpc.call_metadata import Metadata, decoded
from rdmanet.rpc.calls import ITEM_BYTES, Inflow, Outflow
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.endpoints import source
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error, not_taken
from rdmanet.rpc.executing import Executing
from rdmanet.rpc.failures import mistake, report, send_failure
from rdmanet.rpc.framing import PlainCall, with_tail
from rdmanet.rpc.host import Host
from rdmanet.rpc.keepalive import Keepalive
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import (
    MAGIC,
    NAMES_MOST,
    NIL,
    VERSION,
    Call,
    Cancel,
    End,
    Hello,
    Item,
    OutHello,
    Ping,
    Pong,
    Release,
    Window,
    check_hello,
)
from rdmanet.rpc.method import Kind, Method
from rdmanet.rpc.packing import Packed
from rdmanet.rpc.parting import Parting
from rdmanet.rpc.peers import Peer, peer_of
from rdmanet.rpc.running import Running, limited
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.shares import Held
from rdmanet.rpc.stats import Counter
from rdmanet.rpc.streaming import Receiving, Sending, item_of

_NOTHING: Final = Schema("", [])
"""What a client gets of a service that the server does not have."""
_UNARY: Final = Kind.UNARY


class Callee(Executing):
    """A connection of a server.

    :ivar peer: who is at the other end
    """

    peer: Peer

    def __init__(self, server: Host) -> None:
        self._service = ""
        self._methods: list[tuple[Method, Callable[..., Any]]] = []
        self._counters: list[Counter] = []
        self._is_builtin = False
        self._stream_bytes = 0
        self._greeting: asyncio.TimerHandle | None = None
        self._is_greeted = False
        self._keepalive: Keepalive | None = None
        handlers: dict[type, Callable[[Any], None]] = {Hello: self._on_hello}
        self._handlers = handlers
        link = Link(
            server.loop,
            server.limits,
            handlers,
            self._made,
            self._lost,
            is_server=True,
            on_unfinished=self._unfinished,
        )
        super().__init__(server, link)
        self._parting = Parting(self.link, functools.partial(server.has_heard, self))

    # -- the connection ------------------------------------------------------------------------------------

    def _made(self) -> None:
        self.server.callees.add(self)
        self.peer = peer_of(self.link.transport)
        self.share = self._answers.share = self.server.shares.join(source(self.peer))
        if self.server.refusal is not None:
            self.link.close()
            return
        self._greeting = self.loop.call_later(self.limits.hello_seconds, self._silent)

    def _unfinished(self, nbytes: int) -> None:
        """So many bytes have come of a message that is not complete, of whatever call it may be."""
        try:
            self.share.frame_is(nbytes)
        except Error as exc:
            raise ProtocolError(exc.text) from None

    def _silent(self) -> None:
        self.link.violated(ProtocolError(f"the peer did not say Hello in {self.limits.hello_seconds} s"))

    def _on_hello(self, hello: Hello) -> None:
        check_hello(hello)
        if self._greeting is not None:
            self._greeting.cancel()
            self._greeting = None
        server, limits, self._service = self.server, self.limits, hello.service
        served = server.builtin.get(hello.service)
        self._is_builtin = served is not None
        served = served or server.services.get(hello.service)
        schema = _NOTHING if served is None else served.schema
        if served is not None:
            self._methods, self._counters = server.methods_for(self, served), served.counters
        self._intercepts = bool(server.carry or server.interceptors) and (
            server.intercept_builtin or not self._is_builtin
        )
        self._stream_bytes = hello.stream_bytes
        methods = NIL if hello.digest == schema.digest else Raw(schema.encoded)
        self._handlers.clear()
        self._handlers |= {
            Call: self._on_call,
            PlainCall: self._on_plain_call,
            Cancel: self._on_cancel,
            Item: self._on_item,
            End: self._on_end,
            Window: self._on_window,
            Release: self._on_release,
            Ping: self.link.answer,
            Pong: self._parting.answered,
        }
        most = limits.message_bytes, limits.calls, limits.stream_bytes
        if served is None:
            names = names_of(server.services)[:NAMES_MOST]
            self.link.send(Hello(MAGIC, VERSION, "", schema.digest, *most, methods, names))
        else:
            self.link.send(OutHello(MAGIC, VERSION, self._service, schema.digest, *most, methods))
        self.link.hears(hello)
        self._is_greeted = True
        if self.server.keepalive is not None:
            self._keepalive = Keepalive(self.link, self.server.keepalive)
        if self.server.refusal is not None:
            self.drain(self.server.refusal)

    def drain(self, reason: str) -> None:
        """Tell the client to begin no more calls: at once, or when it has said Hello.

        Health is asked for until the end.
        """
        if not self._is_greeted or self._is_builtin or self.link.is_over:
            return
        if self.server.is_closing:
            self._parting.refuse(reason)
        else:
            self.server.unheard.add(self)
            self._parting.drain(reason)

    def finish(self, reason: str) -> None:
        """Close the connection, when the client has read all answers."""
        if self._is_greeted and not self.link.is_over:
            self._parting.finish(reason)
        else:
            self.link.close()

    def _lost(self, error: BaseException | None) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        if self._keepalive is not None:
            self._keepalive.stop()
        self._parting.stop()
        self.server.callees.discard(self)
        self.server.has_heard(self)
        self.share.leave()
        lost = self.link.lost_error()
        for running in self.book.lost():
            if running.released is not None:
                running.release()
            elif running.method.options.outlives_connection:
                if running.received is not None:
                    running.received.finish(lost)
                if running.sent is not None:
                    running.sent.allowed()  # to see that nobody takes its items
            else:
                running.cancel()

    # -- messages ------------------------------------------------------------------------------------------

    def _on_call(self, message: Call) -> None:
        timeout_us = -1 if message.timeout_us is None else message.timeout_us
        number, place, memory, asks = message.number, message.method, message.memory, message.asks
        self._take(number, place, timeout_us, message.arguments, message.metadata, memory, asks, None)

    def _on_plain_call(self, message: PlainCall) -> None:
        number, place, timeout_us = message.number, message.method, message.timeout_us
        self._take(number, place, timeout_us, message.arguments, NIL, None, False, message.tail)

    def _take(
        self,
        number: Any,
        place: Any,
        timeout_us: Any,
        raw_arguments: Any,
        raw_metadata: Any,
        memory: Any,
        asks: Any,
        tail: Any,
    ) -> None:
        """Take a Call, whose fields these are (messages.py, framing.PlainCall)."""
        running = None
        book, server, parting = self.book, self.server, self._parting
        if number in book.calls or number in book.lending:
            book.check_unused(number)
        try:
            if parting.refusal is not None:
                raise not_taken(f"the server takes no new calls ({parting.refusal})")
            parting.taken += 1
            if place >= len(self._methods):
                raise Error(Code.UNIMPLEMENTED, f"there is no method {place}")
            method, function = self._methods[place]
            metadata: Metadata = {}
            limits = self.limits
            if tail is not None and (method.bytes_at < 0 or method.bytes_at != method.count - 1):
                raw_arguments, tail = with_tail(raw_arguments, tail), None
            received_bytes = len(raw_arguments) + (memory.nbytes if type(memory) is memoryview else 0)
            if tail is not None:
                received_bytes += len(tail)
            nbytes = received_bytes
            if raw_metadata is not NIL:
                metadata, metadata_bytes = decoded(raw_metadata, limits)
                nbytes += metadata_bytes
            else:
                asks = False
            deadline = None if timeout_us < 0 else self.loop.time() + timeout_us / 1e6
            counter = self._counters[method.number]
            if method.is_limited:
                deadline = limited(method, counter, deadline, self.loop.time())
            call = CallInfo(self._service, method.name, metadata, deadline, self, False, number)
            running = Running(number, method, function, call, counter, self.link.heard_at)
            running.asks = asks
            if len(raw_arguments) >= method.weighed_bytes:
                nbytes += method.scale.weigh(raw_arguments, limits.decoded_bytes)
            self.share.begin(running, nbytes)
            arguments: tuple[Any, ...] = ()
            try:
                if memory is not None and method.brings:
                    running.packed = Packed(raw_arguments, memory)  # decoded when its memory is taken
                else:
                    arguments = method.exact(raw_arguments)
                    if tail is not None:
                        is_bytes = type(arguments[method.bytes_at]) is bytes
                        arguments = (*arguments[: method.bytes_at], tail if is_bytes else memoryview(tail))
            except Exception:
                if tail is not None:
                    raw_arguments = with_tail(raw_arguments, tail)
                arguments = method.decode_arguments(raw_arguments)
            if method.kind is _UNARY:
                book.begin(number, _UNARY, running)
            else:
                self._begin_streams(running)
        except BaseException as exc:
            if running is not None and running.is_counted:
                self.share.end(running)
                running.end_streams()
            if isinstance(exc, Error):
                send_failure(self.link, number, exc, begun=False)
                return
            # from the constructor of an argument's class
            send_failure(self.link, number, mistake(exc, server.send_tracebacks), begun=False)
            report(method.label, exc)
            if isinstance(exc, ENDS_THE_PROGRAM):
                raise
            return
        counter.begun += 1
        counter.received_bytes += received_bytes
        self._begin(running, arguments)

    def _begin_streams(self, running: Running) -> None:
        method, inflow, outflow = running.method, None, None
        if method.kind in (Kind.CLIENT_STREAM, Kind.BOTH):
            inflow = Inflow(self.limits.stream_bytes)
            drop = functools.partial(self.share.drop, running)
            running.received = Receiving(self.link, inflow, method.decode_sent_item, drop)
            running.received.number = running.number
        if method.kind in (Kind.SERVER_STREAM, Kind.BOTH):
            outflow = Outflow(self._stream_bytes)
            held = Held(self.share, running)
            packed = method.label if method.result_brings else None
            running.sent = Sending(self.link, outflow, running.counter, held, packed)
            running.sent.number = running.number
        self.book.begin(running.number, method.kind, running, inflow, outflow)
        if running.received is not None:
            running.received.watch(self.limits.stream_seconds, outflow)

    def _on_cancel(self, message: Cancel) -> None:
        running = self.book.cancel(message.number)
        if running is not None:
            running.cancel()

    def _on_item(self, message: Item) -> None:
        item = item_of(message)
        running = self.book.item(message.number, len(item) + ITEM_BYTES)
        if running is not None and running.received is not None and not running.received.has_ended:
            running.counter.received_bytes += len(item)
            scale = running.method.item_scale
            try:
                if len(message.item) >= scale.least:
                    scale.weigh(message.item, self.limits.decoded_bytes)
                self.share.hold(running, len(item) + ITEM_BYTES, "items")
            except Error as exc:
                running.received.finish(exc)
            else:
                running.received.put(item)

    def _on_end(self, message: End) -> None:
        running = self.book.end(message.number)
        if running is not None and running.received is not None:
            running.received.finish()

    def _on_window(self, message: Window) -> None:
        running = self.book.window(message.number, message.total)
        if running is not None and running.sent is not None:
            running.sent.allowed()

    def _on_release(self, message: Release) -> None:
        running = self.book.release(message.number)
        if running is not None:
            running.release()

    # -- a call --------------------------------------------------------------------------------------------

    async def say(self, call: CallInfo, metadata: Metadata) -> None:
        """Send initial metadata of a call (context.py)."""
        await self._answers.say(call, metadata)

    @property
    def executor(self) -> Any:
        """Whose threads run methods (threads.py); None: the loop's."""
        return self.server.executor

    def leave(self, call: CallInfo, thread: asyncio.Future[None]) -> None:
        """The method of this call waits no more for a thread, which goes on."""
        running = self._answers.running(call) or next((r for r in self._running if r.call is call), None)
        if running is not None:
            running.threads = [*(running.threads or ()), thread]
