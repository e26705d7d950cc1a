"""Memory for large arguments and results is provided in pieces, and others have their turn between two of them."""

import asyncio
import ctypes
import mmap
from typing import Any, Self

import numpy
import pytest
from net import Net, idle

from rdmanet import rpc
from rdmanet._core import bring_in
from rdmanet.rpc import item_types, lending, paging
from rdmanet.rpc.paging import LEAST_BYTES, PIECE_BYTES, brought_in, filled
from tests.support.waiting import loop_turns

SIZE = 2 * LEAST_BYTES
PAGE = mmap.PAGESIZE


def present(memory: mmap.mmap) -> list[bool]:
    """Which pages the kernel has provided."""
    pages = (ctypes.c_ubyte * (len(memory) // PAGE))()
    at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert not ctypes.CDLL(None).mincore(at, ctypes.c_size_t(len(memory)), pages)
    return [bool(page & 1) for page in pages]


def test_only_what_is_asked_for_is_brought_in():
    with mmap.mmap(-1, 8 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        assert not any(present(memory))
        bring_in(memory, 2 * PAGE, PAGE)
        assert present(memory) == [False, True, True, *[False] * 5]
        memory[PAGE] = 7
        bring_in(memory, 1 << 40, PAGE)
        bring_in(memory, PAGE, 1 << 40)
        assert present(memory) == [False, *[True] * 7] and memory[PAGE] == 7
    with pytest.raises(BufferError):
        bring_in(b"read-only", 1, 0)
    with pytest.raises(ValueError, match="nbytes"):
        bring_in(bytearray(1), -1, 0)


class Turn:
    """A block in which the turns of the loop are counted."""

    async def __aenter__(self) -> Self:
        self.number = 0
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            self.number += 1
            await loop_turns(1)


async def test_pieces_take_turns(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    pieces: list[tuple[int, int, int]] = []
    memories = [bytearray(SIZE) for _ in range(3)]

    def counted(memory: Any, nbytes: int, offset: int) -> None:
        pieces.append((turn.number, memories.index(memory), offset))

    for number, memory in enumerate(memories):
        memory[0] = number
    monkeypatch.setattr(paging, "bring_in", counted)
    monkeypatch.setattr(paging, "STEP_S", 0)  # one piece
    async with Turn() as turn:
        await asyncio.gather(*(brought_in(loop, memory) for memory in memories))
    offsets = list(range(0, SIZE, PIECE_BYTES))
    assert len({turn for turn, _, _ in pieces}) == len(pieces) == len(offsets) * len(memories)
    assert [pieces[n][1] for n in range(3)] == [0, 1, 2]
    assert sorted(offset for _, which, offset in pieces if which == 1) == offsets
    await brought_in(loop, bytearray(LEAST_BYTES - 1))
    assert len(pieces) == len(offsets) * len(memories)


class Store(rpc.Service):
    kept = numpy.arange(SIZE, dtype="u1")

    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def put_array(self, data: numpy.ndarray) -> int:
        return data.nbytes

    async def put_arrays(self, data: list[numpy.ndarray]) -> int:
        return sum(array.nbytes for array in data)

    async def peek(self, data: rpc.Buffer) -> int:
        return len(await data.read(0, SIZE))

    async def get(self) -> memoryview:
        return memoryview(bytes(SIZE))

    async def get_kept(self) -> numpy.ndarray:
        return self.kept

    async def sums(self, data: numpy.ndarray) -> numpy.ndarray:
        return data + numpy.uint8(1)


class Brought:
    """Counts the bytes that are brought in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._nbytes = 0
        monkeypatch.setattr(paging, "bring_in", self._bring_in)

    def _bring_in(self, memory: Any, nbytes: int, offset: int) -> None:
        self._nbytes += min(nbytes, memoryview(memory).nbytes - offset)
        bring_in(memory, nbytes, offset)

    def taken(self) -> int:
        """How many there were since the last time."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


@pytest.mark.parametrize("transport", ["rdma"])
async def test_all_that_is_read_from_the_peer(net: Net, monkeypatch: pytest.MonkeyPatch):
    brought = Brought(monkeypatch)
    client, server = await net.pair(Store())
    data = bytes(SIZE)
    for call in (client.put(data), client.put_array(numpy.zeros(SIZE, "u1")), client.peek(rpc.Buffer(data))):
        assert await call == brought.taken() == SIZE
    assert len(await client.get()) == brought.taken() == SIZE
    await idle(server)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_result_that_is_copied(net: Net, monkeypatch: pytest.MonkeyPatch):
    """The memory for the copy is brought in, too: the loop waits for the copy alone."""
    brought = Brought(monkeypatch)
    client, server = await net.pair(Store())
    found = await client.get_kept()
    assert numpy.array_equal(found, Store.kept)
    assert brought.taken() == 2 * SIZE
    await idle(server)


async def test_what_came_in_messages_is_copied_in_pieces(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Those of an array, or of what is read into the caller's memory."""
    turns = 0

    async def counted(loop: Any, memory: memoryview, data: memoryview) -> None:
        nonlocal turns
        before = turn.number
        await filled(loop, memory, data)
        assert memory == data
        turns += turn.number - before

    monkeypatch.setattr(lending, "LEND_BYTES", 1 << 30)
    monkeypatch.setattr(lending, "filled", counted)
    monkeypatch.setattr(paging, "STEP_S", 0)
    monkeypatch.setattr(lending, "_where_it_came", lambda *given: None)  # as if it lay where no array may be
    client, _ = await net.pair(Store())
    array = numpy.arange(SIZE + 3, dtype="u1")
    pieces = len(range(0, array.nbytes, PIECE_BYTES)) - 1
    async with Turn() as turn:
        assert numpy.array_equal(await client.sums(array), array + numpy.uint8(1))
        assert turns >= 2 * pieces
        turns, into = 0, bytearray(SIZE)
        assert len(await rpc.options(client, into=into).get()) == SIZE
        assert turns >= pieces - 1
    assert (await client.sums(array[:3])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("lend_bytes", [1, 1 << 30])
async def test_texts_are_checked_in_pieces(net: Net, monkeypatch: pytest.MonkeyPatch, lend_bytes: int):
    """Also those of records, whose characters are not side by side."""
    turns: list[int] = []
    check = item_types._check

    def counted(array: Any) -> None:
        if array.ndim == 1 and array.dtype == texts.dtype:
            assert array.nbytes <= item_types._PIECE_BYTES
            turns.append(turn.number)
        check(array)

    monkeypatch.setattr(lending, "LEND_BYTES", lend_bytes)
    monkeypatch.setattr(item_types, "_check", counted)
    monkeypatch.setattr(paging, "STEP_S", 0)
    texts = numpy.full((5, SIZE // 16), 1, [("number", "i1"), ("text", "<U1")])
    client, _ = await net.pair(Store())
    async with Turn() as turn:
        for call in (client.put_array(texts), client.put_arrays([texts, numpy.ones(3, "u1")])):
            turns.clear()
            assert await call >= texts.nbytes
            assert len(set(turns)) == len(turns) >= texts.nbytes / item_types._PIECE_BYTES > 2
