"""Arrays of `rdmanet call`: lists of numbers and files of NumPy, given and got."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rdmanet.cli import call as call_command
from rdmanet.cli.call_arrays import file_head, fits, of_file, of_list, write_archive
from rdmanet.rpc.dynamic_results import ArrayWithin
from rdmanet.rpc.messages import Array, Field, Placed

numpy = pytest.importorskip("numpy")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

SERVER = """
import asyncio, sys
from collections.abc import AsyncIterator
import numpy
from numpy.typing import NDArray
from rdmanet import rpc

class Store(rpc.Service):
    async def double(self, array: numpy.ndarray) -> numpy.ndarray:
        return 2 * array
    async def shift(self, array: NDArray[numpy.float32] | None, by: float = 1.0) -> NDArray[numpy.float32]:
        return array + numpy.float32(by)
    async def sums(self, state: dict[str, NDArray[numpy.float64]]) -> dict[str, float]:
        return {name: float(array.sum()) for name, array in state.items()}
    async def same(self, array: numpy.ndarray) -> numpy.ndarray:
        return array
    async def state(self, size: int) -> dict[str, NDArray[numpy.float32]]:
        return {"w": numpy.ones((2, 2), "f4"), "long": numpy.arange(size, dtype="f4"), "a.b": numpy.zeros(0, "f4")}
    async def found(self) -> tuple[int, list[NDArray[numpy.int8] | None]]:
        return 3, [None, numpy.array([1, 2], "i1")]
    async def rows(self, count: int) -> AsyncIterator[numpy.ndarray]:
        for index in range(count):
            yield numpy.array([index, 2 * index])

