"""What a peer may use of a server, and what it leaves to others."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from net import Net, callee, channel, idle
from strangers import HELLO, NUMBERS, Store, call, stranger

from rdmanet import rpc
from rdmanet.rpc import taking
from rdmanet.rpc.calls import Outflow
from rdmanet.rpc.endpoints import source
from rdmanet.rpc.errors import Code
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import Call, Failure, Hello, Item, Lent, Release, Reply, Window, raw
from rdmanet.rpc.shares import Holder, Share, Shares
from rdmanet.rpc.streaming import Receiving
from tests.support.waiting import loop_turns, until_seen

by_tcp = pytest.mark.parametrize("transport", ["tcp"])
by_rdma = pytest.mark.parametrize("transport", ["rdma"])
is_bounded = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "control"])


def without(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Have servers whose connections do not know this limit: a method of `Share`."""
    lax = type("LaxShare", (Share,), {limit: lambda *_: None})

    class LaxShares(Shares):
        def join(self, source: str) -> Share:
            super().join(source)
            return lax(self, source)  # type: ignore[no-any-return]

    monkeypatch.setattr("rdmanet.rpc.server.Shares", LaxShares)


def begun(share: Share, count: int, nbytes: int = 0) -> list[Holder]:
    """Begin so many calls; those that were taken."""
    taken = []
    for _ in range(count):
        holder = Holder()
        try:
            share.begin(holder, nbytes)
        except rpc.Error as exc:
            assert exc.code is Code.RESOURCE_EXHAUSTED
        else:
            taken.append(holder)
    return taken


# ---- Shares alone ------------------------------------------------------------------------------------------


def test_who_comes_alone_has_as_much_as_the_limit_says():
    share = Shares(rpc.Limits(server_calls=100)).join("a")
    calls = begun(share, 200)
    assert len(calls) == 100
    share.end(calls.pop())
    assert len(begun(share, 200)) == 1


def test_who_opens_many_connections_takes_only_from_itself():
    shares = Shares(rpc.Limits(server_calls=100))
    many = [shares.join("a") for _ in range(20)]
    honest = shares.join("b")
    assert sum(len(begun(share, 100)) for share in many) == 100 + 19 * 2  # 100 / (2 * 20) for each
    assert len(begun(honest, 100)) == 50
    late = shares.join("a")
    assert len(begun(late, 100)) == 2
    for share in many:
        share.leave()
    assert len(begun(honest, 100)) == 0  # their calls have not ended
    assert shares.part("b", 100) == 50 and shares.part("a", 100) == 50


def test_one_call_is_for_everybody():
    shares = Shares(rpc.Limits(server_calls=2))
    connections = [shares.join(f"{number}") for number in range(10)]
    assert [len(begun(share, 5)) for share in connections] == [2] + [1] * 9


def test_bytes_of_all_kinds_count_together():
    shares = Shares(rpc.Limits(server_bytes=1000, inline_bytes=10_000, lent_bytes=10_000))
    first, second = shares.join("a"), shares.join("b")
    (one,) = begun(first, 1, 300)
    first.hold_lent(one, 300, "arguments")
    first.frame_is(400)
    with pytest.raises(rpc.Error, match="1001 bytes, with 1 of items: the limit server_bytes is 1000"):
        first.hold(one, 1, "items")
    (two,) = begun(second, 1, 500)  # its share
    with pytest.raises(rpc.Error, match="the limit server_bytes is 1000"):
        second.hold_lent(two, 1, "arguments")
    first.frame_is(0)
    first.end(one)
    second.hold_lent(two, 400, "arguments")
    second.drop(two, 500)
    second.end(two)
    second.drop(two, 5)  # an item that is taken after the end
    assert shares.held_bytes == first.inline_bytes == second.inline_bytes == second.lent_bytes == 0


async def test_peers_are_users_of_this_host_or_addresses(net: Net):
    _, server = await net.pair(Store())
    found = source(callee(server).peer)
    if net.transport == "tcp":
        assert found == channel_address(server)
    else:
        assert found in (f"user {os.getuid()} of this host", channel_address(server))
    if net.is_by_name:
        assert "user" in found


def channel_address(server: rpc.Server) -> Any:
    peer = callee(server).link.peer
    return peer[0] if isinstance(peer, tuple) else None


# ---- Calls -------------------------------------------------------------------------------------------------


