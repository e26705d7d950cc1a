"""What is left of a connection that has ended: nothing but what the program keeps."""

import asyncio
import gc
import weakref

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
