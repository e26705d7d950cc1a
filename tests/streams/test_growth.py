"""What a connection costs while it does nothing, and how its slots grow; how much comes in that nobody reads."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from harness import HOST, Net, Recorder
from pattern import Pattern
from test_reader import GEOMETRIES, stream_pair

import rdmanet
from rdmanet import credit
from rdmanet.errors import ProtocolError
from rdmanet.wire import slots
from tests.support.bare_peer import ABORT, CREDIT, DATA, GROWING_HELLO, HELLO, PING, PONG, BarePeer, frame
from tests.support.waiting import loop_turns, until_seen

KIB = 1 << 10
MIB = 1 << 20
FIRST = slots.FIRST_SLOT_BYTES
RECEIVES = 24


def stats(end: Any) -> dict[str, int]:
    found: dict[str, int] = end.get_extra_info("rdma_stats")
    return found


# ---- memory


async def test_an_idle_connection_has_a_small_ring_and_nothing_to_send_from(net: Net):
    client, server = await net.pair()
    client.transport.write(b"hello")
    await server.until_received(5)
    for side in (client, server):
        await until_seen(
            lambda side=side: stats(side.transport)["bytes_registered"] == RECEIVES * (FIRST + 64)
        )


async def test_what_is_sent_much_grows_the_ring(net: Net):
    reader, writer, _, far = await net.stream_pair()
    before = RECEIVES * (FIRST + 64)
    await until_seen(lambda: stats(writer)["bytes_registered"] == before)
    sent, expected = Pattern(), Pattern()
    for size in (1, FIRST, FIRST + 1, 10 * KIB, 300 * KIB, MIB, 3, 5 * MIB, 1):
        far.write(b"".join(sent.take(min(MIB, size - at)) for at in range(0, size, MIB)))
        expected.check(await reader.readexactly(size))
    assert stats(writer)["bytes_registered"] > RECEIVES * 64 * KIB
    assert stats(far)["bytes_registered"] < MIB + 64 * KIB + 2 * before, "nothing was sent in this direction"


async def test_messages_that_fit_do_not_grow_it(net: Net):
    reader, writer, _, far = await net.stream_pair()
    for _ in range(500):
        far.write(bytes(FIRST - 1))
        await reader.readexactly(FIRST - 1)
    await until_seen(lambda: stats(writer)["bytes_registered"] == RECEIVES * (FIRST + 64))


NEVER = 1e6


def shrink_after(end: Any, idle_s: float) -> None:
    end.transport.engine.grown.idle_s = idle_s


def looked_at(end: Any, times: int = 1) -> None:
    """The timer's call, so many times: a ring shrinks at the second between which nothing came."""
    for _ in range(times):
        end.transport.engine.grown.look()


async def test_an_idle_ring_is_small_again(net: Net):
    """Both, of which one has grown; and then it grows again. While nothing happens, nothing is said."""
    reader, writer, _, far = await net.stream_pair()
    small = RECEIVES * (FIRST + 64)
    sent, expected = Pattern(), Pattern()
    for _ in range(3):
        shrink_after(writer, NEVER)
        far.write(b"".join(sent.take(MIB) for _ in range(5)))
        assert stats(writer)["bytes_registered"] >= small
        for _ in range(5):
            expected.check(await reader.readexactly(MIB))
        assert stats(writer)["bytes_registered"] > RECEIVES * 64 * KIB
        before = [stats(end)["control_frames_sent"] for end in (writer, far)]
        shrink_after(writer, 0.02)
        looked_at(writer)
        await until_seen(lambda: stats(writer)["bytes_registered"] == small)
        await until_seen(lambda: stats(far)["bytes_registered"] == small)
        after = [stats(end)["control_frames_sent"] for end in (writer, far)]
        assert all(now - then <= RECEIVES + 4 for now, then in zip(after, before, strict=True))
        await asyncio.sleep(0.1)
        assert after == [stats(end)["control_frames_sent"] for end in (writer, far)]


async def test_a_busy_ring_stays_large(net: Net):
    reader, writer, _, far = await net.stream_pair()
    shrink_after(writer, NEVER)
    far.write(bytes(5 * MIB))
    await reader.readexactly(5 * MIB)
    for _ in range(100):
        looked_at(writer)
        far.write(b"x")
        await reader.readexactly(1)
        assert stats(writer)["bytes_registered"] > RECEIVES * 64 * KIB
    looked_at(writer, 2)
    await until_seen(lambda: stats(writer)["bytes_registered"] < 2 * MIB)


