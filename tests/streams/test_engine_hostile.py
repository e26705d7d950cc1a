"""A bare peer sends what no correct peer sends: it is told so, and other connections are not affected."""

import asyncio
import contextlib
import random

import pytest
from harness import HOST, OFFERABLE, HalfOpen, Net, Recorder

import rdmanet
from rdmanet import AccessFlags, credit
from rdmanet._core import CMEventType, WCStatus, WROpcode
from rdmanet.errors import ProtocolError
from rdmanet.stream import bindings
from rdmanet.wire import placement
from tests.support.bare_peer import (
    ABORT,
    CREDIT,
    DATA,
    FIN,
    HELLO,
    PING,
    PLACED,
    PONG,
    BarePeer,
    frame,
)
from tests.support.endpoints import hears
from tests.support.waiting import loop_turns


@pytest.fixture
def bare(device):
    peer = BarePeer(device.library)
    yield peer
    peer.close()


async def connected(bare: BarePeer, protocol: type[Recorder] = Recorder) -> Recorder:
    port = bare.listen(HOST)
    accepting = asyncio.ensure_future(bare.accept())
    _, connection = await rdmanet.create_rdma_connection(protocol, HOST, port)
    await accepting
    return connection


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
    "a write with 32 bits": [(b"", WROpcode.RDMA_WRITE_WITH_IMM)],
    "a send with 32 bits": [(frame(DATA, b"x"), WROpcode.SEND_WITH_IMM)],
    "less than a header with 32 bits": [(b"", WROpcode.SEND_WITH_IMM)],
    "a write with 32 bits, after bytes": [
        *((frame(DATA, bytes([n]) * 100), WROpcode.SEND) for n in range(16)),
        (b"", WROpcode.RDMA_WRITE_WITH_IMM),
    ],
}


async def is_refused(bare: BarePeer, protocol: Recorder) -> str:
    """What the peer is told."""
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
    protocol = await connected(bare, HalfOpen)  # what follows a Fin may come late
    if what == "without credit":
        protocol.transport.pause_reading()
    for each in WRONG[what]:
        bare.post(each)
    await is_refused(bare, protocol)


@pytest.mark.not_on_iwarp("has no immediate data")
@pytest.mark.parametrize("what", NO_SEND)
async def test_what_completes_a_receive_and_is_no_frame(net: Net, bare, what):
    protocol = await connected(bare)
    for data, opcode in NO_SEND[what]:
        bare.post(data, opcode)
    reason = await is_refused(bare, protocol)
    assert reason == "a receive was completed by something else than a SEND"
    assert protocol.data == b"".join(data[16:] for data, opcode in NO_SEND[what] if opcode is WROpcode.SEND)


@pytest.mark.parametrize("length", range(16))
async def test_less_than_a_header(net: Net, bare, length):
    """The bytes that it lacks are not taken from the message before, nor is the peer told of them."""
    protocol = await connected(bare)
    whole = frame(DATA, b"secret", reaped=0x01020304)
    for each in [*[frame(DATA, b"secret")] * 15, whole[:length]]:
        bare.post(each)
    reason = await is_refused(bare, protocol)
    assert reason == f"a frame of {length} bytes is shorter than its 16-byte header"
    assert protocol.data == b"secret" * 15


async def test_what_an_application_says_to_itself_is_not_told_to_the_peer(net: Net, bare):
    class Raising(Recorder):
        def data_received(self, data):
            raise ProtocolError("the database's password is 1234")

    protocol = await connected(bare, Raising)
    bare.post(frame(DATA, b"x"))
    await protocol.until_lost()
    assert credit.unpack_abort((await bare.last_words())[16:]) == credit.Abort(credit.AbortCode.ABORTED, "")
    assert "1234" in str(net.complaint()["exception"])


@pytest.mark.not_on_iwarp("lets the connecting side speak first, and nobody else")
@pytest.mark.parametrize("what", WRONG)
async def test_the_same_before_the_connection_is_known(net: Net, bare, what, monkeypatch):
    """The accepting side may not speak first; whatever it says then is refused, and nothing crashes."""
    held = asyncio.get_running_loop().create_future()

    def cm_event(endpoint, event, hear):
        if event.type is CMEventType.ESTABLISHED:
            held.set_result((endpoint, event, hear))
        else:
            hear(event)

    hears(monkeypatch, cm_event)
    connecting = asyncio.ensure_future(rdmanet.create_rdma_connection(Recorder, HOST, bare.listen(HOST)))
    await bare.accept(*WRONG[what])
    endpoint, event, hear = await held
    await bare.all_sent()
    endpoint._connection.engine.drain()
    hear(event)
    with pytest.raises(ProtocolError):
        await connecting


