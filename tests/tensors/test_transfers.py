"""Reads and writes of another endpoint's memory: the bytes, what is refused before it begins, and notifications."""

import asyncio
import random

import numpy
import pytest
from places import ENVIRONMENT, HOST, IS_FAR, script

import rdmanet
from rdmanet import tensors
from rdmanet._core import Device
from rdmanet.tensors import endpoint, link
from rdmanet.tensors.messages import Message, Release
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin, loop_turns, until_seen

MIB = 1 << 20
KIB = 1 << 10


@pytest.mark.parametrize("nbytes", [1, 64, 4096, MIB, 12 * MIB + 345])
@pytest.mark.parametrize("kind", ["plain", "allocated"])
async def test_the_bytes(owner: tensors.Endpoint, peer: tensors.Peer, kind: str, nbytes: int):
    theirs = bytearray(nbytes) if kind == "plain" else memoryview(rdmanet.alloc(nbytes))
    text = random.Random(nbytes).randbytes(nbytes)
    async with owner.register(theirs) as memory:
        described = memory.describe(mode="rw")
        await peer.write(text, described)
        assert (bytes(theirs) == text) is True
        mine = bytearray(nbytes)
        await peer.read(described, into=mine)
        assert (mine == text) is True
        del theirs
    counted = peer.statistics()
    assert (counted["reads"], counted["bytes_read"], counted["bytes_written"]) == (1, nbytes, nbytes)
    assert (counted["connections"], counted["claims"], counted["failed"]) == (1, 1, 0)


async def test_arrays(owner: tensors.Endpoint, peer: tensors.Peer):
    theirs = numpy.arange(600, dtype="<f4").reshape(20, 30)
    async with owner.register(theirs) as memory:
        whole = tensors.Descriptor.from_bytes(memory.describe())
        assert (whole.dtype, whole.shape, whole.mode) == ("<f4", (20, 30), "r")
        mine = numpy.empty(whole.shape, whole.dtype)
        await peer.read(whole, into=mine)
        assert (mine == theirs).all()
        part = tensors.Descriptor.from_bytes(memory.describe(slice(5, 8)))
        assert (part.offset, part.shape) == (0, (3, 30))
        await peer.read(part, into=mine[:3])
        assert (mine[:3] == theirs[5:8]).all()
        await peer.read(part[1:2], into=mine[7:8])
        assert (mine[7] == theirs[6]).all()
        theirs[0, 0] = -1.0  # read when they are read
        await peer.read(whole[:1], into=mine[:1])
        assert mine[0, 0] == -1.0


@pytest.mark.parametrize("dtype", ["<f2", ">i4", "|b1", "<c16", "<M8[s]", "|V12", "<U3"])
async def test_types_of_items(owner: tensors.Endpoint, peer: tensors.Peer, dtype: str):
    theirs = numpy.frombuffer(random.Random(1).randbytes(48), "|u1").copy().view(dtype)
    async with owner.register(theirs) as memory:
        described = tensors.Descriptor.from_bytes(memory.describe())
        assert described.dtype == dtype
        mine = numpy.empty(described.shape, described.dtype)
        await peer.read(described, into=mine)
        assert mine.tobytes() == theirs.tobytes()


