"""Proxies that run (`rdmanet proxy`), and peers on both sides of them.

A peer is a pair of asyncio's or rdmanet's streams on the test's loop; the proxy is a process.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

import rdmanet
from tests.support import ending
from tests.support.processes import AwaitedProcess
from tests.support.waiting import loop_turns, until_seen

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
HOST = "127.0.0.1"
MIB = 1 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# ---- the peers


_numbers = count()


def fresh_name() -> str:
    """A Unix socket that needs no file."""
    return f"@rdmanet-test-{os.getpid()}-{next(_numbers)}"


def fresh(scheme: str) -> str:
    """An endpoint for the proxy to listen on."""
    return f"unix:{fresh_name()}" if scheme == "unix" else f"{scheme}://{HOST}:0"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def open_streams(endpoint: str) -> Streams:
    scheme = endpoint.partition(":")[0]
    if scheme == "unix":
        return await asyncio.open_unix_connection(endpoint.partition(":")[2].replace("@", "\0"))
    connect = rdmanet.open_rdma_connection if scheme == "rdma" else asyncio.open_connection
    return await connect(HOST, port_of(endpoint))


def is_arrival(task: asyncio.Task, handler: Callable) -> bool:
    return task.get_coro().__name__ in ("_accept_connection2", handler.__name__)  # type: ignore[union-attr]


@asynccontextmanager
async def serving(
    scheme: str, limit: int = 65536, **options
) -> AsyncIterator[tuple[str, Callable[[], Awaitable[Streams]]]]:
    """A server for the proxy to connect to: its endpoint, and what waits for its next connection."""
    arrived: asyncio.Queue[Streams] = asyncio.Queue()
    all_of_them = []

    async def arrive(*streams) -> None:
        all_of_them.append(streams[1])
        await arrived.put(streams)

    if scheme == "unix":
        endpoint = f"unix:{fresh_name()}"
        name = endpoint.partition(":")[2].replace("@", "\0")
        server = await asyncio.start_unix_server(arrive, name, limit=limit)
    else:
        start = rdmanet.start_rdma_stream_server if scheme == "rdma" else asyncio.start_server
        server = await start(arrive, HOST, 0, limit=limit, **options)
        port = server.sockets[0].getsockname()[1]
        endpoint = f"{scheme}://{HOST}:{port}"
        if options:  # with TLS; the name is the certificate's
            endpoint = f"{'tls' if scheme == 'tcp' else 'rdma+tls'}://localhost:{port}"
    try:
        yield endpoint, arrived.get
    finally:
        # What it has accepted may not have arrived yet: asyncio has a task for each of both steps. A server that is
        # closed between them loses the connection's socket.
        while on_their_way := [task for task in asyncio.all_tasks() if is_arrival(task, arrive)]:
            await asyncio.wait(on_their_way)
        server.close()
        for writer in all_of_them:
            ending.abort(writer.transport)
        for writer in all_of_them:
            with suppress(ConnectionError):
                await writer.wait_closed()


def abort(streams: Streams) -> None:
    """As a program that fails does: not in a way that looks like the end."""
    transport = streams[1].transport
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    transport.abort()


async def close(*many: Streams) -> None:
    for _, writer in many:
        writer.close()
    for _, writer in many:
        with suppress(ConnectionError):
            await writer.wait_closed()


async def send(streams: Streams, data: bytes) -> None:
    streams[1].write(data)
    await streams[1].drain()


async def send_slowly(sender: Streams, receiver: Streams, chunk: bytes, total: int) -> None:
    async def send_much() -> None:
        for _ in range(0, total, len(chunk)):
            await send(sender, chunk)

    sending = asyncio.ensure_future(send_much())
    got = 0
    while got < total:
        await loop_turns()
        await until_seen(lambda: sending.done() or sender[1].transport.get_write_buffer_size())
        piece = await receiver[0].readexactly(1 << 12)
        assert piece == chunk[got % MIB : got % MIB + len(piece)]
        got += len(piece)
    await sending


async def until_reset(streams: Streams) -> bytes:
    """What comes before its connection is reset; an end of file fails the test."""
    got = b""
    with pytest.raises(ConnectionResetError):
        while True:
            piece = await streams[0].read(65536)
            assert piece, f"an end of file after {len(got)} bytes"
            got += piece
    await close(streams)
    return got


async def is_reset(endpoint: str) -> None:
    """Connect there, and be reset: before one knows of being connected, or then."""
    try:
        streams = await open_streams(endpoint)
    except ConnectionResetError:
        return
    assert await until_reset(streams) == b""


# ---- the proxy


class Running(AwaitedProcess):
    """A proxy that listens.

    :ivar endpoints: where, by pair
    """

    endpoints: list[str]

    @property
    def endpoint(self) -> str:
        [endpoint] = self.endpoints
        return endpoint

    async def counters(self, pair: int = 0) -> dict[str, int]:
        """What it tells on SIGUSR1."""
        before = len(self.errors())
        self.send_signal(signal.SIGUSR1)

        def table() -> list[str]:
            """Once the pair's line is whole. There may be messages around the table."""
            said = self.errors()[before:]
            found = re.search(rf"^pair  .*\n-.*\n(.*\n){{{pair + 1}}}", said, re.MULTILINE)
            return said[found.start() :].splitlines() if found else []

        await until_seen(table)
        head, _, *rows = table()
        names = re.split(r"  +", head)[1:]
        return dict(zip(names, map(int, rows[pair].split()[-len(names) :]), strict=True))

    async def until_counted(self, **expected: int) -> None:
        """Wait until its counters say so."""
        while True:
            counted = await self.counters()
            if all(counted[name] == number for name, number in expected.items()):
                return

    async def stopped(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send_signal(number)
        return await self.ended()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rdmanet", "proxy", *map(str, arguments)]


@asynccontextmanager
async def proxy(
    *arguments: object, loop: str = "asyncio", env: Mapping[str, str] | None = None
) -> AsyncIterator[Running]:
    environment = {**ENVIRONMENT, **(env or {})}
    with Running(*command("--loop", loop, *arguments), keep_errors=True, env=environment) as running:
        pairs = sum(":" in str(each) and not str(each).startswith("/") for each in arguments) // 2
        running.endpoints = [(await running.line()).partition(" -> ")[0] for _ in range(pairs)]
        yield running
    assert "Traceback" not in running.errors()


@asynccontextmanager
async def joined(
    listen: str, to: str, loop: str, *options: object
) -> AsyncIterator[tuple[Streams, Streams, Running]]:
    """A client and a server, with a proxy between."""
    async with serving(to) as (target, arrival), proxy(fresh(listen), target, *options, loop=loop) as running:
        near = await open_streams(running.endpoint)
        far = await arrival()
        try:
            yield near, far, running
        finally:
            await close(near, far)


def refused(*arguments: object) -> str:
    """Why it does not even begin: one line."""
    done = subprocess.run(
        command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    assert done.stderr.startswith("proxy: ")
    return done.stderr.rstrip()


def peak(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10
