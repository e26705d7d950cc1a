"""One side of a measurement of verbs: its device, queue pairs and memory, connected to the other side's.

Each queue pair has memory of its own, one message to send from and one to receive into, side by side:

    | source | target |     each rounded up to whole pages; a datagram's target has 40 bytes more, for its header

The client's requests go from its source to the server's target (WRITE, SEND), or from the server's source to its own
target (READ). All queue pairs share two completion queues: one for sends, one for receives.
"""

import contextlib
from typing import Any

import rdmanet.verbs as v
from rdmanet.cli.perf.control import PerfError, QueuePair, Run, Verbs
from rdmanet.cli.perf.kinds import KINDS

ACCESS = (
    v.AccessFlags.LOCAL_WRITE
    | v.AccessFlags.REMOTE_WRITE
    | v.AccessFlags.REMOTE_READ
    | v.AccessFlags.REMOTE_ATOMIC
)
GRH_BYTES = 40
QKEY = 0x11111111
"""perftest's."""
PAGE = 4096
LATENCY_DEPTH = 16
"""Room for sends of a latency test: of so many, traffic.pxi may not have polled the completions yet."""
_TYPES = {"RC": v.QPType.RC, "UC": v.QPType.UC, "UD": v.QPType.UD}


class Place:
    """Where a side measures: its own choice, which the other one needs not know.

    :ivar device: the name of the device; None is the first
    """

    def __init__(self, device: str | None = None, port: int = 1, gid_index: int | None = None) -> None:
        self.device, self.port, self.gid_index = device, port, gid_index


