"""Trio's streams over RDMA: ``open_rdma_stream``, ``open_rdma_listeners`` and ``serve_rdma``.

They work with whatever takes Trio's streams: ``trio.SSLStream``, ``trio.StapledStream``, ``trio.serve_listeners``. They
behave like those of ``trio.open_tcp_stream`` and ``trio.serve_tcp``, with these differences:

* ``aclose()`` waits until the peer's device has what was sent. (With TCP the kernel goes on sending afterwards; here
  no kernel is involved.) If it is cancelled, it drops what has not been sent; if anything was dropped, the peer's
  ``receive_some()`` raises ``BrokenResourceError``. So ``trio.aclose_forcefully`` does what it says.
* A ``send_all()`` that is cancelled has sent nothing.
* There is no socket. ``transport`` is what is below.

Trio's loop does everything (trio_loop.py): there is no thread, and no loop of asyncio's.

Importing this module imports Trio (``pip install rdmanet[trio]``); ``import rdmanet`` does not.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import trio
from trio.abc import HalfCloseableStream, Listener

from rdmanet.errors import shown
from rdmanet.stream.addresses import SockAddr
from rdmanet.streams.accept_queue import AcceptQueue
from rdmanet.streams.buffering import BufferedStream, BufferingProtocol
from rdmanet.streams.trio_loop import trio_loop
from rdmanet.transport import RdmaTransport, create_rdma_connection, start_rdma_server

__all__ = ["RdmaListener", "RdmaStream", "open_rdma_listeners", "open_rdma_stream", "serve_rdma"]

_RECEIVE_BYTES = 65536  # if the caller does not say how many


async def open_rdma_stream(host: str, port: int, **options: Any) -> RdmaStream:
    """``trio.open_tcp_stream`` over RDMA.

    ``options`` are those of ``rdmanet.create_rdma_connection``: ``device``, ``connect_timeout``, ``local_addr``,
    ``slot_bytes``, …

    Raises what that function raises. Cancelling it undoes what it has begun.
    """
    home = trio_loop()
    _, protocol = await home.call(
        create_rdma_connection(lambda: BufferingProtocol(home=home.notifier), host, port, **options)
    )
    return RdmaStream(protocol)


async def open_rdma_listeners(
    port: int, *, host: str | None = None, backlog: int = 100, **options: Any
) -> list[RdmaListener]:
    """``trio.open_tcp_listeners`` over RDMA; one listener, which has all the addresses.

    Without ``host`` it listens on every address. ``port=0`` takes a free port, for each family its own
    (``RdmaListener.addresses``). ``backlog`` connections wait to be accepted; those that come beyond it are aborted.
    ``options`` are those of ``rdmanet.start_rdma_server``.

    Raises OSError when nothing could listen; ValueError unless ``backlog`` is positive. Cancelling it closes what was
    begun.
    """
    home = trio_loop()
    queue = AcceptQueue(backlog, home.notifier)
    queue.serves(await home.call(start_rdma_server(queue.factory, host, port, backlog=backlog, **options)))
    return [RdmaListener(queue)]


async def serve_rdma(
    handler: Callable[[RdmaStream], Awaitable[object]],
    port: int,
    *,
    host: str | None = None,
    backlog: int = 100,
    handler_nursery: trio.Nursery | None = None,
    task_status: trio.TaskStatus[list[RdmaListener]] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """``trio.serve_tcp`` over RDMA: call ``handler(stream)`` for each connection, until cancelled.

    The stream is closed when the handler returns. An exception of it ends the nursery, which is ``handler_nursery`` or
    one of its own. ``nursery.start`` returns the listeners.

    Raises what ``open_rdma_listeners`` raises, and OSError when the device is removed.
    """
    listeners = await open_rdma_listeners(port, host=host, backlog=backlog, **options)
    await trio.serve_listeners(handler, listeners, handler_nursery=handler_nursery, task_status=task_status)


class RdmaStream(BufferedStream, HalfCloseableStream):
    """One connection (``trio.abc.HalfCloseableStream``). `open_rdma_stream` and listeners create it."""

    _library = trio

    def __init__(self, protocol: BufferingProtocol) -> None:
        super().__init__(protocol)
        self._receiving = _OneTask("receiving from this stream")
        self._sending = _OneTask("sending to this stream")

    @property
    def transport(self) -> RdmaTransport:
        """The transport: for ``get_extra_info``, to ``offer`` memory, and for counters. Do not read or write with it.

        Its coroutines are asyncio's; a task of Trio's cannot await them.
        """
        return self._transport

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive at least one byte, and at most ``max_bytes``; waits while there is nothing. b"" at end of file.

        A program that does not receive stops the peer, once some 64 KiB and the slots of the ring are full.

        Raises BrokenResourceError when the connection is lost, with the OSError as its cause, after all received bytes
        were taken; ClosedResourceError when this stream is closed, also while it waits; BusyResourceError while another
        task receives; TypeError unless ``max_bytes`` is an integer or None, ValueError unless it is positive.

        Cancelling it loses no byte.
        """
        most = _RECEIVE_BYTES if max_bytes is None else operator.index(max_bytes)
        if most < 1:
            raise ValueError(f"max_bytes={shown(max_bytes)} is not positive")
        with self._receiving.entered():
            return await self._receive(most)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``; waits while earlier bytes have not left.

        It returns when ``data`` has been accepted, not when it has arrived. The peer's device has it when ``aclose()``
        returns; the peer's program has it when it answers. The program may change ``data`` after the return.

        Raises BrokenResourceError when the connection is lost, with the OSError as its cause; ClosedResourceError
        after ``send_eof()`` or ``aclose()``, also while it waits; BusyResourceError while another task sends; TypeError
        unless ``data`` is bytes-like.

        If it is cancelled, nothing of ``data`` was sent.
        """
        with self._sending.entered():
            await self._send(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until ``send_all`` would not wait.

        Raises what ``send_all`` raises. Cancelling it changes nothing.
        """
        with self._sending.entered():
            if not await self._until_room():
                await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """Send end of file after what was sent: the peer's ``receive_some()`` returns b"". Receiving still works.

        A second call does nothing. Raises ClosedResourceError after ``aclose()``, BusyResourceError while another task
        sends. It does not wait, and does not report a lost connection.
        """
        with self._sending.entered():
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this stream is closed")
            self._sent_eof = True
            self._transport.write_eof()

    async def aclose(self) -> None:
        """Send what is left and end of file, and close. Bytes that were not received are dropped.

        It waits until the peer's device has everything, or there was no progress for ``close_timeout`` seconds (an
        option of the connection). Like those of Trio it raises nothing: to know that everything was received, ask the
        peer. Other tasks that wait on this stream get ClosedResourceError.

        If it is cancelled, it drops what has not been sent, and closes all the same.
        """
        await self._close()


