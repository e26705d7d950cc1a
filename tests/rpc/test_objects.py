"""Service objects as arguments: the server calls them, for as long as it has them, and not a moment longer."""

import asyncio
import contextlib
import gc
import random
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy
import pytest
from net import Journal, Net, callee, channel, failure, idle
from strangers import Stranger, stranger

import rdmanet
from rdmanet import rpc
from rdmanet.rpc import Code, testing
from rdmanet.rpc.inner import WINDOW_BYTES
from rdmanet.rpc.messages import (
    MAGIC,
    VERSION,
    Call,
    Carry,
    Drop,
    Failure,
    Hello,
    More,
    OutHello,
    Ping,
    Pong,
    encode,
)
from rdmanet.rpc.schema import schema_of
from tests.support.waiting import loop_turns, until_seen


class Listener(rpc.Service):
    async def on(self, text: str) -> int:
        return len(text)

    async def sum(self, numbers: numpy.ndarray) -> int:
        return int(numbers.sum())

    async def some(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def make(self, count: int) -> memoryview:
        return memoryview(bytes(count))

    async def wait(self) -> None: ...

    async def fail(self, code: int) -> None: ...

    async def who(self) -> str:
        return str(rpc.peer())


class Heard(Listener):
    """:ivar journal: what has happened"""

    def __init__(self, name: str = "") -> None:
        self.journal = Journal()
        self.name = name
        self.metadata: Any = None
        self.peer: Any = None
        self.deadline: float | None = None

    async def on(self, text: str) -> int:
        self.journal(text)
        self.metadata, self.peer, self.deadline = rpc.metadata(), rpc.peer(), rpc.deadline()
        return len(text)

    async def wait(self) -> None:
        self.journal("wait")
        try:
            await asyncio.Event().wait()
        finally:
            await loop_turns(20)
            self.journal("cancelled")

    async def fail(self, code: int) -> None:
        if code == 0:
            raise ValueError("a mistake")
        raise rpc.Error(Code(code), "no", {"left": 0})


class Station(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()
        self.kept: list[Any] = []
        self.gate = asyncio.Event()

    async def tell(self, listener: Listener, text: str) -> int:
        return await listener.on(text)

    async def each(self, first: Listener, count: int = 1, *, second: Listener | None = None) -> list[int]:
        found = [await first.on("first") for _ in range(count)]
        return found if second is None else [*found, await second.on("second!")]

    async def keep(self, listener: Listener) -> None:
        self.kept.append(listener)

    async def ask(self, listener: Listener, what: str) -> Any:
        if what == "who":
            return await listener.who()
        if what == "some":
            return [number async for number in listener.some(5)]
        if what == "total":

            async def numbers() -> AsyncIterator[int]:
                for number in range(5):
                    yield number

            return await listener.total(numbers())
        if what == "metadata":
            return await rpc.options(listener, metadata={"tenant": "a"}).on("x")
        if what == "peer":
            return [str(rpc.peer(listener)), rdmanet.fabric(listener).fabric]
        if what == "stats":
            await listener.on("x")
            return rpc.stats(listener)["on"].ended
        return None

    async def call(self, listener: Listener, code: int) -> None:
        self.journal("call")
        await (listener.wait() if code < 0 else listener.fail(code))

    async def large(self, listener: Listener, count: int) -> int:
        made = await listener.make(count)
        return len(made) + await listener.sum(numpy.ones(count, "u1"))

    async def counts(self, upto: int, listener: Listener) -> AsyncIterator[int]:
        for number in range(upto):
            yield await listener.on("x" * number)

    async def feed(self, numbers: AsyncIterator[int], listener: Listener) -> list[int]:
        return [await listener.on("x" * number) async for number in numbers]

    async def not_used(self, listener: Listener) -> None:
        await self.gate.wait()


def lender(client: Any) -> Any:
    return channel(client)._lender  # type: ignore[attr-defined]


async def nothing_is_lent(client: Any, server: rpc.Server) -> None:
    """Wait for it: what the server has let go of takes a moment."""
    await until_seen(lambda: not lender(client).lent and not lender(client).open)
    await until_seen(lambda: not callee(server).link.inners.open)
    assert not lender(client).running


# ---- Calls ---------------------------------------------------------------------------------------------------


async def test_the_server_calls_it(net: Net):
    client, server = await net.pair(Station())
    heard = Heard()
    assert await client.tell(heard, "four") == 4
    assert heard.journal.entries == ["four"]
    await nothing_is_lent(client, server)


async def test_several_and_by_name(net: Net):
    client, server = await net.pair(Station())
    assert await client.each(Heard(), 2) == [5, 5]
    assert await client.each(Heard(), second=None) == [5]
    assert await client.each(first=Heard(), count=1, second=Heard()) == [5, 7]
    one = Heard()
    assert await client.each(one, second=one) == [5, 7] and one.journal.entries == ["first", "second!"]
    await nothing_is_lent(client, server)


async def test_streams(net: Net):
    client, server = await net.pair(Station())

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    assert await client.ask(Heard(), "some") == [0, 1, 2, 3, 4]
    assert await client.ask(Heard(), "total") == 10
    assert [number async for number in client.counts(4, Heard())] == [0, 1, 2, 3]
    assert await client.feed(numbers(), Heard()) == [0, 1, 2]
    await nothing_is_lent(client, server)


async def test_large_arguments_and_results(net: Net):
    """Longer than the credit of an inner connection, and than what is written in a piece."""
    client, server = await net.pair(Station())
    for count in (1000, WINDOW_BYTES, 5 << 20):
        assert await client.large(Heard(), count) == 2 * count
    await nothing_is_lent(client, server)


async def test_many_at_once(net: Net):
    client, server = await net.pair(Station(), limits=rpc.Limits(objects=1000))
    client = await net.connect(Station, server, limits=rpc.Limits(objects=1000))
    found = await asyncio.gather(*(client.tell(Heard(), "x" * count) for count in range(200)))
    assert found == list(range(200))
    await until_seen(lambda: not lender(client).lent)


async def test_what_a_callback_knows(net: Net):
    client, server = await net.pair(Station())
    heard = Heard()
    await rpc.options(client, timeout=100).ask(heard, "metadata")
    assert heard.metadata == {"tenant": "a"}
    assert heard.peer.transport == net.transport and heard.peer.address == channel(client).peer
    assert heard.deadline is not None and heard.deadline <= asyncio.get_running_loop().time() + 100
    assert await client.ask(Heard(), "peer") == [str(callee(server).link.peer), net.transport]
    assert rdmanet.fabric(heard.peer).fabric == net.transport
    assert await client.ask(Heard(), "stats") == {"OK": 1}


async def test_errors_of_callbacks(net: Net):
    client, server = await net.pair(Station())
    error = await failure(client.call(Heard(), int(Code.NOT_FOUND)))
    assert (error.code, error.text, error.details) == (Code.NOT_FOUND, "no", {"left": 0})
    error = await failure(client.call(Heard(), 0))
    assert error.code is Code.INTERNAL and error.text == "the service failed"
    await nothing_is_lent(client, server)


async def test_cancelling_and_deadlines(net: Net):
    """The caller's cancelling goes through the method to the callback, and so does its deadline."""
    client, server = await net.pair(Station())
    heard = Heard()
    call = asyncio.ensure_future(client.call(heard, -1))
    await heard.journal.until("wait")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await heard.journal.until("cancelled")
    await idle(server)
    error = await failure(rpc.options(client, timeout=0.05).call(heard, -1))
    assert error.code is Code.DEADLINE_EXCEEDED
    await heard.journal.until("cancelled", 2)
    await nothing_is_lent(client, server)


async def test_with_interceptors_and_retry(net: Net):
    seen: list[str] = []

    async def log(call: Any, proceed: Any) -> Any:
        seen.append(call.method)
        return await proceed()

    server = await net.serve(Station(), interceptors=[log])
    client = await net.connect(Station, server, interceptors=[log], retry=rpc.Retry())
    assert await client.tell(Heard(), "four") == 4
    assert seen == ["tell", "tell"]  # around callbacks there are none


# ---- For how long --------------------------------------------------------------------------------------------


async def test_it_is_kept_after_the_call(net: Net):
    service = Station()
    client, server = await net.pair(service)
    heard = Heard()
    await client.keep(heard)
    (kept,) = service.kept
    assert await kept.on("later") == 5
    assert len(lender(client).lent) == len(lender(client).open) == 1
    await kept.aclose()
    await nothing_is_lent(client, server)
    error = await failure(kept.on("too late"))
    assert error.code is Code.CANCELLED and heard.journal.entries == ["later"]
    await kept.aclose()


async def test_nobody_refers_to_it_any_more(net: Net):
    service = Station()
    client, server = await net.pair(service)
    await client.keep(Heard())
    other = rpc.options(service.kept[0], timeout=10)
    service.kept.clear()
    assert await other.on("x") == 1  # a copy is the same
    call = asyncio.ensure_future(other.on("four"))
    del other
    assert await call == 4  # and so is a call
    del call
    gc.collect()
    await nothing_is_lent(client, server)


async def test_a_cycle_that_has_it(net: Net):
    service = Station()
    client, server = await net.pair(service)
    await client.keep(Heard())
    cycle: list[Any] = [service.kept.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    await nothing_is_lent(client, server)


async def test_the_connection_ends(net: Net):
    service = Station()
    server = await net.serve(service)
    client = await rpc.connect(Station, *net.address(server), transport=net.transport)
    heard = Heard()
    await client.keep(heard)
    (kept,) = service.kept
    call = asyncio.ensure_future(kept.wait())
    await heard.journal.until("wait")
    await client.aclose()
    assert heard.journal.entries == ["wait", "cancelled"]  # close() has waited for that
    assert not lender(client).lent and not lender(client).open and not lender(client).running
    assert (await failure(call)).code is Code.UNAVAILABLE
    assert (await failure(kept.on("x"))).code is Code.UNAVAILABLE


async def test_the_server_ends(net: Net):
    service = Station()
    server = await net.serve(service)
    client = await net.connect(Station, server)
    heard = Heard()
    await client.keep(Heard())
    call = asyncio.ensure_future(client.call(heard, -1))
    await heard.journal.until("wait")
    server.close()
    await server.wait_closed()
    assert (await failure(call)).code in (Code.CANCELLED, Code.UNAVAILABLE)
    await heard.journal.until("cancelled")
    await until_seen(lambda: not lender(client).lent and not lender(client).running)


async def test_draining(net: Net):
    """Calls that run may call back, and what a service keeps does not hold the server up."""
    service = Station()
    server = await net.serve(service)
    client = await net.connect(Station, server)
    await client.keep(Heard())
    steps = asyncio.Event()

    class Slow(Heard):
        async def on(self, text: str) -> int:
            self.journal("on")
            await steps.wait()
            return 1

    slow = Slow()
    call = asyncio.ensure_future(client.each(slow, 3))
    await slow.journal.until("on")
    draining = asyncio.ensure_future(server.drain())
    await loop_turns(5)
    steps.set()
    assert await call == [1, 1, 1]
    await draining


async def test_one_that_the_method_never_gets(net: Net):
    """An interceptor has answered: it is not lent any more when the call has ended."""

    async def refuse(call: Any, proceed: Any) -> Any:
        raise rpc.Error(Code.PERMISSION_DENIED, "no")

    server = await net.serve(Station(), interceptors=[refuse])
    client = await net.connect(Station, server)
    assert (await failure(client.tell(Heard(), "x"))).code is Code.PERMISSION_DENIED
    assert not lender(client).lent


async def test_a_lost_connection_repeats_no_call_that_has_begun(net: Net):
    class Marked(rpc.Service):
        @rpc.method(idempotent=True)
        async def tell(self, listener: Listener) -> None: ...

    class Lost(Marked):
        def __init__(self) -> None:
            self.calls = 0

        async def tell(self, listener: Listener) -> None:
            self.calls += 1
            callee(server).link.abort()
            await asyncio.Event().wait()

    service = Lost()
    server = await net.serve(service)
    client = await net.connect(Marked, server, retry=rpc.Retry(first_seconds=0.001, methods=["tell"]))
    assert (await failure(client.tell(Heard()))).code is Code.UNAVAILABLE
    assert service.calls == 1


async def test_a_call_that_was_not_sent_is_made_on_the_next_connection(net: Net):
    service = Station()
    server = await net.serve(service)
    client = await net.connect(Station, server, retry=rpc.Retry(first_seconds=0.001))
    assert await client.tell(Heard(), "x") == 1
    callee(server).link.abort()
    await until_seen(lambda: channel(client)._slots[0].usable is None)  # type: ignore[attr-defined]
    assert await client.tell(Heard(), "again") == 5


async def test_cancelling_at_random_leaves_nothing(net: Net):
    """In any turn: before the server has it, while that opens it, while it calls, or when it has answered."""
    service = Station()
    client, server = await net.pair(service)
    chance = random.Random(1)
    for _ in range(100):
        heard = Heard()
        calls = (
            client.tell(heard, "x"),
            client.keep(heard),
            client.call(heard, -1),
            client.each(heard, 3, second=heard),
            client.not_used(heard),
        )
        tasks = [asyncio.ensure_future(call) for call in calls]
        await loop_turns(chance.randrange(12))
        for task in chance.sample(tasks, 4):
            task.cancel()
            await loop_turns(chance.randrange(3))
        if chance.random() < 0.5:
            service.kept.clear()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if len(service.kept) > 20:
            service.kept.clear()
    await idle(server)
    for kept in service.kept:
        with contextlib.suppress(rpc.Error):  # it was lost with the call that was cancelled
            assert await kept.on("four") == 4
    kept = None
    service.kept.clear()
    await nothing_is_lent(client, server)


# ---- Limits --------------------------------------------------------------------------------------------------


async def test_how_many_are_lent(net: Net):
    service = Station()
    server = await net.serve(service)
    client = await net.connect(Station, server, limits=rpc.Limits(objects=2))
    await client.keep(Heard())
    await client.keep(Heard())
    error = await failure(client.keep(Heard()))
    assert (
        error.code is Code.RESOURCE_EXHAUSTED and "the limit objects is 2" in error.text and not error.begun
    )
    await service.kept.pop().aclose()
    await until_seen(lambda: len(lender(client).lent) == 1)
    await client.keep(Heard())


async def test_how_many_a_server_takes(net: Net):
    service = Station()
    server = await net.serve(service, limits=rpc.Limits(objects=1))
    client = await net.connect(Station, server)
    await client.keep(Heard())
    error = await failure(client.keep(Heard()))
    assert error.code is Code.RESOURCE_EXHAUSTED and "the limit objects is 1" in error.text
    assert len(lender(client).lent) == 1


async def test_how_many_calls_it_executes(net: Net):
    """By the client's limits, for all of its objects together; one call of each object there may always be."""
    service = Station()
    server = await net.serve(service)
    client = await net.connect(Station, server, limits=rpc.Limits(calls=2))
    heard = Heard()
    for _ in range(4):
        await client.keep(heard)
    calls = [asyncio.ensure_future(kept.wait()) for kept in service.kept for _ in range(2)]
    for _ in range(3):
        done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[assignment]
        for call in done:
            error = call.exception()
            assert isinstance(error, rpc.Error) and error.code is Code.RESOURCE_EXHAUSTED
            assert "server_calls" in error.text
        if len(calls) == 5:
            break
    await heard.journal.until("wait", 5)
    assert len(calls) == len(lender(client).running) == 5
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


# ---- Declaring it --------------------------------------------------------------------------------------------


def test_where_it_may_stand():
    with pytest.raises(TypeError, match="parameter a: a service object is an argument by itself"):

        class One(rpc.Service):
            async def m(self, a: list[Listener]) -> None: ...

    with pytest.raises(TypeError, match="the result: a service object is an argument by itself"):

        class Two(rpc.Service):
            async def m(self) -> Listener: ...

    with pytest.raises(TypeError, match="parameter a: ask of Station takes a service object itself"):

        class Three(rpc.Service):
            async def m(self, a: Station) -> None: ...

    with pytest.raises(TypeError, match="parameter a: Empty has no methods"):

        class Empty(rpc.Service): ...

        class Four(rpc.Service):
            async def m(self, a: Empty) -> None: ...

    with pytest.raises(TypeError, match="a service object is an argument by itself"):

        class Five(rpc.Service):
            async def m(self, a: Listener | int) -> None: ...


def test_a_thread_takes_none():
    with pytest.raises(
        TypeError, match="parameter a is a service object, whose methods a thread cannot await"
    ):

        class One(rpc.Service):
            @rpc.method(thread=True)
            def m(self, a: Listener) -> None: ...


async def test_a_callback_that_computes_in_a_thread(net: Net):
    class Computes(Listener):
        @rpc.method(thread=True)
        def on(self, text: str) -> int:
            return threading.get_ident()

    client, _ = await net.pair(Station())
    assert await client.tell(Computes(), "x") not in (0, threading.get_ident())


async def test_what_is_no_object(net: Net):
    client, server = await net.pair(Station())
    for wrong in (None, 1, Station(), Listener):
        with pytest.raises(TypeError, match="parameter listener: .* is no object of a class .* Listener"):
            await client.tell(wrong, "x")  # type: ignore[arg-type]

    class Lends(Listener):
        async def more(self, listener: Listener) -> None: ...

    with pytest.raises(TypeError, match="a method of Lends takes a service object itself"):
        await client.tell(Lends(), "x")
    service = Station()
    kept = await net.connect(Station, await net.serve(service))
    await kept.keep(Heard())
    with pytest.raises(TypeError, match="is no object of a class"):
        await client.tell(service.kept[0], "x")


def test_its_description():
    (each,) = [method for method in schema_of(Station).description[0] if method[0] == "each"]
    assert each[2] == [
        ["first", ["object", "Listener"], True],
        ["count", "int", False],
        ["second", ["union", ["object", "Listener"], "none"], False],
    ]


async def test_what_a_schema_says(net: Net):
    """By Reflection, and to a client without the class, which cannot lend anything."""
    from rdmanet.rpc.dynamic_client import discover

    server = await net.serve(Station())
    address = (*net.address(server), None)[:2]
    async with discover("Station", *address, net.transport) as (_, schema):
        method: Any = schema.methods["each"]
        assert str(method) == (
            "each(first: object[Listener], count: int = ..., second: object[Listener] | None = ...) -> list[int]"
        )
        for given in ({"first": 1}, {"first": {}}, {"first": None}):
            with pytest.raises(
                ValueError, match="first is an object of the service Listener: only a program"
            ):
                method.arguments_of(given, schema.structs, None, None)


# ---- Two versions --------------------------------------------------------------------------------------------


def versions() -> dict[str, Any]:
    class Listener(rpc.Service):
        async def on(self, text: str) -> int: ...

    class Old(rpc.Service, name="Station"):
        async def tell(self, text: str) -> int: ...

    class New(rpc.Service, name="Station"):
        async def tell(self, text: str, listener: Listener | None = None) -> int: ...

    class Any_(rpc.Service, name="Station"):
        async def tell(self, text: str, listener: Any = None) -> int: ...

    class Other(rpc.Service, name="Listener"):
        async def on(self, text: str, times: int) -> int: ...

    class Otherwise(rpc.Service, name="Station"):
        async def tell(self, text: str, listener: Other | None = None) -> int: ...

    return locals()


async def test_a_server_that_does_not_know_it(net: Net):
    """It is not lent any more when the call has ended, as nobody has opened it."""
    classes = versions()

    class Told(classes["Old"], name="Station"):  # type: ignore[misc]
        async def tell(self, text: str) -> int:
            return 7

    class Ear(classes["Listener"], name="Listener"):  # type: ignore[misc]
        async def on(self, text: str) -> int:
            return 1

    server = await net.serve(Told())
    client = await net.connect(classes["New"], server)
    assert await client.tell("x", Ear()) == 7
    assert not lender(client).lent


async def test_a_client_that_does_not_know_it(net: Net):
    classes = versions()

    class Told(classes["New"], name="Station"):  # type: ignore[misc]
        async def tell(self, text: str, listener: Any = None) -> int:
            return 7 if listener is None else 8

        tell.__annotations__["listener"] = classes["Listener"] | None

    client = await net.connect(classes["Old"], await net.serve(Told()))
    assert await client.tell("x") == 7


async def test_a_default_that_is_the_servers(net: Net):
    """A class with ``...`` for the default sends nothing for it."""
    classes = versions()

    class Given(rpc.Service, name="Station"):
        async def tell(self, text: str, listener: classes["Listener"] = ...) -> int: ...  # type: ignore[valid-type]

    class Told(classes["New"], name="Station"):  # type: ignore[misc]
        async def tell(self, text: str, listener: Any = None) -> int:
            return 7 if listener is None else await listener.on(text)

        tell.__annotations__["listener"] = classes["Listener"] | None

    class Ear(classes["Listener"], name="Listener"):  # type: ignore[misc]
        async def on(self, text: str) -> int:
            return 1

    client = await net.connect(Given, await net.serve(Told()))
    assert [await client.tell("x"), await client.tell("x", Ear())] == [7, 1]


async def test_versions_that_do_not_fit(net: Net):
    """Where one has an object, the other has to; and what their methods say is compared at the first call."""
    classes = versions()

    class Told(classes["Any_"], name="Station"):  # type: ignore[misc]
        async def tell(self, text: str, listener: Any = None) -> int:
            return 7

    error = await failure(net.connecting(classes["New"], await net.serve(Told())).__aenter__())
    assert error.code is Code.FAILED_PRECONDITION and "parameter listener" in error.text

    class Calls(classes["Otherwise"], name="Station"):  # type: ignore[misc]
        async def tell(self, text: str, listener: Any = None) -> int:
            return await listener.on(text, 2)

        tell.__annotations__["listener"] = classes["Other"] | None

    class Ear(classes["Listener"], name="Listener"):  # type: ignore[misc]
        async def on(self, text: str) -> int:
            return 1

    client = await net.connect(classes["New"], await net.serve(Calls()))
    error = await failure(client.tell("x", Ear()))
    assert error.code is Code.FAILED_PRECONDITION and "times is unknown there" in error.text
    assert "the client's Listener differs from ours" in error.text


# ---- A client that waits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["rdma", "tcp", "unix"])
async def test_a_blocking_client(net: Net):
    """Its objects are called while it waits for the call; what a server keeps waits for the next call."""
    service = Station()
    server = await net.serve(service)
    address = net.address(server)

    def script() -> list[Any]:
        with rpc.blocking.connect(Station, *address, transport=net.transport) as client:
            found = [client.tell(heard, "four"), rpc.blocking.call(client, Station.tell, heard, "three")]
            client.keep(heard)
            return found

    heard = Heard.__new__(Heard)
    heard.journal = lambda text: None  # type: ignore[assignment, return-value]
    assert await asyncio.to_thread(script) == [4, 5]
    assert (await failure(service.kept[0].on("x"))).code is Code.UNAVAILABLE


# ---- Peers that do as they like ------------------------------------------------------------------------------

tcp = pytest.mark.parametrize("transport", ["tcp"])


class FakeServer:
    """A server that speaks by hand; the client has called `tell`."""

    def __init__(self, service: type[rpc.Service]) -> None:
        self._schema = schema_of(service)
        self.peers: asyncio.Queue[Stranger] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        await peer.hear()
        peer.say(Hello(MAGIC, VERSION, "Station", self._schema.digest, 1 << 20, 100, 1 << 18))
        self.peers.put_nowait(peer)
        await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def fake() -> AsyncIterator[tuple[Any, Stranger, Any, Heard, Call]]:
    """A client, its server by hand, its call, the object that it lends, and the Call as it has come."""
    server = FakeServer(Station)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with rpc.connect(Station, *listening.sockets[0].getsockname(), transport="tcp") as client:
        peer = await server.peers.get()
        heard = Heard()
        call = asyncio.ensure_future(client.tell(heard, "x"))
        message = await peer.hear()
        assert isinstance(message, Call)
        try:
            yield client, peer, call, heard, message
        finally:
            call.cancel()
            await asyncio.wait([call])
            peer.writer.close()
    listening.close()


def framed(message: Any) -> bytes:
    body = encode(message)
    return struct.pack("!I", len(body)) + body


def hello_of(service: type[rpc.Service]) -> bytes:
    schema = schema_of(service)
    return framed(OutHello(MAGIC, VERSION, schema.name, schema.digest, 1 << 20, 100, 1 << 18))


@tcp
async def test_numbers_that_were_not_lent(net: Net):
    """Whoever calls one breaks the protocol, and has called nothing."""
    for number in (1, 17, 2**31 + 5):
        async with fake() as (client, peer, call, heard, _):
            peer.say(Carry(number, hello_of(Listener)))
            error = await failure(call)
            assert error.code is Code.UNAVAILABLE and f"object {number}, which was not lent" in error.text
            assert not heard.journal.entries
            assert await peer.is_cut_off()


@tcp
async def test_an_object_that_is_not_lent_any_more(net: Net):
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        peer.say(Failure(message.number, int(Code.NOT_FOUND), "no"))
        await failure(call)
        assert not lender(client).lent
        peer.say(Carry(number, hello_of(Listener)))
        answer = await peer.hear()
        assert answer == Drop(number) and not heard.journal.entries


@tcp
async def test_before_anything_was_lent(net: Net):
    server = FakeServer(Station)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with rpc.connect(Station, *listening.sockets[0].getsockname(), transport="tcp") as client:
        peer = await server.peers.get()
        peer.say(Carry(0, b""))
        assert await peer.is_cut_off()
        peer.writer.close()
        await until_seen(lambda: channel(client).link.is_over)
    listening.close()


@tcp
async def test_by_a_name_that_it_does_not_have(net: Net):
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        schema = schema_of(Station)
        peer.say(Carry(number, framed(OutHello(MAGIC, VERSION, "Station", schema.digest, 1 << 20, 9, 9))))
        answer = await peer.hear()
        assert isinstance(answer, Carry) and answer.number == number
        inner = msgspec.msgpack.decode(answer.data[4:])
        services = inner[9]
        assert inner[3] == "" and services in (["Listener"], ["Heard"])


@tcp
async def test_more_than_there_is_credit_for(net: Net):
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        inner = hello_of(Listener)
        peer.say(Carry(number, inner))
        await until_seen(lambda: number in lender(client).open)
        lender(client).open[number].pause_reading()
        for _ in range(4):
            peer.say(Carry(number, bytes(WINDOW_BYTES // 4)))
        error = await failure(call)
        assert "more of object" in error.text
        assert await peer.is_cut_off()


@tcp
async def test_a_flood_for_an_object_that_is_gone(net: Net):
    """A peer that reads nothing does not make the client keep an answer for each message."""
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        peer.say(Failure(message.number, int(Code.NOT_FOUND), "no"))
        await failure(call)
        link = channel(client).link
        link.pause_writing()
        for _ in range(1000):
            peer.say(Carry(number, b""))
        peer.say(Ping(1))
        await until_seen(lambda: link._unanswered is not None)
        link.resume_writing()
        peer.say(Ping(2))
        answers = [await peer.hear() for _ in range(3)]
        assert answers == [Pong(1), Drop(number), Pong(2)] and not heard.journal.entries


@tcp
async def test_small_pieces_that_wait(net: Net):
    """What an inner connection keeps is what the credit says, not so many objects."""
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        peer.say(Carry(number, hello_of(Listener)))
        await until_seen(lambda: number in lender(client).open)
        inner = lender(client).open[number]
        inner.pause_reading()
        for _ in range(1000):
            peer.say(Carry(number, b""))
            peer.say(Carry(number, bytes(2)))
        peer.say(Ping(1))
        while await peer.hear() != Pong(1):
            pass
        assert len(inner._come) == 2000


@tcp
async def test_nonsense_within_ends_the_inner_connection_only(net: Net):
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        peer.say(Carry(number, b"\x00\x00\x00\x02no"))
        assert await peer.hear() == Drop(number)
        peer.say(Carry(number, b"x"))
        assert await peer.hear() == Drop(number)
        assert not call.done()


@tcp
async def test_credit_that_is_taken_back(net: Net):
    async with fake() as (client, peer, call, heard, message):
        (number, _) = msgspec.msgpack.decode(message.arguments)
        peer.say(Carry(number, hello_of(Listener)))
        peer.say(More(number, 5))
        error = await failure(call)
        assert "takes back credit" in error.text


@tcp
async def test_a_client_that_lends_a_number_twice(net: Net):
    service = Station()
    server = await net.serve(service)
    schema = schema_of(Station)
    peer = await stranger(net, server, OutHello(MAGIC, VERSION, "Station", schema.digest, 1 << 20, 9, 9))
    await peer.hear()
    number = schema.methods["keep"].number
    peer.say(Call(1, number, None, msgspec.Raw(msgspec.msgpack.encode([5]))))
    assert isinstance(await peer.hear(), Carry)
    await peer.hear()
    peer.say(Call(2, number, None, msgspec.Raw(msgspec.msgpack.encode([5]))))
    answer = await peer.hear()
    assert isinstance(answer, Failure) and answer.code == Code.INVALID_ARGUMENT
    peer.say(Call(3, number, None, msgspec.Raw(msgspec.msgpack.encode([-1]))))
    answer = await peer.hear()
    assert isinstance(answer, Failure) and answer.code == Code.INVALID_ARGUMENT and "listener" in answer.text
    peer.say(Carry(77, b"x"))  # may have crossed a Drop
    peer.say(Drop(5))
    await until_seen(lambda: not callee(server).link.inners.open)
    peer.writer.close()


def test_without_waiting():
    """A callback that hangs, by a clock."""
    clock = testing.Clock()

    async def main() -> None:
        async with await rpc.serve(Station(), "s", transport="memory"):
            async with rpc.connect(Station, "s", transport="memory", timeout=30) as client:
                heard = Heard()
                call = asyncio.ensure_future(client.call(heard, -1))
                await clock.advance(30)
                assert (await failure(call)).code is Code.DEADLINE_EXCEEDED
                assert heard.journal.entries == ["wait", "cancelled"]

    clock.run(main())
