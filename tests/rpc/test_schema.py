"""Services as they are read from their classes, and compared with those of the other side."""

import dataclasses
import enum
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import pytest

from rdmanet import rpc
from rdmanet.errors import ProtocolError
from rdmanet.rpc.describe import differences
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.method import Kind
from rdmanet.rpc.schema import Schema, schema_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(msgspec.Struct):
    value: int
    children: list["Tree"] = []


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


class Example(rpc.Service):
    async def get(self, name: str) -> bytes: ...  # type: ignore[empty-body]

    async def put(self, name: str, data: memoryview, times: int = 1, *, tree: Tree | None = None) -> None: ...

    async def paint(
        self, colour: Colour, at: Point, how: Literal["thick", "thin"]
    ) -> dict[str, list[int]]: ...  # type: ignore[empty-body]

    async def watch(self, prefix: str) -> AsyncIterator[Tree]:
        yield Tree(1)

    async def total(self, start: int, numbers: AsyncIterator[int]) -> int: ...  # type: ignore[empty-body]

    async def _private(self) -> Any: ...


def test_what_is_read():
    schema = schema_of(Example)
    assert list(schema.methods) == ["get", "paint", "put", "total", "watch"]
    assert [method.number for method in schema.numbered] == [0, 1, 2, 3, 4]
    assert {name: method.kind for name, method in schema.methods.items()} == {
        "get": Kind.UNARY,
        "paint": Kind.UNARY,
        "put": Kind.UNARY,
        "total": Kind.CLIENT_STREAM,
        "watch": Kind.SERVER_STREAM,
    }
    put = schema.methods["put"]
    assert [(p.name, p.is_buffer, p.by_keyword) for p in put.parameters] == [
        ("name", False, False),
        ("data", True, False),
        ("times", False, False),
        ("tree", False, True),
    ]
    assert schema_of(Example()) is schema
    with pytest.raises(TypeError, match="is not a rdmanet.rpc.Service"):
        schema_of(int)  # type: ignore[arg-type]


def test_its_description():
    methods, structs = schema_of(Example).description
    assert ["put", "str"] == [methods[2][0], methods[2][2][0][1]]
    assert methods[1] == [
        "paint",
        0,
        [
            ["colour", ["one of", "red", "blue"], True],
            ["at", ["struct", "Point"], True],
            ["how", ["one of", "thin", "thick"], True],
        ],
        None,
        ["dict", "str", ["list", "int"]],
    ]
    assert structs["Tree"] == [
        "map",
        None,
        False,
        [["value", "int", True], ["children", ["list", ["struct", "Tree"]], False, 0, [[]]]],
    ]


