"""explain() and rdmanet.connections(): troubles are staged, and the cause is named."""

import asyncio
import contextlib
import re
import threading
import time
from ipaddress import ip_address
from typing import Any, cast

import pytest
from harness import HOST, Echo, Net, Recorder

import rdmanet
from rdmanet._core import CMID, GIDEntry, GIDType, Library, best_gid
from rdmanet.stream import explaining
from tests.support.bare_peer import BarePeer
from tests.support.waiting import until_seen

MUCH = 8 << 20
"""More than a connection takes in that its program does not read."""


def stats(end: Any) -> dict[str, int]:
    found: dict[str, int] = end.transport.get_extra_info("rdma_stats")
    return found


def explained(end: Any) -> str:
    said: str = end.transport.explain()
    return said


async def test_nobody_waits(net: Net):
    client, server = await net.pair()
    client.transport.write(b"one")
    await server.until_received(3)
    await until_seen(lambda: not stats(client)["sends_in_flight"])
    said = explained(client).splitlines()
    assert re.fullmatch(r"\S+:\d+ to \S+:\d+ \(client\): open", said[0])
    assert said[1].startswith("fabric: RDMA, device ") and said[1].endswith(": the program asked for RDMA")
    assert said[2].startswith("waits: nobody; ")
    assert "(server): open" in explained(server)


async def test_the_peer_does_not_read(net: Net):
    """A slow reader: its side says that reading is paused, and the other that credits are lacking."""
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(bytes(MUCH))
    await client.until(lambda: client.writing_paused)
    await until_seen(lambda: not stats(client)["credits"])
    said = explained(client)
    assert re.search(
        r"waits: \S+ MiB that were written wait for the peer: credits 0 of \d+: the peer does not read", said
    )
    assert "waits: this program's writers are paused (pause_writing), and drain() waits" in said
    await until_seen(lambda: "bytes have come" in explained(server))
    assert re.search(
        r"waits: bytes have come, in \d+ receive slots, and reading is paused: they wait", explained(server)
    )
    server.transport.resume_reading()
    await server.until_received(MUCH)
    await until_seen(lambda: "waits: nobody" in explained(client))
    assert stats(client)["waits_for_credits"] > 0 == stats(server)["waits_for_credits"]
    assert 0 < stats(client)["us_without_credits"] <= stats(client)["us_open"]


async def test_the_time_without_credits_goes_on_until_there_is_one(net: Net):
    client, server = await net.pair()
    server.transport.pause_reading()
    client.transport.write(bytes(MUCH))
    await until_seen(lambda: not stats(client)["credits"])
    before = stats(client)
    await until_seen(lambda: stats(client)["us_without_credits"] > before["us_without_credits"] + 1000)
    assert "note: bytes have waited for credits" in explained(client)
    server.transport.resume_reading()
    await server.until_received(MUCH)
    await until_seen(lambda: not stats(client)["sends_in_flight"])
    after = stats(client)
    await until_seen(lambda: stats(client)["us_open"] > after["us_open"] + 1000)
    assert stats(client)["us_without_credits"] == after["us_without_credits"]


async def test_slots_are_small(net: Net):
    _, port = await net.serve(slot_bytes=4096)
    client = await net.connect(port)
    client.transport.write(bytes(2 << 20))
    await until_seen(lambda: stats(client)["bytes_sent"] == 2 << 20)
    note = r"note: the peer's receive slots hold 4096 bytes, so 2\.0 MiB took \d+ frames: small slots: "
    assert re.search(note, explained(client))


async def test_when_the_last_bytes_went(net: Net):
    client, server = await net.pair()
    client.transport.write(b"one")
    await server.until_received(3)
    for end, last in ((client, "us_since_sent"), (server, "us_since_received")):
        before = stats(end)
        assert before[last] <= before["us_open"]
        await until_seen(lambda end=end, last=last, was=before[last]: stats(end)[last] > was + 1000)
    client.transport.write(b"two")
    await server.until_received(6)
    for end, last in ((client, "us_since_sent"), (server, "us_since_received")):
        now = stats(end)
        assert now[last] < now["us_open"]  # which began before that
    assert re.search(
        r"waits: nobody; 6 bytes sent \(.* ago\), 0 bytes received$", explained(client), re.MULTILINE
    )


async def test_when_the_last_bytes_went_after_the_loop_has_slept(net: Net):
    """They came after the write that woke it, and not when it went to sleep."""
    client, server = await net.pair(server=Echo, busy_poll=0)
    engine = server.transport._life.connection.engine
    for sent in range(1, 6):
        await until_seen(
            lambda: not engine.stats()["polling"] and stats(server)["us_since_received"] > 10_000,
        )
        before = time.monotonic_ns()
        client.transport.write(b"one")
        await client.until_received(3 * sent)
        now = stats(server)
        passed = (time.monotonic_ns() - before) // 1000
        assert max(now["us_since_received"], now["us_since_sent"]) <= passed


async def test_a_task_does_not_read(net: Net):
    _, writer, reader, _ = await net.stream_pair()
    writer.write(b"one line\n")
    await until_seen(lambda: "have come" in net.writers[1].transport.explain())
    said = net.writers[1].transport.explain()
    assert "waits: bytes have come, in 1 receive slots, and this program has not read them: its task" in said
    await reader.readline()
    assert "waits: nobody" in net.writers[1].transport.explain()


