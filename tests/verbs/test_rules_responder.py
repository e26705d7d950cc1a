"""Rules of the responder: what it answers, what both sides are told, and what is only dropped.

Class C errors of the InfiniBand specification (9.9.3): the requester gets the status, the responder's queue
pair goes to ERR with an asynchronous event, and its receives are flushed. docs/rules.md maps the rules
to the tests.
"""

import pytest

from rdmanet.verbs import (
    PD,
    SGE,
    AccessFlags,
    EventType,
    QPState,
    QPType,
    WCOpcode,
    WCStatus,
    WROpcode,
)

from .conftest import EVERYTHING, Net, Side, differs, driver
from .test_datagram import GRH, QKEY, to

LOCAL, READ, WRITE, ATOMIC = (
    AccessFlags.LOCAL_WRITE,
    AccessFlags.REMOTE_READ,
    AccessFlags.REMOTE_WRITE,
    AccessFlags.REMOTE_ATOMIC,
)
REMOTE = [
    WROpcode.RDMA_WRITE,
    WROpcode.RDMA_READ,
    pytest.param(WROpcode.ATOMIC_FETCH_AND_ADD, marks=pytest.mark.not_on_iwarp("has no atomics")),
]
# What siw has sent it has done, for the sender; that the peer refuses it only ends the connection.
TOLD_WHEN_SENT = pytest.mark.not_on_siw(
    "completes a WRITE or SEND when it is sent; a refusal ends the connection"
)
REMOTE_IDS = pytest.mark.parametrize("opcode", REMOTE, ids=lambda opcode: opcode.name)


def both_fail(
    net: Net,
    a: Side,
    b: Side,
    status: WCStatus,
    event: EventType,
    *,
    receive: WCStatus = WCStatus.WR_FLUSH_ERR,
    rxe: tuple[WCStatus, WCStatus] | None = None,
) -> None:
    """The requester's next completion has the status, the responder's receive fails too, with an event."""
    device = driver(net.context)
    if device == "rxe" and rxe is not None:
        status, receive = rxe
    elif device == "siw":
        status = WCStatus.WR_FLUSH_ERR
    wc = a.one()
    assert wc.status == status, wc
    a.becomes(QPState.ERR)
    if device == "siw":  # which leaves the responder's receives where they are
        return
    wc = b.one()
    assert (wc.status, wc.wr_id) == (receive, "waiting"), wc
    b.becomes(QPState.ERR)
    if device != "rxe":  # which tells nobody
        assert net.event(event).qp is b.qp


@pytest.mark.parametrize(
    "fault", ["key", "after", "before", "across", "longer", "rights", "domain", "closed"]
)
@REMOTE_IDS
def test_remote_access(net: Net, pair, opcode, fault):
    """Wrong key, range, rights or domain: REM_ACCESS_ERR there, QP_ACCESS_ERR here."""
    if opcode == WROpcode.RDMA_READ and fault == "rights":
        differs(net.context, "siw", "lets every region be read")
    if opcode == WROpcode.RDMA_WRITE:
        differs(
            net.context, "siw", "completes a WRITE or SEND when it is sent; a refusal ends the connection"
        )
    a, b = pair
    right = {WROpcode.RDMA_WRITE: WRITE, WROpcode.RDMA_READ: READ}.get(opcode, ATOMIC)
    access = EVERYTHING & ~right if fault == "rights" else EVERYTHING
    pd = net.keep(PD(net.context)) if fault == "domain" else net.pd
    region = net.keep(pd.alloc_mr(4 if fault == "longer" else 4096, access))
    address, rkey, length = region.address, region.rkey, 8
    if fault == "key":
        rkey ^= 0x5A
    elif fault == "after":
        address += 4096
    elif fault == "before":
        address -= 8
    elif fault == "across":
        address += 4096 - 4 if opcode != WROpcode.ATOMIC_FETCH_AND_ADD else 4096
    elif fault == "closed":
        region.close()
    b.receive(net.mr(), wr_id="waiting")
    a.send(net.mr().sge(0, length), opcode, remote_addr=address, rkey=rkey, compare_add=1)
    both_fail(net, a, b, WCStatus.REM_ACCESS_ERR, EventType.QP_ACCESS_ERR)


@pytest.mark.not_on_iwarp("has no immediate data")
def test_a_write_with_immediate_and_a_wrong_key(net: Net, pair):
    """The receive that it would have taken fails, too."""
    a, b = pair
    b.receive(net.mr(), wr_id="waiting")
    a.send(net.mr().sge(0, 8), WROpcode.RDMA_WRITE_WITH_IMM, remote_addr=1, rkey=1, imm_data=1)
    assert a.one().status == WCStatus.REM_ACCESS_ERR
    wc = b.one()
    assert wc.wr_id == "waiting" and wc.status != WCStatus.SUCCESS
    b.becomes(QPState.ERR)