@pytest.mark.parametrize(
    "hello",
    [b"", b"RDMN", b"HTTP/1.1 200 OK", HELLO[:-4], HELLO.replace(b"RDMN\1", b"RDMN\2"), b"RDMN\1\1\x90"],
    ids=repr,
)
async def test_an_answer_that_is_no_hello(net: Net, bare, hello):
    port = bare.listen(HOST)
    accepting = asyncio.ensure_future(bare.accept(hello=hello))
    with pytest.raises(ProtocolError):
        await rdmanet.create_rdma_connection(Recorder, HOST, port)
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
            await loop_turns()
        bare.post(frame(PING, b"question"))
        protocol.transport.close()
        kinds: list[int] = []
        while kinds.count(DATA) < 16 or PONG not in kinds:
            kinds.append((await bare.next_frame())[0])
        protocol.transport.abort()
        await protocol.until_lost()
        while kind := (await bare.next_frame())[0]:  # all that was ever sent
            kinds.append(kind)
        assert kinds.pop() == ABORT
        assert kinds.count(DATA) == 16
        assert len(kinds) - 16 <= credit.CONTROL_ALLOWANCE
        assert kinds.count(PONG) == 1 and kinds.count(FIN) == 0
        await asyncio.gather(*(offer.__aexit__(None, None, None) for offer in offers))


async def test_whoever_waits_for_remote_memory_hears_of_the_end_before_the_bytes_are_read(net: Net, bare):
    """The reader may be paused because of that very wait."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr):
            protocol.transport.pause_reading()
            await bare.next_frame()
            bare.post(frame(DATA, b"bytes"))
            bare.post(frame(FIN))
            await bare.all_sent()
            bare.id.disconnect()
        # The revocation is never acknowledged: the block ended because the connection has.
        assert not protocol.lost
        protocol.transport.resume_reading()
        assert await protocol.until_lost() is None
        assert protocol.events == ["made", "data", "eof", "lost"]


# ---- who was offered memory, and behaves badly


async def test_who_never_lets_go_loses_the_key(net: Net, bare):
    """When its time is over, the memory is the owner's again, and the connection goes on."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0.1):
            region = await bare.offered()
            there = {"remote_addr": region.address, "rkey": region.rkey}
            assert await bare.done(b"granted", WROpcode.RDMA_WRITE, **there) == WCStatus.SUCCESS
            bare.post(frame(DATA, b"now", reaped=1))
            await protocol.until_received(3)
            assert mr[:7] == b"granted"
        bare.post(frame(DATA, b"still here", reaped=2))
        assert await protocol.until_received(13) == b"nowstill here"
        # It may say so later, too.
        assert (await bare.news()).revoked == (region.id,)
        acknowledgement = credit.pack_credit(credit.Credit(16, acked=(region.id,)))
        bare.post(frame(CREDIT, acknowledgement, reaped=3))
        bare.post(frame(DATA, b", still", reaped=3))
        assert await protocol.until_received(20) == b"nowstill here, still"
        await bare.done(b"revoked", WROpcode.RDMA_WRITE, **there)
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
    """By the device's rules a peer may invalidate its own key; by ours it may not."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr):
            region = await bare.offered()
            bare.post(frame(DATA, b"x"), WROpcode.SEND_WITH_INV, invalidate_rkey=region.rkey)
            assert isinstance(await protocol.until_lost(), ProtocolError)
    assert protocol.data == b""


@pytest.mark.not_on_iwarp("has no memory windows")
@pytest.mark.not_on_rxe("crashes the kernel when a window is invalidated twice")
async def test_who_invalidates_it_just_before_the_owner(net: Net, bare):
    """Our own invalidation fails then, and the connection's error says whose fault that is."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, revoke_timeout=0):
            region = await bare.offered()
            bare.post(frame(DATA, b"x"), WROpcode.SEND_WITH_INV, invalidate_rkey=region.rkey)
            await bare.all_sent()  # and the loop has not looked since
        assert isinstance(await protocol.until_lost(), ProtocolError)


