"""What callbacks may do: raise, close anything, stop the loop; and whose context they run in.

An exception ends its own connection and nothing else, through the loop's exception handler;
nothing that has arrived for others is lost.
"""

import asyncio
import contextlib
import contextvars
import ssl
from asyncio.sslproto import SSLProtocol

import pytest
from harness import HOST, OFFERABLE, Echo, HalfOpen, Net, Recorder

import rdmanet

pytestmark = pytest.mark.once

MIB = 1 << 20


class Failure(Exception):
    pass


def fail(*args):
    raise Failure


# ---- exceptions


@pytest.mark.parametrize("name", ["data_received", "eof_received"])
async def test_an_exception_ends_its_connection_only(net: Net, name):
    class Failing(Recorder):
        pass

    setattr(Failing, name, fail)
    bystanders = [(await net.pair(server=Echo))[0] for _ in range(3)]
    client, server = await net.pair(server=Failing)
    for bystander in bystanders:
        bystander.transport.write(b"hello")
    client.transport.write(b"x")
    client.transport.write_eof()
    assert isinstance(await server.until_lost(), Failure)
    context = net.complaint()
    assert isinstance(context["exception"], Failure)
    assert context["transport"] is server.transport
    assert context["protocol"] is server
    assert name in context["message"]
    assert isinstance(await client.until_lost(), ConnectionError)
    for bystander in bystanders:
        await bystander.until_received(5)


@pytest.mark.parametrize("name", ["pause_writing", "resume_writing"])
async def test_an_exception_of_flow_control_is_reported_and_survived(net: Net, name):
    """As asyncio does: these two are hints, and the stream goes on."""

    class Failing(Recorder):
        pass

    setattr(Failing, name, fail)
    client, server = await net.pair(client=Failing)
    server.transport.pause_reading()
    client.transport.write(b"x" * 8 * MIB)
    server.transport.resume_reading()
    await server.until_received(8 * MIB)
    client.transport.write(b"end")
    await server.until_received(8 * MIB + 3)
    assert isinstance(net.complaint()["exception"], Failure)


