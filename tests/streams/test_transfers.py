"""Long READs and WRITEs of offered memory, which go in pieces: the bytes, what goes ahead of them, and every end."""

import asyncio
from typing import Any

import pytest
from harness import Echo, Net
from pattern import Pattern

from rdmanet.stream import transfers
from rdmanet.stream.transfers import AT_ONCE_BYTES, PIECE_BYTES
from rdmanet.verbs import SGE, WROpcode
from tests.streams.test_offers import allocate, offered
from tests.support.waiting import begin, until_seen

MIB = 1 << 20
MUCH = 128 * MIB


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all pieces that are posted."""
    lengths: list[int] = []

    class Recording(transfers._Piece):
        def __init__(self, operation: Any, transfer: Any, pieces: Any, length: int) -> None:
            super().__init__(operation, transfer, pieces, length)
            lengths.append(length)

    monkeypatch.setattr(transfers, "_Piece", Recording)
    return lengths


@pytest.mark.parametrize("size", [AT_ONCE_BYTES + 1, PIECE_BYTES, 2 * PIECE_BYTES + 12345])
async def test_the_bytes(net: Net, size: int, posted: list[int]):
    client, server = await net.pair()
    text = (Pattern().take(MIB) * (size // MIB + 1))[:size]
    with allocate(server, size + 7) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            await remote.write(7, text)
            assert bytes(mr) == bytes(7) + text
            assert await remote.read(7) == text
    assert sum(posted) == 2 * size and max(posted) <= PIECE_BYTES
    assert client.transport._regions.transfers.moved == 2 * size


class Taking:
    """A connection that takes every operation, and a memory that has every part."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, int]] = []

    def post_operation(self, operation: Any, total: int = 0) -> bool:
        self.taken.append((operation, total))
        return True

    def part(self, offset: int, length: int) -> SGE:
        return SGE(b"memory", 6, 0)

    def close(self) -> None:
        pass


async def test_the_device_hears_of_how_much_each_piece_is_a_part():
    """What is more than its caches hold it copies past them, in pieces, too."""
    taking: Any = Taking()
    length, future = 2 * PIECE_BYTES + 1, asyncio.get_running_loop().create_future()
    pieces = transfers.Transfers(taking)
    pieces.begin(transfers.Transfer(future, WROpcode.RDMA_READ, taking, length, 0, 1))
    for number in range(3):
        operation, total = taking.taken[number]
        assert total == length
        operation.end()
        pieces.go_on()
    assert len(taking.taken) == 3
    await future


async def test_several_take_turns(net: Net):
    client, server = await net.pair()
    text = Pattern().take(MIB) * 16
    ended: list[str] = []
    with allocate(server, len(text)) as mr:
        memoryview(mr)[:] = text
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)

            async def read(name: str, size: int) -> None:
                assert await remote.read(0, size) == text[:size]
                ended.append(name)

            sizes = {"longest": 16 * MIB, "long": 15 * MIB, "middle": 2 * MIB, "short": 100}
            await asyncio.gather(*(read(name, size) for name, size in sizes.items()))
    assert ended.index("short") < ended.index("middle") < ended.index("longest")


async def test_a_message_goes_between_the_pieces(net: Net):
    client, server = await net.pair(server=Echo)
    ours = bytearray(MUCH)
    with allocate(server, MUCH) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            (reading,) = await begin(remote.read_into(ours))
            client.transport.write(b"ping")
            assert await client.until_received(4) == b"ping"
            assert not reading.done()
            await reading


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_cancelled_transfer_posts_nothing_more(net: Net, way: str):
    client, server = await net.pair()
    ours = bytearray(MUCH)
    with allocate(server, MUCH) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            calls = await begin(
                *(remote.read_into(ours) if way == "read" else remote.write(0, ours) for _ in range(3))
            )
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await until_seen(lambda: not remote.is_used)
            assert client.transport._regions.transfers.moved <= 2 * PIECE_BYTES
            assert len(await remote.read(0, 100)) == 100


async def test_the_end_of_the_connection(net: Net):
    client, server = await net.pair()
    ours = bytearray(MUCH)
    with allocate(server, MUCH) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            calls = await begin(*(remote.read_into(ours) for _ in range(4)))
            client.transport.abort()
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, OSError)
            assert not remote.is_used


async def test_a_piece_that_fails(net: Net):
    client, server = await net.pair()
    ours = bytearray(MUCH)
    with allocate(server, MUCH) as mr:
        async with server.transport.offer(mr, access="read", revoke_timeout=0.001):
            remote = await offered(client)
            (reading,) = await begin(remote.read_into(ours))
        with pytest.raises(OSError):  # the owner has taken its key back meanwhile
            await reading
        assert not remote.is_used


@pytest.mark.long
@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.limit(120)  # 2 GiB of memory that nothing has touched yet, on a busy machine
async def test_more_than_the_longest_message_of_the_device(net: Net, way: str):
    client, server = await net.pair()
    size = (1 << 30) + PIECE_BYTES + 1
    theirs, ours = bytearray(size), bytearray(size)
    source, target = (theirs, ours) if way == "read" else (ours, theirs)
    source[0], source[-1] = 1, 2
    async with server.transport.offer(theirs, access="read,write"):
        remote = await offered(client)
        await (remote.read_into(ours) if way == "read" else remote.write(0, ours))
    assert (target[0], target[-1]) == (1, 2)
