"""What is wrong, of another kind, too much, or another's: an exception that says so, and never a crash."""

import contextlib
import errno
import gc
import os
import re
import subprocess
import sys
import weakref

import pytest

from rdmanet._core import Connection
from rdmanet.cm import CMEventChannel
from rdmanet.verbs import (
    AH,
    CQ,
    MW,
    PD,
    QP,
    SRQ,
    AccessFlags,
    AHAttr,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendWR,
    SRQAttr,
    WROpcode,
    inc_rkey,
    live_objects,
)

from .conftest import EVERYTHING, driver, needs

BINDABLE = EVERYTHING | AccessFlags.MW_BIND


class NotInitialized(SendWR):
    def __init__(self):
        pass


class ReceiveNotInitialized(RecvWR):
    def __init__(self):
        pass


# ---- No requests at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [None, 5, RecvWR(), NotInitialized()], ids=lambda r: type(r).__name__)
def test_what_is_no_request_to_send(net, request_):
    a, _ = net.pair()
    with pytest.raises(TypeError):
        a.qp.post_send([SendWR(WROpcode.SEND), request_])
    assert a.qp.in_flight == (0, 0)
    repr(request_)


@pytest.mark.parametrize(
    "request_", [None, 5, SendWR(WROpcode.SEND), ReceiveNotInitialized()], ids=lambda r: type(r).__name__
)
def test_what_is_no_request_to_receive(net, request_):
    a, _ = net.pair()
    with pytest.raises(TypeError):
        a.qp.post_recv([RecvWR(), request_])
    with needs("shared receive queues"):
        srq = net.keep(SRQ(net.pd, SRQAttr(max_wr=4)))
    with pytest.raises(TypeError):
        srq.post_recv([RecvWR(), request_])
    assert (a.qp.in_flight, srq.in_flight) == ((0, 0), 0)
    repr(request_)


def test_a_window_needs_a_region(net):
    with needs("memory windows of type 2"):
        net.windows.append(MW(net.pd, MWType.TYPE_2))
    with pytest.raises(TypeError, match=r"names no memory region \(mr\)"):
        SendWR(WROpcode.BIND_MW, mw=net.windows[0], bind_info=MWBindInfo(None))
    with pytest.raises(TypeError, match=r"names no memory region \(mr\)"):
        net.side().qp.bind_mw(net.windows[0], MWBind(MWBindInfo(None)))


def test_an_object_is_made_once(net):
    """If __init__ made a queue pair again, its requests in flight would be forgotten."""
    side = net.side()
    for thing, arguments in (
        (net.pd, (net.context,)),
        (side.channel, (net.context,)),
        (side.cq, (net.context, 16)),
        (side.qp, (net.pd, QPInitAttr(side.cq, side.cq))),
    ):
        before = live_objects()
        with pytest.raises(RuntimeError, match="already initialized"):
            thing.__init__(*arguments)
        assert live_objects() == before


# ---- Numbers and buffers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offset, length", [(-1, None), (0, -1), (101, None), (50, 51), (2**64, None), (0, 2**70)]
)
def test_the_numbers_of_a_part_are_told(net, offset, length):
    mr = net.mr(100)
    wrong = offset if length is None or offset > 100 else length
    with pytest.raises(IndexError, match=re.escape(str(wrong))):
        mr.sge(offset, length)
    with pytest.raises(IndexError, match=re.escape(str(wrong))):
        mr.to_remote(offset, length)


@pytest.mark.parametrize("number", [1.5, "1", b"1"])
def test_a_size_is_a_whole_number(net, number):
    mr = net.mr(100)
    for call in (mr.sge, mr.to_remote, net.pd.alloc_mr):
        with pytest.raises(TypeError):
            call(number)


@pytest.mark.parametrize("length", [0, -1, 2**64 - 1, 2**64])
def test_sizes_that_cannot_be(net, length):
    with pytest.raises(ValueError, match=re.escape(str(length))):
        net.pd.alloc_mr(length)


