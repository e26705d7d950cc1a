"""The examples do what their first lines say: each is run as a program, on the embedded device."""

import asyncio
import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rdmanet
from rdmanet import _core
from rdmanet.verbs import PD
from rdmanet.verbs_async import AsyncCMID, AsyncCQ
from tests.support.processes import Process

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


# Python 3.15 says this of a process that multiprocessing started, whose asyncio is in debug mode: by spawn, the main
# module has no loader.
OPTIONS = ("-X", "dev", "-W", "error", "-W", "ignore:Module globals is missing a __spec__:DeprecationWarning")


def command(name, *arguments):
    """In Python's development mode, where warnings are errors."""
    return [sys.executable, *OPTIONS, ROOT / "examples" / name, *map(str, arguments)]


def ended(name, *arguments, stdin=""):
    """An example that ends by itself."""
    options = {"capture_output": True, "text": True, "timeout": 100}
    return subprocess.run(command(name, *arguments), input=stdin, env=ENVIRONMENT, check=False, **options)


def complaints(errors):
    """Without asyncio's, in development mode, of steps that took more than 0.1 s: on a busy machine any may."""
    return re.sub(r"^Executing <.*> took [\d.]+ seconds\n", "", errors, flags=re.MULTILINE)


def run(name, *arguments, stdin=""):
    """What an example prints that ends well."""
    process = ended(name, *arguments, stdin=stdin)
    assert (process.returncode, complaints(process.stderr)) == (0, "")
    return process.stdout


@pytest.fixture
def serve():
    """Start an example that serves; it is ended with the test, unless it ends by itself."""
    with contextlib.ExitStack() as servers:

        def serve(name, *arguments):
            """The process, and the port that it says it listens on."""
            server = Process(*command(name, *arguments), keep_errors=True, env=ENVIRONMENT)
            servers.enter_context(server)
            line = server.line()
            port = re.search(r"(?:, |port |on \S+ )(\d+)", line)
            assert port, line
            return server, int(port[1])

        yield serve


def test_a_lock_whose_holder_is_killed(serve):
    _, port = serve("lock_with_lease.py", "serve", "127.0.0.1", 0)

    def holder(number, seconds):
        program = command("lock_with_lease.py", "hold", number, "127.0.0.1", port, "-s", seconds)
        return Process(*program, keep_errors=True, env=ENVIRONMENT)

    with holder(1, 3600) as first:
        assert first.line() == "client 1 has the lock"
        with holder(2, 0) as second:
            assert second.line() == "client 2 waits for client 1"
            first.send_signal(signal.SIGKILL)
            assert second.line() == "client 2 has the lock"
            assert second.line() == "client 2 has given it back"


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_calls_from_cpp(serve, tmp_path):
    """A client that knows the wire format's page alone: its stream is longer than the credit that it begins with."""
    program = tmp_path / "rpc_client"
    options = "-std=c++17", "-Wall", "-Wextra", "-Werror"
    subprocess.run(["c++", *options, ROOT / "examples/rpc_client.cpp", "-o", program], check=True)
    _, port = serve("rpc.py", "serve", "--tcp", "127.0.0.1", 0)
    done = subprocess.run(
        [program, "127.0.0.1", str(port)], capture_output=True, text=True, timeout=100, check=True
    )
    *found, refused, late = done.stdout.splitlines()
    assert found == ["1 + 2.5 = 3.5", "counted 20000, the last is 19999", "slept"]
    assert refused.startswith("add: code 3: ") and "numbers" in refused
    assert late.startswith("sleep: code 4: ")


@pytest.mark.parametrize("style", [[], ["--streams"]])
def test_echo(serve, style):
    _, port = serve("echo_server.py", *style, "127.0.0.1", 0)
    assert "a line" in run("echo_client.py", "127.0.0.1", port, stdin="a line\nand another\n")


