"""A server that answers every piece with itself, and aborts its connections when it is told to."""

import asyncio

from script import HOST, orders, port_of, run, say

import rdmanet

transports = []


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        transports.append(transport)

    def connection_lost(self, exc):
        transports.remove(self.transport)

    def data_received(self, data):
        self.transport.write(data)

    # A peer that reads no more must not make us buffer without bound.
    def pause_writing(self):
        self.transport.pause_reading()

    def resume_writing(self):
        self.transport.resume_reading()


async def main():
    async with await rdmanet.start_rdma_server(Echo, HOST, 0) as server:
        say("port", port_of(server))
        async for _ in orders():
            for transport in transports:
                transport.abort()


run(main())
