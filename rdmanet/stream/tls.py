"""TLS: asyncio's SSLProtocol between a connection's transport and the application's protocol.

Theory
------
asyncio encrypts by a protocol. ``SSLProtocol`` is the protocol of a transport, and has a second transport, the *face*,
for the application's protocol above. It asks of the lower transport only what every asyncio transport has, and of its
loop only ``call_soon``, ``call_later`` and the like. So it runs over ours, on any loop: what TLS does here, its states,
time-outs, errors and extra info, is what the Python that runs does over TCP. What is written to the face is encrypted
at once, so the program may change its memory when ``write()`` has returned. The encrypted bytes are one ``bytes``
object, which the device reads where it lies. Received bytes go from their slots into TLS's MemoryBIO (_pyx/sink.pxi).

Of asyncio's this uses what is not in its manual: SSLProtocol, its ``_app_transport``, which is the face, and its
``_incoming``, the MemoryBIO. CPython's own tests of TLS run over all that (tests/streams/cpython_tls.py). Where we make
an SSLProtocol, it is one that reads faster (ssl_protocol.py).

SSLProtocol closes the lower transport while it has bytes left to write, if that has told it to pause. It writes them
when it is resumed, as asyncio's transports take writes after ``close()`` until their buffers are empty. So the
lifecycle ends our half only then.

Bytes that have come when TLS begins, and that nobody has read, are TLS's: they are the peer's first records. (If they
are none, the handshake fails. So nobody can slip in plain text before it that is then taken for what TLS protects.)
`begin_over` sees to that wherever an RDMA transport gets an SSLProtocol, and `start_tls` on others (in_the_clear.py).
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

from rdmanet.errors import shown
from rdmanet.stream import in_the_clear
from rdmanet.stream.ssl_protocol import Protocol


class Tls:
    """How connections are to be encrypted: what asyncio's functions take for that."""

    def __init__(
        self,
        context: ssl.SSLContext | None,
        server_side: bool,
        server_hostname: str | None,
        handshake_timeout: float | None,
        shutdown_timeout: float | None,
    ) -> None:
        """
        :param context: None: asyncio's default for clients
        """
        self._context = context
        self._server_side = server_side
        self._server_hostname = server_hostname
        self._handshake_timeout = handshake_timeout
        self._shutdown_timeout = shutdown_timeout

    @classmethod
    def of_client(
        cls,
        context: ssl.SSLContext | bool | None,
        host: str | None,
        server_hostname: str | None,
        handshake_timeout: float | None,
        shutdown_timeout: float | None,
    ) -> Tls | None:
        """What the arguments of create_rdma_connection() ask for; None: no TLS. Errors are asyncio's."""
        if not context:
            _refuse_without_ssl(
                server_hostname=server_hostname,
                ssl_handshake_timeout=handshake_timeout,
                ssl_shutdown_timeout=shutdown_timeout,
            )
            return None
        if not isinstance(context, ssl.SSLContext | bool):
            raise TypeError(f"ssl argument must be an SSLContext, a bool or None, not {shown(context)}")
        if server_hostname is None:
            if not host:
                raise ValueError("You must set server_hostname when using ssl without a host")
            server_hostname = host
        given = None if isinstance(context, bool) else context
        return cls(given, False, server_hostname, handshake_timeout, shutdown_timeout)

    @classmethod
    def of_server(
        cls, context: ssl.SSLContext | None, handshake_timeout: float | None, shutdown_timeout: float | None
    ) -> Tls | None:
        """The same of start_rdma_server()."""
        if context is None:
            _refuse_without_ssl(
                ssl_handshake_timeout=handshake_timeout, ssl_shutdown_timeout=shutdown_timeout
            )
            return None
        if not isinstance(context, ssl.SSLContext):
            raise TypeError("ssl argument must be an SSLContext or None")
        if context.protocol is ssl.PROTOCOL_TLS_CLIENT:  # Python 3.14 speaks of server_hostname first
            raise ssl.SSLError("Cannot create a server socket with a PROTOCOL_TLS_CLIENT context")
        tls = cls(context, True, None, handshake_timeout, shutdown_timeout)
        # What would fail for every client fails now: a time that is not positive, for example.
        tls.wrap(asyncio.get_running_loop(), asyncio.Protocol(), None)._app_transport.abort()
        return tls

    @property
    def handshake_timeout(self) -> float:
        """How long a handshake may take, in seconds."""
        if self._handshake_timeout is None:
            return asyncio.constants.SSL_HANDSHAKE_TIMEOUT
        return self._handshake_timeout

    def wrap(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        greeted: asyncio.Future[None] | None,
        is_new: bool = True,
    ) -> Any:
        """An SSLProtocol.

        :param protocol: gets connection_made() when the handshake is done, if the connection `is_new` to it
        :param greeted: gets a result then, or the reason why there will be none
        """
        make: Any = Protocol  # SSLProtocol's stub knows no None
        return make(
            loop,
            protocol,
            self._context,
            greeted,
            self._server_side,
            self._server_hostname,
            call_connection_made=is_new,
            ssl_handshake_timeout=self._handshake_timeout,
            ssl_shutdown_timeout=self._shutdown_timeout,
        )


