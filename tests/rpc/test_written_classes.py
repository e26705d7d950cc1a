"""What `rdmanet call --pyi` writes: the same on the wire as those of the server, and right for mypy --strict."""

import builtins
import dataclasses
import datetime
import decimal
import enum
import itertools
import os
import random
import re
import subprocess
import sys
import types
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy
import pytest
from net import Net
from numpy.typing import NDArray
from random_types import a_node, build

from rdmanet import rpc
from rdmanet.cli.call_classes import Unwritable, classes
from rdmanet.rpc.describe import decode_description
from rdmanet.rpc.schema import schema_of

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("RDMANET_TEST_SEED", 0))
_numbers = itertools.count()


class Access(enum.Flag):
    READ = 1
    WRITE = 4


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Leaf(msgspec.Struct, tag="leaf"):
    value: float = 0.5


class Tree(msgspec.Struct, tag="tree"):
    children: "list[Tree | Leaf]" = []
    name: str = "none"
    made: datetime.datetime = datetime.datetime(2026, 1, 1)


class Range(NamedTuple):
    start: int
    stop: int = 10


class Keys(TypedDict, total=False):
    list: list[int]
    count: int


class Row(msgspec.Struct, rename={"from_": "from", "key": "a key"}, omit_defaults=True):
    from_: int
    key: str = "x"


@dataclasses.dataclass
class Step:
    number: Annotated[int, msgspec.Meta(ge=0)]
    gradients: dict[str, NDArray[numpy.float32]]
    mask: NDArray[numpy.bool_] | None = None


class Store(rpc.Service, version=2):
    """Of all types."""

    async def get(self, name: str, scale: float = 3.0, level: Level = Level.LOW) -> NDArray[numpy.float32]:
        return numpy.full(len(name), scale, "f4")

    async def names(self, prefix: str = "", *, most: int = 7) -> list[str]:
        return [prefix] * most

    async def put(self, data: memoryview, *, access: Access = Access.READ) -> bytes | None:
        return bytes(data)

    async def step(self, step: Step) -> dict[str, NDArray[Any]]:
        return {**step.gradients}

    async def tree(self, tree: Tree | Leaf) -> Tree | Leaf | None:
        return tree

    async def rows(self, rows: list[Row], ranges: tuple[Range, int], keys: Keys) -> list[Row]:
        return [*rows, Row(ranges[0].stop), Row(len(keys), "y")]

    async def times(
        self, at: datetime.datetime, day: datetime.date | None, span: datetime.timedelta
    ) -> uuid.UUID:
        return uuid.UUID(int=1)

    async def sums(
        self, numbers: AsyncIterator[int], first: decimal.Decimal = decimal.Decimal(0)
    ) -> AsyncIterator[float]:
        total = float(first)
        async for number in numbers:
            total += number
            yield total

    async def mean(self, values: AsyncIterator[float]) -> Literal["small", "large", 3]:
        return "large" if [value async for value in values] else "small"


class Clock(rpc.Service):
    async def now(self) -> float:
        return 1.5

    async def tree(self, tree: Tree | Leaf) -> None: ...


def text_of(*services: type[rpc.Service]) -> str:
    """What a client that knows nothing of these writes."""
    return classes({schema_of(each).name: decode_description(schema_of(each).encoded) for each in services})


def written(*services: type[rpc.Service]) -> types.ModuleType:
    module = types.ModuleType(f"written_{next(_numbers)}")
    sys.modules[module.__name__] = module
    exec(compile(text_of(*services), module.__name__, "exec"), vars(module))
    return module


@pytest.fixture(autouse=True)
def no_modules() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("written_")]:
        del sys.modules[name]


def check_fits(one: Any, other: Any) -> None:
    """Each understands the other."""
    for ours, theirs in ((one, other), (other, one)):
        known = schema_of(ours).understands(schema_of(theirs).encoded)
        assert known.keys() == schema_of(ours).methods.keys()


def test_all_types():
    module = written(Store, Clock)
    check_fits(Store, module.Store)
    check_fits(Clock, module.Clock)
    assert schema_of(module.Store).name == "Store/2"
    tree = module.Tree([module.Leaf(), module.Tree(name="a")])
    assert tree.children[0].value == 0.5 and tree.made == datetime.datetime(2026, 1, 1)
    assert module.Keys().count is msgspec.UNSET


