"""RdmaStreamReader: asyncio's reader, which leaves what it has received in the receive slots."""

import asyncio
import gc
import random
import resource
import sys
import warnings

import pytest
from harness import HOST, Net
from pattern import Pattern

from rdmanet.streams import RdmaStreamReader
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin, loop_turns, until_seen

pytestmark = pytest.mark.once

KIB = 1 << 10
SMALL = {"slot_bytes": 512, "data_slots": 3}
GEOMETRIES = [{}, SMALL, {"slot_bytes": 512, "data_slots": 1}, {"slot_bytes": 4096, "data_slots": 16}]
GEOMETRIES += [{**SMALL, "shared_receive": True}, {"shared_receive": True}]
on_every_geometry = pytest.mark.parametrize(
    "geometry", GEOMETRIES, ids=["default", "small", "one slot", "4 KiB", "small shared", "shared"]
)


async def stream_pair(net: Net, geometry: dict[str, int], **options: int):
    """Reader and writer of both ends; the first are those of the server, whose receive queue may be shared."""
    made = asyncio.get_running_loop().create_future()
    _, port = await net.serve_streams(lambda *ends: made.set_result(ends), **geometry, **options)
    far = await net.open(
        port, **{name: geometry[name] for name in geometry if name != "shared_receive"}, **options
    )
    return *await made, *far


def some_text(rng: random.Random, size: int) -> bytes:
    """Bytes of few kinds, so that separators, and beginnings of separators, are all over them."""
    return bytes(rng.choices(b"ab-=\n", weights=[20, 20, 3, 3, 2], k=size))


class Expecting:
    """What a reader must give, of a text that is known."""

    def __init__(self, text: bytes) -> None:
        self.rest = text

    def took(self, got: bytes) -> None:
        assert self.rest.startswith(got), (got[:80], self.rest[:80])
        self.rest = self.rest[len(got) :]

    async def some(self, reader, rng):
        got = await reader.read(n := rng.choice([1, 5, 70, 500, 9000]))
        assert 1 <= len(got) <= n
        self.took(got)

    async def exactly(self, reader, rng):
        n = min(rng.choice([1, 2, 63, 511, 512, 513, 5000, 40_000]), len(self.rest))
        got = await reader.readexactly(n)
        assert len(got) == n
        self.took(got)

    async def until(self, reader, rng):
        separator = rng.choice(
            [b"\n", b"-=", b"=-=", b"a-b-", b"====", (b"-", b"="), (b"ab-", b"b-", b"=\n")]
        )
        separators = separator if isinstance(separator, tuple) else (separator,)
        ends = [self.rest.find(one) + len(one) for one in separators if one in self.rest]
        if ends:
            got = await reader.readuntil(separator)
            assert len(got) == min(ends)
            self.took(got)

    async def line(self, reader, rng):
        got = await reader.readline()
        assert got.find(b"\n") == len(got) - 1 or (b"\n" not in got and got == self.rest)
        self.took(got)

    async def into(self, reader, rng):
        memory = bytearray(rng.choice([1, 511, 513, 3000]))
        n = await reader.readinto(memory)
        assert 1 <= n <= len(memory) and not any(memory[n:])
        self.took(bytes(memory[:n]))

    async def into_exactly(self, reader, rng):
        memory = bytearray(min(rng.choice([1, 511, 513, 3000, 20_000]), len(self.rest)))
        assert await reader.readinto_exactly(memory) == len(memory)
        self.took(bytes(memory))

    async def impatient(self, reader, rng):
        """Cancelled at any time, it takes nothing."""
        kind = rng.randrange(4)
        if kind == 0:
            reading = asyncio.ensure_future(reader.readexactly(len(self.rest) + 1))
        elif kind == 1:
            reading = asyncio.ensure_future(reader.readuntil(b"is nowhere"))
        elif kind == 2:
            reading = asyncio.ensure_future(reader.readinto_exactly(bytearray(len(self.rest) + 1)))
        else:
            reading = asyncio.ensure_future(reader.read(3))
        for _ in range(rng.randrange(4)):
            await asyncio.wait([reading], timeout=0)
        reading.cancel()
        try:
            self.took(await reading)
        except asyncio.CancelledError:
            pass
        except asyncio.IncompleteReadError as error:  # the stream had ended
            assert kind != 3 and error.partial == self.rest
            self.rest = b""

    async def peek(self, reader, rng):
        """Whatever looks at asyncio's attribute sees the unread bytes."""
        assert self.rest.startswith(bytes(reader._buffer))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@on_every_geometry
