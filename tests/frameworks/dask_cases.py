"""Dask's comms over RDMA: messages of every shape, and every way in which they end."""

import asyncio
import contextlib
import gc
import logging
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Security
from distributed.comm import CommClosedError, connect, listen
from distributed.comm.core import FatalCommClosedError
from distributed.comm.registry import get_backend
from distributed.protocol import to_serialize

import rdmanet
from rdmanet.frameworks.dask import RdmaBackend
from tests.support import certificates
from tests.support.waiting import begin, loop_turns, until_seen

MIB = 1 << 20


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """A test ends when its connections have ended, before its loop is closed."""
    yield
    async with asyncio.timeout(60):
        while rdmanet.connections():
            await asyncio.sleep(0.001)


@pytest.fixture(params=["clear", "tls"])
def arguments(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Of listen() and of connect()."""
    if request.param == "clear":
        return {"listen": {}, "connect": {}}
    return {
        "listen": {"ssl_context": certificates.of_server()},
        "connect": {"ssl_context": certificates.of_client(), "server_hostname": "localhost"},
    }


@asynccontextmanager
async def pair(
    arguments: dict[str, dict[str, Any]] | None = None, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """The two ends of a connection: the client's, and the server's; for a minute at most."""
    arguments = arguments or {"listen": {}, "connect": {}}
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    async with (
        asyncio.timeout(60),
        listen("rdma://127.0.0.1", accepted.put, **arguments["listen"], **options) as listener,
    ):
        client = await connect(listener.contact_address, **arguments["connect"], **options)
        server = await accepted.get()
        try:
            yield client, server
        finally:
            client.abort()
            server.abort()


def bytes_received(comm: Any) -> int:
    """How many bytes of the stream have come."""
    return comm._writer.get_extra_info("rdma_stats")["bytes_received"]


async def begun(action: Awaitable[Any], other: Any) -> asyncio.Task[Any]:
    """The task of a write whose head the other end has received, and whose array waits for its reader."""
    before = bytes_received(other)
    task = asyncio.ensure_future(action)
    await until_seen(lambda: bytes_received(other) != before)
    assert not task.done()
    return task


async def sent(client: Any, server: Any, message: Any) -> Any:
    """What comes of a message at the other end."""
    nbytes, came = await asyncio.gather(client.write(message), server.read())
    assert nbytes > 0
    return came


# ---- Messages -----------------------------------------------------------------------------------------------


def test_distributed_finds_it_by_its_entry_point() -> None:
    assert type(get_backend("rdma")) is RdmaBackend


def test_rdmanet_does_not_import_dask() -> None:
    program = (
        "import sys, rdmanet, rdmanet.tensors, rdmanet.rpc, rdmanet.frameworks; rdmanet.open_rdma_connection;"
        "assert not {'dask', 'distributed', 'tornado', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [0],
        [0, 1, 0],
        [2100],
        [127 << 10, 1],
        [200_000] * 3,
        [MIB - 1, MIB, MIB + 1],
        [5 * MIB, 100, 0, 3 * MIB, 40_000],
        [MIB] * 70,  # more than are lent at once
        [100] * 2000,
    ],
    ids=lambda counts: f"{len(counts)}x{max(counts)}",
)
async def test_arrays_of_every_length(arguments: dict[str, dict[str, Any]], counts: list[int]) -> None:
    random = np.random.default_rng(len(counts))
    arrays = [random.integers(0, 256, count, "u1") for count in counts]
    floats = [random.random(count // 8) for count in counts]
    async with pair(arguments) as (client, server):
        for _ in range(2):
            came = await sent(
                client,
                server,
                {"bytes": to_serialize(arrays), "floats": [to_serialize(each) for each in floats]},
            )
            assert all(map(np.array_equal, came["bytes"], arrays))
            assert all(map(np.array_equal, came["floats"], floats))
            back = await sent(server, client, {"x": to_serialize(came["floats"]), "small": "text", "n": 7})
            assert all(map(np.array_equal, back["x"], floats))
            assert (back["small"], back["n"]) == ("text", 7)


async def test_an_array_has_memory_of_its_own_and_can_be_changed() -> None:
    async with pair() as (client, server):
        for count in (10, 10_000, MIB, 3 * MIB):
            a, b = (np.arange(count, dtype="f8") for _ in range(2))
            came = await sent(client, server, {"data": to_serialize([a, b]), "one": to_serialize(a)})
            for each in (*came["data"], came["one"]):
                assert each.flags.writeable
                each[:] = each + 1
            assert np.array_equal(came["data"][0], a + 1)
            assert len({id(memory_of(each)) for each in (*came["data"], came["one"])}) == 3


def memory_of(array: Any) -> object:
    """What an array keeps: the object that has its memory."""
    while not isinstance(array, np.ndarray) or array.base is not None:
        if isinstance(array, np.ndarray):
            array = array.base
        elif isinstance(array, memoryview):
            array = array.obj
        else:
            break
    return array


@pytest.mark.parametrize("count", [100, 30_000, MIB])
async def test_a_single_array_is_aligned(count: int) -> None:
    async with pair() as (client, server):
        for name in ("x", "xy", "xyz", "xyz0"):  # the head's length moves what follows
            came = await sent(client, server, {name: to_serialize(np.zeros(count, dtype="c16"))})
            assert came[name].flags.aligned


async def test_read_only_and_non_contiguous_arrays() -> None:
    grid = np.arange(4 * MIB, dtype="i4").reshape(2048, 2048)
    fixed = grid.copy()
    fixed.flags.writeable = False
    sliced = grid[::2, 1::3]
    async with pair() as (client, server):
        came = await sent(client, server, [to_serialize(fixed), to_serialize(grid.T), to_serialize(sliced)])
        for was, now in zip((fixed, grid.T, sliced), came, strict=True):
            assert np.array_equal(was, now)


async def test_large_arrays_go_past_the_stream() -> None:
    array = np.ones(8 * MIB, dtype="u1")
    async with pair() as (client, server):
        before = bytes_received(server)
        came = await sent(client, server, {"x": to_serialize(array)})
        assert np.array_equal(came["x"], array)
        assert bytes_received(server) - before < 4096


async def test_messages_of_both_sides_cross() -> None:
    array = np.arange(2 * MIB, dtype="u1")
    async with pair() as (client, server):

        async def say(comm: Any) -> None:
            for number in range(5):
                await comm.write({"number": number, "x": to_serialize(array)})

        async def hear(comm: Any) -> None:
            for number in range(5):
                came = await comm.read()
                assert came["number"] == number and np.array_equal(came["x"], array)

        await asyncio.gather(say(client), say(server), hear(client), hear(server))


async def test_what_is_not_deserialized_is_passed_on() -> None:
    array = np.arange(3 * MIB, dtype="u1")
    async with pair(deserialize=False) as (client, server), pair() as (third, fourth):
        passed = await sent(client, server, {"x": to_serialize(array)})
        came = await sent(third, fourth, passed)
        assert np.array_equal(came["x"], array)


# ---- Ends ---------------------------------------------------------------------------------------------------


async def test_closing_ends_what_the_other_side_does(arguments: dict[str, dict[str, Any]]) -> None:
    async with pair(arguments) as (client, server):
        reads = await begin(client.read(), server.read())
        await client.close()
        for read in reads:
            with pytest.raises(CommClosedError):
                await read
        for each in (client, server):
            assert each.closed()
            with pytest.raises(CommClosedError):
                await each.write("x")
            with pytest.raises(CommClosedError):
                await each.read()
            await each.close()


async def test_what_was_written_before_the_end_is_read() -> None:
    async with pair() as (client, server):
        await client.write({"last": "words"})
        await client.close()
        assert await server.read() == {"last": "words"}
        with pytest.raises(CommClosedError):
            await server.read()


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("who", ["writer", "reader"])
async def test_a_write_that_waits_for_its_reader_ends_with_the_connection(who: str, how: str) -> None:
    array = np.ones(4 * MIB, dtype="u1")
    async with pair() as (client, server):
        writing = await begun(client.write({"x": to_serialize(array)}), server)
        ended = {"writer": client, "reader": server}[who]
        if how == "abort":
            ended.abort()
        else:
            await ended.close()
        with pytest.raises(CommClosedError):
            await writing
        assert client.closed()


@pytest.mark.parametrize("side", ["write", "read"])
async def test_who_cancels_a_message_loses_the_connection(side: str) -> None:
    """What was on its way is not known: no later message may be taken for a part of it."""
    array = np.ones(64 * MIB, dtype="u1")
    async with pair() as (client, server):
        if side == "write":
            waiting = await begun(client.write({"x": to_serialize(array)}), server)
            ended, other = client, server
        else:
            (waiting,) = await begin(server.read())
            ended, other = server, client
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.closed()
        with pytest.raises(CommClosedError):
            await other.read()


async def test_a_read_that_is_cancelled_while_the_peer_writes() -> None:
    array = np.ones(64 * MIB, dtype="u1")
    for turns in range(1, 12, 2):  # it has begun
        async with pair() as (client, server):
            writing = asyncio.create_task(client.write({"x": to_serialize(array)}))
            reading = asyncio.create_task(server.read())
            await loop_turns(turns)
            reading.cancel()
            results = await asyncio.gather(writing, reading, return_exceptions=True)
            assert isinstance(results[1], asyncio.CancelledError)
            assert isinstance(results[0], CommClosedError | int)
            assert server.closed()


async def test_a_connection_that_nobody_closes_ends_as_garbage(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as (client, server):
        client._forgotten.detach()  # and this one is forgotten instead
        other = await connect(server.local_address)
        with caplog.at_level(logging.WARNING):
            del other
            gc.collect()
        assert "that nobody closed" in caplog.text


# ---- Who is at the other end --------------------------------------------------------------------------------


@asynccontextmanager
async def stranger(hear: Callable[[Any], Awaitable[None]]) -> AsyncIterator[tuple[Any, Any]]:
    """A connection of streams to a listener of Dask's that has heard the handshake and says what it likes."""
    async with listen("rdma://127.0.0.1", hear) as listener:
        host, port = listener.get_host_port()
        reader, writer = await rdmanet.open_rdma_connection(host, port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (struct.pack("3Q", 1 << 62, 0, 1 << 20), "sends a message of"),
        (struct.pack("3Q", 8, (1 << 64) - 1, 1 << 20), "sends a message of"),
        (struct.pack("3Q", 3, 0, 1 << 20) + b"abc", "3 bytes that are no head"),
        (struct.pack("3QQ", 8, 0, 1 << 20, 1 << 60), "8 bytes that are no head"),
        (struct.pack("3QQQ", 16, 0, 1 << 20, 1, 1 << 50), "sends a message of"),
        (struct.pack("3QQQ", 24, 0, 1 << 20, 1, 100) + bytes(8), "whose frames end at 116"),
        (struct.pack("3QQQ", 16, 0, 0, 1, 0), "lends frames from 0 bytes on"),
        (bytes(10), "10 bytes read on a total of 24"),
        (b"\xff" * 4096, "sends a message of"),
    ],
)
async def test_what_is_no_message_is_refused(said: bytes, why: str) -> None:
    async with pair() as (client, server):
        client._writer.write(said)
        client._writer.write_eof()
        with pytest.raises(CommClosedError, match=why):
            await server.read()
        assert server.closed()


