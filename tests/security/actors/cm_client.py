"""Connects once for each line {"to": [address, port], "data": text}, and says `reply`, or the `error` that it got.

With "local" in the line it connects from that address; with "exhausted", without a free descriptor.
"""

import asyncio
import os
import resource
import time

from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMID, AsyncCQ


def exhaust():
    """No descriptor is left: returns what it was before."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    return limits


async def connect(to, data, local=None, exhausted=False):
    async with AsyncCMID() as id:
        await id.resolve(tuple(to), source=local and tuple(local))
        with PD(id.context) as pd, AsyncCQ(id.context, 8) as cq:
            id.create_qp(pd, cq, QPCap(max_send_wr=1, max_recv_wr=1))
            limits = exhaust() if exhausted else resource.getrlimit(resource.RLIMIT_NOFILE)
            try:
                return await id.connect(data)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                id.close()


say(ready=True)
while (order := hear()) is not None:
    began = time.monotonic()
    try:
        data = order.get("data", "").encode()
        reply = asyncio.run(connect(order["to"], data, order.get("local"), order.get("exhausted", False)))
    except OSError as exc:
        kind = type(exc).__name__
        say(error=kind, errno=exc.errno, text=str(exc), seconds=time.monotonic() - began)
    else:
        say(reply=reply.rstrip(b"\0").decode(), seconds=time.monotonic() - began)
