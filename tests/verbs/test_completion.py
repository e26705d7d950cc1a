"""Arming, events, acknowledgement, and queues that are too small."""

import gc

import pytest

from rdmanet.verbs import CQ, CompChannel, EventType, QPState, RecvWR, SendFlags, SendWR, WCStatus, WROpcode

from .conftest import differs, needs


def message(a, b, mr, flags=SendFlags.SIGNALED):
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8), flags=flags)
    assert a.one().status == WCStatus.SUCCESS


def test_no_event_without_arming(net, pair):
    a, b = pair
    message(a, b, net.mr())
    assert not b.wait_event(0.05)
    assert b.channel.get_cq_event() is None
    b.one()


def test_one_event_for_one_arming(net, pair):
    a, b = pair
    mr = net.mr()
    b.cq.req_notify()
    message(a, b, mr)
    message(a, b, mr)
    assert b.wait_event()
    assert not b.wait_event(0.05), "armed once, fired twice"
    b.poll(2)
    b.cq.req_notify()
    message(a, b, mr)
    assert b.wait_event()
    b.one()


def test_arm_poll_wait_misses_nothing(net, pair):
    """The rule: arm, poll what came before, then wait."""
    a, b = pair
    mr = net.mr()
    for _ in range(200):
        b.cq.req_notify()
        assert b.cq.poll() == []
        message(a, b, mr)
        assert b.wait_event(), "a wake-up was lost"
        assert b.one().status == WCStatus.SUCCESS


def test_the_sender_is_woken_too(net, pair):
    a, b = pair
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.cq.req_notify()
    a.send(mr.sge(8, 8))
    assert a.wait_event()
    a.one(), b.one()


@pytest.mark.not_on_siw("does not fire for solicited messages")
def test_solicited_only(net, pair):
    """A plain message does not fire, a solicited one does."""
    a, b = pair
    mr = net.mr()
    b.cq.req_notify(solicited_only=True)
    message(a, b, mr)
    assert not b.wait_event(0.05)
    message(a, b, mr, SendFlags.SIGNALED | SendFlags.SOLICITED)
    assert b.wait_event()
    b.poll(2)


def test_an_error_is_solicited(net, pair):
    differs(net.context, "rxe", "fires for solicited messages only")
    differs(net.context, "siw", "does not fire for solicited messages")
    a, b = pair
    b.receive(net.mr())
    b.cq.req_notify(solicited_only=True)
    b.qp.to_error()
    assert b.wait_event()
    assert b.one().status == WCStatus.WR_FLUSH_ERR


@pytest.mark.not_on_siw("does not fire for solicited messages")
def test_any_overrides_solicited_and_not_the_reverse(net, pair):
    a, b = pair
    b.cq.req_notify()
    b.cq.req_notify(solicited_only=True)
    message(a, b, net.mr())
    assert b.wait_event()
    b.one()


def test_one_channel_for_many_queues(net):
    a, b = net.side(), net.side()
    net.connect(a, b)
    channel = CompChannel(net.context)
    first, second = CQ(net.context, 4, channel), CQ(net.context, 4, channel)
    with pytest.raises(OSError) as caught:
        channel.close()
    assert caught.value.errno == 16, "a channel in use is busy"
    first.close()
    second.close()
    channel.close()


def test_events_are_acknowledged_in_batches(net, pair):
    a, b = pair
    mr = net.mr()
    for _ in range(5):
        b.cq.req_notify()
        message(a, b, mr)
        while b.channel.get_cq_event() is None:
            pass
        b.one()
    b.cq.ack_events(3)
    with pytest.raises(ValueError, match="2 events"):
        b.cq.ack_events(3)
    # The other two are acknowledged by closing: it must not wait for ever.


def test_closing_a_queue_with_an_event_not_read(net, pair):
    """The event goes with its queue."""
    a, b = pair
    b.cq.req_notify()
    message(a, b, net.mr())
    b.qp.close()
    b.cq.close()
    assert b.channel.get_cq_event() is None


def test_a_queue_in_use_is_busy(net, pair):
    a, _ = pair
    with pytest.raises(OSError) as caught:
        a.cq.close()
    assert caught.value.errno == 16
    assert not a.cq.closed


def test_poll_takes_what_is_asked_for(net, pair):
    a, b = pair
    mr = net.mr()
    for _ in range(5):
        message(a, b, mr)
    assert len(b.cq.poll(2)) == 2
    assert len(b.cq.poll(100)) == 3
    assert b.cq.poll() == []


def test_many_completions_at_once(net):
    a, b = net.side(cqe=512, max_send_wr=200), net.side(cqe=512, max_recv_wr=200)
    net.connect(a, b)
    mr = net.mr()
    b.qp.post_recv([RecvWR(mr.sge(0, 8), wr_id=i) for i in range(200)])
    a.qp.post_send([SendWR(WROpcode.SEND, mr.sge(8, 8), wr_id=i) for i in range(200)])
    assert [wc.wr_id for wc in b.poll(200)] == list(range(200))
    assert [wc.wr_id for wc in a.poll(200)] == list(range(200))


def test_completions_of_a_closed_queue_pair_are_dropped(net):
    """Whatever the device does with them: nothing of a queue pair that is gone comes out of poll()."""
    shared = net.side(cqe=64)
    a = net.side()
    net.connect(a, shared)
    mr = net.mr()
    for _ in range(3):
        message(a, shared, mr)
    shared.qp.close()
    assert shared.cq.poll() == []


@pytest.mark.not_on_siw("leaves the queue pairs as they are")
def test_overrun(net, eventually):
    """A completion that finds no room breaks the queue, and all its users are told."""
    differs(net.context, "rxe", "loses the completion and tells nobody")
    a = net.side(cqe=1, max_send_wr=16)
    b = net.side(cqe=64)
    net.connect(a, b)
    mr = net.mr()
    b.qp.post_recv([RecvWR(mr.sge(0, 8)) for _ in range(16)])
    room = a.cq.cqe
    for _ in range(min(room + 1, 16)):
        a.send(mr.sge(8, 8))
    if room >= 16:
        pytest.skip(f"the smallest queue has {room} entries")
    kinds = []

    def told():
        while (event := net.context.get_async_event()) is not None:
            kinds.append((event.event_type, event.cq or event.qp))
        return (EventType.CQ_ERR, a.cq) in kinds

    eventually(told)
    eventually(lambda: a.qp.query()[0].qp_state == QPState.ERR)


def test_resize(net, pair):
    a, b = pair
    with needs("ibv_resize_cq"):
        b.cq.resize(500)
    assert b.cq.cqe >= 500
    message(a, b, net.mr())
    b.one()


def test_garbage_does_not_keep_a_queue(net):
    """A CQ knows its queue pairs, and they it, without keeping each other alive."""
    side = net.side()
    del side
    last = net.sides.pop()
    last.qp.close()
    cq = last.cq
    last.cq = last.qp = None
    with pytest.warns(ResourceWarning, match="unclosed <CQ"):
        del cq
        gc.collect()
    last.channel.close()
