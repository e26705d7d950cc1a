"""A server whose answer is the last that its client gets, while the client goes on writing.

Its arguments: how the connection ends ("abort"; "close"; "impatient": close, and abort if the client does not soon do
the same), how long the answer is, and "tls" or "plain". It prints its port.
"""

import asyncio
import logging
import sys

import rdmanet
from tests.support.certificates import of_server

how, size, tls = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tls"
logging.disable(logging.CRITICAL)


async def answer(reader, writer):
    await reader.readline()
    writer.write(b"a" * size)
    if how == "abort":
        await writer.drain()
        writer.transport.abort()
    else:
        writer.close()


async def main():
    of_tls = {"ssl": of_server(), "ssl_shutdown_timeout": 0.1 if how == "impatient" else None} if tls else {}
    server = await asyncio.start_server(answer, "127.0.0.1", 0, **of_tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


rdmanet.run(main())
