"""A client that asks by TCP alone, and by RDMA alone: argv is the address and the port of the server.

Says what came by `tcp`, and what by `rdma`: the reply, or the class of the error.
"""

import asyncio

import rdmanet
import rdmanet.transport

address, port = argv


async def ask(connect):
    try:
        reader, writer = await connect(address, int(port))
    except OSError as exc:
        return type(exc).__name__
    writer.write(b"for the server only\n")
    reply = (await reader.readline()).decode().strip()
    writer.close()
    return reply


async def main():
    say(tcp=await ask(asyncio.open_connection), rdma=await ask(rdmanet.open_rdma_connection))


asyncio.run(main())