@by_tcp
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "control"])
async def test_calls_that_wait_for_ever_leave_some_to_others(
    net: Net, shared: bool, monkeypatch: pytest.MonkeyPatch
):
    """Without shares, nobody else can call."""
    if not shared:
        none = type("NoShares", (Shares,), {"part": lambda self, source, limit: 0})
        monkeypatch.setattr("rdmanet.rpc.server.Shares", none)
    limits = rpc.Limits(server_calls=64, calls=32)
    server = await net.serve(Store(), limits=limits)
    for _ in range(4):
        peer = await stranger(net, server, HELLO, *(call(number, "total") for number in range(32)))
        await peer.hear()
    await until_seen(lambda: len(server.running) >= 64)
    client = await net.connect(Store, server)
    ten = asyncio.gather(*(client.add(number, 1) for number in range(10)))
    if shared:
        assert await ten == list(range(1, 11))
    else:
        with pytest.raises(rpc.Error, match="the limit server_calls is 64"):
            await ten


@by_tcp
@is_bounded
async def test_a_stream_that_never_comes_ends_its_call(
    net: Net, bounded: bool, monkeypatch: pytest.MonkeyPatch
):
    if not bounded:
        monkeypatch.setattr(Receiving, "watch", lambda *_: None)
    server = await net.serve(Store(), limits=rpc.Limits(stream_seconds=0.05))
    peer = await stranger(net, server, HELLO, call(1, "total"))
    await peer.hear()
    if not bounded:
        await asyncio.sleep(4 * 0.05)
        assert server.running
        return
    failure = await peer.hear()
    assert failure.code == Code.DEADLINE_EXCEEDED and "the limit stream_seconds" in failure.text
    assert await idle(server)


@by_tcp
async def test_a_stream_is_given_up_only_if_nothing_moves(net: Net):
    class Link:
        loop = asyncio.get_running_loop()

    received = Receiving(Link, None, lambda item: item)  # type: ignore[arg-type]
    sent = Outflow(100)
    received.watch(3600, sent)

    def look(times: int) -> None:
        for _ in range(times):
            timer = received._timer
            assert timer is not None
            timer.cancel()
            received._look()

    look(5)  # nobody waits for it
    waiting = asyncio.ensure_future(anext(received))
    await loop_turns(2)
    for _ in range(5):
        look(1)
        sent.sent(1)
    look(2)
    assert received._timer is None
    with pytest.raises(rpc.Error, match="nothing has come"):
        await waiting
    received.put(b"late")
    with pytest.raises(rpc.Error, match="nothing has come"):
        await anext(received)


@by_rdma
@is_bounded
async def test_a_loan_that_never_comes_ends_its_call(
    net: Net, bounded: bool, monkeypatch: pytest.MonkeyPatch
):
    if not bounded:
        monkeypatch.setattr(taking, "_in_time", lambda finding, seconds: finding)
    server = await net.serve(Store(), limits=rpc.Limits(lent_seconds=0.05))
    client = await net.connect(Store, server)
    assert await client.add(1, 2) == 3
    channel(client).link.send(Call(77, NUMBERS["put"], None, raw((Lent(200, LEND_BYTES),))))
    if not bounded:
        await until_seen(lambda: server.shares.held_bytes >= LEND_BYTES)
        await asyncio.sleep(4 * 0.05)
        assert server.running
        return
    await until_seen(lambda: server.stats()["put"].ended.get("DEADLINE_EXCEEDED"))
    assert server.shares.held_bytes == 0


# ---- Bytes -------------------------------------------------------------------------------------------------


@by_tcp
@is_bounded
async def test_messages_that_are_not_complete_count(net: Net, bounded: bool, monkeypatch: pytest.MonkeyPatch):
    if not bounded:
        without(monkeypatch, "frame_is")
    limits = rpc.Limits(server_bytes=2_000_000, message_bytes=1_000_000)
    server = await net.serve(Store(), limits=limits)
    start = (1_000_000).to_bytes(4, "big") + bytes(900_000)
    peers = []
    for number in range(3):
        peers.append(await stranger(net, server, HELLO, start))
        assert isinstance(await peers[-1].hear(), Hello)
        if bounded and number < 2:
            await until_seen(lambda: server.shares.held_bytes == 900_000 * len(peers))
    if not bounded:
        held = [each.link._framer for each in server.callees]
        await until_seen(lambda: sum(framer.unfinished_bytes for framer in held) == 3 * 900_000)
        return
    assert await peers[2].is_cut_off()
    assert server.shares.held_bytes == 1_800_000
    client = await net.connect(Store, server)
    assert await client.put(bytes(200_000)) == 200_000
    peers[0].writer.close()
    await until_seen(lambda: server.shares.held_bytes == 900_000)


