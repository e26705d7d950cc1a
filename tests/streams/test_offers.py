"""Memory regions through credit messages: offered, used, revoked, and never after.

The descriptors ride in Credit frames, whose number is bounded; operations run on the connection's
own queue pair, beside the stream and without disturbing it.
"""

import array
import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import signal
import tempfile

import pytest
from harness import OFFERABLE, Echo, Net, Recorder
from pattern import Pattern

import rdmanet
from rdmanet import AccessFlags
from rdmanet._core import PD
from rdmanet.stream import bindings
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.wire.offers import ALIVE_MAX, RemoteRegion
from tests.support.waiting import begin

MIB = 1 << 20
BY_TCP = os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream"


def allocate(protocol: Recorder, length: int, access: AccessFlags = OFFERABLE):
    return protocol.transport.get_extra_info("rdma_pd").alloc_mr(length, access)


async def offered(protocol: Recorder, count: int = 1):
    await protocol.until(lambda: len(protocol.offered) >= count)
    return protocol.offered[count - 1]


async def test_an_offer_arrives_with_all_that_is_known_of_it(net: Net):
    client, server = await net.pair()
    with allocate(server, 4096) as mr:
        async with server.transport.offer(mr, access="read,write", name="weights"):
            remote = await offered(client)
            assert remote.name == "weights"
            assert remote.length == len(remote) == 4096
            assert remote.access == AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
            assert not remote.revoked
            assert (
                repr(remote) == f"<OfferedMemory 'weights' id={remote.id} 4096 bytes, access='read, write'>"
            )
            with pytest.raises(TypeError, match="^read_into: bytes of 4096 bytes is read-only$"):
                await remote.read_into(bytes(4096))
    assert not server.offered


async def test_what_begins_and_ends_bindings_goes_in_its_order(net: Net):
    """Ahead of operations. The end of one must not wait for as long as others begin."""
    client, _ = await net.pair()
    regions, posted, room = client.transport._regions, [], []

    class Request:
        def __init__(self, name: str) -> None:
            self.name = name

        def post(self, connection: object) -> bool:
            if room:
                posted.append(self.name)
            return bool(room)

    for name in ("bind", "invalidate", "bind another"):
        regions.submit(Request(name))
        regions._waiting.append(Request(f"operation after {name}"))
    room.append(True)
    regions.submit(Request("last"))
    assert not posted
    regions.post_waiting()
    assert posted[:4] == ["bind", "invalidate", "bind another", "last"]
    assert posted[4:] == [
        "operation after bind",
        "operation after invalidate",
        "operation after bind another",
    ]


