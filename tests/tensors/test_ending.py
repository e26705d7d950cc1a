"""How access ends: leases, revocation, cancelling, time-outs, lost connections, closed endpoints, killed processes."""

import asyncio
import gc
import signal
from typing import Any

import numpy
import pytest
from places import ENVIRONMENT, HOST, script

import rdmanet
from rdmanet import tensors
from rdmanet._core import Device
from rdmanet.stream.blocks import Lists
from rdmanet.tensors.link import Dialled, Served
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin, loop_turns, until_seen

MIB = 1 << 20


async def test_a_lease_ends(owner: tensors.Endpoint, peer: tensors.Peer):
    async with owner.register(bytearray(b"text")) as memory:
        short, long = memory.describe(lease=0.2), memory.describe(lease=1000)
        mine = bytearray(4)
        await peer.read(short, into=mine)
        assert len(memory.held()) == 1
        await until_seen(lambda: not memory.held())
        with pytest.raises(rdmanet.RegionRevokedError, match="its lease is over, it was revoked"):
            await peer.read(short, into=mine)
        await peer.read(long, into=mine)
        assert peer.statistics()["connections"] == 1


async def test_revoking_one_and_all(owner: tensors.Endpoint, peer: tensors.Peer):
    async with owner.register(bytearray(b"text")) as memory, owner.register(bytearray(4)) as other:
        first, second, third = memory.describe(), memory.describe(), other.describe()
        mine = bytearray(4)
        for each in (first, second, third):
            await peer.read(each, into=mine)
        await memory.revoke(first)
        await memory.revoke(first)
        await memory.revoke(third)  # another memory's: none of its business
        assert (len(memory.held()), len(other.held())) == (1, 1)
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.read(first, into=mine)
        await peer.read(second, into=mine)
        await memory.revoke()
        assert not memory.held()
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.read(second, into=mine)
        await peer.read(third, into=mine)
        with pytest.raises(tensors.DescriptorError):
            await memory.revoke(b"rubbish")
    assert peer.statistics()["connections"] == 1


@pytest.mark.parametrize("what", ["one", "all"])
async def test_revoking_what_has_ended_awaits_its_keys(
    owner: tensors.Endpoint, peer: tensors.Peer, what: str
):
    async with owner.register(bytearray(b"text")) as memory:
        described = memory.describe()
        await peer.read(described, into=bytearray(4))

        async def again() -> None:
            assert len(memory.held()) == 1
            await memory.revoke(described if what == "one" else None)
            assert not memory.held() and not memory.ending

        await asyncio.gather(memory.revoke(described), again())


async def test_revoking_what_is_being_claimed(owner: tensors.Endpoint, peer: tensors.Peer):
    async with owner.register(bytearray(4)) as memory:
        for turns in range(12):
            described = memory.describe()
            (reading,) = await begin(peer.read(described, into=bytearray(4)))
            for _ in range(turns):
                await asyncio.wait([reading], timeout=0)
            await memory.revoke(described)
            assert not memory.held()
            await asyncio.wait([reading])
            assert reading.exception() is None or isinstance(reading.exception(), rdmanet.RegionRevokedError)
    assert peer.statistics()["connections"] == 1


async def test_what_is_revoked_while_it_is_read(owner: tensors.Endpoint, peer: tensors.Peer):
    """The rest is not read, and the connection stays."""
    async with owner.register(memoryview(rdmanet.alloc(32 * MIB))) as memory:
        described = tensors.Descriptor.from_bytes(memory.describe())
        mine = bytearray(32 * MIB)
        await peer.read(described[:1], into=memoryview(mine)[:1])
        blocks = [
            (described[at : at + 4096], memoryview(mine)[at : at + 4096]) for at in range(28 * MIB, 0, -8192)
        ]
        (reading,) = await begin(peer.read_many(blocks))
        assert not reading.done()
        await memory.revoke()
        assert not memory.held()
        with pytest.raises(rdmanet.RegionRevokedError):
            await reading
        del blocks
    assert peer.statistics()["connections"] == 1


