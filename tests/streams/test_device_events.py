"""What a device tells by itself: that it fails, or a queue pair, a queue or a port, and what becomes of streams.

The fault injection makes it happen. Both ends of a connection are in this process, and so on the device that fails.
"""

import asyncio
import errno
import gc
import logging
import os
import threading
from types import SimpleNamespace

import pytest
from harness import HOST, Echo, Net, Recorder

from rdmanet.cm import CMEventType
from rdmanet.errors import CompletionError, DeviceLostError
from rdmanet.verbs import AsyncEvent, EventType, Library, WCStatus, live_objects
from rdmanet.verbs.device_events import EventFeed
from rdmanet.verbs_async import DeviceEvents
from tests.support.bare_peer import BarePeer
from tests.support.waiting import begin, until_seen

BY_TCP = os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream"

pytestmark = pytest.mark.embedded_only("only the embedded device can be made to fail")


def device_of(protocol):
    """The context that a connection is on."""
    return protocol.transport.get_extra_info("rdma_pd").context


def is_lost_by(error: BaseException | None, event: str) -> None:
    assert isinstance(error, DeviceLostError), error
    assert isinstance(error, ConnectionError) and error.errno == errno.ENODEV
    assert (error.device, error.event) == ("soft0", event)
    assert "soft0" in str(error) and event in str(error)


def logged(caplog) -> list[str]:
    """The records that are ours: on a busy machine asyncio logs its own slowness."""
    return [record.getMessage() for record in caplog.records if record.name == "rdmanet"]


async def echoes(net: Net, port: int) -> None:
    client = await net.connect(port)
    client.transport.write(b"here again")
    assert await client.until_received(10) == b"here again"


async def test_the_device_fails(net, caplog):
    """All connections are lost at once, with its name; new ones open it anew, through the same listener."""
    _, port = await net.serve(Echo)
    clients = [await net.connect(port) for _ in range(3)]
    await net.accepted_beside(clients)
    old = device_of(clients[0])
    with caplog.at_level(logging.ERROR, "rdmanet"):
        old.set_faults("fatal=now")
        for protocol in net.recorders:
            is_lost_by(await protocol.until_lost(), "DEVICE_FATAL")
            assert not protocol.eof
    assert logged(caplog) == ["device soft0 is lost: DEVICE_FATAL; connections: 6"]
    await echoes(net, port)
    assert device_of(net.recorders[-1]) is not old
    for _ in range(3):
        device_of(net.recorders[-1]).set_faults("fatal=now")
        is_lost_by(await net.recorders[-1].until_lost(), "DEVICE_FATAL")
        await echoes(net, port)


async def test_what_had_come_is_delivered_first(net):
    """Even if reading was paused; and no end of file follows."""
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(b"x" * 200_000)
    await until_seen(lambda: server.transport.get_extra_info("rdma_stats")["bytes_received"] == 200_000)
    device_of(server).set_faults("fatal=now")
    is_lost_by(await server.until_lost(), "DEVICE_FATAL")
    assert (server.received, server.eof) == (200_000, False)


async def test_while_connecting(net):
    """A connection attempt that waits for an answer fails at once, not when its time is over."""
    silent = BarePeer(Library.embedded())
    connecting = asyncio.ensure_future(net.connect(silent.listen(HOST), connect_timeout=None))
    await silent.request()
    silent.id.context.set_faults("fatal=now")
    with pytest.raises(DeviceLostError) as caught:
        await connecting
    is_lost_by(caught.value, "DEVICE_FATAL")
    silent.close()


@pytest.mark.parametrize(
    ("status", "told"), [("REM_INV_REQ_ERR", "QP_REQ_ERR"), ("REM_ACCESS_ERR", "QP_ACCESS_ERR")]
)
async def test_a_queue_pair_fails(net, status, told):
    """The requester has its completion; the responder would know only that it was flushed. The others go on."""
    _, port = await net.serve(Echo)
    bystander = await net.connect(port)
    client, server = await net.pair()
    device_of(client).set_faults(f"fail=send:1:{status}")
    client.transport.write(b"x")
    error = await server.until_lost()
    assert isinstance(error, ConnectionResetError)
    assert str(error).startswith(f"[Errno {errno.ECONNRESET}] {told} for queue pair 0x")
    # The answer and the disconnection that follows it come by two ways; either may be heard of first.
    error = await client.until_lost()
    assert isinstance(error, CompletionError) or "disconnected by the peer" in str(error), error
    if isinstance(error, CompletionError):
        assert error.status == WCStatus[status]
    bystander.transport.write(b"still")
    assert await bystander.until_received(5) == b"still"


