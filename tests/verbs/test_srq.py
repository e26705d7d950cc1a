"""Shared receive queues."""

import gc

import pytest

from rdmanet.verbs import SRQ, EventType, RecvWR, SRQAttr, SRQInitAttr, WCStatus, WROpcode

from .conftest import Net, Side, needs


@pytest.fixture
def srq(net: Net) -> SRQ:
    with needs("shared receive queues"):
        return net.keep(SRQ(net.pd, SRQInitAttr(SRQAttr(max_wr=16, max_sge=2))))


def sharers(net: Net, srq: SRQ, count: int = 2) -> list[tuple[Side, Side]]:
    """Connections (sender, receiver), whose receivers share the queue."""
    pairs = []
    for _ in range(count):
        a, b = net.side(), net.side(srq=srq)
        net.connect(a, b)
        pairs.append((a, b))
    return pairs


def test_one_queue_for_many(net, srq):
    """The next message takes the oldest receive, on whichever queue pair; it completes on that queue pair's CQ."""
    mr = net.mr()
    pairs = sharers(net, srq, 3)
    for i in range(6):
        srq.post_recv(RecvWR(mr.sge(i * 64, 64), wr_id=f"buffer {i}"))
    assert srq.in_flight == 6
    taken = []
    for turn in range(2):
        for i, (a, b) in enumerate(pairs):
            mr[1024:1028] = bytes([turn, i]) * 2
            a.send(mr.sge(1024, 4))
            assert a.one().status == WCStatus.SUCCESS
            wc = b.one()
            assert wc.status == WCStatus.SUCCESS and wc.qp is b.qp and wc.srq is srq and not wc.is_send
            place = int(wc.wr_id.split()[1])
            assert mr[place * 64 : place * 64 + 4] == bytes([turn, i]) * 2
            taken.append(place)
    assert taken == list(range(6))
    assert srq.in_flight == 0


def test_a_chain(net, srq):
    mr = net.mr()
    ((a, b),) = sharers(net, srq, 1)
    srq.post_recv([RecvWR(mr.sge(i * 8, 8), wr_id=i) for i in range(8)])
    for _ in range(8):
        a.send(mr.sge(512, 8))
    a.poll(8)
    assert [wc.wr_id for wc in b.poll(8)] == list(range(8))


@pytest.mark.not_on_siw("crashes in its library")
def test_receives_of_its_own_are_refused(net, srq):
    """A queue pair with a shared queue has none of its own."""
    ((_, b),) = sharers(net, srq, 1)
    with pytest.raises(OSError, match="ibv_post_recv"):
        b.receive(net.mr())
    assert b.qp.in_flight == (0, 0)


@pytest.mark.not_on_iwarp("has no immediate data")
def test_immediate_data(net, srq):
    mr = net.mr()
    ((a, b),) = sharers(net, srq, 1)
    mr[64:72] = b"8 bytes!"
    srq.post_recv(RecvWR(mr.sge(0, 64), wr_id="imm"))
    a.send(
        mr.sge(64, 8), WROpcode.RDMA_WRITE_WITH_IMM, remote_addr=mr.address + 128, rkey=mr.rkey, imm_data=77
    )
    wc = b.one()
    assert (wc.status, wc.wr_id, wc.imm_data, wc.byte_len) == (WCStatus.SUCCESS, "imm", 77, 8)
    a.one()
    assert (mr[128:136], mr[0:8]) == (b"8 bytes!", bytes(8))


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_an_empty_queue_is_not_ready(net, srq):
    """The sender waits, and the first receive posted is taken."""
    mr = net.mr()
    ((a, b),) = sharers(net, srq, 1)
    a.send(mr.sge(0, 8))
    assert b.quiet()
    srq.post_recv(RecvWR(mr.sge(64, 8), wr_id="late"))
    assert b.one().wr_id == "late"
    assert a.one().status == WCStatus.SUCCESS


@pytest.mark.not_on_siw("cannot query shared queues")
def test_full(net, srq):
    depth = srq.query().max_wr
    assert depth >= 16
    with pytest.raises(OSError, match="ibv_post_srq_recv.*were posted") as caught:
        srq.post_recv([RecvWR() for _ in range(depth + 2)])
    assert caught.value.errno == 12
    assert srq.in_flight == depth or srq.in_flight == depth + 1  # providers may keep one place more


