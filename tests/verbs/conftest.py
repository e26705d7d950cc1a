"""Fixtures of the device's tests: a context, and two queue pairs connected with each other.

The pair is connected by hand, through the device's own address: what the connection manager does is
test_cm.py's subject. Only a kernel's iWARP device leaves no choice; there a test that needs the steps
by hand is skipped. Peers in other processes are forked, and open the device for themselves.
"""

import contextlib
import ctypes
import errno
import multiprocessing
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rdmanet.cm import CMID, CMEvent, CMEventChannel, CMEventType
from rdmanet.verbs import (
    AH,
    CQ,
    MR,
    MW,
    PD,
    QP,
    WC,
    AccessFlags,
    AHAttr,
    AsyncEvent,
    CompChannel,
    Context,
    Device,
    EventType,
    GIDEntry,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    TransportType,
    WROpcode,
)

EVERYTHING = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)


HUGE_PAGE = 1024 * int(re.findall(r"^Hugepagesize: *(\d+)", Path("/proc/meminfo").read_text(), re.M)[0])

_VENDORS = {0xFFFFFF: "rxe", 0x626D74: "siw"}


def driver(context: Context) -> str:
    """The name of the driver, if it is one that is known to differ, or "other"."""
    if context.library.embedded_device:
        return "embedded"
    return _VENDORS.get(context.query_device().vendor_id, "other")


def differs(context: Context, name: str, how: str) -> None:
    """Skip a test of something that this one driver is known to do otherwise; docs/rules.md has them all."""
    if driver(context) == name:
        pytest.skip(f"{name} {how}")


@contextlib.contextmanager
def needs(what: str) -> Iterator[None]:
    """Around the first use of something that not every device has: without it the test is skipped."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT):
            pytest.skip(f"the device has no {what}")
        raise


# What a reliable connection has on InfiniBand and RoCE, and not on a kernel's iWARP device.
NOT_ON_IWARP = {
    WROpcode.SEND_WITH_IMM: "iWARP has no immediate data",
    WROpcode.RDMA_WRITE_WITH_IMM: "iWARP has no immediate data",
    WROpcode.ATOMIC_CMP_AND_SWP: "iWARP has no atomic operations",
    WROpcode.ATOMIC_FETCH_AND_ADD: "iWARP has no atomic operations",
}


def own_gid(context: Context) -> GIDEntry:
    """The address by which we reach ourselves: RDMANET_TEST_HOST, or an IPv4 one if there is any."""
    table = context.gid_table(1)
    wanted = os.environ.get("RDMANET_TEST_HOST")
    for entry in table:
        if str(entry.address) == wanted:
            return entry
    return next((entry for entry in table if entry.address.version == 4), table[0])


@dataclass
class Side:
    """One end of a connection, with all that belongs to it."""

    pd: PD
    channel: CompChannel
    cq: CQ
    qp: QP
    managed: bool = False
    pending: list[WC] = field(default_factory=list)

    def poll(self, count: int = 1, timeout: float = 60) -> list[WC]:
        """Exactly count completions."""
        deadline = time.monotonic() + timeout
        while len(self.pending) < count:
            found = self.cq.poll(count - len(self.pending))
            self.pending += found
            if not found:
                assert time.monotonic() < deadline, (
                    f"{len(self.pending)} of {count} completions: {self.pending}"
                )
                time.sleep(0)
        found, self.pending = self.pending[:count], self.pending[count:]
        return found

    def one(self, timeout: float = 60) -> WC:
        return self.poll(1, timeout)[0]

    def quiet(self, seconds: float = 0.02) -> bool:
        """Nothing comes for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pending += self.cq.poll()
            if self.pending:
                return False
        return True

    def wait_event(self, timeout: float = 60) -> bool:
        """One event of the completion channel, acknowledged."""
        if not select.select([self.channel], [], [], timeout)[0]:
            return False
        cq = self.channel.get_cq_event()
        if cq is None:
            return False
        assert cq is self.cq
        cq.ack_events(1)
        return True

    def becomes(self, state: QPState, timeout: float = 60) -> None:
        """The device says that the queue pair is in this state; a completion may be a moment ahead of it."""
        deadline = time.monotonic() + timeout
        while (now := self.qp.query()[0].qp_state) != state:
            assert time.monotonic() < deadline, f"{now!r}, not {state!r}"
            time.sleep(0.001)

    def send(self, sg_list: object = (), opcode: WROpcode = WROpcode.SEND, **options: object) -> None:
        if self.managed and opcode in NOT_ON_IWARP:
            pytest.skip(NOT_ON_IWARP[opcode])
        self.qp.post_send(SendWR(opcode, sg_list, **options))  # type: ignore[arg-type]

    def receive(self, sg_list: object = (), **options: object) -> None:
        self.qp.post_recv(RecvWR(sg_list, **options))  # type: ignore[arg-type]

    def close(self) -> None:
        self.pending.clear()
        self.qp.close()
        self.cq.close()
        self.channel.close()


