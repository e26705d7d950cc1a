"""Memory on offer beside StreamReader and StreamWriter: what protocols have by region_offered(), awaited."""

import asyncio

import pytest
from harness import HOST, OFFERABLE, Net, Recorder

import rdmanet
from rdmanet._core import AccessFlags
from rdmanet.stream import regions
from rdmanet.stream.bindings import Binding
from rdmanet.wire.offers import ALIVE_MAX
from tests.support.certificates import of_client, of_server
from tests.support.waiting import begin


async def test_one_side_offers_and_the_other_takes(net: Net):
    reader, writer, far_reader, far_writer = await net.stream_pair()
    board = bytearray(b"from the owner" + bytes(50))
    async with far_writer.offer(board, access="read,write", name="board"):
        remote = await reader.next_offer()
        assert (remote.name, remote.length) == ("board", 64)
        assert await remote.read(0, 14) == b"from the owner"
        await remote.write(14, b"from the guest")
        assert board[:28] == b"from the ownerfrom the guest"
        async with writer.offer(b"back"):
            assert await (await far_reader.next_offer()).read() == b"back"
    with pytest.raises(rdmanet.RegionRevokedError):
        await remote.read()
    assert remote.revoked
    writer.write(b"the bytes flow beside it")
    assert await far_reader.readexactly(24) == b"the bytes flow beside it"


async def test_a_registered_region(net: Net):
    reader, _, _, far_writer = await net.stream_pair()
    with far_writer.get_extra_info("rdma_pd").alloc_mr(100, OFFERABLE) as region:
        region[:6] = b"region"
        async with far_writer.offer(region):
            assert await (await reader.next_offer()).read(0, 6) == b"region"


async def test_offers_come_in_order_and_end_with_the_connection(net: Net):
    reader, writer, _, far_writer = await net.stream_pair()
    taken = []
    async with far_writer.offer(b"1"), far_writer.offer(b"2"):
        async for remote in reader.offers():
            taken.append(await remote.read())
            if len(taken) == 2:
                break
    async with far_writer.offer(b"3"):
        async for remote in reader.offers():
            taken.append(await remote.read())
            far_writer.close()
    assert taken == [b"1", b"2", b"3"]
    assert await reader.next_offer() is None
    writer.close()
    await writer.wait_closed()


async def test_who_waits_hears_of_a_loss(net: Net):
    reader, _, _, far_writer = await net.stream_pair()

    async def iterate() -> None:
        async for _ in reader.offers():
            pass

    waiting = await begin(reader.next_offer(), iterate())
    far_writer.transport.abort()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, ConnectionResetError)
    with pytest.raises(ConnectionResetError):
        await reader.next_offer()


async def test_cancelling_loses_no_offer(net: Net):
    """Whether it comes before the offer, or in the same turn of the loop, when the waiter has been woken already."""
    reader, _, _, far_writer = await net.stream_pair()
    (waiting,) = await begin(reader.next_offer())
    waiting.cancel()
    put = reader._offered.put
    iterator = reader.offers()
    for name in ("a", "b"):
        (waiting,) = await begin(anext(iterator))

        def put_and_cancel(remote) -> None:
            put(remote)
            waiting.cancel()  # noqa: B023

        reader._offered.put = put_and_cancel
        async with far_writer.offer(b"x", name=name):
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await anext(iterator)).name == name


async def test_each_offer_goes_to_one_of_those_who_wait(net: Net):
    reader, _, _, far_writer = await net.stream_pair()
    waiting = await begin(*(reader.next_offer() for _ in range(3)))
    async with (
        far_writer.offer(b"x", name="a"),
        far_writer.offer(b"x", name="b"),
        far_writer.offer(b"x", name="c"),
    ):
        assert sorted(remote.name for remote in await asyncio.gather(*waiting)) == ["a", "b", "c"]


