"""Every operation of a reliable connection moves the right bytes, and says so in its completions."""

import os
import struct
import threading
from collections import Counter

import pytest

from rdmanet.verbs import (
    SGE,
    AccessFlags,
    QPState,
    RecvWR,
    SendFlags,
    SendWR,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
)

from .conftest import differs


def u64(mr, offset=0):
    return struct.unpack_from("=Q", mr, offset)[0]


def test_send_receive(net, pair):
    a, b = pair
    source, target = net.mr(), net.mr()
    data = os.urandom(1000)
    source[:1000] = data
    b.receive(target, wr_id="here")
    a.send(SGE(source, 0, 1000), wr_id="there")

    sent = a.one()
    assert (sent.status, sent.opcode, sent.wr_id, sent.qp) == (WCStatus.SUCCESS, WCOpcode.SEND, "there", a.qp)
    received = b.one()
    assert (received.status, received.opcode, received.wr_id) == (WCStatus.SUCCESS, WCOpcode.RECV, "here")
    assert received.byte_len == 1000
    assert received.imm_data is None
    assert received.qp_num == b.qp.qp_num
    assert target[:1000] == data
    assert target[1000:] == bytes(len(target) - 1000)


@pytest.mark.parametrize("size", [0, 1, 7, 64, 4096, 65536, 1 << 20])
def test_sizes(net, pair, size):
    a, b = pair
    source, target = net.mr(max(size, 1)), net.mr(size + 1)
    source[:size] = data = os.urandom(size)
    target[size:] = b"\xaa"
    b.receive(target)
    a.send(SGE(source, 0, size))
    assert a.one().status == WCStatus.SUCCESS
    assert b.one().byte_len == size
    assert target[:size] == data
    assert target[size:] == b"\xaa", "a byte past the message was written"


def test_both_directions(net, pair):
    a, b = pair
    x, y = net.mr(), net.mr()
    for side, mr, text in ((a, x, b"ping"), (b, y, b"pong")):
        mr[:4] = text
        side.receive(SGE(mr, 64, 64))
    a.send(SGE(x, 0, 4))
    b.send(SGE(y, 0, 4))
    assert {wc.opcode for wc in a.poll(2)} == {WCOpcode.SEND, WCOpcode.RECV}
    assert {wc.opcode for wc in b.poll(2)} == {WCOpcode.SEND, WCOpcode.RECV}
    assert (x[64:68], y[64:68]) == (b"pong", b"ping")


def test_scatter_gather(net, pair):
    """Elements of one side need not fit those of the other."""
    a, b = pair
    source, target = net.mr(), net.mr()
    source[:100] = data = os.urandom(100)
    b.receive([SGE(target, 0, 10), SGE(target, 100, 0), SGE(target, 200, 200)])
    a.send([SGE(source, 0, 3), SGE(source, 3, 90), SGE(source, 93, 7)])
    assert b.one().byte_len == 100
    assert a.one().status == WCStatus.SUCCESS
    assert target[:10] + target[200:290] == data


def test_order_of_messages_and_completions(net, pair):
    a, b = pair
    source, target = net.mr(), net.mr()
    source[:256] = bytes(range(256))
    b.qp.post_recv([RecvWR(SGE(target, 16 * i, 16), wr_id=i) for i in range(16)])
    a.qp.post_send([SendWR(WROpcode.SEND, SGE(source, 16 * i, 16), wr_id=i) for i in range(16)])
    assert [wc.wr_id for wc in a.poll(16)] == list(range(16))
    assert [wc.wr_id for wc in b.poll(16)] == list(range(16))
    assert target[:256] == source[:256]


@pytest.mark.not_on_iwarp("has no immediate data")
def test_send_with_immediate(net, pair):
    a, b = pair
    mr = net.mr()
    b.receive(mr)
    a.send((), WROpcode.SEND_WITH_IMM, imm_data=0x01020304)
    assert a.one().status == WCStatus.SUCCESS
    wc = b.one()
    assert (wc.opcode, wc.imm_data, wc.byte_len) == (WCOpcode.RECV, 0x01020304, 0)
    assert WCFlags.WITH_IMM in wc.wc_flags