class Net:
    """Makes sides and connects them; closes everything in the end, however far a test has come."""

    def __init__(self, context: Context, address: str | None = None) -> None:
        self.context = context
        self.address = address
        self.gid = own_gid(context)
        (device,) = (found for found in context.library.devices() if found.name == context.name)
        # Only the connection manager connects queue pairs, and moves them.
        self.managed = device.transport_type == TransportType.IWARP and not context.library.embedded_device
        self.manager: Manager | None = None
        self.pd = PD(context)
        self.sides: list[Side] = []
        self.mrs: list[MR] = []
        self.kept: list[Any] = []
        self.windows: list[MW] = []

    def side(
        self,
        *,
        cqe: int = 64,
        pd: PD | None = None,
        sq_sig_all: bool = False,
        qp_type: QPType = QPType.RC,
        srq: Any = None,
        ops: int = 0,
        **cap: int,
    ) -> Side:
        """A queue pair with its completion queue; ops are the extended calls that it is made for."""
        channel = CompChannel(self.context)
        cq = CQ(self.context, cqe, channel)
        sizes = QPCap(**{"max_send_wr": 16, "max_recv_wr": 16, "max_send_sge": 4, "max_recv_sge": 4} | cap)
        attr: QPInitAttr = QPInitAttr(cq, cq, sizes, qp_type, sq_sig_all, srq)
        if ops:
            attr = QPInitAttrEx(cq, cq, sizes, qp_type, sq_sig_all, srq, send_ops_flags=ops)
        try:
            with needs(f"{qp_type.name} queue pairs" if not ops else "extended calls for these requests"):
                qp = QP(pd or self.pd, attr)
        except BaseException:
            cq.close()
            channel.close()
            raise
        side = Side(pd or self.pd, channel, cq, qp, self.managed)
        self.sides.append(side)
        return side

    def keep(self, resource: Any) -> Any:
        """To be closed in the end, after the queue pairs, the last one first."""
        self.kept.append(resource)
        return resource

    def datagrams(self, qkey: int = 0x1234, **options: Any) -> Side:
        """A datagram queue pair, ready to send."""
        side = self.side(qp_type=QPType.UD, **options)
        side.qp.to_init(qkey=qkey)
        side.qp.to_rtr()
        side.qp.to_rts()
        return side

    def ah(self, **options: Any) -> AH:
        """The way to ourselves."""
        with needs("address handles"):
            return self.keep(AH(self.pd, AHAttr(self.gid.gid, self.gid.gid_index, **options)))

    def event(self, wanted: EventType, timeout: float = 60) -> AsyncEvent:
        """The next asynchronous event of this kind."""
        deadline = time.monotonic() + timeout
        while True:
            while (event := self.context.get_async_event()) is not None:
                if event.event_type == wanted:
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {wanted.name} within {timeout} s"
            select.select([self.context.async_fd], [], [], left)

    def mr(
        self, length: int = 4096, access: AccessFlags = EVERYTHING, pd: PD | None = None, **options: Any
    ) -> MR:
        mr = (pd or self.pd).alloc_mr(length, access, **options)
        self.mrs.append(mr)
        return mr

    def needs_huge_pages(self, count: int) -> None:
        """The test goes on only where the system has reserved so many, and a few more for others."""
        try:
            self.pd.alloc_mr((count + 8) * HUGE_PAGE, huge_pages=True).close()
        except OSError:
            pytest.skip("the system has no huge pages: `sysctl vm.nr_hugepages=32`")

    def by_hand(self) -> None:
        """The test goes on only where queue pairs are connected without the connection manager."""
        if self.managed:
            pytest.skip("iWARP's queue pairs are connected and moved by rdma_cm only")

    def to_rtr(self, side: Side, peer: Side, **options: int) -> None:
        self.by_hand()
        side.qp.to_rtr(peer.qp.qp_num, self.gid.gid, sgid_index=self.gid.gid_index, **options)

    def connect(
        self,
        a: Side,
        b: Side,
        *,
        access: AccessFlags = EVERYTHING,
        rtr: dict[str, int] | None = None,
        rts: dict[str, int] | None = None,
    ) -> None:
        if rtr or rts or access != EVERYTHING or a is b:
            self.by_hand()
        if self.managed:
            self.connect_managed(a, b)
            return
        a.qp.to_init(access=access)
        b.qp.to_init(access=access)
        for side, peer in ((a, b), (b, a)):
            self.to_rtr(side, peer, **(rtr or {}))
        for side in (a, b):
            side.qp.to_rts(**{"timeout": 14, "retry_cnt": 3} | (rts or {}))

    def connect_managed(self, a: Side, b: Side) -> None:
        self.manager = self.manager or Manager(self.context.library)
        depths = {"responder_resources": 4, "initiator_depth": 4}
        client = self.manager.resolved(self.manager.listener(self.address).local_addr)
        client.connect(qp_num=a.qp.qp_num, **depths)
        server = self.manager.next(CMEventType.CONNECT_REQUEST).id
        server.accept(qp_num=b.qp.qp_num, **depths)
        for _ in range(2):
            self.manager.next(CMEventType.ESTABLISHED)

    def pair(self, **options: object) -> tuple[Side, Side]:
        a, b = self.side(), self.side()
        self.connect(a, b, **options)  # type: ignore[arg-type]
        return a, b

    def close(self) -> None:
        for window in self.windows:  # while one is bound, rxe does not let go of its queue pair
            window.close()
        for side in self.sides:
            side.qp.close()
        for resource in reversed(self.kept):
            resource.close()
        for side in self.sides:
            side.close()
        for mr in self.mrs:
            mr.close()
        self.pd.close()
        if self.manager:
            self.manager.close()


