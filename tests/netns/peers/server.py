"""Echo over RDMA until standard input ends.

usage: server.py HOST
"""

import asyncio
import sys

import rdmanet


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(bytes(data))


async def main(host):
    server = await rdmanet.start_rdma_server(Echo, host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()
    server.close_clients()
    await server.wait_closed()


asyncio.run(main(sys.argv[1]))