def test_why_memory_is_not_registered(net):
    if driver(net.context) != "rxe":  # which registers it
        with pytest.raises(OSError, match="0 bytes.*at least one byte"):
            net.pd.reg_mr(bytearray())
    with pytest.raises(OSError, match="REMOTE_WRITE and REMOTE_ATOMIC also need LOCAL_WRITE"):
        net.pd.reg_mr(bytearray(8), AccessFlags.REMOTE_WRITE)
    with pytest.raises(BufferError):
        net.pd.reg_mr(memoryview(bytearray(8))[::2])
    for thing in (None, 5, "text"):
        with pytest.raises(TypeError):
            net.pd.reg_mr(thing)


def test_a_region_cannot_borrow_itself(net):
    """The memory would be let go of while it is registered."""
    memory = bytearray(b"kept".ljust(64))
    for mr in (net.mr(64), net.pd.reg_mr(memory)):
        with mr:
            mr[:4] = b"kept"
            for buffer in (mr, memoryview(mr)):
                with pytest.raises(BufferError):
                    mr.rereg(buffer=buffer)
                del buffer
            assert mr[:4] == b"kept"


def test_numbers_are_no_data(net):
    """bytes(8) is eight zeros: of a number there is none to send."""
    with pytest.raises(TypeError):
        SendWR(WROpcode.ATOMIC_WRITE, atomic_data=8)
    with pytest.raises(TypeError):
        AH(net.pd, AHAttr(dgid=16))
    with CMEventChannel(net.context.library) as channel, channel.create_id() as id:
        for call in (id.connect, id.accept, id.reject):
            with pytest.raises(TypeError):
                call(10)


@pytest.mark.parametrize(
    "address, error",
    [
        ("127.0.0.1", TypeError),
        (None, TypeError),
        (("127.0.0.1",), TypeError),
        ((5, 5), TypeError),
        ((b"127.0.0.1", 5), TypeError),
        (("127.0.0.1", "http"), TypeError),
        (("127.0.0.1\0x", 1), ValueError),
        (("name", 1), ValueError),
        (("ä", 1), ValueError),
        (("127.0.0.1", -1), OverflowError),
        (("127.0.0.1", 2**40), OverflowError),
        (("::1", 1, 0, 2**40), OverflowError),
    ],
    ids=repr,
)
def test_what_is_no_address(net, address, error):
    with CMEventChannel(net.context.library) as channel, channel.create_id() as id, pytest.raises(error):
        id.bind_addr(address)


def test_numbers_of_a_connection_are_not_cut(manager, address):
    client = manager.resolved(manager.listener(address).local_addr)
    for options, text in (
        ({"responder_resources": 256}, "responder_resources 256 is not in 0..255"),
        ({"initiator_depth": -1}, "initiator_depth -1"),
        ({"retry_count": 8}, "retry_count 8 is not in 0..7"),
        ({"rnr_retry_count": 300}, "rnr_retry_count 300"),
    ):
        with pytest.raises(ValueError, match=text):
            client.connect(**options)
    with pytest.raises(ValueError, match="300 bytes"):
        client.connect(bytes(300))


@pytest.mark.not_on_siw("private data may be longer")
@pytest.mark.not_on_iwarp("private data may be longer")
def test_how_much_private_data_fits(manager, address):
    client = manager.resolved(manager.listener(address).local_addr)
    with pytest.raises(OSError, match="57 bytes, at most 56 fit"):
        client.connect(bytes(57))


def test_what_a_completion_queue_may_have(net):
    for arguments in ((0,), (2**30,), (16, None, 10**6)):
        with pytest.raises(OSError, match="entries, and comp_vector below"):
            CQ(net.context, *arguments)


# ---- Refused requests say why -------------------------------------------------------------------------


@pytest.mark.not_on_siw("takes more elements than it says")
def test_a_refused_request_says_why(net):
    side, _ = net.pair()
    mr = net.mr()
    cap = side.qp.cap
    with pytest.raises(OSError, match=rf"{cap.max_send_sge} elements \(QPCap.max_send_sge"):
        side.send([mr.sge(0, 1)] * (cap.max_send_sge + 1))
    with pytest.raises(OSError, match=rf"{cap.max_recv_sge} elements \(QPCap.max_recv_sge"):
        side.receive([mr.sge(0, 1)] * (cap.max_recv_sge + 1))
    with pytest.raises(OSError, match=rf"at most {cap.max_inline_data} can be"):
        side.send(mr.sge(0, cap.max_inline_data + 1), flags=SendFlags.INLINE)
    with pytest.raises(OSError, match=rf"holds {cap.max_recv_wr} \(QPCap.max_recv_wr\): poll") as caught:
        while True:
            side.receive(mr)
    assert caught.value.errno == errno.ENOMEM


