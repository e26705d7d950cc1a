"""hasty.py: at each `go PORT` connects, writes and closes, mostly before the other side is ready."""

import asyncio

from script import THERE, orders, run, say

import rdmanet


class Hasty(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"all of it")
        transport.close()
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc):
        self.lost.set_result(exc)


async def main():
    async for _, port in orders():
        _, protocol = await rdmanet.create_rdma_connection(Hasty, THERE, int(port))
        say("lost", repr(await protocol.lost))


run(main())
