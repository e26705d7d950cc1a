"""One of several servers on one port. It prints when it is ready, and sends its number to whoever connects.

A second argument is the address; a third has it treat the embedded device as an adapter.
"""

import asyncio
import os
import sys

import rdmanet
from rdmanet.loop import workers

ADDRESS = sys.argv[2] if sys.argv[2:] else "127.0.0.1"


class Numbered(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        transport.write(b"%d %s\n" % (os.getpid(), transport.get_extra_info("fabric").encode()))

    def data_received(self, data):
        self.transport.write(data)


async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Numbered, ADDRESS, int(sys.argv[1]), reuse_port=True)
    print("ready", flush=True)
    over = loop.create_future()
    loop.add_reader(sys.stdin, lambda: sys.stdin.readline() or over.done() or over.set_result(None))
    await over
    server.close()


if sys.argv[3:]:
    workers.is_dealt = lambda library: True
rdmanet.run(main())
