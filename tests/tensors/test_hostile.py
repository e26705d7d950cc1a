"""Strangers and liars: descriptors that are replayed or changed, peers that speak otherwise or keep what has ended."""

import asyncio
import contextlib
import random
import secrets
from typing import Any, cast

import msgspec
import pytest
from places import HOST

import rdmanet
from rdmanet import tensors
from rdmanet.credit import OtherVersionError
from rdmanet.errors import ProtocolError
from rdmanet.stream.bindings import Binding
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.stream.regions import Regions
from rdmanet.tensors import messages
from rdmanet.tensors.link import KEYS_MOST, Dialled, Served
from rdmanet.tensors.messages import Claim, Hello, Notify, Refused, Release, Why, packed
from tests.support.waiting import loop_turns, until_seen

ID = b"stranger's number"[:16]


def changed(descriptor: bytes, **fields: object) -> tensors.Descriptor:
    return msgspec.structs.replace(tensors.Descriptor.from_bytes(descriptor), **fields)


async def test_a_descriptor_that_was_changed(owner: tensors.Endpoint, peer: tensors.Peer):
    """Its owner's device enforces what was granted, whatever the descriptor says."""
    theirs = bytearray(b"secret" + b"public" + b"secret")
    async with owner.register(theirs) as memory:
        described = memory.describe(slice(6, 12))
        mine = bytearray(6)
        await peer.read(described, into=mine)
        assert mine == b"public"
        for wrong, error, says in (
            (changed(described, offset=1), IndexError, "^read: 6 bytes at offset 1 are not within"),
            (changed(described, offset=1 << 40), IndexError, "are not within"),
            (
                changed(described, grant=secrets.token_bytes(16)),
                rdmanet.RegionRevokedError,
                "does not grant this",
            ),
            (
                changed(described, endpoint=bytes(16)),
                tensors.DescriptorError,
                "is of memory of endpoint 00000000, and",
            ),
        ):
            with pytest.raises(error, match=says):
                await peer.read(wrong, into=mine)
        with pytest.raises(PermissionError, match="lacks 'write'"):
            await peer.write(b"change", changed(described, mode="rw"))
        with pytest.raises(IndexError):
            await peer.read(changed(described, nbytes=7), into=bytearray(7))
        assert peer.statistics()["connections"] == 1
    assert theirs == b"secretpublicsecret"


async def test_changed_bytes_of_a_descriptor_reach_nothing_else(owner: tensors.Endpoint, peer: tensors.Peer):
    """Whatever they say, they are refused by one of these errors, or mean what was granted."""
    refused = (tensors.DescriptorError, rdmanet.RegionRevokedError, ValueError, IndexError, PermissionError)
    chance = random.Random(47)
    theirs = bytearray(chance.randbytes(96))
    before, came = bytes(theirs), 0
    async with owner.register(theirs) as memory:
        described = memory.describe(slice(32, 64))
        for _ in range(1000):
            wrong = bytearray(described)
            for _ in range(chance.choice((1, 1, 2, 4))):
                wrong[chance.randrange(len(wrong))] = chance.randrange(256)
            mine = bytearray(32)
            try:
                await peer.read(bytes(wrong), into=mine)
            except refused:
                assert mine == bytes(32)
            else:
                assert mine == before[32:64]
                came += 1
            with pytest.raises(refused):
                await peer.write(bytes(32), bytes(wrong))
        await peer.read(described, into=mine)
        assert theirs == before and came < 100
    assert peer.statistics()["connections"] == 1


async def test_another_endpoints_descriptor(
    owner: tensors.Endpoint, user: tensors.Endpoint, peer: tensors.Peer
):
    async with user.register(bytearray(4)) as memory:
        with pytest.raises(tensors.DescriptorError, match="^read: the descriptor is of memory of endpoint"):
            await peer.read(memory.describe(), into=bytearray(4))


