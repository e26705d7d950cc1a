# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The application's protocol: how its methods are called, and what becomes of the exceptions they raise.

A connection calls its protocol from the event loop, where nobody awaits. So each method runs in the context that the
transport was created with, and an exception goes to the loop's exception handler: a CancelledError, too, which the
result of a future may raise, but what ends the program passes through. It is the same with asyncio's transports.
Whether an exception also ends the connection is not decided here.

Received bytes do not pass through here: _pyx/sink.pxi calls data_received() and buffer_updated().
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from typing import Any


class Callbacks:
    """Calls the methods of one connection's protocol.

    :ivar context: the context in which its methods run
    :ivar transport: what the protocol gets in connection_made(); None when the connection has been released
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        context: contextvars.Context,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._protocol: asyncio.BaseProtocol | None = None
        self._protocol_was: weakref.ref[asyncio.BaseProtocol] | None = None
        self.context = context
        self.transport: asyncio.Transport | None = transport
        self._loop = loop
        self._factory: Callable[[], asyncio.BaseProtocol] | None = factory

    @property
    def protocol(self) -> asyncio.BaseProtocol | None:
        """The current protocol; None until `make_protocol`, and when an ended connection's protocol is gone."""
        return self._protocol_was() if self._protocol_was is not None else self._protocol

    @protocol.setter
    def protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol, self._protocol_was = protocol, None

    def let_go(self) -> None:
        """The connection has been released: keep nothing alive for it.

        A protocol mostly has an attribute for its transport. If the transport kept the protocol, only the garbage
        collector would free the two.
        """
        self.transport = None
        try:
            self._protocol_was = weakref.ref(self._protocol)  # type: ignore[arg-type]
        except TypeError:  # there is none, or its class has __slots__ without __weakref__
            return
        self._protocol = None

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Call the factory. What it raises is the caller's, and so is the AttributeError if it makes no protocol."""
        factory, self._factory = self._factory, None  # it may hold what it makes
        assert factory is not None  # it is called once
        try:
            protocol = self.context.run(factory)
        except StopIteration as exc:
            raise RuntimeError(
                "the protocol factory raised StopIteration"
            ) from exc  # which no future carries
        protocol.connection_made  # noqa: B018
        self.protocol = protocol
        return protocol

    def connection_made(self, transport: asyncio.Transport | None = None) -> None:
        """Call connection_made(). If it raises, the connection goes on, as asyncio's and uvloop's do.

        :param transport: for a protocol that takes over what may have been released
        """
        transport, protocol = transport or self.transport, self.protocol
        assert protocol is not None and transport is not None
        try:
            self.context.run(protocol.connection_made, transport)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc, "connection_made() failed")

    def connection_lost(self, error: Exception | None) -> None:
        """Call connection_lost(), if there is a protocol. The caller has entered the context."""
        protocol = self.protocol
        if protocol is None:
            return
        try:
            protocol.connection_lost(error)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc, "connection_lost() failed")

    def pause_writing(self) -> None:
        """Call pause_writing(), in the context of who writes."""
        self._tell_of_room("pause_writing")

    def resume_writing(self) -> None:
        """Call resume_writing(). The caller has entered the context."""
        self._tell_of_room("resume_writing")

    def _tell_of_room(self, name: str) -> None:
        try:
            getattr(self.protocol, name)()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self.report(exc, f"{name}() failed")

    def listens_for(self, name: str) -> bool:
        """Whether the protocol has a method of this name."""
        return hasattr(self.protocol, name)

    def tell(self, name: str, *arguments: Any) -> Any:
        """Call a method that a protocol need not have, and return its result; None without it. It may raise."""
        method = getattr(self.protocol, name, None)
        return None if method is None else self.context.run(method, *arguments)

    def report(self, exc: BaseException, message: str) -> None:
        """Call the loop's exception handler."""
        self._loop.call_exception_handler(
            {"message": message, "exception": exc, "transport": self.transport, "protocol": self.protocol}
        )


def is_buffered(protocol: asyncio.BaseProtocol) -> bool:
    """Whether a protocol gets its bytes through get_buffer().

    asyncio's loop asks for the base class, uvloop for the method. A protocol that has the methods of that base class,
    and no data_received(), can mean nothing else.
    """
    if isinstance(protocol, asyncio.BufferedProtocol):
        return True
    return hasattr(protocol, "get_buffer") and not hasattr(protocol, "data_received")
