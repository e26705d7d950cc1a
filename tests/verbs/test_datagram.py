"""Datagrams: address handles, the 40 bytes before the payload, Q_Keys, multicast; and unreliable connections."""

import gc
import ipaddress

import pytest

from rdmanet.verbs import (
    AH,
    SGE,
    AHAttr,
    GlobalRoute,
    QPCap,
    QPState,
    QPType,
    RecvWR,
    SendFlags,
    SendWR,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
)

from .conftest import EVERYTHING, Net, driver, needs

GRH = 40
QKEY = 0x1234


def to(ah, side, *, qkey=QKEY, **options):
    """Where a datagram goes."""
    return {"ah": ah, "remote_qpn": side.qp.qp_num, "remote_qkey": qkey, **options}


def test_there_and_back(net: Net):
    """The receiver's buffer begins with the header; AH.from_wc() makes the way back of it."""
    a, b = net.datagrams(), net.datagrams()
    mr = net.mr()
    mr[0:5] = b"hello"
    b.receive(mr.sge(1024, 1024), wr_id="receive")
    a.send(mr.sge(0, 5), wr_id="send", **to(net.ah(), b))
    wc = a.one()
    assert (wc.status, wc.opcode, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.SEND, "send")
    wc = b.one()
    assert (wc.status, wc.opcode, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.RECV, "receive")
    assert wc.byte_len == GRH + 5
    assert wc.src_qp == a.qp.qp_num
    assert wc.wc_flags & WCFlags.GRH
    assert mr[1024 + GRH : 1024 + GRH + 5] == b"hello"
    with needs("ibv_init_ah_from_wc"):
        back = net.keep(AH.from_wc(net.pd, wc, mr[1024 : 1024 + GRH]))
    assert back.attr.dgid == net.gid.gid
    a.receive(mr.sge(2048, 1024))
    b.send(mr.sge(0, 5), ah=back, remote_qpn=wc.src_qp, remote_qkey=QKEY)
    assert b.one().status == WCStatus.SUCCESS
    assert a.one().byte_len == GRH + 5
    assert mr[2048 + GRH : 2048 + GRH + 5] == b"hello"


def test_one_to_many(net: Net):
    """A datagram queue pair has no peer: each request names its own."""
    a, others = net.datagrams(), [net.datagrams() for _ in range(3)]
    mr, ah = net.mr(), net.ah()
    for i, other in enumerate(others):
        other.receive(mr.sge(1024 * (i + 1), 128))
        mr[i : i + 1] = bytes([i])
        a.send(mr.sge(i, 1), **to(ah, other))
    a.poll(3)
    for i, other in enumerate(others):
        assert other.one().byte_len == GRH + 1
        assert mr[1024 * (i + 1) + GRH] == i


def test_immediate_and_inline(net: Net):
    a, b = net.datagrams(max_inline_data=32), net.datagrams()
    mr, ah = net.mr(), net.ah()
    b.receive(mr.sge(1024, 128))
    b.receive(mr.sge(2048, 128))
    a.send(mr.sge(0, 8), WROpcode.SEND_WITH_IMM, imm_data=0x01020304, **to(ah, b))
    wc = b.one()
    assert wc.imm_data == 0x01020304 and wc.byte_len == GRH + 8
    a.send(SGE(b"from here"), **to(ah, b, flags=SendFlags.SIGNALED | SendFlags.INLINE))
    assert b.one().byte_len == GRH + 9
    assert mr[2048 + GRH : 2048 + GRH + 9] == b"from here"
    assert [wc.status for wc in a.poll(2)] == [WCStatus.SUCCESS] * 2


def test_a_datagram_needs_an_address(net: Net):
    a = net.datagrams()
    with pytest.raises(OSError, match="needs ah") as caught:
        a.send(net.mr().sge(0, 8))
    assert caught.value.errno == 22
    assert a.qp.in_flight == (0, 0)


def test_an_address_needs_a_gid_on_ethernet(net: Net):
    net.datagrams()
    with pytest.raises(OSError, match="ibv_create_ah.*no GID"):
        AH(net.pd, AHAttr(dlid=1))


def test_addresses_as_records(net: Net):
    route = GlobalRoute(net.gid.gid, sgid_index=net.gid.gid_index, hop_limit=3, traffic_class=5)
    attr = AHAttr(gr=route, port_num=1)
    assert attr.is_global and attr.global_route == route and attr.dgid == net.gid.gid
    assert AHAttr(dlid=7).global_route is None
    with pytest.raises(ValueError, match="a GID has 16"):
        AH(net.pd, AHAttr(b"short"))


def test_a_request_keeps_its_address(net: Net):
    """Forgotten while it is on its way, and closed before it is posted."""
    a, b = net.datagrams(), net.datagrams()
    mr = net.mr()
    b.receive(mr.sge(1024, 128))
    with needs("address handles"):
        ah = AH(net.pd, AHAttr(net.gid.gid, net.gid.gid_index))
    wr = SendWR(WROpcode.SEND, mr.sge(0, 4), **to(ah, b))
    del ah
    gc.collect()
    a.qp.post_send(wr)
    del wr
    gc.collect()
    with pytest.warns(ResourceWarning, match="unclosed <AH"):
        assert a.one().status == WCStatus.SUCCESS
        gc.collect()
    assert b.one().status == WCStatus.SUCCESS
    closed = net.ah()
    late = SendWR(WROpcode.SEND, mr.sge(0, 4), **to(closed, b))
    closed.close()
    with pytest.raises(ValueError, match="AH is closed"):
        a.qp.post_send(late)


