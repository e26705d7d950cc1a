"""Connections that cannot be made: in time, with the right error, and nothing left of the attempt."""

import asyncio
import math
import os
import re
import resource
import signal
import socket

import pytest
from harness import HOST, Echo, Net, Recorder

import rdmanet
from rdmanet.base import log_rate
from rdmanet.errors import endpoint
from rdmanet.stream.rdma_transport import RdmaTransport
from tests.support.ports import free_port
from tests.support.waiting import begin, loop_turns


@pytest.mark.not_on_siw("lets go of an identifier that connects when it is answered, or after ten seconds")
async def test_connect_timeout_to_a_stopped_server(net: Net):
    """Its kernel accepts connections to the port, but no program answers the request."""
    peer = net.spawn("echo.py")
    port = await peer.port()
    peer.stop()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=str(port)):
            await net.connect(port, connect_timeout=0.05)
    peer.send_signal(signal.SIGCONT)
    client = await net.connect(port)
    client.transport.write(b"awake again")
    assert await client.until_received(11) == b"awake again"


async def test_a_server_that_dies_while_we_connect(net: Net):
    peer = net.spawn("echo.py")
    port = await peer.port()
    peer.stop()
    connecting = await begin(*(net.connect(port) for _ in range(5)))
    peer.send_signal(signal.SIGKILL)
    for outcome in await asyncio.gather(*connecting, return_exceptions=True):
        assert isinstance(outcome, OSError), outcome


async def test_a_server_closed_while_clients_connect(net: Net):
    """Each is either made or refused; none hangs."""
    for turns in range(8):
        server, port = await net.serve(Echo)
        connecting = [asyncio.ensure_future(net.connect(port)) for _ in range(5)]
        await loop_turns(turns)
        server.close()
        for outcome in await asyncio.gather(*connecting, return_exceptions=True):
            if isinstance(outcome, Recorder):
                outcome.transport.write(b"made it")
                await outcome.until(lambda outcome=outcome: outcome.lost or outcome.received == 7)
                outcome.transport.abort()
            else:
                assert isinstance(outcome, OSError), outcome
        server.abort_clients()
        await server.wait_closed()


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_nobody_listens_on_any_address_of_a_name(net: Net):
    server, port = await net.serve_on(free_port())
    server.close()
    with pytest.raises(OSError):
        await rdmanet.create_rdma_connection(Recorder, "localhost", port)
    with pytest.raises(ExceptionGroup) as caught:
        await rdmanet.create_rdma_connection(Recorder, "localhost", port, all_errors=True)
    assert all(isinstance(error, OSError) for error in caught.value.exceptions)


