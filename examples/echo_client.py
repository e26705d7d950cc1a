"""Send standard input over RDMA, line by line, and print what comes back.

usage: python examples/echo_client.py [HOST] [PORT]
"""

import asyncio
import sys

import rdmanet


async def main(host: str = "127.0.0.1", port: str = "7471") -> None:
    reader, writer = await rdmanet.open_rdma_connection(host, int(port))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        writer.write(line)
        await writer.drain()
        # The server sends the same number of bytes, in pieces of any size: it is a byte stream.
        sys.stdout.buffer.write(await reader.readexactly(len(line)))
        sys.stdout.buffer.flush()
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:3]))
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
