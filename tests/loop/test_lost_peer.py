"""A peer that is killed, exits or aborts looks as it does over TCP; or, if the program wants, as an error."""

import asyncio
import contextlib
import signal

import anyio
import pytest
from loop_harness import Recorder, fabric, peer, serving

import rdmanet
from rdmanet.loop import doors
from rdmanet.protocol import Writing
from tests.support.certificates import of_client
from tests.support.waiting import until_seen


class HalfClosing(Recorder):
    """Goes on when the peer has ended its half."""

    def eof_received(self):
        super().eof_received()
        return True


async def connected(port: int, factory=Recorder) -> tuple[rdmanet.RdmaTransport, Recorder]:
    transport, protocol = await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)
    assert fabric(transport) == "rdma"
    transport.write(b"x")
    await protocol.until(lambda: protocol.data == b"x")
    return transport, protocol


@pytest.mark.parametrize("how", ["abort", "exit", "kill"])
async def test_it_is_end_of_file(how):
    with peer("echo.py") as server:
        port = int(await server.line())
        _, protocol = await connected(port)
        await end(server, protocol, how)
    assert (protocol.events, protocol.error) == (["made", "data", "eof", "lost"], None)


@pytest.mark.parametrize("how", ["abort", "exit", "kill"])
async def test_after_its_end_of_file_it_is_no_error(how):
    with peer("echo.py") as server:
        port = int(await server.line())
        transport, protocol = await connected(port, HalfClosing)
        transport.write(b"eof")
        await protocol.until(lambda: "eof" in protocol.events)
        await end(server, protocol, how)
    assert (protocol.events, protocol.error) == (["made", "data", "eof", "lost"], None)


@pytest.mark.parametrize("how", ["abort", "exit", "kill"])
async def test_it_may_be_an_error(how):
    rdmanet.patch_loop(asyncio.get_running_loop(), lost_peer="error")
    with peer("echo.py") as server:
        port = int(await server.line())
        _, protocol = await connected(port)
        await end(server, protocol, how)
    assert protocol.events == ["made", "data", "lost"]
    assert isinstance(protocol.error, ConnectionResetError)


@pytest.mark.parametrize("ending", ["run", "loop.close"])
@pytest.mark.parametrize("how", ["close", "forget"])
@pytest.mark.parametrize("size", [3, 300_000])
async def test_what_a_program_wrote_at_its_end_arrives(how, size, ending):
    served = asyncio.get_running_loop().create_future()

    def recorder():
        served.set_result(Recorder())
        return served.result()

    async with serving(recorder) as (_, port):
        with peer("parting.py", port, size, how, ending) as client:
            assert await client.line() == "rdma"
            protocol = await served
            await protocol.until(lambda: "lost" in protocol.events)
    assert (len(protocol.data), protocol.events) == (size, ["made", "data", "eof", "lost"])
    assert protocol.error is None


async def test_what_it_sent_before_comes_first():
    with peer("echo.py") as server:
        port = int(await server.line())
        transport, protocol = await connected(port)
        transport.pause_reading()
        transport.write(b"big")
        poll = transport.get_extra_info("socket").fileno()
        assert poll >= 0
        await asyncio.get_running_loop().run_in_executor(None, readable, poll)
        # Of several frames, the first is readable before the last is sent.
        while await server.line() != "sent":
            pass
        server.send_signal(signal.SIGKILL)
        await asyncio.get_running_loop().run_in_executor(None, server.process.wait)
        transport.resume_reading()
        await protocol.until(lambda: "lost" in protocol.events)
    assert (len(protocol.data), protocol.events[-2:], protocol.error) == (4_001, ["eof", "lost"], None)


def readable(fd: int) -> None:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(30_000)


async def test_readers_get_nothing_more():
    with peer("echo.py") as server:
        port = int(await server.line())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert fabric(writer) == "rdma"
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        server.send_signal(signal.SIGKILL)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(("how", "size"), [("close", 14), ("close", 1_000_000), ("abort", 14)])
@pytest.mark.parametrize("encrypted", ["tls", "plain"])
async def test_an_answer_is_read_before_the_end(encrypted, how, size):
    """The server answers while its client is writing, and ends: who reads gets the answer, who writes the error."""
    context = of_client() if encrypted == "tls" else None
    with peer("answering.py", how, size, encrypted) as server:
        port = int(await server.line())
        for _ in range(3):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=context and "localhost"
            )
            assert fabric(writer) == "rdma"
            writer.write(b"POST\n")
            with contextlib.suppress(OSError):
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
            assert await reader.readexactly(size) == b"a" * size
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            with pytest.raises(ConnectionResetError):
                await writer.drain()
            writer.close()


