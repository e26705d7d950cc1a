"""Bytes come back: every size around every border, any buffer, any number of writes, in order."""

import array
import asyncio
import errno
import itertools
import re

import pytest
from harness import HOST, Echo, Net, Recorder

import rdmanet
from tests.support.ports import free_port
from tests.support.waiting import loop_turns, until_seen

# Borders of slots are the transport's own business; these straddle whatever they are.
SIZES = sorted(
    {
        1,
        2,
        3,
        63,
        64,
        65,
        100_000,
        *(n + d for n in (4096, 8192, 16384, 32768, 65536) for d in (-17, -16, -1, 0, 1)),
    }
)


async def test_sizes(net: Net):
    client, _ = await net.pair(server=Echo)
    for size in SIZES:
        text = bytes(itertools.islice(itertools.cycle(range(1, 252)), size))
        client.data.clear()
        client.received = 0
        client.transport.write(text)
        assert await client.until_received(size) == text


async def test_another_process(net: Net):
    client = await net.connect(await net.spawn("echo.py").port())
    client.transport.write(b"over there")
    assert await client.until_received(10) == b"over there"


@pytest.mark.long
async def test_many_messages_one_after_another(net: Net):
    client = await net.connect(await net.spawn("echo.py").port())
    for number in range(2000):
        client.transport.write(b"%08d" % number)
        await client.until_received(8 * (number + 1))
    assert client.data == b"".join(b"%08d" % number for number in range(2000))


async def test_many_messages_in_flight(net: Net):
    client = await net.connect(await net.spawn("echo.py").port())
    for number in range(20_000):
        client.transport.write(b"%08d" % number)
    assert await client.until_received(160_000) == b"".join(b"%08d" % number for number in range(20_000))


async def test_ping_pong_within_callbacks(net: Net, fewer):
    """Every message is written in the callback of the one before: the shortest path there is."""
    total = 64 * fewer(3000)

    class Volley(Recorder):
        def keep(self, data):
            super().keep(data)
            if len(self.data) < total:
                self.transport.write(b"x" * 64)

    client = await net.connect(await net.spawn("echo.py").port(), Volley)
    client.transport.write(b"x" * 64)
    await client.until_received(total)


@pytest.mark.parametrize(
    "buffer",
    [
        bytes(range(256)) * 40,
        bytearray(range(256)) * 40,
        memoryview(bytes(range(256)) * 40)[5:],
        array.array("I", range(3000)),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
async def test_any_contiguous_buffer(net: Net, buffer):
    client, _ = await net.pair(server=Echo)
    text = bytes(memoryview(buffer))
    client.transport.write(memoryview(buffer) if isinstance(buffer, array.array) else buffer)
    assert await client.until_received(len(text)) == text


@pytest.mark.parametrize("size", [10, 5_000, 3 << 20])
async def test_a_buffer_is_the_callers_again_after_write(net: Net, size):
    """What can change is copied before write returns; but large memoryviews, which test_large_writes.py has."""
    client, server = await net.pair()
    buffer = bytearray(b"a" * size)
    client.transport.write(buffer)
    buffer[:] = b"b" * size
    if size < 262144:
        client.transport.write(memoryview(buffer))
    else:
        client.transport.write(buffer)
    buffer[:] = b"c" * size
    del buffer[:]  # not exported any more either
    assert await server.until_received(2 * size) == b"a" * size + b"b" * size


async def test_bytes_need_not_be_kept(net: Net):
    """Large bytes may be sent from where they lie, so the transport holds them, not the caller."""
    client, server = await net.pair()
    for number in range(64):
        client.transport.write(bytes([number]) * 300_000)
    text = await server.until_received(64 * 300_000)
    assert text == b"".join(bytes([number]) * 300_000 for number in range(64))


async def test_writelines(net: Net):
    client, _ = await net.pair(server=Echo)
    pieces = [b"one", bytearray(b"two"), memoryview(b"three"), b"", b"4" * 70_000]
    client.transport.writelines(pieces)
    client.transport.writelines([])
    client.transport.writelines(bytes([n]) for n in range(10))
    text = b"onetwothree" + b"4" * 70_000 + bytes(range(10))
    assert await client.until_received(len(text)) == text


async def test_nothing_written_is_nothing_sent(net: Net):
    client, server = await net.pair()
    for nothing in (b"", bytearray(), memoryview(b"")):
        client.transport.write(nothing)
    client.transport.write(b"end")
    assert await server.until_received(3) == b"end"
    assert server.events == ["made", "data"]


async def test_boundaries_do_not_show(net: Net):
    """A byte stream: many small writes may arrive as one piece, and all that counts is their order."""
    client, server = await net.pair()
    text = b"".join(b"%d," % number for number in range(5000))
    for begin in range(0, len(text), 7):
        client.transport.write(text[begin : begin + 7])
    assert await server.until_received(len(text)) == text


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_addresses(net: Net, host):
    server = await rdmanet.start_rdma_server(net.remember(Echo), host, 0)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]
    _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), host, port)
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"
    assert client.transport.get_extra_info("peername")[:2] == server.sockets[0].getsockname()[:2]


