"""TLS that begins on a connection in the clear, by RDMA and TCP: what came before it is never taken for protected."""

import asyncio
import contextlib
import ssl

import pytest
import uvloop
from loop_harness import fabric

import rdmanet
from rdmanet.stream import in_the_clear
from tests.support.certificates import of_client, of_server
from tests.support.ending import abort
from tests.support.waiting import until_seen

SERVER, CLIENT = of_server(), of_client()
INSERTED = b"delete everything\n"


class Reader(asyncio.StreamReader):
    """A program's own."""


class Protocol(asyncio.StreamReaderProtocol):
    """A program's own."""


KINDS = {
    "asyncio's": (asyncio.StreamReader, asyncio.StreamReaderProtocol),
    "own reader": (Reader, asyncio.StreamReaderProtocol),
    "own protocol": (asyncio.StreamReader, Protocol),
}


@pytest.fixture(params=["rdma", "tcp"])
def by(request):
    """The fabric of connections from now on."""

    def choose() -> str:
        if request.param == "tcp":
            rdmanet.patch_loop(asyncio.get_running_loop(), peers="!*")
        return request.param

    return choose


@contextlib.asynccontextmanager
async def pair(kind: str = "asyncio's", has_tls: bool = False):
    """The two ends of a connection, in the clear or not: (reader, writer) of the client, then of the server."""
    loop = asyncio.get_running_loop()
    new_reader, new_protocol = KINDS[kind]
    accepted: asyncio.Future = loop.create_future()

    def factory():
        return new_protocol(new_reader(), lambda *stream: accepted.set_result(stream))

    server = await loop.create_server(factory, "127.0.0.1", 0, ssl=SERVER if has_tls else None)
    reader = new_reader()
    transport, protocol = await loop.create_connection(
        lambda: new_protocol(reader),
        *server.sockets[0].getsockname(),
        ssl=CLIENT if has_tls else None,
        server_hostname="localhost" if has_tls else None,
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    writer.write(b"hello\n")
    far = await accepted
    assert await far[0].readline() == b"hello\n"
    try:
        yield reader, writer, *far
    finally:
        server.close()
        for each in writer, far[1]:
            abort(each.transport)


def unread(reader) -> bytes:
    return bytes(reader._buffer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose", ["client", "server"])
async def test_what_was_inserted_before_tls_is_not_read(by, whose, kind):
    """Plain text behind STARTTLS, or behind the answer to it."""
    fabric_is = by()
    async with pair(kind) as (reader, writer, far_reader, far_writer):
        assert fabric(writer) == fabric(far_writer) == fabric_is
        near, far = (reader, writer), (far_reader, far_writer)
        (mine, my_writer), (_, other) = (near, far) if whose == "client" else (far, near)
        other.write(b"the word\n" + INSERTED)
        assert await mine.readline() == b"the word\n"
        await until_seen(lambda: unread(mine))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            if whose == "client":
                await my_writer.start_tls(CLIENT, server_hostname="localhost")
            else:
                await my_writer.start_tls(SERVER)
        assert not unread(mine)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            raise AssertionError(await mine.readline())


def test_without_the_guard_it_is_read(monkeypatch):
    """The control, on uvloop and by TCP. Newer Pythons' asyncio has a guard of its own."""
    monkeypatch.setattr(in_the_clear, "_take", lambda protocol: b"")

    async def attack():
        async with pair() as (reader, writer, far_reader, far_writer):
            far_writer.write(b"the word\n" + INSERTED)
            assert await reader.readline() == b"the word\n"
            await until_seen(lambda: unread(reader))
            await asyncio.gather(
                writer.start_tls(CLIENT, server_hostname="localhost"), far_writer.start_tls(SERVER)
            )
            return await reader.readline()

    assert rdmanet.run(attack(), peers="!*", loop_factory=uvloop.new_event_loop) == INSERTED


async def test_a_client_that_begins_at_once(by):
    """It does not wait for the answer: what the server has not read is the beginning of TLS."""
    by()
    async with pair() as (reader, writer, far_reader, far_writer):
        writer.write(b"STARTTLS\n")
        starting = asyncio.create_task(writer.start_tls(CLIENT, server_hostname="localhost"))
        assert await far_reader.readline() == b"STARTTLS\n"
        await until_seen(lambda: unread(far_reader))
        await far_writer.start_tls(SERVER)
        await starting
        writer.write(b"protected\n")
        assert await far_reader.readline() == b"protected\n"


async def test_wrong_arguments_take_nothing(by):
    by()
    async with pair() as (reader, writer, _, far_writer):
        far_writer.write(b"go ahead\n" + INSERTED)
        assert await reader.readline() == b"go ahead\n"
        with pytest.raises(TypeError):
            await writer.start_tls("no context", server_hostname="localhost")
        assert await reader.readline() == INSERTED


@pytest.mark.parametrize("kind", KINDS)
async def test_another_protocol_is_to_be_above(by, kind):
    """The stream's protocol is given to loop.start_tls() while another one has the transport, as asyncpg does."""
    by()
    loop = asyncio.get_running_loop()
    async with pair(kind) as (reader, writer, _, far_writer):
        far_writer.write(b"go ahead\n" + INSERTED)
        assert await reader.readline() == b"go ahead\n"
        await until_seen(lambda: unread(reader))
        protocol = writer.transport.get_protocol()
        writer.transport.set_protocol(asyncio.Protocol())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await loop.start_tls(writer.transport, protocol, CLIENT, server_hostname="localhost")
        assert not unread(reader)


async def test_what_tls_protects_is_not_what_tls_in_it_protects(by):
    """Of two layers, the inner one has an end of its own: what only the outer one protects is not read as its own."""
    by()
    async with pair() as (reader, writer, far_reader, far_writer):
        await asyncio.gather(
            writer.start_tls(CLIENT, server_hostname="localhost"), far_writer.start_tls(SERVER)
        )
        far_writer.write(b"go ahead\n" + INSERTED)
        assert await reader.readline() == b"go ahead\n"
        await until_seen(lambda: unread(reader))
        # asyncio's before 3.13 tells nobody of a handshake that fails there.
        starting = asyncio.create_task(writer.start_tls(CLIENT, server_hostname="localhost"))
        await until_seen(lambda: starting.done() or not unread(reader))
        starting.cancel()
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.CancelledError)):
            await starting
        assert not unread(reader)