async def test_a_descriptor_that_is_used_after_its_end(owner: tensors.Endpoint, user: tensors.Endpoint):
    """By one who has never used it, by one who has, and when the same memory is granted again."""
    async with owner.register(bytearray(4)) as memory, tensors.open(HOST) as late:
        peer, other = await user.connect(owner.address()), await late.connect(owner.address())
        old = memory.describe()
        await peer.read(old, into=bytearray(4))
        await memory.revoke()
        new = memory.describe()
        for each in (peer, other, peer):
            with pytest.raises(rdmanet.RegionRevokedError):
                await each.read(old, into=bytearray(4))
            await each.read(new, into=bytearray(4))


async def test_a_user_that_keeps_its_key_reads_nothing(owner: tensors.Endpoint, user: tensors.Endpoint):
    """It does not let go, and reads by the key that it was told, past all checks of its own side."""
    peer = await user.connect(owner.address())
    theirs = bytearray(b"before")
    async with owner.register(theirs) as memory:
        described = memory.describe(mode="rw")
        await peer.read(described, into=bytearray(6))
        link = peer._link
        assert link is not None
        remote = link.claimed(tensors.Descriptor.from_bytes(described).grant)
        assert remote is not None
        link.regions.begin_use(remote._region)  # so it is never acknowledged
        await memory.revoke()
        assert not memory.held()
        theirs[:] = b"secret"
        remote._region.revoked = False
        mine = bytearray(b"nothing")
        with pytest.raises(OSError):
            await remote.read_into(memoryview(mine)[:6])
        with pytest.raises(OSError):
            remote._region.revoked = False
            await remote.write(0, b"change")
        assert (mine, theirs) == (b"nothing", b"secret")
        link.regions.end_use(remote._region)
        await until_seen(
            lambda: not peer._is_connected()
        )  # the device has refused, which ends the connection
        with pytest.raises(rdmanet.RegionRevokedError):
            await peer.read(described, into=bytearray(6))


class Stranger(asyncio.Protocol):
    """Says what it is told, and remembers what it hears."""

    def __init__(self, *words: bytes) -> None:
        self.words = words
        self.heard: list[messages.Message] = []
        self.framer = messages.Framer()
        self.offers: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        for word in self.words:
            transport.write(word)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.heard += self.framer.feed(data)

    def region_offered(self, remote: rdmanet.OfferedMemory) -> None:
        self.offers.append(remote.name)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.set_result(exc)

    def name(self) -> object:
        return self.transport.get_extra_info("sockname")

    def answers(self) -> list[messages.Message]:
        """What it has heard, from the Hello on."""
        return self.heard


async def stranger(endpoint: tensors.Endpoint, *words: bytes) -> Stranger:
    address = tensors.Address.from_bytes(endpoint.address())
    _, protocol = await rdmanet.create_rdma_connection(lambda: Stranger(*words), address.host, address.port)
    return protocol


HELLO = packed(Hello(1, ID))
RUBBISH = [
    b"GET / HTTP/1.1\r\n\r\n",
    packed(Claim(1, ID)),
    packed(Hello(2, ID)),
    HELLO + packed(Hello(1, ID)),
    HELLO + packed(Refused(1, Why.ENDED)),
    HELLO + b"\0\0\0\x01\xc1",
    HELLO + b"\0\0\0\0",
    HELLO + (messages.MESSAGE_BYTES_MOST + 1).to_bytes(4, "big"),
    HELLO + b"\0\0\0\x05" + msgspec.msgpack.encode([2, 1, b"x"])[:5],
    HELLO + b"\0\0\0\x08" + msgspec.msgpack.encode([5, -1, b"abcde"])[:8],
]


@pytest.mark.parametrize("words", RUBBISH, ids=range(len(RUBBISH)))
async def test_who_speaks_otherwise_is_cut_off(
    owner: tensors.Endpoint, peer: tensors.Peer, words: bytes, caplog: pytest.LogCaptureFixture
):
    one = await stranger(owner, words)
    await one.lost
    assert "the peer broke the protocol" in caplog.text
    async with owner.register(bytearray(b"text")) as memory:  # others go on
        mine = bytearray(4)
        await peer.read(memory.describe(), into=mine)
        assert mine == b"text"