async def test_what_is_taken_back_untaken_is_not_given_out(net: Net):
    reader, _, far_reader, far_writer = await net.stream_pair()
    with far_writer.get_extra_info("rdma_pd").alloc_mr(100, OFFERABLE) as region:
        for _ in range(3):
            async with far_writer.offer(region, name="early"):
                async with reader._transport.offer(b"heard"):  # by then the other offer has come, too
                    await far_reader.next_offer()
        async with far_writer.offer(region, name="late"):
            assert (await reader.next_offer()).name == "late"


async def test_what_nobody_takes_is_bounded(net: Net):
    """By the number of offers that may be alive; the owner is told of one too many."""
    reader, writer, _, far_writer = await net.stream_pair()
    offered = reader._offered
    with far_writer.get_extra_info("rdma_pd").alloc_mr(100, OFFERABLE) as region:
        for _ in range(2):
            blocks = [far_writer.offer(region) for _ in range(ALIVE_MAX)]
            for block in blocks:
                await block.__aenter__()
            with pytest.raises(rdmanet.RdmaError, match="regions are on offer"):
                await far_writer.offer(region).__aenter__()
            await reader.next_offer()
            assert len(offered._untaken) < ALIVE_MAX
            await asyncio.gather(*(block.__aexit__(None, None, None) for block in blocks))
            assert not offered._untaken
        async with far_writer.offer(region):
            writer.transport.abort()
            assert await reader.next_offer() is None
    assert not offered._untaken


async def test_offers_go_on_after_the_end_of_file(net: Net):
    reader, writer, _, far_writer = await net.stream_pair()
    far_writer.write_eof()
    assert await reader.read() == b""
    async with far_writer.offer(b"after all"):
        assert await (await reader.next_offer()).read() == b"after all"
    writer.close()


async def test_a_protocol_offers_to_a_stream(net: Net):
    """And the other way round."""
    taken = net.loop.create_future()

    async def connected(reader, writer) -> None:
        async with writer.offer(b"of the stream"):
            taken.set_result(await (await reader.next_offer()).read())
            await reader.read()
        writer.close()

    _, port = await net.serve_streams(connected)
    client = await net.connect(port, Recorder)
    async with client.transport.offer(b"of the protocol"):
        assert await taken == b"of the protocol"
        await client.until(lambda: client.offered)
        assert await client.offered[0].read() == b"of the stream"
    client.transport.write_eof()
    await client.until_lost()


@pytest.mark.embedded_only("the switched loop finds servers of loopback by their names")
def test_streams_of_asyncio_itself():
    """Those of asyncio.open_connection() and start_server() on the switched loop have next_offer(), too."""

    async def connected(reader, writer) -> None:
        async with writer.transport.offer(b"switched"):
            await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, HOST, 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        assert await (await reader.next_offer()).read() == b"switched"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    rdmanet.run(main())


@pytest.mark.parametrize("late", [False, True])
async def test_an_encrypted_stream_refuses(net: Net, late):
    accepted = net.loop.create_future()
    tls = {} if late else {"ssl": of_client(), "server_hostname": "localhost"}
    _, port = await net.serve_streams(
        lambda r, w: accepted.set_result((r, w)), **({} if late else {"ssl": of_server()})
    )
    reader, writer = await net.open(port, **tls)
    far_reader, far_writer = await accepted
    net.writers.append(far_writer)
    if late:
        await asyncio.gather(
            writer.start_tls(of_client(), server_hostname="localhost"), far_writer.start_tls(of_server())
        )
    for side_reader, side_writer in ((reader, writer), (far_reader, far_writer)):
        with pytest.raises(RuntimeError, match=r"offer\(\): the stream is encrypted"):
            side_writer.offer(b"in the clear")
        with pytest.raises(RuntimeError, match=r"next_offer\(\): the stream is encrypted"):
            await side_reader.next_offer()


# ---- memory that a server registers once


