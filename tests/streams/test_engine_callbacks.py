"""What callbacks may do to the engine while it is at work, and what it does to them."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from harness import HOST, OFFERABLE, Echo, HalfOpen, Net, Recorder
from pattern import REPEATED

import rdmanet
from rdmanet._core import QP, CMEventType, QPAttr, QPCap, QPInitAttr, QPState, SendWR, WROpcode
from rdmanet.stream.establish import Role
from rdmanet.stream.regions import Regions
from tests.support.endpoints import hears
from tests.support.waiting import begin, loop_turns


async def test_resume_writing_does_not_cut_into_a_write(net: Net):
    """It is told by the loop: what it writes follows what is being written."""

    class Eager(Recorder):
        def resume_writing(self):
            super().resume_writing()
            self.transport.write(b"<resumed>")

    client, server = await net.pair(client=Eager)
    client.transport.set_write_buffer_limits(high=0)
    # Writes go out at once until one comes so soon after another that it stays in its slot, and so pauses us. The next
    # one fills the slot, which is posted while the rest of it still is to be taken.
    expected = b""
    while not client.transport.get_write_buffer_size():
        client.transport.write(b"b" * 1000)
        expected += b"b" * 1000
    client.transport.write(b"c" * 200_000)
    expected += b"c" * 200_000
    await server.until_received(len(expected) + 9)
    assert server.data[: len(expected)] == expected


async def test_what_a_program_writes_between_its_work_goes_out_at_once(net: Net):
    """Though it does not return to the loop: only bursts of writes are held back, for a moment."""
    client, server = await net.pair()
    for number in range(10):
        client.transport.write(b"%d" % number)
        assert client.transport.get_write_buffer_size() == 0
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
    assert await server.until_received(10) == b"0123456789"


@pytest.fixture
def late(monkeypatch):
    """Accepting sides read ESTABLISHED only when all else that has come was seen."""

    def cm_event(endpoint, event, hear):
        if endpoint.role is Role.SERVER and event.type is CMEventType.ESTABLISHED:
            asyncio.get_running_loop().call_later(0.02, hear, event)
        elif endpoint.role is Role.SERVER and event.type is CMEventType.DISCONNECTED:
            asyncio.get_running_loop().call_later(0.03, hear, event)
        else:
            hear(event)

    hears(monkeypatch, cm_event)


async def accepted(net: Net, client) -> Recorder:
    (server,) = await net.accepted_beside([client])
    return server


async def test_what_comes_before_established_waits_for_it(net: Net, late):
    _, port = await net.serve()
    client = await net.connect(port)
    client.transport.write(b"early")
    client.transport.close()
    server = await accepted(net, client)
    assert await server.until_lost() is None
    assert server.data == b"early"
    assert server.events == ["made", "data", "eof", "lost"]


async def test_an_offer_before_established_waits_for_it(net: Net, late):
    _, port = await net.serve()
    client = await net.connect(port)
    with client.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        mr[:5] = b"early"
        async with client.transport.offer(mr, name="early"):
            server = await accepted(net, client)
            await server.until(lambda: server.offered)
            assert await server.offered[0].read() == b"early" + bytes(59)


async def test_an_abort_before_established_is_an_error(net: Net, late):
    _, port = await net.serve()
    client = await net.connect(port)
    client.transport.write(b"early")
    await loop_turns()
    client.transport.abort()
    server = await accepted(net, client)
    assert isinstance(await server.until_lost(), ConnectionResetError)
    # abort() is at once: where sends take time, it overtakes them.
    assert server.data in (b"early", b"") and not server.eof


async def test_a_question_before_established_is_answered(net: Net, late):
    _, port = await net.serve(Echo)
    client = await net.connect(port)
    client.transport.write(b"early")
    assert await client.until_received(5) == b"early"


async def test_clients_are_closed_that_are_half_accepted(net: Net, late):
    """wait_closed() waits for them too, and their peers see a clean end."""
    server, port = await net.serve()
    client = await net.connect(port)
    server.close()
    [waiting] = await begin(server.wait_closed())
    assert not waiting.done()
    server.close_clients()
    assert await client.until_lost() is None
    await waiting


def test_a_keyboard_interrupt_loses_nothing(loop_factory):
    """A program that catches it and runs the loop again finds the connection as it was."""
    loop = loop_factory()
    asyncio.set_event_loop(loop)

    class Interrupted(HalfOpen):
        interrupt = 3

        def data_received(self, data):
            super().data_received(data)
            self.interrupt -= 1
            if self.interrupt == 0:
                raise KeyboardInterrupt

    net = None

    async def begin():
        nonlocal net
        net = Net()
        return await net.pair(server=Interrupted)

    client, server = loop.run_until_complete(begin())
    sent = (REPEATED * 2)[: 16 * 65536 * 3]

    async def send():
        client.transport.write(sent)
        client.transport.write_eof()
        await server.until(lambda: server.eof)

    task = loop.create_task(send())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    loop.run_until_complete(asyncio.wait_for(task, 60))
    assert server.data == sent
    loop.run_until_complete(net.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.parametrize("where", ["factory", "connection_made"])
def test_a_keyboard_interrupt_while_connecting_keeps_nobody_waiting(where):
    loop = asyncio.SelectorEventLoop()  # uvloop does not run on after an interrupted reader
    asyncio.set_event_loop(loop)

    class Interrupted(Recorder):
        def __init__(self):
            super().__init__()
            if where == "factory":
                raise KeyboardInterrupt

        def connection_made(self, transport):
            super().connection_made(transport)
            raise KeyboardInterrupt

    async def serve():
        return await rdmanet.start_rdma_server(Recorder, HOST, 0)

    server = loop.run_until_complete(serve())
    port = server.sockets[0].getsockname()[1]
    task = loop.create_task(rdmanet.create_rdma_connection(Interrupted, HOST, port, connect_timeout=None))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(asyncio.wait_for(task, 60))
    server.close()
    loop.run_until_complete(server.wait_closed())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def test_close_timeout_counts_after_write_eof(net: Net):
    """write_eof() asked for the Fin already; close() is bounded all the same."""

    class Deaf(Recorder):
        def connection_made(self, transport):
            transport.pause_reading()
            super().connection_made(transport)

    client, server = await net.pair(server=Deaf, close_timeout=0.05)
    client.transport.write(bytes(4 << 20))
    client.transport.write_eof()
    client.transport.close()
    assert isinstance(await asyncio.wait_for(client.until_lost(), 60), TimeoutError)


async def test_close_timeout_is_not_put_off_by_what_the_peer_sends(net: Net):
    """Only our own bytes are progress: a peer that talks and never listens does not hold us."""

    class Talker(Recorder):
        def connection_made(self, transport):
            transport.pause_reading()
            super().connection_made(transport)
            self.talk()

        def talk(self):
            if not self.lost:
                self.transport.write(bytes(100_000))
                asyncio.get_running_loop().call_later(0.005, self.talk)

    client, server = await net.pair(server=Talker, close_timeout=0.1)
    client.transport.write(bytes(4 << 20))
    client.transport.close()
    assert isinstance(await asyncio.wait_for(client.until_lost(), 60), TimeoutError)


@pytest.mark.embedded_only("faults of the device")
async def test_a_refused_queue_pair_gives_everything_back(net: Net):
    """Its share of the completion queue included."""
    _, port = await net.serve()
    client = await net.connect(port)
    engine = client.transport.engine

    engine.pd.context.set_faults("fail=create_qp:100%")
    for _ in range(200):
        with pytest.raises(OSError, match="rdma_create_qp: Cannot allocate memory"):
            await rdmanet.create_rdma_connection(Recorder, HOST, port)
    engine.pd.context.set_faults(None)
    assert len(engine.cqs) == 1
    # The server was asked for connections that then were given up.
    net.complaints.clear()


async def test_an_exception_of_ours_ends_one_connection(net: Net, monkeypatch):
    client, server = await net.pair(server=Echo)
    other, _ = await net.pair(server=Echo)

    def broken(*_):
        raise RuntimeError("a flaw of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Regions, "credit_body", broken)
        with (
            client.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr,
            contextlib.suppress(OSError),
        ):
            async with client.transport.offer(mr):
                assert isinstance(await client.until_lost(), RuntimeError)
    assert isinstance(net.complaint()["exception"], RuntimeError)
    other.transport.write(b"still here")
    assert await other.until_received(10) == b"still here"


async def test_a_late_refusal_is_a_reset(net: Net):
    """What the kernel says when the peer closes before it knows that the connection stands."""
    client, _ = await net.pair(server=Echo)
    refusal = SimpleNamespace(type=CMEventType.REJECTED, status=28, error=lambda: ConnectionRefusedError())
    client.transport._life.endpoint._cm_event(refusal)
    assert isinstance(await client.until_lost(), ConnectionResetError)


@pytest.mark.embedded_only("only the embedded device tells of a completion queue that is overrun")
async def test_an_overrun_completion_queue_ends_its_connections_only(net: Net):
    """Once, with an error; connections made later get another queue."""
    client, server = await net.pair(server=Echo)
    engine = client.transport.engine
    (cq,) = engine.cqs
    attr = QPInitAttr(cap=QPCap(max_send_wr=cq.cqe + 1), send_cq=cq, recv_cq=cq)
    with engine.pd.alloc_mr(64) as mr, QP(engine.pd, attr) as qp:
        qp.to_init()
        qp.modify(QPAttr(qp_state=QPState.ERR))
        for _ in range(cq.cqe + 1):
            qp.post_send(SendWR(WROpcode.SEND, [mr.sge()]))
        client.transport.write(b"x")
        for side in (client, server):
            assert isinstance(await side.until_lost(), OSError)
    again, _ = await net.pair(server=Echo)
    again.transport.write(b"still here")
    assert await again.until_received(10) == b"still here"
    assert cq not in engine.cqs
