"""Direct placement at its limits: no window is left, no Credit may go, nobody answers, a child is forked.

test_placement.py has what it is when nothing is in the way.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
from pathlib import Path

import pytest
from harness import HOST, Net
from pattern import Pattern

import rdmanet
from rdmanet import credit
from rdmanet._core import AccessFlags, WROpcode
from tests.streams.test_placement import bare as bare
from tests.streams.test_placement import memory, needs_windows, placed, places, said, stats, streams_to
from tests.support.bare_peer import CREDIT, DATA, PING, PONG, BarePeer, frame
from tests.support.waiting import begin, until_seen

MIB = 1 << 20


async def pass_some(reader, writer, view: memoryview, count: int = 3) -> None:
    """Some messages of the view's length, read into it."""
    sent, expected = Pattern(), Pattern()
    for _ in range(count):
        (reading,) = await begin(reader.readinto_exactly(view))
        writer.write(sent.take(len(view)))
        await reading
        expected.check(view)


# ---- windows


@pytest.mark.embedded_only("a device of the kernel fails when it likes")
async def test_the_device_has_no_window_left(net: Net, caplog):
    """Then large reads are copied on this connection, and a new one tries again."""
    reader, near, _, writer = await net.stream_pair()
    needs_windows(near)
    device = near.get_extra_info("rdma_pd").context
    device.set_faults("fail=alloc_mw:1:ENOSPC")
    try:
        await pass_some(reader, writer, memory(MIB))
    finally:
        device.set_faults("")
    assert stats(near)["bytes_placed_here"] == 0
    assert stats(near)["wants_open"] == 0
    (record,) = [record for record in caplog.records if "large reads are copied" in record.message]
    assert os.strerror(28) in record.message
    reader, near, _, writer = await net.stream_pair()
    await pass_some(reader, writer, memory(MIB))
    if places(writer):
        assert stats(near)["bytes_placed_here"] > MIB


# ---- Credits


async def test_a_want_waits_until_a_credit_may_go(net: Net, bare: BarePeer):
    """The first one, and that of an offer, are not answered: the peer is asked by a Ping, and then it is told."""
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    size = 300_000
    view = memory(size)

    async def reads_when_told() -> None:
        (reading,) = await begin(reader.readinto_exactly(view))
        kind, body = await bare.next_frame()
        assert kind == PING
        assert stats(writer)["wants_open"] == 1, "it is named, and not said"
        bare.post(frame(PONG, body, reaped=bare.reaped))
        want = await said(bare)
        there = {"remote_addr": want.address, "rkey": want.rkey}
        bare.post(b"a" * size, WROpcode.RDMA_WRITE, **there)
        bare.post(placed(want.serial, size))
        assert await reading == size
        assert bytes(view) == b"a" * size

    with writer.get_extra_info("rdma_pd").alloc_mr(4096, AccessFlags.MW_BIND) as mr:
        async with writer.transport.offer(mr, revoke_timeout=0):
            await bare.offered()
            await reads_when_told()


async def test_a_want_and_more_regions_than_a_credit_has_room_for(net: Net, bare: BarePeer):
    """The Want goes first, and nothing is longer than the peer's slots."""
    room = 512
    port = bare.listen(HOST)
    hello = credit.pack_hello(credit.Hello(room, 16, 8, 16, credit.FEATURE_PLACEMENT))
    accepting = asyncio.ensure_future(bare.accept(hello=hello))
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    net.writers.append(writer)
    await accepting
    needs_windows(writer)
    bare.places = True
    pd = writer.get_extra_info("rdma_pd")
    names = {f"{i}".rjust(224) for i in range(6)}  # two fill a Credit
    async with contextlib.AsyncExitStack() as stack:
        for name in names:  # as long as nothing is answered, all but the first of them wait
            mr = stack.enter_context(pd.alloc_mr(4096, AccessFlags.MW_BIND))
            await stack.enter_async_context(writer.transport.offer(mr, name=name, revoke_timeout=0))
        (reading,) = await begin(reader.readinto_exactly(memory(MIB)))
        wants: list[credit.Want] = []
        heard: set[str] = set()
        while not wants or heard != names:
            kind, body = await bare.next_frame()
            if kind == CREDIT and body:
                assert len(body) <= room
                news = credit.unpack_credit(body, 16, True)
                heard |= {region.name for region in news.regions}
                wants += getattr(news, "wants", ())
            bare.post(
                frame(PONG, body, reaped=bare.reaped)
                if kind == PING
                else frame(CREDIT, granted=16, reaped=bare.reaped)
            )
        assert len(wants) == 1
        bare.post(frame(DATA, b"d" * 100))
        reading.cancel()


