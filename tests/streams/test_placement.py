"""Large messages are written where a read wants them, if that is memory of rdmanet.alloc().

A device without memory windows, or one that reads registered memory only, uses slots; then all but the way is the same.
"""

import asyncio
import ctypes
import errno
import gc
import mmap
import os
import random
import signal
import sys
import warnings
from typing import ClassVar

import pytest
from harness import HOST, OFFERABLE, Net, Peer
from pattern import PERIOD, Pattern
from test_reader import GEOMETRIES, stream_pair

import rdmanet
from rdmanet import credit
from rdmanet._core import WCStatus, WROpcode
from rdmanet.errors import ProtocolError
from rdmanet.wire import placement
from tests.support.bare_peer import ABORT, CREDIT, DATA, FIN, PLACED, PLACING_HELLO, BarePeer, frame
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin, loop_turns, until_seen

KIB = 1 << 10
MIB = 1 << 20


def memory(size: int) -> memoryview:
    return memoryview(rdmanet.alloc(size))


def stats(end) -> dict[str, int]:
    return end.get_extra_info("rdma_stats")


def places(end) -> bool:
    """Whether bytes that are written here can be placed by the peer's side, which is on the same device."""
    engine = end.transport.engine
    return engine.confines_peers() and engine.reads_in_place


async def read_exactly(reader, size: int, pattern: Pattern) -> None:
    view = memory(size)
    assert await reader.readinto_exactly(view) == size
    pattern.check(view)


@pytest.fixture
def bare(device):
    peer = BarePeer(device.library)
    yield peer
    peer.close()


# ---- what is placed


# Devices of the kernel, where nothing is placed, try the first of these only, and the tests of readers try the others.
on_every_geometry = pytest.mark.parametrize(
    "geometry", [GEOMETRIES[0], *(pytest.param(each, marks=pytest.mark.long) for each in GEOMETRIES[1:])]
)


@pytest.mark.parametrize("size", [64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB - 3, MIB, 5 * MIB + 7])
@pytest.mark.parametrize("kind", [bytes, bytearray, rdmanet.alloc])
async def test_bytes_come_where_they_are_wanted(net: Net, size: int, kind):
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(size)
    for _ in range(6):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        data = b"".join(sent.take(min(MIB, size - at)) for at in range(0, size, MIB))
        if kind is rdmanet.alloc:
            source = memory(size)
            source[:] = data
            writer.write(source)
        else:
            writer.write(memoryview(kind(data)))
        await writer.drain()
        assert await reading == size
        expected.check(view)
    if places(writer) and size > MIB:
        assert stats(writer)["bytes_placed"] > 3 * size
    if size < 64 * KIB:
        assert stats(writer)["bytes_placed"] == 0


async def test_an_offer_waits_for_what_is_being_placed(net: Net):
    """Both take one of the few places for one-sided requests."""
    reader, _, _, writer = await net.stream_pair()
    with writer.get_extra_info("rdma_pd").alloc_mr(100, OFFERABLE) as mr:
        for _ in range(8):
            (reading,) = await begin(reader.readinto_exactly(memory(12 * MIB)))
            await loop_turns(100)  # so that it is known there that it waits
            writer.write(bytes(12 * MIB))
            async with writer.transport.offer(mr):
                assert await reading == 12 * MIB


FREED_MEANWHILE = """
import asyncio, sys, threading, rdmanet
from rdmanet.stream.loop_context import LoopContext
SIZE = 1 << 16
sys.setswitchinterval(1e-6)
arrays = [rdmanet.alloc(SIZE) for _ in range(300)]

async def serve(reader, writer):
    while await reader.read(1):
        writer.write(bytes(SIZE))

def free():
    while arrays:
        arrays.pop()

def close(self, original=LoopContext.close):
    threading.Thread(target=free).start()
    original(self)

LoopContext.close = close

async def main():
    server = await rdmanet.start_rdma_stream_server(serve, HOST, 0)
    reader, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
    for array in arrays:
        writer.write(b"x")
        await reader.readinto_exactly(memoryview(array))

asyncio.run(main())
"""


async def test_memory_that_is_freed_by_a_thread_while_the_loop_ends(net: Net):
    code = FREED_MEANWHILE.replace("HOST", repr(HOST))
    with AwaitedProcess(sys.executable, "-c", code, keep_errors=True) as program:
        assert await program.finish() == ""


