"""An owner of tensors for tests.soak.tensors: grants parts of its memory, takes them back, and says what is in them."""

import asyncio
import hashlib
import json
import sys

import rdmanet
from rdmanet import tensors

TEXT_BYTES = 1 << 20
SLOT_BYTES = 64 << 10


def text_of(seed: int) -> bytes:
    """What this owner's readable memory has."""
    return hashlib.shake_128(str(seed).encode()).digest(TEXT_BYTES)


async def main() -> None:
    seed, slots, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    text, kept = (memoryview(rdmanet.alloc(nbytes)) for nbytes in (TEXT_BYTES, slots * SLOT_BYTES))
    text[:] = text_of(seed)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    grants: dict[int, tuple[bytes, bytes]] = {}
    async with (
        tensors.open(host) as endpoint,
        endpoint.register(text) as texts,
        endpoint.register(kept) as memory,
    ):
        print(json.dumps({"address": endpoint.address().hex()}), flush=True)
        while line := await lines.readline():
            asked = json.loads(line)
            slot = asked["slot"]
            part = slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)
            if asked["do"] == "grant":
                grants[slot] = texts.describe(), memory.describe(part, mode="rw")
                said = {"granted": [each.hex() for each in grants[slot]]}
            elif asked["do"] == "revoke":
                for owned, descriptor in zip((texts, memory), grants.pop(slot, ()), strict=False):
                    await owned.revoke(descriptor)
                said = {"digest": hashlib.sha256(kept[part]).hexdigest()}
            else:
                said = {"digest": hashlib.sha256(kept[part]).hexdigest()}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