async def test_an_exception_of_connection_lost_is_reported(net: Net):
    class Failing(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            raise Failure

    client, server = await net.pair(client=Failing)
    client.transport.close()
    await server.until_lost()
    await client.until_lost()
    assert isinstance(net.complaint()["exception"], Failure)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_an_exception_of_the_factory(net: Net, side):
    if side == "client":
        _, port = await net.serve(Echo)
        with pytest.raises(Failure):
            await net.connect(port, fail)
    else:
        turns = iter([fail, Echo])
        _, port = await net.serve(lambda: next(turns)())
        try:
            client = await net.connect(port)
        except OSError:
            pass
        else:
            assert isinstance(await client.until_lost(), ConnectionError)
        assert isinstance(net.complaint()["exception"], Failure)
        client = await net.connect(port)
        client.transport.write(b"the next one")
        await client.until_received(12)


async def test_an_exception_of_a_region_callback(net: Net):
    class Failing(Recorder):
        region_offered = fail

    client, server = await net.pair(server=Failing)
    with client.transport.get_extra_info("rdma_pd").alloc_mr(10, OFFERABLE) as mr:
        async with client.transport.offer(mr):
            assert isinstance(await server.until_lost(), Failure)
    assert isinstance(net.complaint()["exception"], Failure)


@pytest.mark.parametrize("name", ["connection_made", "data_received", "eof_received", "connection_lost"])
async def test_a_cancelled_result_ends_no_more_than_another_exception(net: Net, name):
    """The result of a future that was cancelled raises CancelledError, which is no Exception."""
    other = (await net.pair(server=Echo))[0]

    class Failing(Recorder):
        pass

    def cancelled(self, *args):
        getattr(Recorder, name)(self, *args)
        raise asyncio.CancelledError

    setattr(Failing, name, cancelled)
    accepted = Failing()
    _, port = await net.serve(lambda: accepted)
    client = await net.connect(port)
    client.transport.write(b"x")
    other.transport.write(b"hello")
    await other.until_received(5)
    client.transport.write_eof()
    error = await accepted.until_lost()
    assert accepted.data == b"x"
    if name in ("data_received", "eof_received"):
        assert isinstance(error, asyncio.CancelledError)
        assert isinstance(await client.until_lost(), ConnectionError)
    else:
        assert error is None
        assert await client.until_lost() is None
    told = net.complaint()
    assert name in told["message"]
    assert isinstance(told["exception"], asyncio.CancelledError)


@pytest.mark.parametrize("name", ["pause_writing", "resume_writing"])
async def test_a_cancelled_result_in_flow_control(net: Net, name):
    class Failing(Recorder):
        pass

    def cancelled(self):
        raise asyncio.CancelledError

    setattr(Failing, name, cancelled)
    client, server = await net.pair(client=Failing)
    server.transport.pause_reading()
    client.transport.write(b"x" * 8 * MIB)
    server.transport.resume_reading()
    await server.until_received(8 * MIB)
    assert isinstance(net.complaint()["exception"], asyncio.CancelledError)


NO_PROTOCOLS = {
    "nothing": (lambda: None, AttributeError, "'NoneType' object has no attribute 'connection_made'"),
    "the end": (iter([]).__next__, RuntimeError, "StopIteration"),
    "cancelled": (lambda: fail_with(asyncio.CancelledError), asyncio.CancelledError, "^$"),
}


def fail_with(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("wrong", NO_PROTOCOLS)
async def test_a_factory_that_makes_no_protocol(net: Net, side, wrong):
    """What it raises, and that it returns no protocol, reaches whoever connects or the loop's handler."""
    factory, error, text = NO_PROTOCOLS[wrong]
    _, port = await net.serve(Echo if side == "client" else factory)
    if side == "client":
        with pytest.raises(error, match=text):
            await rdmanet.create_rdma_connection(factory, HOST, port)
        return
    with contextlib.suppress(OSError):
        await (await net.connect(port)).until_lost()
    assert isinstance(net.complaint()["exception"], error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_passes_through(loop_factory, error):
    """The loop stops with it, as with any transport, and cleaning up still works."""

    class Ending(Recorder):
        def data_received(self, data):
            raise error

    async def main():
        net = Net()
        client, server = await net.pair(server=Ending)
        client.transport.write(b"x")
        try:
            await client.until_lost()
        finally:
            await net.aclose()

    with pytest.raises(error):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())


# ---- closing


async def test_callbacks_close_other_connections(net: Net):
    """Several connections have data in one pass, and the first to get it ends the rest."""

    first = net.loop.create_future()

    class Jealous(Recorder):
        def keep(self, data):
            first.done() or first.set_result(self)
            for server in servers:
                if server is not self:
                    server.transport.abort()

    pairs = [await net.pair(server=Jealous) for _ in range(10)]
    servers = [server for _, server in pairs]
    for client, _ in pairs:
        client.transport.write(b"me" * 1000)
    survivor = await first
    for server in servers:
        if server is not survivor:
            assert await server.until_lost() is None
            assert not server.received
    assert not survivor.transport.is_closing()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_callbacks_close_their_own_connection(net: Net, how):
    """Bytes behind the ones being delivered are dropped: nothing comes after close."""

    class Sated(Recorder):
        def keep(self, data):
            getattr(self.transport, how)()

    client, server = await net.pair(server=Sated)
    for _ in range(100):
        client.transport.write(b"x" * 70_000)
    assert await server.until_lost() is None
    assert server.events == ["made", "data", "lost"]
    await client.until_lost()


async def test_a_callback_closes_server_and_clients(net: Net):
    class Last(Recorder):
        def keep(self, data):
            server.close()
            server.abort_clients()

    server, port = await net.serve(Last)
    clients = [await net.connect(port) for _ in range(10)]
    for client in clients:
        client.transport.write(b"x")
    for client in clients:
        assert isinstance(await client.until_lost(), ConnectionError)
    await server.wait_closed()


async def test_connecting_and_writing_from_within_callbacks(net: Net):
    """connection_lost of one connection begins the next."""
    _, port = await net.serve(Echo)
    done = net.loop.create_future()
    tasks = set()

    class Next(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"x" * 100)

        def keep(self, data):
            if self.received == 100:
                self.transport.close()

        def connection_lost(self, exc):
            super().connection_lost(exc)
            count.append(exc)
            if len(count) == 50:
                done.set_result(None)
            else:
                task = net.loop.create_task(net.connect(port, Next))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    count: list[BaseException | None] = []
    await net.connect(port, Next)
    await done
    assert count == [None] * 50


async def test_writing_in_connection_lost_and_eof_received(net: Net):
    class Talkative(HalfOpen):
        def eof_received(self):
            self.transport.write(b"to the end")
            self.transport.close()
            return super().eof_received()

        def connection_lost(self, exc):
            self.transport.write(b"beyond")
            super().connection_lost(exc)

    client, server = await net.pair(server=Talkative)
    client.transport.write_eof()
    assert await client.until_lost() is None
    assert client.data == b"to the end"
    assert await server.until_lost() is None


async def test_pausing_from_within_stops_at_once(net: Net):
    """After pause_reading no byte comes, not even from the pass that is running."""

    class Sipping(Recorder):
        def keep(self, data):
            assert self.transport.is_reading()
            self.transport.pause_reading()
            self.transport.pause_reading()  # a second time is no error, nor has it effect

    client, server = await net.pair(server=Sipping)
    for _ in range(30):
        client.transport.write(b"x" * 70_000)
    while server.received < 30 * 70_000:
        seen = server.received
        server.transport.resume_reading()
        server.transport.resume_reading()
        assert server.received == seen  # never from within resume_reading
        await server.until(lambda seen=seen: server.received > seen)


# ---- the loop stops


def test_a_callback_stops_the_loop(loop_factory):
    """Whatever was under way goes on when the loop is run again."""
    loop = loop_factory()
    asyncio.set_event_loop(loop)

    class Stopping(Recorder):
        def keep(self, data):
            nonlocal stopping
            super().keep(data)
            # Once a run: uvloop keeps a second stop() of one iteration for the next run.
            if not stopping:
                stopping = True
                loop.stop()

    async def begin():
        nonlocal net
        net = Net()
        pairs.extend([await net.pair(server=Stopping) for _ in range(5)])
        for client, _ in pairs:
            for n in range(20):
                client.transport.write(bytes([n]) * 200_000)  # more than a ring holds

    net: Net = None  # type: ignore[assignment]
    pairs: list = []
    stopping = True
    loop.run_until_complete(begin())
    stops = 0
    while any(server.received < 4_000_000 for _, server in pairs):
        stopping = False
        loop.run_forever()
        stops += 1
    assert stops > 1
    for _, server in pairs:
        assert server.data == b"".join(bytes([n]) * 200_000 for n in range(20))
    stopping = True
    loop.run_until_complete(net.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    asyncio.set_event_loop(None)


# ---- contexts

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Witness(HalfOpen):
    """Notes in whose context each callback runs, and leaves a mark of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def note(self, event):
        if event != "pause":  # which write() tells at once, in its caller's context, as asyncio's does
            self.seen.add(who.get())
        super().note(event)


async def test_callbacks_run_in_the_context_of_their_connection(net: Net):
    """Two clients of one loop, made in two contexts: every callback of each sees its own."""
    _, port = await net.serve(lambda: Echo())

    async def connect(name: str) -> Witness:
        who.set(name)
        return await net.connect(port, Witness)

    clients = {name: await asyncio.create_task(connect(name)) for name in ("anna", "bert")}
    for client in clients.values():
        for _ in range(100):  # more than fits in the peer's receives
            client.transport.write(b"x" * 20_000)
    for client in clients.values():
        await client.until_received(2_000_000)
        client.transport.close()
    for name, client in clients.items():
        await client.until_lost()
        assert {"pause", "resume"} < {*client.events}
        assert client.seen == {name}


async def test_a_value_set_in_a_callback_stays_with_the_connection(net: Net):
    class Marking(Recorder):
        def keep(self, data):
            self.seen = [*getattr(self, "seen", []), who.get()]
            who.set(bytes(data).decode())

    _, port = await net.serve(Marking)
    accepted = []
    clients = []
    for _ in range(2):
        clients.append(await net.connect(port))
    for name in ("one", "two"):
        for n, client in enumerate(clients):
            client.transport.write(f"{name}{n}".encode())
        accepted = await net.accepted_beside(clients)
        expected = 4 * (1 if name == "one" else 2)
        for server in accepted:
            await server.until(lambda server=server, expected=expected: server.received == expected)
    assert sorted(server.seen for server in accepted) == [["nobody", "one0"], ["nobody", "one1"]]
    assert who.get() == "nobody"


async def test_a_server_runs_in_the_context_of_its_caller(net: Net):
    """Not in that of whoever was the first on the loop, and each connection in a copy of its own."""
    who.set("the first")
    await net.pair()
    made: list[str] = []

    class Serving(Witness):
        def connection_made(self, transport):
            made.append(who.get())
            super().connection_made(transport)
            who.set(f"connection {len(made)}")

    def factory():
        made.append(who.get())
        return Serving()

    async def serve() -> int:
        who.set("the server")
        _, port = await net.serve(factory)
        return port

    port = await asyncio.create_task(serve())
    for lost in 2, 4:
        client = await net.connect(port)
        client.transport.write(b"x")
        client.transport.close()
        # The server's end, too: it may come to be when the client's has ended already.
        await net.until(lambda lost=lost: sum(recorder.lost for recorder in net.recorders) == lost)
    servers = [recorder for recorder in net.recorders if isinstance(recorder, Serving)]
    assert made == ["the server"] * 4
    assert [server.seen for server in servers] == [
        {"the server", "connection 2"},
        {"the server", "connection 4"},
    ]
    assert who.get() == "the first"


async def test_a_connection_made_that_raises_leaves_the_connection(net: Net):
    """As asyncio's and uvloop's transports: the exception is reported, and that is all."""

    class Raising(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            raise ZeroDivisionError

    client, _ = await net.pair(Recorder, Raising)
    assert isinstance(net.complaint()["exception"], ZeroDivisionError)
    client.transport.write(b"still here")
    assert await client.until_received(10) == b"still here"


async def test_what_tls_cannot_read_ends_the_connection_with_its_reason(net: Net):
    """asyncio's SSLProtocol over a transport of ours: it ends what it cannot go on with by _force_close()."""
    client, server = await net.pair()
    waiter = net.loop.create_future()
    above = Recorder()
    tls = SSLProtocol(
        net.loop,
        above,
        ssl.create_default_context(),
        waiter,
        server_hostname="nobody",
        call_connection_made=False,
    )
    client.transport.set_protocol(tls)
    tls.connection_made(client.transport)
    await server.until(lambda: server.received > 0)  # its hello
    server.transport.write(b"this is no TLS at all")
    with pytest.raises(ssl.SSLError):
        await waiter
    assert isinstance(await server.until_lost(), ConnectionResetError)
    assert client.transport.is_closing()
    client.transport = None  # its end was told to tls


async def test_a_forced_close_tells_its_reason(net: Net):
    client, server = await net.pair()
    reason = ValueError("a bad record")
    client.transport._force_close(reason)
    assert await client.until_lost() is reason
    assert isinstance(await server.until_lost(), ConnectionResetError)
    client.transport._force_close(None)
    assert client.events[-1] == "lost"
