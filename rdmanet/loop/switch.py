"""What stands behind the loop's methods: what one loop has for its connections and servers.

Each of the loop's methods (mixin.py) has its counterpart here, which decides whether the call is ours. What is ours is
in connecting.py, serving.py and standins.py. Modules that load the device are imported there, with the first connection
or server that may need them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import socket
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rdmanet.base import watching
from rdmanet.base.late_import import imported
from rdmanet.loop import annotation, connecting, kernel
from rdmanet.loop.accepting import Accepting
from rdmanet.loop.base import Base
from rdmanet.loop.choice import Chooser
from rdmanet.loop.connecting import Connected, Factory
from rdmanet.loop.mixin import RdmaUvLoop
from rdmanet.loop.serving import REASON, DualServer
from rdmanet.loop.settings import Settings
from rdmanet.loop.standins import Standins
from rdmanet.stream import in_the_clear

if TYPE_CHECKING:
    from rdmanet.base.accounts import ConnectionInfo, ServerInfo
    from rdmanet.base.call_accounts import CallsInfo

# Keywords of create_connection() that do not matter to RDMA. With others, the call is the base's.
_OF_TCP = {"happy_eyeballs_delay", "interleave"} | ({"all_errors"} if sys.version_info >= (3, 12) else set())
_OF_TLS = _OF_TCP | {"server_hostname", "ssl_handshake_timeout", "ssl_shutdown_timeout"}
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Switch:
    """What one loop has for all this.

    :ivar base: the methods that are replaced
    :ivar begin_call: of a factory and facts, what takes the factory's place in a call of the base's
    :ivar servers: those that serve; they live on if the program drops them, as the loop's own do
    """

    def __init__(self, loop: Any, above: Any, settings: Settings) -> None:
        self.base = Base(loop, above)
        self.settings = settings
        self.chooser = Chooser(settings.patterns, settings.excludes_tcp)
        self.standins = Standins(self.base, settings, self.chooser)
        self.servers: set[DualServer] = set()
        self.accepting = Accepting(self.base, settings, self.standins, self.rdma_server)
        self._ushers = isinstance(loop, RdmaUvLoop)
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        usher = functools.partial(annotation.Usher, self._made)
        self.begin_call: Any = usher if self._ushers else annotation.Making
        self._watched = watching.Watched(self, watching.Readers(loop, self._read, loop.remove_reader))

    def change(self, settings: Settings) -> None:
        """Have these options from now on. Servers keep theirs, and sockets the connections that they stand for."""
        self.settings = self.standins.settings = self.accepting.settings = settings
        self.chooser.change(settings.patterns, settings.excludes_tcp)

    in_the_clear = in_the_clear  # for start_tls(), and imported now, as all that a loop's methods take

    # What only asyncio's loop needs, for the call of its own create_connection() that is under way.
    is_connecting = staticmethod(annotation.is_connecting)
    facts = staticmethod(annotation.facts)

    def close(self) -> None:
        """Give back what is kept for the next choice, and be watched no more: the loop is closed."""
        self.base.close()
        self.chooser.close()
        self._watched.close(loop_lives=False)

    def _read(self, fd: int, callback: Callable[[], object]) -> None:
        # In an empty context: the first connection is not the only one. The base's, as ours is for sockets of programs.
        contextvars.Context().run(self.base.add_reader, fd, callback)

    # -- who watches -------------------------------------------------------------------------------------

    modules: Sequence[str] = ("rdmanet.loop.tcp_infos",)

    def headline(self) -> dict[str, Any]:
        """What is to be known besides."""
        return {"loop": id(self.base.loop), "library": "", "engines": []}

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        """The connections by TCP as they are now; those by RDMA are the loop context's."""
        found: Iterator[ConnectionInfo] = imported(_tcp_infos).tcp_infos(self.base.loop, self._made)
        return found

    def transports(self) -> Iterator[Any]:
        """Their transports."""
        found: Iterator[Any] = imported(_tcp_infos).tcp_transports(self.base.loop, self._made)
        return found

    def connection_rows(self) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        """The same as rows, with the names of their counters."""
        found: Iterator[tuple[list[str], tuple[Any, ...]]] = imported(_tcp_infos).tcp_rows(
            self.base.loop, self._made
        )
        return found

    def tcp_sides(self) -> Iterator[str]:
        """The side of each of these connections."""
        found: Iterator[str] = imported(_tcp_infos).tcp_sides(self.base.loop, self._made)
        return found

    def calls_infos(self) -> Iterator[CallsInfo]:
        """What `rdmanet.rpc` has under way on this loop."""
        return watching.calls_of(self.base.loop)

    def server_infos(self) -> Iterator[ServerInfo]:
        """The servers that serve both. Who looks counts those by TCP, which are listed one by one."""
        return (server.info_but_tcp() for server in list(self.servers))

    # -- the loop's methods --------------------------------------------------------------------------------

    def create_connection(
        self,
        protocol_factory: Factory,
        host: str | bytes | None,
        port: int | str | None,
        ssl: Any,
        family: int,
        proto: int,
        flags: int,
        sock: socket.socket | None,
        local_addr: Any,
        kwds: dict[str, Any],
    ) -> Coroutine[Any, Any, Connected]:
        """By RDMA if the peer offers it, else by TCP. It is to be awaited at once."""
        if self.standins.transports:
            self.standins.sweep()
        is_alone = host is None and port is None  # else the base says what is wrong
        if sock is not None and is_alone and (kept := self.standins.take(sock)) is not None:
            from rdmanet.stream.tls import Tls

            sock.close()
            tls = functools.partial(Tls.of_client, ssl, None, kwds.get("server_hostname"))
            return self.adopt(kept, protocol_factory, tls, kwds)
        strange = kwds and _strange(kwds, _OF_TLS if ssl else _OF_TCP)
        reason = (
            self.standins.reason(sock) if sock is not None
            else "the program chose the local address" if local_addr is not None
            else "the program asked for a protocol that is not TCP" if proto not in (0, socket.IPPROTO_TCP)
            else "the call has arguments of TCP's" if strange or not host or port is None
            else ""
        )  # fmt: skip
        if not reason and host is not None and port is not None:
            host = host.decode("ascii") if isinstance(host, bytes) else host
            wanted = connecting.Wanted(protocol_factory, host, port, family, proto, flags, ssl, kwds)
            return connecting.create_connection(self.base, self.settings, self.chooser, self.by_tcp, wanted)
        if sock is None or sock.family in _INTERNET:
            place = (host, port)
            if sock is not None:
                with contextlib.suppress(OSError):  # it is not connected
                    place = sock.getpeername()[:2]
            self.chooser.refuse_tcp(*place, reason)
        return self.by_tcp(
            annotation.of_client(reason), protocol_factory, host, port, ssl=ssl, family=family, proto=proto,
            flags=flags, sock=sock, local_addr=local_addr, **kwds,
        )  # fmt: skip

    async def create_server(
        self,
        protocol_factory: Factory,
        host: Any,
        port: int | str | None,
        ssl: Any,
        start_serving: bool,
        kwds: dict[str, Any],
    ) -> DualServer:
        """A server by TCP, and by RDMA on the same port."""
        self.accepting.sweep()
        tcp = await self.serve_tcp(protocol_factory, host, port, ssl=ssl, start_serving=False, **kwds)
        make_server = self.rdma_server(
            protocol_factory,
            kwds.get("backlog", 100),
            ssl,
            kwds.get("ssl_handshake_timeout"),
            kwds.get("ssl_shutdown_timeout"),
        )
        server = DualServer(
            tcp, self.base.loop, self.settings, make_server, self.servers, self.connection_infos
        )
        if start_serving:
            try:
                await server.start_serving()
            except BaseException:
                server.close()
                raise
        return server

    async def connect_accepted_socket(
        self, protocol_factory: Factory, sock: socket.socket, ssl: Any, kwds: dict[str, Any]
    ) -> Connected:
        """Of a socket that stands for an RDMA connection, that connection; else a transport of TCP's."""
        if (kept := self.standins.take(sock)) is not None:
            from rdmanet.stream.tls import Tls

            sock.close()
            return await self.adopt(kept, protocol_factory, functools.partial(Tls.of_server, ssl), kwds)
        if sock.family not in _INTERNET:
            return await self.base.connect_accepted_socket(protocol_factory, sock, ssl=ssl, **kwds)  # type: ignore[no-any-return]
        self.accepting.becomes_transport(sock)
        call = self.begin_call(protocol_factory, annotation.OF_SERVER)
        try:
            # With ssl, uvloop returns its own protocol instead of the program's.
            made = await self.base.connect_accepted_socket(call, sock, ssl=ssl, **kwds)
        except BaseException:
            call.end()
            raise
        return call.connected(made)  # type: ignore[no-any-return]

    async def sock_connect(self, sock: socket.socket, address: Any) -> bool:
        """Connect by RDMA, or by TCP if that is faster. False: the base is to connect the socket.

        :raises ConnectionRefusedError: RDMA does not reach the peer, and TCP is excluded
        """
        if sock.family not in _INTERNET or sock.type != socket.SOCK_STREAM:
            return False
        if _is_numeric(address):
            return await self.standins.connect(sock, address)
        if isinstance(address, tuple) and len(address) >= 2:  # else the base says what is wrong with it
            host, port = address[:2]
            self.chooser.refuse_tcp(
                host, port, "sock_connect() takes RDMA only to an IP address and a number"
            )
        return False

    # -- what they are made of -----------------------------------------------------------------------------

    async def by_tcp(self, facts: dict[str, str], factory: Factory, *args: Any, **kwds: Any) -> Connected:
        """The base's create_connection(); its transport says why it is TCP's.

        :param facts: what annotation.of_client() says
        """
        sock = kwds.get("sock")
        if self._ushers and sock is not None and sock.family not in _INTERNET:
            return await self.base.create_connection(factory, *args, **kwds)  # type: ignore[no-any-return]
        call = self.begin_call(factory, facts)
        try:
            made = await self.base.create_connection(call, *args, **kwds)
        except BaseException:
            call.end()
            raise
        return call.connected(made)  # type: ignore[no-any-return]

    async def adopt(
        self, transport: Any, factory: Factory, make_tls: Callable[..., Any], kwds: dict[str, Any]
    ) -> Connected:
        """Give a connection, for which a socket stood, its protocol."""
        from rdmanet.stream.tls import Layer
        from rdmanet.streams.reader_writer import with_compiled_reader

        waiting = transport.get_protocol()
        try:
            tls = make_tls(kwds.get("ssl_handshake_timeout"), kwds.get("ssl_shutdown_timeout"))

            def make() -> Any:
                return with_compiled_reader(factory())

            layer = None if tls is None else Layer(tls, self.base.loop, make)
            protocol = make() if layer is None else layer.make()
            waiting.hand_over(transport, protocol)
        except BaseException:
            transport.abort()
            raise
        return (transport, protocol) if layer is None else await layer.done(transport)

    async def serve_tcp(self, factory: Factory, *args: Any, **kwds: Any) -> Any:
        """The base's create_server()."""
        if self._ushers:
            factory = annotation.ushering(self._made, factory, annotation.OF_SERVER)
        return await self.base.create_server(factory, *args, **kwds)

    def rdma_server(
        self,
        factory: Factory,
        backlog: int,
        ssl: Any = None,
        handshake_s: float | None = None,
        shutdown_s: float | None = None,
    ) -> Callable[[], Any]:
        """Makes RDMA servers of this factory; called in the context that the connections are to have."""
        settings = self.settings  # they may change before it is called

        def make() -> Any:
            from rdmanet.stream.tls import Tls
            from rdmanet.streams.reader_writer import with_compiled_reader
            from rdmanet.transport import server_of

            tls = Tls.of_server(ssl, handshake_s, shutdown_s)
            return server_of(
                self.base.loop,
                lambda: with_compiled_reader(factory()),
                settings.config(REASON),
                backlog,
                tls,
            )

        return make


def _tcp_infos() -> Any:
    from rdmanet.loop import tcp_infos

    return tcp_infos


def _strange(kwds: dict[str, Any], known: set[str]) -> bool:
    return any(name not in known and value is not None for name, value in kwds.items())


def _is_numeric(address: Any) -> bool:
    """Whether this is a socket's address with an IP address in it, not a name."""
    try:
        kernel.packed(address[0])
        return isinstance(address[1], int)
    except (OSError, TypeError, ValueError, IndexError, AttributeError):
        return False
