# ruff: noqa: F821
"""An honest client: tells what it was offered, reads it when it is told to, and has its words echoed."""

import asyncio

import rdmanet


class Guest(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        say(connected=True)

    def region_offered(self, remote):
        self.remote = remote
        say(address=remote.address, rkey=remote.rkey, length=remote.length)

    def data_received(self, data):
        say(echo=data.decode())

    def connection_lost(self, exc):
        say(lost=type(exc).__name__)


async def main():
    transport, guest = await rdmanet.create_rdma_connection(Guest, "127.0.0.1", int(argv[0]))
    while (order := await asyncio.to_thread(hear)) is not None:
        if order["do"] == "read":
            say(data=(await guest.remote.read(0, 16)).decode())
        else:
            transport.write(order["text"].encode())
    transport.abort()


asyncio.run(main())
