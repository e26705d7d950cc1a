"""The victim: an echo server that sleeps between messages. It ends when it is told nothing more.

usage: scribbles_victim.py [shared]
"""

import asyncio
import os
from pathlib import Path

import rdmanet

connected = set()


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        connected.add(transport)

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, exc):
        connected.discard(self.transport)


def engine_ns():
    """How long the engine's thread has run; None: there is none."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "rdmanet-engine\n":
            return int((task / "schedstat").read_text().split()[0])
    return None


async def main():
    loop = asyncio.get_running_loop()
    server = await rdmanet.start_rdma_server(
        Echo, "127.0.0.1", 0, busy_poll=0, close_timeout=1, shared_receive="shared" in argv
    )
    async with server:
        say(port=server.sockets[0].getsockname()[1], pid=os.getpid())
        while await loop.run_in_executor(None, hear) is not None:
            say(engine_ns=engine_ns())
        for transport in connected.copy():
            transport.abort()


asyncio.run(main())
