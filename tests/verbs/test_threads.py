"""Which object may be used from which thread, row by row of the table in docs/async-verbs.md.

What is for all threads is used by several at once. What is for one at a time refuses the second, which leaves it
as it was; the rows about event loops are tested in tests/verbs_async.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rdmanet.cm import CMEventChannel
from rdmanet.verbs import (
    AH,
    CQ,
    CQEX,
    MW,
    PD,
    QP,
    SRQ,
    AHAttr,
    CompChannel,
    CQInitAttrEx,
    MWType,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendWR,
    SRQAttr,
    WROpcode,
)

from .conftest import EVERYTHING, needs

THREADS = 4


def together(*works: Callable[[], object]) -> None:
    """Each in a thread of its own, all at once; the first exception is raised here."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Switch between threads a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def rounds(device) -> int:
    return 200 if device.library.embedded_device else 5


# ---- All threads ----------------------------------------------------------------------------------------


def test_children_of_one_context_and_domain(net, rounds):
    """Context, PD, MR, MW, AH, SRQ, CQ, QP: made and closed by all threads; the fixture counts what is left."""
    with needs("address handles"):
        AH(net.pd, AHAttr(net.gid.gid, net.gid.gid_index)).close()
    with needs("memory windows"):
        MW(net.pd, MWType.TYPE_2).close()

    def work():
        memory = bytearray(100)
        for _ in range(rounds):
            with PD(net.context), CompChannel(net.context) as channel, CQ(net.context, 8, channel) as cq:
                with SRQ(net.pd, SRQAttr(4, 1)) as srq, AH(net.pd, AHAttr(net.gid.gid, net.gid.gid_index)):
                    with QP(net.pd, QPInitAttr(cq, cq, QPCap(4, 0), srq=srq)) as qp, net.pd.reg_mr(memory):
                        with MW(net.pd, MWType.TYPE_2), net.pd.alloc_mr(4096) as mr:
                            mr[:4] = b"abcd"
                            qp.to_init()
                            assert net.context.query_device().max_qp > 0 and mr[:4] == b"abcd"

    together(*[work] * THREADS)


def test_the_first_and_the_last_child_of_a_context(manager, address, rounds):
    """The connection manager's context is held open by what is made from it, once, whoever comes first and goes last.

    The fixture sees that nothing holds it afterwards. Other threads have the library busy meanwhile, so that what
    begins and ends the holding takes its time.
    """
    id = manager.id()
    id.bind_addr((address, 0))
    context, done = id.context, threading.Event()
    turn = threading.Barrier(2, timeout=60)

    def work():
        try:
            for _ in range(rounds):
                turn.wait()
                PD(context).close()
        finally:
            done.set()

    def keep_busy():
        with CMEventChannel(context.library) as channel:
            while not done.is_set():
                channel.create_id().close()

    together(work, work, keep_busy, keep_busy)


@pytest.mark.parametrize("extended", [False, True], ids=["CQ", "CQEX"])
def test_one_queue_pair_and_completion_queue(net, rounds, extended):
    """Several threads post, several poll: each request ends once."""
    net.by_hand()
    count = 20 * rounds
    mr = net.mr()
    with needs("extended completion queues"):
        cq = CQEX(net.context, CQInitAttrEx(256)) if extended else CQ(net.context, 256)
    net.keep(cq)
    qp = net.keep(QP(net.pd, QPInitAttr(cq, cq, QPCap(128, 1))))
    qp.to_init(access=EVERYTHING)
    qp.to_rtr(qp.qp_num, net.gid.gid, sgid_index=net.gid.gid_index)
    qp.to_rts()
    ended: list[tuple[int, int]] = []
    room = threading.Semaphore(qp.cap.max_send_wr)
    deadline = time.monotonic() + 60

    def post(thread):
        for i in range(count):
            assert room.acquire(timeout=60)
            where = {"remote_addr": mr.address + 64 * thread, "rkey": mr.rkey}
            qp.post_send(SendWR(WROpcode.RDMA_WRITE, mr.at[:64], wr_id=(thread, i), **where))

    def poll():
        while len(ended) < THREADS * count:
            assert time.monotonic() < deadline, f"{len(ended)} of {THREADS * count}"
            found = list(itertools.islice(cq.start_poll(), 7)) if extended else cq.poll(7)
            for wc in found:
                wc.raise_for_status()
                ended.append(wc.wr_id)
                room.release()

    together(*[lambda thread=thread: post(thread) for thread in range(THREADS)], poll, poll)
    assert sorted(ended) == [(thread, i) for thread in range(THREADS) for i in range(count)]
    assert qp.in_flight == (0, 0)


