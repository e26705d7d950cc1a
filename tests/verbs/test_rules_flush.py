"""Rules of the end: what an error does to the work behind it, and what RESET, destroying and overrun do.

docs/rules.md maps the rules to the tests.
"""

import pytest

from rdmanet.verbs import (
    CQ,
    QP,
    SRQ,
    EventType,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendFlags,
    SendWR,
    SRQAttr,
    WCStatus,
    WROpcode,
)

from .conftest import Net, Side, differs, driver, needs

FLUSHED = WCStatus.WR_FLUSH_ERR
NONE = SendFlags.NONE


def receives(side: Side, net: Net, count: int) -> None:
    mr = net.mr()
    for i in range(count):
        side.receive(mr.sge(i * 8, 8), wr_id=i)


# ---- After an error ----------------------------------------------------------------------------------------


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
@pytest.mark.parametrize("opcode", [WROpcode.RDMA_WRITE, WROpcode.RDMA_READ], ids=lambda opcode: opcode.name)
def test_everything_behind_an_error_is_flushed(net: Net, pair, opcode):
    """Both queues, in order, signaled or not; and each completion says whose it is."""
    a, _ = pair
    mr = net.mr()
    receives(a, net, 3)
    wrs = [SendWR(opcode, mr.sge(0, 8), wr_id="bad", flags=NONE, remote_addr=1, rkey=1)]
    wrs += [SendWR(WROpcode.SEND, mr.sge(0, 8), wr_id=i, flags=NONE if i % 2 else 2) for i in range(5)]
    a.qp.post_send(wrs)
    found = a.poll(9)
    sends = [(wc.wr_id, wc.status) for wc in found if wc.is_send]
    assert sends == [("bad", WCStatus.REM_ACCESS_ERR), *((i, FLUSHED) for i in range(5))]
    assert [(wc.wr_id, wc.status) for wc in found if not wc.is_send] == [(i, FLUSHED) for i in range(3)]
    assert all(wc.qp is a.qp and wc.opcode is None and wc.imm_data is None for wc in found)
    assert a.qp.in_flight == (0, 0)


def test_to_error_flushes(net: Net, pair):
    a, b = pair
    receives(b, net, 3)
    b.qp.to_error()
    assert [(wc.wr_id, wc.status) for wc in b.poll(3)] == [(i, FLUSHED) for i in range(3)]
    assert b.quiet()


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_what_waits_is_flushed(net: Net):
    """A message that waits for the peer's receive, and those behind it."""
    a, _ = net.pair(rts={"rnr_retry": 7}, rtr={"min_rnr_timer": 20})
    mr = net.mr()
    for i in range(3):
        a.send(mr.sge(0, 8), wr_id=i)
    assert a.quiet()
    a.qp.to_error()
    assert [(wc.wr_id, wc.status) for wc in a.poll(3)] == [(i, FLUSHED) for i in range(3)]


@pytest.mark.not_on_siw("refuses receives in the error state")
def test_posting_in_error(net: Net, pair):
    """Accepted and flushed, sends and receives, signaled or not."""
    a, _ = pair
    mr = net.mr()
    a.qp.to_error()
    for i in range(3):
        a.receive(mr, wr_id=i)
        a.send(mr.sge(0, 8), wr_id=i, flags=NONE)
    found = a.poll(6)
    assert {wc.status for wc in found} == {FLUSHED}
    assert (
        [wc.wr_id for wc in found if wc.is_send] == [wc.wr_id for wc in found if not wc.is_send] == [0, 1, 2]
    )


def test_what_was_done_before_stays_done(net: Net, pair):
    """Completions that are in the queue are not taken back by an error."""
    a, b = pair
    mr = net.mr()
    b.receive(mr.sge(0, 8), wr_id="done")
    b.receive(mr.sge(8, 8), wr_id="waiting")
    a.send(mr.sge(64, 8), wr_id="done")
    assert a.one().status == WCStatus.SUCCESS
    b.cq.poll(0)
    first = b.one()
    b.qp.to_error()
    assert (first.wr_id, first.status) == ("done", WCStatus.SUCCESS)
    assert [(wc.wr_id, wc.status) for wc in b.poll(1)] == [("waiting", FLUSHED)]


@pytest.mark.not_on_siw("does not tell")
def test_receives_of_a_shared_queue_are_not_flushed(net: Net):
    """QP_LAST_WQE_REACHED says that no more will be taken for this queue pair."""
    with needs("shared receive queues"):
        srq = net.keep(SRQ(net.pd, SRQAttr(8, 1)))
    a, b = net.side(), net.side(srq=srq)
    net.connect(a, b)
    mr = net.mr()
    srq.post_recv([RecvWR(mr.sge(i * 8, 8), wr_id=i) for i in range(2)])
    b.qp.to_error()
    assert net.event(EventType.QP_LAST_WQE_REACHED).qp is b.qp
    assert b.quiet()
    assert srq.in_flight == 2


# ---- RESET and destroying ----------------------------------------------------------------------------------


def test_reset_forgets_silently(net: Net, by_hand, pair):
    a, b = pair
    receives(b, net, 3)
    b.qp.to_reset()
    assert b.quiet()
    assert b.qp.in_flight == (0, 0)
    a.qp.to_reset()
    net.connect(a, b)
    mr = net.mr()
    b.receive(mr.sge(0, 8), wr_id="new")
    a.send(mr.sge(64, 8))
    assert b.one().wr_id == "new"
    a.one()


def test_reset_takes_its_completions_along(net: Net, by_hand, pair):
    """What is in the queue of a queue pair that was reset does not come out any more."""
    a, b = pair
    mr = net.mr()
    for _ in range(3):
        b.receive(mr.sge(0, 8))
        a.send(mr.sge(64, 8))
    a.poll(3)
    differs(net.context, "rxe", "leaves completions where they are")
    b.qp.to_reset()
    assert b.quiet()