def test_what_a_small_service_looks_like():
    class Small(rpc.Service):
        async def get(self, name: str, row: Row, scale: float = 1.0) -> NDArray[numpy.float32]: ...  # type: ignore[empty-body]

        async def watch(self, count: int) -> AsyncIterator[Leaf]:
            yield Leaf()

    assert (
        text_of(Small)
        == '''\
"""Classes for clients, as `rdmanet call --pyi` has written them: a stub and a module at once."""

from __future__ import annotations

import msgspec
import numpy
from collections.abc import AsyncIterator
from numpy.typing import NDArray
from rdmanet import rpc


class Leaf(msgspec.Struct, tag_field='type', tag='leaf'):
    value: float = 0.5


class Row(msgspec.Struct):
    field_0_from: int = msgspec.field(name='from')
    field_1_a_key: str = msgspec.field(default='x', name='a key')


class Small(rpc.Service):
    async def get(self, name: str, row: Row, scale: float = ...) -> NDArray[numpy.float32]:
        raise NotImplementedError

    def watch(self, count: int) -> AsyncIterator[Leaf]:
        raise NotImplementedError
'''
    )


async def test_calls_with_written_classes(net: Net):
    module = written(Store)
    server = await net.serve(Store())
    client: Any = await net.connect(module.Store, server)
    assert (await client.get("abc")).tolist() == [3.0] * 3  # the server's default
    assert (await client.get("a", 2.0)).tolist() == [2.0]
    assert await client.names("", most=2) == ["", ""] and await client.names("x") == ["x"] * 7
    assert bytes(await client.put(memoryview(b"12"))) == b"12"
    step = module.Step(1, {"w": numpy.ones(3, "f4")})
    assert (await client.step(step))["w"].tolist() == [1.0] * 3
    got = await client.tree(module.Tree([module.Leaf(2.0)], "b"))
    assert got.children[0].value == 2.0 and got.name == "b"
    keys = module.Keys(list=[1])
    rows = await client.rows([module.Row(1)], (module.Range(0), 5), keys)
    assert [(row.field_0_from, row.field_1_a_key) for row in rows] == [(1, "x"), (10, "x"), (1, "y")]

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert [total async for total in client.sums(items=numbers())] == [1.0, 3.0]
    assert await client.mean(numbers()) == "large"
    with pytest.raises(
        TypeError, match="lacks the argument 'scale': its default is the server's, and 'level'"
    ):
        await client.get("a", level="high")


def test_random_types():
    for seed in range(SEED, SEED + 400):
        rng = random.Random(seed)

        async def take(self: Any, value: Any) -> None: ...

        async def give(self: Any) -> Any: ...

        try:
            take.__annotations__["value"] = give.__annotations__["return"] = build(a_node(rng))
            service = type("Store", (rpc.Service,), {"take": take, "give": give})
        except TypeError:
            continue
        try:
            check_fits(service, written(service).Store)
        except Exception as exc:
            raise AssertionError(f"RDMANET_TEST_SEED={seed}: {text_of(service)}") from exc


FIELD = [["get", 0, [["a", ["struct", "S"], True]], None, "none"]]
EVIL = "x: int = __import__('os').abort()\n    y"


@pytest.mark.parametrize(
    "schema",
    [
        [[[EVIL, 0, [], None, "none"]], {}],
        [[["class", 0, [], None, "none"]], {}],
        [[["__init__", 0, [], None, "none"]], {}],
        [[["get", 0, [[EVIL, "int", True]], None, "none"]], {}],
        [[["get", 0, [["self", "int", True]], None, "none"]], {}],
        [[["get", 0, [["a", "int", True], ["a", "int", True]], None, "none"]], {}],
        [[["get", 0, [], None, EVIL]], {}],
        [[["get", 0, [], None, "os"]], {}],
        [[["get", 0, [], None, [EVIL, "int"]]], {}],
        [FIELD, {"S": ["map", None, False, [['a"', "int", True]]]}],
    ],
)
def test_names_that_python_cannot_have_are_refused(schema: Any):
    with pytest.raises(Unwritable, match="cannot have|two parameters|does not know"):
        classes({"Store": decode_description(msgspec.msgpack.encode(schema))})


