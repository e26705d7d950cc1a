"""AnyIO's byte streams over RDMA: ``connect_rdma`` and ``create_rdma_listener``.

They work with whatever takes an ``anyio.abc.ByteStream``: the wrappers of ``anyio.streams`` (buffered, text, TLS), and
libraries written for AnyIO. They behave like the results of ``anyio.connect_tcp`` and ``anyio.create_tcp_listener``,
with these differences:

* ``aclose()`` waits until the peer's device has what was sent. (With TCP the kernel goes on sending afterwards; here
  no kernel is involved.) If it is cancelled, it drops what has not been sent; if anything was dropped, the peer's
  ``receive()`` raises ``BrokenResourceError``. So ``anyio.aclose_forcefully`` does what it says.
* A ``send()`` that a cancel scope cancels has sent nothing of its item.
* There is no raw socket, so ``SocketAttribute.raw_socket`` is not among the attributes.

They run on both of AnyIO's backends. On Trio, its run loop does what a transport asks of asyncio's (trio_loop.py).

Importing this module imports AnyIO (``pip install rdmanet[anyio]``); ``import rdmanet`` does not.
"""

from __future__ import annotations

import contextlib
import operator
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import anyio
from anyio.abc import ByteStream, IPAddressType, Listener, SocketAttribute, TaskGroup
from anyio.lowlevel import checkpoint

from rdmanet.base.notifier import Notifier, TrioNotifier, current_notifier
from rdmanet.errors import shown
from rdmanet.stream.addresses import SockAddr
from rdmanet.streams.accept_queue import AcceptQueue
from rdmanet.streams.buffering import BufferedStream, BufferingProtocol
from rdmanet.transport import RdmaTransport, create_rdma_connection, start_rdma_server

__all__ = ["RdmaAttribute", "RdmaByteStream", "RdmaListener", "connect_rdma", "create_rdma_listener"]

_T = TypeVar("_T")


async def connect_rdma(
    remote_host: IPAddressType,
    remote_port: int,
    *,
    local_host: IPAddressType | None = None,
    local_port: int = 0,
    **options: Any,
) -> RdmaByteStream:
    """``anyio.connect_tcp`` over RDMA.

    If ``local_host`` is given, the connection is bound to it, with ``local_port`` or a free port. ``options`` are those
    of ``rdmanet.create_rdma_connection``: ``device``, ``connect_timeout``, ``slot_bytes``, …

    Raises what that function raises. Cancelling it undoes what it has begun.
    """
    if local_host is not None:
        options["local_addr"] = (_text(local_host), local_port)
    elif local_port:
        raise ValueError(f"local_port={shown(local_port)} needs a local_host")
    _, protocol = await _on_loop(
        lambda home: create_rdma_connection(
            lambda: BufferingProtocol(home=home), _text(remote_host), remote_port, **options
        )
    )
    return RdmaByteStream(protocol)


async def create_rdma_listener(
    *,
    local_host: IPAddressType | None = None,
    local_port: int = 0,
    family: int = socket.AF_UNSPEC,
    backlog: int = 100,
    **options: Any,
) -> RdmaListener:
    """``anyio.create_tcp_listener`` over RDMA.

    Without ``local_host`` it listens on every address, of ``family`` or of both. ``local_port=0`` takes a free port,
    for each family its own (``RdmaListener.addresses``). ``backlog`` connections wait to be accepted; those that come
    beyond it are aborted. ``options`` are those of ``rdmanet.start_rdma_server``.

    Raises OSError when nothing could listen; ValueError unless ``backlog`` is positive. Cancelling it closes what was
    begun.
    """

    async def begin(home: Notifier) -> AcceptQueue:
        queue = AcceptQueue(backlog, home)
        queue.serves(
            await start_rdma_server(
                queue.factory, _text(local_host), local_port, family=family, backlog=backlog, **options
            )
        )
        return queue

    return RdmaListener(await _on_loop(begin))


class RdmaAttribute(anyio.TypedAttributeSet):
    """The attributes of ``stream.extra()`` in addition to ``anyio.abc.SocketAttribute``."""

    transport: RdmaTransport = anyio.typed_attribute()
    """The stream's transport, to ``offer`` memory or to see its counters. Do not read or write through it."""
    device: str = anyio.typed_attribute()
    """The name of the RDMA device."""