def test_nothing_of_a_refused_write_is_placed(net: Net, pair):
    a, b = pair
    there, source = net.mr(100), net.mr()
    source[:64] = b"x" * 64
    a.send(source.sge(0, 64), WROpcode.RDMA_WRITE, remote_addr=there.address + 50, rkey=there.rkey)
    if driver(net.context) == "siw":
        assert a.one().status == WCStatus.SUCCESS, "it has been sent"
    else:
        assert a.one().status == WCStatus.REM_ACCESS_ERR
    b.becomes(QPState.ERR)
    assert bytes(there) == bytes(100)


@REMOTE_IDS
def test_what_the_queue_pair_does_not_allow(net: Net, opcode):
    """qp_access_flags come first: an invalid request, whatever the region would allow."""
    a, b = net.pair(access=AccessFlags(0))
    there = net.mr()
    b.receive(net.mr(), wr_id="waiting")
    a.send(net.mr().sge(0, 8), opcode, remote_addr=there.address, rkey=there.rkey, compare_add=1)
    both_fail(net, a, b, WCStatus.REM_INV_REQ_ERR, EventType.QP_REQ_ERR)


@pytest.mark.parametrize("opcode", REMOTE[1:], ids=lambda opcode: opcode.name)
def test_fetching_without_room_for_it(net: Net, opcode):
    """max_dest_rd_atomic 0."""
    a, b = net.pair(rtr={"max_dest_rd_atomic": 0})
    there = net.mr()
    b.receive(net.mr(), wr_id="waiting")
    a.send(net.mr().sge(0, 8), opcode, remote_addr=there.address, rkey=there.rkey, compare_add=1)
    both_fail(net, a, b, WCStatus.REM_INV_REQ_ERR, EventType.QP_REQ_ERR)


@pytest.mark.not_on_iwarp("has no atomics")
def test_a_misaligned_atomic(net: Net, pair):
    differs(net.context, "rxe", "refuses to post it")
    a, b = pair
    there = net.mr()
    b.receive(net.mr(), wr_id="waiting")
    a.send(
        net.mr().sge(0, 8),
        WROpcode.ATOMIC_FETCH_AND_ADD,
        remote_addr=there.address + 4,
        rkey=there.rkey,
        compare_add=1,
    )
    both_fail(net, a, b, WCStatus.REM_INV_REQ_ERR, EventType.QP_REQ_ERR)
    assert not any(bytes(there))


@TOLD_WHEN_SENT
def test_a_message_longer_than_its_receive(net: Net, pair):
    a, b = pair
    b.receive(net.mr().sge(0, 10), wr_id="waiting")
    a.send(net.mr().sge(0, 11))
    both_fail(
        net,
        a,
        b,
        WCStatus.REM_INV_REQ_ERR,
        EventType.QP_REQ_ERR,
        receive=WCStatus.LOC_LEN_ERR,
        rxe=(WCStatus.REM_OP_ERR, WCStatus.LOC_QP_OP_ERR),
    )


@TOLD_WHEN_SENT
def test_a_receive_with_a_wrong_key(net: Net, pair):
    """The responder's own fault: REM_OP_ERR there."""
    a, b = pair
    b.receive(SGE(net.mr(), 0, 64, lkey=0xDEAD00), wr_id="waiting")
    a.send(net.mr().sge(0, 8))
    kernel = driver(net.context) == "rxe"
    assert a.one().status == WCStatus.REM_OP_ERR
    wc = b.one()
    assert (wc.status, wc.wr_id) == (WCStatus.LOC_QP_OP_ERR if kernel else WCStatus.LOC_PROT_ERR, "waiting")
    a.becomes(QPState.ERR)
    b.becomes(QPState.ERR)


@pytest.mark.parametrize("opcode", REMOTE[:2], ids=lambda opcode: opcode.name)
def test_no_bytes_need_no_key(net: Net, pair, opcode):
    """A zero-length operation does not look at rkey or address."""
    a, _ = pair
    a.send((), opcode, remote_addr=1, rkey=0xDEAD00)
    assert a.one().status == WCStatus.SUCCESS


# ---- Unreliable: dropped -----------------------------------------------------------------------------------


@pytest.fixture
def unreliable(net: Net) -> tuple[Side, Side]:
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b)
    return a, b


def still_works(net: Net, a: Side, b: Side) -> None:
    mr = net.mr()
    mr[64:69] = b"after"
    b.receive(mr.sge(0, 64), wr_id="after")
    a.send(mr.sge(64, 5), wr_id="after")
    assert (wc := a.one()).status == WCStatus.SUCCESS and wc.wr_id == "after"
    wc = b.one()
    assert (wc.status, wc.wr_id, wc.byte_len) == (WCStatus.SUCCESS, "after", 5)
    assert mr[0:5] == b"after"
    assert a.qp.query()[0].qp_state == b.qp.query()[0].qp_state == QPState.RTS


def test_unreliable_without_a_receive(net: Net, unreliable):
    """Sent is sent: the sender succeeds, and the message is gone."""
    a, b = unreliable
    a.send(net.mr().sge(0, 8))
    assert a.one().status == WCStatus.SUCCESS
    assert b.quiet()
    still_works(net, a, b)


