"""Waiting for a buffer of a pool: in turn, and cancelling takes none."""

import threading

import pytest
from loops import on_every_loop

from rdmanet.verbs_async import AsyncBufferPool


async def take(pool, name, order):
    with await pool.get(10):
        order.append(name)


@on_every_loop
async def test_in_turn(loop, verbs):
    with AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier) as pool:
        order = []
        held = await pool.get()
        tasks = []
        for name in "abc":
            tasks.append(loop.spawn(take(pool, name, order)))
            await loop.turn()
        assert order == []
        held.release()
        for task in tasks:
            await task.join()
        assert order == ["a", "b", "c"]
        assert pool.available == 1


@on_every_loop
async def test_cancelling(loop, verbs):
    with AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier) as pool:
        order = []
        held = await pool.get()
        first, second = loop.spawn(take(pool, "a", order)), None
        await loop.turn()
        second = loop.spawn(take(pool, "b", order))
        await loop.turn()
        held.release()  # the first is woken, and cancelled before it runs
        first.cancel()
        await first.join()
        await second.join()
        assert order in (["b"], ["a", "b"])
        assert pool.available == 1


@on_every_loop
async def test_cancelled_while_waiting(loop, verbs):
    with AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier) as pool:
        order = []
        with await pool.get():
            task = loop.spawn(take(pool, "a", order))
            await loop.turn()
            task.cancel()
            await task.join()
        assert order == [] and pool.available == 1


@on_every_loop
async def test_what_there_cannot_be(loop, verbs):
    with AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier) as pool:
        with pytest.raises(ValueError, match="11 bytes are not in 0..10"):
            await pool.get(11)
    with pytest.raises(ValueError, match="closed"):
        await pool.get()


@on_every_loop
async def test_closing_tells_all_who_wait(loop, verbs):
    pool = AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier)
    held = await pool.get()
    tasks = [loop.spawn(take(pool, name, [])) for name in "abc"]
    await loop.turn()
    held.release()
    pool.close()
    for task in tasks:
        with pytest.raises(ValueError, match="closed"):
            await task.join()


@on_every_loop
async def test_another_thread_is_refused(loop, verbs):
    found = []

    def other():
        try:
            pool.get().send(None)
        except RuntimeError as exc:
            found.append(str(exc))

    with AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier) as pool:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(found) == 1 and "thread" in found[0]