async def test_local_address(net: Net):
    _, port = await net.serve(Echo)
    client = await net.connect(port, local_addr=(HOST, 0))
    assert client.transport.get_extra_info("sockname")[0] == HOST


async def test_one_port_has_one_server(net: Net):
    _, port = await net.serve(Echo)
    with pytest.raises(OSError) as caught:
        await rdmanet.start_rdma_server(Echo, HOST, port)
    assert caught.value.errno == errno.EADDRINUSE
    assert "in use" in str(caught.value) and str(port) in str(caught.value)


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
@pytest.mark.parametrize("taken", [["0.0.0.0", "::"], ["0.0.0.0"], ["::"]])
async def test_a_port_that_is_taken_in_part_or_whole_is_one_error(net: Net, taken):
    """A server that would get one family of addresses only fails instead, with one error that names the port."""
    port = free_port()
    for host in taken:
        await serve_on(net, host, port)
    with pytest.raises(OSError) as caught:
        await rdmanet.start_rdma_server(Echo, None, port)
    assert caught.value.errno == errno.EADDRINUSE
    assert re.search(rf"\b{port}\b.* in use", str(caught.value))
    assert str(caught.value).count("in use") == 1
    for free in {"0.0.0.0", "::"} - set(taken):
        await serve_on(net, free, port)  # it has left nothing behind


async def serve_on(net: Net, host: str, port: int) -> None:
    net.servers.append(await rdmanet.start_rdma_server(net.remember(Echo), host, port))


async def test_nobody_listens(net: Net):
    server, port = await net.serve_on(free_port(), Echo)  # which nobody else is given when it is closed
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await net.connect(port)


async def test_two_directions_at_once(net: Net):
    client, server = await net.pair()
    for number in range(200):
        client.transport.write(bytes([number]) * 1000)
        server.transport.write(bytes([255 - number]) * 1000)
        if number % 20 == 0:
            await loop_turns()
    await server.until_received(200_000)
    await client.until_received(200_000)
    assert server.data == b"".join(bytes([n]) * 1000 for n in range(200))
    assert client.data == b"".join(bytes([255 - n]) * 1000 for n in range(200))


@pytest.mark.embedded_only("only the embedded device counts")
async def test_what_is_short_goes_inline(net: Net):
    """The bytes are in the request itself."""
    client, _ = await net.pair()
    qp = client.transport.qp
    before = qp.counters()["bytes_inline"]
    client.transport.write(bytes(40))
    async with asyncio.timeout(60):
        # It is counted when the device is done with it.
        await until_seen(lambda: qp.counters()["bytes_inline"] >= before + 40)


async def test_who_writes_when_the_connection_is_made_says_nothing_else_before(net: Net):
    """The connecting side speaks first. If its program has something to say, that is enough."""

    class Speaker(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"hello")

    client, server = await net.pair(Speaker)
    await server.until_received(5)
    assert client.transport.get_extra_info("rdma_stats")["control_frames_sent"] == 0
    silent, other = await net.pair()
    await net.until(lambda: silent.transport.get_extra_info("rdma_stats")["control_frames_sent"] == 1)
    other.transport.write(b"so the server may speak")
    await silent.until_received(23)