@pytest.mark.parametrize("size", [1, 4096, 100_000, 3 * MIB])
async def test_read(net: Net, size):
    client, server = await net.pair()
    text = (Pattern().take(MIB) * 3)[:size]
    with allocate(server, size) as mr:
        memoryview(mr)[:] = text
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            assert await remote.read(0, size) == text
            assert await remote.read() == text
            assert await remote.read(size // 2) == text[size // 2 :]
            assert await remote.read(0, 0) == b""
            buffer = bytearray(size)
            assert await remote.read_into(buffer) == size
            assert buffer == text


@pytest.mark.embedded_only("an adapter's requests are not executed by our CPUs")
@pytest.mark.skipif(BY_TCP, reason="by TCP, a poll of the CQ may carry all that the sockets have")
@pytest.mark.parametrize("way", ["read", "write"])
async def test_the_loop_runs_while_much_is_moved(net: Net, way):
    client, server = await net.pair()
    size = 16 * MIB
    with allocate(server, size) as mr, allocate(client, size, AccessFlags.LOCAL_WRITE) as ours:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            moving = asyncio.ensure_future(remote.read_into(ours) if way == "read" else remote.write(0, ours))
            turns = 0
            while not moving.done():
                await asyncio.sleep(0)
                turns += 1
            await moving
    assert turns > 20  # there were three when the loop's thread copied


@pytest.mark.parametrize("size", [1, 4096, 100_000, 3 * MIB])
async def test_write(net: Net, size):
    client, server = await net.pair()
    text = (Pattern().take(MIB) * 3)[:size]
    with allocate(server, size + 20) as mr:
        async with server.transport.offer(mr, access="write"):
            remote = await offered(client)
            await remote.write(10, text)
            assert bytes(mr) == bytes(10) + text + bytes(10)
            await remote.write(0, bytearray(b"0123456789"))
            await remote.write(5, b"")
            assert bytes(mr)[:10] == b"0123456789"


def pages_present(memory: mmap.mmap) -> int:
    """How many pages the kernel has provided."""
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    first = ctypes.c_ubyte.from_buffer(memory)
    at = ctypes.c_void_p(ctypes.addressof(first))
    assert not ctypes.CDLL(None).mincore(at, ctypes.c_size_t(len(memory)), pages)
    return sum(page & 1 for page in pages)


@pytest.mark.embedded_only("an adapter pins all pages")
async def test_an_offer_does_not_look_at_each_page(net: Net):
    """Which takes as long as a good part of the READ."""
    client, server = await net.pair()
    with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        async with server.transport.offer(memory, access="read,write"):
            remote = await offered(client)
            assert pages_present(memory) == 0
            assert await remote.read(4 * MIB, 10) == bytes(10)
            await remote.write(5 * MIB, b"written")
            assert 0 < pages_present(memory) < 8 * MIB // mmap.PAGESIZE
        assert memory[5 * MIB : 5 * MIB + 8] == b"written\0"


@pytest.mark.embedded_only("an adapter pins all pages")
async def test_a_file_that_was_shortened_is_on_offer(net: Net):
    """It ends this connection when the peer reads what is not there, and hurts nobody else."""
    client, server = await net.pair()
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * MIB)
        with mmap.mmap(file.fileno(), 8 * MIB) as memory:
            file.truncate(MIB)
            async with server.transport.offer(memory, access="read"):
                remote = await offered(client)
                assert await remote.read(0, 10) == bytes(10)
                with pytest.raises(OSError):
                    await remote.read(4 * MIB, 10)
    other, _ = await net.pair()
    assert not other.transport.is_closing()


@pytest.mark.parametrize("kind", [bytearray, rdmanet.alloc, lambda n: memoryview(array.array("B", bytes(n)))])
async def test_a_buffer_is_registered_for_the_block(net: Net, kind):
    client, server = await net.pair()
    memory = kind(1000)
    with memoryview(memory) as view:
        view[:5] = b"owner"
    async with server.transport.offer(memory, access="read,write"):
        remote = await offered(client)
        assert await remote.read(0, 5) == b"owner"
        await remote.write(5, b"guest")
        with memoryview(memory) as view:
            assert view[:10] == b"ownerguest"
        if kind is bytearray:
            with pytest.raises(BufferError):
                memory.clear()
    if kind is bytearray:
        memory.clear()


async def test_a_read_only_buffer_is_for_reading(net: Net):
    client, server = await net.pair()
    async with server.transport.offer(b"constant"):
        assert await (await offered(client)).read() == b"constant"
    with pytest.raises(BufferError):
        async with server.transport.offer(b"constant", access="write"):
            pass


async def test_a_buffer_is_free_when_a_cancelled_revocation_is_done(net: Net):
    """Who is cancelled as he leaves leaves the buffer registered until the peer has let go."""
    client, server = await net.pair()
    memory = bytearray(4 * MIB)

    async def offer() -> None:
        async with server.transport.offer(memory):
            await asyncio.Event().wait()

    (task,) = await begin(offer())
    remote = await offered(client)
    reads = await begin(*(remote.read() for _ in range(20)))
    (binding,) = server.transport._life.regions._bindings
    task.cancel()
    await asyncio.sleep(0)  # a turn: the first ends the block, the second the wait for the peer
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await binding.over
    memory.clear()
    await asyncio.gather(*reads, return_exceptions=True)


