"""What stands where a socket would: its descriptor, its options, and what it refuses."""

import errno
import os
import pickle
import select
import socket
import subprocess
import sys
import time

import pytest
from harness import Echo, HalfOpen, Net, Recorder

from rdmanet.stream import readiness
from tests.support.waiting import readable, until_seen

pytestmark = pytest.mark.once


def looks_readable(fd: int) -> bool:
    """As httpcore asks whether an idle connection was closed by its server."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- the descriptor


async def test_made_when_asked_for_and_gone_with_the_connection(net: Net):
    client, server = await net.pair(server=Echo)
    sock = client.transport.get_extra_info("socket")
    assert client.transport.get_extra_info("socket") is sock
    client.transport.write(b"x")
    await client.until_received(1)
    before = open_descriptors()
    fd = sock.fileno()
    assert fd >= 0 and sock.fileno() == fd
    assert open_descriptors() == before + 2, "its own, and the one that all connections have in common"
    server.transport.get_extra_info("socket").fileno()
    assert open_descriptors() == before + 3
    client.transport.close()
    await client.until_lost()
    await server.until_lost()
    assert sock.fileno() == -1
    assert open_descriptors() <= before + 1
    assert sock.getpeername() == client.transport.get_extra_info("peername")


async def test_idle_it_is_not_readable(net: Net):
    client, _ = await net.pair(server=Echo)
    fd = client.transport.get_extra_info("socket").fileno()
    assert not looks_readable(fd)
    for n in range(1, 10):
        client.transport.write(b"x")
        await client.until_received(n)
    assert not looks_readable(client.transport.get_extra_info("socket").fileno())


async def test_readable_while_bytes_wait(net: Net):
    client, server = await net.pair()
    fd = server.transport.get_extra_info("socket").fileno()
    for n in (1, 2):
        server.transport.pause_reading()
        assert not looks_readable(fd)
        client.transport.write(b"hello")
        await readable(fd)  # by the event loop
        assert looks_readable(fd) and server.received == 5 * (n - 1)
        server.transport.resume_reading()
        await server.until_received(5 * n)
        await client_and_back(client, server)
        assert not looks_readable(fd)


async def client_and_back(client: Recorder, server: Recorder) -> None:
    """A round trip: whatever was under way before has arrived."""
    before = client.received
    server.transport.write(b"x")
    await client.until_received(before + 1)


async def test_readable_from_end_of_file_on(net: Net):
    client, server = await net.pair(server=HalfOpen)
    sock = server.transport.get_extra_info("socket")
    assert not looks_readable(sock.fileno())
    client.transport.write_eof()
    await readable(sock.fileno())
    await server.until(lambda: server.eof)
    assert looks_readable(sock.fileno())
    server.transport.close()
    assert looks_readable(sock.fileno())
    await server.until_lost()


async def test_readable_when_asked_after_the_end_of_file(net: Net):
    client, server = await net.pair(server=HalfOpen)
    client.transport.write_eof()
    await server.until(lambda: server.eof)
    assert looks_readable(server.transport.get_extra_info("socket").fileno())


async def test_readable_at_a_loss_that_nobody_was_told_of(net: Net):
    """The connection is gone, and the bytes that came before are not delivered: reading is paused."""
    client, server = await net.pair()
    sock = server.transport.get_extra_info("socket")
    assert not looks_readable(sock.fileno())
    server.transport.pause_reading()
    client.transport.write(b"hello")
    client.transport.close()
    await client.until_lost()
    await readable(sock.fileno())
    assert not server.lost
    server.transport.resume_reading()
    assert await server.until_lost() is None
    assert sock.fileno() == -1


async def test_what_has_come_is_seen_though_the_loop_does_not_come_round(net: Net):
    """A program looks at an idle connection before it uses it again, and the loop was busy with others till now."""
    peer = net.spawn("closing.py")
    client = await net.connect(await peer.port(), HalfOpen)
    await peer.expect("connected")
    sock = client.transport.get_extra_info("socket")
    assert not looks_readable(sock.fileno())
    peer.say("close")
    until = time.monotonic() + 60
    while not looks_readable(sock.fileno()):  # the loop stands still
        assert time.monotonic() < until
    assert not client.eof
    await client.until(lambda: client.eof)
    await peer.finish()


async def test_a_subprocess_cannot_take_it_for_the_connection(net: Net):
    client, server = await net.pair()
    sock = client.transport.get_extra_info("socket")
    for code, stream in (
        ("import os; os.read(0, 1)", "stdin"),
        ("import os; os.write(1, b'x')", "stdout"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], **{stream: sock}, stderr=subprocess.PIPE, check=False
        )
        assert done.returncode == 1
        assert b"[Errno 22]" in done.stderr
    client.transport.write(b"still here")
    assert await server.until_received(10) == b"still here"
    assert not looks_readable(sock.fileno())


async def test_no_descriptors_left(net: Net, monkeypatch):
    """fileno() raises, and the connection lives on; the next call succeeds."""

    def no_more():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    client, _ = await net.pair(server=Echo)
    sock = client.transport.get_extra_info("socket")
    with monkeypatch.context() as patch:
        patch.setattr(readiness.select, "epoll", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            sock.fileno()
    client.transport.write(b"x")
    await client.until_received(1)
    assert not looks_readable(sock.fileno())


@pytest.mark.embedded_only("librdmacm does not survive a fork")
async def test_a_forked_child_has_none(net: Net):
    client, _ = await net.pair()
    sock = client.transport.get_extra_info("socket")
    sock.fileno()
    child = os.fork()
    if child == 0:
        os._exit(0 if sock.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not looks_readable(sock.fileno())


# ---- options


async def test_options(net: Net):
    server, port = await net.serve()
    client = await net.connect(port)
    connected, listening = client.transport.get_extra_info("socket"), server.sockets[0]
    for sock in (connected, listening):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == int(sock is connected)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 4) == (1).to_bytes(4, sys.byteorder)
        linger = b"\1\0\0\0\2\0\0\0"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == linger
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, None, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1, "it is so, whatever was asked"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == sock.family
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
    assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@pytest.mark.parametrize(
    ("options", "size"), [({}, 16 * 65536), ({"slot_bytes": 4096, "data_slots": 3}, 3 * 4096)]
)
async def test_sizes_of_the_buffers(net: Net, options, size):
    """Those of the ring, whatever is set."""
    accepted = Recorder()
    _, port = await net.serve(lambda: accepted, **options)
    client = await net.connect(port, **options)
    await until_seen(lambda: accepted.transport)
    for recorder in (client, accepted):
        sock = recorder.transport.get_extra_info("socket")
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 123)
            assert sock.getsockopt(socket.SOL_SOCKET, option) == size
            assert sock.getsockopt(socket.SOL_SOCKET, option, 4) == size.to_bytes(4, sys.byteorder)


async def test_options_of_the_keep_alive(net: Net):
    """They are read, and written, as with TCP; sizes that TCP refuses are refused."""
    _, port = await net.serve()
    client = await net.connect(port, keepalive=(7.5, 2, 3))
    sock = client.transport.get_extra_info("socket")
    idle, interval, count = (
        (socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert [sock.getsockopt(*option) for option in (idle, interval, count)] == [8, 2, 3]
    for option, value in ((idle, 20), (interval, 5), (count, 9)):
        sock.setsockopt(*option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    assert client.transport._connection.kept_alive == (False, 20.0, 5.0, 9)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    assert client.transport._connection.kept_alive == (True, 20.0, 5.0, 9)
    for option, value in ((idle, 0), (idle, 32768), (interval, -1), (count, 128)):
        with pytest.raises(OSError, match="is not between 1 and"):
            sock.setsockopt(*option, value)
    assert client.transport._connection.kept_alive == (True, 20.0, 5.0, 9)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, (True, 60.0, 10.0, 6)),
        ({"keepalive": None}, (False, 60.0, 10.0, 6)),
        ({"keepalive": (5, 1, 2)}, (True, 5.0, 1.0, 2)),
        ({"keep_alive": False}, (False, 60.0, 10.0, 6)),
        ({"keep_alive": True}, (True, 60.0, 10.0, 6)),
        ({"keep_alive": True, "keepalive": (5, 1, 2)}, (True, 5.0, 1.0, 2)),
    ],
)
async def test_the_keep_alive_of_servers(net: Net, options, kept):
    accepted = Recorder()
    _, port = await net.serve(lambda: accepted, **options)
    await net.connect(port)
    await until_seen(lambda: accepted.transport)
    assert accepted.transport._connection.kept_alive == kept


@pytest.mark.parametrize(
    "wrong", [5, "often", (1, 2), (0, 1, 1), (1, -1, 1), (1, 1, 0), (float("nan"), 1, 1)]
)
async def test_impossible_keep_alives(net: Net, wrong):
    with pytest.raises((TypeError, ValueError), match="keepalive="):
        await net.connect(1, keepalive=wrong)


async def test_an_idle_connection_goes_on(net: Net):
    """However often it is probed. (Peers that the embedded device reaches through memory are not.)"""
    keepalive = (0.01, 0.01, 100)
    server, port = await net.serve(Echo, keepalive=keepalive)
    client = await net.connect(port, keepalive=keepalive)
    alive = client.transport.engine.alive
    looks = 0

    def look():
        nonlocal looks
        alive.look()
        looks += 1
        return looks > 20 and (alive.probes > 3 or not client.transport._connection.probed)

    await until_seen(look)
    client.transport.write(b"x")
    await until_seen(lambda: client.data == b"x")


async def test_what_asyncios_stand_in_has(net: Net):
    """Every method of it; it accepts and refuses the same."""
    client, _ = await net.pair()
    sock = client.transport.get_extra_info("socket")
    for name in vars(asyncio_stand_in()):
        # (getsockbyname is no method of sockets, and fails there.)
        if not name.startswith("_") and name != "getsockbyname":
            assert hasattr(sock, name), name
    assert sock.gettimeout() == 0
    assert sock.get_inheritable() is False
    sock.settimeout(0)
    sock.setblocking(False)
    for wrong in (lambda: sock.settimeout(1), lambda: sock.settimeout(None), lambda: sock.setblocking(True)):
        with pytest.raises(ValueError, match="transport sockets"):
            wrong()
    with pytest.raises(OSError, match="set_protocol") as caught:
        sock.dup()
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(TypeError, match="serialized"):
        pickle.dumps(sock)


def asyncio_stand_in() -> type:
    from asyncio.trsock import TransportSocket

    return TransportSocket


# ---- shutdown


async def test_shutdown_of_the_sending_half(net: Net):
    client, server = await net.pair(HalfOpen, HalfOpen)
    client.transport.write(b"question")
    client.transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
    await server.until(lambda: server.eof)
    assert server.data == b"question"
    server.transport.write(b"answer")
    assert await client.until_received(6) == b"answer"


async def test_shutdown_of_both_halves(net: Net):
    client, server = await net.pair()
    client.transport.write(b"last words")
    sock = client.transport.get_extra_info("socket")
    sock.shutdown(socket.SHUT_RDWR)
    assert await client.until_lost() is None
    assert await server.until_received(10) == b"last words"
    with pytest.raises(OSError) as caught:
        sock.shutdown(socket.SHUT_WR)
    assert caught.value.errno == errno.ENOTCONN


@pytest.mark.parametrize(("how", "number"), [(socket.SHUT_RD, errno.EOPNOTSUPP), (7, errno.EINVAL)])
async def test_shutdown_that_cannot_be(net: Net, how, number):
    server, port = await net.serve(Echo)
    client = await net.connect(port)
    with pytest.raises(OSError) as caught:
        client.transport.get_extra_info("socket").shutdown(how)
    assert caught.value.errno == number
    client.transport.write(b"x")
    await client.until_received(1)
    with pytest.raises(OSError) as caught:
        server.sockets[0].shutdown(how)
    assert caught.value.errno == errno.ENOTCONN
