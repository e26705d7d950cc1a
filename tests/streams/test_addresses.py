"""Local addresses, scopes, and arguments that are refused: what the keywords say, and what the errors say of them."""

import asyncio
import errno
import ipaddress
import socket

import pytest
from harness import HOST, Net, Recorder

import rdmanet
from rdmanet.base.scopes import scope_of, with_scope
from rdmanet.stream.addresses import _address, resolve

pytestmark = [pytest.mark.once, pytest.mark.embedded_only("takes addresses of the loopback interface")]


def entry(*address):
    family = socket.AF_INET if len(address) == 2 else socket.AF_INET6
    return family, socket.SOCK_STREAM, 6, "", address


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to what a test says, by the loop under test."""
    known: dict[str, list[tuple]] = {}

    def use(loop):
        async def getaddrinfo(host, port, **hints):
            return [entry(address[0], port, *address[2:]) for address in known[host]]

        class Resolving:
            def __getattr__(self, name):
                return getaddrinfo if name == "getaddrinfo" else getattr(loop, name)

        resolving = Resolving()
        monkeypatch.setattr(
            "rdmanet.transport.resolve",
            lambda loop, *rest: resolve(resolving, *rest),  # type: ignore[arg-type]
        )
        return known

    return use


V4, V6 = ("127.0.0.1", 0), ("::1", 0, 0, 0)


@pytest.mark.parametrize("own", [[V4, V6], [V6, V4]], ids=["4 first", "6 first"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_local_name_gives_the_address_of_the_family_in_hand(net: Net, names, own, host):
    names(net.loop)["here"] = own
    server = await rdmanet.start_rdma_server(Recorder, host, 0)
    net.servers.append(server)
    transport, _ = await rdmanet.create_rdma_connection(
        net.remember(Recorder), host, server.sockets[0].getsockname()[1], local_addr=("here", 0)
    )
    assert transport.get_extra_info("sockname")[0] == host


async def test_an_address_without_a_local_one_of_its_family_is_passed_over(net: Net, names):
    known = names(net.loop)
    known |= {"here": [V4], "both": [V6, V4], "six": [V6]}
    server, port = await net.serve()
    transport, _ = await rdmanet.create_rdma_connection(
        net.remember(Recorder), "both", port, local_addr=("here", 0)
    )
    assert transport.get_extra_info("peername")[0] == HOST
    with pytest.raises(
        OSError, match=rf"\[::1\]:{port}: local_addr=\('here', 0\) has no IPv6 address"
    ) as told:
        await rdmanet.create_rdma_connection(Recorder, "six", port, local_addr=("here", 0))
    assert told.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (None, 0), ("", 0), ([None], 0), (HOST, None), ([HOST, None], 0), ([b"127.0.0.1"], 0),
        (None, None), ([""], 0), (5, 0), (0, 0), (b"127.0.0.1", 0), (HOST, "no such service"),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_server_listens_where_asyncios_would(net: Net, host, port):
    """Or it raises the same kind of error."""

    async def where(start) -> object:
        try:
            server = await start(asyncio.Protocol, host, port)
        except (OSError, TypeError, ValueError) as exc:
            return type(exc)
        try:
            return {sock.getsockname()[0] for sock in server.sockets}
        finally:
            server.close()

    assert await where(rdmanet.start_rdma_server) == await where(net.loop.create_server)


async def test_an_address_that_is_named_twice_is_listened_on_once(net: Net):
    server, port = await net.serve()
    server.close()
    server = await rdmanet.start_rdma_server(Recorder, [HOST, "localhost", HOST], port, family=socket.AF_INET)
    net.servers.append(server)
    assert [sock.getsockname() for sock in server.sockets] == [(HOST, port)]


def test_a_blocking_listener_needs_a_host_or_a_port():
    with rdmanet.listen_rdma_stream() as listener:  # any port
        assert listener.getsockname()[1]
    with pytest.raises(ValueError, match="neither host nor port"):
        rdmanet.listen_rdma_stream(None, None)


async def test_a_link_local_address_keeps_its_scope(net: Net):
    index = socket.if_nametoindex("lo")
    for host in ("fe80::1%lo", f"fe80::1%{index}"):
        assert await resolve(net.loop, host, 7471, 0, 0, 0) == [("fe80::1", 7471, 0, index)]
        assert await resolve(net.loop, host, "7471", 0, 0, 0) == [("fe80::1", 7471, 0, index)]
    with pytest.raises(OSError, match="this host has no interface 'nope'"):
        await resolve(net.loop, "fe80::1%nope", 7471, 0, 0, 0)


def test_a_scope_is_added_only_where_it_is_missing():
    index = socket.if_nametoindex("lo")
    assert [scope_of(host) for host in ("::1", "10.0.0.1", None, b"::1")] == [0] * 4
    found = [("fe80::1", 1, 0, 0), ("fe80::1", 1, 0, 7), ("10.0.0.1", 1), ("10.0.0.1", 1)]
    assert with_scope("fe80::1%lo", found) == [
        ("fe80::1", 1, 0, index),
        ("fe80::1", 1, 0, 7),
        ("10.0.0.1", 1),
    ]
    assert with_scope("a.name", found[:1]) == found[:1]


# ---- arguments


@pytest.mark.parametrize(
    ("keyword", "value", "error"),
    [
        ("connect_timeout", -1, ValueError),
        ("connect_timeout", float("nan"), ValueError),
        ("connect_timeout", "3", TypeError),
        ("close_timeout", -0.5, ValueError),
        ("busy_poll", -1, ValueError),
        ("busy_poll", "always", TypeError),
        ("slot_bytes", "64K", TypeError),
        ("slot_bytes", 65536.0, TypeError),
        ("first_slot_bytes", None, TypeError),
        ("data_slots", "16", TypeError),
        ("data_slots", 0, ValueError),
    ],
)
async def test_an_argument_is_refused_by_name_and_value(net: Net, keyword, value, error):
    for call in (rdmanet.open_rdma_connection, rdmanet.start_rdma_server):
        if call is rdmanet.start_rdma_server and keyword == "connect_timeout":
            continue
        arguments = (HOST, 1) if call is rdmanet.open_rdma_connection else (Recorder, HOST, 0)
        with pytest.raises(error, match=f"{keyword}={value!r}"):
            await call(*arguments, **{keyword: value})


async def test_what_is_no_memory_cannot_be_offered(net: Net):
    client, _ = await net.pair()
    with pytest.raises(
        TypeError, match=r"offer\(\): 'int' is neither a memory region nor .* buffer protocol"
    ):
        async with client.transport.offer(64):
            pass


# ---- errors name the peer


async def test_the_error_of_an_aborted_connection_names_host_and_port(net: Net):
    client, server = await net.pair()
    peer = client.transport.get_extra_info("peername")
    server.transport.abort()
    error = await client.until_lost()
    assert isinstance(error, ConnectionResetError)
    assert f"the peer aborted the connection (peer {HOST}:{peer[1]})" in str(error)


async def test_the_error_of_a_stream_names_host_and_port(net: Net):
    made: asyncio.Future = net.loop.create_future()
    server = await rdmanet.start_rdma_stream_server(lambda r, w: made.set_result(w), HOST, 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    (await made).transport.abort()
    with pytest.raises(ConnectionResetError, match=f"{HOST}:{port}"):
        await reader.read()
    server.close()
    with pytest.raises(ConnectionResetError, match=f"{HOST}:{port}"):
        await writer.wait_closed()
    await server.wait_closed()


@pytest.mark.parametrize("local", [("198.51.100.7", 0), ("fe80::1%lo", 0)], ids=repr)
async def test_the_error_of_a_local_address_names_it(net: Net, local):
    """It may be the peer's that is good."""
    host = "::1" if ":" in local[0] else HOST
    server = await rdmanet.start_rdma_server(Recorder, host, 0)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=f"{host}, {port} from {local[0].partition('%')[0]}, 0") as caught:
        await rdmanet.create_rdma_connection(Recorder, host, port, local_addr=local)
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize("wrong", [HOST, (HOST,), (), 5], ids=repr)
async def test_a_local_address_is_host_and_port(net: Net, wrong):
    with pytest.raises(TypeError):
        await rdmanet.create_rdma_connection(Recorder, HOST, 1, local_addr=wrong)


