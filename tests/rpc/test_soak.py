"""Calls of every kind, a half of which is cancelled at a random moment, over connections that are killed at random.

Streams and buffers go both ways, and some calls make the server call another server. Every answer is compared.
In the end nothing is left: no call, no handler whose caller is gone, no loan, no task, no object.
"""

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from net import Net, bindings, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code, lending
from rdmanet.rpc.channel import Channel
from tests.support.waiting import loop_turns

AT_ONCE = 50
LENT_BYTES = 300_000
IN_PIECES_BYTES = 6 << 20  # a READ of more than 1 MiB goes in pieces of at most 5 MiB
ROUNDS = [10, pytest.param(1000, marks=pytest.mark.long)]
"""2,000 calls over each transport, and 200,000: a half of them on each of two loops. The rounds are made twice."""
OF_A_CALL = {
    "Pending",
    "Running",
    "Receiving",
    "Sending",
    "Inflow",
    "Outflow",
    "Results",
    "Cut",
    "Loan",
    "Buffer",
}

pytestmark = pytest.mark.parametrize("transport", ["rdma", "tcp"])


@pytest.fixture(autouse=True)
def lend_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many calls lend memory, and few bytes are copied."""
    monkeypatch.setattr(lending, "LEND_BYTES", 100_000)
    monkeypatch.setattr(lending, "LEND_TIMES", 0)


class Node(rpc.Service):
    """A server, and perhaps a client of another one.

    :ivar alive: how many of its methods run
    """

    def __init__(self) -> None:
        self.alive = 0
        self.behind: Any = None

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.alive += 1
        try:
            yield
        finally:
            self.alive -= 1

    async def echo(self, value: int, naps: int) -> int:
        with self._running():
            try:
                await loop_turns(naps)
            finally:
                await asyncio.sleep(0)
            return value

    async def count(self, start: int, number: int) -> AsyncIterator[int]:
        with self._running():
            for value in range(start, start + number):
                yield value
                await asyncio.sleep(0)

    async def total(self, numbers: AsyncIterator[int]) -> int:
        with self._running():
            return sum([number async for number in numbers])

    async def scale(self, factor: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        with self._running():
            async for chunk in chunks:
                yield chunk * factor

    async def mirror(self, data: memoryview) -> memoryview:
        with self._running():
            await asyncio.sleep(0)
            return data

    async def lend(self, data: bytes, naps: int) -> rpc.Buffer:
        with self._running():
            await loop_turns(naps)
            return rpc.Buffer(data)

    async def relay(self, value: int, naps: int) -> int:
        with self._running():
            return int(await self.behind.echo(value, naps))

    async def relay_count(self, start: int, number: int) -> AsyncIterator[int]:
        with self._running():
            async with contextlib.aclosing(self.behind.count(start, number)) as numbers:
                async for value in numbers:
                    yield value

    async def relay_total(self, numbers: AsyncIterator[int]) -> int:
        with self._running():
            return int(await self.behind.total(numbers))

    async def relay_mirror(self, data: rpc.Buffer) -> memoryview:
        with self._running():
            return memoryview(await self.behind.mirror(await data.read()))


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
        if number % 7 == 0:
            await asyncio.sleep(0)


async def chunks(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number]) * 30
        await asyncio.sleep(0)


async def one_call(client: Any, chance: random.Random, large: bytes) -> None:
    """A call of a random kind, whose answer is compared."""
    value, number = chance.randrange(1 << 40), chance.randrange(20)
    size = chance.choice((0, 100, 70_000, LENT_BYTES)) if chance.randrange(20) else len(large)
    at = chance.randrange(len(large) - size + 1)
    data = large[at : at + size]
    match chance.randrange(10):
        case 0:
            assert await client.echo(value, number % 4) == value
        case 1:
            assert await client.relay(value, number % 4) == value
        case 2:
            found = [item async for item in client.count(value, number)]
            assert found == list(range(value, value + number))
        case 3:
            found = [item async for item in client.relay_count(value, number)]
            assert found == list(range(value, value + number))
        case 4:
            assert await client.total(numbers(number)) == sum(range(number))
        case 5:
            assert await client.relay_total(numbers(number)) == sum(range(number))
        case 6:
            found = [chunk async for chunk in client.scale(3, chunks(number))]
            assert found == [bytes([index]) * 90 for index in range(number)]
        case 7:
            assert await client.mirror(data) == data
        case 8:
            assert await client.relay_mirror(data) == data
        case _:
            async with await client.lend(data, number % 4) as buffer:
                assert await buffer.read() == data


class Storm:
    """Servers, clients that are replaced when they were killed, and what has happened."""

    def __init__(self, net: Net, seed: int) -> None:
        self.net = net
        self.chance = random.Random(seed)
        self.large = random.Random(1).randbytes(IN_PIECES_BYTES)
        self.nodes = Node(), Node()
        self.servers: list[rpc.Server] = []
        self.outcomes: Counter[str] = Counter()
        self._clients: dict[int, Any] = {}
        self._stacks: dict[int, contextlib.AsyncExitStack] = {}

    async def begin(self) -> None:
        for node in self.nodes:
            self.servers.append(await self.net.serve(node))

    async def client(self, number: int) -> Any:
        """A client of a server, which is connected again if it was killed."""
        if number in self._clients and channel(self._clients[number]).link.is_over:
            await self.leave(number)
        if number not in self._clients:
            stack = self._stacks[number] = contextlib.AsyncExitStack()
            connecting = self.net.connecting(Node, self.servers[number])
            self._clients[number] = await stack.enter_async_context(connecting)
        return self._clients[number]

    async def leave(self, number: int) -> None:
        del self._clients[number]
        await self._stacks.pop(number).aclose()

    async def round(self) -> None:
        """Calls of which a half is cancelled. In one round of two a connection is killed meanwhile."""
        chance = self.chance
        client = await self.client(0)
        self.nodes[0].behind = await self.client(1)
        killed = chance.choice((None, None, None, 0, 0, 1))
        tasks = [asyncio.ensure_future(one_call(client, chance, self.large)) for _ in range(AT_ONCE)]
        doomed = chance.sample(tasks, AT_ONCE // 2)
        kill_at = chance.randrange(len(doomed))
        while doomed:
            await loop_turns(chance.randrange(4))
            if len(doomed) == kill_at + 1 and killed is not None:
                self._side(killed)()
            doomed.pop().cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            self._note(outcome, killed is not None)
        if killed is not None:
            await channel(self._clients[killed]).link.closed  # the client has heard of it

    def _side(self, number: int) -> Callable[[], None]:
        """What aborts a client's connection, at the client or at the server."""
        mine = channel(self._clients[number]).link
        name = mine.transport.get_extra_info("sockname")
        theirs = [found.link for found in self.servers[number].callees if found.link.peer == name]
        return self.chance.choice([mine, *theirs]).transport.abort  # type: ignore[no-any-return]

    def _note(self, outcome: BaseException | None, killed: bool) -> None:
        if outcome is None:
            self.outcomes["answered"] += 1
        elif isinstance(outcome, asyncio.CancelledError):
            self.outcomes["cancelled"] += 1
        elif isinstance(outcome, rpc.Error) and killed and outcome.code is Code.UNAVAILABLE:
            self.outcomes["lost"] += 1
        else:
            raise outcome

    async def check(self) -> None:
        """Nothing is left of the calls, on the connections that are still there."""
        for server in reversed(self.servers):
            await idle(server)
            assert server.shares.calls == 0
        assert [node.alive for node in self.nodes] == [0, 0]
        for client in self._clients.values():
            if not channel(client).link.is_over:
                assert await client.echo(1, 0) == 1
            assert_idle(channel(client))
        for callee in [callee for server in self.servers for callee in server.callees]:
            if not callee.link.is_over:
                share = callee.share
                assert len(callee.book) == share.calls == share.inline_bytes == share.lent_bytes == 0
                assert not callee.link._awaited and not bindings(callee.link)

    async def end(self) -> None:
        for number in list(self._clients):
            await self.leave(number)
        self.nodes[0].behind = None
        for server in self.servers:
            server.close()
            await server.wait_closed()


def assert_idle(found: Channel) -> None:
    assert len(found.book) == found.fetching.reading_bytes == 0
    assert not found.link._awaited and not bindings(found.link)


def objects_of_calls() -> Counter[str]:
    gc.collect()
    names = (
        type(found).__name__ for found in gc.get_objects() if type(found).__module__.startswith("rdmanet.rpc")
    )
    return Counter(name for name in names if name in OF_A_CALL)


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_calls_cancelled_over_connections_that_are_killed(net: Net, rounds: int):
    tasks = len(asyncio.all_tasks())
    storm = Storm(net, rounds)
    await storm.begin()
    for _ in range(rounds):
        await storm.round()
        await storm.check()
    gc.collect()
    half = len(gc.get_objects())
    for _ in range(rounds):
        await storm.round()
        await storm.check()
    assert not objects_of_calls()
    assert len(gc.get_objects()) - half < 5000 + rounds  # far less than one for a call
    await storm.end()
    assert len(asyncio.all_tasks()) == tasks
    calls = sum(storm.outcomes.values())
    assert calls == 2 * rounds * AT_ONCE and min(storm.outcomes.values()) > calls // 50, storm.outcomes
