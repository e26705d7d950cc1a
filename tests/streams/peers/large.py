"""large.py [SIZE [asked]]: sends the pattern to whoever connects, SIZE bytes a write, until the connection ends.

With "asked", each write waits for a byte from there.
"""

import asyncio
import contextlib
import sys

from pattern import PERIOD, Pattern
from script import HOST, port_of, run, say

import rdmanet

SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 20
ASKED = "asked" in sys.argv


async def send(reader, writer):
    pattern = Pattern()
    with contextlib.suppress(OSError):
        while not ASKED or await reader.read(1):
            pieces = [pattern.take(min(PERIOD, SIZE - at)) for at in range(0, SIZE, PERIOD)]
            writer.write(b"".join(pieces))
            await writer.drain()
    writer.close()


async def main():
    server = await rdmanet.start_rdma_stream_server(send, HOST, 0)
    say("port", port_of(server))
    await asyncio.get_running_loop().create_future()


run(main())
