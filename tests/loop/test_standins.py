"""Programs that connect a socket by sock_connect() and then make a transport of it, as aiohttp does."""

import asyncio
import contextvars
import errno
import gc
import socket
import ssl

import pytest
from loop_harness import Echo, Recorder, fabric, peer, plain_server, serving
from test_switch import of_client, of_server

import rdmanet
from tests.support.waiting import begin, until_seen


async def connected(port: int, host: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return sock


async def round_trip(transport, protocol, message=b"hello"):
    before = len(protocol.data)
    transport.write(message)
    await protocol.until(lambda: protocol.data[before:] == message)


async def no_wait(call):
    call()


USES = {
    "sock_sendall": lambda loop, sock: loop.sock_sendall(sock, b"hello"),
    "sock_recv": lambda loop, sock: loop.sock_recv(sock, 5),
    "add_reader": lambda loop, sock: no_wait(lambda: loop.add_reader(sock, print)),
    "add_writer": lambda loop, sock: no_wait(lambda: loop.add_writer(sock.fileno(), print)),
}


@pytest.mark.parametrize("use", USES)
async def test_where_tcp_is_excluded_it_is_never_connected(use):
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, fallback=False)
    async with serving() as (_, port):
        sock = await connected(port)
        with pytest.raises(
            ConnectionRefusedError, match="fallback=False excludes: the program uses the socket itself"
        ):
            await USES[use](loop, sock)
        with pytest.raises(OSError, match="not connected"):
            sock.getpeername()
        transport, protocol = await loop.create_connection(Recorder, sock=sock)  # it stands for it as before
        assert fabric(transport) == "rdma"
        await round_trip(transport, protocol)
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)


@pytest.mark.parametrize("place", [("localhost", "port"), ("127.0.0.1", "text"), ("127.1", "port")])
async def test_where_tcp_is_excluded_a_name_is_not_connected_to(place):
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, fallback=False)
    server, port = await plain_server()
    host, kind = place
    with socket.socket() as sock:
        sock.setblocking(False)
        with pytest.raises(
            ConnectionRefusedError, match=f"only TCP reaches {host} port {port}, which fallback="
        ):
            await loop.sock_connect(sock, (host, str(port) if kind == "text" else port))
        with pytest.raises(OSError, match="not connected"):
            sock.getpeername()
    server.close()


async def test_it_becomes_a_transport():
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        sock = await connected(port)
        assert sock.fileno() >= 0
        transport, protocol = await loop.create_connection(Recorder, sock=sock)
        assert sock.fileno() == -1
        assert isinstance(transport, rdmanet.RdmaTransport) and fabric(transport) == "rdma"
        await round_trip(transport, protocol)
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)
        assert protocol.events == ["made", "data", "lost"]


async def test_streams():
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection(sock=await connected(port))
        assert isinstance(reader, rdmanet.RdmaStreamReader)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


async def test_tls():
    loop = asyncio.get_running_loop()
    async with serving(ssl=of_server()) as (_, port):
        transport, protocol = await loop.create_connection(
            Recorder, sock=await connected(port), ssl=of_client(), server_hostname="localhost"
        )
        assert fabric(transport) == "rdma"
        await round_trip(transport, protocol)
        transport.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await loop.create_connection(
                Recorder, sock=await connected(port), ssl=True, server_hostname="localhost"
            )


async def test_what_came_before_is_not_lost():
    class Greeting(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"welcome")
            transport.close()

    loop = asyncio.get_running_loop()
    async with serving(Greeting) as (server, port):
        sock = await connected(port)
        transport, protocol = await loop.create_connection(Recorder, sock=sock)
        await protocol.until(lambda: "lost" in protocol.events)
        assert (bytes(protocol.data), protocol.events) == (b"welcome", ["made", "data", "eof", "lost"])


