"""Much data: back-pressure works, nothing deadlocks, and every byte is right."""

import pytest
from harness import HalfOpen, Net, Recorder
from pattern import Pattern

MIB = 1 << 20


class Bulk(HalfOpen):
    """Sends `total` bytes of the pattern as the transport allows, then its end (if it sends any).

    What it gets must be the pattern too, from the place `expects`.
    """

    def __init__(self, total: int, *, sends: int = 0, expects: int = 1, hold: bool = False) -> None:
        super().__init__()
        self.total, self.hold = total, hold
        self.sent, self.expected = Pattern(sends), Pattern(expects)
        self.finished = False
        self.most_buffered = 0

    def connection_made(self, transport):
        super().connection_made(transport)
        if self.hold:
            transport.pause_reading()
        self.fill()

    def fill(self):
        while not self.writing_paused and self.sent.position < self.total:
            self.transport.write(self.sent.take(min(MIB, self.total - self.sent.position)))
            self.most_buffered = max(self.most_buffered, self.transport.get_write_buffer_size())
        if self.total and self.sent.position == self.total and not self.finished:
            self.finished = True
            self.transport.write_eof()

    def keep(self, data):
        self.expected.check(data)

    def resume_writing(self):
        super().resume_writing()
        self.fill()


@pytest.mark.parametrize("piece", [32 << 10, 4 << 10, 1000])
async def test_32_kib(net: Net, piece):
    client, server = await net.pair()
    text = Pattern().take(32 << 10)
    for begin in range(0, len(text), piece):
        client.transport.write(text[begin : begin + piece])
    assert await server.until_received(len(text)) == text


@pytest.mark.long
async def test_256_mib_in_both_directions_at_once(net: Net):
    total = 256 * MIB
    peer = net.spawn("bulk.py", total)
    client = await net.connect(await peer.port(), lambda: Bulk(total))
    assert await peer.expect("received") == [str(total)]
    await client.until(lambda: client.eof)
    assert client.expected.position == total
    # At most what the high-water mark allows and the one write that crossed it.
    _, high = client.transport.get_write_buffer_limits()
    assert client.most_buffered <= high + MIB
    client.transport.close()
    assert await client.until_lost() is None
    peer.say("close")
    assert await peer.expect("lost") == ["None", str(total), str(total)]


@pytest.mark.long
async def test_one_write_of_64_mib(net: Net):
    client, server = await net.pair(server=lambda: Bulk(0, sends=1, expects=0))
    text = bytearray()
    pattern = Pattern()
    for _ in range(64):
        text += pattern.take(MIB)
    client.transport.write(bytes(text))
    client.transport.write_eof()
    await server.until(lambda: server.eof)
    assert server.expected.position == 64 * MIB


async def test_neither_side_reads_for_a_while(net: Net):
    """Both are full in both directions before either reads; then everything flows."""
    total = 64 * MIB
    peer = net.spawn("bulk.py", total, "hold")
    client = await net.connect(await peer.port(), lambda: Bulk(total, hold=True))
    (accepted,) = await peer.expect("full")
    await client.until(lambda: client.writing_paused)
    # "Full" is small: what lies between two stuck applications is a ring and a write buffer each.
    assert int(accepted) < 32 * MIB
    assert client.sent.position < 32 * MIB
    assert client.received == 0
    peer.say("read")
    client.transport.resume_reading()
    assert await peer.expect("received") == [str(total)]
    await client.until(lambda: client.eof)
    assert client.expected.position == total


@pytest.mark.parametrize("first", ["client", "server"])
async def test_one_side_reads_before_the_other(net: Net, first):
    total = 16 * MIB
    client, server = await net.pair(
        lambda: Bulk(total, hold=True), lambda: Bulk(total, sends=1, expects=0, hold=True)
    )
    await client.until(lambda: client.writing_paused)
    await server.until(lambda: server.writing_paused)
    sides = [client, server] if first == "client" else [server, client]
    for side in sides:
        side.transport.resume_reading()
        await side.until(lambda side=side: side.eof)
    assert client.expected.position == server.expected.position == total


async def test_a_paused_reader_gets_nothing_until_it_resumes(net: Net):
    """Pausing may be undone and redone in every callback, and loses nothing."""

    class Sipping(Bulk):
        def keep(self, data):
            super().keep(data)
            self.transport.pause_reading()
            net.loop.call_soon(self.transport.resume_reading)

        def data_received(self, data):
            assert self.transport.is_reading()
            super().data_received(data)

    client, server = await net.pair(lambda: Bulk(4 * MIB), lambda: Sipping(0, expects=0))
    await server.until(lambda: server.eof)
    assert server.expected.position == 4 * MIB


async def test_the_writer_pauses_and_resumes_in_turn(net: Net):
    client, server = await net.pair(lambda: Bulk(0), lambda: Bulk(0, expects=0, hold=True))
    transport = client.transport
    transport.set_write_buffer_limits(high=100_000, low=20_000)
    pattern = Pattern()
    while not client.writing_paused:
        transport.write(pattern.take(10_000))
    assert transport.get_write_buffer_size() > 100_000
    server.transport.resume_reading()
    await client.until(lambda: not client.writing_paused)
    assert transport.get_write_buffer_size() <= 20_000
    transport.write_eof()
    await server.until(lambda: server.received == pattern.position)
    assert client.events.count("pause") == client.events.count("resume")


async def test_high_water_of_zero_pauses_at_the_first_buffered_byte(net: Net):
    client, server = await net.pair(server=lambda: Bulk(0, expects=0, hold=True))
    client.transport.set_write_buffer_limits(high=0)
    pattern = Pattern()
    while not client.writing_paused:
        client.transport.write(pattern.take(4096))
    server.transport.resume_reading()
    await client.until(lambda: not client.writing_paused)
    assert client.transport.get_write_buffer_size() == 0
    await server.until(lambda: server.received == pattern.position)


async def test_echo_of_much_through_a_slow_reader(net: Net):
    """Back-pressure passes through: the echo server stops reading while it cannot write."""

    class Relay(Recorder):
        def keep(self, data):
            self.transport.write(data)

        def pause_writing(self):
            super().pause_writing()
            self.transport.pause_reading()

        def resume_writing(self):
            super().resume_writing()
            self.transport.resume_reading()

    client, _ = await net.pair(lambda: Bulk(16 * MIB, expects=0, hold=True), Relay)
    await client.until(lambda: client.writing_paused)
    client.transport.resume_reading()
    await client.until(lambda: client.received == 16 * MIB)
    assert client.expected.position == 16 * MIB
