"""Arrays as arguments and results: in the message and by reference, their types, and what is refused."""

import array
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from net import Net, callee, channel, idle

from rdmanet import rpc
from rdmanet.base import log_rate
from rdmanet.rpc import Code, lending
from rdmanet.rpc.arrays import ITEM_BYTES, ArrayType, declared
from rdmanet.rpc.buffer import bytes_of
from rdmanet.rpc.lending import LEND_BYTES, Lent
from rdmanet.rpc.messages import Array, OutCall
from rdmanet.rpc.outgoing import Outgoing
from rdmanet.rpc.pending import Pending
from rdmanet.rpc.schema import schema_of
from rdmanet.rpc.stats import Counter

LARGE = LEND_BYTES // 4
"""So many numbers of 4 bytes go by reference over RDMA."""
DTYPES = [numpy.dtype(text) for text in ITEM_BYTES]


class Store(rpc.Service):
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.count = 0

    async def put(self, name: str, data: numpy.ndarray) -> str:
        self.kept[name] = data
        return f"{data.dtype} {data.shape}"

    async def get(self, name: str) -> numpy.ndarray:
        self.count += 1
        return self.kept[name]  # type: ignore[no-any-return]

    async def total(self, data: npt.NDArray[numpy.float32], note: Annotated[numpy.ndarray, "any"]) -> float:
        return float(data.sum() + note.sum())

    async def half(self, name: str) -> npt.NDArray[numpy.float16]:
        return self.kept[name]  # type: ignore[no-any-return]

    async def view(self, name: str) -> memoryview:
        return memoryview(self.kept[name]).cast("B")

    async def lend(self, name: str) -> rpc.Buffer:
        return rpc.Buffer(self.kept[name])


def numbers(count: int, dtype: str = "<f4") -> Any:
    return (numpy.arange(count) % 251).astype(dtype)


def same(one: Any, other: Any) -> bool:
    return one.dtype.str == other.dtype.str and one.shape == other.shape and one.tobytes() == other.tobytes()


