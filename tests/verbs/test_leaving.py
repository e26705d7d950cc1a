"""Large memory that nobody uses any more goes in pieces where a loop runs, and at once elsewhere."""

import asyncio
import ctypes
import heapq
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from rdmanet._core import unfilled, unmap_some, unneeded_bytes
from rdmanet.stream import leaving
from rdmanet.stream.leaving import PIECE_BYTES
from tests.support.waiting import loop_turns

MIB = 1 << 20
SIZE = 320 * MIB  # more than is kept
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()


def address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def left() -> int:
    """How much is to be unmapped."""
    return unmap_some(0)


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made = request.param()
    yield made
    made.close()
    assert left() == 0


@pytest.fixture(autouse=True)
def one_piece_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "STEP_S", 0)
    monkeypatch.setattr(leaving, "LINGER_S", 0)


def test_one_piece_in_a_turn(loop: asyncio.AbstractEventLoop):
    async def let_go() -> list[int]:
        memory = unfilled(SIZE)
        del memory
        seen = [left()]
        while seen[-1]:
            await loop_turns(1)
            seen.append(left())
        return seen

    seen = loop.run_until_complete(let_go())
    assert seen[0] == SIZE and len(seen) >= SIZE // PIECE_BYTES
    assert all(before - after in (0, PIECE_BYTES) for before, after in zip(seen, seen[1:], strict=False))


