"""Order of closing, garbage, forks and warnings: nothing is destroyed too early, or twice, or by a child."""

import gc
import itertools
import os
import subprocess
import sys
import warnings

import pytest

from rdmanet.cm import CMEventChannel
from rdmanet.verbs import (
    CQ,
    PD,
    QP,
    SRQ,
    AccessFlags,
    CompChannel,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    SRQAttr,
    SRQInitAttr,
    WROpcode,
    live_objects,
)

from .conftest import needs


def family(device):
    """One of each, by name."""
    context = device.open()
    pd = PD(context)
    channel = CompChannel(context)
    cq = CQ(context, 16, channel)
    mr = pd.alloc_mr(4096)
    qp = QP(pd, QPInitAttr(cq, cq, QPCap(4, 4)))
    return {"context": context, "pd": pd, "channel": channel, "cq": cq, "mr": mr, "qp": qp}


CHILDREN = {
    "context": ["pd", "channel"],
    "pd": ["mr", "qp"],
    "channel": ["cq"],
    "cq": ["qp"],
    "mr": [],
    "qp": [],
}


def ready(name, open_names):
    return not any(child in open_names for child in CHILDREN[name]) and (
        name != "context" or "cq" not in open_names
    )


ORDERS = [
    order
    for order in itertools.permutations(CHILDREN)
    if all(ready(name, order[i + 1 :]) for i, name in enumerate(order))
]


@pytest.mark.parametrize("order", ORDERS[::3], ids="-".join)
def test_every_order_of_closing(device, order):
    members = family(device)
    for name in order:
        members[name].close()
        assert members[name].closed
    for member in members.values():
        member.close()


@pytest.mark.parametrize("name", [name for name, children in CHILDREN.items() if children and name != "pd"])
def test_parents_stay_open_while_they_are_needed(device, name):
    members = family(device)
    with pytest.raises(OSError) as caught:
        members[name].close()
    assert caught.value.errno == 16
    assert not members[name].closed
    for late in ("qp", "mr", "cq", "channel", "pd", "context"):
        members[late].close()


@pytest.mark.parametrize("order", list(itertools.permutations(["context", "pd", "cq", "qp"])), ids="-".join)
def test_every_order_of_forgetting(device, order):
    """Whatever name goes first, the objects go children first; each says that it was forgotten."""
    before = live_objects()
    members = family(device)
    members["mr"].close()
    members.pop("mr")
    members.pop("channel")
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Recorded warnings would keep their objects alive.
        warnings.showwarning = lambda message, *rest, **more: said.append(str(message))
        for name in order:
            del members[name]
        gc.collect()
    assert live_objects() == before
    assert len(said) == 5 and all(text.startswith("unclosed <") for text in said)


def test_a_cycle(device):
    """Garbage that refers to itself is destroyed in the right order, too."""
    before = live_objects()
    members = family(device)
    members["self"] = members
    holder = RecvWR(members["mr"], wr_id=members)
    members["qp"].modify(
        QPAttr(qp_state=QPState.INIT, port_num=1, pkey_index=0, qp_access_flags=AccessFlags(0))
    )
    members["qp"].post_recv(holder)  # in flight, and refers to the family by its wr_id
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del members, holder
        gc.collect()
    if live_objects() != before:
        pytest.fail(f"{live_objects()} instead of {before}")


def needs_rereg(net) -> None:
    """The test goes on only where a region can be registered again."""
    with needs("ibv_rereg_mr"), net.pd.reg_mr(bytearray(10)) as mr:
        mr.rereg(buffer=bytearray(10))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("again", [False, True], ids=["registered", "registered again"])
def test_a_region_of_a_memoryview_in_a_cycle(net, again):
    """The collector takes the memoryview apart before it comes to the region, which holds the memory all the same."""

    class Program:
        """Refers to itself, and so do the region and the memoryview, which is older."""

    def make(memory: bytearray) -> None:
        part = memoryview(memory)[100:5000]
        program = Program()
        program.itself, program.part = program, part
        program.mr = net.pd.reg_mr(bytearray(10) if again else part)
        if again:
            program.mr.rereg(buffer=part)

    if again:
        needs_rereg(net)
    memory = bytearray(8192)
    make(memory)
    with pytest.raises(BufferError):
        memory.append(0)
    gc.collect()
    memory.append(0)