REFUSED = {
    "async def get(self, name) -> int: ...": "get: parameter name has no annotation",
    "async def get(self, name: str): ...": "get: the result has no annotation",
    "def get(self) -> int: ...": "get is not a coroutine function",
    "async def get(self, *names: str) -> int: ...": "get: parameter names: a method has no * or **",
    "async def get(self, lock: threading.Lock) -> int: ...": "get: parameter lock: ",
    "async def get(self) -> threading.Thread: ...": "get: the result: ",
    "async def get(self, a: AsyncIterator[int], b: AsyncIterator[int]) -> int: ...": "get: parameter b: a method takes",
    "async def get(self) -> AsyncIterator[int]: ...": "get: a coroutine function cannot return a stream",
    "def get(self) -> AsyncIterator[rpc.Buffer]: ...": "get: the result: a stream has no rpc.Buffer",
    "async def get(self, a: AsyncIterator[rpc.Buffer]) -> int: ...": "get: parameter a: a stream has no rpc.Buffer",
    "async def get(self, later: 'Later') -> int: ...": "get: an annotation is not defined yet: name 'Later'",
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_is_refused_when_the_class_is_defined(method: str):
    source = f"import threading\nclass Wrong(rpc.Service):\n    {method}\n"
    with pytest.raises(TypeError, match=re.escape("Wrong." + REFUSED[method])):
        exec(source, {"rpc": rpc, "AsyncIterator": AsyncIterator})


def test_types_of_one_name():
    def other() -> type:
        class Tree(msgspec.Struct):
            wood: str

        return Tree

    with pytest.raises(TypeError, match="two types that differ are both named 'Tree'"):
        exec(
            "class Wrong(rpc.Service):\n    async def get(self, a: A, b: B) -> None: ...",
            {"rpc": rpc, "A": Tree, "B": other()},
        )


def test_arguments_are_bound_as_by_python():
    put = schema_of(Example).methods["put"]
    assert put.bind(("w", b"1"), {}) == (("w", b"1", 1, None), None)
    assert put.bind(("w",), {"data": b"1", "tree": None}) == (("w", b"1", 1, None), None)
    for arguments, by_name, says in [
        (("w",), {}, "lacks the argument 'data'"),
        (("w", b"", 1, None), {}, "takes 3 positional arguments, not 4"),
        (("w", b""), {"name": "w"}, "two values for 'name'"),
        (("w", b""), {"colour": 1}, "has no parameter 'colour'"),
    ]:
        with pytest.raises(TypeError, match=re.escape(says)):
            put.bind(arguments, by_name)
    total = schema_of(Example).methods["total"]
    assert total.bind((1, "stream"), {}) == ((1,), "stream")
    assert total.bind((), {"numbers": "stream", "start": 1}) == ((1,), "stream")
    with pytest.raises(TypeError, match="lacks the argument 'numbers'"):
        total.bind((1,), {})


@pytest.mark.parametrize(
    ("parameters", "calls"),
    [
        (
            "x: int, items: AsyncIterator[int], y: int = 0",
            [((1, "s", 2), {}), ((1,), {"items": "s", "y": 2})],
        ),
        ("x: int, items: AsyncIterator[int], *, y: int = 0", [((1, "s"), {"y": 2})]),
        ("items: AsyncIterator[int], x: int, y: int = 0", [(("s", 1, 2), {}), (("s",), {"x": 1, "y": 2})]),
        ("x: int, y: int = 0, *, items: AsyncIterator[int]", [((1, 2), {"items": "s"})]),
    ],
)
def test_a_stream_has_any_place(parameters: str, calls: Any):
    """So a method that has one can get a parameter with a default, as any other."""
    method = schema(f"async def get(self, {parameters}) -> int: ...").methods["get"]
    assert [parameter.name for parameter in method.parameters] == ["x", "y"]
    for arguments, by_name in [*calls, ((), {"x": 1, "y": 2, "items": "s"})]:
        assert method.bind(arguments, by_name) == ((1, 2), "s")
    with pytest.raises(TypeError, match="positional arguments, not"):
        method.bind((*calls[0][0], 2, 3), {})
    with pytest.raises(TypeError, match="lacks the argument 'items'"):
        method.bind((), {"x": 1})


def test_arguments_are_checked():
    put = schema_of(Example).methods["put"]
    encode = msgspec.msgpack.encode
    name, data, times, tree = put.decode_arguments(encode(("w", b"1", 2, Tree(3))))
    assert (name, bytes(data), times, tree) == ("w", b"1", 2, Tree(3))
    assert put.decode_arguments(encode(("w", b"1")))[2:] == (1, None)
    assert put.decode_arguments(encode(("w", b"1", 2, None, "of a newer client")))[2:] == (2, None)
    for arguments, says in [
        ((1, b"1"), "Example.put: Expected `str`, got `int` - at `name`"),
        (("w",), "Example.put: Expected `array` of at least length 2"),
        (("w", b"1", 1, {"value": "x"}), "at `tree.value`"),
    ]:
        with pytest.raises(Error, match=re.escape(says)) as caught:
            put.decode_arguments(encode(arguments))
        assert caught.value.code is Code.INVALID_ARGUMENT


def schema(*methods: str, **names: Any) -> Schema:
    """The schema of a service Store with these methods."""
    given = {"rpc": rpc, "Any": Any, "AsyncIterator": AsyncIterator, "Literal": Literal, **names}
    exec("class Store(rpc.Service):\n" + "".join(f"    {method}\n" for method in methods), given)
    return schema_of(given["Store"])


def understood(client: Schema, server: Schema) -> dict[str, int]:
    return client.understands(msgspec.msgpack.encode(server.description))


GET = "async def get(self, name: str) -> int: ..."
COMPATIBLE = [
    ("async def get(self, a: bytes) -> int: ...", "async def get(self, a: bytes | None) -> int: ..."),
    ("async def get(self, a: rpc.Buffer) -> int: ...", "async def get(self, a: Any) -> int: ..."),
    ("async def get(self) -> Any: ...", "async def get(self) -> rpc.Buffer: ..."),
    (GET, "async def get(self, name: str, more: int = 0) -> int: ..."),
    ("async def get(self, name: str, more: int = 0) -> int: ...", GET),
    (GET, "async def get(self, name: str | None) -> int: ..."),
    (
        "async def get(self, name: str, items: AsyncIterator[int]) -> int: ...",
        "async def get(self, name: str, more: int = 0, *, items: AsyncIterator[float]) -> int: ...",
    ),
    ("async def get(self, name: str) -> float: ...", GET),
    ("async def get(self, name: int) -> int: ...", "async def get(self, name: float) -> int: ..."),
    ("async def get(self, a: bytes) -> bytes: ...", "async def get(self, a: memoryview) -> rpc.Buffer: ..."),
    ("async def get(self, a: Literal[1]) -> int: ...", "async def get(self, a: Literal[1, 2]) -> int: ..."),
    ("def get(self) -> AsyncIterator[bytes]: ...", "def get(self) -> AsyncIterator[memoryview]: ..."),
    ("async def get(self, a: list[bytes]) -> int: ...", "async def get(self, a: Any) -> int: ..."),
    ("async def get(self, a: list[int]) -> int: ...", "async def get(self, a: set[float | str]) -> int: ..."),
]
DIFFERENT = [
    (GET, "async def get(self, name: bytes) -> int: ...", "get: parameter name: str is not buffer"),
    (GET, "async def get(self, key: str) -> int: ...", "get: parameter 1 is name here, key there"),
    (GET, "async def get(self, name: str, n: int) -> int: ...", "get: parameter n is required there"),
    (GET, "async def get(self) -> int: ...", "get: parameter name is unknown there"),
    (GET, "async def get(self, name: str) -> int | None: ...", "get: the result: None is not int"),
    (GET, "def get(self, name: str) -> AsyncIterator[int]: ...", "get is UNARY here, SERVER_STREAM there"),
    (
        "async def get(self, a: bytes | None) -> int: ...",
        "async def get(self, a: bytes) -> int: ...",
        "get: parameter a: None is not buffer; get: parameter a: bytes is not buffer",
    ),
    (
        "async def get(self) -> bytes: ...",
        "async def get(self) -> bytes | None: ...",
        "get: the result: None is not buffer",
    ),
    (
        "async def get(self, a: Literal[1, 2]) -> int: ...",
        "async def get(self, a: Literal[1]) -> int: ...",
        "get: parameter a: 2 is no value of the other side",
    ),
    (
        "async def get(self, a: tuple[int, int]) -> int: ...",
        "async def get(self, a: tuple[int, str]) -> int: ...",
        "get: parameter a[1]: int is not str",
    ),
]


@pytest.mark.parametrize(("client", "server"), COMPATIBLE)
def test_a_newer_side_is_understood(client: str, server: str):
    assert understood(schema(client), schema(server)) == {"get": 0}


@pytest.mark.parametrize(("client", "server", "says"), DIFFERENT)
def test_what_differs_is_named(client: str, server: str, says: str):
    with pytest.raises(Error, match=re.escape(says)) as caught:
        understood(schema(client), schema(server))
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_methods_that_one_side_lacks():
    more = "async def add(self) -> int: ..."
    assert understood(schema(GET), schema(GET, more)) == {"get": 1}
    assert understood(schema(GET, more), schema(GET)) == {"get": 0}
    with pytest.raises(Error, match="none of the methods of Store; it has add"):
        understood(schema(GET), schema(more))


def test_structs_of_two_versions():
    def of(*fields: Any, **options: Any) -> Schema:
        inner = msgspec.defstruct("Inner", fields, **options)
        item = msgspec.defstruct("Item", [*fields, ("inner", inner | None, None)], **options)
        return schema("async def get(self, item: Item) -> None: ...", Item=item)

    old = of(("a", int))
    new = of(("a", int), ("b", str, ""))
    strict = of(("a", int), ("b", str))
    closed = of(("a", int), forbid_unknown_fields=True)
    array = of(("a", int), array_like=True)
    assert understood(old, new) == understood(new, old) == {"get": 0}
    for client, server, says in [
        (old, strict, "Item.b is required, and Item does not have it"),
        (new, closed, "Item.b is unknown to Item, which forbids that"),
        (old, array, "Item is a map with the tag None, not a array"),
    ]:
        with pytest.raises(Error, match=re.escape(says)):
            understood(client, server)


def test_tags_of_two_versions():
    def of(**options: Any) -> Schema:
        item = msgspec.defstruct("Item", [("a", int)], **options)
        return schema("async def get(self, item: Item) -> None: ...", Item=item)

    by_type, by_kind = of(tag="item"), of(tag="item", tag_field="kind")
    assert by_type.description[1]["Item"][1] == ["type", "item"]
    assert by_kind.digest != by_type.digest
    with pytest.raises(Error, match="Item is a map with the tag type='item', not a map with kind='item'"):
        understood(by_type, by_kind)


def test_an_assumption_that_failed_is_forgotten():
    """A is compared in a union first, where it does not fit, and where B seems to fit as it refers to A."""
    written = {
        "A": ["map", None, False, [["b", ["struct", "B"], True], ["x", "int", True]]],
        "B": ["map", None, False, [["a", ["struct", "A"], True]]],
    }
    read = {**written, "A": ["map", None, False, [["b", ["struct", "B"], True], ["x", "str", True]]]}
    union = ["union", ["struct", "A"], "none"]
    for first in (["struct", "A"], union, ["struct", "B"]):
        for then in (["struct", "A"], ["struct", "B"], union):
            found = differences(["tuple", first, then], written, ["tuple", first, then], read)
            assert len(found) == 2, (first, then, found)
    assert differences(["struct", "B"], written, ["struct", "B"], written) == []


def test_a_hostile_schema_takes_no_time():
    """Each pair of structs is compared once or twice, however often it is met."""
    count = 60
    wrong = [["x", "int", True]], [["x", "str", True]]
    tables = []
    for last in wrong:
        table: dict[str, Any] = {f"S{count}": ["map", None, False, last]}
        for number in range(count):
            member = ["union", ["struct", f"S{number + 1}"], "none"]
            table[f"S{number}"] = ["map", None, False, [["a", member, True], ["b", member, True]]]
        tables.append(table)
    assert differences(["struct", "S0"], tables[0], ["struct", "S0"], tables[1])


def test_digests():
    assert schema(GET).digest == schema(GET).digest
    assert schema(GET).digest != schema("async def get(self, name: str) -> float: ...").digest


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        [],
        [[], []],
        [[["get", 9, [], None, "int"]], {}],
        [[["get", 0, [["name", ["struct", "Gone"], True]], None, ["struct", "Gone"]]], {}],
        [[["get", 0, [["name", "str", True]], None, ["struct", "A"]]], {"A": []}],
        [[["get", 0, [["name", "str", True]], None, []]], {}],
        [[["get", 0, [["name", "str", True]], None, [["x"]]]], {}],
    ],
)
def test_a_hostile_schema(hostile: Any):
    ours = schema("async def get(self, name: str) -> Item: ...", Item=Tree)
    with pytest.raises((ProtocolError, Error)):
        ours.understands(msgspec.msgpack.encode(hostile))


def test_a_deep_schema():
    deep: Any = "int"
    for _ in range(200):
        deep = ["list", deep]
    assert differences(deep, {}, deep, {}) == []
    encoded = b"\x92\x90\x81\xa1A\x91" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        schema(GET).understands(encoded)


def test_errors_are_values():
    import pickle

    error = Error(Code.NOT_FOUND, "no \x1b[31mw", {"a": 1})
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.text, again.details) == (Code.NOT_FOUND, "no \x1b[31mw", {"a": 1})
    assert str(again) == "NOT_FOUND: no \\x1b[31mw"


def test_limits_are_checked():
    for wrong in (
        {"calls": 0},
        {"message_bytes": 1 << 32},
        {"message_bytes": 255},
        {"hello_seconds": 0},
        {"calls": 1.5},
        {"calls": 1 << 32},
        {"inline_bytes": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.Limits(**wrong)  # type: ignore[arg-type]
