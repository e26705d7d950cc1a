"""An endpoint: where a program's memory is found by others, and from where it reaches theirs.

Theory
------
An endpoint belongs to one event loop. It listens at one port, and draws a number by which its descriptors are known;
a process that is started anew at the same port has another number. It keeps all that it has made, and ends it in the
opposite order: it stops listening, closes the connections to its peers, ends what it has granted, whatever its peers
do, and then the connections that they have made.

What its peers notify is kept until the program takes it. When there are NOTIFICATIONS_MOST, nothing more is read from
the connections that have brought them, so their peers wait.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import errno
import ipaddress
import secrets
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from rdmanet.stream.options import CONNECT_TIMEOUT_S
from rdmanet.stream.server import RdmaServer
from rdmanet.tensors.descriptor import ID_BYTES, VERSION, Address
from rdmanet.tensors.link import Notification, Served
from rdmanet.tensors.memory import Grant, Memory
from rdmanet.tensors.peer import Peer
from rdmanet.transport import start_rdma_server

NOTIFICATIONS_MOST: Final = 1024


@contextlib.asynccontextmanager
async def open_endpoint(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    device: str | None = None,
    connect_timeout: float | None = CONNECT_TIMEOUT_S,
    busy_poll: float | None = None,
) -> AsyncIterator[Endpoint]:
    """An endpoint of the running event loop, for the length of the block.

    When the block ends, what was granted ends, whatever the peers do, and then the connections. Cancelling that takes
    effect when it is done, which takes seconds at most.

    :param host: an address of this host, by which the others reach it. The default is for this host alone
    :param port: 0 takes a free one
    :param device: the name of a device; None chooses it as `rdmanet.create_rdma_connection` does
    :param connect_timeout: how long one attempt to connect to a peer may take, in seconds; None: any time
    :param busy_poll: as for `rdmanet.create_rdma_connection`
    :raises ValueError: the address is none that others can connect to
    :raises OSError: the port is taken, or there is no such address or device
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise OSError(
                errno.EINVAL, f"tensors.open(): {host} is no address that others can connect to: name one"
            )
    endpoint = Endpoint(asyncio.get_running_loop(), host, device, connect_timeout, busy_poll)
    try:
        await endpoint._start(port)
        yield endpoint
    finally:
        await endpoint._close()


