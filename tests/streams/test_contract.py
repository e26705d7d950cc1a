"""asyncio's surface, method by method: what create_connection and its transport do, ours do."""

import array
import asyncio
import contextlib
import ctypes
import errno
import inspect
import logging
import mmap
import re
import socket

import pytest
from harness import HOST, Echo, HalfOpen, Net, Recorder

import rdmanet
from rdmanet.stream import addresses
from rdmanet.transport import RdmaTransport
from tests.support.ports import free_port
from tests.support.waiting import begin

pytestmark = pytest.mark.once

# What has no meaning over RDMA yet, with a value that asks for it.
UNBUILT = {
    "sock": object(),
    "happy_eyeballs_delay": 0.25,
    "interleave": 1,
    "reuse_port": True,
}


def mmap_of(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memory


def keywords(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


# ---- the functions


async def test_every_keyword_of_create_connection_is_known(net: Net):
    _, port = await net.serve(Echo)
    given = keywords(asyncio.BaseEventLoop.create_connection)
    client = await net.connect(port, **given)
    client.transport.write(b"x")
    await client.until_received(1)


async def test_every_keyword_of_create_server_is_known(net: Net):
    given = keywords(asyncio.BaseEventLoop.create_server)
    given["family"] = socket.AF_UNSPEC
    given["flags"] = 0
    await net.serve(Echo, **given)


@pytest.mark.parametrize(
    "name", [n for n in keywords(asyncio.BaseEventLoop.create_connection) if n in UNBUILT]
)
async def test_what_is_not_built_says_so_when_connecting(net: Net, name):
    for function in (rdmanet.create_rdma_connection, rdmanet.open_rdma_connection):
        first = [Recorder] if function is rdmanet.create_rdma_connection else []
        with pytest.raises(NotImplementedError, match=rf"^{function.__name__}\(\) .*{name}.*rdmanet.run"):
            await function(*first, HOST, 1, **{name: UNBUILT[name]})


@pytest.mark.parametrize("name", [n for n in keywords(asyncio.BaseEventLoop.create_server) if n in UNBUILT])
async def test_what_is_not_built_says_so_when_listening(net: Net, name):
    for function in (rdmanet.start_rdma_server, rdmanet.start_rdma_stream_server):
        with pytest.raises(NotImplementedError, match=rf"^{function.__name__}\(\) .*{name}.*rdmanet.run"):
            await function(Recorder, HOST, 0, **{name: UNBUILT[name]})


async def test_an_unknown_keyword_is_a_type_error(net: Net):
    with pytest.raises(TypeError, match="colour"):
        await rdmanet.create_rdma_connection(Recorder, HOST, 1, colour="red")
    with pytest.raises(TypeError, match="colour"):
        await rdmanet.start_rdma_server(Recorder, HOST, 0, colour="red")


async def test_a_coroutine_function_is_no_factory(net: Net):
    async def serve(reader, writer):
        pass

    with pytest.raises(TypeError, match="start_rdma_stream_server"):
        await rdmanet.start_rdma_server(serve, HOST, 0)


async def test_host_and_port_are_needed(net: Net):
    for host, port in [(None, None), (HOST, None), (None, 1)]:
        with pytest.raises((ValueError, TypeError)):
            await rdmanet.create_rdma_connection(Recorder, host, port)


@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_out_of_range(net: Net, port):
    with pytest.raises((OverflowError, OSError)):
        await rdmanet.create_rdma_connection(Recorder, HOST, port)


async def test_an_address_of_another_family(net: Net):
    with pytest.raises(OSError):
        await rdmanet.create_rdma_connection(Recorder, HOST, 1, family=socket.AF_INET6)


async def test_an_address_that_is_not_ours(net: Net):
    """A server elsewhere is refused, not ignored."""
    with pytest.raises(OSError):
        await rdmanet.start_rdma_server(Recorder, "198.51.100.77", 0)


async def test_no_address_at_all():
    with pytest.raises(ValueError, match=r"host=\[\] names no address"):
        await rdmanet.start_rdma_server(Recorder, [], 0)


async def test_a_device_that_is_not_there(net: Net):
    with pytest.raises(rdmanet.DeviceNotFoundError, match="nobody0") as caught:
        await rdmanet.create_rdma_connection(Recorder, HOST, 1, device="nobody0")
    assert caught.value.errno == errno.ENODEV
    with pytest.raises(rdmanet.DeviceNotFoundError, match="nobody0"):
        await rdmanet.start_rdma_server(Recorder, HOST, 0, device="nobody0")


async def test_what_the_environment_asks_for_is_not_there(net: Net, monkeypatch):
    monkeypatch.setenv("RDMANET_DEVICE", "nobody0")
    with pytest.raises(rdmanet.DeviceNotFoundError, match="nobody0"):
        await rdmanet.create_rdma_connection(Recorder, HOST, 1)
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    monkeypatch.delenv("RDMANET_DEVICE")
    monkeypatch.setattr(addresses, "_device_names", lambda library: [])
    for begun in (
        rdmanet.create_rdma_connection(Recorder, HOST, 1),
        rdmanet.start_rdma_server(Recorder, HOST, 0),
    ):
        with pytest.raises(rdmanet.DeviceNotFoundError, match="RDMANET_REQUIRE=rdma"):
            await begun
    monkeypatch.setenv("RDMANET_REQUIRE", "rmda")
    with pytest.raises(
        OSError, match="RDMANET_REQUIRE=rmda: set it to rdma or no-tcp, or unset it"
    ) as caught:
        await rdmanet.create_rdma_connection(Recorder, HOST, 1)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_several_hosts_one_server(net: Net):
    server = await rdmanet.start_rdma_server(net.remember(Echo), ["127.0.0.1", "::1"], 0)
    net.servers.append(server)
    names = [sock.getsockname() for sock in server.sockets]
    assert {name[0] for name in names} == {"127.0.0.1", "::1"}
    for host, port, *_ in names:
        _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), host, port)
        client.transport.write(b"x")
        await client.until_received(1)


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_all_addresses_of_both_families(net: Net):
    """One port for both, as asyncio has it."""
    server = await rdmanet.start_rdma_server(net.remember(Echo), ["0.0.0.0", "::"], 0)
    net.servers.append(server)
    names = [sock.getsockname() for sock in server.sockets]
    assert [name[0] for name in names] == ["0.0.0.0", "::"]
    again = await rdmanet.start_rdma_server(net.remember(Echo), None, 0)
    net.servers.append(again)
    assert {name[0] for name in (sock.getsockname() for sock in again.sockets)} == {"0.0.0.0", "::"}
    for host, (_, port, *_) in zip(["127.0.0.1", "::1"], names, strict=True):
        _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), host, port)
        client.transport.write(b"x")
        await client.until_received(1)