async def test_news_of_what_is_gone(net):
    """Another thread may have read it before the connection ended, and told us."""
    client, server = await net.pair()
    loop_context, qp = client.transport._life.loop_context, client.transport.qp
    (feed,) = loop_context._feeds.values()
    client.transport.abort()
    await client.until_lost()
    await server.until_lost()
    await until_seen(lambda: qp.closed)
    for event in (
        AsyncEvent(EventType.QP_FATAL, qp=qp),
        AsyncEvent(EventType.CQ_ERR, cq=qp.send_cq),
        AsyncEvent(EventType.QP_FATAL),
        AsyncEvent(EventType.CQ_ERR),
        AsyncEvent(EventType.COMM_EST),
    ):
        feed(event)
    (engine,) = loop_context.engines.values()
    loop_context.hear_device(engine)
    assert list(loop_context.engines.values()) == [engine]


async def test_a_completion_queue_fails(net):
    """All connections on it are lost; later ones get another queue."""
    _, port = await net.serve(Echo)
    client = await net.connect(port)
    await net.accepted_beside([client])
    device_of(client).set_faults("overrun=1")
    client.transport.write(b"x")
    for protocol in net.recorders:
        error = str(await protocol.until_lost())
        assert "CQ_ERR" in error or "QP_FATAL" in error, error  # the device says both
    await echoes(net, port)
    assert device_of(net.recorders[-1]) is device_of(client)


class Listener(Recorder):
    """Implements the callback for events of the port."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[EventType] = []

    def port_event(self, event) -> None:
        assert event.port_num == 1
        self.told.append(event.event_type)
        self.note(None)


async def test_a_port_goes_down_for_a_while(net, caplog):
    """Nothing is lost, because the device tries again. Protocols that ask for it are told, and it is logged."""
    client, server = await net.pair(Listener, Listener)
    with caplog.at_level(logging.INFO, "rdmanet"):
        device_of(client).set_faults("link=down:0ms:20ms")
        client.transport.write(b"through it")
        for protocol in (client, server):
            await protocol.until(lambda protocol=protocol: len(protocol.told) == 2 or protocol.lost)
    if BY_TCP and (client.lost or server.lost):  # a first frame was under way: see docs/testing.md
        for protocol in (client, server):
            assert isinstance(await protocol.until_lost(), ConnectionError)
        return
    assert client.told == server.told == [EventType.PORT_ERR, EventType.PORT_ACTIVE]
    assert await server.until_received(10) == b"through it"
    assert logged(caplog) == [
        "port 1 of soft0: PORT_ERR",
        "port 1 of soft0: PORT_ACTIVE",
    ]


async def test_a_port_event_that_raises(net):
    """As an exception in any other callback: it is reported, and ends the connection."""

    class Clumsy(Recorder):
        def port_event(self, event) -> None:
            raise RuntimeError("clumsy")

    client, server = await net.pair(Clumsy)
    device_of(client).set_faults("link=down:0ms:1ms")
    assert isinstance(await client.until_lost(), RuntimeError)
    assert isinstance(await server.until_lost(), ConnectionResetError)
    assert str(net.complaint()["exception"]) == "clumsy"


async def test_a_device_that_is_removed(net, monkeypatch):
    """No device that we test on can be, so the connection manager's event is made up."""
    client, server = await net.pair()
    loop_context, lost = client.transport._life.loop_context, OSError(errno.ENODEV, "the device was removed")
    events = [
        SimpleNamespace(
            type=CMEventType.DEVICE_REMOVAL,
            id=client.transport._life.endpoint.id,
            listen_id=None,
            error=lambda: lost,
        )
    ]
    with monkeypatch.context() as patch:
        patch.setattr(loop_context, "cm", SimpleNamespace(get_event=lambda: events.pop() if events else None))
        loop_context._cm_events()
    for protocol in (client, server):
        is_lost_by(await protocol.until_lost(), "DEVICE_REMOVAL")


