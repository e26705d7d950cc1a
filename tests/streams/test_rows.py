"""Many rows of offered memory in one call: the bytes, what goes between them, and every end."""

import array
import asyncio
import random

import pytest
from harness import Echo, Net

import rdmanet
from rdmanet.stream import blocks
from rdmanet.stream.transfers import AT_ONCE_BYTES, PIECE_BYTES
from tests.streams.test_offers import allocate, offered
from tests.support.waiting import begin, until_seen

MIB = 1 << 20


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each list is when it begins."""
    lengths: list[int] = []
    begin_list = blocks.Lists.begin

    def recorded(self: blocks.Lists, one: rdmanet._core.Blocks) -> None:
        lengths.append(len(one))
        begin_list(self, one)

    monkeypatch.setattr(blocks.Lists, "begin", recorded)
    return lengths


@pytest.mark.parametrize(
    ("row_bytes", "rows", "count"),
    [(1, 300, 1), (8, 1000, 500), (100, 1000, 1000), (4096, 500, 700), (70_000, 30, 50)],
)
async def test_the_bytes(net: Net, row_bytes: int, rows: int, count: int):
    client, server = await net.pair()
    chance = random.Random(row_bytes)
    text = chance.randbytes(row_bytes * rows + 5)
    indices = [chance.randrange(rows) for _ in range(count)]
    with allocate(server, len(text)) as mr:
        memoryview(mr)[:] = text
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            for given in (indices, array.array("q", indices), (index for index in indices)):
                into = bytearray(row_bytes * count)
                await remote.read_rows(given, into)
                assert into == b"".join(text[row_bytes * i : row_bytes * (i + 1)] for i in indices)
            assert await remote.read(0, 5) == text[:5]


async def test_rows_longer_than_a_piece(net: Net):
    client, server = await net.pair()
    row_bytes = PIECE_BYTES + 4321
    text = random.Random(7).randbytes(12 * MIB)
    with allocate(server, len(text)) as mr:
        memoryview(mr)[:] = text
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            into = memoryview(bytearray(3 * row_bytes)).cast("B", (3, row_bytes))
            await remote.read_rows([1, 0, 1], into)
            first, second = text[:row_bytes], text[row_bytes : 2 * row_bytes]
            assert (into.tobytes() == second + first + second) is True


async def test_rows_that_follow_each_other_are_one_request(net: Net, lists: list[int]):
    client, server = await net.pair()
    with allocate(server, 4 * MIB) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            into = bytearray(2 * MIB)
            await remote.read_rows(range(512), into)
            await remote.read_rows(range(511, -1, -1), into)
    assert lists == [2 * MIB // AT_ONCE_BYTES, 512]


@pytest.mark.parametrize("empty", [[], array.array("q"), range(0)])
async def test_no_rows(net: Net, empty: object):
    client, server = await net.pair()
    with allocate(server, 4096) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            await remote.read_rows(empty, bytearray())


async def test_mistakes_are_named_and_change_nothing(net: Net):
    client, server = await net.pair()
    with allocate(server, 1000) as mr:
        memoryview(mr)[:] = b"x" * 1000
        async with server.transport.offer(mr, access="read", name="table"):
            remote = await offered(client)
            into = bytearray(300)
            for index in (10, -1, 1 << 62):
                with pytest.raises(IndexError, match=f"^row {index} is not within 10 rows of 100 bytes$"):
                    await remote.read_rows([0, index, 1], into)
            with pytest.raises(IndexError, match="^an index has more than 64 bits, and is no row$"):
                await remote.read_rows([0, 1 << 64, 1], into)
            with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
                await remote.read_rows([0, 1.0, 1], into)
            with pytest.raises(ValueError, match=r"^read_rows: an array of \(300,\) does not have 7 rows$"):
                await remote.read_rows(range(7), into)
            with pytest.raises(ValueError, match=r"^read_rows: an array of \(3, 100\) does not have 6 rows$"):
                await remote.read_rows(range(6), memoryview(into).cast("B", (3, 100)))
            with pytest.raises(TypeError, match="^read_rows: bytes of 300 bytes is read-only$"):
                await remote.read_rows(range(3), bytes(into))
            assert into == bytes(300) and not remote.is_used
            await remote.read_rows(range(3), into)
            assert into == b"x" * 300
        with pytest.raises(rdmanet.RegionRevokedError):
            await remote.read_rows(range(3), into)


async def test_no_rows_of_what_is_for_writing(net: Net):
    client, server = await net.pair()
    with allocate(server, 1000) as mr:
        async with server.transport.offer(mr, access="write"):
            remote = await offered(client)
            with pytest.raises(PermissionError, match="lacks 'read'"):
                await remote.read_rows([1], bytearray(10))


async def test_messages_and_other_operations_go_between(net: Net):
    client, server = await net.pair(server=Echo)
    with allocate(server, 16 * MIB) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            into = bytearray(16 * MIB)
            (rows,) = await begin(remote.read_rows(range(4095, -1, -1), into))
            assert len(await remote.read(0, 100)) == 100
            assert not rows.done()
            client.transport.write(b"ping")
            assert await client.until_received(4) == b"ping"
            assert not rows.done()
            await rows


async def test_lists_take_turns(net: Net):
    client, server = await net.pair()
    ended: list[int] = []
    with allocate(server, 16 * MIB) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)

            async def read(count: int) -> None:
                await remote.read_rows(range(count - 1, -1, -1), bytearray(count * 4096))
                ended.append(count)

            await asyncio.gather(*(read(count) for count in (4000, 3000, 20)))
    assert ended == [20, 3000, 4000]


async def test_a_cancelled_list_posts_nothing_more(net: Net):
    client, server = await net.pair()
    with allocate(server, 16 * MIB) as mr:
        memoryview(mr)[:] = b"x" * (16 * MIB)
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            into = bytearray(16 * MIB)
            (rows,) = await begin(remote.read_rows(range(4095, -1, -1), into))
            rows.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rows
            await until_seen(lambda: not remote.is_used)
            assert 0 < into.count(b"x") <= 2 * MIB
            assert len(await remote.read(0, 100)) == 100


async def test_the_end_of_the_connection(net: Net):
    client, server = await net.pair()
    with allocate(server, 16 * MIB) as mr:
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            calls = await begin(*(remote.read_rows(range(1000, 0, -1), bytearray(4096000)) for _ in range(3)))
            client.transport.abort()
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, OSError)
            assert not remote.is_used


async def test_the_owner_takes_its_memory_back(net: Net):
    client, server = await net.pair()
    with allocate(server, 16 * MIB) as mr:
        async with server.transport.offer(mr, access="read", revoke_timeout=0):
            remote = await offered(client)
            (rows,) = await begin(remote.read_rows(range(4095, -1, -1), bytearray(16 * MIB)))
        with pytest.raises(OSError):
            await rows
        assert not remote.is_used
