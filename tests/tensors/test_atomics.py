"""Atomic operations on 8 bytes of another endpoint's memory: what they return, what is refused; and none is lost."""

import asyncio

import msgspec
import numpy
import pytest
from places import HOST

import rdmanet
from rdmanet import tensors
from rdmanet.tensors import blocking
from tests.support.waiting import begin

MOST = (1 << 64) - 1

pytestmark = pytest.mark.not_on_iwarp("has no atomic operations")


def numbers(count: int) -> numpy.ndarray:
    return numpy.frombuffer(memoryview(rdmanet.alloc(8 * count)), "u8")


async def test_they_return_what_was_there(owner: tensors.Endpoint, peer: tensors.Peer):
    kept = numbers(8)
    async with owner.register(kept) as memory:
        each = tensors.Descriptor.from_bytes(memory.describe(mode="rwa"))
        assert (each.mode, each[1:2].nbytes) == ("rwa", 8)
        assert await peer.fetch_and_add(each[1:2], 5) == 0
        assert await peer.fetch_and_add(each[1:2], -2) == 5
        assert await peer.compare_and_swap(each[1:2], 4, 100) == 3
        assert await peer.compare_and_swap(each[1:2], 3, 100) == 3
        assert await peer.fetch_and_add(bytes(each[7:]), -1) == 0
        assert await peer.fetch_and_add(each[7:], 3) == MOST
        assert await peer.fetch_and_add(each[7:], numpy.int64(-1)) == 2
        assert await peer.compare_and_swap(each[7:], numpy.uint64(1), numpy.int64(2)) == 1
        mine = numpy.empty(8, "u8")
        await peer.read(each, into=mine)
        assert mine.tolist() == kept.tolist() == [0, 100, 0, 0, 0, 0, 0, 2]
        only = tensors.Descriptor.from_bytes(memory.describe(slice(1, 2), mode="a"))
        assert await peer.fetch_and_add(only, 1) == 100
        with pytest.raises(PermissionError):
            await peer.read(only, into=mine[:1])
        del kept
    assert (peer.statistics()["atomics"], peer.statistics()["failed"]) == (9, 0)


async def test_many_at_once_lose_nothing(owner: tensors.Endpoint):
    kept = numbers(1)
    async with owner.register(kept) as memory, tensors.open(HOST) as first, tensors.open(HOST) as second:
        described = memory.describe(mode="a")
        peers = [await each.connect(owner.address()) for each in (first, second)]
        before = await asyncio.gather(
            *(peer.fetch_and_add(described, 1) for _ in range(300) for peer in peers)
        )
        assert sorted(before) == list(range(600)) and kept[0] == 600
        del kept


async def test_what_is_refused(owner: tensors.Endpoint, peer: tensors.Peer):
    kept = numbers(3)
    async with owner.register(kept) as memory, owner.register(memoryview(kept).cast("B")[4:20]) as odd:
        plain = tensors.Descriptor.from_bytes(memory.describe(mode="rw"))
        with pytest.raises(PermissionError):
            await peer.fetch_and_add(plain[:1], 1)
        forged = msgspec.structs.replace(plain[:1], mode="rwa")  # the owner has granted less
        with pytest.raises(PermissionError):
            await peer.fetch_and_add(forged, 1)
        all_of_it = tensors.Descriptor.from_bytes(memory.describe(mode="a"))
        with pytest.raises(ValueError, match="take a slice of 8"):
            await peer.fetch_and_add(all_of_it, 1)
        with pytest.raises(IndexError):
            await peer.fetch_and_add(msgspec.structs.replace(all_of_it[:1], offset=24), 1)
        for number in (-1, 1 << 64):
            with pytest.raises(ValueError, match="without sign"):
                await peer.compare_and_swap(all_of_it[:1], number, 1)
        bytes_of = tensors.Descriptor.from_bytes(odd.describe(mode="a"))
        with pytest.raises(ValueError, match="not a multiple of 8"):
            await peer.fetch_and_add(bytes_of[:8], 1)
        assert await peer.fetch_and_add(bytes_of[4:12], 1) == 0
        gone = memory.describe(slice(0, 1), mode="a")
        await memory.revoke(gone)
        before = peer.statistics()
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.fetch_and_add(gone, 1)
        after = peer.statistics()
        assert [after[name] - before[name] for name in ("atomics", "failed")] == [1, 1]
        assert kept.tolist() == [0, 1, 0]
        del kept
    async with owner.register(bytes(8)) as read_only:
        with pytest.raises(TypeError, match="read-only"):
            read_only.describe(mode="a")
        with pytest.raises(ValueError, match="is none of"):
            read_only.describe(mode="x")  # type: ignore[arg-type]
    assert peer.statistics()["connections"] == 1


async def test_cancelling_and_revoking(owner: tensors.Endpoint, peer: tensors.Peer):
    kept = numbers(1)
    async with owner.register(kept) as memory:
        for turns in range(10):
            described = memory.describe(mode="a")
            adding = await begin(*(peer.fetch_and_add(described, 1) for _ in range(20)))
            for _ in range(turns):
                await asyncio.wait(adding, timeout=0)
            for each in adding[::3]:
                each.cancel()
            await memory.revoke(described)
            assert not memory.held()
            now = int(kept[0])
            await asyncio.wait(adding)
            assert kept[0] == now  # nobody adds after the end
            for each in adding:
                assert each.cancelled() or isinstance(
                    each.exception(), rdmanet.RegionRevokedError | type(None)
                )
        del kept
    assert peer.statistics()["connections"] == 1


def test_without_a_loop():
    kept = numbers(2)
    with blocking.open(HOST) as owner, owner.register(kept) as memory, blocking.open(HOST) as user:
        peer = user.connect(owner.address())
        each = tensors.Descriptor.from_bytes(memory.describe(mode="a"))
        assert peer.fetch_and_add(each[1:], 7).wait(30) == 0
        assert peer.compare_and_swap(each[1:], 7, 9).wait(30) == 7
        assert kept.tolist() == [0, 9]
        del kept