class RdmaListener(Listener[RdmaStream]):
    """Accepts connections (``trio.abc.Listener``). `open_rdma_listeners` creates it."""

    def __init__(self, queue: AcceptQueue) -> None:
        self._queue = queue
        self._accepting = _OneTask("accepting from this listener")

    async def accept(self) -> RdmaStream:
        """The next connection.

        Raises ClosedResourceError when the listener is closed, also while it waits; BrokenResourceError when its device
        is removed; BusyResourceError while another task accepts; RuntimeError in a forked child. Cancelling it loses no
        connection.
        """
        self._queue.server._refuse_foreign()
        with self._accepting.entered():
            await trio.lowlevel.checkpoint()
            return RdmaStream(await self._queue.next(trio))

    async def aclose(self) -> None:
        """Stop listening, and abort the connections that were not accepted. Accepted connections live on."""
        self._queue.close()
        await trio.lowlevel.checkpoint()

    @property
    def addresses(self) -> list[SockAddr]:
        """The addresses it listens on, as sockets have them; none once it is closed."""
        return [sock.getsockname() for sock in self._queue.server.sockets]

    def __repr__(self) -> str:
        return f"<RdmaListener {self._queue.server!r}>"


class _OneTask:
    """Refuses a second task."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._busy = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        if self._busy:
            raise trio.BusyResourceError(f"another task is {self._what}")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
