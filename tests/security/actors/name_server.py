"""Serves requests of the connection manager by name alone: argv is the port, which a TCP program has on 127.0.0.1.

It says `listens`, and then, for each request, its `request`, and whether it came `by_link`: in memory, from a process
that it is linked to. It keeps the connections. A line with `become` has it lock itself up (link_words.py), and it says
`became`.
"""

import asyncio

from link_words import become
from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMListener, AsyncCQ

kept = []


async def serve(listener):
    async for id in listener:
        say(request=id.private_data.rstrip(b"\0").decode(), by_link=not id.id.peer_by_name)
        cq = AsyncCQ(id.context, 8)
        id.create_qp(PD(id.context), cq, QPCap(max_send_wr=1, max_recv_wr=1))
        kept.append((id, cq))
        await id.accept(b"by name")


async def main():
    with AsyncCMListener(("127.0.0.1", int(argv[0]))) as listener:
        say(listens=True)
        serving = asyncio.create_task(serve(listener))
        while (order := await asyncio.get_running_loop().run_in_executor(None, hear)) is not None:
            become(*order["become"])
            say(became=True)
        serving.cancel()


asyncio.run(main())
