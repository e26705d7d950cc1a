"""clients.py PORT COUNT: COUNT connections at once. At each `round N` all of them echo N bytes.

At each `write N` they write N bytes, and `written` says that these have arrived.
"""

import asyncio
import sys

from script import THERE, orders, run, say

import rdmanet


async def echo(number, reader, writer, length):
    text = number.to_bytes(4, "big") * (length // 4)
    writer.write(text)
    await writer.drain()
    assert await reader.readexactly(len(text)) == text


async def main():
    port, count = map(int, sys.argv[1:])
    streams = await asyncio.gather(*(rdmanet.open_rdma_connection(THERE, port) for _ in range(count)))
    say("connected", len(streams))
    async for order, length in orders():
        if order == "write":
            for _, writer in streams:
                writer.write(b"x" * int(length))
            for _, writer in streams:
                while writer.get_extra_info("rdma_stats")["sends_in_flight"]:  # nobody tells
                    await asyncio.sleep(0.001)
            say("written", count)
            continue
        await asyncio.gather(*(echo(n, r, w, int(length)) for n, (r, w) in enumerate(streams)))
        say("echoed", count)
    for _, writer in streams:
        writer.close()
    for _, writer in streams:
        await writer.wait_closed()


run(main())
