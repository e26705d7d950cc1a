# cython: nonecheck=True, auto_pickle=False
"""The callee's side of one connection: from a Call to its answer.

Theory
------
A call that may begin becomes a task, which runs the method and sends the one answer. The task ends in one of five ways:

    the method returns          Reply; for a stream, its Items and End
    the method raises Error     Failure with that
    it raises something else    Failure INTERNAL, and nothing more; the log has the rest. KeyboardInterrupt and
                                SystemExit go on from there, as from any task
    it is cancelled             Failure CANCELLED, or DEADLINE_EXCEEDED if its time is over
    the connection is lost      it is cancelled, unless the method outlives connections; there is nobody to answer

Cancelling is asyncio's: CancelledError is raised where the method awaits, and `finally` blocks run. The server awaits
the end of each task. A result on loan keeps its task until the caller has released it, or until the time for that is
over.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from msgspec import Raw

from rdmanet.errors import ProtocolError
from rdmanet.rpc.answers import Answers, is_long
from rdmanet.rpc.beginning import BEGINNING
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.builtin import names_of
from rdmanet.rpc.call_metadata import Metadata, decoded
from rdmanet.rpc.calls import ITEM_BYTES, CalleeBook, Inflow, Outflow
from rdmanet.rpc.context import CURRENT, CallInfo
from rdmanet.rpc.endpoints import source
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error, late, not_taken
from rdmanet.rpc.failures import error_of, mistake, report, send_failure, when_read
from rdmanet.rpc.host import Host
from rdmanet.rpc.interceptors import chained
from rdmanet.rpc.keepalive import Keepalive
from rdmanet.rpc.lending import at_once
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
from rdmanet.rpc.running import Running, limited, threads_end
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.shares import Held, Share
from rdmanet.rpc.snapshot import alone
from rdmanet.rpc.stats import Counter
from rdmanet.rpc.streaming import Receiving, Sending, item_of
from rdmanet.rpc.taking import take, unpack

_NOTHING: Final = Schema("", [])
"""What a client gets of a service that the server does not have."""
_UNARY: Final = Kind.UNARY


class Callee:
    """A connection of a server.

    :ivar link: the protocol of its transport
    :ivar book: its unfinished calls
    :ivar share: what these have
    :ivar peer: who is at the other end
    """

    share: Share
    peer: Peer

    def __init__(self, server: Host) -> None:
        self.server = server
        self._running = server.running
        self.loop = server.loop
        self.limits = server.limits
        self.book: CalleeBook = CalleeBook(self.limits.calls)
        self._service = ""
        self._methods: list[tuple[Method, Callable[..., Any]]] = []
        self._counters: list[Counter] = []
        self._is_builtin = False
        self._intercepts = False
        self._stream_bytes = 0
        self._greeting: asyncio.TimerHandle | None = None
        self._is_greeted = False
        self._keepalive: Keepalive | None = None
        handlers: dict[type, Callable[[Any], None]] = {Hello: self._on_hello}
        self._handlers = handlers
        self.link = Link(
            self.loop,
            self.limits,
            handlers,
            self._made,
            self._lost,
            is_server=True,
            on_unfinished=self._unfinished,
        )
        self._answers = Answers(self.link, self.book, self.limits)
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
        number, raw_arguments, running = message.number, message.arguments, None
        book, server, parting = self.book, self.server, self._parting
        if number in book.calls or number in book.lending:
            book.check_unused(number)
        try:
            if parting.refusal is not None:
                raise not_taken(f"the server takes no new calls ({parting.refusal})")
            parting.taken += 1
            if message.method >= len(self._methods):
                raise Error(Code.UNIMPLEMENTED, f"there is no method {message.method}")
            method, function = self._methods[message.method]
            metadata: Metadata = {}
            asks = False
            memory, limits = message.memory, self.limits
            received_bytes = len(raw_arguments) + (memory.nbytes if type(memory) is memoryview else 0)
            nbytes = received_bytes
            if message.metadata is not NIL:
                metadata, metadata_bytes = decoded(message.metadata, limits)
                nbytes += metadata_bytes
                asks = message.asks
            left_us = message.timeout_us
            deadline = None if left_us is None else self.loop.time() + left_us / 1e6
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
            except Exception:
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
        self._running.add(running)  # before the task, which may be eager, and end at once
        work = self._run(running, arguments)
        work.send(None)
        running.task = self.loop.create_task(work, name=method.label)

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

    async def _run(self, running: Running, arguments: tuple[Any, ...]) -> None:
        """The task of a call."""
        method, server, deadline = running.method, self.server, running.call.deadline
        timer: asyncio.TimerHandle | None = None
        buffers: list[Buffer] = []
        try:
            await BEGINNING
            if not running.task:  # an eager one begins before its creator has it
                running.task = cast("asyncio.Task[None]", asyncio.current_task())
            CURRENT.set(running.call)
            if deadline is not None:
                timer = self.loop.call_at(deadline, running.time_is_over)
            if self._intercepts:
                execution = self._intercepted(running, arguments, buffers)
            else:
                execution = self._execute(running, arguments, buffers)
            if method.result_is_memory:
                held, result = await alone(execution), None
            else:
                held, result = None, await execution
            if running.sent is not None:
                self._answers.end(running)
            elif (
                held is not None or self.link.turns.busy or running.borrowed
                or (method.result_is_apart and (type(result) is not bytes or is_long(method, result)))
            ):  # fmt: skip
                held, result = held or [result], None
                await self._answers.reply(running, held, buffers, timer)
            else:
                self._answers.send_plain(running, result)
        except asyncio.CancelledError:
            self._fail(running, late() if running.late else Error(Code.CANCELLED, "the call was cancelled"))
        except BaseException as exc:
            if isinstance(exc, GeneratorExit) and self.loop.is_closed():
                running.received = running.sent = None
                raise  # nobody will run this task any more
            await self._has_raised(running, exc)
            if isinstance(exc, ENDS_THE_PROGRAM):
                raise
        finally:
            if timer is not None:
                timer.cancel()
            if running.threads is not None and not self.loop.is_closed():
                await threads_end(self.book, running.threads)
            for buffer in buffers:
                buffer.release()
            counter = running.counter
            seconds = self.loop.time() - running.begun_at
            if running.code is None:
                counter.ok += 1
                counter.seconds += seconds
            else:
                counter.count_failed(running.code, seconds)
            self.share.end(running)
            self._running.discard(running)
            if server.refusal is not None and not self._running:
                server.is_idle()

    async def _intercepted(self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]) -> Any:
        """Execute the method within the server's interceptors, and with the context variables that were sent."""
        server, call = self.server, running.call
        for variable in server.carry:
            if variable.name in call.metadata:
                variable.set(call.metadata[variable.name])
        execute = functools.partial(self._execute, running, arguments, buffers)
        return await chained(server.interceptors, call, execute)()

    def _execute(
        self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
    ) -> Coroutine[Any, Any, Any]:
        """Run the method. Returns its result; a stream is sent.

        Most calls are no more than the method's own coroutine: that of another one would be resumed each time, too.
        """
        method = running.method
        if method.kind is _UNARY and method.count >= 0 and running.packed is None:
            for index in method.buffers:
                if type(arguments[index]) is not bytes:
                    break
            else:
                return running.function(*arguments)  # type: ignore[no-any-return]
        return self._execute_prepared(running, arguments, buffers)

    async def _execute_prepared(
        self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
    ) -> Any:
        """Run a method that takes a stream, gives one, or gets more than plain arguments."""
        method = running.method
        if running.packed is not None:
            arguments = await self._unpacked(running, running.packed)
        for index in method.buffers:
            if type(arguments[index]) is not bytes:  # else it is as declared
                arguments = await self._taken(running, arguments, buffers)
                break
        call = running.function(*arguments) if method.count >= 0 else running.called(arguments)
        if running.sent is not None:
            await running.sent.send(aiter(call))
            return None
        return await call

    async def _taken(
        self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
    ) -> tuple[Any, ...]:
        """The arguments with their buffers, as the method declares them."""
        if (taken := at_once(running.method, arguments)) is None:
            running.taking = True
            try:
                taken = await take(self.link, self.share, running, arguments, buffers)
            finally:
                running.taking = False
        return taken

    async def _unpacked(self, running: Running, packed: Packed) -> tuple[Any, ...]:
        """The arguments with the arrays in them."""
        running.packed, running.taking = None, True
        try:
            return await unpack(self.link, self.share, running, packed)
        finally:
            running.taking = False

    async def _has_raised(self, running: Running, exc: BaseException) -> None:
        """Answer a call whose method has raised this."""
        with_traceback = self.server.send_tracebacks
        error = error_of(exc, with_traceback)
        told = error or mistake(exc, with_traceback)
        if self.link.turns.busy and isinstance(exc, Exception) and not running.is_cancelled:
            told = await when_read(self.link, self.share, running, told)
        self._fail(running, told)
        if error is None:
            report(running.method.label, exc)

    def _fail(self, running: Running, error: Error) -> None:
        """Answer a call with an error, unless it has been answered, or the connection is gone."""
        if not running.call.is_over:
            running.code = int(error.code)
        running.call.is_over = True
        running.end_streams()
        if not self.link.is_over and self.book.cancel(running.number) is running:
            try:
                self._answers.fail(running, error)
            finally:
                self.book.answered(running.number)
