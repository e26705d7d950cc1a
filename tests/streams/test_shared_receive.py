"""Servers whose connections receive from one shared receive queue: what each has for sure, and what they share.

All but the over-sender's tests run without retries of sends that find no receive: the promises are kept.
"""

import asyncio
import contextlib
import types

import pytest
from harness import HOST, OFFERABLE, Echo, HalfOpen, Net, Recorder
from pattern import Pattern

import rdmanet
from rdmanet import credit
from rdmanet._core import STREAM_SHARED_OWN
from rdmanet.errors import ProtocolError
from rdmanet.stream import establish
from rdmanet.stream.options import SHARED_SLOTS
from tests.support.bare_peer import DATA, BarePeer, frame
from tests.support.waiting import until_seen

EACH = STREAM_SHARED_OWN + credit.CONTROL_ALLOWANCE  # receives that are a connection's own


@pytest.fixture(autouse=True)
def no_second_try(request, monkeypatch):
    if "over_sender" not in request.fixturenames:
        monkeypatch.setattr(establish, "SHARED_RNR_RETRY", 0)


class Checking(HalfOpen):
    """Asks at each callback whether there is a receive for everything that may come."""

    def note(self, event):
        super().note(event)
        if event and self.transport is not None and not self.lost:
            stands = self.transport.get_extra_info("rdma_shared_receive")
            if stands is not None and stands["slots_posted"] < stands["slots_needed"]:
                self.violations.append(f"{event}: {stands}")


class CheckingEcho(Checking, Echo):
    pass


def shared(protocol) -> dict[str, int]:
    return protocol.transport.get_extra_info("rdma_shared_receive")


def stats_of(protocol) -> dict[str, int]:
    return protocol.transport.get_extra_info("rdma_stats")


def holds_all_it_has(stats: dict[str, int]) -> bool:
    return stats["slots_held"] >= STREAM_SHARED_OWN + stats["slots_borrowed"]


async def whole_again(engine, connections: int = 0) -> None:
    """Every slot is posted again, and what was lent is back."""

    def rings() -> list[dict[str, int]]:
        return [ring.stats() for ring in engine.shared_rings if ring is not None]

    await until_seen(
        lambda: (
            sum(stats["connections"] for stats in rings()) == connections
            and all(stats["slots_posted"] == stats["slots"] for stats in rings())
        )
    )
    if connections == 0:
        assert all(stats["common_slots_left"] == stats["common_slots"] for stats in rings()), rings()


async def clients_of(net: Net, count: int, factory=CheckingEcho, **options):
    """`count` connections to a server that shares, and the server's ends in the same order."""
    _, port = await net.serve(factory, shared_receive=True, **options)
    clients, servers = [], []
    for _ in range(count):
        clients.append(await net.connect(port))
        ends = await net.accepted_beside(clients)
        servers += [end for end in ends if end not in servers]
    return clients, servers


@pytest.mark.parametrize(
    "sizes", [(65536, 16, 256), (4096, 16, 3), (512, 1, 0), (512, 2, 7), (65536, 104, 64)], ids=str
)
async def test_bytes_arrive_both_ways_at_once(net: Net, sizes):
    slot_bytes, data_slots, shared_slots = sizes
    clients, servers = await clients_of(
        net, 5, Checking, slot_bytes=slot_bytes, data_slots=data_slots, shared_slots=shared_slots
    )
    size = 200_000
    for side in (*clients, *servers):
        side.transport.write(Pattern().take(size))
    for side in (*clients, *servers):
        Pattern().check(bytearray(await side.until_received(size)))
    engine = servers[0].transport.engine
    assert shared(servers[0])["connections"] == 5
    for side in clients:
        side.transport.close()
    for server in servers:
        await server.until(lambda server=server: server.eof)
        server.transport.close()
    for side in (*clients, *servers):
        assert await side.until_lost() is None
    await whole_again(engine)


