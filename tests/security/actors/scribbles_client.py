"""A client of the echo server. For each {"echo": n, "within": seconds} it says how many messages came back.

usage: scribbles_client.py PORT
"""

import asyncio

import rdmanet


class Client(asyncio.Protocol):
    def __init__(self):
        self.arrived = asyncio.Event()
        self.received = 0
        self.lost = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += len(data)
        self.arrived.set()

    def connection_lost(self, exc):
        self.lost = repr(exc)
        self.arrived.set()

    async def echo(self, count):
        for sent in range(1, count + 1):
            self.transport.write(b"c" * 64)
            while self.received < 64 and self.lost is None:
                self.arrived.clear()
                await self.arrived.wait()
            if self.lost is not None:
                return sent - 1
            self.received -= 64
        return count


async def main():
    loop = asyncio.get_running_loop()
    try:
        transport, client = await rdmanet.create_rdma_connection(
            Client, "127.0.0.1", int(argv[0]), connect_timeout=10
        )
    except OSError as error:
        say(refused=repr(error))
        return
    say(connected=True)
    while order := await loop.run_in_executor(None, hear):
        try:
            echoed = await asyncio.wait_for(client.echo(order["echo"]), order["within"])
        except TimeoutError:
            echoed = None
        say(echoed=echoed, lost=client.lost)
    transport.abort()


asyncio.run(main())
