"""Who is reached does not depend on the fabric: addresses are tried in TCP's order, and each one once."""

import asyncio
import contextlib
import socket
import ssl

import pytest
from loop_harness import Echo, Recorder, fabric, plain_server, serving
from test_switch import of_client, of_server, round_trip

import rdmanet
from rdmanet.loop import connecting

FIRST, SECOND = "127.0.0.2", "127.0.0.1"


@pytest.fixture
async def names(monkeypatch):
    """What names mean."""
    meaning: dict[str, list[str]] = {"two.test": [FIRST, SECOND]}
    original = socket.getaddrinfo

    def getaddrinfo(host, port, family=0, type=0, proto=0, flags=0):
        if host not in meaning:
            return original(host, port, family, type, proto, flags)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in meaning[host]]

    async def of_loop(host, port, **options):
        return getaddrinfo(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(asyncio.get_running_loop()._rdmanet.base, "getaddrinfo", of_loop)
    return meaning


@pytest.fixture
def port():
    """A port that is free at every address until the test ends. Listeners may take it: they set SO_REUSEADDR."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("0.0.0.0", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
async def sockets(monkeypatch):
    """The addresses to which TCP was tried."""
    tried = []
    base = asyncio.get_running_loop()._rdmanet.base
    original = base.connect

    async def connect(sock, address):
        tried.append(address[0])
        await original(sock, address)

    monkeypatch.setattr(base, "connect", connect)
    return tried


@contextlib.asynccontextmanager
async def plain(host: str, port: int, **options):
    """A server that knows nothing of RDMA."""
    base = asyncio.get_running_loop()._rdmanet.base
    server = await base.create_server(Echo, host, port, **options)
    try:
        yield
    finally:
        server.close()


@contextlib.asynccontextmanager
async def dual(host: str, port: int, **options):
    """A server that offers RDMA."""
    server = await asyncio.get_running_loop().create_server(Echo, host, port, **options)
    try:
        yield
    finally:
        server.close()


async def connect(port: int, factory=Recorder, host="two.test", **options):
    return await asyncio.get_running_loop().create_connection(factory, host, port, **options)


async def reached(port: int, **options) -> tuple[str, str]:
    transport, _ = await connect(port, **options)
    transport.abort()
    return fabric(transport), transport.get_extra_info("peername")[0]


async def test_tcp_to_the_first_address_goes_before_rdma_to_the_second(names, port):
    async with plain(FIRST, port), dual(SECOND, port):
        assert await reached(port) == ("tcp", FIRST)


async def test_rdma_to_the_second_address_follows_tcp_to_the_first(names, sockets, port):
    async with dual(SECOND, port):
        assert await reached(port) == ("rdma", SECOND)
        assert sockets == [FIRST]


async def test_an_attempt_by_rdma_that_fails_goes_to_tcp_at_the_same_address(
    names, sockets, monkeypatch, port
):
    async def refuse(self, address, chance):
        chance.door.socket.close()
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(connecting.Attempt, "connect", refuse)
    async with dual(FIRST, port), dual(SECOND, port):
        assert await reached(port) == ("tcp", FIRST)
    assert sockets == [FIRST]


async def test_rdma_is_not_tried_again_below_tcp(monkeypatch):
    """asyncio's create_connection() calls sock_connect(), which is ours."""
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="auto !localhost")
    async with serving() as (_, port):
        if isinstance(loop, asyncio.BaseEventLoop):
            options = [{}, {"happy_eyeballs_delay": 0.1}, {"interleave": 1}]
        else:
            options = [{}]
        options.append({"local_addr": ("127.0.0.1", 0)})
        for given in options:
            assert await round_trip(port, "localhost", family=socket.AF_INET, **given) == "tcp"
        assert not loop._rdmanet.standins.transports