class Layer:
    """TLS on one connection, until the handshake is done.

    :ivar make: the factory of the lower transport's protocol
    """

    def __init__(
        self, tls: Tls, loop: asyncio.AbstractEventLoop, factory: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        """
        :param factory: makes the application's protocol
        """
        self._tls = tls
        self._loop = loop
        self._factory = factory
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._below: Any = None
        self._face: asyncio.Transport | None = None
        self._protocol: asyncio.BaseProtocol | None = None

    def make(self) -> asyncio.BaseProtocol:
        """The connection exists: the protocol that encrypts it, below the application's."""
        self._protocol = self._factory()
        self._below = self._tls.wrap(self._loop, self._protocol, self._greeted)
        self._face = self._below._app_transport  # it forgets that when the connection is lost
        return cast(asyncio.BaseProtocol, self._below)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this when the handshake has succeeded; if it fails the connection ends."""

        def greeted(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None and self._is_up:
                call()

        self._greeted.add_done_callback(greeted)

    async def done(self, lower: asyncio.Transport) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Wait for the handshake on this transport; returns the face, and the application's protocol.

        If it fails or is cancelled, the connection is aborted.

        :raises ssl.SSLError: the peer's certificate is not good, or it speaks no TLS that we do, and the like
        :raises OSError: the connection was lost; ConnectionAbortedError, the time was up
        """
        try:
            try:
                await self._greeted
            except ConnectionResetError as exc:
                if exc.args:
                    raise
                raise ConnectionResetError(  # asyncio's has no text
                    errno.ECONNRESET,
                    "the peer ended the connection during the TLS handshake: it may not expect TLS, or may demand a"
                    " certificate",
                ) from exc
            if not self._is_up:
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, "the connection was closed during the SSL handshake"
                )
        except BaseException:
            lower.abort()
            raise
        assert self._face is not None and self._protocol is not None
        return self._face, self._protocol

    @property
    def _is_up(self) -> bool:
        # An end without an error gives a result, too. A face that was closed twice knows nothing any more.
        return self._below is not None and "ssl_object" in self._below._extra


async def start_tls(
    transport: asyncio.WriteTransport,
    protocol: asyncio.BaseProtocol,
    sslcontext: ssl.SSLContext,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> asyncio.Transport:
    """Encrypt a connection from now on, like ``loop.start_tls``; returns the transport that ``protocol`` is to use.

    It works on every event loop. ``transport`` is an RdmaTransport, or one that asyncio's ``loop.start_tls`` takes.
    Received bytes that the protocol was not given, or that nobody has read from its RdmaStreamReader, are the first of
    TLS. ``connection_made()`` is not called again. Times are in seconds; asyncio's defaults are 60 for the handshake
    and 30 for the shutdown.

    Raises TypeError for a context that is none, or another transport; ValueError for times that are not positive;
    ``ssl.SSLError`` if the handshake fails; ConnectionAbortedError if it takes too long; the OSError with which the
    connection was lost. The connection is closed then, and also if this is cancelled.
    """
    if not isinstance(sslcontext, ssl.SSLContext):
        raise TypeError(
            f"sslcontext is expected to be an instance of ssl.SSLContext, got {shown(sslcontext)}"
        )
    if not getattr(transport, "_start_tls_compatible", False):
        raise TypeError(f"transport {shown(transport)} is not supported by start_tls()")
    loop = asyncio.get_running_loop()
    lower = cast(asyncio.Transport, transport)
    tls = Tls(sslcontext, server_side, server_hostname, ssl_handshake_timeout, ssl_shutdown_timeout)
    greeted: asyncio.Future[None] = loop.create_future()
    below = tls.wrap(loop, protocol, greeted, is_new=False)
    lower.pause_reading()  # until connection_made() has been called
    before = lower.get_protocol()
    lower.set_protocol(below)
    in_the_clear.hand_over(before, protocol, below)  # by RDMA, set_protocol() has seen to what `before` had
    begun = [loop.call_soon(below.connection_made, lower), loop.call_soon(lower.resume_reading)]
    try:
        await greeted
    except BaseException:
        lower.close()
        for call in begun:
            call.cancel()
        raise
    face: asyncio.Transport | None = below._app_transport
    if face is None:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed during the SSL handshake")
    return face


def begin_over(before: asyncio.BaseProtocol | None, protocol: Any, writing_paused: bool) -> None:
    """A transport has got this SSLProtocol, after another protocol: TLS goes on where that one has stopped.

    :param writing_paused: the transport has told the protocol before to pause
    """
    if writing_paused:
        protocol.pause_writing()
    in_the_clear.hand_over(before, None, protocol)


def face_of(protocol: asyncio.BaseProtocol | None) -> asyncio.Transport | None:
    """The transport above a transport's protocol, if that is TLS's and the connection is there."""
    return (
        cast("asyncio.Transport | None", getattr(protocol, "_app_transport", None))
        if is_tls(protocol)
        else None
    )


def close_face(protocol: asyncio.BaseProtocol | None) -> None:
    """The connection is gone, of which TLS will hear. The face says so now.

    Else a program that writes and awaits drain() in a row would never let the loop run, which is to tell it.
    """
    face: Any = face_of(protocol)
    if face is not None:
        face._closed = True


def is_tls(protocol: asyncio.BaseProtocol | None) -> bool:
    """Whether a transport's protocol encrypts it."""
    return isinstance(protocol, SSLProtocol)


def _refuse_without_ssl(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is only meaningful with ssl")