@pytest.mark.not_on_siw("cannot query shared queues")
def test_too_many_elements(net, srq):
    mr = net.mr()
    most = srq.query().max_sge
    with pytest.raises(OSError, match="ibv_post_srq_recv"):
        srq.post_recv(RecvWR([mr.sge(0, 1)] * (most + 1)))
    assert srq.in_flight == 0


@pytest.mark.not_on_siw("cannot query shared queues")
def test_the_limit_is_told_once(net, srq):
    mr = net.mr()
    ((a, b),) = sharers(net, srq, 1)
    srq.post_recv([RecvWR(mr.sge(0, 8)) for _ in range(4)])
    srq.modify(srq_limit=3)
    assert srq.query().srq_limit == 3
    a.send(mr.sge(64, 8))
    b.one()
    a.one()
    assert net.context.get_async_event() is None, "3 are left, and the limit is 3"
    a.send(mr.sge(64, 8))
    b.one()
    a.one()
    event = net.event(EventType.SRQ_LIMIT_REACHED)
    assert event.srq is srq
    assert srq.query().srq_limit == 0
    a.send(mr.sge(64, 8))
    b.one()
    a.one()
    assert net.context.get_async_event() is None


@pytest.mark.not_on_siw("cannot query shared queues")
def test_a_limit_above_the_size(net, srq):
    with pytest.raises(OSError, match="ibv_modify_srq") as caught:
        srq.modify(srq_limit=srq.query().max_wr + 1)
    assert caught.value.errno == 22


def test_resize(net, srq):
    """What is posted stays."""
    mr = net.mr()
    ((a, b),) = sharers(net, srq, 1)
    srq.post_recv([RecvWR(mr.sge(i * 8, 8), wr_id=i) for i in range(4)])
    with needs("shared receive queues that can be resized"):
        srq.modify(max_wr=200)
    assert srq.query().max_wr >= 200
    srq.post_recv([RecvWR(mr.sge(i * 8, 8), wr_id=i) for i in range(4, 150)])
    for i in range(6):
        a.send(mr.sge(2048, 8))
        assert b.one().wr_id == i
        a.one()


def test_in_use(net, srq):
    sharers(net, srq, 1)
    with pytest.raises(OSError, match="ibv_destroy_srq") as caught:
        srq.close()
    assert caught.value.errno == 16
    assert not srq.closed


def test_buffers_are_kept_until_polled(net, srq):
    """Also when the receive was posted to the queue of many."""
    ((a, b),) = sharers(net, srq, 1)
    memory = bytearray(64)
    mr = net.mr()
    borrowed = net.pd.reg_mr(memory)
    srq.post_recv(RecvWR(borrowed.sge(0, 64)))
    lkey = borrowed.lkey
    assert lkey
    del borrowed
    gc.collect()
    with pytest.raises(BufferError):
        memory.append(0)
    mr[0:5] = b"still"
    a.send(mr.sge(0, 5))
    with pytest.warns(ResourceWarning, match="unclosed <MR"):
        assert b.one().status == WCStatus.SUCCESS
        gc.collect()
    a.one()
    assert memory[:5] == b"still"
    memory.append(0)


@pytest.mark.not_on_siw("does not tell")
def test_flushing_leaves_its_receives(net, srq):
    """A queue pair in error says that it takes no more; the receives are there for the others."""
    mr = net.mr()
    (a, b), (c, d) = sharers(net, srq, 2)
    srq.post_recv([RecvWR(mr.sge(i * 8, 8), wr_id=i) for i in range(2)])
    b.qp.to_error()
    assert net.event(EventType.QP_LAST_WQE_REACHED).qp is b.qp
    assert b.quiet()
    c.send(mr.sge(64, 8))
    assert d.one().wr_id == 0
    c.one()


def test_closing_in_flight(net):
    """Its receives are forgotten, with their buffers."""
    with needs("shared receive queues"):
        srq = SRQ(net.pd, SRQAttr(4, 1))
    srq.post_recv([RecvWR(net.mr().sge(0, 8)) for _ in range(3)])
    srq.close()
    assert srq.closed and srq.in_flight == 0
    srq.close()
    with pytest.raises(ValueError, match="closed"):
        srq.post_recv(RecvWR())


def test_forgetting_in_any_order(net):
    """It holds its domain; a queue pair holds it."""
    with needs("shared receive queues"):
        srq = SRQ(net.pd, SRQAttr(4, 1))
    side = net.side(srq=srq)
    assert side.qp.srq is srq
    del srq
    gc.collect()
    assert not side.qp.srq.closed
    shared = side.qp.srq
    side.close()
    shared.close()
