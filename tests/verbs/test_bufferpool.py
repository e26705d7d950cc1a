"""Pools of registered buffers: lent, given back, and never lent twice."""

import errno
import gc

import pytest

from rdmanet.verbs import SGE, BufferPool, RecvWR, SendWR, WCStatus, WROpcode


@pytest.fixture
def pool(net):
    with BufferPool(net.pd, 100, 3) as pool:
        yield pool


def test_lent_and_given_back(pool):
    assert (pool.count, pool.buffer_bytes, pool.available) == (3, 100, 3)
    with pool.acquire() as buffer:
        assert len(buffer) == 100 and pool.available == 2
        buffer[:5] = b"hello"
        assert buffer[:5] == bytes(memoryview(buffer)[:5]) == b"hello"
    assert pool.available == 3
    with pytest.raises(ValueError, match="is released"):
        memoryview(buffer)
    buffer.release()
    assert pool.available == 3


def test_they_are_apart(pool):
    buffers = [pool.acquire() for _ in range(3)]
    for i, buffer in enumerate(buffers):
        buffer[:] = bytes([i + 1]) * 100
    assert [set(buffer[:]) for buffer in buffers] == [{1}, {2}, {3}]
    assert all(SGE(buffer).addr % 64 == 0 for buffer in buffers)
    for buffer in buffers:
        buffer.release()


def test_it_is_bounded(pool):
    buffers = [pool.acquire(10) for _ in range(3)]
    with pytest.raises(OSError, match="all 3 buffers of 100 bytes") as caught:
        pool.acquire()
    assert caught.value.errno == errno.ENOBUFS
    buffers.pop().release()
    with pool.acquire(0) as buffer:
        assert len(buffer) == 0
    for buffer in buffers:
        buffer.release()


def test_what_is_in_flight_is_not_lent(net, pair, pool):
    """Given back while the device may still write to it: it comes free with the completion."""
    a, b = pair
    with pool.acquire() as buffer:
        b.qp.post_recv(RecvWR(buffer))
        with memoryview(buffer) as view:
            b.qp.post_recv(RecvWR(view[50:]))
    del buffer, view
    gc.collect()
    assert pool.available == 2
    with pytest.raises(OSError, match="1 of 3 buffers are in use") as caught:
        pool.close()
    assert caught.value.errno == errno.EBUSY
    for left in (2, 3):
        with pool.acquire(5) as ours:
            ours[:] = b"hello"
            a.qp.post_send(SendWR(WROpcode.SEND, ours))
        assert a.one().status == b.one().status == WCStatus.SUCCESS
        assert pool.available == left
    b.qp.post_recv(RecvWR(forgotten := pool.acquire()))
    forgotten.release()
    assert pool.available == 2
    b.qp.close()
    assert pool.available == 3


def test_its_region_stays_while_it_is_looked_at(pool):
    """Nor does closing the region itself take the memory away under a buffer that is lent."""
    with pool.acquire() as buffer:
        with memoryview(buffer) as view:
            with pytest.raises(BufferError, match="exported to 1 buffers"):
                pool.mr.close()
            view[99] = 1
        pool.mr.close()
        with pytest.raises(ValueError, match="closed"):
            buffer[0]
    assert pool.closed


def test_parts(net, pair, pool):
    a, b = pair
    with pool.acquire(8) as source, pool.acquire() as target:
        source[:] = b"01234567"
        b.receive(target.sge(10, 20))
        with memoryview(source) as view:
            a.send([view[2:4], source.sge(6)])
        assert a.one().status == WCStatus.SUCCESS
        assert b.one().byte_len == 4
        assert target[10:14] == b"2367"
        with pytest.raises(IndexError, match="9 bytes at offset 0"):
            source.sge(0, 9)


def test_a_forgotten_one_comes_back(pool):
    with pytest.warns(ResourceWarning, match="unreleased <PooledBuffer 0 of 100 bytes>"):
        pool.acquire()
        gc.collect()
    assert pool.available == 3


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 0), (1, -1)])
def test_what_cannot_be(net, size, count):
    with pytest.raises(ValueError, match="a pool needs at least one buffer"):
        BufferPool(net.pd, size, count)


def test_too_long(pool):
    for wrong in (101, -1):
        with pytest.raises(ValueError, match=r"are not in 0\.\.100, the size of a buffer"):
            pool.acquire(wrong)


def test_closed(net):
    pool = BufferPool(net.pd, 10, 1)
    pool.close()
    pool.close()
    assert pool.closed and pool.available == 0 and "closed" in repr(pool)
    with pytest.raises(ValueError, match="closed"):
        pool.acquire()
