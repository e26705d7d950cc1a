"""A server that answers every piece with itself."""

import asyncio

from script import HOST, port_of, run, say, until_told_to_end

import rdmanet


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

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
        await until_told_to_end()


run(main())
