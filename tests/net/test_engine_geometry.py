"""Two sides whose rings differ: each may send what the other's slots hold, and no more."""

import asyncio
import dataclasses

import pytest
from harness import HOST, HalfOpen, Net, Recorder
from pattern import Pattern

import rdmanet
from rdmanet import transport
from rdmanet.transport import StreamConfig

GEOMETRIES = [(512, 1), (512, 3), (4096, 2), (65536, 1), (65536, 104)]


@pytest.fixture
def ring(monkeypatch):
    """Build connections, from now on, with rings of `data_slots` slots of `slot_bytes`."""

    def use(slot_bytes: int, data_slots: int) -> None:
        def config(**given):
            return dataclasses.replace(StreamConfig(**given), slot_bytes=slot_bytes, data_slots=data_slots)

        monkeypatch.setattr(transport, "StreamConfig", config)

    return use


async def pair(net: Net, ring, ours: tuple[int, int], theirs: tuple[int, int], factory=Recorder):
    ring(*theirs)
    _, port = await net.serve(factory)
    ring(*ours)
    client = await net.connect(port, factory)
    (server,) = await net.accepted_beside([client])
    return client, server


@pytest.mark.parametrize("theirs", GEOMETRIES, ids=str)
@pytest.mark.parametrize("ours", GEOMETRIES, ids=str)
async def test_bytes_arrive_both_ways_at_once(net: Net, ring, ours, theirs):
    client, server = await pair(net, ring, ours, theirs, HalfOpen)
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
async def test_news_of_regions_fit_the_smaller_slots(net: Net, ring, geometry):
    """A Credit's body is cut to what the peer's slots hold, even while bytes compete for them."""
    client, server = await pair(net, ring, (65536, 16), geometry)
    pd = client.transport.get_extra_info("rdma_pd")
    with pd.alloc_mr(64, 4) as mr:  # IBV_ACCESS_REMOTE_READ
        offers = [client.transport.offer(mr, name="n" * 200) for _ in range(30)]
        for offer in offers:
            await offer.__aenter__()
        client.transport.write(bytes(100_000))
        await server.until(lambda: len(server.offered) == 30)
        await asyncio.gather(*(offer.__aexit__(None, None, None) for offer in offers))
        assert len(server.revoked) == 30
    assert len(await server.until_received(100_000)) == 100_000


async def test_a_ring_that_cannot_be_is_refused(net: Net, ring):
    _, port = await net.serve()
    ring(65536, 105)
    with pytest.raises(ValueError, match="105 slots"):
        await rdmanet.create_rdma_connection(Recorder, HOST, port)