@pytest.mark.embedded_only("an adapter's limit is lower")
async def test_the_embedded_device_places_only_what_is_larger_than_caches(net: Net, monkeypatch):
    monkeypatch.delenv("RDMANET_PLACE_BYTES")
    reader, _, _, writer = await net.stream_pair()
    for size, is_placed in ((MIB, False), (8 * MIB, True)):
        sent, expected = Pattern(), Pattern()
        for _ in range(3):
            (reading,) = await begin(read_exactly(reader, size, expected))
            writer.write(b"".join(sent.take(MIB) for _ in range(size // MIB)))
            await reading
        assert (stats(writer)["bytes_placed"] > 0) == (is_placed and places(writer))


@pytest.mark.parametrize("limit", ["64K", "0", "-1", "9" * 19])
async def test_a_limit_that_is_no_number_of_bytes(net: Net, monkeypatch, limit):
    monkeypatch.setenv("RDMANET_PLACE_BYTES", limit)
    with pytest.raises(OSError, match=f"RDMANET_PLACE_BYTES={limit}: set it to a number of bytes") as caught:
        await net.stream_pair()
    assert caught.value.errno == errno.EINVAL


@on_every_geometry
async def test_every_geometry(net: Net, geometry):
    reader, _, _, writer = await stream_pair(net, geometry)
    sent, expected = Pattern(), Pattern()
    size = 300 * KIB
    for _ in range(8):
        reading = asyncio.ensure_future(read_exactly(reader, size, expected))
        writer.write(sent.take(size))
        await reading
    if places(writer):
        assert stats(writer)["bytes_placed"] > size


async def test_short_reads(net: Net):
    """readinto() is asked ahead only after it got much, and returns what has come."""
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(MIB)
    for size in [MIB, 700 * KIB, 300 * KIB, 64 * KIB, 100, MIB, MIB, 5]:
        left = size
        writer.write(sent.take(size))
        while left:
            got = await reader.readinto(view[:left])
            expected.check(view[:got])
            left -= got
    assert not reader._buffer


async def test_a_header_before_each_message(net: Net):
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(2 * MIB)
    rng = random.Random(1)

    async def write() -> None:
        for _ in range(20):
            size = rng.choice([10, 70 * KIB, MIB])
            writer.write(size.to_bytes(8, "little"))
            writer.write(sent.take(size))
            await writer.drain()

    (writing,) = await begin(write())
    for _ in range(20):
        size = int.from_bytes(await reader.readexactly(8), "little")
        assert await reader.readinto_exactly(view[:size]) == size
        expected.check(view[:size])
    await writing
    if places(writer):
        assert stats(writer)["bytes_placed"] > MIB


async def test_a_view_by_way_of_another_object(net: Net):
    """Memory is found by its address: an array over it, such as NumPy's, is an object of its own."""
    reader, _, _, writer = await net.stream_pair()
    size = 8 * MIB - 8192
    view = memoryview((ctypes.c_char * size).from_buffer(rdmanet.alloc(8 * MIB), 8000)).cast("B")
    source = Pattern().take(PERIOD) * (size // PERIOD + 1)
    for _ in range(3):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        writer.write(memoryview(source)[:size])
        await writer.drain()
        await reading
        assert view == source[:size]
        view[:] = bytes(size)
    if places(writer):
        assert stats(writer)["bytes_placed"] > size


async def test_other_memory_goes_by_slots(net: Net):
    reader, _, _, writer = await net.stream_pair()
    view = bytearray(MIB)
    for _ in range(3):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        writer.write(bytes(MIB))
        await reading
    assert stats(writer)["bytes_placed"] == 0


async def test_small_writes_do_not_pay_for_large_reads(net: Net):
    """The reader goes back to slots, and grants as many as always."""
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(MIB)
    for _ in range(12):
        (reading,) = await begin(reader.readinto_exactly(view))
        for _ in range(128):
            writer.write(sent.take(8 * KIB))
            await writer.drain()
        await reading
        expected.check(view)
    assert stats(writer)["bytes_placed"] == 0
    await until_seen(lambda: stats(writer)["credits"] > 2)


# ---- cancelled, closed, lost


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("call", ["readinto", "readinto_exactly"])
async def test_a_cancelled_read_leaves_its_memory_alone(net: Net, turns, call):
    """What is placed until the peer has answered is unread, and nothing is written when the cancelled call is over."""
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(MIB)
    for _ in range(3):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        writer.write(sent.take(MIB))
        await reading
        expected.check(view)
    reading = asyncio.ensure_future(getattr(reader, call)(view))
    if turns % 2:
        writer.write(sent.take(MIB))
    await loop_turns(turns)
    reading.cancel()
    if turns % 2 == 0:
        writer.write(sent.take(MIB))
    got = 0
    try:
        got = await reading
    except asyncio.CancelledError:
        view[:] = bytes(MIB)
    expected.check(view[:got])
    expected.check(await reader.readexactly(MIB - got))
    if not got:
        assert not any(view)
    # And on.
    reading = asyncio.ensure_future(reader.readinto_exactly(view))
    writer.write(sent.take(MIB))
    await reading
    expected.check(view)


async def test_cancelled_twice(net: Net):
    reader, _, _, writer = await net.stream_pair()
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    await until_named(reader)
    reading.cancel()
    await loop_turns()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    writer.write(b"x" * MIB)
    assert await reader.readexactly(MIB) == b"x" * MIB
    assert not any(view)


async def until_named(reader) -> None:
    """Its Want has been said, and nobody has answered it."""
    transport = reader._transport
    if transport.engine.confines_peers():
        await until_seen(lambda: stats(transport)["wants_open"])


async def test_time_limits(net: Net):
    reader, _, _, writer = await net.stream_pair()
    view = memory(MIB)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await reader.readinto_exactly(view)
    writer.write(b"x" * MIB)
    assert await reader.readinto_exactly(view) == MIB
    assert bytes(view) == b"x" * MIB


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_the_reader_ends_the_connection(net: Net, end):
    reader, writer, _, far = await net.stream_pair()
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    await until_named(reader)
    far.write(b"x" * (3 * MIB))
    getattr(writer.transport, end)()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reading
    before = bytes(view)
    await loop_turns(10)
    assert bytes(view) == before


async def test_memory_in_a_cycle_is_freed_without_a_warning(net: Net):
    reader, writer, _, far = await net.stream_pair()
    cycle: list[object] = [memory(MIB)]
    cycle.append(cycle)
    (reading,) = await begin(reader.readinto_exactly(cycle[0]))
    await until_named(reader)
    far.write(b"x" * MIB)
    assert await reading == MIB
    writer.transport.abort()  # with which the windows to the memory end
    await writer.wait_closed()
    del cycle, reading
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gc.collect()
    assert not found


@pytest.mark.parametrize("much", [0, 100, 200 * KIB])
async def test_the_peer_ends_its_half(net: Net, much):
    reader, writer, _, far = await net.stream_pair()
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    await until_named(reader)
    far.write(b"x" * much)
    far.write_eof()
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        await reading
    assert caught.value.partial == b"x" * much and caught.value.expected == MIB
    # And the other half lives.
    writer.write(b"still here")
    await writer.drain()


async def test_the_peer_aborts(net: Net):
    reader, _, _, far = await net.stream_pair()
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    await until_named(reader)
    far.transport.abort()
    with pytest.raises(ConnectionError):
        await reading


async def test_another_protocol_takes_over(net: Net):
    """What was placed for a read that is none any more is the next protocol's."""
    reader, writer, _, far = await net.stream_pair()
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    await until_named(reader)
    got = bytearray()
    done = asyncio.get_running_loop().create_future()

    class Next(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            got.extend(data)
            if len(got) == 2 * MIB:
                done.set_result(None)

    writer.transport.set_protocol(Next())
    pattern = Pattern()
    far.write(pattern.take(MIB))
    far.write(pattern.take(MIB))
    await done
    Pattern().check(got)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not any(view)


async def test_another_connection_takes_over(net: Net):
    """A read takes its memory back from the one whose peer it has asked."""
    reader, writer, _, _ = await net.stream_pair()
    _, other, _, _ = await net.stream_pair()
    (reading,) = await begin(reader.readinto_exactly(memory(MIB)))
    await until_named(reader)
    other.transport.set_protocol(writer.transport.get_protocol())
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not stats(writer)["wants_open"]


async def test_a_stopped_peer_holds_a_cancelled_read_for_as_long_as_closing_may_take(net: Net):
    peer = net.spawn("large.py")
    reader, _writer = await net.open(await peer.port(), close_timeout=0.5)
    view = memory(MIB)
    for _ in range(3):
        await reader.readinto_exactly(view)
    peer.stop()
    named = False
    try:
        # What it has sent before it was stopped is read first.
        while True:
            reading = asyncio.ensure_future(reader.readinto_exactly(view))
            await asyncio.wait([reading], timeout=0.2)
            if not reading.done():
                break
        named = bool(stats(reader._transport)["wants_open"])
        reading.cancel()
        with pytest.raises((asyncio.CancelledError, ConnectionError)):
            await reading
        if named:
            with pytest.raises(TimeoutError, match="has not let go"):
                await reader.readexactly(1 << 30)
    finally:
        os.kill(peer.pid, signal.SIGCONT)


PAST_CACHES = pytest.param(40 * MIB + 5, marks=pytest.mark.embedded_only("an adapter copies nothing"))
"""Which the embedded device copies in another way (soft/responder/stream.h)."""


@pytest.mark.parametrize("size", [300 * KIB, PAST_CACHES, pytest.param(8 * MIB, marks=pytest.mark.long)])
async def test_another_process(net: Net, size):
    peer: Peer = net.spawn("large.py", size, "asked")
    reader, writer = await net.open(await peer.port())
    view = memory(size)
    expected = Pattern()
    for _ in range(10):
        (reading,) = await begin(reader.readinto_exactly(view))
        await until_named(reader)
        writer.write(b"?")
        assert await reading == size
        expected.check(view)
    if places(writer):
        assert stats(writer)["bytes_placed_here"] > 9 * size  # nearly all


# ---- protocols that are asked for memory


class Placing(asyncio.BufferedProtocol):
    """Checks a Pattern that comes into memory of rdmanet.alloc(), and that its methods take turns."""

    made: ClassVar[list["Placing"]] = []

    def __init__(self, size: int = MIB) -> None:
        self.made.append(self)
        self.memory = memory(size)
        self.expected = Pattern()
        self.given: memoryview | None = None
        self.ahead = 0
        self.events: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()
        self.awaited: tuple[int, asyncio.Future] | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self.given is None and not self.lost.done()
        assert sizehint == -1 or sizehint > 0
        self.ahead += sizehint == -1
        self.given = self.memory[: len(self.memory)]
        return self.given

    def buffer_updated(self, nbytes: int) -> None:
        assert self.given is not None and 0 < nbytes <= len(self.given)
        self.expected.check(self.given[:nbytes])
        self.given[:nbytes] = bytes(nbytes)
        self.given = None
        if self.awaited and self.expected.position >= self.awaited[0]:
            self.awaited[1].set_result(None)
            self.awaited = None

    async def until(self, position: int) -> None:
        if self.expected.position < position:
            self.awaited = position, asyncio.get_running_loop().create_future()
            await self.awaited[1]

    def connection_lost(self, exc) -> None:
        self.memory[:] = bytes(len(self.memory))
        self.lost.set_result(exc)


@pytest.fixture(autouse=True)
def forget_memory():
    """`Net`, which pytest keeps, knows the protocols; what a test must not leave behind is their memory."""
    yield
    for protocol in Placing.made:
        protocol.memory = protocol.given = None
    Placing.made.clear()


async def send_messages(net: Net, factory=Placing, count: int = 10, size: int = MIB):
    """Messages that wait for one another."""
    client, server = await net.pair(server=factory)
    sent = Pattern()
    for _ in range(count):
        client.transport.write(sent.take(size))
        await server.until(sent.position)
    return client, server, sent


async def test_a_protocol_is_asked_for_memory_ahead(net: Net):
    client, server, _ = await send_messages(net)
    if places(client):
        assert server.ahead > 5
        assert stats(client.transport)["bytes_placed"] > 5 * MIB
    client.transport.abort()
    await server.lost
    assert not any(server.memory)


@on_every_geometry
async def test_protocols_on_every_geometry(net: Net, geometry):
    made = asyncio.get_running_loop().create_future()

    def factory() -> Placing:
        protocol = Placing()
        made.set_result(protocol)
        return protocol

    _, port = await net.serve(factory, **geometry)
    client = await net.connect(port, **{name: n for name, n in geometry.items() if name != "shared_receive"})
    server = await made
    sent = Pattern()
    for size in [MIB, 10, MIB, 300 * KIB, 100 * KIB, MIB, MIB]:
        client.transport.write(sent.take(size))
        await server.until(sent.position)
    client.transport.write_eof()
    assert await server.lost is None


async def test_a_protocol_may_forbid_it(net: Net):
    class Forbidding(Placing):
        rdma_get_buffer_ahead = False

    client, server, _ = await send_messages(net, Forbidding)
    assert server.ahead == 0 and stats(client.transport)["bytes_placed"] == 0
    client.transport.abort()
    await server.lost


async def test_other_memory_is_not_asked_for_ahead(net: Net):
    class Ordinary(Placing):
        def __init__(self) -> None:
            super().__init__()
            self.memory = memoryview(bytearray(MIB))

    client, server, _ = await send_messages(net, Ordinary)
    assert server.ahead == 0 and stats(client.transport)["bytes_placed"] == 0
    client.transport.abort()
    await server.lost


async def test_a_protocol_that_changes_to_other_memory(net: Net):
    class Changing(Placing):
        def get_buffer(self, sizehint: int) -> memoryview:
            super().get_buffer(sizehint)
            if sizehint == -1:
                self.given = memoryview(bytearray(1000))
            return self.given

    client, server, _ = await send_messages(net, Changing)
    assert stats(client.transport)["bytes_placed"] == 0
    client.transport.abort()
    await server.lost


@pytest.mark.parametrize("end", ["close", "abort", "peer closes", "peer aborts"])
@pytest.mark.parametrize("turns", range(4))
async def test_the_connection_ends_with_memory_asked_for(net: Net, end, turns):
    """Nothing is written to the memory from connection_lost() on."""
    client, server, sent = await send_messages(net, count=4)
    for _ in range(3):
        client.transport.write(sent.take(MIB))
    await loop_turns(turns)
    getattr(
        client.transport if end.startswith("peer") else server.transport, end.split()[-1].removesuffix("s")
    )()
    await server.lost
    assert not any(server.memory)
    await loop_turns(10)
    assert not any(server.memory)
    client.transport.abort()
    await client.until_lost()
    assert not any(server.memory)


async def test_another_protocol_with_memory_asked_for(net: Net):
    client, first, sent = await send_messages(net, count=5)
    second = Placing()
    second.expected.position = sent.position
    second.connection_made(first.transport)
    first.transport.set_protocol(second)
    for count in range(6):
        client.transport.write(sent.take(MIB))
        await second.until(sent.position)
        if count == 2:  # the peer has let go of it
            before = bytes(first.memory)
    assert bytes(first.memory) == before
    client.transport.abort()
    await second.lost


async def test_a_protocol_that_pauses(net: Net):
    class Pausing(Placing):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.transport.pause_reading()
            net.loop.call_soon(self.transport.resume_reading)

    client, server, sent = await send_messages(net, Pausing)
    server.transport.pause_reading()
    client.transport.write(sent.take(MIB))
    client.transport.write_eof()
    await loop_turns(10)
    server.transport.resume_reading()
    assert await server.lost is None
    assert server.expected.position == sent.position


@pytest.mark.parametrize("failing", ["raises", "empty", "not a buffer"])
async def test_get_buffer_that_fails_ahead(net: Net, failing):
    class Failing(Placing):
        def get_buffer(self, sizehint: int):
            if sizehint > 0:
                return super().get_buffer(sizehint)
            if failing == "raises":
                raise LookupError("no memory")
            return b"" if failing == "not a buffer" else bytearray()

    client, server = await net.pair(server=Failing)
    client.transport.write(Pattern().take(MIB))
    if not client.transport.engine.confines_peers():
        pytest.skip("the device has no windows that confine a peer: nobody is asked ahead")
    assert await server.lost is not None
    assert "get_buffer" in net.complaint()["message"]


@pytest.mark.long
async def test_gigabytes(net: Net):
    """One write of more than a Want can name, of memory that is not there, in bounded memory."""
    source = mmap.mmap(-1, 3 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    reader, _, _, writer = await net.stream_pair()
    view = memory(64 * MIB)
    view[:] = b"x" * len(view)
    with memoryview(source) as whole:
        writer.write(whole)
        before = resident()
        for _ in range(len(whole) // len(view)):
            assert await reader.readinto_exactly(view) == len(view)
            assert view[0] == view[-1] == view[MIB + 1] == 0
            view[0] = view[-1] = view[MIB + 1] = 1
        await writer.drain()
        assert resident() - before < 200 * MIB
    if places(writer):
        assert stats(writer)["bytes_placed"] > 2 << 30
    source.close()


def resident() -> int:
    """Bytes of this process that are neither shared nor of files."""
    with open("/proc/self/status") as status:
        return KIB * sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


async def test_memory_of_alloc_is_sent_without_on_demand_paging(net: Net):
    """By the key of its own registration."""
    reader, _, _, writer = await net.stream_pair()
    source, view = memory(8 * MIB), memory(8 * MIB)
    pattern = Pattern()
    for at in range(0, 8 * MIB, MIB):
        source[at : at + MIB] = pattern.take(MIB)
    for _ in range(4):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        writer.write(source)
        await writer.drain()
        await reading
        assert view == source
        view[:] = bytes(len(view))
    if writer.transport.engine.confines_peers():
        assert stats(writer)["bytes_placed"] > 16 * MIB
    assert stats(writer)["bytes_borrowed"] + stats(writer)["bytes_placed"] > 24 * MIB


async def test_writelines_of_much(net: Net):
    reader, _, _, writer = await net.stream_pair()
    sent, expected = Pattern(), Pattern()
    view = memory(8 * MIB)
    for _ in range(3):
        reading = asyncio.ensure_future(reader.readinto_exactly(view))
        writer.writelines([memoryview(bytearray(sent.take(MIB))) for _ in range(8)])
        await writer.drain()
        await reading
        expected.check(view)
    if places(writer):
        assert stats(writer)["bytes_placed"] > 16 * MIB


# ---- random programs


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("geometry", [{}, {"slot_bytes": 4096, "data_slots": 2}, {"shared_receive": True}])
async def test_random_programs(net: Net, geometry, seed):
    near_reader, near_writer, far_reader, far_writer = await stream_pair(net, geometry)
    total = 12 * MIB

    async def write(writer, rng: random.Random) -> None:
        sent = Pattern()
        while sent.position < total:
            size = min(total - sent.position, rng.choice([1, 30, 5000, 70_000, 300_000, MIB]))
            data = sent.take(size)
            writer.write(data if rng.random() < 0.4 else memoryview(bytearray(data)))
            if rng.random() < 0.9:
                await writer.drain()
        writer.write_eof()

    async def read(reader, rng: random.Random) -> None:
        expected = Pattern()
        view = memory(2 * MIB)
        while expected.position < total:
            size = min(total - expected.position, rng.choice([1, 100, 70_000, 200_000, MIB, 2 * MIB]))
            at = rng.randrange(2 * MIB - size + 1)
            part = view[at : at + size]
            pick = rng.random()
            if pick < 0.2:
                expected.check(await reader.readexactly(size))
                continue
            reading = asyncio.ensure_future(
                reader.readinto_exactly(part) if pick < 0.7 else reader.readinto(part)
            )
            if rng.random() < 0.4:
                await loop_turns(rng.randrange(8))
                reading.cancel()
            try:
                got = await reading
            except asyncio.CancelledError:
                part[:] = bytes(size)
                await loop_turns(3)
                assert not any(part)
            else:
                expected.check(part[:got])
        assert await reader.read() == b""

    rngs = [random.Random(10 * seed + i) for i in range(4)]
    await asyncio.gather(
        write(near_writer, rngs[0]),
        write(far_writer, rngs[1]),
        read(near_reader, rngs[2]),
        read(far_reader, rngs[3]),
    )


# ---- peers of other kinds


async def streams_to(bare: BarePeer, **options):
    port = bare.listen(HOST)
    accepting = asyncio.ensure_future(bare.accept(hello=PLACING_HELLO))
    # The peer does not know that slots grow, and sends long frames.
    ends = await rdmanet.open_rdma_connection(HOST, port, first_slot_bytes=65536, **options)
    await accepting
    return ends


async def test_a_peer_that_does_not_know_it(net: Net, bare: BarePeer):
    """It hears nothing of it."""
    port = bare.listen(HOST)
    accepting = asyncio.ensure_future(bare.accept())
    reader, writer = await net.open(port)
    await accepting
    (reading,) = await begin(reader.readinto_exactly(memory(MIB)))
    writer.write(b"x")
    while (received := await bare.next_frame())[0] != DATA:
        assert received == (CREDIT, b"")
    reading.cancel()


async def said(bare: BarePeer) -> credit.Want:
    news = await bare.news()
    (want,) = news.wants
    return want


def placed(serial: int, upto: int, zero: int = 0) -> bytes:
    return frame(PLACED, credit.PLACED_BODY.pack(serial, zero, upto), reaped=1)


def needs_windows(writer) -> None:
    if not writer.transport.engine.confines_peers():
        pytest.skip("the device has no windows that confine a peer: its memory is never named")


async def test_a_bare_peer_places(net: Net, bare: BarePeer):
    """In part, and then by DATA: the frames, as they are on the wire."""
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    view = memory(MIB)
    (reading,) = await begin(reader.readinto_exactly(view))
    want = await said(bare)
    assert (want.serial, want.position, want.length, want.flags) == (1, 0, MIB, placement.FIXED)
    there = {"remote_addr": want.address, "rkey": want.rkey}
    bare.post(b"a" * 70_000, WROpcode.RDMA_WRITE, **there)
    bare.post(placed(1, 70_000))
    bare.post(frame(DATA, b"b" * 50_000, reaped=1))
    there["remote_addr"] += 120_000
    bare.post(b"c" * 100_000, WROpcode.RDMA_WRITE, **there)
    bare.post(placed(1, 220_000))
    bare.post(frame(FIN, reaped=1))
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        await reading
    assert caught.value.partial == b"a" * 70_000 + b"b" * 50_000 + b"c" * 100_000


@pytest.mark.parametrize("after", ["its bytes", "an answer", "fin"])
async def test_the_key_is_good_for_nothing_when_the_read_is_over(net: Net, bare: BarePeer, after):
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    view = memory(100_000)
    (reading,) = await begin(reader.readinto_exactly(view))
    want = await said(bare)
    there = {"remote_addr": want.address, "rkey": want.rkey}
    if after == "its bytes":
        bare.post(b"a" * 100_000, WROpcode.RDMA_WRITE, **there)
        bare.post(placed(1, 100_000))
        assert await reading == 100_000
    elif after == "an answer":
        bare.post(frame(CREDIT, reaped=2))  # else it would ask by a Ping first
        reading.cancel()
        news = await bare.news()
        assert news.unwanted == 1
        assert not reading.done()
        answer = credit.Credit(16, (), (), (), (), 0, 1)
        bare.post(frame(CREDIT, credit.pack_credit(answer), reaped=3))
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        bare.post(frame(FIN, reaped=1))
        with pytest.raises(asyncio.IncompleteReadError):
            await reading
    before = bytes(view)
    assert await bare.done(b"z" * 1000, WROpcode.RDMA_WRITE, **there) != WCStatus.SUCCESS
    assert bytes(view) == before


async def test_only_the_named_bytes_can_be_written(net: Net, bare: BarePeer):
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    view = memory(300_000)
    (reading,) = await begin(reader.readinto_exactly(view[100_000:200_000]))
    want = await said(bare)
    there = {"remote_addr": want.address + 99_999, "rkey": want.rkey}
    assert await bare.done(b"zz", WROpcode.RDMA_WRITE, **there) != WCStatus.SUCCESS
    with pytest.raises((ConnectionError, OSError)):
        await reading
    assert not any(view)


def _credit(*fields: object) -> bytes:
    return frame(CREDIT, credit.pack_credit(credit.Credit(16, (), (), (), *fields)), reaped=1)


LIES = {
    "a serial that was not said": [placed(2, 1000)],
    "no bytes": [placed(1, 0)],
    "more than is wanted": [placed(1, 100_001)],
    "not zero": [placed(1, 1000, zero=1)],
    "a body of another length": [frame(PLACED, bytes(12), reaped=1)],
    "placed after fin": [frame(FIN, reaped=1), placed(1, 1000)],
    "an answer to nothing": [_credit((), 0, 1)],
    "an unwant of nothing": [_credit((), 1, 0)],
    "a want of nothing": [_credit((credit.Want(1, 0, 4096, 0, 1, 1),), 0, 0)],
    "a want beyond memory": [_credit((credit.Want(1, 0, 2**64 - 1, 2, 1, 1),), 0, 0)],
    "a want beyond the stream": [_credit((credit.Want(1, 2**64 - 1, 0, 2, 1, 1),), 0, 0)],
    "an unknown flag": [_credit((credit.Want(1, 0, 4096, 64, 1, 2),), 0, 0)],
    "a loose want ahead": [_credit((credit.Want(1, 9, 4096, 64, 1, 0),), 0, 0)],
    "five wants": [_credit(tuple(credit.Want(i + 1, 8 * i, 4096, 8, 1, 1) for i in range(5)), 0, 0)],
    "a serial again": [_credit(tuple(credit.Want(1, 8 * i, 4096, 8, 1, 1) for i in range(2)), 0, 0)],
}


@pytest.mark.parametrize(
    "what",
    ["a serial that was not said", "an answer to nothing", "an unwant of nothing", "a want of nothing"],
)
async def test_lies_before_any_memory_is_named(net: Net, bare: BarePeer, what):
    """Nothing is kept of placement until somebody asks for it."""
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    (reading,) = await begin(reader.readexactly(1))
    for each in LIES[what]:
        bare.post(each)
    with pytest.raises(ProtocolError):
        await reading
    last = await bare.last_words()
    assert credit.unpack_header(last).kind == ABORT


@pytest.mark.parametrize("what", LIES)
async def test_lies_end_the_connection(net: Net, bare: BarePeer, what):
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    needs_windows(writer)
    view = memory(100_000)
    (reading,) = await begin(reader.readinto_exactly(view))
    await said(bare)
    for each in LIES[what]:
        bare.post(each)
    # After Fin it ends as at any end of file.
    with pytest.raises(asyncio.IncompleteReadError if what == "placed after fin" else ProtocolError):
        await reading
    last = await bare.last_words()
    assert credit.unpack_header(last).kind == ABORT
    assert not any(view)


async def test_a_peer_that_answers_wants_with_data(net: Net, bare: BarePeer):
    """A Want obliges to nothing."""
    reader, writer = await streams_to(bare)
    net.writers.append(writer)
    view = memory(100_000)
    (reading,) = await begin(reader.readinto_exactly(view))
    for _ in range(2):
        bare.post(frame(DATA, b"d" * 50_000))
    assert await reading == 100_000
    assert bytes(view) == b"d" * 100_000


# ---- rdmanet.alloc()


def test_memory_is_zeroed_and_lives_as_long_as_a_view_of_it():
    view = memoryview(rdmanet.alloc(100_000))
    gc.collect()
    assert len(view) == 100_000 and not any(view) and not view.readonly
    view[:] = b"x" * 100_000
    part = view[50_000:]
    del view
    gc.collect()
    assert bytes(part) == b"x" * 50_000


@pytest.mark.parametrize(
    ("nbytes", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (1 << 63, ValueError)]
)
def test_impossible_lengths(nbytes, error):
    with pytest.raises(error):
        rdmanet.alloc(nbytes)


def test_it_leaves_nothing(net_descriptors):
    before = net_descriptors()
    for _ in range(100):
        rdmanet.alloc(10_000)
    gc.collect()
    assert net_descriptors() == before


@pytest.fixture
def net_descriptors():
    return lambda: len(os.listdir("/proc/self/fd"))


async def test_regions_end_with_the_memory(net: Net, live_objects):
    reader, _, _, writer = await net.stream_pair()

    async def pass_some(view) -> None:
        for _ in range(3):
            reading = asyncio.ensure_future(reader.readinto_exactly(view))
            writer.write(bytes(MIB))
            await reading

    await pass_some(bytearray(MIB))  # so that the rings have grown
    before = live_objects()["mrs"]
    view = memory(MIB)
    await pass_some(view)
    if places(writer):
        assert live_objects()["mrs"] == before + 1
    del view
    gc.collect()
    assert live_objects()["mrs"] == before


@pytest.fixture
def live_objects():
    from rdmanet._core import live_objects

    return live_objects
