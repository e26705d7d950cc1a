"""Two hundred connections at once, of one server, each with bytes of its own."""

import asyncio

import pytest
from harness import Echo, Net

COUNT = 200


@pytest.mark.not_on_siw("refuses queue pairs beyond some fifty")
async def test_more_connections_than_keep_what_they_send_from(net: Net):
    """Each message has its connection's bytes, though connections take turns with the memory that they send from."""
    _, port = await net.serve(Echo)
    clients = await asyncio.gather(*(net.connect(port, slot_bytes=1024) for _ in range(80)))
    for turn in range(1, 6):
        for number, client in enumerate(clients):
            client.transport.write(bytes([number, turn]) * 32)
        for client in clients:
            await client.until_received(64 * turn)
    for number, client in enumerate(clients):
        assert bytes(await client.until_received(320)) == b"".join(
            bytes([number, turn]) * 32 for turn in range(1, 6)
        )


@pytest.mark.long
@pytest.mark.limit(100)
async def test_200_connections_of_one_process(net: Net):
    _, port = await net.serve(Echo)
    clients = await asyncio.gather(*(net.connect(port) for _ in range(COUNT)))
    for turn in range(1, 4):
        for number, client in enumerate(clients):
            client.transport.write(number.to_bytes(4, "big") * 500)
        for number, client in enumerate(clients):
            assert await client.until_received(2000 * turn) == number.to_bytes(4, "big") * 500 * turn


@pytest.mark.long
@pytest.mark.limit(100)
async def test_200_connections_of_another_process(net: Net):
    """One CQ and one channel serve them all on either side."""
    server, port = await net.serve(Echo)
    peer = net.spawn("clients.py", port, COUNT)
    assert await peer.expect("connected") == [str(COUNT)]
    for length in (64, 4000, 40_000):
        peer.say(f"round {length}")
        assert await peer.expect("echoed") == [str(COUNT)]
    await peer.finish()
    for recorder in net.recorders:
        assert await recorder.until_lost() is None


@pytest.mark.long
@pytest.mark.limit(100)
async def test_200_connections_closed_in_odd_order(net: Net):
    """Every other connection goes away while the rest are in use."""
    _, port = await net.serve(Echo)
    clients = await asyncio.gather(*(net.connect(port) for _ in range(COUNT)))
    for number, client in enumerate(clients):
        client.transport.write(b"x" * 3000)
        if number % 4 == 1:
            client.transport.abort()
        elif number % 4 == 3:
            client.transport.close()
    for number, client in enumerate(clients):
        if number % 2:
            assert await client.until_lost() is None
        else:
            assert await client.until_received(3000) == b"x" * 3000