async def test_a_peer_that_was_lost_meanwhile():
    loop = asyncio.get_running_loop()
    with peer("echo.py") as server:
        sock = await connected(int(await server.line()))
        assert await server.line() == "rdma"
        server.process.kill()
        await loop.run_in_executor(None, server.process.wait)
        transport, protocol = await loop.create_connection(Recorder, sock=sock)
        await protocol.until(lambda: "lost" in protocol.events)
        assert protocol.events == ["made", "eof", "lost"]


async def test_a_tcp_server_is_connected_by_tcp():
    server, port = await plain_server()
    sock = await connected(port)
    assert sock.getpeername() == ("127.0.0.1", port)
    transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, sock=sock)
    assert fabric(transport) == "tcp"
    assert "no program on this host offers RDMA" in transport.get_extra_info("fabric_reason")
    await round_trip(transport, protocol)
    transport.abort()
    server.close()


async def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError), socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))


async def test_a_socket_that_is_bound_is_connected_by_tcp():
    async with serving() as (_, port):
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            assert sock.getpeername() == ("127.0.0.1", port)


async def test_nobody_waits_any_more_for_tcp_that_fails(monkeypatch):
    """The only call that waited for it was cancelled: then the failure is nobody's."""
    loop = asyncio.get_running_loop()
    failures = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with serving() as (_, port):
        with await connected(port) as sock:
            standins = loop._rdmanet.standins
            fails = loop.create_future()
            monkeypatch.setattr(standins._base, "sock_connect", lambda *_: fails, raising=False)
            sends = loop.create_task(loop.sock_sendall(sock, b"hello"))
            await until_seen(lambda: standins._connecting)
            [begun] = standins._connecting.values()
            assert begun.get_name() == "connect by TCP instead"
            sends.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sends
            fails.set_exception(ConnectionRefusedError("refused"))
            await until_seen(lambda: not standins._connecting)
            del begun
            gc.collect()
            assert not failures


async def test_other_uses_make_it_a_tcp_socket():
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        with await connected(port) as sock:
            await loop.sock_sendall(sock, b"hello")
            assert sock.getpeername() == ("127.0.0.1", port)
            assert await loop.sock_recv(sock, 5) == b"hello"
        with await connected(port) as sock:
            [receiving] = await begin(loop.sock_recv_into(sock, memory := bytearray(5)))
            await loop.sock_sendall(sock, b"hello")
            assert (await receiving, memory) == (5, b"hello")
        for use in (lambda sock: sock, lambda sock: sock.fileno()):
            with await connected(port) as sock:
                writable = loop.create_future()
                loop.add_writer(use(sock), lambda: writable.done() or writable.set_result(None))  # noqa: B023
                await writable
                loop.remove_writer(use(sock))
                sock.send(b"hello")
                readable = loop.create_future()
                loop.add_reader(use(sock), lambda: readable.done() or readable.set_result(None))  # noqa: B023
                await readable
                loop.remove_reader(use(sock))
                assert sock.recv(5) == b"hello"


async def test_a_socket_that_is_thrown_away_ends_the_connection():
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    async with serving(factory) as (_, port):
        sock = await connected(port)
        await until_seen(lambda: made and made[0].events)
        sock.close()
        del sock
        gc.collect()
        await made[0].until(lambda: "lost" in made[0].events)


async def test_what_the_factory_raises_ends_the_connection():
    def factory():
        raise ValueError("no protocol")

    async with serving() as (_, port):
        with pytest.raises(ValueError, match="no protocol"):
            await asyncio.get_running_loop().create_connection(factory, sock=await connected(port))


async def test_a_socket_that_is_closed_ends_the_connection_when_the_loop_connects_again():
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    loop = asyncio.get_running_loop()
    async with serving(factory) as (_, port):
        for again in (connected, lambda port: loop.create_connection(Recorder, "127.0.0.1", port)):
            sock = await connected(port)
            await until_seen(lambda: made and made[-1].events)
            first = made[-1]
            sock.close()
            another = await again(port)
            await first.until(lambda: "lost" in first.events)  # noqa: B023
            assert sock.fileno() == -1  # it is not collected
            (another if isinstance(another, socket.socket) else another[0]).close()


