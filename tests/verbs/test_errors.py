"""What goes wrong, and what both sides are told: every status that a program can provoke."""

import errno
import time

import pytest

from rdmanet.errors import CompletionError, CompletionResetError
from rdmanet.verbs import PD, SGE, AccessFlags, EventType, QPState, SendFlags, WCOpcode, WCStatus, WROpcode

from .conftest import EVERYTHING, differs

READ, WRITE, ATOMIC = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC
LOCAL = AccessFlags.LOCAL_WRITE


def failed(side, status, timeout=60, *, rxe=None):
    """The next completion has this status, and the queue pair is in error.

    Kernel devices name some faults otherwise than the specification does; `rxe` is what they say.
    """
    wc = side.one(timeout)
    if rxe is not None and not side.pd.context.library.embedded_device:
        assert wc.status in (status, rxe), wc
    else:
        assert wc.status == status, wc
    assert wc.opcode is None
    assert side.qp.query()[0].qp_state == QPState.ERR
    return wc


def event_of(context, eventually, kind, qp):
    found = []

    def look():
        while (event := context.get_async_event()) is not None:
            found.append(event)
        return any(event.event_type == kind and event.qp is qp for event in found)

    eventually(look, what=f"{kind!r} among {found}")


# ---- The sender's own fault ----


@pytest.mark.not_on_siw("completes it with an error, and goes on")
def test_an_element_outside_its_region(net, pair):
    a, b = pair
    small, big = net.mr(64), net.mr(8192)
    b.receive(big)
    a.send(SGE(big, 0, 128, lkey=small.lkey))
    failed(a, WCStatus.LOC_PROT_ERR, rxe=WCStatus.WR_FLUSH_ERR)


@pytest.mark.not_on_siw("completes it with an error, and goes on")
def test_an_element_longer_than_its_region(net, pair):
    """From its first byte, and beyond its last."""
    a, b = pair
    big = net.mr(8192)
    small = net.keep(net.pd.reg_mr(memoryview(big)[:64], EVERYTHING))
    b.receive(net.mr())
    a.send(SGE(big, 0, 128, lkey=small.lkey))
    failed(a, WCStatus.LOC_PROT_ERR, rxe=WCStatus.WR_FLUSH_ERR)


@pytest.mark.not_on_siw("completes it with an error, and goes on")
def test_an_unknown_lkey(net, pair):
    a, b = pair
    b.receive(net.mr())
    a.send(SGE(net.mr(), lkey=0xDEAD00))
    failed(a, WCStatus.LOC_PROT_ERR, rxe=WCStatus.WR_FLUSH_ERR)


@pytest.mark.not_on_siw("completes it with an error, and goes on")
def test_a_region_of_another_domain(net, pair):
    a, b = pair
    b.receive(net.mr())
    with PD(net.context) as other, other.alloc_mr(64) as mr:
        a.send(mr)
        failed(a, WCStatus.LOC_PROT_ERR, rxe=WCStatus.WR_FLUSH_ERR)


@pytest.mark.not_on_siw("completes it with an error, and goes on")
def test_a_closed_region(net, pair):
    a, b = pair
    b.receive(net.mr())
    mr = net.pd.alloc_mr(64)
    lkey = mr.lkey
    mr.close()
    a.send(SGE(net.mr(), lkey=lkey))
    failed(a, WCStatus.LOC_PROT_ERR, rxe=WCStatus.WR_FLUSH_ERR)


def test_reading_into_memory_that_cannot_be_written(net, pair):
    a, _ = pair
    there = net.mr()
    with net.pd.reg_mr(bytes(64)) as mr:
        a.send(mr, WROpcode.RDMA_READ, remote_addr=there.address, rkey=there.rkey)
        wc = a.one()
        assert wc.status in (WCStatus.LOC_PROT_ERR, WCStatus.LOC_ACCESS_ERR)


# ---- What the responder does not allow ----


