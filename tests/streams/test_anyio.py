"""AnyIO's streams: its contracts, and what its own wrappers and task groups do with ours."""

import asyncio
import gc
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
import pytest_asyncio
from anyio.abc import ByteStream, Listener, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextReceiveStream, TextSendStream
from anyio.streams.tls import TLSStream
from harness import HOST, THERE, Net, Recorder
from pattern import REPEATED, Pattern

from rdmanet.anyio_streams import (
    RdmaAttribute,
    RdmaByteStream,
    RdmaListener,
    connect_rdma,
    create_rdma_listener,
)
from tests.support.waiting import loop_turns, until_seen

pytestmark = pytest.mark.once

MIB = 1 << 20


@asynccontextmanager
async def pair(**options) -> AsyncIterator[tuple[RdmaByteStream, RdmaByteStream]]:
    """Both ends of a connection: the connecting one, the accepting one."""
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(await create_rdma_listener(local_host=HOST, **options))
        near = await connect_rdma(HOST, listener.extra(SocketAttribute.local_port), **options)
        stack.push_async_callback(anyio.aclose_forcefully, near)
        far = await listener.accept()
        stack.push_async_callback(anyio.aclose_forcefully, far)
        yield near, far


@pytest_asyncio.fixture
async def ends(net: Net) -> AsyncIterator[tuple[RdmaByteStream, RdmaByteStream]]:
    async with pair() as both:
        yield both


async def read_all(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def until_it_waits(stream: RdmaByteStream, what: str) -> None:
    """Wait until a task waits on `stream`, to read or to write."""
    await until_seen(lambda: stream._protocol._waiting[what])


MUCH = (REPEATED * 4)[: 8 * MIB]


async def fill(stream: RdmaByteStream) -> bytes:
    """Send more than the peer's ring and program hold while nobody receives, so that no more can be sent.

    Returns what was sent. It goes in one piece: between two, a device that executes late may have made room.
    """
    await stream.send(MUCH)
    assert not stream._protocol.writable
    return MUCH


# ---- both ways


async def test_they_are_anyios(ends):
    near, far = ends
    assert isinstance(near, ByteStream) and isinstance(far, ByteStream)
    assert "RdmaTransport open" in repr(near)


async def test_an_echo_by_task_groups(net: Net):
    async def echo(stream: ByteStream) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)
            await stream.send_eof()

    async def ask(port: int, n: int) -> None:
        async with await connect_rdma(HOST, port) as stream:
            await stream.send(b"question %d" % n)
            await stream.send_eof()
            assert await read_all(stream) == b"question %d" % n
        done.append(n)

    done: list[int] = []
    async with await create_rdma_listener(local_host=HOST) as listener, anyio.create_task_group() as group:
        assert isinstance(listener, RdmaListener) and isinstance(listener, Listener)
        group.start_soon(listener.serve, echo)
        async with anyio.create_task_group() as clients:
            for n in range(10):
                clients.start_soon(ask, listener.extra(SocketAttribute.local_port), n)
        group.cancel_scope.cancel()
    assert sorted(done) == list(range(10))


async def test_the_handlers_run_in_the_group_that_is_given(net: Net):
    async def handler(stream: ByteStream) -> None:
        async with stream:
            await stream.send(b"hello")
            outer.cancel_scope.cancel()

    async with (
        await create_rdma_listener(local_host=HOST) as listener,
        anyio.create_task_group() as outer,
        await connect_rdma(HOST, listener.extra(SocketAttribute.local_port)),
    ):
        outer.start_soon(listener.serve, handler, outer)
        await anyio.sleep_forever()
    assert outer.cancel_scope.cancelled_caught


async def test_an_exception_of_a_handler_ends_the_serving(net: Net):
    async def handler(stream: ByteStream) -> None:
        async with stream:
            raise LookupError("in the handler")

    async with await create_rdma_listener(local_host=HOST) as listener:
        async with await connect_rdma(HOST, listener.extra(SocketAttribute.local_port)):
            with pytest.raises(ExceptionGroup) as caught:
                await listener.serve(handler)
    assert caught.group_contains(LookupError)


async def test_much_both_ways_at_once(ends):
    near, far = ends

    async def send(stream: ByteStream, seed: int) -> None:
        pattern = Pattern(seed=seed)
        for size in (1, 7, 65536, 100_000, MIB, MIB, MIB, MIB):
            await stream.send(pattern.take(size))
        await stream.send_eof()

    async def check(stream: ByteStream, seed: int) -> None:
        pattern = Pattern(seed=seed)
        async for chunk in stream:
            assert 0 < len(chunk) <= 65536
            pattern.check(chunk)
        assert pattern.position == 4 * MIB + 165_544

    async with anyio.create_task_group() as group:
        for stream, seed in ((near, 1), (far, 2)):
            group.start_soon(send, stream, seed)
            group.start_soon(check, stream, 3 - seed)


