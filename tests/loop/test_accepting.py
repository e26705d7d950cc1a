"""Programs that accept sockets themselves and make transports of them, as AnyIO's listeners do, or do not."""

import asyncio
import contextlib
import contextvars
import errno
import gc
import resource
import socket
import ssl

import pytest
from loop_harness import Echo, Recorder, fabric

from rdmanet.loop import accepting, doors
from tests.support.certificates import of_client, of_server
from tests.support.waiting import begin, loop_turns, until_seen


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def has_door(port: int) -> bool:
    found = doors.find("127.0.0.1", port)
    if isinstance(found, doors.Found):
        found.socket.close()
    return isinstance(found, doors.Found)


async def accept(listener: socket.socket, **options):
    loop = asyncio.get_running_loop()
    sock, _ = await loop.sock_accept(listener)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await loop.connect_accepted_socket(Echo, sock, **options)


async def connect(port: int, **options):
    return await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port, **options)


async def both(listener: socket.socket, **options):
    """A client, and what the program makes of it."""
    of_client = {"ssl": options["ssl_of_client"], "server_hostname": "localhost"} if options else {}
    of_server = {"ssl": options["ssl"]} if options else {}
    return await asyncio.gather(connect(port_of(listener), **of_client), accept(listener, **of_server))


async def round_trip(transport, protocol, message=b"hello"):
    transport.write(message)
    await protocol.until(lambda: protocol.data == message)


async def offer(listener: socket.socket) -> None:
    """Have the listener's first client."""
    (client, protocol), (server, _) = await both(listener)
    assert (fabric(client), fabric(server)) == ("tcp", "tcp")
    assert server.get_extra_info("fabric_reason") == "the client came by TCP"
    await round_trip(client, protocol)
    client.abort()
    await until_seen(lambda: has_door(port_of(listener)))


async def test_who_comes_after_the_first_client_comes_by_rdma(listener):
    await offer(listener)
    for _ in range(2):
        (client, protocol), (server, served) = await both(listener)
        assert (fabric(client), fabric(server)) == ("rdma", "rdma")
        await round_trip(client, protocol)
        client.close()
        await served.until(lambda: "lost" in served.events)  # noqa: B023
        assert served.events == ["made", "data", "eof", "lost"]


async def test_tcp_is_accepted_beside_it(listener):
    await offer(listener)
    [rdma, plain] = await begin(accept(listener), accept(listener))
    with socket.create_connection(listener.getsockname()) as by_tcp:
        client, protocol = await connect(port_of(listener))
        await round_trip(client, protocol)
        served = await asyncio.gather(rdma, plain)
        assert sorted(fabric(transport) for transport, _ in served) == ["rdma", "tcp"]
        by_tcp.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(by_tcp, b"x")
        assert await loop.sock_recv(by_tcp, 9) == b"x"
    client.abort()


async def test_what_comes_before_it_is_accepted_is_kept(listener):
    await offer(listener)
    client, protocol = await connect(port_of(listener))
    client.write(b"early")
    client.write_eof()
    _, served = await accept(listener)
    await protocol.until(lambda: protocol.data == b"early")
    await served.until(lambda: "lost" in served.events)
    assert served.events == ["made", "data", "eof", "lost"]


async def test_tls(listener):
    await offer(listener)
    (client, protocol), (server, _) = await both(listener, ssl=of_server(), ssl_of_client=of_client())
    assert (fabric(client), fabric(server)) == ("rdma", "rdma")
    assert isinstance(server.get_extra_info("ssl_object"), ssl.SSLObject)
    await round_trip(client, protocol)
    client.abort()


async def test_tls_of_a_client_by_tcp(listener):
    """uvloop's own returns its TLS protocol in the place of the program's."""
    (client, protocol), (server, served) = await both(listener, ssl=of_server(), ssl_of_client=of_client())
    assert (fabric(client), fabric(server)) == ("tcp", "tcp")
    assert isinstance(served, Echo)
    await round_trip(client, protocol)
    client.abort()


async def test_a_program_that_uses_the_sockets_itself_gets_tcps(listener):
    loop = asyncio.get_running_loop()
    for _ in range(3):
        connecting, accepting = connect(port_of(listener)), loop.sock_accept(listener)
        (client, protocol), (sock, _) = await asyncio.gather(connecting, accepting)
        assert fabric(client) == "tcp" and not has_door(port_of(listener))
        with sock:
            await loop.sock_sendall(sock, b"hello")
            await protocol.until(lambda: protocol.data == b"hello")  # noqa: B023
        client.abort()


async def test_a_stand_in_is_not_connected(listener):
    """The program used a transport before, and now the socket: it has an error, and the client an end."""
    await offer(listener)
    loop = asyncio.get_running_loop()
    (client, protocol), (sock, _) = await asyncio.gather(
        connect(port_of(listener)), loop.sock_accept(listener)
    )
    with sock, pytest.raises(OSError):
        await loop.sock_sendall(sock, b"hello")
    await protocol.until(lambda: "lost" in protocol.events)
    assert client.is_closing()


