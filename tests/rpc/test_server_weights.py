"""Servers with weights, and servers that are ejected, with policy="spread"."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from net import Net, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.resolving import addresses_of
from rdmanet.rpc.slot import EJECTED_MOST_S, EJECTED_S, EJECTING_FAILURES, Slot
from tests.support.waiting import begin, until_seen


class Worker(rpc.Service):
    def __init__(self) -> None:
        self.code: Code | None = None
        self.calls = 0
        self.may_end = asyncio.Event()

    async def work(self) -> None:
        self.calls += 1
        if self.code is not None:
            raise rpc.Error(self.code, "as it was told")

    async def wait(self) -> None:
        self.calls += 1
        await self.may_end.wait()


def weighted(net: Net, server: rpc.Server, weight: float) -> Any:
    host, *port = net.address(server)
    return host, port[0] if port else None, weight


@contextlib.asynccontextmanager
async def spread(
    net: Net, weights: list[float], **options: Any
) -> AsyncIterator[tuple[Worker, list[Worker], Pool]]:
    services = [Worker() for _ in weights]
    servers = [await net.serve(service) for service in services]
    given = [weighted(net, *pair) for pair in zip(servers, weights, strict=True)]
    async with rpc.connect(Worker, given, transport=net.transport, policy="spread", **options) as client:
        pool: Pool = client._caller  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        yield client, services, pool


async def test_calls_one_after_the_other_go_by_weight(net: Net):
    async with spread(net, [1, 4]) as (client, (light, heavy), _):
        for _ in range(300):
            await client.work()
    assert 30 < light.calls < 100 and heavy.calls == 300 - light.calls  # 60 of 300, and 7 is the deviation


async def test_unfinished_calls_go_by_weight(net: Net):
    async with spread(net, [1, 3, 0.5]) as (client, services, _):
        calls = await begin(*(client.wait() for _ in range(90)))
        await until_seen(lambda: sum(service.calls for service in services) == 90)
        assert [service.calls for service in services] == [20, 60, 10]
        for service in services:
            service.may_end.set()
        await asyncio.gather(*calls)


async def test_a_resolver_changes_weights(net: Net):
    services = [Worker(), Worker()]
    servers = [await net.serve(service) for service in services]
    weights = [1.0, 1.0]

    def found() -> list[Any]:
        return [weighted(net, *pair) for pair in zip(servers, weights, strict=True)]

    resolver = rpc.Resolver(found, every=1e-9)
    async with rpc.connect(Worker, resolver, transport=net.transport, policy="spread") as client:
        pool: Pool = client._caller  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        channels = [slot.channel for slot in pool._slots]
        weights[1] = 1e6
        while pool._slots[1].weight != 1e6:
            await client.work()  # asks, when the loop's clock has moved, which may count milliseconds
        for service in services:
            service.calls = 0
        for _ in range(100):
            await client.work()
        assert services[0].calls < 5
        assert [slot.channel for slot in pool._slots] == channels  # the connections stay


def test_lists_with_weights(tmp_path: Path):
    found = addresses_of([("a", 1), ("b", 2, 3), "/path", ("/other", None, 0.5), ("a", 1, 9)], "x")
    known = {("a", 1): 1.0, ("b", 2): 3.0, ("/path", None): 1.0, ("/other", None): 0.5}
    assert found == [*known.items(), (("a", 1), 9.0)]
    file = tmp_path / "servers"
    file.write_text("a 1  # the first\nb 2 weight=3\n/path\n/other weight=0.5\n")
    assert asyncio.run(rpc.Resolver.file(file).addresses()) == list(known.items())


async def test_wrong_weights_say_what_to_do(net: Net, tmp_path: Path):
    for weight in (0, -1, float("nan"), float("inf"), 1e308, 10**400, 5e-324, "2", True, None):
        with pytest.raises(
            ValueError, match=r"the weight of 'a' is .*, not a number from 1e-9 to 1e9: leave out"
        ):
            await rpc.connect(Worker, [("a", 1, weight)], policy="spread")
    with pytest.raises(ValueError, match=r"with weights it is \[\(host, port, weight\), ...\]"):
        await rpc.connect(Worker, [("a", 1, 2, 3)], policy="spread")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r'weights are for calls that are spread: add policy="spread"'):
        await rpc.connect(Worker, [("a", 1, 2), ("b", 1, 1)])
    with pytest.raises(ValueError, match=r'add policy="spread"'):
        await rpc.connect(Worker, rpc.Resolver(lambda: [("a", 1, 2)]))
    file = tmp_path / "servers"
    file.write_text("a 1\nb 2 weight=much\n")
    with pytest.raises(ValueError, match=r"servers:2: 'b 2 weight=much' is neither"):
        await rpc.connect(Worker, rpc.Resolver.file(file), policy="spread")


async def test_a_server_that_fails_in_a_row_is_ejected(net: Net):
    async with spread(net, [1, 1, 1]) as (client, (bad, *good), pool):
        slot, now = pool._slots[0], 1000.0
        pool.loop = _Clock(pool.loop, lambda: now)  # type: ignore[assignment]
        bad.code = Code.INTERNAL

        async def work(count: int) -> None:
            for _ in range(count):
                with contextlib.suppress(rpc.Error):
                    await client.work()

        while slot.row < EJECTING_FAILURES:
            now += 100  # so that its failures are forgotten as unfinished calls
            await work(1)
        assert bad.calls == EJECTING_FAILURES
        now += 0.9 * EJECTED_S
        await work(100)
        assert bad.calls == EJECTING_FAILURES and sum(each.calls for each in good) >= 100
        now += 100
        await work(100)  # it gets one call, which fails
        assert bad.calls == EJECTING_FAILURES + 1 and slot.is_ejected(now)
        now += 1.9 * EJECTED_S
        assert slot.is_ejected(now)  # for twice as long
        now += 100
        bad.code = None
        await work(100)
        assert bad.calls > EJECTING_FAILURES + 10 and slot.row == 0


async def test_an_error_of_the_call_ends_the_row(net: Net):
    async with spread(net, [1e9, 1]) as (client, (worker, _), pool):
        now = 1000.0
        pool.loop = _Clock(pool.loop, lambda: now)  # type: ignore[assignment]
        for worker.code in [*[Code.INTERNAL] * (EJECTING_FAILURES - 1), Code.NOT_FOUND, Code.INTERNAL]:
            now += 100  # so that its failures are forgotten as unfinished calls
            assert (await failure(client.work())).code is worker.code
        assert pool._slots[0].row == 1


async def test_if_most_fail_it_is_not_the_servers(net: Net):
    async with spread(net, [1, 1, 1]) as (client, services, pool):
        pool.loop = _Clock(pool.loop, lambda: 1000.0)  # type: ignore[assignment]
        for service in services:
            service.code = Code.INTERNAL
        for _ in range(60):
            assert (await failure(client.work())).code is Code.INTERNAL
        assert all(slot.is_ejected(1000.0) for slot in pool._slots)
        for service in services:
            service.code = None
        await client.work()


def test_how_long_a_server_is_ejected():
    slot, now = Slot([("a", 1)]), 0.0
    for _ in range(EJECTING_FAILURES - 1):
        slot.blame(now)
    assert not slot.is_ejected(now)
    for seconds in (EJECTED_S, 2 * EJECTED_S, 4 * EJECTED_S):
        slot.blame(now)
        slot.blame(now)  # of a call that was there before
        assert slot.is_ejected(now + 0.99 * seconds) and not slot.is_ejected(now + seconds)
        now += seconds
    for _ in range(100):
        slot.blame(now)
        now += EJECTED_MOST_S
        assert not slot.is_ejected(now)
    slot.row = 0
    slot.blame(now)
    assert not slot.is_ejected(now)


class _Clock:
    """A loop whose time is a test's."""

    def __init__(self, loop: Any, time: Any) -> None:
        self._loop, self.time = loop, time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
