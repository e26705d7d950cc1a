"""Keeps memory that others may read, says where it is, and ends with its input."""

import asyncio
import json
import sys

from rdmanet import tensors


async def main() -> None:
    async with tensors.open() as endpoint, endpoint.register(bytearray(b"k" * (1 << 20))) as memory:
        facts = {
            "address": endpoint.address().hex(),
            "descriptor": memory.describe().hex(),
            "nbytes": memory.nbytes,
        }
        print(json.dumps(facts), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())
