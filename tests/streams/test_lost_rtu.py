"""A client is ready, and its word for that (RTU) gets lost. Its first frame says the same, so nobody waits for more."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from harness import HOST, Echo, Net, Recorder

from rdmanet import blocking
from rdmanet.cm import CMEventType
from rdmanet.verbs import PD, QP, QPInitAttr, QPState
from tests.support.bare_peer import DATA, HELLO, BarePeer, frame
from tests.support.waiting import until_seen


@pytest.fixture
def lost(device):
    if not device.library.embedded_device:
        pytest.skip("by a fault")
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


class NeverReady(BarePeer):
    """It moves its queue pair itself, and never says that it is ready: as if its word were lost, on any device."""

    async def go(self, address: str, port: int) -> None:
        ours = self.id = self._channel.create_id()
        ours.resolve_addr(None, (address, port), 5000)
        await self.event(CMEventType.ADDR_RESOLVED)
        ours.resolve_route(5000)
        await self.event(CMEventType.ROUTE_RESOLVED)
        self.id = SimpleNamespace(context=ours.context, create_qp=self._made, init_qp_attr=ours.init_qp_attr)
        try:
            self._create_qp()
        finally:
            self.id = ours
        ours.connect(HELLO, qp_num=self.qp.qp_num)
        await self.event(CMEventType.CONNECT_RESPONSE)
        for state in (QPState.RTR, QPState.RTS):
            self._move(self.qp, state)

    def _made(self, pd: PD, init_attr: QPInitAttr) -> QP:
        """Not the identifier's, but of the program's own."""
        qp = QP(pd, init_attr)
        self._move(qp, QPState.INIT)
        return qp

    def _move(self, qp: QP, state: QPState) -> None:
        attr = self.id.init_qp_attr(state)
        attr.qp_state = state
        qp.modify(attr)


@pytest.mark.not_on_siw("connects the queue pair itself")
async def test_who_never_says_it(net: Net, device):
    peer = NeverReady(device.library)
    try:
        _, port = await net.serve(Echo)
        await peer.go(HOST, port)
        peer.post(frame(DATA, b"who is there?"))
        assert await peer.next_of(DATA) == b"who is there?"
    finally:
        peer.close()
