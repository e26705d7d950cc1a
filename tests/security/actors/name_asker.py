"""Connects to 127.0.0.1 by the listener's name alone: argv is the port. It keeps what it has, so it stays linked.

For each line that it hears it connects once more, and says `reply`, or the `error` that it got.
"""

import asyncio

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMID, AsyncCQ

kept = []


async def connect(data):
    id = AsyncCMID()
    id.id.set_by_name_alone()
    await id.resolve(("127.0.0.1", int(argv[0])))
    cq = AsyncCQ(id.context, 8)
    id.create_qp(PD(id.context), cq, QPCap(max_send_wr=1, max_recv_wr=1))
    reply = await id.connect(data)
    kept.append((id, cq))
    return reply


async def main():
    say(ready=True)
    while (order := await asyncio.get_running_loop().run_in_executor(None, hear)) is not None:
        try:
            reply = await connect(order["data"].encode())
        except OSError as exc:
            say(error=type(exc).__name__, text=str(exc))
        else:
            say(reply=reply.rstrip(b"\0").decode())


asyncio.run(main())
