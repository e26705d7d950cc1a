"""The event loop: what it does differently from its base, method by method.

``RdmaLoop`` goes before a loop's class, asyncio's or uvloop's. Each method asks the loop's `Switch` (switch.py), and
calls the base's if the call is not ours, with the same arguments. The switch and all that it needs are imported with
the first call: a program may have no network, and is not to pay for one. So this module imports little. If the program
cannot read these modules by then, the loop has a `TcpAlone` (tcp_alone.py) for a switch.

A method that a program, its tests or a library has replaced is called as the base calls it. The methods are
coroutine functions where the base's are, which mock's `autospec` looks at. They have the base's signatures, by which
libraries know what a loop takes, and its names of arguments. Each call looks the base's method up anew, so one that is
replaced in its class later counts. What the base calls of the loop's (asyncio's `create_connection`: `getaddrinfo` and
`sock_connect`; uvloop's: none), ours calls of the loop's, too. And the class says the base's module, by which libraries
tell uvloop's loops.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import types

from rdmanet.loop.tcp_alone import OUT_OF_REACH, TcpAlone, may_work_again

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any

    from rdmanet.loop.connecting import Connected, Factory
    from rdmanet.loop.settings import Settings
    from rdmanet.loop.switch import Switch


_INTERNET = (socket.AF_INET.value, socket.AF_INET6.value)
_family: Any = vars(socket.SocketType)["family"].__get__
"""A socket's family as a number. Its attribute makes an enum of that, in four calls."""


