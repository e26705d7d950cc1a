"""How connections and servers end: every way out, in the order asyncio promises.

`eof_received` means that the peer said so. A connection that ends otherwise reports an error, so
that half a file never looks like a whole one.
"""

import asyncio
import gc
import socket
import weakref

import pytest
from harness import HOST, Echo, HalfOpen, Net, Recorder
from pattern import Pattern

from tests.support.waiting import begin, loop_turns, until_seen

MIB = 1 << 20


class Deaf(Recorder):
    """Reads nothing until told to."""

    def connection_made(self, transport):
        transport.pause_reading()
        super().connection_made(transport)


# ---- close


async def test_close_is_seen_as_eof_then_lost_without_error(net: Net):
    client, server = await net.pair()
    client.transport.write(b"last words")
    client.transport.close()
    assert await client.until_lost() is None
    assert await server.until_lost() is None
    assert server.events == ["made", "data", "eof", "lost"]
    assert client.events == ["made", "lost"]
    assert server.data == b"last words"


async def test_close_is_not_at_once_and_idempotent(net: Net):
    client, server = await net.pair()
    client.transport.close()
    assert client.transport.is_closing()
    assert not client.lost  # never within the call
    client.transport.close()
    client.transport.abort()
    await client.until_lost()
    client.transport.close()
    client.transport.abort()
    await server.until_lost()
    assert client.events == ["made", "lost"]


@pytest.mark.parametrize("size", [1, 5 * MIB])
async def test_close_delivers_what_was_written(net: Net, size):
    client, server = await net.pair()
    text = b"z" * size
    client.transport.write(text)
    client.transport.close()
    assert await server.until_received(size) == text
    assert await server.until_lost() is None
    assert server.events == ["made", "data", "eof", "lost"]


async def test_close_delivers_to_another_process(net: Net):
    """The bytes are in the peer's hands when connection_lost(None) comes, even if we then exit."""
    peer = net.spawn("bulk.py", 0)
    client = await net.connect(await peer.port(), HalfOpen)
    pattern = Pattern()
    for _ in range(20):
        client.transport.write(pattern.take(MIB))
    client.transport.close()
    assert await client.until_lost() is None
    assert await peer.expect("received") == [str(20 * MIB)]


async def test_close_with_a_reader_who_is_slow(net: Net):
    """close() waits for the peer's application only as long as its ring is full."""
    client, server = await net.pair(server=Deaf)
    pattern, size = Pattern(), 0
    while not client.writing_paused:
        client.transport.write(pattern.take(MIB))
    size = pattern.position
    client.transport.close()
    assert client.transport.is_closing() and not client.lost
    server.transport.resume_reading()
    await server.until_received(size)
    assert await client.until_lost() is None
    assert await server.until_lost() is None
    assert len(server.data) == size
    Pattern().check(server.data)


async def test_close_of_little_does_not_wait_for_the_application(net: Net):
    """What fits the peer's ring is delivered: a peer that does not read cannot hold close up."""
    client, server = await net.pair(server=Deaf)
    client.transport.write(b"small")
    client.transport.close()
    assert await client.until_lost() is None
    assert not server.data
    server.transport.resume_reading()
    assert await server.until_lost() is None
    assert server.data == b"small"
    assert server.events == ["made", "data", "eof", "lost"]


async def test_close_timeout_gives_up_on_a_peer_that_never_reads(net: Net):
    client, server = await net.pair(server=Deaf, close_timeout=0.2)
    for _ in range(8):  # one is taken in though nobody reads
        client.transport.write(b"y" * MIB)
    client.transport.close()
    error = await client.until_lost()
    assert isinstance(error, TimeoutError)
    server.transport.resume_reading()
    assert await server.until_lost() is not None
    assert not server.eof
    assert set(server.data) == {ord("y")}


@pytest.mark.quick_on("uvloop")
async def test_close_timeout_counts_from_the_last_progress(net: Net):
    """A peer that reads a little at a time is slow, not gone: the timeout starts over."""

    class Sipping(Deaf):
        def keep(self, data):
            self.transport.pause_reading()
            net.loop.call_later(0.02, self.transport.resume_reading)

    client, server = await net.pair(server=Sipping, close_timeout=1)
    pattern = Pattern()
    while pattern.position < 8 * MIB:
        client.transport.write(pattern.take(MIB))
    client.transport.close()
    server.transport.resume_reading()
    assert await client.until_lost() is None
    await server.until_received(8 * MIB)


async def test_nothing_is_delivered_after_close(net: Net):
    client, server = await net.pair()
    client.transport.close()
    server.transport.write(b"too late")
    await client.until_lost()
    await server.until_lost()
    assert client.events == ["made", "lost"]


