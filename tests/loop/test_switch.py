"""The switch: connections take RDMA where both sides can, TCP elsewhere, and say which and why."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import uvloop
from loop_harness import Echo, Recorder, fabric, plain_server, serving

import rdmanet
from rdmanet.stream import client_ports
from tests.support.certificates import of_client, of_server
from tests.support.waiting import loop_turns, until_seen

ROOT = Path(__file__).parents[2]


async def round_trip(port: int, host: str = "127.0.0.1", **options) -> str:
    """Send something there and back; the fabric that it took."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(Recorder, host, port, **options)
    transport.write(b"hello")
    await protocol.until(lambda: protocol.data == b"hello")
    took = fabric(transport)
    if took == "rdma":
        assert isinstance(transport, rdmanet.RdmaTransport) or "ssl" in options
    if isinstance(transport, rdmanet.RdmaTransport):
        assert transport.get_extra_info("rdma_stats")["bytes_received"] == 5
    transport.close()
    await protocol.until(lambda: "lost" in protocol.events)
    assert protocol.error is None
    return took


def by_hand(port: int) -> bytes:
    """What a program for TCP gets that knows nothing of all this."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"hello")
        return sock.recv(5, socket.MSG_WAITALL)


# ---- The ways to switch it on ------------------------------------------------------------------------


async def loops_and_a_server() -> tuple[str, str]:
    async with serving() as (_, port):
        return type(asyncio.get_running_loop()).__mro__[2].__name__, await round_trip(port)


ENVIRONMENTS = {
    "RDMANET_SOFT_CHAOS": ("los=5%", 'RDMANET_SOFT_CHAOS: los=5%: unknown fault "los"; use delay'),
    "RDMANET_SOFT_CHAO": ("loss=5%", "RDMANET_SOFT_CHAO; did you mean RDMANET_SOFT_CHAOS?"),
    "RDMANET_SOFT_DEFER": ("soon", "RDMANET_SOFT_DEFER=soon: must be a whole number"),
    "RDMANET_REQUIRE": ("rmda", "RDMANET_REQUIRE=rmda: set it to rdma or no-tcp, or unset it"),
    "RDMANET_PLACE_BYTES": ("64K", "RDMANET_PLACE_BYTES=64K: set it to a number of bytes"),
}


@pytest.mark.parametrize("way", ["run", "loop_factory", "patch_loop", "rdmanet run"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_wrong_variable_is_an_error_at_the_start_and_never_tcp(name, way):
    """The device does not open with it, so the program would run over TCP, without what the variable asks for."""
    code = {
        "run": "rdmanet.run(main())",
        "loop_factory": "asyncio.run(main()) if not rdmanet.loop_factory() else 0",
        "patch_loop": "rdmanet.patch_loop(asyncio.new_event_loop())",
        "rdmanet run": "asyncio.run(main())",
    }[way]
    script = f"import asyncio, rdmanet\nasync def main(): print('it runs')\n{code}"
    value, why = ENVIRONMENTS[name]
    command = [sys.executable, *(("-m", "rdmanet", "run") if way == "rdmanet run" else ()), "-c", script]
    done = subprocess.run(
        command,
        capture_output=True, text=True, env={**os.environ, name: value, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"OSError: [Errno {errno.EINVAL}]" in done.stderr and why in done.stderr
    assert "it runs" not in done.stdout


def test_run_that_does_not_begin(recwarn):
    """A coroutine that an error keeps from running does not warn that nobody has awaited it."""
    with pytest.raises(ValueError, match="no IPv6 address"):
        rdmanet.run(loops_and_a_server(), peers="a:b:c")
    assert not recwarn.list


def test_run(base):
    assert rdmanet.run(loops_and_a_server(), loop_factory=base) == (
        rdmanet.loop.mixin.RdmaLoop.__name__,
        "rdma",
    )


def test_run_takes_uvloop_where_it_is():
    async def kind():
        return isinstance(asyncio.get_running_loop(), uvloop.Loop)

    assert rdmanet.run(kind())


def test_run_takes_asyncios_loop_elsewhere(monkeypatch):
    async def kind():
        return isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)

    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert rdmanet.run(kind(), debug=True)


def test_a_factory_needs_no_arguments():
    with asyncio.Runner(loop_factory=rdmanet.loop_factory) as runner:
        assert runner.run(loops_and_a_server())[1] == "rdma"


def test_a_loop_that_exists_is_patched(base):
    async def main():
        loop = asyncio.get_running_loop()
        rdmanet.patch_loop(loop)
        rdmanet.patch_loop(loop)
        return (await loops_and_a_server())[1]

    with asyncio.Runner(loop_factory=base) as runner:
        assert runner.run(main()) == "rdma"


def test_other_loops_cannot_be_switched():
    with pytest.raises(TypeError, match="cannot be switched to RDMA"):
        rdmanet.patch_loop(asyncio.AbstractEventLoop())


def test_a_loop_where_its_factory_is_asked_for_is_an_error(base):
    with contextlib.closing(base()) as loop:
        with pytest.raises(TypeError, match="is a loop, not what makes one: give its class"):
            rdmanet.loop_factory(loop)
        with pytest.raises(TypeError, match="is a loop, not what makes one"):
            rdmanet.run(loops_and_a_server(), loop_factory=loop)


@pytest.mark.parametrize("wrong", [{"peers": ":80"}, {"lost_peer": "x"}])
def test_options_that_make_no_sense_are_errors(wrong):
    with pytest.raises(ValueError):
        rdmanet.loop_factory(**wrong)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_program_without_network_loads_the_switch_and_nothing_else(kind):
    """What is imported costs time at every program's start."""
    base = {"asyncio": "asyncio.SelectorEventLoop", "uvloop": "uvloop.Loop"}[kind]
    code = f"""
import asyncio, sys
import socket
import {kind}
async def main():
    read, _ = socket.socketpair()
    loop = asyncio.get_running_loop()
    loop.add_reader(read, print)
    loop.remove_reader(read)
    return await asyncio.to_thread(int, 1)
asyncio.run(main())
before = set(sys.modules)
import rdmanet
rdmanet.run(main(), loop_factory={base})
print(*sorted(set(sys.modules) - before - {{"__future__"}}))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RDMANET_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    loaded = "rdmanet rdmanet.loop rdmanet.loop.mixin rdmanet.loop.settings rdmanet.loop.tcp_alone\n"
    assert done.stdout == loaded


def test_no_device_is_loaded_before_it_is_needed():
    code = """