async def test_a_ring_with_unread_bytes_stays_large(net: Net):
    client, server = await net.pair()
    shrink_after(client, NEVER)
    pattern = Pattern()
    data = b"".join(pattern.take(MIB) for _ in range(4))
    client.transport.write(data[: 2 * MIB])
    await server.until_received(2 * MIB)
    server.transport.pause_reading()
    client.transport.write(data[2 * MIB : 2 * MIB + 1000])
    await until_seen(lambda: stats(server.transport)["bytes_received"] == 2 * MIB + 1000)
    looked_at(server, 3)
    await loop_turns(100)
    assert stats(server.transport)["bytes_registered"] > RECEIVES * 64 * KIB
    server.transport.resume_reading()
    await server.until_received(2 * MIB + 1000)
    looked_at(server, 2)
    await until_seen(lambda: stats(server.transport)["bytes_registered"] < 2 * MIB)
    client.transport.write(data[2 * MIB + 1000 :])
    assert await server.until_received(4 * MIB) == data


async def test_bursts_while_rings_grow_and_shrink(net: Net):
    """At any moment, in both directions."""
    near_reader, near, far_reader, far = await net.stream_pair()
    shrink_after(near, 0.0005)
    rng = random.Random(5)

    async def write(writer: Any, pattern: Pattern) -> None:
        for _ in range(60):
            writer.write(pattern.take(rng.choice([1, FIRST, 9 * KIB, 200 * KIB])))
            await writer.drain()
            await asyncio.sleep(rng.choice([0, 0.0003, 0.002, 0.005]))
        writer.write_eof()

    async def read(reader: Any, pattern: Pattern) -> None:
        while data := await reader.read(rng.choice([1000, MIB])):
            pattern.check(data)

    await asyncio.gather(
        write(near, Pattern()),
        write(far, Pattern()),
        read(near_reader, Pattern()),
        read(far_reader, Pattern()),
    )


async def test_a_peer_is_told_of_small_slots_and_asked_for_frames(net: Net, device):
    """What is on the wire. Until it has answered nothing is freed, and it is asked once at a time."""
    bare = BarePeer(device.library, renews=True)
    try:
        protocol = await connected(bare)
        engine = protocol.transport.engine
        engine.grown.idle_s = 0.02
        frames = Counting(bare)
        bare.post(frame(DATA, bytes(FIRST)))
        while True:
            kind, body = await frames.next()
            if kind == CREDIT and body:
                break
        assert growth_in(body) == (RECEIVES, 8 * FIRST)
        for _ in range(RECEIVES - 1):  # use up the small ones
            bare.post(frame(PING, bytes(8), reaped=bare.reaped))
            while (await frames.next())[0] != PONG:
                pass
        bare.post(frame(CREDIT, reaped=bare.reaped))
        small, large = RECEIVES * (FIRST + 64), RECEIVES * 8 * FIRST
        kind, body = await frames.next()
        assert kind == CREDIT
        assert growth_in(body)[1] == FIRST
        for _ in range(RECEIVES):  # as many as are posted
            kind, body = await frames.next()
            assert kind == PING
            assert not bare.received(), "it asks for more, and has no answer"
            assert stats(protocol.transport)["bytes_registered"] > large
            bare.post(frame(PONG, body, reaped=bare.reaped))
        await until_seen(lambda: stats(protocol.transport)["bytes_registered"] == small)
        await loop_turns(100)
        assert not bare.received()
    finally:
        bare.close()


def growth_in(body: bytes) -> tuple[int, int]:
    """(number, size) of a Credit's news of slots."""
    return tuple(msgspec.msgpack.decode(body)[-2:])


@pytest.mark.long  # siw has too few queue pairs
async def test_a_thousand_connections_share_what_they_send_from(net: Net):
    """And memory of connections that have ended is used again."""
    engine = None
    for _ in range(2):
        pairs = [await net.pair() for _ in range(100)]
        engine = pairs[0][0].transport.engine
        for client, _ in pairs:
            client.transport.write(bytes(100 * KIB))
        for _, server in pairs:
            await server.until(lambda server=server: server.received == 100 * KIB)
        for client, _ in pairs:
            await until_seen(
                lambda client=client: stats(client.transport)["bytes_registered"] == RECEIVES * (FIRST + 64)
            )
        for client, server in pairs:
            client.transport.close()
            await client.until_lost()
            server.transport.close()
            await server.until_lost()
    assert engine is not None


