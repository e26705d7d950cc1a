# ruff: noqa: F821
"""A program that uses rdmanet, and may be watched by its own user; with `open` by everybody, as without the guard."""

import asyncio

import rdmanet
from rdmanet.base import onlookers

if "open" in argv:
    onlookers.may_look = lambda onlooker: True


async def main():
    server = await rdmanet.start_rdma_server(asyncio.Protocol, "127.0.0.1", 0)
    [name] = [each._socket.getsockname() for each in onlookers._all]
    say(name=name[1:].decode())
    await asyncio.get_running_loop().run_in_executor(None, hear)
    server.close()


asyncio.run(main())
