"""``get_extra_info("fabric")`` of transports that are TCP's.

asyncio's loop makes its transports by a method that takes what get_extra_info() is to know besides. It is called in the
context of the call that makes the transport, which is why there is `making`. uvloop's transports cannot be given
anything, and their class cannot be derived from. So the program gets a stand-in there, which has the transport's own
write() as an attribute, so that a call of it costs what it cost. The stand-in must be what connection_made() gets, so
an `Usher` is the transport's first protocol, and makes way for the program's.

Each of the two is what the base calls for a protocol, so that there is one object to a connection and not three: most
connections of a program are by TCP, and each pays for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from typing import Any

from rdmanet.base.watching import opened_by_tcp

BY_CLIENT = "the client came by TCP"

OF_SERVER = {"fabric": "tcp", "fabric_reason": BY_CLIENT}
"""What get_extra_info() is to know of a TCP transport that was accepted."""


def of_client(reason: str) -> dict[str, str]:
    """What get_extra_info() is to know of a TCP transport that a client makes for this reason."""
    return {"fabric": "tcp", "fabric_reason": reason}


_METHODS = (
    "abort", "can_write_eof", "close", "get_protocol", "get_write_buffer_limits", "get_write_buffer_size",
    "is_closing", "is_reading", "pause_reading", "resume_reading", "set_protocol", "set_write_buffer_limits",
    "write_eof",
)  # fmt: skip


class AnnotatedTransport(asyncio.Transport):
    """A transport of uvloop's, with facts of ours."""

    __slots__ = ("__weakref__", "_facts", "_transport", "write", "writelines")

    def __init__(self, transport: asyncio.Transport, facts: dict[str, str]) -> None:
        self._transport = transport
        self._facts = facts
        self.write = transport.write  # type: ignore[method-assign]
        self.writelines = transport.writelines  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, by its name."""
        fact = self._facts.get(name)
        return self._transport.get_extra_info(name, default) if fact is None else fact

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def __repr__(self) -> str:
        return repr(self._transport)


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: AnnotatedTransport, *args: Any, **kwds: Any) -> Any:
        return getattr(self._transport, name)(*args, **kwds)

    call.__name__ = name
    return call


for _name in _METHODS:
    setattr(AnnotatedTransport, _name, _delegate(_name))


class Usher(asyncio.Protocol):
    """The first protocol of a transport of uvloop's, and the factory of it, which is called once.

    :ivar protocol: the program's
    :ivar transport: the program's; None before the connection is made
    """

    __slots__ = ("_factory", "_facts", "_made", "protocol", "transport")

    def __init__(
        self,
        made: weakref.WeakValueDictionary[int, AnnotatedTransport],
        factory: Callable[[], asyncio.BaseProtocol],
        facts: dict[str, str],
    ) -> None:
        """:param made: where the transport is remembered: uvloop does not tell which ones it has"""
        self._made = made
        self._factory = factory
        self._facts = facts
        self.transport: AnnotatedTransport | None = None

    def __call__(self) -> Usher:
        self.protocol = self._factory()
        return self

    def connection_made(self, transport: Any) -> None:
        opened_by_tcp["server" if self._facts is OF_SERVER else "client"] += 1
        self.transport = annotated = AnnotatedTransport(transport, self._facts)
        self._made[id(annotated)] = annotated
        transport.set_protocol(self.protocol)
        self.protocol.connection_made(annotated)

    def connected(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
        """The program's transport and protocol, when uvloop has made its own."""
        return self.transport or made[0], self.protocol

    def end(self) -> None:
        """The call has failed."""


def ushering(
    made: weakref.WeakValueDictionary[int, AnnotatedTransport],
    factory: Callable[[], asyncio.BaseProtocol],
    facts: dict[str, str],
) -> Callable[[], Usher]:
    """A factory for a server of uvloop's, whose transports are annotated."""
    return lambda: Usher(made, factory, facts)()


class Making:
    """A call of asyncio's own method that makes a transport, and the factory of its protocol.

    asyncio's create_connection() calls our sock_connect(), which must leave the socket to TCP. What the program's
    protocol starts has the same context, so `is_connecting` ends when that is made.

    :ivar facts: what get_extra_info() is to know
    """

    __slots__ = ("_factory", "_token", "facts", "is_connecting")

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], facts: dict[str, str]) -> None:
        """It begins. Whoever makes it calls `connected` or `end`."""
        self._factory = factory
        self.facts = facts
        self.is_connecting = True
        self._token = making.set(self)

    def __call__(self) -> asyncio.BaseProtocol:
        self.is_connecting = False
        return self._factory()

    def connected(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
        """The program's transport and protocol, when asyncio has made them."""
        self.end()
        return made

    def end(self) -> None:
        """The call is over."""
        self.is_connecting = False
        making.reset(self._token)


def nothing_to_make() -> asyncio.BaseProtocol:
    """The factory of a call that only connects a socket."""
    raise AssertionError("a call that connects a socket makes no protocol")


making: contextvars.ContextVar[Making | None] = contextvars.ContextVar("rdmanet_making", default=None)
"""The call that is under way."""


def is_connecting() -> bool:
    """Whether asyncio's create_connection() is at work in this context: its sockets are TCP's."""
    call = making.get()
    return call is not None and call.is_connecting


def facts(server: object) -> dict[str, str]:
    """What get_extra_info() is to know of a transport that asyncio makes in this context; it is counted.

    :param server: whose it is; None if it is of no server
    """
    opened_by_tcp["client" if server is None else "server"] += 1
    if server is not None:
        return OF_SERVER
    call = making.get()
    return of_client("") if call is None else call.facts


def original(transport: Any) -> Any:
    """The transport that uvloop knows."""
    return transport._transport if isinstance(transport, AnnotatedTransport) else transport