def remote_access(net, pair, eventually, opcode, length=8, **where):
    a, b = pair
    a.send(SGE(net.mr(), 0, length), opcode, **where)
    wc = failed(a, WCStatus.REM_ACCESS_ERR)
    with pytest.raises(CompletionError, match="rkey, range or access rights") as caught:
        wc.raise_for_status()
    assert caught.value.status == WCStatus.REM_ACCESS_ERR
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_WRITE, WROpcode.RDMA_READ], ids=lambda o: o.name)
@pytest.mark.parametrize("fault", ["key", "after", "before", "length", "rights", "domain", "closed"])
@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_remote_access(net, pair, eventually, opcode, fault):
    """Wrong key, wrong range, no right, wrong domain: the same verdict for all."""
    right = READ if opcode == WROpcode.RDMA_READ else WRITE
    access = LOCAL | (READ | WRITE) ^ right if fault == "rights" else LOCAL | right
    with PD(net.context) as other, (other if fault == "domain" else net.pd).alloc_mr(4096, access) as mr:
        address, rkey, length = mr.address, mr.rkey, 8
        if fault == "key":
            rkey ^= 0x5A
        elif fault == "after":
            address += 4096 - 7
        elif fault == "before":
            address -= 1
        elif fault == "length":
            length = 2048
            address += 3000
        elif fault == "closed":
            mr.close()
        remote_access(net, pair, eventually, opcode, length, remote_addr=address, rkey=rkey)


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_the_responder_is_told(net, pair, eventually):
    """Its queue pair goes to error, with an event, and its receives are flushed."""
    a, b = pair
    b.receive(net.mr(), wr_id="waiting")
    a.send(SGE(net.mr(), 0, 8), WROpcode.RDMA_WRITE, remote_addr=1, rkey=1)
    failed(a, WCStatus.REM_ACCESS_ERR)
    wc = failed(b, WCStatus.WR_FLUSH_ERR)
    assert (wc.wr_id, wc.is_send) == ("waiting", False)
    if net.context.library.embedded_device:  # rxe keeps it to itself
        event_of(net.context, eventually, EventType.QP_ACCESS_ERR, b.qp)


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_nothing_is_written_by_a_refused_write(net, pair):
    a, _ = pair
    there = net.mr(100)
    source = net.mr()
    source[:] = b"x" * len(source)
    a.send(SGE(source, 0, 64), WROpcode.RDMA_WRITE, remote_addr=there.address + 50, rkey=there.rkey)
    failed(a, WCStatus.REM_ACCESS_ERR)
    assert bytes(there) == bytes(100)


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_WRITE, WROpcode.RDMA_READ], ids=lambda o: o.name)
def test_the_queue_pair_does_not_allow_it(net, opcode):
    a, b = net.pair(access=AccessFlags(0))
    there = net.mr()
    a.send(SGE(net.mr(), 0, 8), opcode, remote_addr=there.address, rkey=there.rkey)
    wc = a.one()
    assert wc.status in (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_ACCESS_ERR)
    assert a.qp.query()[0].qp_state == QPState.ERR


@pytest.mark.not_on_iwarp("has no atomics")
def test_a_misaligned_atomic(net, pair):
    if not net.context.library.embedded_device:
        pytest.skip("rxe's provider refuses to post it")
    a, _ = pair
    there = net.mr()
    a.send(
        SGE(net.mr(), 0, 8),
        WROpcode.ATOMIC_FETCH_AND_ADD,
        compare_add=1,
        remote_addr=there.address + 4,
        rkey=there.rkey,
    )
    failed(a, WCStatus.REM_INV_REQ_ERR)
    assert bytes(there) == bytes(len(there))


@pytest.mark.not_on_iwarp("has no atomics")
def test_atomics_need_their_right(net, pair):
    a, _ = pair
    with net.pd.alloc_mr(64, LOCAL | READ | WRITE) as there:
        a.send(
            SGE(net.mr(), 0, 8),
            WROpcode.ATOMIC_FETCH_AND_ADD,
            compare_add=1,
            remote_addr=there.address,
            rkey=there.rkey,
        )
        failed(a, WCStatus.REM_ACCESS_ERR)


def test_reads_need_a_responder(net):
    """A queue pair that keeps no room for reads refuses them."""
    a, b = net.pair(rtr={"max_dest_rd_atomic": 0})
    there = net.mr()
    a.send(SGE(net.mr(), 0, 8), WROpcode.RDMA_READ, remote_addr=there.address, rkey=there.rkey)
    failed(a, WCStatus.REM_INV_REQ_ERR)


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD], ids=lambda o: o.name)
def test_what_cannot_be_inline(net, opcode):
    a, b = net.side(max_inline_data=64), net.side()
    net.connect(a, b)
    differs(net.context, "rxe", "does not look at the flag")
    there = net.mr()
    with pytest.raises(OSError, match="ibv_post_send") as caught:
        a.send(
            SGE(net.mr(), 0, 8), opcode, flags=SendFlags.INLINE, remote_addr=there.address, rkey=there.rkey
        )
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("opcode", [WROpcode.TSO, 77], ids=str)
def test_what_a_reliable_connection_cannot_do(net, pair, opcode):
    a, _ = pair
    differs(net.context, "rxe", "completes what the transport cannot do with an error")
    with pytest.raises(OSError, match="ibv_post_send") as caught:
        a.send(SGE(net.mr(), 0, 8), opcode)
    assert caught.value.errno in (errno.EINVAL, errno.EOPNOTSUPP)


