"""Two versions of a service: what connects also works, and what would not is refused by name when they connect."""

import dataclasses
import datetime
import enum
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
import numpy
import pytest
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct
from msgspec.msgpack import encode
from net import Net

from rdmanet import rpc
from rdmanet.rpc.describe import Structs, describe, differences
from rdmanet.rpc.lending import LEND_BYTES


def service(parameter: Any = None, result: Any = None, returns: Any = None) -> type[rpc.Service]:
    """A service with a method that takes this type, or returns that one. It keeps what it gets."""

    async def take(self: Any, value: Any) -> None:
        self.got = value

    async def give(self: Any) -> Any:
        return returns() if callable(returns) else returns

    take.__annotations__["value"] = parameter
    give.__annotations__["return"] = result
    return type("Store", (rpc.Service,), {"take": take, "give": give})


def difference(written: Any, read: Any) -> str:
    """Why what is written as one type is not understood as the other."""
    by: Structs = {}
    of: Structs = {}
    there, here = describe(written, by), describe(read, of)
    return "; ".join(differences(*plain(there, by), *plain(here, of), "x"))


def plain(*described: Any) -> Any:
    """As it comes by the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(described))


# ---- Bytes that one version has in a union -------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, LEND_BYTES])
@pytest.mark.parametrize(
    "there", [bytes | None, memoryview | None, bytes | list[int], bytearray, Any], ids=str
)
@pytest.mark.parametrize("here", [bytes, memoryview, rpc.Buffer], ids=str)
async def test_a_buffer_for_who_accepts_more(net: Net, here: Any, there: Any, size: int):
    """It is whole, and of the receiver's type, though it may go by reference between others."""
    data = bytes(range(256)) * (size // 256) + b"123"
    newer = service(there)()
    server = await net.serve(newer)
    client: Any = await net.connect(service(here), server)
    for value in (data, bytearray(data), memoryview(data), rpc.Buffer(data), numpy.frombuffer(data, "u1")):
        await client.take(value)
        got, newer.got = newer.got, None  # type: ignore[attr-defined]
        assert got == data
        assert type(got) is (
            memoryview if there == memoryview | None else bytearray if there is bytearray else bytes
        )
    older = await net.serve(
        service(result=here, returns=lambda: rpc.Buffer(data) if here is rpc.Buffer else data)()
    )
    client = await net.connect(service(result=there), older)
    got = await client.give()
    assert got == data
    assert type(got) is (
        memoryview if there == memoryview | None else bytearray if there is bytearray else bytes
    )


async def test_a_buffer_beside_a_stream_for_who_accepts_more(net: Net):
    class Old(rpc.Service):
        async def send(self, data: bytes, more: AsyncIterator[int]) -> AsyncIterator[int]:
            yield 0

    class New(rpc.Service, name="Old"):
        async def send(self, data: bytes | None, more: AsyncIterator[int]) -> AsyncIterator[int]:
            assert data is not None
            yield len(data)
            async for number in more:
                yield number

    async def numbers() -> AsyncIterator[int]:
        yield 7

    client = await net.connect(Old, await net.serve(New()))
    assert [number async for number in client.send(bytes(LEND_BYTES), numbers())] == [LEND_BYTES, 7]


# ---- What is left out ----------------------------------------------------------------------------------------


class Total(TypedDict):
    x: int


class Partial(TypedDict):
    x: NotRequired[int]


class Plain(Struct):
    x: int


class Defaulted(Struct):
    x: int = 0


class Other(Struct):
    x: int = 1


class Made(Struct):
    x: int = msgspec.field(default_factory=lambda: 0)


class Omitting(Struct, omit_defaults=True):
    x: int = 0


class OmittingMade(Struct, omit_defaults=True):
    x: int = msgspec.field(default_factory=lambda: 0)


class Unset(Struct):
    x: int | UnsetType = UNSET


class UnsetRequired(Struct):
    x: Annotated[int | UnsetType, "may be left out"]


class UnsetOmitting(Struct, omit_defaults=True):
    x: int | UnsetType = 0


@dataclasses.dataclass
class UnsetData:
    x: int | UnsetType = UNSET


@dataclasses.dataclass
class Data:
    x: int


ALWAYS = [Total, Plain, Defaulted, Other, Made, OmittingMade, Data]
"""Who writes these writes x."""
OPTIONAL = [Partial, Defaulted, Other, Made, Omitting, OmittingMade, Unset, UnsetOmitting, UnsetData]
"""Who reads these does without x."""
LEAVING_OUT = [Partial, Unset, UnsetRequired, UnsetData]
REQUIRED = [Total, Plain, Data, UnsetRequired]


def test_what_may_be_left_out_has_to_be_optional():
    for read in [*REQUIRED, *OPTIONAL]:
        assert not any(difference(written, read) for written in ALWAYS)
    for written in LEAVING_OUT:
        assert not any(difference(written, read) for read in OPTIONAL)
        for read in REQUIRED:
            assert difference(written, read) == (
                f"x: {written.__name__}.x is left out at times, and is required by {read.__name__}"
            )
    for read in REQUIRED:
        assert "Omitting.x is left out if it is 0, and is required by" in difference(Omitting, read)


def test_a_default_that_is_left_out_is_the_readers_default():
    for read in (Defaulted, Omitting, UnsetOmitting):
        assert difference(Omitting, read) == difference(UnsetOmitting, read) == ""
    for read in (Other, Made, OmittingMade, Partial, Unset, UnsetData):
        says = f"Omitting.x is left out if it is 0, which is not the default of {read.__name__}"
        assert says in difference(Omitting, read) and says in difference(UnsetOmitting, read)


def test_an_array_has_all_its_items():
    class Pair(NamedTuple):
        a: int
        b: int = 0

    class Triple(NamedTuple):
        a: int
        b: int = 0
        c: int = 0

    class Array(Struct, array_like=True, omit_defaults=True):
        a: int
        b: int = 0

    class Longer(Struct, array_like=True):
        a: int
        b: int = 1
        c: int = 0

    assert "Triple.c is unknown to Pair, which forbids that" in difference(Triple, Pair)
    assert "Longer.c is unknown to Pair, which forbids that" in difference(Longer, Pair)
    for written in (Pair, Array):
        assert not any(difference(written, read) for read in (Pair, Triple, Array, Longer))
    for written in (Triple, Longer):
        assert not any(difference(written, read) for read in (Triple, Array, Longer))


# ---- Limits and flags ----------------------------------------------------------------------------------------


def within(type_: Any, **limits: Any) -> Any:
    return Annotated[type_, Meta(**limits)]


NARROWER = [
    (within(int, ge=1), within(int, ge=0), int),
    (within(int, gt=0), within(int, ge=0), within(int, ge=-1)),
    (within(int, ge=1), within(int, gt=0), within(int, gt=-1)),
    (within(int, le=5, ge=0), within(int, le=6), within(float, lt=7.5)),
    (within(int, lt=5), within(int, le=5), within(int, lt=6)),
    (within(int, multiple_of=6), within(int, multiple_of=3), int),
    (within(str, max_length=3), within(str, max_length=4), str),
    (within(str, min_length=3), within(str, min_length=1), within(str, min_length=0)),
    (within(str, pattern="^a"), str, Any),
    (within(list[int], max_length=3), list[int], Any),
    (within(datetime.datetime, tz=True), datetime.datetime, Any),
    (within(dict[str, int], max_length=3, min_length=1), within(dict[str, float], min_length=1), Any),
    (within(bytes, max_length=3), bytes, bytes | None),
]


def test_limits_of_two_versions():
    for narrow, wide, wider in NARROWER:
        for written, read in [(narrow, narrow), (wide, wide), (narrow, wide), (wide, wider), (narrow, wider)]:
            assert not difference(written, read), (written, read)
        assert difference(wide, narrow), (wide, narrow)
    assert difference(int, within(int, ge=0, le=9)) == "x: int is not int with ge=0, le=9"
    assert difference(list[int], list[within(int, ge=0)]) == "x[]: int is not int with ge=0"
    assert difference(datetime.datetime, within(datetime.datetime, tz=False))


class Colours(enum.Flag):
    RED = 1
    GREEN = 2


class MoreColours(enum.Flag):
    RED = 1
    GREEN = 2
    BLUE = 4
    ALL = 7


def test_an_integer_is_for_the_member_that_has_integers():
    """msgspec gives it to that member, and not to the float beside it."""
    for member in (Literal[3], Colours):
        assert difference(int, member | float) and difference(within(int, ge=1), member | float)
        assert not difference(int, float | str) and not difference(float, member | float)
    assert not difference(int, Literal["3"] | float)


def test_flags_of_two_versions():
    assert describe(MoreColours, {}) == ["flags", 7]
    assert not difference(Colours, MoreColours)
    assert difference(MoreColours, Colours) == "x: the other side has no flags of 0x4"
    assert difference(Colours, Literal[1, 2])  # which is not 3


class Unbounded(enum.IntFlag):
    RED = 1


class Many(enum.Flag):
    locals().update({f"F{bit}": 1 << bit for bit in range(17)})


@pytest.mark.parametrize(
    "flags, text",
    [(Unbounded, "Unbounded keeps bits.*boundary=enum.STRICT.*, or send an int"), (Many, "Many has 17 bits")],
)
def test_flags_that_a_peer_could_make_very_many_of(flags: Any, text: str):
    """Their class keeps each combination for good."""
    for type_ in (flags, list[flags | None], Annotated[dict[str, flags], Meta(max_length=3)]):
        with pytest.raises(TypeError, match=text):
            service(type_)
        with pytest.raises(TypeError, match=text):
            service(None, type_)
        with pytest.raises(TypeError, match=text):

            class Failing(rpc.Service):
                @rpc.method(details=type_)
                async def fail(self) -> None: ...


@pytest.mark.parametrize("transport", ["unix"])
async def test_combined_flags(net: Net):
    newer: Any = service(MoreColours)()
    client: Any = await net.connect(service(Colours), await net.serve(newer))
    for flags in (Colours(0), Colours.RED, Colours.RED | Colours.GREEN):
        await client.take(flags)
        assert newer.got is MoreColours(flags.value)


HOSTILE: list[Callable[[], Any]] = [
    lambda: differences("int", {}, ["within", "int", {"multiple_of": 0}], {}),
    lambda: differences(["flags", "a"], {}, ["flags", 1], {}),
    lambda: differences("int", {}, ["within", "int", 5], {}),
    lambda: differences("int", {}, ["within", "int"], {}),
    lambda: differences(["within", "int", {"ge": "a"}], {}, ["within", "int", {"ge": 1}], {}),
    lambda: differences(*struct(["x", "int", True, "a", []]), *struct(["x", "int", True])),
    lambda: differences(*struct(["x", "int", True, 1, []]), *struct(["x", "int", True])),
    lambda: differences(*struct(["x", "int", True, 1]), *struct(["x", "int", True])),
    lambda: differences(*struct(["x", "int", True, 1, [1]]), *struct(["x", "int", False, 0, 5])),
]


def struct(*fields: Any) -> Any:
    return ["struct", "A"], {"A": ["map", None, False, list(fields)]}


@pytest.mark.parametrize("hostile", range(len(HOSTILE)))
def test_a_hostile_description(hostile: int):
    """It differs, or is refused by an exception that `Schema.understands` expects."""
    try:
        assert HOSTILE[hostile]()
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        pass


# ---- Generic classes, and defaults ---------------------------------------------------------------------------

T = TypeVar("T")


class Box(Struct, Generic[T]):
    value: T
    more: "Box[T] | None" = None


@dataclasses.dataclass
class Pair(Generic[T]):
    one: T
    other: Box[T] | None = None


async def test_generic_classes_of_several_types(net: Net):
    class Boxes(rpc.Service):
        async def shown(self, value: Box[int], pair: Pair[str | None]) -> Box[str]:
            return Box(str(value.value), Box(str(pair.one)))

        async def boxed(self, value: list[Box[list[int]]]) -> Box[Box[int]]:
            return Box(Box(value[0].value[0]))

    client, _ = await net.pair(Boxes())
    assert await client.shown(Box(1), Pair("x")) == Box("1", Box("x"))
    assert await client.boxed([Box([7])]) == Box(Box(7))
    structs = Boxes.__rpc_schema__.description[1]
    names = [
        "Box[Box[int]]",
        "Box[int]",
        "Box[list[int]]",
        "Box[str | NoneType]",
        "Box[str]",
        "Pair[str | NoneType]",
    ]
    assert list(structs) == names


def test_defaults_that_are_equal_numbers():
    """A default of 0 is that of 0.0, where a float is read."""
    whole, real = (omitting(float, default=number) for number in (0, 0.0))
    assert not difference(whole, real) and not difference(real, whole)
    assert not difference(omitting(int, default=5), omitting(float, default=5))
    assert not difference(omitting(int, default=5), omitting(float, default=5.0))
    assert "which is not the default" in difference(omitting(float, default=1), omitting(float, default=0.0))
    assert "which is not the default" in difference(omitting(Any, default=0), omitting(Any, default=0.0))


@pytest.mark.parametrize(
    "factory, type_",
    [(made, made) for made in (list, dict, set, frozenset, tuple, bytes, str, int, float, bool)],
)
def test_what_a_factory_makes_is_left_out_or_not(factory: Any, type_: Any):
    """A field that is always there may be required by the reader."""
    written = omitting(type_, default_factory=factory)
    required = defstruct("Record", [("value", type_)])
    is_left_out = encode(written()) == encode({})
    assert ("is required" in difference(written, required)) == is_left_out


def omitting(type_: Any, **default: Any) -> type[Struct]:
    field: Any = msgspec.field(**default)
    return defstruct("Record", [("value", type_, field)], omit_defaults=True)
