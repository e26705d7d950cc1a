"""Fixtures of the device's tests: a context, and two queue pairs connected with each other.

The pair is connected by hand, through the device's own address: what the connection manager does is
test_cm.py's subject.
"""

import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from rdmanet.verbs import (
    CQ,
    MR,
    PD,
    QP,
    WC,
    AccessFlags,
    CompChannel,
    Context,
    Device,
    GIDEntry,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendWR,
    WROpcode,
)

EVERYTHING = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)


def own_gid(context: Context) -> GIDEntry:
    """The address to reach ourselves by: an IPv4 one where there is a choice."""
    table = context.gid_table(1)
    return next((entry for entry in table if entry.address.version == 4), table[0])


@dataclass
class Side:
    """One end of a connection, with all that belongs to it."""

    pd: PD
    channel: CompChannel
    cq: CQ
    qp: QP
    pending: list[WC] = field(default_factory=list)

    def poll(self, count: int = 1, timeout: float = 5) -> list[WC]:
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

    def one(self, timeout: float = 5) -> WC:
        return self.poll(1, timeout)[0]

    def quiet(self, seconds: float = 0.02) -> bool:
        """Nothing comes for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pending += self.cq.poll()
            if self.pending:
                return False
        return True

    def wait_event(self, timeout: float = 5) -> bool:
        """One event of the completion channel, acknowledged."""
        if not select.select([self.channel], [], [], timeout)[0]:
            return False
        cq = self.channel.get_cq_event()
        if cq is None:
            return False
        assert cq is self.cq
        cq.ack_events(1)
        return True

    def send(self, sg_list: object = (), opcode: WROpcode = WROpcode.SEND, **options: object) -> None:
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

    def __init__(self, context: Context) -> None:
        self.context = context
        self.gid = own_gid(context)
        self.pd = PD(context)
        self.sides: list[Side] = []
        self.mrs: list[MR] = []

    def side(self, *, cqe: int = 64, pd: PD | None = None, sq_sig_all: bool = False, **cap: int) -> Side:
        channel = CompChannel(self.context)
        cq = CQ(self.context, cqe, channel)
        sizes = QPCap(**{"max_send_wr": 16, "max_recv_wr": 16, "max_send_sge": 4, "max_recv_sge": 4} | cap)
        qp = QP(pd or self.pd, QPInitAttr(cq, cq, sizes, sq_sig_all=sq_sig_all))
        side = Side(pd or self.pd, channel, cq, qp)
        self.sides.append(side)
        return side

    def mr(self, length: int = 4096, access: AccessFlags = EVERYTHING, pd: PD | None = None) -> MR:
        mr = (pd or self.pd).alloc_mr(length, access)
        self.mrs.append(mr)
        return mr

    def to_rtr(self, side: Side, peer: Side, **options: int) -> None:
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
        a.qp.to_init(access=access)
        b.qp.to_init(access=access)
        for side, peer in ((a, b), (b, a)):
            self.to_rtr(side, peer, **(rtr or {}))
        for side in (a, b):
            side.qp.to_rts(**{"timeout": 14, "retry_cnt": 3} | (rts or {}))

    def pair(self, **options: object) -> tuple[Side, Side]:
        a, b = self.side(), self.side()
        self.connect(a, b, **options)  # type: ignore[arg-type]
        return a, b

    def close(self) -> None:
        for side in self.sides:
            side.close()
        for mr in self.mrs:
            mr.close()
        self.pd.close()


@pytest.fixture
def context(device: Device) -> Iterator[Context]:
    with device.open() as context:
        yield context


@pytest.fixture
def net(context: Context) -> Iterator[Net]:
    net = Net(context)
    yield net
    net.close()


@pytest.fixture
def pair(net: Net) -> tuple[Side, Side]:
    """Two connected queue pairs in this process, each with its own completion queue and channel."""
    return net.pair()
