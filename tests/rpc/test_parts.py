"""Long arrays of a message are lent where they lie, and the others gathered; parts that cannot be are refused."""

import asyncio
import random
from typing import Any

import msgspec
import numpy
import numpy.typing as npt
import pytest
from net import Net, bindings, callee, channel, failure, idle

from rdmanet import rpc
from rdmanet.rpc import Code, packing
from rdmanet.rpc.link import LOANS_MOST
from rdmanet.rpc.messages import MAGIC, VERSION, Hello, Lent, OutCallBringing, Part, Parts
from rdmanet.rpc.packing import Packing
from rdmanet.rpc.parts import PART_LEAST, Layout, Places
from rdmanet.rpc.pending import Pending
from rdmanet.rpc.schema import schema_of
from rdmanet.rpc.stats import Counter
from rdmanet.wire.offers import ACCEPTED_MAX
from tests.support.waiting import begin, loop_turns

PARTS_MOST = ACCEPTED_MAX // 2 - LOANS_MOST
State = dict[str, npt.NDArray[Any]]


class Store(rpc.Service):
    def __init__(self) -> None:
        self.state: State = {}

    async def put(self, state: State) -> int:
        self.state = state
        return len(state)

    async def get(self) -> State:
        return self.state

    async def made(self, count: int) -> State:
        return {str(index): numbers(PART_LEAST, index) for index in range(count)}


def numbers(nbytes: int, seed: int = 0) -> Any:
    return (numpy.arange(nbytes) + seed).astype("u1")


def mixed() -> State:
    """Long and short arrays in turns; some are not contiguous, have odd lengths, or are the same memory twice."""
    state: State = {"nothing": numpy.zeros((0, 3))}
    for index in range(4):
        state[f"long{index}"] = numbers(PART_LEAST + index, index)
        state[f"short{index}"] = numbers(1000 + index, index)
        state[f"square{index}"] = numbers(PART_LEAST, index).reshape(2, -1).T
    state["twice"] = state["long1"]
    return state


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(numpy.array_equal(one[name], other[name]) for name in one)


def lent(monkeypatch: pytest.MonkeyPatch, link: Any) -> list[Any]:
    """What this side puts on offer from now on."""
    found: list[Any] = []
    regions = link.transport._regions
    bind = regions.bind

    def bound(memory: Any, *how: Any) -> Any:
        found.append(memory)
        return bind(memory, *how)

    monkeypatch.setattr(regions, "bind", bound)
    return found


def lies(memory: Any, array: Any) -> bool:
    return numpy.shares_memory(numpy.asarray(memory), array)


def nothing_left(*links: Any) -> bool:
    for link in links:
        assert (link.loans_left, link.parts_left) == (LOANS_MOST, PARTS_MOST)
    return not bindings(*links)


# ---- On a connection -------------------------------------------------------------------------------------------


