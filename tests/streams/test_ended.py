"""What is left of a connection that has ended: nothing but what the program keeps."""

import asyncio
import gc
import weakref

import pytest
from harness import HOST, Net

import rdmanet
from tests.support.waiting import until_seen


class Keeper(asyncio.Protocol):
    """Keeps its transport, as most protocols do."""

    ended: "list[weakref.ref[Keeper]] | None" = None

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        if self.ended is not None:
            self.ended.append(weakref.ref(self))


async def test_a_protocol_that_keeps_its_transport_goes_without_the_collector(net: Net):
    class Watched(Keeper):
        ended = []  # noqa: RUF012

    _, port = await net.serve(Watched)
    gc.collect()
    gc.disable()
    try:
        transport, _ = await rdmanet.create_rdma_connection(Watched, HOST, port)
        transport.close()
        del transport, _
        await until_seen(
            lambda: len(Watched.ended) == 2 and not any(protocol() for protocol in Watched.ended)
        )
    finally:
        gc.enable()


async def test_a_connection_that_ends_at_once_still_returns_its_protocol(net: Net):
    class Aborting(Keeper):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.abort()

    _, port = await net.serve()
    transport, protocol = await rdmanet.create_rdma_connection(Aborting, HOST, port)
    assert type(protocol) is Aborting
    assert protocol.transport is transport and transport.get_protocol() is protocol


async def test_get_protocol_of_an_ended_transport(net: Net):
    class Slotted(asyncio.Protocol):
        """Nothing can refer to it weakly."""

        __slots__ = ()

    _, port = await net.serve()
    for kind in (Keeper, Slotted):
        transport, protocol = await rdmanet.create_rdma_connection(kind, HOST, port)
        transport.abort()
        life = transport._life
        await until_seen(lambda life=life: not life.unclosed)
        assert transport.get_protocol() is protocol
        del protocol
        if kind is Keeper:
            gc.collect()
        assert (transport.get_protocol() is None) == (kind is Keeper)


async def test_memory_of_a_connection_that_never_had_any_and_is_over(net: Net):
    """What keeps track of offers is made with the first. After the end it is as if it had been there."""
    client, server = await net.pair()
    assert client.transport.get_extra_info("rdma_offers") == []
    assert client.transport._life.known_regions is None
    client.transport.abort()
    for protocol in (client, server):
        await protocol.until(lambda protocol=protocol: protocol.lost)
        assert protocol.transport.get_extra_info("rdma_offers") == []
        with pytest.raises(ConnectionResetError, match="the connection is lost"):
            async with protocol.transport.offer(bytearray(100)):
                pass
        assert protocol.transport._regions.peer == protocol.transport.get_extra_info("peername")


async def test_what_a_connection_takes_until_it_is_used(net: Net):
    """Objects that the collector knows: what most connections never use is made with its first use."""
    _, port = await net.serve(Keeper)
    kept = [await rdmanet.create_rdma_connection(Keeper, HOST, port) for _ in range(3)]
    gc.collect()
    before, count = len(gc.get_objects()), 20
    kept += [await rdmanet.create_rdma_connection(Keeper, HOST, port) for _ in range(count)]
    gc.collect()
    assert (len(gc.get_objects()) - before) / count < 122  # of both sides; one does not see which
    for transport, _ in kept:
        transport.abort()


async def test_nobody_asks_the_device_about_a_queue_pair_that_is_gone(net: Net):
    """What was received waits for its program, however long that does not read. The queue pair is gone at once."""
    peer = net.spawn("unread.py")
    assert await peer.expect("explained") == ["True"]
    assert await peer.expect("read") == ["all"]
    assert await peer.expect("lost") == ["None"]
