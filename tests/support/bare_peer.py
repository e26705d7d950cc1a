"""A peer of a byte stream that is spoken by hand, in bare verbs: it says what it is told to say, right or wrong.

`BarePeer` calls a server, or listens for one caller. It posts what it is given, frames mostly, and hears the frames
that come. It has receives for `receives` of them; with `renews` each is posted again once its frame was heard.

Whatever waits is a coroutine, for any asyncio loop, and sleeps on the descriptors of the event channels. The stream at
the other end may be on the same loop.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from rdmanet import credit
from rdmanet._core import (
    CQ,
    MR,
    PD,
    CMEvent,
    CMEventChannel,
    CMEventType,
    CompChannel,
    Library,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendWR,
    WCStatus,
    WROpcode,
)
from tests.support.waiting import readable

SLOT, SLOTS = 70_000, 24  # a frame of the longest that HELLO allows has room in a slot
HELLO = credit.pack_hello(credit.Hello(65536, 16, 8, 16))
PLACING_HELLO = credit.pack_hello(credit.Hello(65536, 16, 8, 16, credit.FEATURE_PLACEMENT))
GROWING_HELLO = credit.pack_hello(credit.Hello(1024, 16, 8, 16, credit.FEATURE_GROWTH))
OUT_BYTES = 1 << 20

DATA, CREDIT, PING, PONG, FIN, ABORT, PLACED = credit.Kind


def frame(
    kind: int, body: bytes = b"", granted: int = 16, reaped: int = 0, length: int | None = None
) -> bytes:
    return credit.pack_header(kind, len(body) if length is None else length, granted, reaped) + body


class BarePeer:
    def __init__(
        self, library: Library, *, receives: int = SLOTS, renews: bool = False, max_sends: int = 64
    ) -> None:
        self.receives = receives
        self.renews = renews
        self.max_sends = max_sends
        self.id: Any = None
        self.qp: Any = None
        self.events: deque[CMEvent] = deque()  # that nobody has waited for yet
        self.frames: deque[bytes] = deque()  # that have come, and nobody has asked for yet
        self.has_ended = False  # nothing will come any more
        self.places = False  # our Hello said that we know direct placement
        self.reaped = 0  # control frames that were taken out: what the peer wants to be told
        self._statuses: dict[int, WCStatus] = {}
        self._posted = 0
        self._used = 0
        self._last = (0, 0)
        self._channel = CMEventChannel(library)
        self._out: MR | None = None
        self._kept: list[Any] = [self._channel]

    def close(self) -> None:
        for thing in (self.qp, self.id, *reversed(self._kept)):
            if thing is not None:
                thing.close()

    # ---- the connection

    def listen(self, address: str) -> int:
        """For one caller; the port."""
        listener = self._keep(self._channel.create_id())
        listener.bind_addr((address, 0))
        listener.listen(1)
        return listener.local_addr[1]

    async def request(self) -> None:
        """A connection request has come: accept or reject `id`."""
        self.id = (await self.event(CMEventType.CONNECT_REQUEST)).id

    async def accept(self, *frames: bytes, hello: bytes = HELLO) -> None:
        """Take the connection; `frames` go out at once, before the other side can know of it."""
        await self.request()
        self.places = hello == PLACING_HELLO
        self._create_qp()
        self.id.accept(private_data=hello, rnr_retry_count=0)
        for each in frames:
            self.post(each)

    async def call(
        self, address: str, port: int, hello: bytes = HELLO, *, source: str | None = None, **param: int
    ) -> None:
        """Ask for a connection. With `qp_num` it is asked for that, and there is no queue pair."""
        self.id = self._channel.create_id()
        self.id.resolve_addr((source, 0) if source else None, (address, port), 5000)
        await self.event(CMEventType.ADDR_RESOLVED)
        self.id.resolve_route(5000)
        await self.event(CMEventType.ROUTE_RESOLVED)
        if "qp_num" not in param:
            self._create_qp()
        self.id.connect(hello, **param)

    async def connect(self, address: str, port: int, hello: bytes = HELLO, **param: int) -> None:
        """Be connected."""
        await self.call(address, port, hello, **param)
        await self.event(CMEventType.ESTABLISHED)

    async def event(self, expected: CMEventType) -> CMEvent:
        """The connection manager's next event, which must be this one."""
        await self._until(lambda: bool(self.events))
        event = self.events.popleft()
        assert event.type is expected, event
        return event

    async def last_words(self) -> bytes:
        """The last frame that came before the disconnection was heard of."""
        await self._until(lambda: any(event.type is CMEventType.DISCONNECTED for event in self.events))
        return self.frames[-1]

    # ---- requests

    def post(
        self,
        data: bytes = b"",
        opcode: WROpcode = WROpcode.SEND,
        *,
        length: int | None = None,
        count: int = 1,
        flags: SendFlags = SendFlags(0),  # noqa: B008
        **options: Any,
    ) -> int:
        """Post a request, or `count` of the same; the number of the last. A READ has a `length`, for what it brings."""
        size = len(data) if length is None else length
        if self._out is None:
            self._out = self._keep(self.pd.alloc_mr(OUT_BYTES))
        if self._used + size > OUT_BYTES:
            self._used = 0
        self._out[self._used : self._used + len(data)] = data
        where = [self._out.sge(self._used, size)] if size else []
        self._last = (self._used, size)
        self._used += size
        if opcode in (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM):
            options = {"imm_data": 7} | options
        numbers = range(self._posted + 1, self._posted + 1 + count)
        self.qp.post_send(
            [
                SendWR(opcode, where, wr_id=("send", number), flags=SendFlags.SIGNALED | flags, **options)
                for number in numbers
            ]
        )
        self._posted += count
        return self._posted

    async def status(self, number: int) -> WCStatus:
        """How this request has ended."""
        await self._until(lambda: number in self._statuses)
        return self._statuses[number]

    async def done(self, data: bytes = b"", opcode: WROpcode = WROpcode.SEND, **options: Any) -> WCStatus:
        """Post a request; how it has ended."""
        return await self.status(self.post(data, opcode, **options))

    async def taken(self, data: bytes = b"", opcode: WROpcode = WROpcode.SEND, **options: Any) -> bool:
        """Post a request; whether it has ended well. One that has not when the connection ends is not waited for."""
        number = self.post(data, opcode, **options)
        await self._until(lambda: number in self._statuses or self.has_ended)
        return self._statuses.get(number) is WCStatus.SUCCESS

    async def all_sent(self) -> None:
        """Each request has completed, and well: its frame is there."""
        await self._until(lambda: len(self._statuses) == self._posted)
        assert set(self._statuses.values()) <= {WCStatus.SUCCESS}, self._statuses

    @property
    def data_read(self) -> bytes:
        """What the last request, a READ, has brought."""
        start, size = self._last
        return bytes(self._out[start : start + size])

    # ---- frames

    def received(self) -> list[bytes]:
        """The frames that have come since the last time."""
        self._look()
        found = list(self.frames)
        self.frames.clear()
        return found

    async def next_frame(self) -> tuple[int, bytes]:
        """(kind, body); (0, b"") when nothing will come any more."""
        await self._until(lambda: bool(self.frames) or self.has_ended)
        if not self.frames:
            return 0, b""
        data = self.frames.popleft()
        header = credit.unpack_header(data)
        if header.kind != DATA:
            self.reaped += 1
        self._granted = header.granted
        return header.kind, data[credit.HEADER_BYTES :]

    async def next_of(self, kind: int) -> bytes:
        """The body of the next frame of this kind; what comes before it is passed over."""
        while True:
            came, body = await self.next_frame()
            if came == kind:
                return body
            if came == 0:
                raise EOFError("the connection has ended")

    async def news(self) -> credit.Credit:
        """The next Credit that has any."""
        while not (body := await self.next_of(CREDIT)):
            pass
        return credit.unpack_credit(body, self._granted, self.places)

    async def offered(self) -> credit.Region:
        """The region that is offered next."""
        return (await self.news()).regions[0]

    # ---- what has come

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._look()
            if condition():
                return
            await readable(self._channel.fd, *([self._completions.fd] if self.qp else []))

    def _look(self) -> None:
        """Take what has come; the queue is armed for what has not."""
        # The manager's events first: what came before a disconnection is to be seen before it.
        while (event := self._channel.get_event()) is not None:
            self.events.append(event)
        if self.qp is not None:
            while (cq := self._completions.get_cq_event()) is not None:
                cq.ack_events(1)
            self.cq.req_notify()
            while found := self.cq.poll(64):
                for wc in found:
                    self._completed(wc)
        if any(event.type is CMEventType.DISCONNECTED for event in self.events):
            self.has_ended = True

    def _completed(self, wc: Any) -> None:
        what, number = wc.wr_id
        if what == "send":
            self._statuses[number] = wc.status
        elif wc.status != WCStatus.SUCCESS:
            self.has_ended = True
        else:
            start = number * SLOT
            self.frames.append(bytes(self._ring[start : start + wc.byte_len]))
            if self.renews:
                self._receive(number)

    def _create_qp(self) -> None:
        context = self.id.context
        self.pd = self._keep(PD(context))
        self._completions = self._keep(CompChannel(context))
        self.cq = self._keep(CQ(context, 2 * (self.max_sends + self.receives), self._completions))
        cap = QPCap(max_send_wr=self.max_sends, max_recv_wr=max(self.receives, 1))
        self.qp = self.id.create_qp(self.pd, QPInitAttr(cap=cap, send_cq=self.cq, recv_cq=self.cq))
        if self.receives:
            self._ring = self._keep(self.pd.alloc_mr(self.receives * SLOT))
        for slot in range(self.receives):
            self._receive(slot)

    def _receive(self, slot: int) -> None:
        self.qp.post_recv(RecvWR(wr_id=("receive", slot), sg_list=[self._ring.sge(slot * SLOT, SLOT)]))

    def _keep(self, thing: Any) -> Any:
        """To be closed in the end: after the queue pair and its identifier, the last one first."""
        self._kept.append(thing)
        return thing
