"""What the tests of the verbs for programs share: connected queue pairs, and every event loop."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rdmanet.verbs import (
    MR,
    PD,
    AccessFlags,
    Context,
    Device,
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

    def __init__(self, context: Context, device: Device) -> None:
        self.context = context
        if device.transport_type == TransportType.IWARP and not device.library.embedded_device:
            pytest.skip("iWARP's queue pairs are connected and moved by rdma_cm only")
        table = context.gid_table(1)
        self.gid = next((entry for entry in table if entry.address.version == 4), table[0])
        self.pd = PD(context)
        self.closing: list[Any] = []

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
            **{"max_send_wr": depth, "max_recv_wr": depth, "max_send_sge": 8, "max_recv_sge": 8} | cap
        )
        a = self.keep(cq.create_qp(self.pd, QPCap(**vars(sizes))))
        b = self.keep((other or cq).create_qp(self.pd, QPCap(**vars(sizes))))
        for side in (a, b):
            side.qp.to_init(access=EVERYTHING & ~AccessFlags.MW_BIND)
        for side, peer in ((a, b), (b, a)):
            side.qp.to_rtr(peer.qp.qp_num, self.gid.gid, sgid_index=self.gid.gid_index, max_dest_rd_atomic=4)
        for side in (a, b):
            side.qp.to_rts(timeout=14, retry_cnt=3, max_rd_atomic=4)
        return a, b

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.pd.close)
            for thing in self.closing:
                stack.callback(thing.close)
            self.closing.clear()


@pytest.fixture
def verbs(context: Context, device: Device) -> Iterator[Verbs]:
    verbs = Verbs(context, device)
    yield verbs
    verbs.close()