import asyncio, sys, rdmanet
async def main():
    server = await asyncio.get_running_loop()._rdmanet.base.create_server(asyncio.Protocol, "127.0.0.1", 0)
    await asyncio.open_connection(*server.sockets[0].getsockname())
rdmanet.run(main())
print(sorted(name for name in sys.modules if name.startswith("rdmanet") and not name.startswith("rdmanet.loop")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    base = [
        f"rdmanet.base.{name}"
        for name in ("environment", "late_import", "log_rate", "onlookers", "pause", "scopes", "watching")
    ]
    stream = ["rdmanet.stream", "rdmanet.stream.in_the_clear"]
    assert done.stdout == f"{['rdmanet', 'rdmanet.base', *base, *stream]}\n"


# ---- Which fabric ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("place", ["itself", "everywhere"])
async def test_a_server_is_found_by_its_address_and_its_names(host, place):
    where = None if place == "everywhere" else host
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    async with serving(host=where) as (server, _):
        family = socket.AF_INET6 if host == "::1" else socket.AF_INET
        [port] = {s.getsockname()[1] for s in server.sockets if s.family == family}
        assert await round_trip(port, host, family=family) == "rdma"


async def test_both_fabrics_reach_one_port():
    seen = []

    class Seen(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            seen.append((fabric(transport), transport.get_extra_info("fabric_reason")))

    async with serving(Seen) as (_, port):
        assert await round_trip(port) == "rdma"
        assert await asyncio.to_thread(by_hand, port) == b"hello"
        transport, protocol = await rdmanet.create_rdma_connection(Recorder, "127.0.0.1", port)
        transport.write(b"x")
        await protocol.until(lambda: protocol.data == b"x")
        transport.abort()
    assert seen == [
        ("rdma", "the client came by RDMA"),
        ("tcp", "the client came by TCP"),
        ("rdma", "the client came by RDMA"),
    ]


async def test_a_tcp_server_is_reached_by_tcp():
    server, port = await plain_server()
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
    assert protocol.transport is transport and transport.get_protocol() is protocol
    assert transport.get_extra_info("fabric") == "tcp"
    assert "no program on this host offers RDMA" in transport.get_extra_info("fabric_reason")
    assert transport.get_extra_info("peername") == ("127.0.0.1", port)
    assert transport.get_extra_info("socket").getpeername() == ("127.0.0.1", port)
    assert transport.get_extra_info("nothing", 5) == 5
    assert isinstance(transport, asyncio.Transport) and str(transport)
    transport.writelines([b"he", b"llo"])
    await protocol.until(lambda: protocol.data == b"hello")
    another = Recorder()
    transport.set_protocol(another)
    transport.write_eof()
    await another.until(lambda: "lost" in another.events)
    assert (another.events, another.error, transport.is_closing()) == (["eof", "lost"], None, True)
    server.close()


@pytest.mark.parametrize("kind", [str, float, Fraction])
async def test_a_port_may_be_a_number_of_any_type(kind):
    async with serving() as (_, port):
        assert await round_trip(kind(port)) == "rdma"
    server, port = await plain_server()
    assert await round_trip(kind(port)) == "tcp"
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nobody_there_is_as_it_was(host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    loop = asyncio.get_running_loop()
    with pytest.raises(OSError) as before:
        await loop._rdmanet.base.create_connection(Recorder, host, port)
    with pytest.raises(OSError) as now:
        await loop.create_connection(Recorder, host, port)
    assert (type(now.value), str(now.value)) == (type(before.value), str(before.value))


async def test_names_that_do_not_exist_are_as_they_were():
    with pytest.raises(socket.gaierror):
        await asyncio.get_running_loop().create_connection(Recorder, "nobody.invalid", 80)


async def test_excluded_peers_take_tcp(base):
    async with serving() as (_, port):
        loop = asyncio.get_running_loop()
        for patterns in ("!*", f"auto !127.0.0.0/8:{port}", "10.0.0.0/8"):
            rdmanet.patch_loop(loop, peers=patterns)
            assert await round_trip(port) == "tcp"
        rdmanet.patch_loop(loop, peers="127.0.0.1")
        assert await round_trip(port) == "rdma"


async def test_an_excluded_port_is_served_by_tcp_only():
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="!*")
    async with serving() as (_, port):
        rdmanet.patch_loop(loop, peers="auto")
        assert await round_trip(port) == "tcp"


async def test_a_server_that_died_leaves_nothing():
    async with serving() as (server, port):
        assert await round_trip(port) == "rdma"
    plain = await asyncio.get_running_loop()._rdmanet.base.create_server(Echo, "127.0.0.1", port)
    assert await round_trip(port) == "tcp"
    plain.close()


async def test_the_choice_is_logged_once(caplog):
    server, plain = await plain_server()
    with caplog.at_level(logging.INFO, "rdmanet"):
        async with serving() as (_, port):
            for _ in range(3):
                await round_trip(port)
                await round_trip(plain)
    server.close()
    told = [record.getMessage() for record in caplog.records if "take" in record.getMessage()]
    assert told[0] == f"connections to 127.0.0.1 port {port} take RDMA: the server on this host offers RDMA"
    assert told[1].startswith(f"connections to 127.0.0.1 port {plain} take TCP: no program on this host")
    assert len(told) == 2


async def test_no_fabric_is_logged_where_nobody_listens(caplog):
    """But when somebody does, a moment later."""
    server, port = await plain_server()
    server.close()
    await server.wait_closed()
    with caplog.at_level(logging.INFO, "rdmanet"):
        with pytest.raises(ConnectionRefusedError):
            await round_trip(port)
        assert not [record for record in caplog.records if " take " in record.getMessage()]
        again = await asyncio.get_running_loop()._rdmanet.base.create_server(Echo, "127.0.0.1", port)
        assert await round_trip(port) == "tcp"
        again.close()
    assert f"connections to 127.0.0.1 port {port} take TCP: " in caplog.text


async def test_the_fabric_is_logged_after_an_attempt_that_was_cancelled(caplog):
    server, port = await plain_server()
    with caplog.at_level(logging.INFO, "rdmanet"):
        attempt = asyncio.ensure_future(round_trip(port))
        await loop_turns(1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert await round_trip(port) == "tcp"
    assert f"connections to 127.0.0.1 port {port} take TCP: " in caplog.text
    server.close()


async def test_it_is_logged_again_when_the_fabric_changes(caplog, monkeypatch):
    monkeypatch.setattr("rdmanet.base.log_rate._said", {})
    with caplog.at_level(logging.INFO, "rdmanet"):
        async with serving() as (_, port):
            await round_trip(port)
        plain = await asyncio.get_running_loop()._rdmanet.base.create_server(Echo, "127.0.0.1", port)
        for _ in range(2):
            assert await round_trip(port) == "tcp"
        plain.close()
        await plain.wait_closed()
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
        assert await round_trip(port) == "rdma"
        server.close()
    told = [record for record in caplog.records if " take " in record.getMessage()]
    assert [(record.levelname, record.getMessage().split(":")[0][-4:]) for record in told] == [
        ("INFO", "RDMA"),
        ("WARNING", " TCP"),
        ("INFO", "RDMA"),
    ]


async def test_rdma_may_be_required(monkeypatch):
    server, plain = await plain_server()
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    loop = asyncio.get_running_loop()
    with pytest.raises(
        ConnectionRefusedError, match="RDMANET_REQUIRE=rdma excludes: no program on this host"
    ):
        await loop.create_connection(Recorder, "127.0.0.1", plain)
    with pytest.raises(
        ConnectionRefusedError, match="RDMANET_REQUIRE=rdma excludes: the program chose the local"
    ):
        await loop.create_connection(Recorder, "127.0.0.1", plain, local_addr=("127.0.0.1", 0))
    with (
        socket.create_connection(("127.0.0.1", plain)) as sock,
        pytest.raises(
            ConnectionRefusedError,
            match=f"only TCP reaches 127.0.0.1 port {plain}, .*: the socket is the program's",
        ),
    ):
        await loop.create_connection(Recorder, sock=sock)
    with pytest.raises(rdmanet.DeviceNotFoundError):  # it excludes the embedded device, too
        await loop.create_server(Echo, "127.0.0.1", 0)
    monkeypatch.setenv("RDMANET_REQUIRE", "tcp")
    with pytest.raises(OSError, match="set it to rdma"):
        await loop.create_connection(Recorder, "127.0.0.1", plain)
    server.close()


@pytest.mark.parametrize("setting", ["RDMANET_REQUIRE=no-tcp", "fallback=False"])
async def test_tcp_may_be_excluded_and_the_embedded_device_count_as_rdma(monkeypatch, caplog, setting):
    """The log says it, too: libraries hide the error."""
    monkeypatch.setattr("rdmanet.base.log_rate._said", {})
    server, plain = await plain_server()
    loop = asyncio.get_running_loop()
    if setting == "fallback=False":
        rdmanet.patch_loop(loop, fallback=False)
    else:
        monkeypatch.setenv(*setting.split("="))
    async with serving() as (_, port):
        for _ in range(2):  # also of a peer that was asked before
            assert await round_trip(port) == "rdma"
            with pytest.raises(
                ConnectionRefusedError,
                match=f"only TCP reaches 127.0.0.1 port {plain}, which {setting} excludes: no program on this",
            ):
                await loop.create_connection(Recorder, "127.0.0.1", plain)
        assert f"only TCP reaches 127.0.0.1 port {plain}, which {setting} excludes: " in caplog.text
        with socket.socket() as sock, pytest.raises(ConnectionRefusedError, match=f"{setting} excludes"):
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", plain))
    server.close()


async def test_a_server_that_cannot_serve_rdma_fails_where_tcp_is_excluded():
    rdmanet.patch_loop(asyncio.get_running_loop(), fallback=False)
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        stranger.bind(f"\0rdmanet-stream/127.0.0.1/{port}")
        reserved.close()
        with pytest.raises(OSError, match="in use"):
            await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)


async def test_a_server_that_cannot_serve_rdma_serves_tcp(caplog):
    """Its name is taken: by another process, for example."""
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        stranger.bind(f"\0rdmanet-stream/127.0.0.1/{port}")
        reserved.close()
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
        assert await round_trip(port) == "tcp"
        server.close()
    assert f"the server on 127.0.0.1 port {port} serves TCP only: Address already in use" in caplog.text


async def test_a_socket_of_the_programs_own_stays_one():
    server, port = await plain_server()
    loop = asyncio.get_running_loop()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    transport, protocol = await loop.create_connection(Recorder, sock=sock)
    assert fabric(transport) == "tcp"
    transport.write(b"x")
    await protocol.until(lambda: protocol.data == b"x")
    transport.abort()
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await loop.create_connection(Recorder, sock=ours)
        assert transport.get_extra_info("fabric") is None
        transport.abort()
    server.close()


async def test_tls_over_both():
    loop = asyncio.get_running_loop()
    async with serving(ssl=of_server()) as (_, port):
        for patterns, fabric in (("auto", "rdma"), ("!*", "tcp")):
            rdmanet.patch_loop(loop, peers=patterns)
            assert await round_trip(port, "localhost", ssl=of_client()) == fabric
            with pytest.raises(ssl.SSLCertVerificationError):
                await round_trip(port, "localhost", ssl=True)
            with pytest.raises(ssl.SSLCertVerificationError):
                await round_trip(port, "localhost", ssl=of_client(), server_hostname="example.org")


async def test_tls_that_begins_later():
    done = []

    async def serve(reader, writer):
        writer.write(await reader.readline())
        transport = await loop.start_tls(
            writer.transport, writer.transport.get_protocol(), of_server(), server_side=True
        )
        done.append(fabric(transport))
        reader._transport = writer._transport = transport
        writer.write(await reader.readline())
        writer.close()

    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    for patterns in ("auto", "!*"):
        rdmanet.patch_loop(loop, peers=patterns)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"plain\n")
        assert await reader.readline() == b"plain\n"
        await writer.start_tls(of_client(), server_hostname="localhost")
        writer.write(b"secret\n")
        assert await reader.readline() == b"secret\n"
        assert writer.get_extra_info("cipher")
        done.append(fabric(writer))
        writer.close()
    server.close()
    assert done == ["rdma", "rdma", "tcp", "tcp"]


async def test_a_stream_ends_when_start_tls_is_cancelled():
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *ends: accepted.set_result(ends), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert fabric(writer) == "rdma"
    far_reader, far_writer = await accepted
    beginning = asyncio.ensure_future(writer.start_tls(of_client(), server_hostname="localhost"))
    assert await far_reader.read(1)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    writer.close()
    with pytest.raises(ConnectionAbortedError):
        await writer.wait_closed()
    far_writer.close()
    server.close()


async def test_wrong_arguments_are_the_bases_to_refuse():
    loop = asyncio.get_running_loop()
    with pytest.raises(TypeError):
        await loop.create_connection(Recorder, "127.0.0.1", 1, no_such=1)
    with pytest.raises(ValueError, match="server_hostname"):
        await loop.create_connection(Recorder, "127.0.0.1", 1, server_hostname="x")
    with pytest.raises(ValueError):
        await loop.create_connection(Recorder)
    with pytest.raises(ValueError):
        await loop.create_server(Recorder)


async def test_what_the_factory_raises_is_the_callers():
    """And is no reason to try TCP."""
    called = []

    def factory():
        called.append(1)
        raise ConnectionError("no protocol today")

    async with serving() as (_, port):
        with pytest.raises(ConnectionError, match="no protocol today"):
            await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)
    assert called == [1]


async def test_a_cancelled_attempt_leaves_nothing():
    async with serving() as (server, port):
        for turns in range(12):
            task = asyncio.ensure_future(round_trip(port))
            await loop_turns(turns)
            task.cancel()
            await asyncio.wait([task])
        assert await round_trip(port) == "rdma"


# ---- Streams -----------------------------------------------------------------------------------------


async def test_streams_are_compiled():
    kinds = []

    async def serve(reader, writer):
        kinds.append((type(reader), type(writer), fabric(writer)))
        while data := await reader.read(100):
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1000)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2000)
    assert isinstance(reader, rdmanet.RdmaStreamReader) and isinstance(writer, asyncio.StreamWriter)
    assert reader._limit == 2000 and fabric(writer) == "rdma"
    writer.write(b"one\ntwo\n")
    await writer.drain()
    assert [await reader.readline(), await reader.readexactly(4)] == [b"one\n", b"two\n"]
    writer.write_eof()
    assert await reader.read() == b"" and reader.at_eof()
    writer.close()
    await writer.wait_closed()
    assert kinds == [(rdmanet.RdmaStreamReader, rdmanet.RdmaStreamWriter, "rdma")]
    server.close()
    await server.wait_closed()