def test_before_it_is_connected(net, by_hand):
    side = net.side()
    with pytest.raises(OSError, match="RESET nothing can be posted"):
        side.receive()
    side.qp.to_init()
    with pytest.raises(OSError, match="connect the queue pair first"):
        side.send()


# ---- Of another context, or for another kind of request -------------------------------------------------


def test_objects_of_two_contexts(net, device):
    """Their pointers mean nothing to each other's library."""
    a, _ = net.pair()
    mr = net.mr(access=BINDABLE)
    with device.open() as other, PD(other) as pd, pd.alloc_mr(64, BINDABLE) as far:
        with needs("address handles"):
            datagrams = net.datagrams()
            with (
                AH(pd, AHAttr(net.gid.gid, net.gid.gid_index)) as ah,
                pytest.raises(ValueError, match="two contexts"),
            ):
                datagrams.send((), ah=ah, remote_qpn=1)
        with needs("memory windows of type 2"), MW(pd, MWType.TYPE_2) as mw:
            net.windows.append(MW(net.pd, MWType.TYPE_2))
            for window, region in ((mw, mr), (net.windows[0], far)):
                info = MWBindInfo(region, None, 64, AccessFlags.REMOTE_READ)
                with pytest.raises(ValueError, match="two contexts"):
                    a.send((), WROpcode.BIND_MW, mw=window, bind_info=info, rkey=inc_rkey(window.rkey))
                with pytest.raises(ValueError, match="two contexts"):
                    a.qp.bind_mw(window, MWBind(info))
    assert a.qp.in_flight == (0, 0)


def test_connected_peers_have_no_address_handle(net):
    """The handle would stand where the remote address does."""
    a, _ = net.pair()
    mr, ah = net.mr(), net.ah()
    for opcode in (WROpcode.RDMA_WRITE, WROpcode.RDMA_READ, WROpcode.SEND):
        with pytest.raises(ValueError, match="takes no ah"):
            a.send(mr.sge(0, 8), opcode, ah=ah, remote_addr=mr.address, rkey=mr.rkey)
    assert a.qp.in_flight == (0, 0)


def test_a_number_that_no_enumeration_has():
    """A device may know more than we do: it has a name all the same."""
    opcode = SendWR(77).opcode
    assert (opcode, opcode.name, opcode.value) == (77, "UNKNOWN_77", 77)
    assert isinstance(opcode, WROpcode) and opcode not in list(WROpcode)
    assert "UNKNOWN_77" in repr(SendWR(77))


# ---- Nothing goes before the device has let go of it -----------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_in_a_garbage_cycle_the_queue_pair_goes_first(net):
    """What it has in flight is on an ordinary list, which the collector clears when it likes."""
    seen = []

    class Probe:
        def __del__(self):
            seen.append(self.qp.closed)

    class Cycle(QP):
        pass

    side = net.side()
    qp, probe = Cycle(net.pd, QPInitAttr(side.cq, side.cq, QPCap())), Probe()
    qp.probe, probe.qp = probe, qp
    gone = weakref.ref(qp)
    del qp, probe
    gc.collect()
    assert seen == [True] and gone() is None


@pytest.mark.parametrize("does", ["closes", "polls", "posts"])
def test_what_is_let_go_of_may_use_the_queue_pair(net, does):
    """A completion ends the unsignaled requests before it, and their wr_ids may have destructors."""
    a, _ = net.pair()
    mr = net.mr()
    told = []

    class Probe:
        def __del__(self):
            if does == "closes":
                a.qp.close()
            elif does == "polls":
                told.extend(a.cq.poll())
            else:
                write("of the destructor")

    def write(wr_id, flags=SendFlags.SIGNALED):
        a.qp.post_send(
            SendWR(
                WROpcode.RDMA_WRITE,
                mr.sge(0, 8),
                wr_id=wr_id,
                flags=flags,
                remote_addr=mr.address,
                rkey=mr.rkey,
            )
        )

    for _ in range(3):
        write(Probe(), SendFlags.NONE)
        write("signaled")
    while not told:
        told.extend(a.cq.poll(1))
    if does == "closes":
        # Where requests may overtake others, nothing is let go of before the signaled one is found.
        assert a.qp.closed and told[0].wr_id in (None, "signaled")
    else:
        while a.qp.in_flight != (0, 0):
            told.extend(a.cq.poll())
        assert "signaled" in [wc.wr_id for wc in told]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is immortal there")