def test_write(net, pair):
    a, b = pair
    source, target = net.mr(), net.mr()
    source[:50] = data = os.urandom(50)
    a.send(
        [SGE(source, 0, 20), SGE(source, 20, 30)],
        WROpcode.RDMA_WRITE,
        remote_addr=target.address + 100,
        rkey=target.rkey,
    )
    wc = a.one()
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.RDMA_WRITE)
    assert target[100:150] == data
    assert b.quiet(), "a plain write completes nothing at the responder"


@pytest.mark.not_on_iwarp("has no immediate data")
def test_write_with_immediate(net, pair):
    a, b = pair
    source, target = net.mr(), net.mr()
    source[:8] = b"whatever"
    b.receive((), wr_id=7)
    a.send(
        SGE(source, 0, 8),
        WROpcode.RDMA_WRITE_WITH_IMM,
        imm_data=9,
        remote_addr=target.address,
        rkey=target.rkey,
    )
    assert a.one().opcode == WCOpcode.RDMA_WRITE
    wc = b.one()
    assert (wc.opcode, wc.imm_data, wc.byte_len, wc.wr_id) == (WCOpcode.RECV_RDMA_WITH_IMM, 9, 8, 7)
    assert target[:8] == b"whatever"


def test_read(net, pair):
    a, b = pair
    here, there = net.mr(), net.mr()
    there[200:300] = data = os.urandom(100)
    several = net.context.query_device().max_sge_rd > 1
    a.send(
        [SGE(here, 0, 40), SGE(here, 40, 60)] if several else [SGE(here, 0, 100)],
        WROpcode.RDMA_READ,
        remote_addr=there.address + 200,
        rkey=there.rkey,
    )
    wc = a.one()
    assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.RDMA_READ)
    assert here[:100] == data
    assert b.quiet()


def test_each_completion_is_its_own_requests(net, pair):
    """Also behind READs, which soft-iWARP lets others overtake: wr_ids and buffers are those of what has ended."""
    a, b = pair
    here, there, small = net.mr(1 << 18), net.mr(1 << 18), net.mr()
    there[:] = data = os.urandom(1 << 18)
    for _ in range(5):
        here[:] = bytes(1 << 18)
        for i in range(3):
            b.receive(small.sge(8 * i, 8))
            part = here.sge(i << 16, 1 << 16)
            remote = {"remote_addr": there.address + (i << 16), "rkey": there.rkey}
            a.send(part, WROpcode.RDMA_READ, wr_id=("read", i), **remote)
            a.send(small.sge(64, 8), wr_id=("send", i))
        for wc in a.poll(6):
            assert wc.status == WCStatus.SUCCESS
            what, i = wc.wr_id
            assert wc.opcode == (WCOpcode.RDMA_READ if what == "read" else WCOpcode.SEND)
            if what == "read":
                assert here[i << 16 : (i + 1) << 16] == data[i << 16 : (i + 1) << 16]
        b.poll(3)
        assert a.qp.in_flight == b.qp.in_flight == (0, 0)


@pytest.mark.not_on_iwarp("has no atomics")
def test_compare_and_swap(net, pair):
    a, _ = pair
    here, there = net.mr(), net.mr()
    struct.pack_into("=Q", there, 8, 5)
    common = {"opcode": WROpcode.ATOMIC_CMP_AND_SWP, "remote_addr": there.address + 8, "rkey": there.rkey}
    a.send(SGE(here, 0, 8), compare_add=5, swap=77, **common)
    assert a.one().opcode == WCOpcode.COMP_SWAP
    assert (u64(here), u64(there, 8)) == (5, 77)
    a.send(SGE(here, 0, 8), compare_add=5, swap=88, **common)
    assert a.one().status == WCStatus.SUCCESS
    assert (u64(here), u64(there, 8)) == (77, 77), "unequal: what is there comes back and stays"


@pytest.mark.not_on_iwarp("has no atomics")
def test_fetch_and_add(net, pair):
    a, _ = pair
    here, there = net.mr(), net.mr()
    struct.pack_into("=Q", there, 0, (1 << 64) - 1)
    for _ in range(2):
        a.send(
            SGE(here, 0, 8),
            WROpcode.ATOMIC_FETCH_AND_ADD,
            compare_add=3,
            remote_addr=there.address,
            rkey=there.rkey,
        )
        assert a.one().opcode == WCOpcode.FETCH_ADD
    assert (u64(here), u64(there)) == (2, 5), "64 bits, wrapping"


