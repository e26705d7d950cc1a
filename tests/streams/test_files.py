"""sendfile: loop.sendfile's meaning, on our transports."""

import asyncio
import io
import os
import threading

import pytest
from harness import HalfOpen, Net, Recorder
from pattern import Pattern

import rdmanet
from rdmanet.streams import files
from tests.support.waiting import loop_turns

pytestmark = pytest.mark.once

MIB = 1 << 20


@pytest.fixture
def content() -> bytes:
    return Pattern().take(MIB)


@pytest.fixture
def path(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file"


@pytest.fixture
async def executor():
    """The loop's threads end with the test."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()


def page_cache(monkeypatch, holds: bool) -> None:
    """Decide what the page cache has: everything, or nothing."""
    preadv = os.preadv

    def patched(fd, buffers, position, flags=0):
        if flags and not holds:
            raise BlockingIOError
        return preadv(fd, buffers, position)

    monkeypatch.setattr(files.os, "preadv", patched)


async def test_a_whole_file(net: Net, path, content, executor):
    client, server = await net.pair()
    with path.open("rb") as file:
        assert await rdmanet.sendfile(client.transport, file) == MIB
        assert file.tell() == MIB
        assert await rdmanet.sendfile(client.transport, file) == MIB, (
            "from the offset, not from where the file is"
        )
    assert await server.until_received(2 * MIB) == content * 2


async def test_a_part(net: Net, path, content, executor):
    client, server = await net.pair()
    parts = [(0, 1), (7, 100_000), (MIB - 3, 3), (MIB - 3, 100), (MIB - 3, None), (MIB, None), (2 * MIB, 5)]
    expected = b""
    with path.open("rb", buffering=0) as file:
        for offset, count in parts:
            part = content[offset:] if count is None else content[offset : offset + count]
            assert await rdmanet.sendfile(client.transport, file, offset, count) == len(part)
            assert file.tell() == offset + len(part)
            expected += part
    assert await server.until_received(len(expected)) == expected


@pytest.mark.parametrize("holds", [True, False])
async def test_a_thread_only_where_the_disk_has_to_be_waited_for(
    net: Net, path, content, executor, monkeypatch, holds
):
    page_cache(monkeypatch, holds)
    client, server = await net.pair()
    before = threading.active_count()
    with path.open("rb") as file:
        assert await rdmanet.sendfile(client.transport, file) == MIB
    assert (threading.active_count() == before) is holds
    assert await server.until_received(MIB) == content


async def test_what_has_no_descriptor(net: Net, content, executor):
    client, server = await net.pair()
    file = io.BytesIO(content)
    assert await rdmanet.sendfile(client.transport, file, 10, 100_000) == 100_000
    assert file.tell() == 100_010
    assert await server.until_received(100_000) == content[10:100_010]


async def test_a_peer_that_does_not_read_holds_it_up(net: Net, path, content, monkeypatch):
    page_cache(monkeypatch, True)
    client, server = await net.pair()
    server.transport.pause_reading()
    with path.open("rb") as file:
        sending = asyncio.ensure_future(send_repeatedly(client.transport, file, 10))
        await client.until(lambda: client.writing_paused)
        await asyncio.wait([sending], timeout=0.05)
        assert not sending.done()
        assert client.transport.get_write_buffer_size() <= 2 * 65536
        server.transport.resume_reading()
        await sending
    assert await server.until_received(10 * MIB) == content * 10
    assert not client.writing_paused, "its protocol was told as ever"


async def send_repeatedly(transport, file, times):
    for _ in range(times):
        await rdmanet.sendfile(transport, file)


async def test_receiving_goes_on(net: Net, path, content, monkeypatch):
    page_cache(monkeypatch, True)
    client, server = await net.pair()
    with path.open("rb") as one, path.open("rb") as other:
        await asyncio.gather(
            rdmanet.sendfile(client.transport, one), rdmanet.sendfile(server.transport, other)
        )
    assert await server.until_received(MIB) == await client.until_received(MIB) == content


async def test_nobody_else_writes_meanwhile(net: Net, path, content, monkeypatch):
    page_cache(monkeypatch, True)
    client, server = await net.pair()
    server.transport.pause_reading()
    with path.open("rb") as file, path.open("rb") as other:
        sending = asyncio.ensure_future(send_repeatedly(client.transport, file, 10))
        await client.until(lambda: client.writing_paused)
        for write in (
            lambda: client.transport.write(b"in between"),
            lambda: client.transport.writelines([b"in between"]),
        ):
            with pytest.raises(RuntimeError, match="sendfile is in progress"):
                write()
        with pytest.raises(RuntimeError, match="sendfile is in progress"):
            await rdmanet.sendfile(client.transport, other)
        server.transport.resume_reading()
        await sending
        client.transport.write(b"behind it")
    assert await server.until_received(10 * MIB + 9) == content * 10 + b"behind it"


@pytest.mark.parametrize("end", ["cancelled", "write_eof", "close"])
async def test_writing_after_it_was_cut_short(net: Net, path, monkeypatch, end):
    """sendfile() leaves the transport as it is: open after a cancellation, closed after what closed it."""
    page_cache(monkeypatch, True)
    client, server = await net.pair(server=HalfOpen)
    server.transport.pause_reading()
    with path.open("rb") as file:
        sending = asyncio.ensure_future(send_repeatedly(client.transport, file, 10))
        await client.until(lambda: client.writing_paused)
        {
            "cancelled": sending.cancel,
            "write_eof": client.transport.write_eof,
            "close": client.transport.close,
        }[end]()
        server.transport.resume_reading()
        await asyncio.wait([sending])
    if end == "cancelled":
        client.transport.write(b"behind it")
        client.transport.write_eof()
    else:
        expected = (RuntimeError, "write_eof") if end == "write_eof" else (ConnectionResetError, "closed")
        with pytest.raises(expected[0], match=expected[1]):
            sending.result()
    if end == "write_eof":
        with pytest.raises(RuntimeError, match="write_eof"):
            client.transport.write(b"too late")
    if end == "close":
        client.transport.write(b"too late")
    await server.until(lambda: server.eof)
    assert server.data.endswith(b"behind it") == (end == "cancelled")
    server.transport.close()


async def test_others_have_their_turn(net: Net, path, monkeypatch):
    page_cache(monkeypatch, True)
    client, _ = await net.pair()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await loop_turns()

    counting = asyncio.ensure_future(count())
    with path.open("rb") as file:
        await rdmanet.sendfile(client.transport, file)
    counting.cancel()
    assert turns >= MIB // 65536


async def test_cancelling_leaves_what_is_written(net: Net, path, content, monkeypatch):
    page_cache(monkeypatch, True)
    client, server = await net.pair()
    server.transport.pause_reading()
    with path.open("rb") as file:
        sending = asyncio.ensure_future(send_repeatedly(client.transport, file, 10))
        await client.until(lambda: client.writing_paused)
        sending.cancel()
        await asyncio.wait([sending])
        position = file.tell()
    server.transport.resume_reading()
    client.transport.close()
    await server.until_lost()
    sent = (content * 10)[: server.received]
    assert server.data == sent and len(sent) % MIB == position % MIB


@pytest.mark.parametrize("end", ["the peer aborts", "we close"])
async def test_the_end_of_the_connection(net: Net, path, monkeypatch, end):
    page_cache(monkeypatch, True)
    client, server = await net.pair()
    server.transport.pause_reading()
    with path.open("rb") as file:
        sending = asyncio.ensure_future(send_repeatedly(client.transport, file, 10))
        await client.until(lambda: client.writing_paused)
        if end == "we close":
            client.transport.close()
        else:
            server.transport.abort()
        server.transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            await sending
        with pytest.raises(RuntimeError, match="closing"):
            await rdmanet.sendfile(client.transport, file)
    await client.until_lost()


async def test_wrong_arguments(net: Net, path, executor):
    client, _ = await net.pair(HalfOpen, HalfOpen)  # a peer that answers the end would end it all
    transport = client.transport
    with path.open("rb") as file, path.open() as text:
        for error, arguments in (
            (TypeError, (object(), file)),
            (ValueError, (transport, text)),
            (ValueError, (transport, file, -1)),
            (ValueError, (transport, file, 0, 0)),
            (ValueError, (transport, file, 0, -1)),
            (TypeError, (transport, file, 1.5)),
            (TypeError, (transport, file, 0, "1")),
            (AttributeError, (transport, "a path")),
        ):
            with pytest.raises(error):
                await rdmanet.sendfile(*arguments)
        with pytest.raises(asyncio.SendfileNotAvailableError):
            await rdmanet.sendfile(transport, file, fallback=False)
        transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            await rdmanet.sendfile(transport, file)
        assert file.tell() == 0
    with pytest.raises(ValueError, match="closed"):
        await rdmanet.sendfile(transport, file)
    with path.open("ab") as unreadable, pytest.raises(OSError):
        await rdmanet.sendfile(transport, unreadable)


async def test_asyncios_own_is_for_its_own(net: Net, path):
    """asyncio's fallback insists on a private base class, and uvloop has no fallback: both must raise."""
    client, _ = await net.pair(Recorder)
    with path.open("rb") as file, pytest.raises((RuntimeError, NotImplementedError)):
        await net.loop.sendfile(client.transport, file)


async def test_a_protocol_that_writes_when_a_file_makes_it_pause_is_refused(net: Net, tmp_path, content):
    """Its bytes would land in the middle of the file."""

    class Writing(Recorder):
        def pause_writing(self):
            super().pause_writing()
            try:
                self.transport.write(b"X")
            except RuntimeError as exc:
                refusals.append(str(exc))

    refusals: list[str] = []
    content *= 8  # more than a ring holds
    path = tmp_path / "large"
    path.write_bytes(content)
    client, server = await net.pair(client=Writing)
    server.transport.pause_reading()
    with path.open("rb") as file:
        sending = asyncio.ensure_future(rdmanet.sendfile(client.transport, file))
        await client.until(lambda: client.writing_paused)
        server.transport.resume_reading()
        assert await sending == len(content)
    assert refusals and all("sendfile is in progress" in refusal for refusal in refusals)
    client.transport.write(b"end")
    assert await server.until_received(len(content) + 3) == content + b"end"
