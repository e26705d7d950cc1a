"""close() ends a connection whose peer has gone, even if the rest of its bytes is never read.

What arrived and was not delivered is dropped then, as TCP's transports drop it.
"""

import asyncio

import pytest
from harness import HalfOpen, Net, Recorder

from rdmanet.protocol import State
from tests.support.waiting import until_seen

MANY = b"m" * 600_000


class Paused(Recorder):
    def connection_made(self, transport):
        transport.pause_reading()
        super().connection_made(transport)


class PausedHalfOpen(HalfOpen, Paused):
    pass


class Sending(Recorder):
    """Sends a lot, and goes: in good order, or without a word."""

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.write(MANY[: self.size])
        getattr(transport, self.end)()


async def reaches(transport, *states):
    """Return when the connection is in one of the states."""
    await until_seen(lambda: transport._machine.state in states)


# After an error reading goes on by itself, and then it may be over already.
GONE = {
    "close": (State.DRAINING, State.DRAINING_TO_EOF),
    "abort": (State.DRAINING, State.DRAINING_TO_EOF, State.CLOSED),
}


@pytest.mark.parametrize("protocol", [Paused, PausedHalfOpen], ids=["closes", "half open"])
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_a_paused_transport_closes_when_its_peer_has_gone(net: Net, protocol, end):
    class Server(Sending):
        size = len(MANY)

    Server.end = end
    client, _ = await net.pair(protocol, Server)
    await reaches(client.transport, *GONE[end])
    client.transport.pause_reading()  # an error had resumed it
    client.transport.close()
    await client.until_lost()
    assert "data" not in client.events or end == "abort"


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_a_writer_closes_while_its_reader_is_paused_by_its_limit(net: Net, end):
    sent = asyncio.get_running_loop().create_future()

    def connected(reader, writer):
        writer.write(MANY)
        getattr(writer.transport, end)()
        sent.set_result(None)

    _, port = await net.serve_streams(connected)
    _, writer = await net.open(port, limit=1000)
    await sent
    # The reader puts aside what is unread when the peer has said end of file, so that the connection may be over.
    await reaches(writer.transport, *GONE[end], State.CLOSED)
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionResetError:
        assert end == "abort"


async def test_a_full_reader_of_both_halves_closes(net: Net):
    """Both ends paused and full, and then one of them dies: the other still gets away."""
    client, server = await net.pair(Paused, Paused)
    client.transport.write(MANY * 20)
    server.transport.write(MANY)
    server.transport.abort()
    await reaches(client.transport, *GONE["abort"])
    client.transport.pause_reading()
    client.transport.close()
    await client.until_lost()
    assert client.error is not None


@pytest.mark.parametrize("protocol", [Paused, PausedHalfOpen], ids=["closes", "half open"])
async def test_who_writes_while_paused_learns_that_the_peer_has_gone(net: Net, protocol):
    class Server(Sending):
        size = len(MANY)
        end = "close"

    client, _ = await net.pair(protocol, Server)
    await reaches(client.transport, *GONE["close"])
    client.transport.write(b"to nobody")
    await client.until_lost()
    assert client.received == len(MANY)
