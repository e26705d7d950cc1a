"""Echo over RDMA, or blocking, and say how each connection ends.

usage: keeper.py HOST KEEPALIVE
"""

import ast
import asyncio
import sys

import rdmanet


async def serve(reader, writer):
    try:
        while data := await reader.read(100):
            writer.write(data)
            print("echoed", flush=True)
        print("end", flush=True)
    except OSError as exc:
        print(type(exc).__name__, exc, flush=True)
    finally:
        writer.close()


async def main(host, keepalive):
    server = await rdmanet.start_rdma_stream_server(serve, host, 0, keepalive=ast.literal_eval(keepalive))
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


asyncio.run(main(*sys.argv[1:]))
