"""`rdmanet proxy`: a process between peers that are here, by every pair of schemes, on asyncio's loop and on uvloop."""

import asyncio
import errno
import os
import re
import signal
import socket
import struct
import subprocess
import sys

import pytest

from tests.support.processes import AwaitedProcess
from tests.support.proxies import (
    ENVIRONMENT,
    HOST,
    MIB,
    abort,
    close,
    command,
    fresh,
    fresh_name,
    is_reset,
    joined,
    open_streams,
    peak,
    port_of,
    proxy,
    refused,
    send,
    send_slowly,
    serving,
    until_reset,
)

MUCH = os.urandom(MIB) * 3 + b"the end"


# ---- bytes


# Those without RDMA are long: they show that the proxy itself makes no difference.
PAIRS = [
    pytest.param(listen, to, marks=() if "rdma" in (listen, to) else pytest.mark.long)
    for listen in ("tcp", "unix", "rdma")
    for to in ("tcp", "unix", "rdma")
]


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize(("listen", "to"), PAIRS)
@pytest.mark.parametrize("first", ["client", "server"])
async def test_each_half_ends_by_itself(listen, to, first, loop):
    """One peer sends much and its end; then the other, which has waited for that, does."""
    async with joined(listen, to, loop) as (near, far, running):
        begins, answers = (near, far) if first == "client" else (far, near)
        for sender, receiver, data in ((begins, answers, MUCH), (answers, begins, MUCH[::-1])):

            async def send_all(sender=sender, data=data) -> None:
                await send(sender, data)
                sender[1].write_eof()

            _, got = await asyncio.gather(send_all(), receiver[0].read())
            assert got == data
        # Both have ended, so nothing is left of them in the proxy.
        await running.until_counted(now=0)
        counted = await running.counters()
        assert counted == {
            "now": 0, "total": 1, "refused": 0, "unconnected": 0, "lost": 0,
            "bytes to": len(MUCH), "bytes from": len(MUCH),
        }  # fmt: skip
        assert await running.stopped() == 0


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize(("listen", "to"), PAIRS)
async def test_a_client_that_says_its_last_words_and_goes(listen, to, loop):
    """Also while the proxy still connects: what it has sent comes."""
    async with serving(to) as (target, arrival), proxy(fresh(listen), target, loop=loop) as running:
        near = await open_streams(running.endpoint)
        near[1].write(MUCH)
        near[1].close()
        far = await arrival()
        assert await far[0].read() == MUCH
        await close(near, far)
        await running.until_counted(now=0, lost=0, total=1)


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize(("listen", "to"), PAIRS)
async def test_a_reader_that_is_slow_holds_the_sender_up(listen, to, loop):
    """It reads only while the sender must wait. A proxy that took all would need twice as much memory."""
    total, chunk = 64 * MIB, os.urandom(MIB)
    async with joined(listen, to, loop) as (near, far, running):
        before = peak(running.pid)
        for sender, receiver in ((near, far), (far, near)):
            await send_slowly(sender, receiver, chunk, total)
        assert peak(running.pid) - before < 24 * MIB


# ---- lost peers


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize(("listen", "to"), PAIRS)
@pytest.mark.parametrize("lost", ["client", "server"])
async def test_half_a_stream_does_not_look_complete(listen, to, lost, loop):
    async with joined(listen, to, loop) as (near, far, running):
        dies, lives = (near, far) if lost == "client" else (far, near)
        await send(dies, b"half of it")
        assert await lives[0].readexactly(10) == b"half of it"
        abort(dies)
        if "unix" in (listen if lost == "client" else to):
            # Such a socket ends like any other when its program does. What is left to do: say the same.
            assert await lives[0].read() == b""
        else:
            if "unix" in (to if lost == "client" else listen):
                assert await lives[0].read() == b""  # and there is no way to tell it
            else:
                assert await until_reset(lives) == b""
            await running.until_counted(now=0, lost=1)
            assert re.search(r"^proxy: .*: lost 127\.0\.0\.1:\d+: \w", running.errors(), re.MULTILINE)


