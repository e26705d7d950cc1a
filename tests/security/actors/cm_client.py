"""Connects once for each line {"to": [address, port], "data": text}, and says `reply`, or the `error` that it got."""

import asyncio
import time

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMID, AsyncCQ


async def connect(to, data):
    async with AsyncCMID() as id:
        await id.resolve(tuple(to))
        with PD(id.context) as pd, AsyncCQ(id.context, 8) as cq:
            id.create_qp(pd, cq, QPCap(max_send_wr=1, max_recv_wr=1))
            try:
                return await id.connect(data)
            finally:
                id.close()


say(ready=True)
while (order := hear()) is not None:
    began = time.monotonic()
    try:
        reply = asyncio.run(connect(order["to"], order.get("data", "").encode()))
    except OSError as exc:
        kind = type(exc).__name__
        say(error=kind, errno=exc.errno, text=str(exc), seconds=time.monotonic() - began)
    else:
        say(reply=reply.rstrip(b"\0").decode(), seconds=time.monotonic() - began)
