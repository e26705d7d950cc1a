"""Clients that connect again, and clients of several servers: which calls are made again, and that nothing spins."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import HOST, Journal, Net, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.retry import Retry
from tests.support.waiting import begin, loop_turns, until_seen

QUICK = Retry(first_seconds=0.001, most_seconds=0.002)
ENDLESS = Retry(first_seconds=0.001, most_seconds=0.002, attempts=None)
SLOW = Retry(first_seconds=3600, most_seconds=3600)


class Work(rpc.Service):
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.journal = Journal()
        self.gate = asyncio.Event()

    async def who(self) -> str:
        return self.name

    async def once(self) -> str:
        self.journal("once")
        await self.gate.wait()
        return self.name

    @rpc.method(idempotent=True)
    async def twice(self) -> str:
        self.journal("twice")
        await self.gate.wait()
        return self.name

    @rpc.method(idempotent=True)
    async def count(self, until: int) -> AsyncIterator[int]:
        self.journal("count")
        await self.gate.wait()
        for number in range(until):
            yield number
        self.journal("counted")
        await asyncio.Event().wait()

    @rpc.method(idempotent=True)
    async def total(self, numbers: AsyncIterator[int]) -> int:
        self.journal("total")
        return sum([number async for number in numbers])

    async def busy(self) -> None:
        raise rpc.Error(Code.UNAVAILABLE, "the disk is away")


def pool(client: rpc.Service) -> Pool:
    return client._caller  # type: ignore[attr-defined, no-any-return]


async def cut(server: rpc.Server) -> None:
    """All connections of a server are lost, and both sides know it."""
    callees: list[Callee] = list(server.callees)
    for callee in callees:
        callee.link.transport.abort()
    for callee in callees:
        await callee.link.closed


async def lost(client: rpc.Service) -> None:
    for slot in pool(client)._slots:
        if slot.channel is not None:
            await slot.channel.link.closed


async def numbers() -> AsyncIterator[int]:
    yield 1
    yield 2


async def test_a_call_after_a_loss_connects_again(net: Net):
    server = await net.serve(Work("a"))
    client = await net.connect(Work, server, retry=QUICK)
    assert await client.who() == "a"
    for _ in range(3):
        await cut(server)
        await lost(client)
        assert not pool(client)._slots[0].task  # nobody wants it yet
        assert await client.who() == "a"
        await cut(server)
        await lost(client)
        assert await client.total(numbers()) == 3
    assert await asyncio.gather(*(client.who() for _ in range(20))) == ["a"] * 20
    assert len(server.callees) == 1


async def test_without_retry_a_loss_is_the_end(net: Net):
    server = await net.serve(Work())
    client = await net.connect(Work, server)
    await client.who()
    await cut(server)
    error = await failure(client.who())
    assert error.code is Code.UNAVAILABLE


async def test_only_idempotent_methods_are_called_again(net: Net):
    service = Work("a")
    server = await net.serve(service)
    client = await net.connect(Work, server, retry=QUICK)
    calls = await begin(client.once(), client.twice())
    await service.journal.until("once")
    await service.journal.until("twice")
    await cut(server)
    error = await failure(calls[0])
    assert error.code is Code.UNAVAILABLE and error.begun
    assert "this call was sent, and may have had its effect" in error.text
    await service.journal.until("twice", 2)
    service.gate.set()
    assert await calls[1] == "a"
    assert service.journal.entries.count("once") == 1


async def test_a_stream_is_begun_again_until_it_has_given_something(net: Net):
    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, retry=QUICK)
    stream = client.count(2)
    first = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
    await service.journal.until("count")
    await cut(server)
    await service.journal.until("count", 2)
    service.gate.set()
    assert await first == 0 and await anext(stream) == 1
    await service.journal.until("counted")
    await cut(server)
    error = await failure(anext(stream))
    assert error.code is Code.UNAVAILABLE and service.journal.entries.count("count") == 2


async def test_a_stream_that_was_taken_from_is_not_sent_again(net: Net):
    """Even of an idempotent method: the items are gone."""
    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, retry=QUICK)

    async def endless() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    (call,) = await begin(client.total(endless()))
    await service.journal.until("total")
    await cut(server)
    error = await failure(call)
    assert error.code is Code.UNAVAILABLE and service.journal.entries.count("total") == 1


async def test_what_a_method_raises_is_its_answer(net: Net):
    client = await net.connect(Work, await net.serve(Work()), retry=ENDLESS)
    error = await failure(client.busy())
    assert error.code is Code.UNAVAILABLE and error.text == "the disk is away" and error.begun


async def test_a_server_that_drains_is_left_and_loses_no_call(net: Net):
    """Calls that cross Goaway are executed, and later ones go to the next server."""
    service, other = Work("old"), Work("new")
    old, new = await net.serve(service), await net.serve(other)
    async with rpc.connect(
        Work, [where(net, old), where(net, new)], transport=net.transport, retry=QUICK
    ) as client:
        (running,) = await begin(client.once())
        await service.journal.until("once")
        (draining,) = await begin(old.drain())
        assert set(await asyncio.gather(*(client.who() for _ in range(10)))) <= {"old", "new"}
        assert await asyncio.gather(*(client.who() for _ in range(10))) == ["new"] * 10
        service.gate.set()
        assert await running == "old"
        await draining


def where(net: Net, server: rpc.Server) -> Any:
    address = net.address(server)
    return address[0] if net.is_by_name else address


async def gone(net: Net) -> Any:
    """An address where nobody listens."""
    async with await rpc.serve(
        Work(), *((str(net._folder / "gone"),) if net.is_by_name else (HOST, 0)),
        transport=net.transport,
    ) as server:  # fmt: skip
        return where(net, server)


async def test_the_first_that_answers(net: Net):
    server = await net.serve(Work("a"))
    nobody = await gone(net)
    async with rpc.connect(Work, [nobody, where(net, server)], transport=net.transport) as client:
        assert await client.who() == "a"
        assert named(rpc.peer(client)) == named(where(net, server))
    with pytest.raises(OSError, match="none of 2 servers answers"):
        await rpc.connect(Work, [nobody, nobody], transport=net.transport).__aenter__()
    with pytest.raises(OSError):
        await rpc.connect(Work, [nobody], transport=net.transport).__aenter__()


def named(address: Any) -> Any:
    return address if isinstance(address, str) else tuple(address[:2])


async def test_spread_takes_the_one_with_the_fewest_calls(net: Net):
    services = [Work(name) for name in "abc"]
    servers = [await net.serve(service) for service in services]
    addresses = [where(net, server) for server in servers]
    async with rpc.connect(Work, addresses, transport=net.transport, policy="spread", retry=QUICK) as client:
        await until_seen(lambda: all(slot.usable for slot in pool(client)._slots))
        calls = await begin(*(client.twice() for _ in range(6)))
        for service in services:
            await service.journal.until("twice", 2)
        await cut(servers[0])  # its calls go to the others, or to its next connection
        for service in services:
            service.gate.set()
        assert len(await asyncio.gather(*calls)) == 6
        servers[1].close()
        await servers[1].wait_closed()
        await until_seen(lambda: not pool(client)._slots[1].usable)
        found = await asyncio.gather(*(client.who() for _ in range(10)))
        assert set(found) <= {"a", "c"} and named(rpc.peer(client)) in map(named, addresses)


async def test_spread_without_retry(net: Net):
    servers = [await net.serve(Work(name)) for name in "ab"]
    async with rpc.connect(
        Work, [where(net, server) for server in servers], transport=net.transport, policy="spread"
    ) as client:
        await until_seen(lambda: all(slot.usable for slot in pool(client)._slots))
        await cut(servers[0])
        await until_seen(lambda: not pool(client)._slots[0].usable)
        assert await client.who() == "b"
        await cut(servers[1])
        await lost(client)
        error = await failure(client.who())
        assert error.code is Code.UNAVAILABLE and not error.begun and "not sent" in error.text


async def test_giving_up(net: Net):
    server = await net.serve(Work())
    async with net.connecting(Work, server, retry=Retry(first_seconds=0.001, attempts=3)) as client:
        await client.who()
        server.close()
        await server.wait_closed()
        await lost(client)
        error = await failure(client.who())
        assert error.code is Code.UNAVAILABLE and not error.begun
        assert "there is no connection to" in error.text and "not sent" in error.text
        assert pool(client)._slots[0].failures == 3
    address = await gone(net)
    address = (address,) if net.is_by_name else address
    retry = Retry(first_seconds=0.001, attempts=2)
    with pytest.raises(OSError):
        await rpc.connect(Work, *address, transport=net.transport, retry=retry).__aenter__()


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_deadline_ends_the_wait(net: Net):
    server = await net.serve(Work())
    async with net.connecting(Work, server, retry=ENDLESS) as client:
        server.close()
        await server.wait_closed()
        await lost(client)
        error = await failure(rpc.options(client, timeout=0.02).who())
        assert error.code is Code.DEADLINE_EXCEEDED and not error.begun and "was not sent" in error.text
        await loop_turns(3)
        assert not pool(client)._slots[0].task


@pytest.mark.parametrize("transport", ["tcp"])
async def test_cancelling_ends_the_wait_and_the_timer(net: Net):
    server = await net.serve(Work())
    async with net.connecting(Work, server, retry=SLOW) as client:
        server.close()
        await server.wait_closed()
        await lost(client)
        slot = pool(client)._slots[0]
        calls = await begin(client.who(), client.who(), anext(client.count(1)))  # type: ignore[arg-type]
        await until_seen(lambda: slot.is_sleeping)
        for call in calls[:2]:
            call.cancel()
        await loop_turns(3)
        assert all(call.cancelled() for call in calls[:2]) and slot.is_sleeping  # for the third one
        calls[2].cancel()
        await loop_turns(3)
        assert calls[2].cancelled() and slot.task is None
        (call,) = await begin(client.who())
        await until_seen(lambda: slot.is_sleeping)
    error = await failure(call)
    assert error.code is Code.CANCELLED and not error.begun


@pytest.mark.parametrize("transport", ["tcp"])
async def test_connecting_waits_for_a_server_that_comes_later(net: Net):
    address = await gone(net)
    async with contextlib.AsyncExitStack() as stack:
        client = rpc.connect(Work, *address, transport="tcp", retry=ENDLESS)
        (connecting,) = await begin(stack.enter_async_context(client))
        await loop_turns(10)
        await stack.enter_async_context(await rpc.serve(Work("late"), *address, transport="tcp"))
        found: Work = await connecting
        assert await found.who() == "late"


@pytest.mark.parametrize("transport", ["tcp"])
async def test_a_server_that_hangs_up_is_not_called_without_a_pause(net: Net):
    """It says Hello, and ends each connection then: that counts as a failure each time."""
    server = await net.serve(Work())
    async with net.connecting(Work, server, retry=Retry(first_seconds=0.001, attempts=4)) as client:

        class HangsUp(Callee):
            def _on_hello(self, hello: Any) -> None:
                super()._on_hello(hello)
                self.link.close()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rdmanet.rpc.server.Callee", HangsUp)
            await cut(server)
            await lost(client)
            error = await failure(client.who())
        assert error.code is Code.UNAVAILABLE
        assert pool(client)._slots[0].failures >= 4
        assert await client.who() == "" and pool(client)._slots[0].failures == 0


@pytest.mark.parametrize("transport", ["tcp"])
async def test_another_version_of_the_service_is_not_waited_for(net: Net):
    class Other(rpc.Service, name="Work"):
        async def different(self) -> int:
            return 1

    server = await net.serve(Other())
    error = await failure(net.connecting(Work, server, retry=ENDLESS).__aenter__())
    assert error.code is Code.FAILED_PRECONDITION


def test_the_delays():
    retry = Retry(first_seconds=0.1, factor=2, most_seconds=1, jitter=0)
    assert [retry.delay(failures) for failures in (0, 1, 2, 3, 4, 5, 100_000)] == [
        0,
        0.1,
        0.2,
        0.4,
        0.8,
        1,
        1,
    ]
    found = {Retry(first_seconds=8, most_seconds=8, jitter=0.5).delay(1) for _ in range(100)}
    assert len(found) > 50 and all(4 <= each <= 8 for each in found)
    for wrong in (
        {"first_seconds": 0},
        {"factor": 0.5},
        {"jitter": 2},
        {"attempts": 0},
        {"connect_seconds": -1},
    ):
        with pytest.raises(ValueError, match=f"Retry: {next(iter(wrong))}="):
            Retry(**wrong)  # type: ignore[arg-type]


async def test_what_is_asked_for_wrongly():
    for arguments, options, says in (
        (("h", 1), {"policy": "random"}, "policy='random'"),
        (([("h", 1)], 2), {}, "has their ports in it"),
        (([],), {}, "the list of servers is empty"),
        (("h",), {"retry": QUICK}, "wants a host and a port"),
    ):
        with pytest.raises(ValueError, match=says):
            await rpc.connect(Work, *arguments, **options).__aenter__()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a client"):
        rpc.peer(Work())


@pytest.mark.parametrize("policy", ["first", "spread"])
async def test_the_first_call_connects(net: Net, policy: Any):
    """Of a client that is lazy; each of several servers may come later."""
    server = await net.serve(Work("a"))
    client = await net.connect(Work, server, lazy=True, policy=policy)
    assert rpc.peer(client) is None and not server.callees
    assert await client.who() == "a" and len(server.callees) == 1
    where = net.address(server)
    server.close()
    await server.wait_closed()
    later = rpc.connect(Work, *where, transport=net.transport, lazy=True, retry=ENDLESS, policy=policy)
    async with (
        later as waits,
        rpc.connect(Work, *where, transport=net.transport, lazy=True, retry=Retry(attempts=1)) as gives_up,
    ):
        assert (await failure(gives_up.who())).code is Code.UNAVAILABLE
        (call,) = await begin(waits.who())
        async with await rpc.serve(Work("b"), *where, transport=net.transport):
            assert await call == "b"
            assert await gives_up.who() == "b"
    async with rpc.connect(Work, *where, transport=net.transport, lazy=True) as unused:
        assert rpc.stats(unused)["who"].begun == 0
