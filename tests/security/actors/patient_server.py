"""Accepts each request of the connection manager at once, and waits for all to get on: argv is its limit of files.

Says its `port`. For each line it hears: how many are `standing`, and how many were `lost` before they did; as soon as
there are as many as the line says, if it does.
"""

import asyncio
import resource

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMListener, AsyncCQ

standing = []
counts = {"lost": 0}
running = set()
another = asyncio.Event()


async def accept(id, pd, cq):
    try:
        id.create_qp(pd, cq, QPCap(max_send_wr=1, max_recv_wr=1))
        await id.accept(b"welcome")
    except OSError:
        counts["lost"] += 1
        id.close()
    else:
        standing.append(id)
    another.set()


async def serve(listener):
    pd = cq = None
    async for id in listener:
        pd, cq = pd or PD(id.context), cq or AsyncCQ(id.context, 1024)
        task = asyncio.create_task(accept(id, pd, cq))
        running.add(task)
        task.add_done_callback(running.discard)


async def main():
    limit = int(argv[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with AsyncCMListener(("127.0.0.1", 0)) as listener:
        say(port=listener.local_addr[1])
        serving = asyncio.create_task(serve(listener))
        loop = asyncio.get_running_loop()
        while (wanted := await loop.run_in_executor(None, hear)) is not None:
            while len(standing) < wanted.get("standing", 0) or counts["lost"] < wanted.get("lost", 0):
                another.clear()
                await another.wait()
            say(standing=len(standing), **counts)
        serving.cancel()


asyncio.run(main())