async def test_max_bytes(ends):
    near, far = ends
    await near.send(b"0123456789")
    assert await far.receive(1) == b"0"
    assert await far.receive(4) == b"1234"
    assert await far.receive() == b"56789"
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            await far.receive(wrong)
    await near.send(b"still there")
    with pytest.raises(TypeError):
        await far.receive("all")
    assert await far.receive() == b"still there"


async def test_what_can_be_sent(ends):
    near, far = ends
    for item in (b"", b"bytes ", bytearray(b"bytearray "), memoryview(b"memoryview")):
        await near.send(item)
    with pytest.raises(TypeError):
        await near.send("text")
    await near.send_eof()
    assert await read_all(far) == b"bytes bytearray memoryview"


async def test_a_buffer_is_the_callers_again_after_send(ends):
    near, far = ends
    buffer = bytearray(b"x" * MIB)
    await near.send(buffer)
    buffer[:] = b"y" * MIB
    await near.send_eof()
    assert await read_all(far) == b"x" * MIB


# ---- back-pressure and cancelling


async def test_a_receiver_that_does_not_ask_holds_the_sender_up(ends):
    near, far = ends
    sent = await fill(near)
    await until_seen(lambda: far._protocol._paused)
    assert far._protocol._held < 65536 + MIB, "the bytes wait in slots, not in the program"
    with anyio.move_on_after(0.05) as scope:
        await near.send(b"never sent")
    assert scope.cancelled_caught
    async with anyio.create_task_group() as group:
        group.start_soon(near.send, b"the end")
        got = b""
        while not got.endswith(b"the end"):
            got += await far.receive()
    assert got == sent + b"the end", "what was cancelled did not go, not in part either"


async def test_cancelling_receive_loses_nothing(ends):
    near, far = ends
    with anyio.move_on_after(0.01) as scope:
        await far.receive()
    assert scope.cancelled_caught
    # Cancelled in the very moment in which bytes come: by scopes, and by asyncio's own way.
    got = b""
    for n in range(100):
        async with anyio.create_task_group() as group:

            async def receive() -> None:
                nonlocal got
                got += await far.receive(3)

            group.start_soon(receive)
            await near.send(b"%02d;" % n)
            await loop_turns(n % 7)
            group.cancel_scope.cancel()
    for n in range(100, 200):
        task = asyncio.ensure_future(far.receive(3))
        await near.send(b"%03d" % n)
        await loop_turns(n % 7)
        if not task.cancel():
            got += task.result()
        else:
            await asyncio.wait([task])
            assert task.cancelled()
    await near.send_eof()
    got += await read_all(far)
    assert got == b"".join(b"%02d;" % n for n in range(100)) + b"".join(b"%03d" % n for n in range(100, 200))


async def test_a_cancelled_scope_is_noticed_though_nothing_has_to_wait(ends):
    near, far = ends
    await near.send(b"there")
    for call in (far.receive, lambda: near.send(b"not there")):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await call()
        assert scope.cancelled_caught
    await near.send_eof()
    assert await read_all(far) == b"there"


async def test_others_have_their_turn(ends):
    """Each call is a checkpoint: a task that always finds bytes, and room, does not block others."""
    near, far = ends
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await loop_turns()

    counting = asyncio.ensure_future(count())
    for _ in range(50):
        await near.send(b"x")
    for _ in range(50):
        await far.receive(1)
    assert turns >= 50
    counting.cancel()


async def test_busy(ends):
    near, far = ends
    async with anyio.create_task_group() as group:
        group.start_soon(far.receive)
        await until_it_waits(far, "readable")
        with pytest.raises(anyio.BusyResourceError):
            await far.receive()
        await near.send(b"x")
    await fill(near)
    async with anyio.create_task_group() as group:
        group.start_soon(near.send, b"waits")
        await until_it_waits(near, "writable")
        for call in (near.send(b"x"), near.send_eof()):
            with pytest.raises(anyio.BusyResourceError):
                await call
        group.cancel_scope.cancel()


# ---- the ends of it