@pytest.fixture
def heard_interrupts():
    """A shell's background job has Ctrl-C ignored, and hands that down."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    "server",
    [
        ["kv_store.py", "serve", "-p", "0"],
        ["rping.py", "-s", "-a", "127.0.0.1", "-p", "0"],
        ["rpc.py", "serve", "127.0.0.1", "0"],
        ["rpc.py", "serve", "--tcp", "127.0.0.1", "0"],
        ["tensor_cache.py", "serve", "127.0.0.1", "0"],
    ],
    ids=" ".join,
)
def test_an_interrupt_prints_no_traceback(server):
    process = subprocess.Popen(
        command(*server), env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline().startswith("listening on")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert complaints(errors) == ""


@pytest.mark.parametrize(
    "client",
    [
        ["echo_client.py", "127.0.0.1", "1"],
        ["async_pingpong.py", "-p", "1", "127.0.0.1"],
        ["async_pingpong.py", "--cm", "-p", "1", "127.0.0.1"],
        ["cmtime.py", "127.0.0.1", "1"],
        ["file_transfer.py", "send", "127.0.0.1", "1", __file__],
        ["kv_store.py", "-p", "1", "get", "key"],
        ["rc_pingpong.py", "-p", "1", "127.0.0.1"],
        ["rpc.py", "call", "127.0.0.1", "1"],
        ["rping.py", "-c", "-a", "127.0.0.1", "-p", "1"],
        ["tensor_cache.py", "try", "127.0.0.1", "1"],
    ],
    ids=" ".join,
)
def test_a_client_without_a_server_says_so_in_one_line(client):
    done = subprocess.run(
        command(*client),
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    errors = complaints(done.stderr)
    assert errors.count("\n") == 1 and "Errno" in errors


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    "server",
    [
        ["echo_server.py"],
        ["echo_server.py", "--streams"],
        ["rpc.py", "serve"],
        ["file_transfer.py", "receive", "."],
    ],
    ids=" ".join,
)
def test_one_interrupt_ends_a_server_with_a_client(serve, server):
    """Ctrl-C once, while a client is connected and stays."""
    process, port = serve(*server, "127.0.0.1", 0)

    async def stay() -> None:
        _, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) in (0, 130, -signal.SIGINT)
        writer.transport.abort()

    asyncio.run(stay())


def test_file_transfer(serve, tmp_path):
    content = os.urandom(1_000_003)
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "arrived").mkdir()
    _, port = serve("file_transfer.py", "receive", tmp_path / "arrived", "127.0.0.1", 0)
    run("file_transfer.py", "send", "127.0.0.1", port, tmp_path / "file")
    assert (tmp_path / "arrived/file").read_bytes() == content


def test_file_transfer_replaces_nothing(serve, tmp_path):
    (tmp_path / "file").write_bytes(b"another one")
    (tmp_path / "arrived").mkdir()
    (tmp_path / "arrived/file").write_bytes(b"mine")
    (tmp_path / "elsewhere").write_bytes(b"mine, too")
    (tmp_path / "arrived/elsewhere").symlink_to("../nowhere")
    _, port = serve("file_transfer.py", "receive", tmp_path / "arrived", "127.0.0.1", 0)
    for name in ("file", "elsewhere"):
        process = ended("file_transfer.py", "send", "127.0.0.1", port, tmp_path / name)
        assert process.returncode == 1
        assert process.stderr.endswith("not received; the receiver says b'there is a file of this name\\n'\n")
    assert (tmp_path / "arrived/file").read_bytes() == b"mine"
    assert (tmp_path / "arrived/elsewhere").is_symlink() and not (tmp_path / "nowhere").exists()
    assert sorted(os.listdir(tmp_path / "arrived")) == ["elsewhere", "file"]


def test_file_transfer_of_nonsense(serve, tmp_path, eventually):
    """Names that lead elsewhere are refused, and of two clients that send the same file at once, one is."""
    _, port = serve("file_transfer.py", "receive", tmp_path, "127.0.0.1", 0)

    async def send(name, content, together):
        reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
        writer.write(name + b"\n")
        answer = await reader.readline()
        if answer == b"ok\n":
            writer.write(content)
            await together.wait()
            writer.write(content)
            writer.write_eof()
            answer = await reader.readline()
        writer.close()
        return answer.decode().rstrip()

    async def cut_off(name):
        _, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
        writer.write(name + b"\n" + bytes(100_000))
        await writer.drain()
        writer.transport.abort()

    async def too_long():
        reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
        writer.write(b"n" * 1_000_000)
        with pytest.raises(ConnectionResetError):
            await reader.readline()

    async def senders():
        odd = [
            b"..",
            b".",
            b"/",
            b"a\0b",
            b"",
            b"../file",
            b"a/b",
            b"/etc/passwd",
            b".profile",
            b"-rf",
            b"\x1b[2J",
        ]
        odd += [b"a\tb", b"a\rb", "a\u202eb".encode(), b"\xff", b"n" * 101, "ä".encode() * 100, b"C:\\file"]
        for name in odd:
            assert "the name is too long, or has more than letters" in await send(
                name, b"", asyncio.Barrier(1)
            )
        await too_long()
        await cut_off(b"cut off")
        together = asyncio.Barrier(2)
        return await asyncio.gather(*(send(b"file", letter * 1000, together) for letter in (b"a", b"b")))

    answers = asyncio.run(senders())
    content = (tmp_path / "file").read_bytes()
    assert content in (b"a" * 2000, b"b" * 2000)
    assert sorted(answers) == sorted([hashlib.sha256(content).hexdigest(), "there is a file of this name"])
    eventually(lambda: os.listdir(tmp_path) == ["file"], what="of who was cut off nothing stays")


def test_file_transfer_of_too_much(tmp_path):
    """A file beyond the limit ends the transfer, and nothing is kept."""
    spec = importlib.util.spec_from_file_location("file_transfer", ROOT / "examples/file_transfer.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.SIZE = 10_000

    async def main():
        serve = functools.partial(example.receive_one, tmp_path)
        async with await rdmanet.start_rdma_stream_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await rdmanet.open_rdma_connection(*server.sockets[0].getsockname())
            writer.write(b"file\n")
            assert await reader.readline() == b"ok\n"
            writer.write(bytes(10_001))
            assert await reader.readline() == b"it has more than 10000 bytes\n"
            long = tmp_path / "long"
            long.write_bytes(bytes(16 << 20))  # it is refused while most of it is yet to be sent
            host, port = server.sockets[0].getsockname()[:2]
            with pytest.raises(SystemExit, match="not received; the receiver says b'it has more than 10000"):
                await example.send(host, port, long)
            long.unlink()
            writer.close()

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_file_transfer_of_silent_senders(serve, tmp_path):
    """A client that says nothing takes no place, and a client that finds no place is told at once."""
    _, port = serve("file_transfer.py", "receive", tmp_path, "127.0.0.1", 0)

    async def begin(name):
        reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", port)
        writer.write(name)
        return reader, writer

    async def main():
        silent = [await begin(b"no name yet") for _ in range(16)]
        places = [await begin(b"file %d\n" % number) for number in range(17)]
        answers = [await reader.readline() for reader, _ in places]
        assert answers == [b"ok\n"] * 16 + [b"too many are sending; try again later\n"]
        for _, writer in silent + places:
            writer.transport.abort()

    asyncio.run(main())


def test_remote_memory():
    out = run("remote_memory.py")
    assert "peer: reads b'from the owner'" in out
    assert "the peer has left: greetings, by RDMA" in out
    assert "may not read any more" in out


@pytest.mark.parametrize("tcp", [[], ["--tcp"]], ids=["rdma", "tcp"])
def test_rpc(serve, tcp):
    server, port = serve("rpc.py", "serve", *tcp, "127.0.0.1", 0)
    for _ in range(2):
        out = run("rpc.py", "call", *tcp, "127.0.0.1", port).splitlines()
        assert out[:6] == [
            "1 + 2 + 3 = 6.0",
            "slept for 0.1 s",
            "slept for 0.2 s",
            "the largest is 999999.0",
            "counted [0, 1, 2, 3, 4]",
            "DEADLINE_EXCEEDED: the call took too long",
        ]
        assert re.fullmatch(r"\d+ us a call", out[6])


@pytest.mark.parametrize("tcp", [[], ["--tcp"]], ids=["rdma", "tcp"])
def test_parameter_server(tcp):
    out = run("parameter_server.py", *tcp, "--steps", 3).splitlines()
    assert re.fullmatch(r"4 workers pushed 12 gradients of 4 MiB in [\d.]+ s", out[0])
    assert out[1:] == ["the weights are the sum of the gradients, 30"]


def test_tensor_store():
    lines = run("tensor_store.py").splitlines()
    died = lines.pop(4)
    assert lines == [
        "store 1: 5120000 bytes, right: True",
        "store 1: 1000 rows, right: True",
        "store 2: 5120000 bytes, right: True",
        "store 2: 1000 rows, right: True",
        "store 2: 5120000 bytes, right: True",
    ]
    assert re.fullmatch(r"store 1 was killed: \w*Error", died)


@pytest.mark.parametrize("tcp", [[], ["--tcp"]], ids=["rdma", "tcp"])
def test_tensor_cache(serve, tcp):
    _, port = serve("tensor_cache.py", "serve", *tcp, "127.0.0.1", 0)
    assert run("tensor_cache.py", "try", *tcp, "127.0.0.1", port).splitlines() == [
        *("put layer0", "got 0.0"),
        *("put layer1", "got 1.0"),
        *("put layer2", "got 1.0"),
        *("put layer3 instead of layer0", "got 1.0"),
        "NOT_FOUND: there is no tensor layer0",
    ]


@pytest.fixture(scope="module")
def embedded():
    with _core.Library.embedded().devices()[0].open() as context:
        yield context.name, context.query_device(), context.gid_table()


def test_show_gids(embedded):
    name, _, table = embedded
    *rows, count = run("show_gids.py", name).splitlines()[2:]
    assert count == f"n_gids_found={len(table)}"
    assert [row.split()[:3] for row in rows] == [[name, "1", str(entry.gid_index)] for entry in table]
    assert run("show_gids.py", "nosuchdevice").endswith("n_gids_found=0\n")


def test_devinfo(embedded):
    name, attributes, table = embedded
    out = run("devinfo.py", "-d", name)
    assert f"hca_id: {name}\n" in out and "PORT_ACTIVE (4)" in out and "max_qp:" not in out
    out = run("devinfo.py", "-v", "-d", name)
    assert re.search(rf"max_qp: +{attributes.max_qp}\n", out)
    assert len(re.findall(r"GID\[\d+\]:", out)) == len(table)


def test_cmtime(serve):
    server, port = serve("cmtime.py", "-s", "127.0.0.1", 0)
    out = run("cmtime.py", "-c", 7, "127.0.0.1", port)
    assert [line.rsplit(maxsplit=3)[0] for line in out.splitlines()[1:]] == [
        "resolve address",
        "resolve route",
        "create qp",
        "connect",
        "disconnect",
        "destroy",
    ]
    assert server.wait(100) == 0
    assert "served 7 connections" in server.rest()


def test_async_pingpong_with_one_who_leaves(serve):
    """As soon as the connection stands. The next client is served."""
    options = ["-d", "soft0", "--cm", "-n", 5, "-s", 64]
    _, port = serve("async_pingpong.py", *options, "-p", 0)

    async def come_and_go():
        async with AsyncCMID() as id:
            await id.resolve(("127.0.0.1", port))
            with PD(id.context) as pd, AsyncCQ(id.context, 16) as cq, id.create_qp(pd, cq):
                await id.connect()

    asyncio.run(come_and_go())
    assert "5 iters in" in run("async_pingpong.py", *options, "-p", port, "127.0.0.1")


def test_every_example_is_described_and_short():
    described = (ROOT / "examples/README.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in described
        # 119 lines, and the four by which Ctrl-C and errors end it without a traceback.
        assert len(example.read_text().splitlines()) <= 123, example.name
