"""Long bytes that end a message are written from where they lie, and the peer sees no difference."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from net import Net, callee, channel, failure, idle

from rdmanet import rpc
from rdmanet.rpc.messages import Framer, OutCall, OutReply, bin_head, encode, frame
from rdmanet.rpc.messenger import COLLECT_BYTES, TAIL_BYTES
from tests.support.waiting import begin, until_seen

SIZES = [TAIL_BYTES - 1, TAIL_BYTES, COLLECT_BYTES - 1, COLLECT_BYTES, COLLECT_BYTES + 1, 700_001]


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


class Echo(rpc.Service):
    def __init__(self) -> None:
        self.data = b""
        self.memory = bytearray()
        self.failures = 0
        self.gate = asyncio.Event()

    async def echo(self, data: bytes) -> bytes:
        return data

    async def last(self, name: str, data: memoryview) -> memoryview:
        return memoryview(bytes(data) + name.encode())

    async def first(self, data: bytes, name: str) -> bytes:
        return data + name.encode()

    async def size(self, data: memoryview) -> int:
        self.data = bytes(data)
        return len(data)

    async def changing(self, size: int) -> memoryview:
        """Memory of its own, which it changes as soon as this has ended."""
        self.memory[:] = b"a" * size
        asyncio.get_running_loop().call_soon(self._change)
        return memoryview(self.memory)

    def _change(self) -> None:
        self.memory[:] = b"b" * len(self.memory)

    @rpc.method(idempotent=True)
    async def flaky(self, data: bytes) -> bytes:
        self.failures += 1
        if self.failures < 3:
            raise rpc.Error(rpc.Code.UNAVAILABLE, "not now")
        return data

    async def late(self, data: bytes) -> bytes:
        self.data = data
        await self.gate.wait()
        return data

    async def told(self, data: bytes) -> bytes:
        rpc.set_trailing_metadata({"size": str(len(data))})
        return data


def watched(link: Any) -> list[Any]:
    """What is written on a link beside short messages."""
    written: list[Any] = []
    write = link._write

    def watch(parts: Any) -> None:
        written.extend(parts)
        write(parts)

    link._write = watch
    return written


@pytest.mark.parametrize("size", SIZES)
async def test_all_sizes(net: Net, size: int):
    client, server = await net.pair(Echo())
    data = pattern(size)
    assert await client.echo(data) == data
    assert await client.last("end", memoryview(data)) == data + b"end"
    assert await client.first(data, "end") == data + b"end"
    assert await rpc.options(client, metadata={"a": "b"}).echo(data) == data
    response = rpc.Response()
    assert await rpc.options(client, response=response).told(data) == data
    assert response.trailing_metadata == {"size": str(size)}
    await idle(server)


async def test_neither_an_argument_nor_a_result_is_copied(net: Net):
    client, server = await net.pair(Echo())
    ours, theirs = watched(channel(client).link), watched(callee(server).link)
    data = pattern(200_000)
    assert await client.echo(data) == data
    assert any(part is data for part in ours)
    assert [type(part) for part in theirs] == [bytes, bytes] and theirs[1] == data
    await client.last("x", memoryview(data))
    assert type(ours[-1]) is memoryview and ours[-1].obj is data
    assert type(theirs[-1]) is memoryview


@pytest.mark.parametrize("kind", ["array", "numbers", "every other", "released"])
async def test_other_memory(net: Net, kind: str):
    """Memory that may change is copied into its message, and so is what is no row of bytes."""
    client, server = await net.pair(Echo())
    written = watched(channel(client).link)
    data = pattern(200_000)
    if kind == "array":
        assert await client.last("", memoryview(bytearray(data))) == data
    elif kind == "numbers":
        assert await client.last("", memoryview(data).cast("I")) == data
    elif kind == "every other":
        with pytest.raises(BufferError):
            await client.last("", memoryview(data)[::2])
    else:
        view = memoryview(data)
        call = client.size(view)
        view.release()
        assert await call == len(data)
    assert any(part is data or getattr(part, "obj", None) is data for part in written) == (kind == "released")
    await idle(server)


async def test_one_that_is_too_long(net: Net):
    """The limit is that of the whole message, and nothing is sent."""
    server = await net.serve(Echo(), limits=rpc.Limits(message_bytes=100_000))
    client = await net.connect(Echo, server)
    for size in 99_999, 100_000, 100_001:
        with pytest.raises(rpc.Error, match="the limit message_bytes is") as caught:
            await client.echo(pattern(size))
        assert caught.value.code is rpc.Code.RESOURCE_EXHAUSTED
    assert await client.echo(b"x") == b"x"


async def test_a_result_that_is_too_long(net: Net):
    server = await net.serve(Echo())
    client = await net.connect(Echo, server, limits=rpc.Limits(message_bytes=100_000))
    for size in 99_999, 100_000, 100_001:
        with pytest.raises(rpc.Error, match="message_bytes") as caught:
            await client.echo(pattern(size))
        assert caught.value.code is rpc.Code.RESOURCE_EXHAUSTED
    assert await client.echo(b"x") == b"x"
    await idle(server)


@pytest.mark.parametrize("size", [TAIL_BYTES, COLLECT_BYTES, 100_000])
def test_the_bytes_on_the_wire(size: int):
    """A peer decodes what it decodes of one that is encoded in one go."""
    data = pattern(size)
    pairs: list[tuple[Any, Any, str]] = [
        (OutCall(7, 3, 1000, ("a", b"")), OutCall(7, 3, 1000, ("a", data)), "arguments"),
        (OutReply(7, b""), OutReply(7, data), "result"),
    ]
    for empty, full, name in pairs:
        body = encode(empty)[:-2] + bin_head(size) + data
        (found,) = Framer(1 << 20).feed(len(body).to_bytes(4, "big") + body)
        (wanted,) = Framer(1 << 20).feed(frame(full))
        assert type(found) is type(wanted) and found.number == wanted.number
        decode = msgspec.msgpack.decode
        assert decode(getattr(found, name)) == decode(getattr(wanted, name))


@pytest.mark.parametrize("size", [20_000, 200_000, 1_400_000])
async def test_memory_that_changes_meanwhile(net: Net, size: int):
    """The peer gets what was there when the call was made, and when the method returned."""
    client, server = await net.pair(Echo())
    memory = bytearray(pattern(size))
    (call,) = await begin(client.last("x", memoryview(memory)))
    memory[:] = bytes(size)
    assert await call == pattern(size) + b"x"
    assert set(bytes(await client.changing(size))) == {ord("a")}
    await idle(server)


async def test_a_call_that_is_cancelled(net: Net):
    """While its argument is under way, and while it runs: others, and their bytes, are as if it had not been."""
    client, server = await net.pair(Echo())
    size, data = 1_000_000, pattern(1_000_000)
    for _ in range(5):
        (call,) = await begin(client.echo(bytes(size)))
        call.cancel()
        assert await client.echo(data) == data
        assert call.cancelled()
    (call,) = await begin(client.late(data))
    await until_seen(lambda: server.running)
    call.cancel()
    assert await client.last("x", memoryview(data)) == data + b"x"
    await idle(server)


@pytest.mark.parametrize("whose", ["client", "server"])
async def test_a_connection_that_is_lost(net: Net, whose: str):
    service = Echo()
    client, server = await net.pair(service)
    data = pattern(3_000_000)
    (call,) = await begin(client.late(data))
    await until_seen(lambda: server.running)
    (channel(client) if whose == "client" else callee(server)).link.abort()
    assert (await failure(call)).code is rpc.Code.UNAVAILABLE
    service.gate.set()
    await idle(server)


async def test_a_call_that_is_made_again(net: Net):
    service = Echo()
    server = await net.serve(service)
    again = rpc.Retry(first_seconds=0.001, most_seconds=0.002, codes=[rpc.Code.UNAVAILABLE])
    client = await net.connect(Echo, server, retry=again)
    data = pattern(200_000)
    assert await client.flaky(data) == data
    assert service.failures == 3


async def test_many_at_a_time(net: Net):
    """Long and short ones, both ways, in any order: each gets its own bytes."""
    client, server = await net.pair(Echo())
    sizes = [10, TAIL_BYTES, 300, 70_000, 1, 500_000, TAIL_BYTES - 1, COLLECT_BYTES]
    sent = [bytes([number]) * size for number, size in enumerate(itertools.chain(*[sizes] * 4))]
    found = await asyncio.gather(*(client.echo(data) for data in sent))
    assert found == sent
    found = await asyncio.gather(*(client.last("x", memoryview(data)) for data in sent))
    assert [bytes(data) for data in found] == [data + b"x" for data in sent]
    await idle(server)