@pytest.mark.parametrize(
    "host", [HOST, pytest.param(None, marks=pytest.mark.embedded_only("its library has one device"))]
)
async def test_a_server_registers_once_and_before_its_clients(net: Net, host):
    """Also if it listens on all addresses."""
    table = rdmanet.alloc(1000)

    async def share(reader, writer) -> None:
        async with writer.offer(registered, access="read,write"):
            await reader.read()
        writer.close()

    server = await rdmanet.start_rdma_stream_server(share, host, 0)
    net.servers.append(server)
    [port] = [
        number
        for address, number, *_ in (socket.getsockname() for socket in server.sockets)
        if (":" in address) == (":" in HOST)  # each family has a port of its own
    ]
    with server.register(table) as registered:
        regions = dict(registered._regions)
        assert registered.length == 1000 and len(regions) == 1
        for number in range(3):
            memoryview(table)[0] = number
            reader, writer = await net.open(port)
            remote = await reader.next_offer()
            assert await remote.read(0, 2) == bytes([number, number])
            await remote.write(1, bytes([number + 1]))
            with pytest.raises(OSError, match="still offered to a peer"):
                registered.close()
            writer.write_eof()
            await reader.read()
        assert registered._regions == regions
        server.close()
        await server.wait_closed()
    registered.close()
    for use in (lambda: registered.length, lambda: registered.region_in(regions.popitem()[0])):
        with pytest.raises(ValueError, match="closed"):
            use()


async def test_registered_memory_that_may_only_be_read(net: Net):
    reader, _, _, far_writer = await net.stream_pair()
    with net.servers[0].register(b"constant") as registered:
        async with far_writer.offer(registered):
            assert await (await reader.next_offer()).read() == b"constant"
        with pytest.raises(ValueError, match="without AccessFlags.LOCAL_WRITE"):
            await far_writer.offer(registered, access="write").__aenter__()


async def test_the_owner_sees_who_has_its_memory(net: Net):
    reader, writer, _, far_writer = await net.stream_pair()
    with net.servers[0].register(bytearray(100)) as registered:
        assert registered.offers() == far_writer.get_extra_info("rdma_offers") == []
        assert "on offer" not in repr(registered)
        offer = far_writer.offer(registered, access="read,write")
        region = await offer.__aenter__()
        await (await reader.next_offer()).write(0, b"x")
        [held] = registered.offers()
        assert held.peer == writer.get_extra_info("sockname")
        assert (held.key, held.length, held.is_revoked) == (region.rkey, 100, False)
        assert held.access == AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
        assert "on offer to 1>" in repr(registered)
        async with far_writer.offer(bytearray(7)):
            kept = far_writer.get_extra_info("rdma_offers")
            assert sorted(each.length for each in kept) == [7, 100]
            assert registered.offers() == [held]
            assert (
                "\noffers: the peer has 2 of our regions, 107 bytes in all" in far_writer.transport.explain()
            )
        [leaving] = await begin(offer.__aexit__(None, None, None))
        assert all(each.is_revoked for each in registered.offers())
        await leaving
        assert registered.offers() == far_writer.get_extra_info("rdma_offers") == []
        assert "offers: " not in far_writer.transport.explain()


async def test_what_a_server_cannot_register(net: Net):
    server, _ = await net.serve_streams(lambda r, w: None)
    with pytest.raises(TypeError, match="bytes-like"):
        server.register(7)
    with pytest.raises(BufferError, match="contiguous"):
        server.register(memoryview(bytearray(10))[::2])
    server.close()
    with pytest.raises(RuntimeError, match="closed"):
        server.register(bytearray(10))


@pytest.mark.not_on_iwarp("has no memory windows")
@pytest.mark.parametrize("how", ["lost", "released"])
async def test_a_connection_that_ends_when_the_key_is_made(
    net: Net, monkeypatch: pytest.MonkeyPatch, how: str
):
    """The key is there, but whoever waits for it has not run yet."""
    _, _, _, far_writer = await net.stream_pair()

    class Ending(Binding):
        def begin(self, patience_s: float) -> None:
            transport = far_writer.transport
            end = transport._end_now if how == "released" else transport._life.regions.lost
            self.granted.add_done_callback(lambda _: end())
            super().begin(patience_s)

    monkeypatch.setattr(regions, "Binding", Ending)
    with pytest.raises(ConnectionResetError):
        async with far_writer.offer(bytearray(100)):
            raise AssertionError("it was offered")