async def test_end_of_file_leaves_the_other_half(ends):
    near, far = ends
    await near.send(b"question")
    await near.send_eof()
    await near.send_eof()
    with pytest.raises(anyio.ClosedResourceError):
        await near.send(b"more")
    assert await far.receive() == b"question"
    for _ in range(2):
        with pytest.raises(anyio.EndOfStream):
            await far.receive()
    await far.send(b"answer")
    assert await near.receive() == b"answer"


async def test_aclose_delivers_what_was_sent(ends):
    near, far = ends

    async def take() -> None:
        assert await read_all(far) == MUCH

    async with anyio.create_task_group() as group:
        group.start_soon(take)
        await near.send(MUCH)
        await near.aclose()
    await near.aclose()
    for call in (near.receive(), near.send(b"x"), near.send_eof()):
        with pytest.raises(anyio.ClosedResourceError):
            await call
    await until_seen(far._transport.is_closing)  # where both halves have ended, so has the connection
    with pytest.raises(anyio.EndOfStream):
        await far.receive()
    with pytest.raises(anyio.BrokenResourceError):
        await far.send(b"x")
    await far.send_eof()


async def test_aclose_while_others_wait(ends):
    near, far = ends
    raised = []

    async def wait(call) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await call
        raised.append(call)

    await fill(near)
    async with anyio.create_task_group() as group:
        group.start_soon(wait, near.receive())
        group.start_soon(wait, near.send(b"x"))
        await until_it_waits(near, "readable")
        await until_it_waits(near, "writable")
        group.start_soon(near.aclose)
        group.start_soon(near.aclose)  # two who close wait both
        await until_it_waits(near, "lost")
        async with far:
            await read_all(far)
    assert len(raised) == 2


async def test_a_cancelled_aclose_aborts(ends):
    near, far = ends
    await fill(near)
    with anyio.move_on_after(0.01) as scope:
        await near.aclose()
    assert scope.cancelled_caught
    with pytest.raises(anyio.ClosedResourceError):
        await near.receive()
    with pytest.raises(anyio.BrokenResourceError) as caught:
        await read_all(far)
    assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_aclose_forcefully(ends):
    near, far = ends
    await near.send(b"came before")
    assert await far.receive() == b"came before"
    await anyio.aclose_forcefully(near)
    with pytest.raises(anyio.ClosedResourceError):
        await near.send(b"x")
    # Nothing was dropped: whether the end of file or the abort went first makes no difference.
    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
        await far.receive()


async def test_a_peer_that_aborts(ends):
    near, far = ends
    await near.send(b"partly")
    assert await far.receive(4) == b"part"
    near.extra(RdmaAttribute.transport).abort()
    assert await far.receive() == b"ly", "what had come is not lost"
    for call in (far.receive, far.receive, lambda: far.send(b"x")):
        with pytest.raises(anyio.BrokenResourceError) as caught:
            await call()
        assert isinstance(caught.value.__cause__, ConnectionResetError)
    await far.aclose()


async def test_a_peer_that_aborts_while_others_wait(ends):
    near, far = ends
    raised = []

    async def wait(call) -> None:
        with pytest.raises(anyio.BrokenResourceError):
            await call
        raised.append(call)

    await fill(far)
    async with anyio.create_task_group() as group:
        group.start_soon(wait, far.receive())
        group.start_soon(wait, far.send(b"x"))
        await until_it_waits(far, "readable")
        await until_it_waits(far, "writable")
        near.extra(RdmaAttribute.transport).abort()
    assert len(raised) == 2


async def test_an_abort_after_the_end_of_file(ends):
    """Our own reading has ended already, and that stays a clean end."""
    near, far = ends
    await near.send_eof()
    with pytest.raises(anyio.EndOfStream):
        await far.receive()
    near.extra(RdmaAttribute.transport).abort()
    await far._protocol.wait_lost()
    with pytest.raises(anyio.EndOfStream):
        await far.receive()
    with pytest.raises(anyio.BrokenResourceError):
        await far.send(b"x")


async def test_a_stream_that_nobody_keeps(net: Net):
    async with await create_rdma_listener(local_host=HOST) as listener:
        near = await connect_rdma(HOST, listener.extra(SocketAttribute.local_port))
        async with await listener.accept() as far:
            with pytest.warns(ResourceWarning, match="unclosed <RdmaByteStream"):
                del near
                gc.collect()
            with pytest.raises(anyio.BrokenResourceError):
                await far.receive()


# ---- connecting and listening


