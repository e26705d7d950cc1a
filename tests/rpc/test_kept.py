"""Buffers that the program keeps and hands over in many calls: their registration, their keys, and their memory."""

import asyncio
import gc
import mmap
from typing import Any

import numpy
import numpy.typing as npt
import pytest
from net import Journal, Net, bindings, callee, channel

import rdmanet
from rdmanet import rpc
from rdmanet.rpc import outgoing
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.link import Link
from rdmanet.stream import regions
from rdmanet.stream.bindings import Binding
from rdmanet.stream.registered import RegisteredMemory
from tests.support.waiting import begin, until_seen

BY_RDMA = pytest.mark.parametrize("transport", ["rdma"])


class Store(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.gate = asyncio.Event()
        self.weights = rpc.Buffer(numpy.arange(LEND_BYTES, dtype="u1"))

    async def first(self, data: rpc.Buffer) -> bytes:
        return await data.read(0, 2)

    async def total(self, data: npt.NDArray[numpy.float32]) -> float:
        return float(data.sum(dtype="f8"))

    async def size(self, data: memoryview) -> int:
        return data.nbytes

    async def hold(self, data: rpc.Buffer) -> bytes:
        self.journal("holds")
        await self.gate.wait()
        return await data.read(0, 2)

    async def get(self) -> rpc.Buffer:
        return self.weights


class Registrations:
    """Counts what is registered in order to be lent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        once, region_of = RegisteredMemory, regions.region_of

        class Counted(once):  # type: ignore[misc, valid-type]
            def region_in(there, pd: Any) -> Any:
                self.count += pd not in there._regions
                return super().region_in(pd)

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return region_of(*arguments)

        monkeypatch.setattr(outgoing, "RegisteredMemory", Counted)
        monkeypatch.setattr(regions, "RegisteredMemory", once)
        monkeypatch.setattr(regions, "region_of", counted)


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Registrations:
    return Registrations(monkeypatch)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[rdmanet.OfferedMemory]:
    """All memory that has been on offer to either side."""
    seen: list[rdmanet.OfferedMemory] = []
    original = Link.region_offered
    monkeypatch.setattr(
        Link, "region_offered", lambda link, remote: (seen.append(remote), original(link, remote))[1]
    )
    return seen


@BY_RDMA
async def test_the_memory_is_registered_once(net: Net, registrations: Registrations, offers: list[Any]):
    """And each call has a key of its own."""
    client, _ = await net.pair(Store())
    async with rpc.Buffer(bytearray(b"ab" * LEND_BYTES)) as kept:
        for _ in range(4):
            assert await client.first(kept) == b"ab"
        assert await asyncio.gather(*(client.first(kept) for _ in range(4))) == [b"ab"] * 4
        assert await client.size(kept) == 2 * LEND_BYTES  # type: ignore[arg-type]
        assert registrations.count == 1
        assert len(offers) == 9 and len({remote.rkey for remote in offers}) == 9
    await client.first(rpc.Buffer(bytearray(LEND_BYTES)))
    assert registrations.count == 2


@BY_RDMA
async def test_a_result_is_registered_once(net: Net, registrations: Registrations):
    service = Store()
    client, _ = await net.pair(service)
    for _ in range(4):
        async with await client.get() as lent:
            assert await lent.read(1, 3) == b"\1\2"
    assert registrations.count == 1
    await net.aclose()
    service.weights.release()


@BY_RDMA
async def test_the_array_of_a_buffer(net: Net, registrations: Registrations):
    client, _ = await net.pair(Store())
    gradient = numpy.ones((2, LEND_BYTES // 4), "<f4")
    async with rpc.Buffer(gradient) as kept:
        assert kept.array.shape == gradient.shape and numpy.shares_memory(kept.array, gradient)
        for value in (1, 2, 3):
            gradient[:] = value
            assert await client.total(kept.array) == value * gradient.size
        assert registrations.count == 1
        assert await client.total(kept.array[1]) == 3 * gradient.size / 2  # a part is memory like any other
        assert registrations.count == 2


async def test_a_buffer_of_bytes_has_no_array():
    with pytest.raises(AttributeError, match="was not made of an array"):
        _ = rpc.Buffer(b"1234").array


@BY_RDMA
async def test_a_key_ends_with_its_call(net: Net, offers: list[Any]):
    """A callee that keeps the descriptor reads nothing after the call, though the memory is still registered."""
    client, _ = await net.pair(Store())
    async with rpc.Buffer(bytearray(b"secret" * LEND_BYTES)) as kept:
        await client.first(kept)
        (remote,) = offers
        await until_seen(lambda: remote.revoked)
        remote._region.revoked = False  # as if it did not know
        found = bytearray(6)
        with pytest.raises(OSError):
            await remote.read_into(found)
        assert found == bytes(6)
        await net.aclose()


@BY_RDMA
async def test_a_key_of_another_call_reads_nothing(net: Net, offers: list[Any]):
    """Not even while the same memory is lent to a second call."""
    service = Store()
    client, _ = await net.pair(service)
    async with rpc.Buffer(bytearray(b"secret" * LEND_BYTES)) as kept:
        await client.first(kept)
        (holding,) = await begin(client.hold(kept))
        await service.journal.until("holds")
        old, new = offers
        assert await new.read(0, 6) == b"secret"
        old._region.revoked = False
        with pytest.raises(OSError):
            await old.read(0, 6)
        with pytest.raises(rpc.Error, match="UNAVAILABLE"):
            await holding  # which cost the callee its connection
        await net.aclose()


@BY_RDMA
async def test_memory_cannot_be_freed_during_a_call(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    growing, mapped = bytearray(b"ab" * LEND_BYTES), mmap.mmap(-1, LEND_BYTES)
    mapped[:2] = b"cd"
    array = numpy.full(LEND_BYTES, 7, "u1")
    kept = [rpc.Buffer(growing), rpc.Buffer(mapped), rpc.Buffer(array)]
    calls = await begin(*(client.hold(buffer) for buffer in kept))
    await service.journal.until("holds", 3)
    for buffer in kept:
        with pytest.raises(BufferError, match="cannot be released: a call has it that has not ended"):
            buffer.release()
    with pytest.raises(BufferError):
        growing.clear()
    with pytest.raises(BufferError):
        mapped.close()
    del array, buffer
    gc.collect()
    service.gate.set()
    assert await asyncio.gather(*calls) == [b"ab", b"cd", b"\7\7"]
    for buffer in kept:
        buffer.release()
    growing.clear()
    mapped.close()
    with pytest.raises(TypeError, match="is not of this process's memory"):
        await client.first(kept[0])


@BY_RDMA
async def test_a_buffer_that_is_forgotten_ends_with_its_call(net: Net):
    """Not before; and its registration ends with it, which the count of live objects shows."""
    service = Store()
    client, server = await net.pair(service)
    (holding,) = await begin(client.hold(rpc.Buffer(bytearray(b"ab" * LEND_BYTES))))
    await service.journal.until("holds")
    gc.collect()
    service.gate.set()
    assert await holding == b"ab"
    (holding,) = await begin(client.hold(rpc.Buffer(bytearray(LEND_BYTES))))
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert not bindings(channel(client).link)
    assert callee(server)


@BY_RDMA
async def test_a_buffer_that_is_forgotten_while_the_peer_does_not_let_go(
    net: Net, monkeypatch: pytest.MonkeyPatch
):
    """It lasts as long as the loan does. Otherwise, this warns that it cannot be released."""
    monkeypatch.setattr(Binding, "acknowledged", lambda self: None)
    client, _ = await net.pair(Store())
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await rpc.options(client, timeout=0.05).hold(rpc.Buffer(bytearray(LEND_BYTES)))
    gc.collect()
    assert not bindings(channel(client).link)


async def test_kept_buffers_over_every_transport(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    other = await net.connect(Store, await net.serve(service))
    kept = rpc.Buffer(numpy.full(LEND_BYTES, 3, "u1"))
    for one in (client, other, client):
        assert await one.first(kept) == b"\3\3"
        async with await one.get() as lent:
            assert await lent.read(1, 3) == b"\1\2"
    kept.release()
    kept.release()
    await net.aclose()
    service.weights.release()