async def test_an_idle_connection_costs_its_own_slots(net: Net):
    """Counted in registered bytes: its slots, and nothing to send from."""
    clients, servers = await clients_of(net, 100, slot_bytes=4096)
    for client in clients:
        client.transport.write(b"hello")
    for client in clients:
        assert await client.until_received(5) == b"hello"
    await until_seen(lambda: not any(stats_of(server)["bytes_registered"] for server in servers))
    stands = shared(servers[0])
    slot = stands["registered_bytes"] // stands["slots"]
    assert 4096 + 16 <= slot < 5000
    # Slots are made some at a time: a quarter more at most.
    assert stands["slots"] <= 1.25 * (100 * EACH + stands["common_slots"])
    assert stands["common_slots_left"] == stands["common_slots"]
    own = clients[0].transport.get_extra_info("rdma_stats")["bytes_registered"]
    assert own == 24 * (1024 + 64)


async def test_who_reads_nothing_holds_what_it_was_lent_and_the_others_go_on(net: Net):
    clients, servers = await clients_of(net, 6, data_slots=8, shared_slots=12, slot_bytes=512)
    hogs, (guest, guests_end) = (
        list(zip(clients[:5], servers[:5], strict=True)),
        (clients[5], servers[5]),
    )
    # They grow while they are read, then they are not.
    sent = Pattern().take(40_000)
    for client, _ in hogs:
        client.transport.write(sent[:20_000])
    for client, _ in hogs:
        await client.until_received(20_000)
    for client, server in hogs:
        server.transport.pause_reading()
        client.transport.write(sent[20_000:])
    for _, server in hogs:
        await until_seen(lambda server=server: holds_all_it_has(stats_of(server)))
        assert stats_of(server)["slots_held"] <= 8
    guest.transport.write(Pattern().take(50_000))
    Pattern().check(await guest.until_received(50_000))
    stands = shared(guests_end)
    assert stands["common_slots_left"] >= 0 and stands["slots_posted"] >= stands["slots_needed"]
    for client, server in hogs:
        server.transport.resume_reading()
        assert await client.until_received(40_000) == sent


async def test_one_alone_leaves_half_of_the_common_slots(net: Net):
    (client,), (server,) = await clients_of(net, 1, data_slots=64, shared_slots=16, slot_bytes=512)
    pattern = Pattern()
    for turn in range(1, 20):
        client.transport.write(pattern.take(30_000))
        Pattern().check(await client.until_received(30_000 * turn))
        stands = shared(server)
        assert 8 <= stands["common_slots_left"] <= 16
    assert client.transport.get_extra_info("rdma_stats")["peer_slots"] == 64


async def test_a_connection_that_pauses_and_ends_gives_its_slots_back(net: Net):
    """With unread bytes, for each way in which a connection can end."""
    _, port = await net.serve(Checking, shared_receive=True)
    witness = await net.connect(port)
    (end,) = await net.accepted_beside([witness])
    engine = end.transport.engine
    ways = ("client aborts", "server aborts", "client closes", "server closes") * 3
    for turn, how in enumerate(ways, 1):
        known = list(net.recorders)
        client = await net.connect(port)
        await net.until(lambda known=known: len(net.recorders) == len(known) + 2)
        (server,) = [each for each in net.recorders if each not in known and each is not client]
        await server.until(lambda server=server: server.transport is not None)
        server.transport.pause_reading()
        client.transport.write(bytes(300_000))
        await until_seen(lambda server=server: stats_of(server)["slots_held"] >= STREAM_SHARED_OWN)
        side = client if how.startswith("client") else server
        other = server if side is client else client
        getattr(side.transport, how.split()[1].rstrip("s"))()
        if how == "client closes":
            server.transport.resume_reading()
            await server.until(lambda server=server: server.eof)
            server.transport.close()
        elif how == "server closes":
            client.transport.close()
        await side.until_lost()
        other.transport.resume_reading()
        await other.until_lost()
        await whole_again(engine, 1)
        witness.transport.write(b"still here")
        await end.until_received(10 * turn)
        assert shared(end)["common_slots_left"] == shared(end)["common_slots"]