async def test_what_a_protocol_starts_may_take_rdma():
    """A TCP connection's protocol runs in the context in which its socket was connected."""
    started = []

    class Starting(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            started.append(asyncio.ensure_future(by_socket()))

    async def by_socket():
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            transport, _ = await loop.create_connection(Recorder, sock=sock)
            transport.abort()
            return fabric(transport)

    loop = asyncio.get_running_loop()
    server, tcp_port = await plain_server()
    async with serving() as (_, port):
        transport, _ = await loop.create_connection(Starting, "127.0.0.1", tcp_port)
        assert (fabric(transport), await started[0]) == ("tcp", "rdma")
        transport.abort()
    server.close()


async def test_happy_eyeballs_take_rdma_at_the_first_address(names, port):
    loop = asyncio.get_running_loop()
    async with dual(FIRST, port):
        assert await reached(port, happy_eyeballs_delay=0.1) == ("rdma", FIRST)
    if isinstance(loop, asyncio.BaseEventLoop):  # uvloop's has no such argument
        async with dual(SECOND, port):
            assert await reached(port, happy_eyeballs_delay=0.1) == ("tcp", SECOND)


async def test_every_failure_is_told(names):
    with socket.create_server((FIRST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError) as failed:
        await connect(port)
    each = [f"[Errno 111] Connect call failed ('{address}', {port})" for address in (FIRST, SECOND)]
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        assert str(failed.value) == f"Multiple exceptions: {', '.join(each)}"
    else:
        assert isinstance(failed.value, ConnectionRefusedError)


async def test_a_handshake_that_fails_is_not_tried_elsewhere(names, sockets, port):
    made = []

    def factory():
        made.append(Recorder())
        return made[-1]

    async with plain(FIRST, port, ssl=of_server()), plain(SECOND, port, ssl=of_server()):
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(port, factory, ssl=True)
    assert (len(made), sockets) == (1, [FIRST])


async def test_what_the_factory_raises_is_not_tried_elsewhere(names, sockets, port):
    calls = []

    def factory():
        calls.append(1)
        raise ConnectionRefusedError("the program's")

    async with plain(FIRST, port), plain(SECOND, port):
        with pytest.raises(ConnectionRefusedError, match="the program's"):
            await connect(port, factory)
    assert (len(calls), sockets) == (1, [FIRST])
    async with dual(FIRST, port), plain(SECOND, port):
        with pytest.raises(ConnectionRefusedError, match="the program's"):
            await connect(port, factory)
    assert (len(calls), sockets) == (2, [FIRST])


@pytest.mark.parametrize("patterns", ["auto", "!*"])
async def test_a_server_hostname_of_none_is_the_host(names, patterns):
    """Else the certificate would be compared with the address."""
    names["localhost"] = [SECOND]
    names["other.test"] = [SECOND]
    loop = asyncio.get_running_loop()
    resolve = loop._rdmanet.base.getaddrinfo
    rdmanet.patch_loop(loop, peers=patterns)
    loop._rdmanet.base.getaddrinfo = resolve
    async with serving(ssl=of_server()) as (_, port):
        transport, _ = await connect(port, host="localhost", ssl=of_client(), server_hostname=None)
        assert fabric(transport) == ("tcp" if patterns == "!*" else "rdma")
        transport.abort()
        with pytest.raises(ssl.SSLCertVerificationError, match=r"other\.test"):
            await connect(port, host="other.test", ssl=of_client(), server_hostname=None)


@pytest.mark.parametrize("host", [b"127.0.0.1", b"localhost"])
async def test_a_host_of_bytes(host):
    async with serving() as (_, port):
        assert await round_trip(port, host, family=socket.AF_INET) == "rdma"
    server, port = await plain_server()
    assert await round_trip(port, host, family=socket.AF_INET) == "tcp"
    server.close()


async def test_required_rdma_is_looked_for_at_every_address(names, sockets, monkeypatch, port):
    async with plain(FIRST, port), plain(SECOND, port):
        monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
        with pytest.raises(ConnectionRefusedError, match="excludes: no program on this host"):
            await connect(port)
    assert sockets == []
