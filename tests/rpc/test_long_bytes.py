"""Long `bytes`, which nobody can change: they go in messages longer than other memory, and from where they are."""

from typing import Any

import pytest
from net import Net, channel, idle

from rdmanet import rpc
from rdmanet.rpc import lending
from rdmanet.rpc.long_writes import LongWrites

pytestmark = pytest.mark.parametrize("transport", ["rdma"])


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


class Store(rpc.Service):
    def __init__(self) -> None:
        self.data = b""

    async def put(self, name: str, data: memoryview) -> int:
        self.data = bytes(data)
        return len(data)

    async def put_first(self, data: bytes, name: str) -> bytes:
        return data[-10:] + name.encode()


def least_lent(client: Any) -> int:
    """From how many bytes on they are lent."""
    return max(lending.LEND_BYTES, lending.LEND_TIMES * channel(client).link.place_bytes)


async def test_how_long_they_are_in_messages(net: Net):
    """Longer than memory that may change, where the device copies by a processor."""
    service = Store()
    client, server = await net.pair(service)
    most = least_lent(client)
    data = pattern(most)

    async def lent(memory: memoryview) -> int:
        before = rpc.stats(client)["put"].lent_bytes
        assert await client.put("w", memory) == len(memory)
        assert service.data == memory
        return rpc.stats(client)["put"].lent_bytes - before

    assert await lent(memoryview(data)) == most
    assert await lent(memoryview(data)[1:]) == 0
    assert await lent(memoryview(data)[:-1]) == 0
    assert await lent(memoryview(bytearray(lending.LEND_BYTES))) == lending.LEND_BYTES
    service.data = b""
    await idle(server)


async def test_they_are_written_at_once(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Not in pieces of a turn each, and as they are."""
    client, server = await net.pair(Store())
    link = channel(client).link
    data = pattern(least_lent(client) - 1)
    written: list[Any] = []
    write = link._write

    def watch(parts: Any) -> None:
        written.extend(parts)
        write(parts)

    monkeypatch.setattr(link, "_write", watch)
    monkeypatch.setattr(LongWrites, "begin", lambda *_: pytest.fail("in pieces"))
    assert await client.put("w", memoryview(data)) == len(data)
    assert [part.obj is data for part in written if type(part) is memoryview] == [True]
    assert await client.put_first(data, "end") == data[-10:] + b"end"
    assert [part.obj is data for part in written if type(part) is memoryview] == [True, True]
    await idle(server)


@pytest.mark.parametrize("kind", ["of numbers", "every other"])
async def test_other_views(net: Net, kind: str):
    client, server = await net.pair(Store())
    data = pattern(800_000)
    if kind == "of numbers":
        assert await client.put("w", memoryview(data).cast("I")) == len(data)
    else:
        with pytest.raises(BufferError):
            await client.put("w", memoryview(data)[::2])
    await idle(server)
