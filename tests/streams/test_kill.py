"""Peers that die, stop or fork in the middle of a transfer.

The survivor gets `connection_lost` with an error within a second, never an end of file, keeps all
it had received, and goes on serving others.
"""

import asyncio
import os
import random
import signal
import traceback
import warnings

import pytest
from harness import NOTICED_WITHIN_S, Echo, FarPort, Net, Peer, Recorder, within
from pattern import Pattern

from rdmanet.errors import endpoint

MIB = 1 << 20
# Times two sides and two loops: a hundred kills in a run of the suite.
KILLS = 25

KEPT_OPEN = pytest.mark.embedded_only("a queue pair lives as long as a process has its descriptor")


class Checker(Recorder):
    """Checks the pattern, and calls `reached` once `mark` bytes have come."""

    def __init__(self, mark: int = 0) -> None:
        super().__init__()
        self.mark = mark
        self.reached = None
        self.expected = Pattern()

    def keep(self, data):
        self.expected.check(data)
        if self.reached and self.received >= self.mark:
            reached, self.reached = self.reached, None
            reached()


def killed(protocol: Recorder) -> None:
    """What the survivor must have seen."""
    assert isinstance(protocol.error, OSError), protocol.error
    assert not protocol.eof
    assert protocol.received > 0


class Volley(Recorder):
    """A message that goes back and forth without end, on a connection that must not notice anything."""

    def start(self) -> None:
        self.transport.write(b"x" * 100)

    def keep(self, data):
        if self.received % 100 == 0:
            self.transport.write(b"x" * 100)

    async def still_going(self) -> None:
        await self.until_received(self.received + 300)


async def bystander(net: Net) -> Volley:
    volley, _ = await net.pair(Volley, Echo)
    volley.start()
    return volley


async def worker(net: Net) -> Peer:
    peer = net.spawn("source.py")
    await peer.expect("ready")
    return peer


@pytest.mark.quick_on("asyncio")
@pytest.mark.limit(90)
async def test_the_server_is_killed_in_mid_transfer(net: Net, fewer):
    chance = random.Random(1)
    volley = await bystander(net)
    nursery = await worker(net)
    for _ in range(fewer(KILLS)):
        nursery.say("go")
        pid, port = map(int, await nursery.expect("worker"))
        client = await net.connect(FarPort(port), lambda: Checker(chance.randrange(4 * MIB)))
        client.reached = lambda pid=pid: os.kill(pid, signal.SIGKILL)
        await client.until(lambda client=client: client.reached is None)
        await within(NOTICED_WITHIN_S, client.until_lost())
        killed(client)
        await volley.still_going()


@pytest.mark.quick_on("uvloop")
@pytest.mark.limit(90)
async def test_the_client_is_killed_in_mid_transfer(net: Net, fewer):
    chance = random.Random(2)
    arrivals: asyncio.Queue[Checker] = asyncio.Queue()

    class Arriving(Checker):
        def connection_made(self, transport):
            super().connection_made(transport)
            arrivals.put_nowait(self)

    _, port = await net.serve(lambda: Arriving(chance.randrange(4 * MIB)))
    volley = await bystander(net)
    nursery = await worker(net)
    for _ in range(fewer(KILLS)):
        nursery.say(f"go {port}")
        (pid,) = map(int, await nursery.expect("worker"))
        server = await arrivals.get()
        server.reached = lambda pid=pid: os.kill(pid, signal.SIGKILL)
        await server.until(lambda server=server: server.reached is None)
        await within(NOTICED_WITHIN_S, server.until_lost())
        killed(server)
        await volley.still_going()


async def test_a_killed_peer_that_we_write_to(net: Net):
    """So is a writer: it gets an exception instead of being paused for ever."""
    peer = net.spawn("echo.py")
    client = await net.connect(await peer.port())
    client.transport.pause_reading()
    while not client.writing_paused:
        client.transport.write(b"y" * MIB)
    peer.send_signal(signal.SIGKILL)
    await within(NOTICED_WITHIN_S, client.until_lost())
    assert isinstance(client.error, OSError)
    assert not client.eof


async def test_an_idle_peer_is_killed(net: Net):
    """Nothing is under way on either side, and still its death is noticed."""
    peer = net.spawn("echo.py")
    client = await net.connect(await peer.port())
    client.transport.write(b"hello")
    await client.until_received(5)
    peer.send_signal(signal.SIGKILL)
    await within(NOTICED_WITHIN_S, client.until_lost())
    killed(client)


