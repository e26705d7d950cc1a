"""A peer made of bare verbs, who says what no correct peer says: it is told so, and nobody else notices."""

import asyncio

import pytest
from harness import HOST, OFFERABLE, Net, Recorder

import rdmanet
from rdmanet import AccessFlags, credit, leases
from rdmanet._core import (
    CQ,
    PD,
    CMEventChannel,
    CMEventType,
    Library,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendWR,
    WCStatus,
    WROpcode,
)
from rdmanet.errors import ProtocolError
from rdmanet.transport import RdmaTransport

SLOT = 70_000
HELLO = credit.pack_hello(credit.Hello(65536, 16, 8, 16))


def frame(kind, body=b"", granted=16, reaped=0, length=None):
    return credit.pack_header(kind, len(body) if length is None else length, granted, reaped) + body


class Bare:
    """A listener that takes one connection and sends frames as they are given."""

    def __init__(self, library: Library) -> None:
        self.channel = CMEventChannel(library)
        self.listener = self.channel.create_id()
        self.listener.bind_addr((HOST, 0))
        self.listener.listen(1)
        self.port = self.listener.local_addr[1]
        self.opened: list = [self.channel, self.listener]

    async def event(self):
        while (event := self.channel.get_event()) is None:
            await asyncio.sleep(0)
        return event

    async def accept(self, *frames: bytes, hello: bytes = HELLO) -> None:
        """Take the connection; `frames` go out at once, before the other side can know of it."""
        request = await self.event()
        assert request.type is CMEventType.CONNECT_REQUEST
        self.id = request.id
        self.pd = PD(self.id.context)
        self.cq = CQ(self.id.context, 256)
        self.ring = self.pd.alloc_mr(24 * SLOT)
        self.out = self.pd.alloc_mr(1 << 20)
        self.used = 0
        cap = QPCap(max_send_wr=64, max_recv_wr=24)
        self.qp = self.id.create_qp(self.pd, QPInitAttr(cap=cap, send_cq=self.cq, recv_cq=self.cq))
        self.opened += [self.pd, self.ring, self.out, self.cq, self.id, self.qp]
        for slot in range(24):
            self.qp.post_recv(RecvWR(wr_id=slot, sg_list=[self.ring.sge(slot * SLOT, SLOT)]))
        self.id.accept(private_data=hello, rnr_retry_count=0)
        for each in frames:
            self.send(each)

    def send(self, data: bytes | tuple[WROpcode, bytes], **options) -> None:
        opcode, data = data if isinstance(data, tuple) else (WROpcode.SEND, data)
        self.out[self.used : self.used + len(data)] = data
        if opcode in (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM):
            options = {"imm_data": 7} | options
        self.qp.post_send(
            SendWR(
                opcode=opcode,
                sg_list=[self.out.sge(self.used, len(data))] if data else [],
                flags=SendFlags.SIGNALED,
                **options,
            )
        )
        self.used += len(data)

    async def one(self, opcode: WROpcode, data: bytes, **options) -> WCStatus:
        """How this ends."""
        self.send((opcode, data), wr_id=99, **options)
        while True:
            for wc in self.cq.poll(64):
                if wc.wr_id == 99:
                    return wc.status
            await asyncio.sleep(0)

    async def news(self) -> credit.Credit:
        """The next Credit that has any."""
        while True:
            for each in self.received():
                header = credit.unpack_header(each)
                if header.kind == CREDIT and len(each) > 16:
                    return credit.unpack_credit(each[16:], header.granted)
            await asyncio.sleep(0)

    async def offered(self) -> credit.Region:
        """The region that they offer."""
        return (await self.news()).regions[0]

    def received(self) -> list[bytes]:
        """The frames that have come since the last time."""
        return [
            self.ring[wc.wr_id * SLOT : wc.wr_id * SLOT + wc.byte_len]
            for wc in self.cq.poll(64)
            if not wc.is_send and wc.status == 0
        ]

    async def until_sent(self, count: int) -> None:
        """So many sends have completed, so their frames are there."""
        while count:
            sent = [wc for wc in self.cq.poll(64) if wc.is_send]
            assert all(wc.status == 0 for wc in sent), sent
            count -= len(sent)
            await asyncio.sleep(0)

    async def last_words(self) -> bytes:
        """The last frame that came before the disconnection was heard of."""
        while (await self.event()).type is not CMEventType.DISCONNECTED:
            pass
        return self.received()[-1]

    def close(self) -> None:
        for thing in reversed(self.opened):
            thing.close()


