"""When the data engine looks at its queue: busy while traffic flows, asleep when there is none.

Counted, not timed: the engine counts its passes and its sleeps.
"""

import asyncio
import math
import select

import pytest
from harness import Echo, Net, Recorder
from pattern import Pattern

from rdmanet.base.accounts import loop_notes
from tests.support.waiting import loop_turns, until_seen


def engine(net: Net):
    """The data engine of the test's loop: there is one per device, however many connections."""
    (loop_context,) = net.loop._rdmanet_loop_contexts.values()
    (engine,) = loop_context.engines.values()
    return engine


async def volley(client, count: int) -> None:
    """So many questions to an Echo, one after the other; each is answered with itself."""
    for _ in range(count):
        before = client.received
        question = b"%064d" % before
        client.transport.write(question)
        await client.until_received(before + 64)
        assert client.data[before:] == question


async def bulk(client) -> None:
    before = client.received
    pattern = Pattern(before)
    sent = b"".join(pattern.take(1_000_000) for _ in range(3))
    client.transport.write(sent)
    await client.until_received(before + len(sent))
    assert client.data[before:] == sent


@pytest.mark.parametrize("busy_poll", [None, 0, 0.001])
async def test_every_way_of_polling_carries_data(net: Net, busy_poll):
    client, _ = await net.pair(server=Echo, busy_poll=busy_poll)
    await volley(client, 100)
    await bulk(client)


@pytest.mark.parametrize("busy_poll", [None, 0, pytest.param(0.001, marks=pytest.mark.long)])
async def test_every_way_of_polling_with_another_process(net: Net, busy_poll):
    client = await net.connect(await net.spawn("echo.py").port(), busy_poll=busy_poll)
    await volley(client, 100)
    await bulk(client)


async def test_a_loop_that_each_message_wakes_is_named(net: Net):
    client = await net.connect(await net.spawn("echo.py").port(), busy_poll=0)
    await volley(client, 300)
    [note] = loop_notes(engine(net).stats())
    assert "wake-ups for" in note and "it sleeps before nearly each" in note


@pytest.mark.parametrize("wrong", [-1, "soon"])
async def test_a_wrong_busy_poll_is_refused(net: Net, wrong):
    _, port = await net.serve(Echo)
    with pytest.raises((ValueError, TypeError)):
        await net.connect(port, busy_poll=wrong)


async def test_without_polling_every_pass_has_a_cause(net: Net):
    """busy_poll=0 never looks twice for the same wake-up without finding anything."""
    peer = net.spawn("echo.py")
    client = await net.connect(await peer.port(), busy_poll=0)
    await volley(client, 10)
    before = engine(net).passes
    await volley(client, 200)
    # A write asks for a pass and an answer for another, with one more to flush or to arm each.
    assert engine(net).passes - before <= 200 * 4 + 10


@pytest.mark.long
async def test_200_idle_connections_are_not_looked_at(net: Net):
    """Once the window has passed the engine sleeps, and stays asleep for as long as nothing comes."""
    _, port = await net.serve(Echo)
    clients = await asyncio.gather(*(net.connect(port) for _ in range(200)))
    for client in clients:
        client.transport.write(b"x" * 100)
    for client in clients:
        await client.until_received(100)
    # Passes follow each other through call_soon, so they end when the loop is seen to be idle.
    idle = engine(net)
    while True:
        passes = idle.passes
        await asyncio.sleep(0.01)
        if idle.passes == passes:
            break
    sleeps = idle.sleeps
    await asyncio.sleep(0.3)  # for passes that must not come
    assert (idle.passes, idle.sleeps) == (passes, sleeps)
    await volley(clients[100], 3)
    assert idle.passes > passes


def another_queue(engine):
    """Connections made from here on have a completion queue of their own."""
    full = engine.cqs[-1]
    while engine.reserve(1) is full:
        pass
    return engine.cqs[-1]


async def idle(net: Net, *, queues: int, busy_poll: float | None):
    """An engine with two connections of one completion queue, which is all that is busy."""
    client, _ = await net.pair(server=Echo, busy_poll=busy_poll)
    sleepy = engine(net)
    for _ in range(queues):
        another_queue(sleepy)
    return client, sleepy


async def test_a_wake_up_costs_the_same_with_idle_queues(net: Net):
    """A completion queue serves some dozens of connections; one that has only idle connections is not polled."""
    counted = []
    client, sleepy = await idle(net, queues=0, busy_poll=0)
    for _ in range(2):
        await volley(client, 20)
        passes, polls = sleepy.passes, sleepy.polls
        await volley(client, 50)
        counted.append((sleepy.polls - polls) / (sleepy.passes - passes))
        for _ in range(10):
            another_queue(sleepy)
    assert counted[1] <= counted[0] * 1.5 + 1


