"""Extended completion queues (the iterator, timestamps) and the extended calls for posting."""

import gc
import threading
import time

import pytest

from rdmanet.verbs import (
    CQ,
    CQEX,
    MW,
    QP,
    SGE,
    AccessFlags,
    CompChannel,
    CQInitAttrEx,
    CreateCQFlags,
    CreateCQWCFlags,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    SendFlags,
    SendOpsFlags,
    SendWR,
    WCOpcode,
    WCStatus,
    WROpcode,
    inc_rkey,
)

from .conftest import EVERYTHING, Net, Side, differs, needs
from .test_datagram import QKEY, to


@pytest.fixture
def told(net: Net):
    """Two connected queue pairs on extended completion queues."""

    def side(**options) -> Side:
        channel = CompChannel(net.context)
        try:
            with needs("extended completion queues that tell this"):
                cq = CQEX(net.context, CQInitAttrEx(64, channel, **options))
        except BaseException:
            channel.close()
            raise
        sizes = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=4, max_recv_sge=4)
        made = Side(net.pd, channel, cq, QP(net.pd, QPInitAttr(cq, cq, sizes)))
        net.sides.append(made)
        return made

    def make(**options) -> tuple[Side, Side]:
        a, b = side(**options), side(**options)
        net.connect(a, b)
        return a, b

    return make


@pytest.mark.not_on_iwarp("has no immediate data")
def test_it_is_a_completion_queue(net: Net, told):
    a, b = told()
    mr = net.mr()
    b.receive(mr.sge(0, 64), wr_id="r")
    b.cq.req_notify()
    a.send(mr.sge(64, 8), WROpcode.SEND_WITH_IMM, imm_data=5, wr_id="s")
    assert b.wait_event()
    (wc,) = b.cq.poll()
    assert (wc.wr_id, wc.status, wc.opcode) == ("r", WCStatus.SUCCESS, WCOpcode.RECV)
    assert (wc.byte_len, wc.imm_data, wc.qp) == (8, 5, b.qp)
    assert a.one().wr_id == "s"
    assert isinstance(a.cq, CQ)


def test_the_iterator(net: Net, told):
    a, b = told()
    mr = net.mr()
    for i in range(5):
        b.receive(mr.sge(i * 8, 8), wr_id=i)
        a.send(mr.sge(64, 8), wr_id=i)
    found = []
    while len(found) < 5:
        with b.cq.start_poll() as completions:
            found += [wc.wr_id for wc in completions]
    assert found == list(range(5))
    assert list(b.cq.start_poll()) == []
    assert [wc.wr_id for wc in a.poll(5)] == list(range(5))


def test_leaving_the_iterator_loses_nothing(net: Net, told, eventually):
    """And its body may do what it likes: no lock is held."""
    a, b = told()
    mr = net.mr()
    for i in range(4):
        b.receive(mr.sge(i * 8, 8), wr_id=i)
        a.send(mr.sge(64, 8))
    assert a.poll(4)[-1].status == WCStatus.SUCCESS
    found = []
    eventually(lambda: found.extend(b.cq.poll(1)) or found)
    for wc in b.cq.start_poll():
        found += [wc, *b.cq.poll(1)]
        break
    found += b.poll(4 - len(found))
    assert [wc.wr_id for wc in found] == [0, 1, 2, 3]


def test_errors_come_with_it(net: Net, told):
    a, b = told()
    for i in range(3):
        b.receive(net.mr(), wr_id=i)
    b.qp.to_error()
    found = b.poll(3)
    assert [(wc.wr_id, wc.status, wc.opcode) for wc in found] == [
        (i, WCStatus.WR_FLUSH_ERR, None) for i in range(3)
    ]


def test_timestamps(net: Net, told):
    a, b = told(wc_flags=CreateCQWCFlags.STANDARD | CreateCQWCFlags.WITH_COMPLETION_TIMESTAMP)
    mr = net.mr()
    with needs("a clock that can be read"):
        before = net.context.query_rt_values()
    times = []
    for _ in range(3):
        b.receive(mr.sge(0, 8))
        a.send(mr.sge(64, 8))
        a.one()
        times.append(b.one().timestamp)
    assert times == sorted(times)
    assert len(set(times)) == 3
    assert b.cq.poll() == []
    if net.context.query_device().hca_core_clock == 1_000_000:  # kHz: stamps and clock are both nanoseconds
        assert before <= times[0] and times[-1] <= net.context.query_rt_values()


