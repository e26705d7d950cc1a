"""Arrays inside of lists, dictionaries, classes and streams: they arrive, by one loan at most, and lies are refused."""

import dataclasses
import random
import sys
import tracemalloc
import types
import weakref
from collections.abc import AsyncIterator
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import numpy
import numpy.typing as npt
import pytest
from net import Net, callee, channel, failure, idle

from rdmanet import rpc
from rdmanet._core import REUSED_BYTES
from rdmanet.rpc import Code, item_types, lending, packing, reads
from rdmanet.rpc.array_types import ArrayType
from rdmanet.rpc.item_types import item_type
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import NIL, Field, ItemType, Lent, OutCallBringing, OutItemBringing
from rdmanet.rpc.outgoing import Outgoing
from rdmanet.rpc.packing import Packed, Packing, Unpacking, unpacked
from rdmanet.rpc.pending import Pending
from rdmanet.rpc.schema import schema_of
from rdmanet.rpc.stats import Counter

RECORD = numpy.dtype(
    [("at", "<M8[us]"), ("name", "S5"), ("x", [("y", ">i2", (2, 3)), ("z", "?")])], align=True
)


class Layer(msgspec.Struct):
    name: str
    weights: npt.NDArray[numpy.float32]
    bias: npt.NDArray[numpy.float32] | None = None


@dataclasses.dataclass
class Model:
    layers: list[Layer]
    state: dict[str, npt.NDArray[Any]]


class Typed(TypedDict):
    data: numpy.ndarray


class Named(NamedTuple):
    data: numpy.ndarray
    count: int


class Store(rpc.Service):
    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.kept: Any = None

    async def put(self, state: dict[str, npt.NDArray[Any]]) -> int:
        self.state = state
        return len(state)

    async def get(self) -> dict[str, npt.NDArray[Any]]:
        return self.state

    async def model(self, model: Model, times: int = 1) -> Model:
        self.kept = model
        return model

    async def several(
        self, one: numpy.ndarray, data: bytes, more: list[Named], last: numpy.ndarray | None = None
    ) -> tuple[numpy.ndarray, Typed, numpy.ndarray | None]:
        self.kept = one, data, more, last
        return one, {"data": more[0].data}, last

    async def stream(self, items: AsyncIterator[Layer], first: numpy.ndarray) -> AsyncIterator[Named]:
        yield Named(first, -1)
        async for item in items:
            yield Named(item.weights, item.weights.size)

    async def floats(self, data: list[npt.NDArray[numpy.float32]]) -> float:
        return float(sum(each.sum() for each in data))


def numbers(count: int, dtype: Any = "<f4") -> Any:
    return (numpy.arange(count) % 251).astype(dtype)


def same(one: Any, other: Any) -> bool:
    """Whether what has come is what was sent; arrays are of the receiver's own memory."""
    if isinstance(one, numpy.ndarray):
        assert one.flags.writeable and one.flags.aligned and one.flags.c_contiguous
        assert not numpy.shares_memory(one, other)
        if one.dtype.names is not None:  # what lies between two fields does not count
            return one.dtype == other.dtype and repr(one.tolist()) == repr(other.tolist())
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return bool(one == other)


def offered(monkeypatch: pytest.MonkeyPatch, *links: Any) -> list[Any]:
    """What these sides put on offer from now on."""
    found: list[Any] = []
    for link in links:
        if link.lends:
            regions = link.transport._regions
            bind = regions.bind
            monkeypatch.setattr(
                regions, "bind", lambda memory, *how, bind=bind: (found.append(memory), bind(memory, *how))[1]
            )
    return found


# ---- They arrive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 3, LEND_BYTES])
async def test_in_classes_and_lists(net: Net, count: int):
    service = Store()
    client, server = await net.pair(service)
    square = numbers(count * 2).reshape(2, -1)
    layers = [Layer("a", square, square[0]), Layer("b", square.T), Layer("c", square[:, ::-2])]
    model = Model(layers, {"x": numbers(count, ">i2"), "": numpy.array(3.0)})
    got = await client.model(model)
    assert same(service.kept, model) and same(got, model)
    assert await idle(server)