@pytest.mark.long  # thousands of round trips, of 10 ms each on soft-RoCE while other tests run
@pytest.mark.limit(
    180
)  # on a busy machine each costs the time slices of others, because polling yields to them
async def test_a_watching_engine_leaves_idle_queues_alone(net: Net):
    """The engine need not fall asleep for that. All its busy connections are on one queue."""
    client, watching = await idle(net, queues=10, busy_poll=math.inf)
    assert watching.stats()["queues_awake"] > 1
    await volley(client, 3000)
    assert watching.stats()["queues"] == 11
    assert (
        watching.stats()["queues_awake"] <= 1
    )  # none, if it was so slow that the engine fell asleep all the same


@pytest.mark.long  # likewise
@pytest.mark.limit(90)  # 6,000 round trips, asleep between them
@pytest.mark.parametrize("busy_poll", [None, 0, 1.0])
async def test_a_queue_that_was_left_alone_is_heard(net: Net, busy_poll):
    client, sleepy = await idle(net, queues=1, busy_poll=busy_poll)
    other, far = await net.pair(server=Echo, busy_poll=busy_poll)
    assert other.transport.qp.send_cq is not client.transport.qp.send_cq
    for _ in range(3):
        await volley(client, 2000)
        # It isn't this loop's own write that wakes its queue: the far side speaks first.
        far.transport.write(b"first")
        await other.until_received(other.received + 5)
        await volley(other, 10)
    other.transport.close()
    assert await far.until_lost() is None
    await volley(client, 10)


async def test_queues_grow(net: Net):
    """So that many connections have few of them."""
    _, growing = await idle(net, queues=0, busy_poll=None)
    most = min(growing.pd.context.query_device().max_cqe, 65536)
    for _ in range(6):
        last = growing.cqs[-1].cqe
        assert another_queue(growing).cqe >= min(2 * last, most)


async def test_two_descriptors_are_registered_however_many_connections(net: Net):
    """One is the device's, for completions. On asyncio's loop, whose selector can be asked."""
    if not isinstance(net.loop, asyncio.SelectorEventLoop):
        return
    before = len(net.loop._selector.get_map())
    _, port = await net.serve(Echo)
    assert len(net.loop._selector.get_map()) <= before + 2
    for _ in range(10):
        await volley(await net.connect(port), 1)
    assert len(net.loop._selector.get_map()) == before + 2


async def test_tasks_run_between_messages(net: Net):
    """A connection that never falls silent leaves the loop to the others."""

    class Volley(Echo):
        pass

    client, server = await net.pair(Volley, Echo)
    client.transport.write(b"x" * 64)
    await client.until_received(64 * 100)
    turns = 0

    async def other() -> None:
        nonlocal turns
        for _ in range(100):
            await loop_turns()
            turns += 1

    await other()
    assert turns == 100
    assert not client.lost


@pytest.mark.long
async def test_many_that_wrote_while_we_did_not_look(net: Net):
    """A queue has more completions than several polls take when it is armed, and none of them raises an event."""
    count = 440  # the third queue gets some 250
    _, port = await net.serve(Recorder, slot_bytes=512, busy_poll=0)
    # By TCP: where memory is shared the device would call us a second later.
    peer = net.spawn("clients.py", port, count, env={"RDMANET_SOFT_TRANSPORT": "stream"})
    await peer.expect("connected")
    for number in 1, 2:  # at the second all of them have been made
        peer.say("write 7")
        assert select.select([peer.process.stdout], [], [], 20)[0]  # the loop stands still meanwhile
        await peer.expect("written")
        await net.until(lambda: len(net.recorders) == count)
        for recorder in net.recorders:
            assert await recorder.until_received(7 * number)


async def test_a_pass_that_finds_only_what_we_have_sent_looks_on(net: Net):
    """The answer comes a moment later; on another way through the loop it would have to wait."""
    client = await net.connect(await net.spawn("bulk.py", "0", "hold").port(), busy_poll=10)
    client.transport.write(b"first")
    await loop_turns(20)  # the connection has begun: no frames of its own are in flight
    watching = engine(net)

    async def polls_of_a_pass() -> int:
        passes, polls = watching.passes, watching.polls
        client.transport.write(b"more")
        await until_seen(lambda: watching.passes > passes)
        return (watching.polls - polls) // (watching.passes - passes)

    # It looks on for some microseconds, which may be over at once if this process is held up just then.
    assert any([await polls_of_a_pass() > 2 for _ in range(5)])