def test_destroying_takes_its_completions_along(net: Net):
    shared = net.side()
    a = net.side()
    net.connect(a, shared)
    mr = net.mr()
    for _ in range(3):
        shared.receive(mr.sge(0, 8))
        a.send(mr.sge(64, 8))
    a.poll(3)
    shared.qp.close()
    assert shared.cq.poll() == []
    if driver(net.context) == "embedded":
        assert shared.cq.stray == 0, "the device itself removes them"


def test_others_on_the_same_queue_are_spared(net: Net):
    """Neither an error, nor RESET, nor destroying touches a neighbour's completions."""
    a, b, c = net.side(), net.side(), net.side()
    net.connect(a, b)
    with QP(net.pd, QPInitAttr(b.cq, b.cq, QPCap(8, 8, 1, 1))) as neighbour:
        d = Side(net.pd, b.channel, b.cq, neighbour)
        net.connect(c, d)
        mr = net.mr()
        receives(b, net, 2)
        d.receive(mr.sge(0, 8), wr_id="neighbour")
        c.send(mr.sge(64, 8))
        c.one()
        b.qp.to_error()
        found = b.poll(3)
        assert [(wc.qp, wc.status) for wc in found if wc.qp is neighbour] == [(neighbour, WCStatus.SUCCESS)]
        assert [wc.wr_id for wc in found if wc.qp is b.qp] == [0, 1]
        assert neighbour.query()[0].qp_state == QPState.RTS


@pytest.mark.parametrize("kind", [QPType.UC, QPType.UD], ids=lambda kind: kind.name)
def test_unreliable_receives_are_flushed_too(net: Net, kind):
    side = net.side(qp_type=kind)
    side.qp.to_init()
    receives(side, net, 2)
    side.qp.to_error()
    assert [(wc.wr_id, wc.status) for wc in side.poll(2)] == [(i, FLUSHED) for i in range(2)]


# ---- Overrun -----------------------------------------------------------------------------------------------


def overrun(net: Net) -> tuple[Side, Side]:
    """A queue that has had one completion more than it holds."""
    differs(net.context, "rxe", "loses the completion and tells nobody")
    a, b = net.side(cqe=1, max_send_wr=64), net.side(cqe=256, max_recv_wr=64)
    net.connect(a, b)
    room = a.cq.cqe
    assert room < 60, "the device's smallest queue is too large for this test"
    mr = net.mr()
    b.qp.post_recv([RecvWR(mr.sge(0, 8)) for _ in range(room + 1)])
    for _ in range(room + 1):
        a.send(mr.sge(64, 8))
    return a, b


def test_an_overrun_is_told(net: Net):
    a, _ = overrun(net)
    event = net.event(EventType.CQ_ERR)
    assert event.cq is a.cq


@pytest.mark.not_on_siw("leaves the queue pairs as they are")
def test_an_overrun_breaks_who_uses_the_queue(net: Net):
    """Its queue pairs are in error, each with QP_FATAL, and the queue cannot be used."""
    a, _ = overrun(net)
    assert net.event(EventType.QP_FATAL).qp is a.qp
    a.becomes(QPState.ERR)
    with pytest.raises(OSError, match="ibv_poll_cq"):
        for _ in range(a.cq.cqe + 1):
            a.cq.poll(1)


def test_others_live_on_after_an_overrun(net: Net):
    overrun(net)
    a, b = net.pair()
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


# ---- Busy --------------------------------------------------------------------------------------------------


def busy(resource: object, call: str) -> None:
    with pytest.raises(OSError) as caught:
        resource.close()  # type: ignore[attr-defined]
    assert caught.value.errno == 16, call
    assert not resource.closed  # type: ignore[attr-defined]


def test_a_domain_with_children_is_busy(net: Net):
    from rdmanet.verbs import AH, MW, PD, AHAttr, MWType

    def with_qp(pd: PD):
        cq = net.keep(CQ(net.context, 4))
        return QP(pd, QPInitAttr(cq, cq))

    makers = {
        "MR": lambda pd: pd.alloc_mr(64),
        "QP": with_qp,
        "SRQ": lambda pd: SRQ(pd, SRQAttr(4, 1)),
        "AH": lambda pd: AH(pd, AHAttr(net.gid.gid, net.gid.gid_index)),
        "MW": lambda pd: MW(pd, MWType.TYPE_1),
    }
    tried = 0
    for name, make in makers.items():
        with PD(net.context) as pd:
            try:
                child = make(pd)
            except OSError as exc:
                assert exc.errno in (95, 38), name
                continue
            with child:
                busy(pd, name)
            tried += 1
    assert tried >= 2


def test_a_completion_queue_with_users_is_busy(net: Net, pair):
    busy(pair[0].cq, "ibv_destroy_cq")


def test_a_channel_with_queues_is_busy(net: Net, pair):
    busy(pair[0].channel, "ibv_destroy_comp_channel")


def test_a_shared_queue_with_users_is_busy(net: Net):
    with needs("shared receive queues"):
        srq = net.keep(SRQ(net.pd, SRQAttr(4, 1)))
    net.side(srq=srq)
    busy(srq, "ibv_destroy_srq")


def test_a_member_of_a_group_is_busy(net: Net):
    """A queue pair has to leave its groups first."""
    if not net.context.query_device().max_mcast_grp:
        pytest.skip("the device has no multicast")
    side = net.datagrams()
    group = bytes.fromhex("00000000000000000000ffffef010204")
    side.qp.attach_mcast(group)
    busy(side.qp, "ibv_destroy_qp")
    side.qp.detach_mcast(group)
    side.qp.close()
