"""The loops in C that `rdmanet perf` measures with, between two queue pairs of this process."""

import gc
import mmap
import threading
import weakref

import pytest

from rdmanet._core import Histogram, Traffic, cache_line_ns
from rdmanet.errors import CompletionError
from rdmanet.verbs import CQ, QP, CompChannel, QPCap, QPInitAttr, RecvWR, SendWR, WROpcode

from .conftest import Net, Side

LONG_S = 60.0


class Split(Side):
    """A side with a completion queue for sends, and one for receives."""

    def __init__(self, net: Net) -> None:
        channel = CompChannel(net.context)
        send, self.recv_cq = CQ(net.context, 64, channel), CQ(net.context, 64, channel)
        qp = QP(net.pd, QPInitAttr(send, self.recv_cq, QPCap(32, 32, 1, 1)))
        super().__init__(net.pd, channel, send, qp, net.managed)

    def close(self) -> None:
        self.qp.close()
        self.recv_cq.close()
        super().close()


@pytest.fixture
def sides(net):
    made = [Split(net), Split(net)]
    try:
        net.connect(*made)
        yield made
    finally:
        for one in made:
            one.close()


def write(net, size=64):
    mr = net.mr(4096)
    return mr, SendWR(WROpcode.RDMA_WRITE, mr.at[:size], remote_addr=mr.address + 2048, rkey=mr.rkey)


@pytest.mark.parametrize(("list_size", "every"), [(1, 1), (1, 7), (4, 1), (4, 8)])
def test_flow(net, sides, list_size, every):
    mr, request = write(net)
    memoryview(mr)[:64] = bytes(range(64))
    traffic = Traffic([sides[0].qp], [request], [], depth=16, list_size=list_size, every=every)
    assert traffic.flow(LONG_S, 100)
    while not traffic.flow(LONG_S, posting=False):
        pass
    assert traffic.in_flight == 0
    assert 100 <= traffic.sent < 100 + list_size * 2
    assert bytes(memoryview(mr)[2048 : 2048 + 64]) == bytes(range(64))
    traffic.restart()
    assert traffic.sent == 0
    assert traffic.flow(LONG_S, 4)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_sends_are_received(net, sides, sleeps):
    mr = net.mr(8192)
    memoryview(mr)[:3] = b"abc"
    sender = Traffic([sides[0].qp], [SendWR(WROpcode.SEND, mr.at[:3])], [], depth=8, sleeps=sleeps)
    receiver = Traffic(
        [sides[1].qp], [], [RecvWR(mr.at[4096:4200])], depth=8, receive_depth=16, sleeps=sleeps
    )
    done = threading.Thread(target=sender.flow, args=(LONG_S, 100))
    done.start()
    while receiver.received < 100:
        receiver.flow(0.01, posting=False)
    done.join()
    assert receiver.received == 100
    assert bytes(memoryview(mr)[4096:4099]) == b"abc"


@pytest.mark.parametrize("by", [0, 1])
def test_exchange(net, sides, by):
    """By bytes in memory, and by messages."""
    mr = net.mr(4 * 4096)
    found, ends = Histogram(), []
    for number, one in enumerate(sides):
        mine, theirs = 8192 * number, 8192 * (1 - number)
        if by == 0:
            request = SendWR(
                WROpcode.RDMA_WRITE,
                mr.at[mine : mine + 8],
                remote_addr=mr.address + theirs + 4096,
                rkey=mr.rkey,
            )
            ends.append(
                Traffic(
                    [one.qp], [request], [], depth=8, memory=mr, outgoing=mine + 7, incoming=mine + 4096 + 7
                )
            )
        else:
            request = SendWR(WROpcode.SEND, mr.at[mine : mine + 8])
            receive = RecvWR(mr.at[mine + 4096 : mine + 4096 + 64])
            ends.append(Traffic([one.qp], [request], [receive], depth=8, receive_depth=8))
    over = threading.Event()

    def answer():
        while not over.is_set():
            ends[1].exchange(0.01, Histogram(), by=by, answers=True)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        assert ends[0].exchange(LONG_S, found, 300, by=by, answers=False)
    finally:
        over.set()
        answering.join()
    assert found.count == 300
    assert 0 < found.min_ns <= found.percentile(50) <= found.max_ns