@pytest.fixture
def context(device: Device) -> Iterator[Context]:
    with device.open() as context:
        yield context


@pytest.fixture
def net(context: Context, address: str) -> Iterator[Net]:
    net = Net(context, address)
    yield net
    net.close()


@pytest.fixture
def by_hand(net: Net) -> None:
    """For tests that move queue pairs through their states themselves."""
    net.by_hand()


@pytest.fixture
def pair(net: Net) -> tuple[Side, Side]:
    """Two connected queue pairs in this process, each with its own completion queue and channel."""
    return net.pair()


# ---- The connection manager --------------------------------------------------------------------------


class Manager:
    """A channel, and all that was made on the way to a connection, to be closed in order."""

    def __init__(self, library) -> None:
        self.library = library
        self.channel = CMEventChannel(library)
        self.channels = [self.channel]
        self.ids: list[CMID] = []
        self.parts: list[object] = []
        self.contexts: dict[Context, tuple[PD, CQ]] = {}

    def id(self, channel: CMEventChannel | None = None) -> CMID:
        made = (channel or self.channel).create_id()
        self.ids.append(made)
        return made

    def next(
        self,
        wanted: CMEventType,
        of: CMID | None = None,
        channel=None,
        timeout: float = 60,
        failing: CMEventType | None = None,
    ) -> CMEvent:
        """The next event, which must be this one; or its failure, which is raised."""
        channel = channel or self.channel
        deadline = time.monotonic() + timeout
        while True:
            ready = select.select([channel], [], [], max(0, deadline - time.monotonic()))[0]
            event = channel.get_event()
            if event is not None:
                break
            assert ready or time.monotonic() < deadline, f"no {wanted.name} within {timeout} s"
        if event.type == failing:
            event.raise_for_status()
        assert event.type == wanted, event
        assert of is None or event.id is of
        if event.type == CMEventType.CONNECT_REQUEST:
            self.ids.append(event.id)
        return event

    def queues(self, context: Context) -> tuple[PD, CQ]:
        if context not in self.contexts:
            self.contexts[context] = PD(context), CQ(context, 256)
        return self.contexts[context]

    def qp(self, id: CMID):
        pd, cq = self.queues(id.context)
        return id.create_qp(pd, QPInitAttr(cq, cq, QPCap(max_send_wr=8, max_recv_wr=8)))

    def listener(self, address: str, channel: CMEventChannel | None = None, port: int = 0) -> CMID:
        id = self.id(channel)
        id.bind_addr((address, port))
        id.listen(64)
        return id

    def resolved(self, address: tuple, channel: CMEventChannel | None = None) -> CMID:
        id = self.id(channel)
        id.resolve_addr(None, address)
        self.next(CMEventType.ADDR_RESOLVED, id, channel)
        id.resolve_route()
        self.next(CMEventType.ROUTE_RESOLVED, id, channel)
        return id

    def connected(self, address: str) -> tuple[CMID, CMID]:
        """A client's and a server's identifier, established."""
        listener = self.listener(address)
        client = self.resolved(listener.local_addr)
        self.qp(client)
        client.connect()
        server = self.next(CMEventType.CONNECT_REQUEST).id
        self.qp(server)
        server.accept()
        self.next(CMEventType.ESTABLISHED)
        self.next(CMEventType.ESTABLISHED)
        return client, server

    def part(self, *ids: CMID) -> None:
        """Read DISCONNECTED for each, and answer it, or the other side would wait for long."""
        left = set(ids)
        while left:
            id = self.next(CMEventType.DISCONNECTED).id
            left.remove(id)
            with contextlib.suppress(OSError):
                id.disconnect()

    def close(self) -> None:
        for id in self.ids:
            id.close()
        for pd, cq in self.contexts.values():
            cq.close()
            pd.close()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def manager(device) -> Iterator[Manager]:
    manager = Manager(device.library)
    yield manager
    manager.close()