@pytest.mark.parametrize("again", [False, True], ids=["registered", "registered again"])
def test_a_region_of_a_memoryview_that_is_released(net, again):
    """The region has the part that the memoryview showed, with its rights, and keeps the object from being resized."""
    if again:
        needs_rereg(net)
    memory = bytearray(range(200))
    part = memoryview(memory)[50:150].toreadonly()
    mr = net.keep(net.pd.reg_mr(bytes(10) if again else part))
    if again:
        mr.rereg(buffer=part)
    part.release()
    with pytest.raises(BufferError):
        memory.append(0)
    memory[60] = 255
    assert len(mr) == 100 and mr[:12] == memory[50:62]
    with pytest.raises(TypeError, match="read-only"):
        mr[0] = 1
    mr.close()
    memory.append(0)


def test_a_warning_says_what(device):
    context = device.open()
    with pytest.warns(ResourceWarning, match=f"unclosed <Context {device.name}"):
        del context
        gc.collect()


def test_closed_objects_are_quiet(device):
    members = family(device)
    for name in ("qp", "cq", "channel", "mr", "pd", "context"):
        members[name].close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members.clear()
        gc.collect()


def test_who_belongs_to_whom(device):
    members = family(device)
    context, pd, channel, cq, mr, qp = members.values()
    assert (pd.context, channel.context, cq.context, cq.channel, mr.pd) == (
        context,
        context,
        context,
        channel,
        pd,
    )
    assert (qp.pd, qp.send_cq, qp.recv_cq, qp.srq) == (pd, cq, cq, None)
    assert (qp.qp_type, qp.state) == (QPType.RC, QPState.RESET)
    for name in ("qp", "cq", "channel", "mr", "pd", "context"):
        members[name].close()


def test_with(device):
    with device.open() as context, PD(context) as pd, CQ(context, 4) as cq:
        with QP(pd, QPInitAttr(cq, cq)) as qp:
            assert not qp.closed
        assert qp.closed
    with pytest.raises(ValueError, match="closed"), context:
        pass


def test_use_after_closing(device):
    members = family(device)
    for name in ("qp", "cq", "channel", "mr", "pd", "context"):
        members[name].close()
    uses = [
        lambda: members["qp"].modify(QPAttr(qp_state=QPState.ERR)),
        lambda: members["qp"].post_recv(RecvWR()),
        lambda: members["qp"].post_send(SendWR(WROpcode.SEND)),
        lambda: members["qp"].query(),
        lambda: members["cq"].poll(),
        lambda: members["cq"].req_notify(),
        lambda: members["channel"].get_cq_event(),
        lambda: members["mr"].lkey,
        lambda: memoryview(members["mr"]),
        lambda: members["pd"].alloc_mr(4),
        lambda: members["context"].gid_table(),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="is closed"):
            use()
    for member in members.values():
        assert "closed" in repr(member)


def in_child(action) -> str:
    """What a forked child says; it ends without Python's farewells."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(action())
        except BaseException as exc:
            text = f"{type(exc).__name__}: {exc}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child crashed"
    return said


def test_a_child_may_not_use_its_parents_objects(device):
    members = family(device)
    channel = CMEventChannel(device.library)
    id = channel.create_id()
    parent = os.getpid()
    uses = [
        lambda: members["cq"].poll(),
        lambda: members["qp"].post_recv(RecvWR()),
        lambda: members["mr"].lkey,
        lambda: members["context"].query_device(),
        lambda: PD(members["context"]),
        lambda: channel.get_event(),
        lambda: id.bind_addr(("127.0.0.1", 0)),
    ]
    for use in uses:
        assert f"was opened by process {parent}; open it again after fork" in in_child(use)
    id.close()
    channel.close()
    for name in ("qp", "cq", "channel", "mr", "pd", "context"):
        members[name].close()


@pytest.mark.embedded_only("librdmacm does not survive a fork")
def test_the_repr_of_a_parents_object_says_whose_it_is(device):
    members = family(device)
    members["event channel"] = CMEventChannel(device.library)
    members["id"] = members["event channel"].create_id()
    members["srq"] = SRQ(members["pd"], SRQInitAttr(SRQAttr(4, 1)))
    members["id"].bind_addr(("127.0.0.1", 0))
    members["its context"] = members["id"].context
    for name, member in members.items():
        here = repr(member)
        assert "process" not in here and "closed" not in here
        assert in_child(lambda member=member: repr(member)).endswith(f" of process {os.getpid()}>"), name
        assert repr(member) == here
    for name in ("id", "event channel", "srq", "qp", "cq", "channel", "mr", "pd", "context"):
        members[name].close()
    for member in members.values():
        assert repr(member).endswith(" closed>")


def test_a_child_destroys_nothing(net, pair):
    """Closing, forgetting and collecting in a child: the parent does not notice."""
    a, b = pair
    mr = net.mr()
    members = {"a": a, "b": b}

    def destroy():
        before = live_objects()
        a.qp.close()
        a.cq.close()
        members.clear()
        net.sides.clear()
        gc.collect()
        return live_objects() == before

    assert in_child(destroy) == "True"
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8))
    a.one(), b.one()


def test_a_child_opens_its_own(device, net, by_hand, pair):
    """A fresh open works in a child, while the parent's connection lives on."""
    a, b = pair
    mr = net.mr()

    def transfer():
        with device.open() as context, PD(context) as pd, CQ(context, 16) as cq, pd.alloc_mr(64) as own:
            one, other = (QP(pd, QPInitAttr(cq, cq, QPCap(4, 4))) for _ in range(2))
            for qp, peer in ((one, other), (other, one)):
                qp.to_init()
                qp.to_rtr(peer.qp_num, net.gid.gid, sgid_index=net.gid.gid_index)
                qp.to_rts()
            other.post_recv(RecvWR(own.sge(0, 8)))
            one.post_send(SendWR(WROpcode.SEND, own.sge(8, 8)))
            found = []
            while len(found) < 2:
                found += cq.poll()
            one.close()
            other.close()
            return [wc.status.name for wc in found]

    assert in_child(transfer) == "['SUCCESS', 'SUCCESS']"
    b.receive(mr.sge(0, 8))
    a.send(mr.sge(8, 8))
    a.one(), b.one()