@pytest.mark.not_on_iwarp("retries nothing: an answer that finds no receive ends the connection")
def test_who_takes_no_answers_holds_nobody_up(net, sides):
    mr = net.mr(4 * 4096)
    asking = Traffic([sides[0].qp], [SendWR(WROpcode.SEND, mr.at[:8])], [], depth=24)
    answer, receive = SendWR(WROpcode.SEND, mr.at[4096:4104]), RecvWR(mr.at[8192:8256])
    answering = Traffic([sides[1].qp], [answer], [receive], depth=24, receive_depth=24)
    for asked in range(1, 20):
        assert asking.flow(LONG_S, asked)
        assert not answering.exchange(0.01, Histogram(), by=1, answers=True)
    assert answering.in_flight == 16


def test_times_of_reads(net, sides):
    mr, found = net.mr(4096), Histogram()
    request = SendWR(WROpcode.RDMA_READ, mr.at[:8], remote_addr=mr.address + 64, rkey=mr.rkey)
    traffic = Traffic([sides[0].qp], [request], [], depth=8)
    assert traffic.exchange(LONG_S, found, 100, by=2, answers=False)
    assert found.count == traffic.sent == 100


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_a_request_that_fails(net, sides):
    mr = net.mr(4096)
    request = SendWR(WROpcode.RDMA_WRITE, mr.at[:8], remote_addr=mr.address, rkey=mr.rkey ^ 0xFF)
    traffic = Traffic([sides[0].qp], [request], [], depth=8)
    with pytest.raises(CompletionError):
        while not traffic.flow(LONG_S, 8) or not traffic.flow(LONG_S, posting=False):
            pass


def test_what_is_closed_is_not_used(net, sides):
    mr, request = write(net)
    traffic = Traffic([sides[0].qp], [request], [], depth=8)
    sides[0].qp.close()
    with pytest.raises(ValueError, match="closed"):
        traffic.flow(0.01, 1)


def test_the_memory_of_receives_is_there_as_long_as_the_queue_pair(net, sides):
    mr = net.pd.alloc_mr(4096, 1)
    gone = weakref.ref(mr)
    Traffic([sides[1].qp], [], [RecvWR(mr.at[:64])], depth=8, receive_depth=4)
    del mr
    gc.collect()
    mr = gone()
    assert mr is not None
    sides[1].qp.close()
    mr.close()
    del mr
    gc.collect()
    assert gone() is None


def test_what_makes_no_sense(net, sides):
    mr, request = write(net)
    a, b = (one.qp for one in sides)
    receive = RecvWR(mr.at[:64])
    for arguments, options in (
        (([], [], []), {"depth": 1}),
        (([a], [request, request], []), {"depth": 1}),
        (([a], [request], []), {"depth": 0}),
        (([a], [request], []), {"depth": 4, "list_size": 5}),
        (([a], [request], []), {"depth": 4, "every": 5}),
        (([a, b], [request, request], []), {"depth": 4}),
    ):
        with pytest.raises(ValueError, match="Traffic"):
            Traffic(*arguments, **options)
    with pytest.raises(IndexError, match="not within 4096"):
        Traffic([a], [request], [], depth=4, memory=mr, outgoing=4096)
    one_queue = net.side()
    with pytest.raises(ValueError, match="completion queue of their own"):
        Traffic([one_queue.qp], [], [receive], depth=4, receive_depth=4)
    with pytest.raises(TypeError):
        Traffic([None], [request], [], depth=4)
    traffic = Traffic([a], [request], [], depth=4)
    with pytest.raises(ValueError, match="needs memory"):
        traffic.exchange(0.01, Histogram(), by=0, answers=False)
    with pytest.raises(ValueError, match="no sends"):
        Traffic([a], [], [], depth=4).exchange(0.01, Histogram(), by=2, answers=False)


def test_bare():
    bare = Traffic.__new__(Traffic)
    with pytest.raises(RuntimeError, match="not initialized"):
        bare.flow(0.01)


def test_a_cache_line_there_and_back():
    with mmap.mmap(-1, 4096) as memory:
        answering = threading.Thread(target=cache_line_ns, args=(memory, 100, True, LONG_S))
        answering.start()
        assert cache_line_ns(memory, 100, False, LONG_S) > 0
        answering.join()
    with mmap.mmap(-1, 4096) as memory:
        assert cache_line_ns(memory, 100, False, 0.001) == 0.0
        with pytest.raises(ValueError, match="128 are needed"):
            cache_line_ns(bytearray(64), 1, False)
