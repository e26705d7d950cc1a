"""A client is ready, and its word for that (RTU) gets lost. Its first frame says the same, so nobody waits for more."""

import asyncio
import threading

import pytest
from harness import HOST, Echo, Net, Recorder

from rdmanet import blocking
from tests.support.waiting import until_seen

pytestmark = pytest.mark.embedded_only("by a fault")


@pytest.fixture
def lost(device):
    device.library.set_faults("loss=rtu")
    yield
    happened = device.library.faults()
    device.library.set_faults("")
    assert happened["loss=rtu"] > 0


async def test_an_echo(net: Net, lost):
    server, port = await net.serve(Echo)
    for _ in range(3):
        client = await net.connect(port)
        client.transport.write(b"who is there?")
        assert await client.until_received(13) == b"who is there?"
        client.transport.close()
        await client.until(lambda client=client: client.lost)
    assert not server._half_open


async def test_a_server_that_speaks_first(net: Net, lost):
    """The client's program says nothing, its transport does."""

    class Greeter(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"welcome")

    _, port = await net.serve(Greeter)
    client = await net.connect(port)
    assert await client.until_received(7) == b"welcome"


async def test_all_that_a_client_says_who_goes_at_once(net: Net, lost):
    """The server's program looks when all is over: its end has come, too, and its word never will."""
    served: list[Recorder] = []

    def factory() -> Recorder:
        served.append(Recorder())
        return served[-1]

    server, port = await net.serve(factory)
    accepted, gone = server._on_request, threading.Event()

    def accept_and_be_busy(request):
        accepted(request)
        assert gone.wait(60)

    server._on_request = accept_and_be_busy

    def go() -> None:
        try:
            with blocking.open_rdma_stream(HOST, port) as stream:
                stream.sendall(b"last words")
        finally:
            gone.set()

    await asyncio.to_thread(go)
    await until_seen(lambda: bool(served))
    await served[0].until(lambda: served[0].lost)
    assert served[0].data == b"last words" and "eof" in served[0].events
