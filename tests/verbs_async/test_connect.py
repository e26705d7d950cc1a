"""Queue pairs that are introduced to each other by QPInfo, and to those of C programs."""

import contextlib
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from rdmanet.verbs import (
    CQ,
    QP,
    AccessFlags,
    QPCap,
    QPInfo,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    WROpcode,
    best_gid,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from foreign import free_port, started  # noqa: E402

ITERS, SIZE = 200, 4096

pytestmark = pytest.mark.usefixtures("by_hand")


@pytest.fixture
def make(verbs):
    """A queue pair with a completion queue of its own."""

    def make(qp_type=QPType.RC):
        cq = verbs.keep(CQ(verbs.context, 64))
        return verbs.keep(QP(verbs.pd, QPInitAttr(cq, cq, QPCap(16, 16), qp_type)))

    return make


def completions(cq, count):
    deadline = time.monotonic() + 60
    found = []
    while len(found) < count:
        found += cq.poll()
        assert time.monotonic() < deadline, f"{len(found)} of {count} completions"
    for wc in found:
        wc.raise_for_status()
    return found


UNRELIABLE = pytest.mark.not_on_iwarp("has reliable connections only")


@pytest.mark.parametrize("kind", [QPType.RC, pytest.param(QPType.UC, marks=UNRELIABLE)], ids=["RC", "UC"])
def test_two_of_our_own(verbs, make, kind):
    a, b = make(kind), make(kind)
    infos = a.info(mtu=2048), QPInfo.from_bytes(bytes(b.info(psn=7)))
    a.connect(infos[1])
    b.connect(infos[0], access=AccessFlags.REMOTE_WRITE)
    for qp, mine, peer in ((a, *infos), (b, *reversed(infos))):
        attr = qp.query()[0]
        assert qp.state == attr.qp_state == QPState.RTS
        assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (peer.qp_num, peer.psn, mine.psn)
        assert attr.ah_attr.dgid == peer.gid
        assert attr.path_mtu.bytes == min(mine.mtu, peer.mtu)
    memory = verbs.mr()
    memory[:5] = b"hello"
    b.post_recv(RecvWR(memory.sge(100, 5)))
    a.post_send(SendWR(WROpcode.SEND, memory.sge(0, 5)))
    a.post_send(
        SendWR(WROpcode.RDMA_WRITE, memory.sge(0, 5), remote_addr=memory.address + 200, rkey=memory.rkey)
    )
    completions(b.recv_cq, 1)
    completions(a.send_cq, 2)
    assert memory[100:105] == b"hello"


def test_what_info_says(context, make):
    qp = make()
    info, port = qp.info(), context.query_port(1)
    assert info.gid == best_gid(context.gid_table(1)).gid
    assert (info.qp_num, info.lid, info.mtu) == (qp.qp_num, port.lid, port.active_mtu.bytes)
    assert qp.info(psn=5, mtu=256, sgid_index=0) == QPInfo(
        qp.qp_num, 5, context.query_gid(1, 0), port.lid, 256
    )
    with pytest.raises(OSError, match="index 4000"):
        qp.info(sgid_index=4000)
    with pytest.raises(ValueError, match="mtu 1000"):
        qp.info(mtu=1000)


def test_rights_given_before_stay(verbs, make):
    a, b = make(), make()
    infos = a.info(), b.info()
    a.to_init(access=AccessFlags.REMOTE_READ)
    a.connect(infos[1])
    assert a.query()[0].qp_access_flags & AccessFlags.REMOTE_READ
    b.to_init(access=AccessFlags.REMOTE_READ)
    b.connect(infos[0], access=AccessFlags.REMOTE_WRITE)
    assert b.query()[0].qp_access_flags & AccessFlags.REMOTE_WRITE
    assert not b.query()[0].qp_access_flags & AccessFlags.REMOTE_READ


def test_who_was_not_introduced(make):
    a, b = make(), make()
    info = a.info()
    with pytest.raises(ValueError, match="call info\\(\\) first"):
        b.connect(info)


@pytest.mark.not_on_iwarp("has no datagrams")
def test_datagrams_have_no_peer(make):
    info = make().info()
    datagrams = make(QPType.UD)
    datagrams.info()
    with pytest.raises(ValueError, match="a datagram queue pair is not connected"):
        datagrams.connect(info)


def test_a_refused_connection_says_where_to(make):
    a = make()
    a.info()
    with pytest.raises(OSError, match="INIT to RTR was refused; address: to .* from GID index"):
        a.connect(QPInfo(1))  # of a port that has neither GID nor LID
    assert a.state == QPState.INIT


# ---- C's ibv_rc_pingpong and ibv_uc_pingpong ----


def ping(verbs, qp, wire, first):
    """The measured part: a message there and one back, ITERS times."""
    memory = verbs.mr(2 * SIZE)
    sent = received = 0
    qp.post_recv([RecvWR(memory.sge(0, SIZE)) for _ in range(8)])
    wire()
    if first:
        qp.post_send(SendWR(WROpcode.SEND, memory.sge(SIZE, SIZE)))
        sent += 1
    while received < ITERS:
        for wc in completions(qp.recv_cq, 1):
            received += 1
            assert wc.byte_len == SIZE
            if received + 8 <= ITERS:
                qp.post_recv(RecvWR(memory.sge(0, SIZE)))
            if sent < ITERS:
                qp.post_send(SendWR(WROpcode.SEND, memory.sge(SIZE, SIZE)))
                sent += 1
    completions(qp.send_cq, sent)


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("ibv_rc_pingpong", QPType.RC), pytest.param("ibv_uc_pingpong", QPType.UC, marks=UNRELIABLE)],
    ids=["rc", "uc"],
)
def test_pingpong_with_c(verbs, device, c_environment, eventually, name, kind, role):
    """We are the server or the client, C the other one, and both get all."""
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    send_cq, recv_cq = verbs.keep(CQ(verbs.context, ITERS + 1)), verbs.keep(CQ(verbs.context, 64))
    qp = verbs.keep(QP(verbs.pd, QPInitAttr(send_cq, recv_cq, QPCap(ITERS, 16), kind)))
    qp.to_init()
    index = verbs.gid.gid_index
    mine = qp.info(sgid_index=index, mtu=1024)
    port = free_port()
    command = f"{name} -d {device.name} -g {index} -p {port} -s {SIZE} -n {ITERS}"
    with contextlib.ExitStack() as stack:
        if role == "server":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            program = stack.enter_context(started(f"{command} 127.0.0.1", c_environment))
            listener.settimeout(60)
            wire, _ = listener.accept()
        else:
            program = stack.enter_context(started(command, c_environment))
            eventually(lambda: program.has_port(port) or program.process.poll() is not None, what="listening")
            wire = socket.create_connection(("127.0.0.1", port))
        stack.enter_context(wire)
        lines = stack.enter_context(wire.makefile("rb"))
        wire.settimeout(60)

        def introduce():
            said = f"{mine}\0".encode()
            if role == "client":
                wire.sendall(said)
            peer = QPInfo.from_text(lines.read(52))
            qp.connect(peer)
            if role == "client":
                wire.sendall(b"done\0")
            else:
                wire.sendall(said)
                assert lines.read(5) == b"done\0"

        ping(verbs, qp, introduce, first=role == "client")
        assert program.wait(60) == 0, program.output()
        assert f"{ITERS} iters in" in program.output()
