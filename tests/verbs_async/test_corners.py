"""What goes wrong half-way: chains refused, queue pairs taken away, cancelling at bad moments, other threads."""

import asyncio
import threading

import pytest
import uvloop
from loops import on_every_loop

from rdmanet.verbs import (
    SRQ,
    AccessFlags,
    CompletionResetError,
    QPCap,
    QPState,
    RecvWR,
    SendFlags,
    SendWR,
    SRQAttr,
    WROpcode,
    live_objects,
)
from rdmanet.verbs_async import AsyncCQ
from tests.support.waiting import begin

no_windows = pytest.mark.not_on_iwarp("has no memory windows")
no_atomics = pytest.mark.not_on_iwarp("has no atomics")


def writing(mr, **options):
    return SendWR(WROpcode.RDMA_WRITE, mr.at[:8], remote_addr=mr.address + 64, rkey=mr.rkey, **options)


# ---- A chain that is refused --------------------------------------------------------------------------


@pytest.mark.not_on_siw("does not count elements when posting")
@pytest.mark.parametrize("flags", [SendFlags.NONE, SendFlags.SIGNALED])
@on_every_loop
async def test_a_chain_that_is_refused_in_its_middle(loop, verbs, flags):
    """The caller gets the error at once. Requests posted before it complete, and nobody waits for them."""
    cq = verbs.cq(loop)
    a, _ = verbs.pair(cq)
    mr = verbs.mr()
    good = writing(mr, flags=flags)
    bad = SendWR(WROpcode.RDMA_WRITE, [mr.at[:1]] * 100, remote_addr=mr.address, rkey=mr.rkey)
    for _ in range(3):
        with pytest.raises(OSError, match="2 of 4 were posted.*elements"):
            await a.batch([good, good, bad, good])
        assert cq.pending == 0
        await a.write(mr.at[:8], mr.to_remote()[64:])
        await a.batch([good] * 4)
    assert (a.in_flight, cq.pending, cq.poll()) == ((0, 0), 0, [])


@on_every_loop
async def test_a_batch_is_looked_at_before_its_turn(loop, verbs):
    """It may have to wait; what is wrong with it is told now."""
    a, _ = verbs.pair(verbs.cq(loop))
    for wrong in (None, 5, RecvWR()):
        with pytest.raises(TypeError):
            await a.batch([writing(verbs.mr()), wrong])
    assert a.in_flight == (0, 0)


# ---- The queue pair is taken away ---------------------------------------------------------------------------


def received_by_many(loop, verbs, cq):
    """A queue pair for whose receives more tasks wait than it holds, after all of them have run."""
    _, b = verbs.pair(cq, depth=2)
    mr = verbs.mr()
    return b, [loop.spawn(b.recv(mr.at[i])) for i in range(b.qp.cap.max_recv_wr + 3)]


@on_every_loop
async def test_who_waits_for_a_turn_hears_that_the_queue_pair_was_closed(loop, verbs):
    """By QP.close(), which knows nothing of AsyncQP."""
    cq = verbs.cq(loop)
    b, receiving = received_by_many(loop, verbs, cq)
    while b.waiting[1] < 3:
        await loop.turn()
    number = b.qp.qp_num
    b.qp.close()
    for task in receiving:
        with pytest.raises(CompletionResetError, match=f"RECV on queue pair {number:#x}: flushed"):
            await task.join()
    assert cq.pending == 0


@pytest.mark.not_on_siw("has queue pairs that are moved by rdma_cm only")
@on_every_loop
async def test_who_waits_for_a_turn_hears_of_a_reset(loop, verbs):
    """Some devices take receives in RESET, where nothing comes."""
    cq = verbs.cq(loop)
    b, receiving = received_by_many(loop, verbs, cq)
    while b.waiting[1] < 3:
        await loop.turn()
    b.qp.to_reset()
    for task in receiving:
        with pytest.raises(CompletionResetError, match="flushed"):
            await task.join()
    assert (cq.pending, b.in_flight) == (0, (0, 0))


@no_windows
@pytest.mark.long  # rxe takes a minute to let go of a queue pair with a window
@pytest.mark.parametrize("end", ["close", "qp.close", "qp.to_error", "qp.to_reset"])
@on_every_loop
async def test_sharing_ends_well_without_the_queue_pair(loop, verbs, end):
    _, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    before = live_objects()["mws"]
    async with b.shared(mr, AccessFlags.REMOTE_WRITE):
        target = b
        for name in end.split("."):
            target = getattr(target, name)
        target()
    assert live_objects()["mws"] == before


# ---- Cancelling ---------------------------------------------------------------------------------------------


