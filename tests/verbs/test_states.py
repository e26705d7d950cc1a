"""The state machine of a queue pair, and which attributes each step takes."""

import contextlib
import errno

import pytest

from rdmanet.verbs import (
    CQ,
    MTU,
    QP,
    AccessFlags,
    AHAttr,
    EventType,
    ModifyQPError,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPState,
    RecvWR,
    SendWR,
    WCStatus,
    WROpcode,
)

R, I, RTR, RTS, SQD, ERR = (  # noqa: E741
    QPState.RESET,
    QPState.INIT,
    QPState.RTR,
    QPState.RTS,
    QPState.SQD,
    QPState.ERR,
)


def steps(net, side):
    """What each step up needs."""
    return {
        I: {"port_num": 1, "pkey_index": 0, "qp_access_flags": AccessFlags(0)},
        RTR: {
            "ah_attr": AHAttr(dgid=net.gid.gid, sgid_index=net.gid.gid_index),
            "path_mtu": MTU.MTU_1024,
            "dest_qp_num": side.qp.qp_num,
            "rq_psn": 0,
            "max_dest_rd_atomic": 1,
            "min_rnr_timer": 12,
        },
        RTS: {"sq_psn": 0, "timeout": 14, "retry_cnt": 7, "rnr_retry": 7, "max_rd_atomic": 1},
    }


def bring_to(net, side, state):
    """Up to state, from wherever below it."""
    needs = steps(net, side)
    for step in (I, RTR, RTS):
        if side.qp.state < step <= state:
            side.qp.modify(QPAttr(qp_state=step, **needs[step]))
    if state in (SQD, ERR):
        side.qp.modify(QPAttr(qp_state=state))


def test_up_and_down(net, by_hand):
    side = net.side()
    assert side.qp.state == R
    for state in (I, RTR, RTS):
        bring_to(net, side, state)
        assert side.qp.state == side.qp.query()[0].qp_state == state
    side.qp.to_error()
    assert side.qp.state == side.qp.query()[0].qp_state == ERR
    side.qp.to_reset()
    assert side.qp.state == R
    bring_to(net, side, RTS)


@pytest.mark.parametrize("step", [I, RTR, RTS], ids=lambda state: state.name)
def test_every_required_attribute_is_required(net, by_hand, step):
    """Without any one of them the device refuses, the message names it, and nothing changes."""
    side = net.side()
    before = QPState(step - 1)
    bring_to(net, side, before)
    needs = steps(net, side)[step]
    for name in needs:
        rest = {key: value for key, value in needs.items() if key != name}
        with pytest.raises(
            OSError, match=f"{before.name} to {step.name} was refused; missing: {name}"
        ) as caught:
            side.qp.modify(QPAttr(qp_state=step, **rest))
        assert caught.value.errno == 22
        assert side.qp.query()[0].qp_state == before
    side.qp.modify(QPAttr(qp_state=step, **needs))


@pytest.mark.parametrize(
    ("state", "step", "extra"),
    [
        (R, I, {"dest_qp_num": 1}),
        (R, I, {"sq_psn": 1}),
        (I, RTR, {"timeout": 14}),
        (I, RTR, {"sq_psn": 0}),
        (RTR, RTS, {"path_mtu": MTU.MTU_512}),
        (RTR, RTS, {"rq_psn": 0}),
    ],
    ids=lambda value: value.name if isinstance(value, QPState) else "-".join(value),
)
def test_what_is_not_allowed(net, by_hand, state, step, extra):
    side = net.side()
    bring_to(net, side, state)
    with pytest.raises(OSError, match=f"not allowed: {next(iter(extra))}"):
        side.qp.modify(QPAttr(qp_state=step, **steps(net, side)[step], **extra))
    assert side.qp.state == state


WAYS = {R: {I}, I: {I, RTR}, RTR: {RTS}, RTS: {RTS, SQD}, SQD: {RTS, SQD}, ERR: set()}


