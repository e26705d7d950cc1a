"""Two sides whose rings differ: each may send what the other's slots hold, and no more."""

import asyncio

import pytest
from harness import HOST, OFFERABLE, HalfOpen, Net, Recorder
from pattern import Pattern

import rdmanet

GEOMETRIES = [(512, 1), (512, 3), (4096, 2), (65536, 1), (65536, 104)]
SOME = [each if each == (512, 3) else pytest.param(each, marks=pytest.mark.long) for each in GEOMETRIES]


async def pair(net: Net, ours: tuple[int, int], theirs: tuple[int, int], factory=Recorder):
    """A connection of (slot_bytes, data_slots) here and there."""
    _, port = await net.serve(factory, slot_bytes=theirs[0], data_slots=theirs[1])
    client = await net.connect(port, factory, slot_bytes=ours[0], data_slots=ours[1])
    (server,) = await net.accepted_beside([client])
    return client, server


@pytest.mark.parametrize("theirs", GEOMETRIES, ids=str)
@pytest.mark.parametrize("ours", SOME, ids=str)
async def test_bytes_arrive_both_ways_at_once(net: Net, ours, theirs):
    client, server = await pair(net, ours, theirs, HalfOpen)
    size = 200_000
    for side in (client, server):
        side.transport.write(Pattern().take(size))
        side.transport.write_eof()
    for side in (client, server):
        await side.until(lambda side=side: side.eof)
        assert side.received == size
        Pattern().check(side.data)
        side.transport.close()
    for side in (client, server):
        assert await side.until_lost() is None


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
async def test_news_of_regions_fit_the_smaller_slots(net: Net, geometry):
    """A Credit's body is cut to what the peer's slots hold, even while bytes compete for them."""
    client, server = await pair(net, (65536, 16), geometry)
    pd = client.transport.get_extra_info("rdma_pd")
    with pd.alloc_mr(64, OFFERABLE) as mr:
        offers = [client.transport.offer(mr, name="n" * 200) for _ in range(30)]
        for offer in offers:
            await offer.__aenter__()
        client.transport.write(Pattern().take(100_000))
        await server.until(lambda: len(server.offered) == 30)
        await asyncio.gather(*(offer.__aexit__(None, None, None) for offer in offers))
        assert len(server.revoked) == 30
    Pattern().check(await server.until_received(100_000))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_slots": 105}, "data_slots=105 is not between 1 and 104"),
        ({"data_slots": 0}, "data_slots=0"),
        ({"slot_bytes": 511}, "slot_bytes=511 is not between 512 and 16777216"),
        ({"slot_bytes": (1 << 24) + 1}, "slot_bytes=16777217"),
    ],
)
async def test_a_ring_that_cannot_be_is_refused(net: Net, wrong, message):
    _, port = await net.serve()
    with pytest.raises(ValueError, match=message):
        await rdmanet.create_rdma_connection(Recorder, HOST, port, **wrong)
    with pytest.raises(ValueError, match=message):
        await rdmanet.start_rdma_server(Recorder, HOST, 0, **wrong)
    with pytest.raises(TypeError):
        await rdmanet.create_rdma_connection(Recorder, HOST, port, data_slots="16")