def test_others_keep_what_they_have(loop: asyncio.AbstractEventLoop):
    """Beside it, before it and behind it; and what is made meanwhile."""

    async def let_go() -> None:
        kept = [unfilled(3 * MIB) for _ in range(3)]
        gone = [unfilled(SIZE), unfilled(SIZE + 32 * MIB), unfilled(SIZE)]
        kept += [unfilled(3 * MIB) for _ in range(3)]
        for number, memory in enumerate(kept):
            memoryview(memory)[:] = bytes([number]) * (3 * MIB)
        gone.clear()
        assert left() == 3 * SIZE + 32 * MIB
        while left():
            await loop_turns(1)
            new = memoryview(unfilled(5 * MIB))
            new[:: MIB // 2] = bytes(len(new[:: MIB // 2]))
        for number, memory in enumerate(kept):
            assert set(bytes(memory)) == {number}

    loop.run_until_complete(let_go())


def test_a_loop_that_stops_goes_on_later(loop: asyncio.AbstractEventLoop):
    async def let_go() -> None:
        unfilled(SIZE)

    async def all_gone() -> None:
        while left():
            await loop_turns(1)

    loop.run_until_complete(let_go())
    assert left() > 0
    loop.run_until_complete(all_gone())


def test_two_loops_by_turns(loop: asyncio.AbstractEventLoop):
    """What one has left to the other is its own again, when the other does not run."""

    async def let_go() -> None:
        unfilled(SIZE)

    async def all_gone() -> None:
        while left():
            await loop_turns(1)

    other = asyncio.new_event_loop()
    for each in (loop, other, loop, other):
        each.run_until_complete(let_go())
    assert left() > 0
    loop.run_until_complete(asyncio.wait_for(all_gone(), 20))
    other.close()


@pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_loop_that_is_closed(new_loop: type[asyncio.AbstractEventLoop]):
    async def let_go() -> None:
        unfilled(SIZE)

    loop = new_loop()
    loop.run_until_complete(let_go())
    assert left() > 0
    loop.close()
    assert left() == 0


def test_without_a_loop():
    memory = unfilled(SIZE)
    del memory
    assert left() == 0


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_another_thread_lets_go(loop: asyncio.AbstractEventLoop):
    """No loop runs there: the one that is at it takes that, too. One that does not run is not waited for."""

    async def let_go() -> None:
        unfilled(SIZE)
        in_thread(lambda: unfilled(SIZE + 32 * MIB) and None)
        assert left() == 2 * SIZE + 32 * MIB

    loop.run_until_complete(let_go())
    in_thread(lambda: unfilled(SIZE + 64 * MIB) and None)
    assert left() == 0


def test_another_threads_loop_lets_go(loop: asyncio.AbstractEventLoop):
    """One is at it: if each took the other's looks for its own, what went just now would seem unneeded. The end of the
    other loop is not that of the list."""

    async def let_go(size: int) -> None:
        unfilled(size)

    async def both() -> None:
        await let_go(SIZE)
        in_thread(lambda: asyncio.run(let_go(SIZE + 32 * MIB)))
        assert left() == 2 * SIZE + 32 * MIB
        while left():
            await loop_turns(1)

    loop.run_until_complete(both())


def test_another_thread_lets_go_as_the_loop_is_done(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
):
    """It has seen that the loop is at it."""
    let_go_of: list[int] = []

    def unmap(nbytes: int) -> int:
        bytes_left = unmap_some(nbytes)
        if not nbytes and not bytes_left and not let_go_of:
            let_go_of.append(SIZE)
            in_thread(lambda: unfilled(SIZE) and None)
            assert left() == SIZE
        return bytes_left

    async def let_go() -> None:
        unfilled(SIZE + 32 * MIB)
        while not let_go_of or left():
            await loop_turns(1)

    monkeypatch.setattr(leaving, "unmap_some", unmap)
    loop.run_until_complete(asyncio.wait_for(let_go(), 20))


def test_while_the_loop_sorts_its_timers():
    """The garbage collector runs anywhere: also within a comparison of two timers."""
    loop = asyncio.new_event_loop()
    memories = [unfilled(SIZE)]

    class Timer(asyncio.TimerHandle):
        def __lt__(self, other: object) -> bool:
            memories.clear()
            return super().__lt__(other)

    async def main() -> None:
        later = loop.time() + 1000
        heapq.heappush(loop._scheduled, Timer(later + 1, lambda: None, (), loop))  # type: ignore[attr-defined]
        heapq.heappush(loop._scheduled, Timer(later, lambda: None, (), loop))  # type: ignore[attr-defined]
        while left():
            await loop_turns(1)

    loop.run_until_complete(main())
    assert not memories
    loop.close()


def test_locked_memory_goes_at_once(loop: asyncio.AbstractEventLoop):
    """The kernel could not take it if it ran short. Also that which is idle until others have used more."""

    def locked(size: int) -> Any:
        memory = unfilled(size)
        mlock2 = ctypes.CDLL(None).mlock2  # AddressSanitizer has an mlock() of its own, which does nothing
        assert not mlock2(ctypes.c_void_p(address(memory)), ctypes.c_size_t(4096), 0)
        return memory

    async def let_go() -> None:
        locked(SIZE)
        assert left() == 0
        smaller = [locked(128 * MIB) for _ in range(2)]
        smaller.clear()
        while left():  # what was idle before
            await loop_turns(1)
        smaller = [locked(128 * MIB) for _ in range(5)]
        smaller.clear()
        assert left() == 0

    loop.run_until_complete(let_go())


async def test_a_forked_child():
    """The loop of its parent does not run there."""
    unfilled(SIZE)
    if (child := os.fork()) == 0:
        try:
            unfilled(SIZE + 32 * MIB)
        finally:
            os._exit(left() != 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert left() == SIZE
    while left():
        await loop_turns(1)


async def test_it_is_told_again_after_the_end():
    for _ in range(3):
        unfilled(SIZE)
        assert left() == SIZE
        while left():
            await loop_turns(1)


async def test_it_is_used_again_meanwhile():
    """What was needed since the last look stays."""
    memory = unfilled(SIZE)
    at = address(memory)
    for _ in range(5):
        del memory
        assert left() == SIZE
        memory = unfilled(SIZE)
        assert address(memory) == at and left() == 0
        await loop_turns(3)
    others = [memory, unfilled(SIZE)]
    del memory
    others.clear()
    unneeded_bytes()
    assert (unneeded_bytes(), left()) == (2 * SIZE, 2 * SIZE)
    unfilled(SIZE)
    assert (unneeded_bytes(), left()) == (SIZE, 2 * SIZE)
    while left():
        await loop_turns(1)


SHORT = """
import asyncio, resource
from rdmanet._core import unfilled, unmap_some, unneeded_bytes
from rdmanet.stream import leaving
leaving.STEP_S = 0

async def main():
    memory = unfilled(1 << 30)
    most = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    del memory
    assert unmap_some(0) == 1 << 30
    again = unfilled(900 << 20)
    print(len(again), unmap_some(0))

asyncio.run(main())
"""


def test_it_makes_room_for_new_memory():
    """Where the address space is short, what is leaving goes first."""
    found = subprocess.run([sys.executable, "-c", SHORT], text=True, capture_output=True, timeout=60)
    assert found.stdout.split() == [str(900 * MIB), "0"], found.stderr


def test_all_of_it_is_unmapped():
    memory = unfilled(SIZE)
    at = address(memory)

    def mapped() -> bool:
        pages = (ctypes.c_ubyte * 1)()
        libc = ctypes.CDLL(None)
        return any(
            libc.mincore(ctypes.c_void_p(at + offset), ctypes.c_size_t(1), pages) == 0
            for offset in range(0, SIZE, PIECE_BYTES)
        )

    assert mapped()
    del memory
    assert not mapped()
