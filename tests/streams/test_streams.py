"""StreamReader and StreamWriter: asyncio's own behaviour on another transport."""

import asyncio
import gc

import pytest
from harness import HOST, Net
from pattern import REPEATED, Pattern

import rdmanet
from rdmanet.stream import facts
from tests.support.waiting import begin

MIB = 1 << 20


async def test_reader_and_writer_are_asyncios(net: Net):
    reader, writer, far_reader, far_writer = await net.stream_pair()
    for one in (reader, far_reader):
        assert isinstance(one, asyncio.StreamReader)
    for one in (writer, far_writer):
        assert isinstance(one, asyncio.StreamWriter)


async def test_every_way_to_read(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"a line\nanother;until;exactly|some")
    far.writelines([b" more", b"\nand", b" the rest"])
    await far.drain()
    assert await reader.readline() == b"a line\n"
    assert await reader.readuntil(b";") == b"another;"
    assert await reader.readexactly(6) == b"until;"
    assert await reader.read(8) == b"exactly|"
    assert await reader.readuntil(b"\n") == b"some more\n"
    far.write_eof()
    assert await reader.read() == b"and the rest"
    assert reader.at_eof()
    assert await reader.read() == await reader.read(10) == await reader.readline() == b""


async def test_lines_by_iteration(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"".join(b"%d\n" % n for n in range(1000)) + b"rest")
    far.write_eof()
    assert [line async for line in reader] == [b"%d\n" % n for n in range(1000)] + [b"rest"]


async def test_incomplete_read(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"short")
    far.close()
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        await reader.readexactly(10)
    assert caught.value.partial == b"short" and caught.value.expected == 10


async def test_limit(net: Net):
    reader, _, _, far = await net.stream_pair(limit=1000)
    far.write(b"x" * 5000 + b"\n")
    with pytest.raises(asyncio.LimitOverrunError):
        await reader.readuntil(b"\n")
    assert await reader.readexactly(5001) == b"x" * 5000 + b"\n"


async def test_limit_is_back_pressure(net: Net):
    """A reader that is not read blocks the sender's drain(), until it is read."""
    reader, _, _, far = await net.stream_pair(limit=10_000)
    far.transport.set_write_buffer_limits(high=0)
    sent, got = Pattern(), Pattern()

    async def send() -> None:
        while sent.position < 8 * MIB:
            far.write(sent.take(65536))
            await far.drain()

    sending = asyncio.ensure_future(send())
    await asyncio.wait([sending], timeout=0.1)
    assert not sending.done()
    while got.position < 8 * MIB:
        got.check(await reader.read(100_000))
    await sending


async def test_close_and_wait_closed(net: Net):
    reader, writer, far_reader, far_writer = await net.stream_pair()
    writer.write(b"bye")
    assert not writer.is_closing()
    writer.close()
    assert writer.is_closing()
    await writer.wait_closed()
    assert await far_reader.read() == b"bye"
    assert await far_reader.read() == b""
    far_writer.close()
    await far_writer.wait_closed()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_drain_after_the_end_raises_at_once(net: Net, end):
    """A loop of write() and drain() ends, as with asyncio's: the first drain() raises from which nothing can come."""
    _, writer, _, _ = await net.stream_pair()
    writer.write(b"last ")
    writer.write(b"words")
    writer.close() if end == "close" else writer.transport.abort()
    writer.close()  # again
    writer.write(b"never sent")
    with pytest.raises(ConnectionResetError):
        await writer.drain()


async def test_drain_waits_though_closed_while_something_is_left(net: Net):
    _, writer, far_reader, _ = await net.stream_pair()
    writer.transport.set_write_buffer_limits(high=0)
    much = (REPEATED * 4)[: 8 * MIB]
    writer.write(much)
    draining = asyncio.ensure_future(writer.drain())
    await asyncio.wait([draining], timeout=0.1)
    assert not draining.done()
    writer.close()
    again = asyncio.ensure_future(writer.drain())
    await asyncio.wait([draining, again], timeout=0.1)
    assert not draining.done() and not again.done()
    assert await far_reader.read() == much
    await draining
    await again
    with pytest.raises(ConnectionResetError):
        await writer.drain()


@pytest.mark.parametrize("unread", [0, MIB], ids=["nothing unread", "a paused reader"])
async def test_a_drain_that_waits_raises_when_the_peer_aborts(net: Net, unread):
    """What was written is lost: to return as if there were room would say the opposite."""
    _, writer, _, far_writer = await net.stream_pair()
    far_writer.write(bytes(unread))
    writer.write((REPEATED * 4)[: 8 * MIB])
    draining = asyncio.ensure_future(writer.drain())
    await asyncio.wait([draining], timeout=0.1)
    assert not draining.done()
    far_writer.transport.abort()
    with pytest.raises(ConnectionResetError):
        await draining


async def test_half_close(net: Net):
    reader, writer, far_reader, far_writer = await net.stream_pair()
    assert writer.can_write_eof()
    writer.write(b"question")
    writer.write_eof()
    assert await far_reader.read() == b"question"
    far_writer.write(b"answer" * 100_000)
    await far_writer.drain()
    far_writer.close()
    assert await reader.read() == b"answer" * 100_000


