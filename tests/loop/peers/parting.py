"""A client whose program ends when it has written.

Its arguments: the port, how many bytes, whether to close the writer, and how to end the loop.
"""

import asyncio
import sys

import rdmanet

port, size, how, ending = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]


async def main():
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    print(writer.get_extra_info("fabric"), flush=True)
    writer.write(bytes(size))
    if how == "close":
        writer.close()
    return writer


if ending == "run":
    rdmanet.run(main())
else:
    loop = rdmanet.loop_factory()
    kept = loop.run_until_complete(main())
    loop.close()
