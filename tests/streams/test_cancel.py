"""Cancellation at every await: by construction, at the n-th suspension for each n there is.

An operation is run again and again; each time it is cancelled one suspension later, until it ends
before the cancellation comes. Each place is tried in two ways: while what it waits for is still to
come, and just when it has come (the task is cancelled between the result and its resumption: where
a connection that exists but was never handed out would be lost). Afterwards nothing is left, which
the leak fixture counts, and the other connections are as before.
"""

import asyncio
import socket
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from harness import HOST, OFFERABLE, Echo, Net

import rdmanet
from tests.support.waiting import loop_turns, until_seen

MIB = 1 << 20


@types.coroutine
def suspended(coroutine: Coroutine[Any, Any, Any], nth: int, late: bool):
    """Run `coroutine` and cancel the current task at its nth suspension (from 0).

    Returns (how often it was suspended, its result).
    """
    task = asyncio.current_task()
    assert task is not None
    count = 0
    send, value = coroutine.send, None
    while True:
        try:
            future = send(value)
        except StopIteration as end:
            return count, end.value
        if count == nth:
            if late and future is not None:
                future.add_done_callback(lambda _: task.cancel())
            else:
                asyncio.get_running_loop().call_soon(task.cancel)
        count += 1
        send = coroutine.send
        try:
            value = yield future
        except BaseException as error:
            send, value = coroutine.throw, error


async def at_every_suspension(
    operation: Callable[[], Coroutine[Any, Any, Any]],
    late: bool,
    after: Callable[[Any, bool], Awaitable[None]] | None = None,
) -> int:
    """Cancel `operation` at each of its suspensions; `after(result, cancelled)` looks what is left."""
    nth = 0
    while True:

        async def run(nth: int = nth) -> Any:
            return await suspended(operation(), nth, late)

        task = asyncio.create_task(run())
        cancelled, result, count = False, None, None
        try:
            count, result = await task
        except asyncio.CancelledError:
            assert not asyncio.current_task().cancelling()
            cancelled = True
        if after is not None:
            await after(result, cancelled)
        if count is not None and count <= nth:
            return nth
        nth += 1
        assert nth < 1000, "it never ends without being cancelled"


@pytest.fixture(params=[False, True], ids=["early", "late"])
def late(request) -> bool:
    return request.param


async def test_connect(net: Net, late):
    _, port = await net.serve(Echo)
    bystander, _ = await net.pair(server=Echo)

    async def connect():
        return await net.connect(port)

    async def look(client, cancelled):
        if client is not None:
            client.transport.write(b"made it")
            await client.until_received(7)
            client.transport.abort()
            await client.until_lost()
        bystander.transport.write(b"x")
        await bystander.until_received(bystander.received + 1)

    assert await at_every_suspension(connect, late, look) >= 1
    await everybody_gone(net, bystander)


async def everybody_gone(net: Net, *but: Any) -> None:
    """What a cancelled connect had made on the server ends there too, and never as a clean file."""
    for recorder in list(net.recorders):
        if recorder.transport is not None and recorder not in but and not isinstance(recorder, Echo):
            await recorder.until_lost()


async def test_open_streams(net: Net, late):
    _, port = await net.serve(Echo)

    async def connect():
        return await rdmanet.open_rdma_connection(HOST, port)

    async def look(streams, cancelled):
        if streams is not None:
            streams[1].close()
            await streams[1].wait_closed()

    assert await at_every_suspension(connect, late, look) >= 1


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_connect_to_a_name(net: Net, late, monkeypatch):
    """Resolving takes a thread of the loop's executor; cancelling that leaves nothing either."""
    resolve, waits = socket.getaddrinfo, threading.Event()

    def resolve_later(*arguments, **keywords):
        """From Python 3.14 on, a loop does not wait for an answer that is there already."""
        assert waits.wait(30)
        return resolve(*arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)
    waits.set()
    server = await rdmanet.start_rdma_server(net.remember(Echo), "localhost", 0)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]

    async def connect():
        waits.clear()
        asyncio.get_running_loop().call_soon(waits.set)
        return await rdmanet.create_rdma_connection(net.remember(asyncio.Protocol), "localhost", port)

    async def look(made, cancelled):
        if made is not None:
            made[0].abort()

    assert await at_every_suspension(connect, late, look) >= 2


async def test_connect_to_nobody(net: Net, late):
    server, port = await net.serve()
    server.close()

    async def connect():
        with pytest.raises(OSError):
            await net.connect(port)

    await at_every_suspension(connect, late)  # of which soft-iWARP may have none: it refuses within the call


async def test_start_server(net: Net, late):
    async def start():
        return await rdmanet.start_rdma_server(Echo, HOST, port)

    async def look(server, cancelled):
        if server is not None:
            server.close()
            await server.wait_closed()
        # The port is free again, whichever way it went.
        server = await rdmanet.start_rdma_server(Echo, HOST, port)
        server.close()
        await server.wait_closed()

    first, port = await net.serve()
    first.close()
    await first.wait_closed()
    await at_every_suspension(start, late, look)


