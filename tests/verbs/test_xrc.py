"""Reliable connections to a whole process: XRC domains, their shared receive queues, and numbers."""

import os

import pytest

from rdmanet.verbs import (
    CQ,
    QP,
    SRQ,
    XRCD,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    SRQAttr,
    SRQInitAttr,
    SRQType,
    WCStatus,
    WROpcode,
)

from .conftest import EVERYTHING, Net, needs


class Xrc:
    """A sender, a target, and shared queues in one domain."""

    def __init__(self, net: Net) -> None:
        self.net = net
        with needs("XRC domains"):
            self.xrcd = net.keep(XRCD(net.context))
        self.send_cq = net.keep(CQ(net.context, 64))
        self.recv_cq = net.keep(CQ(net.context, 64))
        self.sender = net.keep(
            QP(net.pd, QPInitAttr(self.send_cq, None, QPCap(max_recv_wr=0), QPType.XRC_SEND))
        )
        self.target = net.keep(QP(net.pd, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=self.xrcd)))
        for qp, other in ((self.sender, self.target), (self.target, self.sender)):
            qp.to_init(access=EVERYTHING)
            qp.to_rtr(other.qp_num, net.gid.gid, sgid_index=net.gid.gid_index)
            qp.to_rts()

    def srq(self) -> SRQ:
        attr = SRQInitAttr(SRQAttr(16, 1), SRQType.XRC, self.xrcd, self.recv_cq)
        return self.net.keep(SRQ(self.net.pd, attr))


@pytest.fixture
def xrc(net: Net) -> Xrc:
    return Xrc(net)


def test_the_sender_names_the_queue(net: Net, xrc: Xrc, eventually):
    first, second = xrc.srq(), xrc.srq()
    assert first.srq_num != second.srq_num
    mr = net.mr()
    for i, srq in enumerate((first, second)):
        srq.post_recv(RecvWR(mr.sge(1024 * (i + 1), 64), wr_id=f"queue {i}"))
    mr[0:3] = b"xrc"
    xrc.sender.post_send(SendWR(WROpcode.SEND, mr.sge(0, 3), remote_srqn=second.srq_num))
    found: list = []
    eventually(lambda: found.extend(xrc.send_cq.poll()) or found)
    assert found[0].status == WCStatus.SUCCESS
    found.clear()
    eventually(lambda: found.extend(xrc.recv_cq.poll()) or found)
    assert (found[0].status, found[0].wr_id, found[0].srq) == (WCStatus.SUCCESS, "queue 1", second)
    assert mr[2048:2051] == b"xrc"
    assert (first.in_flight, second.in_flight) == (1, 0)


def test_an_unknown_number(net: Net, xrc: Xrc, eventually):
    srq = xrc.srq()
    xrc.sender.post_send(SendWR(WROpcode.SEND, net.mr().sge(0, 3), remote_srqn=srq.srq_num + 1000))
    found: list = []
    eventually(lambda: found.extend(xrc.send_cq.poll()) or found)
    assert found[0].status == WCStatus.REM_INV_REQ_ERR


def test_a_domain_in_use(net: Net, xrc: Xrc):
    xrc.srq()
    with pytest.raises(OSError, match="ibv_close_xrcd") as caught:
        xrc.xrcd.close()
    assert caught.value.errno == 16


def test_a_domain_of_a_file(net: Net, tmp_path):
    fd = os.open(tmp_path / "domain", os.O_RDONLY | os.O_CREAT)
    try:
        with needs("XRC domains"), XRCD(net.context, fd) as xrcd, XRCD(net.context, fd, 0) as same:
            assert not xrcd.closed and not same.closed
    finally:
        os.close(fd)


def test_sharing_a_target(net: Net, xrc: Xrc):
    with QP.open(net.pd, xrc.xrcd, xrc.target.qp_num) as shared:
        assert shared.qp_num == xrc.target.qp_num
        assert shared.query()[0].qp_state == QPState.RTS
    with pytest.raises(OSError, match="ibv_open_qp"):
        QP.open(net.pd, xrc.xrcd, 0xABCDEF)