async def test_both_close_at_once(net: Net):
    client, server = await net.pair()
    client.transport.write(b"c" * 1000)
    server.transport.write(b"s" * 1000)
    await client.until_received(1000)
    await server.until_received(1000)
    client.transport.close()
    server.transport.close()
    assert await client.until_lost() is None
    assert await server.until_lost() is None


async def test_close_in_connection_made(net: Net):
    class Shy(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.close()

    client, server = await net.pair(server=Shy)
    assert await client.until_lost() is None
    assert client.events == ["made", "eof", "lost"]
    assert await server.until_lost() is None


async def test_write_and_close_in_connection_made(net: Net):
    class Greeter(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"welcome, goodbye")
            transport.close()

    client, _ = await net.pair(server=Greeter)
    assert await client.until_lost() is None
    assert client.data == b"welcome, goodbye"
    assert client.events == ["made", "data", "eof", "lost"]


async def test_everything_may_be_over_before_the_server_knows_of_it(net: Net, fewer):
    """Data and end of file overtake the event that says the connection is made."""
    _, port = await net.serve()
    peer = net.spawn("hasty.py")
    for turn in range(fewer(30)):
        peer.say(f"go {port}")
        assert await peer.expect("lost") == ["None"]
        await net.until(lambda turn=turn: len(net.recorders) > turn)
        server = net.recorders[turn]
        assert await server.until_lost() is None
        assert server.events == ["made", "data", "eof", "lost"]
        assert server.data == b"all of it"


# ---- abort


async def test_abort_is_an_error_for_the_peer_and_never_eof(net: Net):
    client, server = await net.pair()
    client.transport.write(b"x")
    await server.until_received(1)
    client.transport.abort()
    assert client.transport.is_closing()
    assert not client.lost
    assert await client.until_lost() is None
    assert isinstance(await server.until_lost(), ConnectionError)
    assert server.events == ["made", "data", "lost"]


async def test_connection_lost_comes_in_the_turn_after_an_abort(net: Net):
    """It does not wait until the peer has the Abort, if the peer cannot write to our memory meanwhile."""
    client, _ = await net.pair()
    client.transport.abort()
    assert not client.lost
    await loop_turns(1)
    assert client.lost


async def test_nothing_is_buffered_after_an_abort(net: Net):
    client, _ = await net.pair()
    while not client.transport.get_write_buffer_size():
        client.transport.write(b"x")
    client.transport.abort()
    assert client.transport.get_write_buffer_size() == 0


async def test_a_server_that_aborts_in_connection_made_says_so(net: Net):
    """It may not send before the client's first frame, and the connection does not end before that."""

    class Refuses(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.abort()

    _, port = await net.serve(Refuses)
    for _ in range(10):
        client = await net.connect(port)
        assert "the peer aborted the connection" in str(await client.until_lost())


async def test_abort_throws_away_what_is_not_sent(net: Net):
    client, server = await net.pair(server=Deaf)
    while not client.writing_paused:
        client.transport.write(b"y" * MIB)
    client.transport.abort()
    assert await client.until_lost() is None
    server.transport.resume_reading()
    assert isinstance(await server.until_lost(), ConnectionError)
    assert not server.eof


async def test_abort_after_close_ends_the_wait(net: Net):
    client, server = await net.pair(server=Deaf)
    while not client.writing_paused:
        client.transport.write(b"y" * MIB)
    client.transport.close()
    client.transport.abort()
    await client.until_lost()
    server.transport.resume_reading()
    assert isinstance(await server.until_lost(), ConnectionError)


async def test_bytes_already_received_come_before_the_error(net: Net):
    """The peer's close() overtakes nothing: bytes that have arrived are handed over first."""
    client, server = await net.pair(server=Deaf)
    client.transport.write(b"precious")
    client.transport.write_eof()
    client.transport.close()
    await client.until_lost()
    server.transport.resume_reading()
    await server.until_lost()
    assert server.data == b"precious"


async def test_a_writer_hears_of_the_loss_while_the_reader_pauses(net: Net):
    """connection_lost() waits until what came is read; who waits for room to write need not."""

    class Pauses(Recorder):
        pauses = True

        def data_received(self, data):
            super().data_received(data)
            if self.pauses:
                self.transport.pause_reading()

    client, server = await net.pair(client=Pauses, server=Deaf)
    while not client.writing_paused:
        client.transport.write(b"y" * MIB)
    for _ in range(3):
        server.transport.write(b"x" * MIB)
    await client.until(lambda: client.received)
    info = client.transport.get_extra_info
    await until_seen(lambda: info("rdma_stats")["bytes_received"] > client.received)
    server.transport.abort()
    await client.until(lambda: not client.writing_paused)
    assert not client.lost
    client.pauses = False
    client.transport.resume_reading()
    assert isinstance(await client.until_lost(), ConnectionError)


# ---- half-close


async def test_write_eof_leaves_the_other_direction(net: Net):
    client, server = await net.pair(server=HalfOpen)
    client.transport.write(b"question")
    client.transport.write_eof()
    await server.until(lambda: server.eof)
    assert server.data == b"question"
    assert not server.transport.is_closing()
    for _ in range(30):
        server.transport.write(b"a" * MIB)
    server.transport.close()
    assert await client.until_received(30 * MIB) == b"a" * 30 * MIB
    assert await client.until_lost() is None
    assert await server.until_lost() is None
    assert client.events == ["made", "data", "eof", "lost"]
    assert [event for event in server.events if event not in ("pause", "resume")] == [
        "made",
        "data",
        "eof",
        "lost",
    ]


async def test_eof_received_false_closes(net: Net):
    client, server = await net.pair()
    client.transport.write_eof()
    assert await server.until_lost() is None
    assert await client.until_lost() is None
    assert server.events == ["made", "eof", "lost"]
    assert client.events == ["made", "eof", "lost"]


async def test_write_eof_sends_what_is_buffered_first(net: Net):
    client, server = await net.pair(server=lambda: DeafHalfOpen())
    pattern = Pattern()
    while not client.writing_paused:
        client.transport.write(pattern.take(MIB))
    client.transport.write_eof()
    server.transport.resume_reading()
    await server.until(lambda: server.eof)
    assert server.received == pattern.position


class DeafHalfOpen(HalfOpen, Deaf):
    pass


async def test_write_eof_twice_is_one(net: Net):
    client, server = await net.pair(server=HalfOpen)
    assert client.transport.can_write_eof() is True
    client.transport.write_eof()
    client.transport.write_eof()
    await server.until(lambda: server.eof)
    server.transport.write(b"still here")
    await client.until_received(10)
    assert server.events == ["made", "eof"]


async def test_write_after_eof_is_refused(net: Net):
    client, _ = await net.pair(server=HalfOpen)
    client.transport.write_eof()
    with pytest.raises(RuntimeError):
        client.transport.write(b"one more thing")
    with pytest.raises(RuntimeError):
        client.transport.writelines([b"one more thing"])


async def test_both_half_close(net: Net):
    """Both have sent end of file: the connection still ends only when one side closes it."""
    client, server = await net.pair(HalfOpen, HalfOpen)
    client.transport.write_eof()
    server.transport.write_eof()
    await client.until(lambda: client.eof)
    await server.until(lambda: server.eof)
    client.transport.close()
    server.transport.close()
    assert await client.until_lost() is None
    assert await server.until_lost() is None


async def test_eof_waits_for_a_paused_reader(net: Net):
    client, server = await net.pair(server=Deaf)
    client.transport.write(b"first")
    client.transport.write_eof()
    other, _ = await net.pair(server=Echo)
    other.transport.write(b"time passes")
    await other.until_received(11)
    assert server.events == ["made"]
    server.transport.resume_reading()
    await server.until_lost()
    assert server.events == ["made", "data", "eof", "lost"]


# ---- servers


async def test_a_closed_server_keeps_its_connections(net: Net):
    server, port = await net.serve(Echo)
    client = await net.connect(port)
    server.close()
    assert not server.is_serving()
    client.transport.write(b"still served")
    assert await client.until_received(12) == b"still served"
    with pytest.raises(OSError):
        await net.connect(port)
    client.transport.close()
    await server.wait_closed()


async def test_wait_closed_waits_for_connections(net: Net):
    server, port = await net.serve(Echo)
    client = await net.connect(port)
    client.transport.write(b"x")
    await client.until_received(1)
    server.close()
    waiting = asyncio.ensure_future(server.wait_closed())
    client.transport.write(b"y")
    await client.until_received(2)
    assert not waiting.done()
    client.transport.close()
    await waiting


async def test_close_clients(net: Net):
    server, port = await net.serve(Recorder)
    clients = [await net.connect(port) for _ in range(5)]
    for client in clients:
        client.transport.write(b"x")
    for recorder in await net.accepted_beside(clients):
        await recorder.until_received(1)
    server.close()
    server.close_clients()
    for client in clients:
        assert await client.until_lost() is None
        assert client.eof
    await server.wait_closed()


async def test_abort_clients(net: Net):
    server, port = await net.serve(Recorder)
    clients = [await net.connect(port) for _ in range(5)]
    for client in clients:
        client.transport.write(b"x")
    for recorder in await net.accepted_beside(clients):
        await recorder.until_received(1)
    server.close()
    server.abort_clients()
    for client in clients:
        assert isinstance(await client.until_lost(), ConnectionError)
        assert not client.eof
    await server.wait_closed()


async def test_async_with_closes(net: Net):
    server, port = await net.serve(Echo)
    async with server as same:
        assert same is server
        assert server.is_serving()
    assert not server.is_serving()
    with socket.socket(socket.AF_INET6 if ":" in HOST else socket.AF_INET) as holder:
        holder.bind((HOST, port))  # else a server of another suite may get it
        with pytest.raises(OSError):
            await net.connect(port)


async def test_serve_forever_ends_by_cancellation_and_closes(net: Net):
    server, port = await net.serve(Echo, start_serving=False)
    assert not server.is_serving()
    [serving] = await begin(server.serve_forever())
    await until_seen(server.is_serving)
    client = await net.connect(port)
    client.transport.write(b"x")
    await client.until_received(1)
    client.transport.close()
    await client.until_lost()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not server.is_serving()


async def test_cancelling_serve_forever_closes_the_connections(net: Net):
    """As CPython's: a server that ends by Ctrl-C does not wait for clients that stay."""
    server, port = await net.serve(Echo)
    clients = [await net.connect(port) for _ in range(3)]
    serving = asyncio.ensure_future(server.serve_forever())
    for client in clients:
        client.transport.write(b"x")
        await client.until_received(1)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    for client in clients:
        assert await client.until_lost() is None
        assert client.eof


async def test_start_serving_later(net: Net):
    server, port = await net.serve(Echo, start_serving=False)
    await server.start_serving()
    await server.start_serving()
    client = await net.connect(port)
    client.transport.write(b"x")
    await client.until_received(1)


async def test_the_port_is_free_again_after_close(net: Net):
    server, port = await net.serve(Echo)
    client = await net.connect(port)
    client.transport.write(b"x")
    await client.until_received(1)
    server.close()
    again, _ = await net.serve_on(port, Echo)
    second = await net.connect(port)
    second.transport.write(b"second life")
    assert await second.until_received(11) == b"second life"
    client.transport.write(b"first life")
    assert (await client.until_received(11))[1:] == b"first life"


async def test_what_has_ended_goes_without_the_collector(net: Net):
    """Nothing that a transport is made of refers to it any more."""
    gc.collect()
    gc.disable()
    try:
        _, port = await net.serve()
        client = await net.connect(port)
        (server,) = await net.accepted_beside([client])
        client.transport.write(b"x")
        client.transport.close()
        await client.until_lost()
        await server.until_lost()
        ended = [weakref.ref(side.transport) for side in (client, server)]
        client.transport = server.transport = None
        await until_seen(lambda: not any(transport() for transport in ended))
    finally:
        gc.enable()


async def test_nobody_waits_for_a_peer_that_has_gone_to_hear_of_an_abort(net: Net):
    client, _ = await net.pair()
    life = client.transport._life
    client.transport.abort()
    assert life.teardown.in_farewell  # its Abort is on the way
    life.connection.owner.on_connection_error(ConnectionResetError("the peer has gone"))
    assert not life.teardown.in_farewell


@pytest.mark.once
async def test_a_write_in_connection_lost_is_dropped_if_the_loop_ends_before_the_connection(net: Net):
    class Parting(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            self.transport.write(bytes(MIB))

    client, server = await net.pair(Parting)
    client.transport._end_now()
    assert client.events == ["made", "lost"]
    await server.until_lost()


# ---- a cancelled read, whose peer has yet to let go of its memory


class Owing:
    """A connection whose peer owes the answer to a question of this number."""

    def __init__(self, connection, awaited: int) -> None:
        self._connection = connection
        self.placing_unanswered = awaited

    def __getattr__(self, name):
        return getattr(self._connection, name)


async def test_each_answer_that_a_peer_owes_has_its_time(net: Net, monkeypatch):
    """When the time is up for one that has come, the next one has the whole time again. Only then the peer is late."""
    client, _ = await net.pair()
    life = client.transport._life
    monkeypatch.setattr(life.deadlines, "_connection", Owing(life.connection, 7))
    life.deadlines._answer_is_late(6)
    again = life.deadlines.answer
    assert again is not None
    assert again.when() > net.loop.time() + life.config.close_timeout / 2
    assert not life.machine.over
    again.cancel()
    life.deadlines._answer_is_late(7)
    monkeypatch.undo()
    assert isinstance(await client.until_lost(), TimeoutError)