# ---- Other processes -------------------------------------------------------------------------------------


def move_to_the_other_host() -> None:
    """This process, a forked one, if there is another host; see --across in tests/conftest.py."""
    if address := os.environ.get("RDMANET_TEST_PEER"):
        with open(os.environ["RDMANET_TEST_FAR_NET"]) as net:
            if ctypes.CDLL(None, use_errno=True).setns(net.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["RDMANET_TEST_HOST"] = address


@pytest.fixture
def peer_address(address: str) -> str:
    """Where a peer serves."""
    return os.environ.get("RDMANET_TEST_PEER", address)


class Peer:
    """A forked process that runs one function; `say` and `hear` carry what both have to agree on."""

    def __init__(self, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                move_to_the_other_host()
                action(theirs, *arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        theirs.close()
        self.connection = ours
        self.status: int | None = None

    def say(self, what: object) -> None:
        self.connection.send(what)

    def hear(self, timeout: float = 60) -> Any:
        assert self.connection.poll(timeout), "the peer says nothing"
        return self.connection.recv()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """Its exit status."""
        deadline = time.monotonic() + timeout
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                break
            assert time.monotonic() < deadline, "the peer does not end"
            time.sleep(0.005)
        self.connection.close()
        return self.status


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Start a function in another process; it must end well, unless the test has ended it otherwise."""
    started: list[Peer] = []

    def start(action: Callable[..., object], *arguments: object) -> Peer:
        started.append(Peer(action, arguments))
        return started[-1]

    yield start
    for peer in started:
        if peer.status is None:
            peer.kill(signal.SIGCONT)
            try:
                assert peer.wait() == 0, "the peer has failed; see its traceback"
            finally:
                if peer.status is None:
                    peer.kill()
                    peer.wait()