@pytest.mark.embedded_only("faults")
async def test_the_send_queue_is_full(net: Net):
    """Four frames are with the device, which is slow; there are credits for more."""
    client, server = await net.pair(data_slots=4)
    device = Library.embedded()
    device.set_faults("delay=200ms")
    try:
        client.transport.write(bytes(MUCH))
        await until_seen(lambda: stats(client)["sends_in_flight"] == 4 and stats(client)["credits"])
        said = explained(client)
    finally:
        device.set_faults("")
    assert "4 of 4 send slots are in flight: the send queue is full" in said
    client.transport.abort()
    await server.until(lambda: server.lost)


async def until_explained(end: Any, words: str) -> str:
    await until_seen(lambda: words in explained(end))
    return explained(end)


@pytest.mark.embedded_only("faults")
async def test_the_peer_does_not_acknowledge(net: Net):
    """It may be that it is not reached from this GID, which is named."""
    client, server = await net.pair()
    device = Library.embedded()
    device.set_faults("delay=1000s")
    try:
        client.transport.write(b"one")
        said = await until_explained(client, "frames are in flight for")
    finally:
        device.set_faults("")
    host = client.transport.get_extra_info("sockname")[0]
    entry = client.transport._life.endpoint.id.context.gid_table()
    index = best_gid([each for each in entry if str(each.address) == host]).gid_index
    assert f", or it is not reached from GID index {index} (" in said
    client.transport.abort()
    await server.until(lambda: server.lost)


@pytest.mark.embedded_only("the embedded device's peer")
async def test_the_peer_does_not_answer(net: Net):
    """A connection that is being made says where from and where to."""
    silent = BarePeer(Library.embedded())
    port = silent.listen(HOST)
    connecting = asyncio.ensure_future(net.connect(port, connect_timeout=None))
    await silent.request()
    [info] = [each for each in rdmanet.connections() if each.state == "opening"]
    assert info.peer == (HOST, port) and info.local is not None
    assert re.search(
        r"waits: the connection is being made from GID index \d+ \(.*: the peer has not answered",
        info.explain(),
    )
    connecting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await connecting
    silent.close()


class Identifier:
    """Of a connection from one address to another, by a device with these."""

    port_num = 1

    def __init__(self, local: str, peer: str, *ours: str) -> None:
        self.local_addr, self.peer_addr = (local, 1), (peer, 2)
        self.context = self
        self._ours = [ip_address(each) for each in ours]

    def gid_table(self, port: int) -> list[GIDEntry]:
        mapped = [b"\0" * 10 + b"\xff\xff" + each.packed for each in self._ours]
        return [GIDEntry(gid, index, 1, GIDType.ROCE_V2, 0) for index, gid in enumerate(mapped)]


@pytest.mark.parametrize(
    ("local", "peer", "words"),
    [
        (
            "127.0.0.1",
            "203.0.113.1",
            ". It is of this host alone, and 203.0.113.1 is not: use GID index 1 (10.0.0.1)",
        ),
        ("127.0.0.1", "10.0.0.1", ""),
        ("127.0.0.1", "127.0.0.1", ""),
        ("10.0.0.1", "203.0.113.1", ""),
    ],
)
def test_a_wrong_gid(local: str, peer: str, words: str):
    """One that the peer cannot reach: that of the loopback, to another host."""
    said = explaining._way(cast(CMID, Identifier(local, peer, "127.0.0.1", "10.0.0.1")))
    assert said.startswith("from GID index ") and said.endswith(words or "lists all")


async def test_the_peer_is_lost(net: Net):
    client, server = await net.pair()
    client.transport.abort()
    await server.until_lost()
    said = explained(server)
    assert "waits: the connection is over: ConnectionResetError: " in said and "aborted" in said
    assert "waits: the connection is over: it has ended in good order" in explained(client)


async def test_all_connections_of_the_process(net: Net):
    client, server = await net.pair()
    found = {info.role: info for info in rdmanet.connections()}
    assert len(rdmanet.connections()) == 2
    assert found["client"].transport is client.transport and found["server"].transport is server.transport
    assert found["client"].local == found["server"].peer
    assert (found["client"].fabric, found["client"].state) == ("rdma", "open")
    assert found["client"].qp == client.transport.get_extra_info("rdma_qp")
    assert found["client"].stats.keys() >= stats(client).keys()
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.extend(rdmanet.connections()))
    other.start()
    await until_seen(lambda: not other.is_alive())
    other.join()
    assert len(seen) == 2
    client.transport.close()
    await server.until_lost()
    await until_seen(lambda: not rdmanet.connections())


async def test_a_server_and_its_connections(net: Net):
    server, port = await net.serve()
    clients = [await net.connect(port) for _ in range(2)]
    accepted = await net.accepted_beside(clients)
    assert {info.transport for info in server.connections} == {each.transport for each in accepted}
    said = server.explain()
    assert f":{port} by RDMA" in said and "connections: 2, of which 0 are not established yet" in said
    assert said.count("(server): open") == 2
    server.close()
    assert server.explain().startswith("closed: connections that live on: 2")


async def test_a_connection_that_is_being_made(net: Net):
    class Looks(Recorder):
        def connection_made(self, transport: Any) -> None:
            self.said = transport.explain()
            super().connection_made(transport)

    client, _ = await net.pair(Looks)
    assert "(client): open" in client.said


async def test_a_connection_that_is_over(net: Net):
    """How its peer was reached is not known any more, and nothing is made up."""
    client, server = await net.pair()
    way = explained(client).splitlines()[1]
    client.transport.close()
    await server.until_lost()
    await client.until_lost()
    said = explained(client).splitlines()
    assert "(client): closed" in said[0] and said[2].startswith("waits: the connection is over: ")
    device = way.split(",")[1].partition(":")[0]
    assert said[1] == f"fabric: RDMA,{device}: the program asked for RDMA" != way
