"""Not an actor but what some are made of: the connecting side of a stream in bare verbs, which says what it likes."""

import select
from typing import Any

from rdmanet import credit
from rdmanet._core import (
    CQ,
    PD,
    CMEvent,
    CMEventChannel,
    CMEventType,
    Library,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendWR,
    WROpcode,
)

SLOT, SLOTS = 70_000, 24
DATA, CREDIT, PING, PONG, FIN, ABORT = credit.Kind
HELLO = credit.pack_hello(credit.Hello(65536, 16, 8, 16))


def frame(kind: int, body: bytes = b"", granted: int = 16, reaped: int = 0) -> bytes:
    return credit.pack_header(kind, len(body), granted, reaped) + body


class Client:
    """One connection; all its calls wait until it is so."""

    def __init__(self, port: int, host: str = "127.0.0.1", receives: int = SLOTS) -> None:
        """`receives`: so many messages are taken, and then none."""
        self.receives = receives
        self.channel = CMEventChannel(Library.embedded())
        self.id = self.channel.create_id()
        self.frames: list[bytes] = []
        self.sends: dict[int, str] = {}
        self.used = self.count = self.reaped = 0
        self.id.resolve_addr(None, (host, port), 5000)
        self.event(CMEventType.ADDR_RESOLVED)
        self.id.resolve_route(5000)
        self.event(CMEventType.ROUTE_RESOLVED)
        self.pd = PD(self.id.context)
        self.cq = CQ(self.id.context, 256)
        self.ring = self.pd.alloc_mr(SLOTS * SLOT)
        self.out = self.pd.alloc_mr(1 << 20)
        cap = QPCap(max_send_wr=64, max_recv_wr=SLOTS)
        self.qp = self.id.create_qp(self.pd, QPInitAttr(cap=cap, send_cq=self.cq, recv_cq=self.cq))
        for slot in range(receives):
            self.qp.post_recv(RecvWR(wr_id=slot, sg_list=[self.ring.sge(slot * SLOT, SLOT)]))
        self.id.connect(HELLO, retry_count=7)
        self.event(CMEventType.ESTABLISHED)
        self.post(WROpcode.SEND, frame(CREDIT))

    def event(self, expected: CMEventType) -> CMEvent:
        poll = select.poll()
        poll.register(self.channel.fd, select.POLLIN)
        while (event := self.channel.get_event()) is None or event.type is not expected:
            if event is None:
                poll.poll()
        return event

    def post(self, opcode: WROpcode, data: bytes = b"", *, length: int | None = None, **options: Any) -> str:
        """Post one request; how it ended, by the name of its status. READ: into data_read."""
        self.count += 1
        number = 1000 + self.count
        size = len(data) if length is None else length
        self.out[self.used : self.used + len(data)] = data
        where = [self.out.sge(self.used, size)] if size else []
        self.at = (self.used, size)
        if opcode in (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM):
            options |= {"imm_data": 7}
        self.used = (self.used + size) % (1 << 19)
        self.qp.post_send(SendWR(opcode, where, wr_id=number, flags=SendFlags.SIGNALED, **options))
        while number not in self.sends:
            self.look()
        return self.sends.pop(number)

    @property
    def data_read(self) -> bytes:
        start, size = self.at
        return bytes(self.out[start : start + size])

    def look(self) -> None:
        event = self.channel.get_event()  # first: what came before a disconnection is to be seen before it
        self.look_at_completions()
        if event is not None and event.type is CMEventType.DISCONNECTED:
            self.frames.append(b"")

    def look_at_completions(self) -> None:
        for wc in self.cq.poll(64):
            if wc.wr_id >= 1000:
                self.sends[wc.wr_id] = wc.status.name
            elif wc.status == 0:
                start = wc.wr_id * SLOT
                self.frames.append(bytes(self.ring[start : start + wc.byte_len]))
                if self.receives == SLOTS:
                    self.qp.post_recv(RecvWR(wr_id=wc.wr_id, sg_list=[self.ring.sge(start, SLOT)]))
            else:
                self.frames.append(b"")  # nothing will come any more

    def next_frame(self) -> tuple[int, bytes]:
        """(kind, body); (0, b"") at the end."""
        while not self.frames:
            self.look()
        data = self.frames.pop(0)
        if not data:
            self.frames.append(b"")
            return 0, b""
        header = credit.unpack_header(data)
        if header.kind != DATA:
            self.reaped += 1
        self.granted = header.granted
        return header.kind, data[16:]

    def news(self) -> credit.Credit:
        """The next Credit that has any."""
        while True:
            kind, body = self.next_frame()
            if kind == 0:
                raise EOFError
            if kind == CREDIT and body:
                return credit.unpack_credit(body, self.granted)

    def acknowledge(self, *ids: int) -> None:
        self.post(
            WROpcode.SEND, frame(CREDIT, credit.pack_credit(credit.Credit(16, acked=ids)), reaped=self.reaped)
        )

    def close(self) -> None:
        for thing in (self.qp, self.id, self.cq, self.ring, self.out, self.pd, self.channel):
            thing.close()