async def test_a_device_that_tells_no_more(net, monkeypatch):
    """Like a kernel's device that was removed: reading its events fails with EIO, and its descriptor stays readable."""
    client, server = await net.pair()
    loop_context = client.transport._life.loop_context
    (engine,) = loop_context.engines.values()

    def gone():
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(loop_context._feeds[engine], "next", gone)
    loop_context.hear_device(engine)
    for protocol in (client, server):
        error = await protocol.until_lost()
        assert isinstance(error, DeviceLostError) and "ibv_get_async_event" in error.event


async def test_the_program_reads_them_too(net):
    """An iterator of its own takes nothing from the streams, nor they from it, nor another iterator."""
    client, server = await net.pair()
    context = device_of(client)
    with DeviceEvents(context) as one, DeviceEvents(context) as other:
        heard = await begin(anext(one), anext(other))
        context.set_faults("fatal=now")
        for event in await asyncio.gather(*heard):
            assert event.event_type is EventType.DEVICE_FATAL
        for protocol in (client, server):
            is_lost_by(await protocol.until_lost(), "DEVICE_FATAL")


async def test_a_program_that_takes_them(net):
    """A program that reads the context's own queue takes events from others that do, but not from the streams."""
    client, server = await net.pair()
    context = device_of(client)
    context.set_faults("fatal=now")
    assert context.get_async_event().event_type is EventType.DEVICE_FATAL
    for protocol in (client, server):
        is_lost_by(await protocol.until_lost(), "DEVICE_FATAL")


def test_loops_in_several_threads(loop_factory):
    """One context has one queue of events, and all feeds get them: the first reader passes them on."""
    errors: list[BaseException | None] = []
    threads = 4
    ready = threading.Barrier(threads + 1, timeout=60)

    async def live():
        net = Net()
        client, server = await net.pair()
        contexts.append(device_of(client))
        ready.wait()
        errors.extend([await client.until_lost(), await server.until_lost()])
        await net.aclose()

    def run():
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(asyncio.wait_for(live(), 60))

    contexts = []
    others = [threading.Thread(target=run) for _ in range(threads)]
    for thread in others:
        thread.start()
    ready.wait()
    assert all(context is contexts[0] for context in contexts)
    contexts[0].set_faults("fatal=now")
    for thread in others:
        thread.join()
    assert len(errors) == 2 * threads
    for error in errors:
        is_lost_by(error, "DEVICE_FATAL")


def test_who_asks_while_another_tells():
    """Reading waits until the other has told: at no time is an event neither in the queue nor told."""
    with Library.embedded().devices()[0].open() as context:
        told: list[AsyncEvent | None] = []

        def slow(event):
            other.start()
            other.join(0.2)  # in vain, if all is well

        context.add_listener(slow)  # comes before the feed
        feed = EventFeed(context)
        other = threading.Thread(target=lambda: told.append(feed.next()))
        context.set_faults("fatal=now")
        assert context.get_async_event().event_type is EventType.DEVICE_FATAL
        other.join()
        assert [event.event_type for event in told] == [EventType.DEVICE_FATAL]
        feed.close()


def test_nothing_is_left(loop_factory):
    """No descriptor and no object, whether the device has failed or not, whether its engine had connections or not."""

    async def live(fails):
        net = Net()
        client, server = await net.pair()
        if fails:
            device_of(client).set_faults("fatal=now")
            await client.until_lost()
            await server.until_lost()
            await echoes_once()
        await net.aclose()

    async def echoes_once():
        net = Net()
        _, port = await net.serve(Echo)
        await echoes(net, port)
        await net.aclose()

    def run(fails):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(asyncio.wait_for(live(fails), 60))
        gc.collect()
        return len(os.listdir("/proc/self/fd")), live_objects(), Library.embedded().live()

    before = run(False)
    assert run(True) == before
    assert run(True) == before


async def test_memory_of_a_failed_device_goes_with_its_last_connection(net):
    """Not with the loop: a server lives for months."""
    client, server = await net.pair()
    client.transport.write(b"x")
    await server.until_received(1)
    loop_context = client.transport._life.loop_context
    (engine,) = loop_context.engines.values()
    device_of(client).set_faults("fatal=now")
    await client.until_lost()
    await server.until_lost()
    await until_seen(lambda: engine.channel.closed)
    assert not loop_context.engines and not loop_context._lost_engines
