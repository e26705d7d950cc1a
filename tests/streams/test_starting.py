"""What rdmanet imports, and when: of others at most these modules, and nothing any more when connections come and go.

A program may give up its rights, or go where it cannot read its modules, when it has a server. So what connections
need, however they end, is imported before that.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.embedded_only("the programs talk to themselves, by the embedded device")

ROOT = Path(__file__).parents[2]

OTHERS = "array bisect dataclasses datetime ipaddress msgspec resource"
"""What one echo imports beside rdmanet and asyncio. Whoever adds a module here adds its time to every start."""

COMMON = """
import asyncio, sys

class Asked:
    def __init__(self):
        self.names = []
        sys.meta_path.insert(0, self)
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)

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

ONE_ECHO = f"""
import {OTHERS.replace(" ", ", ")}
asked = Asked()
import rdmanet
async def main():
    server = await rdmanet.start_rdma_stream_server(echo, "127.0.0.1", 0)
    reader, writer = await rdmanet.open_rdma_connection(*server.sockets[0].getsockname())
    await say(reader, writer)
    await close(writer)
    server.close()
asyncio.run(main())
print(*(name for name in asked.names if not name.startswith("rdmanet")))
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


def words_of(code: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RDMANET_")}
    command = [sys.executable, "-c", COMMON + code]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment
    ).stdout.split()


def test_what_one_echo_imports_of_others() -> None:
    assert words_of(ONE_ECHO) == []


@pytest.mark.parametrize("lives", [LIVES, SWITCHED], ids=["streams", "switched"])
def test_what_lives_of_connections_import(lives: str) -> None:
    """Whatever happens to them: an echo, an abort, a refusal, a peer that lies, TCP instead."""
    assert words_of(lives) == []