@pytest.mark.parametrize("fault", ["key", "range", "queue pair"])
def test_unreliable_writes_that_are_refused(net: Net, fault):
    """They are dropped silently, and nothing is written."""
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b, access=AccessFlags(0) if fault == "queue pair" else EVERYTHING)
    differs(net.context, "rxe", "puts the responder into ERR")
    there = net.mr()
    mr = net.mr()
    mr[0:8] = b"intruder"
    a.send(
        mr.sge(0, 8),
        WROpcode.RDMA_WRITE,
        remote_addr=there.address + (4090 if fault == "range" else 0),
        rkey=there.rkey ^ (0x5A if fault == "key" else 0),
    )
    assert a.one().status == WCStatus.SUCCESS
    still_works(net, a, b)
    assert not any(bytes(there))


def test_datagrams_without_a_receive(net: Net):
    a, b = net.datagrams(), net.datagrams()
    mr, ah = net.mr(), net.ah()
    a.send(mr.sge(0, 8), **to(ah, b))
    assert a.one().status == WCStatus.SUCCESS
    assert b.quiet()
    b.receive(mr.sge(1024, 64 + GRH), wr_id="after")
    a.send(mr.sge(0, 3), **to(ah, b))
    wc = b.one()
    assert (wc.wr_id, wc.byte_len) == ("after", GRH + 3)
    a.one()


def test_datagrams_with_a_wrong_key(net: Net):
    """Another Q_Key than the receiver's: dropped."""
    a, b = net.datagrams(), net.datagrams()
    mr, ah = net.mr(), net.ah()
    b.receive(mr.sge(1024, 64 + GRH), wr_id="right")
    a.send(mr.sge(0, 8), **to(ah, b, qkey=QKEY + 1))
    assert a.one().status == WCStatus.SUCCESS
    assert b.quiet()
    a.send(mr.sge(0, 3), **to(ah, b))
    assert (wc := b.one()).wr_id == "right" and wc.byte_len == GRH + 3
    a.one()


def test_the_high_bit_of_a_qkey(net: Net):
    """With it in a request, the sender's own Q_Key goes out (IBTA 10.2.5)."""
    a, b = net.datagrams(qkey=0x77), net.datagrams(qkey=0x77)
    differs(net.context, "rxe", "sends the key of the request as it is")
    mr, ah = net.mr(), net.ah()
    b.receive(mr.sge(1024, 64 + GRH))
    a.send(mr.sge(0, 8), **to(ah, b, qkey=0x80000000))
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().byte_len == GRH + 8


def test_datagrams_to_nobody(net: Net):
    a = net.datagrams()
    a.send(net.mr().sge(0, 8), ah=net.ah(), remote_qpn=a.qp.qp_num ^ 0x55, remote_qkey=QKEY)
    assert a.one().status == WCStatus.SUCCESS
    assert a.qp.query()[0].qp_state == QPState.RTS


# ---- What a receive's completion tells --------------------------------------------------------------------


@pytest.mark.not_on_iwarp("has no immediate data")
def test_a_write_with_immediate_is_told(net: Net, pair):
    """RECV_RDMA_WITH_IMM with the length written; the receive's own memory is not touched."""
    a, b = pair
    mr, there = net.mr(), net.mr()
    mr[0:9] = b"immediate"
    b.receive(mr.sge(1024, 64))
    a.send(
        mr.sge(0, 9),
        WROpcode.RDMA_WRITE_WITH_IMM,
        imm_data=0x01020304,
        remote_addr=there.address,
        rkey=there.rkey,
    )
    wc = b.one()
    assert wc.opcode == WCOpcode.RECV_RDMA_WITH_IMM
    assert (wc.byte_len, wc.imm_data) == (9, 0x01020304)
    assert not any(mr[1024 : 1024 + 64])
    assert there[0:9] == b"immediate"
    assert a.one().opcode == WCOpcode.RDMA_WRITE


def test_a_plain_write_tells_nobody(net: Net, pair):
    a, b = pair
    mr, there = net.mr(), net.mr()
    mr[0:8] = b"8 bytes!"
    b.receive(mr.sge(1024, 64))
    a.send(mr.sge(0, 8), WROpcode.RDMA_WRITE, remote_addr=there.address, rkey=there.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert b.quiet()
    assert (there[0:8], mr[1024:1032]) == (b"8 bytes!", bytes(8))
    assert b.qp.in_flight == (0, 1)


def test_a_send_without_immediate_has_none(net: Net, pair):
    a, b = pair
    mr = net.mr()
    b.receive(mr.sge(1024, 64))
    a.send(mr.sge(0, 8))
    wc = b.one()
    assert (wc.opcode, wc.imm_data, wc.byte_len, wc.qp_num) == (WCOpcode.RECV, None, 8, b.qp.qp_num)
    a.one()