async def test_what_has_no_buffer_but_is_an_array(owner: tensors.Endpoint, peer: tensors.Peer):
    class Interface:
        def __init__(self, array: numpy.ndarray) -> None:
            self.array = array
            self.__array_interface__ = array.__array_interface__

    class Exchanged:
        def __init__(self, array: numpy.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    for kind in (Interface, Exchanged):
        theirs, mine = kind(numpy.arange(10.0)), numpy.zeros(10)
        async with owner.register(theirs) as memory:
            described = tensors.Descriptor.from_bytes(memory.describe())
            assert (described.dtype, described.shape) == ("<f8", (10,))
            await peer.read(described, into=mine)
        assert (mine == theirs.array).all()


async def test_many_blocks(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    chance = random.Random(5)
    theirs = bytearray(chance.randbytes(4 * MIB))
    mine = bytearray(4 * MIB)
    view = memoryview(mine)
    async with owner.register(theirs) as memory, user.register(mine):
        whole = tensors.Descriptor.from_bytes(memory.describe(mode="rw"))
        blocks = list(range(1024))
        chance.shuffle(blocks)
        pairs = [(4 * KIB * at, 4 * KIB * (at + 1)) for at in blocks]
        await peer.read_many((whole[start:stop], view[start:stop]) for start, stop in pairs)
        assert (mine == theirs) is True
        mine[:] = chance.randbytes(len(mine))
        await peer.write_many((view[start:stop], whole[start:stop]) for start, stop in pairs)
        assert (mine == theirs) is True
        await peer.read_many([])
        view.release()
    assert peer.statistics()["claims"] == 1


async def test_blocks_of_many_grants(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """More than a connection keeps claimed: those that have not been used for long are let go of."""
    monkeypatch.setattr(link, "CLAIMS_MOST", 20)
    theirs = bytearray(random.Random(6).randbytes(60 * 100))
    async with owner.register(theirs) as memory:
        described = [memory.describe(slice(100 * i, 100 * i + 100)) for i in range(60)]
        for _ in range(2):
            mine = [bytearray(100) for _ in described]
            for first in range(0, 60, 15):
                some = slice(first, first + 15)
                await peer.read_many(zip(described[some], mine[some], strict=True))
            assert b"".join(mine) == theirs
        assert peer.statistics()["claims"] == 120
        with pytest.raises(rdmanet.RdmaError, match="^.*20 descriptors of this peer's are in use at once"):
            await peer.read_many(zip(described[:30], mine[:30], strict=True))
        await peer.read(described[0], mine[0])
        assert mine[0] == theirs[:100]


async def test_what_was_just_claimed_is_not_let_go_of(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """Another claim needs room when the answer has come, and who awaits it has not gone on."""
    monkeypatch.setattr(link, "CLAIMS_MOST", 1)
    refused: list[rdmanet.RdmaError] = []

    def make_room(_: object) -> None:
        try:
            peer._link._make_room()
        except rdmanet.RdmaError as error:
            refused.append(error)

    async with owner.register(bytearray(b"text")) as memory:
        mine = bytearray(4)
        (reading,) = await begin(peer.read(memory.describe(), into=mine))
        [claimed] = peer._link._claims.values()
        claimed.answer.add_done_callback(make_room)
        await reading
        assert mine == b"text" and refused
        peer._link._make_room()
        assert not peer._link._claims


async def read_all(peer: tensors.Peer, described: list[bytes], at_once: int) -> bytes:
    """The bytes that so many descriptors of one byte each say."""
    places = asyncio.Semaphore(at_once)

    async def read(descriptor: bytes) -> bytes:
        async with places:
            mine = bytearray(1)
            await peer.read(descriptor, into=mine)
            return mine

    return b"".join(await asyncio.gather(*map(read, described)))


async def test_many_grants_by_turns(owner: tensors.Endpoint, peer: tensors.Peer, device: Device):
    """Claims and their ends keep pace with each other, however many wait."""
    count, turns = (1000, 3) if device.library.embedded_device else (400, 2)  # the kernel's devices are slow
    theirs = bytearray(random.Random(6).randbytes(count))
    async with owner.register(theirs) as memory:
        described = [memory.describe(slice(at, at + 1)) for at in range(count)]
        for _ in range(turns):
            assert await read_all(peer, described, at_once=200) == theirs
    assert peer.statistics()["connections"] == 1


async def test_what_was_let_go_of_counts_until_the_owner_has_it_back(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """An owner that is slow, or far away, is not asked for more than a connection can have."""
    monkeypatch.setattr(link, "CLAIMS_MOST", 20)
    monkeypatch.setattr(link, "RETURNING_MOST", 5)
    late: list[tuple[link.Served, Release]] = []
    handle = link.Served.handle

    def slow(self: link.Served, message: Message) -> None:
        if isinstance(message, Release):
            late.append((self, message))
        else:
            handle(self, message)

    monkeypatch.setattr(link.Served, "handle", slow)
    theirs = bytearray(random.Random(6).randbytes(100))
    async with owner.register(theirs) as memory:
        described = [memory.describe(slice(at, at + 1)) for at in range(100)]
        (reading,) = await begin(read_all(peer, described, at_once=10))
        await until_seen(lambda: len(late) == 5)
        await loop_turns(50)
        assert len(late) == 5 and len(memory.held()) == 25
        while not reading.done():
            for served, release in late:
                handle(served, release)
            late.clear()
            await asyncio.sleep(0)
            assert len(memory.held()) <= 20 + 2 * 5
        assert await reading == theirs
    assert peer.statistics()["connections"] == 1


async def test_who_waits_for_room_is_told_of_the_connection_s_end(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link, "CLAIMS_MOST", 1)
    monkeypatch.setattr(link, "RETURNING_MOST", 1)
    handle = link.Served.handle
    monkeypatch.setattr(
        link.Served, "handle", lambda self, message: isinstance(message, Release) or handle(self, message)
    )
    async with owner.register(bytearray(3)) as memory:
        described = [memory.describe(slice(at, at + 1)) for at in range(3)]
        await peer.read(described[0], bytearray(1))
        await peer.read(described[1], bytearray(1))
        waiting = await begin(*(peer.read(described[2], bytearray(1)) for _ in range(2)))
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert waiting[0].cancelled() and not waiting[1].done()
        peer._link.transport.abort()
        with pytest.raises(ConnectionResetError):
            await waiting[1]


async def test_rows(owner: tensors.Endpoint, peer: tensors.Peer):
    table = numpy.random.default_rng(7).random((500, 16), "f4")
    indices = numpy.random.default_rng(8).integers(0, 500, 1000)
    async with owner.register(table) as memory:
        whole = tensors.Descriptor.from_bytes(memory.describe())
        mine = numpy.zeros((1000, 16), "f4")
        await peer.read_rows(whole, indices, into=mine)
        assert (mine == table[indices]).all()
        await peer.read_rows(whole[100:200], [99, 0], into=mine[:2])
        assert (mine[:2] == table[[199, 100]]).all()
        for wrong in (100, -1):
            with pytest.raises(IndexError, match=f"^row {wrong} is not within 100 rows of 64 bytes$"):
                await peer.read_rows(whole[100:200], [0, wrong], into=mine[:2])
        with pytest.raises(ValueError, match="^read_rows: 3 rows of 64 bytes do not go into 128 bytes$"):
            await peer.read_rows(whole, [0, 1, 2], into=mine[:2])
        with pytest.raises(IndexError, match="^read_rows: there are no rows in"):
            await peer.read_rows(whole[0:0], [0], into=mine[:0])
        await peer.read_rows(whole, [], into=mine[:0])


async def test_registered_memory_is_not_registered_again(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    mine = numpy.zeros(1000, "<i8")
    async with owner.register(numpy.arange(1000)) as memory:
        described = tensors.Descriptor.from_bytes(memory.describe())
        await peer.read(described, into=mine)
        assert peer._link is not None
        registrations = peer._link.regions.engine.registrations
        before = registrations.stats()["misses"]
        assert before
        async with user.register(mine):
            await peer.read(described, into=mine)
            await peer.read(described[10:20], into=mine[:10])
            assert (mine[:12] == [*range(10, 20), 10, 11]).all()
            assert registrations.stats()["misses"] == before
        await peer.read(described, into=mine)
        assert registrations.stats()["misses"] == before + 1


async def test_notifications(owner: tensors.Endpoint, peer: tensors.Peer):
    theirs = bytearray(100)
    async with owner.register(theirs) as memory:
        described = memory.describe(mode="w")
        (waiting,) = await begin(anext(owner.notifications()))
        await peer.write(b"x" * 100, described, notify=b"done")
        notification = await waiting
        assert (notification.memory, notification.payload) == (memory, b"done")
        assert theirs == b"x" * 100
        for number in range(20):
            await peer.write(bytes([number]) * 100, described, notify=b"%d" % number)
        got = [(await anext(owner.notifications())).payload for _ in range(20)]
        assert got == [b"%d" % number for number in range(20)]
        with pytest.raises(ValueError, match="a notification of 16385 bytes: it has at most 16384"):
            await peer.write(bytes(100), described, notify=bytes(16385))
        with pytest.raises(ValueError, match="is about a block that has bytes, and there is none$"):
            await peer.write_many([], notify=b"nothing")
    assert peer.statistics()["notifications"] == 21


async def test_nobody_takes_the_notifications(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """The peer waits, and nothing is lost."""
    monkeypatch.setattr(endpoint, "NOTIFICATIONS_MOST", 50)
    count = 1000
    async with owner.register(bytearray(8)) as memory:
        described = memory.describe(mode="w")

        async def notify() -> None:
            for number in range(count):
                await peer.write(bytes(8), described, notify=b"%d." % number + bytes(16_000))

        writing = asyncio.create_task(notify())
        notifications = owner.notifications()
        await until_seen(lambda: notifications._slowed)
        assert not writing.done()
        for number in range(count):
            assert (await anext(notifications)).payload.startswith(b"%d." % number)
        await writing


async def test_notifications_end_with_the_endpoint():
    async with tensors.open(HOST) as endpoint:
        notifications = endpoint.notifications()
        (waiting,) = await begin(anext(notifications))
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(notifications)


async def test_mistakes_are_named(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    theirs = numpy.zeros((4, 6))
    async with owner.register(theirs) as memory, owner.register(b"read-only") as constant:
        for call, error, says in (
            (lambda: memory.describe(slice(2, 5)), IndexError, "^2:5 is not within 4 rows$"),
            (
                lambda: memory.describe(mode="x"),
                ValueError,
                "mode 'x' is none of 'r', 'w', 'rw', 'a' and 'rwa'$",
            ),
            (lambda: memory.describe(lease=0), ValueError, "a lease of 0: it is a positive number"),
            (lambda: memory.describe(lease=float("inf")), ValueError, "a lease of inf"),
            (lambda: constant.describe(mode="rw"), TypeError, "the array is read-only"),
            (
                lambda: owner.register(theirs.T),
                BufferError,
                r"^register\(\): an array of the shape \(6, 4\) is not C-",
            ),
            (lambda: owner.register(b""), ValueError, "the array has no bytes"),
            (lambda: owner.register(5), TypeError, "^register.*: 'int' is no array, and has no buffer$"),
        ):
            with pytest.raises(error, match=says):
                call()
        readable, writable = memory.describe(), memory.describe(mode="w")
        for coroutine, error, says in (
            (peer.read(writable, bytearray(192)), PermissionError, "mode='w', .* is not for this$"),
            (peer.write(bytes(192), readable), PermissionError, "mode='r', .* is not for this$"),
            (peer.read(readable, bytearray(191)), ValueError, "191 bytes.* 192$"),
            (peer.read(readable, bytes(192)), TypeError, "^read: .* is read-only$"),
            (
                peer.read(readable, numpy.zeros((6, 4)).T),
                BufferError,
                "is not C-contiguous: give its contiguous",
            ),
            (peer.read(b"rubbish", bytearray(192)), tensors.DescriptorError, "are not a descriptor"),
            (user.connect(b"rubbish"), tensors.AddressError, "are not an address of an endpoint"),
        ):
            with pytest.raises(error, match=says):
                await coroutine
        await peer.read(readable, bytearray(192))
        assert len(memory.held()) == 1


async def test_an_endpoint_reads_its_own_memory(owner: tensors.Endpoint):
    itself = await owner.connect(owner.address())
    async with owner.register(bytearray(b"text")) as memory:
        mine = bytearray(4)
        await itself.read(memory.describe(), into=mine)
        assert mine == b"text"


async def test_both_ways(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    back = await owner.connect(user.address())
    ours, theirs = bytearray(b"ours"), bytearray(b"them")
    async with user.register(ours) as here, owner.register(theirs) as there:
        mine, yours = bytearray(4), bytearray(4)
        await asyncio.gather(
            peer.read(there.describe(), into=mine),
            back.read(here.describe(), into=yours),
        )
        assert (mine, yours) == (b"them", b"ours")


async def test_one_connection_for_all_who_ask(owner: tensors.Endpoint, user: tensors.Endpoint):
    peers = await asyncio.gather(*(user.connect(owner.address()) for _ in range(5)))
    assert len({*map(id, peers)}) == 1
    assert peers[0].statistics()["connections"] == 1
    assert len(owner._links) == 1


@pytest.mark.skipif(IS_FAR, reason="it is not reached by memory")
@pytest.mark.embedded_only("it alone counts bytes by their way")
@pytest.mark.not_on_iwarp("has no memory windows, and memory that is registered again is not mapped")
@pytest.mark.parametrize(("kind", "way"), [("plain", "bytes_cma"), ("allocated", "bytes_mapped")])
async def test_how_the_device_reaches_them(user: tensors.Endpoint, kind: str, way: str):
    """Memory of alloc() is mapped: a READ of it is no system call."""
    with AwaitedProcess(*script("keeper.py", kind), env=ENVIRONMENT) as keeper:
        facts = await keeper.hear()
        peer = await user.connect(bytes.fromhex(facts["address"]))
        assert peer._link is not None
        context = peer._link.regions.engine.pd.context
        mine = bytearray(facts["nbytes"])
        await peer.read(bytes.fromhex(facts["descriptor"]), into=mine)
        before = context.counters()
        await peer.read(bytes.fromhex(facts["descriptor"]), into=mine)
        after = context.counters()
        assert after[way] - before[way] >= len(mine)
        assert mine.count(b"k") == len(mine)
        mine.clear()