async def test_any_sequence_of_reads_gives_the_bytes_that_were_sent(net: Net, geometry, seed):
    rng = random.Random(seed)
    reader, _, _, far = await stream_pair(net, geometry, limit=300_000)
    text = some_text(rng, 200_000)

    async def send() -> None:
        at = 0
        while at < len(text):
            n = rng.choice([1, 30, 511, 512, 513, 700, 20_000])
            far.write(text[at : at + n])
            at += n
            if rng.random() < 0.3:
                await far.drain()
            await loop_turns(rng.random() < 0.2)
        far.write_eof()

    [sending] = await begin(send())
    expecting = Expecting(text)
    ways = [expecting.some, expecting.exactly, expecting.until, expecting.line]
    ways += [expecting.into, expecting.into_exactly, expecting.impatient, expecting.peek]
    while expecting.rest:
        await rng.choice(ways)(reader, rng)
    assert await reader.read() == b"" and reader.at_eof()
    await sending


@on_every_geometry
async def test_a_cancelled_read_gives_back_what_it_had(net: Net, geometry):
    reader, _, _, far = await stream_pair(net, geometry)
    far.write(b"x" * 500)
    await far.drain()
    memory = bytearray(1000)
    for read in (
        reader.readexactly(1000),
        reader.readinto_exactly(memory),
        reader.read(),
        reader.readuntil(b"y"),
    ):
        reading = asyncio.ensure_future(read)
        await asyncio.wait([reading], timeout=0.02)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    far.write(b"y")
    assert await reader.readuntil(b"y") == b"x" * 500 + b"y"


async def test_cancelled_after_the_bytes_came_and_before_the_task_ran(net: Net):
    """The result is the task's already, and the task is cancelled instead of being given it."""
    reader, _, _, far = await net.stream_pair()
    for make in (
        lambda: reader.readexactly(4),
        lambda: reader.read(9),
        lambda: reader.readinto_exactly(bytearray(4)),
    ):
        reading = asyncio.ensure_future(make())
        await asyncio.wait([reading], timeout=0)
        waiter = reader._waiter
        assert waiter is not None
        far.write(b"1234")
        await until_seen(waiter.done)  # which is before the task has run
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await reader.readexactly(4) == b"1234"


@pytest.mark.parametrize("more", [b"", b"BBBB"])
@pytest.mark.parametrize("following", ["readexactly", "read", "readinto_exactly", "readuntil"])
async def test_the_next_read_begins_when_the_cancelled_one_has_given_back(net: Net, following, more):
    """It need not wait for the task: that gets its end first, and its bytes come first."""
    reader, _, _, far = await net.stream_pair()
    reading = asyncio.ensure_future(reader.read(4))
    await asyncio.wait([reading], timeout=0)
    waiter = reader._waiter
    far.write(b"AAAA" + more)
    await until_seen(waiter.done)
    reading.cancel()
    if following == "readinto_exactly":
        got = bytearray(4)
        await reader.readinto_exactly(got)
    else:
        got = await getattr(reader, following)(b"AA" if following == "readuntil" else 4)
    assert got == (b"AA" if following == "readuntil" else b"AAAA")
    assert reading.cancelled()
    if following == "readuntil":
        assert await reader.readexactly(2) == b"AA"
    assert not more or await reader.readexactly(4) == more


async def test_nothing_is_taken_before_it_is_awaited(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"kept")
    read = reader.read(4)
    read.close()
    task = asyncio.ensure_future(reader.readexactly(4))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await reader.readexactly(4) == b"kept"


async def test_a_read_that_nobody_awaited_is_told():
    reader = RdmaStreamReader()
    with pytest.warns(RuntimeWarning, match="never awaited"):
        reader.read(1)
        gc.collect()


async def test_an_awaitable_is_good_for_once(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"once")
    read = reader.read(4)
    assert await read == b"once"
    with pytest.raises(RuntimeError, match="already awaited"):
        await read


