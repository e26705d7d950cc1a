"""An echo server of streams: argv is its address and its limit of descriptors (0: as it is).

Says its `port`. For each line it hears: how many connections it has, and whether open() works; for {"eat": true} it
takes all descriptors that are left, and says how many it `ate`.
"""

import asyncio
import contextlib
import os
import resource

from rdmanet import start_rdma_stream_server

connections = set()


async def echo(reader, writer):
    connections.add(writer)
    with contextlib.suppress(ConnectionError):
        while words := await reader.readline():
            writer.write(words)
            await writer.drain()
    connections.discard(writer)
    writer.close()


def can_open():
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError as exc:
        return str(exc)
    return True


def eat():
    ate = 0
    try:
        while True:
            os.dup(0)
            ate += 1
    except OSError:
        return ate


async def main():
    address, limit = argv[0], int(argv[1])
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    server = await start_rdma_stream_server(echo, address, 0)
    say(port=server.sockets[0].getsockname()[1])
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, hear)) is not None:
        if "eat" in order:
            say(ate=eat())
            continue
        say(connections=len(connections), can_open=can_open())
    server.close()


asyncio.run(main())
