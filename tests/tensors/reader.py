"""Reads what its standard input describes, once, and says it. Then it keeps the key until its input ends."""

import asyncio
import json
import sys

from places import HOST

from rdmanet import tensors


async def main() -> None:
    facts = json.loads(sys.stdin.readline())
    async with tensors.open(HOST) as endpoint:
        peer = await endpoint.connect(bytes.fromhex(facts["address"]))
        descriptor = tensors.Descriptor.from_bytes(bytes.fromhex(facts["descriptor"]))
        mine = bytearray(descriptor.nbytes)
        await peer.read(descriptor, into=mine)
        print(mine.decode(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())