async def test_two_at_a_time_are_refused(net: Net):
    reader, _, _, far = await net.stream_pair()
    [first] = await begin(reader.readexactly(3))
    await asyncio.wait([first], timeout=0)
    with pytest.raises(RuntimeError, match=r"readline\(\)|readuntil\(\) called while another coroutine"):
        await reader.readline()
    far.write(b"abc")
    assert await first == b"abc"


async def test_others_run_while_everything_is_there(net: Net):
    """A loop of reads that never have to wait leaves the loop to the others every now and then."""
    reader = RdmaStreamReader()
    reader.feed_data(b"x" * 10_000_000)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while not reader.at_eof():
            turns += 1
            await loop_turns()

    [running] = await begin(others())
    for _ in range(100_000):
        await reader.readexactly(100)
    assert turns > 10
    reader.feed_eof()
    await running


async def test_bytes_wait_in_their_slots(net: Net):
    """Until somebody reads, when there are few of them; a program that does not read gets no more than its limit."""
    reader, writer, _, far = await net.stream_pair(limit=1000)
    far.transport.set_write_buffer_limits(high=0)
    far.write(b"few")
    assert await reader.read(1) == b"f"
    assert writer.get_extra_info("rdma_stats")["slots_held"] == 1
    sent = Pattern()

    async def send() -> None:
        while True:
            far.write(sent.take(10_000))
            await far.drain()

    [sending] = await begin(send())
    await until_seen(lambda: writer.get_extra_info("rdma_stats")["slots_held"] >= 8)
    sending.cancel()
    got = Pattern()
    assert await reader.readexactly(2) == b"ew"
    while got.position < sent.position:
        got.check(await reader.read(7777))


@pytest.mark.parametrize("geometry", [*GEOMETRIES, {"slot_bytes": 4096, "data_slots": 2}], ids=str)
async def test_two_that_write_before_they_read(net: Net, geometry):
    """Each takes in twice its limit while it does not read, as asyncio's readers do."""
    reader, writer, far_reader, far = await stream_pair(net, geometry)
    message = random.Random(1).randbytes(128 * KIB)

    async def exchange(reader, writer) -> None:
        for at in range(0, len(message), 1000):
            writer.write(message[at : at + 1000])
            await writer.drain()
        assert await reader.readexactly(len(message)) == message

    await asyncio.gather(exchange(reader, writer), exchange(far_reader, far))


async def test_what_was_unread_outlives_the_connection(net: Net):
    reader, writer, _, far = await net.stream_pair()
    far.write(b"the last words")
    assert await reader.read(4) == b"the "
    writer.close()
    await writer.wait_closed()
    assert await reader.read() == b"last words"


async def test_a_number_of_the_peers_takes_no_memory(net: Net):
    """readexactly() of what a peer has announced: memory comes with the bytes."""
    reader, _, _, far = await net.stream_pair()
    [reading] = await begin(reader.readexactly(1 << 62))
    far.write(b"but few come")
    far.close()
    with pytest.raises(asyncio.IncompleteReadError) as caught:
        await reading
    assert caught.value.partial == b"but few come" and caught.value.expected == 1 << 62


async def test_more_than_memory_is_made_for_at_first(net: Net):
    size = (64 << 20) + 12345
    reader, _, _, far = await net.stream_pair()
    message = random.Random(2).randbytes(size)
    far.write(message)
    assert await reader.readexactly(size) == message


async def test_a_size_that_is_no_integer_raises_and_leaves_nothing_that_nobody_awaits(net: Net):
    reader, _, _, _ = await net.stream_pair()
    for read in (reader.read, reader.readexactly):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(TypeError):
                read(1.5)
        assert not said


async def test_readinto_takes_only_memory_that_it_may_write(net: Net):
    reader, _, _, far = await net.stream_pair()
    with pytest.raises((BufferError, TypeError)):
        await reader.readinto(b"read-only")
    far.write(b"12")
    memory = bytearray(10)
    view = memoryview(memory)[4:6]
    assert await reader.readinto_exactly(view) == 2
    assert memory == b"\0\0\0\x0012\0\0\0\0"
    view.release()
    memory.clear()  # nothing holds it any more
    far.close()
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readinto_exactly(bytearray(1))
    assert await reader.readinto(bytearray(1)) == 0
    assert await reader.readinto(bytearray()) == 0