async def test_a_reader_is_told_of_the_loss_after_the_last_byte():
    """Of what the lost connection has left, each kind of read gets what there is, and then the error."""
    rdmanet.patch_loop(asyncio.get_running_loop(), lost_peer="error")
    with peer("answering.py", "abort", 10, "plain") as server:
        port = int(await server.line())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST\n")
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
        assert isinstance(reader.exception(), ConnectionResetError)
        for read in reader.read(), reader.readline(), reader.readexactly(11):
            with pytest.raises(ConnectionResetError):
                await read
        assert await reader.read(4) == await reader.readexactly(4) == b"aaaa"
        assert await reader.read(4) == b"aa"
        with pytest.raises(ConnectionResetError):
            await reader.read(4)


async def test_a_slow_reader_of_tls_loses_nothing():
    """It has paused, and what TLS holds is not decrypted when the server is gone."""
    with peer("answering.py", "impatient", 300_000, "tls") as server:
        port = int(await server.line())
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=of_client(), server_hostname="localhost"
        )
        assert fabric(writer) == "rdma"
        writer.write(b"POST\n")
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        assert await reader.readexactly(300_000) == b"a" * 300_000


async def test_a_server_that_is_stopped_is_reached_by_tcp():
    """The kernel accepts for it; RDMA needs its loop."""
    with peer("echo.py") as server:
        port = int(await server.line())
        server.stop()
        transport, protocol = await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", port)
        assert fabric(transport) == "tcp"
        assert f"did not answer within {doors.PATIENCE_S} s" in transport.get_extra_info("fabric_reason")
        server.send_signal(signal.SIGCONT)
        transport.write(b"x")
        await protocol.until(lambda: protocol.data == b"x")
        transport.abort()


async def end(server, protocol: Recorder, how: str) -> None:
    if how == "kill":
        server.send_signal(signal.SIGKILL)
    else:
        protocol.transport.write(how.encode())
    await protocol.until(lambda: "lost" in protocol.events)


def state_of(transport: rdmanet.RdmaTransport) -> str:
    return next(info.state for info in rdmanet.connections() if info.transport is transport)


async def test_what_came_before_the_end_is_read_first():
    """AnyIO pauses reading between two reads, and takes a transport that is closing for one with nothing to read."""
    ends: list[Recorder] = []

    class Far(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            ends.append(self)

    async with serving(Far) as (_, port):
        stream = await anyio.connect_tcp("127.0.0.1", port)
        transport = stream._transport
        assert fabric(transport) == "rdma"
        await stream.send(b"x")
        await until_seen(lambda: ends and ends[0].data)
        for answer in (b"an answer", b"the last"):
            ends[0].transport.write(answer)
            if answer == b"the last":
                ends[0].transport.close()
                await until_seen(lambda: state_of(transport).startswith("draining"))
                assert not transport.is_closing()
                transport._life.machine.writing = Writing.CLOSE_DUE  # close() waits for TLS
                assert transport.is_closing()
                transport._life.machine.writing = Writing.OVER
            assert await stream.receive() == answer
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await until_seen(transport.is_closing)
        await stream.aclose()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_who_only_writes_learns_of_the_end_while_bytes_are_unread(how):
    """drain() is no turn of the loop unless the transport is closing, and nobody else would say that it is over."""
    ends: list[asyncio.Transport] = []

    class Far(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            ends.append(transport)

    async with serving(Far) as (_, port):
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, "127.0.0.1", port)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await until_seen(lambda: ends)
        transport.pause_reading()
        ends[0].write(b"unread")
        getattr(ends[0], how)()
        await until_seen(lambda: state_of(transport).startswith("draining"))
        assert not transport.is_closing()
        with pytest.raises(ConnectionResetError):
            for _ in range(1000):
                writer.write(b"to nobody")
                await writer.drain()
