"""One process reads and writes the memory of another, with RDMA READ and WRITE.

usage: python examples/remote_memory.py

The owner offers a region over an ordinary connection and goes on with its own work. The peer's protocol gets it by
region_offered(remote), and uses it. No code of the owner runs for an access. When the owner leaves the block, the offer
is revoked: the peer has ten seconds to finish what it has begun. After that it cannot access the memory any more,
whatever it claims.
"""

import asyncio
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any, cast

import rdmanet
from rdmanet.errors import printable

SIZE = 1 << 20
# It has no remote rights itself: only a peer to which it is offered gets a key to it, valid as long as the offer.
ACCESS = rdmanet.AccessFlags.LOCAL_WRITE | rdmanet.AccessFlags.MW_BIND


class Owner(asyncio.Protocol):
    """Offers a region to each client, until the client says that it is done."""

    def __init__(self) -> None:
        self.told = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.task = asyncio.create_task(self.share())

    async def share(self) -> None:
        transport = cast(Any, self.transport)
        pd = transport.get_extra_info("rdma_pd")
        try:
            with pd.alloc_mr(SIZE, ACCESS) as region, memoryview(region) as memory:
                memory[:14] = b"from the owner"
                async with transport.offer(region, access="read,write", name="board"):
                    print("owner: offered", len(memory), "bytes; waiting")
                    await self.told
                print(
                    "owner: taken back; the peer has left:",
                    printable(bytes(memory[64:82]).decode(errors="replace")),
                )
        finally:
            transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.told.done():
            self.told.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.told.done():
            self.told.set_result(None)


class Peer(asyncio.Protocol):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.offered: asyncio.Future[Any] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()

    def region_offered(self, remote: Any) -> None:
        self.offered.set_result(remote)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set_result(None)
        if not self.offered.done():
            self.offered.set_exception(exc or ConnectionResetError("the owner left without an offer"))


def run_owner(address: Connection) -> None:
    async def serve() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(address.fileno(), over.set)
        async with await rdmanet.start_rdma_server(Owner, "127.0.0.1", 0) as server:
            address.send(server.sockets[0].getsockname()[:2])
            await over.wait()

    asyncio.run(serve())


async def run_peer(host: str, port: int) -> None:
    transport, peer = await rdmanet.create_rdma_connection(Peer, host, port)
    remote = await peer.offered
    print("peer: got", remote)
    print("peer: reads", await remote.read(0, 14))
    await remote.write(64, b"greetings, by RDMA")
    transport.write(b"done")
    await peer.over
    try:
        await remote.read(0, 14)
    except rdmanet.RegionRevokedError as exc:
        print("peer: may not read any more:", exc)


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=run_owner, args=(theirs,))
    owner.start()
    theirs.close()
    try:
        asyncio.run(run_peer(*ours.recv()))
    finally:
        ours.close()
        owner.join()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
