"""Regions whose addresses begin at 0: what both sides say is the offset, and inline data is the program's memory."""

import contextlib

import pytest

from rdmanet.verbs import (
    DM,
    MR,
    MW,
    SGE,
    AccessFlags,
    MWBind,
    MWBindInfo,
    MWType,
    SendFlags,
    SendOpsFlags,
    SendWR,
    WCStatus,
    WROpcode,
    inc_rkey,
)

from .conftest import EVERYTHING, Net, differs, driver, needs

ZERO_BASED = EVERYTHING | AccessFlags.MW_BIND | AccessFlags.ZERO_BASED
MESSAGE = bytes(range(1, 65))
PAGE = 4096


def memory_of(net: Net, mr: MR) -> memoryview:
    """All of a region, until the net closes, even if the test is skipped: while it lives, the region cannot close."""
    return net.keep(contextlib.ExitStack()).enter_context(memoryview(mr))


def zero_based(net: Net, kind: str):
    """A region of one page, and the memory that it is of."""
    differs(net.context, "siw", "takes the addresses of the process, whatever was asked for")
    with needs("regions whose addresses begin at 0"):
        if kind == "allocated":
            mr = net.mr(PAGE, ZERO_BASED)
            return mr, memory_of(net, mr)
        memory = bytearray(3 * PAGE)
        with memoryview(memory) as view, net.pd.reg_mr(memory) as somewhere:
            begin = -somewhere.address % PAGE  # kernels want the beginning of a page for the address 0
            part = view[begin : begin + PAGE]
        mr = net.keep(net.pd.reg_mr(part, ZERO_BASED))
        return mr, memory_of(net, mr)


KINDS = pytest.mark.parametrize("kind", ["allocated", "borrowed"])


@KINDS
def test_local_elements_have_offsets(net: Net, pair, kind):
    a, b = pair
    here, memory = zero_based(net, kind)
    there = net.mr()
    memory[100:164] = MESSAGE
    assert here.address == 0 and here.to_remote(100).address == 100
    assert here.sge(100, 64).addr == 100
    assert SGE(memory[100:164]).addr == 100
    for element in (here.sge(100, 64), memory[100:164]):
        there[:64] = bytes(64)
        b.receive(there.sge(0, 64))
        a.send(element)
        assert a.one().status == WCStatus.SUCCESS
        assert b.one().status == WCStatus.SUCCESS
        assert there[:64] == MESSAGE
    b.receive(here.at[1000:1064])
    a.send(there.sge(0, 64))
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().status == WCStatus.SUCCESS
    assert memory[1000:1064] == MESSAGE


@KINDS
def test_the_peer_has_the_same_offsets(net: Net, pair, kind):
    a, _ = pair
    there, memory = zero_based(net, kind)
    mr = net.mr()
    mr[:64] = MESSAGE
    to = there.to_remote(200, 64)
    a.send(mr.sge(0, 64), WROpcode.RDMA_WRITE, remote_addr=to.address, rkey=to.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert memory[200:264] == MESSAGE
    a.send(there.sge(300, 64), WROpcode.RDMA_READ, remote_addr=mr.address, rkey=mr.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert memory[300:364] == MESSAGE


@KINDS
def test_inline_data_is_read_from_the_program(net: Net, kind):
    a, b = net.side(max_inline_data=64), net.side()
    net.connect(a, b)
    here, memory = zero_based(net, kind)
    there = net.mr()
    memory[100:164] = MESSAGE
    for element in (here.sge(100, 64), memory[100:164]):
        there[:64] = bytes(64)
        b.receive(there.sge(0, 64))
        a.send(element, flags=SendFlags.INLINE | SendFlags.SIGNALED)
        assert a.one().status == WCStatus.SUCCESS
        assert b.one().status == WCStatus.SUCCESS
        assert there[:64] == MESSAGE


def test_both_by_the_extended_calls(net: Net):
    a, b = net.side(ops=SendOpsFlags.SEND, max_inline_data=64), net.side()
    net.connect(a, b)
    here, memory = zero_based(net, "allocated")
    there = net.mr()
    memory[100:164] = MESSAGE
    for flags in (SendFlags.SIGNALED, SendFlags.SIGNALED | SendFlags.INLINE):
        there[:64] = bytes(64)
        b.receive(there.sge(0, 64))
        with a.qp.wr() as wr:
            wr.send(here.sge(100, 64), flags=flags)
        assert a.one().status == WCStatus.SUCCESS
        assert b.one().status == WCStatus.SUCCESS
        assert there[:64] == MESSAGE


@pytest.mark.parametrize("kind", list(MWType))
def test_a_window_to_all_of_it(net: Net, pair, kind):
    a, b = pair
    there, memory = zero_based(net, "allocated")
    mr = net.mr()
    mr[:64] = MESSAGE
    with needs("memory windows of this type"):
        mw = MW(net.pd, kind)
    net.windows.append(mw)
    info = MWBindInfo(there, None, there.length, AccessFlags.REMOTE_WRITE)
    if kind is MWType.TYPE_1:
        b.qp.bind_mw(mw, MWBind(info))
    else:
        b.qp.post_send(SendWR(WROpcode.BIND_MW, mw=mw, rkey=inc_rkey(mw.rkey), bind_info=info))
    assert b.one().status == WCStatus.SUCCESS
    a.send(mr.sge(0, 64), WROpcode.RDMA_WRITE, remote_addr=500, rkey=mw.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert memory[500:564] == MESSAGE


def test_other_memory_begins_at_0_as_well(net: Net, pair):
    a, _ = pair
    if driver(net.context) != "embedded":
        pytest.skip("ibv_rereg_mr() takes the address of new memory, and drivers take that for its first one")
    region, memory = net.keep(net.pd.reg_mr(bytearray(100), ZERO_BASED)), bytearray(200)
    region.rereg(buffer=memory)
    mr = net.mr()
    mr[:64] = MESSAGE
    a.send(mr.sge(0, 64), WROpcode.RDMA_WRITE, remote_addr=region.to_remote(100).address, rkey=region.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert memory[100:164] == MESSAGE
    a.send(region.sge(0, 64), WROpcode.RDMA_READ, remote_addr=mr.address, rkey=mr.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert region[:64] == MESSAGE


def test_memory_that_the_program_cannot_read_is_not_sent_inline(net: Net):
    a, b = net.side(max_inline_data=64), net.side()
    net.connect(a, b)
    with needs("device memory"):
        dm = net.keep(DM(net.context, 1024))
        region = net.keep(net.pd.reg_dm_mr(dm))
    with pytest.raises(ValueError, match="inline"):
        a.qp.post_send(SendWR(WROpcode.SEND, region.sge(0, 8), flags=SendFlags.INLINE))