async def test_clients_that_are_killed_with_slots_in_flight(net: Net):
    """Another process dies while sending; other connections are not affected, and nothing is lost."""
    _, port = await net.serve(CheckingEcho, shared_receive=True)
    witness = await net.connect(port)
    (end,) = await net.accepted_beside([witness])
    for turn in range(1, 4):
        before = len(net.recorders)
        peer = net.spawn("clients.py", port, 4)
        await peer.expect("connected")
        peer.say("round 40000")
        await net.until(lambda before=before: sum(each.received > 0 for each in net.recorders[before:]) >= 2)
        peer.close()
        for recorder in net.recorders[before:]:
            await recorder.until_lost()
        witness.transport.write(b"x" * 1000)
        await witness.until_received(1000 * turn)
        await whole_again(end.transport.engine, 1)


async def test_a_server_that_ends_others_from_its_callbacks(net: Net):
    """Completions of other connections that are found while one is ended reach them, in order."""
    ends: list[Recorder] = []

    class Turncoat(Checking):
        def keep(self, data):
            super().keep(data)
            if self is not ends[-1] and not ends[-1].lost and self.received > 30_000:
                ends.pop().transport.abort()

    clients, servers = await clients_of(net, 12, Turncoat, slot_bytes=1024, shared_slots=32)
    ends += servers
    for client in clients:
        client.transport.write(Pattern().take(60_000))
    for server in servers:
        await server.until(lambda server=server: server.lost or server.received == 60_000)
        Pattern().check(server.data)
    lost = [server for server in servers if server.lost]
    assert lost
    for server in set(servers) - set(lost):
        server.transport.abort()
    for side in (*clients, *servers):
        await side.until_lost()


async def test_offers_and_remote_memory(net: Net):
    (client,), (server,) = await clients_of(net, 1)
    pd = server.transport.get_extra_info("rdma_pd")
    with pd.alloc_mr(4096, OFFERABLE) as mr:
        mr[:5] = b"lent!"
        async with server.transport.offer(mr, access="read,write"):
            client.transport.write(b"go on")  # the accepting side hears first
            await client.until(lambda: bool(client.offered))
            assert await client.offered[0].read(0, 5) == b"lent!"
            await client.offered[0].write(100, b"given")
            assert mr[100:105] == b"given"
        assert client.revoked
    stands = shared(server)
    assert stands["slots_posted"] >= stands["slots_needed"]


# ---- who sends what it was not granted


@pytest.fixture
def over_sender(device):
    peer = BarePeer(device.library, max_sends=512)
    yield peer
    peer.close()


@pytest.mark.not_on_iwarp("has no second try for who finds no receive: others may be hurt")
@pytest.mark.parametrize("count", [STREAM_SHARED_OWN + 1, 400])
async def test_who_sends_too_much_is_cut_off_and_hurts_nobody(net: Net, over_sender, count):
    """Also where it takes every receive that there is."""
    clients, servers = await clients_of(net, 3, slot_bytes=1024, shared_slots=32)
    known = list(net.recorders)
    await over_sender.connect(HOST, shared_port(net), credit.pack_hello(credit.Hello(1024, 16, 8, 16)))
    await net.until(lambda: len(net.recorders) > len(known))
    culprit = net.recorders[-1]
    await culprit.until(lambda: culprit.transport is not None)
    culprit.transport.pause_reading()  # else what is read is granted again
    over_sender.post(frame(DATA, b"mine"), count=count)
    for client in clients:
        client.transport.write(Pattern().take(50_000))
    assert isinstance(await culprit.until_lost(), ProtocolError)
    assert len(culprit.data) <= 4 * STREAM_SHARED_OWN
    for client in clients:
        Pattern().check(await client.until_received(50_000))
    await whole_again(servers[0].transport.engine, 3)


