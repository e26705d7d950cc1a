"""bulk.py TOTAL [hold]: both directions at once, for one connection.

It is sent TOTAL bytes of the pattern while as many are received and checked. With
`hold` it reads nothing until told `read`, and says `full` when it has to pause writing first.
"""

import asyncio
import sys

from pattern import Pattern
from script import HOST, orders, port_of, run, say

import rdmanet

TOTAL = int(sys.argv[1])
HOLD = "hold" in sys.argv
PIECE = 1 << 20


class Bulk(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.sent, self.received = Pattern(seed=1), Pattern()
        self.writing, self.said_full = True, False
        current.set_result(self)
        if HOLD:
            transport.pause_reading()
        self.fill()

    def fill(self):
        while self.writing and self.sent.position < TOTAL:
            self.transport.write(self.sent.take(min(PIECE, TOTAL - self.sent.position)))
        if self.writing and self.transport.can_write_eof():
            self.writing = False
            self.transport.write_eof()

    def pause_writing(self):
        self.writing = False
        if HOLD and not self.said_full:
            self.said_full = True
            say("full", self.sent.position)

    def resume_writing(self):
        self.writing = True
        self.fill()

    def data_received(self, data):
        self.received.check(data)

    def eof_received(self):
        say("received", self.received.position)
        return True  # our own direction may still be flowing

    def connection_lost(self, exc):
        say("lost", repr(exc).replace(" ", "_"), self.sent.position, self.received.position)


async def main():
    global current
    current = asyncio.get_running_loop().create_future()
    async with await rdmanet.start_rdma_server(Bulk, HOST, 0) as server:
        say("port", port_of(server))
        async for order in orders():
            if order == ["read"]:
                (await current).transport.resume_reading()
            elif order == ["close"]:
                (await current).transport.close()


run(main())