async def test_memory_is_registered_once(net: Net):
    """What is passed again as the same memoryview, or is of a region of the domain; see _pyx/registration.pxi."""
    client, server = await net.pair()
    cache = client.transport.engine.registrations
    with allocate(server, 1000) as mr, allocate(client, 1000, AccessFlags.LOCAL_WRITE) as ours:
        memoryview(mr)[:] = bytes(range(250)) * 4
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            memory = bytearray(1000)
            view = memoryview(memory)
            before = cache.stats()
            for i in range(10):
                assert await remote.read_into(view) == 1000
                assert memory == bytes(mr)
                memory[0] = i
                await remote.write(0, view)
                assert bytes(mr) == memory
            assert cache.hits == before["hits"] + 19
            assert cache.misses == before["misses"] + 1
            with memoryview(ours) as region:
                assert await remote.read_into(region[10:20], 10) == 10
                assert region[10:20] == memory[10:20]
            assert await remote.read_into(ours) == 1000
            assert bytes(ours) == memory
            await remote.write(0, ours)
            assert cache.misses == before["misses"] + 1
            view.release()
            memory.extend(b"it can be resized")
            assert await remote.read_into(memory[:1000]) == 1000
            assert await remote.read() == bytes(mr)
            with memoryview(ours) as region, region.toreadonly() as read_only:
                for buffer in (b"x" * 10, read_only):
                    with pytest.raises(TypeError, match="read-only"):
                        await remote.read_into(buffer)
            assert cache.misses == before["misses"] + 3
    del view
    assert cache.stats()["entries"] == before["entries"]


async def test_through_another_process(net: Net):
    peer = net.spawn("offers.py")
    client = await net.connect(await peer.port())
    with allocate(client, 64) as mr:
        mr_view = memoryview(mr)
        mr_view[:1] = b"n"
        mr_view.release()
        async with client.transport.offer(mr, name="n"):
            peer.say("read 1")
            assert await peer.expect("read") == ["1"]


async def test_bounds(net: Net):
    client, server = await net.pair()
    with allocate(server, 100) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            for offset, length in [(0, 101), (100, 1), (-1, 1), (50, -1), (1 << 63, 1), (101, 0)]:
                with pytest.raises(IndexError):
                    await remote.read(offset, length)
            for offset, data in [(0, bytes(101)), (100, b"x"), (-1, b"x")]:
                with pytest.raises(IndexError):
                    await remote.write(offset, data)
            with pytest.raises(IndexError):
                await remote.read_into(bytearray(101))
            assert await remote.read(100, 0) == b""
            assert await remote.read(99, 1) == b"\0"


async def test_memory_on_offer_cannot_be_closed(net: Net):
    """Nor can it be registered anew with other memory or other rights, until the block has ended."""
    client, server = await net.pair()
    mr = allocate(server, 4096)
    mr[:5] = b"still"
    async with server.transport.offer(mr, access="read"):
        remote = await offered(client)
        for change in (mr.close, lambda: mr.rereg(access=AccessFlags.LOCAL_WRITE)):
            with pytest.raises(OSError, match="still offered to a peer") as caught:
                change()
            assert caught.value.errno == errno.EBUSY
        assert await remote.read(0, 5) == b"still"
    mr.close()


@pytest.mark.not_on_siw("ends the connection without a verdict")
async def test_memory_that_is_gone_too_early(net: Net):
    """A read after the memory was taken back fails with its address, and the connection ends on both sides."""
    client, server = await net.pair()
    with allocate(server, 4096) as mr:
        mr[100:150] = b"m" * 50
        async with server.transport.offer(mr, access="read"):
            remote = await offered(client)
            mine = OfferedMemory.of(client.transport._life.regions, RemoteRegion(remote._region.region))
            assert await mine.read(100, 50) == b"m" * 50
        with pytest.raises(rdmanet.RemoteAccessError) as caught:
            await mine.read(100, 50)
        assert isinstance(await server.until_lost(), ConnectionError)
        assert (caught.value.address, caught.value.length) == (mr.address + 100, 50)
    assert caught.value.rkey == remote.rkey
    assert caught.value.opcode == "RDMA_READ"
    assert await client.until_lost() is caught.value


