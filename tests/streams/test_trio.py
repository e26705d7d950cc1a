"""Trio's streams: Trio's own checks, and what its nurseries, servers and wrappers do with ours; and the loop below."""

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import trio
from anyio.abc import SocketAttribute
from harness import HOST
from pattern import REPEATED
from trio.testing import check_half_closeable_stream

from rdmanet.anyio_streams import connect_rdma, create_rdma_listener
from rdmanet.blocking import listen_rdma_stream
from rdmanet.cm import CMEventType
from rdmanet.streams.trio_loop import TrioLoop, trio_loop
from rdmanet.trio_streams import RdmaListener, RdmaStream, open_rdma_listeners, open_rdma_stream, serve_rdma
from tests.support.certificates import of_client, of_server

pytestmark = pytest.mark.once

LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 60))
MIB = 1 << 20


def on_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test as Trio's main task."""

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            await test()

    def run() -> None:
        trio.run(main)

    run.__name__ = test.__name__
    return run


async def ends() -> tuple[RdmaStream, RdmaStream]:
    """The connecting end, and the accepting one."""
    [listener] = await open_rdma_listeners(0, host=HOST)
    async with listener:
        near = await open_rdma_stream(HOST, listener.addresses[0][1])
        return near, await listener.accept()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[RdmaStream, RdmaStream]]:
    near, far = await ends()
    try:
        yield near, far
    finally:
        await trio.aclose_forcefully(near)
        await trio.aclose_forcefully(far)


async def clogged() -> tuple[RdmaStream, RdmaStream]:
    """Neither can send more."""
    both = await ends()
    for end in both:
        await end.send_all(bytes(8 * MIB))
        assert not end._protocol.writable
    return both


async def until_seen(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.lowlevel.checkpoint()


async def echo(stream: trio.abc.Stream) -> None:
    async for chunk in stream:
        await stream.send_all(chunk)


# ---- streams


@on_trio
async def test_they_are_as_trios_should_be():
    await check_half_closeable_stream(ends, clogged)


@on_trio
async def test_a_server_of_a_nursery():
    done = []

    async def ask(port: int, n: int) -> None:
        async with await open_rdma_stream(HOST, port) as stream:
            assert isinstance(stream, trio.abc.HalfCloseableStream)
            assert "RdmaTransport open" in repr(stream)
            question = REPEATED[n : n + MIB]
            async with trio.open_nursery() as both:
                both.start_soon(stream.send_all, question)
                answer = b""
                while len(answer) < MIB:
                    answer += await stream.receive_some(50_000)
            assert answer == question
            await stream.send_eof()
            assert await stream.receive_some() == b""
        done.append(n)

    threads = threading.active_count()
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(lambda **kept: serve_rdma(echo, 0, host=HOST, **kept))
        assert isinstance(listener, RdmaListener) and isinstance(listener, trio.abc.Listener)
        async with trio.open_nursery() as clients:
            for n in range(5):
                clients.start_soon(ask, listener.addresses[0][1], n)
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        assert threading.active_count() == threads
        nursery.cancel_scope.cancel()
    assert sorted(done) == list(range(5))


@on_trio
async def test_a_name():
    [listener] = await open_rdma_listeners(0, host="localhost")
    async with listener:
        near = await open_rdma_stream("localhost", listener.addresses[0][1])
        async with near, await listener.accept() as far:
            await near.send_all(b"hello")
            assert await far.receive_some() == b"hello"
        with pytest.raises(socket.gaierror):
            await open_rdma_stream("nobody.invalid", 1)


@on_trio
async def test_nobody_listens():
    [listener] = await open_rdma_listeners(0, host=HOST)
    port = listener.addresses[0][1]
    await listener.aclose()
    with pytest.raises(ConnectionRefusedError):
        await open_rdma_stream(HOST, port)


@on_trio
async def test_connecting_is_cancelled():
    """This listener answers nobody."""
    with contextlib.closing(listen_rdma_stream(HOST)) as silent, trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_rdma_stream, HOST, silent.getsockname()[1])
            await until_seen(lambda: attempts())
            await until_seen(lambda: attempts()[0].endpoint._awaited is CMEventType.ESTABLISHED)
            scope.cancel()
    assert not attempts()


def attempts() -> list:
    """The connections of this run, and what may become some."""
    contexts = getattr(trio_loop(), "_rdmanet_loop_contexts", {})
    return [connection for context in contexts.values() for connection in context.connections]


@on_trio
async def test_a_peer_that_aborts():
    async with pair() as (near, far):
        await near.send_all(REPEATED[:MIB])
        await trio.aclose_forcefully(near)
        with pytest.raises(trio.BrokenResourceError) as caught:
            while await far.receive_some():
                pass
        assert isinstance(caught.value.__cause__, ConnectionResetError)


@on_trio
async def test_what_was_sent_may_change():
    async with pair() as (near, far):
        mine = bytearray(REPEATED[:MIB])
        await near.send_all(memoryview(mine))
        mine[:] = bytes(MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.aclose)
            assert b"".join([chunk async for chunk in far]) == REPEATED[:MIB]


@on_trio
async def test_wrong_sizes():
    async with pair() as (near, _):
        with pytest.raises(ValueError, match="max_bytes=0 is not positive"):
            await near.receive_some(0)
        with pytest.raises(TypeError):
            await near.receive_some(1.5)
        with pytest.raises(TypeError):
            await near.send_all("text")
    with pytest.raises(ValueError, match="backlog=0"):
        await open_rdma_listeners(0, host=HOST, backlog=0)


@on_trio
async def test_tls():
    async with pair() as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(echo, trio.SSLStream(far, of_server(), server_side=True))
        async with trio.SSLStream(near, of_client(), server_hostname="localhost") as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"


