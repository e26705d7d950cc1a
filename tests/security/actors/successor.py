"""Takes the port that it is told, as soon as it is free, and serves RDMA there. Says `has` then."""

import asyncio

from rdmanet import start_rdma_stream_server


async def answer(reader, writer):
    await reader.readline()
    writer.write(b"the successor\n")
    writer.close()


async def main():
    say(ready=True)
    server = await start_rdma_stream_server(answer, "127.0.0.1", hear()["port"])
    say(has=server.sockets[0].getsockname()[1])
    await asyncio.get_running_loop().run_in_executor(None, hear)
    server.close()


asyncio.run(main())
