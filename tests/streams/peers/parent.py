"""A server that sends without end and, at `fork`, forks a child that only sleeps.

The child inherits every descriptor and never looks at one: when the server is killed, the sockets
stay open, and only the process's death itself can tell its peers.
"""

import asyncio
import os
import signal

from pattern import Pattern
from script import HOST, orders, port_of, run, say

import rdmanet


class Source(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.pattern = Pattern()
        self.resume_writing()

    def pause_writing(self):
        self.writing = False

    def resume_writing(self):
        self.writing = True
        while self.writing:
            self.transport.write(self.pattern.take(1 << 16))


async def main():
    async with await rdmanet.start_rdma_server(Source, HOST, 0) as server:
        say("port", port_of(server))
        async for _ in orders():
            child = os.fork()
            if child == 0:
                while True:
                    signal.pause()
            say("child", child)


run(main())
