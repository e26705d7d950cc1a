"""What the tests of the verbs for programs share: connected queue pairs, and every event loop."""

import contextlib
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rdmanet.cm import CMID, CMEventChannel, CMEventType
from rdmanet.verbs import (
    MR,
    PD,
    QP,
    AccessFlags,
    Context,
    Device,
    Library,
    QPCap,
    TransportType,
)
from rdmanet.verbs_async import AsyncCQ, AsyncQP

sys.path.insert(0, str(Path(__file__).parent))

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

EVERYTHING = (
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
    | AccessFlags.MW_BIND
)


@pytest.fixture
def context(device: Device) -> Iterator[Context]:
    with device.open() as context:
        yield context


class Verbs:
    """Makes what a test needs, and closes it all in the end, however far the test has come."""

    def __init__(self, context: Context, device: Device, address: str) -> None:
        self.context = context
        table = context.gid_table(1)
        self.gid = next((entry for entry in table if entry.address.version == 4), table[0])
        self.pd = PD(context)
        self.closing: list[Any] = []
        self.max_sge = min(8, context.query_device().max_sge)
        self.manager: Manager | None = None
        self.max_inline, self.empty_parts = 300, True
        if device.transport_type == TransportType.IWARP and not device.library.embedded_device:
            self.manager = self.keep(Manager(device.library, address))
            self.max_inline = 64  # siw has no more
            self.empty_parts = False  # behind others they crash siw, and the kernel with it

    def by_hand(self) -> None:
        """The test goes on only where queue pairs are connected without the connection manager."""
        if self.manager:
            pytest.skip("iWARP's queue pairs are connected and moved by rdma_cm only")

    def keep(self, thing: Any) -> Any:
        """To be closed in the end, the last one first."""
        self.closing.append(thing)
        return thing

    def mr(self, length: int = 4096, access: AccessFlags = EVERYTHING) -> MR:
        return self.keep(self.pd.alloc_mr(length, access))

    def cq(self, loop: Any, cqe: int = 1024, **options: Any) -> AsyncCQ:
        return self.keep(AsyncCQ(self.context, cqe, notifier=loop.notifier, **options))

    def pair(
        self, cq: AsyncCQ, depth: int = 64, other: AsyncCQ | None = None, **cap: int
    ) -> tuple[AsyncQP, AsyncQP]:
        """Two queue pairs, connected with each other."""
        sizes = QPCap(
            **{
                "max_send_wr": depth,
                "max_recv_wr": depth,
                "max_send_sge": self.max_sge,
                "max_recv_sge": self.max_sge,
            }
            | cap
        )
        a = self.keep(cq.create_qp(self.pd, QPCap(**vars(sizes))))
        b = self.keep((other or cq).create_qp(self.pd, QPCap(**vars(sizes))))
        if self.manager:
            self.manager.connect(a.qp, b.qp)
            return a, b
        for side in (a, b):
            side.qp.to_init(access=EVERYTHING & ~AccessFlags.MW_BIND)
        for side, peer in ((a, b), (b, a)):
            side.qp.to_rtr(peer.qp.qp_num, self.gid.gid, sgid_index=self.gid.gid_index, max_dest_rd_atomic=4)
        for side in (a, b):
            side.qp.to_rts(timeout=18, retry_cnt=7, max_rd_atomic=4)
        return a, b

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.pd.close)
            for thing in self.closing:
                stack.callback(thing.close)
            self.closing.clear()


class Manager:
    """Connects queue pairs that others have made, by the connection manager: iWARP leaves no choice."""

    def __init__(self, library: Library, address: str) -> None:
        self.channel = CMEventChannel(library)
        self.listener = self.channel.create_id()
        self.listener.bind_addr((address, 0))
        self.listener.listen(8)
        self.ids = [self.listener]

    def connect(self, a: QP, b: QP) -> None:
        depths = {"responder_resources": 4, "initiator_depth": 4}
        client = self.channel.create_id()
        self.ids.append(client)
        client.resolve_addr(None, self.listener.local_addr)
        self.next(CMEventType.ADDR_RESOLVED)
        client.resolve_route()
        self.next(CMEventType.ROUTE_RESOLVED)
        client.connect(qp_num=a.qp_num, **depths)
        server = self.next(CMEventType.CONNECT_REQUEST)
        self.ids.append(server)
        server.accept(qp_num=b.qp_num, **depths)
        self.next(CMEventType.ESTABLISHED)
        self.next(CMEventType.ESTABLISHED)

    def next(self, wanted: CMEventType) -> CMID:
        """Whom the next event is about, which must be this one. Earlier connections may have ended meanwhile."""
        deadline = time.monotonic() + 60
        while True:
            event = self.channel.get_event()
            if event is None:
                assert time.monotonic() < deadline, f"no {wanted.name}"
                select.select([self.channel], [], [], 1)
            elif event.type != CMEventType.DISCONNECTED:
                assert event.type == wanted, event
                return event.id

    def close(self) -> None:
        for id in self.ids:
            id.close()
        self.channel.close()


@pytest.fixture
def verbs(context: Context, device: Device, address: str) -> Iterator[Verbs]:
    verbs = Verbs(context, device, address)
    yield verbs
    verbs.close()


@pytest.fixture
def by_hand(verbs: Verbs) -> None:
    """For tests that move queue pairs through their states themselves."""
    verbs.by_hand()