# ---- unread bytes

# A mebibyte of messages of half a kibibyte takes a minute in the kernel's virtual machine.
on_every_geometry = pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(each, marks=[pytest.mark.long] if each.get("slot_bytes") == 512 else [])
        for each in [*GEOMETRIES, {"slot_bytes": 4096, "data_slots": 2}]
    ],
    ids=str,
)


@on_every_geometry
async def test_both_write_a_mebibyte_then_drain_then_read(net: Net, geometry):
    near_reader, near_writer, far_reader, far_writer = await stream_pair(net, geometry)

    async def side(reader: Any, writer: Any) -> None:
        sent, expected = Pattern(), Pattern()
        for _ in range(2):
            writer.write(bytes(sent.take(MIB)))
            await writer.drain()
            expected.check(await reader.readexactly(MIB))

    await asyncio.gather(side(near_reader, near_writer), side(far_reader, far_writer))


@on_every_geometry
@pytest.mark.parametrize("buffered", [False, True])
async def test_what_a_paused_protocol_takes_in_is_bounded_and_whole(net: Net, geometry, buffered):
    class Plain(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    class Buffered(Plain, asyncio.BufferedProtocol):
        def get_buffer(self, sizehint):
            self.memory = bytearray(1000)
            return self.memory

        def buffer_updated(self, nbytes):
            self.data_received(bytes(self.memory[:nbytes]))

    made: list[Recorder] = []

    def factory() -> Recorder:
        made.append(Buffered() if buffered else Plain())
        return made[-1]

    _, port = await net.serve(factory, **geometry)
    own = {name: geometry[name] for name in geometry if name != "shared_receive"}
    client = await net.connect(port, Recorder, **own)
    pattern = Pattern()
    data = b"".join(pattern.take(MIB) for _ in range(4))
    for at in range(0, len(data), 32 * KIB):
        client.transport.write(data[at : at + 32 * KIB])
    left: Any = client.transport.get_write_buffer_size
    await until_seen(lambda: left() <= 3 * MIB)
    server = made[0]
    assert server.received == 0
    assert left() > MIB
    server.transport.resume_reading()
    assert await server.until_received(len(data)) == data


# ---- peers


@pytest.fixture
def bare(device) -> Iterator[BarePeer]:
    peer = BarePeer(device.library)
    yield peer
    peer.close()


async def connected(bare: BarePeer, hello: bytes = GROWING_HELLO) -> Recorder:
    port = bare.listen(HOST)
    accepting = asyncio.ensure_future(bare.accept(hello=hello))
    _, connection = await rdmanet.create_rdma_connection(Recorder, HOST, port)
    await accepting
    return connection


def says(number: int, size: int, granted: int = 16) -> bytes:
    body = credit.pack_credit(credit.Credit(granted, slots_from=number, slot_bytes=size))
    return frame(CREDIT, body, granted=granted)


LIES = {
    "too small": ([says(24, 511)], "511 bytes, 512 to 16777216 are possible"),
    "too large": ([says(24, (1 << 24) + 1)], "16777217 bytes, 512"),
    "nothing at all": ([says(24, 0)], " 0 bytes, 512"),
    "too far": ([says(40, 4096)], "from receive 40 on: 1 were used, and it has 24"),
    "of what was used": ([says(0, 4096)], "from receive 0 on: 1 were used"),
    "before the last one holds": ([says(24, 4096), says(25, 8192)], "8192 bytes before they hold 4096"),
}


@pytest.mark.parametrize("what", LIES)
async def test_what_no_peer_may_say_of_its_slots(net: Net, bare, what):
    frames, reason = LIES[what]
    protocol = await connected(bare)
    for each in frames:
        bare.post(each)
    error = await protocol.until_lost()
    assert isinstance(error, ProtocolError), error
    last = await bare.last_words()
    assert credit.unpack_header(last).kind == ABORT
    assert reason in credit.unpack_abort(last[16:]).reason


async def test_whoever_has_not_agreed_may_not_say_it(net: Net, bare):
    protocol = await connected(bare, HELLO)
    bare.post(says(24, 4096))
    assert isinstance(await protocol.until_lost(), ProtocolError)


async def test_placement_has_to_be_agreed_on_too(net: Net, bare):
    protocol = await connected(bare)
    bare.post(frame(CREDIT, credit.pack_credit(credit.Credit(16, unwanted=1))))
    assert isinstance(await protocol.until_lost(), ProtocolError)


async def test_a_frame_longer_than_its_slot(net: Net, bare):
    """It is the device that finds this."""
    protocol = await connected(bare)
    bare.post(frame(DATA, bytes(FIRST + 1)))
    assert isinstance(await protocol.until_lost(), OSError)
    assert protocol.received == 0


class Counting:
    """The frames that a bare peer gets, and how many they were."""

    def __init__(self, bare: BarePeer) -> None:
        self.bare = bare
        self.count = 0

    async def next(self) -> tuple[int, bytes]:
        self.count += 1
        kind, body = await self.bare.next_frame()
        assert kind, "the connection has ended"
        return kind, body

    async def knows(self, *frames: bytes) -> None:
        """Say this, and wait until the other side has heard it."""
        for each in (*frames, frame(PING, bytes(8), granted=0)):
            self.bare.post(each)
        while (await self.next())[0] != PONG:
            pass

    async def data(self) -> bytes:
        while True:
            kind, body = await self.next()
            if kind == DATA:
                return body


async def test_frames_are_as_long_as_the_peer_says_from_there_on(net: Net, bare):
    protocol = await connected(bare)
    frames = Counting(bare)
    await frames.knows(says(8, 5000))
    data = bytes(Pattern().take(30_000))
    protocol.transport.write(data)
    got = b""
    while len(got) < len(data):
        number = frames.count
        body = await frames.data()
        assert frames.count == number + 1
        got += body
        assert len(body) == (FIRST if number < 8 else 5000) or got == data, number
    assert frames.count > 10
    assert got == data


@pytest.mark.parametrize("lends", [False, True])
async def test_frames_get_shorter_as_soon_as_the_peer_says_so(net: Net, device, lends):
    """Also the one that was being filled while there were no credits."""
    bare = BarePeer(device.library, renews=True)
    try:
        hello = credit.pack_hello(credit.Hello(8192, 16, 8, 0, credit.FEATURE_GROWTH))
        protocol = await connected(bare, hello)
        frames = Counting(bare)
        data = bytes(Pattern().take(400_000))
        protocol.transport.write(data[:5000])
        rest = bytearray(data[5000:])
        protocol.transport.write(memoryview(rest) if lends else data[5000:])
        await frames.knows(frame(CREDIT, granted=0), says(24, 600, granted=0))
        got = b""
        granted = 0
        while len(got) < len(data):
            granted += 16
            bare.post(frame(CREDIT, granted=granted, reaped=bare.reaped))
            for _ in range(min(16, -(-(len(data) - len(got)) // 600))):
                body = await frames.data()
                assert len(body) <= 600
                got += body
        assert got == data
    finally:
        bare.close()


async def test_a_caller_that_does_not_know_it_gets_a_whole_ring(net: Net, bare):
    """Its Hello comes first."""
    _, port = await net.serve()
    await bare.connect(HOST, port)
    data = bytes(Pattern().take(65536))
    bare.post(frame(DATA, data))
    await net.until(lambda: bool(net.recorders))
    assert await net.recorders[0].until_received(65536) == data


async def test_a_server_that_does_not_know_it_sends_short_frames(net: Net, device):
    """What it does not know is only that it could send longer ones."""
    bare = BarePeer(device.library, renews=True)
    try:
        protocol = await connected(bare, HELLO)
        frames = Counting(bare)
        assert (await frames.next())[0] == CREDIT
        data = bytes(Pattern().take(16 * FIRST))
        for at in range(0, len(data), FIRST):
            bare.post(frame(DATA, data[at : at + FIRST]))
        assert await protocol.until_received(len(data)) == data
        protocol.transport.write(data)
        got = b""
        while len(got) < len(data):
            got += await frames.data()
        assert got == data
        assert stats(protocol.transport)["bytes_registered"] < 2 * MIB
    finally:
        bare.close()
