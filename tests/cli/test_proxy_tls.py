"""`rdmanet proxy` with TLS, over TCP and over RDMA."""

import asyncio
import os
import signal
import ssl

import pytest

import rdmanet
from tests.support.proxies import (
    HOST,
    MIB,
    ROOT,
    close,
    fresh,
    is_reset,
    open_streams,
    peak,
    port_of,
    proxy,
    send,
    send_slowly,
    serving,
    until_reset,
)
from tests.support.waiting import until_seen

MUCH = os.urandom(MIB) * 12 + b"the end"
CERTIFICATES = ROOT / "tests/streams/certificates"
AUTHORITY = CERTIFICATES / "authority.pem"
SERVER = CERTIFICATES / "server.pem"  # for localhost
CLIENT = CERTIFICATES / "client.pem"
CARRIERS = {"tls": "tcp", "rdma+tls": "rdma"}


def server_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(SERVER)
    return context


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_tls_between_two_proxies(scheme, loop):
    """Each wants the other's certificate."""
    listening = ("--cert", SERVER, "--client-ca", AUTHORITY)
    connecting = ("--client-cert", CLIENT, "--ca", AUTHORITY)
    async with (
        serving("rdma") as (target, arrival),
        proxy(*listening, f"{scheme}://{HOST}:0", target, loop=loop) as inner,
        proxy(
            *connecting, fresh("tcp"), f"{scheme}://localhost:{port_of(inner.endpoint)}", loop=loop
        ) as outer,
    ):
        near = await open_streams(outer.endpoint)
        sending = asyncio.ensure_future(send(near, MUCH))
        far = await arrival()
        assert await far[0].readexactly(len(MUCH)) == MUCH
        await sending
        answering = asyncio.ensure_future(send(far, MUCH))
        assert await near[0].readexactly(len(MUCH)) == MUCH
        await answering
        far[1].close()
        assert await near[0].read() == b"", "the end of a stream goes through TLS"
        await close(near, far)
        for each in (inner, outer):
            await each.until_counted(now=0, lost=0)


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_a_reader_behind_tls_that_is_slow_holds_the_sender_up(scheme, loop):
    total, chunk = 64 * MIB, os.urandom(MIB)
    async with (
        serving(CARRIERS[scheme], ssl=server_context()) as (target, arrival),
        proxy("--ca", AUTHORITY, fresh("tcp"), target, loop=loop) as running,
    ):
        near = await open_streams(running.endpoint)
        far = await arrival()
        before = peak(running.pid)
        for sender, receiver in ((near, far), (far, near)):
            await send_slowly(sender, receiver, chunk, total)
        assert peak(running.pid) - before < 24 * MIB
        await close(near, far)


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("scheme", CARRIERS)
@pytest.mark.parametrize("speaks", ["client", "server"])
async def test_all_that_was_said_before_the_end_comes(speaks, scheme, loop):
    """Also what waits, when the end comes, for a reader that is slow to begin."""
    async with (
        serving(CARRIERS[scheme], ssl=server_context()) as (target, arrival),
        proxy("--ca", AUTHORITY, fresh("tcp"), target, loop=loop) as running,
    ):
        near = await open_streams(running.endpoint)
        far = await arrival()
        speaker, listener = (near, far) if speaks == "client" else (far, near)
        speaker[1].write(MUCH)
        speaker[1].close()
        await running.until_counted(now=1)
        assert await listener[0].read() == MUCH
        await close(near, far)
        await running.until_counted(now=0, lost=0)


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_a_client_that_says_its_last_words_and_goes(scheme, loop):
    """While the proxy still connects."""
    context = ssl.create_default_context(cafile=AUTHORITY)
    connect = asyncio.open_connection if scheme == "tls" else rdmanet.open_rdma_connection
    async with (
        serving("tcp") as (target, arrival),
        proxy("--cert", SERVER, f"{scheme}://{HOST}:0", target, loop=loop) as running,
    ):
        near = await connect(HOST, port_of(running.endpoint), ssl=context)
        near[1].write(MUCH[:50_000])
        near[1].close()
        far = await arrival()
        assert await far[0].read() == MUCH[:50_000]
        await close(near, far)
        await running.until_counted(now=0, lost=0, unconnected=0)


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_a_proxy_that_is_killed(scheme, loop):
    """Behind TLS and in front of it: an end of file, as asyncio has it, may lack TLS's good-bye."""
    async with (
        serving(CARRIERS[scheme], ssl=server_context()) as (target, arrival),
        proxy("--ca", AUTHORITY, fresh("tcp"), target, loop=loop) as running,
    ):
        near = await open_streams(running.endpoint)
        far = await arrival()
        for sender, receiver in ((near, far), (far, near)):
            await send(sender, b"half")
            assert await receiver[0].readexactly(4) == b"half"
        running.send_signal(signal.SIGKILL)
        await until_reset(near)
        await until_reset(far)


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_tls_that_is_cut_off(scheme, loop):
    """An end of file without TLS's own good-bye may be anybody's."""
    async with (
        serving(CARRIERS[scheme], ssl=server_context()) as (target, arrival),
        proxy("--ca", AUTHORITY, fresh("rdma"), target, loop=loop) as running,
    ):
        near = await open_streams(running.endpoint)
        far = await arrival()
        await send(far, b"half of it")
        assert await near[0].readexactly(10) == b"half of it"
        far[1].transport._ssl_protocol._transport.write_eof()
        assert await until_reset(near) == b""
        await running.until_counted(now=0, lost=1)


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_tls_with_a_stranger(scheme, loop):
    async with (
        serving(CARRIERS[scheme], ssl=server_context()) as (target, _),
        proxy(fresh("tcp"), target, loop=loop) as running,
    ):
        await is_reset(running.endpoint)
        assert "its certificate is not accepted: " in running.errors()
        await running.until_counted(now=0, unconnected=1)


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_a_certificate_that_is_missing(scheme, version, loop, tmp_path):
    """Both sides say so: the server's by its option, the client's by the alert that it gets."""
    limits = tmp_path / "openssl.cnf"
    limits.write_text(
        "openssl_conf = all\n[all]\nssl_conf = kinds\n[kinds]\nsystem_default = limits\n"
        f"[limits]\nMaxProtocol = {version.replace('_', '.')}\nCipherString = DEFAULT@SECLEVEL=0\n"
    )
    async with (
        serving("tcp") as (target, _),
        proxy(
            "--cert", SERVER, "--client-ca", AUTHORITY, f"{scheme}://{HOST}:0", target,
            loop=loop, env={"OPENSSL_CONF": str(limits)},
        ) as inner,
        proxy("--ca", AUTHORITY, fresh("tcp"), f"{scheme}://localhost:{port_of(inner.endpoint)}", loop=loop)
        as outer,
    ):  # fmt: skip
        await is_reset(outer.endpoint)
        await until_seen(inner.errors)
        assert inner.errors() == (
            "proxy: a client has failed to connect by TLS: it showed no certificate, and --client-ca demands one\n"
        )
        await until_seen(outer.errors)
        assert "give --client-cert" in outer.errors()
        assert (" aborted" in outer.errors(), "Unix socket" in outer.errors()) == (False, False)


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("scheme", CARRIERS)
async def test_a_certificate_that_is_not_accepted(scheme, loop):
    """By the server's side: it is of another issuer."""
    other = CERTIFICATES / "stranger.pem"
    async with (
        serving("tcp") as (target, _),
        proxy("--cert", SERVER, "--client-ca", other, f"{scheme}://{HOST}:0", target, loop=loop) as inner,
        proxy(
            "--ca", AUTHORITY, "--client-cert", CLIENT,
            fresh("tcp"), f"{scheme}://localhost:{port_of(inner.endpoint)}", loop=loop,
        ) as outer,
    ):  # fmt: skip
        await is_reset(outer.endpoint)
        await until_seen(inner.errors)
        assert "failed to connect by TLS: its certificate is not accepted: " in inner.errors()
        if scheme == "rdma+tls":
            await until_seen(outer.errors)
            assert "it does not accept the proxy's certificate: unknown ca" in outer.errors()