@pytest.mark.not_on_iwarp("has no memory windows")
async def test_nobody_waits_longer_than_a_second_for_the_queue_pair(net: Net, bare, monkeypatch):
    """Where the peer holds the invalidation up for too long, the connection is cut off and the memory is free."""
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, OFFERABLE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0):
            region = await bare.offered()
            monkeypatch.setattr(protocol.transport._life.regions, "submit", lambda request: None)
        mr[:7] = b"revoked"
        there = {"remote_addr": region.address, "rkey": region.rkey}
        bare.post(b"too late", WROpcode.RDMA_WRITE, **there)
        assert isinstance(await protocol.until_lost(), TimeoutError)
        assert mr[:7] == b"revoked"


async def test_devices_without_windows(net: Net, bare, monkeypatch):
    """The key ends with the offer all the same."""
    monkeypatch.setattr(bindings, "has_windows", lambda engine: False)
    protocol = await connected(bare)
    with protocol.transport.get_extra_info("rdma_pd").alloc_mr(64, AccessFlags.LOCAL_WRITE) as mr:
        async with protocol.transport.offer(mr, access="read,write", revoke_timeout=0):
            region = await bare.offered()
            assert (region.address, region.length) == (mr.address, 64)
            assert region.rkey != mr.rkey
            there = {"remote_addr": region.address, "rkey": region.rkey}
            assert await bare.done(b"granted", WROpcode.RDMA_WRITE, **there) == WCStatus.SUCCESS
            bare.post(frame(DATA, b"now", reaped=1))
            await protocol.until_received(3)
            assert mr[:7] == b"granted"
        await bare.done(b"revoked", WROpcode.RDMA_WRITE, **there)
        assert isinstance(await protocol.until_lost(), ConnectionError)
        assert mr[:7] == b"granted"


# ---- who may place bytes, and lies