class RdmaByteStream(BufferedStream, ByteStream):
    """One connection (``anyio.abc.ByteStream``, method by method). `connect_rdma` and listeners create it."""

    _library = anyio

    def __init__(self, protocol: BufferingProtocol) -> None:
        super().__init__(protocol)
        self._receiving = anyio.ResourceGuard("receiving from")
        self._sending = anyio.ResourceGuard("sending to")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive at least one byte and at most ``max_bytes``; waits while there is nothing.

        A program that does not receive stops the peer, once some 64 KiB and the slots of the ring are full.

        Raises EndOfStream after the peer's last byte; BrokenResourceError when the connection is lost, with the
        OSError as its cause, after all received bytes were taken; ClosedResourceError when this stream is closed, also
        while it waits; BusyResourceError while another task receives; TypeError unless ``max_bytes`` is an integer,
        ValueError unless it is positive.

        Cancelling it loses no byte.
        """
        if operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes={shown(max_bytes)} is not a positive integer")
        with self._receiving:
            if data := await self._receive(max_bytes):
                return data
            raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        """Send all of ``item``, a bytes-like object; waits while earlier bytes have not left.

        It returns when ``item`` has been accepted, not when it has arrived. The peer's device has it when ``aclose()``
        returns; the peer's program has it when it answers. The program may change ``item`` after the return.

        Raises BrokenResourceError when the connection is lost, with the OSError as its cause; ClosedResourceError
        after ``send_eof()`` or ``aclose()``, also while it waits; BusyResourceError while another task sends; TypeError
        unless ``item`` is bytes-like.

        If a cancel scope cancels it, nothing of ``item`` was sent. (``Task.cancel()``, which is not AnyIO's, may hit it
        after all of ``item`` was accepted.)
        """
        with self._sending:
            await self._send(item)

    async def send_eof(self) -> None:
        """Send end of file after what was sent: the peer's ``receive()`` raises EndOfStream. Receiving still works.

        A second call does nothing. Raises ClosedResourceError after ``aclose()``, BusyResourceError while another task
        sends. It does not wait, and does not report a lost connection.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        with self._sending:
            self._sent_eof = True
            self._transport.write_eof()

    async def aclose(self) -> None:
        """Send what is left and end of file, and close. Bytes that were not received are dropped.

        It waits until the peer's device has everything, or there was no progress for ``close_timeout`` seconds (an
        option of the connection). Like AnyIO's own it raises nothing: to know that everything was received, ask the
        peer. Other tasks that wait on this stream get ClosedResourceError.

        If it is cancelled, it drops what has not been sent, and closes all the same.
        """
        await self._close()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """``anyio.abc.SocketAttribute``, except ``raw_socket``, and `RdmaAttribute`; also of a closed stream."""
        info = self._transport.get_extra_info
        return {
            **_local_attributes(info("sockname")),
            SocketAttribute.remote_address: lambda: _without_scope(info("peername")),
            SocketAttribute.remote_port: lambda: info("peername")[1],
            RdmaAttribute.transport: lambda: self._transport,
            RdmaAttribute.device: lambda: info("rdma_device"),
        }


class RdmaListener(Listener[RdmaByteStream]):
    """Accepts connections (``anyio.abc.Listener``). `create_rdma_listener` creates it."""

    def __init__(self, queue: AcceptQueue) -> None:
        self._queue = queue
        self._accepting = anyio.ResourceGuard("accepting connections from")

    async def accept(self) -> RdmaByteStream:
        """The next connection.

        Raises ClosedResourceError when the listener is closed, also while it waits; BrokenResourceError when its device
        is removed; BusyResourceError while another task accepts; RuntimeError in a forked child. Cancelling it loses no
        connection.
        """
        self._queue.server._refuse_foreign()
        with self._accepting:
            await checkpoint()
            return RdmaByteStream(await self._queue.next(anyio))

    async def serve(
        self, handler: Callable[[RdmaByteStream], Any], task_group: TaskGroup | None = None
    ) -> None:
        """Call ``handler(stream)`` for each connection, in ``task_group`` or in a new one, until cancelled.

        The handler has to close its stream. An exception of it ends the task group, as with AnyIO's own listeners.
        """
        async with contextlib.AsyncExitStack() as stack:
            if task_group is None:
                task_group = await stack.enter_async_context(anyio.create_task_group())
            while True:
                task_group.start_soon(handler, await self.accept())

    async def aclose(self) -> None:
        """Stop listening, and abort the connections that were not accepted. Accepted connections live on."""
        self._queue.close()
        await checkpoint()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses it listens on; none once it is closed."""
        return [_without_scope(sock.getsockname()) for sock in self._queue.server.sockets]

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The ``anyio.abc.SocketAttribute`` values of the first of `addresses`: family, local_address, local_port."""
        return (
            _local_attributes(self._queue.server.sockets[0].getsockname())
            if self._queue.server.sockets
            else {}
        )


async def _on_loop(begin: Callable[[Notifier], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine of asyncio's on the caller's loop: asyncio's, or Trio's (trio_loop.py)."""
    home = current_notifier()
    if not isinstance(home, TrioNotifier):
        return await begin(home)
    from rdmanet.streams.trio_loop import trio_loop  # it imports Trio

    loop = trio_loop()
    return await loop.call(begin(loop.notifier))


def _text(host: IPAddressType | None) -> str | None:
    """A host as text: AnyIO also takes the address objects of ``ipaddress``."""
    return None if host is None else str(host)


def _local_attributes(address: SockAddr) -> dict[Any, Callable[[], Any]]:
    family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
    return {
        SocketAttribute.family: lambda: family,
        SocketAttribute.local_address: lambda: _without_scope(address),
        SocketAttribute.local_port: lambda: address[1],
    }


def _without_scope(address: SockAddr) -> tuple[str, int]:
    """(host, port), AnyIO's form of an address in both families; a non-zero scope becomes part of the host."""
    host = address[0]
    if len(address) == 4 and address[3] and "%" not in host:
        host = f"{host}%{address[3]}"
    return host, address[1]
