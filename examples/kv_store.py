"""A key-value store whose server is passive: the clients read and change the table in its memory themselves.

usage: python examples/kv_store.py serve | put KEY VALUE | get KEY | add KEY NUMBER   [-n TIMES]

The table is an array of slots of 64 bytes. Clients get its address when they connect; then any number of them use READ,
WRITE and atomic operations at the same time, and no code of the server runs. A slot has

    version   0: free; odd: a client is changing the slot; even: no client is. Only atomic operations change it
    key       24 bytes, written once, by the client that takes the free slot
    value     32 bytes; or a number in the first 8, which fetch_and_add() changes without owning the slot

- The slot of a key is found by its hash and linear probing: the first slot that has the key, or is free.
- To change a slot, a client must own it: compare_and_swap(version, even, even + 1) returns the old value, which is
  `even` for one client only. That client writes, and releases the slot by fetch_and_add(version, 1).
- A reader does not own the slot. The value is consistent if the version was even before and is unchanged afterwards.
- Clients trust each other: each can write everywhere, and a slot whose owner dies stays locked.
"""

import argparse
import asyncio
import contextlib
import ctypes
import sys
import zlib

import rdmanet.verbs as v
from rdmanet.errors import printable
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ, AsyncQP, RemoteMemory, RemoteStruct

SLOTS, KEY, VALUE = 4096, 24, 32
REMOTE = v.AccessFlags.REMOTE_READ | v.AccessFlags.REMOTE_WRITE | v.AccessFlags.REMOTE_ATOMIC


class Slot(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint64), ("key", ctypes.c_char * KEY), ("value", ctypes.c_char * VALUE)]


class Store:
    """The table, as a client sees it; it does one thing after the other, since it has room for one answer."""

    def __init__(self, qp: AsyncQP, table: RemoteMemory, room: v.MR) -> None:
        self.qp, self.room, self.slots = qp, room, table.struct_array(Slot)

    async def get(self, key: str) -> str:
        slot = await self.slot_of(key, take=False)
        while True:
            before = await self.qp.fetch_and_add(slot.version, 0)
            await self.qp.read(self.room.at[:VALUE], slot.value)
            if before % 2 == 0 and before == await self.qp.fetch_and_add(slot.version, 0):
                return self.room[:VALUE].rstrip(b"\0").decode()

    async def put(self, key: str, value: str) -> int:
        data = ctypes.create_string_buffer(value.encode(), VALUE).raw  # ValueError, if it is longer
        slot, even = await self.slot_of(key, take=True), 2
        while (found := await self.qp.compare_and_swap(slot.version, even, even + 1)) != even:
            even = found & ~1
        await self.qp.write(data, slot.value)
        return await self.qp.fetch_and_add(slot.version, 1) // 2  # the value's revision, from 1

    async def add(self, key: str, number: str) -> int:
        slot = await self.slot_of(key, take=True)
        return await self.qp.fetch_and_add(slot.value[:8], int(number)) + int(number)

    async def slot_of(self, key: str, take: bool) -> RemoteStruct:
        """The slot that has this key; otherwise a free one is given it, or there is none."""
        data = ctypes.create_string_buffer(key.encode(), KEY).raw
        for step in range(SLOTS):
            slot: RemoteStruct = self.slots[(zlib.crc32(data) + step) % SLOTS]
            found = await self.qp.compare_and_swap(slot.version, 0, int(take))
            if found == 0 and not take:
                break
            if found == 0:  # and now it is 1, and ours
                await self.qp.write(data, slot.key)
                await self.qp.fetch_and_add(slot.version, 1)
                return slot
            while found == 1:  # another client is giving it its key
                found = await self.qp.fetch_and_add(slot.version, 0)
            await self.qp.read(self.room.at[:KEY], slot.key)
            if self.room[:KEY] == data:
                return slot
        raise KeyError(key)


async def attend(id: AsyncCMID, table: v.MR) -> None:
    """All that the server does for a client: let it in, and out."""
    with contextlib.suppress(OSError), AsyncCQ(table.pd.context, 64) as cq, id:
        id.create_qp(table.pd, cq)
        await id.accept(bytes(table.to_remote()))
        await id.disconnected()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-d", "--device", help="one of the library to use; by default the first of all")
    parser.add_argument("-a", "--address", default="127.0.0.1")
    parser.add_argument("-p", "--port", type=int, default=7475)
    parser.add_argument("-n", "--times", type=int, default=1)
    parser.add_argument("command", choices=["serve", "put", "get", "add"])
    parser.add_argument("words", nargs="*", metavar="KEY, VALUE or NUMBER")
    args = parser.parse_args()
    library, address = v.find_device(args.device).library, (args.address, args.port)
    if args.command == "serve":
        with AsyncCMListener(address, library=library) as listener, v.PD(listener.context) as pd:
            with pd.alloc_mr(SLOTS * ctypes.sizeof(Slot), REMOTE | v.AccessFlags.LOCAL_WRITE) as table:
                print("listening on", *listener.local_addr, flush=True)
                async with asyncio.TaskGroup() as clients:
                    async for id in listener:
                        clients.create_task(attend(id, table))
        return
    with AsyncCMID(library=library) as id:
        await id.resolve(address)
        with v.PD(id.context) as pd, AsyncCQ(id.context, 64) as cq, pd.alloc_mr(VALUE) as room, id:
            qp = id.create_qp(pd, cq, v.QPCap(max_inline_data=VALUE))
            store = Store(qp, RemoteMemory.from_bytes((await id.connect())[:20]), room)
            for _ in range(args.times):
                print(printable(str(await getattr(store, args.command)(*args.words))))  # others' words


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
