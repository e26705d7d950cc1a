"""A server of rdmanet.rpc that keeps what it is given: argv is how many bytes it takes by reference of one connection,
and what it is, of `hasty` (it has the kernel provide all memory of an argument at once), `careless` (it does not count
what is lent to it).

Says its `port`, and `most`, how many bytes of memory it may have provided between two turns of its loop. For each line
that it hears, it waits until so many calls are `held`, and says how many bytes were provided in one turn, at `most`.
"""

import asyncio

from rdmanet import rpc
from rdmanet._core import bring_in
from rdmanet.rpc import lending, paging, taking

lent_bytes, *kinds = argv
changed = asyncio.Condition()


class Holder(rpc.Service):
    def __init__(self):
        self.held = 0

    async def hold(self, data: bytes) -> None:
        self.held += 1
        async with changed:
            changed.notify()
        await asyncio.Event().wait()


class Provided:
    """How many bytes of memory are provided in a turn."""

    def __init__(self):
        self.now = self.most = 0

    def bring_in(self, memory, nbytes, offset):
        if not self.now:
            asyncio.get_running_loop().call_soon(self.end)
        self.now += min(nbytes, len(memory) - offset)
        self.most = max(self.most, self.now)
        bring_in(memory, nbytes, offset)

    def end(self):
        self.now = 0

    async def all_at_once(self, loop, memory):
        self.bring_in(memory, len(memory), 0)


async def main():
    loop = asyncio.get_running_loop()
    service = Holder()
    limits = rpc.Limits(lent_bytes=int(lent_bytes))
    async with await rpc.serve(service, "127.0.0.1", 0, transport="rdma", limits=limits) as server:
        say(port=server.sockets[0].getsockname()[1], most=2 * paging.PIECE_BYTES)
        while (order := await loop.run_in_executor(None, hear)) is not None:
            async with changed:
                await changed.wait_for(lambda: service.held >= order["held"])
            say(held=service.held, most=provided.most)
        await server.close(0)


class Uncounted:
    """A connection's share that counts all but what is lent."""

    def __init__(self, share):
        self.share = share

    def __getattr__(self, name):
        return getattr(self.share, name)

    def hold_lent(self, holder, nbytes, what):
        pass


provided = Provided()
paging.STEP_S = 0  # one piece in a turn, however fast the host is
paging.bring_in = provided.bring_in
if "hasty" in kinds:
    lending.brought_in = provided.all_at_once
if "careless" in kinds:
    take = taking.take
    taking.take = lambda link, share, *rest: take(link, Uncounted(share), *rest)
asyncio.run(main())
