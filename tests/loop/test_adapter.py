"""The event loop on the device under test: soft-RoCE and soft-iWARP in `make test-kernel`, else the embedded one.

iWARP's connections are TCP's, so the loop must not use it where a TCP program may be listening (options.py).
"""

import asyncio
import socket
from collections import Counter

import pytest
from loop_harness import Echo, workers_on

from rdmanet import _core
from rdmanet.loop import doors
from tests.support.waiting import until_seen


@pytest.fixture(autouse=True)
def no_device_is_named(monkeypatch):
    """As for most programs: where there is an adapter, there is the embedded device as well."""
    monkeypatch.delenv("RDMANET_DEVICE", raising=False)


@pytest.fixture
def is_iwarp(device: _core.Device) -> bool:
    return not device.library.embedded_device and device.transport_type is _core.TransportType.IWARP


async def connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, str]:
    reader, writer = await asyncio.open_connection(address, port)
    pid, fabric = (await reader.readline()).split()
    writer.write(b"hello\n")
    assert await reader.readline() == b"hello\n"
    return reader, writer, int(pid), fabric.decode()


async def test_workers_share_the_connections(address, is_iwarp):
    """In turn, by RDMA; killing one ends only its own connections.

    Beside an iWARP adapter the connections are the embedded device's, and the first worker serves every client.
    """
    with workers_on(address, 3) as (port, there):
        for worker in there.values():
            assert await worker.line() == "ready"
        front = doors.owner(address, port)
        serving = {front} if is_iwarp else set(there)
        kept = []
        while {pid for _, _, pid in kept} != serving:  # one may be ready before the first has heard of it
            reader, writer, pid, fabric = await connect(address, port)
            assert fabric == "rdma", writer.get_extra_info("fabric_reason")
            assert pid in serving
            kept.append((reader, writer, pid))
        served: Counter[int] = Counter()
        for _ in range(6):
            reader, writer, pid, fabric = await connect(address, port)
            assert fabric == "rdma", writer.get_extra_info("fabric_reason")
            kept.append((reader, writer, pid))
            served[pid] += 1
        assert served == dict.fromkeys(serving, 6 // len(serving))

        there[front].process.kill()
        await there.pop(front).ended()
        for reader, writer, pid in kept:
            if pid == front:
                assert await reader.read() == b""
            else:
                writer.write(b"still there\n")
                assert await reader.readline() == b"still there\n"
            writer.close()
        await until_seen(lambda: doors.owner(address, port) in there)
        _, writer, pid, fabric = await connect(address, port)
        assert fabric == "rdma", writer.get_extra_info("fabric_reason")
        assert pid in there
        writer.close()


async def test_a_tcp_server_gets_the_clients_bytes_only(address):
    """It knows nothing of RDMA. What comes to its port by RDMA's means must not reach it."""
    accepted: list[Echo] = []

    class Server(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            accepted.append(self)

    loop = asyncio.get_running_loop()
    server = await loop._rdmanet.base.create_server(Server, address, 0)
    port = server.sockets[0].getsockname()[1]
    transport, client = await loop.create_connection(Echo, address, port)
    transport.write(b"from the client")
    await accepted[0].until(lambda: accepted[0].data)
    transport.abort()
    await accepted[0].until(lambda: "lost" in accepted[0].events)
    server.close()
    assert transport.get_extra_info("fabric") == "tcp"
    assert [bytes(each.data) for each in accepted] == [b"from the client"]


async def test_a_tcp_client_is_served_by_tcp(address):
    """It knows nothing of RDMA, and whoever listens beside TCP must not take it."""
    loop = asyncio.get_running_loop()
    with workers_on(address, 1) as (port, there):
        (worker,) = there.values()
        assert await worker.line() == "ready"
        for _ in range(8):
            with socket.socket() as plain:
                plain.setblocking(False)
                await loop._rdmanet.base.sock_connect(plain, (address, port))
                assert await loop._rdmanet.base.sock_recv(plain, 100) == b"%d tcp\n" % worker.pid