async def test_another_protocol_takes_over(net: Net):
    """set_protocol(): what has come is the reader's, as with asyncio's; the next protocol gets what comes then."""
    reader, writer, _, far = await net.stream_pair()
    far.write(b"for the reader, and this")
    assert await reader.readexactly(16) == b"for the reader, "
    got = asyncio.get_running_loop().create_future()

    class Next(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            got.set_result(data)

    writer.transport.set_protocol(Next())
    far.write(b"for the next")
    assert await got == b"for the next"
    assert await reader.read(100) == b"and this"


async def test_drain_waits_and_can_be_cancelled(net: Net):
    reader, writer, far_reader, far = await net.stream_pair()
    far.write(b"x" * 4_000_000)
    [draining] = await begin(far.drain())
    await asyncio.wait([draining], timeout=0.05)
    assert not draining.done()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert await reader.readexactly(4_000_000) == b"x" * 4_000_000
    await far.drain()
    writer.transport.abort()
    with pytest.raises(ConnectionResetError):
        await far_reader.read()
    with pytest.raises(ConnectionResetError):
        await far.drain()


async def test_waiting_for_ever_leaves_nothing_behind(net: Net):
    """Readers and reads that are dropped while they wait are collected without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader, _, _, far = await net.stream_pair()
        for _ in range(100):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.readexactly(10), 0.0001)
        far.write(b"0123456789")
        assert await asyncio.wait_for(reader.readexactly(10), 10) == b"0123456789"
        gc.collect()


# Prints how many pages were mapped for four reads and two copies of each, and for the same objects made in a process
# whose malloc has learned as much as it can.
LARGE_READS = """
import asyncio, resource, rdmanet
SIZE, TIMES = 10_000_000, 4

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

async def serve(reader, writer):
    value = bytes(SIZE)
    while await reader.read(1):
        writer.write(value)
    writer.close()

async def main():
    server = await rdmanet.start_rdma_stream_server(serve, HOST, 0)
    reader, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
    for turn in range(3 + TIMES):
        if turn == 3:
            before = faults()
        writer.write(b"x")
        value = await reader.readexactly(SIZE)
        copies = value[:-1], value[:-2]
        del value, copies
    print(faults() - before)
    bytes(31 << 20)
    for turn in range(3 + TIMES):
        if turn == 3:
            before = faults()
        value = b"x" * SIZE
        copies = value[:-1], value[:-2]
        del value, copies
    print(faults() - before)
    writer.close()
    await writer.wait_closed()
    server.close()

asyncio.run(main())
"""


async def test_the_memory_of_large_reads_is_used_again(net: Net):
    """malloc is made to keep it, or each page of each read would be mapped anew."""
    code = LARGE_READS.replace("HOST", repr(HOST))
    with AwaitedProcess(sys.executable, "-c", code, keep_errors=True) as program:
        for_reads, at_least = int(await program.line()), int(await program.line())
        assert await program.finish() == ""
    assert for_reads < at_least + 4 * 10_000_000 // resource.getpagesize()  # of three times as many


# ---- what programs set on asyncio's


async def test_the_limit_of_a_reader_that_exists(net: Net):
    """asyncio has no public way to change it, so programs assign to the attribute."""
    *_, far_writer, reader, _ = await stream_pair(net, {}, limit=100)
    [reading] = await begin(reader.readline())
    reader._limit = 1000
    far_writer.write(b"a" * 900 + b"\n" + b"b" * 20 + b"\n")
    assert len(await reading) == 901
    reader._limit = 10
    with pytest.raises(ValueError, match="limit"):
        await reader.readline()
    assert reader._limit == 10


async def test_other_attributes_of_a_reader(net: Net):
    *_, far_writer, reader, _ = await stream_pair(net, {})
    far_writer.write(b"abc")
    await until_seen(lambda: reader._buffer == b"abc")
    reader._buffer.extend(b"d")
    assert await reader.readexactly(4) == b"abcd"
    reader._exception = OSError("of the program")
    for read in reader.read(), reader.readline():
        with pytest.raises(OSError, match="of the program"):
            await read
    assert reader.exception() is reader._exception
    reader._exception = None
    reader._eof = True
    assert await reader.read() == b"" and reader.at_eof()
    reader._eof, reader._paused = False, True
    [reading] = await begin(reader.readexactly(1))
    assert not reader._paused  # or it would wait for ever
    far_writer.write(b"e")
    assert await reading == b"e"