@pytest.fixture
def bare(device):
    peer = Bare(device.library)
    yield peer
    peer.close()


async def connected(bare: Bare, **options) -> Recorder:
    accepting = asyncio.ensure_future(bare.accept(**options))
    _, protocol = await rdmanet.create_rdma_connection(Recorder, HOST, bare.port)
    await accepting
    return protocol


DATA, CREDIT, PING, PONG, FIN, ABORT = credit.Kind
WRONG = {
    "unknown kind": [frame(9)],
    "a flag": [frame(DATA | 0x100, b"x")],
    "shorter than a header": [b"\1\0\0\0"],
    "empty": [b""],
    "empty data": [frame(DATA)],
    "length too long": [frame(DATA, b"abc", length=4)],
    "length too short": [frame(DATA, b"abc", length=2)],
    "without credit": [frame(DATA, b"x")] * 17,
    "too many credits": [frame(DATA, b"x", granted=40)],
    "reaped what was not sent": [frame(DATA, b"x", reaped=7)],
    "a second fin": [frame(FIN), frame(FIN)],
    "data after fin": [frame(FIN), frame(DATA, b"x")],
    "a fin with a body": [frame(FIN, b"x")],
    "a pong to no ping": [frame(PONG, bytes(8))],
    "a short ping": [frame(PING, bytes(7))],
    "three credits": [frame(CREDIT)] * 3,
    "garbage in a credit": [frame(CREDIT, b"\xff\x00garbage")],
    "garbage in an abort": [frame(ABORT, b"\xff\x00garbage")],
    "an acknowledgement of nothing": [frame(CREDIT, credit.pack_credit(credit.Credit(16, acked=(7,))))],
    "a revocation of nothing": [frame(CREDIT, credit.pack_credit(credit.Credit(16, revoked=(7,))))],
}


# Completes a receive without being a frame. What lies in it then is another message's.
NO_SEND = {
    "a write with 32 bits": [(WROpcode.RDMA_WRITE_WITH_IMM, b"")],
    "a send with 32 bits": [(WROpcode.SEND_WITH_IMM, frame(DATA, b"x"))],
    "less than a header with 32 bits": [(WROpcode.SEND_WITH_IMM, b"")],
    "a write with 32 bits, after bytes": [
        *(frame(DATA, bytes([n]) * 100) for n in range(16)),
        (WROpcode.RDMA_WRITE_WITH_IMM, b""),
    ],
}


async def is_refused(bare: Bare, protocol: Recorder, frames: list) -> str:
    """What the peer is told."""
    for each in frames:
        bare.send(each)
    error = await asyncio.wait_for(protocol.until_lost(), 60)
    assert isinstance(error, ProtocolError), error
    # Its last words say why, and no disconnection overtakes them.
    last = await bare.last_words()
    assert credit.unpack_header(last).kind == ABORT
    abort = credit.unpack_abort(last[16:])
    assert abort.code == credit.AbortCode.PROTOCOL
    return abort.reason


@pytest.mark.parametrize("what", WRONG)
async def test_what_no_peer_may_say(net: Net, bare, what):
    protocol = await connected(bare)
    if what == "without credit":
        protocol.transport.pause_reading()
    await is_refused(bare, protocol, WRONG[what])


@pytest.mark.not_on_iwarp("has no immediate data")
@pytest.mark.parametrize("what", NO_SEND)
async def test_what_completes_a_receive_and_is_no_frame(net: Net, bare, what):
    protocol = await connected(bare)
    reason = await is_refused(bare, protocol, NO_SEND[what])
    assert reason == "a receive was completed by something else than a SEND"
    assert protocol.data == b"".join(each[16:] for each in NO_SEND[what] if isinstance(each, bytes))