def address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (2, 3, 4), (LARGE,), (4, LARGE // 2)])
async def test_arguments_and_results(net: Net, shape: tuple[int, ...]):
    service = Store()
    client, _ = await net.pair(service)
    sent = numbers(int(numpy.prod(shape))).reshape(shape)
    assert await client.put("w", sent) == f"float32 {shape}"
    assert same(service.kept["w"], sent)
    got = await client.get("w")
    assert same(got, sent)
    for found in (service.kept["w"], got):  # memory of the receiver's own, to be changed and kept
        assert found.flags.writeable and found.flags.aligned and found.flags.c_contiguous
        assert not numpy.shares_memory(found, sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_types_of_items(dtype: Any, tmp_path):
    net = Net("unix", tmp_path)
    service = Store()
    client, _ = await net.pair(service)
    sent = numpy.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    await client.put("w", sent)
    assert same(service.kept["w"], sent)
    assert same(await client.get("w"), sent)
    await net.aclose()


@pytest.mark.parametrize("transport", ["rdma"])
async def test_the_sender_copies_nothing(net: Net, monkeypatch: pytest.MonkeyPatch):
    """What is put on offer is the memory of the array itself, and no byte of it is in a message."""
    client, server = await net.pair(Store(), limits=rpc.Limits(message_bytes=10_000))
    offered = []
    for link in (channel(client).link, callee(server).link):
        regions = link.transport._regions  # type: ignore[attr-defined]
        monkeypatch.setattr(
            regions,
            "bind",
            lambda memory, *how, original=regions.bind: (offered.append(memory), original(memory, *how))[1],
        )
    sent = numbers(LARGE).reshape(4, -1)
    await client.put("w", sent)
    assert address(numpy.asarray(offered[0])) == address(sent)
    await client.get("w")
    assert len(offered) == 2


async def test_arrays_that_are_not_contiguous_are_copied(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    square = numbers(LARGE * 2).reshape(2, -1)
    for sent in (
        square[:, ::2],
        square.T,
        square[::-1],
        numpy.asfortranarray(square),
        numpy.broadcast_to(1.0, (3, 3)),
    ):
        await client.put("w", sent)
        assert service.kept["w"].flags.c_contiguous
        assert same(service.kept["w"], numpy.ascontiguousarray(sent))


class ByDLPack:
    """What other libraries have: an object with memory of the CPU."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self._memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._memory.__dlpack_device__()


class ByInterface:
    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class Masked(ByInterface):
    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "mask": memory > 0}


class Quantity(numpy.ndarray):
    """What has units."""

    unit = "m"


class Renamed(numpy.ndarray):
    """What has another name, and nothing else."""


class OnGpu(ByDLPack):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("this memory is a GPU's")


async def test_arrays_of_other_libraries(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    sent = numbers(1000)
    for other in (ByDLPack(sent), ByInterface(sent)):
        service.kept.clear()
        await client.put("w", other)  # type: ignore[arg-type]
        assert same(service.kept["w"], sent)
    service.kept["w"] = ByDLPack(sent)
    assert same(await client.get("w"), sent)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1.0, 2.0], "Store.put: parameter data: 'list' is no array"),
        (b"1234", "'bytes' is no array"),
        (OnGpu(numbers(1)), "has no memory that NumPy can use: this memory is a GPU's"),
        (numpy.array([object()]), "an array of object cannot be sent"),
        (
            numpy.zeros(2, "V4"),
            "an array of |V4 cannot be sent: its items are plain memory. Send array.view('u1')",
        ),
        (numpy.zeros(2, "f4,O"), "an array of object cannot be sent"),
        (numpy.zeros(2, numpy.longdouble), "cannot be sent: machines differ in it. Send array.astype('f8')"),
        (Masked(numbers(1)), "'Masked' has no memory that NumPy can use: it has a mask"),
        (numpy.ma.masked_array([1.0], [True]), "a numpy.ma.MaskedArray may be more than a numpy.ndarray"),
        (numbers(4).view(numpy.recarray), "numpy.rec.recarray may be more than"),
        (numbers(4).view(Quantity), "Quantity may be more than"),
    ],
)
async def test_what_the_caller_may_not_send(net: Net, wrong: Any, says: str):
    service = Store()
    client, _ = await net.pair(service)
    with pytest.raises(TypeError) as caught:
        await client.put("w", wrong)
    assert says in str(caught.value)
    assert not service.kept


async def test_what_a_method_may_not_return(
    net: Net, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Its caller gets the name of the type, and so does the log."""
    monkeypatch.setattr(log_rate, "_said", {})  # each method has a line a second
    service = Store()
    client, _ = await net.pair(service)
    service.kept["w"] = numpy.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(
        rpc.Error, match="INTERNAL: Store.get: the result: a numpy.ma.MaskedArray may be more"
    ):
        await client.get("w")
    assert "a numpy.ma.MaskedArray may be more" in caplog.text
    service.kept["w"] = [1.0]
    with pytest.raises(rpc.Error, match="INTERNAL: Store.get: the result: 'list' is no array"):
        await client.get("w")


async def test_arrays_that_are_more_than_their_numbers():
    """They are refused wherever memory is handed over; an array that is mapped from a file is no more than one."""
    masked = numpy.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(
        TypeError, match=r"rpc.Buffer: a numpy.ma.MaskedArray may be more than a numpy.ndarray"
    ):
        rpc.Buffer(masked)
    with pytest.raises(TypeError, match="Store.view: the result: a numpy.ma.MaskedArray"):
        Outgoing(memoryview, masked, "Store.view: the result")
    with pytest.raises(TypeError, match="into: a numpy.ma.MaskedArray"):
        lending.Into(masked)
    renamed = numpy.arange(3.0).view(Renamed)
    assert rpc.Buffer(renamed).nbytes == renamed.nbytes
    renamed.unit = "m"
    with pytest.raises(TypeError, match="Renamed may be more"):
        rpc.Buffer(renamed)


async def test_an_array_of_a_file(net: Net, tmp_path: Path):
    client, _ = await net.pair(service := Store())
    mapped = numpy.memmap(tmp_path / "numbers", "<f4", "w+", shape=(2, LARGE))
    mapped[:] = 7
    await client.put("w", mapped)
    assert same(service.kept["w"], numpy.asarray(mapped))
    service.kept["w"] = mapped
    got = await client.get("w")
    assert type(got) is numpy.ndarray and same(got, numpy.asarray(mapped))
    service.kept.clear()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in Python 3.12")
def test_names_of_types_of_arrays():
    """From NumPy 2.5 on, NDArray itself is such a name."""
    named: dict[str, Any] = {}
    exec("import numpy; type Any_ = numpy.ndarray; type Of[T] = numpy.ndarray[tuple, numpy.dtype[T]]", named)
    assert declared(named["Any_"], "here").dtype is None
    floats = named["Of"][numpy.float32]
    assert declared(Annotated[floats, "metres"], "here").dtype == "<f4"


async def test_annotations_name_the_type(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    assert await client.total(numbers(4), numbers(3, ">i2")) == 9.0
    with pytest.raises(TypeError, match="parameter data: an array of '<f8', where the annotation says '<f4'"):
        await client.total(numbers(4, "<f8"), numbers(1))  # type: ignore[arg-type]
    service.kept["w"] = numbers(4)
    with pytest.raises(rpc.Error, match="INTERNAL"):
        await client.half("w")


# ---- Into the caller's memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 10, LARGE])
async def test_into_an_array(net: Net, count: int):
    service = Store()
    client, _ = await net.pair(service)
    service.kept["w"] = numbers(count).reshape(2, -1)
    mine = numpy.full((2, count // 2), 7, "<f4")
    filling = rpc.options(client, into=mine)
    assert await filling.get("w") is mine
    assert same(mine, service.kept["w"])
    mine[:] = 0
    assert await filling.get("w") is mine
    assert same(mine, service.kept["w"])


@pytest.mark.parametrize("dtype", ["M8[ns]", ">m8[s]", "bfloat16", [("at", "<M8[ms]"), ("value", "<f4")]])
@pytest.mark.parametrize("count", [10, LARGE])
async def test_items_that_numpy_exports_as_no_buffer(net: Net, dtype: Any, count: int):
    """Into the caller's memory, as a kept Buffer, and read from one: dates, and what ml_dtypes adds."""
    items = numpy.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    service = Store()
    client, _ = await net.pair(service)
    there = numpy.frombuffer(bytes(range(256)) * (count * items.itemsize // 256 + 1), "u1")
    array = there[: count * items.itemsize].copy().view(items)
    mine = numpy.zeros(count, items)
    async with rpc.Buffer(array) as kept:
        assert kept.array.dtype == items and same(kept.array, array)
        assert Outgoing(ArrayType(None), kept.array, "").buffer is kept
        await client.put("w", kept.array)
    assert same(service.kept["w"], array)
    assert await rpc.options(client, into=mine).get("w") is mine
    assert same(mine, array)
    mine[:] = numpy.zeros(1, items)
    async with await client.lend("w") as lent:
        assert await lent.read_into(mine) == array.nbytes
    assert same(mine, array)
    with pytest.raises(BufferError, match="into: the memory is not C-contiguous"):
        rpc.options(client, into=mine[::2])


@pytest.mark.parametrize("count", [0, 10, LARGE])
async def test_a_view_into_a_buffer(net: Net, count: int):
    service = Store()
    client, _ = await net.pair(service)
    service.kept["w"] = numbers(count)
    mine = bytearray(count * 4 + 3)
    got = await rpc.options(client, into=mine).view("w")
    assert got == service.kept["w"].tobytes() == mine[: count * 4]
    assert numpy.shares_memory(numpy.asarray(got), numpy.asarray(mine)) or not count


@pytest.mark.parametrize("transport", ["rdma"])
async def test_into_the_same_array_is_registered_once(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    service.kept["w"] = numbers(LARGE)
    filling = rpc.options(client, into=numpy.empty(LARGE, "<f4"))
    await filling.get("w")
    registrations = channel(client).link.transport._life.regions.engine.registrations  # type: ignore[attr-defined]
    before = registrations.stats()
    for _ in range(5):
        await filling.get("w")
    after = registrations.stats()
    assert (after["misses"], after["hits"]) == (before["misses"], before["hits"] + 5)


@pytest.mark.parametrize("count", [10, LARGE])
async def test_a_result_that_does_not_fit(net: Net, count: int):
    service = Store()
    client, server = await net.pair(service)
    service.kept["w"] = numbers(count)
    for wrong in (numpy.zeros(count + 1, "<f4"), numpy.zeros(count, "<i4"), numpy.zeros((1, count), "<f4")):
        with pytest.raises(
            rpc.Error, match=r"the result is an array of '<f4', \(\d+,\): into= is one of"
        ) as caught:
            await rpc.options(client, into=wrong).get("w")
        assert caught.value.code is Code.OUT_OF_RANGE
        assert not wrong.any()
    with pytest.raises(rpc.Error, match=f"the result has {count * 4} bytes: into= has 5"):
        await rpc.options(client, into=bytearray(5)).view("w")
    assert same(await client.get("w"), service.kept["w"])
    await idle(server)  # each result that was on loan was released


async def test_into_is_for_arrays_and_views(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    mine = numpy.zeros(4, "<f4")
    with pytest.raises(TypeError, match="Store.put: into= is for results that are annotated as an array"):
        await rpc.options(client, into=mine).put("w", mine)
    with pytest.raises(TypeError, match="Store.lend: into= is for"):
        await rpc.options(client, into=mine).lend("w")
    with pytest.raises(TypeError, match="Store.get: the result is an array: into= is 'bytearray'"):
        await rpc.options(client, into=bytearray(16)).get("w")
    with pytest.raises(TypeError, match="into: 'bytes' is read-only"):
        rpc.options(client, into=b"1234")
    with pytest.raises(BufferError, match="not C-contiguous"):
        rpc.options(client, into=mine[::2])
    assert not service.count


async def test_options_keep_the_time_of_the_client(net: Net):
    service = Store()
    service.kept["w"] = numbers(3)
    server = await net.serve(service)
    client = await net.connect(Store, server, timeout=1e-9)
    for hurried in (client, rpc.options(client, into=numpy.zeros(3, "<f4"))):
        with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
            await hurried.get("w")
    assert same(await rpc.options(client, timeout=None).get("w"), numbers(3))


# ---- What a peer may send ------------------------------------------------------------------------------------


HOSTILE = [
    (Array("|O", [1], memoryview(bytes(8))), "an array of '|O' is not accepted"),
    (Array("<U1", [1], memoryview(bytes(4))), "an array of '<U1', where '<f4' is expected"),
    (Array("", [4], memoryview(bytes(4))), "is not accepted"),
    (Array("f4", [1], memoryview(bytes(4))), "is not accepted"),
    (Array("<f16", [1], memoryview(bytes(16))), "is not accepted"),
    (Array("<i4", [1], memoryview(bytes(4))), "an array of '<i4', where '<f4' is expected"),
    (Array("<f4", [2], memoryview(bytes(4))), "does not have 4 bytes"),
    (Array("<f4", [], memoryview(bytes(5))), "does not have 5 bytes"),
    (Array("<f4", [1 << 52, 1 << 12], memoryview(b"")), "does not have 0 bytes"),  # 0 in 64 bits
    (Array("<f4", [0, 1 << 51], memoryview(b"")), "is too large"),
    (Array("<f4", [1 << 50], Lent(9999, 1 << 52)), "the limit lent_bytes is"),
    (Array("<f4", [2], Lent(9999, 4)), "does not have 4 bytes"),
    (["<f4", [-1], b""], "Expected `int` >= 0"),
    (["<f4", [1] * 33, b"1234"], "Expected `array` of length <= 32"),
    (["<f4" * 11, [1], b"1234"], "Expected `str` of length <= 32"),
    (["<f4", [1.0], b"1234"], "Expected `int`, got `float`"),
    (["<f4", None, b"1234"], "Expected `array`, got `None` - at `data[1]`"),
    (["<f4", [1]], "Expected `array` of at least length 3"),
    (b"1234", "Expected `array`, got `bytes`"),
]


async def test_a_caller_that_lies(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It gets INVALID_ARGUMENT, before any memory is taken; the connection goes on."""
    client, _ = await net.pair(Store())
    method = schema_of(Store).methods["total"]
    side = channel(client)
    with monkeypatch.context() as patch:
        patch.setattr(ArrayType, "empty", lambda *_: pytest.fail("memory was taken"))
        for sent, says in HOSTILE:
            pending = Pending(method, side.loop.create_future(), Counter())
            number = side.book.begin(method.kind, pending)
            side.link.send(OutCall(number, method.number, None, (sent, Array("<f4", [0], memoryview(b"")))))
            with pytest.raises(rpc.Error) as caught:
                await pending.future
            assert says in caught.value.text
            assert caught.value.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
    assert await client.put("w", numbers(1)) == "float32 (1,)"


@pytest.mark.parametrize(
    ("sent", "says"), [(sent, says) for sent, says in HOSTILE if isinstance(sent, Array)]
)
def test_a_server_that_lies(sent: Array, says: str):
    """The same check, with a code that blames the server."""
    nbytes = sent.data.length if isinstance(sent.data, Lent) else sent.data.nbytes
    if "lent_bytes" in says:
        return
    with pytest.raises(rpc.Error, match="INTERNAL: the result") as caught:
        ArrayType("<f4").check(sent, nbytes, Code.INTERNAL, "the result")
    assert says in caught.value.text


async def test_a_result_of_another_shape_than_its_bytes(net: Net, monkeypatch: pytest.MonkeyPatch):
    service = Store()
    client, server = await net.pair(service)
    monkeypatch.setattr(Outgoing, "item", lambda self, data: Array("<f4", [3], data))
    for count in (2, LARGE):
        service.kept["w"] = numbers(count)
        with pytest.raises(rpc.Error, match=r"INTERNAL: Store.get: the result: an array of the shape \[3\]"):
            await client.get("w")
    await idle(server)  # what was on loan was released


@given(
    st.sampled_from(["<f4", "|u1", ">i8", "|O", "<c16"]),
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, (1 << 53) - 1)), max_size=32),
    st.integers(0, 64),
)
def test_what_is_accepted_can_be_made(dtype: str, shape: list[int], nbytes: int):
    sent = Array(dtype, shape, memoryview(bytes(nbytes)))
    try:
        ArrayType(None).check(sent, nbytes, Code.INVALID_ARGUMENT, "x")
    except rpc.Error:
        return
    made = ArrayType(None).empty(sent)
    assert bytes_of(made).nbytes == nbytes and list(made.shape) == shape and made.dtype.str == dtype


# ---- Annotations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "dtype"),
    [
        (numpy.ndarray, None),
        (npt.NDArray[Any], None),
        (Annotated[npt.NDArray[numpy.int8], "note"], "|i1"),
        (numpy.ndarray[tuple[int, int], numpy.dtype[numpy.complex64]], "<c8"),
        (npt.NDArray[numpy.longlong], "<i8"),
        (npt.NDArray[numpy.bool_], "|b1"),
        (npt.NDArray, None),
        (npt.NDArray[numpy.datetime64], "M8"),
        (npt.NDArray[numpy.timedelta64], "m8"),
        (npt.NDArray[numpy.str_], "U"),
        (npt.NDArray[numpy.bytes_], "S"),
        (npt.NDArray[numpy.void], "record"),
    ],
)
def test_annotations(annotation: Any, dtype: str | None):
    assert declared(annotation, "here").dtype == dtype


@pytest.mark.parametrize("item", [numpy.object_, numpy.floating, numpy.longdouble])
def test_annotations_that_are_refused(item: Any):
    with pytest.raises(
        TypeError, match=f"Wrong.put: parameter data: arrays of {item.__name__} cannot be sent"
    ):

        class Wrong(rpc.Service):
            async def put(self, data: npt.NDArray[item]) -> None: ...


def test_versions_that_differ():
    class One(rpc.Service):
        async def put(self, data: numpy.ndarray) -> npt.NDArray[numpy.float32]: ...  # type: ignore[empty-body]

    class Other(rpc.Service):
        async def put(self, data: npt.NDArray[numpy.float32]) -> numpy.ndarray: ...  # type: ignore[empty-body]

    one, other = schema_of(One), schema_of(Other)
    assert one.description[0] == [["put", 0, [["data", ["array", "any"], True]], None, ["array", "<f4"]]]
    wire = msgspec.Raw(msgspec.msgpack.encode(other.description))
    with pytest.raises(rpc.Error, match="parameter data.*: any is not <f4.*the result.*: any is not <f4"):
        one.understands(wire)
    assert other.understands(msgspec.Raw(msgspec.msgpack.encode(one.description))) == {"put": 0}


def test_numpy_is_not_imported_for_others():
    program = "import sys; from rdmanet import rpc; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_nothing_keeps_an_array(net: Net):
    client, _ = await net.pair(Store())
    sent = numbers(LARGE)
    ended = weakref.ref(sent)
    await client.put("w", sent)
    del sent
    assert ended() is None


def test_an_array_of_the_standard_library_is_no_array():
    with pytest.raises(TypeError, match="'array' is no array"):
        ArrayType(None).checked(array.array("d", [1]), "x")