async def test_an_owner_of_another_version(
    owner: tensors.Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Each side hears the other's Hello and cuts it off; both say both versions."""

    def connection_made(self: Served, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(RdmaTransport, transport)
        self.say(Hello(2, self._ours))

    def greeted(self: Served, message: messages.Message) -> None:
        assert isinstance(message, Hello)
        raise OtherVersionError(f"the peer speaks version {message.version} of this protocol, and not 2")

    monkeypatch.setattr(Served, "connection_made", connection_made)
    monkeypatch.setattr(Served, "_greeted", greeted)
    async with tensors.open(HOST) as endpoint:
        with pytest.raises(ConnectionResetError, match="speaks version 2 of this protocol, and not 1"):
            await endpoint.connect(owner.address())
    assert "the peer speaks version 2 of this protocol, and not 1" in caplog.text
    await until_seen(lambda: "the peer speaks version 1 of this protocol, and not 2" in caplog.text)


async def test_claims_of_a_stranger(owner: tensors.Endpoint, caplog: pytest.LogCaptureFixture):
    """Guesses are refused; what it has no claim to does not concern anybody; no number is used twice."""
    async with owner.register(bytearray(4)) as memory:
        grant = tensors.Descriptor.from_bytes(memory.describe()).grant
        guesses = [packed(Claim(number, secrets.token_bytes(16))) for number in range(500)]
        others = [packed(Release(7)), packed(Notify(7, b"forged")), packed(Claim(1000, grant))]
        one = await stranger(owner, HELLO, *guesses, *others, packed(Notify(1000, b"it is not for writing")))
        await until_seen(lambda: one.offers)
        assert one.answers()[1:] == [Refused(number, Why.ENDED) for number in range(500)]
        assert one.offers == ["1000"]
        assert not owner.notifications()._waiting
        one.transport.write(packed(Claim(1000, grant)))  # type: ignore[attr-defined]
        await one.lost
    assert "the peer claims by the number 1000 twice" in caplog.text


async def test_more_claims_than_a_connection_can_have(owner: tensors.Endpoint):
    async with owner.register(bytearray(1000)) as memory:
        grants = [tensors.Descriptor.from_bytes(memory.describe(slice(i, i + 1))).grant for i in range(300)]
        claims = [packed(Claim(number, grant)) for number, grant in enumerate(grants)]
        one = await stranger(owner, HELLO, *claims)
        await until_seen(lambda: len(one.offers) == 256)
        assert one.answers()[1:] == [Refused(number, Why.TOO_MANY) for number in range(256, 300)]
        one.transport.abort()  # type: ignore[attr-defined]
        await one.lost
        await until_seen(lambda: not memory.held())


@pytest.mark.parametrize(
    "most",
    [
        64,
        pytest.param(
            KEYS_MOST,
            marks=pytest.mark.embedded_only("an emulated processor takes more than a second to end so many"),
        ),
    ],
)
async def test_claims_that_are_let_go_of_at_once(
    owner: tensors.Endpoint, monkeypatch: pytest.MonkeyPatch, most: int
):
    """Their keys take time to end, and count until then. A number may come again meanwhile."""
    alive: list[int] = []
    bind = Regions.bind

    def counted(self: Regions, *arguments: Any) -> Binding:
        binding = bind(self, *arguments)
        alive.append(len(self._bindings))
        return binding

    monkeypatch.setattr(Regions, "bind", counted)
    monkeypatch.setattr("rdmanet.tensors.link.KEYS_MOST", most)
    async with owner.register(bytearray(4)) as memory:
        grant = tensors.Descriptor.from_bytes(memory.describe()).grant
        pairs = [
            packed(Claim(number % 7, grant)) + packed(Release(number % 7)) for number in range(most + 100)
        ]
        one = await stranger(owner, HELLO, *pairs, packed(Claim(7, ID)))
        await until_seen(lambda: Refused(7, Why.ENDED) in one.answers())
        await until_seen(lambda: not memory.held())
        assert len(alive) >= most >= max(alive)
        again = [(packed(Claim(number, grant)), packed(Release(number))) for number in range(10, 13)]
        for claim, release in again:
            one.transport.write(claim + release + claim)  # type: ignore[attr-defined]
        await until_seen(lambda: {"10", "11", "12"} <= {*one.offers} and len(memory.held()) == 3)
        for _, release in again:
            one.transport.write(release)  # type: ignore[attr-defined]
        await until_seen(lambda: not memory.held())
        one.transport.abort()  # type: ignore[attr-defined]
        await one.lost


async def link_of(owner: tensors.Endpoint, one: Stranger) -> Served:
    def found() -> list[Served]:
        return [each for each in owner._links if each.transport.get_extra_info("peername") == one.name()]

    await until_seen(found)  # who connects can hear of it first
    return found()[0]


async def test_who_does_not_read_the_answers_is_not_heard(owner: tensors.Endpoint, peer: tensors.Peer):
    """Otherwise the answers to its claims pile up here."""
    one = await stranger(owner, HELLO)
    link = await link_of(owner, one)
    one.transport.pause_reading()  # type: ignore[attr-defined]
    claim = packed(Claim(1, ID))
    while link.transport.is_reading():
        assert link.transport.get_write_buffer_size() < 1 << 20
        one.transport.write(claim * 1000)  # type: ignore[attr-defined]
        await loop_turns()
    async with owner.register(bytearray(b"text")) as memory:  # others go on
        mine = bytearray(4)
        await peer.read(memory.describe(), into=mine)
        assert mine == b"text"
    one.transport.resume_reading()  # type: ignore[attr-defined]
    await until_seen(link.transport.is_reading)
    one.transport.abort()  # type: ignore[attr-defined]
    await one.lost


def feed(framer: messages.Framer, data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(framer.feed(data))


def test_random_bytes_are_refused_or_are_messages():
    chance = random.Random(9)
    words = [
        HELLO,
        packed(Claim(1, ID)),
        packed(Refused(2, Why.FAILED)),
        packed(Release(3)),
        packed(Notify(4, b"abc")),
    ]
    whole = b"".join(words)
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 2, 4))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        framer = messages.Framer()
        cut = chance.randrange(len(data))
        feed(framer, bytes(data[:cut]))
        feed(framer, bytes(data[cut:]))
        assert len(framer._bytes) <= len(data)


async def test_messages_come_in_any_pieces():
    words = [Hello(1, ID), Claim(1, ID), Notify(4, bytes(messages.NOTIFICATION_BYTES_MOST)), Release(3)]
    whole = b"".join(map(packed, words))
    for size in (1, 5, 1000, len(whole)):
        framer = messages.Framer()
        got = [message for at in range(0, len(whole), size) for message in framer.feed(whole[at : at + size])]
        assert got == words


async def test_an_owner_that_answers_otherwise(user: tensors.Endpoint, caplog: pytest.LogCaptureFixture):
    """It offers what nobody has asked for, refuses what nobody has claimed, and then speaks out of turn."""
    loop = asyncio.get_running_loop()

    class Liar(Served):
        def handle(self, message: messages.Message) -> None:
            assert isinstance(message, Claim)
            self.say(Refused(77, Why.ENDED))
            self.say(Refused(message.number, Why.FAILED) if spared else Claim(1, ID))

    spared = [True]
    server = await rdmanet.start_rdma_server(lambda: Liar(loop, ID, {}, lambda *_: None, set()), HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        peer = await user.connect(tensors.Address(1, ID, HOST, port))
        described = tensors.Descriptor(1, ID, bytes(16), "r", 0, 4)
        with pytest.raises(rdmanet.RdmaError, match="cannot put this memory on offer; its log says why"):
            await peer.read(described, into=bytearray(4))
        spared.clear()
        with pytest.raises(ConnectionResetError, match="a Claim from the side that accepted the connection"):
            await peer.read(described, into=bytearray(4))
        await peer.close()


async def test_offers_with_other_names_are_left_alone():
    link = Dialled(asyncio.get_running_loop(), ID)
    region = rdmanet.credit.Region(1, 4096, 10, 5, 4, "no number")
    remote = rdmanet.OfferedMemory.of(None, rdmanet.wire.offers.RemoteRegion(region))  # type: ignore[arg-type]
    link.region_offered(remote)
    link.region_revoked(remote)
    assert not link._claims
