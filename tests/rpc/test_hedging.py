"""Calls that are made at another server, too, because the first is slow: the first result counts."""

import asyncio
import contextlib
from typing import Any, Self

import pytest
from net import Journal, Net, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.retry import Retry
from tests.support.waiting import begin, until_seen

pytestmark = pytest.mark.parametrize("transport", ["tcp"])

HEDGED = Retry(hedge_seconds=0.001)


class Slow(rpc.Service):
    """Answers when its gate is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.error: Code | None = None
        self.journal = Journal()

    async def _answer(self, what: str) -> str:
        self.journal(what)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.journal(f"{what} was cancelled")
            raise
        if self.error is not None:
            raise rpc.Error(self.error, self.name)
        return self.name

    @rpc.method(idempotent=True)
    async def who(self) -> str:
        return await self._answer("who")

    async def once(self) -> str:
        return await self._answer("once")

    async def ping(self) -> str:
        return self.name


class Two:
    """Two servers, and a client that is connected to both."""

    def __init__(self) -> None:
        self.services = Slow("a"), Slow("b")
        self.client: Any = None

    @classmethod
    async def begun(cls, net: Net) -> Self:
        found = cls()
        addresses = [net.address(await net.serve(service)) for service in found.services]
        where: Any = [each[0] if net.is_by_name else each for each in addresses]
        connecting = rpc.connect(Slow, where, transport=net.transport, policy="spread", retry=HEDGED)
        found.client = await net._stack.enter_async_context(connecting)
        await found.client.ping()
        pool: Pool = found.client._caller
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        return found

    async def at_both(self) -> tuple[Slow, Slow]:
        """Wait until `who` runs at both: the first, and the other one."""
        one, other = self.services
        await until_seen(lambda: one.journal.entries or other.journal.entries)
        first, second = (one, other) if "who" in one.journal.entries else (other, one)
        await second.journal.until("who")
        return first, second


@pytest.mark.parametrize("fast", [0, 1])
async def test_the_first_result_counts(net: Net, fast: int):
    two = await Two.begun(net)
    (call,) = await begin(two.client.who())
    both = await two.at_both()
    both[fast].gate.set()
    assert await call == both[fast].name
    await both[1 - fast].journal.until("who was cancelled")
    assert rpc.stats(two.client)["who"].begun == 2


async def test_if_one_fails_the_other_decides(net: Net):
    two = await Two.begun(net)
    (call,) = await begin(two.client.who())
    first, second = await two.at_both()
    first.error = Code.ABORTED
    first.gate.set()
    await until_seen(lambda: rpc.stats(two.client)["who"].ended.get("ABORTED"))
    second.gate.set()
    assert await call == second.name


async def test_the_error_of_the_first(net: Net):
    two = await Two.begun(net)
    (call,) = await begin(two.client.who())
    first, second = await two.at_both()
    for service in (second, first):
        service.error = Code.ABORTED
        service.gate.set()
    error = await failure(call)
    assert (error.code, error.text) == (Code.ABORTED, first.name)


async def test_who_gives_up_cancels_both(net: Net):
    two = await Two.begun(net)
    (call,) = await begin(two.client.who())
    both = await two.at_both()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    for service in both:
        await service.journal.until("who was cancelled")


async def test_a_deadline_ends_both(net: Net):
    two = await Two.begun(net)
    error = await failure(rpc.options(two.client, timeout=0.05).who())
    assert error.code is Code.DEADLINE_EXCEEDED


async def test_methods_that_may_not_be_called_twice(net: Net):
    """A call of one begins before another call that is made at both, and is made once."""
    two = await Two.begun(net)
    (once,) = await begin(two.client.once())
    (call,) = await begin(two.client.who())
    one, other = two.services
    await one.journal.until("who")
    await other.journal.until("who")
    assert one.journal.entries.count("once") + other.journal.entries.count("once") == 1
    for service in two.services:
        service.gate.set()
    assert await once in ("a", "b") and await call in ("a", "b")


async def test_where_there_is_no_other_server(net: Net):
    service = Slow("a")
    address = net.address(await net.serve(service))
    where: Any = [address[0] if net.is_by_name else address]
    async with rpc.connect(Slow, where, transport=net.transport, policy="spread", retry=HEDGED) as client:
        (call,) = await begin(client.who())
        await service.journal.until("who")
        service.gate.set()
        assert await call == "a" and service.journal.entries == ["who"]


async def test_what_is_refused(net: Net):
    with pytest.raises(ValueError, match='hedge_seconds=. is for several servers: add policy="spread"'):
        await net.connecting(Slow, await net.serve(Slow("a")), retry=HEDGED)
    with pytest.raises(ValueError, match="Retry: hedge_seconds=0 is not more than 0 seconds"):
        Retry(hedge_seconds=0)
