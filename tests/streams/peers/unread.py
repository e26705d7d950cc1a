"""unread.py: asks about a connection that has ended unread, when its queue pair's memory has been used again."""

import asyncio
import ctypes

from script import HOST, port_of, run, say

import rdmanet
from tests.support.waiting import until_seen

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p


class Ending(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"all")
        transport.close()


class Paused(asyncio.Protocol):
    def connection_made(self, transport):
        self.lost = asyncio.get_running_loop().create_future()
        transport.pause_reading()

    def data_received(self, data):
        say("read", data.decode())

    def connection_lost(self, exc):
        self.lost.set_result(exc)


def use_free_memory():
    """Take what is free, in pieces of each size that the device may have given back."""
    for size in range(64, 16384, 16):
        for _ in range(8):
            ctypes.memset(libc.malloc(size), 1, size)


async def main():
    async with await rdmanet.start_rdma_server(Ending, HOST, 0) as server:
        transport, protocol = await rdmanet.create_rdma_connection(Paused, HOST, port_of(server))
        qp = transport.qp
        await until_seen(lambda: qp.closed)
        use_free_memory()
        say("explained", "bytes have come" in transport.explain())
        transport.resume_reading()
        say("lost", repr(await protocol.lost))


run(main())
