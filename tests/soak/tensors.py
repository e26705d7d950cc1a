"""Transfers of random lists of blocks, many of them cancelled, late, revoked or cut off by a kill: is each byte right?

usage: python -m tests.soak.tensors [--transfers 10000] [--seed N]
       python scripts/two_hosts.py python -m tests.soak.tensors ...     the owners are on another host

Two processes own memory (tensors_owner.py). Tasks of this one read and write random lists of blocks of it, each task a
part of its own. What is compared:

- after a read, each byte of each block, and that nothing beside the blocks has changed;
- after one that has failed or was cancelled, that each block's bytes are the owner's or those from before, and that
  none changes later: nothing touches the memory once the call has ended;
- after a write, all of the owner's part, which is read back; after one that failed, each byte is the old or the new;
- after a revocation, that the owner's part does not change any more.

A connection is lost when an owner is killed, and on a busy machine also when a process takes too long to let go of what
has ended. Then the task is granted its part anew.

At the end nothing is left. It ends with status 1 at the first wrong byte; the seed that it prints brings the same lists
again, though not the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import os
import random
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rdmanet import _core, tensors
from rdmanet.errors import RegionRevokedError
from tests.soak.tensors_owner import SLOT_BYTES, TEXT_BYTES, text_of
from tests.support.processes import AwaitedProcess

ROOT = Path(__file__).resolve().parents[2]
TASKS = 8
KILL_EVERY = 400  # transfers
BLOCKS_MOST = 40
GAP = 0xEE
HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
FAR = shlex.split(os.environ.get("RDMANET_TEST_FAR", ""))


class Owner(AwaitedProcess):
    """A process that owns memory."""

    def __init__(self, seed: int) -> None:
        host = os.environ.get("RDMANET_TEST_THERE", HOST).split()[0]
        program = (sys.executable, "-m", "tests.soak.tensors_owner")
        super().__init__(*FAR, *program, seed, TASKS, host, cwd=ROOT)
        self.text = text_of(seed)
        self.asking = asyncio.Lock()
        self.address = b""

    async def ask(self, do: str, slot: int) -> Any:
        async with self.asking:
            self.tell(do=do, slot=slot)
            return next(iter((await self.hear(timeout=120)).values()))


class Soak:
    def __init__(self, endpoint: tensors.Endpoint, seed: int) -> None:
        self.endpoint = endpoint
        self.random = random.Random(seed)
        self.owners: list[Owner] = []
        self.done: Counter[str] = Counter()

    async def run(self, transfers: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                self.owners.append(await self.start(stack))
            self.left = transfers
            async with asyncio.TaskGroup() as tasks:
                for slot in range(TASKS):
                    tasks.create_task(self.work(slot, random.Random(self.random.getrandbits(32))))
                tasks.create_task(self.disturb(stack, transfers))

    async def start(self, stack: contextlib.ExitStack) -> Owner:
        owner = stack.enter_context(Owner(self.random.getrandbits(32)))
        owner.address = bytes.fromhex((await owner.hear(timeout=120))["address"])
        return owner

    async def disturb(self, stack: contextlib.ExitStack, transfers: int) -> None:
        """Kill one after so many transfers, and start another in its place."""
        for kill in range(1, transfers // KILL_EVERY + 1):
            while self.left > transfers - kill * KILL_EVERY:
                await asyncio.sleep(0.01)
            index = self.random.randrange(2)
            self.owners[index].process.kill()
            self.owners[index] = await self.start(stack)
            self.done["kills"] += 1

    async def work(self, slot: int, choose: random.Random) -> None:
        while self.left > 0:
            owner = choose.choice(self.owners)
            try:
                await Part(self, owner, slot, choose).use()
            except RegionRevokedError:
                raise  # nobody has revoked it
            except (OSError, EOFError):
                self.done["lost"] += 1
                await asyncio.sleep(0.01)


class Part:
    """One task's part of an owner's memory, until it is revoked or the owner is killed."""

    def __init__(self, soak: Soak, owner: Owner, slot: int, choose: random.Random) -> None:
        self.soak, self.owner, self.slot, self.choose = soak, owner, slot, choose
        self.mine = bytearray([GAP]) * (BLOCKS_MOST * 16 << 10)

    async def use(self) -> None:
        owner, choose, soak = self.owner, self.choose, self.soak
        text, kept = (bytes.fromhex(each) for each in await owner.ask("grant", self.slot))
        self.text, self.kept = tensors.Descriptor.from_bytes(text), tensors.Descriptor.from_bytes(kept)
        self.peer = await soak.endpoint.connect(owner.address)
        self.slot_bytes = bytearray(SLOT_BYTES)
        await self.peer.read(self.kept, into=self.slot_bytes)  # as others have left it
        while soak.left > 0:
            soak.left -= 1
            fate = choose.choices(("none", "cancelled", "late", "revoked"), (6, 2, 1, 1))[0]
            call = choose.choice((self.read, self.write))
            soak.done[f"{call.__name__}s"] += 1
            if not await call(fate):
                return

    async def end(self, fate: str, moving: asyncio.Task[None]) -> tuple[bool, bool]:
        """Await a transfer that comes to this end. Whether it has done all; and whether the part is still granted."""
        choose, revoked = self.choose, False
        try:
            if fate == "cancelled":
                await asyncio.wait([moving], timeout=choose.choice((0, 0, 0.0005, 0.002)))
                moving.cancel()
            if fate == "late":
                async with asyncio.timeout(choose.random() * 0.003):
                    await moving
            if fate == "revoked":
                revoked = True
                await asyncio.wait([moving], timeout=choose.choice((0, 0, 0.001)))
                digest = await self.owner.ask("revoke", self.slot)
                self.soak.done["revoked"] += 1
                await asyncio.wait([moving])
                if await self.owner.ask("digest", self.slot) != digest:
                    raise ValueError("the owner's memory has changed after it was revoked")
            await moving
            return True, not revoked
        except (asyncio.CancelledError, TimeoutError):
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            self.soak.done["cut short"] += 1
            return False, not revoked
        except RegionRevokedError:
            if not revoked:
                raise
            self.soak.done["refused"] += 1
            return False, False
        except OSError:  # it was killed, or too slow to let go of what was revoked
            self.soak.done["lost"] += 1
            return False, False
        finally:
            moving.cancel()
            await asyncio.wait([moving])
            if not moving.cancelled():
                moving.exception()

    def cut(self, nbytes: int) -> list[tuple[int, int, int]]:
        """A random list: (offset at the owner, offset here, length), with gaps between, here and there disjoint."""
        choose, blocks, there, here = self.choose, [], 0, 0
        for _ in range(choose.randint(1, BLOCKS_MOST)):
            there += choose.choice((0, 1, choose.randrange(nbytes // 8)))
            here += choose.choice((0, 1, 64))
            length = choose.choice((1, 8, 100, 4096, choose.randint(1, 12 << 10)))
            if there + length > nbytes:
                break
            blocks.append((there, here, length))
            there, here = there + length, here + length
        choose.shuffle(blocks)
        return blocks or [(0, 0, 1)]

    async def read(self, fate: str) -> bool:
        blocks, mine = self.cut(TEXT_BYTES), self.mine
        whole = memoryview(mine)
        whole[:] = bytes([GAP]) * len(mine)
        wanted = bytearray(mine)
        for there, here, length in blocks:
            wanted[here : here + length] = self.owner.text[there : there + length]
        pairs = [(self.text[at : at + length], whole[here : here + length]) for at, here, length in blocks]
        moving = asyncio.ensure_future(self.peer.read_many(pairs))
        is_all, goes_on = await self.end(fate, moving)
        came = bytes(mine)
        if is_all and came != wanted:
            raise ValueError("a read has brought something else")
        if not is_all and any(byte not in (right, GAP) for byte, right in zip(came, wanted, strict=True)):
            raise ValueError("a read that was cut short has brought something else")
        await asyncio.sleep(self.choose.choice((0, 0.001)))
        if mine != came:
            raise ValueError("memory has changed after the read had ended")
        return goes_on

    async def write(self, fate: str) -> bool:
        blocks = self.cut(SLOT_BYTES)
        mine, old = memoryview(self.mine), bytes(self.slot_bytes)
        mine[:] = self.choose.randbytes(len(mine))
        new = bytearray(old)
        for there, here, length in blocks:
            new[there : there + length] = mine[here : here + length]
        pairs = [(mine[here : here + length], self.kept[at : at + length]) for at, here, length in blocks]
        moving = asyncio.ensure_future(self.peer.write_many(pairs))
        is_all, goes_on = await self.end(fate, moving)
        mine[:] = bytes([GAP]) * len(mine)  # what is sent after the end would be wrong
        if not goes_on:
            if is_all and await self.owner.ask("digest", self.slot) != hashlib.sha256(new).hexdigest():
                raise ValueError("a write has written something else")
            return False
        await self.peer.read(self.kept, into=self.slot_bytes)
        there_now = bytes(self.slot_bytes)
        if is_all and there_now != new:
            raise ValueError("a write has written something else")
        if any(byte not in choice for byte, *choice in zip(there_now, old, new, strict=True)):
            raise ValueError("a write that was cut short has written something else")
        return True


async def soak(transfers: int, seed: int) -> Counter[str]:
    async with tensors.open(os.environ.get("RDMANET_TEST_HERE", HOST).split()[0]) as endpoint:
        running = Soak(endpoint, seed)
        await running.run(transfers)
    return running.done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.tensors")
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    done = asyncio.run(soak(options.transfers, options.seed))
    gc.collect()
    print(", ".join(f"{count} {name}" for name, count in sorted(done.items())))
    if left := {kind: count for kind, count in _core.live_objects().items() if count}:
        print(f"left behind: {left}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
