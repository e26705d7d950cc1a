"""What can be done with regions beyond making them: in-place changes, advice, other kinds of memory."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os

import pytest

from rdmanet.verbs import (
    DM,
    PD,
    AccessFlags,
    AdviseMRAdvice,
    SendWR,
    WCStatus,
    WROpcode,
)

from .conftest import EVERYTHING, Net, driver, needs

F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4  # the fcntl module of 3.11 lacks them


def test_changing_rights(net: Net, pair):
    a, _ = pair
    mr, there = net.mr(), net.mr(access=AccessFlags.LOCAL_WRITE)
    with needs("ibv_rereg_mr"):
        there.rereg(access=EVERYTHING)
    assert there.access == EVERYTHING
    mr[0:7] = b"allowed"
    a.send(mr.sge(0, 7), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey)
    assert a.one().status == WCStatus.SUCCESS
    there.rereg(access=AccessFlags.LOCAL_WRITE)
    mr[0:7] = b"refused"
    a.send(mr.sge(0, 7), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey)
    assert a.one().status == WCStatus.REM_ACCESS_ERR
    assert there[0:7] == b"allowed"


def test_changing_memory(net: Net, pair):
    """It borrows the other memory from then on, and gives back what it had."""
    a, b = pair
    mr, memory, first = net.mr(), bytearray(b"x" * 100), bytearray(64)
    region = net.keep(net.pd.reg_mr(first))
    with needs("ibv_rereg_mr"):
        region.rereg(buffer=memory)
    first.append(0)
    with pytest.raises(BufferError):
        memory.append(0)
    assert region.length == 100 and region[:3] == b"xxx"
    mr[0:2] = b"yy"
    b.receive(region.sge(50, 10))
    a.send(mr.sge(0, 2))
    assert b.one().status == WCStatus.SUCCESS
    a.one()
    assert memory[49:53] == b"xyyx"


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_changing_the_domain(net: Net, pair):
    a, _ = pair
    mr = net.mr()
    mr[0:8] = b"8 bytes!"
    with PD(net.context) as other, other.alloc_mr(4096, EVERYTHING) as there:
        a.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey)
        assert a.one().status == WCStatus.REM_ACCESS_ERR
        assert there[0:8] == bytes(8)
        with needs("ibv_rereg_mr"):
            there.rereg(pd=net.pd)
        assert there.pd is net.pd
        c, d = net.pair()
        c.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey)
        assert c.one().status == WCStatus.SUCCESS
        assert there[0:8] == b"8 bytes!"


def test_one_buffer_in_two_domains(net: Net):
    """Registering owns nothing: each region has its keys, and the buffer is free when the last is closed."""
    memory = bytearray(b"shared by both")
    with PD(net.context) as other:
        first, second = net.pd.reg_mr(memory), other.reg_mr(memory)
        assert first.address == second.address and first.lkey != second.lkey
        first[:6] = b"SHARED"
        assert second[:6] == b"SHARED"
        first.close()
        with pytest.raises(BufferError):
            memory.append(0)
        second.close()
    memory.append(0)


def test_changing_while_it_is_viewed(net: Net):
    mr = net.mr()
    with memoryview(mr), pytest.raises(BufferError, match="memoryviews"):
        mr.rereg(buffer=bytearray(8))
    assert len(mr) == 4096


def test_memory_that_is_read_only_stays_so(net: Net):
    with net.pd.reg_mr(bytes(64), 0) as mr, pytest.raises(BufferError, match="read-only"):
        mr.rereg(access=AccessFlags.LOCAL_WRITE)


def test_what_cannot_be(net: Net):
    mr = net.mr()
    with pytest.raises(BufferError):
        mr.rereg(buffer=b"read only", access=EVERYTHING)
    with needs("ibv_rereg_mr"):
        mr.rereg(access=EVERYTHING)
    with pytest.raises(OSError, match="ibv_rereg_mr"):
        mr.rereg(access=AccessFlags.REMOTE_WRITE)  # without LOCAL_WRITE
    assert mr.closed or mr.access == EVERYTHING  # some devices find it out when the old region is gone


@pytest.mark.parametrize("access", [AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC])
def test_remote_writing_is_writing(net: Net, access):
    """IBTA 10.6.3.1: remote write or atomic access needs local write."""
    with pytest.raises(OSError, match="ibv_reg_mr") as caught:
        net.pd.alloc_mr(4096, access)
    assert caught.value.errno == errno.EINVAL


def test_advice(net: Net):
    if not net.context.query_device().odp_general_caps:
        pytest.skip("the device has no on-demand paging")
    mr = net.mr(access=AccessFlags.LOCAL_WRITE | AccessFlags.ON_DEMAND)
    with needs("ibv_advise_mr"):
        net.pd.advise_mr(AdviseMRAdvice.PREFETCH, [mr.sge(0, 4096)])


def test_no_memory(net: Net, pair):
    """A null region: what is received into it is dropped, and the rest lands where it should."""
    a, b = pair
    with needs("null regions"):
        null = net.keep(net.pd.alloc_null_mr())
    mr = net.mr()
    mr[0:8] = b"12345678"
    b.receive([null.sge(0, 4), mr.sge(1024, 4)])
    a.send(mr.sge(0, 8))
    assert b.one().status == WCStatus.SUCCESS
    a.one()
    assert mr[1024:1028] == b"5678"
    with pytest.raises(BufferError, match="no memory"):
        memoryview(null)


# ---- Device memory ---------------------------------------------------------------------------------------


@pytest.fixture
def dm(net: Net) -> DM:
    with needs("device memory"):
        return net.keep(DM(net.context, 4096))


def test_copying(dm: DM):
    dm.copy_to_dm(8, b"on a device!")
    assert dm.copy_from_dm(8, 12) == b"on a device!"
    assert len(dm) == 4096
    for call in (lambda: dm.copy_to_dm(4090, b"too long"), lambda: dm.copy_from_dm(5000, 1)):
        with pytest.raises(IndexError, match="are not within 4096 bytes"):
            call()


def test_reached_by_the_peer(net: Net, pair, dm: DM):
    a, b = pair
    region = net.keep(net.pd.reg_dm_mr(dm, 1024, 1024, EVERYTHING))
    mr = net.mr()
    mr[0:8] = b"remotely"
    a.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=16, rkey=region.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert dm.copy_from_dm(1024 + 16, 8) == b"remotely"
    b.receive(mr.sge(512, 64))
    a.qp.post_send(SendWR(WROpcode.SEND, region.sge(16, 6)))
    assert b.one().byte_len == 6
    assert mr[512:518] == b"remote"
    a.one()
    with pytest.raises(BufferError, match="device memory"):
        memoryview(region)


def test_device_memory_outlives_its_regions(net: Net, dm: DM):
    region = net.pd.reg_dm_mr(dm)
    with pytest.raises(OSError, match="ibv_free_dm"):
        dm.close()
    region.close()
    dm.close()
    with pytest.raises(ValueError, match="closed"):
        dm.copy_from_dm(0, 1)


def test_a_region_holds_device_memory(net: Net):
    with needs("device memory"):
        dm = DM(net.context, 4096)
    region = net.pd.reg_dm_mr(dm)
    del dm
    gc.collect()
    assert not region.dm.closed
    dm = region.dm
    region.close()
    dm.close()


def test_memory_of_a_descriptor(net: Net, pair):
    """A dma-buf; on the embedded device a sealed memfd, at the addresses where it is mapped."""
    a, _ = pair
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
        with mmap.mmap(fd, 4096) as memory:
            probe = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(probe)
            del probe
            with needs("regions of descriptors"):
                try:
                    region = net.pd.reg_dmabuf_mr(fd, 4096, iova=address, access=EVERYTHING)
                except OSError as exc:
                    if driver(net.context) != "embedded" and exc.errno in (errno.EINVAL, errno.EBADF):
                        pytest.skip("only a real dma-buf would do")
                    raise
            mr = net.mr()
            mr[0:6] = b"by fd!"
            a.send(mr.sge(0, 6), WROpcode.RDMA_WRITE, remote_addr=address + 8, rkey=region.rkey)
            assert a.one().status == WCStatus.SUCCESS
            assert memory[8:14] == b"by fd!"
            with pytest.raises(BufferError, match="another device's memory"):
                memoryview(region)
            region.close()
    finally:
        os.close(fd)
