"""A server of the switched loop on all addresses, whose TCP listener takes only what comes by one interface: argv is
that interface, and what the server is, of `careless` (it does not look at its listener's options).

Says its `port`.
"""

import asyncio
import socket

import rdmanet
import rdmanet.loop.serving
import rdmanet.transport

interface, *kinds = argv


async def answer(reader, writer):
    await reader.readline()
    writer.write(b"the server\n")
    writer.close()


async def main():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        listener.bind(("", 0))
        server = await asyncio.start_server(answer, sock=listener)
        say(port=listener.getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, hear)
        server.close()


if "careless" in kinds:
    rdmanet.loop.serving._why_tcp_alone = lambda tcp: ""
rdmanet.run(main())
