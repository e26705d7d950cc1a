"""rdmanet.fabric() of what programs have in their hands, on switched loops; of HTTP libraries see tests/libraries."""

import asyncio
import gc
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from loop_harness import Echo, Recorder, plain_server, serving

import rdmanet
from rdmanet.base import fabric_of, watching
from tests.support.certificates import of_client, of_server
from tests.support.waiting import until_seen

BY_RDMA = rdmanet.FabricInfo("rdma", "the client came by RDMA", "soft0")
BY_TCP = rdmanet.FabricInfo("tcp", "the client came by TCP")


def scope_of(transport: Any, **more: Any) -> dict[str, Any]:
    """What an ASGI server makes of an accepted connection."""
    places = {"server": transport.get_extra_info("sockname"), "client": transport.get_extra_info("peername")}
    return {"type": "http", **places, **more}


class Accepting:
    """A factory of protocols that remembers them."""

    def __init__(self) -> None:
        self.made: list[Echo] = []

    def __call__(self) -> Echo:
        self.made.append(Echo())
        return self.made[-1]


async def pair(port: int, accepting: Accepting) -> tuple[Recorder, Echo]:
    """Both ends of a new connection."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Recorder, "127.0.0.1", port)
    client.transport.write(b"hello")
    await client.until(lambda: client.data == b"hello")
    return client, accepting.made[-1]


async def end(client: Recorder, server: Echo) -> None:
    client.transport.close()
    await client.until(lambda: "lost" in client.events)
    await server.until(lambda: "lost" in server.events)


@pytest.mark.parametrize("peers", ["auto", "!*"])
async def test_both_ends_of_a_connection(peers):
    loop, accepting = asyncio.get_running_loop(), Accepting()
    rdmanet.patch_loop(loop, peers=peers)
    async with serving(accepting) as (_, port):
        client, server = await pair(port, accepting)
        expected = BY_RDMA if peers == "auto" else BY_TCP
        assert rdmanet.fabric(server.transport) == expected
        assert rdmanet.fabric(server.transport.get_extra_info("socket")) == expected
        assert rdmanet.fabric(scope_of(server.transport)) == expected
        assert rdmanet.fabric(scope_of(server.transport)) == expected  # the second is one that was found
        found = rdmanet.fabric(client.transport)
        assert (found.fabric, found.device) == (expected.fabric, expected.device)
        assert found.reason == client.transport.get_extra_info("fabric_reason") != ""
        assert rdmanet.fabric(client.transport.get_extra_info("socket")) == found
        scope = scope_of(server.transport)
        await end(client, server)  # those who are kept say it when they are over, too
        assert rdmanet.fabric(client.transport) == found
        assert rdmanet.fabric(server.transport) == rdmanet.fabric(scope) == expected


async def test_streams():
    seen = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        seen.set_result((rdmanet.fabric(reader), rdmanet.fabric(writer)))
        writer.write(await reader.read())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert rdmanet.fabric(reader) == rdmanet.fabric(writer) and rdmanet.fabric(writer).device == "soft0"
        writer.write_eof()
        assert await seen == (BY_RDMA, BY_RDMA) and not await reader.read()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("peers", ["auto", "!*"])
async def test_streams_that_were_encrypted(peers):
    """uvloop's own transport of TLS knows nothing of the switch, so its socket is asked."""
    rdmanet.patch_loop(asyncio.get_running_loop(), peers=peers)
    seen = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        await writer.start_tls(of_server())
        seen.set_result((rdmanet.fabric(reader), rdmanet.fabric(writer)))
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        plain = rdmanet.fabric(writer)
        await writer.start_tls(of_client(), server_hostname="localhost")
        assert rdmanet.fabric(writer) == rdmanet.fabric(reader) == plain
        assert await seen == ((BY_RDMA,) * 2 if peers == "auto" else (BY_TCP,) * 2)
        await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_a_connection_of_many_is_found_without_asking_each_again(monkeypatch):
    accepting = Accepting()
    async with serving(accepting) as (_, port):
        ends = [await pair(port, accepting) for _ in range(3)]
        scopes = [scope_of(server.transport) for _, server in ends]
        assert [rdmanet.fabric(scope) for scope in scopes] == [BY_RDMA] * 3
        monkeypatch.setattr(watching, "transports", lambda: pytest.fail("it looks through all again"))
        assert [rdmanet.fabric(scope) for scope in scopes] == [BY_RDMA] * 3
        monkeypatch.undo()
        for both in ends:
            await end(*both)
    places = {(scope["server"], scope["client"]) for scope in scopes}
    assert places <= set(fabric_of._found.keys())
    del ends, both
    accepting.made.clear()

    def is_forgotten() -> bool:
        gc.collect()
        return not places & set(fabric_of._found.keys())

    await until_seen(is_forgotten)


