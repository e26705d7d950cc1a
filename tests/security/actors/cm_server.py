"""Serves requests of the connection manager: argv is address, port, and what it answers.

It says `port` when it listens, or `refused` with the errno, and `request` with the data of each. It ends with its
input.
"""

import asyncio
import contextlib
import sys

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMListener, AsyncCQ


async def serve(listener, answer):
    async for id in listener:
        say(request=id.private_data.rstrip(b"\0").decode())
        cq = AsyncCQ(id.context, 8)
        id.create_qp(PD(id.context), cq, QPCap(max_send_wr=1, max_recv_wr=1))
        with contextlib.suppress(OSError):  # who asked has gone
            await id.accept(answer)


async def main():
    address, port, answer = argv[0], int(argv[1]), argv[2].encode()
    try:
        listener = AsyncCMListener((address, port))
    except OSError as exc:
        say(refused=exc.errno, text=str(exc))
        return
    with listener:
        say(port=listener.local_addr[1])
        serving = asyncio.create_task(serve(listener, answer))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        serving.cancel()


asyncio.run(main())