def test_the_time_of_day(net: Net, told):
    a, b = told(wc_flags=CreateCQWCFlags.STANDARD | CreateCQWCFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    a.one()
    wc = b.one()
    assert abs(wc.wallclock_ns - time.time_ns()) < 3600 * 10**9
    assert wc.timestamp is None


def test_single_threaded(net: Net, told):
    a, b = told(flags=CreateCQFlags.SINGLE_THREADED)
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def test_what_was_not_asked_for_is_not_told(net: Net, told):
    a, b = told(wc_flags=0)
    mr = net.mr()
    b.receive(mr.sge(0, 8), wr_id="r")
    a.send(mr.sge(64, 8))
    assert a.one().status == WCStatus.SUCCESS
    wc = b.one()
    assert (wc.wr_id, wc.byte_len) == ("r", 0)


def test_resize(net: Net, told):
    a, b = told()
    with needs("completion queues that can be resized"):
        b.cq.resize(300)
    assert b.cq.cqe >= 300


# ---- Posting -----------------------------------------------------------------------------------------

OPS = SendOpsFlags


@pytest.fixture
def posters(net: Net):
    """Two connected queue pairs, the first made for these calls."""

    def make(ops: SendOpsFlags) -> tuple[Side, Side]:
        a, b = net.side(ops=ops, max_inline_data=64), net.side()
        net.connect(a, b)
        return a, b

    return make


@pytest.mark.not_on_iwarp("has no immediate data")
def test_sends(net: Net, posters):
    differs(net.context, "rxe", "of rdma-core 44 takes wrong lengths of lists and of inline data")
    a, b = posters(OPS.SEND | OPS.SEND_WITH_IMM)
    mr = net.mr()
    mr[0:10] = b"onetwothre"
    for i in range(3):
        b.receive(mr.sge(1024 + i * 16, 16), wr_id=i)
    with a.qp.wr() as wr:
        wr.send(mr.sge(0, 3), wr_id="a", flags=SendFlags.NONE)
        wr.send(mr.sge(3, 3), imm_data=2, wr_id="b", flags=SendFlags.NONE)
        assert a.qp.in_flight == (0, 0), "nothing is posted before the end"
        wr.send(SGE(b"thre"), wr_id="c", flags=SendFlags.SIGNALED | SendFlags.INLINE)
        assert len(wr) == 3
    wc = a.one()
    assert (wc.wr_id, wc.status) == ("c", WCStatus.SUCCESS)
    assert a.qp.in_flight == (0, 0)
    found = b.poll(3)
    assert [(wc.byte_len, wc.imm_data) for wc in found] == [(3, None), (3, 2), (4, None)]
    assert [mr[1024 + i * 16 : 1024 + i * 16 + 4] for i in range(3)] == [b"one\0", b"two\0", b"thre"]


def test_lists_of_elements(net: Net, posters):
    differs(net.context, "rxe", "of rdma-core 44 takes the first element's length for all")
    a, b = posters(OPS.SEND)
    mr = net.mr()
    mr[0:8] = b"abcdefgh"
    b.receive([mr.sge(1024, 3), mr.sge(2048, 8)])
    b.receive(mr.sge(512, 16))
    with a.qp.wr() as wr:
        wr.send([mr.sge(0, 2), mr.sge(4, 3)])
        wr.send([SGE(b"in"), SGE(b"line")], flags=SendFlags.SIGNALED | SendFlags.INLINE)
    assert [wc.status for wc in a.poll(2)] == [WCStatus.SUCCESS] * 2
    assert [wc.byte_len for wc in b.poll(2)] == [5, 6]
    assert mr[1024:1027] + mr[2048:2050] == b"abefg"
    assert mr[512:518] == b"inline"


@pytest.mark.not_on_iwarp("has no atomics")
def test_remote_memory(net: Net, posters):
    a, b = posters(
        OPS.RDMA_WRITE
        | OPS.RDMA_READ
        | OPS.RDMA_WRITE_WITH_IMM
        | OPS.ATOMIC_FETCH_AND_ADD
        | OPS.ATOMIC_CMP_AND_SWP
    )
    mr, there = net.mr(), net.mr()
    mr[0:8] = (41).to_bytes(8, "little")
    b.receive()
    remote = {"remote_addr": there.address, "rkey": there.rkey}
    with a.qp.wr() as wr:
        wr.rdma_write(mr.sge(0, 8), **remote)
        wr.atomic_fetch_add(mr.sge(8, 8), add=1, **remote)
        wr.atomic_cmp_swp(mr.sge(16, 8), compare=42, swap=7, **remote)
        wr.rdma_read(mr.sge(24, 8), **remote)
        wr.rdma_write(mr.sge(0, 8), remote_addr=there.address + 64, rkey=there.rkey, imm_data=3)
    assert [wc.status for wc in a.poll(5)] == [WCStatus.SUCCESS] * 5
    assert b.one().imm_data == 3
    assert [int.from_bytes(mr[i : i + 8], "little") for i in (8, 16, 24)] == [41, 42, 7]
    assert there[64:72] == mr[0:8]


def test_atomic_write(net: Net, posters):
    a, _ = posters(OPS.ATOMIC_WRITE)
    there = net.mr()
    with a.qp.wr() as wr:
        wr.atomic_write(b"8 bytes!", remote_addr=there.address, rkey=there.rkey)
    wc = a.one()
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.ATOMIC_WRITE)
    assert there[0:8] == b"8 bytes!"


