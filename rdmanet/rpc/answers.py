# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""How a server sends the answer of a call: in one message, or with memory that the caller reads by reference.

What the method says beside its result goes along if the caller asks for that, and with errors.

A result that is lent keeps its call until the caller has released it, or until the time for that is over. A result that
has to wait until the peer reads counts meanwhile (shares.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from msgspec import Raw

from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.call_metadata import Metadata, checked_metadata
from rdmanet.rpc.calls import CalleeBook
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.errors import Error
from rdmanet.rpc.failures import send_failure, unsendable
from rdmanet.rpc.framing import reply_head
from rdmanet.rpc.lending import (
    APART_BYTES,
    apart,
    beside,
    goes_by_reference,
    in_message,
    is_apart,
    lent,
    memory_in_message,
)
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import (
    End,
    Initial,
    OutEnd,
    OutReply,
    OutReplyBringing,
    OutReplyReturning,
    OutReplySaying,
    raw,
)
from rdmanet.rpc.method import Method
from rdmanet.rpc.outgoing import Gathered, Outgoing
from rdmanet.rpc.packing import Packing
from rdmanet.rpc.paging import LEAST_BYTES
from rdmanet.rpc.running import Running
from rdmanet.rpc.shares import Share
from rdmanet.rpc.tails import last_result

_WAITING = "results that are not read"


def is_long(method: Method, result: bytes) -> bool:
    """Whether bytes that a method has returned are no plain answer."""
    return len(result) >= APART_BYTES or not method.result_is_buffer or method.result_is_array


class Answers:
    """The answers on one connection of a server.

    :ivar share: what its calls have
    """

    share: Share

    def __init__(self, link: Link, book: CalleeBook, limits: Limits) -> None:
        self._link = link
        self._book = book
        self._limits = limits

    def send(self, running: Running, message: Any, lending: bool = False, is_long: bool = False) -> None:
        """Send the one answer of a call, unless the connection is gone."""
        if not self._link.is_over:
            link = self._link  # may raise: then this is not the answer
            running.counter.sent_bytes += link.send_apart(message) if is_long else link.send(message)
            if lending:
                self._book.answered(running.number, lending)
            else:
                del self._book.calls[running.number]
        elif lending:
            running.release()
        running.call.is_over = True
        if running.received is not None or running.sent is not None:
            running.end_streams()

    def send_plain(self, running: Running, result: Any) -> None:
        """The same as `send` for a result that is in the message, of a call that streams none."""
        link, calls = self._link, self._book.calls
        if running.asks:
            self.send(running, self._message(running, result))
            return
        if type(result) is bytes and len(result) >= link.tail_bytes:
            self._send_tailed(running, result)
            return
        if not link.is_over:
            head = reply_head(running.number)
            running.counter.sent_bytes += link.send_plain(head, result, len(calls) == 1)
            del calls[running.number]
        running.call.is_over = True
        if running.received is not None:
            running.end_streams()

    def _send_tailed(self, running: Running, tail: bytes | memoryview) -> None:
        """The same for one that is written behind its message."""
        if not self._link.is_over:
            running.counter.sent_bytes += self._link.send_tailed(OutReply(running.number, b""), tail)
            del self._book.calls[running.number]
        running.call.is_over = True
        if running.received is not None:
            running.end_streams()

    async def reply(
        self, running: Running, held: list[Any], buffers: list[Buffer], timer: asyncio.TimerHandle | None
    ) -> None:
        """Answer with a result.

        :param held: the result, to which nothing else refers; it is taken out
        :param buffers: those of the arguments
        :param timer: of the call's deadline
        """
        method, link = running.method, self._link
        if method.result_brings:
            await self._bring(running, held, buffers, timer)
            return
        if is_held := link.turns.busy:
            self._hold(running, held)
            await link.turns.wait()
        if (tail := last_result(link, running, held[0])) is not None:
            held.clear()
            self._send_tailed(running, tail)
            return
        if method.result_is_buffer and (type(held[0]) is not bytes or is_long(method, held[0])):
            try:
                going = Outgoing.of_result(method.result, held, f"{method.label}: the result")
            except (TypeError, BufferError) as exc:
                raise unsendable(method.label, exc) from exc
            if goes_by_reference(link, going.nbytes, going.is_bytes):
                await self._lend(running, going, timer)
            elif going.nbytes >= LEAST_BYTES:
                await self._reply_long(running, going, buffers, is_held)
            else:
                sent = in_message(link, going)
                if goes_beside := is_apart(going):
                    sent = beside(going)
                self._reply(running, sent, buffers, is_long=goes_beside)
        else:
            self._reply(running, held.pop(), buffers)

    def _hold(self, running: Running, held: list[Any]) -> None:
        """Count a result that waits until the peer reads, in the form in which it is sent."""
        if not running.method.result_is_buffer:
            held[0] = raw(held[0])
        nbytes = getattr(held[0], "nbytes", None)
        self.share.hold(running, len(held[0]) if nbytes is None else nbytes, _WAITING)

    async def _bring(
        self, running: Running, held: list[Any], buffers: list[Buffer], timer: asyncio.TimerHandle | None
    ) -> None:
        """Answer with a result that has arrays in it."""
        label, link = running.method.label, self._link
        try:
            packing = Packing(held.pop(), f"{label}: the result")
        except (TypeError, BufferError) as exc:
            raise unsendable(label, exc) from exc
        is_held = False
        if link.turns.busy:
            is_held = not goes_by_reference(link, packing.nbytes)
            self.share.hold(running, len(packing.raw) + (packing.nbytes if is_held else 0), _WAITING)
            await link.turns.wait()
        if goes_by_reference(link, packing.nbytes):
            await self._lend(running, Gathered(packing, is_result=True), timer, packing.raw)
        elif packing.nbytes >= LEAST_BYTES:
            await self._reply_long(running, Gathered(packing, is_result=True), buffers, is_held, packing.raw)
        else:
            self._reply(running, packing.raw, buffers, memory_in_message(link, packing))

    async def _lend(
        self,
        running: Running,
        going: Outgoing | Gathered,
        timer: asyncio.TimerHandle | None,
        result: Any = None,
    ) -> None:
        """Answer with what goes by reference, and wait until the caller has read it.

        :param result: in msgpack, if what goes is the memory of arrays in it
        """
        if going.buffer is None:  # the memory of a Buffer is the service's own
            self.share.hold_lent(running, going.nbytes, "results on loan")
        async with lent(self._link, going) as sent:
            if result is None:
                reply = self._message(running, sent)
            else:
                reply = self._message(running, result, False, sent)
            running.counter.lent_bytes += going.nbytes
            running.released = self._link.loop.create_future()
            self.send(running, reply, lending=True)
            if timer is not None:
                timer.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.lent_seconds):
                    await running.released
            self._book.end_loan(running.number, running)

    async def _reply_long(
        self,
        running: Running,
        going: Outgoing | Gathered,
        buffers: list[Buffer],
        is_held: bool,
        result: Any = None,
    ) -> None:
        """Answer with a result that is long, and goes in the message.

        :param is_held: it counts
        :param result: as for `_lend`
        """
        if not is_held:
            self.share.hold(running, going.nbytes, "results")
        memory = await apart(self._link, going)
        if self._link.turns.busy:
            await self._link.turns.wait()
        if result is None:
            self._reply(running, memory, buffers, is_long=True)
        else:
            self._reply(running, result, buffers, memory, is_long=True)

    def _reply(
        self,
        running: Running,
        result: Any,
        buffers: list[Buffer],
        memory: Any = None,
        is_long: bool = False,
    ) -> None:
        """Answer with a result that is in the message."""
        returned = False
        if running.borrowed:
            for buffer in buffers:
                buffer.release()  # before it is said that nobody reads them
            returned = running.has_returned
        self.send(running, self._message(running, result, returned, memory), is_long=is_long)

    def _message(self, running: Running, result: Any, returned: bool = False, memory: Any = None) -> OutReply:
        """The answer with this result, and with what the method says beside it.

        :raises TypeError, Error: that cannot be sent
        """
        number = running.number
        if running.asks and (metadata := trailing(running, self._limits)) is not None:
            return OutReplySaying(number, result, returned, memory, metadata)
        if memory is not None:
            return OutReplyBringing(number, result, returned, memory)
        return (OutReplyReturning if returned else OutReply)(number, result)

    def end(self, running: Running) -> None:
        """Answer a call whose stream is complete."""
        metadata = trailing(running, self._limits) if running.asks else None
        self.send(running, OutEnd(running.number) if metadata is None else End(running.number, metadata))

    def fail(self, running: Running, error: Error) -> None:
        """Answer with an error."""
        metadata = None
        with contextlib.suppress(Exception):  # the answer is an error anyway
            metadata = trailing(running, self._limits)
        send_failure(self._link, running.number, error, metadata=metadata)

    async def say(self, call: CallInfo, metadata: Metadata) -> None:
        """Send initial metadata of a call, unless the caller does not ask for it, or is gone.

        :raises RuntimeError: an item of its stream was sent
        """
        running = self.running(call)
        if running is not None and running.sent is not None and running.sent.outflow.sent_bytes:
            raise RuntimeError(
                f"{running.method.label}: initial metadata goes before the first item: send it before the first yield"
            )
        if running is None or not running.asks:
            return
        if self._link.turns.busy:
            await self._link.turns.wait()
        if self.running(call) is not None:
            running.counter.sent_bytes += self._link.send(Initial(running.number, raw(metadata)))

    def running(self, call: CallInfo) -> Running | None:
        """A call that has no answer yet, on a connection that lives."""
        found = self._book.calls.get(call._number)
        return None if found is None or found[1].call is not call or self._link.is_over else found[1]


def trailing(running: Running, limits: Limits) -> Raw | None:
    """What goes with the answer of a call; None if that is nothing.

    :raises TypeError, Error: an interceptor has put something else there, or too much
    """
    said = running.call._said
    if said is None or not said.trailing_metadata:
        return None
    return raw(checked_metadata(said.trailing_metadata, limits.metadata_bytes))