class RdmaLoop:
    """A loop whose connections take RDMA where both sides can. It is the first base of a class beside a loop's."""

    _rdmanet_settings: Settings

    _rdmanet_switch: Switch | TcpAlone | None = None

    @property
    def _rdmanet(self) -> Switch | TcpAlone:
        """What this loop has for connections and servers; made when it is first needed.

        :raises OSError: no descriptor or memory is left for that
        """
        if self._rdmanet_switch is None:
            settings = self._rdmanet_settings
            # Not by way of __dict__, which would make each attribute of asyncio's loop slower.
            try:
                from rdmanet.loop.switch import Switch
            except (ImportError, OSError) as exc:
                if may_work_again(exc):
                    raise
                self._rdmanet_switch = TcpAlone(super(), settings, exc)
            else:
                self._rdmanet_switch = Switch(self, super(), settings)
        return self._rdmanet_switch

    async def create_connection(
        self,
        protocol_factory: Factory,
        host: str | bytes | None = None,
        port: int | str | None = None,
        *,
        ssl: Any = None,
        family: int = 0,
        proto: int = 0,
        flags: int = 0,
        sock: socket.socket | None = None,
        local_addr: Any = None,
        **kwds: Any,
    ) -> Connected:
        """asyncio's create_connection(): by RDMA if the peer offers it, else by TCP."""
        switch = self._rdmanet_switch or self._rdmanet
        # Most calls are to peers that TCP is known to reach, so these are made here, with the least that it takes.
        has_more = family or proto or flags or kwds or switch.standins.transports
        if ssl is None and sock is None and local_addr is None and not has_more:
            facts = switch.chooser.plain(host, port)
            if facts is not None:
                call = switch.begin_call(protocol_factory, facts)
                try:
                    made: Connected = await super().create_connection(call, host, port)  # type: ignore[misc]
                except BaseException:
                    call.end()
                    raise
                return call.connected(made)  # type: ignore[no-any-return]
        return await switch.create_connection(
            protocol_factory, host, port, ssl, family, proto, flags, sock, local_addr, kwds
        )

    async def create_server(
        self,
        protocol_factory: Factory,
        host: Any = None,
        port: int | str | None = None,
        *,
        ssl: Any = None,
        start_serving: bool = True,
        **kwds: Any,
    ) -> Any:
        """asyncio's create_server(), which serves RDMA on the same port."""
        return await self._rdmanet.create_server(protocol_factory, host, port, ssl, start_serving, kwds)

    async def connect_accepted_socket(
        self, protocol_factory: Factory, sock: socket.socket, *, ssl: Any = None, **kwds: Any
    ) -> Connected:
        """asyncio's connect_accepted_socket(), also for sockets that sock_accept() gave for clients by RDMA."""
        return await self._rdmanet.connect_accepted_socket(protocol_factory, sock, ssl, kwds)

    def close(self) -> None:
        """asyncio's close(), which ends what RDMA has left on the loop, even if nobody has shut it down before."""
        module = sys.modules.get("rdmanet.stream.loop_context")
        loop: Any = self
        if module is not None and not loop.is_running():
            try:
                if asyncio._get_running_loop() is None:
                    module.run_until_sent(loop)
            finally:
                module.end_loop_contexts(loop)
        super().close()  # type: ignore[misc]
        self._forget_switch()

    def _forget_switch(self) -> None:
        switch, self._rdmanet_switch = self._rdmanet_switch, None
        if switch is not None:
            switch.close()

    # -- programs that connect a socket first --------------------------------------------------------------

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """asyncio's sock_connect(): by RDMA if the peer offers it. Then only create_connection() can use the socket."""
        switch = self._rdmanet_switch or self._rdmanet
        is_plain = switch.is_connecting() or switch.standins.is_plain(sock, address)
        if is_plain or not await switch.sock_connect(sock, address):
            await super().sock_connect(sock, address)  # type: ignore[misc]

    async def sock_accept(self, sock: socket.socket) -> Any:
        """asyncio's sock_accept(): also of RDMA, once connect_accepted_socket() has had a client of this listener."""
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            return await self._rdmanet.accepting.accept(sock)
        return await super().sock_accept(sock)  # type: ignore[misc]

    async def sock_sendall(self, sock: socket.socket, data: Any) -> None:
        """asyncio's sock_sendall()."""
        await self._rdmanet.standins.use(sock)
        await super().sock_sendall(sock, data)  # type: ignore[misc]

    async def sock_recv(self, sock: socket.socket, n: int) -> bytes:
        """asyncio's sock_recv()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_recv(sock, n)  # type: ignore[misc,no-any-return]

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        """asyncio's sock_recv_into()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_recv_into(sock, buf)  # type: ignore[misc,no-any-return]

    async def sock_recvfrom(self, sock: socket.socket, bufsize: int) -> Any:
        """asyncio's sock_recvfrom()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_recvfrom(sock, bufsize)  # type: ignore[misc]

    async def sock_recvfrom_into(self, sock: socket.socket, buf: Any, nbytes: int = 0) -> Any:
        """asyncio's sock_recvfrom_into()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_recvfrom_into(sock, buf, nbytes)  # type: ignore[misc]

    async def sock_sendto(self, sock: socket.socket, data: Any, address: Any) -> Any:
        """asyncio's sock_sendto()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_sendto(sock, data, address)  # type: ignore[misc]

    async def sock_sendfile(self, sock: socket.socket, file: Any, *args: Any, **kwds: Any) -> int:
        """asyncio's sock_sendfile()."""
        await self._rdmanet.standins.use(sock)
        return await super().sock_sendfile(sock, file, *args, **kwds)  # type: ignore[misc,no-any-return]

    def _leave_to_program(self, fd: Any) -> None:
        switch = self._rdmanet_switch
        if switch is not None and switch.standins.transports:
            switch.standins.use_now(fd)

    # -- what asyncio's does only for its own transports ---------------------------------------------------

    async def sendfile(
        self,
        transport: Any,
        file: IO[bytes],
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool = True,
    ) -> int:
        """asyncio's sendfile()."""
        if _is_ours(transport):
            from rdmanet.streams.files import sendfile

            return await sendfile(transport, file, offset, count, fallback=fallback)
        return await self._sendfile_of_base(transport, file, offset, count, fallback)

    async def _sendfile_of_base(
        self, transport: Any, file: IO[bytes], offset: int, count: int | None, fallback: bool
    ) -> int:
        sent: int = await super().sendfile(transport, file, offset, count, fallback=fallback)  # type: ignore[misc]
        return sent

    async def start_tls(self, transport: Any, protocol: Any, sslcontext: Any, **kwds: Any) -> Any:
        """asyncio's start_tls()."""
        in_the_clear = self._rdmanet.in_the_clear
        if in_the_clear is None:
            return await super().start_tls(transport, protocol, sslcontext, **kwds)  # type: ignore[misc]
        if _is_ours(transport) or isinstance(transport, asyncio.sslproto._SSLProtocolTransport):
            from rdmanet.stream.tls import start_tls

            try:
                return await start_tls(transport, protocol, sslcontext, **kwds)
            except BaseException as exc:
                if isinstance(protocol, asyncio.StreamReaderProtocol):
                    in_the_clear.tell_of_failure(transport, protocol, exc)
                raise
        inner = _original(transport)
        handing = None
        if hasattr(inner, "get_protocol"):  # else the base says what is wrong with it
            # The base pauses reading and sets the protocol at once, and has the loop go on after this.
            loop: Any = self
            handing = loop.call_soon(in_the_clear.hand_over_by, inner, inner.get_protocol(), protocol)
        try:
            over = await super().start_tls(inner, protocol, sslcontext, **kwds)  # type: ignore[misc]
        except BaseException:
            if handing is not None:
                handing.cancel()
            raise
        return over if inner is transport else type(transport)(over, transport._facts)


