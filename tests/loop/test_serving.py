"""The server of both fabrics is asyncio's, method by method."""

import asyncio
import errno
import gc
import socket
import sys
import weakref

import pytest
import uvloop
from loop_harness import Echo, Recorder, fabric, serving

import rdmanet
from rdmanet.loop import doors, loading
from rdmanet.loop import serving as serving_module
from rdmanet.stream import loop_context
from tests.support.waiting import begin, loop_turns, until_seen


async def connected(port: int):
    transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
    assert fabric(transport) == "rdma"
    return transport, protocol


def has_door(port: int) -> bool:
    found = doors.find("127.0.0.1", port)
    if isinstance(found, doors.Found):
        found.socket.close()
    return isinstance(found, doors.Found)


async def test_it_is_an_abstract_server():
    loop = asyncio.get_running_loop()
    async with await loop.create_server(Echo, "127.0.0.1", 0) as server:
        assert isinstance(server, asyncio.AbstractServer)
        assert server.get_loop() is loop and server.is_serving()
        [listener] = server.sockets
        port = listener.getsockname()[1]
        assert (listener.family, listener.type) == (socket.AF_INET, socket.SOCK_STREAM)
        assert listener.fileno() >= 0 and has_door(port) and "DualServer" in repr(server)
        with pytest.raises(AttributeError):
            _ = server.no_such_thing
        assert type(server.sockets) is (list if isinstance(loop, uvloop.Loop) else tuple)
    assert not server.is_serving() and not server.sockets and not has_door(port)
    server.close()
    with pytest.raises(OSError):
        await connected(port)


async def test_it_may_start_later():
    async with serving(start_serving=False) as (server, port):
        assert not server.is_serving() and not has_door(port)
        await server.start_serving()
        await server.start_serving()
        assert server.is_serving() and has_door(port)
        transport, _ = await connected(port)
        transport.close()


async def test_what_takes_long_is_done_before_it_listens(monkeypatch: pytest.MonkeyPatch):
    """A client that comes when TCP listens and there is no door takes TCP: the time between is to be short."""
    answers: list[int] = []
    load = loading.load
    async with serving(start_serving=False) as (server, port):

        def spy(**options: bool) -> None:
            with socket.socket() as client:
                answers.append(client.connect_ex(("127.0.0.1", port)))
            load(**options)

        monkeypatch.setattr(loading, "load", spy)
        await server.start_serving()
        assert has_door(port)
    assert answers[0] == errno.ECONNREFUSED and answers[-1] == 0


async def test_several_hosts():
    async with serving(host=["127.0.0.1", "127.0.0.2"]) as (server, _):
        for listener in server.sockets:
            host, port = listener.getsockname()
            transport, _ = await asyncio.get_running_loop().create_connection(Recorder, host, port)
            assert fabric(transport) == "rdma"
            transport.close()


async def test_a_bound_socket_of_the_programs():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(Echo, sock=sock)
    transport, _ = await connected(server.sockets[0].getsockname()[1])
    transport.close()
    server.close()


async def test_a_socket_of_both_families():
    sock = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, sock=sock)
    for host in ("127.0.0.1", "::1"):
        transport, _ = await loop.create_connection(Recorder, host, server.sockets[0].getsockname()[1])
        assert fabric(transport) == "rdma"
        transport.close()
    server.close()


async def test_a_taken_port_is_an_error_as_before():
    async with serving() as (_, port):
        with pytest.raises(OSError, match="in use"):
            await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
        transport, _ = await connected(port)
        transport.close()


async def test_connections_outlive_it():
    async with serving() as (server, port):
        transport, protocol = await connected(port)
        server.close()
        transport.write(b"x")
        await protocol.until(lambda: protocol.data == b"x")
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)