def test_none_is_counted_in_the_end(net):
    """The table of what is in flight moves references; none is lost, nor given away, whatever ends it."""
    a, b = net.pair()
    mr = net.mr()
    wr = SendWR(WROpcode.RDMA_WRITE, mr.sge(0, 8), wr_id=None, remote_addr=mr.address, rkey=mr.rkey)
    before = sys.getrefcount(None)
    for _ in range(200):
        a.qp.post_send([wr] * 12)
        while a.qp.in_flight[0]:
            a.cq.poll()
    b.receive(mr.sge(0, 8))
    with contextlib.suppress(OSError):  # siw makes room meanwhile
        a.qp.post_send([wr] * 1000)  # more than there are places, too
    a.qp.close(), b.qp.close()
    assert abs(sys.getrefcount(None) - before) < 200, "2,400 went in and out, and up to 1,000 more"


BOUND_ELSEWHERE = """
import gc, logging
from rdmanet.verbs import *

RIGHTS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.MW_BIND
context = open_device("soft0")
pd, cq = PD(context), CQ(context, 16)
qp = QP(pd, QPInitAttr(cq, cq, QPCap(max_send_wr=4)))
own = best_gid(context.gid_table(1))
qp.to_init()
qp.to_rtr(qp.qp_num, own.gid, sgid_index=own.gid_index)
qp.to_rts()
memory = bytearray(64)
first, second = pd.reg_mr(memory, RIGHTS), pd.alloc_mr(64)
mw = MW(pd, MWType.TYPE_2)
for mr in first, second:
    info = MWBindInfo(mr, None, 64, AccessFlags.REMOTE_READ)
    qp.post_send(SendWR(WROpcode.BIND_MW, mw=mw, bind_info=info, rkey=inc_rkey(mw.rkey)))
    while not (found := cq.poll()):
        pass
    print(found[0].status.name)
del mr, info, first, found
gc.collect()
try:
    memory.append(0)
except BufferError:
    print("held")
"""


@pytest.mark.not_on_iwarp("has no memory windows")
@pytest.mark.embedded_only("another process, which leaves a leak on purpose")
def test_what_a_window_is_bound_to_stays():
    """A window whose rebinding failed stays bound as it was. Its region stays too, though nothing else refers to it."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BOUND_ELSEWHERE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout == "SUCCESS\nMW_BIND_ERR\nheld\n", found.stderr
    assert "an unclosed MR cannot be destroyed" in found.stderr


# ---- The connection manager's context ---------------------------------------------------------------------


def test_a_context_that_the_manager_has_closed(device, address):
    """It goes with the last channel, and does not come back with another channel at the same address."""

    def bound():
        channel = CMEventChannel(device.library)
        id = channel.create_id()
        id.bind_addr((address, 0))
        return channel, id

    channel, id = bound()
    context = id.context
    id.close()
    channel.close()
    channel, id = bound()
    with channel, id:
        assert id.context is not context
        with pytest.raises(ValueError, match="last event channel"):
            PD(context)
        PD(id.context).close()


# ---- The engine's connections ---------------------------------------------------------------------------


def test_a_connection_that_has_no_engine_yet(net):
    """It has no queue pair to create, and none to receive by."""
    a, _ = net.pair()
    connection = Connection(object(), False, 0)
    with CMEventChannel(net.context.library) as channel, channel.create_id() as id:
        for call in (lambda: connection.create_qp(id, a.cq), lambda: connection.start(a.qp)):
            with pytest.raises(RuntimeError, match="no engine yet"):
                call()