async def test_attributes(ends):
    near, far = ends
    assert near.extra(SocketAttribute.local_address) == far.extra(SocketAttribute.remote_address)
    assert far.extra(SocketAttribute.local_port) == near.extra(SocketAttribute.remote_port)
    host, port = near.extra(SocketAttribute.remote_address)
    assert host == HOST and port == near.extra(SocketAttribute.remote_port)
    assert near.extra(SocketAttribute.family) == (socket.AF_INET6 if ":" in HOST else socket.AF_INET)
    assert near.extra(RdmaAttribute.device) == near.extra(RdmaAttribute.transport).get_extra_info(
        "rdma_device"
    )
    with pytest.raises(anyio.TypedAttributeLookupError):
        near.extra(SocketAttribute.raw_socket)
    await near.aclose()
    assert near.extra(SocketAttribute.remote_port) == port


async def test_where_a_listener_listens(net: Net):
    listener = await create_rdma_listener(local_host=HOST)
    assert listener.addresses == [listener.extra(SocketAttribute.local_address)]
    await listener.aclose()
    assert listener.addresses == []
    with pytest.raises(anyio.TypedAttributeLookupError):
        listener.extra(SocketAttribute.local_port)


async def test_nobody_listens(net: Net):
    async with await create_rdma_listener(local_host=HOST) as listener:
        port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(OSError):
            await create_rdma_listener(local_host=HOST, local_port=port)
    with pytest.raises(ConnectionRefusedError):
        await connect_rdma(HOST, port)


async def test_wrong_arguments(net: Net):
    with pytest.raises(TypeError, match="colour"):
        await connect_rdma(HOST, 1, colour="red")
    with pytest.raises(TypeError, match="colour"):
        await create_rdma_listener(local_host=HOST, colour="red")
    with pytest.raises(ValueError, match="local_host"):
        await connect_rdma(HOST, 1, local_port=1)
    with pytest.raises(ValueError, match="backlog"):
        await create_rdma_listener(local_host=HOST, backlog=0)


async def test_from_a_certain_address(net: Net):
    async with await create_rdma_listener(local_host=HOST) as listener:
        port = listener.extra(SocketAttribute.local_port)
        async with await connect_rdma(HOST, port, local_host=HOST) as near, await listener.accept() as far:
            assert far.extra(SocketAttribute.remote_address) == near.extra(SocketAttribute.local_address)
            assert near.extra(SocketAttribute.local_address)[0] == HOST


async def test_cancelling_while_connecting(net: Net):
    async with await create_rdma_listener(local_host=HOST) as listener:
        port = listener.extra(SocketAttribute.local_port)
        for turns in range(12):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def connect() -> None:
                        async with await connect_rdma(HOST, port):
                            scope.cancel()

                    group.start_soon(connect)
                    await loop_turns(turns)
                    scope.cancel()


async def test_accepting(net: Net):
    listener = await create_rdma_listener(local_host=HOST)
    raised = []

    async def accept() -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await listener.accept()
        raised.append(True)

    with anyio.move_on_after(0.01) as scope:
        await listener.accept()
    assert scope.cancelled_caught
    async with anyio.create_task_group() as group:
        group.start_soon(accept)
        await until_seen(lambda: listener._queue._waiter is not None)
        with pytest.raises(anyio.BusyResourceError):
            await listener.accept()
        await listener.aclose()
    await listener.aclose()
    assert raised
    for call in (listener.accept, lambda: listener.serve(print)):
        with pytest.raises((anyio.ClosedResourceError, ExceptionGroup)) as caught:
            await call()
        assert "ClosedResourceError" in repr(caught.value)


async def test_a_device_that_is_removed_ends_the_accepting(net: Net):
    """The test does what the server would do then."""
    async with await create_rdma_listener(local_host=HOST) as listener:
        net.loop.call_soon(listener._queue.server.close)
        for _ in range(2):
            with pytest.raises(anyio.BrokenResourceError, match="is gone"):
                await listener.accept()


async def test_who_waits_to_be_accepted_is_aborted_with_the_listener(net: Net):
    async with await create_rdma_listener(local_host=HOST, backlog=2) as listener:
        port = listener.extra(SocketAttribute.local_port)
        first = [await connect_rdma(HOST, port) for _ in range(2)]
        await until_seen(lambda: len(listener._queue._arrived) == 2)
        # There is no place for a third.
        async with await connect_rdma(HOST, port) as third:
            with pytest.raises(anyio.BrokenResourceError):
                await third.receive()
        async with await listener.accept() as accepted:
            await listener.aclose()
            await accepted.send(b"lives on")
            # A process's first connection to another one may be made after its second.
            theirs = accepted.extra(SocketAttribute.remote_port)
            first.sort(key=lambda stream: stream.extra(SocketAttribute.local_port) != theirs)
            assert await first[0].receive() == b"lives on"
            with pytest.raises(anyio.BrokenResourceError):
                await first[1].receive()
            for stream in first:
                await stream.aclose()