async def test_readers_that_are_not_exactly_asyncios_stay_what_they_are():
    class Reader(asyncio.StreamReader):
        pass

    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        reader = Reader(loop=loop)
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop), "127.0.0.1", port
        )
        transport.write(b"hello")
        assert await reader.readexactly(5) == b"hello" and type(reader) is Reader
        transport.close()


# ---- As TCP's ----------------------------------------------------------------------------------------


async def test_memory_that_may_change_is_copied():
    async with serving() as (_, port):
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        paused = []
        protocol.pause_writing = lambda: paused.append(1)
        protocol.resume_writing = lambda: paused.clear()
        transport.set_write_buffer_limits(1 << 24)
        memory = bytearray(b"a" * (1 << 20))
        transport.write(memoryview(memory))
        memory[:] = bytes(len(memory))
        assert not paused
        await protocol.until(lambda: len(protocol.data) == len(memory))
        assert protocol.data == b"a" * len(memory)
        transport.close()


async def test_memory_may_be_sent_from_where_it_lies():
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, reference_writes=True)
    async with serving() as (_, port):
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        paused = []
        protocol.pause_writing = lambda: paused.append(1)
        protocol.resume_writing = lambda: None
        transport.set_write_buffer_limits(1 << 24)
        transport.write(memoryview(bytearray(1 << 20)))
        assert paused
        await protocol.until(lambda: len(protocol.data) == 1 << 20)
        transport.close()


