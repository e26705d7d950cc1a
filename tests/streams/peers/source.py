"""source.py serve | source.py connect PORT...: sends the pattern for ever, made to be killed.

Importing costs more than a transfer does, so this process stays a nursery: at each `go [PORT]` it
forks a worker (before anything of rdmanet is open, as the documentation demands) and says
`worker PID [PORT]`. The workers die with the pipe that they share with the nursery.
"""

import asyncio
import ctypes
import os
import signal
import sys

from pattern import Pattern
from script import HOST, THERE, port_of, run, say

import rdmanet

PIECE = 256 << 10


class Source(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.pattern = Pattern()
        self.writing = True
        self.fill()

    def fill(self):
        while self.writing:
            self.transport.write(self.pattern.take(PIECE))

    def pause_writing(self):
        self.writing = False

    def resume_writing(self):
        self.writing = True
        asyncio.get_running_loop().call_soon(self.fill)


async def serve():
    server = await rdmanet.start_rdma_server(Source, HOST, 0)
    say("worker", os.getpid(), port_of(server))
    await asyncio.get_running_loop().create_future()


async def connect(port):
    await rdmanet.create_rdma_connection(Source, THERE, port)
    say("worker", os.getpid())
    await asyncio.get_running_loop().create_future()


def work(order):
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    run(serve() if len(order) == 1 else connect(int(order[1])))


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
say("ready")
for line in sys.stdin:
    if os.fork() == 0:
        work(line.split())
        os._exit(1)
