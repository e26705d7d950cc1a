"""Listens, is connected to, ends the connection first, and does so again on the same port: argv is address, cycles, and
the port if it is not to be chosen.

It says how each `cycle` went: the port, and the errno of what failed.
"""

import asyncio
import contextlib

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ


@contextlib.contextmanager
def queues(id):
    with PD(id.context) as pd, AsyncCQ(id.context, 8) as cq:
        id.create_qp(pd, cq, QPCap(max_send_wr=1, max_recv_wr=1))
        yield
        id.close()


async def connect(address):
    async with AsyncCMID() as id:
        await id.resolve(address)
        with queues(id):
            await id.connect()
            await id.disconnected()


async def cycle(address, port):
    with AsyncCMListener((address, port)) as listener:
        port = listener.local_addr[1]
        client = asyncio.create_task(connect(("127.0.0.1", port)))
        id = await listener.get_request()
        with queues(id):
            await id.accept()
            await id.disconnect()
        await client
    return port


port = int(argv[2]) if argv[2:] else 0
for _ in range(int(argv[1])):
    try:
        port = asyncio.run(cycle(argv[0], port))
        say(port=port, errno=0)
    except OSError as exc:
        say(port=port, errno=exc.errno)
        break