@by_tcp
async def test_items_that_are_not_taken_count(net: Net):
    class Hoard(rpc.Service):
        async def hoard(self, items: AsyncIterator[bytes]) -> int:
            taken = 0
            await gate.wait()
            async for item in items:
                taken += len(item)
            return taken

    gate = asyncio.Event()
    limits = rpc.Limits(inline_bytes=2_000_000, stream_bytes=500_000)
    client, server = await net.pair(Hoard(), limits=limits)

    async def items() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(100_000)

    calls = [asyncio.ensure_future(client.hoard(items())) for _ in range(8)]
    share = callee(server).share
    await until_seen(lambda: any(running.received._error for running in server.running))
    assert share.inline_bytes <= 2_000_000
    gate.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [each for each in found if isinstance(each, rpc.Error)]
    assert refused and refused[0].code is Code.RESOURCE_EXHAUSTED and "bytes of items" in refused[0].text
    assert found.count(500_000) >= 3 and len(refused) + found.count(500_000) == 8
    assert share.inline_bytes == 0


@by_tcp
@pytest.mark.parametrize(
    ("streamed", "bounded"),
    [(False, True), (True, True), (False, False)],
    ids=["results", "items", "control"],
)
async def test_results_that_nobody_reads_count(
    net: Net, streamed: bool, bounded: bool, monkeypatch: pytest.MonkeyPatch
):
    if not bounded:
        without(monkeypatch, "hold")
    server = await net.serve(Store(), limits=rpc.Limits(inline_bytes=5_000_000))
    if streamed:
        calls: list[Any] = [call(n, "large") for n in range(20)]
        calls += [Window(n, 1 << 40) for n in range(20)]
    else:
        calls = [call(n, "much") for n in range(20)]
    peer = await stranger(net, server, msgspec.structs.replace(HELLO, message_bytes=1 << 30), *calls)
    if not bounded:
        await until_seen(lambda: len(server.running) == 20)  # with a result each
        assert all([isinstance(await peer.hear(), Hello | Reply) for _ in range(21)])
        return
    await until_seen(lambda: server.shares.calls and len(server.running) < 20)
    share = callee(server).share
    assert share.inline_bytes <= 5_000_000
    failures = replies = 0
    while failures + replies < 20:
        heard = await peer.hear()
        failures += isinstance(heard, Failure)
        replies += isinstance(heard, Reply | Item)
        if isinstance(heard, Failure):
            assert "that are not read in messages: the limit inline_bytes is 5000000" in heard.text
    assert failures and replies
    peer.writer.close()
    await until_seen(lambda: not server.shares.calls)


class Lender(rpc.Service):
    def __init__(self) -> None:
        self.kept = rpc.Buffer(bytearray(LEND_BYTES))

    async def fresh(self) -> memoryview:
        return memoryview(bytearray(LEND_BYTES))

    async def same(self) -> rpc.Buffer:
        return self.kept


@by_rdma
@is_bounded
async def test_results_on_loan_count(net: Net, bounded: bool, monkeypatch: pytest.MonkeyPatch):
    """The memory of a Buffer does not: it is the service's own."""
    if not bounded:
        without(monkeypatch, "hold_lent")
    service = Lender()
    server = await net.serve(service, limits=rpc.Limits(lent_bytes=3 * LEND_BYTES))
    client = await net.connect(Lender, server)
    callee(server).link._handlers[Release] = lambda _: None  # type: ignore[index]
    held = [await client.same() for _ in range(5)]
    for _ in range(3):
        assert len(await client.fresh()) == LEND_BYTES  # and they are not released
    if bounded:
        assert callee(server).share.lent_bytes == 3 * LEND_BYTES
        with pytest.raises(
            rpc.Error, match=f"results on loan of {4 * LEND_BYTES} bytes: the limit lent_bytes is"
        ):
            await client.fresh()
    else:
        assert len(await client.fresh()) == LEND_BYTES
    monkeypatch.undo()
    for buffer in held:
        buffer.release()
    channel(client).link.close()
    await until_seen(lambda: server.shares.held_bytes == 0)
    await idle(server)
    service.kept.release()