async def test_a_client_that_has_gone_before_it_is_accepted(loop):
    """The kernel no longer knows its address, but accept() has told it to asyncio's loop."""
    async with serving("tcp") as (target, _), proxy(fresh("tcp"), target, loop=loop) as running:
        running.stop()
        with socket.create_connection(("127.0.0.1", port_of(running.endpoint))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        running.send_signal(signal.SIGCONT)
        await running.until_counted(now=0, total=1, lost=1)
        who = r"127\.0\.0\.1:\d+" if loop == "asyncio" else "a peer that had gone"
        assert re.search(f": lost {who}: ", running.errors())


DIES = """
import asyncio, sys, rdmanet
async def main():
    reader, writer = await rdmanet.open_rdma_connection("127.0.0.1", int(sys.argv[1]))
    writer.write(b"half of it")
    await writer.drain()
    print(await reader.read(1), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("to", ["tcp", "rdma"])
async def test_a_client_that_is_killed(to, loop):
    async with serving(to) as (target, arrival), proxy(fresh("rdma"), target, loop=loop) as running:
        code = (sys.executable, "-c", DIES, port_of(running.endpoint))
        with AwaitedProcess(*code, env=ENVIRONMENT) as client:
            far = await arrival()
            assert await far[0].readexactly(10) == b"half of it"
            await send(far, b"!")
            assert await client.line() == "b'!'"
            client.send_signal(signal.SIGKILL)
            assert await until_reset(far) == b""
        await running.until_counted(now=0, lost=1)


@pytest.mark.parametrize(("listen", "to"), PAIRS)
@pytest.mark.parametrize("ended", ["neither", "the client's"])
async def test_a_proxy_that_is_killed(listen, to, ended, loop):
    """Its peers do not take what has come for all. A stream that has ended stays so."""
    async with joined(listen, to, loop) as (near, far, running):
        for sender, receiver in ((near, far), (far, near)):
            await send(sender, b"half")
            assert await receiver[0].readexactly(4) == b"half"
        if ended == "the client's":
            near[1].write_eof()
            assert await far[0].read() == b""
        running.send_signal(signal.SIGKILL)
        await running.ended()
        for streams, scheme in ((near, listen), (far, to)):
            if streams is far and ended == "the client's":
                continue
            if scheme == "unix":
                assert await streams[0].read() == b"", "there is no way to tell it"
            else:
                await until_reset(streams)


@pytest.mark.parametrize("to", ["tcp", "rdma", "unix"])
async def test_what_is_read_later_than_the_relay_has_ended(to, loop):
    """The kernel still has it: the connection that the relay has closed in good order is not reset."""
    much = bytes(range(256)) * 512
    async with joined("tcp", to, loop) as (near, far, running):
        far[1].transport.pause_reading()
        await send(far, much)
        far[1].write_eof()
        near[1].write(much)
        near[1].write_eof()
        await running.until_counted(now=0, lost=0)
        assert await near[0].read() == much
        far[1].transport.resume_reading()
        assert await far[0].read() == much


async def test_a_proxy_that_is_killed_while_it_connects(loop):
    """A client has not heard the end of a stream then, either."""
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))
        deaf.listen(0)
        with socket.create_connection(deaf.getsockname()):  # so that the next one waits
            target = f"tcp://{HOST}:{deaf.getsockname()[1]}"
            async with proxy(fresh("tcp"), target, loop=loop) as running:
                near = await open_streams(running.endpoint)
                await running.until_counted(now=1)
                running.send_signal(signal.SIGKILL)
                await until_reset(near)


# ---- connecting


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("listen", ["tcp", "rdma"])
@pytest.mark.parametrize("to", ["tcp", "rdma", "unix"])
async def test_nobody_listens_there(listen, to, loop):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    target = f"unix:{fresh_name()}" if to == "unix" else f"{to}://{HOST}:{port}"
    async with proxy(fresh(listen), target, loop=loop) as running:
        await is_reset(running.endpoint)
        await running.until_counted(now=0, total=1, unconnected=1, lost=0)
        assert f"to {target}: " in running.errors() and "refused" in running.errors()


@pytest.mark.quick_on("asyncio")
async def test_nobody_answers(loop):
    """A server that accepts, and says nothing to TLS."""
    async with serving("tcp") as (target, arrival):
        target = target.replace("tcp", "tls")
        async with proxy("--connect-timeout", 0.05, fresh("tcp"), target, loop=loop) as running:
            await is_reset(running.endpoint)
            await arrival()
            await running.until_counted(now=0, unconnected=1)
            assert "no connection within 0.05 s" in running.errors()


@pytest.mark.quick_on("uvloop")
async def test_a_client_that_goes_while_the_proxy_connects(loop):
    async with serving("tcp") as (target, arrival):
        target = target.replace("tcp", "tls")
        async with proxy("--connect-timeout", 1000, fresh("rdma"), target, loop=loop) as running:
            near = await open_streams(running.endpoint)
            await arrival()
            abort(near)
            await running.until_counted(now=0, unconnected=0)


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("listen", ["tcp", "rdma"])
async def test_no_more_than_it_may_have(listen, loop):
    async with (
        serving("tcp") as (target, arrival),
        proxy(fresh(listen), target, "--max-connections", 1, loop=loop) as running,
    ):
        near, far = await open_streams(running.endpoint), await arrival()
        await is_reset(running.endpoint)
        assert "refused 127.0.0.1:" in running.errors()
        await send(near, b"still there")
        assert await far[0].readexactly(11) == b"still there"
        await close(near, far)
        await running.until_counted(now=0, refused=1, total=1)
        again = await open_streams(running.endpoint)
        await close(again, await arrival())
        await running.until_counted(now=0, total=2, refused=1)


@pytest.mark.quick_on("uvloop")
async def test_several_pairs(loop):
    async with serving("tcp") as (one, arrivals), serving("rdma") as (two, others):
        async with proxy(fresh("rdma"), one, fresh("unix"), two, loop=loop) as running:
            for endpoint, arrival in zip(running.endpoints, (arrivals, others), strict=True):
                near = await open_streams(endpoint)
                far = await arrival()
                await send(far, b"who are you?")  # some servers speak first
                assert await near[0].readexactly(12) == b"who are you?"
                await close(near, far)
            assert [(await running.counters(pair))["bytes from"] for pair in (0, 1)] == [12, 12]


# ---- its end


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_it_lets_connections_end(number, status, loop, interruptible):
    async with joined("rdma", "tcp", loop, "--grace", "inf") as (near, far, running):
        running.send_signal(number)
        while True:
            try:
                await close(await open_streams(running.endpoint))
            except ConnectionRefusedError:
                break  # it listens no more
            except ConnectionResetError:
                pass  # it was waiting to be accepted when the listener was closed
        await send(near, MUCH[:MIB])
        assert await far[0].readexactly(MIB) == MUCH[:MIB]
        await close(near, far)
        assert await running.ended() == status
        assert running.errors() == ""


@pytest.mark.quick_on("asyncio")
@pytest.mark.parametrize("how", ["grace", "twice"])
@pytest.mark.parametrize("listen", ["tcp", "rdma"])
async def test_it_ends_connections_that_do_not(how, listen, loop, interruptible):
    async with joined(listen, "rdma", loop, "--grace", 0.05 if how == "grace" else "inf") as (
        near,
        far,
        running,
    ):
        running.send_signal(signal.SIGTERM)
        if how == "twice":
            running.send_signal(signal.SIGINT)
        await until_reset(near)
        await until_reset(far)
        assert await running.ended() in (0, 130)  # whichever it hears first
        assert running.errors() == "proxy: reset 1 connections that had not ended\n"


# ---- Unix sockets


@pytest.mark.quick_on("asyncio")
async def test_a_path_comes_and_goes(tmp_path, loop):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # as a killed program leaves it behind
    async with serving("tcp") as (target, arrival), proxy(f"unix:{path}", target, loop=loop) as running:
        near = await open_streams(f"unix:{path}")
        far = await arrival()
        message = refused(f"unix:{path}", target)
        assert message == f"proxy: cannot listen on unix:{path}: another program listens there"
        await close(near, far)
        assert await running.stopped() == 0
    assert not path.exists()
    path.write_text("something else")
    assert refused(f"unix:{path}", target).endswith("the path exists, and is no socket")
    assert path.read_text() == "something else"


@pytest.mark.quick_on("uvloop")
async def test_a_path_that_another_has_taken_stays(tmp_path, loop):
    path = tmp_path / "socket"
    async with proxy(f"unix:{path}", "tcp://127.0.0.1:9", loop=loop) as running:
        path.unlink()
        path.write_text("of another")
        assert await running.stopped() == 0
    assert path.read_text() == "of another"


# ---- what is wrong from the beginning


@pytest.mark.parametrize("scheme", ["tcp", "rdma"])
async def test_a_port_that_is_taken(scheme):
    async with serving(scheme) as (target, _):
        message = refused(target, "tcp://127.0.0.1:9")
    assert message.startswith(f"proxy: cannot listen on {target}: ")
    assert os.strerror(errno.EADDRINUSE).lower() in message.lower()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tcp://no..host:1", "tcp://127.0.0.1:1"], "cannot listen on tcp://no..host:1: "),
        (["rdma://no..host:1", "tcp://127.0.0.1:1"], "cannot listen on rdma://no..host:1: "),
        (["tcp://127.0.0.1:0", "tcp://no..host:1"], "cannot connect to tcp://no..host:1: "),
        (["tcp://127.0.0.1:0", "rdma://:1"], "cannot connect to rdma://:1: it needs a host and a port"),
        (["tls://127.0.0.1:0", "tcp://127.0.0.1:1"], "tls://127.0.0.1:0 needs a certificate: give --cert"),
        (["--ca", "/nonexistent", "tcp://127.0.0.1:0", "tls://localhost:1"], "/nonexistent: No such file"),
        (["unix:/nonexistent/s", "tcp://127.0.0.1:1"], "unix:/nonexistent/s: No such file or directory"),
    ],
)
def test_what_cannot_be(arguments, says):
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tcp://127.0.0.1:0"], "give a LISTEN and a TO for each"),
        (["localhost:1", "tcp://127.0.0.1:1"], "'localhost:1' is no endpoint: write rdma://HOST:PORT, "),
        (
            ["tcp://127.0.0.1", "tcp://127.0.0.1:1"],
            "is no endpoint: the port is missing: write tcp://HOST:PORT",
        ),
        (["redis://127.0.0.1:1", "tcp://127.0.0.1:1"], "the schemes are rdma, rdma+tls, tcp, tls and unix"),
        (["unix:@", "tcp://127.0.0.1:1"], "the name is missing: write unix:@NAME"),
        (["tcp://127.0.0.1:0", f"unix:/{'x' * 107}"], "107 bytes at most, and this one has 108"),
        (["unix:relative", "tcp://127.0.0.1:1"], "the path must be absolute: write unix:/PATH"),
        (["tcp://127.0.0.1:1/x", "tcp://127.0.0.1:1"], "only a host and a port may follow"),
        (["tcp://127.0.0.1:99999", "tcp://127.0.0.1:1"], "Port out of range"),
        (["--grace", "nan", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"], "'nan' is no number of seconds"),
        (["--max-connections", "0", "unix:@a", "unix:@b"], "'0' is no number of connections"),
    ],
)
def test_what_is_misspelt(arguments, says):
    done = subprocess.run(
        command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and "Traceback" not in done.stderr