# ---- listeners


@on_trio
async def test_accepting():
    [listener] = await open_rdma_listeners(0, host=HOST, backlog=1)
    port = listener.addresses[0][1]
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await listener.accept()

        nursery.start_soon(accept)
        await until_seen(lambda: listener._queue._waiter is not None)
        with pytest.raises(trio.BusyResourceError):
            await listener.accept()
        nursery.start_soon(listener.aclose)
    assert not listener.addresses
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    with pytest.raises(ConnectionRefusedError):
        await open_rdma_stream(HOST, port)


@on_trio
async def test_a_device_that_is_removed_ends_the_accepting():
    """The test does what the server would do then."""
    [listener] = await open_rdma_listeners(0, host=HOST)
    trio_loop().call_soon(listener._queue.server.close)
    with pytest.raises(trio.BrokenResourceError, match="is gone"):
        await listener.accept()


@on_trio
async def test_who_waits_to_be_accepted_is_aborted_with_the_listener():
    [listener] = await open_rdma_listeners(0, host=HOST, backlog=1)
    port = listener.addresses[0][1]
    async with await open_rdma_stream(HOST, port) as first:
        await until_seen(lambda: listener._queue._arrived)
        async with await open_rdma_stream(HOST, port) as second:
            with pytest.raises(trio.BrokenResourceError):
                await second.receive_some()  # there is no place for it
        await listener.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await first.receive_some()


# ---- the end of a run


def test_a_run_ends_before_its_streams():
    """Nothing is left of them (the fixture that counts looks), and the next run begins anew."""
    left: list[object] = []

    async def main() -> None:
        [listener] = await open_rdma_listeners(0, host=HOST)
        near = await open_rdma_stream(HOST, listener.addresses[0][1])
        await near.send_all(b"hello")
        left.extend((listener, near, await listener.accept(), trio_loop()))

    for _ in range(2):
        left.clear()
        trio.run(main)
        *_, near, far, loop = left
        assert isinstance(near, RdmaStream) and isinstance(far, RdmaStream) and isinstance(loop, TrioLoop)
        assert near.transport.is_closing() and far.transport.is_closing()
        assert loop.is_closed()
        with pytest.raises(RuntimeError, match="has ended"):
            loop.call_soon(print)


@on_trio
async def test_who_forgets_a_stream_is_told():
    near, far = await ends()
    with pytest.warns(ResourceWarning, match="unclosed <RdmaStream"):
        del near
        gc.collect()
    with pytest.raises(trio.BrokenResourceError):
        await far.receive_some()
    await far.aclose()


# ---- the loop


@on_trio
async def test_callbacks_come_in_order_and_timers_at_their_time():
    loop, seen = trio_loop(), []
    over = trio.Event()
    start = loop.time()
    loop.call_later(0.02, lambda: seen.append("late") or over.set())
    loop.call_later(0.01, seen.append, "early")
    loop.call_later(0.01, seen.append, "never").cancel()
    loop.call_soon(loop.call_soon, seen.append, "next turn")
    loop.call_soon(seen.append, "this turn")
    loop.call_soon(seen.append, "never").cancel()
    await trio.to_thread.run_sync(lambda: loop.call_soon_threadsafe(seen.append, "from a thread"))
    await over.wait()
    assert loop.time() >= start + 0.02
    assert seen.index("this turn") < seen.index("next turn")
    assert seen.index("early") < seen.index("late")
    assert sorted(seen) == ["early", "from a thread", "late", "next turn", "this turn"]


@on_trio
async def test_cancelled_timers_are_forgotten():
    loop = trio_loop()
    for _ in range(10_000):
        loop.call_later(1000, print).cancel()
    assert len(loop._timers) <= 200


def test_a_callback_that_raises_is_logged_and_ends_nothing(caplog):
    async def main() -> None:
        def raises() -> None:
            raise ValueError("of a callback")

        loop, seen = trio_loop(), []
        loop.call_soon(raises)
        loop.call_soon(seen.append, "after it")
        await until_seen(lambda: seen)

    trio.run(main)
    assert "of a callback" in caplog.text


@on_trio
async def test_a_coroutine_of_asyncios_is_cancelled_with_its_caller():
    loop, seen = trio_loop(), []

    async def wait() -> None:
        try:
            async with asyncio.timeout(1000):
                seen.append("begun")
                await loop.create_future()
        finally:
            seen.append("undone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.call, wait())
        await until_seen(lambda: seen)
        nursery.cancel_scope.cancel()
    assert seen == ["begun", "undone"]

    async def late() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await wait()
        return "done all the same"

    with trio.CancelScope() as scope:
        scope.cancel()
        assert await loop.call(late()) == "done all the same"

    async def times_out() -> None:
        async with asyncio.timeout(0.001):
            await loop.create_future()

    with pytest.raises(TimeoutError):
        await loop.call(times_out())


# ---- AnyIO


def test_anyios_streams_run_on_trio():
    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)

    async def main() -> None:
        async with (
            await create_rdma_listener(local_host=HOST) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, serve)
            async with await connect_rdma(HOST, listener.extra(SocketAttribute.local_port)) as stream:
                await stream.send(REPEATED[:MIB])
                got = b""
                with anyio.fail_after(LIMIT_S):
                    while len(got) < MIB:
                        got += await stream.receive()
                assert got == REPEATED[:MIB]
                with anyio.move_on_after(0.01) as scope:
                    await stream.receive()
                assert scope.cancelled_caught
                await stream.send_eof()
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
            group.cancel_scope.cancel()

    anyio.run(main, backend="trio")


def test_importing_rdmanet_imports_no_trio():
    code = "import sys, rdmanet, rdmanet.anyio_streams; print('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
