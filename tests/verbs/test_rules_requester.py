"""Rules of the requester: what is refused while posting, what fails later, when a place comes free.

Refused while posting: a return code, and nothing of the request happens; the requests before it in its
chain are posted (ibv_post_send(3)). Failed later: a completion. docs/rules.md maps the rules to the tests.
"""

import errno

import pytest

from rdmanet.verbs import (
    SGE,
    QPState,
    QPType,
    RecvWR,
    SendFlags,
    SendWR,
    WCStatus,
    WROpcode,
)

from .conftest import EVERYTHING, Net, Side, differs, driver

SIGNALED, NONE, INLINE = SendFlags.SIGNALED, SendFlags.NONE, SendFlags.INLINE


def refused(side: Side, wrs, number: int = errno.EINVAL) -> None:
    before = side.qp.in_flight
    with pytest.raises(OSError, match="ibv_post_send") as caught:
        side.qp.post_send(wrs)
    assert caught.value.errno == number
    assert side.qp.in_flight == before


# ---- Refused while posting -----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["RESET", "INIT", "RTR"])
def test_posting_a_send_before_rts(net: Net, state):
    side = net.side()
    if state != "RESET":
        side.qp.to_init()
    if state == "RTR":
        net.to_rtr(side, side)
    number = errno.ENOTCONN if driver(net.context) == "siw" else errno.EINVAL
    refused(side, SendWR(WROpcode.SEND, net.mr().sge(0, 8)), number)


@pytest.mark.not_on_siw("takes receives from the beginning")
def test_posting_a_receive_before_init(net: Net):
    side = net.side()
    with pytest.raises(OSError, match="ibv_post_recv") as caught:
        side.receive(net.mr())
    assert caught.value.errno == errno.EINVAL


def test_a_full_send_queue(net: Net):
    """ENOMEM; what was before it in the chain is posted, and nothing is lost once there is room."""
    a, b = net.side(max_send_wr=4), net.side(max_recv_wr=64)
    net.connect(a, b, rtr={"min_rnr_timer": 20})
    mr = net.mr()
    depth = a.qp.cap.max_send_wr
    wrs = [SendWR(WROpcode.SEND, mr.sge(0, 8), wr_id=i) for i in range(depth + 8)]
    with pytest.raises(OSError, match="were posted") as caught:
        a.qp.post_send(wrs)  # none can end: there is no receive
    assert caught.value.errno == errno.ENOMEM
    posted = a.qp.in_flight[0]
    assert depth <= posted < depth + 8
    b.qp.post_recv([RecvWR(mr.sge(64, 8)) for _ in range(posted)])
    assert [wc.wr_id for wc in a.poll(posted)] == list(range(posted))
    b.poll(posted)


def test_a_full_receive_queue(net: Net):
    side = net.side(max_recv_wr=4)
    if not net.managed:
        side.qp.to_init()
    depth = side.qp.cap.max_recv_wr
    with pytest.raises(OSError, match="were posted") as caught:
        side.qp.post_recv([RecvWR(net.mr().sge(0, 8)) for _ in range(depth + 8)])
    assert caught.value.errno == errno.ENOMEM
    assert depth <= side.qp.in_flight[1] < depth + 8


@pytest.mark.not_on_siw("does not count elements when posting")
def test_too_many_elements(net: Net, pair):
    a, b = pair
    mr = net.mr()
    refused(a, SendWR(WROpcode.SEND, [mr.sge(0, 1)] * (a.qp.cap.max_send_sge + 1)))
    with pytest.raises(OSError, match="ibv_post_recv") as caught:
        b.receive([mr.sge(0, 1)] * (b.qp.cap.max_recv_sge + 1))
    assert caught.value.errno == errno.EINVAL


@pytest.mark.not_on_siw("sends it all the same")
def test_inline_beyond_the_limit(net: Net):
    a, b = net.side(max_inline_data=16), net.side()
    net.connect(a, b)
    most = a.qp.cap.max_inline_data
    refused(a, SendWR(WROpcode.SEND, SGE(bytes(most + 1)), flags=SIGNALED | INLINE))


def test_an_unknown_opcode(net: Net, pair):
    a, _ = pair
    if driver(net.context) == "rxe":
        a.send(net.mr().sge(0, 8), 77)  # type: ignore[arg-type]
        assert a.one().status != WCStatus.SUCCESS
    else:
        refused(a, SendWR(77, net.mr().sge(0, 8)))


@pytest.mark.parametrize(
    "opcode", [WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.ATOMIC_CMP_AND_SWP]
)
def test_reads_and_atomics_of_the_unreliable(net: Net, opcode):
    """UC has neither; UD has sends only."""
    differs(net.context, "rxe", "completes what the transport cannot do with an error")
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b)
    mr = net.mr()
    refused(a, SendWR(opcode, mr.sge(0, 8), remote_addr=mr.address, rkey=mr.rkey))


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_READ, WROpcode.RDMA_WRITE])
def test_remote_memory_of_datagrams(net: Net, opcode):
    differs(net.context, "rxe", "completes what the transport cannot do with an error")
    a = net.datagrams()
    refused(a, SendWR(opcode, net.mr().sge(0, 8), ah=net.ah(), remote_qpn=a.qp.qp_num, remote_qkey=0x1234))


