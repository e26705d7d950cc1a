"""A server of rdmanet.rpc that reads what is lent to it: argv is its lent_seconds, and what it is, of `patient` (it
does not look whether anything comes).

Says its `port`, and that it is `about` to read. It reads when it hears a line. When the connection has ended, or after
four times those seconds if it is patient, it says how many `connections` it has, and ends them at the next line.
"""

import asyncio

from rdmanet import rpc
from rdmanet.rpc import reads

lent_seconds, *kinds = argv
begun = asyncio.Event()


class Holder(rpc.Service):
    async def hold(self, data: bytes) -> None: ...


async def read(self, remote, memory, offset, read=reads.Reads.read):
    say(about=True)
    hear()  # and nothing else happens, so that the call does not end before
    begun.set()
    await read(self, remote, memory, offset)


async def main():
    limits = rpc.Limits(lent_seconds=float(lent_seconds))
    async with await rpc.serve(Holder(), "127.0.0.1", 0, transport="rdma", limits=limits) as server:
        say(port=server.sockets[0].getsockname()[1])
        await begun.wait()
        [callee] = server.callees
        if "patient" in kinds:
            await asyncio.sleep(4 * float(lent_seconds))
        else:
            await callee.link.closed
        say(connections=len(server.callees))
        hear()
        callee.link.abort()


reads.Reads.read = read
if "patient" in kinds:
    reads.Reads.look = lambda self: None
asyncio.run(main())
