"""rdmanet.connections() and explain() of switched loops: connections by TCP, too, with their reasons."""

import asyncio
import os
import re
import socket
import sys

import pytest
from loop_harness import Recorder, plain_server, serving

import rdmanet
from rdmanet.loop import tcp_infos
from tests.support.waiting import until_seen

MUCH = 32 << 20
"""More than the kernel's buffers of a TCP connection hold."""


def info_of(transport):
    [info] = [info for info in rdmanet.connections() if info.transport is transport]
    return info


async def test_connections_by_tcp_have_their_reasons():
    server, port = await plain_server()
    transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
    transport.write(b"hello")
    await protocol.until(lambda: protocol.data == b"hello")
    info = info_of(transport)
    assert (info.fabric, info.role, info.state) == ("tcp", "client", "open")
    assert info.reason.startswith("no program on this host offers RDMA there")
    assert info.peer == ("127.0.0.1", port)
    assert (info.stats["bytes_sent"], info.stats["bytes_received"]) == (5, 5)
    assert "fabric: TCP: no program on this host" in info.explain() and "waits: nobody" in info.explain()
    transport.close()
    await protocol.until(lambda: "lost" in protocol.events)
    del transport, info
    protocol.transport = None
    server.close()


def by_tcp(name: str, side: str) -> float:
    found = re.search(
        rf'^{name}{{fabric="tcp",device="",side="{side}"}} (\d+)$', rdmanet.metrics(), re.MULTILINE
    )
    assert found is not None
    return int(found[1])


async def test_metrics_count_connections_by_tcp():
    loop = asyncio.get_running_loop()
    opened = {side: by_tcp("rdmanet_connections_opened_total", side) for side in ("client", "server")}
    rdmanet.patch_loop(loop, peers="!*")
    async with serving() as (server, port):
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        transport.write(b"hello")
        await protocol.until(lambda: protocol.data == b"hello")
        for side, before in opened.items():
            assert by_tcp("rdmanet_connections", side) == 1
            assert by_tcp("rdmanet_connections_opened_total", side) == before + 1
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)
        await until_seen(lambda: not by_tcp("rdmanet_connections", "server"))
    for side, before in opened.items():
        assert by_tcp("rdmanet_connections", side) == 0
        assert by_tcp("rdmanet_connections_opened_total", side) == before + 1


async def test_a_server_lists_its_clients_by_both():
    loop = asyncio.get_running_loop()
    async with serving() as (server, port):
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        transport.write(b"hello")
        await protocol.until(lambda: protocol.data == b"hello")
        with socket.create_connection(("127.0.0.1", port)) as by_tcp:
            await until_seen(lambda: len(server.connections) == 2)
            assert {info.fabric: info.reason for info in server.connections} == {
                "rdma": "the client came by RDMA",
                "tcp": "the client came by TCP",
            }
            said = server.explain()
            assert said.splitlines()[:2] == [
                f"serving: 127.0.0.1:{port} by RDMA and TCP",
                f"door at 127.0.0.1:{port}: this process has it",
            ]
            assert "\nconnections: 2, " in said
            assert "fabric: TCP: the client came by TCP" in said
            assert by_tcp.getsockname()[1] in {info.peer[1] for info in server.connections}
        await until_seen(lambda: len(server.connections) == 1)
        transport.close()
        await protocol.until(lambda: "lost" in protocol.events)


async def test_who_looks_does_not_have_each_server_go_through_all_connections():
    def all_of_them():
        raise AssertionError("it asks of each connection")

    loop = asyncio.get_running_loop()
    async with serving() as (server, port):
        with socket.create_connection(("127.0.0.1", port)):
            await until_seen(lambda: server.info().connections == 1)
            server._tcp_infos = all_of_them
            [info] = loop._rdmanet.server_infos()
            assert (info.connections, info.places) == (0, [("127.0.0.1", port)])
            server._tcp_infos = loop._rdmanet.connection_infos
            [by_tcp] = server.connections
            assert info.has(by_tcp)
        await until_seen(lambda: not server.connections)


async def test_a_peer_by_tcp_that_does_not_read():
    class Deaf(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            ends.append(self)

    ends: list[Deaf] = []
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="!*")
    async with serving(Deaf) as (server, port):
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        await until_seen(lambda: ends)
        ends[0].transport.pause_reading()
        transport.write(bytes(MUCH))
        await until_seen(lambda: "the kernel has" in info_of(transport).explain())
        assert re.search(r"waits: .* MiB that were written wait for the peer", info_of(transport).explain())
        assert "the peer does not read" in info_of(transport).explain()
        [info] = server.connections
        assert "reading is paused: they wait for resume_reading()" in info.explain()
        transport.abort()
        ends[0].transport.abort()
        await ends[0].until(lambda: "lost" in ends[0].events)


async def test_whoever_is_interrupted_when_he_asks_closes_nothing():
    """Ctrl-C may end the question at any line; the descriptor is the transport's."""

    def interrupt(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != tcp_infos.__file__:
            return None
        lines -= event == "line"
        if not lines:
            raise KeyboardInterrupt
        return interrupt

    server, port = await plain_server()
    transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
    fd, before, lines, interrupted = transport.get_extra_info("socket").fileno(), sys.gettrace(), 0, 0
    where = os.fstat(fd)
    while lines <= 0:
        lines = interrupted = interrupted + 1
        sys.settrace(interrupt)
        try:
            info_of(transport)
        except KeyboardInterrupt:
            lines = 0
        finally:
            sys.settrace(before)
        assert os.path.samestat(os.fstat(fd), where), interrupted
    assert interrupted > 8
    transport.abort()
    await protocol.until(lambda: "lost" in protocol.events)
    server.close()


@pytest.mark.parametrize("kind", ["a switched loop", "a loop that is patched later"])
def test_a_loop_that_has_ended_lists_nothing(base, kind):
    async def main():
        far = Recorder()
        server, port = await plain_server(lambda: far)
        transport, near = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
        assert rdmanet.connections()
        transport.abort()
        for each in (near, far):
            await each.until(lambda each=each: "lost" in each.events)
        server.close()

    async def patched():
        rdmanet.patch_loop(asyncio.get_running_loop())
        await main()

    if kind == "a switched loop":
        rdmanet.run(main(), loop_factory=base)
    else:
        with asyncio.Runner(loop_factory=base) as runner:
            runner.run(patched())
    assert not rdmanet.connections()
