"""Two processes: the same operations, and what one side learns of the other's end."""

import os
import signal
import struct
import time

import pytest

from rdmanet.cm import CMEventType
from rdmanet.verbs import SGE, AccessFlags, RecvWR, SendFlags, SendWR, WCStatus, WROpcode

EVERYTHING = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)


def meet(net, pipe_send, pipe_receive, rts=None, **sizes):
    """A side of ours, connected by hand with one of the other process."""
    side = net.side(**sizes)
    pipe_send((side.qp.qp_num, net.gid.gid))
    number, gid = pipe_receive()
    side.qp.to_init(access=EVERYTHING)
    side.qp.to_rtr(number, gid, sgid_index=net.gid.gid_index, max_dest_rd_atomic=4)
    side.qp.to_rts(**{"timeout": 18, "retry_cnt": 7, "max_rd_atomic": 4} | (rts or {}))
    return side


def owner(pipe, device, Net, kind):
    """A process with memory and posted receives, until it is told to end."""
    with device.open() as context:
        net = Net(context)
        side = meet(net, pipe.send, pipe.recv)
        if kind != "reg":
            mr = net.mr(1 << 16, EVERYTHING, huge_pages=kind == "huge")
        else:
            mr = net.pd.reg_mr(bytearray(1 << 16), EVERYTHING)
            net.mrs.append(mr)
        side.qp.post_recv([RecvWR(mr.sge(1024 * i, 1024)) for i in range(8)])
        pipe.send((mr.address, mr.rkey))
        while (wanted := pipe.recv()) is not None:
            if isinstance(wanted, slice):
                pipe.send(mr[wanted])
            else:
                offset, data = wanted
                mr[offset : offset + len(data)] = data
                pipe.send(None)
        net.close()


class Owner:
    """The other end of owner(): its memory, asked for or changed by itself."""

    def __init__(self, peer):
        self.peer = peer
        self.address, self.rkey = peer.hear()

    def read(self, start, end):
        self.peer.say(slice(start, end))
        return self.peer.hear()

    def write(self, offset, data):
        self.peer.say((offset, data))
        self.peer.hear()

    def at(self, offset):
        return {"remote_addr": self.address + offset, "rkey": self.rkey}


@pytest.fixture(params=["alloc", "huge", "reg"])
def there(request, device, net, by_hand, peer):
    """(our side, the owner) with the owner's memory in pages of its own, or brought by the program."""
    if request.param == "huge":
        net.needs_huge_pages(1)
    other = peer(owner, device, type(net), request.param)
    side = meet(net, other.say, other.hear, max_inline_data=64)
    yield side, Owner(other)
    other.say(None)
    assert other.wait() == 0


def test_send(net, there):
    side, owner = there
    mr = net.mr()
    mr[:1000] = data = os.urandom(1000)
    for length in (1000, 1, 0):
        side.send(SGE(mr, 0, length))
        assert side.one().status == WCStatus.SUCCESS
    assert owner.read(0, 1000) == data
    assert owner.read(1024, 1026) == data[:1] + b"\0"


@pytest.mark.parametrize("size", [1, 8, 100, 4096, 65536])
def test_write_and_read(net, there, size):
    side, owner = there
    here = net.mr(1 << 16)
    here[:size] = data = os.urandom(size)
    side.send(SGE(here, 0, size), WROpcode.RDMA_WRITE, **owner.at(0))
    assert side.one().status == WCStatus.SUCCESS
    assert owner.read(0, size) == data
    owner.write(0, data[::-1])
    side.send(SGE(here, 0, size), WROpcode.RDMA_READ, **owner.at(0))
    assert side.one().status == WCStatus.SUCCESS
    assert here[:size] == data[::-1]


def test_from_borrowed_memory(net, there):
    side, owner = there
    data = os.urandom(5000)
    back = bytearray(5000)
    with net.pd.reg_mr(data) as source, net.pd.reg_mr(back) as target:
        side.send(source, WROpcode.RDMA_WRITE, **owner.at(100))
        side.send(target, WROpcode.RDMA_READ, **owner.at(100))
        assert [wc.status for wc in side.poll(2)] == [WCStatus.SUCCESS] * 2
    assert back == data


