"""Trio's own checks of streams, against AnyIO's streams over RDMA, on both of its backends.

The checks run on Trio. Streams of the asyncio backend need asyncio's loop, or uvloop, and Trio is its guest then: both
run in one thread, and a call of a stream is a task of asyncio that a task of Trio waits for. If Trio cancels the one,
AnyIO's cancel scope cancels the other.

They do not apply to the blocking streams (rdmanet.blocking): nothing can cancel a call that blocks, and another thread
may not close the stream meanwhile, which Trio's checks ask for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.lowlevel
import outcome
import pytest
import trio
from anyio.abc import SocketAttribute
from harness import HOST
from trio.testing import check_half_closeable_stream

import rdmanet
from rdmanet import trio_streams
from rdmanet.anyio_streams import RdmaByteStream, connect_rdma, create_rdma_listener
from rdmanet.base import notifier

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio keeps the thread of a guest for ten seconds more, and no_leaks would wait for its end."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.01)


MAPPED = {
    anyio.BrokenResourceError: trio.BrokenResourceError,
    anyio.BusyResourceError: trio.BusyResourceError,
    anyio.ClosedResourceError: trio.ClosedResourceError,
}


async def on_asyncio(call: Callable[..., Awaitable[Any]], *args: object) -> Any:
    """Call a coroutine function on asyncio's loop, from a task of Trio."""
    waiter = trio.lowlevel.current_task()
    scopes: list[anyio.CancelScope] = []
    cancelled: list[Callable[[], object]] = []

    async def run() -> Any:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            if cancelled:  # before this has begun
                scope.cancel()
            return outcome.Value(await call(*args))

    def done(task: asyncio.Task[Any]) -> None:
        result = outcome.capture(task.result)
        if isinstance(result, outcome.Value):
            # None where the scope has been cancelled.
            result = result.value if result.value is not None else outcome.capture(cancelled[0])
        elif type(result.error) in MAPPED:
            error = MAPPED[type(result.error)](str(result.error))
            error.__cause__ = result.error.__cause__
            result = outcome.Error(error)
        trio.lowlevel.reschedule(waiter, result)

    def abort(raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
        cancelled.append(raise_cancel)
        for scope in scopes:
            scope.cancel()
        return trio.lowlevel.Abort.FAILED

    asyncio.get_running_loop().create_task(run()).add_done_callback(done)
    return await trio.lowlevel.wait_task_rescheduled(abort)


async def on_trio(call: Callable[..., Awaitable[Any]], *args: object) -> Any:
    """Call a coroutine function here."""
    try:
        return await call(*args)
    except tuple(MAPPED) as exc:
        raise MAPPED[type(exc)](str(exc)) from exc.__cause__


On = Callable[..., Awaitable[Any]]


class Guest(trio.abc.HalfCloseableStream):
    """A stream of AnyIO's, as one of Trio's."""

    def __init__(self, stream: RdmaByteStream, on: On) -> None:
        self.stream = stream
        self.on = on

    async def send_all(self, data: bytes) -> None:
        await self.on(self.stream.send, data)

    async def wait_send_all_might_not_block(self) -> None:
        """Trio's streams have it, AnyIO's don't."""

        async def wait() -> None:
            with self.stream._sending:
                self.stream._check_sendable()
                if not self.stream._protocol.writable:
                    await self.stream._protocol.wait_writable()
                self.stream._check_sendable()

        await self.on(wait)
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await self.on(self.stream.send_eof)
        await trio.lowlevel.checkpoint()  # Trio's have one, AnyIO's need not

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            return await self.on(self.stream.receive, 65536 if max_bytes is None else max_bytes)
        except anyio.EndOfStream:
            return b""

    async def aclose(self) -> None:
        await self.on(self.stream.aclose)


async def pair(on: On) -> tuple[Guest, Guest]:
    async def both() -> tuple[Guest, Guest]:
        async with await create_rdma_listener(local_host=HOST) as listener:
            near = await connect_rdma(HOST, listener.extra(SocketAttribute.local_port))
            return Guest(near, on), Guest(await listener.accept(), on)

    both_ends: tuple[Guest, Guest] = await on(both)
    return both_ends


async def clogged(on: On) -> tuple[Guest, Guest]:
    """Neither can send more."""
    both = await pair(on)
    for end in both:
        await end.send_all(bytes(8 << 20))
        assert not end.stream._protocol.writable
    return both


async def as_guest(main: Callable[[], Awaitable[None]]) -> None:
    """Run Trio on this loop."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    trio.lowlevel.start_guest_run(
        main,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=over.set_result,
        host_uses_signal_set_wakeup_fd=True,
    )
    (await over).unwrap()


async def test_whose_task_waits_when_both_loops_run() -> None:
    """The verbs find the loop of whoever uses them."""

    async def on_host() -> notifier.Notifier:
        return notifier.current_notifier()

    async def main() -> None:
        assert isinstance(notifier.current_notifier(), notifier.TrioNotifier)
        assert await on_asyncio(on_host) is asyncio.get_running_loop()

    await as_guest(main)


async def test_anyios_streams_are_as_trios_should_be() -> None:
    await as_guest(lambda: check_half_closeable_stream(lambda: pair(on_asyncio), lambda: clogged(on_asyncio)))


def test_anyios_streams_on_trio_are_as_trios_should_be() -> None:
    trio.run(check_half_closeable_stream, lambda: pair(on_trio), lambda: clogged(on_trio))


async def test_trios_streams_where_trio_is_a_guest() -> None:
    """Each loop has its own connections."""

    async def main() -> None:
        async with await trio_streams.open_rdma_stream(HOST, port) as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"HELLO"

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(5)).upper())
        writer.close()

    async with await rdmanet.start_rdma_stream_server(shout, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        await as_guest(main)