def shared_port(net: Net) -> int:
    return net.servers[-1].sockets[0].getsockname()[1]


# ---- what it is called, and when it isn't there


async def test_what_is_told_of_it(net: Net):
    (client,), (server,) = await clients_of(net, 1)
    assert client.transport.get_extra_info("rdma_shared_receive") is None
    assert client.transport.get_extra_info("rdma_shared_receive", "no") == "no"
    stands = shared(server)
    assert stands["connections"] == 1
    assert stands["slots_needed"] == EACH
    assert stands["common_slots"] == stands["common_slots_left"] == SHARED_SLOTS
    assert "credits=16/16" in repr(server.transport)
    assert f"credits={STREAM_SHARED_OWN}/16" in repr(client.transport)


async def test_servers_of_the_same_sizes_share_and_others_do_not(net: Net):
    for options, rings in (({}, 1), ({}, 1), ({"slot_bytes": 4096}, 2), ({"shared_slots": 8}, 3)):
        _, port = await net.serve(shared_receive=True, **options)
        client = await net.connect(port)
        await net.accepted_beside(net.recorders[::2])
        assert sum(ring is not None for ring in client.transport.engine.shared_rings) == rings


async def test_a_large_queue_goes_with_its_last_connection(net: Net):
    clients, servers = await clients_of(net, 60, Recorder, slot_bytes=512, shared_slots=0)
    engine = servers[0].transport.engine
    (ring,) = engine.shared_rings
    cq = ring.cq
    for client in clients:
        client.transport.abort()
    for side in (*clients, *servers):
        await side.until_lost()
    await until_seen(lambda: ring not in engine.shared_rings)
    assert cq.closed and ring.srq is None and cq not in engine.cqs
    again = await net.connect(shared_port(net))
    assert again.transport.get_extra_info("rdma_stats")["credits"] == STREAM_SHARED_OWN
    assert engine.shared_rings[0] is not ring


@pytest.mark.long
@pytest.mark.not_on_siw("refuses queue pairs beyond some fifty")
async def test_more_connections_than_one_queue_serves(net: Net):
    _, port = await net.serve(Echo, shared_receive=True, shared_slots=4096, slot_bytes=512)
    clients = [await net.connect(port)]
    (ring,) = clients[0].transport.engine.shared_rings
    while len(clients) <= ring.room:
        clients += await asyncio.gather(*(net.connect(port) for _ in range(20)))
    assert len(clients[0].transport.engine.shared_rings) == 2
    for client in clients:
        client.transport.write(b"there")
    for client in clients:
        assert await client.until_received(5) == b"there"


async def test_a_device_without_such_queues_gives_each_its_ring(net: Net, monkeypatch, caplog):
    original = establish._shares
    monkeypatch.setattr(
        establish, "_shares", lambda engine: original(types.SimpleNamespace(can_share=False, pd=engine.pd))
    )
    (client,), (server,) = await clients_of(net, 1)
    assert any("no shared receive queues" in record.getMessage() for record in caplog.records)
    assert shared(server) is None
    client.transport.write(b"still")
    assert await client.until_received(5) == b"still"


@pytest.mark.parametrize("wrong", [-1, 4097])
async def test_shared_slots_that_cannot_be_are_refused(net: Net, wrong):
    with pytest.raises(ValueError, match="shared_slots"):
        await rdmanet.start_rdma_server(Recorder, HOST, 0, shared_receive=True, shared_slots=wrong)


async def test_streams_share_too(net: Net):
    async def echo(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    _, port = await net.serve_streams(echo, shared_receive=True, shared_slots=4)
    pairs = [await net.open(port) for _ in range(4)]
    text = Pattern().take(100_000)
    for reader, writer in pairs:
        writer.write(text)
        writer.write_eof()
        assert await reader.read(-1) == text