def test_inline(net, there):
    side, owner = there
    side.send(SGE(b"8 bytes!"), flags=SendFlags.SIGNALED | SendFlags.INLINE)
    assert side.one().status == WCStatus.SUCCESS
    assert owner.read(0, 8) == b"8 bytes!"


@pytest.mark.not_on_iwarp("has no atomics")
def test_atomics(net, there):
    side, owner = there
    here = net.mr()
    owner.write(8, struct.pack("=Q", 40))
    side.send(SGE(here, 0, 8), WROpcode.ATOMIC_FETCH_AND_ADD, compare_add=2, **owner.at(8))
    side.send(SGE(here, 8, 8), WROpcode.ATOMIC_CMP_AND_SWP, compare_add=42, swap=7, **owner.at(8))
    assert [wc.status for wc in side.poll(2)] == [WCStatus.SUCCESS] * 2
    assert struct.unpack_from("=QQ", here) == (40, 42)
    assert struct.unpack("=Q", owner.read(8, 16)) == (7,)


def test_refused_access(net, there):
    side, owner = there
    side.send(SGE(net.mr(), 0, 8), WROpcode.RDMA_WRITE, **owner.at(1 << 16))
    assert side.one().status == WCStatus.REM_ACCESS_ERR


def test_a_message_too_long(net, there):
    side, owner = there
    side.send(SGE(net.mr(), 0, 1025))
    assert side.one().status in (WCStatus.REM_INV_REQ_ERR, WCStatus.REM_OP_ERR)  # the latter is rxe's


def test_order(net, there):
    """A message tells that what was written before it is there."""
    side, owner = there
    mr = net.mr(1 << 16)
    for i in range(8):
        mr[: 1 << 14] = bytes([i + 1]) * (1 << 14)
        side.send(SGE(mr, 0, 1 << 14), WROpcode.RDMA_WRITE, flags=0, **owner.at(1 << 15))
        side.send(SGE(mr, 0, 4), wr_id=i)
        assert side.one().wr_id == i
        assert owner.read(1 << 15, (1 << 15) + (1 << 14)) == bytes([i + 1]) * (1 << 14)


# ---- Waking, echoing ----------------------------------------------------------------------------------


def echoing(pipe, device, Net, count):
    """Sends back what comes, asleep in between."""
    with device.open() as context:
        net = Net(context)
        side = meet(net, pipe.send, pipe.recv)
        mr = net.mr()
        side.receive(mr.sge(0, 64))
        side.cq.req_notify()
        pipe.send("ready")
        done = 0
        while done < count:
            side.wait_event()
            side.cq.req_notify()
            for wc in side.cq.poll():
                wc.raise_for_status()
                if not wc.is_send:
                    done += 1
                    side.receive(mr.sge(64, 64))
                    side.send(SGE(mr, 0, wc.byte_len))
        pipe.recv()
        net.close()


def test_waking_each_other(device, net, by_hand, peer):
    """Armed, asleep, woken by the other process, many times: no wake-up is lost."""
    other = peer(echoing, device, type(net), 300)
    side = meet(net, other.say, other.hear)
    mr = net.mr()
    assert other.hear() == "ready"
    for i in range(300):
        side.receive(mr.sge(0, 64), wr_id="back")
        side.cq.req_notify()
        side.send(mr.sge(64, 8), flags=SendFlags.SIGNALED)
        found = []
        while not any(wc.wr_id == "back" for wc in found):
            found += side.cq.poll()
            if not any(wc.wr_id == "back" for wc in found):
                assert side.wait_event(), f"not woken for echo {i}"
                side.cq.req_notify()
        for wc in found:
            wc.raise_for_status()
    other.say(None)


def counting(pipe, device, Net, rounds):
    with device.open() as context:
        net = Net(context)
        side = meet(net, pipe.send, pipe.recv)
        address, rkey = pipe.recv()
        here = net.mr()
        for _ in range(rounds):
            side.send(
                SGE(here, 0, 8), WROpcode.ATOMIC_FETCH_AND_ADD, compare_add=1, remote_addr=address, rkey=rkey
            )
            side.one().raise_for_status()
        net.close()


