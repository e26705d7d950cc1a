"""The running loop makes no call that tools against blocking calls know (blockbuster, in aiohttp's and AnyIO's tests).

They stand for all that may wait for a disk or a peer: `os.stat`, `open()`, `connect()` of a blocking socket. Here they
are replaced as blockbuster replaces them, but by nothing that comes without a wheel.
"""

import asyncio
import builtins
import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from loop_harness import STREAM, Echo, Recorder, fabric, peer, plain_server, workers_on

import rdmanet
from tests.support.certificates import of_client, of_server

SERVER, CLIENT = of_server(), of_client()


OF_FILES = [
    (builtins, "open"), (io, "open"), (time, "sleep"),
    *((os, name) for name in (
        "access", "getcwd", "link", "listdir", "mkdir", "readlink", "remove", "rename", "replace", "rmdir",
        "scandir", "stat", "statvfs", "symlink", "unlink",
    )),
    *((os.path, name) for name in ("abspath", "islink", "ismount", "samestat", "sameopenfile")),
]  # fmt: skip
OF_DESCRIPTORS = [(os, "read"), (os, "write")]
OF_SOCKETS = [
    (socket.socket, name) for name in (
        "connect", "accept", "send", "sendall", "sendto", "recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg",
    )
]  # fmt: skip
# What Python does by itself while the loop runs: importing, showing a warning's line.
OF_PYTHON = ("importlib._bootstrap", "linecache", "assertion/rewrite.py")


class Blocking(Exception):
    """The running loop has made a call that may block."""


def _refuse(patch, owner, name: str, may: Callable[[Any], bool]) -> None:
    call = getattr(owner, name)

    def checked(*args, **kwds):
        if asyncio._get_running_loop() is not None and not may(args[0] if args else None):
            frame = sys._getframe(1)
            while frame is not None and not any(part in frame.f_code.co_filename for part in OF_PYTHON):
                frame = frame.f_back
            if frame is None:
                raise Blocking(f"{name}{args!r}")
        return call(*args, **kwds)

    patch.setattr(owner, name, checked)


@contextlib.contextmanager
def no_blocking_calls():
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OF_FILES:
            _refuse(patch, owner, name, lambda _: False)
        for owner, name in OF_DESCRIPTORS:
            _refuse(patch, owner, name, lambda fd: not os.get_blocking(fd))
        for owner, name in OF_SOCKETS:
            _refuse(patch, owner, name, lambda sock: not sock.getblocking())
        yield


async def round_trip(host: str, port: int, **options) -> str:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(Recorder, host, port, **options)
    transport.write(b"hello")
    await protocol.until(lambda: protocol.data == b"hello")
    transport.get_extra_info("socket")
    took = fabric(transport)
    transport.close()
    await protocol.until(lambda: "lost" in protocol.events)
    return took


def test_that_it_would_be_noticed():
    async def main():
        with no_blocking_calls():
            os.stat("/")

    with pytest.raises(Blocking, match="stat"):
        asyncio.run(main())


HOSTS = {"127.0.0.1": ["127.0.0.1", "localhost"], "0.0.0.0": ["127.0.0.1"], "::": ["::1"]}


@pytest.mark.parametrize("address", HOSTS)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_server_and_its_clients(base, address, encrypted):
    """From the first import that they need to the loop's end."""

    async def main():
        with no_blocking_calls():
            loop = asyncio.get_running_loop()
            server = await loop.create_server(Echo, address, 0, ssl=SERVER if encrypted else None)
            port = server.sockets[0].getsockname()[1]
            options = {"ssl": CLIENT, "server_hostname": "localhost"} if encrypted else {}
            for host in HOSTS[address]:
                assert await round_trip(host, port, **options) == "rdma"
            server.close()
            with pytest.raises(ConnectionRefusedError):
                await round_trip(HOSTS[address][0], port, **options)

    rdmanet.run(main(), loop_factory=base)


async def test_to_a_server_by_tcp():
    plain, port = await plain_server()
    with no_blocking_calls():
        for _ in range(2):
            assert await round_trip("127.0.0.1", port) == "tcp"
    plain.close()


async def test_to_another_process_that_dies():
    with peer("echo.py") as server:
        port = int(await server.line())
        with no_blocking_calls():
            assert await round_trip("127.0.0.1", port) == ("tcp" if STREAM else "rdma")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"kill")
            server.process.kill()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()


@pytest.mark.skipif(STREAM, reason="processes of one host are not connected by TCP's path by default")
async def test_workers():
    """This process is dealt connections by another one, and then deals them itself."""
    loop = asyncio.get_running_loop()
    with workers_on("127.0.0.1", 1) as (port, peers):
        [other] = peers.values()
        await other.line()
        with no_blocking_calls():
            server = await loop.create_server(Echo, "127.0.0.1", port, reuse_port=True)
            for _ in range(3):
                transport, _ = await loop.create_connection(Recorder, "127.0.0.1", port)
                transport.abort()
            other.process.kill()
            await asyncio.gather(*server._tasks)
            server.close()


async def test_sockets_of_the_program():
    loop = asyncio.get_running_loop()
    with socket.socket() as listener:
        listener.setblocking(False)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with no_blocking_calls():
            for _ in range(3):
                sock = socket.socket()
                sock.setblocking(False)
                accepting = asyncio.ensure_future(loop.sock_accept(listener))
                await loop.sock_connect(sock, listener.getsockname())
                connected, _ = await loop.create_connection(Recorder, sock=sock)
                accepted, _ = await loop.connect_accepted_socket(Echo, (await accepting)[0])
                connected.abort()
                accepted.abort()


async def test_direct_calls():
    with no_blocking_calls():
        async with await rdmanet.start_rdma_server(Echo, "127.0.0.1", 0) as server:
            transport, _ = await rdmanet.create_rdma_connection(Recorder, *server.sockets[0].getsockname())
            async with transport.offer(bytearray(4096)):
                pass
            transport.abort()
