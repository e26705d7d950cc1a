"""A peer that TCP reaches: connecting to it again costs little, but it is not taken for granted.

Each test connects at least twice, because the first connection is the one that finds out.
"""

import asyncio
import contextlib
import os
import socket
import struct
import sys

import pytest
from loop_harness import Echo, Recorder, fabric, plain_server, serving

import rdmanet
from rdmanet.loop import choice, connecting, doors
from tests.support.versions import WIRE


async def connect(port: int, host: str = "127.0.0.1", **options):
    return await asyncio.get_running_loop().create_connection(Recorder, host, port, **options)


async def reason(port: int, host: str = "127.0.0.1", **options) -> str:
    """Why the next connection is TCP's; "" if it is not."""
    transport, protocol = await connect(port, host, **options)
    transport.write(b"x")
    await protocol.until(lambda: protocol.data == b"x")
    transport.abort()
    assert fabric(transport) in ("tcp", "rdma")
    return transport.get_extra_info("fabric_reason") if fabric(transport) == "tcp" else ""


@pytest.fixture
def chooses(monkeypatch):
    """The addresses for which a choice was made from the beginning."""
    chosen = []
    original = choice.Chooser._choose

    def choose(self, host, place):
        chosen.append(place[0])
        return original(self, host, place)

    monkeypatch.setattr(choice.Chooser, "_choose", choose)
    return chosen


async def test_the_choice_is_made_once(chooses):
    server, port = await plain_server()
    first = await reason(port)
    assert first.startswith(doors.NOBODY)
    assert [await reason(port) for _ in range(10)] == [first] * 10
    assert len(chooses) == 1
    server.close()


async def test_of_a_name_too(chooses):
    """Patterns may be for the name, so what is known of its address says nothing of it."""
    server, port = await plain_server()
    options = {"family": socket.AF_INET}
    for _ in range(3):
        assert (await reason(port, "localhost", **options)).startswith(doors.NOBODY)
        assert (await reason(port)).startswith(doors.NOBODY)
    assert len(chooses) == 2
    rdmanet.patch_loop(asyncio.get_running_loop(), peers="auto !localhost")
    for _ in range(2):
        assert (await reason(port)).startswith(doors.NOBODY)
        assert "do not include it" in await reason(port, "localhost", **options)
    server.close()


async def test_of_a_socket_that_the_program_connects(chooses):
    loop = asyncio.get_running_loop()
    server, port = await plain_server()
    for _ in range(3):
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            transport, _ = await loop.create_connection(Recorder, sock=sock.dup())
            assert sock.getpeername() == ("127.0.0.1", port)
            transport.abort()
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        transport, _ = await loop.create_connection(Recorder, sock=sock)
        assert transport.get_extra_info("fabric_reason").startswith(doors.NOBODY)
        transport.abort()
    assert len(chooses) == 1
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        await loop.sock_connect(other, ("127.0.0.1", port))
        assert other.getpeername() == ("127.0.0.1", port)
    server.close()
    async with serving() as (_, port):
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        transport, _ = await loop.create_connection(Recorder, sock=sock)
        assert fabric(transport) == "rdma"
        transport.abort()


@pytest.mark.parametrize("address", [None, (), ("127.0.0.1",), ([], {}), ("127.0.0.1", [])])
async def test_a_socket_is_not_connected_to_what_is_no_address(address):
    with socket.socket() as sock:
        sock.setblocking(False)
        with pytest.raises((TypeError, ValueError, OSError, IndexError)):
            await asyncio.get_running_loop().sock_connect(sock, address)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