class Buffered(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.memory = bytearray(100)
        self.data = b""

    def get_buffer(self, sizehint):
        return self.memory

    def buffer_updated(self, nbytes):
        self.data += self.memory[:nbytes]


async def test_a_buffered_protocol_above(by):
    by()
    loop = asyncio.get_running_loop()
    async with pair() as (_, writer, _, far_writer):
        above, stream = Buffered(), writer.transport.get_protocol()
        transport, _ = await asyncio.gather(
            loop.start_tls(writer.transport, above, CLIENT, server_hostname="localhost"),
            far_writer.start_tls(SERVER),
        )
        far_writer.write(b"protected")
        await until_seen(lambda: above.data == b"protected")
        transport.set_protocol(stream)


async def test_a_handshake_inside_of_tls_fails(by):
    """Python 3.11's own SSLProtocol raises a TypeError of its own then, and start_tls() never returns."""
    by()
    async with pair(has_tls=True) as (reader, writer, _, far):
        far.write(INSERTED)
        await until_seen(lambda: unread(reader) == INSERTED)
        with pytest.raises(ssl.SSLError):
            await writer.start_tls(CLIENT, server_hostname="localhost")
        assert not unread(reader) and writer.transport.is_closing()


async def test_the_end_of_tls_inside_of_tls_is_not_waited_for(by):
    """The peer reads nothing, and so does not answer close_notify."""
    by()
    async with pair(has_tls=True) as (_, writer, _, far):
        transport = writer.transport
        begun = asyncio.get_running_loop().start_tls(
            transport, transport.get_protocol(), CLIENT, server_hostname="localhost", ssl_shutdown_timeout=0.1
        )
        inner, _ = await asyncio.gather(begun, far.start_tls(SERVER))
        far.transport.pause_reading()
        inner.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
