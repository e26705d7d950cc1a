"""patch_loop() on a loop that is switched already: all that the loop has stays, and the options are the new ones."""

import asyncio
import gc
import logging
import socket

import pytest
from loop_harness import Echo, Recorder, fabric, serving
from test_accepting import both, offer
from test_standins import connected, round_trip

import rdmanet

OPTIONS = pytest.mark.parametrize("options", [{}, {"peers": "!*"}], ids=["same", "others"])


def patch_again(options: dict) -> None:
    rdmanet.patch_loop(asyncio.get_running_loop(), **options)
    gc.collect()


@OPTIONS
async def test_sockets_go_on_standing_for_connections(options):
    async with serving() as (_, port):
        sock = await connected(port)
        patch_again(options)
        transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, sock=sock)
        assert fabric(transport) == "rdma"
        await round_trip(transport, protocol)
        transport.abort()


async def test_a_socket_can_still_be_connected_by_tcp():
    async with serving() as (_, port):
        sock = await connected(port)
        patch_again({})
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"hello")
        assert await loop.sock_recv(sock, 100) == b"hello"
        sock.close()


async def test_a_server_that_the_program_has_dropped_goes_on():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    alive = loop._rdmanet.servers
    del server
    patch_again({"lost_peer": "error"})
    transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
    assert fabric(transport) == "rdma"
    await round_trip(transport, protocol)
    transport.abort()
    (server,) = alive
    server.close()


@OPTIONS
async def test_listeners_go_on_offering(options):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        await offer(listener)
        patch_again(options)
        rdmanet.patch_loop(asyncio.get_running_loop())
        (client, protocol), (server, _) = await both(listener)
        assert (fabric(client), fabric(server)) == ("rdma", "rdma")
        await round_trip(client, protocol)
        client.abort()
        server.abort()


async def test_the_options_are_those_of_the_last_call(caplog):
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        with caplog.at_level(logging.INFO, "rdmanet"):
            for options, expected in (({}, "rdma"), ({}, "rdma"), ({"peers": "!*"}, "tcp"), ({}, "rdma")):
                patch_again(options)
                transport, _ = await loop.create_connection(Recorder, "127.0.0.1", port)
                assert fabric(transport) == expected
                transport.abort()
    told = [record.getMessage() for record in caplog.records if "take" in record.getMessage()]
    assert ["take RDMA" in text for text in told] == [True, False, True]