@pytest.mark.embedded_only("a device of the kernel has a port space of its own")
@pytest.mark.parametrize("host", [None, ""])
async def test_all_addresses_beside_tcp(net: Net, host):
    """TCP has the port on all addresses of both families, and so has RDMA, when it comes second."""

    def tcp_protocol():
        raise AssertionError("a connection by TCP")

    port = free_port()
    async with (
        await net.loop.create_server(tcp_protocol, "0.0.0.0", port),
        await net.loop.create_server(tcp_protocol, "::", port),
    ):
        server = await rdmanet.start_rdma_server(net.remember(Echo), host, port)
        net.servers.append(server)
        assert [sock.getsockname()[:2] for sock in server.sockets] == [("0.0.0.0", port), ("::", port)]
        for loopback in ("127.0.0.1", "::1"):
            _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), loopback, port)
            client.transport.write(b"x")
            await client.until_received(1)


@pytest.mark.embedded_only("a device of the kernel has a port space of its own")
async def test_a_port_passes_between_tcp_and_rdma_at_once(net: Net):
    """Old connections of one keep no port from the other: each server has ended them itself (TIME_WAIT)."""

    async def over_tcp(reader, writer):
        writer.close()

    port = free_port()
    for _ in range(2):
        async with await asyncio.start_server(over_tcp, HOST, port):
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        server = await rdmanet.start_rdma_server(net.remember(Echo), HOST, port)
        _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), HOST, port)
        client.transport.write(b"x")
        await client.until_received(1)
        server.close()
        server.abort_clients()
        await client.until_lost()
        await server.wait_closed()