async def test_a_server_that_begins_to_offer_rdma_is_found_at_once(host, chooses):
    loop = asyncio.get_running_loop()
    with socket.socket() as reserved:  # so that nobody else takes the port in between
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        server = await loop._rdmanet.base.create_server(Echo, "127.0.0.1", port, reuse_port=True)
        for _ in range(2):
            assert (await reason(port)).startswith(doors.NOBODY)
        server.close()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:  # asyncio's own listeners on :: do not take IPv4
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if ":" in host:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, port))
            offering = await loop.create_server(Echo, sock=listener)
            assert await reason(port) == ""
            offering.close()
        server = await loop._rdmanet.base.create_server(Echo, "127.0.0.1", port, reuse_port=True)
        assert (await reason(port)).startswith(doors.NOBODY)
        server.close()


async def test_the_server_sees_nothing_but_the_client():
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for said in (b"first", b"second", b"third"):
            transport, _ = await connect(listener.getsockname()[1])
            accepted, _ = await loop._rdmanet.base.sock_accept(listener)
            with accepted:
                transport.write(said)
                transport.close()
                heard = b""
                while more := await loop._rdmanet.base.sock_recv(accepted, 100):
                    heard += more
                assert heard == said
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_who_is_excluded_meanwhile_is():
    server, port = await plain_server()
    for _ in range(2):
        assert (await reason(port)).startswith(doors.NOBODY)
    async with serving() as (_, offering):
        rdmanet.patch_loop(asyncio.get_running_loop(), peers="!*")
        for _ in range(2):
            assert "do not include it" in await reason(port)
            assert "do not include it" in await reason(offering)
        rdmanet.patch_loop(asyncio.get_running_loop(), peers="auto")
        assert await reason(offering) == ""
    server.close()


async def test_all_else_is_found_out_again_after_a_second(monkeypatch, chooses):
    monkeypatch.setattr(choice, "_LOOK_AGAIN_S", -1.0)
    server, port = await plain_server()
    await reason(port)
    await reason(port)
    assert len(chooses) == 2
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    with pytest.raises(ConnectionRefusedError, match="RDMANET_REQUIRE"):
        await connect(port)
    server.close()


async def test_what_is_required_is_not_forgotten(monkeypatch):
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    server, port = await plain_server()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError, match="RDMANET_REQUIRE"):
            await connect(port)
    server.close()


async def test_what_the_program_asks_for_besides_counts():
    server, port = await plain_server()
    for _ in range(2):
        await reason(port)
    assert "chose the local address" in await reason(port, local_addr=("127.0.0.1", 0))
    with pytest.raises(OSError):
        await connect(port, family=socket.AF_INET6)
    server.close()


@pytest.mark.parametrize("host, port", [(["127.0.0.1"], 9), ("127.0.0.1", [9]), ({}, {})])
async def test_what_is_no_address_is_an_error(host, port):
    with pytest.raises((TypeError, OSError, ValueError)):
        await asyncio.get_running_loop().create_connection(Recorder, host, port)


async def test_peers_are_forgotten_where_there_are_too_many(monkeypatch, chooses):
    monkeypatch.setattr(choice, "_PEERS_KEPT", 2)
    chooser = asyncio.get_running_loop()._rdmanet.chooser
    for port in (1, 2, 3, 3):
        chooser.choose("127.0.0.1", ("127.0.0.1", port))
    assert len(chooses) == 3 and len(chooser._plain) == 1


async def test_a_chooser_that_was_closed_looks_again():
    server, port = await plain_server()
    await reason(port)
    asyncio.get_running_loop()._rdmanet.chooser.close()
    for _ in range(2):
        assert (await reason(port)).startswith(doors.NOBODY)
    server.close()


async def test_how_many_calls_it_takes():
    """Beyond what the loop itself takes. It is what a program that is switched, and whose peers are not, pays."""
    server, port = await plain_server(asyncio.Protocol)
    loop = asyncio.get_running_loop()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and os.path.dirname(frame.f_code.co_filename).endswith("/rdmanet/loop")

    for _ in range(2):
        calls = 0
        sys.setprofile(count)
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        sys.setprofile(None)
        transport.abort()
    # asyncio's loop turns twice meanwhile, and a coroutine counts each time that it goes on.
    assert calls <= (18 if isinstance(loop, asyncio.BaseEventLoop) else 8)
    server.close()