async def test_a_socket_is_connected_once():
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        sock = await connected(port)
        with pytest.raises(OSError) as failed:
            await loop.sock_connect(sock, ("127.0.0.1", port))
        assert failed.value.errno == errno.EISCONN
        transport, protocol = await loop.create_connection(Recorder, sock=sock)
        await round_trip(transport, protocol)
        transport.close()
        with socket.socket() as sock:
            sock.setblocking(False)
            first, second = await asyncio.gather(
                *(loop.sock_connect(sock, ("127.0.0.1", port)) for _ in range(2)), return_exceptions=True
            )
            assert first is None and isinstance(second, OSError) and second.errno == errno.EALREADY


async def test_datagram_calls_make_it_a_tcp_socket():
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.BaseEventLoop):
        return  # uvloop's work with datagrams only
    async with serving() as (_, port):
        memory = bytearray(5)
        for receive in (lambda s: loop.sock_recvfrom(s, 5), lambda s: loop.sock_recvfrom_into(s, memory)):
            with await connected(port) as sock:
                [receiving] = await begin(receive(sock))
                await loop.sock_sendto(sock, b"hello", ("127.0.0.1", port))
                assert (await receiving)[0] in (b"hello", 5)
        assert memory == b"hello"


async def test_connection_made_is_called_as_at_other_connections():
    """In the connection's context, and what it raises goes to the loop."""
    of = contextvars.ContextVar("of", default="nobody")
    seen, told = [], []

    class Raises(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append(of.get())
            raise ValueError("not made")

        def data_received(self, data):
            super().data_received(data)
            seen.append(of.get())

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    async with serving() as (_, port):
        of.set("who connects")
        sock = await connected(port)
        of.set("who takes it over")
        transport, protocol = await loop.create_connection(Raises, sock=sock)
        await round_trip(transport, protocol)
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)
    assert seen == ["who connects"] * 2
    assert [str(error) for error in told] == ["not made"]


async def test_connection_made_of_what_is_over_already():
    """Nothing is left of the connection when a protocol takes it over."""
    told = []

    class Raises(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            raise ValueError("not made")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    async with serving() as (_, port):
        sock = await connected(port)
        [(_, kept, _)] = loop._rdmanet.standins.transports.values()
        kept.abort()
        await until_seen(lambda: kept._life.callbacks.transport is None)
        transport, protocol = await loop.create_connection(Raises, sock=sock)
        await protocol.until(lambda: "lost" in protocol.events)
        assert protocol.transport is transport and protocol.events == ["made", "lost"]
    assert [str(error) for error in told] == ["not made"]


@pytest.mark.parametrize("place", [{"host": "127.0.0.1"}, {"port": 7}, {"host": "127.0.0.1", "port": 7}])
async def test_a_host_beside_the_socket_is_wrong(place):
    """As asyncio says. The socket stands for its connection as before."""
    async with serving() as (_, port):
        with await connected(port) as sock:
            with pytest.raises(ValueError, match="host/port and sock can not be specified at the same time"):
                await asyncio.get_running_loop().create_connection(Recorder, sock=sock, **place)
            transport, _ = await asyncio.get_running_loop().create_connection(Recorder, sock=sock)
            assert fabric(transport) == "rdma"
            transport.abort()


async def test_what_is_no_socket_is_the_bases_error():
    loop = asyncio.get_running_loop()
    base = type(loop).__mro__[2]
    with pytest.raises(AttributeError) as ours:
        await loop.create_connection(Recorder, sock="a name")
    with pytest.raises(AttributeError) as its:
        await base.create_connection(loop, Recorder, sock="a name")
    assert str(ours.value) == str(its.value)