async def test_who_speaks_another_protocol_is_dropped() -> None:
    heard = []

    async def hear(comm: Any) -> None:
        heard.append(comm)

    async with stranger(hear) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: scheduler\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # an orderly end will do, too
            while await reader.read(1000):
                pass
    assert not heard


async def test_who_lends_what_is_not_lent_is_dropped(arguments: dict[str, dict[str, Any]]) -> None:
    """A frame of one byte; and over TLS none is lent, since RDMA goes past it."""
    async with pair(arguments) as (client, server):
        client._writer.write(struct.pack("3QQQ", 16, 0, 1, 1, 1) + b"\1")
        with pytest.raises(CommClosedError, match="lends frames from 1 bytes on"):
            await server.read()
        assert server.closed()


async def test_nobody_listens() -> None:
    with pytest.raises(OSError, match="Timed out trying to connect to rdma://127.0.0.1:1"):
        await connect("rdma://127.0.0.1:1", timeout=0.2)
    with pytest.raises(ValueError):
        await connect("rdma://127.0.0.1", timeout=0.2)


async def test_a_listener_that_was_stopped() -> None:
    async def hear(comm: Any) -> None:
        pass

    listener = await listen("rdma://", hear)
    assert listener.listen_address.startswith("rdma://0.0.0.0:")
    assert not listener.contact_address.startswith("rdma://0.0.0.0:")
    address = listener.contact_address
    listener.stop()
    listener.stop()
    with pytest.raises(OSError):
        await connect(address, timeout=0.2)