async def main():
    server = await rpc.serve(Store(), "127.0.0.1", 0, transport="tcp")
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server():
    """The address of a server, as an argument of the command."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
    assert process.returncode == 0


def call(*arguments):
    """Exit status, output, and error."""
    command = [sys.executable, "-m", "rdmanet", "call", "--transport", "tcp", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_lists_of_numbers(server):
    status, out, err = call(server, "Store.double", '{"array": [[1, 2, 3], [4, 5, 6]]}')
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "dtype": "<i8",
        "shape": [2, 3],
        "bytes": 48,
        "items": [[2, 4, 6], [8, 10, 12]],
    }
    assert json.loads(call(server, "Store.shift", '{"array": [1, 2], "by": 0.5}')[1])["items"] == [1.5, 2.5]
    assert call(server, "Store.sums", '{"state": {"w": [1, 2], "b": []}}')[:2] == (
        0,
        '{"w": 3.0, "b": 0.0}\n',
    )


def test_files_of_numpy(server, tmp_path: Path):
    there, back = tmp_path / "w.npy", tmp_path / "back.npy"
    array = numpy.arange(100_000, dtype=">f4").reshape(1000, 100)
    numpy.save(there, array)
    assert call(server, "Store.same", json.dumps({"array": f"@{there}"}), "--output", back) == (0, "", "")
    found = numpy.load(back)
    assert found.dtype == array.dtype and (found == array).all()
    out = call(server, "Store.same", json.dumps({"array": f"@{there}"}))[1]
    assert json.loads(out) == {"dtype": ">f4", "shape": [1000, 100], "bytes": 400_000}
    plain = tmp_path / "plain"
    call(server, "Store.same", json.dumps({"array": f"@{there}"}), "--output", plain)
    assert plain.read_bytes() == array.tobytes()


def test_arrays_within_a_result(server, tmp_path: Path):
    w = {"dtype": "<f4", "shape": [2, 2], "bytes": 16, "items": [[1, 1], [1, 1]]}
    empty = {"dtype": "<f4", "shape": [0], "bytes": 0}
    status, out, err = call(server, "Store.state", '{"size": 3}')
    assert (status, err) == (0, "")
    short = {"dtype": "<f4", "shape": [3], "bytes": 12, "items": [0, 1, 2]}
    assert json.loads(out) == {"w": w, "long": short, "a.b": empty}
    long = {"dtype": "<f4", "shape": [5000], "bytes": 20_000}
    file = tmp_path / "state.npz"
    for more in ([], ["--output", file]):
        status, out, err = call(server, "Store.state", '{"size": 5000}', *more)
        assert (status, json.loads(out), err) == (0, {"w": w, "long": long, "a.b": empty}, "")
    with numpy.load(file) as found:
        assert sorted(found) == ["a.b", "long", "w"]
        assert (found["long"] == numpy.arange(5000)).all() and found["long"].dtype == "f4"
        assert found["w"].shape == (2, 2) and found["a.b"].shape == (0,)
    status, out, err = call(server, "Store.found", "{}", "--output", file)
    assert json.loads(out) == [3, [None, {"dtype": "|i1", "shape": [2], "bytes": 2, "items": [1, 2]}]]
    with numpy.load(file) as found:
        assert list(found) == ["1.1"] and found["1.1"].tolist() == [1, 2]
    status, out, err = call(server, "Store.rows", '{"count": 2}')
    assert (status, err) == (0, "")
    assert [json.loads(line)["items"] for line in out.splitlines()] == [[0, 0], [1, 2]]


def test_names_in_an_archive(tmp_path: Path):
    """A server may have any keys."""
    arrays = []
    for where in ("a.b", "a.b", "a.b", "", "../x\0", "/a//..\\./b", "..", "n" * 2000, "ö"):
        arrays.append(ArrayWithin(Placed("<i2", [1], 0), 2, where))
        arrays[-1].data = memoryview(b"\1\0")
    write_archive(tmp_path / "all.npz", arrays)
    with numpy.load(tmp_path / "all.npz") as found:
        names = ["a.b", "a.b_1", "a.b_2", "result", "x", "a/b", "result_3", "n" * 1000, "ö"]
        assert list(found) == names
        assert all(found[name].tolist() == [1] for name in found)


def test_what_no_type_has_is_printed_as_text(capsys):
    """A peer may send extensions of msgpack."""
    call_command._print({"a": msgspec.msgpack.Ext(1, b"x")})
    assert "Ext" in json.loads(capsys.readouterr().out)["a"]


def test_errors_teach(server, tmp_path: Path):
    columns, other, empty = tmp_path / "columns.npy", tmp_path / "other", tmp_path / "empty"
    numpy.save(columns, numpy.ones((2, 3), order="F"))
    other.write_text("no array")
    empty.touch()
    for array, says in (
        ([[1, 2], [3]], "lists beside each other have different lengths"),
        (["a"], "lists stand for numbers"),
        (["<f4", [1], "@/nowhere"], "text that begins with @ names a file"),
        ("@/nowhere", "No such file"),
        (f"@{columns}", "save numpy.ascontiguousarray() of it"),
        (f"@{other}", "is no file of NumPy"),
        (f"@{empty}", "is no file of NumPy"),
    ):
        status, out, err = call(server, "Store.double", json.dumps({"array": array}))
        assert (status, out) == (2, "") and says in err and err.count("\n") == 1, err
    for method, given, file, says in (
        (
            "state",
            '{"size": 1}',
            "state.npy",
            "returns arrays within something else, for which give FILE.npz",
        ),
        ("rows", '{"count": 1}', "rows.npz", "returns a stream, which is printed"),
        ("sums", '{"state": {}}', "sums.npz", "returns no buffer"),
    ):
        status, out, err = call(server, f"Store.{method}", given, "--output", tmp_path / file)
        assert (status, out) == (2, "") and says in err and not (tmp_path / file).exists()
    status, _, err = call(server, "Store.double", '{"array": 1}')
    assert status == 67 and "INVALID_ARGUMENT" in err


@pytest.mark.parametrize(
    "array",
    [
        numpy.array(7),
        numpy.zeros((0, 3), "u2"),
        numpy.array([True, False]),
        numpy.array([1.5, 2], "f2"),
        numpy.array([1 + 2j]),
        numpy.array([b"ab", b"c"]),
        numpy.array(["ab", "ö"]),
        numpy.array(["2020-01-01"], "M8[ns]"),
        numpy.zeros(2, numpy.dtype([("a", "<i2"), ("ö", ">f8", (2, 3)), ("c", [("d", "i1")])])),
        numpy.zeros(2, numpy.dtype([("a", "i1"), ("b", "<i8")], align=True)),
    ],
    ids=lambda array: str(array.dtype),
)
def test_each_type_of_items(array, tmp_path: Path):
    """What NumPy has saved is read, and what is written NumPy loads."""
    file = tmp_path / "array.npy"
    numpy.save(file, array)
    dtype, shape, data = of_file(file)
    came = Array(fields_of(dtype), shape, bytes(data))
    assert fits(came, len(data)) and bytes(data) == array.tobytes()
    file.write_bytes(file_head(came) + data)
    found = numpy.load(file)
    assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
    assert len(file_head(came)) % 64 == 0


def fields_of(dtype):
    """The type of items, as it comes from the wire."""
    if isinstance(dtype, str):
        return dtype
    return [Field(name, fields_of(items), *shape) for name, items, *shape in dtype]


def test_numbers_that_do_not_fit():
    assert of_list([[True], [False]], "any", "a") == ["|b1", [2, 1], b"\1\0"]
    assert of_list([1, 2.5], "any", "a")[0] == "<f8" and of_list([], "any", "a")[1:] == [[0], b""]
    assert of_list([1, 2], ">u2", "a") == [">u2", [2], b"\0\1\0\2"]
    for value, items, says in (
        ([300], "|u1", "a: not all of it fits an array of '|u1'"),
        ([1.5], "<i4", "not all of it fits"),
        ([1e300], "<f4", "not all of it fits"),
        ([1], "|b1", "has true and false"),
        ([1], "bfloat16", "give @FILE.npy"),
        ([1], "datetime64", "give @FILE.npy"),
        ([[1], 2], "any", "different lengths"),
        ([1, [2]], "any", "lists stand for numbers"),
        ([None], "any", "lists stand for numbers"),
    ):
        with pytest.raises(ValueError, match="^a: ") as caught:
            of_list(value, items, "a")
        assert says in str(caught.value)


def test_what_is_no_array():
    """A server may say anything of its result."""
    assert not fits(Array("<f4", [3], b""), 11) and not fits(Array("|O", [1], b""), 8)
    head = file_head(Array("bfloat16", [2], b""))
    assert b"'|V2'" in head