class Liar:
    """A peer that keeps the rules of direct placement for a while, so that it gets far, and then breaks some."""

    def __init__(self, bare: BarePeer, rng: random.Random) -> None:
        self.bare, self.rng = bare, rng
        self.ledger = credit.Ledger(LIARS, OURS)
        self.peer_wants = placement.PeerWants()
        self.wants = placement.OurWants()
        self.news = False  # that an answer or a Want of ours is to be said
        self.memory = bare.pd.alloc_mr(1_000_000, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
        self.lies = 0

    async def live(self) -> None:
        """Until the connection has ended, or for so many turns."""
        for turn in range(120):
            with contextlib.suppress(ProtocolError) if self.lies else contextlib.nullcontext():
                for each in self.bare.received():
                    self.hear(each)
            if self.bare.has_ended or not await self.say(self.rng.random() < (turn - 40) / 200):
                return
            await loop_turns()

    def hear(self, received: bytes) -> None:
        header, body = credit.unpack_header(received), received[credit.HEADER_BYTES :]
        self.ledger.frame_received(len(received), *header)
        if header.kind == DATA:
            self.wants.received(header.length)
            self.ledger.slots_freed(1)
        elif header.kind == PLACED:
            serial, _, upto = credit.PLACED_BODY.unpack(body)
            self.wants.place(serial, upto)
            self.ledger.slots_freed(1)
        elif header.kind == CREDIT and body:
            news = credit.unpack_credit(body, header.granted, True)
            self.wants.hear(news.answered)
            self.peer_wants.hear(news.wants, news.unwanted)

    async def say(self, lie: bool) -> bool:
        """Something that may be said now, or, if `lie`, something like it. Whether it was taken."""
        self.lies += lie
        if (kind := self.ledger.control_due(bool(self.peer_wants.answer_due or self.news))) or lie:
            if not kind or (kind == CREDIT and self.rng.random() < 0.5):
                return await self.say_data(lie)
            return await self.say_control(kind, lie)
        if self.wants.count and self.rng.random() < 0.2:
            self.wants.unwant()
            self.news = True
        elif self.wants.may_name(True) and self.rng.random() < 0.3:
            self.wants.name(self.memory.address, self.rng.randrange(1, 1_000_000), True)
            self.news = True
        return await self.say_data(False)

    async def say_control(self, kind: int, lie: bool) -> bool:
        body = bytes(8)
        if kind == CREDIT:
            said = []
            while (want := self.wants.next_to_say()) is not None:
                said.append(self.wants.say(want, self.memory.rkey))
            unwanted, answered = self.wants.unwanted(), self.peer_wants.answered()
            self.news = False
            if lie:
                said, unwanted, answered = self.spoilt_news(said, unwanted, answered)
        self.ledger.control_sent(kind)
        if kind == CREDIT:
            granted = self.ledger.granted
            body = credit.pack_credit(credit.Credit(granted, (), (), (), tuple(said), unwanted, answered))
        return await self.post(kind, body)

    def spoilt_news(self, said: list[credit.Want], unwanted: int, answered: int) -> tuple[list, int, int]:
        some = self.rng.choice([0, 1, 2, 2**32 - 1])
        what = self.rng.randrange(4)
        if what == 0:
            return said, some, answered
        if what == 1:
            return said, unwanted, some
        numbers = [1, 0, self.memory.address, 70_000, self.memory.rkey, 1]
        numbers[self.rng.randrange(6)] = self.rng.choice([1, 3, 4096, 2**31, 2**32 - 1])
        return [credit.Want(*numbers)], unwanted, answered

    async def say_data(self, lie: bool) -> bool:
        want = self.peer_wants.current()
        if not self.ledger.may_send(DATA):
            return True
        if want is None or self.rng.random() < 0.3:
            data = bytes(self.rng.randrange(1, 5000))
            self.peer_wants.sent(len(data))
            self.ledger.data_sent()
            if not lie:
                return await self.post(DATA, data)
            serial, upto = self.rng.choice([0, 1, 2, 2**32 - 1]), self.rng.choice([0, 1, 100_000, 2**64 - 1])
            return await self.post(PLACED, credit.PLACED_BODY.pack(serial, 0, upto))
        count = self.rng.randrange(1, min(self.peer_wants.room(want), 100_000) + 1)
        address, serial = self.peer_wants.target(want), want.serial
        self.peer_wants.sent(count)
        upto = self.peer_wants.position
        if lie:
            what = self.rng.randrange(3)
            address += self.rng.choice([-want.length, want.length]) if what == 0 else 0
            upto += self.rng.choice([-count, 1 << 20]) if what == 1 else 0
            serial += what == 2
        data = bytes([7]) * count
        if not await self.bare.taken(data, WROpcode.RDMA_WRITE, remote_addr=address, rkey=want.rkey):
            return False
        self.ledger.data_sent()
        return await self.post(PLACED, credit.PLACED_BODY.pack(serial, 0, upto))

    async def post(self, kind: int, body: bytes) -> bool:
        text = frame(kind, body, self.ledger.granted, self.ledger.reaped)
        return await self.bare.taken(text)


OURS = credit.Hello(65536, 16, 8, 16, credit.FEATURE_PLACEMENT)
LIARS = credit.Hello(65536, 2, 8, 2, credit.FEATURE_PLACEMENT)


@pytest.fixture
def renewing(device):
    peer = BarePeer(device.library, renews=True)
    yield peer
    peer.close()


@pytest.mark.parametrize("seed", range(15))
async def test_who_lies_about_memory_gets_none(net: Net, renewing, seed):
    """What is beside the bytes named stays as it is, and what a read has returned changes no more."""
    rng = random.Random(seed)
    accepting = asyncio.ensure_future(renewing.accept(hello=credit.pack_hello(LIARS)))
    reader, writer = await rdmanet.open_rdma_connection(HOST, renewing.listen(HOST))
    net.writers.append(writer)
    await accepting
    view = memoryview(rdmanet.alloc(400_000))
    guard = bytes(100_000)

    async def read_one() -> bool:
        reading = asyncio.ensure_future(
            rng.choice([reader.readinto, reader.readinto_exactly])(view[100_000:300_000])
        )
        if rng.random() < 0.3:
            await loop_turns(rng.randrange(6))
            reading.cancel()
        try:
            return await reading > 0
        except asyncio.CancelledError:
            return True
        finally:
            del reading  # the log knows the error, and its traceback this frame

    async def read() -> None:
        while await read_one():
            view[100_000:300_000] = bytes([1]) * 200_000
            await loop_turns(rng.randrange(3))
            assert view[100_000:300_000] == bytes([1]) * 200_000

    async def write() -> None:
        array = memoryview(bytearray(500_000))
        while True:
            writer.write(array)
            await writer.drain()

    liar = Liar(renewing, rng)
    tasks = [asyncio.ensure_future(work) for work in (read(), write())]
    with liar.memory:
        await liar.live()
        writer.transport.abort()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        renewing.qp.close()
    assert all(
        isinstance(outcome, ConnectionError | ProtocolError | EOFError) for outcome in outcomes if outcome
    ), outcomes
    assert view[:100_000] == guard and view[300_000:] == guard
    # And nobody else notices.
    near, far = await net.pair()
    near.transport.write(b"still here")
    assert await far.until_received(10) == b"still here"
    view = memoryview(b"")  # the log knows the error, and its traceback the frames above