class Endpoint:
    """Where a program's memory is found by others, and from where it reaches theirs: see `open`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        device: str | None,
        connect_timeout: float | None,
        busy_poll: float | None,
    ) -> None:
        self._loop = loop
        self._host = host
        self._id = secrets.token_bytes(ID_BYTES)
        self._options: dict[str, Any] = {"device": device, "busy_poll": busy_poll}
        self._connecting = self._options | {"connect_timeout": connect_timeout}
        self._server: RdmaServer | None = None
        self._port = 0
        self._links: set[Served] = set()
        # Those that the program has, or that are connected: a long-lived process meets many that end.
        self._peers: weakref.WeakValueDictionary[bytes, Peer] = weakref.WeakValueDictionary()
        self._grants: dict[bytes, Grant] = {}
        self._memories: list[Memory] = []  # in the order of their addresses,
        self._addresses: list[int] = []  # which are these
        self._beside: set[Memory] = set()  # those that operations of our own do not reach
        self._notifications = Notifications()
        self._is_closed = False

    async def _start(self, port: int) -> None:
        self._server = await start_rdma_server(self._served, self._host, port, **self._options)
        self._port = self._server.sockets[0].getsockname()[1]

    def _served(self) -> Served:
        return Served(self._loop, self._id, self._grants, self._notifications.put, self._links)

    # -- our memory --------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """What another endpoint's `connect` needs to find this one. Send it by any channel."""
        return bytes(Address(VERSION, self._id, self._host, self._port))

    def register(self, array: Any) -> Memory:
        """Memory that can be described to others, and that this endpoint's own operations reach without a registration.

        It is registered with each device when it is used there first, until `Memory.close`. Meanwhile it cannot be
        resized. Memory of ``rdmanet.alloc()`` is the fastest where peers share this host: they map it.

        :param array: of NumPy, a tensor of PyTorch that is in the processor's memory, or any other buffer; or a
            `DmaBuf` of another device's memory, which is for peers alone
        :raises TypeError: it is no array, or one in a GPU's memory
        :raises BufferError: it is not C-contiguous
        :raises ValueError: it has no bytes, a `DmaBuf` says numbers that no device takes, or the endpoint is closed
        """
        self._check_open()
        memory = Memory(array, self._id, self._grants, self._loop, self._forget)
        if memory.address is None:
            self._beside.add(memory)
            return memory
        at = bisect.bisect(self._addresses, memory.address)
        self._addresses.insert(at, memory.address)
        self._memories.insert(at, memory)
        return memory

    def _forget(self, memory: Memory) -> None:
        if memory.address is None:
            self._beside.discard(memory)
            return
        at = self._memories.index(memory)
        del self._memories[at], self._addresses[at]

    def _find(self, address: int, nbytes: int, writable: bool) -> Memory | None:
        """The registered memory that has these bytes, for operations of our own."""
        at = bisect.bisect(self._addresses, address) - 1
        if at < 0:
            return None
        memory = self._memories[at]
        return memory if memory.serves(address, nbytes, writable) else None

    def notifications(self) -> Notifications:
        """What peers have said with their writes: ``async for notification in endpoint.notifications()``.

        It ends with the endpoint. Each notification is given once. Cancelling loses none.
        """
        return self._notifications

    # -- others' -----------------------------------------------------------------------------------------------

    async def connect(self, address: bytes | Address) -> Peer:
        """Another endpoint. It is the same `Peer` each time, with one connection, which is made again when it is lost.

        Cancelling ends only the wait, if others wait for the same connection.

        :raises AddressError: these bytes are no address
        :raises OSError: nobody answers there, or another endpoint does
        :raises ValueError: this endpoint is closed
        """
        self._check_open()
        if not isinstance(address, Address):
            address = Address.from_bytes(address)
        peer = self._peers.get(address.endpoint)
        if peer is None or peer.address != address:
            peer = Peer(self._loop, self._id, address, self._find, self._connecting)
            await self._kept(peer)
        else:
            await peer.connected()
        return peer

    async def _kept(self, peer: Peer) -> None:
        """Connect a new peer. One that cannot be reached is forgotten, so that strange addresses take no memory."""
        before = self._peers.get(peer.address.endpoint)
        self._peers[peer.address.endpoint] = peer
        try:
            await peer.connected()
        except BaseException:
            if self._peers.get(peer.address.endpoint) is peer and not peer._is_connected():
                del self._peers[peer.address.endpoint]
                if before is not None:
                    self._peers[peer.address.endpoint] = before
                await peer.close()
            raise
        if before is not None:
            await before.close()

    # -- the end -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this endpoint is closed")

    async def _close(self) -> None:
        self._is_closed = True
        closing = self._loop.create_task(self._end(), name="tensors close")
        cancelled = False
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                cancelled = True  # everything ends within seconds, whatever the peers do
        closing.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        self._notifications.end()
        for peer in list(self._peers.values()):
            await peer.close()
        await asyncio.gather(*(memory.close() for memory in [*self._memories, *self._beside]))
        for link in list(self._links):
            link.transport.abort()
            await asyncio.shield(link.lost)
        if self._server is not None:
            await self._server.wait_closed()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"at {self._host}:{self._port}"
        return f"<Endpoint {state}, {len(self._memories)} memories, {len(self._peers)} peers>"


class Notifications:
    """The notifications that nobody has taken: an asynchronous iterator, for any number of tasks."""

    def __init__(self) -> None:
        self._waiting: deque[Notification] = deque()
        self._slowed: set[Served] = set()
        self._came = asyncio.Event()
        self._is_over = False

    def put(self, link: Served, notification: Notification) -> None:
        """A peer has said this."""
        if self._is_over:
            return
        self._waiting.append(notification)
        self._came.set()
        if len(self._waiting) >= NOTIFICATIONS_MOST and link not in self._slowed:
            link.be_deaf(self)
            self._slowed.add(link)

    def end(self) -> None:
        """There will be no more. What is left is given to who asks."""
        self._is_over = True
        self._came.set()

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> Notification:
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        notification = self._waiting.popleft()
        if self._slowed and len(self._waiting) <= NOTIFICATIONS_MOST // 2:
            slowed, self._slowed = self._slowed, set()
            for link in slowed:
                link.hear_again(self)
        return notification