@pytest.mark.parametrize("state", WAYS, ids=lambda state: state.name)
def test_there_are_no_other_ways(net, by_hand, state):
    """From each state, each step that is not in the table is refused; RESET is always open."""
    side = net.side()
    bring_to(net, side, state)
    if side.qp.query()[0].qp_state != state:
        pytest.skip(f"the device does not stay in {state.name}")
    needs = steps(net, side)
    for step in set(WAYS) - WAYS[state] - {R, ERR}:
        with pytest.raises(OSError, match=f"no transition from {state.name} to {step.name}, only to"):
            side.qp.modify(QPAttr(qp_state=step, **needs.get(step, {})))
        assert side.qp.state == state
    side.qp.to_reset()
    assert side.qp.state == R


def test_optional_attributes(net, by_hand):
    side = net.side()
    bring_to(net, side, I)
    side.qp.modify(QPAttr(qp_state=I, qp_access_flags=AccessFlags.REMOTE_READ))
    assert side.qp.query()[0].qp_access_flags & AccessFlags.REMOTE_READ
    needs = steps(net, side)
    side.qp.modify(QPAttr(qp_state=RTR, **needs[RTR], qp_access_flags=AccessFlags.REMOTE_WRITE))
    assert side.qp.query()[0].qp_access_flags & AccessFlags.REMOTE_WRITE
    side.qp.modify(QPAttr(qp_state=RTS, **needs[RTS], min_rnr_timer=5))
    side.qp.modify(QPAttr(qp_state=RTS, min_rnr_timer=6, qp_access_flags=AccessFlags.REMOTE_READ))
    attr, init = side.qp.query()
    assert attr.min_rnr_timer == 6
    assert attr.qp_access_flags & AccessFlags.REMOTE_READ


def test_query_tells_what_was_set(net, by_hand):
    a, b = net.side(), net.side()
    net.connect(
        a,
        b,
        access=AccessFlags.REMOTE_READ,
        rtr={"rq_psn": 0x123456, "max_dest_rd_atomic": 4, "min_rnr_timer": 9},
        rts={"sq_psn": 0x654321, "timeout": 13, "retry_cnt": 5, "rnr_retry": 2, "max_rd_atomic": 2},
    )
    attr, init = a.qp.query()
    assert attr.qp_state == RTS
    assert attr.dest_qp_num == b.qp.qp_num
    assert (attr.rq_psn, attr.sq_psn) == (0x123456, 0x654321)
    assert (attr.max_dest_rd_atomic, attr.max_rd_atomic) == (4, 2)
    assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (13, 5, 2, 9)
    assert attr.ah_attr.dgid == net.gid.gid
    assert attr.ah_attr.sgid_index == net.gid.gid_index
    assert attr.path_mtu == MTU.MTU_1024
    assert attr.qp_access_flags & ~AccessFlags.LOCAL_WRITE == AccessFlags.REMOTE_READ
    assert init.cap.max_send_wr >= 16
    assert init.send_cq is a.cq


def test_capacities_are_at_least_what_was_asked(net):
    side = net.side(max_send_wr=3, max_recv_wr=5, max_send_sge=2, max_recv_sge=3, max_inline_data=17)
    cap = side.qp.cap
    assert cap.max_send_wr >= 3 and cap.max_recv_wr >= 5
    assert cap.max_send_sge >= 2 and cap.max_recv_sge >= 3
    assert cap.max_inline_data >= 17


def test_too_much_is_refused(net):
    limits = net.context.query_device()
    with CQ(net.context, 4) as cq:
        for name, most in (("max_send_wr", limits.max_qp_wr), ("max_send_sge", limits.max_sge)):
            with pytest.raises(OSError, match="ibv_create_qp"):
                QP(net.pd, QPInitAttr(cq, cq, QPCap(**{name: most + 1})))


def test_a_wrong_address_is_named(net):
    side = net.side()
    bring_to(net, side, I)
    with pytest.raises(OSError, match="GID index 200 of port 1.*gid_table"):
        side.qp.to_rtr(side.qp.qp_num, net.gid.gid, sgid_index=200)


def test_posting_needs_a_state(net, by_hand):
    """Receives from INIT on, sends from RTS on."""
    side = net.side()
    mr = net.mr()
    with pytest.raises(OSError, match="ibv_post_recv"):
        side.receive(mr)
    bring_to(net, side, I)
    side.receive(mr)
    for state in (I, RTR):
        bring_to(net, side, state)
        with pytest.raises(OSError, match="ibv_post_send") as caught:
            side.send(mr)
        assert caught.value.errno == 22
    assert side.qp.in_flight == (0, 1)


