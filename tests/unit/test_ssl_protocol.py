"""TLS's protocol over a transport that the test plays: what its application hears at the end."""

import asyncio
import ssl

from rdmanet.stream.in_the_clear import feed
from rdmanet.stream.ssl_protocol import Protocol
from tests.support import certificates
from tests.support.waiting import loop_turns


class Wire(asyncio.Transport):
    """The transport below: keeps what TLS writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def _force_close(self, exc) -> None:
        """What asyncio calls to end a connection by an error."""


class Client(asyncio.Protocol):
    """The application of TLS."""

    ended_by: object = "nothing yet"

    def connection_made(self, transport) -> None:
        self.transport = transport

    def eof_received(self) -> None:
        self.ended_by = "a good end"

    def connection_lost(self, exc) -> None:
        if self.ended_by != "a good end":
            self.ended_by = exc


async def handshaken() -> tuple[Protocol, Client, Wire]:
    """A client's end, whose handshake with OpenSSL's server is complete."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificates.of_server().wrap_bio(incoming, outgoing, server_side=True)
    loop, client, wire = asyncio.get_running_loop(), Client(), Wire()
    waiter = loop.create_future()
    protocol = Protocol(loop, client, certificates.of_client(), waiter, server_hostname="localhost")
    protocol.connection_made(wire)
    while not waiter.done():
        incoming.write(wire.written)
        wire.written = b""
        try:
            server.do_handshake()
        except ssl.SSLWantReadError:
            pass
        if data := outgoing.read():
            feed(protocol, data)
        else:
            await loop_turns()
    await waiter
    return protocol, client, wire


async def test_an_error_of_tls_is_told_also_if_the_peer_ends_in_the_same_turn():
    protocol, client, wire = await handshaken()
    feed(protocol, b"no record of TLS, but something else")
    assert wire.written  # the alert
    protocol.eof_received()
    protocol.connection_lost(None)
    await loop_turns()
    client.transport.close()
    assert isinstance(client.ended_by, ssl.SSLError)


async def test_an_error_in_what_was_not_read_before_the_end_is_told_and_not_kept():
    """Its traceback would keep the connection, until the collector comes."""
    protocol, client, _ = await handshaken()
    client.transport.pause_reading()
    feed(protocol, b"no record of TLS, but something else")
    protocol.connection_lost(None)
    await loop_turns(2)
    assert isinstance(client.ended_by, ssl.SSLError)
    assert protocol._tls_error is None