async def test_wait_closed_waits_as_the_bases():
    async with serving() as (server, port):
        transport, protocol = await connected(port)
        server.close()
        [waiting] = await begin(server.wait_closed())
        await loop_turns(5)
        waits = sys.version_info >= (3, 12) and not isinstance(asyncio.get_running_loop(), uvloop.Loop)
        assert waiting.done() is not waits
        transport.close()
        await waiting
        await protocol.until(lambda: "lost" in protocol.events)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_its_clients_are_closed(how):
    async with serving() as (server, port):
        transport, protocol = await connected(port)
        transport.write(b"x")
        await protocol.until(lambda: protocol.data == b"x")
        getattr(server, f"{how}_clients")()
        await protocol.until(lambda: "lost" in protocol.events)
        assert protocol.error is None


async def test_serve_forever_ends_its_connections():
    async with serving(start_serving=False) as (server, port):
        [task] = await begin(server.serve_forever())
        await until_seen(lambda: has_door(port))
        transport, protocol = await connected(port)
        with pytest.raises(RuntimeError, match="already being awaited"):
            await server.serve_forever()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await protocol.until(lambda: "lost" in protocol.events)
        assert not server.is_serving() and not has_door(port)
        with pytest.raises(RuntimeError, match="is closed"):
            await server.serve_forever()


async def test_serve_forever_is_awaited_once():
    """The second call may come while the first one still begins to serve."""
    async with serving(start_serving=False) as (server, _):
        first, second = await begin(server.serve_forever(), server.serve_forever())
        with pytest.raises(RuntimeError, match="already being awaited"):
            await second
        server.close()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_close_ends_serve_forever():
    async with serving() as (server, _):
        [task] = await begin(server.serve_forever())
        await loop_turns(2)
        server.close()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_server_that_nobody_closes_ends_with_its_loop(base):
    async def main():
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert has_door(port)
        server._tcp.close()
        return port, server

    port, _ = rdmanet.run(main(), loop_factory=base)
    with socket.create_server(("127.0.0.1", port)):
        assert not has_door(port)


async def test_connections_have_the_context_of_the_caller():
    import contextvars

    name = contextvars.ContextVar("name", default="")
    seen = []

    class Seen(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(name.get())
            name.set("changed")

    name.set("the server's")
    async with serving(Seen) as (_, port):
        name.set("the client's")
        for _ in range(2):
            transport, protocol = await connected(port)
            transport.write(b"x")
            await protocol.until(lambda: protocol.data == b"x")  # noqa: B023
            transport.close()
    assert seen == ["the server's"] * 2


async def test_it_serves_when_the_program_drops_it():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    kept, port = weakref.ref(server), server.sockets[0].getsockname()[1]
    del server
    gc.collect()
    transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
    assert fabric(transport) == "rdma"
    transport.write(b"hello")
    await protocol.until(lambda: protocol.data == b"hello")
    transport.close()
    await protocol.until(lambda: "lost" in protocol.events)
    kept().close()
    await loop_turns(10)
    gc.collect()
    assert kept() is None


async def test_closing_it_while_it_tries_again_ends_it(monkeypatch):
    """Somebody has the name that the embedded device needs, and lets it go when the server is closed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0, start_serving=False)
    port = server.sockets[0].getsockname()[1]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0rdmanet-stream/127.0.0.1/{port}")

        def nobody(host, port):
            loop.call_soon(server.close)
            stranger.close()

        monkeypatch.setattr(serving_module, "owner", nobody)
        await server.start_serving()
    assert server._rdma == [] and not server.is_serving() and not has_door(port)
    again = await rdmanet.start_rdma_server(Echo, "127.0.0.1", port)
    again.close()


async def test_closing_it_while_it_looks_for_devices_ends_it(monkeypatch):
    original = loop_context.loop_context_for

    async def slow(*arguments):
        await looking.wait()
        return await original(*arguments)

    looking = asyncio.Event()
    monkeypatch.setattr(loop_context, "loop_context_for", slow)
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, start_serving=False)
    port = server.sockets[0].getsockname()[1]
    [starting] = await begin(server.start_serving())
    await until_seen(server.is_serving)
    await loop_turns(3)
    server.close()
    looking.set()
    await starting
    assert server._rdma == [] and not has_door(port)
    monkeypatch.undo()
    again = await rdmanet.start_rdma_server(Echo, "127.0.0.1", port)
    again.close()
