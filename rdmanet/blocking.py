"""Byte streams for programs without an event loop: ``open_rdma_stream`` and ``listen_rdma_stream``.

Theory
------
Each stream, and each listener, has an event loop of its own, which runs within its calls and at no other time. No
thread is started. What follows from that:

* Between calls the device goes on by itself, and we do not. What the peer sends arrives, until the ring's slots are
  full; it is taken out of them, and the peer gets new credits, in the next call that reads. That the peer has closed
  or aborted is seen in a call, too. Nothing of ours is left over: a call that writes returns when all is handed to
  the device.
* A stream is for one thread at a time. Which one makes no difference, and different streams do not concern each other:
  a listener hands each connection's request to the loop of the new stream before it is answered, so what was accepted
  may go to a thread of its own.
* Ctrl-C is seen as soon as the loop is, like in ``asyncio.run`` (it is the same Runner): KeyboardInterrupt comes out of
  the call, and the stream goes on working.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rdmanet import credit
from rdmanet._core import CMID
from rdmanet.addresses import SockAddr
from rdmanet.admission import OTHERS_WAIT_S, PATIENCE_S, waiting_for
from rdmanet.driver import Driver, driver_for, end_drivers
from rdmanet.pull import PullProtocol
from rdmanet.server import NOT_ACCEPTED
from rdmanet.transport import (
    CLOSE_TIMEOUT_S,
    DATA_SLOTS,
    SLOT_BYTES,
    RdmaServer,
    RdmaTransport,
    StreamConfig,
    create_rdma_connection,
    listen,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_T = TypeVar("_T")


def open_rdma_stream(
    host: str, port: int | str, *, timeout: float | None = None, **options: Any
) -> RdmaStream:
    """``socket.create_connection`` over RDMA: connect, and return a stream that blocks.

    ``timeout`` bounds this call and each of the stream's (`RdmaStream.settimeout`), in seconds. ``options`` are those
    of ``create_rdma_connection``: ``device``, ``connect_timeout``, ``local_addr``, ``slot_bytes``, …

    Raises what ``create_rdma_connection`` raises, TimeoutError; RuntimeError where an event loop runs in this thread.
    """
    return _stream(timeout, lambda: create_rdma_connection(PullProtocol, host, port, **options))


def listen_rdma_stream(
    host: str | None = None,
    port: int | str = 0,
    *,
    timeout: float | None = None,
    family: int = 0,
    backlog: int = 100,
    device: str | None = None,
    close_timeout: float | None = CLOSE_TIMEOUT_S,
    busy_poll: float | None = None,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
) -> RdmaStreamListener:
    """``socket.create_server`` over RDMA: listen, and return what ``accept`` is called on.

    ``timeout`` bounds each ``accept``, in seconds. The other keywords, and the errors, are those of
    ``start_rdma_server``; RuntimeError where an event loop runs in this thread.
    """
    config = StreamConfig(
        slot_bytes=slot_bytes, data_slots=data_slots, close_timeout=close_timeout, busy_poll=busy_poll
    )
    return RdmaStreamListener(
        config, _seconds(timeout), backlog,
        lambda server: listen(server, host, port, family=family, device=device),
    )  # fmt: skip


class RdmaStream(io.RawIOBase):
    """One connection, as a raw file of both directions that blocks. Made by `open_rdma_stream` and by listeners.

    ``io.BufferedReader(stream)``, ``io.BufferedRWPair(stream, stream)`` and ``io.TextIOWrapper`` around these work
    over it. It cannot be waited for with ``select``: it has no descriptor.

    An event loop of its own runs within its calls only. Between them, what the peer sends arrives until the
    connection's ring is full, and stays there: credits are granted, and the end of the connection is seen, within
    calls. What is written has left when ``write`` returns.

    One call at a time: a call while another thread is in one raises RuntimeError, as does one in a thread where an
    event loop runs, or in a forked child.
    """

    _made = False  # a raw file is closed also where its __init__ was refused

    def __init__(self, loop: _PrivateLoop, protocol: PullProtocol, timeout: float | None) -> None:
        self._private = loop
        self._protocol = protocol
        self._transport = protocol.transport
        self._timeout = timeout
        self._shut = False
        self._transport.set_write_buffer_limits(0)  # there is room when all is handed to the device
        self._made = True

    # -- reading ----------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Wait for bytes, and fill ``buffer`` as far as they have come; 0 at the end of file.

        Raises TimeoutError, and the OSError with which the connection was lost (ConnectionResetError: the peer
        aborted it), after what had come before. Neither these nor KeyboardInterrupt lose a byte.
        """
        with memoryview(buffer) as given, given.cast("B") as view:
            if view.readonly:
                raise TypeError("readinto() takes a writable buffer")
            return self._read(lambda: self._protocol.take_into(view)) if len(view) else 0

    def recv(self, size: int, /) -> bytes:
        """At most ``size`` bytes, as ``socket.recv``: what ``readinto`` would give, without a buffer of one's own.

        :raises ValueError: the size is negative, or the stream is closed
        """
        if size < 0:
            raise ValueError(f"recv({size!r}): a size is not negative")
        return self._read(lambda: self._protocol.take(size)) if size else b""

    def _read(self, take: Callable[[], _T]) -> _T:
        protocol = self._protocol
        with self._entered():
            if not protocol.readable:
                self._private.run(protocol.wait_readable, self._timeout)
            taken = take()
            if not taken and protocol.error is not None and not protocol.eof:
                raise protocol.error
            return taken

    # -- writing ----------------------------------------------------------------------------------------

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of ``data``; returns its length in bytes, when all is handed to the device.

        Each call sends one frame or more, and the peer's ring has room for so many; collect what is small in an
        ``io.BufferedWriter``.

        Raises BrokenPipeError after ``shutdown``, the OSError with which the connection was lost, TimeoutError. After
        a TimeoutError, or a KeyboardInterrupt, what is left of ``data`` goes out in the calls that follow: do not
        write it again.
        """
        protocol = self._protocol
        with memoryview(data) as view, self._entered():
            if self._shut:
                raise BrokenPipeError("write() after shutdown()")
            if protocol.broken is None:
                self._transport.write(data if isinstance(data, bytes) else view)
                if not protocol.writable:
                    self._private.run(protocol.wait_writable, self._timeout)
            if protocol.broken is not None:
                raise protocol.broken
            return view.nbytes

    def sendall(self, data: ReadableBuffer, /) -> None:
        """``write``, under the name that sockets have for it."""
        self.write(data)

    def shutdown(self, how: int = socket.SHUT_WR, /) -> None:
        """End our half (``socket.SHUT_WR``, nothing else): the peer reads end of file. Reading goes on.

        Returns when the peer's device has all that was written. Raises TimeoutError.
        """
        if how != socket.SHUT_WR:
            raise ValueError("shutdown() ends writing only (socket.SHUT_WR); close() ends both")
        with self._entered():
            self._shut = True
            self._private.run(self._transport._end_writing, self._timeout)

    # -- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send end of file, wait until the peer's device has everything, and be gone. Doing it twice does no more.

        Raises TimeoutError when nothing moved for ``close_timeout`` seconds (an option of the connection), and the
        OSError that ended the connection meanwhile, when bytes of ours may be lost. It is closed all the same.
        """
        if not self._ours:
            return super().close()
        known = self._protocol.error
        self._end(self._transport.close)
        error = self._protocol.error
        if error is not None and error is not known:
            raise error

    def abort(self) -> None:
        """Be gone at once: what was not sent is dropped, the peer gets ConnectionResetError."""
        if self._ours:
            self._end(self._transport.abort)

    @property
    def _ours(self) -> bool:
        """Whether there is something to end: it is open, and no forked child's copy of its parent's."""
        return not self.closed and self._made and not self._private.foreign

    def _end(self, begin: Callable[[], None]) -> None:
        with self._entered():
            try:
                begin()
                self._private.run(self._protocol.wait_lost, None)
            finally:
                self._drop()

    def _drop(self) -> None:
        super().close()
        self._transport.abort()
        self._private.close()

    def __del__(self) -> None:
        if self._ours:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._drop()

    # -- what sockets have ------------------------------------------------------------------------------

    def settimeout(self, timeout: float | None) -> None:
        """How long a call may wait, in seconds; None: for ever. Raises ValueError unless it is positive."""
        self._timeout = _seconds(timeout)

    def gettimeout(self) -> float | None:
        """What was set."""
        return self._timeout

    def getsockname(self) -> SockAddr:
        """The local address."""
        return cast(SockAddr, self.get_extra_info("sockname"))

    def getpeername(self) -> SockAddr:
        """The peer's address."""
        return cast(SockAddr, self.get_extra_info("peername"))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of `RdmaTransport.get_extra_info`."""
        return self._transport.get_extra_info(name, default)

    def _entered(self) -> contextlib.AbstractContextManager[None]:
        if self.closed:
            raise ValueError("I/O operation on a closed stream")
        return self._private.entered("this stream")

    def __repr__(self) -> str:
        return f"<RdmaStream {self._transport!r}>"


class RdmaStreamListener:
    """Accepts connections, one a call. Made by `listen_rdma_stream`.

    Between calls nobody is answered: who connects waits for the next ``accept``, up to its own ``connect_timeout``.
    """

    _open = False  # until __init__ is done

    def __init__(
        self,
        config: StreamConfig,
        timeout: float | None,
        backlog: int,
        begin: Callable[[RdmaServer], Coroutine[Any, Any, None]],
    ) -> None:
        self._config = config
        self._timeout = timeout
        self._requests: deque[_Request] = deque()
        self._requests_max = waiting_for(backlog)
        self._arrived: asyncio.Future[None] | None = None
        self._private = _PrivateLoop()
        try:
            with self._private.entered("this listener"):
                self._server = RdmaServer(
                    self._private.loop, lambda driver, _: _Request(driver, self), backlog
                )
                self._private.run(lambda: begin(self._server), None)
                self._server.on_close = self._wake
        except BaseException:
            self._private.close()
            raise
        self._open = True

    def accept(self) -> RdmaStream:
        """Wait for a connection; its stream has no ``timeout`` yet.

        One connection is made at a time. Who connects and then does not go on with it is given up after five seconds,
        or after one if others wait already, and the next one waited for.

        Raises TimeoutError when nobody connects in time; ValueError when the listener is closed; other OSErrors when
        its device is removed, or a connection could not be accepted for want of memory, descriptors, queue pairs:
        that one is refused. KeyboardInterrupt refuses the connection that was being made, if one was.
        """
        if not self._open:
            raise ValueError("accept() on a closed listener")
        with self._private.entered("this listener"):
            while True:
                if not self._requests:
                    self._private.run(self._wait, self._timeout)
                request = self._requests.popleft()
                patience = OTHERS_WAIT_S if self._requests else PATIENCE_S
                try:
                    return _stream(None, lambda: request.answer(self._config), patience)  # noqa: B023
                except (ConnectionError, TimeoutError):
                    request.refuse()  # it has gone away meanwhile
                except BaseException:
                    request.refuse()
                    raise

    async def _wait(self) -> None:
        while not self._requests:
            if not self._server.sockets:
                raise OSError(errno.ENODEV, "the device that was listened on is gone")
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def settimeout(self, timeout: float | None) -> None:
        """How long ``accept`` may wait, in seconds; None: for ever."""
        self._timeout = _seconds(timeout)

    def gettimeout(self) -> float | None:
        """What was set."""
        return self._timeout

    def getsockname(self) -> SockAddr:
        """Where it listens; the first address, if there are several.

        :raises ValueError: the listener is closed, or its device is gone
        """
        if not self._server.sockets:
            raise ValueError("the listener is closed, or its device is gone")
        return self._server.sockets[0].getsockname()

    def close(self) -> None:
        """Stop listening, and refuse who waits. What was accepted lives on."""
        if self._open and not self._private.foreign:
            with self._private.entered("this listener"):
                self._drop()

    def _drop(self) -> None:
        self._open = False
        while self._requests:
            self._requests.popleft().refuse()
        self._server.close()
        self._private.close()

    def __enter__(self) -> RdmaStreamListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open and not self._private.foreign:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._drop()

    def __repr__(self) -> str:
        return f"<RdmaStreamListener {self._server!r}>"


class _Request:
    """Somebody who wants to connect. To the listener's server it is the transport that is being made."""

    def __init__(self, driver: Driver, listener: RdmaStreamListener) -> None:
        self._library = driver.library
        self._listener = listener

    def _accept(self, cm_id: CMID, hello: credit.Hello) -> None:
        if len(self._listener._requests) >= self._listener._requests_max:
            raise OSError(errno.EAGAIN, "too many wait to be accepted")
        self._id, self._hello = cm_id, hello
        self._listener._requests.append(self)
        self._listener._wake()

    async def answer(self, config: StreamConfig) -> tuple[RdmaTransport, PullProtocol]:
        """Go on with the connection on the loop that runs here, another than the listener's."""
        made = asyncio.get_running_loop().create_future()
        driver = await driver_for(asyncio.get_running_loop(), self._library)
        self._id.migrate(driver.cm)
        # The transport tells its server when it ends, which may be before it has begun.
        server = cast(RdmaServer, _Doorstep(made))
        transport = RdmaTransport(driver, config, lambda: PullProtocol(made.set_result), server)
        try:
            transport._accept(self._id, self._hello)
        except Exception as exc:
            made.cancel()  # nobody waits for it
            try:
                self._id.reject(credit.pack_refusal(credit.RefusalCode.ERROR, NOT_ACCEPTED))
            except OSError:
                # There is nobody to be refused, which may well be why it failed.
                raise ConnectionAbortedError("the peer went away before it was accepted") from exc
            raise
        return transport, await made

    def refuse(self) -> None:
        self._id.close()

    def _teardown(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class _Doorstep:
    """What stands where a transport's server is: the stream is nobody's, but somebody waits for it to be made."""

    def __init__(self, made: asyncio.Future[PullProtocol]) -> None:
        self._made = made

    def _attach(self, transport: RdmaTransport) -> None: ...

    def _stands(self, transport: RdmaTransport) -> None: ...

    def _detach(self, transport: RdmaTransport) -> None:
        if not self._made.done() and not self._made.get_loop().is_closed():
            self._made.set_exception(ConnectionAbortedError("the peer went away before it was connected"))


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's, but names are resolved here and now, not in a thread."""

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        return socket.getaddrinfo(host, port, **hints)


class _PrivateLoop:
    """An event loop that runs within calls, one call at a time."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._calls: list[object] = []  # the first is in, others are about to be refused
        self._runner = asyncio.Runner(loop_factory=_Loop)
        self.loop = self._runner.get_loop()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, and the loop its parent's."""
        return self._pid != os.getpid()

    @contextlib.contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """This thread is in a call. RuntimeError when it may not."""
        if self.foreign:
            raise RuntimeError(f"this was opened by process {self._pid}; open another after fork")
        call = object()
        try:
            # Ctrl-C may come after each of these. A lock that was just taken would stay so.
            self._calls.append(call)
            if self._calls[0] is not call:
                raise RuntimeError(f"another thread, or what a signal interrupted, is in a call of {what}")
            if asyncio._get_running_loop() is not None:
                raise RuntimeError(
                    "an event loop runs in this thread, and a call that blocks would stop it: "
                    "use open_rdma_connection() or start_rdma_stream_server() there"
                )
            yield
        finally:
            if call in self._calls:
                self._calls.remove(call)

    def run(self, call: Callable[[], Coroutine[Any, Any, _T]], timeout: float | None) -> _T:
        """Run until that is done. TimeoutError when it takes longer, after it was cancelled."""

        async def bounded() -> _T:
            async with asyncio.timeout(timeout):
                return await call()

        try:
            return self._runner.run(bounded())
        except asyncio.CancelledError:
            # Nobody else cancels here. The Runner forgets a Ctrl-C that comes while it prepares for one.
            raise KeyboardInterrupt from None
        except TimeoutError as exc:
            if exc.args:
                raise
            raise TimeoutError(f"not within {timeout} s") from None

    def close(self) -> None:
        """End what is left on it. It need not run for that, so the collector may do it, in any thread."""
        end_drivers(self.loop)
        self.loop.close()


def _stream(
    timeout: float | None,
    begin: Callable[[], Coroutine[Any, Any, tuple[RdmaTransport, PullProtocol]]],
    within: float | None = None,
) -> RdmaStream:
    """What `begin` connects, on a loop of its own."""
    timeout = _seconds(timeout)
    private = _PrivateLoop()
    try:
        with private.entered("this stream"):
            _, protocol = private.run(begin, timeout if within is None else within)
        return RdmaStream(private, protocol, timeout)
    except BaseException:
        private.close()
        raise


def _seconds(timeout: float | None) -> float | None:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r} is not positive: calls that do not wait are asyncio's")
    return timeout