def test_a_datagram_longer_than_a_packet(net: Net):
    """A datagram is one packet: more than the path's is refused, or completes with a length error."""
    differs(net.context, "rxe", "leaves it to the network below")
    a = net.datagrams()
    mr, ah = net.mr(16384), net.ah()
    wr = SendWR(WROpcode.SEND, mr, ah=ah, remote_qpn=a.qp.qp_num, remote_qkey=0x1234)
    try:
        a.qp.post_send(wr)
    except OSError as exc:
        assert exc.errno in (errno.EINVAL, errno.EMSGSIZE)
    else:
        assert a.one().status == WCStatus.LOC_LEN_ERR


# ---- Failed later ------------------------------------------------------------------------------------------


def local_fault(net: Net, side: Side, wr: SendWR, status: WCStatus = WCStatus.LOC_PROT_ERR) -> None:
    """Accepted, and completed with an error; rxe flushes it."""
    side.qp.post_send(wr)
    wc = side.one()
    assert wc.status == (WCStatus.WR_FLUSH_ERR if driver(net.context) == "rxe" else status)
    side.becomes(QPState.ERR)


@pytest.mark.not_on_siw("completes it with an error, and goes on")
@pytest.mark.parametrize("fault", ["key", "outside", "domain", "closed"])
def test_a_local_element_that_is_wrong(net: Net, pair, fault):
    a, b = pair
    mr = net.mr(8192)
    b.receive(mr)
    small = net.mr(64)
    if fault == "key":
        sge = SGE(mr, 0, 8, lkey=0xDEAD00)
    elif fault == "outside":
        sge = SGE(mr, 0, 128, lkey=small.lkey)
    else:
        from rdmanet.verbs import PD

        pd = net.keep(PD(net.context))
        other = net.keep(pd.alloc_mr(64))
        sge = SGE(mr, 0, 8, lkey=other.lkey) if fault == "closed" else SGE(other)
        if fault == "closed":
            other.close()
    local_fault(net, a, SendWR(WROpcode.SEND, sge))
    assert b.quiet()


def test_a_read_into_memory_that_is_not_writable(net: Net, pair):
    a, _ = pair
    there = net.mr()
    here = net.keep(net.pd.alloc_mr(64, 0))
    a.send(here, WROpcode.RDMA_READ, remote_addr=there.address, rkey=there.rkey)
    assert a.one().status in (WCStatus.LOC_PROT_ERR, WCStatus.LOC_ACCESS_ERR)
    a.becomes(QPState.ERR)


def test_a_message_longer_than_the_port_takes(net: Net, pair):
    """LOC_LEN_ERR; tried only where such a message can be named."""
    a, _ = pair
    most = net.context.query_port().max_msg_sz
    if most >= 1 << 31:
        pytest.skip("the device takes messages of every length that an element can have")
    differs(net.context, "rxe", "takes messages longer than its port says")
    mr = net.keep(net.pd.alloc_mr(most + 1))
    a.send(mr)
    assert a.one().status == WCStatus.LOC_LEN_ERR


@pytest.mark.parametrize(
    "opcode",
    [
        pytest.param(WROpcode.RDMA_WRITE, marks=pytest.mark.not_on_siw("completes a WRITE when it is sent")),
        WROpcode.RDMA_READ,
    ],
    ids=lambda opcode: opcode.name,
)
def test_an_error_completes_unsignaled(net: Net, pair, opcode):
    """Always, whatever the flags are."""
    a, _ = pair
    a.send(net.mr().sge(0, 8), opcode, flags=NONE, remote_addr=1, rkey=1, wr_id="bad")
    wc = a.one()
    flushed = driver(net.context) == "siw"  # which says no more about a READ that the peer has refused
    assert (wc.wr_id, wc.status) == ("bad", WCStatus.WR_FLUSH_ERR if flushed else WCStatus.REM_ACCESS_ERR)


# ---- Inline ----------------------------------------------------------------------------------------------------


def test_inline_needs_no_region(net: Net):
    """Copied while posting: no key is looked at, and the memory is free at once."""
    a, b = net.side(max_inline_data=32), net.side()
    net.connect(a, b)
    mr = net.mr()
    memory = bytearray(b"as it was")
    b.receive(mr.sge(0, 32))
    a.send(SGE(memory, lkey=0xDEAD00), flags=SIGNALED | INLINE)
    memory[:] = b"otherwise"
    assert a.one().status == WCStatus.SUCCESS
    b.one()
    assert mr[0:9] == b"as it was"


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD])
def test_what_is_fetched_cannot_be_inline(net: Net, opcode):
    differs(net.context, "rxe", "does not look at the flag")
    a, b = net.side(max_inline_data=32), net.side()
    net.connect(a, b)
    mr = net.mr()
    refused(
        a,
        SendWR(opcode, mr.sge(0, 8), flags=SIGNALED | INLINE, remote_addr=mr.address + 64, rkey=mr.rkey),
    )