async def test_a_refusal_names_host_and_port(net: Net):
    server, port = await net.serve_on(free_port())
    server.close()
    for attempt in (net.connect(port), net.open(port)):
        with pytest.raises(ConnectionRefusedError, match=re.escape(endpoint((HOST, port)))):
            await attempt


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_a_refusal_at_each_address_of_a_name_is_a_refusal(net: Net, monkeypatch):
    """Each address is named, and the exception is what it is at one address."""
    server, port = await net.serve_on(free_port())
    server.close()

    async def both(*_args, **_options):
        return [
            (socket.AF_INET, 0, 0, "", ("127.0.0.1", port)),
            (socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    with pytest.raises(ConnectionRefusedError) as caught:
        await rdmanet.create_rdma_connection(Recorder, "both.invalid", port)
    assert f"127.0.0.1:{port}" in str(caught.value) and f"[::1]:{port}" in str(caught.value)


async def test_a_servers_own_refusal_names_host_and_port(net: Net, monkeypatch):
    def fails(self, *_):
        raise OSError(12, "no memory")

    monkeypatch.setattr(RdmaTransport, "_accept", fails)
    monkeypatch.setattr(log_rate, "due", lambda *_: "")
    _, port = await net.serve(Echo)
    with pytest.raises(ConnectionRefusedError, match=re.escape(endpoint((HOST, port))) + " refuses"):
        await net.connect(port)
    net.complaint()


@pytest.mark.embedded_only("a device of the kernel does not know of TCP's ports")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_tcp_program_listens_there(net: Net, address):
    """It is recognized as a TCP program, and no byte of ours reaches it."""
    with socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    ) as tcp:
        port = tcp.getsockname()[1]
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        with pytest.raises(ConnectionRefusedError) as caught:
            await rdmanet.open_rdma_connection(address, port, connect_timeout=60)
        assert f"{where} answers, but not as rdmanet" in str(caught.value)
        tcp.setblocking(False)
        with pytest.raises(BlockingIOError):
            tcp.accept()


async def test_a_name_that_does_not_resolve(net: Net):
    with pytest.raises(OSError):
        await rdmanet.create_rdma_connection(Recorder, "no-such-host.invalid", 1)


@pytest.mark.embedded_only("a connection through the kernel takes no descriptor of its own")
async def test_out_of_descriptors(net: Net):
    """New clients are refused then, connected ones are served, and later all is well again.

    Nobody has connected to that server before, so each of them needs a socket.
    """
    _, port = await net.serve(Echo)
    client = await net.connect(port)
    _, port = await net.serve(Echo)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    fillers = []
    try:
        # Room for more than the seven given back below, however densely the open ones lie.
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, limits[1]))
        with pytest.raises(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(7):
            os.close(fillers.pop())
        outcomes = await asyncio.gather(
            *(net.connect(port, connect_timeout=0.5) for _ in range(20)), return_exceptions=True
        )
        assert any(isinstance(outcome, OSError) for outcome in outcomes), outcomes
        client.transport.write(b"still here")
        assert await client.until_received(10) == b"still here"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
    for outcome in outcomes:
        if isinstance(outcome, Recorder):
            outcome.transport.abort()
    again = await net.connect(port)
    again.transport.write(b"and again")
    assert await again.until_received(9) == b"and again"
    while net.complaints:  # the server may have said why it could not accept
        assert isinstance(net.complaint()["exception"], OSError)


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_one_port_number_on_two_addresses(net: Net):
    """One loop is both ends, even of the very same port number on two addresses."""
    _, port = await net.serve(Echo)
    server = await rdmanet.start_rdma_server(net.remember(Echo), "::1", port)
    net.servers.append(server)
    for host in (HOST, "::1"):
        _, client = await rdmanet.create_rdma_connection(net.remember(Recorder), host, port)
        client.transport.write(host.encode())
        await client.until_received(len(host))


@pytest.mark.parametrize("exc", [OSError(28, "no room in /srv/secret"), LookupError("an internal name")])
async def test_a_stranger_is_not_told_our_failures(net: Net, monkeypatch, exc):
    """What went wrong in the server is for its log."""

    def fails(self, *_):
        raise exc

    monkeypatch.setattr(RdmaTransport, "_accept", fails)
    monkeypatch.setattr(log_rate, "due", lambda *_: "")  # each is said
    _, port = await net.serve(Echo)
    with pytest.raises(
        ConnectionRefusedError, match="the server could not accept the connection; its log says why"
    ):
        await net.connect(port)
    assert net.complaint()["exception"] is exc


@pytest.mark.parametrize("timeout", [math.inf, 1e9])
async def test_a_timeout_may_be_long(net: Net, timeout):
    _, port = await net.serve(Echo)
    client = await net.connect(port, connect_timeout=timeout)
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_what_the_factory_raises_is_not_the_addresses(net: Net, monkeypatch):
    """It is called once, and no other address is tried."""
    _, port = await net.serve(Echo)
    net.servers.append(await rdmanet.start_rdma_server(Echo, "127.0.0.2", port))

    async def both(*_args, **_options):
        return [(socket.AF_INET, 0, 0, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]

    called = []

    def factory():
        called.append(True)
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    with pytest.raises(FileNotFoundError, match="^no such file$"):
        await rdmanet.create_rdma_connection(factory, "both.invalid", port)
    assert called == [True]
