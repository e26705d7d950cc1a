"""AsyncCQ and AsyncQP: what is awaited, in which order it ends, and what cancelling leaves behind."""

import asyncio
import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
from loops import LIMIT_S, on_every_loop

from rdmanet._core import Operation
from rdmanet.verbs import (
    CQ,
    MW,
    QP,
    WC,
    AccessFlags,
    CompChannel,
    CompletionError,
    CompletionResetError,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPState,
    RecvWR,
    RemoteAccessError,
    SendFlags,
    SendWR,
    WCOpcode,
    WROpcode,
    live_objects,
)
from rdmanet.verbs_async import AsyncCMListener, AsyncCQ, AsyncQP, DeviceEvents, RemoteMemory, shared

no_immediate = pytest.mark.not_on_iwarp("has no immediate data")
no_windows = pytest.mark.not_on_iwarp("has no memory windows")
no_scattered_reads = pytest.mark.not_on_iwarp("reads into one element only")
no_reset = pytest.mark.not_on_siw("has queue pairs that are moved by rdma_cm only")
no_atomics = pytest.mark.not_on_iwarp("has no atomics")


# ---- Every operation -----------------------------------------------------------------------------------


@on_every_loop
async def test_send_and_receive(loop, verbs):
    a, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    mr[:5] = b"hello"
    receiving = loop.spawn(b.recv(mr.at[100:200]))
    await loop.turn()
    sent = await a.send(mr.at[:5])
    received = await receiving.join()
    assert (sent.opcode, received.opcode, received.byte_len) == (WCOpcode.SEND, WCOpcode.RECV, 5)
    assert mr[100:105] == b"hello"