def test_windows(net: Net, posters):
    a, b = posters(OPS.BIND_MW | OPS.LOCAL_INV | OPS.SEND_WITH_INV)
    with needs("memory windows of type 2"):
        mw = net.keep(MW(net.pd, MWType.TYPE_2))
    memory = net.mr(access=EVERYTHING | AccessFlags.MW_BIND)
    mr = net.mr()
    key = inc_rkey(mw.rkey)
    with a.qp.wr() as wr:
        wr.bind_mw(mw, key, MWBindInfo(memory, None, 64, AccessFlags.REMOTE_WRITE))
    assert a.one().opcode == WCOpcode.BIND_MW
    mr[0:8] = b"8 bytes!"
    b.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=memory.address, rkey=key)
    assert b.one().status == WCStatus.SUCCESS
    assert memory[0:8] == b"8 bytes!"
    with a.qp.wr() as wr:
        wr.local_inv(key)
    assert a.one().opcode == WCOpcode.LOCAL_INV


def test_datagrams(net: Net):
    a, b = net.datagrams(ops=OPS.SEND | OPS.SEND_WITH_IMM), net.datagrams()
    mr, ah = net.mr(), net.ah()
    b.receive(mr.sge(1024, 128))
    with a.qp.wr() as wr:
        wr.send(mr.sge(0, 4), imm_data=1, **to(ah, b, qkey=QKEY))
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().imm_data == 1
    with pytest.raises(OSError, match="needs ah"), a.qp.wr() as wr:
        wr.send(mr.sge(0, 4))


def test_an_exception_posts_nothing(net: Net, posters):
    a, b = posters(OPS.SEND)
    mr = net.mr()
    b.receive(mr)
    with pytest.raises(KeyError), a.qp.wr() as wr:
        wr.send(mr.sge(0, 4))
        raise KeyError
    assert a.qp.in_flight == (0, 0)
    with a.qp.wr() as wr:
        wr.send(mr.sge(0, 4))
        wr.abort()
    assert a.quiet() and b.quiet()
    with pytest.raises(ValueError, match="has ended"):
        wr.send(mr.sge(0, 4))
    with pytest.raises(ValueError, match="has ended"), wr:
        pass