def test_too_many_receives(net, by_hand):
    side = net.side(max_recv_wr=4)
    bring_to(net, side, I)
    depth = side.qp.cap.max_recv_wr
    wrs = [RecvWR(wr_id=i) for i in range(depth + 2)]
    with pytest.raises(OSError, match=f"{depth} of {depth + 2} were posted") as caught:
        side.qp.post_recv(wrs)
    assert caught.value.errno == 12
    assert side.qp.in_flight == (0, depth)


def test_too_many_elements(net, by_hand):
    side = net.side(max_send_sge=2, max_recv_sge=2)
    bring_to(net, side, RTS)
    mr = net.mr()
    sends, receives = side.qp.cap.max_send_sge, side.qp.cap.max_recv_sge
    with pytest.raises(OSError, match="ibv_post_recv"):
        side.receive([mr.sge(0, 1)] * (receives + 1))
    with pytest.raises(OSError, match="ibv_post_send"):
        side.send([mr.sge(0, 1)] * (sends + 1))


@pytest.mark.not_on_siw("does not count elements when posting")
def test_a_chain_stops_at_the_wrong_request(net, pair):
    """What comes before it is posted, and does its work."""
    a, b = pair
    mr = net.mr()
    b.receive(mr)
    good = SendWR(WROpcode.SEND, mr.sge(0, 4), wr_id="good")
    bad = SendWR(WROpcode.SEND, [mr.sge(0, 1)] * (a.qp.cap.max_send_sge + 1))
    with pytest.raises(OSError, match="1 of 3 were posted"):
        a.qp.post_send([good, bad, good])
    assert a.one().wr_id == "good"
    assert b.one().byte_len == 4
    assert a.qp.in_flight == (0, 0)


def test_error_flushes_in_order(net, pair):
    a, b = pair
    for i in range(3):
        b.receive(net.mr(), wr_id=i)
    b.qp.to_error()
    flushed = b.poll(3)
    assert [(wc.wr_id, wc.status) for wc in flushed] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]
    assert b.qp.in_flight == (0, 0)


@pytest.mark.not_on_siw("refuses receives in the error state")
def test_posting_in_error_is_flushed(net, pair):
    """Accepted, and completed as flushed, signaled or not."""
    a, _ = pair
    mr = net.mr()
    a.qp.to_error()
    a.receive(mr, wr_id="receive")
    a.send(mr, wr_id="send", flags=0)
    found = {wc.wr_id: wc.status for wc in a.poll(2)}
    assert found == {"receive": WCStatus.WR_FLUSH_ERR, "send": WCStatus.WR_FLUSH_ERR}


def test_reset_forgets(net, by_hand, pair):
    a, b = pair
    mr = net.mr()
    b.receive(mr)
    b.qp.to_reset()
    assert b.quiet()
    assert b.qp.in_flight == (0, 0)
    # And serves again.
    a.qp.to_reset()
    net.connect(a, b)
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def test_drained(net, by_hand, pair):
    """SQD: what is posted goes nowhere until RTS."""
    a, b = pair
    mr = net.mr()
    a.qp.modify(QPAttr(qp_state=SQD))
    if not net.context.library.embedded_device:
        pytest.skip("rxe does not go on after draining")
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8))
    assert b.quiet(), "sent while draining"
    a.qp.modify(QPAttr(qp_state=RTS))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def test_the_first_message_is_told(net, by_hand, eventually):
    """COMM_EST: something has come while we were still at RTR."""
    if not net.context.library.embedded_device:
        pytest.skip("rxe does not tell")
    a, b = net.side(), net.side()
    a.qp.to_init()
    b.qp.to_init()
    net.to_rtr(a, b)
    net.to_rtr(b, a)
    a.qp.to_rts()
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8))
    assert b.one().status == WCStatus.SUCCESS
    assert a.one().status == WCStatus.SUCCESS
    found = []

    def told():
        if (event := net.context.get_async_event()) is not None:
            found.append((event.event_type, event.qp))
        return (EventType.COMM_EST, b.qp) in found

    eventually(told)