@pytest.mark.parametrize(("host", "name"), [(HOST, HOST), ("::1", "[::1]")])
async def test_a_server_shows_where_it_is_and_whether_it_serves(net: Net, host, name):
    server = await rdmanet.start_rdma_server(Recorder, host, 0, start_serving=False)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]
    assert repr(server) == f"<RdmaServer idle {name}:{port} connections=0>"
    await server.start_serving()
    assert repr(server) == f"<RdmaServer serving {name}:{port} connections=0>"
    server.close()
    assert repr(server) == "<RdmaServer closed connections=0>"


@pytest.mark.parametrize(
    "host",
    "127.0.0.1 127.255.0.9 128.0.0.1 169.254.3.4 169.253.1.1 0.0.0.0 10.1.2.3 ::1 :: fe80::1%lo fe80::1 febf::2 "
    "fec0::1 ::ffff:10.0.0.1 2001:db8::5 1:2:3:4:5:6:7:8".split(),
)
def test_numeric_addresses_are_what_ipaddress_says(host: str) -> None:
    known = ipaddress.ip_address(host.partition("%")[0])
    assert _address(host) == (known.version, known.is_link_local, known.is_loopback)


def test_a_mapped_loopback_address_is_of_this_host_only() -> None:
    """As ipaddress says since Python 3.13."""
    assert _address("::ffff:127.0.0.9") == (6, False, True)
    assert _address("::ffff:128.0.0.1") == _address("::127.0.0.1") == (6, False, False)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "127.1",
        "127.0.0.01",
        "1.2.3.4.5",
        "1.2.3.256",
        " 127.0.0.1",
        "127.0.0.1\0",
        "::g",
        "1::2::3",
    ],
)
def test_names_are_no_numeric_addresses(host: str) -> None:
    with pytest.raises(ValueError):
        ipaddress.ip_address(host)
    with pytest.raises(ValueError):
        _address(host)
