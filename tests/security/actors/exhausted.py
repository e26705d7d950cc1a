"""A server of the loop without a free descriptor, to be watched: argv may be "restless", who accepts again at once, or
"connected", who has a connection, and so a queue pair that listens.

Says where each kind of its listeners is. A line from the test has it say how often the loop's own listeners are looked
at in a second, and how often accept4() found no descriptor meanwhile, which accepts.c counts.
"""

import asyncio
import ctypes
import os
import resource
import sys

import rdmanet
from rdmanet.loop import acceptor

if "restless" in argv:
    acceptor.REST_S = 0

looks = 0
program = ctypes.CDLL(None)
in_vain = (
    ctypes.c_uint.in_dll(program, "accepts_in_vain")
    if hasattr(program, "accepts_in_vain")
    else ctypes.c_uint()
)


def counted(look):
    def arrived(self):
        global looks
        looks += 1
        look(self)

    return arrived


acceptor.Acceptor._arrived = counted(acceptor.Acceptor._arrived)


async def serve(reader, writer):
    await reader.read()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    both = await rdmanet.start_rdma_stream_server(serve, "127.0.0.1", 0)
    far = both.sockets[0].getsockname()[1]
    queues = None
    if "connected" in argv:
        _, writer = await rdmanet.open_rdma_connection("127.0.0.1", far)
        queues = writer.get_extra_info("rdma_qp") >> 8
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(sys.stdin, lambda: sys.stdin.readline() and asked.set())
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
    say(
        door=f"rdmanet-stream/127.0.0.1/{port}",
        register=f"rdmanet-stream/127.0.0.1/{port}/workers",
        name=f"rdmanet-cm/::ffff:127.0.0.1/{port}",
        queue_pair=f"rdmanet-soft/{queues}",
        tcp=far,
    )
    while True:
        await asked.wait()
        asked.clear()
        before, seen = in_vain.value, looks
        await asyncio.sleep(1)
        say(accepts_in_vain=in_vain.value - before, looks=looks - seen)


rdmanet.run(main())