async def test_encryption_that_is_required() -> None:
    async def hear(comm: Any) -> None:
        pass

    with pytest.raises(RuntimeError, match="requires encryption"):
        listen("rdma://127.0.0.1", hear, require_encryption=True)
    with pytest.raises(RuntimeError, match="requires encryption"):
        await connect("rdma://127.0.0.1:1", require_encryption=True)


async def test_tls_says_who_the_peer_is_and_refuses_others() -> None:
    def security(**others: str) -> Security:
        names = {
            "tls_ca_file": "authority",
            "tls_worker_cert": "server",
            "tls_client_cert": "client",
        } | others
        return Security(
            **{name: str(certificates.CERTIFICATES / f"{file}.pem") for name, file in names.items()}
        )

    worker, client = security().get_listen_args("worker"), security().get_connection_args("client")
    async with pair({"listen": worker, "connect": client}) as ends:
        for end in ends:
            assert end.extra_info["peercert"]["subject"] and end.extra_info["cipher"]

    async def hear(comm: Any) -> None:
        await comm.close()

    stranger = security(tls_ca_file="stranger").get_connection_args("client")
    async with listen("rdma://127.0.0.1", hear, **worker) as listener:
        with pytest.raises(FatalCommClosedError, match="TLS"):
            await connect(listener.contact_address, **stranger)


async def test_a_silent_host_is_lost_as_dasks_configuration_says() -> None:
    with dask.config.set({"distributed.comm.timeouts.tcp": "20s"}):
        async with pair() as (client, server):
            for each in (client, server):
                on, idle, interval, count = each._writer.transport._kept_alive()
                assert (on, idle + interval * count) == (True, 20)
