"""A call is what a coroutine is, for whoever awaits it, makes a task of it, or runs it by hand."""

import asyncio
import collections.abc
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from net import Net, channel, failure, idle

from rdmanet import rpc
from rdmanet.rpc import Code
from tests.support.waiting import begin, loop_turns, until_seen


class Item(msgspec.Struct, weakref=True):
    text: str


class Store(rpc.Service):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.calls = 0

    async def add(self, a: int, b: int) -> int:
        self.calls += 1
        return a + b

    async def pair(self) -> tuple[int, int]:
        return 1, 2

    async def wait(self) -> None:
        self.calls += 1
        await self.gate.wait()

    async def fails(self) -> None:
        raise rpc.Error(Code.ABORTED, "no")

    async def memory(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    async def take(self, item: Item, fails: bool) -> None:
        if fails:
            raise rpc.Error(Code.ABORTED, "no")


async def test_it_is_a_coroutine(net: Net):
    client, _ = await net.pair(Store())
    call = client.add(1, 2)
    assert asyncio.iscoroutine(call) and inspect.isawaitable(call)
    assert isinstance(call, collections.abc.Coroutine)
    task = asyncio.create_task(call)
    assert "add" in repr(task)
    assert await task == 3
    assert await asyncio.gather(*(client.add(i, 1) for i in range(5))) == [1, 2, 3, 4, 5]
    assert await asyncio.wait_for(client.add(2, 2), 60) == 4
    assert await client.pair() == (1, 2)
    assert len(await client.memory(3_000_000)) == 3_000_000


async def test_it_begins_when_it_is_awaited_and_only_once(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    call = client.add(1, 2)
    assert await client.add(3, 4) == 7 and service.calls == 1
    assert await call == 3
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await call
    failing = client.fails()
    assert (await failure(failing)).code is Code.ABORTED
    with pytest.raises(RuntimeError, match="already awaited"):
        await failing


async def test_one_that_nobody_awaits(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    with pytest.warns(RuntimeWarning, match=r"coroutine 'Store\.add' was never awaited"):
        client.add(1, 2)
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.add(1, 2).close()
        thrown = client.add(1, 2)
        with pytest.raises(KeyError):
            thrown.throw(KeyError("mine"))
        del thrown
        gc.collect()
    assert service.calls == 0


async def test_the_first_step_takes_no_value(net: Net):
    client, _ = await net.pair(Store())
    call = client.pair()
    with pytest.raises(TypeError, match="can't send non-None value to a just-started coroutine"):
        call.send(1)
    assert len(channel(client).book) == 0
    assert await call == (1, 2)


@pytest.mark.parametrize("method", ["wait", "pair", "fails"])
@pytest.mark.parametrize("by", ["send", "next"])
async def test_its_steps_by_hand(net: Net, method: str, by: str):
    """The first one gives the future, which a task would wait for. A coroutine that awaits it takes them by `next`."""
    service = Store()
    service.gate.set()
    client, _ = await net.pair(service)
    call = getattr(client, method)()
    step = functools.partial(call.send, None) if by == "send" else functools.partial(next, call.__await__())
    future = step()
    assert asyncio.isfuture(future) and future._asyncio_future_blocking
    await asyncio.wait([future])
    with pytest.raises(rpc.Error if method == "fails" else StopIteration) as found:
        step()
    if method == "fails":
        assert rpc.stats(client)[method].ended == {"ABORTED": 1}
    else:
        assert found.value.value == ((1, 2) if method == "pair" else None)
        assert rpc.stats(client)[method].ended == {"OK": 1}


@pytest.mark.parametrize("how", ["close", "drop", "throw"])
async def test_one_that_is_given_up_halfway(net: Net, how: str):
    service = Store()
    client, server = await net.pair(service)
    call = rpc.options(client, timeout=3600).wait()
    call.send(None)
    await until_seen(lambda: service.calls == 1)
    if how == "close":
        call.close()
    elif how == "throw":
        with pytest.raises(KeyError):
            call.throw(KeyError("mine"))
    del call
    gc.collect()
    (ended,) = rpc.stats(client)["wait"].ended.values()
    assert ended == 1
    service.gate.set()
    await until_seen(lambda: len(channel(client).book) == 0)
    assert await client.add(1, 2) == 3
    await idle(server)


async def test_cancelling_tells_the_server(net: Net):
    service = Store()
    client, server = await net.pair(service)
    (task,) = await begin(client.wait())
    await until_seen(lambda: service.calls == 1)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(server)
    assert rpc.stats(client)["wait"].ended == {"CANCELLED": 1}


@pytest.mark.parametrize("ends", ["with a result", "with an error", "cancelled", "never begun"])
async def test_a_task_that_has_ended_keeps_no_arguments(net: Net, ends: str):
    client, _ = await net.pair(Store())
    item = Item("a")
    kept = weakref.ref(item)
    call = client.take(item, ends == "with an error")
    task = asyncio.create_task(call)
    if ends == "never begun":
        task.cancel()
    elif ends == "cancelled":
        await loop_turns(1)
        task.cancel()
    await asyncio.wait([task])
    del item
    assert kept() is None
    assert task.get_coro() is call and "take" in repr(task)


async def test_two_that_await_the_same_call(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    call = client.wait()
    (first,) = await begin(awaits(call))
    await until_seen(lambda: service.calls == 1)
    with pytest.raises(RuntimeError, match="being awaited already"):
        await awaits(call)
    service.gate.set()
    await first
    assert rpc.stats(client)["wait"].ended == {"OK": 1}


async def awaits(call: Awaitable[Any]) -> Any:
    return await call


async def test_cancelling_what_it_waits_for_tells_the_server(net: Net):
    client, server = await net.pair(service := Store())
    call = client.wait()
    future = call.send(None)
    await until_seen(lambda: service.calls == 1)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        call.send(None)
    await idle(server)
    assert rpc.stats(client)["wait"].ended == {"CANCELLED": 1}


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_result_that_is_refused_at_once_is_counted_once(net: Net):
    server = await net.serve(Store())
    client = await net.connect(Store, server, limits=rpc.Limits(lent_bytes=600_000))
    assert (await failure(client.memory(2_000_000))).code is Code.RESOURCE_EXHAUSTED
    counted = rpc.stats(client)["memory"]
    assert counted.ended == {"RESOURCE_EXHAUSTED": 1} and counted.running == 0