async def test_access_is_what_was_offered(net: Net):
    client, server = await net.pair()
    with allocate(server, 100) as mr:
        async with server.transport.offer(mr, access="read", name="r"):
            async with server.transport.offer(mr, access="write", name="w"):
                await offered(client, 2)
                by_name = {remote.name: remote for remote in client.offered}
                await by_name["r"].read()
                await by_name["w"].write(0, b"x")
                with pytest.raises(PermissionError):
                    await by_name["r"].write(0, b"x")
                with pytest.raises(PermissionError):
                    await by_name["w"].read()
    client.transport.write(b"fine")
    await server.until_received(4)


REMOTE_READ, REMOTE_WRITE = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE
NOT_TO_BE_OFFERED = [
    (OFFERABLE, {"access": "execute"}, "execute"),
    (OFFERABLE, {"access": AccessFlags.LOCAL_WRITE}, "no remote rights"),
    (OFFERABLE, {"access": AccessFlags(0)}, "no remote rights"),
    (AccessFlags.MW_BIND, {"access": "write"}, "without AccessFlags.LOCAL_WRITE"),
    (OFFERABLE | REMOTE_READ, {}, "remote rights of its own.*Register it with AccessFlags.MW_BIND"),
    (OFFERABLE | REMOTE_WRITE, {"access": "write"}, "remote rights of its own"),
    (OFFERABLE, {"revoke_timeout": None}, "revoke_timeout is None"),
    (OFFERABLE, {"revoke_timeout": -1}, "revoke_timeout is -1"),
    (OFFERABLE, {"revoke_timeout": float("inf")}, "revoke_timeout is inf"),
    (OFFERABLE, {"revoke_timeout": float("nan")}, "revoke_timeout is nan"),
    (OFFERABLE, {"name": "n" * 256}, "its name has 256 bytes"),
]


@pytest.mark.parametrize(("access", "options", "why"), NOT_TO_BE_OFFERED)
async def test_what_cannot_be_offered(net: Net, access, options, why):
    """The caller is told, and the connection goes on."""
    client, server = await net.pair()
    with allocate(client, 100, access) as mr:
        with pytest.raises(ValueError, match=why):
            async with client.transport.offer(mr, **options):
                pass
    client.transport.write(b"fine")
    await server.until_received(4)


@pytest.mark.not_on_iwarp("has no memory windows")
async def test_memory_that_no_window_can_be_bound_to(net: Net):
    client, _ = await net.pair()
    with allocate(client, 100, AccessFlags.LOCAL_WRITE) as mr:
        with pytest.raises(ValueError, match="without AccessFlags.MW_BIND"):
            async with client.transport.offer(mr):
                pass


async def test_memory_of_another_domain(net: Net):
    client, _ = await net.pair()
    with PD(client.transport.get_extra_info("rdma_pd").context) as pd, pd.alloc_mr(100, OFFERABLE) as mr:
        with pytest.raises(ValueError, match="another protection domain"):
            async with client.transport.offer(mr):
                pass


async def test_use_after_revocation_is_refused_and_the_stream_lives(net: Net):
    client, server = await net.pair(server=Echo)
    with allocate(server, 100) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            await remote.read()
    assert remote.revoked
    assert client.revoked == [remote]
    for use in (remote.read(), remote.read_into(bytearray(1)), remote.write(0, b"x"), remote.read(0, 0)):
        with pytest.raises(rdmanet.RegionRevokedError):
            await use
    assert isinstance(rdmanet.RegionRevokedError(errno.EACCES, ""), OSError)
    client.transport.write(b"alive")
    assert await client.until_received(5) == b"alive"


