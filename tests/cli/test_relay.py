"""One relay of `rdmanet proxy` within this process."""

import asyncio
import errno
import os
import socket
import ssl

import pytest

from rdmanet.cli import relay
from rdmanet.cli.endpoints import Tls, listen, parse
from rdmanet.cli.relay import Relay
from tests.support.waiting import readable

MUCH = bytes(range(256)) * 512
NO_TLS = Tls(None, ssl.create_default_context())


class Owner:
    """Who has the relay: it connects to this port.

    :ivar over: done when the relay has ended
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.over = asyncio.get_running_loop().create_future()

    def admits(self, relay):
        return True

    async def connect(self, factory):
        await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", self.port)

    def unconnected(self, relay, why):
        raise AssertionError(why)

    def lost(self, relay, why):
        raise AssertionError(why)

    def ended(self, relay):
        self.over.set_result(None)


def no_descriptors(_: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("left", [True, False], ids=["descriptors", "no descriptors"])
async def test_what_is_read_after_a_good_close_is_not_lost(left, monkeypatch):
    """What is accepted inherits from its listener that a close resets it, and the relay takes that back."""

    async def backend(reader, writer):
        writer.write(MUCH)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(backend, "127.0.0.1", 0)
    owner = Owner(server.sockets[0].getsockname()[1])
    if not left:
        monkeypatch.setattr(relay.os, "dup", no_descriptors)
    listener = await listen(parse("tcp://127.0.0.1:0"), lambda: Relay(owner).near, NO_TLS)
    with socket.create_connection(("127.0.0.1", listener.endpoints[0].port)) as client:
        client.shutdown(socket.SHUT_WR)
        await owner.over
        client.setblocking(False)
        got = b""
        while len(got) < len(MUCH):
            await readable(client.fileno())
            piece = client.recv(len(MUCH))
            assert piece, "the stream ended early"
            got += piece
        await readable(client.fileno())
        assert (got, client.recv(1)) == (MUCH, b"")
    listener.close()
    server.close()
    await server.wait_closed()
