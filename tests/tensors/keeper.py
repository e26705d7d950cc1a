"""Keeps memory that others may read, says where it is, and ends with its input; "allocated": of alloc()."""

import asyncio
import json
import sys

from places import HOST

import rdmanet
from rdmanet import tensors

NBYTES = 1 << 20


async def main() -> None:
    # Neither begins at the beginning of a page.
    of = rdmanet.alloc if sys.argv[1:] == ["allocated"] else bytearray
    kept = memoryview(of(NBYTES + 100))[100:]
    kept[:] = b"k" * NBYTES
    async with tensors.open(HOST) as endpoint, endpoint.register(kept) as memory:
        facts = {
            "address": endpoint.address().hex(),
            "descriptor": memory.describe().hex(),
            "nbytes": memory.nbytes,
        }
        print(json.dumps(facts), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())
