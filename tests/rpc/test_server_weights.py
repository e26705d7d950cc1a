"""Servers with weights, and servers that are ejected, with policy="spread"."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from net import Net, failure

from rdmanet import rpc
from rdmanet.rpc import Code, Retry
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.resolving import addresses_of
from rdmanet.rpc.slot import Slot
from tests.support.waiting import begin, until_seen

HOW = Retry()
FAILURES = HOW.eject_failures or 0


class Listener(rpc.Service):
    async def on(self) -> None: ...


class Worker(rpc.Service):
    def __init__(self) -> None:
        self.code: Code | None = None
        self.calls = 0
        self.may_end = asyncio.Event()
        self.kept: list[Listener] = []

    async def work(self) -> None:
        self.calls += 1
        if self.code is not None:
            raise rpc.Error(self.code, "as it was told")

    async def wait(self) -> None:
        self.calls += 1
        await self.may_end.wait()

    async def take(self, data: str) -> None: ...

    async def longest(self, texts: AsyncIterator[str]) -> int:
        return max([len(text) async for text in texts])

    async def keep(self, listener: Listener) -> None:
        self.kept.append(listener)


def weighted(net: Net, server: rpc.Server, weight: float) -> Any:
    host, *port = net.address(server)
    return host, port[0] if port else None, weight


class OldWorker(rpc.Service, name="Worker"):
    async def take(self, data: str) -> None: ...


@contextlib.asynccontextmanager
async def spread(
    net: Net,
    weights: list[float],
    server_limits: rpc.Limits | None = None,
    service: Any = Worker,
    **options: Any,
) -> AsyncIterator[tuple[Worker, list[Worker], Pool]]:
    services = [service() for _ in weights]
    servers = [await net.serve(service, limits=server_limits or rpc.Limits()) for service in services]
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
    found = addresses_of(
        [("a", 1), ("b", 2, 3), "/path", ("/other", None, 0.5), ("/third", None), ("a", 1, 9)], "x"
    )
    known = {("a", 1): 1.0, ("b", 2): 3.0, ("/path", None): 1.0, ("/other", None): 0.5, ("/third", None): 1.0}
    assert found == [*known.items(), (("a", 1), 9.0)]
    file = tmp_path / "servers"
    file.write_text("a 1  # the first\nb 2 weight=3\n/path\n/other weight=0.5\n/third\n")
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

        while slot.row < FAILURES:
            now += 100  # so that its failures are forgotten as unfinished calls
            await work(1)
        assert bad.calls == FAILURES
        now += 0.9 * HOW.eject_seconds
        await work(100)
        assert bad.calls == FAILURES and sum(each.calls for each in good) >= 100
        now += 100
        await work(100)  # it gets one call, which fails
        assert bad.calls == FAILURES + 1 and slot.is_ejected(now)
        now += 1.9 * HOW.eject_seconds
        assert slot.is_ejected(now)  # for twice as long
        now += 100
        bad.code = None
        await work(100)
        assert bad.calls > FAILURES + 10 and slot.row == 0


async def test_an_error_of_the_call_ends_the_row(net: Net):
    async with spread(net, [1e9, 1]) as (client, (worker, _), pool):
        now = 1000.0
        pool.loop = _Clock(pool.loop, lambda: now)  # type: ignore[assignment]
        for worker.code in [*[Code.INTERNAL] * (FAILURES - 1), Code.NOT_FOUND, Code.INTERNAL]:
            now += 100  # so that its failures are forgotten as unfinished calls
            assert (await failure(client.work())).code is worker.code
        assert pool._slots[0].row == 1


async def texts(*given: str, error: BaseException | None = None) -> AsyncIterator[str]:
    for text in given:
        yield text
    if error is not None:
        raise error


async def test_what_fails_at_the_caller_is_not_held_against_a_server(net: Net):
    longest = 1 << 20
    limits = rpc.Limits(message_bytes=longest)
    async with spread(net, [1, 1], server_limits=limits) as (client, _, pool):
        failing: list[tuple[Code, Callable[[], Awaitable[object]]]] = [
            (Code.RESOURCE_EXHAUSTED, lambda: client.take("x" * 2 * longest)),
            (Code.DEADLINE_EXCEEDED, lambda: rpc.options(client, timeout=0).work()),
            (Code.RESOURCE_EXHAUSTED, lambda: client.longest(texts("x" * 2 * longest))),
            (Code.INTERNAL, lambda: client.longest(texts("x", error=rpc.Error(Code.INTERNAL)))),
            (Code.UNAVAILABLE, lambda: client.longest(texts(error=rpc.Error(Code.UNAVAILABLE)))),
            (Code.CANCELLED, lambda: client.longest(texts(error=asyncio.CancelledError()))),
        ]
        for slot in pool._slots:
            slot.row = 1  # which nothing of this ends, either
        for code, call in failing:
            for _ in range(2 * FAILURES):
                assert (await failure(call())).code is code
        assert [(slot.row, slot.blamed(pool.loop.time())) for slot in pool._slots] == [(1, 0)] * 2


async def test_limits_of_the_caller_are_not_held_against_a_server(net: Net):
    limits = rpc.Limits(calls=2, objects=1)
    async with spread(net, [1, 1], limits=limits) as (client, workers, pool):
        listener = Listener()
        await asyncio.gather(client.keep(listener), client.keep(listener))
        calls = await begin(*(client.wait() for _ in range(4)))
        for slot in pool._slots:
            slot.row = 1
        late = rpc.options(client, timeout=1e-3, wait=True)
        for _ in range(2 * FAILURES):
            assert (await failure(client.keep(listener))).code is Code.RESOURCE_EXHAUSTED
            assert (await failure(client.work())).code is Code.RESOURCE_EXHAUSTED
            assert (await failure(late.work())).code is Code.DEADLINE_EXCEEDED
        assert [(slot.row, slot.blamed(pool.loop.time())) for slot in pool._slots] == [(1, 0)] * 2
        for worker in workers:
            worker.may_end.set()
        await asyncio.gather(*calls)


async def test_a_method_that_an_older_server_lacks_is_not_held_against_it(net: Net):
    async with spread(net, [1, 1], service=OldWorker) as (client, _, pool):
        for _ in range(4 * FAILURES):
            assert (await failure(client.work())).code is Code.UNIMPLEMENTED
        assert not any(slot.row for slot in pool._slots)


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
    for _ in range(FAILURES - 1):
        slot.blame(now, HOW)
    assert not slot.is_ejected(now)
    for seconds in (HOW.eject_seconds, 2 * HOW.eject_seconds, 4 * HOW.eject_seconds):
        slot.blame(now, HOW)
        slot.blame(now, HOW)  # of a call that was there before
        assert slot.is_ejected(now + 0.99 * seconds) and not slot.is_ejected(now + seconds)
        now += seconds
    for _ in range(100):
        slot.blame(now, HOW)
        now += HOW.eject_most_seconds
        assert not slot.is_ejected(now)
    slot.row = 0
    for _ in range(FAILURES):  # it has served a call, so all of these count
        assert not slot.is_ejected(now)
        slot.blame(now, HOW)
    assert slot.is_ejected(now)


async def test_how_many_failures_and_how_long_are_options(net: Net):
    retry = Retry(eject_failures=2, eject_seconds=10.0, eject_most_seconds=30.0)
    async with spread(net, [1e9, 1, 1], retry=retry) as (client, (bad, *_), pool):
        slot, now = pool._slots[0], 1000.0
        pool.loop = _Clock(pool.loop, lambda: now)  # type: ignore[assignment]
        bad.code = Code.INTERNAL
        for seconds in (10, 20, 30, 30):
            while not slot.is_ejected(now):
                now += 100  # so that its failures are forgotten as unfinished calls
                with contextlib.suppress(rpc.Error):
                    await client.work()
            assert slot.is_ejected(now + 0.99 * seconds) and not slot.is_ejected(now + seconds)
            now += seconds
        assert bad.calls == 5
    never = Slot([("a", 1)])
    for _ in range(100):
        never.blame(0.0, Retry(eject_failures=None))
    assert not never.is_ejected(0.0)


async def test_wrong_options_of_ejection_say_what_to_do():
    for name in ("eject_seconds", "eject_most_seconds"):
        for value in (0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=rf"Retry: {name}=.* is not more than 0 seconds"):
                Retry(**{name: value})
        with pytest.raises(TypeError):
            Retry(**{name: None})
    with pytest.raises(ValueError, match="Retry: eject_failures=0 is not 1 or more"):
        Retry(eject_failures=0)
    for given in ({"eject_failures": None}, {"eject_seconds": 2.0}, {"eject_most_seconds": 2.0}):
        with pytest.raises(ValueError, match=rf'Retry\({next(iter(given))}=\) is .* add policy="spread"'):
            await rpc.connect(Worker, "127.0.0.1", 1, retry=Retry(**given), lazy=True)  # type: ignore[arg-type]


class _Clock:
    """A loop whose time is a test's."""

    def __init__(self, loop: Any, time: Any) -> None:
        self._loop, self.time = loop, time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