# ---- Receives ----


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_a_message_longer_than_the_receive(net, pair, eventually):
    a, b = pair
    target = net.mr()
    b.receive(SGE(target, 0, 10))
    a.send(SGE(net.mr(), 0, 11))
    failed(a, WCStatus.REM_INV_REQ_ERR, rxe=WCStatus.REM_OP_ERR)
    failed(b, WCStatus.LOC_LEN_ERR, rxe=WCStatus.LOC_QP_OP_ERR)


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_a_receive_into_the_wrong_memory(net, pair):
    a, b = pair
    b.receive(SGE(net.mr(), lkey=0xDEAD00))
    a.send(SGE(net.mr(), 0, 8))
    failed(a, WCStatus.REM_OP_ERR, rxe=WCStatus.REM_INV_REQ_ERR)
    failed(b, WCStatus.LOC_PROT_ERR, rxe=WCStatus.LOC_QP_OP_ERR)


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_flushed_after_an_error(net, pair):
    """All that is behind the failed request is flushed, in order, signaled or not."""
    differs(net.context, "rxe", "does not always flush receives")
    a, _ = pair
    mr = net.mr()
    a.send(SGE(mr, 0, 8), WROpcode.RDMA_WRITE, remote_addr=0, rkey=1, wr_id="bad", flags=SendFlags.NONE)
    for i in range(3):
        a.send(SGE(mr, 0, 8), wr_id=i, flags=SendFlags.SIGNALED if i else SendFlags.NONE)
    a.receive(mr, wr_id="receive")
    found = a.poll(5)
    sends = [(wc.wr_id, wc.status) for wc in found if wc.is_send]
    assert sends[0] == ("bad", WCStatus.REM_ACCESS_ERR)
    assert sends[1:] == [(i, WCStatus.WR_FLUSH_ERR) for i in range(3)]
    assert [wc.status for wc in found if not wc.is_send] == [WCStatus.WR_FLUSH_ERR]
    with pytest.raises(CompletionResetError, match="flushed"):
        found[-1].raise_for_status()


# ---- Receiver not ready ----


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_rnr_budget(net):
    """Without a posted receive, and without retries, the first try is the last."""
    a, b = net.pair(rts={"rnr_retry": 0})
    a.send(SGE(net.mr(), 0, 8))
    wc = failed(a, WCStatus.RNR_RETRY_EXC_ERR)
    with pytest.raises(ConnectionResetError, match="posted no receive"):
        wc.raise_for_status()
    assert b.qp.query()[0].qp_state == QPState.RTS, "the responder does not mind"


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_rnr_retries(net):
    """Tries as often as it may, min_rnr_timer apart: 3 times 10.24 ms."""
    a, _ = net.pair(rts={"rnr_retry": 3}, rtr={"min_rnr_timer": 20})
    start = time.monotonic()
    a.send(SGE(net.mr(), 0, 8))
    failed(a, WCStatus.RNR_RETRY_EXC_ERR)
    assert time.monotonic() - start >= 0.030


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
@pytest.mark.parametrize("opcode", [WROpcode.SEND, WROpcode.RDMA_WRITE_WITH_IMM], ids=lambda o: o.name)
def test_a_late_receive(net, opcode):
    """With retries without limit a message waits until there is a receive for it."""
    a, b = net.pair(rts={"rnr_retry": 7}, rtr={"min_rnr_timer": 1})
    source, target = net.mr(), net.mr()
    source[:4] = b"late"
    a.send(SGE(source, 0, 4), opcode, remote_addr=target.address, rkey=target.rkey)
    a.send(SGE(source, 0, 4), opcode, remote_addr=target.address, rkey=target.rkey)
    assert a.quiet(0.05)
    b.receive(target)
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().status == WCStatus.SUCCESS
    assert target[:4] == b"late"
    assert a.quiet(), "the second has no receive yet"
    b.receive(target)
    assert a.one().opcode in (WCOpcode.SEND, WCOpcode.RDMA_WRITE)
    assert b.one().status == WCStatus.SUCCESS


# ---- Nobody there ----


def test_the_peer_is_gone(net):
    """No answer: retries are exceeded, within the time that timeout and retry_cnt say, more or less."""
    a, b = net.pair(rts={"timeout": 12, "retry_cnt": 2})
    b.close()
    a.send(SGE(net.mr(), 0, 8))
    wc = failed(a, WCStatus.RETRY_EXC_ERR, timeout=60)
    with pytest.raises(ConnectionResetError, match="did not answer"):
        wc.raise_for_status()


def test_the_peer_is_in_error(net):
    a, b = net.pair(rts={"timeout": 12, "retry_cnt": 2})
    b.qp.to_error()
    a.send(SGE(net.mr(), 0, 8))
    failed(a, WCStatus.RETRY_EXC_ERR, timeout=60)


def test_the_peer_comes_late(net):
    """Either side may go to RTS first; what is sent meanwhile is tried again."""
    a, b = net.side(), net.side()
    mr = net.mr()
    for side in (a, b):
        side.qp.to_init()
    b.receive(SGE(mr, 0, 8))
    net.to_rtr(a, b)
    a.qp.to_rts(timeout=14, retry_cnt=7)
    a.send(SGE(mr, 8, 8))
    assert a.quiet(), "it is tried again"
    net.to_rtr(b, a)
    assert b.one().status == WCStatus.SUCCESS
    assert a.one(timeout=60).status == WCStatus.SUCCESS
