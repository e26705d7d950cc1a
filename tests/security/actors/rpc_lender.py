"""Lends one buffer many times to a server of rdmanet.rpc: argv is its port, the length of the buffer, how often, and
the seconds that the calls may take.

Says how many calls were `refused`, and `why`, as soon as there are as many as the line has in `refused`.
"""

import asyncio

from rdmanet import rpc

port, length, times, seconds = map(int, argv)


class Holder(rpc.Service):
    async def hold(self, data: bytes) -> None: ...


async def main():
    loop = asyncio.get_running_loop()
    memory = bytes(length)
    async with rpc.connect(Holder, "127.0.0.1", port, transport="rdma", timeout=seconds) as client:
        calls = {asyncio.ensure_future(client.hold(memory)) for _ in range(times)}
        refused = []
        while (order := await loop.run_in_executor(None, hear)) is not None:
            while len(refused) < order["refused"]:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                refused += [str(call.exception()) for call in done]
            say(refused=len(refused), why=refused[:1])
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


asyncio.run(main())