@pytest.mark.parametrize("length", range(16))
async def test_less_than_a_header(net: Net, bare, length):
    """The bytes that it lacks are not taken from the message before, nor is the peer told of them."""
    protocol = await connected(bare)
    whole = frame(DATA, b"secret", reaped=0x01020304)
    reason = await is_refused(bare, protocol, [*[frame(DATA, b"secret")] * 15, whole[:length]])
    assert reason == f"a frame of {length} bytes is shorter than its 16-byte header"
    assert protocol.data == b"secret" * 15


async def test_what_an_application_says_to_itself_is_not_told_to_the_peer(net: Net, bare):
    class Raising(Recorder):
        def data_received(self, data):
            raise ProtocolError("the database's password is 1234")

    accepting = asyncio.ensure_future(bare.accept())
    _, protocol = await rdmanet.create_rdma_connection(Raising, HOST, bare.port)
    await accepting
    bare.send(frame(DATA, b"x"))
    await protocol.until_lost()
    assert credit.unpack_abort((await bare.last_words())[16:]) == credit.Abort(credit.AbortCode.ABORTED, "")
    assert "1234" in str(net.complaint()["exception"])


@pytest.mark.not_on_iwarp("lets the connecting side speak first, and nobody else")
@pytest.mark.parametrize("what", WRONG)
async def test_the_same_before_the_connection_is_known(net: Net, bare, what, monkeypatch):
    """The accepting side may not speak first; whatever it says then is refused, and nothing crashes."""
    original = RdmaTransport._cm_event
    held = asyncio.get_running_loop().create_future()

    def cm_event(self, event):
        if event.type is CMEventType.ESTABLISHED:
            held.set_result((self, event))
        else:
            original(self, event)

    monkeypatch.setattr(RdmaTransport, "_cm_event", cm_event)
    connecting = asyncio.ensure_future(rdmanet.create_rdma_connection(Recorder, HOST, bare.port))
    await bare.accept(*WRONG[what])
    transport, event = await held
    await bare.until_sent(len(WRONG[what]))
    transport._engine.drain()
    original(transport, event)
    with pytest.raises(ProtocolError):
        await connecting


@pytest.mark.parametrize(
    "hello",
    [b"", b"RDMN", b"HTTP/1.1 200 OK", HELLO[:-4], HELLO.replace(b"RDMN\1", b"RDMN\2"), b"RDMN\1\1\x90"],
    ids=repr,
)
async def test_an_answer_that_is_no_hello(net: Net, bare, hello):
    accepting = asyncio.ensure_future(bare.accept(hello=hello))
    with pytest.raises(ProtocolError):
        await rdmanet.create_rdma_connection(Recorder, HOST, bare.port)
    await accepting


async def test_a_peer_that_never_reaps_is_sent_no_more_than_it_has_slots_for(net: Net, bare):
    """Neither bytes nor news of regions nor answers overrun it, whatever the application asks for."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        offers = [protocol.transport.offer(mr, name="n" * 255) for _ in range(100)]
        for offer in offers:
            await offer.__aenter__()
        for _ in range(50):
            protocol.transport.write(bytes(100_000))
            await asyncio.sleep(0)
        bare.send(frame(PING, b"question"))
        protocol.transport.close()
        kinds: list[int] = []
        while kinds.count(DATA) < 16 or PONG not in kinds:
            kinds += [credit.unpack_header(each).kind for each in bare.received()]
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # for what must not come
        kinds += [credit.unpack_header(each).kind for each in bare.received()]
        assert kinds.count(DATA) == 16
        assert len(kinds) - 16 <= credit.CONTROL_ALLOWANCE
        assert kinds.count(PONG) == 1 and kinds.count(FIN) == 0
        protocol.transport.abort()
        await protocol.until_lost()
        await asyncio.gather(*(offer.__aexit__(None, None, None) for offer in offers))


async def test_whoever_waits_for_remote_memory_hears_of_the_end_before_the_bytes_are_read(net: Net, bare):
    """The reader may be paused because of that very wait."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr):
            protocol.transport.pause_reading()
            while len(bare.received()) < 1:
                await asyncio.sleep(0)
            bare.send(frame(DATA, b"bytes"))
            bare.send(frame(FIN))
            await bare.until_sent(2)
            bare.id.disconnect()
        # The revocation is never acknowledged: the block ended because the connection has.
        assert not protocol.lost
        protocol.transport.resume_reading()
        assert await protocol.until_lost() is None
        assert protocol.events == ["made", "data", "eof", "lost"]


