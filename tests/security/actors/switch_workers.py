"""A server of several processes that share one listening socket, as a pre-forking server has it: argv is how many, and
what they are, of `blind` (the one that deals connections out does not look whether the others' loops turn).

Says its `port` and the `workers`, by their numbers, the one that deals first, and their `ports` for RDMA. They end with
its standard input.
"""

import asyncio
import contextlib
import ctypes
import encodings.idna  # noqa: F401
import os
import signal
import socket
import struct

import rdmanet
import rdmanet.loop.serving
import rdmanet.transport
from rdmanet.loop import workers

count, *kinds = argv


async def answer(reader, writer):
    with contextlib.suppress(ConnectionError):
        await reader.readline()
        writer.write(b"%d\n" % os.getpid())
    writer.close()


def work(listener, told):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG

    async def main():
        server = await asyncio.start_server(answer, sock=listener)
        os.write(told, b"%d\n" % os.getpid())
        await server.serve_forever()

    rdmanet.run(main())


def tell_register(believe=workers.Register._believe):
    """Have the one that deals say which worker registers with which port."""

    def tell(self, worker, place):
        believe(self, worker, place)
        pid, _, _ = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        os.write(told[1], b"%d %d\n" % (pid, place.port))

    workers.Register._believe = tell


if "blind" in kinds:
    workers.Register._tell = lambda self, worker: True
    workers.Register.busy = lambda self: []
told = os.pipe()
tell_register()
listener = socket.create_server(("127.0.0.1", 0))
there, ports = [], {}
with os.fdopen(told[0], "r", buffering=1) as heard:
    for number in range(int(count)):
        if (pid := os.fork()) == 0:
            os.close(0)
            work(listener, told[1])
        while len(there) == number or (number and len(ports) < number):
            one, *port = heard.readline().split()
            if port:
                ports[int(one)] = int(port[0])
            else:
                there.append(int(one))
say(port=listener.getsockname()[1], workers=there, ports=[ports.get(pid, 0) for pid in there])
hear()
for pid in there:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