def test_only_what_it_was_made_for(net: Net, posters):
    a, b = posters(OPS.SEND)
    mr = net.mr()
    with pytest.raises(OSError, match="RDMA_WRITE is not in the send_ops_flags") as caught, a.qp.wr() as wr:
        wr.rdma_write(mr.sge(0, 4), remote_addr=mr.address, rkey=mr.rkey)
    assert caught.value.errno == 95
    with pytest.raises(OSError, match=r"does not support wr\(\)") as caught:
        b.qp.wr()
    assert caught.value.errno == 95


def test_unknown_calls_are_refused(net: Net):
    """A device that took a bit it does not know would leave a function pointer empty."""
    net.side(ops=OPS.SEND)  # or it has none at all
    with CQ(net.context, 4) as cq, pytest.raises(OSError, match="ibv_create_qp_ex") as caught:
        QP(net.pd, QPInitAttrEx(cq, cq, send_ops_flags=1 << 40))
    assert caught.value.errno in (95, 22)


def test_too_many_are_all_refused(net: Net, posters):
    a, b = posters(OPS.SEND)
    mr = net.mr()
    depth = a.qp.cap.max_send_wr
    for _ in range(4):
        b.receive(mr.sge(0, 8))
    with pytest.raises(OSError, match="none was posted") as caught, a.qp.wr() as wr:
        for _ in range(depth + 8):
            wr.send(mr.sge(0, 8))
    assert caught.value.errno in (12, 28)  # ENOMEM as of ibv_post_send(3); rxe says ENOSPC
    assert a.qp.in_flight == (0, 0)
    with a.qp.wr() as wr:
        wr.send(mr.sge(0, 8))
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def test_both_ways_of_posting_keep_the_order(net: Net, posters):
    a, b = posters(OPS.SEND)
    mr = net.mr()
    for i in range(6):
        b.receive(mr.sge(i * 8, 8), wr_id=i)
    for i in range(3):
        with a.qp.wr() as wr:
            wr.send(mr.sge(64, 2 * i + 1), wr_id=2 * i)
        a.qp.post_send(SendWR(WROpcode.SEND, mr.sge(64, 2 * i + 2), wr_id=2 * i + 1))
    assert [wc.wr_id for wc in a.poll(6)] == list(range(6))
    assert [wc.byte_len for wc in b.poll(6)] == list(range(1, 7))


def test_sessions_beside_plain_posts(net: Net, posters):
    """No Python runs while a library holds the queue's lock, however often threads and the collector take turns."""
    a, b = posters(OPS.SEND)
    mr = net.mr()
    failed = []

    def work(plain: bool) -> None:
        try:
            for _ in range(3):
                if plain:
                    a.qp.post_send([SendWR(WROpcode.SEND, mr.sge(0, 1), wr_id=1) for _ in range(2)])
                else:
                    with a.qp.wr() as wr:
                        wr.send(mr.sge(0, 2), wr_id=2)
                        wr.send(mr.sge(0, 2), wr_id=2)
        except BaseException as exc:
            failed.append(exc)

    def collecting(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)  # lets another thread run

    for _ in range(12):
        b.receive(mr.sge(512, 8))
    before = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=work, args=(plain,)) for plain in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collecting)
    assert not failed
    order = [wc.wr_id for wc in a.poll(12)]
    assert all(order[i] == order[i + 1] for i in range(0, 12, 2)), order
    assert [wc.byte_len for wc in b.poll(12)] == order


def test_sessions_of_two_threads(net: Net, posters):
    """Each block's requests stay together."""
    a, b = posters(OPS.SEND)
    mr = net.mr()
    failed = []

    def work(name: int) -> None:
        try:
            for _ in range(2):
                with a.qp.wr() as wr:
                    for _ in range(3):
                        wr.send(mr.sge(0, name), wr_id=name)
        except BaseException as exc:
            failed.append(exc)

    for _ in range(12):
        b.receive(mr.sge(512, 8))
    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    order = [wc.wr_id for wc in a.poll(12)]
    assert all(len(set(order[i : i + 3])) == 1 for i in range(0, 12, 3)), order
    assert [wc.byte_len for wc in b.poll(12)] == order