@pytest.mark.parametrize("count", [7, LEND_BYTES // 2])
async def test_beside_arrays_and_buffers(net: Net, count: int):
    service = Store()
    client, _ = await net.pair(service)
    one, two = numbers(count), numbers(count, "<c8")
    got = await client.several(one, b"x" * count, [Named(two[::2], 3), Named(one, 4)], last=one)
    assert same(service.kept, (one, b"x" * count, [Named(two[::2], 3), Named(one, 4)], one))
    assert same(got, (one, {"data": two[::2]}, one))
    assert same((await client.several(one, b"", [Named(one, 0)]))[2], None)


async def test_items_of_streams(net: Net):
    client, _ = await net.pair(Store())
    sent = [Layer(str(index), numbers(index * 5000).reshape(5, -1).T) for index in range(30)]

    async def items() -> AsyncIterator[Layer]:
        for each in sent:
            yield each

    got = [item async for item in client.stream(items(), numbers(LEND_BYTES))]
    assert same(
        got, [Named(numbers(LEND_BYTES), -1), *(Named(each.weights, each.weights.size) for each in sent)]
    )


async def test_a_state_dict_is_one_call_and_one_loan(net: Net, monkeypatch: pytest.MonkeyPatch):
    service = Store()
    client, server = await net.pair(service)
    links = channel(client).link, callee(server).link
    loans = offered(monkeypatch, *links)
    state = {f"layer{index}.weight": numbers(index * 701).reshape(-1, 1) for index in range(200)}
    assert await client.put(state) == 200
    assert same(service.state, state)
    assert same(await client.get(), state)
    assert len(loans) == (2 if net.transport == "rdma" else 0)
    assert rpc.stats(client)["put"].begun == 1
    assert await idle(server) and all(link.loans_left == lending.LOANS_MOST for link in links)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_one_array_is_lent_where_it_lies(net: Net, monkeypatch: pytest.MonkeyPatch):
    """A result is copied all the same: the service may change it."""
    service = Store()
    client, server = await net.pair(service, limits=rpc.Limits(message_bytes=10_000))
    loans = offered(monkeypatch, channel(client).link, callee(server).link)
    large = numbers(LEND_BYTES)
    await client.put({"a": large, "b": numbers(0)})
    assert numpy.shares_memory(numpy.asarray(loans[0]), large)
    assert same(await client.get(), {"a": large, "b": numbers(0)})
    assert len(loans) == 2 and not numpy.shares_memory(numpy.asarray(loans[1]), service.state["a"])


async def test_the_memory_of_a_result_is_of_one_moment(net: Net, monkeypatch: pytest.MonkeyPatch):
    """What the service changes when its method has returned does not arrive."""
    service = Store()
    client, _ = await net.pair(service)
    service.state = {name: numpy.zeros(LEND_BYTES // 8, "<i4") for name in "abcd"}
    state = dict(service.state)
    sends = lending.lent

    def change(link: Any, going: Any) -> Any:
        block = sends(link, going)
        loop = link.loop
        loop.call_soon(lambda: [loop.call_soon(array.fill, 7) for array in state.values()])
        return block

    monkeypatch.setattr("rdmanet.rpc.answers.lent", change)
    got = await client.get()
    assert len({int(value) for array in got.values() for value in (array.min(), array.max())}) == 1


class Seeds:
    """Random types with arrays in them, and values of these."""

    LEAVES = (numpy.ndarray, npt.NDArray[Any], npt.NDArray[numpy.float32], npt.NDArray[numpy.datetime64])

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def type(self, depth: int = 0) -> Any:
        kind = self.random.randrange(9) if depth < 4 else 0
        if kind <= 1:
            return self.random.choice(self.LEAVES)
        if kind == 2:
            return self.random.choice((int, str, bytes))
        if kind == 3:
            return list[self.type(depth + 1)]  # type: ignore[misc]
        if kind == 4:
            return dict[str, self.type(depth + 1)]  # type: ignore[misc]
        if kind == 5:
            return tuple[self.type(depth + 1), Annotated[self.type(depth + 1), "note"]]  # type: ignore[misc]
        if kind == 6:
            return self.random.choice(self.LEAVES) | None
        self.count += 1
        name = f"Class{self.count}"
        fields = [(f"f{index}", self.type(depth + 1)) for index in range(self.random.randrange(1, 4))]
        if kind == 7:
            return dataclasses.make_dataclass(name, fields)
        return msgspec.defstruct(name, fields, array_like=self.random.random() < 0.5)

    def value(self, type_: Any) -> Any:
        origin, arguments = getattr(type_, "__origin__", None), getattr(type_, "__args__", ())
        if type_ in self.LEAVES:
            dtypes = {2: ["<f4"], 3: ["<M8[s]", ">M8[3ns]"]}.get(
                self.LEAVES.index(type_), ["<f4", "?", "<f2", "<U3", "S4", RECORD]
            )
            shape = [self.random.choice((0, 1, 2, 5)) for _ in range(self.random.randrange(4))]
            array = numpy.zeros(shape, self.random.choice(dtypes))
            array.reshape(-1).view("u1")[: array.nbytes : 4] = self.random.randrange(2)
            return array.T if self.random.random() < 0.3 else array
        if type_ in (int, str, bytes):
            return {int: 5, str: "text", bytes: b"\x00"}[type_]
        if origin is list:
            return [self.value(arguments[0]) for _ in range(self.random.randrange(4))]
        if origin is dict:
            return {str(index): self.value(arguments[1]) for index in range(self.random.randrange(4))}
        if origin is tuple:
            return self.value(arguments[0]), self.value(arguments[1].__origin__)
        if isinstance(type_, types.UnionType):
            return None if self.random.random() < 0.5 else self.value(arguments[0])
        if dataclasses.is_dataclass(type_):
            found = {each.name: each.type for each in dataclasses.fields(type_)}
        else:
            found = {each.name: each.type for each in msgspec.structs.fields(type_)}
        return type_(**{name: self.value(of) for name, of in found.items()})


def echoing(annotation: Any) -> Any:
    async def echo(self: Any, value: Any) -> Any:
        self.kept.append(value)
        return value

    echo.__annotations__ = {"value": annotation, "return": annotation}
    return echo


@pytest.mark.parametrize("lend_bytes", [1, 2000, LEND_BYTES])
async def test_random_types(net: Net, monkeypatch: pytest.MonkeyPatch, lend_bytes: int):
    monkeypatch.setattr(lending, "LEND_BYTES", lend_bytes)
    seeds = Seeds(lend_bytes)
    annotations = [seeds.type() for _ in range(40)]
    methods = {f"m{index}": echoing(annotation) for index, annotation in enumerate(annotations)}
    service = type("Echo", (rpc.Service,), methods)()
    service.kept = []
    client, _ = await net.pair(service)
    for index, annotation in enumerate(annotations):
        for _ in range(2):
            value = seeds.value(annotation)
            got = await getattr(client, f"m{index}")(value)
            assert same(service.kept[-1], value) and same(got, value)


# ---- Types of items --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix"])
async def test_types_of_items(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    sent = {
        "half": numbers(5, "<f2"),
        "boolean": numbers(5, "?"),
        "big": numbers(5, ">f8"),
        "moments": numpy.array(["2026-11-29", "NaT"], "M8[25us]"),
        "spans": numpy.array([1, -1], ">m8[D]"),
        "no unit": numpy.zeros(3, "m8"),  # NumPy 2.5 takes no number for it
        "bytes": numpy.array([b"a\x00b", b""], "S7"),
        "texts": numpy.array([["", "\U0010ffff"]], ">U3"),
        "records": numpy.zeros((2, 3), RECORD),
        "one field": numpy.zeros(3, [("x", "<f4", (2,))]),
    }
    await client.put(sent)
    assert same(service.state, sent) and same(await client.get(), sent)
    for array in sent.values():  # the same, by itself
        assert same((await client.several(array, b"", [Named(array, 0)]))[1]["data"], array)
        assert same(service.kept[0], array)


@pytest.mark.parametrize("transport", ["unix"])
async def test_types_of_ml_dtypes(net: Net):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    service = Store()
    client, _ = await net.pair(service)
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4")
    sent = {name: numpy.ones(6, getattr(ml_dtypes, name)) for name in names}
    await client.put(sent)
    assert same(service.state, sent) and same(await client.get(), sent)
    assert same((await client.several(sent["bfloat16"], b"", [Named(sent["int4"], 0)]))[0], sent["bfloat16"])

    class Brain(rpc.Service):
        async def put(self, data: npt.NDArray[ml_dtypes.bfloat16]) -> None: ...

    assert schema_of(Brain).description[0][0][2] == [["data", ["array", "bfloat16"], True]]


@pytest.mark.parametrize("transport", ["unix"])
async def test_a_type_whose_package_is_not_installed(net: Net, monkeypatch: pytest.MonkeyPatch):
    client, _ = await net.pair(Store())
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    raw = msgspec.Raw(msgspec.msgpack.encode([{"a": ["bfloat16", [1], 0]}]))
    error = await _sent(client, "put", raw, memoryview(b"12"))
    assert error.code is Code.INVALID_ARGUMENT and "needs the package ml_dtypes" in error.text


class Tensor:
    """What PyTorch has, as far as it is needed."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


async def test_tensors(net: Net, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, from_numpy=Tensor))

    class Trainer(rpc.Service):
        async def step(self, data: Tensor, more: dict[str, Tensor]) -> list[Tensor]:
            assert isinstance(data, Tensor)
            return [data, *more.values()]

        async def one(self) -> Tensor:
            return Tensor(numbers(3))

    client, _ = await net.pair(Trainer())
    sent = numbers(1000)
    got = await client.step(Tensor(sent), {"a": Tensor(sent[3:])})
    assert same([each.memory for each in got], [sent, sent[3:]])
    assert same((await client.one()).memory, numbers(3))


class Bits(Tensor):
    """A tensor of items that NumPy does not have: it is exchanged as one of integers."""

    requires_grad = False

    def __init__(self, memory: Any, dtype: str = "torch.int16") -> None:
        super().__init__(memory)
        self.dtype = dtype

    def view(self, dtype: str) -> "Bits":
        return Bits(self.memory, dtype)


async def test_tensors_of_types_that_numpy_does_not_have(net: Net, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ml_dtypes")
    names = {"int16": "torch.int16", "bfloat16": "torch.bfloat16"}
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Bits, from_numpy=Bits, **names))

    class Trainer(rpc.Service):
        async def step(self, data: Bits, more: dict[str, Bits]) -> list[Bits]:
            assert data.dtype == more["a"].dtype == "torch.bfloat16"
            return [data, *more.values()]

    client, _ = await net.pair(Trainer())
    sent = Bits(numbers(1000, "<i2"), "torch.bfloat16")
    got = await client.step(sent, {"a": sent})
    assert [each.dtype for each in got] == ["torch.bfloat16"] * 2
    assert same([each.memory for each in got], [sent.memory] * 2)
    learns = Bits(numbers(2, "<i2"), "torch.bfloat16")
    learns.requires_grad = True
    with pytest.raises(TypeError, match=r"it needs a gradient: pass tensor.detach\(\)"):
        await client.step(learns, {"a": sent})


# ---- What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["rdma", "unix"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (numpy.array([object()]), "Store.put: an array of object cannot be sent.* Send a list"),
        (numpy.ma.masked_array([1.0], [True]), "pass numpy.asarray"),
        (numpy.float32(1), r"is a number of NumPy's: pass its item\(\)"),
        (object(), "'object' is no array"),
        (numpy.zeros(1, numpy.longdouble), r"Send array.astype\('f8'\)"),
    ],
)
async def test_what_the_caller_may_not_send(net: Net, wrong: Any, says: str):
    client, _ = await net.pair(Store())
    with pytest.raises(TypeError, match=says):
        await client.put({"a": numbers(3), "b": wrong})
    assert await client.put({}) == 0


async def test_what_a_method_may_not_return(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    service.state = {"a": numpy.array([object()])}
    error = await failure(client.get())
    assert error.code is Code.INTERNAL and "Store.get: the result: an array of object" in error.text


async def test_what_an_item_of_a_stream_may_not_be(net: Net):
    """The side that gives it is told by name, and so is a method's caller."""
    client, _ = await net.pair(Store())
    masked = numpy.ma.masked_array([1.0], [True])

    async def layers() -> AsyncIterator[Layer]:
        yield Layer("masked", masked)

    with pytest.raises(TypeError, match=r"Store.stream: a numpy.ma.MaskedArray may be more than"):
        async for _ in client.stream(layers(), numbers(3)):
            pass

    class Masked(rpc.Service):
        async def get(self) -> AsyncIterator[list[numpy.ndarray]]:
            yield [numbers(3)]
            yield [masked]

    client, _ = await net.pair(Masked())
    items = aiter(client.get())
    assert same(await anext(items), [numbers(3)])
    error = await failure(anext(items))
    assert error.code is Code.INTERNAL and "Masked.get: a numpy.ma.MaskedArray may be more" in error.text


async def test_another_type_than_the_annotation_says(net: Net):
    client, _ = await net.pair(Store())
    error = await failure(client.floats([numbers(1), numbers(1, "<f8")]))
    assert error.code is Code.INVALID_ARGUMENT
    assert "an array of '<f8', where '<f4' is expected - at `data[1]`" in error.text
    assert await client.floats([numbers(3), numbers(2)]) == 4


def test_annotations_that_are_refused():
    for annotation, says in (
        (list[numpy.ndarray | str], "parameter value: Type unions.*an array may be in a union with None"),
        (list[rpc.Buffer], "an rpc.Buffer is an argument or a result by itself, an array may be anywhere"),
        (dict[str, npt.NDArray[numpy.object_]], "inside of another type: arrays of object_ cannot be sent"),
        (list[numpy.ma.MaskedArray], "is not a type that msgspec encodes by itself"),
    ):
        with pytest.raises(TypeError, match=says):
            type("Wrong", (rpc.Service,), {"get": echoing(annotation)})
    with pytest.raises(TypeError, match="the details of its errors cannot have arrays in them"):

        class Details(rpc.Service):
            @rpc.method(details=list[numpy.ndarray])
            async def get(self) -> None: ...


async def _sent(client: Any, name: str, raw: Any, memory: Any) -> rpc.Error:
    """The error of a call that a client of this package would not make."""
    side = channel(client)
    method = schema_of(Store).methods[name]
    pending = Pending(method, side.loop.create_future(), Counter())
    number = side.book.begin(method.kind, pending)
    side.link.send(OutCallBringing(number, method.number, None, raw, {}, memory))
    return await failure(pending.future)


HOSTILE = [
    (["<f4", [3], 0], 11, "an array of 12 bytes at 0 is not in the 11 bytes of memory"),
    (["<f4", [3], 1 << 52], 12, "is not in the 12 bytes of memory"),
    (["<f4", [1 << 40], 0], 12, "is not in the 12 bytes"),
    (["<f4", [1 << 52, 1 << 12], 0], 12, "is too large"),
    (["<f4", [0, 1 << 51], 0], 0, "is too large"),
    (["|O", [1], 0], 8, "an array of '|O' is not accepted"),
    (["<U0", [1], 0], 8, "an array of '<U0' is not accepted"),
    (["<U999999999", [1], 0], 8, "an array of '<U999999999' is not accepted"),
    (["<M8[0s]", [1], 0], 8, "is not accepted"),
    (["float9", [1], 0], 8, "is not accepted"),
    (["<U1", [1], 0], 4, "a character that does not exist"),
    ([[["", "<f4"]], [1], 0], 8, "a field has no name"),
    ([[["a", "<f4"], ["a", "<f4"]], [1], 0], 8, "an array of such records is not accepted"),
    ([[["a", "<f4", [1 << 52]]], [1], 0], 8, "records of 18014398509481984 bytes"),
    ([[["a", [["b", "<f4"]] * 200]] * 2, [1], 0], 8, "records of more than 256 fields"),
    ([[["a", "<U1"], ["b", "|b1"]], [1], 0], 5, "a character that does not exist"),
    ([[], [1], 0], 8, "an array of records of 0 bytes"),
    (["<f4", [1], -1], 8, "what has come for an array is none: Expected `int` >= 0"),
    (["<f4", [1] * 33, 0], 8, "Expected `array` of length <= 32"),
    (["<f4", [1], b"12345"], 8, "does not have 5 bytes"),
    ("text", 8, "what has come for an array is none"),
    ({"a": 1}, 8, "what has come for an array is none"),
]


async def test_a_caller_that_lies(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It is told, before memory is taken; the connection goes on."""
    service = Store()
    client, server = await net.pair(service)
    for one, length, says in HOSTILE:
        with monkeypatch.context() as patch:
            if "character" not in says and "such records" not in says:
                patch.setattr(ArrayType, "empty", lambda *_: pytest.fail("memory was taken"))
                patch.setattr(ArrayType, "over", lambda *_: pytest.fail("memory was taken"))
            raw = msgspec.Raw(msgspec.msgpack.encode([{"a": one}]))
            error = await _sent(client, "put", raw, memoryview(b"\xff" * length))
            assert error.code is Code.INVALID_ARGUMENT and says in error.text, (one, error.text)
    assert await client.put({"a": numbers(2)}) == 1
    assert await idle(server)


@pytest.mark.parametrize("lend_bytes", [1, 1 << 30])
async def test_what_is_counted_of_messages(net: Net, monkeypatch: pytest.MonkeyPatch, lend_bytes: int):
    """Both sides count the same memory: that in messages, or that on loan."""
    monkeypatch.setattr(lending, "LEND_BYTES", lend_bytes)
    client, server = await net.pair(Store())
    state = {"a": numbers(5000), "b": numbers(5000)}
    nbytes = 40000
    await client.put(state)
    assert same(await client.get(), state) and await idle(server)
    here, there = rpc.stats(client), server.stats()
    is_lent = net.transport == "rdma" and lend_bytes == 1
    for sent, received in ((here["put"], there["put"]), (there["get"], here["get"])):
        for count in (sent.sent_bytes, received.received_bytes):
            assert 0 <= count - (0 if is_lent else nbytes) < 200
        assert sent.lent_bytes == received.lent_bytes == (nbytes if is_lent else 0)


async def test_empty_texts_are_not_kept(net: Net):
    """Their message has no memory, and nothing remembers them when the call is over."""
    service = Store()
    client, _ = await net.pair(service)
    sent = {"text": numpy.zeros(0, "<U3"), "records": numpy.zeros((3, 0), RECORD)}
    assert await client.put(sent) == 2 and same(service.state, sent)
    alive = [weakref.ref(array) for array in service.state.values()]
    service.state = {}
    assert [each() for each in alive] == [None, None]


def test_deep_records_take_no_longer_than_wide_ones(monkeypatch: pytest.MonkeyPatch):
    """Each field is looked at a few times, however deep it is."""
    looks: list[Field] = []
    field_bytes = item_types._field_bytes

    def counted(field: Field) -> int:
        looks.append(field)
        return field_bytes(field)

    monkeypatch.setattr(item_types, "_field_bytes", counted)
    depth = 200
    type_: ItemType = "|i1"
    for _ in range(depth):
        type_ = [Field("a", type_)]
    unpacking = Unpacking(Packed(msgspec.msgpack.encode([[type_, [1], 0]]), memoryview(b"1")))
    unpacking.decode(msgspec.msgpack.Decoder(list[numpy.ndarray], dec_hook=unpacked).decode)
    assert item_type(unpacking.fill()[0].dtype) == type_
    assert len(looks) < 10 * depth


async def test_arrays_may_not_have_the_same_memory(net: Net):
    """Else a message of a megabyte could make a thousand arrays of that."""
    client, _ = await net.pair(Store())
    both = {"a": ["<f4", [2], 0], "b": ["<f4", [2], 4]}
    error = await _sent(client, "put", msgspec.Raw(msgspec.msgpack.encode([both])), memoryview(bytes(16)))
    assert error.code is Code.INVALID_ARGUMENT and "behind the arrays before it" in error.text
    error = await _sent(client, "put", msgspec.Raw(msgspec.msgpack.encode([both])), NIL)
    assert "is not in the 0 bytes of memory" in error.text


async def test_loans_that_are_none(net: Net, monkeypatch: pytest.MonkeyPatch):
    client, server = await net.pair(Store(), limits=rpc.Limits(lent_bytes=1 << 20, lent_seconds=0.05))
    raw = msgspec.Raw(msgspec.msgpack.encode([{"a": ["<f4", [4], 0]}]))
    monkeypatch.setattr(ArrayType, "empty", lambda *_: pytest.fail("memory was taken"))
    error = await _sent(client, "put", raw, Lent(77, 16))
    assert error.code is (Code.DEADLINE_EXCEEDED if net.transport == "rdma" else Code.INVALID_ARGUMENT)
    error = await _sent(client, "put", raw, Lent(77, 1 << 52))
    assert error.code is Code.RESOURCE_EXHAUSTED and "the limit lent_bytes" in error.text
    assert await idle(server)


async def test_a_stream_that_lies(net: Net):
    client, _ = await net.pair(Store())

    async def items() -> AsyncIterator[Layer]:
        (number,) = channel(client).book._calls
        raw = msgspec.Raw(msgspec.msgpack.encode({"name": "", "weights": ["<f4", [4], 1]}))
        channel(client).link.send(OutItemBringing(number, raw, bytes(16)))
        yield Layer("", numbers(1))

    error = await failure(anext(_second(client.stream(items(), numbers(1)))))
    assert error.code is Code.INVALID_ARGUMENT and "at 1 is not in the 16 bytes" in error.text


async def _second(items: Any) -> AsyncIterator[Any]:
    await anext(items)
    yield await anext(items)


@pytest.mark.parametrize("name", ["inline_bytes", "lent_bytes"])
async def test_what_counts(net: Net, name: str):
    """The memory of arrays counts as that of other arguments does."""
    limits = rpc.Limits(**{name: (1 << 21) + 4000})
    client, server = await net.pair(Store(), limits=limits)
    is_lent = net.transport == "rdma"
    state = {"a": numbers(1 << 18), "b": numbers(1 << 18, ">i4")}
    if is_lent is (name == "lent_bytes"):
        assert await client.put(state) == 2
        error = await failure(client.put({**state, "c": numbers(2000)}))
        assert error.code is Code.RESOURCE_EXHAUSTED and name in error.text
    else:
        assert await client.put({**state, "c": numbers(1 << 19)}) == 3
    assert await idle(server)


@pytest.mark.parametrize("dtype", ["<f4", [("x", "<f4")], [(f"x{index}", "i1") for index in range(200)]])
def test_what_arrays_weigh(dtype: Any):
    """Arrays of no items are objects, and so are the types of records."""
    method = schema_of(Store).methods["put"]
    raw = bytes(Packing(({str(index): numpy.zeros([0] + [1] * 31, dtype) for index in range(50)},), "x").raw)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        decoded = method.exact(raw)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decoded[0]) == 50
    assert method.scale.weigh(raw, 1 << 30) >= after - before


def test_no_other_bytes_are_sent():
    """Memory is reused, for other peers, too: what lies between arrays, or fields, is zero."""
    records = numpy.zeros((30, 20), numpy.dtype("i1,i8", align=True))
    records.view("u1")[:] = 255
    sent = numpy.ones(3, "i1"), records.T, numpy.ones(5, "i1")
    memory = Packing(sent, "x").gathered()
    assert sum(memory) == 3 + 5 + records.size * 9 * 255
    assert sum(Outgoing(ArrayType(None), records.T, "x").memory or b"") == records.size * 9 * 255


def test_what_waits_for_a_loan_keeps_no_more():
    """Not the other messages that were received with it: those were not counted."""
    received = bytearray(msgspec.msgpack.encode([["<f4", [1], 0]]) + bytes(1 << 16))
    packed = Packed(memoryview(received)[: -(1 << 16)], Lent(7, 4))
    received.clear()  # BufferError: something refers to it
    assert msgspec.msgpack.decode(packed.raw) == [["<f4", [1], 0]] and packed.nbytes == len(packed.raw)


def test_short_arrays_keep_little():
    """An array that is kept does not keep all that has come with it."""
    sent = {str(index): numbers(1 << size) for index, size in enumerate((3, 14, 17, 4, 19, 20, 2))}
    packing = Packing(sent, "x")
    unpacking = Unpacking(Packed(packing.raw, packing.gathered()))
    unpacking.decode(msgspec.msgpack.Decoder(dict[str, numpy.ndarray], dec_hook=unpacked).decode)
    for array in unpacking.fill().values():
        keeps = array.nbytes if array.base is None else len(array.base)
        assert keeps <= max(16 * array.nbytes, 1024)
    assert same(unpacking.value, sent)


async def test_long_arrays_share_memory(net: Net, monkeypatch: pytest.MonkeyPatch):
    """They are read in few parts, and who keeps one keeps at most 16 times as much."""
    service = Store()
    client, _ = await net.pair(service)
    read_bytes: list[int] = []
    if net.transport == "rdma":
        read = reads.read_offer

        async def counted(link: Any, remote: Any, memory: Any, offset: int) -> None:
            read_bytes.append(memory.nbytes)
            await read(link, remote, memory, offset)

        monkeypatch.setattr(reads, "read_offer", counted)
    monkeypatch.setattr(packing, "PART_LEAST", 1 << 60)  # with all in one loan
    for sizes, most in ([1300 << 10], 14), ([3 << 17, 1 << 20, 7, 3 << 20, 200_000, 100, 1 << 21], 45):
        state = {str(index): numbers(sizes[index % len(sizes)], "u1") for index in range(70)}
        read_bytes.clear()
        assert await client.put(state) == 70 and same(service.state, state)
        memories = {id(array.base): array.base for array in service.state.values() if array.base is not None}
        for array in service.state.values():
            assert array.base is None or len(array.base) <= 16 * array.nbytes
        nbytes = sum(array.nbytes for array in state.values())
        assert sum(map(len, memories.values())) <= 2 * nbytes
        if net.transport == "rdma":
            assert len(read_bytes) <= most and nbytes <= sum(read_bytes) <= nbytes + 70 * 16


def test_arrays_at_odd_places_take_no_more():
    """Another client may have no gaps between them."""
    nbytes = (1 << 17) + 1
    raw = msgspec.msgpack.encode([["|u1", [nbytes], index * nbytes] for index in range(64)])
    memory = memoryview(bytes(range(251)) * (64 * nbytes // 251 + 1))[: 64 * nbytes]
    unpacking = Unpacking(Packed(raw, memory))
    unpacking.decode(msgspec.msgpack.Decoder(list[numpy.ndarray], dec_hook=unpacked).decode)
    assert sum(block.nbytes for block in unpacking.blocks) <= memory.nbytes + REUSED_BYTES
    for index, array in enumerate(unpacking.fill()):
        assert array.flags.aligned and array.tobytes() == memory[index * nbytes : (index + 1) * nbytes]


# ---- Versions --------------------------------------------------------------------------------------------------


def test_descriptions():
    methods, structs = schema_of(Store).description
    described = {method[0]: method for method in methods}
    assert described["put"][2] == [["state", ["dict", "str", ["array", "any"]], True]]
    assert structs["Layer"][3][1:] == [
        ["weights", ["array", "<f4"], True],
        ["bias", ["union", ["array", "<f4"], "none"], False, 0, [None]],
    ]
    assert described["several"][4][1] == ["array", "any"]


def test_versions_that_differ():
    def differ(written: Any, read: Any) -> str:
        one, other = (type("S", (rpc.Service,), {"m": echoing(each)}) for each in (read, written))
        wire = msgspec.Raw(msgspec.msgpack.encode(schema_of(other).description))  # type: ignore[arg-type]
        with pytest.raises(rpc.Error) as caught:
            schema_of(one).understands(wire)  # type: ignore[arg-type]
        return caught.value.text

    floats = npt.NDArray[numpy.float32]
    assert "the result[][]: any is not <f4" in differ(list[numpy.ndarray], list[floats])
    assert "the result" in differ(list[numpy.ndarray], list[Any])  # which would get no array
    assert "the result" in differ(list[numpy.ndarray], Any)
    assert "is not" in differ(dict[str, floats], dict[str, npt.NDArray[numpy.float64]])


async def test_an_array_by_itself_and_one_in_a_union(net: Net):
    """A version may allow None in the place of an array, or not return it any more."""

    class Server(rpc.Service):
        async def swap(self, data: numpy.ndarray | None) -> npt.NDArray[numpy.float32]:
            assert data is not None
            return data * 2

        async def layer(self, name: str) -> Layer:
            return Layer(name, numbers(LEND_BYTES))

    class Client(rpc.Service, name="Server"):
        async def swap(self, data: numpy.ndarray) -> numpy.ndarray | None: ...  # type: ignore[empty-body]
        async def layer(self, name: str) -> Named2: ...  # type: ignore[empty-body]

    server = await net.serve(Server(), limits=rpc.Limits(lent_seconds=3600))
    client = await net.connect(Client, server)
    for count in (3, LEND_BYTES):
        got = await client.swap(numbers(count))
        assert same(got, numbers(count) * 2)
    assert (await client.layer("x")).name == "x"
    assert await idle(server)  # nobody waits for what the client does not know


class Named2(msgspec.Struct):
    name: str