# ---- Places in the send queue ---------------------------------------------------------------------------------


@pytest.mark.not_on_siw("frees a place as soon as its request is done")
def test_places_come_free_when_a_signaled_completion_is_polled(net: Net):
    """Not before: neither by execution, nor by a completion that nobody has polled."""
    differs(net.context, "rxe", "frees a place as soon as its request is done")
    a, b = net.side(max_send_wr=8), net.side(max_recv_wr=64)
    net.connect(a, b)
    mr = net.mr()
    depth = a.qp.cap.max_send_wr
    b.qp.post_recv([RecvWR(mr.sge(0, 8)) for _ in range(depth + 1)])
    for _ in range(depth - 1):
        a.send(mr.sge(64, 8), flags=NONE)
    a.send(mr.sge(64, 8), wr_id="last")
    b.poll(depth)
    refused(a, SendWR(WROpcode.SEND, mr.sge(64, 8)), errno.ENOMEM)
    assert a.one().wr_id == "last"
    a.send(mr.sge(64, 8))
    assert a.one().status == WCStatus.SUCCESS


@pytest.mark.not_on_siw("frees a place as soon as its request is done")
def test_a_queue_of_unsignaled_requests_ends_in_enomem(net: Net):
    differs(net.context, "rxe", "frees a place as soon as its request is done")
    a, b = net.side(max_send_wr=8), net.side(max_recv_wr=64)
    net.connect(a, b)
    mr = net.mr()
    depth = a.qp.cap.max_send_wr
    for _ in range(depth):
        b.receive(mr.sge(0, 8))
        a.send(mr.sge(64, 8), flags=NONE)
        b.one()
    assert a.quiet()
    refused(a, SendWR(WROpcode.SEND, mr.sge(64, 8)), errno.ENOMEM)


def test_all_signaled(net: Net):
    a, b = net.side(sq_sig_all=True), net.side()
    net.connect(a, b)
    mr = net.mr()
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(64, 8), flags=NONE, wr_id="silent")
    assert a.one().wr_id == "silent"


# ---- Order ----------------------------------------------------------------------------------------------------


@pytest.mark.not_on_siw("completes what is behind a READ before it")
def test_completions_are_in_the_order_of_posting(net: Net, pair):
    """A send may pass an outstanding read; its completion does not."""
    a, b = pair
    mr, there = net.mr(), net.mr(65536)
    big = net.mr(65536)
    b.receive(mr.sge(0, 8))
    a.qp.post_send(
        [
            SendWR(WROpcode.RDMA_READ, big, wr_id=0, remote_addr=there.address, rkey=there.rkey),
            SendWR(WROpcode.SEND, mr.sge(64, 8), wr_id=1),
            SendWR(WROpcode.RDMA_WRITE, mr.sge(64, 8), wr_id=2, remote_addr=there.address, rkey=there.rkey),
        ]
    )
    assert [wc.wr_id for wc in a.poll(3)] == [0, 1, 2]
    b.one()


@pytest.mark.not_on_iwarp("has no atomics")
def test_a_fence_waits_for_what_is_fetched(net: Net, pair):
    a, b = pair
    here, there, got = net.mr(), net.mr(), net.mr()
    there[0:8] = (5).to_bytes(8, "little")
    b.receive(got)
    remote = {"remote_addr": there.address, "rkey": there.rkey}
    a.qp.post_send(
        [
            SendWR(WROpcode.ATOMIC_FETCH_AND_ADD, here.sge(0, 8), compare_add=2, **remote),
            SendWR(WROpcode.RDMA_READ, here.sge(8, 8), **remote),
            SendWR(WROpcode.SEND, here.sge(0, 16), flags=SIGNALED | SendFlags.FENCE),
        ]
    )
    assert [wc.status for wc in a.poll(3)] == [WCStatus.SUCCESS] * 3
    assert b.one().byte_len == 16
    assert [int.from_bytes(got[i : i + 8], "little") for i in (0, 8)] == [5, 7]


@pytest.mark.parametrize("depth", [1, 2])
def test_reads_beyond_max_rd_atomic_wait(net: Net, depth):
    a, b = net.side(max_send_wr=32), net.side()
    net.connect(a, b, rtr={"max_dest_rd_atomic": depth}, rts={"max_rd_atomic": depth})
    here, there = net.mr(access=EVERYTHING), net.mr()
    there[:] = bytes(range(256)) * 16
    a.qp.post_send(
        [
            SendWR(
                WROpcode.RDMA_READ,
                here.sge(i * 8, 8),
                wr_id=i,
                remote_addr=there.address + i * 8,
                rkey=there.rkey,
            )
            for i in range(24)
        ]
    )
    assert [wc.wr_id for wc in a.poll(24)] == list(range(24))
    assert here[:192] == there[:192]