@pytest.mark.parametrize("read", ["read", "readexactly", "readline", "readuntil"])
async def test_read(net: Net, late, read):
    """A cancelled read takes nothing: what has come stays for the next."""
    reader, _, _, far = await net.stream_pair()

    async def operation():
        net.loop.call_soon(far.write, b"12345678\n")
        return await {
            "read": lambda: reader.read(9),
            "readexactly": lambda: reader.readexactly(9),
            "readline": lambda: reader.readline(),
            "readuntil": lambda: reader.readuntil(b"\n"),
        }[read]()

    async def look(text, cancelled):
        if cancelled:
            text = await reader.readexactly(9)
        assert text == b"12345678\n"

    assert await at_every_suspension(operation, late, look) == 1


async def test_drain(net: Net, late):
    """What was written stays written; only the wait ends."""
    reader, _, _, far = await net.stream_pair()
    far.transport.set_write_buffer_limits(high=0)
    text = b"d" * (4 * MIB)

    async def operation():
        far.write(text)
        reading.append(asyncio.ensure_future(reader.readexactly(len(text))))
        await far.drain()

    async def look(_, cancelled):
        assert await reading.pop() == text

    reading: list[asyncio.Future[bytes]] = []
    assert await at_every_suspension(operation, late, look) >= 1


async def test_wait_closed_of_a_writer(net: Net, late):
    _, port = await net.serve(Echo)
    _, writer = await net.open(port)

    async def operation():
        nonlocal writer
        _, writer = await rdmanet.open_rdma_connection(HOST, port)
        writer.write(b"c" * MIB)
        writer.close()
        await writer.wait_closed()

    async def look(_, cancelled):
        writer.close()
        await writer.wait_closed()

    await at_every_suspension(operation, late, look)


async def test_an_error_after_a_cancelled_wait_is_not_reported(net: Net):
    """asyncio.shield() reports it from Python 3.14 on."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    served: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await rdmanet.start_rdma_stream_server(lambda _, writer: served.put_nowait(writer), HOST, 0)
    _, writer = await rdmanet.open_rdma_connection(*server.sockets[0].getsockname()[:2])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await writer.wait_closed()
    far = await served.get()
    far.transport.abort()
    with pytest.raises(OSError):
        await writer.wait_closed()
    server.close()
    await server.wait_closed()
    assert not reported


async def test_wait_closed_of_a_server(net: Net, late):
    server, port = await net.serve(Echo)
    client = await net.connect(port)
    client.transport.write(b"x")
    await client.until_received(1)
    server.close()

    async def look(_, cancelled):
        if cancelled:
            client.transport.write(b"still here")
            await client.until_received(client.received + 10)
            client.transport.close()

    assert await at_every_suspension(server.wait_closed, False, look) == 1


async def test_serve_forever(net: Net, late):
    """Cancelling it is how it ends: the server is closed, its port free."""
    for _ in range(3):
        server, port = await net.serve(Echo, start_serving=False)
        task = asyncio.create_task(suspended_forever(server, late))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.is_serving()
        again, _ = await net.serve_on(port)
        again.close()


async def suspended_forever(server: Any, late: bool) -> None:
    await suspended(server.serve_forever(), 0, False)


async def test_offer(net: Net, late):
    """Entering, staying in and leaving the block: the region is always revoked in the end."""
    client, server = await net.pair()
    with server.transport.get_extra_info("rdma_pd").alloc_mr(100, OFFERABLE) as mr:

        async def operation():
            async with server.transport.offer(mr):
                await client.until(lambda: len(client.offered) > len(client.revoked))
                await client.offered[-1].read()

        async def look(_, cancelled):
            # A next offer and its end push the acknowledgement of the last one through.
            async with server.transport.offer(mr):
                pass
            await client.until(lambda: len(client.offered) == len(client.revoked))
            assert all(remote.revoked for remote in client.offered)
            # One that was cancelled while it waited goes on by itself; only then may the memory go.
            await until_seen(lambda: not server.transport._life.regions._bindings)

        assert await at_every_suspension(operation, late, look) >= 2


@pytest.mark.parametrize("what", ["read", "write"])
async def test_remote_operations(net: Net, late, what):
    client, server = await net.pair()
    with server.transport.get_extra_info("rdma_pd").alloc_mr(MIB, OFFERABLE) as mr:
        async with server.transport.offer(mr, access="read,write"):
            await client.until(lambda: bool(client.offered))
            remote = client.offered[0]

            async def operation():
                if what == "read":
                    return await remote.read()
                await remote.write(0, bytes(MIB))

            assert await at_every_suspension(operation, late) >= 1


async def test_timeout_while_connecting(net: Net):
    """asyncio.timeout is a cancellation, and reads as TimeoutError."""
    _, port = await net.serve(Echo)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await net.connect(port)
    client = await net.connect(port)
    client.transport.write(b"later")
    await client.until_received(5)


@pytest.mark.not_on_siw("lets go of an identifier that connects when it is answered, or after ten seconds")
async def test_a_hundred_connects_cancelled_together(net: Net, fewer):
    _, port = await net.serve(Echo)
    for turns in range(12):
        tasks = [asyncio.create_task(net.connect(port)) for _ in range(fewer(20))]
        await loop_turns(turns)
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(made, BaseException):
                made.transport.abort()
    client = await net.connect(port)
    client.transport.write(b"fine")
    await client.until_received(4)


async def test_a_connect_that_is_cancelled_when_the_connection_is_there(net: Net):
    """Its factory's exception is nobody's then."""
    _, port = await net.serve(Echo)

    def factory():
        connecting.cancel()
        raise ConnectionAbortedError("nobody wants it")

    connecting = asyncio.ensure_future(rdmanet.create_rdma_connection(factory, HOST, port))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert not net.complaints
