"""What a message makes when it is decoded is known before, and limited: memory, and time."""

import asyncio
import dataclasses
import datetime
import decimal
import enum
import itertools
import random
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
from net import Net, callee, idle

from rdmanet import rpc
from rdmanet.rpc import call_metadata, weights
from rdmanet.rpc.errors import Code
from rdmanet.rpc.weighing import weigh
from rdmanet.rpc.weights import Scale
from tests.support.waiting import until_seen

by_tcp = pytest.mark.parametrize("transport", ["tcp"])
encode = msgspec.msgpack.encode
MODULUS = (1 << 61) - 1


class Node(msgspec.Struct):
    name: str = ""
    kids: list["Node"] = []
    tags: dict[str, int] = {}
    other: set[int] = msgspec.field(default_factory=set)


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclasses.dataclass
class Record:
    a: int = 0
    b: list[int] = dataclasses.field(default_factory=list)


class Inner(msgspec.Struct):
    a: list[int] = msgspec.field(default_factory=list)
    b: dict[str, int] = msgspec.field(default_factory=dict)
    c: list[int] = msgspec.field(default_factory=lambda: list(range(1000, 1020)))


class Middle(msgspec.Struct):
    a: Inner = msgspec.field(default_factory=Inner)
    b: Inner = msgspec.field(default_factory=lambda: Inner())
    c: Inner = msgspec.field(default_factory=Inner)


class Outer(msgspec.Struct):
    a: Middle = msgspec.field(default_factory=Middle)
    b: Middle = msgspec.field(default_factory=Middle)
    c: Any = msgspec.field(default_factory=lambda: 1 / 0)


class Endless(msgspec.Struct):
    a: "Endless | None" = msgspec.field(default_factory=lambda: Endless())


class Texts(msgspec.Struct):
    a: bytearray = msgspec.field(default_factory=lambda: bytearray(10_000))
    b: list[str] = msgspec.field(default_factory=lambda: ["x" * 5000, "y" * 5000])


@dataclasses.dataclass
class Nested:
    a: Record = dataclasses.field(default_factory=Record)
    b: Record = dataclasses.field(default_factory=Record)


class Rights(enum.IntFlag, boundary=enum.STRICT):
    READ = 1
    WRITE = 2
    ADMIT = 1 << 15


