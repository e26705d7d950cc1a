"""Reads and writes of memory that is known at both ends: they are done at once, and nothing is taken for granted."""

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine

import numpy
import pytest
from places import IS_FAR

import rdmanet
from rdmanet import tensors
from rdmanet._core import Blocks
from rdmanet.stream.blocks import Lists, new_list
from rdmanet.stream.registered import RegisteredMemory
from rdmanet.tensors import link
from rdmanet.tensors.link import Dialled
from rdmanet.tensors.peer import Peer
from tests.support.waiting import until_seen

executes_at_once = pytest.mark.skipif(
    IS_FAR
    or "RDMANET_SOFT_DEFER" in os.environ
    or "RDMANET_TEST_HOST" in os.environ
    or "RDMANET_TEST_DEVICE" in os.environ,
    reason="there the device does not execute requests while they are posted",
)


async def known(peer: Peer, described: bytes, mine: object) -> None:
    """From the second one on, the fast path knows the descriptor and the array."""
    for _ in range(2):
        await peer.read(described, into=mine)


async def is_done_at_once(call: Callable[[], Coroutine[None, None, None]]) -> bool:
    """Whether it ever suspends nothing. Where it takes long, the loop is to turn: a busy machine may do that."""
    for _ in range(1000):
        await asyncio.sleep(0)  # the loop has just turned
        step = call()
        try:
            step.send(None)
        except StopIteration:
            return True
        step.close()
    return False