class RdmaSelectorLoop(RdmaLoop):
    """Over asyncio's own loop, whose transports are made by methods."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        """asyncio's add_reader()."""
        self._leave_to_program(fd)
        return super().add_reader(fd, callback, *args)  # type: ignore[misc]

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        """asyncio's add_writer()."""
        self._leave_to_program(fd)
        return super().add_writer(fd, callback, *args)  # type: ignore[misc]

    def _make_socket_transport(
        self, sock: Any, *args: Any, extra: Any = None, server: Any = None, **kwds: Any
    ) -> Any:
        extra = self._annotated(sock, extra, server)
        return super()._make_socket_transport(sock, *args, extra=extra, server=server, **kwds)  # type: ignore[misc]

    def _make_ssl_transport(
        self, rawsock: Any, *args: Any, extra: Any = None, server: Any = None, **kwds: Any
    ) -> Any:
        extra = self._annotated(rawsock, extra, server)
        made = super()._make_ssl_transport(rawsock, *args, extra=extra, server=server, **kwds)  # type: ignore[misc]
        return made

    def _annotated(self, sock: Any, extra: Any, server: Any) -> Any:
        """What a transport of this socket is to know besides."""
        try:
            family = _family(sock)
        except TypeError:  # it only looks like a socket
            family = sock.family
        if family not in _INTERNET:
            return extra
        switch = self._rdmanet_switch or self._rdmanet
        return {**(extra or {}), **switch.facts(server)}


class RdmaUvLoop(RdmaLoop):
    """Over uvloop's, which has no sendfile()."""

    def add_reader(self, fileobj: Any, callback: Callable[..., Any], *args: Any) -> Any:
        """uvloop's add_reader()."""
        self._leave_to_program(fileobj)
        return super().add_reader(fileobj, callback, *args)  # type: ignore[misc]

    def add_writer(self, fileobj: Any, callback: Callable[..., Any], *args: Any) -> Any:
        """uvloop's add_writer()."""
        self._leave_to_program(fileobj)
        return super().add_writer(fileobj, callback, *args)  # type: ignore[misc]

    async def _sendfile_of_base(
        self, transport: Any, file: IO[bytes], offset: int, count: int | None, fallback: bool
    ) -> int:
        try:
            from rdmanet.loop.files import sendfile
        except (ImportError, OSError) as exc:
            raise asyncio.SendfileNotAvailableError(OUT_OF_REACH.format(exc)) from exc
        return await sendfile(transport, file, offset, count, fallback)


def switch_on(loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
    """Give a loop that exists our methods, and these options from now on. One that has them keeps all that it has.

    :raises TypeError: it is neither of asyncio's selector loops nor of uvloop's
    """
    changed: Any = loop
    if not isinstance(loop, RdmaLoop):
        kind: Any = type(loop)
        try:
            changed.__class__ = class_over(kind)
        except TypeError as exc:
            raise TypeError(f"{loop!r} cannot be switched to RDMA: {exc}") from None
    changed._rdmanet_settings = settings
    switch: Switch | None = changed._rdmanet_switch
    if switch is not None:
        switch.change(settings)


@functools.cache
def class_over(base: Any) -> Any:
    """The class of loops of this class that are switched."""
    uvloop = sys.modules.get("uvloop")
    mixin: type[RdmaLoop]
    if issubclass(base, RdmaLoop):
        return base
    if uvloop is not None and issubclass(base, uvloop.Loop):
        mixin = RdmaUvLoop
    elif issubclass(base, asyncio.SelectorEventLoop):
        mixin = RdmaSelectorLoop
    else:
        raise TypeError("it is neither one of asyncio's selector loops nor one of uvloop's")
    members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    for name, method in {**vars(RdmaLoop), **vars(mixin)}.items():
        if isinstance(method, types.FunctionType) and hasattr(base, name):
            members[name] = _as_declared(method, getattr(base, name))
    return type(f"Rdma{base.__name__.lstrip('_')}", (mixin, base), members)


def _as_declared(method: types.FunctionType, by_base: Any) -> Any:
    """The same method, as this base has it to whoever looks at its signature, name and text."""
    copy = types.FunctionType(
        method.__code__, method.__globals__, None, method.__defaults__, method.__closure__
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return functools.update_wrapper(copy, by_base)


def _is_ours(transport: Any) -> bool:
    """Whether it is an RDMA transport. If the module is not loaded, there is none."""
    module = sys.modules.get("rdmanet.transport")
    return module is not None and isinstance(transport, module.RdmaTransport)


def _original(transport: Any) -> Any:
    """The transport that uvloop knows. If the module is not loaded, every transport is one."""
    module = sys.modules.get("rdmanet.loop.annotation")
    return transport if module is None else module.original(transport)