@pytest.mark.embedded_only("a device of the kernel says it in its own way")
async def test_an_address_of_another_host(net: Net):
    with pytest.raises(OSError, match="no interface of this host has this address") as caught:
        await rdmanet.start_rdma_server(Recorder, "198.51.100.7", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL


def leave_connections(port: int) -> None:
    """Of IPv4, as a server's that has just ended."""
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        server.accept()[0].close()
        assert not client.recv(1)


@pytest.mark.embedded_only("a device of the kernel has a port space of its own")
@pytest.mark.parametrize("beside", ["nothing", "old connections", "a TCP program"])
async def test_all_addresses_or_none(net: Net, beside: str):
    """If one of them is taken, the error says which and why, and 0.0.0.0 is free again. Who listens at addresses of
    IPv4 alone has not taken those of IPv6."""
    port = free_port()
    if beside == "old connections":
        leave_connections(port)
    with contextlib.ExitStack() as stack:
        if beside == "a TCP program":
            stack.enter_context(socket.create_server(("0.0.0.0", port)))
        held = stack.enter_context(socket.socket(socket.AF_INET6))
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind(("::", port))
        with pytest.raises(OSError, match=rf"\[::\]:{port}.*start the TCP server first") as caught:
            await rdmanet.start_rdma_server(Recorder, None, port)
        assert caught.value.errno == errno.EADDRINUSE
    server = await rdmanet.start_rdma_server(Recorder, None, port)
    net.servers.append(server)


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_a_wildcard_listens_on_loopback_too(net: Net):
    server = await rdmanet.start_rdma_server(net.remember(Echo), None, 0, family=socket.AF_INET)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]
    _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), "127.0.0.1", port)
    client.transport.write(b"x")
    await client.until_received(1)


# ---- the transport


async def test_the_transport_is_one(net: Net):
    client, server = await net.pair()
    for transport in (client.transport, server.transport):
        assert isinstance(transport, asyncio.Transport)
        assert isinstance(transport, RdmaTransport) and type(transport) is RdmaTransport
        for kind in (asyncio.BaseTransport, asyncio.ReadTransport, asyncio.WriteTransport, asyncio.Transport):
            for method in vars(kind):
                if not method.startswith("_"):
                    assert callable(getattr(transport, method)), method
        assert HOST in repr(transport)
        qp = transport.get_extra_info("rdma_qp")
        assert re.search(
            rf"<RdmaTransport open .* qp={qp:#x} credits=\d+/16 write_buffer=0 bytes>", repr(transport)
        )
    client.transport.abort()
    await client.until_lost()
    assert "RdmaTransport closed" in repr(client.transport) and "credits" not in repr(client.transport)


async def test_connection_made_comes_before_create_connection_returns(net: Net):
    _, port = await net.serve()
    transport, protocol = await rdmanet.create_rdma_connection(net.remember(Recorder), HOST, port)
    assert protocol.events[0] == "made"
    assert protocol.transport is transport
    assert transport.get_protocol() is protocol
    assert not transport.is_closing()
    assert transport.is_reading()


async def test_extra_info(net: Net):
    client, server = await net.pair()
    near, far = client.transport.get_extra_info, server.transport.get_extra_info
    assert near("peername") == far("sockname")
    assert near("sockname") == far("peername")
    assert near("peername")[0] == HOST
    assert isinstance(near("peername")[1], int)
    assert isinstance(near("rdma_device"), str)
    assert near("rdma_pd") is not None
    assert near("rdma_stats") is not None
    assert near("sslcontext") is None
    assert near("no such key") is None
    assert near("no such key", "default") == "default"
    client.transport.close()
    await client.until_lost()
    assert near("peername")[0] == HOST  # as after a socket's end: logs want it


async def test_what_looks_like_a_socket(net: Net):
    server, port = await net.serve()
    client = await net.connect(port)
    listening, connected = server.sockets[0], client.transport.get_extra_info("socket")
    for sock in (listening, connected):
        assert sock.family == (socket.AF_INET6 if ":" in HOST else socket.AF_INET)
        assert sock.type == socket.SOCK_STREAM
        assert isinstance(sock.proto, int)
        assert (sock.fileno() == -1) == (sock is listening)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert isinstance(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), int)
    assert listening.getsockname()[:2] == (HOST, port)
    assert connected.getpeername()[:2] == (HOST, port)
    assert connected.getsockname() == client.transport.get_extra_info("sockname")
    with pytest.raises(OSError):
        listening.getpeername()


@pytest.mark.parametrize("wrong", ["text", None, 7, [b"x"], object()])
async def test_writing_what_is_not_bytes(net: Net, wrong):
    client, server = await net.pair()
    with pytest.raises(TypeError):
        client.transport.write(wrong)
    if wrong != [b"x"]:
        with pytest.raises(TypeError):
            client.transport.writelines([wrong])
    client.transport.write(b"fine")
    assert await server.until_received(4) == b"fine"


@pytest.mark.parametrize(
    "data",
    [array.array("H", b"abcdef"), (ctypes.c_uint16 * 3).from_buffer_copy(b"abcdef"), mmap_of(b"abcdef")],
    ids=["array", "ctypes", "mmap"],
)
async def test_writing_any_bytes_like_object(net: Net, data):
    """uvloop's TCP takes them; asyncio's refuses them, though it calls for bytes-like objects."""
    client, server = await net.pair()
    client.transport.write(data)
    client.transport.writelines([data, b";"])
    assert await server.until_received(13) == b"abcdefabcdef;"


