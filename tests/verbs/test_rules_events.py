"""Rules of events: one an arming, what is solicited, and what a device tells without being asked.

docs/rules.md maps the rules to the tests.
"""

import errno
import time

import pytest

from rdmanet.verbs import EventType, QPAttr, QPState, SendFlags, WCStatus, WROpcode

from .conftest import Net, Side, differs

SOLICITED = SendFlags.SIGNALED | SendFlags.SOLICITED


def message(a: Side, b: Side, net: Net, flags: int = SendFlags.SIGNALED) -> None:
    """One message, whose sender has heard that it has arrived."""
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8), flags=flags)
    assert a.one().status == WCStatus.SUCCESS


def test_nothing_without_arming(net: Net, pair):
    a, b = pair
    message(a, b, net)
    b.one()
    assert not b.wait_event(0.05)


def test_one_event_for_one_arming(net: Net, pair):
    a, b = pair
    b.cq.req_notify()
    b.cq.req_notify()
    message(a, b, net)
    assert b.wait_event()
    message(a, b, net)
    b.poll(2)
    assert not b.wait_event(0.05)


def test_what_is_there_already_gives_no_event(net: Net, pair):
    """Only a completion that comes after arming fires: hence arm, poll, wait."""
    a, b = pair
    message(a, b, net)
    message(a, b, net)
    b.pending += b.poll(1)  # the second is there, and not polled: the sender has heard of both
    b.cq.req_notify()
    assert not b.wait_event(0.05)
    b.poll(2)
    message(a, b, net)
    assert b.wait_event()
    b.one()


def test_a_moderated_event_waits(net: Net, pair):
    """With too few completions it comes with the period, and not before; with enough of them, at once."""
    a, b = pair
    if not net.context.query_device().max_cq_count:
        with pytest.raises(OSError) as caught:
            b.cq.modify(2, 1000)
        assert caught.value.errno == errno.EOPNOTSUPP
        return
    period_s = 0.02
    b.cq.modify(3, int(period_s * 1e6))
    for messages in (1, 2, 5):
        b.cq.req_notify()
        began = time.monotonic()
        for _ in range(messages):
            message(a, b, net)
        assert b.wait_event()
        assert messages >= 3 or time.monotonic() - began >= period_s
        assert not b.wait_event(2 * period_s)  # one an arming
        b.poll(messages)
    b.cq.modify(0, 0)
    b.cq.req_notify()
    message(a, b, net)
    assert b.wait_event()
    b.one()


WITH_IMM = pytest.mark.not_on_iwarp("has no immediate data")


@pytest.mark.not_on_siw("does not fire for solicited messages")
@pytest.mark.parametrize(
    "opcode",
    [
        WROpcode.SEND,
        pytest.param(WROpcode.SEND_WITH_IMM, marks=WITH_IMM),
        pytest.param(WROpcode.RDMA_WRITE_WITH_IMM, marks=WITH_IMM),
    ],
    ids=lambda opcode: opcode.name,
)
def test_solicited(net: Net, pair, opcode):
    """Armed for solicited ones, plain messages do not fire, and solicited ones do."""
    a, b = pair
    mr = net.mr()
    b.cq.req_notify(solicited_only=True)
    for flags, fires in ((SendFlags.SIGNALED, False), (SOLICITED, True)):
        b.receive(mr.sge(0, 8))
        a.send(mr.sge(64, 8), opcode, flags=flags, remote_addr=mr.address + 128, rkey=mr.rkey)
        a.one()
        assert b.wait_event(5 if fires else 0.05) == fires
        b.one()


@pytest.mark.not_on_siw("does not fire for solicited messages")
def test_an_error_is_solicited(net: Net, pair):
    differs(net.context, "rxe", "fires for solicited messages only")
    _, b = pair
    b.receive(net.mr())
    b.cq.req_notify(solicited_only=True)
    b.qp.to_error()
    assert b.wait_event()
    assert b.one().status == WCStatus.WR_FLUSH_ERR


def test_any_overrides_solicited(net: Net, pair):
    a, b = pair
    b.cq.req_notify(solicited_only=True)
    b.cq.req_notify()
    message(a, b, net)
    assert b.wait_event()
    b.one()


@pytest.mark.not_on_siw("does not fire for solicited messages")
def test_solicited_does_not_override_any(net: Net, pair):
    a, b = pair
    b.cq.req_notify()
    b.cq.req_notify(solicited_only=True)
    message(a, b, net)
    assert b.wait_event()
    b.one()


def test_the_sender_is_told_as_well(net: Net, pair):
    a, b = pair
    a.cq.req_notify()
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    assert a.wait_event()
    a.one()
    b.one()


def test_events_of_a_destroyed_queue_are_gone(net: Net, pair):
    a, b = pair
    b.cq.req_notify()
    message(a, b, net)
    b.qp.close()
    b.cq.close()
    assert b.channel.get_cq_event() is None


def test_acknowledging_is_counted(net: Net, pair):
    a, b = pair
    for _ in range(3):
        b.cq.req_notify()
        message(a, b, net)
        while b.channel.get_cq_event() is None:
            pass
        b.one()
    with pytest.raises(ValueError, match="3 events"):
        b.cq.ack_events(4)
    b.cq.ack_events(2)  # and closing does the last: destroying would wait for it for ever


def test_a_channel_of_many(net: Net):
    """Each event names its queue."""
    from rdmanet.verbs import CQ, QP, QPCap, QPInitAttr

    a, b = net.pair()
    other = net.keep(CQ(net.context, 8, b.channel))
    qp = net.keep(QP(net.pd, QPInitAttr(other, other, QPCap(4, 4, 1, 1))))
    d = Side(net.pd, b.channel, other, qp)
    c = net.side()
    net.connect(c, d)
    for x, y in ((c, d), (a, b)):
        y.cq.req_notify()
        message(x, y, net)
        assert y.wait_event()
        y.one()


# ---- Of the device ---------------------------------------------------------------------------------------------


def test_the_first_message_before_rts(net: Net):
    """COMM_EST: a queue pair at RTR has heard from its peer."""
    differs(net.context, "rxe", "does not tell")
    a, b = net.side(), net.side()
    for side in (a, b):
        side.qp.to_init()
    net.to_rtr(a, b)
    net.to_rtr(b, a)
    a.qp.to_rts()
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    assert net.event(EventType.COMM_EST).qp is b.qp
    assert b.qp.query()[0].qp_state == QPState.RTR
    a.one()
    b.one()


def test_drained(net: Net, by_hand, pair):
    """SQ_DRAINED where it was asked for; nothing is sent until RTS."""
    differs(net.context, "rxe", "does not stay in SQD")
    a, b = pair
    mr = net.mr()
    a.qp.modify(QPAttr(qp_state=QPState.SQD, en_sqd_async_notify=True))
    assert net.event(EventType.SQ_DRAINED).qp is a.qp
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    assert b.quiet() and a.quiet()
    a.qp.modify(QPAttr(qp_state=QPState.RTS))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def test_drained_without_asking(net: Net, by_hand, pair):
    differs(net.context, "rxe", "does not stay in SQD")
    a, _ = pair
    a.qp.modify(QPAttr(qp_state=QPState.SQD))
    assert a.quiet(0.05)
    assert net.context.get_async_event() is None


def test_no_event_is_none(net: Net):
    assert net.context.get_async_event() is None
