"""How much a connection takes in that its program does not read: as much as TCP, and no more than that."""

import asyncio

import pytest
from loop_harness import Recorder, fabric

from tests.support.waiting import loop_turns, until_seen

MIB = 1 << 20


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int, piece: int) -> None:
    """Write, drain, and only then read."""
    data = bytes(range(256)) * (size // 256)
    for at in range(0, size, piece):
        writer.write(data[at : at + piece])
        await writer.drain()
    assert await reader.readexactly(size) == data


@pytest.mark.parametrize("size", [3 * MIB // 2, 2 * MIB, 4 * MIB])
@pytest.mark.parametrize("piece", [1024, 65536, 4 * MIB])
async def test_both_write_then_drain_then_read(size: int, piece: int):
    """What passes over TCP, whose buffers hold that much by default."""
    ended = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await exchange(reader, writer, size, piece)
            writer.close()
        finally:
            ended.set_result(None)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert fabric(writer.transport) == "rdma"
        await exchange(reader, writer, size, piece)
        await ended
        writer.close()
        await writer.wait_closed()


class Deaf(Recorder):
    """Does not read."""

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.pause_reading()


async def test_a_program_that_does_not_read_is_given_no_more_than_that():
    loop = asyncio.get_running_loop()
    made: list[Deaf] = []

    def factory() -> Deaf:
        made.append(Deaf())
        return made[-1]

    async with await loop.create_server(factory, "127.0.0.1", 0) as server:
        transport, protocol = await loop.create_connection(Recorder, *server.sockets[0].getsockname())
        assert fabric(transport) == "rdma"
        data = bytes(range(256)) * (16 * MIB // 256)
        for at in range(0, len(data), 65536):
            transport.write(data[at : at + 65536])
        await until_seen(lambda: made and made[0].transport)
        server_transport = made[0].transport

        def received() -> int:
            return server_transport.get_extra_info("rdma_stats")["bytes_received"]

        await until_seen(lambda: received() >= 4 * MIB)
        await loop_turns(1000)
        assert received() <= 6 * MIB, "4 MiB, the ring, and no more"
        assert transport.get_write_buffer_size() > 9 * MIB
        assert not made[0].data
        server_transport.resume_reading()
        await made[0].until(lambda: len(made[0].data) == len(data))
        assert made[0].data == data
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)
