"""Rules of waiting: for a receive (RNR), for an answer, and how often.

Times are only ever compared in the direction in which a busy machine cannot err. docs/rules.md maps the
rules to the tests.
"""

import pytest

from rdmanet.verbs import QPState, QPType, WCStatus, WROpcode

from .conftest import Net, driver

TAKES_A_RECEIVE = pytest.mark.parametrize(
    "opcode", [WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM], ids=lambda o: o.name
)


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
@TAKES_A_RECEIVE
def test_no_receive_and_no_retry(net: Net, opcode):
    """rnr_retry 0: RNR_RETRY_EXC_ERR at once, and the queue pair is in error. The responder does not mind."""
    a, b = net.pair(rts={"rnr_retry": 0})
    mr = net.mr()
    a.send(mr.sge(0, 8), opcode, remote_addr=mr.address + 64, rkey=mr.rkey)
    assert a.one().status == WCStatus.RNR_RETRY_EXC_ERR
    a.becomes(QPState.ERR)
    assert b.qp.query()[0].qp_state == QPState.RTS
    assert b.quiet()


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_the_budget_is_spent(net: Net, budget):
    """budget + 1 tries in all; the embedded device counts them."""
    a, b = net.pair(rts={"rnr_retry": budget}, rtr={"min_rnr_timer": 14})
    before = b.qp.counters().get("rnr_naks", 0) + a.qp.counters().get("rnr_naks", 0)
    a.send(net.mr().sge(0, 8))
    assert a.one().status == WCStatus.RNR_RETRY_EXC_ERR
    if driver(net.context) == "embedded":
        after = b.qp.counters()["rnr_naks"] + a.qp.counters()["rnr_naks"]
        assert after - before == budget + 1


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_seven_is_without_limit(net: Net):
    """More tries than any budget has; a receive posted at last is taken."""
    a, b = net.pair(rts={"rnr_retry": 7}, rtr={"min_rnr_timer": 1})
    mr = net.mr()
    a.send(mr.sge(0, 8))
    assert a.quiet(0.2)
    b.receive(mr.sge(64, 8))
    assert b.one().status == a.one().status == WCStatus.SUCCESS


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
@TAKES_A_RECEIVE
def test_a_receive_within_the_budget(net: Net, opcode):
    """The wait is min_rnr_timer's: long enough here to post a receive meanwhile."""
    a, b = net.pair(rts={"rnr_retry": 2}, rtr={"min_rnr_timer": 31})
    mr = net.mr()
    mr[0:4] = b"late"
    a.send(mr.sge(0, 4), opcode, remote_addr=mr.address + 64, rkey=mr.rkey, imm_data=1)
    b.receive(mr.sge(64, 8))
    assert b.one().status == a.one().status == WCStatus.SUCCESS
    assert mr[64:68] == b"late"


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_an_answer_refills_the_budget(net: Net):
    """Three messages of which each needs the whole budget of one."""
    a, b = net.pair(rts={"rnr_retry": 1}, rtr={"min_rnr_timer": 29})
    mr = net.mr()
    for _ in range(3):
        a.send(mr.sge(0, 4))
        b.receive(mr.sge(64, 8))
        assert b.one().status == a.one().status == WCStatus.SUCCESS


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_messages_behind_wait_in_order(net: Net):
    a, b = net.pair(rts={"rnr_retry": 7}, rtr={"min_rnr_timer": 1})
    mr, there = net.mr(), net.mr()
    a.send(mr.sge(0, 8), wr_id=0)
    mr[8:12] = b"pass"
    a.send(mr.sge(8, 4), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey, wr_id=1)
    assert a.quiet()
    assert not any(bytes(there)), "a write does not pass a send that waits"
    b.receive(mr.sge(64, 8))
    assert [wc.wr_id for wc in a.poll(2)] == [0, 1]
    assert there[0:4] == b"pass"
    b.one()


# ---- No answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["closed", "error", "reset", "init"])
def test_no_answer(net: Net, where):
    """RETRY_EXC_ERR when timeout and retry_cnt are spent, and the queue pair is in error."""
    a, b = net.side(), net.side()
    a.qp.to_init()
    b.qp.to_init()
    net.to_rtr(a, b)
    a.qp.to_rts(timeout=10, retry_cnt=1)
    if where == "closed":
        b.close()
    elif where == "error":
        b.qp.to_error()
    elif where == "reset":
        b.qp.to_reset()
    a.send(net.mr().sge(0, 8))
    assert a.one(20).status == WCStatus.RETRY_EXC_ERR
    a.becomes(QPState.ERR)


def test_the_wrong_peer(net: Net):
    """A queue pair that is connected to another one does not answer a stranger."""
    a, b = net.pair()
    stranger = net.side()
    stranger.qp.to_init()
    net.to_rtr(stranger, b)
    stranger.qp.to_rts(timeout=10, retry_cnt=1)
    b.receive(net.mr(), wr_id="for a")
    if driver(net.context) == "rxe":
        # rxe looks at the numbers of packets only, and they begin alike here.
        stranger.qp.to_reset()
        stranger.qp.to_init()
        net.to_rtr(stranger, b)
        stranger.qp.to_rts(timeout=10, retry_cnt=1, sq_psn=0x700000)
    stranger.send(net.mr().sge(0, 8))
    assert stranger.one(20).status == WCStatus.RETRY_EXC_ERR
    assert b.quiet()
    a.send(net.mr().sge(0, 8))
    assert b.one().wr_id == "for a"
    a.one()


def test_timeout_zero_waits_for_ever(net: Net):
    """And the peer that comes at last is served."""
    a, b = net.side(), net.side()
    mr = net.mr()
    a.qp.to_init()
    b.qp.to_init()
    b.receive(mr.sge(64, 8))
    net.to_rtr(a, b)
    a.qp.to_rts(timeout=0, retry_cnt=1)
    a.send(mr.sge(0, 8))
    assert a.quiet(0.3)
    if driver(net.context) == "rxe":
        return  # it never tries again, either
    net.to_rtr(b, a)
    assert b.one().status == a.one().status == WCStatus.SUCCESS


def test_the_peer_comes_late(net: Net):
    """Either side may be first; what is sent meanwhile is tried again."""
    a, b = net.side(), net.side()
    mr = net.mr()
    a.qp.to_init()
    b.qp.to_init()
    b.receive(mr.sge(64, 8))
    net.to_rtr(a, b)
    a.qp.to_rts(timeout=16, retry_cnt=7)
    a.send(mr.sge(0, 8))
    net.to_rtr(b, a)
    assert b.one().status == WCStatus.SUCCESS
    assert a.one(20).status == WCStatus.SUCCESS


def test_the_unreliable_wait_for_nobody(net: Net):
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b)
    b.close()
    a.send(net.mr().sge(0, 8))
    assert a.one().status == WCStatus.SUCCESS
    assert a.qp.query()[0].qp_state == QPState.RTS


def test_packet_numbers_must_agree(net: Net):
    """sq_psn here is rq_psn there; when they are not, the peer does not answer."""
    a, b = net.side(), net.side()
    for side in (a, b):
        side.qp.to_init()
    net.to_rtr(a, b, rq_psn=0x200)
    net.to_rtr(b, a, rq_psn=0x100)
    a.qp.to_rts(sq_psn=0x700100, timeout=10, retry_cnt=1)
    b.qp.to_rts(sq_psn=0x200)
    b.receive(net.mr())
    a.send(net.mr().sge(0, 8))
    assert a.one(20).status == WCStatus.RETRY_EXC_ERR
    assert b.quiet()