async def test_asyncios_transports_are_its_peers(net: Net):
    """It is the same protocol on the wire."""
    async with await create_rdma_listener(local_host=HOST) as listener:
        client = await net.connect(listener.extra(SocketAttribute.local_port))
        async with await listener.accept() as stream:
            client.transport.write(b"from asyncio")
            assert await stream.receive() == b"from asyncio"
            await stream.send(b"from AnyIO")
            assert await client.until_received(10) == b"from AnyIO"
    assert await client.until_lost() is None
    _, port = await net.serve(Recorder)
    async with await connect_rdma(HOST, port) as stream:
        await stream.send(b"hello")


async def test_a_connection_of_another_process(net: Net):
    peer = net.spawn("echo.py")
    port = await peer.port()
    async with await connect_rdma(THERE, port) as stream:
        await stream.send(b"across")
        got = b""
        while len(got) < 6:
            got += await stream.receive()
        assert got == b"across"


# ---- what others make of them


async def test_buffered(ends):
    near, far = ends
    await near.send(b"a line\nexactly|rest")
    await near.send_eof()
    buffered = BufferedByteReceiveStream(far)
    assert await buffered.receive_until(b"\n", 100) == b"a line"
    assert await buffered.receive_exactly(8) == b"exactly|"
    with pytest.raises(anyio.IncompleteRead):
        await buffered.receive_exactly(5)


async def test_text(ends):
    near, far = ends
    await TextSendStream(near).send("grün, ")
    await TextSendStream(near).send("€")
    await near.send_eof()
    assert "".join([text async for text in TextReceiveStream(far)]) == "grün, €"


# For localhost; the client below trusts anybody.
CERTIFICATE = """
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgAy8cyfLxNcotcEID
Oa8sQJg+p9uWEtW5qQVrN/l7NTehRANCAAQlMXeXkeWQFHFhvfiYumE4rCVbcer9
T0GXIUC2XLykcvouL2U0kJ6KTCn9lb6U6kcurP3cPRtSgTfXsuPqaxq7
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBlTCCATugAwIBAgIUZ8ZIRNwb3/p9Qu4ll5gtD2tVG/MwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTIxMzc1N1oYDzIxMjYxMDI4
MjEzNzU3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQlMXeXkeWQFHFhvfiYumE4rCVbcer9T0GXIUC2XLykcvouL2U0kJ6K
TCn9lb6U6kcurP3cPRtSgTfXsuPqaxq7o2kwZzAdBgNVHQ4EFgQUAAFO+pj5Ijbx
Yqi2AoWkO2AlIk8wHwYDVR0jBBgwFoAUAAFO+pj5IjbxYqi2AoWkO2AlIk8wDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
SAAwRQIgGdWtFQcbbkBVgYyKurA6zlS3BvmiXMza+TlFBSbI5V0CIQDdAIwpnC4H
x4BVBnRQG+DlHl8eaaVR2Bc1e1RutcTvcw==
-----END CERTIFICATE-----
"""


async def test_tls(ends, tmp_path):
    near, far = ends
    (tmp_path / "certificate").write_text(CERTIFICATE)
    of_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    of_server.load_cert_chain(tmp_path / "certificate")
    of_client = ssl.create_default_context()
    of_client.check_hostname = False
    of_client.verify_mode = ssl.CERT_NONE

    async def serve() -> None:
        async with await TLSStream.wrap(far, server_side=True, ssl_context=of_server) as stream:
            async for chunk in stream:
                await stream.send(chunk)

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        async with await TLSStream.wrap(near, hostname="localhost", ssl_context=of_client) as stream:
            await stream.send(MUCH[:MIB])
            got = b""
            while len(got) < MIB:
                got += await stream.receive()
            assert got == MUCH[:MIB]


def test_importing_rdmanet_imports_no_anyio():
    code = "import sys, rdmanet, rdmanet.streams; print('anyio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_under_anyio_run(loop_factory):
    async def main() -> None:
        async with pair() as (near, far):
            await near.send(b"hello")
            assert await far.receive() == b"hello"

    anyio.run(main, backend_options={"loop_factory": loop_factory})


@pytest.mark.embedded_only("librdmacm does not survive a fork")
async def test_a_forked_child_accepts_nothing_and_says_so():
    async with await create_rdma_listener(local_host=HOST) as listener:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                listener.accept().send(None)
            except RuntimeError as exc:
                status = 0 if "after fork" in str(exc) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