@pytest.mark.embedded_only("librdmacm does not survive a fork")
def test_a_child_counts_its_own_channels_and_objects(device):
    """The connection manager's context ends with the child's last channel, whatever its parent has open; and one that
    is opened later, perhaps at the same address, is another."""

    def look():
        assert not any(live_objects().values()), live_objects()
        contexts = []
        for _ in range(3):
            with CMEventChannel(device.library) as channel, channel.create_id() as id:
                id.bind_addr(("127.0.0.1", 0))
                contexts.append(id.context)
                assert id.context is contexts[-1]
                assert not os.get_blocking(id.context.async_fd)
                assert id.context.get_async_event() is None
            assert not any(live_objects().values()), live_objects()
            for context in contexts:
                with pytest.raises(ValueError, match="was closed together with"):
                    context.query_device()
        return len(set(contexts))

    with CMEventChannel(device.library) as channel, channel.create_id() as id:
        id.bind_addr(("127.0.0.1", 0))
        context = id.context
        before = live_objects()
        assert in_child(look) == "3"
        assert in_child(lambda: in_child(look)) == "3"
        assert live_objects() == before
        assert id.context is context
        assert context.get_async_event() is None


def test_exit_with_everything_open(device):
    """An interpreter that ends with open objects ends quietly."""
    program = f"""
import sys
sys.path[:0] = {[path for path in sys.path if path]!r}
from rdmanet.verbs import *
device = next(d for d in devices() if d.name == {device.name!r})
context = device.open()
pd, cq = PD(context), CQ(context, 16, CompChannel(context))
mr = pd.alloc_mr(4096)
qp = QP(pd, QPInitAttr(cq, cq))
loop = [qp, mr]
loop.append(loop)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.embedded_only("it opens the embedded device")
def test_what_cannot_be_destroyed_is_logged():
    """A destructor's exception reaches no caller, so the leak is logged. A queue pair in a group is busy."""
    program = f"""
import ipaddress, logging, sys, warnings
sys.path[:0] = {[path for path in sys.path if path]!r}
warnings.simplefilter("ignore")
logging.basicConfig(format="%(levelname)s by %(name)s: %(message)s")
from rdmanet.verbs import *
context = Library.embedded().devices()[0].open()
pd, cq = PD(context), CQ(context, 16)
qp = QP(pd, QPInitAttr(cq, cq, qp_type=QPType.UD))
qp.attach_mcast(ipaddress.IPv4Address("239.1.2.3"))
del qp
"""
    environment = {key: value for key, value in os.environ.items() if key != "RDMANET_SOFT_RULES"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (
        "ERROR by rdmanet: an unclosed QP cannot be destroyed, and leaks: [Errno 16] ibv_destroy_qp"
        in done.stderr
    )


def test_again_and_again(device):
    """Making and closing leaves nothing behind; the fixture counts."""
    for _ in range(100 if device.library.embedded_device else 3):
        members = family(device)
        for name in ("qp", "cq", "channel", "mr", "pd", "context"):
            members[name].close()
