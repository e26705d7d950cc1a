"""Servers that end while they are called: no call is lost, and none is said to have begun that has not."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy
import pytest
from net import Net, callee, channel
from strangers import HELLO, LIMITS, Store, Stranger, call, stranger

from rdmanet import rpc
from rdmanet.rpc import Code, parting
from rdmanet.rpc.keepalive import Keepalive
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import Call, Failure, Goaway, Hello, Ping, Pong, Reply, raw
from tests.support.waiting import begin, loop_turns, until_seen

by_tcp = pytest.mark.parametrize("transport", ["tcp"])

LARGE = LEND_BYTES  # goes by reference


class Work(rpc.Service):
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.ran = 0
        self.gate = asyncio.Event()

    async def who(self) -> str:
        self.ran += 1
        return self.name

    async def take(self, data: numpy.ndarray) -> int:
        self.ran += 1
        return int(data[0])

    async def give(self, size: int) -> memoryview:
        self.ran += 1
        return memoryview(bytes(size))

    async def count(self, number: int) -> AsyncIterator[int]:
        self.ran += 1
        for each in range(number):
            yield each

    async def total(self, numbers: AsyncIterator[int]) -> int:
        self.ran += 1
        return sum([number async for number in numbers])

    async def double(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        self.ran += 1
        async for number in numbers:
            yield 2 * number

    async def wait(self) -> str:
        self.ran += 1
        await self.gate.wait()
        return self.name


async def numbers(count: int) -> AsyncIterator[int]:
    for each in range(count):
        yield each


async def listed(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


ARRAY = numpy.full(LARGE, 7, "u1")
CALLS: list[tuple[Callable[[Work], Awaitable[Any]], Any]] = [
    (lambda client: client.take(ARRAY), 7),
    (lambda client: client.give(LARGE), bytes(LARGE)),
    (lambda client: client.give(10), bytes(10)),
    (lambda client: listed(client.count(100)), list(range(100))),
    (lambda client: client.total(numbers(100)), sum(range(100))),
    (lambda client: listed(client.double(numbers(100))), [2 * each for each in range(100)]),
]


async def outcome(work: Awaitable[Any]) -> Any:
    """What it returns, or the Error that it raises."""
    try:
        return await work
    except rpc.Error as exc:
        return exc


@pytest.mark.parametrize("turns", range(4))
async def test_calls_that_cross_a_drain_are_executed(net: Net, turns: int):
    """Of each kind, without a second try. Those that still wait for a loan, or for the transport, are not."""
    service = Work("a")
    client, server = await net.pair(service)
    assert await client.who() == "a"
    calls = await begin(*(make(client) for make, _ in CALLS))
    await loop_turns(turns)
    await server.drain()
    for found, (_, result) in zip(await asyncio.gather(*map(outcome, calls)), CALLS, strict=True):
        assert found == result or (not found.begun and "this call was not sent" in found.text)
    error = await outcome(client.who())
    assert error.code is Code.UNAVAILABLE and not error.begun


@pytest.mark.parametrize("turns", range(4))
async def test_calls_that_cross_a_close_have_not_begun(net: Net, turns: int):
    """Or they have their answer. What is said to have begun has run."""
    service = Work("a")
    client, server = await net.pair(service)
    assert await client.who() == "a"
    calls = await begin(*(client.who() for _ in range(20)), *(client.total(numbers(3)) for _ in range(3)))
    await loop_turns(turns)
    server.close()
    found = await asyncio.gather(*map(outcome, calls))
    await server.wait_closed()
    not_begun = [each for each in found if isinstance(each, rpc.Error) and not each.begun]
    assert {each.code for each in not_begun} <= {Code.UNAVAILABLE}
    # One that was cancelled before its first step did not run, and counts as begun.
    cancelled = [each for each in found if isinstance(each, rpc.Error) and each.code is Code.CANCELLED]
    assert len(not_begun) + len(cancelled) + service.ran - 1 >= len(calls)
    assert len(not_begun) + service.ran - 1 <= len(calls)


async def test_a_stream_that_is_read_slowly_is_complete(net: Net):
    """The server has sent its end, and drains. The client sends credit to it, and has not read the end."""
    server = await net.serve(Work())
    client = await net.connect(Work, server, limits=rpc.Limits(stream_bytes=1000))
    stream = client.count(10)
    found = [await anext(stream)]
    await until_seen(lambda: not server.running)
    drained = asyncio.ensure_future(server.drain())
    async for item in stream:
        found.append(item)
        await loop_turns(3)
    await drained
    assert found == list(range(10))


async def test_health_is_asked_for_until_the_end(net: Net):
    service = Work()
    client, server = await net.pair(service)
    health = await net.connect(rpc.Health, server)
    (waiting,) = await begin(client.wait())
    await until_seen(lambda: service.ran)
    (drained,) = await begin(server.drain())
    assert await health.check() == "NOT_SERVING"
    asked = await begin(*(health.check() for _ in range(3)))
    service.gate.set()
    await drained
    await waiting
    for found in await asyncio.gather(*map(outcome, asked)):
        assert found == "NOT_SERVING" or not found.begun


@by_tcp
async def test_a_client_that_does_not_answer(net: Net, monkeypatch: pytest.MonkeyPatch):
    """It is told how many of its calls were taken, later ones are refused, and the server ends without it."""
    monkeypatch.setattr(parting, "HEAR_S", 0.05)
    service = Store()
    server = await net.serve(service, limits=LIMITS)
    peer = await stranger(net, server, HELLO, call(1, "wait"), call(2, "add", 1, 2))
    assert isinstance(await peer.hear(), Hello) and isinstance(await peer.hear(), Reply)
    drained = asyncio.ensure_future(server.drain())
    assert await peer.hear() == Goaway("it is shutting down") and await peer.hear() == Ping(1)
    peer.say(Pong(7), call(3, "add", 1, 2))  # of another Ping
    assert isinstance(await peer.hear(), Reply)
    assert await peer.hear() == Goaway("it is shutting down", 3)
    peer.say(call(4, "add", 1, 2))
    refused = await peer.hear()
    assert isinstance(refused, Failure) and refused.code == Code.UNAVAILABLE and not refused.begun
    service.gate.set()
    assert isinstance(await peer.hear(), Reply)
    assert await peer.hear() == Ping(2)
    assert await peer.hear() is None
    await drained


@by_tcp
async def test_a_drain_that_takes_too_long(net: Net):
    """Its time also ends the wait for clients, and what runs is cancelled."""
    service = Store()
    server = await net.serve(service, limits=LIMITS)
    peer = await stranger(net, server, HELLO, call(1, "wait"))
    await until_seen(lambda: service.alive)
    assert isinstance(await peer.hear(), Hello)
    drained = asyncio.ensure_future(server.drain(timeout=0.01))
    assert await peer.hear() == Goaway("it is shutting down") and await peer.hear() == Ping(1)
    assert await peer.hear() == Goaway("it is closed", 1)
    cancelled = await peer.hear()
    assert isinstance(cancelled, Failure) and cancelled.code == Code.CANCELLED
    assert await peer.hear() == Ping(2)
    peer.say(Pong(2))
    assert await peer.hear() is None
    await drained


@by_tcp
@pytest.mark.parametrize("taken", [None, 0, 1, 3])
@pytest.mark.parametrize("retry", [None, rpc.Retry(first_seconds=0.001)])
async def test_a_client_knows_what_was_taken(net: Net, taken: int | None, retry: rpc.Retry | None):
    """Its server goes without a further word. One of an older version does not say the number."""
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Stranger(reader, writer)
        with contextlib.closing(writer):
            assert isinstance(await peer.hear(), Hello)
            peer.say(HELLO)
            if seen:
                while isinstance(found := await peer.hear(), Call):
                    peer.say(Reply(found.number, raw(4)))
                return
            while len(seen) < 3:
                found = await peer.hear()
                assert isinstance(found, Call)
                seen.append(found.number)
            old = b"\x92\x09\xa1x"  # [9, "x"]
            peer.say(len(old).to_bytes(4, "big") + old if taken is None else Goaway("x", taken))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await net._stack.enter_async_context(server)
    connecting = rpc.connect(Store, *server.sockets[0].getsockname()[:2], transport="tcp", retry=retry)
    client = await net._stack.enter_async_context(connecting)
    found = await asyncio.gather(*(outcome(client.add(1, 2)) for _ in range(3)))
    for place, each in enumerate(found, 1):
        if taken is None or place <= taken:
            assert each.code is Code.UNAVAILABLE and each.begun and "may have had its effect" in each.text
        elif retry is not None:
            assert each == 4
        else:
            assert each.code is Code.UNAVAILABLE and not each.begun
            assert each.text == "the server takes no new calls (x); this call did not begin"


async def test_a_call_while_the_connection_ends(net: Net):
    """It is not sent, and the client knows."""
    client, server = await net.pair(Work())
    channel(client).link.close()
    error = await outcome(client.who())
    assert error.code is Code.UNAVAILABLE and not error.begun
    again = await net.connect(Work, server, retry=rpc.Retry(first_seconds=0.001))
    assert await again.who() == ""
    again._caller._slots[0].channel.link.abort()  # type: ignore[attr-defined]
    assert await again.who() == ""


@pytest.mark.parametrize("restarts", [6, pytest.param(60, marks=pytest.mark.long)])
async def test_rolling_restarts_lose_no_call(net: Net, restarts: int):
    """Two servers end in turn, and begin again at their addresses. Clients make calls of each kind all the time."""
    services = [Work("0"), Work("1")]
    first = [await net.serve(service) for service in services]
    addresses = [net.address(server) for server in first]
    servers: list[rpc.Server] = list(first)
    is_over = False
    made = 0
    wrong: list[Any] = []
    retry = rpc.Retry(first_seconds=0.001, most_seconds=0.01, attempts=None)
    where: Any = [each[0] if net.is_by_name else each for each in addresses]

    async def work(policy: Any, seed: int) -> None:
        nonlocal made
        async with rpc.connect(Work, where, transport=net.transport, retry=retry, policy=policy) as client:
            while not is_over:
                make, result = CALLS[(made + seed) % len(CALLS)]
                if (found := await outcome(make(client))) != result:
                    wrong.append(found)
                made += 1

    tasks = [asyncio.create_task(work(policy, seed)) for policy in ("first", "spread") for seed in range(6)]
    for turn in range(restarts):
        which = turn % 2
        before = made
        await until_seen(lambda before=before: made > before + 20 or any(task.done() for task in tasks))
        await servers[which].drain()
        servers[which] = await rpc.serve(services[which], *addresses[which], transport=net.transport)
    is_over = True
    await asyncio.gather(*tasks)
    for server in servers:
        server.close()
        await server.wait_closed()
    assert wrong == [] and made > 20 * restarts
    gc.collect()


@pytest.mark.parametrize("drains", [10, pytest.param(1000, marks=pytest.mark.long)])
async def test_no_drain_loses_a_call(net: Net, drains: int):
    """Each at another moment of a burst of calls by two clients: all have their results, and ran once."""
    for turn in range(drains):
        service = Work("a")
        server = await net.serve(service)
        async with net.connecting(Work, server) as one, net.connecting(Work, server) as other:
            calls = await begin(*(client.who() for _ in range(10) for client in (one, other)))
            await loop_turns(turn % 7)
            await server.drain()
            assert await asyncio.gather(*map(outcome, calls)) == ["a"] * 20
            assert service.ran == 20


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_ping_behind_that_of_a_drain(net: Net, monkeypatch: pytest.MonkeyPatch):
    """A client that could not write answers the last Ping alone, which tells that it has heard the former one."""
    client, server = await net.pair(Store())
    found = callee(server)
    pings: list[Ping] = []
    monkeypatch.setattr(found.link, "send", lambda message: pings.append(message))
    found._parting.drain("it ends")
    keepalive = Keepalive(found.link, 0.5)
    found.link.heard_at -= 1
    keepalive.look()
    keepalive.stop()
    monkeypatch.undo()
    asked = [message for message in pings if isinstance(message, Ping)]
    assert len(asked) == 2 and found._parting.refusal is None
    found._parting.answered(Pong(asked[-1].token))
    assert found._parting.refusal == "it ends"
