"""The rest of a long message goes straight into its memory, and what nobody changes is not copied into its message."""

import asyncio
import random
from typing import Any

import msgspec
import numpy
import pytest
from net import Net, callee, channel, idle

from rdmanet import rpc
from rdmanet._core import REUSED_BYTES
from rdmanet.rpc import lending, link, messages, messenger
from rdmanet.rpc.framing import LONG_BYTES, is_kept
from rdmanet.rpc.long_bodies import LongBody
from rdmanet.rpc.messages import Framer, OutCall, OutItem, Ping, Reply, encode, frame
from rdmanet.rpc.snapshot import is_settled
from tests.support.waiting import begin, loop_turns, until_seen

SIZE = 1_400_000
"""A long body, which is not lent."""


def pattern(size: int) -> bytes:
    return (numpy.arange(size, dtype="u4") % 251).astype("u1").tobytes()


class Store(rpc.Service):
    def __init__(self) -> None:
        self.data = pattern(SIZE)
        self.kept: Any = None

    async def put(self, name: str, data: memoryview, more: bytes) -> int:
        self.kept = data
        return len(data) + len(more)

    async def put_array(self, array: numpy.ndarray) -> int:
        self.kept = array
        return int(array.nbytes)

    async def put_both(self, array: numpy.ndarray, more: memoryview) -> int:
        self.kept = array, more
        return int(array.nbytes) + len(more)

    async def get_array(self) -> numpy.ndarray:
        return numpy.frombuffer(self.data, "<f4")

    async def get(self) -> memoryview:
        return memoryview(self.data)

    async def get_bytes(self) -> bytes:
        return self.data

    async def put_state(self, state: dict[str, numpy.ndarray]) -> int:
        self.kept = state
        return len(state)

    async def one(self) -> int:
        return 1


