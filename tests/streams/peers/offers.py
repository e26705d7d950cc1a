"""offers.py: a server that counts the regions it is offered and reads the first byte of each.

Says `offered N` once N regions stand (N is what the line before asked for), `revoked N` likewise.
"""

import asyncio

from script import HOST, orders, port_of, run, say

import rdmanet
from tests.support.waiting import Conditions


class Counting(asyncio.Protocol):
    offered = revoked = read = 0

    def connection_made(self, transport):
        self.conditions = Conditions()
        current.set_result(self)
        self.tasks = set()

    def region_offered(self, remote):
        self.offered += 1
        self.conditions.look()
        task = asyncio.get_running_loop().create_task(self.look(remote))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def look(self, remote):
        try:
            first = await remote.read(0, 1)
        except rdmanet.RegionRevokedError:
            return
        assert first == remote.name.encode()[:1], (first, remote)
        self.read += 1
        self.conditions.look()

    def region_revoked(self, remote):
        assert remote.revoked
        self.revoked += 1
        self.conditions.look()


async def main():
    global current
    current = asyncio.get_running_loop().create_future()
    async with await rdmanet.start_rdma_server(Counting, HOST, 0) as server:
        say("port", port_of(server))
        async for name, count in orders():
            protocol = await current
            await protocol.conditions.until(lambda: getattr(protocol, name) >= int(count))  # noqa: B023
            say(name, getattr(protocol, name))


run(main())