async def test_sendfile(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    loop = asyncio.get_running_loop()
    async with serving() as (_, port):
        transport, protocol = await loop.create_connection(Recorder, "127.0.0.1", port)
        with path.open("rb") as file:
            assert await loop.sendfile(transport, file, 1000, 200_000) == 200_000
            with pytest.raises(asyncio.SendfileNotAvailableError):
                await loop.sendfile(transport, file, fallback=False)
        await protocol.until(lambda: len(protocol.data) == 200_000)
        assert protocol.data == path.read_bytes()[1000:201_000]
        transport.close()


class Held(Echo):
    """Reads nothing until it is told to; then it keeps what comes."""

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.pause_reading()

    def data_received(self, data):
        Recorder.data_received(self, data)


class Paused(Recorder):
    """Counts how often it was paused and resumed."""

    def __init__(self):
        super().__init__()
        self.pauses = self.resumptions = 0

    def pause_writing(self):
        self.pauses += 1

    def resume_writing(self):
        self.resumptions += 1
        self._note("resumed")


@pytest.mark.parametrize("way", ["tcp", "tcp+tls", "rdma+tls"])
async def test_sendfile_where_the_base_has_the_transport(tmp_path, way):
    """uvloop has no sendfile(): the switched loop sends the file as asyncio's fallback does."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(9_000_000))
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="auto" if way == "rdma+tls" else "!*")
    served = []
    options, both = {}, {}
    if "tls" in way:
        both = {"ssl": of_server()}
        options = {"ssl": of_client(), "server_hostname": "localhost"}
    server = await loop.create_server(lambda: served.append(Held()) or served[-1], "127.0.0.1", 0, **both)
    transport, protocol = await loop.create_connection(Paused, *server.sockets[0].getsockname(), **options)
    assert fabric(transport) == way.partition("+")[0]
    with path.open("rb") as file:
        sending = asyncio.create_task(loop.sendfile(transport, file, 1000, 8_000_000))
        await until_seen(lambda: served and served[0].transport)
        await loop_turns(20)
        assert not sending.done()  # the peer does not read
        served[0].transport.resume_reading()
        assert await sending == 8_000_000
        assert file.tell() == 8_001_000
        assert transport.get_protocol() is protocol and transport.is_reading()
        await served[0].until(lambda: len(served[0].data) == 8_000_000)
        assert served[0].data == path.read_bytes()[1000:8_001_000]
        if isinstance(loop, uvloop.Loop):
            with pytest.raises(asyncio.SendfileNotAvailableError):
                await loop.sendfile(transport, file, fallback=False)
        assert file.tell() == 8_001_000
        assert await loop.sendfile(transport, file, 8_999_000) == 1000
    served[0].transport.write(b"seen")
    await protocol.until(lambda: protocol.data == b"seen")
    transport.close()
    await protocol.until(lambda: "lost" in protocol.events)
    with path.open("rb") as file, pytest.raises(RuntimeError):
        await loop.sendfile(transport, file)
    server.close()


async def test_sendfile_of_a_connection_that_is_lost(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(9_000_000))
    loop = asyncio.get_running_loop()
    rdmanet.patch_loop(loop, peers="!*")
    served = []
    server = await loop.create_server(lambda: served.append(Held()) or served[-1], "127.0.0.1", 0)
    transport, protocol = await loop.create_connection(Recorder, *server.sockets[0].getsockname())
    with path.open("rb") as file:
        sending = asyncio.create_task(loop.sendfile(transport, file))
        await until_seen(lambda: served and served[0].transport)
        await loop_turns(20)
        served[0].transport.abort()
        with pytest.raises(OSError):
            await sending
    await protocol.until(lambda: "lost" in protocol.events)
    server.close()


def is_taken(address):
    with socket.socket() as other:
        try:
            other.bind(address)
        except OSError:
            return True
        return False


async def test_addresses_stand_for_one_connection():
    peers = []

    class Seen(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            peers.append(transport.get_extra_info("peername"))

    async with serving(Seen) as (_, port):
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(Recorder, "127.0.0.1", port) for _ in range(5)]
        await until_seen(lambda: len(peers) == 5)
        assert len(set(peers)) == 5 and all(name[1] for name in peers)
        names = [transport.get_extra_info("sockname") for transport, _ in made]
        assert len(set(names)) == 5
        # Where another program has a port that was computed, the server's side has another. Beside many connections of
        # TCP that have ended in the last minute it may be so for all of them.
        assert set(names) & set(peers) or any(is_taken(name) for name in names)
        for transport, _ in made:
            sock = transport.get_extra_info("socket")
            assert (sock.family, sock.type, sock.getpeername()) == (
                socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port),
            )  # fmt: skip
            assert sock.fileno() >= 0
            transport.close()


def test_the_first_connections_of_many_processes_have_different_ports():
    held = range(32768, 61000)  # of these ports each process holds one
    assert len({client_ports.port_of(port << 8) for port in held}) == len(held)


def test_no_connection_has_the_port_that_its_process_holds():
    """A server could not hold it then, and would give the client another: the two sides would not agree."""
    held = 60999
    assert held not in {client_ports.port_of(held << 8 | index) for index in range(256)}


def test_the_connections_of_one_process_have_different_ports():
    ports = {client_ports.port_of(60999 << 8 | index) for index in range(256)}
    assert len(ports) == 256 and min(ports) >= 32768 and max(ports) <= 65535


async def test_peers_whose_ports_are_computed_to_be_the_same_get_different_ones(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        computed = free.getsockname()[1]
    monkeypatch.setattr(client_ports, "port_of", lambda _: computed)
    served = []

    def echo():
        served.append(Echo())
        return served[-1]

    async with serving(echo) as (_, port):
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(Recorder, "127.0.0.1", port) for _ in range(3)]
        await until_seen(lambda: len(served) == 3 and all(each.transport for each in served))
        ports = [name_of(each) for each in served]
        assert ports[0] == computed and len(set(ports)) == 3 and all(ports)
        for taken in ports:
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", taken))
        for each in served:
            each.transport.abort()
        await until_seen(lambda: not any(each.transport._life.facts.held_port.port for each in served))
        with socket.socket() as other:
            other.bind(("127.0.0.1", computed))
        for transport, _ in made:
            transport.close()


def name_of(echo):
    return echo.transport.get_extra_info("peername")[1]


@pytest.mark.parametrize("does", ["sets another", "aborts"])
async def test_the_factorys_protocol_is_returned(does):
    class Moving(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            if does == "aborts":
                transport.abort()
            else:
                transport.set_protocol(Recorder())

    async with serving() as (_, port):
        transport, protocol = await asyncio.get_running_loop().create_connection(Moving, "127.0.0.1", port)
        assert type(protocol) is Moving
        transport.abort()
        transport, protocol = await rdmanet.create_rdma_connection(Moving, "127.0.0.1", port)
        assert type(protocol) is Moving
        transport.abort()


async def test_tls_over_tls():
    """As to a server behind an HTTPS proxy. uvloop's own start_tls() takes its own transports only."""
    loop = asyncio.get_running_loop()
    starting = []

    class Second(Echo):
        def connection_made(self, transport):
            transport.pause_reading()  # until TLS reads

            async def start():
                over = await loop.start_tls(transport, self, of_server(), server_side=True)
                Echo.connection_made(self, over)

            starting.append(loop.create_task(start()))

    async with serving(Second, ssl=of_server()) as (_, port):
        outer, protocol = await loop.create_connection(Recorder, "localhost", port, ssl=of_client())
        inner = await loop.start_tls(outer, protocol, of_client(), server_hostname="localhost")
        await asyncio.gather(*starting)
        assert fabric(inner) == "rdma"
        inner.write(b"hello")
        await protocol.until(lambda: protocol.data == b"hello")
        assert inner.get_extra_info("ssl_object") is not outer.get_extra_info("ssl_object")
        inner.close()
        await protocol.until(lambda: "lost" in protocol.events)
