"""When the driver looks at its queue: busy while traffic flows, asleep when there is none.

Counted, not timed: the engine counts its passes and its sleeps.
"""

import asyncio

import pytest
from harness import Echo, Net


def engine(net: Net):
    """The data engine of the test's loop: there is one a device, however many connections."""
    (driver,) = net.loop._rdmanet_drivers.values()
    (engine,) = driver.engines.values()
    return engine


async def volley(client, count: int) -> None:
    for _ in range(count):
        client.transport.write(b"x" * 64)
        await client.until_received(client.received + 64)


@pytest.mark.parametrize("busy_poll", [None, 0, 0.001])
async def test_every_way_of_polling_carries_data(net: Net, busy_poll):
    client, _ = await net.pair(server=Echo, busy_poll=busy_poll)
    await volley(client, 300)
    client.transport.write(b"y" * 3_000_000)
    await client.until_received(client.received + 3_000_000)


@pytest.mark.parametrize("busy_poll", [None, 0, pytest.param(0.001, marks=pytest.mark.long)])
async def test_every_way_of_polling_with_another_process(net: Net, busy_poll):
    client = await net.connect(await net.spawn("echo.py").port(), busy_poll=busy_poll)
    await volley(client, 300)
    client.transport.write(b"y" * 3_000_000)
    await client.until_received(client.received + 3_000_000)


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
    await asyncio.sleep(0.3)
    assert (idle.passes, idle.sleeps) == (passes, sleeps)
    await volley(clients[100], 3)
    assert idle.passes > passes


async def test_one_descriptor_is_registered_however_many_connections(net: Net):
    """On asyncio's loop, whose selector can be asked."""
    if not isinstance(net.loop, asyncio.SelectorEventLoop):
        return
    before = len(net.loop._selector.get_map())
    _, port = await net.serve(Echo)
    assert len(net.loop._selector.get_map()) == before + 1
    for _ in range(10):
        await volley(await net.connect(port), 1)
    assert len(net.loop._selector.get_map()) == before + 1


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
            await asyncio.sleep(0)
            turns += 1

    await other()
    assert turns == 100
    assert not client.lost