class Side:
    """A side, from the opening of the device to its end."""

    def __init__(self, stack: contextlib.ExitStack, place: Place, run: Run) -> None:
        self.run, self.settings, self.kind = run, run.settings, KINDS[run.kind]
        self.place = place
        settings = self.settings
        self.context: Any = stack.enter_context(v.open_device(place.device))
        self.port = self._port()
        self.span = -(-(run.size + GRH_BYTES) // PAGE) * PAGE
        self.pd = stack.enter_context(v.PD(self.context))
        channel = stack.enter_context(v.CompChannel(self.context)) if settings.events else None
        self.depth = LATENCY_DEPTH if self.kind.latency else settings.depth
        sends = settings.queue_pairs * self.depth
        receives = settings.queue_pairs * self.receive_depth
        self._check_sizes(sends, receives)
        self.send_cq = stack.enter_context(v.CQ(self.context, sends + 1, channel))
        self.recv_cq = stack.enter_context(v.CQ(self.context, max(1, receives), channel))
        self.memory = stack.enter_context(self.pd.alloc_mr(2 * self.span * settings.queue_pairs, ACCESS))
        cap = v.QPCap(
            max_send_wr=self.depth,
            max_recv_wr=max(1, self.receive_depth),
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=self.inline_bytes,
        )
        init = v.QPInitAttr(self.send_cq, self.recv_cq, cap, _TYPES[settings.connection])
        self.qps = [stack.enter_context(v.QP(self.pd, init)) for _ in range(settings.queue_pairs)]
        self.infos = [
            qp.info(port_num=place.port, sgid_index=place.gid_index, mtu=settings.mtu or None)
            for qp in self.qps
        ]
        self.stack = stack
        self.requests: list[v.SendWR] = []

    @property
    def receive_depth(self) -> int:
        """How many receives are posted on each queue pair: none, if nothing is received."""
        return self.settings.receive_depth if self.kind.over == "send" else 0

    @property
    def inline_bytes(self) -> int:
        """So many are posted inline: all of a message, or none."""
        fits = self.run.size <= self.settings.inline and self.kind.over in ("send", "write")
        return self.run.size if fits else 0

    @property
    def mtu(self) -> int:
        return min(self.infos[0].mtu, self.settings.mtu or self.infos[0].mtu)

    def _port(self) -> Any:
        attributes = self.context.query_device()
        if not 1 <= self.place.port <= attributes.phys_port_cnt:
            raise PerfError(
                f"{self.context.name} has no port {self.place.port} (-i): its ports are 1 to {attributes.phys_port_cnt}"
            )
        port = self.context.query_port(self.place.port)
        if self.settings.connection == "UD" and self.run.size > port.active_mtu.bytes:
            raise PerfError(
                f"a datagram has at most {port.active_mtu.bytes} bytes on {self.context.name}, not {self.run.size}"
                " (-s)"
            )
        return port

    def _check_sizes(self, sends: int, receives: int) -> None:
        most = self.context.query_device().max_cqe
        if max(sends + 1, receives) > most:
            raise PerfError(
                f"{self.settings.queue_pairs} queue pairs (-q) with {self.settings.depth} requests (-t) and"
                f" {self.receive_depth} receives (-r) each: a completion queue of {self.context.name} holds {most}:"
                " give fewer"
            )

    # ---- What the other side is told, and what follows ----

    def told(self) -> Verbs:
        base = self.memory.address
        return Verbs(
            self.context.name,
            [
                QueuePair(str(info), base + 2 * self.span * index, self.memory.rkey)
                for index, info in enumerate(self.infos)
            ],
        )

    def connect(self, peer: Verbs) -> None:
        """To the other side's queue pairs, in their order; and make the requests for its memory.

        :raises PerfError: the other side has another number of them, or one makes no sense; or the adapter connects
            none without the connection manager
        """
        if len(peer.pairs) != len(self.qps):
            raise PerfError(f"the other side has {len(peer.pairs)} queue pairs, this one {len(self.qps)}")
        for index, (qp, theirs) in enumerate(zip(self.qps, peer.pairs, strict=True)):
            try:
                info = v.QPInfo.from_text(theirs.info)
            except ValueError as exc:
                raise PerfError(f"the other side's queue pair: {exc}") from None
            to: dict[str, Any] = {}
            if self.settings.connection == "UD":
                to = self._to_datagrams(qp, info, index)
            else:
                self._connect(qp, info)
            self.requests.append(self._request(index, theirs, to))

    def _connect(self, qp: v.QP, info: v.QPInfo) -> None:
        outstanding = min(self.settings.outstanding, self.context.query_device().max_qp_rd_atom)
        try:
            qp.connect(
                info,
                access=ACCESS,
                max_dest_rd_atomic=outstanding,
                max_rd_atomic=outstanding,
                min_rnr_timer=12,
            )
        except OSError as exc:
            if self.context.transport_type != v.TransportType.IWARP:
                raise
            raise PerfError(
                f"{self.context.name} speaks iWARP, where a queue pair is an end of a TCP connection, and only the"
                f" connection manager connects it ({exc}): measure it by streams and rpc, or by perftest with -R"
            ) from None

    def _to_datagrams(self, qp: v.QP, info: v.QPInfo, index: int) -> dict[str, Any]:
        qp.to_init(self.place.port, qkey=QKEY)
        qp.to_rtr()
        qp.to_rts(sq_psn=self.infos[index].psn)
        sgid_index = self.place.gid_index
        if sgid_index is None:
            best = v.best_gid(self.context.gid_table(self.place.port))
            sgid_index = 0 if best is None else best.gid_index
        address = v.AHAttr(
            dgid=info.gid if any(info.gid) else None,
            sgid_index=sgid_index,
            dlid=info.lid,
            port_num=self.place.port,
        )
        handle = self.stack.enter_context(v.AH(self.pd, address))
        return {"ah": handle, "remote_qpn": info.qp_num, "remote_qkey": QKEY}

    def _request(self, index: int, theirs: QueuePair, to: dict[str, Any]) -> v.SendWR:
        size, begin = self.run.size, 2 * self.span * index
        source, target = (
            self.memory.at[begin : begin + size],
            self.memory.at[begin + self.span : begin + self.span + size],
        )
        flags = v.SendFlags.INLINE if self.inline_bytes else v.SendFlags.NONE
        if self.kind.over == "write":
            return v.SendWR(
                v.WROpcode.RDMA_WRITE,
                source,
                flags=flags,
                remote_addr=theirs.address + self.span,
                rkey=theirs.rkey,
            )
        if self.kind.over == "read":
            return v.SendWR(v.WROpcode.RDMA_READ, target, remote_addr=theirs.address, rkey=theirs.rkey)
        if self.kind.over == "atomic":
            return v.SendWR(
                v.WROpcode.ATOMIC_FETCH_AND_ADD,
                target,
                remote_addr=theirs.address,
                rkey=theirs.rkey,
                compare_add=1,
            )
        return v.SendWR(v.WROpcode.SEND, source, flags=flags, **to)

    def receives(self) -> list[v.RecvWR]:
        """A receive for each queue pair, into its target; none if nothing is received."""
        if not self.receive_depth:
            return []
        size = self.run.size + (GRH_BYTES if self.settings.connection == "UD" else 0)
        return [
            v.RecvWR(self.memory.at[begin : begin + size])
            for begin in (2 * self.span * index + self.span for index in range(len(self.qps)))
        ]

    def traffic(self, *, sends: bool) -> Any:
        """The loop in C: rdmanet/_pyx/traffic.pxi."""
        from rdmanet._core import Traffic

        settings, last = self.settings, self.run.size - 1
        by_memory = self.kind.latency and self.kind.over == "write"
        return Traffic(
            self.qps,
            self.requests if sends else [],
            self.receives(),
            depth=self.depth,
            list_size=1 if self.kind.latency else settings.list_size,
            every=1 if self.kind.latency else settings.every,
            receive_depth=self.receive_depth,
            sleeps=settings.events,
            memory=self.memory if by_memory else None,
            outgoing=last if by_memory else 0,
            incoming=self.span + last if by_memory else 0,
        )