@executes_at_once
async def test_nothing_is_suspended(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    theirs, mine = bytearray(range(64)), bytearray(64)
    async with owner.register(theirs) as memory, user.register(mine):
        described = memory.describe(mode="rw")
        await known(peer, described, mine)
        mine[:] = bytes(64)
        assert await is_done_at_once(lambda: peer.read(described, into=mine))
        assert mine == bytes(range(64))
        mine[:] = bytes(64)
        assert await is_done_at_once(lambda: peer.write(mine, described))
        assert theirs == bytes(64)
    counted = peer.statistics()
    assert (
        counted["bytes_read"] == 64 * counted["reads"] and counted["bytes_written"] == 64 * counted["writes"]
    )


@executes_at_once
@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_few_mib_wake_no_other_thread(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: Peer, way: str, monkeypatch: pytest.MonkeyPatch
):
    """They are moved in turns of the loop, as lists of short blocks are."""
    left, begin = [], Lists.begin

    def begin_and_note(lists: Lists, blocks: Blocks) -> None:
        left.append(blocks)
        begin(lists, blocks)

    theirs, mine = (numpy.random.default_rng(seed).integers(0, 255, 5 << 20, "u1") for seed in (1, 2))
    async with owner.register(theirs) as memory, user.register(mine):
        described = memory.describe(mode="rw")
        await known(peer, described, mine)
        assert (mine == theirs).all()
        monkeypatch.setattr(Lists, "begin", begin_and_note)
        for turn in range(100):  # a busy machine may leave a part to the device's thread
            left.clear()
            mine[:] = turn
            await (peer.read(described, into=mine) if way == "read" else peer.write(mine, described))
            assert (mine == theirs).all()
            if not left:
                break
    assert not left
    counted = peer.statistics()
    assert counted["bytes_read"] == mine.nbytes * counted["reads"]
    assert counted["bytes_written"] == mine.nbytes * counted["writes"]


@executes_at_once
async def test_a_long_list_is_left_to_the_device(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: Peer, monkeypatch: pytest.MonkeyPatch
):
    """Many blocks of a few MiB each are no few MiB: the loop's thread does not copy them all."""
    left, begin = [], Lists.begin

    def begin_and_note(lists: Lists, blocks: Blocks) -> None:
        left.append(len(blocks))
        begin(lists, blocks)

    theirs = numpy.random.default_rng(1).integers(0, 255, 15 << 20, "u1")
    mine = numpy.zeros(15 << 20, "u1")
    async with owner.register(theirs) as memory, user.register(mine):
        described = tensors.Descriptor.from_bytes(memory.describe())
        await known(peer, described, mine)
        monkeypatch.setattr(Lists, "begin", begin_and_note)
        mine[:] = 0
        parts = [slice(at << 20, (at + 5) << 20) for at in (10, 0, 5)]
        await peer.read_many([(described[part], mine[part]) for part in parts])
        assert (mine == theirs).all()
    assert left == [5 + 1 + 1]  # requests: of 1 MiB, as long as it is a few, and of 5 MiB


@pytest.mark.parametrize("way", ["read", "write", "read_rows"])
async def test_the_loop_turns(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, way: str):
    """However long a program goes on without another await, others get their turns."""
    theirs, mine = numpy.ones((4, 16), "u1"), numpy.zeros((4, 16), "u1")
    loop = asyncio.get_running_loop()
    async with owner.register(theirs) as memory, user.register(mine):
        described = memory.describe(mode="rw")
        for _ in range(3):
            turned = asyncio.Event()
            loop.call_soon(turned.set)
            while not turned.is_set():
                if way == "read":
                    await peer.read(described, mine)
                elif way == "write":
                    await peer.write(mine, described)
                else:
                    await peer.read_rows(described, [3, 2], into=mine[:2])


async def test_a_long_list_lets_the_loop_turn(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    table = numpy.random.default_rng(1).integers(0, 256, (4096, 4096), "u1")
    mine = numpy.zeros_like(table)
    order = numpy.random.default_rng(2).permutation(4096)
    async with owner.register(table) as memory, user.register(mine):
        reading = asyncio.ensure_future(peer.read_rows(memory.describe(), order, into=mine))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        await reading
        assert turns > 3
        assert (mine == table[order]).all()


async def test_a_list_that_is_cancelled_between_two_turns(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    table = numpy.ones((4096, 4096), "u1")
    mine = numpy.zeros_like(table)
    pairs = []
    async with owner.register(table) as memory, user.register(mine) as ours:
        whole = tensors.Descriptor.from_bytes(memory.describe())
        await peer.read(whole[:1], into=mine[:1])
        pairs = [(whole[at : at + 1], mine[at]) for at in range(4095, -1, -1)]
        reading = asyncio.ensure_future(peer.read_many(pairs))
        await until_seen(lambda: mine[4095].all())
        assert reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        moved = mine.sum()
        assert not ours._uses and not peer._link._active
        await peer.read(whole[:1], into=mine[:1])
        assert mine.sum() <= moved + 4096
    assert peer.statistics()["cancelled"] == 1 and peer.statistics()["connections"] == 1


async def test_what_is_revoked(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    mine = bytearray(8)
    async with owner.register(bytearray(8)) as memory, user.register(mine):
        described = memory.describe()
        await known(peer, described, mine)
        await memory.revoke(described)
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.read(described, into=mine)


async def test_what_is_let_go_of(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """A grant that gives way to another one is claimed again, and not used by its old key."""
    mine = bytearray(4)
    async with owner.register(bytearray(b"one.two.")) as memory, user.register(mine):
        one, two = memory.describe(slice(0, 4)), memory.describe(slice(4, 8))
        await known(peer, one, mine)
        monkeypatch.setattr(link, "CLAIMS_MOST", 1)
        assert isinstance(peer._link, Dialled)
        peer._link._make_room()
        await peer.read(one, into=mine)
        assert peer.statistics()["claims"] == 2
        for described, expected in ((two, b"two."), (one, b"one."), (one, b"one."), (two, b"two.")):
            await peer.read(described, into=mine)
            assert mine == expected
        assert peer.statistics()["claims"] == 5 and peer.statistics()["connections"] == 1


async def test_what_was_used_last_is_kept(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """Others were claimed since, but this one is used all the time."""
    monkeypatch.setattr(link, "CLAIMS_MOST", 3)
    mine = bytearray(4)
    async with owner.register(bytearray(40)) as memory, user.register(mine):
        described = [memory.describe(slice(at, at + 4)) for at in range(0, 40, 4)]
        await known(peer, described[0], mine)
        for each in described[1:]:
            await peer.read(each, into=bytearray(4))
            await peer.read(described[0], into=mine)
        assert peer.statistics()["claims"] == len(described)


async def test_our_memory_that_is_closed(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    mine = bytearray(4)
    async with owner.register(bytearray(b"text")) as memory:
        described = memory.describe()
        async with user.register(mine):
            await known(peer, described, mine)
        mine.clear()
        mine += bytes(4)
        await peer.read(described, into=mine)
        assert mine == b"text"
        mine.clear()


async def test_a_peer_that_is_closed(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    mine = bytearray(4)
    async with owner.register(bytearray(4)) as memory, user.register(mine):
        described = memory.describe()
        await known(peer, described, mine)
        await peer.close()
        with pytest.raises(ValueError, match="is closed"):
            await peer.read(described, into=mine)


async def test_a_connection_that_ends(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    """What is asked for next makes another one, also before the loop has told of the end."""
    mine = bytearray(4)
    async with owner.register(bytearray(b"text")) as memory, user.register(mine):
        described = memory.describe()
        await known(peer, described, mine)
        peer._link.transport.abort()
        await peer.read(described, into=mine)
        assert mine == b"text" and peer.statistics()["connections"] == 2


async def test_what_is_wrong_is_said(owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer):
    """Also by a peer that knows the grant and the array."""
    mine = bytearray(8)
    async with owner.register(bytearray(8)) as memory, user.register(mine):
        described = memory.describe()
        whole = tensors.Descriptor.from_bytes(described)
        await known(peer, described, mine)
        made = (whole.version, whole.endpoint, whole.grant)
        with pytest.raises(PermissionError):
            await peer.write(mine, described)
        with pytest.raises(PermissionError):  # it says that it may, but was not granted so
            await peer.write(mine, tensors.Descriptor(*made, "rw", 0, 8))
        for offset, nbytes in ((1, 8), (8, 8), (1 << 61, 8), (-1, 8), (-1 << 70, 8)):
            with pytest.raises(IndexError):
                await peer.read(tensors.Descriptor(*made, "r", offset, nbytes), into=mine)
        with pytest.raises(tensors.DescriptorError):
            await peer.read(tensors.Descriptor(1, bytes(16), whole.grant, "r", 0, 8), into=mine)
        with pytest.raises(ValueError, match="has 4 bytes"):
            await peer.read(described, into=memoryview(mine)[:4])
        with pytest.raises(TypeError, match="read-only"):
            await peer.read(described, into=memoryview(mine).toreadonly())
        with pytest.raises(BufferError, match="not C-contiguous"):
            await peer.read(whole[:4], into=memoryview(mine)[::2])
        with pytest.raises(TypeError):
            await peer.read(described, into=3)
        await peer.read(described, into=mine)
    assert peer.statistics()["connections"] == 1


async def test_many_descriptors_are_not_kept(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    mine = bytearray(1)
    async with owner.register(bytearray(range(256)) * 4) as memory, user.register(mine):
        whole = tensors.Descriptor.from_bytes(memory.describe())
        for at in range(0, 1024, 3):
            for _ in range(2):
                await peer.read(bytes(whole[at : at + 1]), into=mine)
                assert mine[0] == at % 256


async def test_a_list_of_descriptors_that_are_bytes(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    """They go the fast path from the first time on, however many they are; one that is none goes the other."""
    theirs, mine = bytearray(range(256)) * 8, bytearray(2048)
    view = memoryview(mine)
    async with owner.register(theirs) as memory, user.register(mine):
        whole = tensors.Descriptor.from_bytes(memory.describe())
        await peer.read(whole, into=mine)
        assert isinstance(peer._link, Dialled) and peer._link.fast is not None
        mine[:] = bytes(2048)
        pairs = [(bytes(whole[at : at + 1]), view[at : at + 1]) for at in range(2047, -1, -1)]
        assert peer._link.fast.fill(new_list(None, 4), list(pairs)) is not None
        await peer.read_many(pairs)
        assert mine == theirs
        for wrong, error in ((b"none", tensors.DescriptorError), (bytes(whole), ValueError)):
            pairs[1000] = (wrong, view[:1])
            assert peer._link.fast.fill(new_list(None, 4), list(pairs)) is None
            with pytest.raises(error):
                await peer.read_many(pairs)
        view.release()
        del pairs


async def test_a_list_after_the_end_of_what_was_used(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    """Of our memory and of theirs, in lists as in single operations."""
    theirs, mine = numpy.ones((4, 16), "u1"), numpy.zeros((4, 16), "u1")
    async with owner.register(theirs) as memory:
        described = tensors.Descriptor.from_bytes(memory.describe())
        pairs = [(described[at : at + 1], mine[at]) for at in (2, 0, 3, 1)]
        async with user.register(mine):
            for _ in range(2):
                await peer.read_many(pairs)
            assert mine.all()
        mine[:] = 0
        await peer.read_many(pairs)
        assert mine.all()
        async with user.register(mine):
            await peer.read_many(pairs)
            await memory.revoke()
            with pytest.raises(rdmanet.RegionRevokedError):
                await peer.read_many(pairs)
    assert peer.statistics()["connections"] == 1


@pytest.mark.parametrize("many", [False, True], ids=["read", "read_many"])
async def test_our_memory_that_cannot_be_registered(
    owner: tensors.Endpoint,
    user: tensors.Endpoint,
    peer: tensors.Peer,
    monkeypatch: pytest.MonkeyPatch,
    many: bool,
):
    """It has no key then, and is not read into by the key of other memory."""

    def none_is_left(*_: object) -> None:
        raise OSError(errno.ENOMEM, "ibv_reg_mr: Cannot allocate memory")

    async def read(mine: bytearray) -> None:
        await (peer.read_many([(described, mine)]) if many else peer.read(described, into=mine))

    one, other = bytearray(4), bytearray(4)
    async with owner.register(bytearray(b"byte")) as memory, user.register(one), user.register(other):
        described = memory.describe()
        await known(peer, described, one)
        with monkeypatch.context() as patched:
            patched.setattr(RegisteredMemory, "region_in", none_is_left)
            with pytest.raises(OSError, match="allocate"):
                await read(other)
        assert peer.statistics()["failed"] == 1
        await read(other)
        assert other == b"byte"
    assert peer.statistics()["connections"] == 1


async def test_a_list_that_has_an_error_tells_whoever_has_begun_it(peer: tensors.Peer):
    blocks = Blocks(None, 4, 1 << 20, 1 << 20)
    blocks.stop(OSError("why"))
    assert blocks.done and str(blocks.error) == "why"
    assert isinstance(peer._link, Dialled) and peer._link.fast is not None