@pytest.mark.parametrize("way", ["read", "write"])
async def test_cancelling_ends_the_access(owner: tensors.Endpoint, peer: tensors.Peer, way: str):
    theirs = memoryview(rdmanet.alloc(64 * MIB))
    mine = bytearray(64 * MIB)
    async with owner.register(theirs) as memory:
        described = memory.describe(mode="rw")
        await peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1])
        for _ in range(5):
            call = peer.read(described, into=mine) if way == "read" else peer.write(mine, described)
            (moving,) = await begin(call)
            assert not moving.done()
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            assert peer._link is not None and not peer._link._active
            mine += b"may be resized: nothing has it registered"
            del mine[64 * MIB :]
        del theirs
    counted = peer.statistics()
    assert counted["cancelled"] == 5 and counted["connections"] == 1
    assert counted["bytes_read"] + counted["bytes_written"] < 5 * 64 * MIB


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_memoryview_that_is_released_meanwhile(owner: tensors.Endpoint, peer: tensors.Peer, way: str):
    """The memory stays where it is until no device touches it."""
    theirs = memoryview(rdmanet.alloc(64 * MIB))
    mine = bytearray(64 * MIB)
    async with owner.register(theirs) as memory:
        described = memory.describe(mode="rw")
        await peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1])
        view = memoryview(mine)
        (moving,) = await begin(peer.read(described, view) if way == "read" else peer.write(view, described))
        assert not moving.done()
        view.release()
        with pytest.raises(BufferError):
            mine.clear()
        await moving
        mine.clear()
        del theirs


async def test_a_time_out_ends_the_access(owner: tensors.Endpoint, peer: tensors.Peer):
    async with owner.register(memoryview(rdmanet.alloc(64 * MIB))) as memory:
        mine = bytearray(64 * MIB)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await peer.read(memory.describe(), into=mine)
        mine.clear()


async def test_a_lost_connection_is_made_again(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    async with owner.register(bytearray(b"text")) as memory:
        described, mine = memory.describe(), bytearray(4)
        await peer.read(described, into=mine)
        for link in list(owner._links):
            link.transport.abort()
        await until_seen(lambda: not peer._is_connected())
        mine.clear()
        mine += bytes(4)
        await asyncio.gather(*(peer.read(described, into=bytearray(4)) for _ in range(4)))
        await peer.read(described, into=mine)
        assert mine == b"text"
        assert peer.statistics()["connections"] == 2 and peer.statistics()["claims"] == 2
        assert await user.connect(owner.address()) is peer


async def test_a_read_of_a_lost_connection_fails(owner: tensors.Endpoint, peer: tensors.Peer):
    async with owner.register(memoryview(rdmanet.alloc(64 * MIB))) as memory:
        described, mine = memory.describe(), bytearray(64 * MIB)
        await peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1])
        (reading,) = await begin(peer.read(described, into=mine))
        assert peer._link is not None
        peer._link.transport.abort()
        with pytest.raises(OSError):
            await reading
        mine.clear()
        assert peer.statistics()["failed"] == 1


async def test_memory_is_closed_once(owner: tensors.Endpoint, peer: tensors.Peer):
    theirs = bytearray(4)
    memory = owner.register(theirs)
    described = memory.describe()
    await peer.read(described, into=bytearray(4))
    with pytest.raises(BufferError):
        theirs.clear()
    await asyncio.gather(memory.close(), memory.close())
    theirs.clear()
    with pytest.raises(ValueError, match="this memory is closed"):
        memory.describe()
    with pytest.raises(rdmanet.RegionRevokedError):
        await peer.read(described, into=bytearray(4))


