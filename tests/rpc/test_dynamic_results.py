"""Arrays within results of a client that has only the server's schema."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
from net import Net, failure
from numpy.typing import NDArray

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.dynamic_client import Discovered, DiscoveredMethod, discover
from rdmanet.rpc.dynamic_results import ArrayWithin, Finder, Reading
from rdmanet.rpc.packing import Packed
from rdmanet.rpc.pending import CallDetails


class Layer(msgspec.Struct):
    weight: NDArray[numpy.float32]
    bias: NDArray[numpy.float32] | None = None
    inner: "list[Layer]" = []


class Pair(NamedTuple):
    name: str
    array: NDArray[Any]


class Tagged(msgspec.Struct, tag="t", array_like=True):
    count: int
    array: NDArray[Any]


class Other(msgspec.Struct, tag="o", array_like=True):
    count: int


class Store(rpc.Service):
    async def state(self, count: int, size: int) -> dict[str, NDArray[numpy.float32]]:
        return {f"w{index}": numpy.full(size, index, "f4") for index in range(count)}

    async def layers(self) -> list[Layer]:
        return [Layer(numpy.ones(2, "f4"), numpy.zeros((1, 1), "f4"), [Layer(numpy.ones(0, "f4"))])]

    async def pair(self) -> tuple[Pair, Tagged | Other, Tagged | Other]:
        return Pair("a", numpy.array([True])), Tagged(3, numpy.array(["ab"])), Other(4)

    async def maybe(self, there: bool) -> NDArray[numpy.int64] | None:
        return numpy.arange(3) if there else None

    async def many(self, count: int) -> AsyncIterator[NDArray[numpy.int16]]:
        for index in range(count):
            yield numpy.arange(index, dtype="i2")

    async def numbers(self) -> list[int]:
        return [1, 2]


def place(array: ArrayWithin) -> tuple[str, list[int], int]:
    return array.where, array.placed.shape, array.nbytes


class Asked:
    """A client without the class.

    :param wants: which arrays it reads
    """

    def __init__(self, channel: Any, schema: Discovered, wants: Any = lambda placed: True) -> None:
        self.channel, self.schema, self.wants = channel, schema, wants

    def prepared(self, name: str, given: dict[str, Any]) -> CallDetails:
        method = self.schema.methods[name]
        assert isinstance(method, DiscoveredMethod)
        method.wants = self.wants
        arguments = method.arguments_of(given, self.schema.structs, str.encode, lambda *array: array[0])
        return CallDetails(method, tuple(arguments))

    async def call(self, name: str, **given: Any) -> Any:
        return await self.channel.unary(self.prepared(name, given))

    def arrays(self, name: str) -> list[ArrayWithin]:
        method = self.schema.methods[name]
        assert isinstance(method, DiscoveredMethod)
        return method.arrays


async def test_arrays_are_found_wherever_a_type_may_stand(net: Net):
    server = await net.serve(Store())
    async with discover("Store", *(*net.address(server), None)[:2], net.transport) as (channel, schema):
        asked = Asked(channel, schema)
        for count, size in ((0, 0), (2, 3), (3, 300_000), (2, 1 << 20)):  # over RDMA on loan, and in parts
            found = await asked.call("state", count=count, size=size)
            assert [place(array) for array in found.values()] == [
                (f"w{index}", [size], 4 * size) for index in range(count)
            ]
            for index, array in enumerate(found.values()):
                assert (numpy.frombuffer(array.data, "f4") == index).all()
            assert asked.arrays("state") == list(found.values())
        (layer,) = await asked.call("layers")
        assert place(layer["weight"]) == ("0.weight", [2], 8) and bytes(layer["bias"].data) == bytes(4)
        (inner,) = layer["inner"]
        assert place(inner["weight"]) == ("0.inner.0.weight", [0], 0) and inner["bias"] is None
        assert len(asked.arrays("layers")) == 3
        (name, array), tagged, other = await asked.call("pair")
        assert name == "a" and place(array) == ("0.array", [1], 1) and array.data == b"\1"
        assert tagged[:2] == ["t", 3] and place(tagged[2]) == ("1.array", [1], 8) and other == ["o", 4]
        assert await asked.call("maybe", there=False) is None and asked.arrays("maybe") == []
        assert place(await asked.call("maybe", there=True)) == ("", [3], 24)
        assert await asked.call("numbers") == [1, 2]
        items = [item async for item in channel.stream(asked.prepared("many", {"count": 3}))]
        assert [bytes(item.data) for item in items] == [
            numpy.arange(n, dtype="i2").tobytes() for n in range(3)
        ]


async def test_what_is_not_wanted_is_not_read(net: Net):
    server = await net.serve(Store())
    async with discover("Store", *(*net.address(server), None)[:2], net.transport) as (channel, schema):
        asked = Asked(channel, schema, lambda placed: placed.shape == [5])
        found = await asked.call("state", count=2, size=1 << 20)
        assert [array.data for array in found.values()] == [None, None]
        assert bytes((await asked.call("state", count=1, size=5))["w0"].data) == bytes(20)


@pytest.mark.parametrize(
    ("value", "type_", "says"),
    [
        (["<f4", [2], 4], ["array", "any"], "is not in the 8 bytes of memory"),
        ([["<f4", [1], 4], ["<f4", [1], 0]], ["list", ["array", "any"]], "behind the arrays before it"),
        (["<f4", [2], b"abc"], ["array", "any"], "does not have 3 bytes"),
        (["<f4", [2], -1], ["array", "any"], "what has come for an array is none"),
        ("text", ["array", "any"], "what has come for an array is none"),
        (["|O", [1], 0], ["array", "any"], "is not accepted"),
        ({"a": 1}, ["dict", "str", ["array", "any"]], "what has come for an array is none"),
    ],
)
def test_what_a_server_may_not_send(value: Any, type_: Any, says: str):
    reading = Reading(Packed(b"", memoryview(bytes(8))), lambda placed: True)
    with pytest.raises(ValueError, match=says):
        Finder({}, reading.found)(value, type_)


def test_what_is_of_another_type_is_left():
    structs = {"S": ["map", None, False, [["array", ["array", "any"], True]]]}
    find = Finder(structs, lambda placed, where: (where, placed.place))
    array = ["<f4", [2], 0]
    for value, type_, found in (
        (5, ["list", ["array", "any"]], 5),
        ([array], ["tuple", ["array", "any"], "int"], [array]),
        ({"array": array, "more": array}, ["struct", "S"], {"array": ("array", 0), "more": array}),
        (array, ["struct", "S"], array),
        (array, ["within", ["array", "any"], {}], ("", 0)),
        ([array], ["union", "none", "int", ["list", ["array", "any"]]], [("0", 0)]),
        ({"array": array}, ["union", ["dict", "str", ["array", "any"]], ["struct", "S"]], {"array": array}),
        (array, "any", array),
    ):
        assert find(value, type_) == found


async def test_a_result_that_is_wrong(net: Net):
    """It fails the call, and not the connection."""

    class Liar(Store):
        async def state(self, count: int, size: int) -> dict[str, Any]:  # type: ignore[override]
            return {"w": ["<f4", [5], 0]}

    server = await net.serve(Liar())
    address = (*net.address(server), None)[:2]
    async with discover("Liar", *address, net.transport) as (channel, schema):
        method = schema.methods["state"]
        assert isinstance(method, DiscoveredMethod)
        described = ["state", 0, method.described, None, ["dict", "str", ["array", "any"]]]
        number = method.number
        DiscoveredMethod.__init__(method, "Liar", described, {})
        method.number = number
        error = await failure(channel.unary(CallDetails(method, (1, 1))))
        assert error.code is Code.INTERNAL and "is not in the 0 bytes of memory" in error.text
        assert await Asked(channel, schema).call("numbers") == [1, 2]
