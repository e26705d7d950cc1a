# ruff: noqa: F821
"""A server that echoes, and offers a region of its own to whichever client it is told; an honest one."""

import asyncio
import time

import rdmanet

MEMORY = rdmanet.AccessFlags.LOCAL_WRITE | rdmanet.AccessFlags.MW_BIND
owners: list["Owner"] = []


class Owner(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.number = len(owners)
        self.left = asyncio.Event()
        owners.append(self)
        say(made=self.number)
        if "offer" in argv:
            self.offer("to each", 5.0)

    def offer(self, name, patience):
        self.task = asyncio.ensure_future(self.share(name, patience))

    async def share(self, name, patience):
        memory = self.transport.get_extra_info("rdma_pd").alloc_mr(4096, MEMORY)
        self.memory = memory
        memory[:16] = b"secret of the %d." % min(self.number, 9)
        try:
            async with self.transport.offer(memory, access="read,write", name=name, revoke_timeout=patience):
                say(offered=self.number)
                await self.left.wait()
                began = time.monotonic()
        except OSError as error:
            say(refused=self.number, why=type(error).__name__)
            return
        finally:
            if "offer" in argv:
                memory.close()
        say(taken_back=self.number, seconds=time.monotonic() - began)

    def data_received(self, data):
        self.transport.write(data)
        say(echoed=self.number)

    def connection_lost(self, exc):
        self.left.set()
        # Of hundreds that are lost nobody reads, and the pipe holds 64 KiB.
        text = {"text": str(exc)} if isinstance(exc, rdmanet.ProtocolError) else {}
        say(lost=self.number, error=type(exc).__name__, **text)


async def main():
    server = await rdmanet.start_rdma_server(Owner, "127.0.0.1", 0, shared_receive="shared" in argv)
    say(port=server.sockets[0].getsockname()[1])
    while (order := await asyncio.to_thread(hear)) is not None:
        owner = owners[order["client"]]
        match order["do"]:
            case "offer":
                owner.offer("to one", order["patience"])
            case "leave":
                owner.left.set()
            case "tell":
                context = owner.transport.get_extra_info("rdma_pd").context
                say(memory=bytes(owner.memory[:32]).hex(), wrong_keys=context.counters().get("wrong_keys"))
    server.abort_clients()
    server.close()


asyncio.run(main())