@pytest.mark.parametrize("way", ["read", "write"])
async def test_our_own_memory_is_closed_while_it_is_used(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, way: str, device: Device
):
    """Its registration ends after the operation, so the connection stays. That has a second to end."""
    nbytes = 64 * MIB if device.library.embedded_device else MIB  # the kernel's devices are slow
    async with owner.register(memoryview(rdmanet.alloc(nbytes))) as memory:
        described, mine = memory.describe(mode="rw"), bytearray(nbytes)
        await peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1])
        registered = user.register(mine)
        (moving,) = await begin(peer.read(described, mine) if way == "read" else peer.write(mine, described))
        assert not moving.done()
        (closing,) = await begin(registered.close())
        await peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1])
        await asyncio.gather(moving, closing)
        mine.clear()
    assert peer.statistics()["connections"] == 1


async def test_our_own_memory_is_closed_while_its_use_does_not_end(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """Here there is never room to post it. Closing does not wait for it."""
    async with owner.register(bytearray(16)) as memory:
        described, mine = memory.describe(), bytearray(16)
        registered = user.register(mine)
        await peer.read(described, into=mine)
        monkeypatch.setattr(Lists, "go_on", lambda self: None)
        monkeypatch.setattr(Lists, "begin_at_once", lambda self, blocks: False)
        peer._link.fast = None
        (reading,) = await begin(peer.read(described, into=mine))
        assert registered._uses
        await registered.close()
        with pytest.raises(ConnectionResetError):
            await reading
        assert not registered._uses


async def test_our_own_memory_is_closed_while_a_claim_is_not_answered(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """It is not in use yet: closing it takes no connection away."""
    async with owner.register(bytearray(b"text")) as memory:
        described, mine = memory.describe(), bytearray(4)
        unanswered: list[Any] = []
        monkeypatch.setattr(Served, "_claimed", lambda self, claim: unanswered.append((self, claim)))
        registered = user.register(mine)
        (reading,) = await begin(peer.read(described, into=mine))
        await until_seen(lambda: unanswered)
        await registered.close()
        monkeypatch.undo()
        [(link, claim)] = unanswered
        link._claimed(claim)
        await reading
        assert mine == b"text"
        assert peer.statistics()["connections"] == 1


async def test_memory_that_was_registered_read_only(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    """It is read into by another registration, and written from by this one."""
    mine = numpy.zeros(4, "u1")
    constant = mine.view()
    constant.flags.writeable = False
    async with owner.register(bytearray(b"text")) as memory, user.register(constant):
        await peer.read(memory.describe(), into=mine)
        assert mine.tobytes() == b"text"
        await peer.write(mine, memory.describe(mode="w"))
    assert peer.statistics()["connections"] == 1


async def test_a_closed_endpoint_refuses(owner: tensors.Endpoint):
    async with tensors.open(HOST) as user:
        peer = await user.connect(owner.address())
    async with owner.register(bytearray(4)) as memory:
        with pytest.raises(ValueError, match=r"^<Peer .*, closed> is closed$"):
            await peer.read(memory.describe(), into=bytearray(4))
    for call in (lambda: user.register(bytearray(4)), lambda: peer.connected()):
        with pytest.raises(ValueError, match="closed"):
            result = call()
            await result
    with pytest.raises(ValueError, match="^this endpoint is closed$"):
        await user.connect(owner.address())


async def test_a_peer_is_closed_while_it_connects(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    """Who waits for the connection is told, and is not cancelled."""
    async with owner.register(bytearray(4)) as memory:
        assert peer._link is not None
        peer._link.transport.abort()
        await peer._link.lost
        (reading,) = await begin(peer.read(memory.describe(), into=bytearray(4)))
        assert peer._dialling is not None
        await peer.close()
        with pytest.raises(ValueError, match=r"^<Peer .*, closed> was closed meanwhile$"):
            await reading


async def test_an_endpoint_that_was_started_anew_is_another():
    async with tensors.open(HOST) as owner:
        address = owner.address()
        port = tensors.Address.from_bytes(address).port
    async with tensors.open(HOST) as user:
        with pytest.raises(OSError):
            await user.connect(address)
        async with tensors.open(HOST, port):
            with pytest.raises(
                ConnectionRefusedError, match="it was started anew; ask for its address again"
            ):
                await user.connect(address)
        assert not user._peers


async def test_peers_that_have_ended_are_forgotten(user: tensors.Endpoint):
    """Those that the program has no more."""
    for _ in range(5):
        async with tensors.open(HOST) as owner:
            peer = await user.connect(owner.address())
            assert await user.connect(owner.address()) is peer
            del peer
            gc.collect()
            assert len(user._peers) == 1  # it is connected
        await until_seen(lambda: gc.collect() is not None and not user._peers)


async def test_closing_a_peer_waits_for_each_of_its_connections(
    owner: tensors.Endpoint, peer: tensors.Peer, monkeypatch: pytest.MonkeyPatch
):
    """A connection that is over may be replaced before the loop has told of its end."""
    late: list[tuple[Dialled, BaseException | None]] = []
    async with owner.register(b"text") as memory:
        with monkeypatch.context() as patched:
            patched.setattr(Dialled, "connection_lost", lambda link, exc: late.append((link, exc)))
            assert peer._link is not None
            peer._link.transport.abort()
            await peer.read(memory.describe(), into=bytearray(4))
            await until_seen(lambda: late)
        assert peer.statistics()["connections"] == 2
        (closing,) = await begin(peer.close())
        await until_seen(lambda: peer._link.lost.done())
        await loop_turns(5)
        assert not closing.done()
        for link, exc in late:
            link.connection_lost(exc)
        await closing


async def test_an_address_that_nobody_can_connect_to():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(OSError, match="is no address that others can connect to"):
            async with tensors.open(host):
                pass


@pytest.mark.parametrize("end", ["killed", "stopped"])
async def test_a_peer_that_has_memory_is_gone(owner: tensors.Endpoint, end: str):
    """What it has of the memory ends, whatever it does."""
    theirs = bytearray(b"text")
    async with owner.register(theirs) as memory:
        with AwaitedProcess(*script("reader.py"), env=ENVIRONMENT) as reader:
            reader.tell(address=owner.address().hex(), descriptor=memory.describe().hex())
            assert await reader.line() == "text"
            assert len(memory.held()) == 1
            if end == "killed":
                reader.send_signal(signal.SIGKILL)
                await until_seen(lambda: not memory.held())
            else:
                reader.stop()
                await memory.revoke()
                assert not memory.held()
                reader.send_signal(signal.SIGCONT)
        await memory.close()
        theirs.clear()


@pytest.mark.parametrize("nbytes", [4, 8 << 20])
async def test_who_is_told_of_the_loss_goes_on_by_another_connection(
    owner: tensors.Endpoint, peer: tensors.Peer, nbytes: int
):
    """Even if the transport is not told yet."""
    async with owner.register(bytearray(nbytes)) as memory:
        described, mine = memory.describe(), bytearray(nbytes)
        await peer.read(described, into=mine)
        assert peer._link is not None
        peer._link.regions.stop_queue_pair()
        with pytest.raises(ConnectionError):
            await peer.read(described, into=mine)
        await peer.read(described, into=mine)
    assert peer.statistics()["connections"] == 2


async def test_an_owner_that_is_killed(user: tensors.Endpoint):
    with AwaitedProcess(*script("keeper.py"), env=ENVIRONMENT) as keeper:
        facts = await keeper.hear()
        peer = await user.connect(bytes.fromhex(facts["address"]))
        described, mine = bytes.fromhex(facts["descriptor"]), bytearray(facts["nbytes"])
        await peer.read(described, into=mine)
        assert mine.count(b"k") == len(mine)
        keeper.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionError):
            while True:
                await peer.read(described, into=mine)
        with pytest.raises(ConnectionRefusedError):  # it connects again, before the loop has told of the loss
            await peer.read(described, into=mine)
        mine.clear()
