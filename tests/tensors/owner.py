"""Owns memory, and does what each line of its standard input says; it answers each with a line, and ends with it."""

import asyncio
import hashlib
import json
import sys
from typing import Any

from places import HOST

import rdmanet
from rdmanet import tensors


async def answer(
    memory: tensors.Memory, kept: memoryview, endpoint: tensors.Endpoint, do: str, what: Any
) -> object:
    if do == "describe":
        part = slice(*what.pop("part")) if "part" in what else None
        return memory.describe(part, **what).hex()
    if do == "revoke":
        await memory.revoke(bytes.fromhex(what))
        return digest(kept)
    if do == "notified":
        return (await anext(endpoint.notifications())).payload.decode()
    return {"held": len(memory.held()), "digest": digest(kept)}


def digest(kept: memoryview) -> str:
    return hashlib.sha256(kept).hexdigest()


async def main() -> None:
    kept = memoryview(rdmanet.alloc(int(sys.argv[1])))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with tensors.open(HOST) as endpoint, endpoint.register(kept) as memory:
        print(json.dumps({"answer": endpoint.address().hex()}), flush=True)
        while line := await lines.readline():
            asked = json.loads(line)
            said = await answer(memory, kept, endpoint, asked["do"], asked["what"])
            print(json.dumps({"answer": said}), flush=True)


asyncio.run(main())