def test_inline_is_copied_while_posting(net):
    a, b = net.side(max_inline_data=64), net.side()
    net.connect(a, b)
    assert a.qp.cap.max_inline_data >= 64
    target = net.mr()
    b.receive(target)
    buffer = bytearray(b"no region covers this")
    a.send(SGE(buffer), flags=SendFlags.SIGNALED | SendFlags.INLINE)
    buffer[:] = bytes(len(buffer))
    assert a.one().status == WCStatus.SUCCESS
    assert target[: b.one().byte_len] == b"no region covers this"


def test_inline_write(net):
    a, b = net.side(max_inline_data=64), net.side()
    net.connect(a, b)
    target = net.mr()
    a.send(
        SGE(b"12345678"),
        WROpcode.RDMA_WRITE,
        flags=SendFlags.SIGNALED | SendFlags.INLINE,
        remote_addr=target.address,
        rkey=target.rkey,
    )
    assert a.one().status == WCStatus.SUCCESS
    assert target[:8] == b"12345678"


@pytest.mark.not_on_siw("sends it all the same")
def test_inline_too_long(net):
    a, b = net.side(max_inline_data=16), net.side()
    net.connect(a, b)
    with pytest.raises(OSError, match="ibv_post_send"):
        a.send(SGE(bytes(a.qp.cap.max_inline_data + 1)), flags=SendFlags.INLINE)
    assert a.qp.in_flight == (0, 0)


def test_unsignaled_sends_complete_with_the_next_signaled(net, pair):
    a, b = pair
    mr, target = net.mr(), net.mr()
    b.qp.post_recv([RecvWR(SGE(target, 0, 64)) for _ in range(4)])
    for i in range(3):
        a.send(SGE(mr, 0, 8), flags=SendFlags.NONE, wr_id=i)
    b.poll(3)
    assert a.quiet()
    assert a.qp.in_flight[0] == 3
    a.send(SGE(mr, 0, 8), wr_id="last")
    assert a.one().wr_id == "last"
    assert a.qp.in_flight[0] == 0


@pytest.mark.not_on_siw("frees a place as soon as its request is done")
def test_a_queue_of_unsignaled_sends_fills_up(net):
    """A slot comes free when a later signaled completion is polled; without any, never."""
    a, b = net.side(max_send_wr=8), net.side(max_recv_wr=64)
    net.connect(a, b)
    mr = net.mr()
    depth = a.qp.cap.max_send_wr
    b.qp.post_recv([RecvWR(SGE(mr, 0, 64)) for _ in range(depth)])
    differs(net.context, "rxe", "frees a place as soon as its request is done")
    for _ in range(depth):
        a.send(SGE(mr, 64, 8), flags=SendFlags.NONE)
    with pytest.raises(OSError, match="ibv_post_send") as caught:
        a.send(SGE(mr, 64, 8), flags=SendFlags.NONE)
    assert caught.value.errno == 12


def test_signal_all(net):
    a, b = net.side(sq_sig_all=True), net.side()
    net.connect(a, b)
    mr = net.mr()
    b.receive(mr)
    a.send(SGE(mr, 0, 8), flags=SendFlags.NONE)
    assert a.one().status == WCStatus.SUCCESS


def test_fence_waits_for_reads(net, pair):
    """A fenced send sees what an earlier read has brought."""
    a, b = pair
    here, there, target = net.mr(), net.mr(), net.mr()
    for i in range(20):
        there[:4] = struct.pack("=I", i)
        b.receive(target)
        a.qp.post_send(
            [
                SendWR(WROpcode.RDMA_READ, SGE(here, 0, 4), remote_addr=there.address, rkey=there.rkey),
                SendWR(WROpcode.SEND, SGE(here, 0, 4), flags=SendFlags.FENCE | SendFlags.SIGNALED),
            ]
        )
        assert [wc.opcode for wc in a.poll(2)] == [WCOpcode.RDMA_READ, WCOpcode.SEND]
        b.one()
        assert struct.unpack_from("=I", target) == (i,)


def test_borrowed_memory(net, pair):
    """Memory that the program brought, on both sides."""
    a, b = pair
    source, target = bytes(os.urandom(300)), bytearray(300)
    with net.pd.reg_mr(source) as x, net.pd.reg_mr(target) as y:
        b.receive(y)
        a.send(x)
        assert a.one().status == WCStatus.SUCCESS
        assert b.one().byte_len == 300
        b.send((), WROpcode.RDMA_WRITE, rkey=0)  # of no length: needs no key
        assert b.one().status == WCStatus.SUCCESS
    assert target == source