# ---- who was offered memory, and behaves badly


async def test_who_never_lets_go_loses_the_key(net: Net, bare):
    """In the time that it has: then the memory is the owner's, and the connection goes on."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0.1):
            region = await bare.offered()
            there = {"remote_addr": region.address, "rkey": region.rkey}
            assert await bare.one(WROpcode.RDMA_WRITE, b"granted", **there) == WCStatus.SUCCESS
            bare.send(frame(DATA, b"now", reaped=1))
            await protocol.until_received(3)
            assert mr[:7] == b"granted"
        bare.send(frame(DATA, b"still here", reaped=2))
        assert await protocol.until_received(13) == b"nowstill here"
        # It may say so later, too.
        assert (await bare.news()).revoked == (region.id,)
        acknowledgement = credit.pack_credit(credit.Credit(16, acked=(region.id,)))
        bare.send(frame(CREDIT, acknowledgement, reaped=3))
        bare.send(frame(DATA, b", still", reaped=3))
        assert await protocol.until_received(20) == b"nowstill here, still"
        await bare.one(WROpcode.RDMA_WRITE, b"revoked", **there)
        assert isinstance(await protocol.until_lost(), ConnectionError)
        assert mr[:7] == b"granted"


async def test_no_patience(net: Net, bare):
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0):
            await bare.offered()
    protocol.transport.abort()
    await protocol.until_lost()


@pytest.mark.not_on_iwarp("has no memory windows")
@pytest.mark.not_on_rxe("does not tell, and crashes the kernel when a window is invalidated twice")
async def test_who_invalidates_what_it_was_offered(net: Net, bare):
    """That is the peer's to do with its own key by the device's rules, but not by ours."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr):
            region = await bare.offered()
            bare.send((WROpcode.SEND_WITH_INV, frame(DATA, b"x")), invalidate_rkey=region.rkey)
            assert isinstance(await protocol.until_lost(), ProtocolError)
    assert protocol.data == b""


@pytest.mark.not_on_iwarp("has no memory windows")
@pytest.mark.not_on_rxe("crashes the kernel when a window is invalidated twice")
async def test_who_invalidates_it_just_before_the_owner(net: Net, bare):
    """Ours fails then; whose fault that is, the connection's error tells."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, revoke_timeout=0):
            region = await bare.offered()
            bare.send((WROpcode.SEND_WITH_INV, frame(DATA, b"x")), invalidate_rkey=region.rkey)
            await bare.until_sent(1)  # and the loop has not looked since
        assert isinstance(await protocol.until_lost(), ProtocolError)


@pytest.mark.not_on_iwarp("has no memory windows")
async def test_nobody_waits_longer_than_a_second_for_the_queue_pair(net: Net, bare, monkeypatch):
    """The invalidation waits behind what the peer holds up: then the connection is cut off, and the memory free."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0):
            region = await bare.offered()
            monkeypatch.setattr(type(protocol.transport), "_submit", lambda transport, request: None)
        mr[:7] = b"revoked"
        there = {"remote_addr": region.address, "rkey": region.rkey}
        bare.send((WROpcode.RDMA_WRITE, b"too late"), **there)
        assert isinstance(await protocol.until_lost(), TimeoutError)
        assert mr[:7] == b"revoked"


async def test_devices_without_windows(net: Net, bare, monkeypatch):
    """The key ends with the offer all the same."""
    monkeypatch.setattr(leases, "has_windows", lambda engine: False)
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, AccessFlags.LOCAL_WRITE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0):
            region = await bare.offered()
            assert (region.address, region.length) == (mr.address, 64)
            assert region.rkey != mr.rkey
            there = {"remote_addr": region.address, "rkey": region.rkey}
            assert await bare.one(WROpcode.RDMA_WRITE, b"granted", **there) == WCStatus.SUCCESS
            bare.send(frame(DATA, b"now", reaped=1))
            await protocol.until_received(3)
            assert mr[:7] == b"granted"
        await bare.one(WROpcode.RDMA_WRITE, b"revoked", **there)
        assert isinstance(await protocol.until_lost(), ConnectionError)
        assert mr[:7] == b"granted"
