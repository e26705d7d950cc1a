"""An owner in another process, which may be on another host: lists, notifications, atomics, and how access ends."""

import asyncio
import hashlib
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy
import pytest
from places import ENVIRONMENT, script

import rdmanet
from rdmanet import tensors
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin

KIB, MIB = 1 << 10, 1 << 20


class Owner(AwaitedProcess):
    """A process that owns so many bytes of memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(*script("owner.py", str(nbytes)), env=ENVIRONMENT)

    async def ask(self, do: str, what: Any = None) -> Any:
        self.tell(do=do, what=what)
        return await self.answer()

    async def answer(self) -> Any:
        return (await self.hear())["answer"]

    async def describe(self, **what: Any) -> tensors.Descriptor:
        return tensors.Descriptor.from_bytes(bytes.fromhex(await self.ask("describe", what)))

    async def revoke(self, descriptor: tensors.Descriptor) -> str:
        """Returns the digest of its memory right after that."""
        return str(await self.ask("revoke", bytes(descriptor).hex()))

    async def digest(self) -> str:
        return str((await self.ask("look"))["digest"])

    async def held(self) -> int:
        return int((await self.ask("look"))["held"])


@asynccontextmanager
async def owned(user: tensors.Endpoint, nbytes: int) -> AsyncIterator[tuple[Owner, tensors.Peer]]:
    with Owner(nbytes) as owner:
        yield owner, await user.connect(bytes.fromhex(await owner.answer()))


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_ten_thousand_blocks(user: tensors.Endpoint, fewer: Callable[[int], int]):
    """Of 64 B to 8 KiB, in any order and with gaps; each byte is compared, also those between."""
    count, chance = fewer(10_000), random.Random(1)
    blocks, end = [], 0
    for _ in range(count):
        start = end + chance.choice((0, 0, 16, 100))
        end = start + chance.choice((64, 4 * KIB, chance.randint(1, 8 * KIB)))
        blocks.append((start, end))
    chance.shuffle(blocks)
    text = memoryview(bytearray(chance.randbytes(end)))
    wanted, mine = bytearray(end), bytearray(end)
    for start, stop in blocks:
        wanted[start:stop] = text[start:stop]
    async with owned(user, end) as (owner, peer):
        whole = await owner.describe(mode="rw")
        async with user.register(text):
            await peer.write_many((text[start:stop], whole[start:stop]) for start, stop in blocks)
        assert await owner.digest() == digest(wanted)
        view = memoryview(mine)
        await peer.read_many((whole[start:stop], view[start:stop]) for start, stop in blocks)
        assert (mine == wanted) is True
        rows = numpy.empty((1000, 64), "u1")
        table = numpy.frombuffer(wanted, "u1")[: end // 64 * 64].reshape(-1, 64)
        indices = numpy.random.default_rng(1).integers(0, len(table), 1000)
        described = tensors.Descriptor(
            *(whole.version, whole.endpoint, whole.grant, "r", 0, table.nbytes, "|u1", table.shape)
        )
        await peer.read_rows(described, indices, into=rows)
        assert (rows == table[indices]).all()
        assert peer.statistics()["connections"] == 1


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("nbytes", [1, 5000, MIB + 1, 9 * MIB])
async def test_one_block(user: tensors.Endpoint, way: str, nbytes: int):
    text = random.Random(nbytes).randbytes(nbytes)
    async with owned(user, nbytes) as (owner, peer):
        whole = await owner.describe(mode="rw")
        await peer.write(text, whole)
        assert await owner.digest() == digest(text)
        mine = bytearray(nbytes)
        await peer.read(whole, into=mine)
        assert (mine == text) is True


async def test_notifications_come_after_the_bytes(user: tensors.Endpoint):
    async with owned(user, 100 * KIB) as (owner, peer):
        whole = await owner.describe(mode="w")
        for step in range(20):
            text = random.Random(step).randbytes(100 * KIB)
            await peer.write(text, whole, notify=b"step %d" % step)
            assert await owner.ask("notified") == f"step {step}"
            assert await owner.digest() == digest(text)


async def test_a_lease_ends(user: tensors.Endpoint):
    async with owned(user, KIB) as (owner, peer):
        short, long = await owner.describe(lease=0.3), await owner.describe()
        mine = bytearray(KIB)
        await peer.read(long, into=mine)
        with pytest.raises(rdmanet.RegionRevokedError):
            while True:
                await peer.read(short, into=mine)
        await peer.read(long, into=mine)
        while await owner.held() != 1:
            pass


async def test_what_is_revoked_is_written_no_more(user: tensors.Endpoint):
    """From the moment on at which the owner's revoke() returned, whatever is under way."""
    async with owned(user, 16 * MIB) as (owner, peer):
        text = memoryview(bytearray(b"x" * (16 * MIB)))
        for turn in range(4):
            whole = await owner.describe(mode="rw")
            await peer.read(whole[:1], into=bytearray(1))
            text[:] = bytes([turn]) * len(text)
            size = 4096
            blocks = [(text[at : at + size], whole[at : at + size]) for at in range(0, len(text), 2 * size)]
            (writing,) = await begin(peer.write_many(blocks))
            then = await owner.revoke(whole)
            await asyncio.wait([writing])
            assert writing.exception() is None or isinstance(writing.exception(), OSError)
            with pytest.raises(rdmanet.RegionRevokedError):
                await peer.write(b"late", whole[:4])
            look = await owner.ask("look")
            assert look == {"held": 0, "digest": then}


@pytest.mark.parametrize("way", ["cancelled", "timed out"])
async def test_after_the_end_of_a_write_nothing_is_sent(user: tensors.Endpoint, way: str):
    async with owned(user, 32 * MIB) as (owner, peer):
        whole, mine = await owner.describe(mode="rw"), bytearray(b"a") * (32 * MIB)
        await peer.read(whole[:1], into=bytearray(1))
        for turn in range(4):
            mine[:] = bytes([turn + 1]) * len(mine)
            if way == "cancelled":
                (writing,) = await begin(peer.write(mine, whole))
                writing.cancel()
                await asyncio.wait([writing])
            else:
                try:
                    async with asyncio.timeout(0.001):
                        await peer.write(mine, whole)
                except TimeoutError:
                    pass
            mine[:] = b"\xff" * len(mine)
            there = bytearray(32 * MIB)
            await peer.read(whole, into=there)
            assert 0xFF not in there
            mine += b"nothing has it registered"
            del mine[32 * MIB :]
        assert peer.statistics()["connections"] == 1


@pytest.mark.not_on_iwarp("has no atomic operations")
async def test_atomic_operations(user: tensors.Endpoint):
    async with owned(user, 16) as (owner, peer):
        whole = await owner.describe(mode="rwa")
        before = await asyncio.gather(*(peer.fetch_and_add(whole[8:], 1) for _ in range(50)))
        assert sorted(before) == list(range(50))
        assert await peer.compare_and_swap(whole[8:], 50, 7) == 50
        assert await owner.digest() == digest(bytes(8) + (7).to_bytes(8, "little"))


async def test_an_owner_that_is_killed_while_it_is_read(user: tensors.Endpoint):
    async with owned(user, MIB) as (owner, peer):
        whole, mine = await owner.describe(), bytearray(MIB)
        await peer.read(whole, into=mine)
        owner.send_signal(signal.SIGKILL)
        with pytest.raises(OSError):
            while True:
                await peer.read(whole, into=mine)
        mine.clear()
    async with owned(user, 4) as (owner, other):
        assert other is not peer
        await other.read(await owner.describe(), into=bytearray(4))