def test_what_a_stranger_says_is_not_run():
    literal = ["one of", EVIL, "'''\n"]
    fields = [
        [EVIL.replace("\n", " "), ["within", "int", {EVIL: 1, "ge": 0}], False, 0, [EVIL]],
        ["text", "str", False, 0, [EVIL]],
    ]
    structs = {EVIL: ["map", [EVIL, EVIL], False, fields]}
    methods = [["get", 0, [["a", literal, True], ["b", ["struct", EVIL], True]], None, ["array", EVIL]]]
    text = classes({EVIL: decode_description(msgspec.msgpack.encode([methods, structs]))})
    module = types.ModuleType("written_x")
    sys.modules["written_x"] = module
    exec(compile(text, "x", "exec"), vars(module))  # and the process is there
    assert re.search(r"^class \w+\(rpc\.Service, name=", text, re.MULTILINE)


def test_a_name_that_hides_a_type():
    class Hides(rpc.Service):  # since Python 3.14, a method's own name hides a type in its annotations, too
        async def list(self, int: int) -> builtins.list[int]:  # type: ignore[valid-type]
            return [int]

        async def dict(self) -> builtins.dict[str, float]: ...  # type: ignore[empty-body]

    assert "-> builtins.dict[str, float]" in text_of(Hides) and "-> builtins.list[int]" in text_of(Hides)
    check_fits(Hides, written(Hides).Hides)


def test_methods_that_take_objects_are_left_out():
    class Listener(rpc.Service):
        async def heard(self, what: str) -> None: ...

    class Speaker(rpc.Service):
        async def attach(self, listener: Listener | None) -> None: ...

        async def count(self) -> int: ...  # type: ignore[empty-body]

    class Only(rpc.Service):
        async def attach(self, listener: Listener) -> None: ...

    text = text_of(Speaker, Only)
    assert "    # attach is left out: it takes an object of the service 'Listener', of which" in text
    module = written(Speaker, Only)
    assert list(schema_of(module.Speaker).methods) == ["count"] and not schema_of(module.Only).methods


CLIENT = """
import asyncio
import numpy
from collections.abc import AsyncIterator
from rdmanet import rpc
from classes import Clock, Leaf, Range, Row, Step, Store, Tree


async def numbers() -> AsyncIterator[int]:
    yield 1


async def main() -> None:
    async with rpc.connect(Store, "127.0.0.1", 1) as store:
        array = await store.get("abc")
        array.sum()
        await store.get("a", 2.0, "high")
        await store.get("a", 2.0, "middle")  # wrong
        await store.get(1)  # wrong
        words: list[str] = await store.names(most=2)
        number: int = await store.names()  # wrong
        await store.step(Step(1, {"w": numpy.ones(3, numpy.float32)}))
        await store.step(Step("1", {}))  # wrong
        await store.tree(Tree([Leaf(2.0)], "b"))
        await store.rows([Row(1)], (Range(0), 5), {})  # wrong
        async for total in store.sums(items=numbers()):
            print(total + 1.0, words, number)
        async for total in store.sums():  # wrong
            pass
        await store.nothing()  # wrong
    async with rpc.connect(Clock, "127.0.0.1", 1) as clock:
        print(await clock.now() + 1.0)


asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("ending", ["py", "pyi"])
def test_mypy_takes_them(ending: str, tmp_path: Path):
    """Long: mypy reads all of rdmanet for it. As a module, and as a stub."""
    pytest.importorskip("mypy", reason="mypy is of the group check")
    (tmp_path / f"classes.{ending}").write_text(text_of(Store, Clock))
    program = tmp_path / "program.py"
    program.write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", str(program)],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": f"{ROOT}:{tmp_path}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "classes.py" not in done.stdout, done.stdout
    found = [int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)]
    lines = CLIENT.splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert sorted(set(found)) == wrong, done.stdout + done.stderr
