"""What rdmanet imports, and when: of others at most these modules, and nothing any more when connections come and go.

A program may give up its rights, or go where it cannot read its modules, when it has a server. So what connections
need, however they end, is imported before that. A client that only says something short does not import all of it: if
it wants the rest, it says so.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.embedded_only("the programs talk to themselves, by the embedded device")

ROOT = Path(__file__).parents[2]

OTHERS = "__future__ bisect resource struct typing"
"""What one echo imports beside rdmanet and asyncio. Whoever adds a module here adds its time to every start.

asyncio itself imports struct before Python 3.15."""

# `rdmanet ss` shows each process that has a socket for it, and what a process imports to answer is not meant here.
# Other tests run it at the same time.
COMMON = """
import asyncio, sys

class Asked:
    def __init__(self):
        self.names = []
        sys.meta_path.insert(0, self)
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)

def unseen(event, args):
    if event == "socket.bind" and str(args[1]).startswith("\\0rdmanet-ss/"):
        raise OSError

sys.addaudithook(unseen)

async def echo(reader, writer):
    try:
        while data := await reader.read(100):
            writer.write(data)
    except OSError:
        pass
    writer.close()

async def say(reader, writer):
    writer.write(bytes(64))
    await reader.readexactly(64)

async def close(writer):
    writer.close()
    await writer.wait_closed()
"""

SERVER = """
import rdmanet

async def offer(reader, writer):
    async with writer.offer(bytearray(100)):
        await echo(reader, writer)

async def abort(reader, writer):
    writer.transport.abort()

