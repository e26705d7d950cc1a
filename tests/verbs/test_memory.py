"""Regions: memory of one's own and borrowed, its bounds, its rights, its life."""

import gc

import pytest

from rdmanet.verbs import SGE, AccessFlags, RecvWR, SendWR, WCStatus, WROpcode


def test_own_memory_is_a_buffer(net):
    mr = net.mr(10000)
    assert len(mr) == 10000
    assert bytes(mr) == bytes(10000)
    mr[3:6] = b"abc"
    assert mr[3:6] == b"abc"
    assert mr[4] == ord("b")
    with memoryview(mr) as view:
        assert view.nbytes == 10000 and not view.readonly
        view[0] = 1
    assert mr[0] == 1
    element, remote = mr.sge(), mr.to_remote()
    assert (element.addr, element.length, element.lkey) == (mr.address, 10000, mr.lkey)
    assert (remote.address, len(remote), remote.rkey) == (mr.address, 10000, mr.rkey)
    assert mr.address % 4096 == 0


def test_nothing_remote_by_default(net):
    with net.pd.alloc_mr(64) as mr:
        assert mr.access == AccessFlags.LOCAL_WRITE
    with net.pd.reg_mr(bytearray(64)) as mr:
        assert mr.access == AccessFlags.LOCAL_WRITE
    with net.pd.reg_mr(bytes(64)) as mr:
        assert mr.access == AccessFlags(0)


def test_borrowed_memory_is_held(net):
    buffer = bytearray(b"hold me")
    with net.pd.reg_mr(buffer) as mr:
        assert bytes(mr) == b"hold me"
        mr[0:4] = b"HOLD"
        with pytest.raises(BufferError):
            buffer.append(0)
    assert buffer == b"HOLD me"
    buffer.append(0)


def test_read_only_memory_is_not_written_to(net):
    with pytest.raises(BufferError):
        net.pd.reg_mr(b"constant", AccessFlags.LOCAL_WRITE)
    with pytest.raises(BufferError):
        net.pd.reg_mr(b"constant", AccessFlags.REMOTE_WRITE)
    with net.pd.reg_mr(b"constant", AccessFlags.REMOTE_READ) as mr, memoryview(mr) as view:
        assert view.readonly


def test_remote_write_needs_local_write(net):
    """The specification's rule; without it a device would let the peer do what we may not."""
    with pytest.raises(OSError) as caught:
        net.pd.reg_mr(bytearray(64), AccessFlags.REMOTE_WRITE)
    assert caught.value.errno == 22


def test_closing_waits_for_views(net):
    mr = net.pd.alloc_mr(64)
    view = memoryview(mr)
    with pytest.raises(BufferError, match="1 buffers"):
        mr.close()
    view.release()
    mr.close()
    mr.close()
    assert mr.closed
    with pytest.raises(ValueError, match="closed"):
        memoryview(mr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((101,), "offset 101 is past the end of 100 bytes"),
        ((0, 101), "101 bytes at offset 0 are not within 100 bytes"),
        ((60, 41), "41 bytes at offset 60"),
        ((0, -1), "length -1 is negative"),
    ],
)
def test_bounds(net, arguments, message):
    mr = net.mr(100)
    with pytest.raises(IndexError, match=message):
        SGE(mr, *arguments)
    with pytest.raises(IndexError, match=message):
        mr.sge(*arguments)


def test_elements_of_a_region(net):
    mr = net.mr(100)
    sge = SGE(mr, 10)
    assert (sge.addr, sge.length, sge.lkey) == (mr.address + 10, 90, mr.lkey)
    assert mr.sge(100).length == 0


def test_elements_keep_the_region(net):
    """An element holds its region, and a request its elements: nothing dangles."""
    mr = net.pd.alloc_mr(64)
    wr = RecvWR(SGE(mr))
    address = mr.address
    del mr
    gc.collect()
    assert wr.sg_list[0].addr == address
    wr.sg_list[0].buffer.close()


def test_work_in_flight_keeps_its_buffers(net, pair):
    """Buffers without another reference live until their completion is polled."""
    a, b = pair
    source = bytearray(b"from nowhere")
    mr = net.pd.reg_mr(bytearray(64))
    region = net.pd.reg_mr(source)
    b.qp.post_recv(RecvWR(mr))
    a.qp.post_send(SendWR(WROpcode.SEND, region))
    with pytest.raises(BufferError):
        source.append(0)
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().byte_len == len(source)
    assert mr[:12] == b"from nowhere"
    assert a.qp.in_flight == b.qp.in_flight == (0, 0)
    mr.close()
    region.close()


def test_whole_address_space(net, pair):
    """Bytes go from where they lie, where the device can do that."""
    a, b = pair
    if not net.context.query_device().implicit_odp:
        with pytest.raises(OSError, match="ibv_reg_mr"):
            net.pd.reg_implicit()
        return
    target = net.mr()
    with net.pd.reg_implicit() as everything:
        with pytest.raises(BufferError):
            memoryview(everything)
        b.receive(target)
        data = b"just some bytes" * 100
        a.send(SGE(data, lkey=everything.lkey))
        assert a.one().status == WCStatus.SUCCESS
        assert target[: b.one().byte_len] == data


def test_a_bad_address_in_the_whole_address_space(net, pair):
    """It is an error completion, not a crash."""
    a, b = pair
    if not net.context.query_device().implicit_odp:
        pytest.skip("the device cannot register the whole address space")
    target = net.mr()
    with net.pd.reg_implicit() as everything:
        b.receive(target)
        a.send(SGE(everything, 8192, 64))  # the second page of all: never mapped
        assert a.one().status == WCStatus.LOC_PROT_ERR


def test_zero_bytes(net):
    with pytest.raises(ValueError, match=r"length 0 is not in 1\.\."):
        net.pd.alloc_mr(0)
