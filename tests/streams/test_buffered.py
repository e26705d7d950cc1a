"""BufferedProtocol: the bytes land in the protocol's own buffer."""

import asyncio

import pytest
from harness import Echo, Net, Recorder
from pattern import Pattern

MIB = 1 << 20


class Buffered(asyncio.BufferedProtocol):
    """Recorder's counterpart; hands out `size` bytes at a time."""

    def __init__(self, size: int = 65536) -> None:
        self.buffer = bytearray(size)
        self.recorder = Recorder()
        self.hints: list[int] = []

    def connection_made(self, transport):
        self.transport = transport
        self.recorder.connection_made(transport)

    def get_buffer(self, sizehint):
        self.hints.append(sizehint)
        return self.buffer

    def buffer_updated(self, nbytes):
        assert 0 < nbytes <= len(self.buffer)
        self.recorder.data_received(bytes(self.buffer[:nbytes]))

    def eof_received(self):
        return self.recorder.eof_received()

    def pause_writing(self):
        self.recorder.pause_writing()

    def resume_writing(self):
        self.recorder.resume_writing()

    def connection_lost(self, exc):
        self.recorder.connection_lost(exc)


@pytest.mark.parametrize("size", [1, 7, 1000, 65536, 3 * MIB])
async def test_any_size_of_buffer(net: Net, size):
    total = min(size * 2000, 4 * MIB)
    client, server = await net.pair(server=lambda: Buffered(size))
    pattern = Pattern()
    while pattern.position < total:
        client.transport.write(pattern.take(min(MIB, total - pattern.position)))
    client.transport.write_eof()
    await server.recorder.until_lost()
    assert server.recorder.events == ["made", "data", "eof", "lost"]
    assert server.recorder.received == total
    Pattern().check(server.recorder.data)
    assert all(hint == -1 or hint > 0 for hint in server.hints)


async def test_methods_without_the_base_class(net: Net):
    """uvloop looks for the methods, asyncio for the base class: here the methods count, without data_received()."""

    class Duck(asyncio.BaseProtocol):
        get_buffer = Buffered.get_buffer
        buffer_updated = Buffered.buffer_updated
        connection_made = Buffered.connection_made
        eof_received = Buffered.eof_received
        connection_lost = Buffered.connection_lost
        __init__ = Buffered.__init__

    class Both(Recorder):
        def get_buffer(self, sizehint):
            raise AssertionError("it has data_received()")

    client, server = await net.pair(Both, Duck)
    client.transport.write(b"hello")
    assert await server.recorder.until_received(5) == b"hello"
    server.transport.write(b"and back")
    assert await client.until_received(8) == b"and back"
    other = Duck()
    other.connection_made(client.transport)
    client.transport.set_protocol(other)
    server.transport.write(b"to the other")
    assert await other.recorder.until_received(12) == b"to the other"
    other.transport.abort()
    await other.recorder.until_lost()
    client.transport = None  # its connection ended elsewhere


async def test_on_both_sides(net: Net):
    class BufferedEcho(Buffered):
        def buffer_updated(self, nbytes):
            self.transport.write(bytes(self.buffer[:nbytes]))

    client, _ = await net.pair(Buffered, BufferedEcho)
    client.recorder.expected = Pattern()
    text = Pattern().take(MIB)
    client.transport.write(text)
    assert await client.recorder.until_received(MIB) == text
    client.transport.abort()
    await client.recorder.until_lost()


async def test_a_memoryview_and_a_new_buffer_each_time(net: Net):
    class Choosy(Buffered):
        def get_buffer(self, sizehint):
            self.buffer = bytearray(1 + len(self.hints) % 977)
            self.hints.append(sizehint)
            return memoryview(self.buffer)

    client, server = await net.pair(server=Choosy)
    text = Pattern().take(300_000)
    client.transport.write(text)
    assert await server.recorder.until_received(len(text)) == text
    client.transport.abort()


async def test_pausing_between_two_buffers(net: Net):
    class Sipping(Buffered):
        def buffer_updated(self, nbytes):
            assert self.transport.is_reading()
            super().buffer_updated(nbytes)
            self.transport.pause_reading()
            net.loop.call_soon(self.transport.resume_reading)

    client, server = await net.pair(server=lambda: Sipping(10_000))
    text = Pattern().take(MIB)
    client.transport.write(text)
    assert await server.recorder.until_received(MIB) == text
    client.transport.abort()


@pytest.mark.parametrize("failing", ["empty", "raises", "none", "not a buffer", "read-only"])
async def test_a_buffer_that_cannot_be_used_ends_the_connection(net: Net, failing):
    class Failing(Buffered):
        def get_buffer(self, sizehint):
            if failing == "raises":
                raise LookupError("no buffer")
            return {"empty": bytearray(), "none": None, "not a buffer": 7, "read-only": bytes(10)}[failing]

    client, server = await net.pair(server=Failing)
    other, _ = await net.pair(server=Echo)
    client.transport.write(b"hello")
    error = await server.recorder.until_lost()
    assert error is not None
    told = net.complaint()
    assert told["exception"] is error
    assert told["message"] == "Fatal error: protocol.get_buffer() call failed."
    assert not server.recorder.eof
    assert isinstance(await client.until_lost(), ConnectionError)
    other.transport.write(b"fine")
    await other.until_received(4)


async def test_an_exception_of_buffer_updated_ends_the_connection(net: Net):
    class Failing(Buffered):
        def buffer_updated(self, nbytes):
            raise LookupError("cannot take it")

    client, server = await net.pair(server=Failing)
    client.transport.write(b"hello")
    assert isinstance(await server.recorder.until_lost(), LookupError)
    told = net.complaint()
    assert isinstance(told["exception"], LookupError)
    assert told["message"] == "Fatal error: protocol.buffer_updated() call failed."
    assert isinstance(await client.until_lost(), ConnectionError)


async def test_switching_between_the_two_kinds(net: Net):
    """set_protocol in a callback: what comes next goes to the new one, in its own way."""
    buffered = Buffered(10)

    class Switching(Recorder):
        def keep(self, data):
            super().keep(data)
            if data == b"first":
                self.transport.set_protocol(buffered)

    client, server = await net.pair(server=Switching)
    client.transport.write(b"first")
    await server.until_received(5)
    buffered.recorder.connection_made(server.transport)
    assert server.transport.get_protocol() is buffered
    client.transport.write(b"second, and longer than its buffer")
    assert await buffered.recorder.until_received(34) == b"second, and longer than its buffer"
    server.transport.set_protocol(server)
    client.transport.write(b"third")
    assert (await server.until_received(10))[5:] == b"third"
