"""Memory that is about to be filled: when it is kept for the next user, and when it is not."""

import ctypes
import threading
from typing import Any

import pytest

from rdmanet._core import REUSED_BYTES, idle_bytes, unfilled

MIB = 1 << 20
IDLE_MOST = 256 * MIB


@pytest.fixture(autouse=True)
def no_other_is_idle() -> None:
    """One area as large as the limit is idle. It goes as soon as another one is."""
    unfilled(IDLE_MOST)
    assert idle_bytes() == IDLE_MOST


def address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_small_memory_is_a_bytearray():
    for nbytes in (0, 1, REUSED_BYTES - 1):
        memory = unfilled(nbytes)
        assert type(memory) is bytearray and len(memory) == nbytes
    assert idle_bytes() == IDLE_MOST


@pytest.mark.parametrize("nbytes", [REUSED_BYTES, REUSED_BYTES + 1, 5 * MIB - 1, 64 * MIB])
def test_large_memory_is_given_again(nbytes: int):
    for _ in range(3):
        memory = unfilled(nbytes)
        at = address(memory)
        assert at % REUSED_BYTES == 0
        view = memoryview(memory)
        assert (view.nbytes, len(memory), view.readonly, view.c_contiguous) == (nbytes, nbytes, False, True)
        view[:3], view[-3:] = b"abc", b"xyz"
        assert (bytes(view[:3]), bytes(view[-3:])) == (b"abc", b"xyz")
        del memory, view
        assert nbytes <= idle_bytes() <= nbytes * 9 // 8
        memory = unfilled(nbytes)
        assert address(memory) == at and idle_bytes() == 0
        del memory


@pytest.mark.parametrize(
    "use",
    [
        memoryview,
        lambda memory: memoryview(memory)[5:6].toreadonly(),
        lambda memory: (ctypes.c_ubyte * 1000).from_buffer(memory, 5),
        lambda memory: memoryview((ctypes.c_ubyte * 1000).from_buffer(memory))[::7],
    ],
    ids=["view", "slice", "array", "view of an array"],
)
def test_memory_that_somebody_uses_is_not_given_again(use: Any):
    memory = unfilled(4 * MIB)
    memoryview(memory)[:] = b"u" * (4 * MIB)
    used = use(memory)
    del memory
    for _ in range(3):
        other = memoryview(unfilled(4 * MIB))
        other[:] = b"o" * (4 * MIB)
        assert idle_bytes() in (0, IDLE_MOST)
        del other
        assert set(bytes(used)) == {ord("u")}
    assert idle_bytes() == 4 * MIB
    del used
    assert idle_bytes() == 8 * MIB


def test_only_memory_of_the_same_size_is_given_again():
    """The sizes are eight for each power of two."""
    at = address(unfilled(33 * MIB))
    other = unfilled(33 * MIB + 4 * MIB)
    assert idle_bytes() == 36 * MIB
    same = unfilled(35 * MIB)
    assert idle_bytes() == 0
    assert address(same) == at != address(other)


def test_what_is_idle_for_longest_goes_first():
    first, second, third = unfilled(64 * MIB), unfilled(80 * MIB), unfilled(128 * MIB)
    del first
    del second
    assert idle_bytes() == (64 + 80) * MIB
    del third
    assert idle_bytes() == (80 + 128) * MIB


def test_more_than_the_limit_is_not_kept():
    unfilled(IDLE_MOST + MIB)
    assert idle_bytes() == IDLE_MOST


def test_there_are_not_too_many():
    memories = [unfilled(REUSED_BYTES) for _ in range(70)]
    memories.clear()
    assert idle_bytes() == 64 * REUSED_BYTES


def test_threads():
    """Each has memory of its own, whoever frees it."""

    def work(number: int) -> None:
        for _ in range(200):
            memory = memoryview(unfilled(REUSED_BYTES))
            memory[:8] = number.to_bytes(8, "big")
            memory[-8:] = number.to_bytes(8, "big")
            if bytes(memory[:8]) != bytes(memory[-8:]):
                wrong.append(number)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_sizes():
    with pytest.raises(ValueError, match="unfilled: nbytes -1 is negative"):
        unfilled(-1)
    with pytest.raises(MemoryError, match="4611686018427387904"):
        unfilled(1 << 62)
    with pytest.raises(MemoryError):
        unfilled((1 << 64) - 1)
    with pytest.raises(TypeError):
        unfilled("1")  # type: ignore[arg-type]
