"""closing.py: serves connections; closes them when told to."""

import asyncio

from script import HOST, orders, port_of, run, say

import rdmanet


class Closing(asyncio.Protocol):
    def connection_made(self, transport):
        connected.append(transport)
        say("connected")


connected: list[asyncio.Transport] = []


async def main():
    async with await rdmanet.start_rdma_server(Closing, HOST, 0) as server:
        say("port", port_of(server))
        async for _ in orders():
            for transport in connected:
                transport.close()


run(main())