async def test_cancelling_loses_nobody(listener):
    await offer(listener)
    [waiting] = await begin(accept(listener))
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    (client, protocol), (server, _) = await both(listener)
    assert fabric(server) == "rdma"
    await round_trip(client, protocol)
    client.abort()


async def test_a_listener_that_is_closed_offers_nothing(listener):
    await offer(listener)
    port = port_of(listener)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await connect(port)
    assert not has_door(port)
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
    client, protocol = await connect(port)
    assert fabric(client) == "rdma"
    await round_trip(client, protocol)
    client.abort()
    server.close()


async def test_a_listener_that_is_thrown_away_offers_nothing():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await offer(listener)
    offers = asyncio.get_running_loop()._rdmanet.accepting._offers
    assert len(offers) == 1
    with pytest.warns(ResourceWarning):
        del listener
        gc.collect()
    await until_seen(lambda: not offers)


async def test_who_is_not_accepted_is_closed_at_the_end_and_when_there_are_too_many(listener, monkeypatch):
    monkeypatch.setattr(accepting, "BACKLOG", 2)
    await offer(listener)
    clients = [await connect(port_of(listener)) for _ in range(3)]
    # The last to come, which need not be the last to connect: those behind the first come by memory.
    await until_seen(lambda: sum("lost" in protocol.events for _, protocol in clients) == 1)
    listener.close()
    asyncio.get_running_loop()._rdmanet.accepting.sweep()
    for _, protocol in clients:
        await protocol.until(lambda: "lost" in protocol.events)  # noqa: B023


async def test_the_context_is_the_accepting_tasks(listener):
    of = contextvars.ContextVar("of", default="nobody")
    seen = []

    class Looks(Echo):
        def data_received(self, data):
            seen.append(of.get())
            super().data_received(data)

    async def make(sock):
        of.set("the first client's task")
        return await asyncio.get_running_loop().connect_accepted_socket(Looks, sock)

    loop = asyncio.get_running_loop()
    of.set("the acceptor")
    for expected in ("tcp", "rdma"):
        (client, protocol), (sock, _) = await asyncio.gather(
            connect(port_of(listener)), loop.create_task(loop.sock_accept(listener))
        )
        await loop.create_task(make(sock))
        assert fabric(client) == expected
        await round_trip(client, protocol)
        client.abort()
        await until_seen(lambda: has_door(port_of(listener)))
    assert seen[1] == "the acceptor"


async def test_who_accepts_already_when_the_first_client_becomes_a_transport_serves_rdma(listener):
    loop = asyncio.get_running_loop()
    served = []

    async def serve():
        while True:
            sock, _ = await loop.sock_accept(listener)
            served.append(loop.create_task(loop.connect_accepted_socket(Echo, sock)))

    [serving] = await begin(serve())
    for expected in ("tcp", "rdma"):
        client, protocol = await connect(port_of(listener))
        await round_trip(client, protocol)
        transport, _ = await served[-1]
        assert (fabric(client), fabric(transport)) == (expected, expected)
        client.abort()
        await until_seen(lambda: has_door(port_of(listener)))
    serving.cancel()


async def test_cancelling_before_there_is_rdma_loses_nobody(listener):
    loop = asyncio.get_running_loop()
    for turns in range(4):
        [accepting] = await begin(loop.sock_accept(listener))
        with socket.create_connection(listener.getsockname()) as client:
            await loop_turns(turns)
            if accepting.done() or not accepting.cancel():
                sock, address = await accepting
            else:
                with pytest.raises(asyncio.CancelledError):
                    await accepting
                sock, address = await loop.sock_accept(listener)
            with sock:
                assert address == client.getsockname()


async def test_of_a_listener_whose_clients_never_become_transports_nothing_is_left():
    loop = asyncio.get_running_loop()
    offers = loop._rdmanet.accepting._offers
    for is_closed in (True, False):
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname()):
            sock, _ = await loop.sock_accept(listener)
            sock.close()
        assert len(offers) == 1
        if is_closed:
            listener.close()
            loop._rdmanet.accepting.sweep()
        else:
            with pytest.warns(ResourceWarning):
                del listener
                gc.collect()
            await until_seen(lambda: not offers)
        assert not offers


async def test_a_listener_that_blocks_is_the_bases(listener):
    loop = asyncio.get_running_loop()
    listener.setblocking(True)
    loop.set_debug(True)
    with pytest.raises(ValueError, match="non-blocking"):
        await loop.sock_accept(listener)


async def test_who_comes_when_descriptors_have_run_out_is_accepted_later(listener):
    await offer(listener)
    loop = asyncio.get_running_loop()
    client, protocol = await connect(port_of(listener))
    [offered] = loop._rdmanet.accepting._offers.values()
    await until_seen(lambda: offered._arrived)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        for _ in range(2):  # one for each kind of clients
            with pytest.raises(OSError) as failed:
                await loop.sock_accept(listener)
            assert failed.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    server, _ = await accept(listener)
    assert fabric(server) == "rdma"
    await round_trip(client, protocol)
    client.abort()
