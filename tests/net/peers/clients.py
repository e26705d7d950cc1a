"""clients.py PORT COUNT: COUNT connections at once; at each `round N` all of them echo N bytes."""

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
    async for _, length in orders():
        await asyncio.gather(*(echo(n, r, w, int(length)) for n, (r, w) in enumerate(streams)))
        say("echoed", count)
    for _, writer in streams:
        writer.close()
    for _, writer in streams:
        await writer.wait_closed()


run(main())
