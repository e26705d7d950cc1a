"""Where a listener's options have TCP refuse clients, RDMA lets in nobody else: the server serves TCP only."""

import asyncio
import ctypes
import errno
import socket
import struct

import pytest
from loop_harness import Echo, Recorder, fabric

from rdmanet.loop import doors, serving
from tests.support.unfit import unfit


def bind_to_loopback(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def attach_filter(listener: socket.socket) -> None:
    """It lets all through, which nobody can know."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF), 8)
    try:
        listener.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(code)))
    except PermissionError:
        unfit("this kernel lets only root attach filters")


def demand_few_hops(listener: socket.socket) -> None:
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, 73, 60)
    else:
        listener.setsockopt(socket.IPPROTO_IP, 21, 60)


def set_nothing(listener: socket.socket) -> None:
    """The control: clients of such a listener take RDMA."""


OPTIONS = [bind_to_loopback, attach_filter, demand_few_hops, set_nothing]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("option", OPTIONS)
async def test_such_a_listener_takes_tcp_alone(option, address, caplog):
    caplog.set_level("INFO", "rdmanet")
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        option(listener)
        server = await loop.create_server(Echo, sock=listener)
        port = listener.getsockname()[1]
        is_alone = option is not set_nothing
        if is_alone:
            assert doors.find(address, port) is doors.NOBODY
        transport, protocol = await loop.create_connection(Recorder, address, port)
        assert fabric(transport) == ("tcp" if is_alone else "rdma")
        transport.write(b"x")
        await protocol.until(lambda: protocol.data == b"x")
        said = f"the server on {address} port {port} serves TCP only: its TCP listener"
        assert (said in caplog.text) is is_alone
        transport.abort()
        server.close()
        server.abort_clients()
        await server.wait_closed()


@pytest.mark.parametrize("option", [attach_filter, demand_few_hops])
async def test_without_the_question_they_get_in(option, monkeypatch):
    """The control: nobody looks at the options.

    (A listener of one interface is not found by the switch either: tests/security/test_interfaces.py has its control.)
    """
    monkeypatch.setattr(serving, "_why_tcp_alone", lambda tcp: "")
    loop = asyncio.get_running_loop()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        option(listener)
        server = await loop.create_server(Echo, sock=listener)
        transport, _ = await loop.create_connection(Recorder, *listener.getsockname())
        assert fabric(transport) == "rdma"
        transport.abort()
        server.close()
        server.abort_clients()
        await server.wait_closed()


async def test_the_least_ttl_of_ipv4_holds_for_a_listener_of_both_families():
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.setsockopt(socket.IPPROTO_IP, 21, 255)
        server = await loop.create_server(Echo, sock=listener)
        port = listener.getsockname()[1]
        assert doors.find("127.0.0.1", port) is doors.NOBODY
        server.close()
        await server.wait_closed()


async def test_it_is_an_error_where_rdma_is_required(monkeypatch):
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        demand_few_hops(listener)
        with pytest.raises(OSError, match="IP_MINTTL") as caught:
            await asyncio.get_running_loop().create_server(Echo, sock=listener)
        assert caught.value.errno == errno.EOPNOTSUPP