@on_every_loop
async def test_write_and_read(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr, peer = verbs.mr(), verbs.mr()
    mr[:4] = b"abcd"
    await a.write(mr.at[:4], peer.to_remote()[8:12])
    assert peer[8:12] == b"abcd"
    await a.read(mr.at[20:24], peer.to_remote()[8:12])
    assert mr[20:24] == b"abcd"


@no_scattered_reads
@on_every_loop
async def test_read_into_pieces(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr, peer = verbs.mr(), verbs.mr()
    peer[8:12] = b"abcd"
    await a.read([mr.at[20:21], mr.at[30:33]], peer.to_remote()[8:12])
    assert (mr[20:21], mr[30:33]) == (b"a", b"bcd")


@no_immediate
@on_every_loop
async def test_immediate_data(loop, verbs):
    a, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    for send in (
        a.send_with_imm(mr.at[:3], 0xDEADBEEF),
        a.write_with_imm(mr.at[:3], mr.to_remote()[64:], 0xDEADBEEF),
    ):
        receiving = loop.spawn(b.recv(mr.at[100:]))
        await loop.turn()
        await send
        received = await receiving.join()
        assert (received.imm_data, received.byte_len) == (0xDEADBEEF, 3)


@no_atomics
@on_every_loop
async def test_atomics(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    counters = mr.to_remote().array("<u8")
    assert await a.fetch_and_add(counters[3], 5) == 0
    assert await a.fetch_and_add(counters[3], -1) == 5
    assert await a.compare_and_swap(counters[3], 7, 1) == 4
    assert await a.compare_and_swap(counters[3], 4, 2**64 - 1) == 4
    assert mr[24:32] == b"\xff" * 8
    with pytest.raises(ValueError, match="multiple of 8"):
        await a.fetch_and_add(mr.to_remote()[4:12], 1)
    with pytest.raises(IndexError, match="8 bytes"):
        await a.fetch_and_add(mr.to_remote()[:4], 1)


@on_every_loop
async def test_bytes_go_inline(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop), max_inline_data=32)
    peer = verbs.mr()
    await a.write(b"short", peer.to_remote())
    assert peer[:5] == b"short"
    too_long = bytes(a.qp.cap.max_inline_data + 1)
    with pytest.raises(ValueError, match="register it"):
        await a.write(too_long, peer.to_remote())
    with pytest.raises(ValueError, match="in no region"):
        await a.recv(bytearray(10))
    assert a.in_flight == (0, 0)


@on_every_loop
async def test_a_chain(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    mr[:8] = b"ABCDEFGH"

    def one(i, **options):
        return SendWR(
            WROpcode.RDMA_WRITE, mr.at[i], remote_addr=mr.address + 100 + i, rkey=mr.rkey, wr_id=i, **options
        )

    completions = await a.batch([one(i, flags=0) for i in range(8)])
    assert [wc.wr_id for wc in completions] == [7]
    assert mr[100:108] == b"ABCDEFGH"
    assert [wc.wr_id for wc in await a.batch([one(0), one(1, flags=0), one(2)])] == [0, 2]
    with pytest.raises(ValueError, match="no requests"):
        await a.batch([])
    with pytest.raises(ValueError, match="more than the"):
        await a.batch([one(0)] * (a.qp.cap.max_send_wr + 1))


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
@on_every_loop
async def test_the_first_of_a_chain_that_fails_is_told(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    good = SendWR(WROpcode.RDMA_WRITE, mr.at[:1], remote_addr=mr.address, rkey=mr.rkey)
    bad = SendWR(WROpcode.RDMA_WRITE, mr.at[:1], remote_addr=mr.address, rkey=mr.rkey ^ 0xFF00)
    with pytest.raises(CompletionError, match="RDMA_WRITE .*remote access error"):
        await a.batch([good, bad, good, good])
    with pytest.raises(CompletionResetError, match="flushed"):
        await a.write(mr.at[:1], mr.to_remote())


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
@on_every_loop
@pytest.mark.parametrize(
    "opcode",
    [
        WROpcode.RDMA_WRITE,
        WROpcode.RDMA_READ,
        pytest.param(WROpcode.RDMA_WRITE_WITH_IMM, marks=no_immediate),
        pytest.param(WROpcode.ATOMIC_CMP_AND_SWP, marks=no_atomics),
        pytest.param(WROpcode.ATOMIC_FETCH_AND_ADD, marks=no_atomics),
    ],
)
async def test_the_refused_range_is_in_the_error(loop, verbs, opcode):
    a, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    mr[:8] = b"intruder"
    b.qp.post_recv(RecvWR())  # for immediate data
    remote = RemoteMemory(mr.address + 8, 8, mr.rkey ^ 0xFF00)
    operations = {
        WROpcode.RDMA_WRITE: lambda: a.write(mr.at[:8], remote),
        WROpcode.RDMA_READ: lambda: a.read(mr.at[:8], remote),
        WROpcode.RDMA_WRITE_WITH_IMM: lambda: a.write_with_imm(mr.at[:8], remote, 7),
        WROpcode.ATOMIC_CMP_AND_SWP: lambda: a.compare_and_swap(remote, 0, 1),
        WROpcode.ATOMIC_FETCH_AND_ADD: lambda: a.fetch_and_add(remote, 1),
    }
    where = f"8 bytes at {remote.address:#x} by rkey {remote.rkey:#x}"
    with pytest.raises(RemoteAccessError, match=where) as caught:
        await operations[opcode]()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.address, error.length, error.rkey) == (remote.address, 8, remote.rkey)
        assert (error.opcode, error.errno, error.qp_num) == (opcode.name, errno.EACCES, a.qp.qp_num)
        assert "remote access error" in str(error)
    assert mr[:16] == b"intruder" + bytes(8)


@no_windows
@on_every_loop
async def test_windows(loop, verbs):
    a, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    for kind in MWType:
        with MW(verbs.pd, kind) as mw:
            rkey = await b.bind_mw(mw, MWBindInfo(mr, mr.address + 64, 64, AccessFlags.REMOTE_WRITE))
            mr[:6] = kind.name.encode()
            await a.write(mr.at[:6], RemoteMemory(mr.address + 64, 64, rkey))
            assert mr[64:70] == kind.name.encode()


@no_windows
@on_every_loop
async def test_shared_memory_is_revoked(loop, verbs):
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    async with b.shared(mr, AccessFlags.REMOTE_WRITE, offset=64, length=64) as remote:
        assert remote.length == 64
        mr[:4] = b"here"
        await a.write(mr.at[:4], remote)
    mr[:4] = b"gone"
    with pytest.raises(CompletionError, match="remote access error"):
        await a.write(mr.at[:4], remote)
    assert mr[64:68] == b"here"
    a, b = verbs.pair(cq)
    memory = bytearray(range(64))
    async with shared(verbs.pd, memory, AccessFlags.REMOTE_READ) as remote:
        await a.read(mr.at[:64], remote)
    assert mr[:64] == memory
    with pytest.raises(CompletionError, match="remote access error"):
        await a.read(mr.at[:64], remote)


@on_every_loop
async def test_reads_are_awaited_by_themselves(loop, verbs):
    """What was sent behind them may be told first, by soft-iWARP: a READ has ended when its bytes are here."""
    a, b = verbs.pair(verbs.cq(loop))
    here, there = verbs.mr(1 << 18), verbs.mr(1 << 18)
    there[:] = bytes(range(256)) * 1024
    for _ in range(5):
        here[:] = bytes(1 << 18)
        receiving = [loop.spawn(b.recv(there.at[:8])) for _ in range(2)]
        await loop.turn()
        reading = loop.spawn(a.read(here, there.to_remote()))
        await loop.turn()
        sending = loop.spawn(a.send(there.at[:8]))
        await reading.join()
        assert here[:] == there[:]
        await sending.join()
        here[:] = bytes(1 << 18)
        read = SendWR(WROpcode.RDMA_READ, here, remote_addr=there.address, rkey=there.rkey, wr_id="read")
        ended = await a.batch([read, SendWR(WROpcode.SEND, there.at[:8], wr_id="send")])
        assert {wc.wr_id for wc in ended} == {"read", "send"}
        assert here[:] == there[:]
        for task in receiving:
            await task.join()
    assert a.in_flight == b.in_flight == (0, 0)


@pytest.mark.long  # rxe takes a minute to let go of a queue pair with a window
@no_windows
@on_every_loop
async def test_shared_memory_of_a_queue_pair_that_goes(loop, verbs):
    """Closing it within the block is no error, nor is forgetting the block: the window goes with it."""
    a, b = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    async with b.shared(mr, AccessFlags.REMOTE_WRITE):
        b.close()
    block = a.shared(mr, AccessFlags.REMOTE_WRITE)
    await block.__aenter__()
    with pytest.raises(StopIteration):  # it awaits nothing
        block.__aexit__(GeneratorExit, GeneratorExit(), None).send(None)
    assert live_objects()["mws"] == 0


# ---- Order, and a full queue ------------------------------------------------------------------------------


@pytest.mark.not_on_iwarp("ends a connection where no receive waits for a message")
@on_every_loop
async def test_who_was_first_hears_first(loop, verbs):
    """The second SEND is done as soon as it is posted. So is by then the first, whose task has not heard of it yet."""
    receiving = verbs.cq(loop)
    a, b = verbs.pair(verbs.cq(loop), other=receiving)
    mr = verbs.mr()
    ended = []

    async def send(which):
        await a.send(mr.at[:8])
        ended.append(which)

    first = loop.spawn(send("first"))
    while not a.in_flight[0]:
        await loop.turn()
    b.qp.post_recv([RecvWR(mr.sge(64, 8)), RecvWR(mr.sge(64, 8))])
    deadline = time.monotonic() + LIMIT_S
    while not receiving.poll():  # and no turn of the loop meanwhile
        assert time.monotonic() < deadline
    await send("second")
    await first.join()
    if loop.in_order:
        assert ended == ["first", "second"]
    assert sorted(ended) == ["first", "second"]


@pytest.mark.quick_on("uvloop")
@on_every_loop
async def test_ten_thousand_in_flight_end_in_order(loop, verbs, fewer):
    count = fewer(10_000)
    a, b = verbs.pair(verbs.cq(loop), depth=128)
    mr = verbs.mr()
    ended = []

    def what_requests_are_made_of():
        gc.collect()
        return [thing for thing in gc.get_objects() if isinstance(thing, Operation | SendWR | WC)]

    async def one(i, operation):
        await operation
        ended.append(i)

    before = what_requests_are_made_of()  # of tests that failed, or gave up, and are kept for the report
    writing = [loop.spawn(one(i, a.write(mr.at[:64], mr.to_remote()[64:]))) for i in range(count)]
    for task in writing:
        await task.join()
    assert (ended if loop.in_order else sorted(ended)) == list(range(count))
    assert (a.in_flight, a.waiting) == ((0, 0), (0, 0))
    del writing, task
    assert [thing for thing in what_requests_are_made_of() if not any(thing is old for old in before)] == []


@on_every_loop
async def test_a_full_queue_is_a_delay(loop, verbs):
    """Receives that have no place yet are posted, in order, as places come free."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq, depth=4)
    depth = b.qp.cap.max_recv_wr
    mr = verbs.mr()
    receiving = []
    for i in range(3 * depth):
        receiving.append(loop.spawn(b.recv(mr.at[100 + i])))
        await loop.turn()
    assert (b.in_flight[1], b.waiting[1]) == (depth, 2 * depth)
    for i in range(3 * depth):
        mr[0] = i
        await a.send(mr.at[0])
        await receiving[i].join()
    assert mr[100 : 100 + 3 * depth] == bytes(range(3 * depth))


@on_every_loop
async def test_a_completion_queue_is_not_overrun(loop, verbs):
    cq = verbs.cq(loop, 16)
    with pytest.raises(ValueError, match="do not fit"):
        cq.create_qp(verbs.pd, QPCap(max_send_wr=cq.cq.cqe, max_recv_wr=cq.cq.cqe))
    for _ in range(3):  # what is closed, or forgotten, has given its entries back
        cq.create_qp(verbs.pd, QPCap(max_send_wr=4, max_recv_wr=4)).close()


@on_every_loop
async def test_what_may_be_in_flight_has_its_place(loop, verbs):
    """The completion queue is not made smaller than its queue pairs may fill, and may be when they are gone."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    granted = sum(qp.qp.cap.max_send_wr + qp.qp.cap.max_recv_wr for qp in (a, b))
    with pytest.raises(ValueError, match=f"{granted - 1} entries are too few: .* may need {granted}"):
        cq.cq.resize(granted - 1)
    assert cq.cq.cqe >= 1024
    for side in (a, b):
        side.close()
    try:
        cq.cq.resize(granted - 1)
    except OSError as exc:
        assert exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS)


# ---- Cancelling, and the end ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed <MR:ResourceWarning")
@on_every_loop
async def test_a_cancelled_operation_keeps_its_memory(loop, verbs):
    """The device may still write there: what was received after the waiter has gone is in the memory."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    memory = bytearray(64)
    target = verbs.pd.reg_mr(memory, AccessFlags.LOCAL_WRITE)
    receiving = loop.spawn(b.recv(target))
    await loop.turn()
    receiving.cancel()
    await receiving.join()
    del target
    assert b.in_flight[1] == 1
    with pytest.raises(BufferError):  # the region has not gone
        memory.append(0)
    mr[:4] = b"late"
    await a.send(mr.at[:4])
    while cq.pending:
        await loop.turn()
    assert memory[:4] == b"late"
    assert b.in_flight[1] == 0


@on_every_loop
async def test_cancelling_what_waits_for_its_turn_takes_it_back(loop, verbs):
    a, b = verbs.pair(verbs.cq(loop), depth=1)
    depth = b.qp.cap.max_recv_wr
    mr = verbs.mr()
    receiving = []
    for i in range(depth + 2):
        receiving.append(loop.spawn(b.recv(mr.at[100 + i])))
        await loop.turn()
    receiving[depth].cancel()
    await receiving[depth].join()
    assert (b.in_flight[1], b.waiting[1]) == (depth, 1)
    for i in [*range(depth), depth + 1]:
        mr[0] = i + 1
        await a.send(mr.at[0])
        await receiving[i].join()
    assert mr[100 + depth] == 0
    assert mr[101 + depth] == depth + 2
    assert (b.in_flight[1], b.waiting[1]) == (0, 0)


@on_every_loop
async def test_closing_a_queue_pair_ends_what_is_awaited(loop, verbs):
    cq = verbs.cq(loop)
    _, b = verbs.pair(cq, depth=2)
    mr = verbs.mr()
    receiving = [loop.spawn(b.recv(mr)) for _ in range(b.qp.cap.max_recv_wr + 2)]
    await loop.turn()
    await loop.turn()
    b.close()
    for task in receiving:
        with pytest.raises(CompletionResetError, match="flushed"):
            await task.join()
    assert cq.pending == 0
    with pytest.raises(ValueError, match="closed"):
        await b.recv(mr)


@on_every_loop
async def test_the_error_state_flushes(loop, verbs):
    cq = verbs.cq(loop)
    _, b = verbs.pair(cq)
    mr = verbs.mr()
    receiving = loop.spawn(b.recv(mr))
    await loop.turn()
    b.qp.to_error()
    with pytest.raises(CompletionResetError, match="RECV .*flushed"):
        await receiving.join()
    assert b.qp.state == QPState.ERR and cq.pending == 0


@no_reset
@on_every_loop
async def test_a_reset_ends_what_is_awaited(loop, verbs):
    cq = verbs.cq(loop)
    _, b = verbs.pair(cq)
    receiving = loop.spawn(b.recv(verbs.mr()))
    await loop.turn()
    b.qp.to_reset()
    with pytest.raises(CompletionResetError):
        await receiving.join()
    assert cq.pending == 0


@on_every_loop
async def test_bounds_are_checked_before_posting(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    with pytest.raises(IndexError, match="64 bytes are more than"):
        await a.write(mr.at[:64], mr.to_remote()[:63])
    with pytest.raises(IndexError, match="4000:4097 is not within 4096 bytes"):
        await a.write(mr.at[4000:4097], mr.to_remote())
    assert a.in_flight == (0, 0)


# ---- The completion queue -----------------------------------------------------------------------------------


@on_every_loop
async def test_sleeping_and_waking(loop, verbs):
    """Without watching, every completion that is waited for is an event; they are acknowledged by sixteens."""
    receiving_cq = verbs.cq(loop, busy_poll=0)
    a, b = verbs.pair(verbs.cq(loop), other=receiving_cq)
    mr = verbs.mr()
    for i in range(40):
        receiving = loop.spawn(b.recv(mr.at[8:16]))
        while receiving_cq.statistics()["sleeps"] <= i:
            await loop.turn()
        await a.send(mr.at[:8])
        await receiving.join()
    statistics = receiving_cq.statistics()
    assert statistics["events"] == statistics["wakeups"] == 40
    with pytest.raises(ValueError, match="only 8 events"):
        receiving_cq.cq.ack_events(17)
    b.close()
    receiving_cq.close()  # it would hang with events that are not acknowledged


@on_every_loop
async def test_false_alarms_do_no_harm(loop, verbs):
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    cq._watcher.readable()
    receiving = loop.spawn(b.recv(mr))
    await loop.turn()
    for _ in range(3):
        cq._watcher.readable()
    assert not receiving.done
    await a.send(mr.at[:1])
    await receiving.join()


@on_every_loop
async def test_idle_costs_nothing(loop, verbs):
    """A receive that nothing comes for is not watched for longer than the window."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    for one in (a, b):  # finding each other costs something
        await one.write(mr.at[:8], mr.to_remote()[64:])
    receiving = loop.spawn(b.recv(mr))
    slept = cq.statistics()["sleeps"]
    while cq.statistics()["sleeps"] == slept:
        await loop.turn()
    # Neither the loop looks, nor does the device's engine, but for one look as it takes a way over from the loop.
    before, counters = cq.statistics(), verbs.context.counters()
    await loop.sleep(0.05)
    later = verbs.context.counters()
    takeover = later.pop("syscalls", 0) - counters.pop("syscalls", 0)  # the embedded device counts
    assert (cq.statistics(), later) == (before, counters)
    assert takeover <= 4, f"{takeover} system calls in 50 ms"
    b.close()
    with pytest.raises(CompletionResetError):
        await receiving.join()


@on_every_loop
async def test_completions_of_other_requests(loop, verbs):
    """wait(), wait_wr() and iteration see what was posted by post_send() and post_recv(), and nothing else."""
    cq = verbs.cq(loop)
    a, b = verbs.pair(cq)
    mr = verbs.mr()
    write = {"remote_addr": mr.address, "rkey": mr.rkey}
    waiting = loop.spawn(cq.wait())
    await loop.turn()
    await a.write(mr.at[:8], mr.to_remote())
    assert not waiting.done
    a.qp.post_send(SendWR(WROpcode.RDMA_WRITE, mr.at[:8], wr_id="mine", **write))
    assert [wc.wr_id for wc in await waiting.join()] == ["mine"]

    b.qp.post_recv([RecvWR(mr.at[i], wr_id=("receive", i)) for i in range(3)])
    third = loop.spawn(cq.wait_wr(("receive", 2)))
    await loop.turn()
    for _ in range(3):
        await a.send(mr.at[8:9])
    assert (await third.join()).wr_id == ("receive", 2)
    assert [wc.wr_id for wc in cq.poll()] == [("receive", 0), ("receive", 1)]

    seen = []

    async def iterate():
        async for wc in cq:
            seen.append(wc.wr_id)

    iterating = loop.spawn(iterate())
    await loop.turn()
    a.qp.post_send([SendWR(WROpcode.RDMA_WRITE, mr.at[:8], wr_id=i, **write) for i in range(5)])
    while len(seen) < 5:
        await loop.turn()
    assert seen == list(range(5))
    a.close()
    b.close()
    cq.close()
    await iterating.join()


@on_every_loop
async def test_cancelled_waiters_are_forgotten(loop, verbs):
    cq = verbs.cq(loop)
    a, _ = verbs.pair(cq)
    mr = verbs.mr()
    for _ in range(10):
        waiting = loop.spawn(cq.wait())
        await loop.turn()
        waiting.cancel()
        await waiting.join()
    last = loop.spawn(cq.wait())
    await loop.turn()
    a.qp.post_send(SendWR(WROpcode.RDMA_WRITE, mr.at[:8], remote_addr=mr.address, rkey=mr.rkey))
    assert len(await last.join()) == 1


@on_every_loop
async def test_closing_tells_who_waits(loop, verbs):
    cq = verbs.cq(loop)
    waiting = loop.spawn(cq.wait())
    await loop.turn()
    cq.close()
    with pytest.raises(ValueError, match="closed"):
        await waiting.join()
    cq.close()


@on_every_loop
async def test_a_parent_stays_open_while_it_is_needed(loop, verbs):
    cq = verbs.cq(loop)
    a, _ = verbs.pair(cq)
    with pytest.raises(OSError, match="in use"):
        cq.close()
    await a.write(verbs.mr().at[:1], verbs.mr().to_remote())  # it is as it was


@on_every_loop
async def test_queues_of_others_are_refused(loop, verbs):
    cq, other = verbs.cq(loop), verbs.cq(loop)
    qp = verbs.keep(QP(verbs.pd, QPInitAttr(cq.cq, cq.cq)))
    with pytest.raises(ValueError, match="another completion queue"):
        AsyncQP(qp, other)
    with pytest.raises(ValueError, match="another completion queue"):
        AsyncQP(qp, cq, other)
    AsyncQP(qp, cq).close()


@on_every_loop
async def test_another_thread_is_refused(loop, verbs):
    a, _ = verbs.pair(verbs.cq(loop))
    mr = verbs.mr()
    found = []

    def other():
        writing = a.write(mr.at[:1], mr.to_remote())
        try:
            writing.send(None)
        except RuntimeError as exc:
            found.append(str(exc))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(found) == 1 and "thread" in found[0]


@pytest.mark.embedded_only("only the embedded device tells of a completion queue that is overrun")
@on_every_loop
async def test_a_broken_completion_queue_is_told(loop, verbs, eventually):
    """All waiters are told, and all later callers."""
    cq = verbs.cq(loop, 4)
    a, b = verbs.pair(cq, depth=1)
    plain = verbs.keep(CQ(verbs.context, 4))
    mr = verbs.mr()
    receiving = loop.spawn(b.recv(mr))
    waiting = loop.spawn(cq.wait())
    await loop.turn()
    sizes = QPCap(max_send_wr=64)
    one = verbs.keep(QP(verbs.pd, QPInitAttr(cq.cq, plain, sizes)))
    one.to_init(access=AccessFlags.REMOTE_WRITE)
    one.to_rtr(one.qp_num, verbs.gid.gid, sgid_index=verbs.gid.gid_index)
    one.to_rts()
    request = SendWR(WROpcode.RDMA_WRITE, mr.at[:1], remote_addr=mr.address, rkey=mr.rkey)
    one.post_send([request] * (cq.cq.cqe + 2))
    # The loop looks into the queue when it is overrun, not before.
    eventually(lambda: one.query()[0].qp_state == QPState.ERR, what="overrun")
    for task in (receiving, waiting):
        with pytest.raises(OSError, match="ibv_poll_cq"):
            await task.join()
    with pytest.raises(OSError, match="ibv_poll_cq"):
        await a.write(mr.at[:1], mr.to_remote())


@on_every_loop
async def test_flags_are_passed_on(loop, verbs):
    a, b = verbs.pair(verbs.cq(loop), max_inline_data=16)
    mr = verbs.mr()
    receiving = loop.spawn(b.recv(mr.at[:16]))
    await loop.turn()
    await a.send(b"x", flags=SendFlags.SOLICITED | SendFlags.FENCE | SendFlags.INLINE)
    await receiving.join()
    assert mr[:1] == b"x"


@pytest.mark.not_on_siw("does not fire for solicited messages")
@on_every_loop
async def test_a_solicited_message_is_told(loop, verbs):
    """A message that is not solicited fires no event in a queue that was armed for solicited ones only."""
    receiving = verbs.cq(loop)
    a, b = verbs.pair(verbs.cq(loop), other=receiving)
    mr = verbs.mr()
    b.qp.post_recv([RecvWR(mr.at[:8]), RecvWR(mr.at[:8])])  # not awaited: the queue is the test's to arm
    receiving.cq.req_notify(solicited_only=True)
    await a.send(mr.at[8:16])
    while not receiving.poll():
        await loop.turn()
    await loop.sleep(0.05)  # for an event that must not come
    assert receiving.statistics()["events"] == 0
    await a.send(mr.at[8:16], flags=SendFlags.SOLICITED)
    while not receiving.statistics()["events"]:
        await loop.turn()
    assert len(receiving.poll()) == 1


# ---- When the loop has gone ----------------------------------------------------------------------------------


def test_closing_after_the_loop(context, device, address):
    """No waiter is left to be told, which is no error."""
    loop = asyncio.new_event_loop()
    events = DeviceEvents(context, notifier=loop)
    listener = AsyncCMListener((address, 0), library=device.library, notifier=loop)
    cq = AsyncCQ(context, 16, notifier=loop)
    waiting = [anext(events), listener.get_request(), cq.wait()]
    for coroutine in waiting:
        coroutine.send(None)
    loop.close()
    for thing in (events, listener, cq):
        thing.close()
    for coroutine in waiting:
        coroutine.close()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_operations_that_are_forgotten_together_with_all_they_use(context, verbs):
    """The collector meets them in any order; the queue pair ends them none the less."""
    before = live_objects()
    loop = asyncio.new_event_loop()
    cq = AsyncCQ(context, 64, notifier=loop)
    qp = cq.create_qp(verbs.pd, QPCap(max_send_wr=4, max_recv_wr=4))
    qp.qp.to_init()
    receiving = [qp.recv(verbs.pd.alloc_mr(64)) for _ in range(6)]  # two wait for their turn
    for coroutine in receiving:
        coroutine.send(None)
    receiving.append(receiving)
    loop.close()
    del loop, cq, qp, receiving, coroutine
    gc.collect()
    assert live_objects() == before


# ---- Without a loop -----------------------------------------------------------------------------------------


def test_a_loop_is_needed(context):
    with pytest.raises(RuntimeError, match="notifier="):
        AsyncCQ(context, 4)


def test_the_channel_needs_no_loop(context):
    """AsyncCQ leaves the plain objects as they are."""
    with CompChannel(context) as channel, CQ(context, 4, channel) as cq:
        assert cq.poll() == []


@pytest.mark.embedded_only("no device is opened")
def test_importing_imports_no_event_loop():
    script = (
        "import sys, rdmanet, rdmanet.verbs, rdmanet.cm, rdmanet.verbs_async\n"
        "print([name for name in ('asyncio', 'trio', 'uvloop', 'anyio') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert found.stdout == "[]\n", found.stderr