def test_multicast(net: Net):
    """Each attached queue pair gets a copy; one that was detached gets none."""
    if not net.context.query_device().max_mcast_grp:
        pytest.skip("the device has no multicast")
    a, b, c = net.datagrams(), net.datagrams(), net.datagrams()
    group = ipaddress.ip_address("239.1.2.3" if net.gid.address.version == 4 else "ff15::1:2:3")
    mr = net.mr()
    for side in (b, c):
        side.qp.attach_mcast(group)
    b.receive(mr.sge(1024, 128))
    c.receive(mr.sge(2048, 128))
    with needs("address handles"):
        ah = net.keep(AH(net.pd, AHAttr(group, net.gid.gid_index)))
    mr[0:4] = b"all!"
    a.qp.post_send(SendWR(WROpcode.SEND, mr.sge(0, 4), ah=ah, remote_qpn=0xFFFFFF, remote_qkey=QKEY))
    assert a.one().status == WCStatus.SUCCESS
    if driver(net.context) == "rxe":
        for side in (b, c):
            side.qp.detach_mcast(group)
        pytest.skip("rxe does not hear its own multicasts")
    for side, at in ((b, 1024), (c, 2048)):
        assert side.one().byte_len == GRH + 4
        assert mr[at + GRH : at + GRH + 4] == b"all!"
    c.qp.detach_mcast(group)
    b.receive(mr.sge(1024, 128))
    c.receive(mr.sge(2048, 128))
    a.qp.post_send(SendWR(WROpcode.SEND, mr.sge(0, 4), ah=ah, remote_qpn=0xFFFFFF, remote_qkey=QKEY))
    a.one()
    b.one()
    assert c.quiet()
    b.qp.detach_mcast(group)
    with pytest.raises(OSError, match="ibv_detach_mcast"):
        b.qp.detach_mcast(group)


# ---- Unreliable connections ----------------------------------------------------------------------------


@pytest.fixture
def unreliable(net: Net):
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b)
    return a, b


def test_an_unreliable_connection(net: Net, unreliable):
    a, b = unreliable
    mr = net.mr()
    mr[0:4] = b"data"
    b.receive(mr.sge(1024, 64))
    a.send(mr.sge(0, 4))
    assert a.one().status == b.one().status == WCStatus.SUCCESS
    assert mr[1024:1028] == b"data"
    b.receive()
    a.send(
        mr.sge(0, 4), WROpcode.RDMA_WRITE_WITH_IMM, remote_addr=mr.address + 2048, rkey=mr.rkey, imm_data=9
    )
    wc = b.one()
    assert (wc.status, wc.imm_data, wc.opcode) == (WCStatus.SUCCESS, 9, WCOpcode.RECV_RDMA_WITH_IMM)
    assert mr[2048:2052] == b"data"
    a.one()


def test_unreliable_attributes(net: Net, unreliable):
    a, b = unreliable
    attr, init = a.qp.query()
    assert init.qp_type == QPType.UC
    assert attr.qp_state == QPState.RTS and attr.dest_qp_num == b.qp.qp_num


def test_capacities(net: Net):
    """A shared way of making them all: sizes are granted at least as asked for."""
    side = net.datagrams(max_send_wr=7, max_recv_wr=5)
    cap: QPCap = side.qp.cap
    assert cap.max_send_wr >= 7 and cap.max_recv_wr >= 5
    side.receive(net.mr(access=EVERYTHING).sge(0, 128))
    assert side.qp.in_flight == (0, 1)
    side.qp.post_recv(RecvWR(wr_id=1))


def many(pipe, device, Net, mark):
    """A process that sends datagrams of one repeated byte until it is told to end."""
    with device.open() as context:
        net = Net(context)
        side, mr = net.datagrams(), net.mr(4096)
        gid, number = pipe.recv()
        ah = net.keep(AH(net.pd, AHAttr(gid, net.gid.gid_index)))
        mr[:] = bytes([mark]) * 4096
        while not pipe.poll():
            for _ in range(8):
                side.send(mr.sge(0, 1024), ah=ah, remote_qpn=number, remote_qkey=QKEY)
            for wc in side.poll(8):
                wc.raise_for_status()
        net.close()


def test_from_many_at_once(device, net: Net, peer):
    """What two processes send at the same time may complete in any order: each completion is its own receive's."""
    receives, size = 16, 2048
    side, mr = net.datagrams(max_recv_wr=receives), net.mr(receives * size)
    posted = set(range(receives))
    for place in posted:
        side.receive(mr.sge(place * size, size), wr_id=place)
    senders = [peer(many, device, type(net), mark) for mark in (1, 2)]
    for sender in senders:
        sender.say((net.gid.gid, side.qp.qp_num))
    came = {1: 0, 2: 0}
    try:
        while min(came.values()) < 5_000:
            wc = side.one()
            wc.raise_for_status()
            assert wc.wr_id in posted
            at = wc.wr_id * size
            mark = mr[at + GRH]
            assert (
                wc.byte_len == GRH + 1024 and bytes(mr[at + GRH : at + wc.byte_len]) == bytes([mark]) * 1024
            )
            came[mark] += 1
            mr[at : at + size] = bytes(size)
            side.receive(mr.sge(at, size), wr_id=wc.wr_id)
    finally:
        for sender in senders:
            sender.say("enough")
