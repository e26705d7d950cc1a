"""What every server has beside its own service: health and reflection. And clients that learn the schema."""

import asyncio
import datetime
import enum
import functools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
from net import Journal, Net, failure
from strangers import HELLO, NUMBERS, Stranger

from rdmanet import rpc
from rdmanet.errors import ProtocolError
from rdmanet.rpc import Code
from rdmanet.rpc.dynamic_client import Discovered, DiscoveredMethod, discover
from rdmanet.rpc.messages import Hello, raw
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.schema import Schema, schema_of
from tests.support.waiting import begin

tcp = pytest.mark.parametrize("transport", ["tcp"])


class Color(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    y: int = 0
    data: bytes = b""


class Pair(NamedTuple):
    name: str
    size: int = 0


class Circle(msgspec.Struct, tag=True):
    size: int


class Square(msgspec.Struct, tag=True):
    size: int


class Mark(msgspec.Struct, tag="m", tag_field="kind", array_like=True):
    number: int


class Store(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.gate = asyncio.Event()

    async def get(self, name: str, size: int = 3) -> rpc.Buffer:
        return rpc.Buffer(name.encode() * size)

    async def put(self, data: memoryview, more: bytes = b"") -> int:
        return len(data) + len(more)

    async def shapes(
        self,
        points: list[Point],
        pairs: dict[int, Pair],
        color: Color = Color.RED,
        maybe: Point | None = None,
    ) -> list[Any]:
        return [points, pairs, color, maybe]

    async def double(self, array: numpy.ndarray) -> numpy.ndarray:
        return array * 2

    async def area(self, shape: Circle | Square, mark: Mark) -> int:
        return shape.size + mark.number

    async def when(self, day: datetime.datetime) -> datetime.datetime:
        return day

    async def count(self, until: int) -> AsyncIterator[int]:
        for number in range(until):
            yield number

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def wait(self) -> None:
        self.journal("wait")
        await self.gate.wait()


async def test_health(net: Net):
    service = Store()
    client, server = await net.pair(service)
    health = await net.connect(rpc.Health, server)
    assert await health.check() == await health.check("Store") == "SERVING"
    assert (await failure(health.check("disk"))).code is Code.NOT_FOUND
    server.set_health("NOT_SERVING")
    server.set_health("SERVING", "disk")
    assert await health.check() == await health.check("Store") == "NOT_SERVING"
    assert await health.check("disk") == "SERVING"
    server.set_health("SERVING")
    with pytest.raises(ValueError, match="is not"):
        server.set_health("SICK")  # type: ignore[arg-type]
    (call,) = await begin(client.wait())
    await service.journal.until("wait")
    (draining,) = await begin(server.drain())
    assert await health.check() == await health.check("disk") == "NOT_SERVING"
    service.gate.set()
    await call
    await draining
    assert (await failure(health.check())).code is Code.UNAVAILABLE


async def test_reflection(net: Net):
    server = await net.serve(Store())
    reflection = await net.connect(rpc.Reflection, server)
    assert await reflection.services() == ["Store", "rdmanet.Health", "rdmanet.Reflection"]
    found = await reflection.schema("Store")
    assert found == msgspec.msgpack.decode(schema_of(Store).encoded)
    assert [method[0] for method in (await reflection.schema("rdmanet.Health"))[0]] == ["check"]
    assert (await failure(reflection.schema("x" * 5000))).code is Code.NOT_FOUND


@tcp
async def test_interceptors_see_them(net: Net):
    async def refuse(call: rpc.CallInfo, proceed: Any) -> Any:
        if call.service == "rdmanet.Reflection":
            raise rpc.Error(Code.PERMISSION_DENIED)
        return await proceed()

    server = await net.serve(Store(), interceptors=[refuse], intercept_builtin=True)
    assert (
        await failure((await net.connect(rpc.Reflection, server)).services())
    ).code is Code.PERMISSION_DENIED
    assert await (await net.connect(rpc.Health, server)).check() == "SERVING"


def latin(text: str) -> bytes:
    return text.encode("latin-1")


def prepared(schema: Discovered, name: str, /, stream: Any = None, **given: Any) -> CallDetails:
    method = schema.methods[name]
    assert isinstance(method, DiscoveredMethod)
    arguments = method.arguments_of(given, schema.structs, latin, lambda value, items, where: value)
    return CallDetails(method, tuple(arguments), stream)


async def test_a_client_that_learns_the_schema(net: Net):
    server = await net.serve(Store())
    address = (*net.address(server), None)[:2]
    async with discover("Store", *address, net.transport) as (channel, schema):

        async def call(name: str, /, **given: Any) -> Any:
            return await channel.unary(prepared(schema, name, **given))

        assert channel.service == "Store"
        assert await (await call("get", name="ab")).read() == b"ababab"
        large = await call("get", name="x" * 1000, size=2000)  # by reference over RDMA
        assert len(await large.read()) == 2_000_000
        large.release()
        assert await call("put", data="four") == 4
        assert await call("put", data="x" * (2 << 20), more="more") == (2 << 20) + 4
        assert await call(
            "shapes", points=[{"x": 1, "data": "a"}], pairs={"-1": {"name": "a"}}, color="red", maybe={"x": 2}
        ) == [[{"x": 1, "y": 0, "data": b"a"}], {-1: ["a", 0]}, "red", {"x": 2, "y": 0, "data": b""}]
        for size in (4, 1 << 20):
            numbers = numpy.arange(size, dtype="<f4")
            found = await call("double", array=["<f4", [size], numbers.tobytes().decode("latin-1")])
            assert await found.read() == (numbers * 2).tobytes()
            found.release()
        assert await call("area", shape={"type": "Circle", "size": 2}, mark={"number": 3}) == 5
        assert (await call("when", day="2026-01-02T03:04:05Z")).year == 2026
        assert [item async for item in channel.stream(prepared(schema, "count", until=3))] == [0, 1, 2]
        items = channel.stream(prepared(schema, "count", until=5))
        assert await channel.unary(prepared(schema, "total", items)) == 10
        error = await failure(call("get", name=5))
        assert error.code is Code.INVALID_ARGUMENT and "`name`" in error.text
        for given, says in (
            ({}, "the parameter 'name' is missing: it is str"),
            ({"nam": "w"}, "there is no parameter 'nam'; there are: name, size"),
        ):
            with pytest.raises(ValueError, match=says):
                prepared(schema, "get", **given)
        with pytest.raises(ValueError, match="points.*: Point lacks 'x'"):
            prepared(schema, "shapes", points=[{}], pairs={})
        with pytest.raises(ValueError, match="is before 'maybe'"):
            prepared(schema, "shapes", points=[], pairs={}, maybe=None)
        assert str(schema.methods["get"]) == "get(name: str, size: int = ...) -> buffer"
        assert str(schema.methods["total"]) == "total(stream of int) -> int"


@functools.cache
def many() -> type[rpc.Service]:
    async def method(self: Any, a: int, b: str = "") -> list[int]:
        return []

    return type("Many", (rpc.Service,), {f"method_{number}": method for number in range(2048)})


@tcp
async def test_a_server_of_thousands_of_methods(net: Net):
    """Its schema is encoded once, and a client that does not take that much gets an error."""

    server = await net.serve(many()())
    reflection = await net.connect(rpc.Reflection, server)
    found = await asyncio.gather(*(reflection.schema("Many") for _ in range(5)))
    assert all(len(each[0]) == 2048 for each in found)
    small = await net.connect(rpc.Reflection, server, limits=rpc.Limits(message_bytes=10_000))
    assert (await failure(small.schema("Many"))).code is Code.RESOURCE_EXHAUSTED
    assert await small.services()
    async with discover("Many", *net.address(server), net.transport) as (_, schema):
        assert len(schema.methods) == 2048


HOSTILE = {
    "no array": 5,
    "no structs": [[]],
    "a type that is a number": [[["a", 0, [], None, 5]], {}],
    "a type of no kind": [[["a", 0, [], None, []]], {}],
    "a list of nothing": [[["a", 0, [], None, ["list"]]], {}],
    "a struct that is not there": [[["a", 0, [], None, ["struct", "P"]]], {}],
    "a struct that is a list": [[["a", 0, [], None, ["struct", ["P"]]]], {}],
    "a struct of another form": [[], {"P": ["map"]}],
    "a tag of another form": [[], {"P": ["map", "tag", False, []]}],
    "an array of nothing": [[["a", 0, [], None, ["array"]]], {}],
    "fields of another form": [[], {"P": ["map", None, False, [["x"]]]}],
    "a depth": [[["a", 0, [["x", eval("[" * 90 + "]" * 90), True]], None, "int"]], {}],
    "an unknown kind of method": [[["a", 9, [], None, "int"]], {}],
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_schema_that_is_none(hostile: str):
    with pytest.raises(ProtocolError, match="what is no schema"):
        Discovered("Store").understands(raw(HOSTILE[hostile]))


def test_names_of_a_hostile_schema_do_no_harm():
    schema = Discovered("Store")
    description = [[["\x1b[31m()", 3, [["class", ["one of", {}, 1], True]], "int", "nonsense"]], {}]
    assert schema.understands(raw(description)) == {"\x1b[31m()": 0}
    assert "class" in str(schema.numbered[0])


@tcp
async def test_a_server_that_claims_to_have_the_same_schema(net: Net):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        await peer.hear()
        peer.say(Hello(HELLO.magic, HELLO.version, "Store", bytes(32), 1 << 20, 100, 10_000))
        await peer.is_cut_off()
        writer.close()

    assert NUMBERS
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await net._stack.enter_async_context(server)
    host, port = server.sockets[0].getsockname()
    async with discover("Store", host, port, "tcp") as (channel, schema):
        assert isinstance(schema, Schema) and not schema.methods
