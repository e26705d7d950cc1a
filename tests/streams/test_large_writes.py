"""Large memoryviews are sent from where they lie; whoever waits until writing resumes may change them.

A device that reads registered memory only gets copies, piece by piece; then a protocol need not be paused.
"""

import array
import asyncio
import errno
import io
import mmap
import os
import tempfile

import pytest
from harness import Net, Recorder
from pattern import Pattern

from tests.support.waiting import begin, until_seen

KIB = 1024
MIB = 1024 * KIB
LEND = 256 * KIB


class Checking(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.expected = Pattern()

    def keep(self, data) -> None:
        self.expected.check(data)


class SlowChecking(Checking):
    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.pause_reading()


def reads_in_place(recorder: Recorder) -> bool:
    """Whether the device read what was written from where it lay."""
    return recorder.transport.get_extra_info("rdma_stats")["bytes_borrowed"] > 0


def filled(size: int, pattern: Pattern) -> bytearray:
    memory = bytearray()
    while len(memory) < size:
        memory += pattern.take(min(size - len(memory), MIB))
    return memory


@pytest.mark.parametrize("size", [LEND, LEND + 1, MIB + 3, 5 * MIB])
async def test_memory_is_the_programs_again_when_writing_resumes(net: Net, size):
    client, server = await net.pair(server=SlowChecking)
    memory = bytearray(size)
    pattern = Pattern()
    for _ in range(4):
        memory[:] = filled(size, pattern)
        client.transport.write(memoryview(memory))
        assert client.writing_paused or not reads_in_place(client)
        server.transport.resume_reading()
        await client.until(lambda: not client.writing_paused)
        assert client.transport.get_write_buffer_size() == 0
        memory[:] = bytes(size)
    await server.until(lambda: server.received == 4 * size)
    rounds = ["pause", "resume"] * 4
    assert client.events[1:] == rounds[: len(client.events) - 1]
    assert client.events[1:] == rounds or not reads_in_place(client)


async def test_it_counts_as_buffered_until_it_is_read(net: Net):
    """However little of it: the marks do not matter."""
    client, server = await net.pair(server=SlowChecking)
    client.transport.set_write_buffer_limits(high=16 * MIB)
    memory = filled(LEND, Pattern())
    client.transport.write(memoryview(memory))
    if reads_in_place(client):
        assert client.writing_paused
        assert client.transport.get_write_buffer_size() == LEND
        with pytest.raises(BufferError):
            memory.append(0)
    await client.until(lambda: not client.writing_paused)
    assert client.transport.get_write_buffer_size() == 0
    memory.append(0)


async def test_a_peer_that_does_not_read_keeps_it(net: Net):
    client, server = await net.pair(server=SlowChecking)
    size = 8 * MIB
    memory = filled(size, Pattern())
    client.transport.write(memoryview(memory))
    await until_seen(lambda: client.transport.get_write_buffer_size() < size)
    assert client.transport.get_write_buffer_size() > 0
    assert client.writing_paused
    server.transport.resume_reading()
    await client.until(lambda: not client.writing_paused)
    await server.until(lambda: server.received == size)


async def test_constant_memory_pauses_nobody(net: Net):
    """Only exact bytes below the view are constant; a read-only view of other memory is not."""
    client, server = await net.pair(server=Checking)
    client.transport.set_write_buffer_limits(high=16 * MIB)
    pattern = Pattern()
    text = pattern.take(MIB)
    client.transport.write(memoryview(text)[: 512 * KIB])
    client.transport.write(memoryview(text)[512 * KIB :])
    assert not client.writing_paused
    memory = filled(LEND, pattern)
    client.transport.write(memoryview(memory).toreadonly())
    assert client.writing_paused or not reads_in_place(client)
    await server.until(lambda: server.received == MIB + LEND)


@pytest.mark.parametrize("kind", [bytes, memoryview])
async def test_it_goes_behind_short_bytes_in_one_frame(net: Net, kind):
    """A header, and what it is for, written together: the long one is not copied."""
    client, server = await net.pair(server=Checking)
    pattern = Pattern()
    for _ in range(16):  # until slots have grown
        client.transport.write(pattern.take(MIB))
    sent = 16 * MIB
    await server.until(lambda: server.received == sent)
    before = client.transport.get_extra_info("rdma_stats")
    for size in (32 * KIB, LEND, MIB):
        memory = bytearray(10 + size)
        memory[:] = filled(len(memory), pattern)
        long = bytes(memory[10:]) if kind is bytes else memoryview(memory)[10:]
        client.transport.writelines([bytes(memory[:10]), long])
        if kind is memoryview and size >= LEND:
            assert client.writing_paused or not reads_in_place(client)
        await client.until(lambda: not client.writing_paused)
        del long
        memory[:] = bytes(10 + size)
        sent += 10 + size
        await server.until(lambda sent=sent: server.received == sent)
        assert client.transport.get_write_buffer_size() == 0
    after = client.transport.get_extra_info("rdma_stats")
    borrowed = after["bytes_borrowed"] - before["bytes_borrowed"]
    if reads_in_place(client):  # all but what is behind the last full frame
        assert borrowed > (LEND + MIB + (32 * KIB if kind is bytes else 0)) - 3 * 16 * KIB


async def test_what_is_copied(net: Net):
    """A bytearray, which its owner may resize, and what is small."""
    client, server = await net.pair(server=Checking)
    client.transport.set_write_buffer_limits(high=16 * MIB)
    pattern = Pattern()
    memory = filled(MIB, pattern)
    client.transport.write(memory)
    del memory[:]
    memory = filled(LEND - 1, pattern)
    client.transport.write(memoryview(memory))
    del memory[:]
    assert not client.writing_paused
    await server.until(lambda: server.received == MIB + LEND - 1)


async def test_the_view_may_be_released(net: Net):
    client, server = await net.pair(server=SlowChecking)
    memory = filled(3 * MIB, Pattern())
    with memoryview(memory) as view, view[:MIB] as first:
        client.transport.write(first)
        client.transport.write(view[MIB:])
    with pytest.raises(BufferError):
        memory.clear()
    server.transport.resume_reading()
    await client.until(lambda: not client.writing_paused)
    memory.clear()
    await server.until(lambda: server.received == 3 * MIB)
    with pytest.raises(ValueError, match="released"):
        client.transport.write(view)


async def test_other_formats_and_dimensions(net: Net):
    client, server = await net.pair(server=Checking)
    text = Pattern().take(960 * KIB)
    numbers = array.array("d", text)
    client.transport.write(memoryview(numbers))
    await client.until(lambda: not client.writing_paused)
    with pytest.raises(BufferError):
        client.transport.write(memoryview(numbers)[::2])
    await server.until(lambda: server.received == len(text))
    server.expected = Pattern()
    client.transport.write(memoryview(numbers).cast("B").cast("B", (960, KIB)))
    await server.until(lambda: server.received == 2 * len(text))
    await client.until(lambda: not client.writing_paused)
    assert client.events[1:] == ["pause", "resume", "pause", "resume"] or not reads_in_place(client)


async def test_order_among_small_and_large(net: Net):
    client, server = await net.pair(server=Checking)
    pattern = Pattern()
    pieces = []
    for size in [10, LEND, 1, 200 * KIB, 20 * KIB, MIB, 100, 3, 70 * KIB]:
        text = pattern.take(size)
        pieces += [text, memoryview(bytearray(pattern.take(size)))]
    client.transport.writelines(pieces)
    client.transport.write_eof()
    await server.until(lambda: server.eof)
    assert server.received == sum(map(len, pieces))


@pytest.mark.parametrize("end", ["abort", "close", "peer"])
async def test_the_end_of_a_connection_gives_it_back(net: Net, end):
    client, server = await net.pair(server=SlowChecking)
    memory = filled(8 * MIB, Pattern())
    client.transport.write(memoryview(memory))
    if end == "peer":
        server.transport.abort()
    elif end == "abort":
        client.transport.abort()
    else:
        client.transport.close()
        server.transport.resume_reading()
    await client.until_lost()
    # The peer is told of an abort before the queue pair ends.
    await until_seen(lambda: client.transport.get_write_buffer_size() == 0)
    memory.clear()
    assert client.events.count("pause") == 1
    client.transport.set_write_buffer_limits(high=0)  # nobody is left to be paused
    assert client.events.count("pause") == 1


async def test_drain(net: Net):
    reader, writer, far, far_writer = await net.stream_pair()
    memory = filled(4 * MIB, Pattern())
    reading = asyncio.ensure_future(far.readexactly(4 * MIB))
    writer.write(memoryview(memory))
    await writer.drain()
    memory[:] = bytes(len(memory))
    Pattern().check(await reading)


async def test_a_cancelled_drain_promises_nothing(net: Net):
    """The next one does."""
    reader, writer, far, far_writer = await net.stream_pair()
    memory = filled(8 * MIB, Pattern())
    writer.write(memoryview(memory))
    (draining,) = await begin(writer.drain())
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    with pytest.raises(BufferError):
        memory.clear()
    received, _ = await asyncio.gather(far.readexactly(8 * MIB), writer.drain())
    memory.clear()
    Pattern().check(received)


async def test_no_copy_of_the_whole_is_made(net: Net):
    client, server = await net.pair(server=Checking)
    size = 64 * MIB
    memory = mmap.mmap(-1, size)
    pattern = Pattern()
    for start in range(0, size, MIB):
        memory[start : start + MIB] = pattern.take(MIB)
    client.transport.write(memoryview(memory))
    with pytest.raises(BufferError):  # it is still needed, so it was not copied
        memory.close()
    await client.until(lambda: not client.writing_paused)
    await server.until(lambda: server.received == size)
    memory.close()  # BufferError if anybody held it


async def test_memory_that_nobody_holds_is_copied(net: Net):
    """io.BufferedWriter passes views of its own buffer, which are good for the call only."""

    class Raw(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            client.transport.write(data)
            return len(data)

    client, server = await net.pair(server=SlowChecking)
    client.transport.set_write_buffer_limits(high=16 * MIB)
    pattern = Pattern()
    for _ in range(3):
        with io.BufferedWriter(Raw(), MIB) as file:
            for _ in range(8):
                file.write(pattern.take(256 * KIB))
    server.transport.resume_reading()
    await server.until(lambda: server.received == 6 * MIB)


class PausesAgain(Recorder):
    """Reads no more after each piece, as asyncio's StreamReader does beyond its limit."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.pause_reading()


async def test_a_writer_learns_that_the_peer_is_gone_though_nobody_reads(net: Net):
    """What has come is still to be delivered, so the connection is not lost; but its queue pair is gone."""
    client, server = await net.pair(PausesAgain, SlowChecking)
    client.transport.pause_reading()
    server.transport.write(bytes(512 * KIB))
    await until_seen(lambda: client.transport.get_extra_info("rdma_stats")["bytes_received"])
    memory = filled(8 * MIB, Pattern())
    client.transport.write(memoryview(memory))
    size = client.transport.get_write_buffer_size
    await until_seen(lambda: size() < 8 * MIB)
    server.transport.abort()
    await client.until(lambda: not client.writing_paused)
    memory.clear()
    assert size() == 0
    assert not client.lost


async def test_a_finalizer_of_the_memory_may_write(net: Net):
    class Array(bytearray):
        def __del__(self) -> None:
            client.transport.write(b"the end of one, ")

    client, server = await net.pair()
    for _ in range(20):
        client.transport.write(memoryview(Array(LEND + 1000)))
    await server.until_received(20 * (LEND + 1000 + 16))
    assert bytes(server.data).replace(b"\0", b"") == b"the end of one, " * 20


async def test_limits_while_memory_is_lent(net: Net):
    client, server = await net.pair(server=SlowChecking)
    memory = filled(8 * MIB, Pattern())
    client.transport.write(memoryview(memory))
    client.transport.set_write_buffer_limits(high=32 * MIB)
    client.transport.abort()
    client.transport.set_write_buffer_limits(high=0)
    await client.until_lost()
    assert client.events.count("pause") == 1


# ---- a file is shortened while its mapping is being used


class Mapping:
    """A writable mapping of a file, which can be shortened."""

    def __init__(self, size: int) -> None:
        self.file = tempfile.TemporaryFile()
        self.file.truncate(size)
        self.memory = mmap.mmap(self.file.fileno(), size)

    def shorten(self) -> None:
        os.ftruncate(self.file.fileno(), 0)

    def __enter__(self) -> "Mapping":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def assert_gone(error: BaseException | None) -> None:
    assert isinstance(error, OSError)
    assert error.errno == errno.EFAULT


async def test_a_file_is_shortened_while_its_mapping_is_sent(net: Net):
    client, server = await net.pair(server=SlowChecking)
    with Mapping(16 * MIB) as mapping:
        client.transport.write(memoryview(mapping.memory))
        await until_seen(lambda: client.transport.get_write_buffer_size() < 16 * MIB)
        assert client.transport.get_write_buffer_size() > 0
        mapping.shorten()
        server.keep = lambda data: None
        server.transport.resume_reading()
        assert_gone(await client.until_lost())
    await server.until_lost()
    assert server.received < 16 * MIB


@pytest.mark.parametrize("size", [1, 4 * KIB, LEND - 1, LEND, 16 * MIB])
async def test_a_mapping_is_gone_before_it_is_written(net: Net, size):
    client, server = await net.pair()
    client.transport.write(b"before")
    await server.until(lambda: server.received)
    with Mapping(size) as mapping:
        mapping.shorten()
        client.transport.write(memoryview(mapping.memory))
        assert_gone(await client.until_lost())
    await server.until_lost()
    assert server.data == b"before"


async def test_what_does_not_fit_is_gone(net: Net):
    """Frames are used up: the rest of a write is copied aside."""
    client, server = await net.pair(server=SlowChecking)
    client.transport.write(bytes(filled(4 * MIB, Pattern())))
    assert client.transport.get_write_buffer_size() > 0
    with Mapping(4 * KIB) as mapping:
        mapping.shorten()
        client.transport.write(memoryview(mapping.memory))
        assert_gone(await client.until_lost())
    server.transport.abort()


class IntoMapping(Recorder, asyncio.BufferedProtocol):
    """Has what arrives copied to a mapping that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = Mapping(64 * KIB)
        self.mapping.shorten()

    def get_buffer(self, sizehint: int) -> mmap.mmap:
        return self.mapping.memory

    def buffer_updated(self, count: int) -> None:
        raise AssertionError("nothing can be copied there")


async def test_bytes_arrive_for_a_mapping_that_is_gone(net: Net):
    client, server = await net.pair(server=IntoMapping)
    client.transport.write(b"to nowhere")
    assert_gone(await server.until_lost())
    await client.until_lost()
    assert_gone(net.complaint()["exception"])
    server.mapping.file.close()
    server.mapping.memory.close()  # which has a descriptor of its own


async def test_a_stream_is_read_into_a_mapping_that_is_gone(net: Net):
    reader, _, _, far = await net.stream_pair()
    far.write(b"to nowhere")
    with Mapping(4 * KIB) as mapping:
        mapping.shorten()
        with pytest.raises(OSError) as caught:
            await reader.readinto(memoryview(mapping.memory))
        assert_gone(caught.value)
    assert await reader.readexactly(10) == b"to nowhere"
