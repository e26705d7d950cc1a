"""Waiting for a buffer of a pool: in turn, and cancelling takes none."""

import gc
import sys
import threading
import warnings

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


@on_every_loop
async def test_a_pool_that_is_garbage_with_a_view_of_its_buffer(loop, verbs, monkeypatch):
    """The collector clears the pool's attributes before the view is gone, which then frees the buffer."""
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_value))
    pool = AsyncBufferPool(verbs.pd, 10, 1, notifier=loop.notifier)
    buffer = await pool.get()
    view = memoryview(buffer)
    buffer.release()
    pool.itself, pool.view = pool, view
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del pool, buffer, view
        gc.collect()
    assert raised == []
    assert any("unclosed <MR" in str(warning.message) for warning in told)  # it was garbage
