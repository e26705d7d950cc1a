"""Ports that RDMA shares with TCP, as iWARP's are: of servers, and of clients, for which the system chooses them."""

import asyncio
import errno

import pytest
from harness import HOST, Echo, Net, Recorder

import rdmanet
from rdmanet import transport
from rdmanet.stream import establish
from rdmanet.stream.server import PORT_TRIES, RdmaServer
from tests.support.ports import free_port

EVERYWHERE = "::" if ":" in HOST else "0.0.0.0"


@pytest.mark.parametrize("host", [HOST, EVERYWHERE], ids=["address", "wildcard"])
async def test_a_server_on_a_given_port(net: Net, monkeypatch, host):
    """No device is named, so the embedded one listens beside an adapter's, unless that needs TCP's port."""
    monkeypatch.delenv("RDMANET_DEVICE", raising=False)
    port = free_port()
    server = await rdmanet.start_rdma_server(net.remember(Echo), host, port)
    net.servers.append(server)
    client = await net.connect(port, Recorder)
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"


@pytest.fixture
def takes(monkeypatch):
    """Lets TCP have the source ports of this many connections; returns a list that has an item for each."""

    def take(count: int) -> list[object]:
        ask = establish._ask
        taken: list[object] = []

        def ask_or_not(cm_id, hello):
            if len(taken) == count:
                return ask(cm_id, hello)
            taken.append(cm_id)
            raise OSError(errno.EADDRINUSE, "rdma_connect: Address already in use")

        monkeypatch.setattr(establish, "_ask", ask_or_not)
        return taken

    return take


@pytest.mark.once
@pytest.mark.parametrize("local", [None, (HOST, 0)])
async def test_a_source_port_that_tcp_has_is_left_for_another(net: Net, takes, local):
    _, port = await net.serve(Echo)
    taken = takes(transport._SOURCE_PORTS_TRIED - 1)
    client = await net.connect(port, Recorder, local_addr=local)
    assert len(taken) == transport._SOURCE_PORTS_TRIED - 1
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"


@pytest.mark.once
async def test_not_all_source_ports_are_tried(net: Net, takes):
    _, port = await net.serve(Echo)
    taken = takes(1000)
    with pytest.raises(OSError, match="rdma_connect: Address already in use") as caught:
        await rdmanet.create_rdma_connection(asyncio.Protocol, HOST, port)
    assert caught.value.errno == errno.EADDRINUSE
    assert len(taken) == transport._SOURCE_PORTS_TRIED


@pytest.mark.once
async def test_a_source_port_that_the_program_chose_is_the_only_one(net: Net, takes):
    _, port = await net.serve(Echo)
    taken = takes(1)
    with pytest.raises(OSError, match="rdma_connect: Address already in use"):
        await rdmanet.create_rdma_connection(asyncio.Protocol, HOST, port, local_addr=(HOST, free_port()))
    assert len(taken) == 1


@pytest.fixture
def listens(monkeypatch):
    """Lets TCP have the ports of this many listeners; returns the ports, one for each that listens or wanted to."""

    def listen(count: int) -> list[int]:
        ports: list[int] = []
        listen_there = RdmaServer._listen_there

        def listen_or_not(self, loop_context, cm_id):
            ports.append(cm_id.local_addr[1])
            if len(ports) <= count:
                raise OSError(errno.EADDRINUSE, "rdma_listen: Address already in use")
            listen_there(self, loop_context, cm_id)

        monkeypatch.setattr(RdmaServer, "_listen_there", listen_or_not)
        return ports

    return listen


@pytest.mark.once
async def test_a_free_port_that_tcp_has_is_left_for_another(net: Net, listens):
    ports = listens(PORT_TRIES - 1)
    server = await rdmanet.start_rdma_server(net.remember(Echo), HOST, 0)
    net.servers.append(server)
    assert len(ports) == PORT_TRIES
    assert len(set(ports)) > 1  # one may come twice: nobody holds it meanwhile
    assert server.sockets[0].getsockname()[1] == ports[-1]
    client = await net.connect(ports[-1], Recorder)
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"


@pytest.mark.once
async def test_not_all_free_ports_are_tried(net: Net, listens):
    ports = listens(1000)
    with pytest.raises(OSError, match="rdma_listen: Address already in use"):
        await rdmanet.start_rdma_server(Echo, HOST, 0)
    assert len(ports) == PORT_TRIES


@pytest.mark.once
async def test_a_port_that_the_program_chose_is_the_only_one(net: Net, listens):
    port = free_port()
    ports = listens(1)
    with pytest.raises(OSError, match="rdma_listen: Address already in use"):
        await rdmanet.start_rdma_server(Echo, HOST, port)
    assert ports == [port]
