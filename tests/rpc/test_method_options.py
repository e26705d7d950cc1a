"""What @rpc.method() says: how long a call may take, and how many there may be."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Net, failure, idle

from rdmanet import rpc


class Bounded(rpc.Service):
    def __init__(self) -> None:
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.cancelled = 0

    @rpc.method(timeout=0.05)
    async def slow(self) -> float:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return (rpc.deadline() or math.inf) - asyncio.get_running_loop().time()

    @rpc.method(timeout=0.05)
    async def ticks(self) -> AsyncIterator[int]:
        yield 1
        await self.may_end.wait()

    @rpc.method(timeout=3600)
    async def left(self) -> float:
        return (rpc.deadline() or math.inf) - asyncio.get_running_loop().time()

    @rpc.method(calls=2)
    async def few(self) -> int:
        self.begun.put_nowait(None)
        await self.may_end.wait()
        return 1

    async def many(self) -> int:
        return 1


async def test_the_methods_own_time(net: Net):
    service = Bounded()
    client, server = await net.pair(service)
    error = await failure(client.slow())
    assert error.code is rpc.Code.DEADLINE_EXCEEDED and error.begun
    await idle(server)
    assert service.cancelled == 1
    items = aiter(client.ticks())
    assert await anext(items) == 1
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await anext(items)


async def test_the_callers_time_if_that_is_shorter(net: Net):
    client, _ = await net.pair(Bounded())
    assert 60 < await client.left() < 3601  # the sum is rounded
    assert await rpc.options(client, timeout=60).left() <= 60


async def test_so_many_calls_of_all_clients(net: Net):
    service = Bounded()
    client, server = await net.pair(service)
    other = await net.connect(Bounded, server)
    calls = [asyncio.ensure_future(each.few()) for each in (client, other)]
    for _ in calls:
        await service.begun.get()
    error = await failure(client.few())
    assert error.code is rpc.Code.RESOURCE_EXHAUSTED and not error.begun
    assert "Bounded.few has 2 unfinished calls: the limit calls of @rpc.method is 2" in error.text
    assert await client.many() == 1
    service.may_end.set()
    assert await asyncio.gather(*calls) == [1, 1]
    await idle(server)
    assert await client.few() == 1
    assert server.stats()["few"].begun == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": 0}, "not more than 0 seconds"),
        ({"timeout": "5"}, "no number of seconds"),
        ({"calls": 0}, "not 1 or more"),
        ({"calls": 1.5}, "no whole number"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        rpc.method(**options)
