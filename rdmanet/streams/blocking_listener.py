"""``listen_rdma_stream``: accept connections by calls that wait.

A listener has a loop of its own, which runs during calls (private_loop.py). It gives each connection request to the
loop of the new stream before it answers, so the new stream may go to a thread of its own.
"""

from __future__ import annotations

import asyncio
import errno
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.admission import OTHERS_WAIT_S, PATIENCE_S, waiting_for
from rdmanet.stream.establish import Role
from rdmanet.stream.loop_context import loop_context_for
from rdmanet.stream.options import CLOSE_TIMEOUT_S, DATA_SLOTS, KEEPALIVE, SLOT_BYTES, Keepalive, StreamConfig
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.stream.server import ConnectRequest, RdmaServer, refuse_failed
from rdmanet.streams.blocking import RdmaStream, seconds, stream_of
from rdmanet.streams.blocking_protocol import BlockingProtocol
from rdmanet.streams.private_loop import PrivateLoop
from rdmanet.transport import listen


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
    keepalive: Keepalive | bool | None = KEEPALIVE,
    slot_bytes: int = SLOT_BYTES,
    data_slots: int = DATA_SLOTS,
) -> RdmaStreamListener:
    """``socket.create_server`` over RDMA: listen, and return what ``accept`` is called on.

    ``timeout`` limits each ``accept``, in seconds. The other keywords are those of ``start_rdma_server``.

    Raises what ``start_rdma_server`` raises; RuntimeError if an event loop runs in this thread.
    """
    config = StreamConfig(
        slot_bytes=slot_bytes, data_slots=data_slots, first_slot_bytes=slot_bytes,
        close_timeout=close_timeout, busy_poll=busy_poll,
        keepalive=keepalive,  # type: ignore[arg-type]  # StreamConfig checks it
    )  # fmt: skip
    return RdmaStreamListener(
        config, seconds(timeout), backlog,
        lambda server: listen(server, host, port, family=family, device=device),
    )  # fmt: skip


class RdmaStreamListener:
    """Accepts connections, one per call. `listen_rdma_stream` creates it.

    It answers nobody between calls: a peer that connects waits for the next ``accept``, up to its own
    ``connect_timeout``.
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
        self._requests: deque[ConnectRequest] = deque()
        self._requests_max = waiting_for(backlog)
        self._arrived: asyncio.Future[None] | None = None
        self._private = PrivateLoop()
        try:
            with self._private.entered("this listener"):
                self._server = RdmaServer(self._private.loop, self._requested, backlog)
                self._private.run(lambda: begin(self._server), None)
                self._server.on_close = self._wake
        except BaseException:
            self._private.close()
            raise
        self._open = True

    def accept(self) -> RdmaStream:
        """Wait for a connection, and return its stream, which has no ``timeout`` yet.

        It makes one connection at a time. If a peer asks for a connection and then makes no progress, this gives up on
        that peer after five seconds, or after one second if others are waiting, and goes on with the next.

        Raises TimeoutError if nobody connects in time; ValueError if the listener is closed; another OSError if the
        device is removed, or if memory, descriptors or queue pairs have run out: then the peer is refused.
        KeyboardInterrupt also refuses the peer whose connection was being made.
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
                    return stream_of(None, lambda private: _answer(private, request, self._config), patience)  # noqa: B023
                except (ConnectionError, TimeoutError):
                    request.id.close()  # it has gone away meanwhile
                except BaseException:
                    request.id.close()
                    raise

    def _requested(self, request: ConnectRequest) -> None:
        if len(self._requests) >= self._requests_max:
            raise OSError(errno.EAGAIN, "too many wait to be accepted")
        self._requests.append(request)
        self._wake()

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
        """Set how long ``accept`` may wait, in seconds; None means forever. Raises ValueError unless it is positive."""
        self._timeout = seconds(timeout)

    def gettimeout(self) -> float | None:
        """The value that was set, in seconds, or None."""
        return self._timeout

    def getsockname(self) -> SockAddr:
        """The address it listens on; the first, if there are several.

        :raises ValueError: the listener is closed, or its device is gone
        """
        if not self._server.sockets:
            raise ValueError("the listener is closed, or its device is gone")
        return self._server.sockets[0].getsockname()

    def close(self) -> None:
        """Stop listening, and refuse the peers that wait. Accepted connections live on."""
        if self._open and not self._private.foreign:
            with self._private.entered("this listener"):
                self._drop()

    def _drop(self) -> None:
        self._open = False
        while self._requests:
            self._requests.popleft().id.close()
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


async def _answer(
    private: PrivateLoop, request: ConnectRequest, config: StreamConfig
) -> tuple[RdmaTransport, BlockingProtocol]:
    """Accept a request on the running loop, which is not the listener's."""
    made: asyncio.Future[BlockingProtocol] = asyncio.get_running_loop().create_future()
    loop_context = await loop_context_for(asyncio.get_running_loop(), request.loop_context.library)
    request.id.migrate(loop_context.cm)

    def over() -> None:
        if not made.done() and not made.get_loop().is_closed():
            made.set_exception(_gone("connected"))

    transport = RdmaTransport(
        loop_context, config, lambda: BlockingProtocol(private, made.set_result), Role.SERVER, on_over=over
    )
    try:
        transport._accept(request)
    except Exception as exc:
        made.cancel()  # nobody waits for it
        if not refuse_failed(request.id):
            # The peer has gone, which may well be the reason of the failure.
            raise _gone("accepted") from exc
        raise
    return transport, await made


def _gone(before: str) -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, f"the peer went away before it was {before}")
