"""A client whose program ends when it has written. Its arguments: the port, how many bytes, whether to close."""

import asyncio
import sys

import rdmanet

port, size, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


async def main():
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    print(writer.get_extra_info("fabric"), flush=True)
    writer.write(bytes(size))
    if how == "close":
        writer.close()


rdmanet.run(main())
