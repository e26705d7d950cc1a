"""Memory windows of both kinds, and keys made invalid."""

import gc

import pytest

from rdmanet.verbs import (
    MR,
    MW,
    AccessFlags,
    MWBind,
    MWBindInfo,
    MWType,
    SendWR,
    WCOpcode,
    WCStatus,
    WROpcode,
    inc_rkey,
)

from .conftest import EVERYTHING, Net, differs, driver, needs

BINDABLE = EVERYTHING | AccessFlags.MW_BIND
WRITE = AccessFlags.REMOTE_WRITE


def window(net: Net, kind: MWType) -> MW:
    with needs(f"memory windows of {kind.name.lower().replace('_', ' ')}"):
        net.windows.append(MW(net.pd, kind))
    return net.windows[-1]


def memories(net: Net) -> tuple[MR, MR]:
    """Where to write from, and to: no byte of the second is zero."""
    mr, memory = net.mr(), net.mr(access=BINDABLE)
    memory[:] = b"." * 4096
    return mr, memory


def write(side, mr, memory, at, rkey):
    """Write eight bytes there, by this key; how that ended. They are there then, or nothing has changed."""
    before = memory[:]
    text = b"%08d" % (int(mr[:8].strip(b"\0") or b"0") + 1)  # another one each time
    mr[:8] = text
    side.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=memory.address + at, rkey=rkey)
    status = side.one().status
    assert memory[:] == (before[:at] + text + before[at + 8 :] if status == WCStatus.SUCCESS else before)
    return status


def bind(side, mw, info):
    """A window of type 2, by a work request; its key."""
    key = inc_rkey(mw.rkey)
    side.send((), WROpcode.BIND_MW, mw=mw, rkey=key, bind_info=info)
    wc = side.one()
    assert wc.status == WCStatus.SUCCESS, wc
    assert wc.opcode == WCOpcode.BIND_MW
    return key


def test_type_1(net: Net, pair):
    a, b = pair
    mw = window(net, MWType.TYPE_1)
    mr, memory = memories(net)
    before = mw.rkey
    b.qp.bind_mw(mw, MWBind(MWBindInfo(memory, memory.address + 64, 128, WRITE), wr_id="bind"))
    wc = b.one()
    assert (wc.status, wc.wr_id, wc.opcode) == (WCStatus.SUCCESS, "bind", WCOpcode.BIND_MW)
    assert mw.rkey != before
    assert write(a, mr, memory, 64, mw.rkey) == WCStatus.SUCCESS


@pytest.mark.parametrize("where", [63, 185, 0], ids=["before", "across the end", "far"])
def test_bounds(net: Net, pair, where):
    differs(net.context, "rxe", "checks the bounds of the region, and not of the window")
    a, b = pair
    mw = window(net, MWType.TYPE_2)
    mr, memory = memories(net)
    key = bind(b, mw, MWBindInfo(memory, memory.address + 64, 128, WRITE))
    assert write(a, mr, memory, where, key) == WCStatus.REM_ACCESS_ERR


def test_rights(net: Net, pair):
    a, b = pair
    mw = window(net, MWType.TYPE_2)
    mr, memory = memories(net)
    key = bind(b, mw, MWBindInfo(memory, None, 4096, WRITE))
    assert write(a, mr, memory, 0, key) == WCStatus.SUCCESS
    a.send(mr.sge(64, 8), WROpcode.RDMA_READ, remote_addr=memory.address, rkey=key)
    assert a.one().status == WCStatus.REM_ACCESS_ERR
    assert mr[64:72] == bytes(8)


def test_local_invalidate(net: Net, pair):
    """The key's owner takes it back."""
    a, b = pair
    mw = window(net, MWType.TYPE_2)
    mr, memory = memories(net)
    key = bind(b, mw, MWBindInfo(memory, None, 4096, WRITE))
    b.send((), WROpcode.LOCAL_INV, invalidate_rkey=key)
    wc = b.one()
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.LOCAL_INV)
    assert write(a, mr, memory, 0, key) == WCStatus.REM_ACCESS_ERR


def test_send_with_invalidate(net: Net, pair):
    """The peer gives a key back; the receive tells which."""
    a, b = pair
    mw = window(net, MWType.TYPE_2)
    mr, memory = memories(net)
    key = bind(b, mw, MWBindInfo(memory, None, 4096, WRITE))
    assert write(a, mr, memory, 0, key) == WCStatus.SUCCESS
    b.receive(mr.sge(1024, 64))
    a.send(mr.sge(0, 8), WROpcode.SEND_WITH_INV, invalidate_rkey=key)
    assert a.one().status == WCStatus.SUCCESS
    wc = b.one()
    assert wc.status == WCStatus.SUCCESS
    assert mr[1024 : 1024 + wc.byte_len] == mr[:8] != bytes(8)
    # rxe sets the kernel's bit for it, which means something else to programs
    assert wc.invalidated_rkey == (None if driver(net.context) == "rxe" else key)
    assert write(a, mr, memory, 0, key) == WCStatus.REM_ACCESS_ERR


def test_a_region_without_the_right(net: Net, pair):
    """MW_BIND has to be asked for."""
    _, b = pair
    mw = window(net, MWType.TYPE_2)
    plain = net.mr()
    b.send((), WROpcode.BIND_MW, mw=mw, rkey=inc_rkey(mw.rkey), bind_info=MWBindInfo(plain, None, 64, WRITE))
    assert b.one().status == (WCStatus.WR_FLUSH_ERR if driver(net.context) == "rxe" else WCStatus.MW_BIND_ERR)


def test_a_bound_region_is_busy(net: Net, pair):
    _, b = pair
    mw = window(net, MWType.TYPE_2)
    memory = net.mr(access=BINDABLE)
    bind(b, mw, MWBindInfo(memory, None, 64, WRITE))
    assert mw.mr is memory
    with pytest.raises(OSError, match="ibv_dereg_mr") as caught:
        memory.close()
    assert caught.value.errno in (16, 22)  # EBUSY, or rxe's EINVAL
    mw.close()
    memory.close()


def test_type_1_is_not_for_requests(net: Net, pair):
    """And a window of type 2 not for bind_mw()."""
    _, b = pair
    mw = window(net, MWType.TYPE_2)
    memory = net.mr(access=BINDABLE)
    with pytest.raises(OSError, match="ibv_bind_mw") as caught:
        b.qp.bind_mw(mw, MWBind(MWBindInfo(memory, None, 64, WRITE)))
    assert caught.value.errno == 22
    assert b.qp.in_flight == (0, 0)


def test_it_holds_its_region(net: Net, pair):
    _, b = pair
    mw = window(net, MWType.TYPE_2)
    memory = net.pd.alloc_mr(4096, BINDABLE)
    wr = SendWR(
        WROpcode.BIND_MW, mw=mw, rkey=inc_rkey(mw.rkey), bind_info=MWBindInfo(memory, None, 64, WRITE)
    )
    del memory
    gc.collect()
    b.qp.post_send(wr)
    assert b.one().status == WCStatus.SUCCESS
    region = mw.mr
    assert not region.closed
    mw.close()
    region.close()
    with pytest.raises(ValueError, match="is closed"):
        b.qp.post_send(wr)


def test_keys():
    assert inc_rkey(0x12345601) == 0x12345602
    assert inc_rkey(0x123456FF) == 0x12345600
