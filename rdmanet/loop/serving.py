"""create_server: one server that serves TCP and RDMA on the same port.

Theory
------
TCP comes first. The loop's own create_server() makes the TCP listeners, so everybody reaches the server as before, and
all that it raises is as before. RDMA's modules, which take long to load, are loaded before they listen. Then an RDMA
listener joins each TCP listener, on the same address and port, and a door (doors.py) tells clients on this host about
it. An adapter has ports of its own. The embedded device's listener shares the TCP port: it is found by its name, on
this host only, and only because the TCP listener is ours.

A listener's options may have TCP refuse clients: those who do not come by one interface, say, or whose packets a filter
of its own drops. RDMA's do not pass there, so beside such a listener there is no RDMA (`_why_tcp_alone`).

If RDMA cannot listen, the server serves TCP only, and the log says why. RDMANET_REQUIRE makes that an error, and so
does ``fallback=False``. If an adapter cannot, as soft-iWARP beside a TCP listener, the embedded device does, and the
log says so.

Of several workers on one port the first has the door and the RDMA listeners. TCP's connections are spread over all by
the kernel, and RDMA's are dealt out in turn by the first (workers.py). When it ends, another takes its place. Until
then clients find no door, and take TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, cast

from rdmanet.base import log_rate
from rdmanet.base.pause import pause
from rdmanet.loop import kernel, loading, workers
from rdmanet.loop.acceptor import REST_S
from rdmanet.loop.choice import why_few_descriptors
from rdmanet.loop.doors import Answer, Door, Heir, owner
from rdmanet.loop.explaining import INTERNET, ExplainedDualServer, HowFound
from rdmanet.loop.settings import Settings

if TYPE_CHECKING:
    from rdmanet._core import Library
    from rdmanet.base.accounts import ConnectionInfo
    from rdmanet.stream.server import RdmaServer

logger = logging.getLogger("rdmanet")

SockAddr = tuple[str, int] | tuple[str, int, int, int]
REASON = "the client came by RDMA"

# Before 3.12 asyncio's wait_closed() returns as soon as the server is closed, and so does uvloop's.
_WAITS_FOR_CONNECTIONS = sys.version_info >= (3, 12)
_TRIES = 3
_TRY_AGAIN_S = 0.02
_SO_GET_FILTER = 26  # Linux; socket has no name for it
_INTERFACE_BYTES = 16  # IFNAMSIZ
_NOT_ITS_ADDRESS = (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAFNOSUPPORT)


class DualServer(ExplainedDualServer, asyncio.AbstractServer):
    """A server of the loop's own, and RDMA beside it (asyncio.Server, method by method)."""

    def __init__(
        self,
        tcp: Any,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        make_server: Callable[[], RdmaServer],
        alive: set[DualServer],
        tcp_infos: Callable[[], Iterable[ConnectionInfo]] = tuple,
    ) -> None:
        """
        :param tcp: the loop's server, not serving yet
        :param make_server: makes RDMA servers without listeners
        :param alive: where the server is kept while it serves
        :param tcp_infos: the loop's connections by TCP, as they are now
        """
        self._tcp = tcp
        self._loop = loop
        self._settings = settings
        self._make_server = make_server
        self._alive = alive
        self._tcp_infos = tcp_infos
        self._rdma: list[RdmaServer] = []
        self._heirs: list[Heir] = []
        self._beside: dict[SockAddr, RdmaServer] = {}
        """Those at ports of our own, while another process serves RDMA at these addresses."""
        self._doors: dict[SockAddr, HowFound] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_offered = False
        self._is_closed = False
        self._serving_forever: asyncio.Future[None] | None = None

    # -- asyncio.Server ------------------------------------------------------------------------------------

    @property
    def sockets(self) -> Any:
        """The TCP listeners' sockets: a tuple, and of uvloop's a list. RDMA listens on the same addresses."""
        return self._tcp.sockets

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the server belongs to."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        return bool(self._tcp.is_serving())

    async def start_serving(self) -> None:
        """Begin to accept connections; later calls do nothing. Cancelling it leaves a server that serves TCP.

        :raises OSError: RDMA cannot listen, and TCP is excluded
        """
        if not self._is_offered:
            self._prepare()
        await self._tcp.start_serving()
        if self.is_serving():
            self._alive.add(self)
        if not self._is_offered:
            self._is_offered = True
            await self._offer()

    def close(self) -> None:
        """Stop listening. Connections live on."""
        self._is_closed = True
        self._alive.discard(self)
        for task in self._tasks:
            task.cancel()
        for heir in self._heirs:
            heir.close()
        for server in self._rdma:
            server.close()
        self._tcp.close()
        if self._serving_forever is not None and not self._serving_forever.done():
            self._serving_forever.cancel()

    def close_clients(self) -> None:
        """Call close() on every connection that was accepted; before Python 3.13, on those by RDMA."""
        for server in self._rdma:
            server.close_clients()
        if hasattr(self._tcp, "close_clients"):
            self._tcp.close_clients()

    def abort_clients(self) -> None:
        """Call abort() on every connection that was accepted; before Python 3.13, on those by RDMA."""
        for server in self._rdma:
            server.abort_clients()
        if hasattr(self._tcp, "abort_clients"):
            self._tcp.abort_clients()

    async def wait_closed(self) -> None:
        """Wait as the loop's own server does; since Python 3.12 until all connections have ended.

        Cancelling it only ends the wait.
        """
        await self._tcp.wait_closed()
        if isinstance(self._tcp, asyncio.AbstractServer) and _WAITS_FOR_CONNECTIONS:
            for server in self._rdma:
                await server.wait_closed()

    async def serve_forever(self) -> None:
        """Accept connections until it is cancelled; then close the server and its connections.

        Python 3.13 closes connections by TCP, too.

        :raises RuntimeError: the server is closed, or this method is already being awaited
        """
        if self._serving_forever is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        if not self.sockets:
            raise RuntimeError(f"server {self!r} is closed")
        self._serving_forever = forever = self._loop.create_future()
        try:
            await self.start_serving()
            await forever
        except asyncio.CancelledError:
            try:
                self.close()
                self.close_clients()
                await self.wait_closed()
            finally:
                raise
        finally:
            self._serving_forever = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tcp"], name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={self.sockets!r} rdma={self._rdma!r}>"

    # -- RDMA ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Do what takes long and needs no TCP listener: clients who find that without a door take TCP."""
        if any(not (why_few_descriptors() or _why_tcp_alone(tcp)) for tcp, _ in self._offerable()):
            with contextlib.suppress(OSError):  # which _join() will meet again
                loading.load(serves=True)

    def _offerable(self) -> list[tuple[Any, SockAddr]]:
        found = [(tcp, cast(SockAddr, tcp.getsockname())) for tcp in self.sockets if tcp.family in INTERNET]
        return [each for each in found if not self._settings.patterns.exclude(*each[1][:2])]

    async def _offer(self) -> None:
        """Listen for RDMA beside each TCP listener."""
        for tcp, address in self._offerable():
            if why := why_few_descriptors() or _why_tcp_alone(tcp):
                if self._settings.excludes_tcp():
                    self.close()
                    raise OSError(errno.EOPNOTSUPP, f"no RDMA on {address[0]} port {address[1]}: {why}")
                logger.info("the server on %s port %d serves TCP only: %s", *address[:2], why)
                self._doors[address] = str(why)
                continue
            try:
                await self._offer_at(address, _takes_both_families(tcp), tcp.fileno())
            except OSError:
                self.close()
                raise

    async def _offer_at(self, address: SockAddr, takes_both: bool, descriptor: int) -> None:
        """Listen for RDMA beside one TCP listener; or wait until the process ends that does.

        :param descriptor: that TCP listener
        :raises OSError: it is not possible, and TCP is excluded
        """
        failure: OSError | None = None
        if (beside := self._beside.pop(address, None)) is not None:
            beside.close()
        for _ in range(_TRIES):
            if self._is_closed:
                return
            try:
                await self._join(address, takes_both, descriptor)
                return
            except OSError as exc:
                failure = exc
                if self._is_closed:
                    return
                if exc.errno != errno.EADDRINUSE:
                    break
                heir = self._waits_for_owner(address, takes_both, descriptor)
                if heir is not None:
                    await self._register(address, takes_both, descriptor, heir)
                    return
                # A worker beside us may be about to open its door: until it listens, nobody sees whose it is.
                await pause(self._loop, _TRY_AGAIN_S)
        assert failure is not None
        if self._settings.excludes_tcp():
            raise failure
        why = failure.strerror or failure
        logger.warning("the server on %s port %d serves TCP only: %s", address[0], address[1], why)
        self._doors[address] = str(why)

    def _waits_for_owner(self, address: SockAddr, takes_both: bool, descriptor: int) -> Heir | None:
        """If another process of this user serves RDMA there, a worker beside us: its heir, which we are."""
        try:
            pid = owner(address[0], address[1])
        except OSError as exc:  # there are no descriptors left
            logger.debug("who serves RDMA on %s port %d could not be asked: %s", *address[:2], exc)
            return None
        if pid is None or pid == os.getpid():
            return None

        def inherit() -> None:
            self._heirs.remove(heir)
            self._begin(self._offer_at(address, takes_both, descriptor), "offer RDMA after another worker")

        try:
            heir = Heir(self._loop, pid, inherit)
        except OSError as exc:
            logger.debug("process %d cannot be waited for: %s", pid, exc)
            return None
        self._heirs.append(heir)
        self._doors[address] = heir
        logger.info(
            "the server on %s port %d serves TCP; process %d serves RDMA there until it ends, and then this one",
            *address[:2],
            pid,
        )
        return heir

    async def _register(self, address: SockAddr, takes_both: bool, descriptor: int, heir: Heir) -> None:
        """Listen at a port of our own, and have the process that serves RDMA send us clients there.

        For want of descriptors or memory, a task does so later.

        :param heir: that process's; when it ends meanwhile, its place is already being taken
        """
        from rdmanet.stream.addresses import libraries_for

        server = self._make_server()
        reserved = failure = None
        try:
            by: Callable[[Library], bool] | None = workers.is_dealt
            port = 0
            if workers.are_dealt_at_the_door(libraries_for(address, None)):
                reserved = workers.reserve(address[0], takes_both)
                by, port = None, reserved.getsockname()[1]
            for place in _places(address, takes_both):
                at = cast(SockAddr, (place[0], port, *place[2:]))
                failure = await self._listen(server, at, by) or failure
                if server.sockets:
                    port = server.sockets[0].getsockname()[1]
            failure = server._serve_where_possible() or failure
            if not server._listeners:
                raise failure or OSError(errno.ENODEV, "no device has this address")
            if heir.has_ended:
                raise ProcessLookupError(errno.ESRCH, "the process that serves RDMA has ended")
            registration = workers.Registration(
                self._loop, address[0], address[1], descriptor, port, reserved
            )
        except BaseException as exc:
            server.close()
            if reserved is not None:
                reserved.close()
            if not isinstance(exc, OSError):
                raise
            if not kernel.lacks_resources(exc):
                logger.debug("no RDMA client is sent to process %d: %s", os.getpid(), exc)
                return
            log_rate.warn(
                logger,
                "worker",
                "the server on %s port %d registers later as a worker: %s",
                *address[:2],
                exc,
            )
            self._begin(self._register_later(address, takes_both, descriptor, heir), "register as a worker")
            return
        server.on_close = registration.close
        self._beside[address] = server
        self._doors[address] = heir, registration
        self._rdma.append(server)
        if self._is_closed:  # meanwhile
            server.close()

    async def _register_later(self, address: SockAddr, takes_both: bool, descriptor: int, heir: Heir) -> None:
        await pause(self._loop, REST_S)
        if not heir.has_ended:
            await self._register(address, takes_both, descriptor, heir)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do this until the server is closed."""
        if self._is_closed:
            work.close()
            return
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, address: SockAddr, takes_both: bool, descriptor: int) -> None:
        """Listen for RDMA on the address of one TCP listener, and open its door."""
        loading.load(serves=True)
        from rdmanet.stream.addresses import libraries_for

        are_dealt_here = workers.are_dealt_at_the_door(libraries_for(address, None))
        register = workers.Register(self._loop, address[0], address[1], descriptor)
        server = None

        def answer() -> Answer:
            busy = register.busy()
            place = register.turn() if are_dealt_here else None
            if place is None:
                return Answer(address[1], descriptor, register.lone_inode, busy)
            return Answer(place.port, descriptor, place.inode, busy)

        try:
            # After the register, so that who finds the door finds the register.
            door = Door(address[0], address[1], answer, takes_both)
        except BaseException:
            register.close()
            raise

        def on_close() -> None:
            door.close()
            register.close()

        try:
            server = self._make_server()
            server.on_close = on_close
            failure: OSError | None = None
            for place in _places(address, takes_both):
                failure = await self._listen(server, place) or failure
            server.elsewhere = register.elsewhere
            left_out = server._serve_where_possible()
            failure = left_out or failure
            if not server._listeners:
                raise failure or OSError(errno.ENODEV, "no device has this address")
            if left_out is not None and all(
                context.library.embedded_device for context, _ in server._listeners
            ):
                why = left_out.strerror or left_out
                logger.info("the server on %s port %d serves RDMA on this host only: %s", *address[:2], why)
            if self._is_closed:  # meanwhile
                server.close()
                return
            door.open(self._loop)
            self._doors[address] = register
        except BaseException:
            if server is not None:
                server.close()
            on_close()
            raise
        self._rdma.append(server)

    async def _listen(
        self, server: RdmaServer, place: SockAddr, by: Callable[[Library], bool] | None = None
    ) -> OSError | None:
        """Listen there by all libraries that can, or those that `by` chooses. Returns why one of them cannot."""
        from rdmanet.stream.addresses import libraries_for
        from rdmanet.stream.loop_context import loop_context_for

        failure: OSError | None = None
        for library in libraries_for(place, None):
            if by is not None and not by(library):
                continue
            try:
                server._add_listener(await loop_context_for(self._loop, library), place)
            except OSError as exc:
                failure = exc
                if exc.errno not in _NOT_ITS_ADDRESS:
                    logger.debug("no RDMA listener on %s by %s: %s", place, library.name, exc)
        return failure


def _places(address: SockAddr, takes_both: bool) -> list[SockAddr]:
    """Where RDMA listens beside a TCP listener."""
    return [address, ("0.0.0.0", address[1])] if takes_both else [address]


def _why_tcp_alone(tcp: Any) -> str:
    """Which option of a TCP listener would not be kept if RDMA listened beside it; "" if none is set."""
    name = tcp.getsockname()
    is_of_zone = len(name) == 4 and name[3]  # which binds it to an interface, too
    interface = tcp.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE_BYTES).rstrip(b"\0")
    if interface and not is_of_zone:
        return f"its TCP listener takes only what comes by {interface.decode(errors='replace')} (SO_BINDTODEVICE)"
    if _has_filter(tcp.fileno()):
        return "its TCP listener has a packet filter (SO_ATTACH_FILTER, SO_ATTACH_BPF)"
    options = [(socket.IPPROTO_IP, workers.IP_MINTTL)]  # also where IPv6 takes IPv4
    if tcp.family == socket.AF_INET6:
        options.append((socket.IPPROTO_IPV6, workers.IPV6_MINHOPCOUNT))
    if any(tcp.getsockopt(*option) for option in options):
        return "its TCP listener takes only what comes by few hops (IP_MINTTL, IPV6_MINHOPCOUNT)"
    return ""


def _has_filter(fd: int) -> bool:
    try:
        import ctypes  # here, for clients do without; servers import it once more (loading.py)
    except ImportError:
        return False  # and there is no RDMA for that
    # The length is that of the filter, in instructions, and 0 asks for it; socket.getsockopt() cannot say that.
    length = ctypes.c_uint32(0)
    failed = ctypes.CDLL(None).getsockopt(fd, socket.SOL_SOCKET, _SO_GET_FILTER, None, ctypes.byref(length))
    return bool(failed or length.value)  # it fails where the filter is no list of instructions, but a program


def _takes_both_families(tcp: Any) -> bool:
    """Whether a listener on :: accepts IPv4, too."""
    return (
        tcp.family == socket.AF_INET6
        and tcp.getsockname()[0] == "::"
        and not tcp.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    )