@pytest.mark.not_on_iwarp("has no atomics")
def test_atomics_of_two_processes(device, net, by_hand, peer):
    """Atomics of several processes on one word are atomic."""
    rounds = 200
    counter = net.mr(64, EVERYTHING)
    others = [peer(counting, device, type(net), rounds) for _ in range(2)]
    sides = [meet(net, other.say, other.hear) for other in others]
    for other in others:
        other.say((counter.address, counter.rkey))
    for other in others:
        assert other.wait(30) == 0
    assert struct.unpack_from("=Q", counter) == (2 * rounds,)
    assert len(sides) == 2


# ---- Through the connection manager, and deaths ---------------------------------------------------------


@pytest.fixture
def forkable(device):
    """Peers are forked here, and librdmacm is of no use in a child whose parent has used it."""
    if not device.library.embedded_device:
        pytest.skip("librdmacm does not survive a fork")


def server(pipe, device, Manager, address):
    """Accepts, and sends every message back, until disconnected."""
    manager = Manager(device.library)
    listener = manager.listener(address)
    pipe.send(listener.local_addr)
    request = manager.next(CMEventType.CONNECT_REQUEST)
    qp = manager.qp(request.id)
    pd, cq = manager.queues(request.id.context)
    with pd.alloc_mr(1024) as mr:
        qp.post_recv([RecvWR(mr.sge(64 * i, 64), wr_id=i) for i in range(8)])
        request.id.accept(b"hello " + request.private_data[:4], rnr_retry_count=7)
        manager.next(CMEventType.ESTABLISHED, request.id)
        while manager.channel.get_event() is None:
            for wc in cq.poll():
                if not wc.is_send and wc.status == WCStatus.SUCCESS:
                    qp.post_send(SendWR(WROpcode.SEND, mr.sge(64 * wc.wr_id, wc.byte_len), wr_id=wc.wr_id))
                elif wc.is_send and wc.status == WCStatus.SUCCESS:
                    qp.post_recv(RecvWR(mr.sge(64 * wc.wr_id, 64), wr_id=wc.wr_id))
            time.sleep(0)
        request.id.disconnect()
        request.id.close()
    manager.close()


@pytest.fixture
def connection(forkable, device, manager, peer_address, peer):
    """(the peer, our identifier) connected with server() there."""
    other = peer(server, device, type(manager), peer_address)
    client = manager.resolved(tuple(other.hear()))
    manager.qp(client)
    client.connect(b"abba")
    event = manager.next(CMEventType.ESTABLISHED, client)
    assert event.private_data[:10] == b"hello abba"
    return other, client


def echo(manager, id, mr, text):
    pd, cq = manager.queues(id.context)
    mr[: len(text)] = text
    id.qp.post_recv(RecvWR(mr.sge(100, 100)))
    id.qp.post_send(SendWR(WROpcode.SEND, mr.sge(0, len(text))))
    found = []
    deadline = time.monotonic() + 60
    while len(found) < 2:
        found += cq.poll()
        assert time.monotonic() < deadline, found
    for wc in found:
        wc.raise_for_status()
    return mr[100 : 100 + len(text)]


def test_connection(manager, connection):
    other, client = connection
    pd, _ = manager.queues(client.context)
    with pd.alloc_mr(256) as mr:
        for i in range(50):
            assert echo(manager, client, mr, b"message %d" % i) == b"message %d" % i
    client.disconnect()
    manager.next(CMEventType.DISCONNECTED, client)
    assert other.wait() == 0


def gone(manager, client):
    """The other side has died: we are told, and what is posted is flushed."""
    event = manager.next(CMEventType.DISCONNECTED, client)
    assert isinstance(event.error(), ConnectionResetError)
    client.disconnect()
    pd, cq = manager.queues(client.context)
    found = []
    deadline = time.monotonic() + 60
    while not found:
        found += cq.poll()
        assert time.monotonic() < deadline, "nothing was flushed"
    assert {wc.status for wc in found} <= {WCStatus.WR_FLUSH_ERR, WCStatus.RETRY_EXC_ERR}


