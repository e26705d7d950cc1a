"""`rdmanet call`: lists and calls methods of servers of which it has no class."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

SERVER = """
import asyncio, dataclasses, sys
from collections.abc import AsyncIterator
from rdmanet import rpc

@dataclasses.dataclass
class Part:
    name: str = "all"
    count: int = 0
class Store(rpc.Service):
    async def get(self, name: str) -> bytes:
        if name == "v":
            raise rpc.Error(rpc.Code.NOT_FOUND, "there is no tensor v")
        return name.encode() * 3
    async def shape(self, name: str, scale: float = 1.0) -> list[float]:
        return [scale, 2 * scale]
    async def put(self, data: memoryview) -> int:
        return data.nbytes
    async def watch(self, count: int) -> AsyncIterator[dict[str, int]]:
        for number in range(count):
            yield {"n": number}
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])
    async def sums(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        found = 0
        async for number in numbers:
            found += number
            yield found
    async def wait(self) -> None:
        await asyncio.Event().wait()
    async def talk(self, name: str) -> AsyncIterator[int]:
        await rpc.send_initial_metadata({"server": "a\\x1b[1mb", "key": b"\\0"})
        yield 1
        rpc.set_trailing_metadata({"cost": "3"})
        if name == "v":
            raise rpc.Error(rpc.Code.NOT_FOUND, "there is no tensor v")
        yield 2
    async def told(self, part: Part) -> dict[str, str]:
        return {name: value if isinstance(value, str) else value.hex() for name, value in rpc.metadata().items()}

async def main():
    server = await rpc.serve(Store(), "127.0.0.1", 0, transport="tcp")
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()

asyncio.run(main())
"""


@pytest.fixture
def server():
    """The address of a server, as an argument of the command."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
    assert process.returncode == 0


def call(*arguments, said=""):
    """Exit status, output, and error."""
    command = [sys.executable, "-m", "rdmanet", "call", "--transport", "tcp", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, input=said, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def one_line(err):
    """The error message, which must be one line without a traceback."""
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err


def test_listing(server):
    status, out, err = call(server)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Store" and "rdmanet.Health" in lines
    assert "  get(name: str) -> buffer" in lines
    assert "  shape(name: str, scale: float = ...) -> list[float]" in lines
    assert "  watch(count: int) -> stream of dict[str, int]" in lines
    assert "  Part: name: str = ..., count: int = ..." in lines
    assert set(json.loads(call(server, "--json")[1])) == {"Store", "rdmanet.Health", "rdmanet.Reflection"}


def test_options_between_words(server):
    """Wherever they are; argparse by itself takes words of one place only."""
    command = ["Store.shape", '{"name": "w"}', "--timeout", "60", "-v"]
    for words in ([*command[:1], *command[2:], *command[1:2]], [*command[2:], *command[:2]], command):
        assert call(server, *words)[:2] == (0, "[1.0, 2.0]\n"), words
    status, out, err = call(server, "Store.shape", "--timeout", "60", '{"name": "w"}', "more")
    assert (status, out) == (2, "") and err.endswith("error: unrecognized arguments: more\n")


def test_classes_for_clients(server, tmp_path: Path):
    """What is written is a module that calls the server."""
    for arguments in (["--pyi"], ["Store", "--pyi"]):
        status, out, err = call(server, *arguments)
        assert (status, err) == (0, "")
        assert "class Part(msgspec.Struct):\n    name: str = 'all'\n    count: int = 0\n" in out
        assert "    async def shape(self, name: str, scale: float = ...) -> list[float]:\n" in out
        assert "    def sums(self, items: AsyncIterator[int]) -> AsyncIterator[int]:\n" in out
    (tmp_path / "classes.py").write_text(out)
    program = """
import asyncio, sys
from rdmanet import rpc
from classes import Part, Store

async def main():
    host, port = sys.argv[1].split(":")
    async with rpc.connect(Store, host, int(port), transport="tcp") as store:
        print(await store.shape("w"), await store.told(Part()))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, server], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[1.0, 2.0] {}\n", "")
    for arguments, says in (
        (["Store.get", "--pyi"], "--pyi takes a service, not a method"),
        (["None", "--pyi"], "the server has no service 'None'; it has: Store"),
        (["Store", '{"a": 1}', "--pyi"], "--pyi writes classes: it takes the name of a service or none"),
        (["--pyi", "--json"], "neither arguments nor --json"),
    ):
        status, out, err = call(server, *arguments)
        assert (status, out) == (2, "") and says in one_line(err)


def test_calling(server, tmp_path: Path):
    assert call(server, "Store.shape", '{"name": "w"}') == (0, "[1.0, 2.0]\n", "")
    assert call(server, "Store.get", '{"name": "w"}') == (0, '{"bytes": 3}\n', "")
    file = tmp_path / "w"
    assert call(server, "Store.get", '{"name": "w"}', "--output", file) == (0, "", "")
    assert file.read_text() == "www"
    assert call(server, "Store.put", json.dumps({"data": f"@{file}"})) == (0, "3\n", "")
    assert call(server, "Store.watch", '{"count": 2}') == (0, '{"n": 0}\n{"n": 1}\n', "")
    assert call(server, "rdmanet.Health.check") == (0, '"SERVING"\n', "")
    assert call(server, "Store.total", said="1\n2\n\n3\n") == (0, "6\n", "")


def test_metadata_is_sent_along(server, tmp_path: Path):
    file = tmp_path / "key"
    file.write_bytes(b"\x00")
    arguments = "--metadata", "token=a=b", "--metadata", f"key=@{file}", "--metadata", "empty="
    assert call(server, "Store.told", '{"part": {}}', *arguments) == (
        0,
        '{"token": "a=b", "key": "00", "empty": ""}\n',
        "",
    )


def test_what_a_method_says_beside_its_result(server):
    first = '{"initial metadata": {"server": "a\\u001b[1mb", "key": "AA=="}}\n'
    last = '{"trailing metadata": {"cost": "3"}}\n'
    assert call(server, "Store.talk", '{"name": "w"}', "--verbose") == (0, "1\n2\n", first + last)
    assert call(server, "Store.talk", '{"name": "w"}') == (0, "1\n2\n", "")
    status, out, err = call(server, "Store.talk", '{"name": "v"}', "-v")
    assert (status, out) == (69, "1\n") and err == f"{first}{last}call: NOT_FOUND: there is no tensor v\n"
    nothing = '{"initial metadata": {}}\n{"trailing metadata": {}}\n'
    assert call(server, "Store.get", '{"name": "w"}', "-v") == (0, '{"bytes": 3}\n', nothing)


def test_errors_teach(server):
    for arguments, wanted, says in (
        (["Store.get", '{"name": "v"}'], 69, "NOT_FOUND: there is no tensor v"),
        (["Store.wait", "--timeout", "0.1"], 68, "DEADLINE_EXCEEDED"),
        (["Store.shape", '{"name": 1}'], 67, "INVALID_ARGUMENT"),
        (["Store.get"], 2, "the parameter 'name' is missing: it is str"),
        (["Store.get", "name"], 2, "the arguments are not JSON"),
        (["Store.get", "[1]"], 2, "an object of JSON"),
        (["Store.put", '{"data": "@/nowhere"}'], 2, "text that begins with @ names a file"),
        (["Store.got"], 2, "it has: get, put, shape"),
        (["Shop.get"], 2, "the server has Store, and no Shop"),
        (["get"], 2, "is not SERVICE.METHOD"),
        (["Store.wait", "--metadata", "token"], 2, "--metadata 'token' is not NAME=TEXT, or NAME=@FILE"),
        (["Store.shape", '{"name": "w"}', "--output", "x"], 2, "returns no buffer"),
    ):
        status, out, err = call(server, *arguments)
        assert (status, out) == (wanted, "") and says in one_line(err)
    status, _, err = call(server, "Store.total", said="1\nx\n")
    assert status == 2 and "a line of standard input is not JSON" in one_line(err)
    assert call("nowhere")[0] == 2 and call(server, "Store.get", "--timeout", "0")[0] == 2


def test_nobody_is_there():
    status, _, err = call("127.0.0.1:1", "Store.get")
    assert status == 1 and "no server answers at 127.0.0.1:1 by tcp" in one_line(err)


def test_ctrl_c_while_it_waits_for_items(server, interruptible):
    """One is enough, though standard input is open. Items are sent as they come."""
    command = [sys.executable, "-m", "rdmanet", "call", "--transport", "tcp", server, "Store.sums"]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        for item, line in (("1\n", "1\n"), ("2\n", "3\n")):
            process.stdin.write(item)
            process.stdin.flush()
            assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) in (130, -signal.SIGINT)
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_items_of_a_file(server, tmp_path: Path):
    file = tmp_path / "items"
    file.write_text("1\n2\n3")
    with file.open() as items:
        command = [sys.executable, "-m", "rdmanet", "call", "--transport", "tcp", server, "Store.total"]
        done = subprocess.run(
            command, env=ENVIRONMENT, stdin=items, capture_output=True, text=True, timeout=100
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")