async def main():
    servers = [await rdmanet.start_rdma_stream_server(each, "127.0.0.1", 0) for each in (offer, abort, echo)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.close()
        await server.wait_closed()
asyncio.run(main())
"""

ONE_ECHO = f"""
import {OTHERS.replace(" ", ", ")}
asked = Asked()
import rdmanet
async def main():
    reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", ECHO)
    await say(reader, writer)
    await close(writer)
asyncio.run(main())
print(*(name for name in asked.names if not name.startswith("rdmanet")))
"""

SWITCHED_SERVER = """
import rdmanet

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    print(*[server.sockets[0].getsockname()[1]] * 3, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()
    await server.wait_closed()
rdmanet.run(main())
"""

SWITCHED_ECHO = f"""
import {OTHERS.replace(" ", ", ")}
asked = Asked()
import rdmanet
from rdmanet.loop import connecting, doors, inquiry
doors.PATIENCE_S = connecting.PATIENCE_S = inquiry.ASK_S = 60.0  # on a busy machine, too
async def main():
    reader, writer = await asyncio.open_connection("127.0.0.1", ECHO)
    assert writer.get_extra_info("fabric") == "rdma"
    await say(reader, writer)
    await close(writer)
rdmanet.run(main(), loop_factory=asyncio.SelectorEventLoop)
print(*(name for name in asked.names if not name.startswith("rdmanet")))
"""

CLIENT = """
import rdmanet

async def aborted(port):
    reader, _ = await rdmanet.open_rdma_connection("127.0.0.1", port)
    try:
        await reader.read()
    except ConnectionResetError:
        pass

async def main():
    asked = Asked()
    reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", ECHO)
    asked.names.clear()
    await say(reader, writer)
    assert writer.get_extra_info("socket").getpeername() == ("127.0.0.1", ECHO)
    writer.transport.abort()
    await aborted(ABORT)
    {more}
    print(*asked.names)
asyncio.run(main())
"""

MUCH = """
    reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", OFFER)
    offered = await reader.next_offer()
    assert len(await offered.read()) == 100
    async with writer.offer(bytearray(100)):
        await say(reader, writer)
    data = bytearray(1 << 22)
    writer.write(data)
    await reader.readinto_exactly(data)
    await close(writer)
"""

HEARS = """
import rdmanet

class Listener(asyncio.Protocol):
    told = 0
    lost = None
    def port_event(self, event):
        self.told += 1
        if self.told == 2:
            over.set_result(event.port_num)
    def connection_lost(self, exc):
        self.lost = exc
        if not over.done():
            over.set_result(repr(exc))

class NoDescriptor:
    def find_spec(self, name, path=None, target=None):
        raise OSError(24, "Too many open files", name)

async def main():
    global over
    over = asyncio.get_running_loop().create_future()
    transport, _ = await rdmanet.create_rdma_connection(Listener, "127.0.0.1", ECHO)
    sys.meta_path.insert(0, NoDescriptor())
    transport.get_extra_info("rdma_pd").context.set_faults("link=down:0ms:20ms")
    transport.write(b"through it")
    print("port", await over)
    transport.abort()
asyncio.run(main())
"""

SCARCE = """
import os, resource, socket, threading
import rdmanet

def take_all():
    if {is_hard}:  # else the limit can be raised
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        return taken

async def main():
    with socket.create_server(("127.0.0.1", 0)) as plain:
        if {fabric!r} == "rdma":
            reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", ECHO)
            await say(reader, writer)  # the device has its descriptors of the peer
        else:
            _, writer = await asyncio.open_connection(*plain.getsockname())
        def ask():
            found.append({ask})
        found, taken = [], take_all()
        if {by_thread}:
            asking = threading.Thread(target=ask)
            asking.start()
            asking.join()
        else:
            ask()
        for fd in taken:
            os.close(fd)
        await close(writer)
    print("fabric" in found[0] and {fabric!r})
rdmanet.run(main())
"""

LIVES = """
import rdmanet
from rdmanet._core import CMEventType, Library
from tests.support.bare_peer import DATA, HELLO, BarePeer, frame

async def lies(address, data, hello=HELLO, end=CMEventType.DISCONNECTED):
    peer = BarePeer(Library.embedded())
    await peer.call(*address, hello)
    if hello is HELLO:
        await peer.event(CMEventType.ESTABLISHED)
        peer.post(data)
    await peer.event(end)
    peer.close()

async def main():
    server = await rdmanet.start_rdma_stream_server(echo, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    asked = Asked()
    reader, writer = await rdmanet.open_rdma_connection(*address)
    await say(reader, writer)
    async with writer.offer(bytearray(100)):
        pass
    await close(writer)
    reader, writer = await rdmanet.open_rdma_connection(*address)
    await say(reader, writer)
    writer.transport.abort()
    await lies(address, frame(200))
    await lies(address, frame(DATA, b"x", length=60000))
    await lies(address, b"", b"no Hello", CMEventType.REJECTED)
    server.close()
    await server.wait_closed()
    try:
        await rdmanet.open_rdma_connection(*address)
    except ConnectionRefusedError:
        pass
    print(*asked.names)
asyncio.run(main())
"""

SWITCHED = """
import socket
import rdmanet

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    asked = Asked()
    reader, writer = await asyncio.open_connection(*address)
    assert writer.get_extra_info("fabric") == "rdma"
    await say(reader, writer)
    await close(writer)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        _, writer = await asyncio.open_connection(*plain.getsockname())
        assert writer.get_extra_info("fabric") == "tcp"
        await close(writer)
    server.close()
    await server.wait_closed()
    try:
        await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        pass
    print(*asked.names)
rdmanet.run(main())
"""


def started(code: str, **pipes: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RDMANET_")}
    command = [sys.executable, "-c", COMMON + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, **pipes)


def words_of(code: str) -> list[str]:
    with started(code) as program:
        said, _ = program.communicate()
    assert program.returncode == 0
    return said.split()


def words_of_client(code: str, servers: str = SERVER) -> list[str]:
    """The same of a program that connects to servers in another one, by the ports OFFER, ABORT and ECHO."""
    with started(servers, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        ports = ", ".join(server.stdout.readline().split())
        words = words_of(f"OFFER, ABORT, ECHO = {ports}\n{code}")
        server.stdin.close()
        assert server.wait() == 0
    return words


def test_what_one_echo_imports_of_others() -> None:
    assert words_of_client(ONE_ECHO) == []


def test_what_a_switched_echo_imports_of_others() -> None:
    """Neither what servers take, as ctypes, nor what makes records."""
    assert set(words_of_client(SWITCHED_ECHO, SWITCHED_SERVER)) == {"fnmatch", "termios"}


def test_one_echo_imports_nothing_of_servers_and_of_memory() -> None:
    """These are a third of what a connection imports, and a client needs them rarely."""
    more = 'print(*(name for name in sys.modules if name.startswith("rdmanet")))'
    loaded = words_of_client(f"{ONE_ECHO}{more}")
    assert "rdmanet.stream.lifecycle" in loaded
    rest = "listening server admission whole regions bindings registered explaining peer_memory"
    assert not {f"rdmanet.stream.{name}" for name in rest.split()} & {*loaded}
    assert not {"rdmanet.base.accounts", "rdmanet.wire.offers", "rdmanet.verbs.device_lookup"} & {*loaded}


def test_one_echo_makes_no_enumeration_and_no_record() -> None:
    more = """
    from rdmanet import _core, verbs
    print(*("dataclasses" in asked.names, *({*vars(_core)} & {*verbs.__all__})))
    """
    said = words_of_client(ONE_ECHO + inspect.cleandoc(more))
    assert said[0] == "False"
    assert not {"WCStatus", "WROpcode", "EventType", "AccessFlags", "QPAttr", "QPCap", "DeviceAttr"} & {*said}


def test_what_a_client_imports_after_its_first_connection() -> None:
    """Nothing, however its connections end."""
    assert words_of_client(CLIENT.replace("{more}", "")) == []


def test_a_client_without_a_descriptor_hears_of_its_port() -> None:
    """What the device tells makes no record that imports something: an OSError there would say that it is lost."""
    assert words_of_client(HEARS) == ["port", "1"]


@pytest.mark.parametrize(("by_thread", "is_hard"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("fabric", "ask"),
    [
        ("rdma", "writer.transport.explain()"),
        ("rdma", "rdmanet.connections()[0].explain()"),
        ("tcp", "rdmanet.connections()[0].explain()"),
        ("rdma", "rdmanet.metrics()"),
        ("tcp", "rdmanet.metrics()"),
    ],
)
def test_a_client_without_a_descriptor_is_explained(
    fabric: str, ask: str, by_thread: bool, is_hard: bool
) -> None:
    """What explains is imported when somebody asks first, and to read a module takes a descriptor."""
    code = SCARCE.format(fabric=fabric, ask=ask, by_thread=by_thread, is_hard=is_hard)
    assert words_of_client(code) == [fabric]


def test_a_client_that_wants_the_rest_says_so() -> None:
    """It names what the memory of peers takes; then long reads and offers import nothing any more."""
    assert words_of_client("import rdmanet\nrdmanet.OfferedMemory\n" + CLIENT.replace("{more}", MUCH)) == []


@pytest.mark.parametrize("lives", [LIVES, SWITCHED], ids=["streams", "switched"])
def test_what_lives_of_connections_import(lives: str) -> None:
    """Whatever happens to them: an echo, an abort, a refusal, a peer that lies, TCP instead."""
    assert words_of(lives) == []