# ---- what was placed, and the read did not get


async def test_what_was_placed_is_copied_out_when_the_read_is_given_up(net: Net, bare: BarePeer):
    """Also if the peer cannot write there any more: the program has its memory back, and the stream its bytes."""
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    size = 200_000
    view = memory(size)
    (reading,) = await begin(reader.readinto_exactly(view))
    want = await said(bare)
    writer.transport.pause_reading()
    bare.post(b"a" * size, WROpcode.RDMA_WRITE, remote_addr=want.address, rkey=want.rkey)
    bare.post(placed(want.serial, size))
    await until_seen(lambda: stats(writer)["bytes_placed_here"] == size)
    await until_seen(lambda: stats(writer)["wants_open"] == 0)
    assert not reading.done()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    view[:] = bytes(size)
    writer.transport.resume_reading()
    assert await reader.readexactly(size) == b"a" * size
    assert not any(view)


# ---- a peer that does not answer


class Waiting(asyncio.Protocol):
    """Waits for its connection's end."""

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc):
        self.lost.set_result(exc)


async def test_a_peer_that_does_not_let_go_when_another_protocol_takes_over(net: Net, bare: BarePeer):
    """It has as long as closing may take."""
    reader, writer = await streams_to(bare, close_timeout=0.3)
    net.writers.append(writer)
    needs_windows(writer)
    (reading,) = await begin(reader.readinto_exactly(memory(MIB)))
    await said(bare)
    bare.post(frame(CREDIT, reaped=bare.reaped))
    protocol = Waiting()
    writer.transport.set_protocol(protocol)
    news = await bare.news()
    assert news.unwanted == 1
    error = await protocol.lost
    assert isinstance(error, TimeoutError) and "has not let go" in str(error)
    reading.cancel()


async def test_each_time_the_peer_has_as_long_to_let_go(net: Net, bare: BarePeer):
    """It has answered for the first read, and does not for the second."""
    reader, writer = await streams_to(bare, close_timeout=0.3)
    net.writers.append(writer)
    needs_windows(writer)
    view = memory(MIB)
    for serial in (1, 2):
        (reading,) = await begin(reader.readinto_exactly(view))
        assert (await said(bare)).serial == serial
        bare.post(frame(CREDIT, reaped=bare.reaped))
        reading.cancel()
        news = await bare.news()
        assert news.unwanted == serial
        if serial == 1:
            answer = credit.Credit(16, answered=serial)
            bare.post(frame(CREDIT, credit.pack_credit(answer), reaped=bare.reaped))
        with pytest.raises((asyncio.CancelledError, ConnectionError)):
            await reading
    with pytest.raises(TimeoutError, match="has not let go"):
        await reader.readexactly(1)


# ---- fork


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


async def test_a_forked_child_frees_memory_that_its_parent_has_registered(net: Net):
    """For itself. The parent's is registered as before, and the peer places bytes there."""
    reader, near, _, writer = await net.stream_pair()
    view = memory(MIB)
    await pass_some(reader, writer, view)
    child = os.fork()
    if child == 0:
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            assert is_mapped(address)
            view.release()
            del view
            gc.collect()
            os._exit(1 if is_mapped(address) else 0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = stats(near)["bytes_placed_here"]
    await pass_some(reader, writer, view)
    if places(writer):
        assert stats(near)["bytes_placed_here"] > before