async def test_addresses_that_are_used_again(monkeypatch):
    """The transport that had them may be kept: it is neither what was found before, nor what is found now."""

    class Over:
        is_closing = staticmethod(lambda: True)

        def __init__(self, scope: dict[str, Any]) -> None:
            facts = {"fabric": "tcp", "sockname": scope["server"], "peername": scope["client"]}
            self.get_extra_info = facts.get

    accepting = Accepting()
    async with serving(accepting) as (_, port):
        client, server = await pair(port, accepting)
        scope = scope_of(server.transport)
        fabric_of._found[scope["server"], scope["client"]] = over = Over(scope)
        monkeypatch.setattr(watching, "transports", lambda: iter([over, server.transport, over]))
        assert rdmanet.fabric(scope) == BY_RDMA
        await end(client, server)


async def test_to_ask_takes_no_port_of_clients_of_other_servers():
    """The name of a client that came by the server's name takes a descriptor (stream/facts.py)."""
    one, other = Accepting(), Accepting()
    async with serving(one) as (_, port), serving(other) as (_, others_port):
        mine, theirs = await pair(port, one), await pair(others_port, other)
        assert rdmanet.fabric(scope_of(mine[1].transport)) == BY_RDMA
        assert [info.peer[1] for info in rdmanet.connections() if info.transport is theirs[1].transport] == [
            0
        ]
        await end(*mine)
        await end(*theirs)


async def test_unix_sockets(tmp_path):
    path = str(tmp_path / "socket")
    accepting = Accepting()
    server = await asyncio.get_running_loop().create_unix_server(accepting, path)
    transport, client = await asyncio.get_running_loop().create_unix_connection(Recorder, path)
    transport.write(b"hello")
    await client.until(lambda: client.data == b"hello")
    for each in transport, accepting.made[0].transport, transport.get_extra_info("socket"):
        assert rdmanet.fabric(each) == rdmanet.FabricInfo("unix")
    assert rdmanet.fabric({"type": "http", "client": None, "server": (path, None)}).fabric == "unix"
    await end(client, accepting.made[0])
    server.close()


async def test_a_socket_of_the_programs_own():
    server, port = await plain_server()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        assert rdmanet.fabric(sock) == rdmanet.FabricInfo("tcp", "no loop of rdmanet's has made it")
    with pytest.raises(LookupError, match="socket has no connection: "):
        rdmanet.fabric(sock)
    with socket.socket() as unconnected, pytest.raises(LookupError):
        rdmanet.fabric(unconnected)
    server.close()


def test_a_loop_that_is_not_switched(base):
    async def main():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert rdmanet.fabric(writer) == rdmanet.fabric(reader)
        assert rdmanet.fabric(writer) == rdmanet.FabricInfo("tcp", "no loop of rdmanet's has made it")
        with pytest.raises(LookupError, match="the event loop is not rdmanet's"):
            rdmanet.fabric(scope_of(writer.transport))
        await reader.read()
        writer.close()
        await writer.wait_closed()
        server.close()

    loop = base()
    loop.run_until_complete(main())
    loop.close()


async def test_a_proxys_header_has_replaced_the_client():
    accepting = Accepting()
    async with serving(accepting) as (_, port):
        client, server = await pair(port, accepting)
        with pytest.raises(LookupError, match=r"between .* and \('198.51.100.1', 0\).*a proxy's header"):
            rdmanet.fabric(scope_of(server.transport, client=("198.51.100.1", 0)))
        await end(client, server)


async def test_a_connection_that_is_over():
    accepting = Accepting()
    async with serving(accepting) as (_, port):
        client, server = await pair(port, accepting)
        scope = scope_of(server.transport)
        await end(client, server)
        await until_seen(lambda: not rdmanet.connections())
        with pytest.raises(LookupError, match="it is over"):
            rdmanet.fabric(scope)


async def test_what_leads_to_no_connection():
    circle = SimpleNamespace()
    circle.connection = circle
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        for each in (
            1,
            "rdma",
            object(),
            {"type": "lifespan"},
            [],
            circle,
            datagrams,
            SimpleNamespace(transport=3),
        ):
            with pytest.raises(TypeError, match=rf"^rdmanet.fabric: {type(each).__name__} does not lead to"):
                rdmanet.fabric(each)
    for nothing in SimpleNamespace(transport=None), SimpleNamespace(connection=None, _protocol=None):
        with pytest.raises(LookupError, match="has no connection, or none any more"):
            rdmanet.fabric(nothing)


async def test_another_thread_asks():
    accepting = Accepting()
    async with serving(accepting) as (_, port):
        client, server = await pair(port, accepting)
        assert await asyncio.to_thread(rdmanet.fabric, scope_of(server.transport)) == BY_RDMA
        await end(client, server)
        await until_seen(lambda: not rdmanet.connections())
