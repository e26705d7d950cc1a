"""What becomes of a connection whose server's callback fails, or forgets it."""

import asyncio
import gc

import pytest
from harness import HOST, Net

import rdmanet

pytestmark = pytest.mark.once


class Failure(Exception):
    pass


async def test_a_plain_callback_that_raises_is_reported_once_and_its_connection_closed(net: Net):
    def callback(reader, writer):
        raise Failure

    server = await rdmanet.start_rdma_stream_server(callback, HOST, 0)
    reader, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
    assert await reader.read() == b""
    writer.close()
    server.close()
    await server.wait_closed()
    context = net.complaint()
    assert isinstance(context["exception"], Failure)
    assert isinstance(context["transport"], rdmanet.RdmaTransport)
    assert not net.complaints


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_writer_that_is_forgotten_is_closed_after_the_clients_end_of_file(net: Net):
    """As TCP's is: whether the callback ended before the end of file, or because of it."""
    for waits in (False, True):

        async def callback(reader, writer, waits=waits):
            if waits:
                assert await reader.read() == b"hello"

        server = await rdmanet.start_rdma_stream_server(callback, HOST, 0)
        reader, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        server.close()
        await server.wait_closed()
        gc.collect()


async def test_a_writer_that_the_callback_keeps_may_answer_after_the_end_of_file(net: Net):
    answered = asyncio.get_running_loop().create_future()

    async def callback(reader, writer):
        said = await reader.read()
        await asyncio.sleep(0)
        gc.collect()
        writer.write(said)
        writer.close()
        answered.set_result(None)

    server = await rdmanet.start_rdma_stream_server(callback, HOST, 0)
    reader, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
    writer.write(b"hello")
    writer.write_eof()
    assert await reader.read() == b"hello"
    await answered
    writer.close()
    server.close()
    await server.wait_closed()