async def test_abort_fails_the_peers_reader(net: Net):
    reader, writer, far_reader, far_writer = await net.stream_pair()
    writer.write(b"partly")
    await far_reader.readexactly(6)
    [waiting] = await begin(far_reader.read())
    writer.transport.abort()
    with pytest.raises(ConnectionError):
        await waiting
    with pytest.raises(ConnectionError):
        await far_reader.read()
    with pytest.raises(ConnectionError):
        far_writer.write(b"x")
        await far_writer.drain()
    with pytest.raises(ConnectionError):
        await far_writer.wait_closed()


async def test_extra_info(net: Net):
    _, writer, _, far = await net.stream_pair()
    assert writer.get_extra_info("peername") == far.get_extra_info("sockname")
    assert writer.get_extra_info("nothing", 7) == 7


async def test_facts_are_put_together_when_somebody_asks_for_one(net: Net):
    """Not for asyncio, which asks each transport for its sslcontext."""
    _, writer, _, _ = await net.stream_pair()
    known = writer.transport._life.facts
    assert writer.get_extra_info("nothing", 7) == 7 and known._known is None
    assert writer.get_extra_info("fabric") == "rdma" and set(known.known()) == facts._NAMES


@pytest.mark.not_on_siw("refuses queue pairs beyond some fifty")
async def test_a_coroutine_serves_each_connection(net: Net):
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            writer.write(line.upper())
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server, port = await net.serve_streams(echo)

    async def ask(n: int) -> None:
        reader, writer = await net.open(port)
        for k in range(10):
            writer.write(b"line %d of %d\n" % (k, n))
            assert await reader.readline() == b"LINE %d OF %d\n" % (k, n)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(ask(n) for n in range(30)))
    server.close()
    await server.wait_closed()


async def test_an_exception_of_the_serving_coroutine_is_reported(net: Net):
    async def fails(reader, writer):
        raise LookupError("in the handler")

    _, port = await net.serve_streams(fails)
    reader, _ = await net.open(port)
    await reader.read()
    assert isinstance(net.complaint()["exception"], LookupError)


async def test_a_reader_fed_by_hand(net: Net):
    """Libraries feed readers themselves: ours must not mind."""
    reader, _, _, far = await net.stream_pair()
    reader.feed_data(b"by hand, ")
    far.write(b"by wire")
    assert await reader.readexactly(16) == b"by hand, by wire"
    reader.feed_eof()
    assert await reader.read() == b""


async def test_two_readers_at_once_are_an_error(net: Net):
    reader, _, _, far = await net.stream_pair()
    [first] = await begin(reader.read(1))
    with pytest.raises(RuntimeError):
        await reader.read(1)
    far.write(b"x")
    assert await first == b"x"


async def test_many_drains_at_once(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.transport.set_write_buffer_limits(high=0)

    async def send(n: int) -> None:
        for _ in range(50):
            far.write(bytes([n]) * 5000)
            await far.drain()

    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(send(n))
        text = await reader.readexactly(20 * 50 * 5000)
    for n in range(20):
        assert text.count(bytes([n])) == 50 * 5000


async def test_a_client_that_leaves_its_streams_to_the_collector(net: Net):
    """The connection of a dropped pair ends as it would have."""
    closed = net.loop.create_future()

    async def serve(reader, writer):
        try:
            await reader.read()
        except ConnectionError:
            pass
        closed.set_result(None)
        writer.close()

    _, port = await net.serve_streams(serve)
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    writer.close()
    del reader, writer
    gc.collect()
    await closed


async def test_a_writer_goes_by_its_public_name(net: Net):
    """Also in the warning about one that nobody closed, which closes it first."""
    _, port = await net.serve()
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    assert repr(writer).startswith("<RdmaStreamWriter transport=<RdmaTransport open")
    with pytest.warns(ResourceWarning, match="^unclosed <RdmaStreamWriter transport=<RdmaTransport closing"):
        del reader, writer
        gc.collect()


async def test_one_connection_is_copied_to_another(net: Net):
    """What a proxy does: read here, write there, drain, and pass the end of file on."""
    source, far_source = (await net.stream_pair())[::3]
    sink, _, _, to_sink = await net.stream_pair()
    payload = bytes(range(256)) * 4096 * 4

    async def produce():
        far_source.write(payload)
        await far_source.drain()
        far_source.write_eof()

    async def copy():
        while chunk := await source.read(50_000):
            to_sink.write(chunk)
            await to_sink.drain()
        to_sink.write_eof()

    _, _, arrived = await asyncio.gather(produce(), copy(), sink.read())
    assert arrived == payload


async def test_a_server_without_a_callback_says_the_order():
    with pytest.raises(TypeError, match="the callback comes first, not '127.0.0.1'"):
        await rdmanet.start_rdma_stream_server("127.0.0.1", 0, lambda reader, writer: None)


async def test_the_task_of_a_callback_has_its_name(net: Net):
    named: asyncio.Future[str] = net.loop.create_future()

    async def count_words(reader, writer):
        task = asyncio.current_task()
        named.set_result(task.get_name() if task else "")
        writer.close()

    _, port = await net.serve_streams(count_words)
    reader, writer = await net.open(port)
    assert (await named).endswith("count_words")
    assert await reader.read() == b""
    writer.close()
