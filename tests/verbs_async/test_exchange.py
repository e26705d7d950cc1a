"""exchange(): both are connected or neither goes on, over any stream, whatever the other end says."""

import asyncio
import collections

import pytest
from loops import on_every_loop

import rdmanet
from rdmanet.errors import ProtocolError
from rdmanet.verbs import CQ, QP, AccessFlags, QPCap, QPInfo, QPInitAttr, QPState, QPType
from rdmanet.verbs_async import exchange

CAP = {"max_send_wr": 4, "max_recv_wr": 4}
CONNECTED = b"connected\n"

pytestmark = pytest.mark.usefixtures("by_hand")


class Stream:
    """One direction of a connection, with a writer's and a reader's face, on any loop."""

    def __init__(self, loop):
        self.loop = loop
        self.data = bytearray()
        self.ended = False

    def write(self, data):
        self.data += data

    async def drain(self):
        await self.loop.turn()

    async def readexactly(self, n):
        while len(self.data) < n:
            if self.ended:
                raise EOFError
            await self.loop.turn()
        data = bytes(self.data[:n])
        del self.data[:n]
        return data


class Sides(collections.namedtuple("Sides", "a b a_to_b b_to_a")):
    @classmethod
    def made(cls, loop, verbs):
        cq = verbs.cq(loop)
        pairs = (verbs.keep(cq.create_qp(verbs.pd, QPCap(**CAP))) for _ in range(2))
        return cls(*pairs, Stream(loop), Stream(loop))

    def a_exchanges(self, **options):
        return exchange(self.a, self.b_to_a, self.a_to_b, **options)

    def b_exchanges(self, **options):
        return exchange(self.b, self.a_to_b, self.b_to_a, **options)


async def hello(loop, verbs, a, b):
    mr = verbs.mr()
    mr[:5] = b"hello"
    receiving = loop.spawn(b.recv(mr.at[100:200]))
    await loop.turn()
    await a.send(mr.at[:5])
    assert (await receiving.join()).byte_len == 5
    assert mr[100:105] == b"hello"


@on_every_loop
async def test_both_are_connected(loop, verbs):
    sides = Sides.made(loop, verbs)
    a, b, a_to_b, _ = sides
    exchanging = loop.spawn(sides.a_exchanges(psn=7, mtu=2048))
    of_a = await sides.b_exchanges(mtu=1024, access=AccessFlags.REMOTE_WRITE)
    of_b = await exchanging.join()
    assert (of_a.qp_num, of_a.psn, of_a.mtu) == (a.qp.qp_num, 7, 2048)
    assert (of_b.qp_num, of_b.mtu) == (b.qp.qp_num, 1024)
    assert [side.qp.query()[0].path_mtu.bytes for side in (a, b)] == [1024, 1024]
    assert b.qp.query()[0].qp_access_flags & AccessFlags.REMOTE_WRITE
    assert not a_to_b.data, "all that was written has been read"
    await hello(loop, verbs, a, b)
    await hello(loop, verbs, b, a)


@on_every_loop
async def test_nobody_goes_on_before_the_other(loop, verbs):
    sides = Sides.made(loop, verbs)
    exchanging = loop.spawn(sides.a_exchanges())
    sides.b_to_a.write(bytes(sides.b.qp.info()))
    while sides.a.qp.state != QPState.RTS:
        await loop.turn()
    for _ in range(10):
        await loop.turn()
    assert not exchanging.done, "b has not said that it is connected"
    sides.b_to_a.write(CONNECTED)
    assert (await exchanging.join()).qp_num == sides.b.qp.qp_num


@on_every_loop
async def test_the_stream_stays_the_programs(loop, verbs):
    """What comes after the exchange is not touched, even when it is there before the end."""
    sides = Sides.made(loop, verbs)
    sides.b_to_a.write(bytes(sides.b.qp.info()) + CONNECTED + b"more")
    await sides.a_exchanges()
    assert await sides.b_to_a.readexactly(4) == b"more"


GOOD = bytes(QPInfo(5, 6, bytes(10) + b"\xff\xff\x7f\0\0\1"))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        bytes(200),
        b"\xff" * 200,
        b"0000:000011:8f3a21:00000000000000000000ffff0a000001\0",
        GOOD[:-2] + b"\3\xe8",  # an MTU of 1000
        GOOD[:16] + b"\1" + GOOD[17:],  # a number of 25 bits
    ],
)
@on_every_loop
async def test_strangers(loop, verbs, said):
    sides = Sides.made(loop, verbs)
    sides.b_to_a.write(said)
    with pytest.raises(ProtocolError, match="is not a QPInfo"):
        await sides.a_exchanges()
    assert sides.a.qp.state == QPState.RESET
    assert sides.b_to_a.data == said[len(GOOD) :], "no more was read than a QPInfo has"


@on_every_loop
async def test_another_word(loop, verbs):
    sides = Sides.made(loop, verbs)
    sides.b_to_a.write(bytes(sides.b.qp.info()) + b"disconnect")
    with pytest.raises(ProtocolError, match="b'disconnect' instead of"):
        await sides.a_exchanges()


@pytest.mark.parametrize("words", [b"", GOOD[:27], "info", "info and a part"])
@on_every_loop
async def test_the_peer_leaves(loop, verbs, words):
    sides = Sides.made(loop, verbs)
    if isinstance(words, str):
        words = bytes(sides.b.qp.info()) + (CONNECTED[:9] if "part" in words else b"")
    sides.b_to_a.write(words)
    sides.b_to_a.ended = True
    with pytest.raises(ConnectionResetError, match="before both"):
        await sides.a_exchanges()


@on_every_loop
async def test_cancelling_leaves_closing(loop, verbs):
    sides = Sides.made(loop, verbs)
    exchanging = loop.spawn(sides.a_exchanges())
    await loop.turn()
    exchanging.cancel()
    await exchanging.join()
    sides.a.close()


@pytest.mark.not_on_iwarp("has no datagrams")
async def test_datagrams_have_no_peer(verbs):
    class Peer:
        async def readexactly(self, n):
            return GOOD

        def write(self, data):
            pass

        async def drain(self):
            pass

    cq = verbs.keep(CQ(verbs.context, 16))
    qp = verbs.keep(QP(verbs.pd, QPInitAttr(cq, cq, QPCap(**CAP), QPType.UD)))
    with pytest.raises(ValueError, match="a datagram queue pair is not connected"):
        await exchange(qp, Peer(), Peer())


async def tcp(callback, address):
    server = await asyncio.start_server(callback, "127.0.0.1", 0)
    return server, await asyncio.open_connection(*server.sockets[0].getsockname())


async def rdma(callback, address):
    server = await rdmanet.start_rdma_stream_server(callback, address, 0)
    return server, await rdmanet.open_rdma_connection(*server.sockets[0].getsockname())


@pytest.mark.parametrize("over", [tcp, rdma])
async def test_streams_of_asyncio(verbs, address, over):
    """Plain queue pairs, introduced over TCP, or over a stream that is RDMA itself."""
    cq = verbs.keep(CQ(verbs.context, 16))
    a, b = (verbs.keep(QP(verbs.pd, QPInitAttr(cq, cq, QPCap(**CAP)))) for _ in range(2))
    served = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        try:
            served.set_result(await exchange(b, reader, writer))
        finally:
            writer.close()
            await writer.wait_closed()

    server, (reader, writer) = await over(serve, address)
    async with server, asyncio.timeout(100):
        peer = await exchange(a, reader, writer)
        assert (peer.qp_num, (await served).qp_num) == (b.qp_num, a.qp_num)
        assert a.state == b.state == QPState.RTS
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