@no_windows
@pytest.mark.not_on_rxe(
    "ends the connection where a binding stands behind a request that waits for a receive"
)
@on_every_loop
async def test_sharing_cancelled_while_the_window_is_being_bound(loop, verbs):
    """The window stays until it is bound: closed before, the binding would fail, and the connection with it."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    before = live_objects()["mws"]
    sending = loop.spawn(a.send(mr.at[:8]))  # the binding's turn comes after it: when there is a receive
    await loop.turn()

    async def share():
        async with a.shared(mr, AccessFlags.REMOTE_WRITE):
            raise AssertionError("it is not bound yet")

    sharing = loop.spawn(share())
    while a.in_flight[0] < 2:
        await loop.turn()
    sharing.cancel()
    await sharing.join()
    assert live_objects()["mws"] == before + 1
    await b.recv(mr.at[100:200])
    await sending.join()
    await a.write(mr.at[:8], mr.to_remote()[64:])
    assert live_objects()["mws"] == before
    assert (a.qp.state, cq.pending) == (QPState.RTS, 0)


@on_every_loop
async def test_what_was_cancelled_does_not_pile_up(loop, verbs):
    """A receive with a time-out, again and again: those that wait for their turn are forgotten."""
    cq = verbs.cq(loop)
    _, b = verbs.pair(cq, depth=2)
    depth = b.qp.cap.max_recv_wr
    mr = verbs.mr()
    last = loop.spawn(b.recv(mr.at[:8]))
    for _ in range(1000):
        # Always one that waits, so that the cancelled ones are never the last.
        receiving, last = last, loop.spawn(b.recv(mr.at[:8]))
        await loop.turn()
        receiving.cancel()
        await receiving.join()
    assert (b.in_flight[1], b.waiting[1] < 200, cq.pending < 200 + depth) == (depth, True, True)
    last.cancel()
    await last.join()


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_loop_that_ends_in_the_middle(verbs, factory):
    """What was posted stays posted, with its memory; closing needs no loop."""
    kept = []
    memory = bytearray(64)

    async def main():
        cq = verbs.keep(AsyncCQ(verbs.context, 1024))
        a, b = verbs.pair(cq)
        mr = verbs.keep(verbs.pd.reg_mr(memory))
        kept.extend((cq, a, b, mr, *await begin(b.recv(mr), cq.wait())))

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    cq, a, b, mr, *_ = kept
    assert (cq.pending, b.in_flight) == (1, (0, 1))
    with asyncio.Runner(loop_factory=factory) as runner:  # of another loop it is not
        with pytest.raises(RuntimeError):
            runner.run(cq.wait())
    with pytest.raises(BufferError):
        memory.append(0)


class Refusing:
    """asyncio's loop, but its futures complain when they are told."""

    def __init__(self, loop):
        self.add_reader, self.remove_reader, self.call_soon = (
            loop.add_reader,
            loop.remove_reader,
            loop.call_soon,
        )
        self.loop = loop

    def create_future(self):
        return Refusal(self.loop.create_future())


class Refusal:
    def __init__(self, future):
        self.future = future
        self.done = future.done

    def set_result(self, result):
        self.future.set_result(result)
        raise LookupError("this future refuses")

    def __await__(self):
        return self.future.__await__()


def test_a_future_that_fails_harms_nobody_else(verbs, caplog):
    async def main():
        cq = verbs.keep(AsyncCQ(verbs.context, 1024, notifier=Refusing(asyncio.get_running_loop())))
        a, b = verbs.pair(cq)
        mr = verbs.mr()
        receiving = await begin(*(b.recv(mr.at[8 * i : 8 * i + 8]) for i in range(1, 4)))
        for _ in receiving:
            a.qp.post_send(SendWR(WROpcode.SEND, mr.at[:8], flags=0))
        async with asyncio.timeout(60):
            await asyncio.gather(*receiving)
        assert cq.pending == 0

    asyncio.run(main())
    assert caplog.text.count("cannot be told") == caplog.text.count("LookupError: this future refuses") == 3


# ---- Threads -----------------------------------------------------------------------------------------------


def in_a_thread(call):
    """What it raised, in another thread."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@on_every_loop
async def test_closing_in_another_thread_is_refused(loop, verbs):
    """Waiters are told by their loop, which only its own thread may touch."""
    cq = verbs.cq(loop)
    _, b = verbs.pair(cq)
    receiving = loop.spawn(b.recv(verbs.mr()))
    await loop.turn()
    for close in (b.close, cq.close):
        error = in_a_thread(close)
        assert isinstance(error, RuntimeError) and "thread" in str(error)
    b.close()
    with pytest.raises(CompletionResetError):
        await receiving.join()


def test_what_an_ended_thread_has_left_can_be_closed(verbs):
    kept = []

    async def main():
        cq = AsyncCQ(verbs.context, 1024)
        kept.extend((cq, *verbs.pair(cq)))

    assert in_a_thread(lambda: asyncio.run(main())) is None
    cq, a, b = kept
    a.close()
    b.close()
    cq.close()


# ---- Wrong arguments ---------------------------------------------------------------------------------------


@on_every_loop
async def test_what_is_no_remote_memory(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    with pytest.raises(TypeError, match="MR.to_remote"):
        await a.write(mr.at[:8], mr)
    for wrong in (None, 5, (mr.address, 8, mr.rkey)):
        with pytest.raises(TypeError, match="no remote memory"):
            await a.read(mr.at[:8], wrong)
        with pytest.raises(TypeError, match="no remote memory"):
            await a.fetch_and_add(wrong, 1)
    assert a.in_flight == (0, 0)


@no_atomics
@on_every_loop
async def test_numbers_of_atomics(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    remote = verbs.mr().to_remote()[:8]
    for wrong in (1.5, "1", None):
        with pytest.raises(TypeError):
            await a.fetch_and_add(remote, wrong)
        with pytest.raises(TypeError):
            await a.compare_and_swap(remote, 0, wrong)
    for wrong in (-1, 2**64):
        with pytest.raises(OverflowError):
            await a.compare_and_swap(remote, wrong, 0)
    assert await a.fetch_and_add(remote, 1) == 0


@on_every_loop
async def test_receives_of_a_shared_queue(loop, verbs):
    cq = verbs.cq(loop)
    srq = verbs.keep(SRQ(verbs.pd, SRQAttr(max_wr=4)))
    qp = verbs.keep(cq.create_qp(verbs.pd, QPCap(), srq=srq))
    with pytest.raises(ValueError, match="SRQ.post_recv"):
        await qp.recv(verbs.mr())


@on_every_loop
async def test_how_long_to_watch(loop, verbs):
    for forever in (float("inf"), 1e30):
        verbs.cq(loop, busy_poll=forever).close()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="busy_poll"):
            verbs.cq(loop, busy_poll=wrong)