def test_drained_is_told(net, by_hand, pair, eventually):
    """SQ_DRAINED, where it was asked for."""
    if not net.context.library.embedded_device:
        pytest.skip("rxe does not go on after draining")
    a, _ = pair
    a.qp.modify(QPAttr(qp_state=SQD, en_sqd_async_notify=True))
    found = []

    def told():
        if (event := net.context.get_async_event()) is not None:
            found.append((event.event_type, event.qp))
        return (EventType.SQ_DRAINED, a.qp) in found

    eventually(told)


# ---- Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, values, said",
    [
        ("to_rtr", {"path_mtu": 1024}, "path_mtu 1024 is not an MTU such as MTU.MTU_1024"),
        ("to_rtr", {"max_dest_rd_atomic": 255}, "max_dest_rd_atomic 255 is more than"),
        ("to_rts", {"timeout": 32}, "timeout 32 is more than 31"),
        ("to_rts", {"retry_cnt": 8}, "retry_cnt 8 is more than 7"),
        ("to_rts", {"rnr_retry": 8}, "rnr_retry 8 is more than 7"),
        ("to_rts", {"max_rd_atomic": 255}, "max_rd_atomic 255 is more than"),
    ],
    ids=str,
)
@pytest.mark.embedded_only("devices of the kernel take some of these, and make of them what they like")
def test_a_wrong_value_is_named(net, step, values, said):
    qp = net.side().qp
    qp.to_init()
    with pytest.raises(ModifyQPError, match=said):
        qp.to_rtr(
            qp.qp_num, net.gid.gid, sgid_index=net.gid.gid_index, **(values if step == "to_rtr" else {})
        )
        qp.to_rts(**values)


@pytest.mark.embedded_only("drivers of the kernel tell what they were given, and cut it off in the adapter")
@pytest.mark.parametrize("given, taken", [(31, 31), (32, 0), (33, 1), (255, 31)])
def test_a_timer_of_more_than_five_bits_is_cut_off(net, given, taken):
    """As adapters do: programs give 32, and mean the longest wait."""
    qp = net.side().qp
    qp.to_init()
    qp.to_rtr(qp.qp_num, net.gid.gid, sgid_index=net.gid.gid_index, min_rnr_timer=given)
    assert qp.query()[0].min_rnr_timer == taken


def test_why_a_queue_pair_cannot_be_made(net):
    cq = net.side().cq
    most = net.context.query_device()
    for init_attr, said in (
        (QPInitAttr(), "it has no send_cq"),
        (QPInitAttr(cq), "it has no recv_cq"),
        (QPInitAttr(cq, cq, QPCap(max_send_wr=2**30)), f"max_send_wr {2**30} is more than {most.max_qp_wr}"),
        (QPInitAttr(cq, cq, QPCap(max_recv_sge=2**20)), f"max_recv_sge {2**20} is more than {most.max_sge}"),
    ):
        with pytest.raises(OSError, match=said):
            QP(net.pd, init_attr)


@pytest.mark.embedded_only("a device of the kernel has as many as its adapter")
def test_more_queue_pairs_than_there_can_be(net):
    cq = net.side().cq
    init_attr = QPInitAttr(cq, cq, QPCap(1, 1))
    with contextlib.ExitStack() as stack, pytest.raises(OSError, match="16384 queue pairs .*log") as caught:
        while True:
            stack.enter_context(QP(net.pd, init_attr))
    assert caught.value.errno == errno.ENOMEM


def test_attributes_as_keywords(by_hand, net):
    qp = net.side().qp
    qp.modify(qp_state=QPState.INIT, port_num=1, pkey_index=0, qp_access_flags=0)
    assert qp.state == QPState.INIT
    with pytest.raises(ModifyQPError, match="dest_qp_num"):
        qp.modify(qp_state=QPState.RTR)
    for wrong in (lambda: qp.modify(), lambda: qp.modify(None), lambda: qp.modify(QPState.RTR),
                  lambda: qp.modify(QPAttr(), qp_state=QPState.RTR), lambda: qp.modify(state=QPState.RTR)):  # fmt: skip
        with pytest.raises(TypeError):
            wrong()
    assert qp.state == QPState.INIT