async def test_revocation_waits_for_operations_under_way(net: Net):
    """What the peer had begun ends well before the block is left, however much it is."""
    client, server = await net.pair()
    size = 4 * MIB
    with allocate(server, size) as mr:
        memoryview(mr)[:] = b"s" * size
        async with server.transport.offer(mr):
            remote = await offered(client)
            reads = await begin(*(remote.read() for _ in range(20)))
        for read in reads:
            try:
                assert await read == b"s" * size
            except rdmanet.RegionRevokedError:
                pass  # it had not begun


async def test_a_cancelled_operation_keeps_its_buffer_until_it_ends(net: Net):
    client, server = await net.pair(server=Echo)
    size = MIB
    with allocate(server, size) as mr:
        memoryview(mr)[:] = b"o" * size
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            for _ in range(10):
                uses = [remote.read(), remote.write(0, b"w" * size), remote.read(size // 2)]
                uses = await begin(*uses)
                for use in uses:
                    use.cancel()
                await asyncio.gather(*uses, return_exceptions=True)
            # Nothing was written but what the caller gave, also when it was freed long ago.
            assert set(await remote.read()) <= {*b"ow"}
    client.transport.write(b"alive")
    assert await client.until_received(5) == b"alive"


@pytest.mark.long
@pytest.mark.limit(100)
async def test_many_operations_at_once(net: Net):
    """More than the send queue takes: they queue, and the stream flows between them."""
    client, server = await net.pair(server=Echo)
    with allocate(server, 1000 * 64) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            await asyncio.gather(*(remote.write(64 * n, b"%064d" % n) for n in range(1000)))
            client.transport.write(b"between")
            texts = await asyncio.gather(*(remote.read(64 * n, 64) for n in range(1000)))
            assert texts == [b"%064d" % n for n in range(1000)]
            assert await client.until_received(7) == b"between"


async def test_operations_while_neither_side_reads(net: Net):
    """One-sided means one-sided: full rings and paused applications do not hold it up."""
    client, server = await net.pair()
    client.transport.pause_reading()
    server.transport.pause_reading()
    for side in (client, server):
        while not side.writing_paused:
            side.transport.write(bytes(MIB))
    with allocate(server, 100) as mr:
        async with server.transport.offer(mr, access="read,write"):
            remote = await offered(client)
            await remote.write(0, b"through")
            assert await remote.read(0, 7) == b"through"


async def test_both_sides_offer_at_once(net: Net):
    client, server = await net.pair()
    with allocate(server, 100) as of_server, allocate(client, 100) as of_client:
        async with server.transport.offer(of_server, access="write"):
            async with client.transport.offer(of_client, access="write"):
                await (await offered(client)).write(0, b"to the server")
                await (await offered(server)).write(0, b"to the client")
        assert bytes(of_server)[:13] == b"to the server"
        assert bytes(of_client)[:13] == b"to the client"


@pytest.mark.long
@pytest.mark.limit(100)
async def test_offers_by_the_thousand_in_turn(net: Net):
    """Credit frames are few and bounded; a thousand offers and revocations pass through them."""
    client, server = await net.pair()
    with allocate(server, 100) as mr:
        for number in range(1000):
            async with server.transport.offer(mr, name=str(number)):
                await offered(client, number + 1)
    await client.until(lambda: len(client.revoked) == 1000)
    assert [remote.name for remote in client.offered] == [str(number) for number in range(1000)]


async def test_an_offer_taken_back_before_it_went_is_never_heard_of(net: Net):
    client, server = await net.pair()
    with allocate(server, 100) as mr:
        for _ in range(1000):
            async with server.transport.offer(mr):
                pass
        async with server.transport.offer(mr, name="last"):
            await offered(client)
    assert [remote.name for remote in client.offered] == ["last"]


@pytest.mark.long
@pytest.mark.limit(100)
async def test_as_many_offers_as_may_be_to_a_stalled_peer(net: Net):
    """They queue here while the peer is stopped; when it continues, it gets all offers and then all revocations."""
    count = ALIVE_MAX
    peer = net.spawn("offers.py")
    client = await net.connect(await peer.port())
    client.transport.write(b"x")
    peer.say("offered 0")
    await peer.expect("offered")
    peer.stop()
    leave = asyncio.Event()
    with allocate(client, 64) as mr:
        memoryview(mr)[:1] = b"n"

        async def offer(number: int) -> None:
            async with client.transport.offer(mr, name=f"n{number}"):
                await leave.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(offer(number))
            # By TCP none of them begins now: making a key waits behind what was sent before.
            client.transport.write(b"y" * 1000)
            # Another connection of this process does not notice.
            other, _ = await net.pair(server=Echo)
            other.transport.write(b"hello")
            await other.until_received(5)
            peer.send_signal(signal.SIGCONT)
            peer.say(f"offered {count}")
            assert await peer.expect("offered") == [str(count)]
            peer.say(f"read {count}")
            assert await peer.expect("read") == [str(count)]
            leave.set()
        peer.say(f"revoked {count}")
        assert await peer.expect("revoked") == [str(count)]


async def test_one_offer_too_many(net: Net):
    """The caller is told, and the connection goes on."""
    client, server = await net.pair()
    async with contextlib.AsyncExitStack() as stack:
        mr = stack.enter_context(allocate(server, 100))
        for _ in range(ALIVE_MAX):
            await stack.enter_async_context(server.transport.offer(mr))
        with pytest.raises(rdmanet.RdmaError, match=f"{ALIVE_MAX} regions are on offer to this peer"):
            await stack.enter_async_context(server.transport.offer(mr))
        await offered(client, ALIVE_MAX)
    await client.until(lambda: len(client.revoked) == ALIVE_MAX)
    async with contextlib.AsyncExitStack() as stack:
        mr = stack.enter_context(allocate(server, 100))
        await stack.enter_async_context(server.transport.offer(mr, name="again"))
        assert (await offered(client, ALIVE_MAX + 1)).name == "again"


async def test_offers_to_a_protocol_that_knows_nothing_of_them(net: Net):
    class Plain(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(data)

    client, server = await net.pair(server=Plain)
    with allocate(client, 100) as mr:
        for _ in range(5):
            async with client.transport.offer(mr):
                pass
    client.transport.write(b"echo")
    assert await client.until_received(4) == b"echo"
    client.transport.abort()


async def test_the_connection_ends_within_the_block(net: Net):
    """Nobody is left to acknowledge: leaving does not wait."""
    client, server = await net.pair()
    with allocate(server, 100) as mr:
        async with server.transport.offer(mr):
            remote = await offered(client)
            client.transport.abort()
            await server.until_lost()
    await client.until_lost()
    assert remote.revoked
    with pytest.raises(OSError):
        await remote.read()


async def test_the_connection_ends_during_the_revocation(net: Net):
    peer = net.spawn("offers.py")
    client = await net.connect(await peer.port())
    with allocate(client, 100) as mr:
        async with client.transport.offer(mr, name="\0"):
            peer.say("read 1")
            await peer.expect("read")
            peer.stop()
            net.loop.call_soon(net.loop.call_soon, peer.send_signal, signal.SIGKILL)
    assert isinstance(await client.until_lost(), OSError)


async def test_operations_under_way_when_the_connection_ends(net: Net):
    """Their waiters get an error, not silence."""
    client, server = await net.pair()
    with allocate(server, 4 * MIB) as mr:
        async with server.transport.offer(mr):
            remote = await offered(client)
            reads = await begin(*(remote.read() for _ in range(100)))
            client.transport.abort()
            for outcome in await asyncio.gather(*reads, return_exceptions=True):
                assert isinstance(outcome, bytes | OSError), outcome


@pytest.mark.parametrize("windows", [True, False])
async def test_offers_after_the_end(net: Net, monkeypatch, windows):
    if not windows:
        monkeypatch.setattr(bindings, "has_windows", lambda _: False)
    client, _ = await net.pair()
    with allocate(client, 100) as mr:
        client.transport.close()
        await client.until_lost()
        with pytest.raises((OSError, RuntimeError)):
            async with client.transport.offer(mr):
                pass