def test_a_killed_peer(manager, connection):
    other, client = connection
    pd, _ = manager.queues(client.context)
    with pd.alloc_mr(256) as mr:
        echo(manager, client, mr, b"alive")
        client.qp.post_recv(RecvWR(mr))
        other.kill()
        gone(manager, client)
        client.close()
    assert other.wait() == -signal.SIGKILL


def test_an_exit_without_farewell(manager, connection):
    other, client = connection
    pd, _ = manager.queues(client.context)
    with pd.alloc_mr(256) as mr:
        client.qp.post_recv(RecvWR(mr))
        other.kill(signal.SIGTERM)
        gone(manager, client)
        client.close()
    assert other.wait() == -signal.SIGTERM


def forking_server(pipe, device, Manager, address):
    """A server that has forked a child, which sleeps and holds copies of all its descriptors."""

    class Forking(Manager):
        def qp(self, id):
            made = super().qp(id)
            pid = os.fork()
            if pid == 0:
                time.sleep(5)
                os._exit(0)
            return made

    server(pipe, device, Forking, address)


def test_a_killed_peer_whose_child_lives(forkable, device, manager, peer_address, peer):
    """The child keeps its parent's descriptors, but not its life."""
    other = peer(forking_server, device, type(manager), peer_address)
    client = manager.resolved(tuple(other.hear()))
    manager.qp(client)
    client.connect(b"abba")
    manager.next(CMEventType.ESTABLISHED, client)
    pd, _ = manager.queues(client.context)
    with pd.alloc_mr(256) as mr:
        client.qp.post_recv(RecvWR(mr))
        other.kill()
        gone(manager, client)
        client.close()
    assert other.wait() == -signal.SIGKILL


def test_a_stopped_peer_stalls_nobody_else(forkable, device, manager, peer_address, peer):
    """Of two connections one stands still; the other goes on, and closing the first does not wait."""
    others = [peer(server, device, type(manager), peer_address) for _ in range(2)]
    clients = []
    for other in others:
        client = manager.resolved(tuple(other.hear()))
        manager.qp(client)
        client.connect(b"abba", rnr_retry_count=7)
        manager.next(CMEventType.ESTABLISHED, client)
        clients.append(client)
    stopped, running = clients
    pd, _ = manager.queues(running.context)
    with pd.alloc_mr(4096) as mr:
        others[0].kill(signal.SIGSTOP)
        os.waitid(os.P_PID, others[0].pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(4):
            stopped.qp.post_send(SendWR(WROpcode.SEND, mr.sge(1024, 8), flags=0))
        for i in range(20):
            assert echo(manager, running, mr, b"%d" % i) == b"%d" % i
        stopped.close()  # which waits for nobody
        others[0].kill(signal.SIGKILL)
        others[0].wait()
        running.disconnect()
        stopped.close()


@pytest.mark.not_on_iwarp("retries nothing: a send that finds no receive ends the connection")
def test_killed_at_any_moment(forkable, device, manager, peer_address, peer):
    """In the middle of a stream of messages, again and again: the survivor is told, and goes on."""
    for round in range(20):
        other = peer(server, device, type(manager), peer_address)
        client = manager.resolved(tuple(other.hear()))
        manager.qp(client)
        client.connect(b"abba", rnr_retry_count=7)
        manager.next(CMEventType.ESTABLISHED, client)
        pd, cq = manager.queues(client.context)
        with pd.alloc_mr(256) as mr:
            when = time.monotonic() + 0.0007 * round
            killed = None
            while True:
                found = cq.poll()
                if any(wc.status != WCStatus.SUCCESS for wc in found):
                    break
                sends, receives = client.qp.in_flight
                for _ in range(4 - receives):
                    client.qp.post_recv(RecvWR(mr.sge(100, 100)))
                if sends < 4:
                    client.qp.post_send(SendWR(WROpcode.SEND, mr.sge(0, 32)))
                if killed is None and time.monotonic() >= when:
                    other.kill()
                    killed = time.monotonic()
                elif killed is not None and manager.channel.get_event() is not None:
                    client.disconnect()
                assert killed is None or time.monotonic() - killed < 60, "nobody tells of the death"
            client.close()
            while manager.channel.get_event() is not None:
                pass
        other.wait()