def test_one_shared_receive_queue(net, rounds):
    """Several threads give receives, and another takes them; none is lost, none comes twice."""
    net.by_hand()
    count = 5 * rounds
    with needs("shared receive queues"):
        srq = net.keep(SRQ(net.pd, SRQAttr(64, 1)))
    mr = net.mr()
    cq = net.keep(CQ(net.context, 256))
    qp = net.keep(QP(net.pd, QPInitAttr(cq, cq, QPCap(16, 0), srq=srq)))
    qp.to_init(access=EVERYTHING)
    qp.to_rtr(qp.qp_num, net.gid.gid, sgid_index=net.gid.gid_index)
    qp.to_rts()
    room, there = threading.Semaphore(64), threading.Semaphore(0)
    received = []

    def give(thread):
        for i in range(count):
            assert room.acquire(timeout=60)
            srq.post_recv(RecvWR(mr.at[:8], wr_id=(thread, i)))
            there.release()

    def take():
        for _ in range(THREADS * count):
            assert there.acquire(timeout=60)
            qp.post_send(SendWR(WROpcode.SEND, mr.at[8:16], flags=2))
            deadline, left = time.monotonic() + 60, 2
            while left:
                assert time.monotonic() < deadline
                for wc in cq.poll():
                    wc.raise_for_status()
                    left -= 1
                    if not wc.is_send:
                        received.append(wc.wr_id)
                        room.release()

    together(*[lambda thread=thread: give(thread) for thread in range(THREADS)], take)
    assert sorted(received) == [(thread, i) for thread in range(THREADS) for i in range(count)]
    assert srq.in_flight == 0


# ---- One thread at a time --------------------------------------------------------------------------------


def until_refused(work: Callable[[], object]) -> str:
    """Two threads do the same until one of them comes while the other is at it."""
    refused: list[str] = []
    deadline = time.monotonic() + 60

    def run():
        while not refused:
            assert time.monotonic() < deadline, "both may"
            try:
                work()
            except RuntimeError as exc:
                refused.append(str(exc))

    together(run, run)
    return refused[0]


def test_an_identifier(manager, address):
    id = manager.id()
    text = until_refused(id.set_reuse_addr)
    assert "<CMID " in text and "in use by another thread" in text
    together(lambda: id.bind_addr((address, 0)))  # another thread at another time
    id.listen(1)


def test_an_event_channel(device):
    with CMEventChannel(device.library) as channel:
        text = until_refused(channel.get_event)
        assert "<CMEventChannel " in text and "in use by another thread" in text
        together(lambda: channel.create_id().close())
        assert channel.get_event() is None


def test_closing_what_another_thread_uses(device):
    """It is refused and stays open, or has been closed: then the other is told. Nothing is used that was freed."""
    for _ in range(50):
        channel = CMEventChannel(device.library)
        id = channel.create_id()

        def use(id=id):
            while not id.closed:
                try:
                    id.set_reuse_addr()
                except RuntimeError:  # it is just being closed
                    pass
                except ValueError:
                    return

        def close(id=id):
            while not id.closed:
                try:
                    id.close()
                except RuntimeError:
                    pass

        together(use, close)
        channel.close()
