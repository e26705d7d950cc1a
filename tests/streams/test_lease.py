"""lease(): received bytes, looked at where they are."""

import asyncio
import contextlib
import gc
import random

import pytest
from harness import Net
from pattern import Pattern
from test_reader import on_every_geometry, stream_pair

import rdmanet
from tests.support.waiting import begin, loop_turns, until_seen

pytestmark = pytest.mark.once

MIB = 1 << 20


def stats(end) -> dict[str, int]:
    return end.get_extra_info("rdma_stats")


async def test_a_frame_in_its_slot(net: Net):
    reader, near, _, writer = await net.stream_pair()
    writer.write(b"hello")
    async with reader.lease() as view:
        assert view == b"hello" and view.readonly
        assert stats(near)["slots_leased"] == 1
        with pytest.raises(TypeError):
            view[0] = 1
    with pytest.raises(ValueError, match="released"):
        view[0]
    assert not reader._buffer
    writer.write(b"and on")
    assert await reader.readexactly(6) == b"and on"


async def test_more_than_a_slot_is_collected(net: Net):
    reader, _, _, writer = await net.stream_pair()
    text = Pattern().take(500_000)
    writer.write(text)
    async with reader.lease(300_000) as view:
        got = bytes(view)
    assert len(got) >= 300_000 and text.startswith(got)
    assert await reader.readexactly(500_000 - len(got)) == text[len(got) :]


async def test_many_at_once_after_reads_that_were_placed(net: Net):
    """Then the peer may send only a little ahead, and each lease must make up for what it keeps."""
    reader, _, _, writer = await net.stream_pair()
    memory = memoryview(rdmanet.alloc(MIB))
    for _ in range(8):
        [reading] = await begin(reader.readinto_exactly(memory))
        writer.write(bytes(MIB))
        await reading
    async with contextlib.AsyncExitStack() as leases:
        for number in range(5):
            writer.write(b"%d" % number)
            assert await leases.enter_async_context(reader.lease()) == b"%d" % number


async def test_the_rest_of_a_slot(net: Net):
    reader, _, _, writer = await net.stream_pair()
    writer.write(b"head,body")
    assert await reader.readuntil(b",") == b"head,"
    async with reader.lease() as view:
        assert view == b"body"


async def test_the_end_of_the_stream(net: Net):
    reader, _, _, writer = await net.stream_pair()
    writer.write(b"abc")
    writer.write_eof()
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        async with reader.lease(4):
            raise AssertionError("there are three bytes")
    assert caught.value.partial == b"abc" and caught.value.expected == 4
    for at_least in (1, 1000):
        async with reader.lease(at_least) as view:
            assert len(view) == 0


async def test_impossible_numbers(net: Net):
    reader, *_ = await net.stream_pair()
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="not positive"):
            reader.lease(wrong)


async def test_a_lease_is_entered_once(net: Net):
    reader, _, _, writer = await net.stream_pair()
    writer.write(b"a")
    lease = reader.lease()
    async with lease:
        pass
    with pytest.raises(RuntimeError, match="once"):
        await lease.__aenter__()


async def test_what_is_made_of_a_view_keeps_its_slot(net: Net):
    reader, near, _, writer = await net.stream_pair()
    writer.write(b"kept")
    async with reader.lease() as view:
        part = view[1:3]
    for _ in range(100):
        writer.write(b"x" * 100_000)
        await reader.readexactly(100_000)
    assert part == b"ep"
    assert stats(near)["slots_leased"] == 1
    part.release()
    await until_seen(lambda: stats(near)["slots_leased"] == 0)
    writer.write(b"y" * MIB)
    assert await reader.readexactly(MIB) == b"y" * MIB


async def test_all_slots_leased(net: Net):
    """The peer can send nothing, until one comes back."""
    slot = 10 << 16  # so much is not put aside, nor spilled
    geometry = {"slot_bytes": slot, "first_slot_bytes": slot, "data_slots": 2}
    reader, near, _, writer = await stream_pair(net, geometry)
    pattern = Pattern()
    text = b"".join(pattern.take(slot) for _ in range(5))
    writer.write(text)
    await until_seen(lambda: stats(near)["slots_held"] == 2)
    parts = []
    for _ in range(2):
        async with reader.lease() as view:
            parts.append(view[:])
    assert stats(near)["slots_leased"] == 2
    (reading,) = await begin(reader.readexactly(3 * slot))
    await loop_turns(10)
    assert not reading.done()
    assert b"".join(parts) == text[: 2 * slot]
    parts.clear()
    assert await reading == text[2 * slot :]


@pytest.mark.parametrize("end", ["close", "abort", "peer"])
async def test_a_view_outlives_its_connection(net: Net, end):
    """No other connection gets that memory before it is released."""
    reader, near, _, writer = await net.stream_pair()
    writer.write(b"kept" * 200)
    async with reader.lease() as view:
        part = view[:]
    if end == "peer":
        writer.transport.abort()
        with pytest.raises(ConnectionError):
            await reader.read()
    else:
        getattr(near.transport, end)()
    await asyncio.gather(near.wait_closed(), return_exceptions=True)
    for _ in range(3):
        other, ending, _, source = await net.stream_pair()
        source.write(b"z" * MIB)
        await other.readexactly(MIB)
        ending.close()
        await ending.wait_closed()
    assert part == b"kept" * 200
    part.release()
    gc.collect()


@on_every_geometry
@pytest.mark.parametrize("seed", range(4))
async def test_random_leases(net: Net, geometry, seed):
    """Any mixture of reads and leases, some cancelled, some held: each byte comes once, and stays while it is held."""
    reader, _, _, writer = await stream_pair(net, geometry)
    rng = random.Random(seed)
    total = 40 * geometry.get("slot_bytes", 65536)
    slots = geometry.get("data_slots", 16)

    async def write() -> None:
        sent = Pattern()
        while sent.position < total:
            writer.write(sent.take(min(total - sent.position, rng.choice([1, 100, 700, 5000, 70_000]))))
            if rng.random() < 0.7:
                await writer.drain()
        writer.write_eof()

    async def lease(at_least: int, got: list[memoryview]) -> None:
        async with reader.lease(at_least) as view:
            got.append(view[:])

    (writing,) = await begin(write())
    expected = Pattern()
    held: list[tuple[memoryview, bytes]] = []
    while expected.position < total:
        left = total - expected.position
        if rng.random() < 0.3:
            expected.check(await reader.read(rng.choice([1, 50, 3000])))
            continue
        got: list[memoryview] = []
        task = asyncio.ensure_future(lease(min(left, rng.choice([1, 1, 1, 600, 9000])), got))
        if rng.random() < 0.4:
            await loop_turns(rng.randrange(4))
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        for view in got:
            assert len(view)
            expected.check(view)
            held.append((view, bytes(view)))
        while len(held) >= max(slots // 2, 1):
            view, text = held.pop(rng.randrange(len(held)))
            assert view == text
            view.release()
    assert await reader.read() == b""
    await writing
    for view, text in held:
        assert view == text
        view.release()
