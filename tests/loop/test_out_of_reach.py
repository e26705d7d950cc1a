"""Programs that cannot read rdmanet's modules any more when they first need them: after chroot(2), or without rights.

They are served by TCP, and the log says why. `go` makes what is not loaded unreachable, as chroot(2) does, for which a
test would have to be root.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loop_harness import peer

ROOT = Path(__file__).parents[2]

COMMON = """
import asyncio, logging, resource, socket, sys
import {base}
import rdmanet

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)

"localhost".encode("idna")  # uvloop itself imports this with its first address

def go():
    sys.path.clear()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = []

async def echo(reader, writer):
    while data := await reader.read(100):
        writer.write(data)
    writer.close()

async def say(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    print((await reader.readexactly(5)).decode())
    writer.close()
    await writer.wait_closed()

async def itself():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    await say(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
"""

PROGRAMS = {
    "first": """
async def main():
    go()
    await itself()
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setblocking(False)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        accepted, _ = await loop.sock_accept(listener)
        await loop.sock_sendall(client, b"by sockets")
        print((await loop.sock_recv(accepted, 10)).decode())
        await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        accepted.close()
""",
    "server": """
async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its loop has the switch now, and no server
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.close()
        go()
        await itself()
""",
    "client": """
async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.close()
        go()
        await say(int(sys.argv[1]))
        await say(int(sys.argv[1]))
""",
    "excluded": """
async def main():
    go()
    for attempt in (itself(), asyncio.open_connection("127.0.0.1", 9)):
        try:
            await attempt
        except ConnectionRefusedError as exc:
            print(exc.strerror)
""",
    "scarce": """
async def without_descriptors(attempt):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        await attempt
    except OSError as exc:
        print(exc.strerror)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

async def load():
    loading.load()

async def main():
    global loading
    await without_descriptors(itself())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.close()
    from rdmanet.loop import loading
    await without_descriptors(load())
    await itself()
""",
    "others": """
async def main():
    go()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, socket.socket(socket.AF_UNIX) as listener:
        receiver.setblocking(False)
        receiver.bind(("127.0.0.1", 0))
        sender, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=receiver.getsockname()
        )
        sender.sendto(b"by UDP")
        print((await loop.sock_recv(receiver, 10)).decode())
        sender.close()
        listener.bind("")
        server = await loop.create_server(asyncio.Protocol, sock=listener)
        print(server.is_serving())
        server.close()
        await server.wait_closed()
""",
}
TOLD = (
    "rdmanet's modules cannot be imported: No module named '{}'. If the program gives up the right to read them, make "
    "a server or a connection before that"
)


def said_by(name: str, base: str, *arguments: object, **options: object) -> list[str]:
    factory = {"asyncio": "asyncio.SelectorEventLoop", "uvloop": "uvloop.Loop"}[base]
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    code = COMMON.format(base=base) + PROGRAMS[name] + f"rdmanet.run(main(), loop_factory={factory}{given})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RDMANET_")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment
    ).stdout.splitlines()


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
def test_nothing_can_be_loaded(base: str) -> None:
    told = TOLD.format("rdmanet.loop.switch")
    assert said_by("first", base) == [f"WARNING all connections take TCP: {told}", "hello", "by sockets"]


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
def test_a_server_cannot_be_loaded(base: str) -> None:
    first, second, *rest = said_by("server", base)
    assert first.startswith("WARNING all connections take TCP: rdmanet's modules cannot be imported")
    assert second.startswith("WARNING the server on 127.0.0.1 port") and "serves TCP only" in second
    assert rest == ["hello"]


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
async def test_a_client_cannot_be_loaded(base: str) -> None:
    with peer("echo.py") as server:
        port = int(await server.line())
        first, *rest = said_by("client", base, port)
        assert first.startswith("WARNING all connections take TCP: rdmanet's modules cannot be imported")
        assert rest == ["hello", "hello"]


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
def test_where_tcp_is_excluded_that_is_an_error(base: str) -> None:
    told = TOLD.format("rdmanet.loop.switch")
    assert said_by("excluded", base, fallback=False) == [
        f"WARNING all connections take TCP: {told}",
        f"a server takes TCP, which fallback=False excludes: {told}",
        f"a connection takes TCP, which fallback=False excludes: {told}",
    ]


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
def test_what_is_not_tcp_is_not_excluded_with_it(base: str) -> None:
    """asyncio itself connects the sockets of UDP by the loop's sock_connect()."""
    assert said_by("others", base, fallback=False)[1:] == ["by UDP", "True"]


@pytest.mark.parametrize("base", ["asyncio", "uvloop"])
def test_for_want_of_descriptors_a_call_fails_and_the_next_does_not(base: str) -> None:
    assert said_by("scarce", base) == ["Too many open files", "Too many open files", "hello"]
