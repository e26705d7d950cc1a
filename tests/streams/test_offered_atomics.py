"""Atomic operations on memory that a peer offers: compare-and-swap and fetch-and-add of OfferedMemory."""

import asyncio
import contextlib
import errno
import sys

import pytest
from harness import OFFERABLE, Net

import rdmanet
from rdmanet import AccessFlags
from tests.support.waiting import begin

MOST = (1 << 64) - 1

atomics = pytest.mark.not_on_iwarp("has no atomic operations")


@contextlib.asynccontextmanager
async def counters(net: Net):
    """A client's view of eight numbers of the server's, and the server's own."""
    client, server = await net.pair()
    with (
        server.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr,
        memoryview(mr) as memory,
        memory.cast("Q") as numbers,
    ):
        async with server.transport.offer(mr, access="atomic,read", name="counters"):
            await client.until(lambda: client.offered)
            yield client.offered[0], numbers


@atomics
async def test_they_return_what_was_there(net: Net):
    async with counters(net) as (remote, numbers):
        assert await remote.fetch_and_add(8, 5) == 0
        assert await remote.fetch_and_add(8, -2) == 5
        assert await remote.compare_and_swap(8, 4, 100) == 3
        assert await remote.compare_and_swap(8, 3, 100) == 3
        assert await remote.read(8, 8) == (100).to_bytes(8, sys.byteorder)
        assert await remote.fetch_and_add(56, -1) == 0
        assert await remote.fetch_and_add(56, 3) == MOST
        assert list(numbers) == [0, 100, 0, 0, 0, 0, 0, 2]


@atomics
async def test_many_at_once_lose_nothing(net: Net, fewer):
    """Over two connections, each with more than its queue pair has room for."""
    count = fewer(300)
    pairs = [await net.pair(), await net.pair()]
    with pairs[0][1].transport.get_extra_info("rdma_pd").alloc_mr(8, OFFERABLE) as mr:
        async with contextlib.AsyncExitStack() as offers:
            for client, server in pairs:
                await offers.enter_async_context(server.transport.offer(mr, access="atomic"))
                await client.until(lambda client=client: client.offered)
            remotes = [client.offered[0] for client, _ in pairs]
            before = await asyncio.gather(
                *(remote.fetch_and_add(0, 1) for _ in range(count) for remote in remotes)
            )
            assert sorted(before) == list(range(2 * count))
            assert int.from_bytes(mr, sys.byteorder) == 2 * count


@atomics
async def test_a_cancelled_one_is_executed_and_disturbs_none_that_follows(net: Net):
    async with counters(net) as (remote, numbers):
        cancelled = await begin(*(remote.fetch_and_add(0, 1000) for _ in range(5)))
        for task in cancelled:
            task.cancel()
        assert [await remote.fetch_and_add(8, 1) for _ in range(20)] == list(range(20))
        assert list(numbers[:2]) == [5000, 20]


@atomics
async def test_what_is_wrong_is_said_here(net: Net):
    """And the connection goes on."""
    async with counters(net) as (remote, numbers):
        for offset, kind, text in (
            (4, ValueError, "not a multiple of 8: use an offset with 4 less"),
            (63, IndexError, "8 bytes at offset 63"),
            (-8, IndexError, "8 bytes at offset -8"),
            (64, IndexError, "8 bytes at offset 64"),
        ):
            for wrong in (remote.fetch_and_add(offset, 1), remote.compare_and_swap(offset, 0, 1)):
                with pytest.raises(kind, match=text):
                    await wrong
        for number in (-1, MOST + 1):
            for arguments in ((0, number, 0), (0, 0, number)):
                with pytest.raises(ValueError, match="64 bits without sign"):
                    await remote.compare_and_swap(*arguments)
        with pytest.raises(PermissionError, match=r"lacks 'write'.* \(peer .*:\d+\)"):
            await remote.write(0, b"12345678")
        assert await remote.fetch_and_add(0, 1) == 0
        assert numbers[0] == 1


@atomics
async def test_without_the_right_or_the_offer(net: Net):
    client, server = await net.pair()
    peer = rdmanet.errors.endpoint(client.transport.get_extra_info("peername"))
    async with server.transport.offer(bytearray(8), access="read,write"):
        await client.until(lambda: client.offered)
        remote = client.offered[0]
        with pytest.raises(PermissionError, match="lacks 'atomic'") as caught:
            await remote.fetch_and_add(0, 1)
        assert peer in str(caught.value)
    with pytest.raises(rdmanet.RegionRevokedError, match="fetch_and_add: the peer has revoked") as revoked:
        await remote.fetch_and_add(0, 1)
    assert peer in str(revoked.value)
    client.transport.write(b"alive")
    await server.until_received(5)
    with pytest.raises(BufferError):
        async with server.transport.offer(bytes(8), access="atomic"):
            pass
    region = server.transport.get_extra_info("rdma_pd").alloc_mr(8, AccessFlags.MW_BIND)
    with region, pytest.raises(ValueError, match="LOCAL_WRITE"):
        async with server.transport.offer(region, access="atomic"):
            pass


async def test_a_device_without_them_says_so(net: Net):
    """Those of iWARP have none."""
    client, server = await net.pair()
    for protocol in (client, server):
        protocol.transport._life.regions._has_atomics = False
    with pytest.raises(OSError, match=r"offer\(\): device \w+ has no atomic operations") as caught:
        async with server.transport.offer(bytearray(8), access="atomic"):
            pass
    assert caught.value.errno == errno.EOPNOTSUPP
    async with server.transport.offer(bytearray(8)):
        await client.until(lambda: client.offered)
        with pytest.raises(OSError, match="fetch_and_add: device") as caught:
            await client.offered[0].fetch_and_add(0, 1)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert await client.offered[0].read() == bytes(8)