@pytest.mark.embedded_only("an adapter sends at once")
async def test_a_peer_that_is_killed_before_the_device_has_sent(net: Net):
    """close() was called, and all is with the device, which has not sent it: these bytes are lost."""
    peer = net.spawn("echo.py")
    client = await net.connect(await peer.port())
    client.transport.write(b"hello")
    await client.until_received(5)
    client.transport.get_extra_info("rdma_pd").context.set_faults("delay=60s")
    client.transport.write(b"lost")
    client.transport.close()
    assert client.transport.get_write_buffer_size() == 0
    peer.send_signal(signal.SIGKILL)
    error = await within(NOTICED_WITHIN_S, client.until_lost())
    assert isinstance(error, ConnectionResetError)


SAYS_SO = pytest.mark.embedded_only("an adapter does not know of processes")


async def peer_and_client(net: Net, busy: bool):
    """A peer, and a client that stopped reading after a round trip; if busy, with more to write than the peer takes."""
    peer = net.spawn("echo.py")
    client = await net.connect(await peer.port())
    client.transport.write(b"hello")
    await client.until_received(5)
    client.transport.pause_reading()
    while busy and not client.writing_paused:
        client.transport.write(b"y" * MIB)
    return peer, client


@SAYS_SO
async def test_who_hears_of_a_killed_peer_is_told_so(net: Net):
    """Not that the queue pair was flushed, or that the peer has disconnected, which it never did."""
    for busy in (False, True):
        peer, client = await peer_and_client(net, busy)
        peer.send_signal(signal.SIGKILL)
        client.transport.resume_reading()
        error = await within(NOTICED_WITHIN_S, client.until_lost())
        assert isinstance(error, ConnectionResetError)
        assert "the peer's process is gone" in str(error), error
        assert str(error).count(endpoint(client.transport.get_extra_info("peername"))) == 1, error
        assert "went to the error state first" not in str(error)


@SAYS_SO
async def test_a_peer_that_takes_leave_is_not_gone(net: Net):
    """It aborts, and its process goes on: the error does not say that the process has ended."""
    for busy in (False, True):
        peer, client = await peer_and_client(net, busy)
        qp = client.transport.qp
        peer.say("abort")
        client.transport.resume_reading()
        error = await client.until_lost()
        assert isinstance(error, ConnectionResetError) and "process is gone" not in str(error), error
        assert qp.closed or not qp.peer_gone


async def test_a_killed_peer_fails_the_reader_of_a_stream(net: Net):
    """readexactly and read(-1) raise; neither calls half of the bytes the whole."""
    nursery = await worker(net)
    for read in (lambda reader: reader.read(-1), lambda reader: reader.readexactly(1 << 40)):
        nursery.say("go")
        pid, port = map(int, await nursery.expect("worker"))
        reader, writer = await net.open(FarPort(port))
        await reader.readexactly(100_000)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError):
            await within(NOTICED_WITHIN_S, read(reader))
        writer.close()


@pytest.mark.long
async def test_a_stopped_client_of_fifty_disturbs_nobody(net: Net):
    """SIGSTOP keeps a client's connection and its claims; the 49 others flow on."""
    connections: list[Recorder] = []

    class Both(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            connections.append(self)

    _, port = await net.serve(Both)
    others = net.spawn("clients.py", port, 49)
    assert await others.expect("connected") == ["49"]
    stopped = net.spawn("clients.py", port, 1)
    await stopped.expect("connected")
    stopped.say("round 64")
    await stopped.expect("echoed")
    (victim,) = [connection for connection in connections if connection.received]
    stopped.stop()
    while not victim.writing_paused:  # as full as it gets, with what the client echoes
        victim.transport.write(bytes(MIB))
    for length in (64, 40_000, 400_000):
        others.say(f"round {length}")
        assert await others.expect("echoed") == ["49"]
    assert not victim.lost
    stopped.send_signal(signal.SIGCONT)
    stopped.say("round 4000000")
    await stopped.expect("echoed")
    await others.finish()


@pytest.mark.limit(60)
@pytest.mark.long
async def test_a_client_stopped_at_any_moment_holds_up_nobody(net: Net):
    """It may be stopped just when it was to wake the server: others' messages wake it all the same."""
    chance = random.Random(3)
    _, port = await net.serve(Checker)
    bystander, _ = await net.pair(server=Echo)
    nursery = await worker(net)
    for _ in range(10):
        nursery.say(f"go {port}")
        (pid,) = map(int, await nursery.expect("worker"))
        for _ in range(20):
            await asyncio.sleep(chance.random() * 0.002)  # a random moment, not a race to be won
            os.kill(pid, signal.SIGSTOP)
            for _ in range(3):
                # One message at a time, with pauses: the server sleeps in between.
                bystander.transport.write(b"?")
                await bystander.until_received(bystander.received + 1)
                await asyncio.sleep(0.0005)
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)