@pytest.mark.not_on_iwarp("has no atomics")
def test_remote_operations_on_borrowed_memory(net, pair):
    a, _ = pair
    there = bytearray(64)
    rights = (
        AccessFlags.LOCAL_WRITE
        | AccessFlags.REMOTE_WRITE
        | AccessFlags.REMOTE_READ
        | AccessFlags.REMOTE_ATOMIC
    )
    here = net.mr()
    here[:5] = b"hello"
    with net.pd.reg_mr(there, rights) as mr:
        at = {"remote_addr": mr.address, "rkey": mr.rkey}
        a.send(SGE(here, 0, 5), WROpcode.RDMA_WRITE, **at)
        a.send(SGE(here, 100, 64), WROpcode.RDMA_READ, **at)
        assert [wc.status for wc in a.poll(2)] == [WCStatus.SUCCESS] * 2
        assert here[100:105] == b"hello"
        aligned = -mr.address % 8
        at["remote_addr"] += 8 + aligned
        a.send(SGE(here, 0, 8), WROpcode.ATOMIC_FETCH_AND_ADD, compare_add=4, **at)
        assert a.one().status == WCStatus.SUCCESS
        assert struct.unpack_from("=Q", there, 8 + aligned) == (4,)


def test_a_queue_pair_to_itself(net):
    side = net.side()
    side.qp.to_init(access=AccessFlags.REMOTE_WRITE)
    net.to_rtr(side, side)
    side.qp.to_rts()
    mr = net.mr()
    mr[:3] = b"abc"
    side.receive(SGE(mr, 100, 3))
    side.send(SGE(mr, 0, 3))
    assert {wc.opcode for wc in side.poll(2)} == {WCOpcode.SEND, WCOpcode.RECV}
    assert mr[100:103] == b"abc"
    assert side.qp.state == QPState.RTS


def test_counters(net, pair):
    """The embedded device accounts for every payload byte."""
    a, b = pair
    if not a.qp.counters():
        pytest.skip("only the embedded device counts")
    mr = net.mr()
    b.receive(SGE(mr, 0, 100))
    a.send(SGE(mr, 200, 100))
    a.one(), b.one()
    counted = a.qp.counters()
    assert counted["send_wrs"] == 1
    ways = ("bytes_mapped", "bytes_cma", "bytes_engine", "bytes_local", "bytes_stream")
    assert sum(counted[way] for way in ways) == 100
    assert b.qp.counters()["recv_wrs"] == 1
    assert net.context.counters()["send_wrs"] >= 1


def test_more_reads_than_may_be_in_flight(net):
    """The rest wait for their turn; all complete, in order."""
    a, b = net.side(max_send_wr=32), net.side()
    net.connect(a, b, rtr={"max_dest_rd_atomic": 1}, rts={"max_rd_atomic": 1})
    here, there = net.mr(), net.mr()
    there[:256] = bytes(range(256))
    for i in range(20):
        a.send(
            SGE(here, i * 8, 8),
            WROpcode.RDMA_READ,
            remote_addr=there.address + i * 8,
            rkey=there.rkey,
            wr_id=i,
        )
    assert [wc.wr_id for wc in a.poll(20)] == list(range(20))
    assert here[:160] == there[:160]


def test_threads(net):
    """Several threads may post to one queue pair; each completion is that of its request."""
    a, b = net.side(cqe=2048, max_send_wr=900), net.side()
    net.connect(a, b)
    here, there = net.mr(1 << 18), net.mr(1 << 18)
    here[:] = os.urandom(1 << 18)
    lengths = {"long": 1 << 17, "short": 64, "inline": 8}

    def post(name):
        wr = SendWR(
            WROpcode.RDMA_WRITE,
            SGE(here, 0, lengths[name]),
            wr_id=name,
            remote_addr=there.address,
            rkey=there.rkey,
        )
        for _ in range(100):
            a.qp.post_send(wr)

    threads = [threading.Thread(target=post, args=(name,)) for name in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = a.poll(300, timeout=60)
    assert {wc.status for wc in found} == {WCStatus.SUCCESS}
    assert Counter(wc.wr_id for wc in found) == dict.fromkeys(lengths, 100)
    assert there[: 1 << 17] == here[: 1 << 17] and not any(there[1 << 17 :])
    assert a.qp.in_flight == (0, 0)
