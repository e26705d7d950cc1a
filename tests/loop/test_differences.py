"""What differs from TCP on the switched loop, as docs/howto/event-loop.md says it."""

import asyncio
import socket
import struct
from contextlib import asynccontextmanager

from loop_harness import fabric

from tests.support.waiting import until_seen

LIMIT = 4096


@asynccontextmanager
async def streams():
    """A client's and a server's, by RDMA."""
    arrived = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *both: arrived.set_result(both), "127.0.0.1", 0)
    near = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=LIMIT)
    near[1].write(b"x")
    far = await arrived
    assert await far[0].readexactly(1) == b"x"
    assert fabric(near[1]) == "rdma"
    try:
        yield near, far
    finally:
        for _, writer in (near, far):
            writer.close()
            await writer.wait_closed()
        server.close()


async def test_a_reader_does_not_pause_its_transport():
    async with streams() as (near, far):
        far[1].write(bytes(4 * LIMIT))
        await far[1].drain()
        descriptor = near[1].get_extra_info("socket").fileno()
        assert descriptor >= 0
        await until_seen(lambda: len(near[0]._buffer) == 4 * LIMIT)
        assert near[1].transport.is_reading()
        far[1].transport.abort()
        await until_seen(lambda: far[1].transport.is_closing())
        assert not far[1].transport.is_reading()


async def test_the_stand_in_remembers_its_addresses():
    async with streams() as (near, far):
        name = near[1].get_extra_info("socket").getpeername()
        near[1].close()
        await near[1].wait_closed()
        assert near[1].get_extra_info("socket").getpeername() == name == far[1].get_extra_info("sockname")


async def test_linger_has_no_effect():
    async with streams() as (near, far):
        far[1].get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        far[1].write(b"all of it")
        far[1].close()
        assert await near[0].read() == b"all of it"


async def test_who_aborts_has_sent_what_the_peer_had_room_for():
    """TCP's kernel would have taken all, and sent it."""
    async with streams() as (near, far):
        far[1].write(bytes(1 << 20))
        far[1].transport.abort()
        assert 0 < len(await near[0].read()) < 1 << 20
