"""Buffers as arguments and results: by reference over RDMA, in the message over the other transports and when small."""

import asyncio
import mmap
from typing import Any

import numpy
import pytest
from net import Journal, Net, bindings, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code, lending, messenger
from rdmanet.rpc.framing import PlainReply
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.link import LOANS_MOST, Link
from rdmanet.rpc.messages import OutItem, encode
from rdmanet.rpc.messenger import COLLECT_BYTES
from rdmanet.rpc.reads import read_offer
from tests.support.waiting import begin

SIZES = [0, 1, 1000, LEND_BYTES - 1, LEND_BYTES, 3_000_001]


class Store(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.gate = asyncio.Event()
        self.kept: Any = None
        self.memory: Any = b""

    async def put(self, name: str, data: memoryview, copy: bytes = b"") -> int:
        self.kept = data
        return data.nbytes + len(copy)

    async def get(self, size: int) -> memoryview:
        return memoryview(self.memory)[:size]

    async def get_bytes(self, size: int) -> bytes:
        return bytes(self.memory[:size])

    async def lend(self, size: int) -> rpc.Buffer:
        return rpc.Buffer(memoryview(self.memory)[:size])

    async def parts(self, data: rpc.Buffer) -> list[bytes]:
        self.kept = data
        middle = bytearray(3)
        await data.read_into(middle, 2)
        return [await data.read(0, 2), bytes(middle), await data.read(data.nbytes - 1)]

    async def keep(self, data: rpc.Buffer) -> None:
        self.kept = data
        self.journal("kept")
        try:
            await asyncio.Event().wait()
        finally:
            self.journal("ends")

    async def hold(self, data: memoryview) -> None:
        self.journal("holds")
        await self.gate.wait()

    async def fail(self, data: rpc.Buffer) -> None:
        self.kept = data
        raise rpc.Error(Code.ABORTED)


def pattern(size: int) -> bytearray:
    return bytearray((bytes(range(251)) * (size // 251 + 1))[:size])


def nothing_is_lent(net: Net, client: Store, server: rpc.Server) -> bool:
    """No offer is left on either side."""
    sides = [channel(client).link, callee(server).link]
    assert not any(side._awaited for side in sides)
    return not bindings(*sides)


async def test_more_calls_with_two_buffers_than_there_can_be_loans(net: Net):
    client, server = await net.pair(Store())
    data = pattern(LEND_BYTES)
    calls = [client.put("w", data.copy(), bytes(data)) for _ in range(LOANS_MOST + 2)]  # type: ignore[arg-type]
    assert set(await asyncio.gather(*calls)) == {2 * LEND_BYTES}
    assert nothing_is_lent(net, client, server)


async def test_answers_of_one_turn_wait_for_the_transport(net: Net, monkeypatch: pytest.MonkeyPatch):
    buffered = []

    def pause_writing(link: Link) -> None:
        original(link)
        buffered.append(link.transport.get_write_buffer_size())

    original = Link.pause_writing
    monkeypatch.setattr(Link, "pause_writing", pause_writing)
    service = Store()
    client, _ = await net.pair(service)
    service.memory = pattern(LEND_BYTES - 1)
    small = client.put("w", memoryview(b"x"))
    assert set(
        map(len, (await asyncio.gather(small, *[client.get_bytes(LEND_BYTES - 1) for _ in range(50)]))[1:])
    ) == {LEND_BYTES - 1}
    assert max(buffered, default=0) < 4 * LEND_BYTES


@pytest.mark.parametrize("size", SIZES)
async def test_arguments_and_results(net: Net, size: int):
    service = Store()
    client, server = await net.pair(service)
    data = service.memory = pattern(size)
    assert await client.put("w", memoryview(data), bytes(data)) == 2 * size
    assert service.kept == data and service.kept.readonly
    got = await client.get(size)
    assert isinstance(got, memoryview) and got == data and got.readonly
    found = await client.get_bytes(size)
    assert isinstance(found, bytes) and found == data
    async with await client.lend(size) as lent:
        assert len(lent) == size
        assert await lent.read() == data
        mine = bytearray(size)
        assert await lent.read_into(mine) == size and mine == data
    if size >= 5:
        parts = await client.parts(rpc.Buffer(data))
        assert parts == [data[:2], data[2:5], data[-1:]]
    await client.put("last", memoryview(b""))  # the Release before it has come
    assert not server.running or await idle(server)
    assert nothing_is_lent(net, client, server)


async def test_by_reference_no_byte_is_in_a_message(net: Net):
    client, _ = await net.pair(Store(), limits=rpc.Limits(message_bytes=100_000))
    data = pattern(2_000_000)
    if net.transport == "rdma":
        assert await client.put("w", memoryview(data)) == 2_000_000
    else:
        with pytest.raises(rpc.Error, match="the limit message_bytes is 100000"):
            await client.put("w", memoryview(data))


async def test_numpy_arrays(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    array = numpy.arange(200_000, dtype="f8").reshape(200, 1000)
    assert await client.put("w", array) == array.nbytes
    assert (numpy.frombuffer(service.kept).reshape(200, 1000) == array).all()
    service.memory = array.data.cast("B")
    async with await client.lend(array.nbytes) as lent:
        mine = numpy.empty_like(array)
        await lent.read_into(mine)
        assert (mine == array).all()
        half = numpy.empty_like(array[100:])
        await lent.read_into(half, array.nbytes // 2)
        assert (half == array[100:]).all()
    with pytest.raises(BufferError):
        await client.put("w", array[:, ::2])


async def test_what_is_no_buffer(net: Net):
    client, _ = await net.pair(Store())
    with pytest.raises(TypeError, match=r"Store.put: parameter data: 'str' is no buffer"):
        await client.put("w", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rpc.Buffer("text")
    buffer = rpc.Buffer(b"12345678")
    with pytest.raises(IndexError):
        await buffer.read(0, 9)
    with pytest.raises(IndexError):
        await buffer.read_into(bytearray(9))
    with pytest.raises(TypeError, match="read-only"):
        await buffer.read_into(b"12345678")
    assert await buffer.read(2, 4) == b"34"


async def test_a_buffer_cannot_be_read_after_its_call(net: Net):
    service = Store()
    client, server = await net.pair(service)
    for size in (100, 2_000_000):
        await client.parts(rpc.Buffer(pattern(size)))
        with pytest.raises(rpc.Error, match="its call has ended"):
            await service.kept.read(0, 1)
        with pytest.raises(rpc.Error, match="ABORTED"):
            await client.fail(rpc.Buffer(pattern(size)))
        with pytest.raises(rpc.Error, match="its call has ended"):
            await service.kept.read(0, 1)
        service.memory = pattern(size)
        lent = await client.lend(size)
        lent.release()
        lent.release()
        with pytest.raises(rpc.Error, match="or it was released"):
            await lent.read(0, 1)
    await idle(server)
    assert nothing_is_lent(net, client, server)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_the_memory_is_the_callers_when_the_call_ends(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Whatever ends it: cancelling, a deadline, an error."""
    monkeypatch.setattr(lending, "RETURN_S", 3600)  # the peer does answer
    service = Store()
    client, server = await net.pair(service)
    data = pattern(2_000_000)
    (call,) = await begin(client.keep(rpc.Buffer(data)))
    await service.journal.until("kept")
    assert await service.kept.read(0, 2) == data[:2]
    with pytest.raises(BufferError):
        data.clear()  # it is lent
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not bindings(channel(client).link)
    await service.journal.until("ends")
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await rpc.options(client, timeout=2).keep(rpc.Buffer(data))
    assert not bindings(channel(client).link)
    await service.journal.until("ends", 2)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_caller_that_reads_nothing_keeps_no_memory(net: Net):
    service = Store()
    service.memory = pattern(2_000_000)
    client, server = await net.pair(service, limits=rpc.Limits(lent_seconds=0.05))
    lent = await client.lend(2_000_000)
    await idle(server)
    with pytest.raises(rpc.Error, match="can be read no more"):
        await lent.read(0, 1)
    lent.release()
    assert await client.put("still there", memoryview(b"1")) == 1


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_server_that_closes_ends_its_loans(net: Net):
    service = Store()
    service.memory = pattern(2_000_000)
    client, server = await net.pair(service)
    lent = await client.lend(2_000_000)
    assert await lent.read(0, 2) == service.memory[:2]
    server.close()
    await (
        server.wait_closed()
    )  # not after `Limits.lent_seconds`, as the call was cancelled when it had its answer
    with pytest.raises(rpc.Error):
        await lent.read(0, 1)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_more_buffers_than_offers(net: Net):
    """More calls with buffers than a connection can have offers: some wait."""
    client, _ = await net.pair(Store())
    data = memoryview(pattern(LEND_BYTES))
    assert await asyncio.gather(*(client.put("w", data) for _ in range(300))) == [LEND_BYTES] * 300


@pytest.mark.parametrize("transport", ["rdma"])
async def test_limits_of_lent_bytes(net: Net):
    service = Store()
    service.memory = pattern(2_000_000)
    server = await net.serve(service, limits=rpc.Limits(lent_bytes=500_000))
    client = await net.connect(Store, server, limits=rpc.Limits(lent_bytes=600_000))
    for call in (client.put("w", memoryview(service.memory)), client.get(2_000_000)):
        with pytest.raises(rpc.Error, match="the limit lent_bytes is") as caught:
            await call
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert (await client.parts(rpc.Buffer(service.memory)))[0] == service.memory[
        :2
    ]  # it chooses what to read


@pytest.mark.parametrize("transport", ["rdma"])
async def test_lent_bytes_count_until_the_call_ends(net: Net):
    service = Store()
    client, _ = await net.pair(service, limits=rpc.Limits(lent_bytes=3_000_000))
    data = memoryview(pattern(2_000_000))
    (holding,) = await begin(client.hold(data))
    await service.journal.until("holds")
    with pytest.raises(rpc.Error, match="the limit lent_bytes is 3000000"):
        await client.put("w", data)
    service.gate.set()
    await holding
    assert await client.put("w", data) == 2_000_000


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_caller_that_is_cancelled_in_the_turn_of_its_answer_releases_it(net: Net):
    service = Store()
    service.memory = pattern(2_000_000)
    client, server = await net.pair(service, limits=rpc.Limits(lent_seconds=3600))
    link = channel(client).link
    original = link._handlers[PlainReply]

    def on_reply(message: PlainReply) -> None:
        original(message)
        call.cancel()

    for method in (client.get, client.lend):
        link._handlers[PlainReply] = on_reply  # type: ignore[index]
        (call,) = await begin(method(2_000_000))
        with pytest.raises(asyncio.CancelledError):
            await call
        link._handlers[PlainReply] = original  # type: ignore[index]
        await idle(server)
        assert nothing_is_lent(net, client, server)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_cancelling_one_reader_of_an_offer_leaves_the_other(net: Net):
    """Both wait for the offer, which has not come yet."""
    service = Store()
    service.memory = pattern(2_000_000)
    client, _ = await net.pair(service)
    link = channel(client).link
    readers = await begin(*(link.offered(1) for _ in range(3)))
    readers[0].cancel()
    await asyncio.wait(readers[:1])
    async with await client.lend(2_000_000):
        one, other = await asyncio.gather(*readers[1:])
        assert one is other and one.length == 2_000_000
    assert not link._awaited


@pytest.mark.parametrize("transport", ["rdma"])
async def test_reading_a_buffer_whose_connection_is_lost(net: Net):
    service = Store()
    service.memory = pattern(2_000_000)
    client, _ = await net.pair(service)
    lent = await client.lend(2_000_000)
    assert await lent.read(0, 2) == service.memory[:2]
    link = channel(client).link
    remote = link._offers[1]
    link.transport.abort()
    await link.closed
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):
        await lent.read(0, 1)
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):  # it was found just before
        await read_offer(link, remote, bytearray(1), 0)


async def test_memory_that_was_released_before():
    """Python's own words for it are told."""
    view, mapped = memoryview(bytearray(4)), mmap.mmap(-1, 4)
    view.release()
    mapped.close()
    async with rpc.Buffer(bytes(4)) as buffer:
        for memory, says in ((view, "released memoryview"), (mapped, "mmap closed")):
            with pytest.raises(ValueError, match=says):
                rpc.Buffer(memory)
            with pytest.raises(ValueError, match=says):
                await buffer.read_into(memory)


async def test_a_connection_that_is_lost_while_memory_is_lent(net: Net):
    service = Store()
    client, server = await net.pair(service)
    (call,) = await begin(client.keep(rpc.Buffer(pattern(2_000_000))))
    await service.journal.until("kept")
    channel(client).link.transport.abort()
    with pytest.raises(rpc.Error, match="UNAVAILABLE"):
        await call
    await service.journal.until("ends")
    await idle(server)


async def test_a_long_message_is_not_copied_to_join_its_header(net: Net, monkeypatch: pytest.MonkeyPatch):
    """And it stays between those that were sent before it and after it in the same turn."""
    client, _ = await net.pair(Store())
    link = channel(client).link
    encoded: list[bytes] = []
    written: list[Any] = []
    transport = link.transport

    class Recorder:
        def write(self, data: bytes) -> None:
            written.append(data)

        def writelines(self, parts: tuple[bytes, ...]) -> None:
            written.extend(parts)

    monkeypatch.setattr(messenger, "encode", lambda message: encoded.append(encode(message)) or encoded[-1])
    link.transport = Recorder()  # type: ignore[assignment]
    for size in (1, 2, COLLECT_BYTES, 3):
        link.send(OutItem(1, bytes(size)))
    link._turn_ends()
    link.transport = transport
    assert any(part is encoded[2] for part in written)
    assert b"".join(written) == b"".join(len(body).to_bytes(4, "big") + body for body in encoded)


async def test_what_is_too_long_for_a_message_and_too_short_to_lend(net: Net):
    limits = rpc.Limits(message_bytes=1 << 16)
    server = await net.serve(Lengths(), limits=limits)
    client = await net.connect(Lengths, server, limits=limits)
    for data in (bytes(100_000), memoryview(bytes(100_000))):
        with pytest.raises(
            rpc.Error, match=r"a message of 1000\d\d bytes to the peer: the limit message_bytes"
        ):
            await client.put(data)
    with pytest.raises(rpc.Error, match=r"a message of 1000\d\d bytes to the peer: the limit message_bytes"):
        await client.get()


class Lengths(rpc.Service):
    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def get(self) -> memoryview:
        return memoryview(bytes(100_000))