N = 3000
CASES: dict[str, tuple[Any, Any]] = {
    "empty lists": (list[list[int]], [[]] * N),
    "empty dicts": (list[dict[str, int]], [{}] * N),
    "small dicts": (list[dict[str, int]], [{"a": 1}] * N),
    "anything": (Any, [[], {}, {"a": [1.5]}, "text", b"bytes", 70000, None, True] * (N // 8)),
    "floats": (list[float], [number / 3 for number in range(N)]),
    "ints": (list[int], list(range(1000, 1000 + N))),
    "small ints": (list[int], [1, 2, 3] * N),
    "texts": (list[str], [f"text {number}" for number in range(N)]),
    "wide texts": (list[str], ["x" * 50 + "\N{GRINNING FACE}"] * N),
    "two-byte texts": (list[str], ["x" * 50 + "\N{EURO SIGN}"] * N),
    "bytes": (list[bytes], [b"12345"] * N),
    "a large dict": (dict[int, int], {number * 7: number + 300 for number in range(N)}),
    "a dict of texts": (dict[str, str], {f"{number}": f"{number}" for number in range(N)}),
    "sets": (list[set[int]], [[1, 2, 3]] * N),
    "a large set": (set[int], [number * 5 for number in range(N)]),
    "objects": (list[Node], [{}] * N),
    "records": (list[Record], [{}] * N),
    "points": (list[Point], [[1]] * N),
    "objects in objects": (list[Middle], [{}] * N),
    "objects with texts": (list[Texts], [{}] * 100),
    "objects in objects of records": (list[Nested], [{}] * N),
    "uuids": (list[uuid.UUID], [str(uuid.UUID(int=number << 40)) for number in range(N)]),
    "decimals": (list[decimal.Decimal], ["1.5"] * N),
    "decimals of numbers": (list[decimal.Decimal], [1, 2.5] * N),
    "what is not decoded": (list[msgspec.Raw], [1, None, "x"] * N),
    "times": (list[datetime.datetime], ["2026-01-01T00:00:00Z"] * N),
    "tuples": (list[tuple[int, ...]], [[], [1]] * (N // 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_not_less_than_what_is_made(case: str):
    type_, value = CASES[case]
    raw = encode(value)
    decode = msgspec.msgpack.Decoder(type_).decode
    decode(raw)
    tracemalloc.start()
    try:
        made = decode(raw)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    estimate = Scale(type_).weigh(raw, 1 << 40) + len(raw)
    assert made is not None
    assert size <= estimate * 1.05 + 2000
    assert estimate < 15 * size  # it is of the heaviest object of the type


def test_combinations_of_flags():
    """Their class keeps them, so they take memory once; but each takes its time."""
    assert Scale(list[Rights | None]).weigh(encode([3] * 1000), 1 << 40) > 300_000


def test_factories_that_do_not_work():
    assert Scale(Outer).weigh(encode({}), 1 << 20) > 1000
    assert Scale(Endless).weigh(encode({}), 1 << 20) > 300


SHORT = {
    "objects": (list[Node], b"\x80"),
    "objects in objects": (list[Middle], b"\x80"),
    "lists": (list[list[int]], b"\x90"),
    "dicts": (list[dict[int, int]], b"\x81\x00\x00"),
    "sets": (set[frozenset[int]], b"\x90"),
    "flags": (list[Rights], b"\x01"),
    "decimals": (list[decimal.Decimal], b"\x01"),
    "texts": (list[str], b"\xa0"),
    "anything": (Any, b"\x81\x00\x00"),
}
NESTED = {"of numbers": b"\x81\x00", "of texts": b"\x81\xa0", "of tuples": b"\x81\x90"}


@pytest.mark.parametrize("case", SHORT)
def test_what_is_not_weighed_makes_little(case: str):
    type_, item = SHORT[case]
    scale = Scale(type_)
    count = (scale.least - 4) // len(item)
    raw = b"\xdc" + count.to_bytes(2, "big") + item * count
    assert len(raw) < scale.least
    assert weights.UNWEIGHED_BYTES / 4 < scale.weigh(raw, 1 << 40) <= weights.UNWEIGHED_BYTES


@pytest.mark.parametrize("case", NESTED)
def test_dicts_within_each_other_that_are_not_weighed_make_little(case: str):
    scale = Scale(Any)
    raw = NESTED[case] * ((scale.least - 2) // 2) + b"\x00"
    assert weights.UNWEIGHED_BYTES / 2 < scale.weigh(raw, 1 << 40) <= weights.UNWEIGHED_BYTES


def test_what_is_no_msgpack_is_left_to_the_decoder():
    for raw in (
        b"\xc1" * 1000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x92\x01",
        b"\xcb\x00",
        b"",
    ):
        assert weigh(raw, 1 << 20) < 1000
    with pytest.raises(RecursionError):
        weigh(b"\x91" * 100_000, 1 << 30)


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes(seed: int):
    chance = random.Random(seed)
    for _ in range(300):
        _, value = chance.choice(list(CASES.values()))
        raw = bytearray(encode(value[:20] if isinstance(value, list) else {1: [2, "x"], "y": 0.5}) * 3)
        for _ in range(chance.randrange(5)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        for has_sets in (0, 1, 2):
            try:
                weigh(raw, 1 << 20, has_sets=has_sets, text_keys=2)
            except (OverflowError, ValueError, RecursionError):
                pass


# ---- Keys --------------------------------------------------------------------------------------------------


TABLE = 2048


def colliding() -> list[int]:
    """Numbers that a dictionary looks for in very many slots, one after the other.

    After 13 steps nothing is left of a hash: from there on, all numbers take one way through the table. Half of this
    way is filled by small numbers, each in its own slot. Then come numbers whose first steps are on the way as well,
    and end at its beginning.
    """
    way = numpy.zeros(TABLE, numpy.uint64)
    for step in range(1, TABLE):
        way[step] = (way[step - 1] * numpy.uint64(5) + numpy.uint64(1)) % numpy.uint64(TABLE)
    place = numpy.argsort(way)
    chance = numpy.random.default_rng(1)
    found: list[int] = []
    while len(found) < 300:
        hashes = chance.integers(1 << 40, 1 << 60, 1 << 20, numpy.uint64)
        perturb, slots = hashes.copy(), hashes % numpy.uint64(TABLE)
        for _ in range(13):
            on_the_way = place[slots] < TABLE // 2
            hashes, perturb, slots = hashes[on_the_way], perturb[on_the_way], slots[on_the_way]
            perturb >>= numpy.uint64(5)
            slots = (slots * numpy.uint64(5) + perturb + numpy.uint64(1)) % numpy.uint64(TABLE)
        found += hashes[place[slots] < TABLE // 8].tolist()
    return [*way[: TABLE // 2].tolist(), *found[:300]]


COLLIDING = colliding()
EQUAL_HASHES = list(itertools.product([1 + MODULUS * number for number in range(8)], repeat=4))[:3000]
KEYS = {
    "numbers": (dict[int, int], dict.fromkeys(COLLIDING, 1)),
    "numbers in anything": (Any, [{"a": dict.fromkeys(COLLIDING, 1)}]),
    "items of a set": (
        set[uuid.UUID],
        [str(uuid.UUID(int=MODULUS * number)) for number in range(1 << 60, (1 << 60) + 500)],
    ),
    "UUIDs": (
        dict[uuid.UUID, int],
        {str(uuid.UUID(int=MODULUS * number)): 1 for number in range(1 << 60, (1 << 60) + 500)},
    ),
    "decimals": (dict[decimal.Decimal, int], {str(MODULUS * number): 1 for number in range(3000)}),
    "tuples": (dict[tuple[int, ...], int], dict.fromkeys(EQUAL_HASHES, 1)),
    "tuples in many maps": (list[dict[tuple[int, ...], int]], [dict.fromkeys(EQUAL_HASHES[:500], 1)] * 40),
    "frozensets": (
        set[frozenset[int]],
        [[2 * bit + (number >> bit & 1) for bit in range(12)] for number in range(3000)],
    ),
    "frozensets in tuples": (
        dict[tuple[frozenset[int], int], int],
        {((number, number + 1), 0): 1 for number in range(3000)},
    ),
    "items of many sets": (list[set[decimal.Decimal]], [[str(MODULUS * n) for n in range(2000)]] * 20),
    "numbers of 64 bits as floats": (
        dict[float, int],
        {(1 << 62) + number: 1 for number in range(3000)},
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_collide_are_refused(case: str):
    type_, value = KEYS[case]
    with pytest.raises(rpc.Error, match="keys collide") as caught:
        Scale(type_).weigh(encode(value), 1 << 40)
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("collide", [True, False])
def test_numbers_that_collide_do_so_in_python(collide: bool):
    """The control: a dictionary takes very many more steps for them than for others."""
    numbers = COLLIDING if collide else random.Random(1).sample(range(1 << 60), len(COLLIDING))
    slots: set[int] = set()
    steps = 0
    for number in numbers:
        perturb, slot = number, number % TABLE
        while slot in slots:
            steps += 1
            perturb >>= 5
            slot = (slot * 5 + perturb + 1) % TABLE
        slots.add(slot)
    assert (steps > 100 * len(numbers)) == collide


HARMLESS: dict[str, tuple[Any, Any]] = {
    "small": (dict[int, int], dict.fromkeys(range(20000), 1)),
    "multiples": (dict[int, int], {number << 20: 1 for number in range(20_000)}),
    "large multiples": (dict[int, int], {number << 45: 1 for number in range(20_000)}),
    "nanoseconds": (
        dict[int, int],
        {1_700_000_000_000_000_000 + number * 10**9: 1 for number in range(20_000)},
    ),
    "negative": (dict[int, int], {-number * 4096: 1 for number in range(20_000)}),
    "floats": (dict[float, int], {number / 7: 1 for number in range(20_000)}),
    "UUIDs": (dict[uuid.UUID, int], {str(uuid.UUID(int=number << 64)): 1 for number in range(20_000)}),
    "texts": (dict[str, int], {str(number): 1 for number in range(20_000)}),
    "UUIDs by texts": (dict[str, uuid.UUID], {str(n): str(uuid.UUID(int=n)) for n in range(5000)}),
    "decimals by texts": (dict[str, decimal.Decimal], {f"a{n}": "1.5" for n in range(5000)}),
    "floats by ids": (dict[int, float], {(1 << 60) + n: 1.5 for n in range(5000)}),
    "points": (dict[tuple[int, int], float], {(n, n * 7): 1.5 for n in range(5000)}),
    "times": (
        dict[datetime.datetime, float],
        {datetime.datetime.fromtimestamp(n, datetime.UTC): 1.5 for n in range(5000)},
    ),
    "a set of points": (set[tuple[int, int]], [(n, n * 7) for n in range(5000)]),
    "multiples of 2**32": (set[int], [n << 32 for n in range(20_000)]),
    "tuples with a text": (dict[tuple[str, int], int], {("x", number): 1 for number in range(20_000)}),
    "a set": (set[int], list(range(0, 200_000, 10))),
    "one number": (set[int], [7] * 20_000),
    "a list of sets": (list[set[int]], [[1, 2]] * 20_000),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_keys_of_programs_are_taken(case: str):
    type_, value = HARMLESS[case]
    raw = encode(value)
    assert Scale(type_).weigh(raw, 1 << 40) > len(value)
    msgspec.msgpack.decode(raw, type=type_)


# ---- Tags --------------------------------------------------------------------------------------------------


class Leaf(msgspec.Struct, tag="leaf"):
    data: list[int]


class Branch(msgspec.Struct, tag="branch", tag_field="kind"):
    child: "Branch | Other"


class Other(msgspec.Struct, tag="other", tag_field="kind"):
    child: "Branch | Other | None" = None
    leaf: "Leaf | Stem | None" = None


class Stem(msgspec.Struct, tag="stem"):
    child: "Leaf | Stem"


def nested(depth: int, field: str, tag: str, is_first: bool) -> bytes:
    """A leaf of 100,000 numbers within so many maps."""
    raw = encode({"type": "leaf", "data": [1] * 100_000})
    for _ in range(depth):
        tagged, child = encode(field) + encode(tag), encode("child") + raw
        raw = b"\x82" + (tagged + child if is_first else child + tagged)
    return raw


def test_tags_that_come_late_in_maps_within_maps():
    """Each map is looked through for its tag: that takes time by the depth, times the bytes."""
    scale = Scale(Stem | Leaf)
    for depth, is_first in ((5, False), (200, True)):
        raw = nested(depth, "type", "stem", is_first)
        assert scale.weigh(raw, 1 << 40)
        msgspec.msgpack.decode(raw, type=Stem | Leaf)
    with pytest.raises(rpc.Error, match="tags are not their first fields") as caught:
        scale.weigh(nested(200, "type", "stem", False), 1 << 40)
    assert caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(rpc.Error, match="tags are not their first fields"):
        Scale(list[Branch | Other]).weigh(b"\x91" + nested(200, "kind", "branch", False), 1 << 40)
    assert Scale(Any).weigh(nested(200, "type", "stem", False), 1 << 40)


def test_metadata_is_weighed_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_metadata, "_decode", lambda raw: pytest.fail("it was decoded"))
    limits = rpc.Limits(metadata_bytes=1 << 20, decoded_bytes=1 << 20)
    with pytest.raises(rpc.Error, match="the limit decoded_bytes is 1048576"):
        call_metadata.decoded(encode({"a": [[]] * 100_000}), limits)
    with pytest.raises(rpc.Error, match="keys collide"):
        call_metadata.decoded(encode({"a": KEYS["numbers"][1]}), limits)
    with pytest.raises(rpc.Error, match="the limit metadata_bytes is 8192"):
        call_metadata.decoded(encode({"a": bytes(10_000)}), rpc.Limits())


# ---- Messages ----------------------------------------------------------------------------------------------


class Taker(rpc.Service):
    async def lists(self, value: list[list[int]]) -> int:
        return len(value)

    async def anything(self, value: Any) -> int:
        return len(value)

    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def give(self, count: int) -> list[list[int]]:
        return [[]] * count

    async def stream(self, values: AsyncIterator[list[list[int]]]) -> int:
        return sum([len(value) async for value in values])

    async def streams(self, count: int) -> AsyncIterator[list[list[int]]]:
        yield [[]] * count

    async def hold(self, value: list[list[int]]) -> None:
        await asyncio.Event().wait()

    async def objects(self, value: list[Middle]) -> None:
        await asyncio.Event().wait()

    @rpc.method(details=list[list[int]])
    async def fail(self, count: int) -> None:
        raise rpc.Error(Code.ABORTED, "no", [[]] * count)


LIMITS = rpc.Limits(decoded_bytes=100_000)


@by_tcp
async def test_a_message_may_not_make_more_than_the_limit(net: Net):
    client, server = await net.pair(Taker(), limits=LIMITS)
    few, many = [[]] * 1000, [[]] * 2000
    assert await client.lists(few) == await client.anything(few) == 1000

    async def items(value: list[list[int]]) -> AsyncIterator[list[list[int]]]:
        yield value

    assert await client.stream(items(few)) == 1000
    for calling in (client.lists(many), client.anything([{}] * 2000), client.stream(items(many))):
        with pytest.raises(rpc.Error, match="the limit decoded_bytes is 100000") as caught:
            await calling
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert await client.put(bytes(1_000_000)) == 1_000_000
    other, _ = await net.pair(Taker())
    with pytest.raises(rpc.Error, match="keys collide"):
        await other.anything(KEYS["numbers"][1])
    assert server.shares.held_bytes == 0


@by_tcp
async def test_without_weighing_it_makes_more(net: Net, monkeypatch: pytest.MonkeyPatch):
    """The control."""
    monkeypatch.setattr(Scale, "weigh", lambda *_: 0)
    client, _ = await net.pair(Taker(), limits=LIMITS)
    assert await client.lists([[]] * 2000) == await client.anything([{}] * 2000) == 2000


@by_tcp
async def test_a_client_is_protected_from_its_server(net: Net):
    server = await net.serve(Taker())
    client = await net.connect(Taker, server, limits=LIMITS)
    assert len(await client.give(1000)) == 1000
    with pytest.raises(rpc.Error, match="the limit decoded_bytes is 100000"):
        await client.give(2000)
    assert [len(item) async for item in client.streams(1000)] == [1000]
    with pytest.raises(rpc.Error, match="the limit decoded_bytes is 100000"):
        assert [item async for item in client.streams(2000)]
    for count, details in ((1000, [[]] * 1000), (100_000, None)):
        with pytest.raises(rpc.Error, match="no") as caught:
            await client.fail(count)
        assert caught.value.details == details


@by_tcp
async def test_what_is_short_is_not_weighed(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Arguments, results, and items of both streams: to weigh these takes longer than to decode them."""

    async def items() -> AsyncIterator[list[list[int]]]:
        for _ in range(3):
            yield [[]]

    client, _ = await net.pair(Taker())
    monkeypatch.setattr(Scale, "weigh", lambda *_: pytest.fail("it was weighed"))
    assert await client.lists([[]]) == await client.stream(items()) - 2 == 1
    assert [item async for item in client.streams(1)] == [await client.give(1)] == [[[]]]


async def held_bytes(call: Awaitable[Any], server: rpc.Server) -> int:
    """How much a call holds that does not end by itself."""
    holding = asyncio.ensure_future(call)
    await until_seen(lambda: server.shares.calls)
    held = callee(server).share.inline_bytes
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await idle(server)
    return held


@by_tcp
async def test_what_arguments_have_become_counts(net: Net):
    client, server = await net.pair(Taker())
    assert await held_bytes(client.hold([[]] * 1000), server) > 72_000
    short: Any = [{}] * 100  # of heavy objects
    assert await held_bytes(client.objects(short), server) > 100_000
    metadata = {f"{number}": "" for number in range(1000)}
    assert await held_bytes(rpc.options(client, metadata=metadata).hold([]), server) > 200_000