async def test_they_arrive(net: Net):
    service = Store()
    client, server = await net.pair(service)
    state = mixed()
    assert await client.put(state) == len(state) and same(service.state, state)
    assert same(await client.get(), state)
    assert same(await client.made(3), await service.made(3))
    assert await idle(server)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_long_ones_are_lent_where_they_lie(net: Net, monkeypatch: pytest.MonkeyPatch):
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    loans, state = lent(monkeypatch, links[0]), mixed()
    await client.put(state)
    gathered, *others = loans
    longs = [state[f"long{index}"] for index in range(4)]
    assert len(others) == 5 and all(any(lies(each, array) for each in others) for array in longs)
    assert not any(lies(gathered, array) for array in state.values())
    loans.clear()
    await client.put({str(index): array for index, array in enumerate(longs)})  # nothing is to be gathered
    assert len(loans) == 4 and all(map(lies, loans, longs))
    assert await idle(server) and nothing_left(*links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_results_are_copied_unless_nobody_can_change_them(net: Net, monkeypatch: pytest.MonkeyPatch):
    """What the method has made is lent as it is, and so is the array of a Buffer; what the service keeps is not."""
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    loans = lent(monkeypatch, links[1])
    assert same(await client.made(3), await service.made(3)) and len(loans) == 3
    loans.clear()
    kept, frozen = numbers(PART_LEAST, 3), numbers(PART_LEAST, 5)
    buffer = rpc.Buffer(frozen)
    service.state = {"kept": kept, "frozen": buffer.array, "more": kept[1:]}
    state = dict(service.state)
    assert same(await client.get(), state)
    assert len(loans) == 2 and not lies(loans[0], kept) and loans[1] is buffer._registered
    assert same(await client.get(), state) and loans[3] is loans[1]  # registered once
    assert await idle(server) and nothing_left(*links)
    service.state = state = {}
    buffer.release()


@pytest.mark.parametrize("transport", ["rdma"])
async def test_when_no_more_can_be_lent(net: Net, monkeypatch: pytest.MonkeyPatch):
    """The longest ones are; the others are gathered."""
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    links[0].parts_left = 2
    loans, state = lent(monkeypatch, links[0]), mixed()
    await client.put(state)
    assert same(service.state, state)
    assert len(loans) == 3 and lies(loans[1], state["long2"]) and lies(loans[2], state["long3"])
    assert links[0].parts_left == 2
    links[0].parts_left = PARTS_MOST
    assert await idle(server) and nothing_left(*links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_more_than_the_peer_accepts(net: Net, monkeypatch: pytest.MonkeyPatch):
    """As many as there are of them; two calls at a time."""
    monkeypatch.setattr(packing, "PART_LEAST", 1 << 15)
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    state = {str(index): numbers(1 << 15, index) for index in range(PARTS_MOST + 20)}
    loans = lent(monkeypatch, links[0])
    assert await asyncio.gather(client.put(state), client.put(state)) == [len(state)] * 2
    assert same(service.state, state)
    assert len(loans) == PARTS_MOST + 2  # each has gathered the rest
    assert await idle(server) and nothing_left(*links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_peer_of_an_older_version(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It is lent one memory for all arrays."""
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    for link in links:
        link.hears(Hello(MAGIC, VERSION, "Store", bytes(32), 1 << 20, 100, 10_000))
    loans = [lent(monkeypatch, link) for link in links]
    state = mixed()
    await client.put(state)
    assert same(service.state, state) and same(await client.get(), state)
    assert same(await client.made(2), await service.made(2))
    assert [len(each) for each in loans] == [1, 2]
    assert await idle(server) and not bindings(*links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_cancelled_at_any_time(net: Net):
    """When the call has ended, nobody has a key to any of the arrays."""
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    state = mixed()
    for turns in range(0, 60, 3):
        (call,) = await begin(client.put(state))
        await loop_turns(turns)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() or call.result() == len(state)
        assert not bindings(links[0]) and links[0].parts_left == PARTS_MOST
    assert await client.put(state) == len(state) and same(service.state, state)
    assert await idle(server) and nothing_left(*links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_lost_connection(net: Net):
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    (call,) = await begin(client.put(mixed()))
    await loop_turns(5)
    links[1].abort()
    assert (await failure(call)).code is Code.UNAVAILABLE
    assert await idle(server) and not bindings(*links)


# ---- What a peer may say ---------------------------------------------------------------------------------------


async def test_offers_that_are_none(net: Net):
    """The caller is told, and the connection goes on."""
    client, server = await net.pair(Store(), limits=rpc.Limits(lent_seconds=0.05, lent_bytes=1 << 20))
    side = channel(client)
    method = schema_of(Store).methods["put"]
    raw = msgspec.Raw(msgspec.msgpack.encode([{"a": ["|u1", [4], 2]}]))
    late = Code.DEADLINE_EXCEEDED if net.transport == "rdma" else Code.INVALID_ARGUMENT
    for length, parts, code in [
        (8, [Part(0, 8, 77), Part(8, 0, 78)], late),
        (8, [Part(0, 6, 77), Part(4, 4, 78)], Code.INVALID_ARGUMENT),
        (8, [Part(4, 6, 77)], Code.INVALID_ARGUMENT),
        (1 << 52, [Part(0, 8, 77)], Code.RESOURCE_EXHAUSTED),
    ]:
        pending = Pending(method, side.loop.create_future(), Counter())
        number = side.book.begin(method.kind, pending)
        side.link.send(OutCallBringing(number, method.number, None, raw, {}, Parts(0, length, parts)))
        assert (await failure(pending.future)).code is code, parts
    assert await client.put({"a": numbers(9)}) == 1
    assert await idle(server)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([Part(0, 8, 1), Part(7, 8, 1)], "begins at 7, and the one before it ends at 8"),
        ([Part(8, 8, 1), Part(0, 8, 1)], "begins at 0, and the one before it ends at 16"),
        ([Part(0, 8, 1), Part(8, 93, 2)], "ends at 101, and the memory of the message has 100 bytes"),
        ([Part(0, (1 << 53) - 1, 2)], "the memory of the message has 100 bytes"),
    ],
)
def test_parts_that_cannot_be(parts: list[Part], says: str):
    with pytest.raises(ValueError, match=says):
        Places(Parts(0, 100, parts))


def test_an_array_is_in_one_part():
    places = Places(Parts(0, 100, [Part(10, 8, 1), Part(18, 8, 2), Part(30, 8, 1)]))
    assert places.offers == [1, 2] and places.lengths == [16, 8]
    for place, nbytes in (10, 8), (18, 1), (25, 1), (37, 1):
        places.check(place, nbytes)
    for place, nbytes in (0, 4), (9, 2), (17, 2), (26, 4), (10, 9), (99, 1):
        with pytest.raises(ValueError, match="is not in one part"):
            places.check(place, nbytes)
    assert [tuple(run) for run in places.runs(0, 100)] == [(10, 18, 0, 0), (18, 26, 1, 0), (30, 38, 0, 8)]
    assert [tuple(run) for run in places.runs(12, 31)] == [(12, 18, 0, 2), (18, 26, 1, 0), (30, 31, 0, 8)]


def test_one_loan_is_one_part():
    assert [tuple(run) for run in Places(Lent(7, 100)).runs(10, 20)] == [(10, 20, 0, 10)]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_what_would_be_gathered(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Whatever arrays there are, and however many of them are lent where they lie; nothing else is sent."""
    monkeypatch.setattr(packing, "PART_LEAST", 64)
    chance = random.Random(seed)
    arrays = [
        numpy.full(chance.choice((0, 1, 15, 16, 40, 64, 65, 200)), 1 + index, "u1")[
            :: chance.choice((1, 1, 2))
        ]
        for index in range(chance.randrange(1, 30))
    ]
    value = Packing(arrays, "x")
    whole = bytes(value.gathered()) if value.nbytes else b""
    layout = value.apart(chance.randrange(1, 30), is_result=False)
    if layout is None:
        return
    gathered = memoryview(bytearray(b"\xff" * layout.gathered_bytes))
    for copy in value.copies(gathered, layout=layout):
        copy()
    memories = [gathered] * bool(layout.gathered) + [value.bytes_of(number) for number in layout.apart]
    said = layout.said(list(range(len(memories))), value.nbytes)
    places = Places(msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Parts))
    assert places.lengths == [len(memories[offer]) for offer in places.offers]
    found = bytearray(value.nbytes)
    for run in places.runs(0, value.nbytes):
        memory = memories[places.offers[run.number]]
        found[run.place : run.end] = memory[run.offset : run.offset + run.end - run.place]
    assert bytes(found) == whole


def test_a_layout():
    layout = Layout([(0, 5), (16, 100), (128, 3), (144, 4)], 148, {1})
    assert layout.gathered == [(0, 0), (2, 16), (3, 32)] and layout.gathered_bytes == 36
    assert layout.said([8, 9], 148) == Parts(0, 148, [Part(0, 16, 8), Part(16, 100, 9), Part(128, 20, 8)])
