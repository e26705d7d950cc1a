"""A peer that keeps what it was lent: it never lets go, and reads by force when the call is over.

As a program, it serves over RDMA, says the port, and "holds" when a call has lent it memory. When it is told to read,
it says what it has read.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from net import HOST

from rdmanet import rpc
from rdmanet.rpc import lending
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.wire.offers import RemoteRegion
from tests.support import lines


async def keep(data: Any) -> OfferedMemory:
    """The memory behind a Buffer, of which the owner will not hear that it is not used any more."""
    remote = await lending.found(data._source._link, data._source._loan)
    remote._operator.begin_use(remote._region)  # type: ignore[attr-defined]
    return remote


async def read_by_force(remote: OfferedMemory) -> bytes:
    """What the device reads with the key, whether the owner has revoked it or not; nothing, if it is refused."""
    found = bytearray(remote.length)
    known = OfferedMemory.of(remote._operator, RemoteRegion(remote._region.region))
    try:
        await known.read_into(found)
    except OSError:
        return bytes(found).rstrip(b"\0")
    return bytes(found)


class Keeper(rpc.Service):
    def __init__(self, say: Any) -> None:
        self.say = say
        self.kept: Any = None

    async def hold(self, data: rpc.Buffer, how: str) -> None:
        self.kept = await keep(data)
        self.say("holds")
        if how == "answers":
            return
        if how == "fails":
            raise rpc.Error(rpc.Code.ABORTED)
        await asyncio.Event().wait()

    async def items(self, data: rpc.Buffer) -> AsyncIterator[int]:
        self.kept = await keep(data)
        yield 1
        await asyncio.Event().wait()

    async def echo(self, text: str) -> str:
        return text

    async def lend(self) -> rpc.Buffer:
        return rpc.Buffer(self.kept)


async def main() -> None:
    service = Keeper(lines.say)
    async with await rpc.serve(service, HOST, 0) as server:
        lines.say(server.sockets[0].getsockname()[1])
        async for _ in lines.lines():
            lines.say((await read_by_force(service.kept))[:10].hex() or "nothing")


if __name__ == "__main__":
    asyncio.run(main())
