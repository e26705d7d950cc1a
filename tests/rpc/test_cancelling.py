"""Thousands of calls that are cancelled at random, over connections that are lost at random: nothing is left, and no
answer goes to another call.
"""

import asyncio
import contextlib
import random
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from net import Journal, Net, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import lending
from rdmanet.rpc.fetching import Fetching
from rdmanet.rpc.link import LOANS_MOST
from rdmanet.rpc.pool import Pool
from tests.support.waiting import begin, loop_turns, until_seen

CALLS_PER_ROUND = 50
ROUNDS = [20, pytest.param(400, marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def lend_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many calls lend memory, and few bytes are copied."""
    monkeypatch.setattr(lending, "LEND_BYTES", 100_000)
    monkeypatch.setattr(lending, "LEND_TIMES", 0)


class Echo(rpc.Service):
    def __init__(self) -> None:
        self.alive = 0

    async def echo(self, value: int, naps: int) -> int:
        self.alive += 1
        try:
            for _ in range(naps):
                await asyncio.sleep(0)
            return value
        finally:
            self.alive -= 1
            await asyncio.sleep(0)

    async def count(self, start: int, number: int) -> AsyncIterator[int]:
        self.alive += 1
        try:
            for value in range(start, start + number):
                yield value
                await asyncio.sleep(0)
        finally:
            self.alive -= 1

    async def total(self, numbers: AsyncIterator[int]) -> int:
        self.alive += 1
        try:
            return sum([number async for number in numbers])
        finally:
            self.alive -= 1

    async def mirror(self, data: memoryview) -> memoryview:
        self.alive += 1
        try:
            await asyncio.sleep(0)
            return data
        finally:
            self.alive -= 1


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
        if number % 7 == 0:
            await asyncio.sleep(0)


async def call(client: Echo, chance: random.Random, large: bytes) -> None:
    """One call, whose answer is compared."""
    value = chance.randrange(1 << 40)
    kind = chance.randrange(5)
    if kind < 2:
        assert await client.echo(value, chance.randrange(4)) == value
    elif kind == 2:
        number = chance.randrange(20)
        found = [item async for item in client.count(value, number)]
        assert found == list(range(value, value + number))
    elif kind == 3:
        number = chance.randrange(20)
        assert await client.total(numbers(number)) == sum(range(number))
    else:
        size = chance.choice((0, 100, len(large)))
        assert await client.mirror(memoryview(large)[:size]) == large[:size]


async def storm(
    client: Echo, chance: random.Random, large: bytes, errors: tuple[type[Exception], ...] = ()
) -> int:
    """Many calls at once, of which some are cancelled after some turns; returns how many ended well."""

    async def one() -> bool:
        try:
            await call(client, chance, large)
        except errors:
            return False
        return True

    tasks = [asyncio.ensure_future(one()) for _ in range(CALLS_PER_ROUND)]
    doomed = chance.sample(tasks, CALLS_PER_ROUND // 2)
    while doomed:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        doomed.pop().cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return sum(outcome is True for outcome in outcomes)


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_calls_cancelled_at_random_leave_nothing(net: Net, rounds: int):
    chance = random.Random(26)
    service = Echo()
    client, server = await net.pair(service)
    large = random.Random(1).randbytes(300_000)
    before = len(asyncio.all_tasks())
    ended = 0
    for _ in range(rounds):
        ended += await storm(client, chance, large)
    assert ended >= rounds * CALLS_PER_ROUND // 2
    assert await client.echo(1, 0) == 1
    await until_idle(server)
    assert len(channel(client).book) == len(callee(server).book) == service.alive == 0
    assert not channel(client).link._awaited and not callee(server).link._awaited
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_connections_that_are_lost_at_random(net: Net, rounds: int):
    chance = random.Random(27)
    service = Echo()
    server = await net.serve(service)
    large = random.Random(1).randbytes(300_000)
    before = len(asyncio.all_tasks())
    for _ in range(rounds // 2):
        async with net.connecting(Echo, server) as client:
            killing = asyncio.ensure_future(
                lose(chance, chance.choice((channel(client), callee(server))).link.transport.abort)
            )
            await storm(client, chance, large, (rpc.Error,))
            await killing
            assert len(channel(client).book) == 0
        await until_idle(server)
        await asyncio.gather(*(found.link.closed for found in list(server.callees)))
    assert service.alive == 0
    assert len(asyncio.all_tasks()) == before


async def lose(chance: random.Random, abort: Callable[[], None]) -> None:
    await loop_turns(chance.randrange(60))
    abort()


async def until_idle(server: rpc.Server) -> None:
    """What was cancelled has ended."""
    await idle(server)


class Lender(rpc.Service):
    async def lend(self, data: bytes) -> rpc.Buffer:
        return rpc.Buffer(data)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_result_that_nobody_gets(net: Net, monkeypatch: pytest.MonkeyPatch):
    """Its call is cancelled when it has come, and the loan of the argument is ending."""
    results: list[weakref.ref[Any]] = []
    take = Fetching.take

    async def watched(*arguments: Any) -> Any:
        result = await take(*arguments)
        results.append(weakref.ref(result))
        asyncio.get_running_loop().call_soon(task.cancel)
        return result

    async def lent(*arguments: Any) -> Any:
        sent = await lending.lend(*arguments)
        block: contextlib.AsyncExitStack = arguments[4]
        block.push_async_callback(asyncio.Event().wait)
        return sent

    monkeypatch.setattr(Fetching, "take", watched)
    monkeypatch.setattr("rdmanet.rpc.channel.lend", lent)
    client, server = await net.pair(Lender())
    task = asyncio.ensure_future(client.lend(bytes(2 * lending.APART_BYTES)))
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(server)
    assert results[0]() is None


class Keeper(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()

    @rpc.method(idempotent=True)
    async def keep(self, data: rpc.Buffer) -> None:
        self.journal("keeps")
        await asyncio.Event().wait()


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_call_of_two_servers_ends_when_both_have_let_go(net: Net):
    """Of the memory that is lent to them, also if it is cancelled once more."""
    services = Keeper(), Keeper()
    where: Any = [net.address(await net.serve(service)) for service in services]
    retry = rpc.Retry(hedge_seconds=0.001)
    connecting = rpc.connect(Keeper, where, transport=net.transport, policy="spread", retry=retry)
    async with connecting as client, rpc.Buffer(bytes(lending.LEND_BYTES)) as data:
        caller: Pool = client._caller  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in caller._slots))
        links = [slot.channel.link for slot in caller._slots if slot.channel is not None]
        (call,) = await begin(client.keep(data))
        for service in services:
            await service.journal.until("keeps")
        assert [link.loans_left for link in links] == [LOANS_MOST - 1] * 2
        for _ in range(2):
            call.cancel()
            await loop_turns(1)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [link.loans_left for link in links] == [LOANS_MOST] * 2
