"""Buffers on their way between the two sides of a call.

Theory
------
Who has the memory lends it: puts it on offer on the call's connection (`RdmaTransport.offer`), for reading, and sends
the offer's number in place of the bytes. Who gets the number reads by RDMA READ, when it wants to, into memory of its
own. The offer's key is good for this connection only, and ends with the call, whatever ends it: the block of `offer`
is left when the call has its answer, fails, runs out of time or is cancelled, and leaving it waits until the device
has invalidated the key. After that the owner's memory is the owner's alone.

That needs the peer, which may have stopped. So each loan has a task of its own. A call that is late or cancelled waits
for it for RETURN_S, and leaves the rest to the task: the device invalidates the key after REVOKE_TIMEOUT_S, whatever
the peer does.

A loan costs a few messages of its own: offer, revocation, confirmation. Below LEND_BYTES it is faster to send the bytes
in the message, which is also the only way over TCP and Unix sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from rdmanet.memory import OfferedMemory
from rdmanet.rdma_transport import RdmaTransport
from rdmanet.rpc.buffer import Buffer, over
from rdmanet.rpc.errors import Code, Error, late
from rdmanet.rpc.link import Link, read_offer
from rdmanet.rpc.messages import Lent

LEND_BYTES: Final = 1 << 20
"""Measured on the embedded device: a loan costs 0.3 ms more than a message. At 1 MiB both take the same time, at 4 MiB
the loan takes two thirds."""
RETURN_S: Final = 0.25
"""How long a call whose time is over waits for its memory. A peer that runs takes much less than that."""
_KEEP_BYTES: Final = 64 << 10
"""A view of fewer bytes is copied: it would keep all that was received with it."""


def goes_inline(value: Any) -> bool:
    """Whether a buffer is surely to go in its message, as it is. This is the quick answer for most."""
    return type(value) is bytes and len(value) < LEND_BYTES


def memory_of(value: Any, what: str) -> memoryview:
    """The bytes of a buffer that the program hands over.

    :raises TypeError: it is no buffer; the text says where
    :raises BufferError: it is not contiguous
    """
    if isinstance(value, Buffer):
        if value.memory is None:
            raise TypeError(f"{what}: {value!r} is not of this process's memory: read it first")
        return value.memory
    try:
        return Buffer(value).memory or memoryview(b"")
    except TypeError:
        raise TypeError(f"{what}: {type(value).__name__!r} is no buffer") from None


@contextlib.asynccontextmanager
async def lent(
    link: Link, memory: memoryview, deadline: float | None = None
) -> AsyncIterator[Lent | memoryview]:
    """A block in which the peer can have this memory. Yields what is sent for it: a loan, or the bytes themselves.

    :param deadline: of the call, on the loop's clock
    :raises Error: DEADLINE_EXCEEDED if the peer does not let go of the memory in time
    """
    transport = link.transport
    if memory.nbytes < LEND_BYTES or not link.lends or not isinstance(transport, RdmaTransport):
        yield memory
        return
    loop = link.loop
    granted: asyncio.Future[int] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()
    task = loop.create_task(_offer(link, transport, memory, granted, ended), name="rpc loan")
    link.lending.add(task)
    task.add_done_callback(link.lending.discard)
    try:
        yield Lent(await granted, memory.nbytes)
    except BaseException as exc:
        gives_up = isinstance(exc, (asyncio.CancelledError, GeneratorExit))
        if not granted.done() or granted.cancelled():
            task.cancel()
        await _returned(loop, task, ended, loop.time() if gives_up else deadline)
        raise
    if not await _returned(loop, task, ended, deadline):
        raise late()


async def _offer(
    link: Link,
    transport: RdmaTransport,
    memory: memoryview,
    granted: asyncio.Future[int],
    ended: asyncio.Future[None],
) -> None:
    """The task of a loan: it lasts until nobody else can use the memory."""
    try:
        async with link.loans, transport.offer(memory, access="read") as region:
            if not granted.done():
                granted.set_result(region.id)
            await ended
    except Exception as exc:
        if not granted.done():
            granted.set_exception(link.lost_error() if isinstance(exc, ConnectionError) else exc)
            granted.exception()  # whoever waits may be cancelled before it looks
        elif not isinstance(exc, OSError):
            raise


async def _returned(
    loop: asyncio.AbstractEventLoop,
    task: asyncio.Task[None],
    ended: asyncio.Future[None],
    deadline: float | None,
) -> bool:
    """End a loan, and wait for that, at most until RETURN_S after the deadline. Returns whether it is over."""
    if not ended.done():
        ended.set_result(None)
    left = None if deadline is None else max(0, deadline - loop.time()) + RETURN_S
    done, _ = await asyncio.wait([task], timeout=left)
    return bool(done)


class Loan:
    """The source of a Buffer that the peer lends.

    :param on_release: called once, when nothing will be read any more
    """

    def __init__(self, link: Link, loan: Lent, on_release: Any = None) -> None:
        self._link = link
        self._loan = loan
        self._is_over = False
        self._on_release = on_release

    async def read_into(self, memory: Any, offset: int) -> None:
        if self._is_over:
            raise over()
        await read_offer(await found(self._link, self._loan), memory, offset)

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._on_release is not None:
                self._on_release()


async def found(link: Link, loan: Lent) -> OfferedMemory:
    """The peer's memory behind a loan. It is as long as the peer says, so memory can be taken for it.

    :raises Error: INVALID_ARGUMENT if it is not, or if nothing can be lent on this connection; as for `Link.offered`
    """
    remote = await link.offered(loan.offer)
    if loan.length > remote.length:
        text = f"the peer lends {loan.length} bytes, and has only {remote.length} on offer"
        raise Error(Code.INVALID_ARGUMENT, text)
    return remote


async def whole(link: Link, loan: Lent) -> memoryview:
    """All bytes of a loan, in memory of this process. Its size has been checked against the limits."""
    remote = await found(link, loan)
    memory = memoryview(bytearray(loan.length))
    await read_offer(remote, memory, 0)
    return memory


def as_declared(type_: Any, memory: memoryview) -> Any:
    """Bytes that are here, as the method's annotation wants them."""
    if type_ is bytes:
        return bytes(memory)
    if memory.nbytes < _KEEP_BYTES:
        memory = memoryview(bytes(memory))
    return Buffer(memory) if type_ is Buffer else memory
