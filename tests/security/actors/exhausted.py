"""A server of the loop without a free descriptor, to be watched: argv may be "restless", who accepts again at once.

Says where each kind of its listeners is. A line from the test has it say how many seconds of CPU it takes in a second,
and how often the loop's own listeners are looked at meanwhile.
"""

import asyncio
import os
import resource
import sys
import time

import rdmanet
from rdmanet.loop import acceptor

if "restless" in argv:
    acceptor.REST_S = 0

looks = 0


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
    _, writer = await rdmanet.open_rdma_connection("127.0.0.1", far)  # so that a queue pair listens
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
        before, seen = time.process_time(), looks
        await asyncio.sleep(1)
        say(cpu_s=time.process_time() - before, looks=looks - seen)


rdmanet.run(main())