async def test_a_stopped_client_can_be_aborted_and_closed(net: Net):
    """Freeing a connection does not wait for its stopped peer, nor does serving the next one.

    Closing one may wait, where the peer's process answers and not an adapter, for a bounded time.
    """
    accepted: list[Recorder] = []

    class Keep(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            accepted.append(self)

    _, port = await net.serve(Keep, close_timeout=0.5)
    peer = net.spawn("clients.py", port, 3)
    await peer.expect("connected")
    peer.say("round 64")
    await peer.expect("echoed")
    peer.stop()
    accepted[0].transport.abort()
    accepted[1].transport.write(b"z" * 64)
    accepted[1].transport.close()
    await accepted[0].until_lost()
    assert isinstance(await accepted[1].until_lost(), TimeoutError | None)
    client = await net.connect(port)
    client.transport.write(b"next")
    await client.until_received(4)
    peer.send_signal(signal.SIGKILL)
    await within(NOTICED_WITHIN_S, accepted[2].until_lost())
    assert isinstance(accepted[2].error, OSError)


@KEPT_OPEN
async def test_a_forked_child_of_the_dead_does_not_hide_its_death(net: Net):
    """The child keeps every socket open; the server is dead all the same."""
    peer = net.spawn("parent.py")
    client = await net.connect(await peer.port(), Checker)
    await client.until_received(MIB)
    peer.say("fork")
    (child,) = map(int, await peer.expect("child"))
    try:
        await client.until_received(client.received + MIB)
        peer.send_signal(signal.SIGKILL)
        await within(NOTICED_WITHIN_S, client.until_lost())
        killed(client)
    finally:
        os.kill(child, signal.SIGKILL)


@KEPT_OPEN
async def test_a_forked_child_of_the_dead_does_not_hide_an_idle_death(net: Net):
    peer = net.spawn("parent.py")
    client = await net.connect(await peer.port(), Checker)
    await client.until_received(MIB)
    client.transport.pause_reading()
    peer.say("fork")
    (child,) = map(int, await peer.expect("child"))
    try:
        peer.send_signal(signal.SIGKILL)
        client.transport.resume_reading()
        await within(NOTICED_WITHIN_S, client.until_lost())
        killed(client)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.embedded_only("librdmacm does not survive a fork")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_garbage_and_exit_in_a_forked_child(net: Net, loop):
    """Neither the parent nor its peer notices what a child does to its copies."""
    _, port = await net.serve(Echo)
    # The device forgets in a child what its parent had (fork.c): to a sanitizer that is a leak.
    no_leaks = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    env = {"RDMANET_TEST_LOOP": loop, "ASAN_OPTIONS": no_leaks}
    peer = net.spawn("forking.py", port, env=env, fresh=True)
    await peer.expect("well")
    await peer.finish()


@pytest.mark.embedded_only("librdmacm does not survive a fork")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("way", ["fork", "pool", "executor"])
async def test_forked_workers_connect_on_one_loop_after_another(net: Net, way, loop):
    """Their parent listens, so it has event channels, which the workers' own must not be counted with."""
    no_leaks = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    env = {"RDMANET_TEST_LOOP": loop, "ASAN_OPTIONS": no_leaks}
    peer = net.spawn("forked_workers.py", way, env=env, fresh=True)
    await peer.expect("well")
    await peer.finish()


@pytest.mark.embedded_only("librdmacm does not survive a fork")
async def test_a_listener_in_a_forked_child_says_that_it_is_dead(net: Net):
    """Programs fork workers behind a listening socket. An RDMA listener is one process's: in a child it raises."""
    peer = net.spawn("forked_listener.py")
    connecting = asyncio.ensure_future(net.connect(await peer.port()))
    assert await peer.expect("child") == ["0"]
    client = await connecting
    client.transport.write(b"the parent's")
    assert await client.until_received(12) == b"the parent's"
    client.transport.abort()
    await client.until_lost()
    await peer.finish()


async def test_a_forked_child_of_this_process(net: Net):
    """Both ends in the parent: the child collects them and leaves, and the parent goes on."""
    client, server = await net.pair(server=Echo)
    client.transport.write(b"before")
    await client.until_received(6)
    child = os.fork()
    if child == 0:
        try:
            import gc

            client.transport = server.transport = None
            net.recorders.clear()
            net.servers.clear()
            gc.collect()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.transport.write(b"after")
    assert await client.until_received(11) == b"beforeafter"


@pytest.mark.embedded_only("librdmacm does not survive a fork")
async def test_the_repr_of_a_connection_in_a_forked_child(net: Net):
    """It says that it is a copy; a writer that the child drops warns by it, and raises nothing."""
    client, server = await net.pair()
    reader, writer, _, its_writer = await net.stream_pair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            copies = [client.transport, server.transport, writer, its_writer, net.servers[0]]
            assert all("forked" in repr(copy) for copy in copies), copies
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                writer.__del__()
            assert all("forked" in str(warning.message) for warning in told), told
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "open" in repr(client.transport)
    writer.write(b"still the parent's")
    writer.close()
