"""Registrations that are kept for the next use: found again, bounded, and never those of other memory."""

import array
import gc
import os

import pytest

from rdmanet._core import RegistrationCache
from rdmanet.verbs import AccessFlags


@pytest.fixture
def cache(net):
    cache = RegistrationCache(net.pd, most_entries=4, most_bytes=1 << 16)
    yield cache
    cache.close()


def use(cache: RegistrationCache, buffer: object) -> int:
    """Its key, of an operation that begins and ends."""
    with memoryview(buffer).cast("B") as view:
        registration = cache.take(buffer, view)
        key = registration.lkey
        registration.close()
    return key


def counts(cache: RegistrationCache) -> tuple[int, int, int, int]:
    """Hits, misses, entries and bytes."""
    stats = cache.stats()
    return stats["hits"], stats["misses"], stats["entries"], stats["bytes"]


def test_the_same_memoryview_is_registered_once(cache):
    view = memoryview(bytearray(1000))
    keys = {use(cache, view) for _ in range(5)}
    assert len(keys) == 1
    assert counts(cache) == (4, 1, 1, 1000)


def test_two_views_of_the_same_memory_are_two(cache):
    memory = bytearray(1000)
    one, other, constant = memoryview(memory), memoryview(memory), memoryview(memory).toreadonly()
    assert len({use(cache, view) for view in (one, other, constant)}) == 3
    assert counts(cache) == (0, 3, 3, 3000)


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda n: array.array("B", bytes(n))])
def test_what_may_be_another_the_next_time_is_not_kept(cache, kind):
    buffer = kind(1000)
    use(cache, buffer)
    use(cache, buffer)
    assert counts(cache) == (0, 2, 0, 0)


def test_nothing_of_the_program_is_held(cache):
    """Neither is the memoryview, nor does its memory stay unresizable."""
    memory = bytearray(1000)
    view = memoryview(memory)
    use(cache, view)
    with pytest.raises(BufferError):
        memory.append(1)  # that is the view's doing,
    view.release()
    memory.append(1)  # and nobody else's
    with pytest.raises(ValueError, match="released"):
        use(cache, view)
    assert counts(cache) == (0, 1, 1, 1000)
    del view
    assert counts(cache) == (0, 1, 0, 0)


def test_memory_that_was_freed_and_came_back_is_registered_anew(cache):
    """The same address and length, in memory that is somebody else's meanwhile, is no hit."""
    addresses: set[int] = set()
    for i in range(50):
        view = memoryview(bytearray(1 << 15))
        with view.cast("B") as inner:
            registration = cache.take(view, inner)
            assert counts(cache) == (0, i + 1, 1, 1 << 15)
            registration.close()
        addresses.add(id(view))
        del view
        assert counts(cache) == (0, i + 1, 0, 0)
    # Even the objects came back, except under the address sanitizer, which keeps what is freed for a while.
    assert len(addresses) < 50 or "ASAN_OPTIONS" in os.environ


def test_memory_in_use_stays_registered_when_its_view_ends(cache):
    view = memoryview(bytearray(1000))
    held = view.cast("B")  # as an operation does
    registration = cache.take(view, held)
    del view
    gc.collect()
    assert counts(cache) == (0, 1, 0, 0)
    registration.close()


def test_a_region_is_not_registered_again(net, cache):
    with net.pd.alloc_mr(4096, AccessFlags.LOCAL_WRITE) as mr:
        assert use(cache, mr) == use(cache, memoryview(mr)[100:200]) == mr.lkey
        assert counts(cache) == (0, 0, 0, 0)


def test_a_region_without_the_right_is(net, cache):
    """To be read from only: what is to be written to needs another."""
    with net.pd.reg_mr(bytearray(4096), AccessFlags(0)) as mr:
        with memoryview(mr) as view:
            if view.readonly:
                assert use(cache, view) == mr.lkey
            else:
                assert use(cache, view) != mr.lkey


def test_the_least_recently_used_goes(cache):
    views = [memoryview(bytearray(1000)) for _ in range(5)]
    for view in views[:4]:
        use(cache, view)
    use(cache, views[0])
    use(cache, views[4])  # too many: the second goes
    assert cache.stats() == {"hits": 1, "misses": 5, "evictions": 1, "entries": 4, "bytes": 4000}
    for view in (views[0], views[2], views[3], views[4]):
        use(cache, view)
    assert counts(cache)[:2] == (5, 5)
    use(cache, views[1])
    assert counts(cache)[:2] == (5, 6)


def test_too_many_bytes(cache):
    views = [memoryview(bytearray(30_000)) for _ in range(3)]
    for view in views:
        use(cache, view)
    assert counts(cache) == (0, 3, 2, 60_000)
    large = memoryview(bytearray(1 << 17))
    use(cache, large)  # larger than all that is kept
    assert counts(cache) == (0, 4, 2, 60_000)


def test_what_is_in_use_is_not_evicted(cache):
    views = [memoryview(bytearray(1000)) for _ in range(6)]
    held = [view.cast("B") for view in views]
    uses = [cache.take(view, inner) for view, inner in zip(views, held, strict=True)]
    assert cache.stats()["entries"] == 6
    assert cache.stats()["evictions"] == 0
    uses.pop(0).close()
    assert (cache.stats()["entries"], cache.stats()["evictions"]) == (5, 1)
    for registration in uses:
        registration.close()
    assert cache.stats()["entries"] == 4


def test_closed_it_has_nothing(net):
    cache = RegistrationCache(net.pd)
    idle, busy = memoryview(bytearray(10)), memoryview(bytearray(10))
    use(cache, idle)
    with busy.cast("B") as inner:
        registration = cache.take(busy, inner)
        cache.close()
        assert counts(cache)[2:] == (0, 0)
        with pytest.raises(ValueError, match="closed"):
            cache.take(busy, inner)
        registration.close()
    cache.close()


def test_a_forked_child_has_no_part_in_it(net, cache):
    view = memoryview(bytearray(1000))
    use(cache, view)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            use(cache, view)
        except (ValueError, RuntimeError, OSError):
            del view  # ends the child's registration, not the parent's
            cache.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    use(cache, view)
    assert counts(cache) == (1, 1, 1, 1000)