async def test_write_buffer_limits(net: Net):
    client, _ = await net.pair()
    transport = client.transport
    low, high = transport.get_write_buffer_limits()
    assert 0 <= low <= high
    transport.set_write_buffer_limits(high=1000)
    assert transport.get_write_buffer_limits() == (250, 1000)
    transport.set_write_buffer_limits(low=100)
    assert transport.get_write_buffer_limits() == (100, 400)
    transport.set_write_buffer_limits(high=7, low=7)
    assert transport.get_write_buffer_limits() == (7, 7)
    transport.set_write_buffer_limits()
    assert transport.get_write_buffer_limits() == (16384, 65536)
    transport.set_write_buffer_limits(high=0.5 * 2**20)  # as asyncio's and uvloop's
    assert transport.get_write_buffer_limits() == (2**17, 2**19)
    transport.set_write_buffer_limits(high=2**70)
    assert transport.get_write_buffer_limits()[1] >= 2**62
    for wrong in ({"high": 1, "low": 2}, {"high": -1}, {"low": -1, "high": 1}):
        with pytest.raises(ValueError):
            transport.set_write_buffer_limits(**wrong)
    assert transport.get_write_buffer_size() == 0


async def test_pause_and_resume_reading_are_idempotent(net: Net):
    client, server = await net.pair()
    transport = server.transport
    for _ in range(2):
        transport.pause_reading()
        assert not transport.is_reading()
    for _ in range(2):
        transport.resume_reading()
        assert transport.is_reading()
    transport.close()
    assert not transport.is_reading()
    transport.pause_reading()
    transport.resume_reading()
    assert not transport.is_reading()
    await server.until_lost()
    transport.pause_reading()
    transport.resume_reading()


async def test_writing_after_close_warns_and_does_not_raise(net: Net, caplog):
    client, server = await net.pair()
    client.transport.close()
    client.transport.write(b"too late")
    client.transport.writelines([b"too", b"late"])
    await client.until_lost()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            client.transport.write(b"much too late")
    assert caplog.records
    await server.until_lost()
    assert server.received == 0
    assert client.transport.get_write_buffer_size() == 0


async def test_everything_is_harmless_after_the_end(net: Net):
    client, server = await net.pair()
    client.transport.abort()
    await client.until_lost()
    transport = client.transport
    assert transport.is_closing()
    assert not transport.is_reading()
    transport.close()
    transport.abort()
    transport.write_eof()
    transport.set_write_buffer_limits(high=1)
    transport.get_write_buffer_size()
    transport.set_protocol(server)
    assert transport.get_protocol() is server
    transport.set_protocol(client)
    repr(transport)
    assert client.events == ["made", "lost"]


async def test_set_protocol_moves_all_callbacks(net: Net):
    client, server = await net.pair()
    other = HalfOpen()
    other.connection_made(server.transport)
    server.transport.set_protocol(other)
    client.transport.write(b"to the other")
    client.transport.write_eof()
    await other.until(lambda: other.eof)
    assert other.data == b"to the other"
    server.transport.close()
    await other.until_lost()
    assert server.events == ["made"]
    server.transport = None  # its connection ended elsewhere


async def test_a_protocol_with_nothing_but_the_basics(net: Net):
    """asyncio.Protocol's defaults suffice."""

    class Bare(asyncio.Protocol):
        pass

    client, _ = await net.pair(server=Bare)
    client.transport.write(b"hello")
    client.transport.close()
    assert await client.until_lost() is None


# ---- the server


async def test_the_server_is_one(net: Net):
    server, port = await net.serve(Echo)
    assert isinstance(server, asyncio.AbstractServer)
    assert server.get_loop() is net.loop
    assert server.is_serving()
    assert str(port) in repr(server)
    for method in (
        "close",
        "wait_closed",
        "start_serving",
        "serve_forever",
        "close_clients",
        "abort_clients",
    ):
        assert callable(getattr(server, method))
    server.close()
    server.close()
    assert not server.is_serving()
    assert server.sockets == ()
    await server.wait_closed()
    await server.wait_closed()
    with pytest.raises(RuntimeError):
        await server.start_serving()
    with pytest.raises(RuntimeError):
        await server.serve_forever()


async def test_serve_forever_twice(net: Net):
    server, _ = await net.serve(Echo)
    [serving] = await begin(server.serve_forever())
    with pytest.raises(RuntimeError):
        await server.serve_forever()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