@pytest.mark.parametrize("holds", ["name", "nothing"])
async def test_a_door_that_leads_nowhere(holds):
    """Behind it nobody listens by name. The TCP program that has the port hears nothing of that, even if its own user
    says by a name that it is an RDMA program."""
    heard = []

    class Noting(Echo):
        def data_received(self, data):
            heard.append(data)
            super().data_received(data)

    server, port = await plain_server(Noting)
    place = doors.Answer(port, server.sockets[0].fileno())
    door = doors.Door("127.0.0.1", port, lambda: place)
    door.open(asyncio.get_running_loop())
    with socket.socket(socket.AF_UNIX) as name:
        if holds == "name":
            name.bind(f"\0rdmanet-cm/::ffff:127.0.0.1/{port}")
        assert (await reason(port)).startswith("RDMA was tried: ")
    assert heard == [b"x"]
    door.close()
    server.close()


async def test_who_makes_no_connection_in_time_is_waited_for_once(monkeypatch):
    """Its loop turns, for its door is answered. But nobody reads what is said to its listener's name."""
    monkeypatch.setattr(connecting, "PATIENCE_S", 0.3)
    server, port = await plain_server()
    place = doors.Answer(port, server.sockets[0].fileno())
    door = doors.Door("127.0.0.1", port, lambda: place)
    door.open(asyncio.get_running_loop())
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0rdmanet-cm/::ffff:127.0.0.1/{port}")
        name.listen()
        assert (await reason(port)) == "RDMA was tried: no connection within 0.3 s"
        assert "made no RDMA connection in time" in await reason(port)
    door.close()
    server.close()


async def test_who_has_another_version_is_tried_once():
    """Its device would refuse each connection in the same way."""
    server, port = await plain_server()
    place = doors.Answer(port, server.sockets[0].fileno())
    door = doors.Door("127.0.0.1", port, lambda: place)
    door.open(asyncio.get_running_loop())
    tried = 0

    async def refuse(reader, writer):
        nonlocal tried
        tried += 1
        await reader.readexactly(8)
        writer.write(struct.pack("!4sBBH", b"RDMC", WIRE + 1, 4, 8))  # all that is known of its messages
        await writer.drain()
        writer.close()

    device = await asyncio.start_unix_server(refuse, f"\0rdmanet-cm/::ffff:127.0.0.1/{port}")
    versions = f"speaks version {WIRE + 1} of the protocol, this side speaks version {WIRE};"
    first, *others = [await reason(port) for _ in range(4)]
    assert first.startswith("RDMA was tried: ")
    assert versions in first
    for each in others:
        assert each.startswith("RDMA was tried within the last 10 s: ")
        assert versions in each
    assert tried == 1
    device.close()
    door.close()
    server.close()


async def test_a_door_of_another_version_is_tried_once():
    server, port = await plain_server()
    knocks = 0

    class Newer(doors.Door):
        def _knocked(self, caller):
            nonlocal knocks
            knocks += 1
            with caller:
                caller.send(b"rdmanet-stream %d in other words\n" % (doors.VERSION + 1))

    door = Newer("127.0.0.1", port, lambda: doors.Answer(port, server.sockets[0].fileno()))
    door.open(asyncio.get_running_loop())
    said = [await reason(port) for _ in range(3)]
    assert all(f"door speaks version {doors.VERSION + 1}, this side" in each for each in said)
    assert knocks == 1
    door.close()
    server.close()


async def test_a_full_queue_is_waited_for_once():
    server, port = await plain_server()
    place = doors.Answer(port, server.sockets[0].fileno())
    door = doors.Door("127.0.0.1", port, lambda: place)
    door.open(asyncio.get_running_loop())
    name = f"\0rdmanet-cm/::ffff:127.0.0.1/{port}"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(name)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(name)
        assert "cannot be reached" in await reason(port)
        assert "made no RDMA connection in time" in await reason(port)
    door.close()
    server.close()