class Received:
    """How much each side's links got in memory of their transports, and how much straight into its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied = self.placed = 0
        takes, came = link.Link.data_received, link.Link.body_came

        def data_received(one: link.Link, data: bytes) -> None:
            self.copied += len(data)
            takes(one, data)

        def body_came(one: link.Link, nbytes: int) -> None:
            self.placed += nbytes
            came(one, nbytes)

        monkeypatch.setattr(link.Link, "data_received", data_received)
        monkeypatch.setattr(link.Link, "body_came", body_came)


async def test_most_of_a_long_body_is_not_copied(net: Net, monkeypatch: pytest.MonkeyPatch):
    received = Received(monkeypatch)
    service = Store()
    client, server = await net.pair(service)
    data = pattern(SIZE)
    for number in range(1, 4):
        assert await client.put("w", memoryview(data), b"more") == SIZE + 4 and service.kept == data
        array = numpy.frombuffer(data, "u2").reshape(-1, 50)
        assert await client.put_array(array) == SIZE and numpy.array_equal(service.kept, array)
        assert await client.get() == data and await client.get_bytes() == data
        assert await client.put_state({"a": array, "b": array[:9]}) == 2
        assert numpy.array_equal(service.kept["b"], array[:9])
        assert await client.one() == 1
        assert received.placed + received.copied > 5 * SIZE * number
    assert received.placed > 2 * received.copied
    assert not server.running or await idle(server)
    for one in channel(client).link, callee(server).link:
        assert one.transport.get_protocol() is one


async def test_an_array_is_where_it_came(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Its memory is that of its message, if it is most of that and lies well; and nobody else's."""
    copied = []

    async def counted(loop: Any, memory: memoryview, data: memoryview) -> None:
        copied.append(data.nbytes)
        memory[:] = data

    monkeypatch.setattr(lending, "filled", counted)
    service = Store()
    client, _ = await net.pair(service)
    array = numpy.frombuffer(pattern(SIZE), "<f4").reshape(-1, 50)
    assert await client.put_array(array) == SIZE
    for got in service.kept, (await client.get_array()).reshape(-1, 50):
        assert got.dtype == array.dtype and got.tobytes() == array.tobytes()
        assert got.flags.writeable and got.flags.aligned and got.flags.c_contiguous
        got[:] = 1
    del got
    held, service.kept = [service.kept], None
    assert is_settled(held) and service.data == pattern(SIZE) and not copied
    assert await client.put_both(array, memoryview(b"odd")) == SIZE + 3  # moves it from where it could be
    assert service.kept[0].tobytes() == array.tobytes() and service.kept[0].flags.aligned and copied == [SIZE]
    small = array[: LONG_BYTES // 200 + 1]
    assert await client.put_both(small, memoryview(service.data)) == small.nbytes + SIZE
    kept, more = service.kept
    assert kept.tobytes() == small.tobytes() and more == service.data and more.readonly
    assert copied == [SIZE, small.nbytes]  # it would keep the rest of its message


@pytest.mark.parametrize("size", [1000, 100_000, SIZE])
async def test_a_memoryview_is_read_only(net: Net, size: int):
    """However long it is, and wherever in an argument."""

    class Views(rpc.Service):
        async def put(self, listed: list[memoryview], plain: memoryview) -> list[bool]:
            return [listed[0].readonly, plain.readonly]

    client, _ = await net.pair(Views())
    data = memoryview(pattern(size))
    assert await client.put([data], data) == [True, True]


async def test_what_nobody_changes_is_not_copied_into_its_message(net: Net, monkeypatch: pytest.MonkeyPatch):
    encoded = []

    def counted(value: Any) -> bytes:
        body = encode(value)
        encoded.append(len(body))
        return body

    monkeypatch.setattr(messages, "encode", counted)
    monkeypatch.setattr(messenger, "encode", counted)
    service = Store()
    client, _ = await net.pair(service)
    data = pattern(SIZE)
    assert await client.put("w", memoryview(data), data) == 2 * SIZE and service.kept == data
    assert await client.get() == data and await client.get_bytes() == data
    assert max(encoded) < 10_000
    mine = bytearray(data)
    assert await client.put("w", memoryview(mine), b"") == SIZE  # which may change before it was written
    assert max(encoded) > SIZE


async def test_memory_that_the_caller_changes_at_once(net: Net):
    """The call is cancelled when it was sent: its arguments are what they were, though the caller has them again."""
    service = Store()
    client, server = await net.pair(service)
    mine = bytearray(pattern(SIZE))
    callee(server).link.transport.pause_reading()
    (calling,) = await begin(client.put("w", memoryview(mine), b""))
    calling.cancel()
    await asyncio.wait([calling])
    mine[:] = bytes(SIZE)
    callee(server).link.transport.resume_reading()
    assert await client.one() == 1
    assert service.kept is None or service.kept == pattern(SIZE)


async def test_a_connection_that_is_lost_in_a_long_body(net: Net):
    client, server = await net.pair(Store())
    found = callee(server).link
    whole = frame(OutCall(7, 0, None, (bytes(SIZE),)))
    channel(client).link.transport.write(whole[: SIZE // 2])
    await until_seen(lambda: type(found.transport.get_protocol()) is LongBody)
    await until_seen(lambda: server.shares.held_bytes >= SIZE // 2 - 100)
    channel(client).link.abort()
    await found.closed
    assert server.shares.held_bytes == 0 and not server.running


async def test_a_long_body_beyond_the_limit_of_the_server(net: Net):
    client, server = await net.pair(Store(), limits=rpc.Limits(server_bytes=SIZE // 2))
    found = callee(server).link
    channel(client).link.transport.write(frame(OutCall(7, 0, None, (bytes(SIZE),)))[:-100])
    await found.closed
    assert "server_bytes" in str(found.error) and server.shares.held_bytes == 0


# ---- Alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("seed", range(20))
async def test_a_framer_with_room(net: Net, seed: int):
    """Whichever way the bytes come, the messages are the same."""
    chance = random.Random(seed)
    sizes = [chance.choice((0, 10, 5000, LONG_BYTES - 5, LONG_BYTES, 3 * LONG_BYTES)) for _ in range(8)]
    items = [pattern(size) for size in sizes]
    stream = b"".join(frame(OutItem(number, item)) for number, item in enumerate(items))
    framer, found, at, placed = Framer(1 << 20), [], 0, 0
    while at < len(stream) or framer.is_behind:
        size = chance.choice((1, 100, 10_000, 100_000))
        framer.budget = chance.choice((0, 1, 1000))
        room = None if framer.is_behind else framer.room()
        if room is None:
            found += framer.feed(stream[at : at + size])
        else:
            size = min(size, len(room), len(stream) - at)
            room[:size] = stream[at : at + size]
            framer.came(size)
            placed += size
            assert framer.is_behind == (size == len(room))
        at += size
    assert [(item.number, msgspec.msgpack.decode(item.item)) for item in found] == list(enumerate(items))
    assert placed or max(sizes) <= LONG_BYTES


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_body_counts_with_its_pages(net: Net):
    """The kernel provides large memory in huge pages: of what is only announced, the first one is there."""
    huge = REUSED_BYTES
    for length, came, counted in (
        (huge // 2, 1000, 1000),
        (2 * huge, 1000, huge),
        (2 * huge, huge + 1, 2 * huge),
        (huge + 1000, huge + 1, huge + 1000),
    ):
        framer = Framer(4 * huge)
        assert framer.feed(length.to_bytes(4, "big") + bytes(1000)) == []
        framer.came(came - 1000)
        assert framer.unfinished_bytes == counted


class Transport(asyncio.Transport):
    """One that has at hand what comes, whether it is to be read or not."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.protocol: Any = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None: ...

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None: ...

    def receives(self, data: bytes) -> None:
        while data:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                room = memoryview(self.protocol.get_buffer(-1))
                part, data = data[: len(room)], data[len(room) :]
                room[: len(part)] = part
                self.protocol.buffer_updated(len(part))
            else:
                self.protocol.data_received(data[:1000])
                data = data[1000:]


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("why", ["turn", "paused"])
async def test_a_long_body_that_ends_when_no_more_is_to_be_handled(net: Net, why: str):
    """It waits for the next turn, or until the answers of a server can be sent, as any message does."""
    heard: list[int] = []
    one = link.Link(
        asyncio.get_running_loop(),
        rpc.Limits(message_bytes=1 << 20),
        {Ping: lambda ping: heard.append(0), Reply: lambda reply: heard.append(len(reply.result))},
        lambda: None,
        lambda error: None,
        is_server=True,
    )
    transport = Transport()
    transport.protocol = one
    one.connection_made(transport)
    transport.receives(frame(Ping(0)))  # the first message is a short one
    heard.clear()
    long = encode(pattern(200_000))
    message = frame(Reply(1, messages.raw(pattern(200_000))))
    transport.receives(message[:100_000])
    assert isinstance(transport.protocol, LongBody)
    if why == "paused":
        one.pause_writing()
        transport.receives(message[100_000:])
    else:
        transport.receives(message[100_000:])
        transport.receives(message[:100_000])
        assert heard == [len(long)]  # a turn's worth
        transport.receives(message[100_000:])
    assert transport.protocol is one and transport.is_paused
    transport.receives(frame(Ping(1)))
    await loop_turns(3)
    if why == "paused":
        assert not heard
        one.resume_writing()
        await loop_turns(3)
    assert heard == ([len(long), 0] if why == "paused" else [len(long), len(long), 0])
    assert not transport.is_paused
    one.connection_lost(None)


assert lending.APART_BYTES < SIZE < lending.LEND_BYTES


def received(data: bytes) -> Reply:
    """A message with these bytes, of which the first came alone."""
    framer, whole = Framer(4 << 20), frame(messages.OutReply(1, data))
    assert not framer.feed(whole[:1000])
    (message,) = framer.feed(whole[1000:])
    return message  # type: ignore[no-any-return]


def memory_of(message: Reply) -> int:
    """Which memory its body is in."""
    return id(memoryview(message.result).obj)


@pytest.mark.parametrize("size", [300_000, 1_000_000, REUSED_BYTES - 70_000])
def test_the_memory_of_a_body_is_used_again(size: int):
    """When nobody refers to it, and not before."""
    others = [received(bytes(size)) for _ in range(8)]  # whatever earlier tests have left is in use
    first = received(pattern(size))
    assert is_kept(memoryview(first.result).obj)
    assert len(memoryview(first.result).obj) < size + 2 * LONG_BYTES
    memory = memory_of(first)
    second = received(bytes(size))
    assert memory_of(second) != memory
    assert bytes(first.result[-size:]) == pattern(size) and not any(second.result[-size:])
    part = first.result[-1:]
    del first
    assert memory_of(received(bytes(size))) != memory
    assert bytes(part) == pattern(size)[-1:]
    del part
    third = received(pattern(size))
    assert memory_of(third) == memory
    assert bytes(third.result[-size:]) == pattern(size)
    del others


def test_few_bodies_are_kept():
    bodies = [received(bytes([number]) * 300_000) for number in range(7)]
    assert [is_kept(memoryview(body.result).obj) for body in bodies] == [False] * 3 + [True] * 4
    for number, body in enumerate(bodies):
        assert set(body.result[-300_000:]) == {number}
    assert not is_kept(memoryview(received(bytes(3 << 20)).result).obj)
    assert not is_kept(memoryview(received(bytes(100_000)).result).obj)
